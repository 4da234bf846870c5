#!/usr/bin/env python
"""Keeps of one default run what TUTORIAL.md shows of it, in docs/run.json, so that the text needs no training run.

python train.py --log-samples -1 --run runs/tutorial
python docs/record.py runs/tutorial
python docs/figures.py && python docs/sync.py
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nano_exgrpo.htmlreport import group_samples  # noqa: E402
from nano_exgrpo.questions import InputError  # noqa: E402
from nano_exgrpo.report import KINDS, kind, separation  # noqa: E402
from nano_exgrpo.runlog import read_config, read_lines, write_text  # noqa: E402

TARGET = ROOT / "docs" / "run.json"
METRICS = (
    "step reward entropy loss grad_norm trained_rows completions/mean_length replay/started replay/questions "
    "replay/weight_mean replay/ratio_mean buffer/questions buffer/trajectories buffer/retired buffer/buckets "
    "eval/accuracy eval/low eval/high"
).split()
Row = dict[str, Any]


def lucky_and_reasoned(groups: dict[tuple[int, str], list[Row]], after: int) -> dict[str, Row]:
    """A lucky guess and a reasoned success, from the first group after step `after` that holds both."""
    for (step, _), rows in groups.items():
        found: dict[str, Row] = {}
        for row in rows:
            if not row["replayed"]:
                found.setdefault(kind(row["prompt"], row["response"], row["reward"]), row)
        if step > after and {"lucky", "reasoned"} <= found.keys():
            return {name: found[name] for name in ("lucky", "reasoned")}
    raise InputError("no group of this run holds a lucky guess beside a reasoned success")


def longest_life(groups: dict[tuple[int, str], list[Row]], started: int, group_size: int) -> Row:
    """The question with most groups among those that were replayed and retired in the end: its groups, in order."""
    lives: dict[str, list[Row]] = {}
    prompts: dict[str, str] = {}
    for (step, question), rows in groups.items():
        if step >= started:
            group = {
                "step": step, "replayed": rows[0]["replayed"], "rewards": [int(row["reward"]) for row in rows],
                "responses": [row["response"] for row in rows], "entropies": [row["entropy"] for row in rows],
            }  # fmt: skip
            lives.setdefault(question, []).append(group)
            prompts[question] = rows[0]["prompt"]
    retired = {
        q: life
        for q, life in lives.items()
        if any(g["replayed"] for g in life) and sum(life[-1]["rewards"]) == group_size
    }
    if not retired:
        raise InputError("no replayed question of this run was retired; train for more steps")
    question = max(retired, key=lambda q: len(retired[q]))
    return {"question": question, "prompt": prompts[question], "groups": retired[question]}


def kinds(rows: Iterable[Row]) -> dict[str, int]:
    """How many of the rows are reasoned, lucky, wrong."""
    counts = Counter(kind(row["prompt"], row["response"], row["reward"]) for row in rows)
    return {name: counts[name] for name in KINDS}


def record(run: Path) -> Row:
    """What docs/run.json holds. Raises InputError: not a run, samples not all logged, nothing to show in it."""
    config = read_config(run)
    if config.get("log_samples") != -1:
        raise InputError(f"{run} did not log every sample; train with --log-samples -1")
    rows, samples = read_lines(run / "metrics.jsonl"), read_lines(run / "samples.jsonl")
    groups = group_samples(samples)
    started = next((row["step"] for row in rows if row.get("replay/started")), None)
    if started is None:
        raise InputError(f"replay never started in {run}")
    early: dict[str, list[float]] = {name: [] for name in KINDS}
    for sample in samples:
        if sample["step"] <= 20 and not sample["replayed"]:
            early[kind(sample["prompt"], sample["response"], sample["reward"])].append(sample["entropy"])
    return {
        "made by": "python train.py --log-samples -1; python docs/record.py",
        "settings": {name: value for name, value in config.items() if name not in ("run", "resume", "overwrite")},
        "metrics": [{name: row[name] for name in METRICS if name in row} for row in rows],
        "started": started,
        "pair": lucky_and_reasoned(groups, 0),
        "early": {
            name: {"count": len(values), "mean": round(fmean(values), 3), "median": round(median(values), 3)}
            for name, values in early.items()
            if values
        },
        "reasoned below": {
            other: round(separation(early["reasoned"][:2000], early[other][:2000]), 3)
            for other in ("lucky", "wrong")
            if early["reasoned"] and early[other]
        },
        "fresh since start": kinds(row for row in samples if row["step"] >= started and not row["replayed"]),
        "replayed": kinds(row for row in samples if row["replayed"]),
        "life": longest_life(groups, started, config["group_size"]),
    }


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: python docs/record.py RUN", file=sys.stderr)
        return 2
    try:
        recorded = record(Path(argv[0]))
    except InputError as error:
        print(f"docs/record.py: {error}", file=sys.stderr)
        return 2
    # A line for each row of metrics and each group, so that a diff can be read.
    as_lines = lambda rows: "[\n  " + ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n ]"  # noqa: E731
    long = {"@metrics@": as_lines(recorded["metrics"]), "@groups@": as_lines(recorded["life"]["groups"])}
    recorded["metrics"], recorded["life"]["groups"] = "@metrics@", "@groups@"
    text = json.dumps(recorded, indent=1, ensure_ascii=False)
    for mark, lines in long.items():
        text = text.replace(f'"{mark}"', lines)
    write_text(TARGET, text + "\n")
    print(f"{TARGET.relative_to(ROOT)} written; now: python docs/figures.py && python docs/sync.py")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
