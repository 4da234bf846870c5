"""What an evaluation keeps: graded responses, streamed to disk as they come.

<folder>/settings.json       all that decides what is generated; the folder goes on only under the same
<folder>/generations.jsonl   one `Generation` a line: prompt, response, extracted answer, gold, verdict
<folder>/results.json        the figures, written by eval.py
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nano_exgrpo.checker import explain
from nano_exgrpo.errors import InputError
from nano_exgrpo.infra.files import write_text
from nano_exgrpo.infra.run_folder import read_lines
from nano_exgrpo.questions import Question
from nano_exgrpo.reward import grade
from nano_exgrpo.trajectory import RIGHT, Trajectory

# ---------------------------------------------------------------------------------------------- grading


@dataclass
class Generation:
    """One graded response: a row of generations.jsonl."""

    benchmark: str
    id: str  # of the question
    sample: int
    prompt: str
    response: str
    tokens: int
    truncated: bool
    answer: str | None
    gold: str
    correct: bool
    letters: str = ""  # of the options; empty for a free answer

    def explain(self) -> str:
        """How its verdict came about, for people to read."""
        if self.letters:
            return f"letter      {self.answer or 'none was found'}\ngold        {self.gold} of {self.letters}"
        return explain(self.gold, self.response)

    def regrade(self) -> bool:
        """Grade anew; returns whether the verdict changed."""
        before = self.correct
        self.answer, reward = grade(self.response, self.gold, self.letters)
        self.correct = reward == RIGHT
        return self.correct != before


def make_generation(benchmark: str, question: Question, sample: int, trajectory: Trajectory) -> Generation:
    answer, reward = grade(trajectory.text, question.answer, question.letters, question.choices)
    return Generation(
        benchmark, question.id, sample, question.prompt, trajectory.text, len(trajectory.response_ids),
        trajectory.truncated, answer, question.answer, reward == RIGHT, question.letters,
    )  # fmt: skip


def by_question(generations: Iterable[Generation]) -> dict[str, list[Generation]]:
    groups: dict[str, list[Generation]] = {}
    for generation in generations:
        groups.setdefault(generation.id, []).append(generation)
    return groups


def by_benchmark(generations: Iterable[Generation]) -> dict[str, list[Generation]]:
    groups: dict[str, list[Generation]] = {}
    for generation in generations:
        groups.setdefault(generation.benchmark, []).append(generation)
    return groups


# -------------------------------------------------------------------------------------------- the folder


def weights_digest(folder: Path) -> str:
    """Tells retrained weights from the old ones without reading gigabytes: sizes, first and last MiB of each file."""
    parts = []
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 2**20))
            parts += [str(size).encode(), file.read()]
            file.seek(0)
            parts.append(file.read(2**20))
    return digest(b"".join(parts)) if parts else "hub"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def open_folder(folder: Path, wanted: dict[str, Any], *, overwrite: bool) -> dict[tuple[str, str, int], Generation]:
    """Make or reopen the folder; what it already holds, by (benchmark, question id, sample).

    Raises InputError when that was generated under other settings."""
    path = folder / "settings.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = json.loads(path.read_text(encoding="utf-8")) if path.exists() and not overwrite else None
    except (OSError, ValueError) as error:
        raise InputError(f"folder {folder} cannot be used ({error}); name another with --out") from None
    generations = read_generations(folder) if held else {}
    if held is None:
        (folder / "generations.jsonl").unlink(missing_ok=True)
        held = {**wanted, "benchmarks": {}}
    remedy = "give the same, start over with --overwrite, or name another folder with --out"
    for name, value in wanted.items():
        if name not in ("model", "benchmarks") and held.get(name) != value:
            what = "other weights" if name == "weights" else f"--{name.replace('_', '-')} {held.get(name)!r}"
            raise InputError(f"folder {folder} holds generations made with {what}; {remedy}")
    for name, task in wanted["benchmarks"].items():
        before = held["benchmarks"].get(name, task)
        if before != task:
            what = f"--samples {before['samples']}" if before["samples"] != task["samples"] else "other questions"
            raise InputError(f"folder {folder} holds {name} with {what}; {remedy}")
    held["benchmarks"].update(wanted["benchmarks"])
    write_text(path, json.dumps(held, indent=2) + "\n")
    return generations


def read_generations(folder: Path) -> dict[tuple[str, str, int], Generation]:
    """Raises InputError for a folder without generations, or with rows of another kind."""
    path = folder / "generations.jsonl"
    try:
        found = [Generation(**row) for row in read_lines(path)]
    except TypeError as error:
        raise InputError(f"{path} has rows of another kind ({error}); start over with --overwrite") from None
    text_whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    generations = {(g.benchmark, g.id, g.sample): g for g in found}
    if not text_whole:  # the last line was cut off while it was written: what is appended must not continue it
        write_generations(folder, generations.values())
    return generations


def write_generations(folder: Path, generations: Iterable[Generation]) -> None:
    write_text(folder / "generations.jsonl", "".join(json.dumps(asdict(g)) + "\n" for g in generations))


def git_commit() -> str | None:
    """The commit of this code, marked when files differ from it; None outside a git checkout."""
    try:
        git = [
            "git",
            "-C",
            str(Path(__file__).resolve().parent),
            "describe",
            "--always",
            "--dirty",
            "--abbrev=40",
            "--exclude=*",
        ]
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
