"""What a run leaves behind: metrics, samples and curves.

runs/<name>/config.json     every setting as it was resolved
runs/<name>/metrics.jsonl   one line a step; names as in TRL where it has the same quantity
runs/<name>/samples.jsonl   whole responses with reward, entropy of each token, fresh or replayed
runs/<name>/curves.png      the metrics as a picture
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nano_exgrpo.errors import InputError


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def claim_run(folder: Path, *, overwrite: bool) -> None:
    """Make sure, before anything costly is done, that a run can be written into this folder; changes nothing in it.

    Raises InputError when it holds another run (unless `overwrite`) or cannot be written."""
    if (folder / "config.json").exists() and not overwrite:
        raise InputError(
            f"run folder {folder} already holds a run; go on with --resume {folder}, replace it with --overwrite, "
            f"or name another with --run"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / ".writable", "")
        (folder / ".writable").unlink()
    except OSError as error:
        raise InputError(f"run folder {folder} cannot be written ({error.strerror}); name another with --run") from None


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run's folder: two would write its files in turns. The lock is on the folder itself, so
    that nothing is left behind, and ends with the process. Raises InputError when another process holds it."""
    handle = None
    try:
        import fcntl

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
            with suppress(OSError):
                folder.rmdir()  # where nothing came of the run; a folder with something in it stays


def open_run(folder: Path, config: dict[str, Any]) -> None:
    """Start a run in its claimed folder: clear away the one that it replaces, with what eval.py and htmlreport made of it, and
    write config.json."""
    for old in (folder / "checkpoints", folder / "model", folder / "eval", *folder.glob("eval-step-*")):
        shutil.rmtree(old, ignore_errors=True)
    for name in ("metrics.jsonl", "samples.jsonl", "curves.png", "report.html"):
        (folder / name).unlink(missing_ok=True)
    write_config(folder, config)


def reopen_run(folder: Path, config: dict[str, Any], step: int) -> None:
    """Go on with a run at its checkpoint of `step`: forget what came after it, and the model of an end that is none now,
    which eval.py would take for the result."""
    last = max((row.get("step", 0) for row in read_lines(folder / "metrics.jsonl")), default=0)
    if last > step:
        print(f"the last checkpoint is of step {step}: what came after it, up to step {last}, is done again")
    rewind(folder, step)
    shutil.rmtree(folder / "model", ignore_errors=True)
    write_config(folder, config)


def write_config(folder: Path, config: dict[str, Any]) -> None:
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a run. Raises InputError when there is none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = None
    if not isinstance(config, dict):
        raise InputError(f"{folder} is not a run folder: it has no readable config.json")
    return config


def append_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Add rows to a JSONL file, in one write. Raises OSError where the disk is full."""
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file of a run, up to the first that is damaged (by a power cut, the last one)."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        if not isinstance(row, dict):
            break
        rows.append(row)
    return rows


def rewind(folder: Path, step: int) -> None:
    """Forget what was logged after `step`, so that a resumed run's files equal an uninterrupted one's."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        rows = [row for row in read_lines(folder / name) if row.get("step", 0) <= step]
        write_text(folder / name, "".join(json.dumps(row) + "\n" for row in rows))


def plot_curves(runs: dict[str, Path], target: Path) -> bool:
    """Draw the curves of one or more runs {label: folder}. False, with a hint, without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no curves.png: plots need matplotlib (pip install matplotlib)", file=sys.stderr)
        return False
    panels = [
        ("eval/accuracy", "held-out accuracy"),
        ("reward", "reward of fresh rollouts"),
        ("entropy", "entropy (nats a token)"),
        ("completions/mean_length", "response length (tokens)"),
        ("buffer/questions", "questions in the buffer"),
        ("buffer/retired", "retired questions"),
    ]
    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6), constrained_layout=True)
    for label, folder in runs.items():
        rows = read_lines(folder / "metrics.jsonl")
        for axis, (key, title) in zip(axes.flat, panels):
            points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
            if not points:
                continue
            x, y = zip(*points)
            (line,) = axis.plot(x, y, label=label, marker="o" if key.startswith("eval") else None, markersize=3)
            if key == "eval/accuracy":
                low, high = zip(*[(row["eval/low"], row["eval/high"]) for row in rows if row.get(key) is not None])
                axis.fill_between(x, low, high, alpha=0.2, color=line.get_color(), linewidth=0)
    for axis, (key, title) in zip(axes.flat, panels):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.grid(alpha=0.3)
        if key in ("eval/accuracy", "reward"):
            axis.set_ylim(0, 1)
    axes.flat[0].legend(fontsize=8)
    temporary = target.with_name(f".{target.name}.tmp")
    figure.savefig(temporary, dpi=110, format="png")
    pyplot.close(figure)
    os.replace(temporary, target)
    return True
