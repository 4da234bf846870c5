"""What an evaluation keeps: graded responses, streamed to disk as they come.

<folder>/settings.json       all that decides what is generated; the folder goes on only under the same
<folder>/generations.jsonl   one `Generation` a line: prompt, response, extracted answer, gold, verdict
<folder>/results.json        the figures, written by eval.py
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import typing
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nano_exgrpo.checker import explain
from nano_exgrpo.errors import InputError
from nano_exgrpo.infra.files import append_lines, read_json, read_jsonl, to_json, write_text, written
from nano_exgrpo.questions import Question
from nano_exgrpo.reward import grade
from nano_exgrpo.trajectory import RIGHT, Trajectory

Key = tuple[str, str, int]  # (benchmark, question id, number of the sample)

# ---------------------------------------------------------------------------------------------- grading


@dataclass
class Generation:
    """One graded response: a row of generations.jsonl. id: of the question. letters, choices: of its options; empty for
    a free answer."""

    benchmark: str
    id: str
    sample: int
    prompt: str
    response: str
    tokens: int
    truncated: bool
    answer: str | None
    gold: str
    correct: bool
    letters: str = ""
    choices: list[str] = field(default_factory=list)

    @property
    def key(self) -> Key:
        return self.benchmark, self.id, self.sample

    def explain(self) -> str:
        """How its verdict came about, for people to read."""
        if self.letters:
            return f"letter      {self.answer or 'none was found'}\ngold        {self.gold} of {self.letters}"
        return explain(self.gold, self.response)

    def regrade(self) -> bool:
        """Grade anew; returns whether the verdict changed."""
        before = self.correct
        self.answer, reward = grade(self.response, self.gold, self.letters, tuple(self.choices))
        self.correct = reward == RIGHT
        return self.correct != before


def make_generation(benchmark: str, question: Question, sample: int, trajectory: Trajectory) -> Generation:
    generation = Generation(
        benchmark, question.id, sample, question.prompt, trajectory.text, len(trajectory.response_ids),
        trajectory.truncated, None, question.answer, False, question.letters, list(question.choices),
    )  # fmt: skip
    generation.regrade()
    return generation


def grouped(generations: Iterable[Generation], name: Callable[[Generation], str]) -> dict[str, list[Generation]]:
    groups: dict[str, list[Generation]] = {}
    for generation in generations:
        groups.setdefault(name(generation), []).append(generation)
    return groups


def by_question(generations: Iterable[Generation]) -> dict[str, list[Generation]]:
    return grouped(generations, lambda g: g.id)


def by_benchmark(generations: Iterable[Generation]) -> dict[str, list[Generation]]:
    return grouped(generations, lambda g: g.benchmark)


# -------------------------------------------------------------------------------------------- the folder


def weights_digest(folder: Path) -> str:
    """Tells retrained weights from the old ones without reading gigabytes: sizes, first and last MiB of each file."""
    digest, paths = hashlib.sha256(), sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    for path in paths:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 2**20))
            digest.update(str(size).encode() + file.read())
            file.seek(0)
            digest.update(file.read(2**20))
    return digest.hexdigest()[:16] if paths else "hub"


def open_folder(folder: Path, wanted: dict[str, Any], *, overwrite: bool) -> dict[Key, Generation]:
    """Make or reopen the folder; what it already holds.

    wanted: all that decides what is generated. Raises InputError when that is not what the folder was made with."""
    fresh = overwrite or not os.path.exists(folder / "settings.json")
    held = {**wanted, "benchmarks": {}} if fresh else read_settings(folder)
    remedy = "give the same, start over with --overwrite, or name another folder with --out"
    for name, value in wanted.items():
        if name not in ("model", "benchmarks") and held.get(name) != value:
            what = "other weights" if name == "weights" else f"--{name.replace('_', '-')} {held.get(name)!r}"
            raise InputError(f"folder {folder} holds generations made with {what}; {remedy}")
    for name, task in wanted["benchmarks"].items():
        before = held["benchmarks"].setdefault(name, task)
        if {**before, **task} != before:
            what = " and ".join(f"{part} {before.get(part)}" for part in task if before.get(part) != task[part])
            raise InputError(f"folder {folder} holds {name} with {what}, not those asked for; {remedy}")
    if fresh:
        with written(folder):
            (folder / "generations.jsonl").unlink(missing_ok=True)
    write_text(folder / "settings.json", json.dumps(held, indent=2) + "\n")
    return {} if fresh else read_generations(folder)


def pin_prompts(folder: Path, benchmark: str, digest: str) -> None:
    """Note the token ids that the policy is asked. Raises InputError where the folder was asked something else: a
    chat template may write today's date."""
    settings = read_settings(folder)
    task = settings["benchmarks"][benchmark]
    if task.setdefault("prompts", digest) != digest:
        raise InputError(
            f"the chat template makes other prompts of {benchmark} than those that folder {folder} holds answers to; "
            f"start over with --overwrite, or name another folder with --out"
        )
    write_text(folder / "settings.json", json.dumps(settings, indent=2) + "\n")


def read_settings(folder: Path) -> dict[str, Any]:
    """What a folder's generations were made with. Raises InputError where it does not say."""
    settings = read_json(folder / "settings.json", f"folder {folder} is no evaluation; evaluate anew with --overwrite")
    tasks = settings.get("benchmarks")
    if not isinstance(tasks, dict) or not all(isinstance(task, dict) for task in tasks.values()):
        raise InputError(f"{folder}/settings.json is damaged; evaluate anew with --overwrite")
    return settings


def read_generations(folder: Path) -> dict[Key, Generation]:
    """Raises InputError for rows of another kind. A last line that was torn while it was written is removed, so that
    what is appended does not continue it."""
    path, kinds = folder / "generations.jsonl", typing.get_type_hints(Generation)
    kinds["choices"] = list
    found = []
    for where, row in read_jsonl(path, torn_end=True) if path.exists() else ():
        row = {"letters": "", "choices": [], **row}
        if row.keys() != kinds.keys() or not all(isinstance(row[name], kind) for name, kind in kinds.items()):
            raise InputError(f"{where} is a row of another kind; start over with --overwrite")
        found.append(Generation(**{**row, "choices": list(map(str, row["choices"]))}))
    if path.exists() and path.read_bytes()[-1:] not in (b"", b"\n"):
        write_generations(folder, found)
    return {g.key: g for g in found}


def write_generations(folder: Path, generations: Iterable[Generation]) -> None:
    write_text(folder / "generations.jsonl", "".join(to_json(asdict(g)) + "\n" for g in generations))


def add_generations(folder: Path, generations: Iterable[Generation]) -> None:
    append_lines(folder / "generations.jsonl", map(asdict, generations))


def git_commit() -> str | None:
    """The commit of this code, marked when files differ from it; None outside a git checkout."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
