#!/usr/bin/env python
"""Measure a language model on the paper's benchmarks, with numbers that can be believed.

    python eval.py --model runs/toy-exgrpo-seed0                       a run, on its own held-out questions
    python eval.py --model Qwen2.5-Math-1.5B --bench math500,aime24    a hub model on benchmarks from the hub
    python eval.py --model runs/x --bench gsm8k --data gsm8k.jsonl     the same questions from a file
    python eval.py --compare runs/a runs/b                             is b better than a?
    python eval.py --model runs/x --show wrong                         why does it fail?

What happens, in order: load the questions, generate responses (streamed to generations.jsonl, so that the same
command goes on where an interrupted one stopped), grade them with the checker that gives training its reward, and
sum them up with 95 % intervals that take the question as the unit (results.json, and a table).
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while importing ends without a traceback

import dataclasses
import json
import os
import platform
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from nano_exgrpo.config import CommandLine, TrainConfig, recorded_config
from nano_exgrpo.errors import InputError
from nano_exgrpo.evaluation import generations as kept
from nano_exgrpo.evaluation.benchmarks import BENCHMARKS, GROUPS, Benchmark, benchmark_names, load_benchmark
from nano_exgrpo.evaluation.evaluate import Task, answer_task
from nano_exgrpo.evaluation.figures import comparison_table, figures_table, summarise
from nano_exgrpo.evaluation.generations import Generation, by_benchmark, by_question
from nano_exgrpo.evaluation.html_report import visible
from nano_exgrpo.evaluation.settings import EvalConfig
from nano_exgrpo.evaluation.statistics import average
from nano_exgrpo.infra.files import Unwritable, write_text
from nano_exgrpo.infra.loading import load_policy, read_config, resolve_device, resolve_model_name
from nano_exgrpo.infra.precision import resolve_dtypes
from nano_exgrpo.infra.prepare import load_data
from nano_exgrpo.infra.run_folder import is_run, list_checkpoints
from nano_exgrpo.policy import Policy
from nano_exgrpo.questions import questions_digest


@dataclass
class Subject:
    """What is evaluated. weights: what `load_policy` loads. run: the settings of the run it came from, if any. out: the
    folder of its evaluation."""

    model: str
    weights: str
    run: TrainConfig | None
    out: Path


def evaluate_model(config: EvalConfig, given: set[str]) -> list[Generation]:
    """Generate what is missing, grade, write results.json and print the table.

    given: names of the settings that were asked for, which a run's own settings do not replace. Raises InputError."""
    subject = find_subject(config.model, config.out)
    if subject.run:  # a run is asked as it was trained, unless flags say otherwise
        own: dict[str, Any] = {
            "system_prompt": subject.run.system_prompt,
            "max_new_tokens": subject.run.max_response_length,
        }
        config = dataclasses.replace(config, **{name: value for name, value in own.items() if name not in given})

    # 1. Questions.
    tasks = load_tasks(config, subject)
    found = kept.open_folder(subject.out, what_decides(config, subject, tasks), overwrite=config.overwrite)

    # 2. Responses, benchmark by benchmark, as far as they are not there yet.
    policy, started = None, time.perf_counter()
    for task in tasks:
        if any(key not in found for key in task.keys):
            policy = policy or load(config, subject)
            answer_task(policy, task, config, subject.out, found)
    seconds = round(time.perf_counter() - started, 1)

    # 3. Figures.
    answered = [found[key] for task in tasks for key in task.keys]
    print(sum_up(subject.out, config.ks, answered, {"model": config.model, "seconds": seconds}))
    return answered


# ------------------------------------------------------------------------------- what to evaluate, on what


def find_subject(model: str, out: str = "") -> Subject:
    """A run folder, the model folder of a run or of one of its checkpoints, any other model folder, or a hub id.
    Raises InputError for a run that has saved no model yet, or only the frozen weights of LoRA."""
    if model in ("", "toy"):
        raise InputError("name what to evaluate with --model: a run folder of train.py, a model folder or a hub id")
    path = Path(model)
    # A run, or its <run>/checkpoints/step-…/model. Unlike Path.is_dir, os.path.isdir takes a name of any length.
    folders = [path, *path.resolve().parents[:3]] if os.path.isdir(path) else []
    home = next((folder for folder in folders if is_run(folder)), None)
    if home is None:
        resolve_model_name(model)  # fails here rather than after a folder was made
        return Subject(model, model, None, Path(out or Path("evals") / model.rstrip("/").split("/")[-1]))
    run, weights = recorded_config(home), path
    if home is path:
        weights = path / "model"
        if not (weights / "config.json").is_file():
            checkpoints = list_checkpoints(path)
            if not checkpoints:
                raise InputError(f"run {model} has saved no model yet; finish it with train.py --resume {model}")
            weights = checkpoints[-1] / "model"
            print(f"{model} is not finished: its last checkpoint, {checkpoints[-1].name}, is evaluated")
    if run.lora_rank and (weights.parent / "state.pt").is_file():  # what was learned, the adapters, stands in state.pt
        raise InputError(f"{weights} holds the frozen weights of a LoRA run; finish it with train.py --resume first")
    step = weights.resolve().parent.name
    return Subject(
        model, str(weights), run, Path(out or home / (f"eval-{step}" if step.startswith("step-") else "eval"))
    )


def load_tasks(config: EvalConfig, subject: Subject) -> list[Task]:
    """The benchmarks asked for, each with its questions. Raises InputError."""
    data = Path(config.data) if config.data else None
    if config.bench == "held-out" or (not config.bench and not data and subject.run):
        names = ["held-out"]
    elif config.bench or not (data and os.path.isfile(data)):
        if not config.bench:
            reason = f"--data {data} is no file" if data else f"{config.model} is no run"
            raise InputError(f"{reason}: name benchmarks with --bench, or a file of questions with --data")
        names = benchmark_names(config.bench)
    else:
        names = [data.stem]
    if data and not os.path.isdir(data) and len(names) > 1:
        raise InputError(f"--data {data} is one file and cannot stand in for {len(names)} benchmarks; give a folder")
    tasks = []
    for name in names:
        benchmark = BENCHMARKS.get(name, Benchmark())
        if name == "held-out" or (name == "toy" and not data and subject.run and not subject.run.data):
            if subject.run is None:
                raise InputError(
                    f"only a run has held-out questions, and {config.model} is none; name others with --bench"
                )
            name, (_, questions) = "held-out" if subject.run.data else "toy", load_data(subject.run)
        else:
            file = str(data / f"{name}.jsonl") if data and os.path.isdir(data) else config.data
            questions = load_benchmark(name, file)
            if not data and len(questions) != benchmark.size:
                print(f"{name}: {len(questions)} questions came from the hub, not {benchmark.size}", file=sys.stderr)
        if config.limit and config.limit < len(questions):
            chosen = sorted(random.Random(config.seed).sample(range(len(questions)), config.limit))
            questions = [questions[i] for i in chosen]
        tasks.append(Task(name, questions, 1 if config.temperature == 0 else config.samples or benchmark.samples))
    return tasks


def load(config: EvalConfig, subject: Subject) -> Policy:
    device = resolve_device(config.device)
    dtype, autocast = find_dtypes(config, subject, device)
    settings: dict[str, Any] = dict(autocast=autocast, sampler=config.sampler, temperature=config.temperature)
    return load_policy(subject.weights, device=device, dtype=dtype, **settings)


def find_dtypes(config: EvalConfig, subject: Subject, device: torch.device) -> tuple[torch.dtype, torch.dtype | None]:
    """(dtype of the weights, dtype of matrix products under autocast or None). With --dtype auto what is evaluated is
    the policy that was trained, and not a rounded one.

    bf16 is used by the run's training or, for other models, on a GPU that has it. Then weights stored in bf16 stay so,
    and those that a run trained in fp32 go under autocast. But LoRA's training never rounded W + (α/r) · B A to bf16:
    autocast would, and lose half of what was learned. So merged weights, and other fp32 files, which may be such, are
    multiplied in fp32."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype), None
    run = subject.run
    dtype, autocast = resolve_dtypes(run.dtype if run else "auto", "adamw", 0, device)
    stored = read_config(subject.weights).dtype if autocast else None
    if stored in (torch.bfloat16, torch.float16):
        return stored, None
    return dtype, None if run is None or run.lora_rank else autocast


# --------------------------------------------------------------------------------------- what is kept


def what_decides(config: EvalConfig, subject: Subject, tasks: Sequence[Task]) -> dict[str, Any]:
    """All that decides what is generated (but the device, which rounds its sums in its own way): a folder goes on only
    under the same."""
    names = ("temperature", "top_p", "max_new_tokens", "system_prompt", "seed", "dtype", "sampler", "batch_tokens")
    benchmarks = {
        t.name: {"samples": t.samples, "questions": len(t.questions), "digest": questions_digest(t.questions)}
        for t in tasks
    }
    settings = {name: getattr(config, name) for name in names}
    weights = kept.weights_digest(Path(subject.weights))
    return {"model": config.model, "weights": weights, **settings, "benchmarks": benchmarks}


def sum_up(folder: Path, ks: Sequence[int], generations: Sequence[Generation], about: dict[str, Any]) -> str:
    """Work out the figures, write results.json, and return the table."""
    figures = {}
    for name, group in by_benchmark(generations).items():
        fewest = min(len(g) for g in by_question(group).values())
        figures[name] = summarise(group, ks or [fewest])
    averages = {
        group: average([figures[name].accuracy for name in names])
        for group, names in GROUPS.items()
        if all(name in figures for name in names)
    }
    versions = {"python": platform.python_version()}
    versions.update({module.__name__: module.__version__ for module in (torch, transformers)})
    results = {
        **about,
        "benchmarks": {name: asdict(f) for name, f in figures.items()},
        "averages": {group: asdict(interval) for group, interval in averages.items()},
        "settings": kept.read_settings(folder),
        "versions": versions,
        "git_commit": kept.git_commit(),
    }
    write_text(folder / "results.json", json.dumps(results, indent=2) + "\n")
    files = f"results: {folder / 'results.json'}   responses: {folder / 'generations.jsonl'}"
    return f"\n{figures_table(figures, averages)}\n\n{files}"


def compare(config: EvalConfig, given: set[str], names: Sequence[str]) -> str:
    """Is B better than A? Each is a folder of generations, or a run or model, which is then evaluated first."""
    sides = []
    for name in names:
        if os.path.isfile(Path(name) / "generations.jsonl"):
            sides.append(list(kept.read_generations(Path(name)).values()))
        else:
            print(f"\n{name}")
            sides.append(evaluate_model(dataclasses.replace(config, model=name), given))
    return comparison_table(names, sides)


# ------------------------------------------------------------------------------ from what is already there


def kept_folder(config: EvalConfig) -> Path:
    """The folder that --regrade and --show work on. Raises InputError when it holds no generations, or when the model
    was trained on since."""
    folder = Path(config.out) if config.out else find_subject(config.model).out
    if not os.path.isfile(folder / "generations.jsonl"):
        raise InputError(f"folder {folder} holds no generations.jsonl; evaluate first, or name the folder with --out")
    weights = kept.read_settings(folder).get("weights")
    if not config.out and weights != kept.weights_digest(Path(find_subject(config.model).weights)):
        raise InputError(
            f"folder {folder} holds generations made with other weights; evaluate anew with --overwrite, "
            f"or name it with --out"
        )
    return folder


def regrade(config: EvalConfig) -> str:
    """Grade all generations anew, write them back, and sum up."""
    folder = kept_folder(config)
    generations = list(kept.read_generations(folder).values())
    changed = [g for g in tqdm(generations, desc="grading") if g.regrade()]
    kept.write_generations(folder, generations)
    lines = [
        f"{g.benchmark} {g.id} sample {g.sample}: now {'right' if g.correct else 'wrong'}, "
        f"answer {g.answer!r}, gold {g.gold!r}"
        for g in changed
    ]
    lines.append(f"{len(changed)} of {len(generations)} verdicts changed")
    about = {"model": kept.read_settings(folder).get("model"), "regraded": True}
    return visible("\n".join(lines)) + "\n" + sum_up(folder, config.ks, generations, about)


def show(config: EvalConfig) -> str:
    """The generations of one kind. What a model wrote cannot steer the terminal: control characters are spelled out."""
    kinds = {
        "wrong": lambda g: not g.correct,
        "right": lambda g: g.correct,
        "truncated": lambda g: g.truncated,
        "unparsable": lambda g: g.answer is None,
    }
    generations = list(kept.read_generations(kept_folder(config)).values())
    if config.bench:
        names = config.bench.split(",")
        generations = [g for g in generations if g.benchmark in names]
        if not generations:
            raise InputError(f"there are no generations of --bench {config.bench}; leave it out to see all")
    chosen = [g for g in generations if kinds[config.show](g)]
    pages = []
    for number, g in enumerate(chosen, start=1):
        cut_off = ", cut off at the limit" if g.truncated else ""
        pages.append(
            f"\n===== {number} of {len(chosen)} {config.show}: {g.benchmark} {g.id}, sample {g.sample} =====\n"
            f"{g.prompt}\n----- response, {g.tokens} tokens{cut_off}\n{g.response}\n-----\n{g.explain()}"
        )
    return visible("\n".join([*pages, f"\n{len(chosen)} of {len(generations)} responses are {config.show}"]))


# ------------------------------------------------------------------------------------- command line


def main(argv: list[str] | None = None) -> int:
    parser = CommandLine("eval.py", "Evaluate a language model on benchmarks.")
    parser.add_settings(EvalConfig, {})
    explained = "runs, models or folders of generations: is B better than A?"
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help=explained)
    try:
        given = vars(parser.parse_args(argv))
        names = given.pop("compare")
        config = EvalConfig(**given)
        if names and (config.model or config.out):
            raise InputError("--compare names both models itself and uses their own folders; drop --model and --out")
        if names:
            print(compare(config, set(given), names))
        elif config.show != "none":
            print(show(config))
        elif config.regrade:
            print(regrade(config))
        else:
            evaluate_model(config, set(given))
    except InputError as error:
        again = "; the same command goes on once it can" if isinstance(error, Unwritable) else ""
        print(f"eval.py: {error}{again}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # "| head" has read enough
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        print("\neval.py: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
