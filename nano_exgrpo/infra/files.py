"""Files that are written whole or not at all, and JSON that says where it cannot be read.

Runs, evaluations and data sets all go through these functions. What they read may come from anybody.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nano_exgrpo.errors import InputError


class Unwritable(InputError, OSError):
    """A file or folder of ours cannot be written: a full or read-only disk, a folder that is gone. One sentence, as of
    every InputError; an OSError as well, for those who know what to do about it."""

    def __init__(self, path: Path, error: OSError | ValueError) -> None:
        self.errno, self.filename = getattr(error, "errno", None), str(path)
        self.strerror = getattr(error, "strerror", None) or str(error)

    def __reduce__(self) -> Any:  # a worker process sends it to its parent
        return Unwritable, (self.filename, OSError(self.errno, self.strerror))

    def __str__(self) -> str:
        return f"{self.filename[:300]} cannot be written ({self.strerror})"


@contextmanager
def written(path: Path) -> Iterator[None]:
    """What is done inside writes `path`: an OSError is explained as that."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a name with a zero in it
        raise Unwritable(path, error) from None


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, and onto the disk: a power cut leaves the old file or the new one.

    Makes its folder. Raises Unwritable where the disk is full or read-only; the old file then stays."""
    write_whole(path, text.encode("utf-8"))


def write_whole(path: Path, content: bytes) -> None:
    """`write_text` for bytes."""
    temporary = path.with_name(f".{path.name[:200]}.{os.getpid()}.tmp")  # a name has at most 255 bytes
    with written(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            with suppress(OSError, ValueError):
                temporary.unlink(missing_ok=True)
        flush(path.parent)


def flush(path: Path) -> None:
    """Put a file, or a folder's list of names, onto the disk, so that it survives a power cut."""
    with suppress(OSError):  # Windows opens no folders, and some file systems cannot
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def append_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Add rows to a JSONL file, all or none. Raises Unwritable where the disk is full."""
    text = "".join(to_json(row) + "\n" for row in rows)
    with written(path), path.open("a", encoding="utf-8") as file:
        end = file.tell()
        try:
            file.write(text)
            file.flush()
        except OSError:
            with suppress(OSError):
                os.truncate(path, end)  # or the next row would be glued to half a line
            raise


def to_json(value: Any) -> str:
    """JSON on one line. NaN and infinity, which JSON has not got, become null."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(finite(value), allow_nan=False)


def finite(value: Any) -> Any:
    """The same value with None for every float that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in a file. what: begins InputError's sentence, as "run x" does."""
    try:
        found = json.loads(read_file(path))
    except InputError as error:
        raise InputError(f"{what}: {error}") from None
    except (ValueError, RecursionError):  # also an integer of too many digits, and lists in lists in lists
        raise InputError(f"{what}: {path} is not valid JSON") from None
    if not isinstance(found, dict):
        raise InputError(f"{what}: {path} is not a JSON object")
    return found


def read_jsonl(path: Path, *, torn_end: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) of every line that is not blank; place reads "FILE line N".

    torn_end: leave out a last line that is no JSON, as a power cut in the middle of `append_lines` leaves one.
    Raises InputError where the file cannot be read as text or a line is no JSON object, after the rows before it."""
    lines = read_file(path).split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if torn_end and number == len(lines):
                return
            raise InputError(f"{where} is not valid JSON; the file must hold one JSON object a line") from None
        if not isinstance(row, dict):
            raise InputError(f"{where} is not a JSON object; the file must hold one JSON object a line")
        yield where, row


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that `append_lines` wrote, a torn last one left out. Raises InputError."""
    return [row for _, row in read_jsonl(path, torn_end=True)]


def read_file(path: Path) -> str:
    """The text of a regular file; a pipe, which may never end, is refused. Raises InputError."""
    if not os.path.isfile(path):  # unlike Path.is_file, it takes a name of any length
        raise InputError(f"{path} {'is not a file' if os.path.exists(path) else 'does not exist'}")
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} cannot be read as UTF-8 text ({error.reason})") from None
