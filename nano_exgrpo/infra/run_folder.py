"""What a run leaves behind: metrics, samples and curves.

runs/<name>/config.json     every setting as it was resolved
runs/<name>/metrics.jsonl   one line a step; names as in TRL where it has the same quantity
runs/<name>/samples.jsonl   whole responses with reward, entropy of each token, fresh or replayed
runs/<name>/curves.png      the metrics as a picture
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nano_exgrpo.errors import InputError, is_out_of_memory
from nano_exgrpo.infra import distributed
from nano_exgrpo.infra.files import read_json, read_jsonl, to_json, write_text

OWN = (
    "checkpoints",
    "model",
    "eval",
    "metrics.jsonl",
    "samples.jsonl",
    "curves.png",
    "report.html",
)  # beside config.json


def claim_run(folder: Path, *, overwrite: bool) -> None:
    """Make sure, before anything costly is done, that a run can be written into this folder; changes nothing in it.

    Only a run is ever replaced, and only with `overwrite`. Raises InputError for a folder that holds a run or anything
    else, or that cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if is_run(folder) and not overwrite:
            raise InputError(
                f"run folder {folder} already holds a run; go on with --resume {folder}, replace it with --overwrite, "
                f"or name another with --run"
            )
        if not is_run(folder) and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise InputError(f"folder {folder} holds something that is no run; name another with --run")
        write_text(folder / ".writable", "")
        (folder / ".writable").unlink()
    except OSError as error:
        raise InputError(
            f"run folder {str(folder)[:200]} cannot be written ({error.strerror}); name another with --run"
        ) from None


def is_run(folder: Path) -> bool:
    """Whether a config.json of train.py proves that this folder is a run's. (A model and other tools have one, too.)"""
    try:
        return {"algo", "run", "seed", "group_size"} <= read_json(folder / "config.json", "").keys()
    except InputError:
        return False


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run's folder: two would write its files in turns.

    The lock is on the folder itself, so nothing is left behind, and it ends with the process. Raises InputError when
    another process holds it."""
    handle: Any = None
    made = False
    try:
        import fcntl

        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise InputError(
            f"run folder {folder} is being written by another process; wait for it, or name another with --run"
        ) from None
    except (ImportError, OSError):
        pass  # Windows, a file system without locks, or a folder that cannot be had, as `claim_run` will say
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)
        if made:
            with suppress(OSError):
                folder.rmdir()  # where nothing came of the run; a folder with something in it stays


def open_run(folder: Path, config: dict[str, Any]) -> None:
    """Start a run in its claimed folder: clear away the one that it replaces, with what was made of it, and write
    config.json."""
    for old in (*(folder / name for name in OWN), *folder.glob("eval-step-*"), *unfinished(folder)):
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def unfinished(folder: Path) -> list[Path]:
    """What a run that was killed in the middle of a save has left, as .model.<pid>.tmp; no other hidden file."""
    left = [path for name in ("config.json", *OWN) for path in folder.glob(f".{name}.[0-9]*.*")]
    return [*left, *folder.glob("checkpoints/.*")]


def reopen_run(folder: Path, config: dict[str, Any], step: int) -> None:
    """Go on with a run at its checkpoint of `step`: forget what came after it, and the model of an end that is none
    now, which eval.py would take for the result."""
    for old in unfinished(folder):
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
    last = max((step_of(row, folder) for row in read_lines(folder / "metrics.jsonl")), default=0)
    if last > step:
        print(f"the last checkpoint is of step {step}: what came after it, up to step {last}, is done again")
    elif last < step:
        print(f"metrics.jsonl is damaged: its rows end at step {last}, the checkpoint is of step {step}")
    rewind(folder, step)
    shutil.rmtree(folder / "model", ignore_errors=True)
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file of a run; none where there is no file. Raises InputError for a damaged line, but for a
    last one that a power cut has torn."""
    return [row for _, row in read_jsonl(path, torn_end=True)] if path.exists() else []


def step_of(row: dict[str, Any], folder: Path) -> int:
    """Raises InputError where a row of metrics or samples has no step."""
    if type(row.get("step")) is not int:
        raise InputError(f"run {folder} has a damaged row, whose step is {str(row.get('step'))[:60]!r}; take it out")
    return row["step"]


def rewind(folder: Path, step: int) -> None:
    """Forget what was logged after `step`, so that a resumed run's files equal an uninterrupted one's."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        rows = [row for row in read_lines(folder / name) if step_of(row, folder) <= step]
        write_text(folder / name, "".join(to_json(row) + "\n" for row in rows))


def list_checkpoints(run: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    with suppress(OSError):  # a path that is too long
        return sorted(path.parent for path in (run / "checkpoints").glob("step-*/state.pt"))
    return []


def explain_failure(error: Exception, run: Path) -> str:
    """One sentence for a failure that the user can do something about; raises it again if it is a fault of this
    program."""
    resumable = f"; go on with --resume {run}" if list_checkpoints(run) else ""
    if isinstance(error, OSError) and (reason := explain_disk(error, run)):
        return f"{reason}{resumable}"
    if isinstance(error, InputError):
        return str(error)
    if is_out_of_memory(error):
        return f"out of memory; --dry-run says which setting makes it fit{resumable}"
    if distributed.lost_another(error):
        reason = str(error).splitlines()[0]
        return f"another process has ended, so this one (rank {distributed.rank()}) stops too: {reason}"
    raise error


def explain_disk(error: OSError, folder: Path) -> str | None:
    """One sentence for a failure to write into a folder; None for any other failure."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {folder} is full; make room"
    if error.filename and Path(str(error.filename)).absolute().is_relative_to(folder.absolute()):
        gone = error.errno == errno.ENOENT
        return f"folder {folder} {'was deleted meanwhile' if gone else f'cannot be written ({error.strerror})'}"
    return None
