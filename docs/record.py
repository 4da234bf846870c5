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

import torch  # noqa: E402

from nano_exgrpo.errors import InputError  # noqa: E402
from nano_exgrpo.evaluation.html_report import group_samples  # noqa: E402
from nano_exgrpo.evaluation.study_report import KINDS, kind, separation  # noqa: E402
from nano_exgrpo.infra.files import read_json, write_text  # noqa: E402
from nano_exgrpo.infra.loading import load_policy  # noqa: E402
from nano_exgrpo.infra.run_folder import read_lines  # noqa: E402
from nano_exgrpo.policy import Policy, end_of_turn  # noqa: E402
from nano_exgrpo.questions import Question  # noqa: E402
from nano_exgrpo.trajectory import Trajectory  # noqa: E402

TARGET = ROOT / "docs" / "run.json"
METRICS = (
    "step reward entropy loss grad_norm trained_rows completions/mean_length replay/started replay/questions "
    "replay/weight_mean replay/ratio_mean buffer/questions buffer/trajectories buffer/retired buffer/buckets "
    "eval/accuracy eval/low eval/high"
).split()
LONGEST_LIFE = 12  # groups of one question that fit a page
Row = dict[str, Any]


def lucky_and_reasoned(groups: dict[tuple[int, str], list[Row]], after: int) -> dict[str, Row]:
    """A success guessed at once and a reasoned one, from the first group after step `after` that holds both."""
    for (step, _), rows in groups.items():
        found: dict[str, Row] = {}
        for row in rows:
            if not row["replayed"]:
                name = kind(row["prompt"], row["response"], row["reward"])
                if name == "reasoned" or row["response"].strip().startswith("\\boxed"):
                    found.setdefault(name, row)
        if step > after and {"lucky", "reasoned"} <= found.keys():
            return {name: found[name] for name in ("lucky", "reasoned")}
    raise InputError("no group of this run holds a lucky guess beside a reasoned success")


def longest_life(groups: dict[tuple[int, str], list[Row]], started: int, group_size: int) -> Row:
    """Of the questions that were replayed and retired, the one with most groups up to `LONGEST_LIFE`: its groups, in
    order."""
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
        question: life
        for question, life in lives.items()
        if any(g["replayed"] for g in life) and sum(life[-1]["rewards"]) == group_size and len(life) <= LONGEST_LIFE
    }
    if not retired:
        raise InputError("no replayed question of this run was retired; train for more steps")
    question = max(retired, key=lambda q: len(retired[q]))
    return {"question": question, "prompt": prompts[question], "groups": retired[question]}


def kinds(rows: Iterable[Row]) -> dict[str, int]:
    """How many of the rows are reasoned, lucky, wrong."""
    counts = Counter(kind(row["prompt"], row["response"], row["reward"]) for row in rows)
    return {name: counts[name] for name in KINDS}


def inverted_mask(policy: Policy, samples: Iterable[Row]) -> Row:
    """How often the mean entropy over the *padding* chooses the same success of a question as that over its tokens.

    An emulation of the released code's inverted mask: responses are padded to one more than the longest, and positions
    are swapped. chance: the agreement of a choice at random."""
    stored: dict[str, dict[str, Row]] = {}
    for sample in samples:
        if sample["reward"] > 0 and not sample["truncated"]:
            stored.setdefault(sample["question"], {})[sample["response"]] = sample
    several = [list(found.values()) for found in stored.values() if len(found) > 1]
    encode = lambda text: torch.tensor(policy.tokenizer(text, add_special_tokens=False)["input_ids"])  # noqa: E731
    end = torch.tensor([end_of_turn(policy.tokenizer)])
    agree = 0
    for successes in several:
        responses = [torch.cat([encode(row["response"]), end]) for row in successes]
        width = max(map(len, responses)) + 1
        padded = [torch.cat([r, torch.full((width - len(r),), policy.pad_id)]) for r in responses]
        question = Question(successes[0]["question"], "", "", prompt_ids=encode(successes[0]["prompt"]))
        with torch.no_grad():
            entropies = policy.score([Trajectory(question, ids, "") for ids in padded]).entropies  # [B, T]
        right = [row[: len(r)].mean().item() for row, r in zip(entropies, responses, strict=True)]
        wrong = [row[len(r) :].mean().item() for row, r in zip(entropies, responses, strict=True)]
        agree += right.index(min(right)) == wrong.index(min(wrong))
    count = max(1, len(several))
    chance = sum(1 / len(found) for found in several) / count
    return {"questions": len(several), "same choice": round(agree / count, 3), "chance": round(chance, 3)}


def luck_of_a_random_choice(samples: Iterable[Row], started: int) -> float:
    """Share of lucky trajectories that would have been replayed, had each been drawn at random from what was stored."""
    stored: dict[str, dict[str, bool]] = {}  # question → response → is it lucky
    shares = []
    for row in samples:
        lucky = kind(row["prompt"], row["response"], row["reward"]) == "lucky"
        if row["replayed"]:
            known = stored[row["question"]].values()
            shares.append(sum(known) / len(known))
        elif row["step"] >= started and row["reward"] > 0:
            stored.setdefault(row["question"], {})[row["response"]] = lucky
    return round(fmean(shares), 3) if shares else 0.0


def record(run: Path) -> Row:
    """What docs/run.json holds. Raises InputError: not a run, samples not all logged, nothing to show in it."""
    config = read_json(run / "config.json", str(run))
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
        "luck of a random choice": luck_of_a_random_choice(samples, started),
        "life": longest_life(groups, started, config["group_size"]),
    }


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: python docs/record.py RUN", file=sys.stderr)
        return 2
    try:
        run = Path(argv[0])
        recorded = record(run)
        policy = load_policy(str(run / "model"), device=torch.device("cpu"))
        recorded["inverted mask"] = inverted_mask(policy, read_lines(run / "samples.jsonl"))
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
