#!/usr/bin/env python
"""Measure a language model on the paper's benchmarks, with numbers that can be believed.

    python eval.py --model runs/toy-exgrpo-seed0                       a run, on its own held-out questions
    python eval.py --model Qwen2.5-Math-1.5B --bench math500,aime24    a hub model on benchmarks from the hub
    python eval.py --model runs/x --bench gsm8k --data gsm8k.jsonl     the same questions from a file
    python eval.py --compare runs/a runs/b                             is b better than a?
    python eval.py --model runs/x --show wrong                         why does it fail?

What happens, in order: load the questions, generate responses (streamed to generations.jsonl, so that the same
command goes on where an interrupted one stopped), grade them with the checker that gives training its reward, and
sum them up with 95 % intervals that take the question as the unit (results.json, and a table). The statistics are
in nano_exgrpo/evaluation/statistics.py, the benchmarks in nano_exgrpo/evaluation/benchmarks.py.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from nano_exgrpo.config import CommandLine, TrainConfig, recorded_config
from nano_exgrpo.errors import InputError
from nano_exgrpo.evaluation.benchmarks import BENCHMARKS, GROUPS, PLAIN, benchmark_names, load_benchmark
from nano_exgrpo.evaluation.evaluate import figures_table, generate_batches, plan_batches, summarise, table
from nano_exgrpo.evaluation.generations import (
    Generation,
    by_benchmark,
    by_question,
    git_commit,
    make_generation,
    open_folder,
    read_generations,
    weights_digest,
    write_generations,
)
from nano_exgrpo.evaluation.settings import EvalConfig
from nano_exgrpo.evaluation.statistics import average, paired_difference
from nano_exgrpo.infra.checkpoint import list_checkpoints
from nano_exgrpo.infra.files import append_lines, write_text
from nano_exgrpo.infra.loading import load_policy, read_config, resolve_device, resolve_model_name
from nano_exgrpo.infra.precision import resolve_dtypes
from nano_exgrpo.infra.session import load_data
from nano_exgrpo.policy import Policy, encode_questions
from nano_exgrpo.questions import Question, questions_digest


@dataclass
class Subject:
    """What is evaluated. weights: what `load_policy` loads. run: the settings of the run it came from, if any."""

    model: str
    weights: str
    run: TrainConfig | None
    out: Path


@dataclass
class Task:
    """One benchmark: its questions, and how many responses to each."""

    name: str
    questions: list[Question]
    samples: int


# ----------------------------------------------------------------------------------- the whole of it


def evaluate_model(config: EvalConfig, given: set[str]) -> tuple[Path, list[Generation]]:
    """Generate what is missing, grade, write results.json and print the table; (folder, generations).

    given: names of the settings that were asked for, which a run's own settings do not replace. Raises InputError.
    """
    subject = find_subject(config.model)
    config = with_run_defaults(config, given, subject)
    folder = Path(config.out) if config.out else subject.out

    # 1. Questions.
    tasks = load_tasks(config, subject)
    generations = open_folder(folder, record(config, subject, tasks), overwrite=config.overwrite)

    # 2. Responses, benchmark by benchmark, as far as they are not there yet.
    policy, started = None, time.perf_counter()
    for task in tasks:
        if any((task.name, q.id, s) not in generations for q in task.questions for s in range(task.samples)):
            policy = policy or load(config, subject)
            generate(policy, task, config, folder, generations)
    seconds = time.perf_counter() - started

    # 3. Figures.
    answered = [generations[task.name, q.id, s] for task in tasks for q in task.questions for s in range(task.samples)]
    print(report(folder, config, answered, {"model": config.model, "seconds": round(seconds, 1)}))
    return folder, answered


def load(config: EvalConfig, subject: Subject) -> Policy:
    device = resolve_device(config.device)
    if config.threads:
        torch.set_num_threads(config.threads)
    weights, autocast = find_dtypes(config, subject, device)
    return load_policy(
        subject.weights,
        device=device,
        dtype=weights,
        autocast=autocast,
        sampler=config.sampler,
        temperature=config.temperature,
    )


def find_dtypes(config: EvalConfig, subject: Subject, device: torch.device) -> tuple[torch.dtype, torch.dtype | None]:
    """(dtype of the weights, dtype of matrix products under autocast or None). With --dtype auto what is evaluated is
    the policy that was trained, and not a rounded one.

    Where bf16 is to be used, as by the run's training or, for other models, on a GPU that has it, weights stored in bf16
    stay so and those that a run trained in fp32 go under autocast. But LoRA's training never rounded W + (α/r) · B A to
    bf16, as autocast would now, and lose half of what was learned: for merged weights, and for other fp32 files, which
    may be such, products in fp32 come nearest."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype), None
    run = subject.run
    dtype, autocast = resolve_dtypes(run.dtype if run else "auto", "adamw", 0, device)
    if autocast is not None and (stored := stored_dtype(subject.weights)) in (torch.bfloat16, torch.float16):
        return stored, None
    return dtype, None if run is None or run.lora_rank else autocast


def stored_dtype(weights: str) -> torch.dtype | None:
    """The dtype that a model's configuration names; None where it names none."""
    return read_config(weights).dtype


def generate(
    policy: Policy, task: Task, config: EvalConfig, folder: Path, generations: dict[tuple[str, str, int], Generation]
) -> None:
    """Generate and grade what `generations` lacks of a task, adding to it and to generations.jsonl batch by batch."""
    asked = encode_questions(policy, task.questions, config.system_prompt)
    plan = plan_batches(
        policy, [q.prompt_ids for q in asked], task.samples,
        max_new_tokens=config.max_new_tokens, token_budget=config.batch_tokens,
    )  # fmt: skip
    room = policy.context - max(len(q.prompt_ids) for q in asked)
    if room < config.max_new_tokens:
        print(f"{task.name}: the longest prompt leaves {room} of {config.max_new_tokens} new tokens in the context")

    def keys(batch: Sequence[tuple[int, int]]) -> list[tuple[str, str, int]]:
        return [(task.name, asked[question].id, sample) for question, sample in batch]

    # A batch cut short by an interruption is generated anew and whole, or its responses would differ from those of
    # an evaluation that was not interrupted.
    pending = [batch for batch in plan if not all(key in generations for key in keys(batch))]
    torn = [key for batch in pending for key in keys(batch) if generations.pop(key, None)]
    if torn:
        write_generations(folder, generations.values())

    done = [g for g in generations.values() if g.benchmark == task.name]
    answered, correct, tokens = len(done), sum(g.correct for g in done), 0
    started = time.perf_counter()
    total = len(task.questions) * task.samples
    with tqdm(desc=task.name, total=total, initial=len(done), unit=" responses") as progress:
        for rows, trajectories in generate_batches(
            policy, asked, pending, top_p=config.top_p,
            max_new_tokens=config.max_new_tokens, seed=config.seed,
        ):  # fmt: skip
            fresh = [
                make_generation(task.name, task.questions[question], sample, trajectory)
                for (question, sample), trajectory in zip(rows, trajectories, strict=True)
            ]
            try:
                append_lines(folder / "generations.jsonl", map(dataclasses.asdict, fresh))
            except OSError as error:
                raise InputError(f"{folder} cannot be written: {error}; the same command goes on once it can") from None
            generations.update(zip(keys(rows), fresh, strict=True))
            correct += sum(g.correct for g in fresh)
            tokens += sum(g.tokens for g in fresh)
            answered += len(fresh)
            progress.update(len(fresh))
            progress.set_postfix(
                accuracy=f"{correct / answered:.3f}", tok_s=round(tokens / (time.perf_counter() - started))
            )


# ------------------------------------------------------------------------------- what to evaluate, on what


def find_subject(model: str) -> Subject:
    """A run folder, the model folder of a run or of one of its checkpoints, any other model folder, or a hub id.
    Raises InputError for a run that has saved no model yet, or only the frozen weights of LoRA."""
    if not model:
        raise InputError("name what to evaluate with --model: a run folder, a model folder or a hub id")
    if model == "toy":
        raise InputError(
            "the toy has no weights until it is trained: run train.py, then give its run folder to --model"
        )
    path = Path(model)
    run = run_settings(path)
    if run is not None:
        checkpoints = list_checkpoints(path)
        if (path / "model" / "config.json").is_file():
            return Subject(model, str(path / "model"), run, path / "eval")
        if checkpoints:
            refuse_frozen(run, checkpoints[-1] / "model")
            print(f"{model} is not finished: its last checkpoint, {checkpoints[-1].name}, is evaluated")
            return Subject(model, str(checkpoints[-1] / "model"), run, path / f"eval-{checkpoints[-1].name}")
        raise InputError(f"run {model} has saved no model yet; finish it with train.py --resume {model}")
    for parent in path.resolve().parents[:3] if path.is_dir() else ():  # <run>/model, <run>/checkpoints/step-…/model
        if (run := run_settings(parent)) is not None:
            refuse_frozen(run, path)
            step = path.resolve().parent.name if path.resolve().parent != parent else ""
            return Subject(model, model, run, parent / (f"eval-{step}" if step else "eval"))
    resolve_model_name(model)  # fails here rather than after a folder was made
    return Subject(model, model, None, Path("evals") / model.rstrip("/").split("/")[-1])


def refuse_frozen(run: TrainConfig, weights: Path) -> None:
    """Raises InputError for the model folder of a LoRA run's checkpoint, which has learned nothing: what has, the adapters,
    stands beside it in state.pt."""
    if run.lora_rank and (weights.parent / "state.pt").is_file():
        raise InputError(
            f"{weights} holds the frozen weights of a LoRA run; finish it with train.py --resume, then evaluate it"
        )


def run_settings(folder: Path) -> TrainConfig | None:
    """The settings of the training run in a folder; None if it holds none (a model's config.json is another thing).
    Raises InputError where a setting has the wrong type."""
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(settings, dict) or "algo" not in settings:
        return None
    return recorded_config(folder)


def with_run_defaults(config: EvalConfig, given: set[str], subject: Subject) -> EvalConfig:
    """A run is asked as it was trained, unless flags say otherwise."""
    if subject.run is None:
        return config
    own = {"system_prompt": subject.run.system_prompt, "max_new_tokens": subject.run.max_response_length}
    return dataclasses.replace(config, **{name: value for name, value in own.items() if name not in given})


def load_tasks(config: EvalConfig, subject: Subject) -> list[Task]:
    """The benchmarks asked for, each with its questions. Raises InputError."""
    data = Path(config.data) if config.data else None
    if config.bench == "held-out" or (not config.bench and not data and subject.run):
        names = ["held-out"]
    elif config.bench:
        names = benchmark_names(config.bench)
    elif data and data.is_file():
        names = [data.stem]
    else:
        what = (
            ""
            if Path(config.model).is_dir()
            else f"{config.model} is no folder here, and as a hub id it has no questions; "
        )
        raise InputError(f"{what}name the benchmarks with --bench, or a file of questions with --data")
    if data and not data.is_dir() and len(names) > 1:
        raise InputError(f"--data {data} is one file and cannot stand in for {len(names)} benchmarks; give a folder")
    tasks = []
    for name in names:
        if name == "held-out" or (name == "toy" and not data and subject.run and not subject.run.data):
            if subject.run is None:
                raise InputError(
                    f"only a run has held-out questions, and {config.model} is none; name benchmarks with --bench"
                )
            name, (_, questions) = "held-out" if subject.run.data else "toy", load_data(subject.run)
        else:
            source = str(data / f"{name}.jsonl") if data and data.is_dir() else config.data
            shuffle_seed = config.seed if config.shuffle_options else None
            questions = load_benchmark(name, data=source, shuffle_seed=shuffle_seed)
            size = BENCHMARKS.get(name, PLAIN).size
            if not source and len(questions) != size:
                print(f"{name}: {len(questions)} questions came from the hub, {size} are expected", file=sys.stderr)
        if config.limit and config.limit < len(questions):
            kept = sorted(random.Random(config.seed).sample(range(len(questions)), config.limit))
            questions = [questions[i] for i in kept]
        samples = 1 if config.temperature == 0 else config.samples or BENCHMARKS.get(name, PLAIN).samples
        tasks.append(Task(name, questions, samples))
    return tasks


# --------------------------------------------------------------------------------------- what is kept


def record(config: EvalConfig, subject: Subject, tasks: Sequence[Task]) -> dict[str, Any]:
    """All that decides what is generated (but the device, which rounds its sums in its own way): a folder goes on only under
    the same."""
    names = ("temperature", "top_p", "max_new_tokens", "system_prompt", "seed", "dtype", "sampler", "batch_tokens")
    return {
        "model": config.model,
        "weights": weights_digest(Path(subject.weights)),
        **{name: getattr(config, name) for name in names},
        "benchmarks": {
            task.name: {
                "samples": task.samples,
                "questions": len(task.questions),
                "digest": questions_digest(task.questions),
            }
            for task in tasks
        },
    }


def report(folder: Path, config: EvalConfig, generations: Sequence[Generation], about: dict[str, Any]) -> str:
    """Sum up, write results.json, and return the table."""
    figures = {}
    for name, group in by_benchmark(generations).items():
        fewest = min(len(g) for g in by_question(group).values())
        figures[name] = summarise(group, [int(k) for k in config.k.split(",")] if config.k else [fewest])
    averages = {
        group: average([figures[name].accuracy for name in names])
        for group, names in GROUPS.items()
        if all(name in figures for name in names)
    }
    results = {
        **about,
        "benchmarks": {name: dataclasses.asdict(f) for name, f in figures.items()},
        "averages": {group: dataclasses.asdict(interval) for group, interval in averages.items()},
        "settings": held_settings(folder),
        "seed": config.seed,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "git_commit": git_commit(),
    }
    write_text(folder / "results.json", json.dumps(results, indent=2) + "\n")
    files = f"results: {folder / 'results.json'}   responses: {folder / 'generations.jsonl'}"
    return f"\n{figures_table(figures, averages)}\n\n{files}"


# ----------------------------------------------------------------------------------------- comparing


def compare(config: EvalConfig, given: set[str], sides: Sequence[str]) -> str:
    """Is B better than A? Each side is a folder of generations, or a run or model, which is then evaluated first.
    Raises InputError when the two did not answer the same questions."""
    found = []
    for side in sides:
        if (Path(side) / "generations.jsonl").is_file():
            found.append(list(read_generations(Path(side)).values()))
        else:
            print(f"\n{side}")
            found.append(evaluate_model(dataclasses.replace(config, model=side, out=""), given)[1])
    a, b = (by_benchmark(generations) for generations in found)
    names = [name for name in a if name in b]
    if not names:
        raise InputError(f"{sides[0]} and {sides[1]} have no benchmark in common ({', '.join(a)}; {', '.join(b)})")
    rows, intervals = [["benchmark", "questions", "A", "B", "B - A [95 %]", "p", "B better", "worse", "same"]], []
    for name in names:
        left, right = by_question(a[name]), by_question(b[name])
        if {i: (g[0].prompt, g[0].gold) for i, g in left.items()} != {
            i: (g[0].prompt, g[0].gold) for i, g in right.items()
        }:
            raise InputError(
                f"{sides[0]} and {sides[1]} answered different questions on {name}; evaluate both on the same"
            )
        verdicts = [[[float(g.correct) for g in side[id]] for id in left] for side in (left, right)]
        result = paired_difference(*verdicts)
        accuracies = [f"{sum(sum(v) / len(v) for v in side) / len(side):.3f}" for side in verdicts]
        d = result.difference
        difference = f"{d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"
        counts = map(str, (result.wins, result.losses, result.ties))
        rows.append([name, str(len(left)), *accuracies, difference, f"{result.p:.2g}", *counts])
        intervals.append(d)
    if len(names) > 1:
        d = average(intervals)
        rows.append(["average", "", "", "", f"{d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}]", "", "", "", ""])
    else:
        d = intervals[0]
    verdict = "B is better than A" if d.low > 0 else "A is better than B" if d.high < 0 else "no difference is shown"
    legend = "p: two-sided exact sign-flip test by question (single samples: McNemar's)"
    return f"\nA  {sides[0]}\nB  {sides[1]}\n\n{table(rows)}\n\n{verdict} (95 % interval of B - A). {legend}"


# ------------------------------------------------------------------------------ from what is already there


def kept_folder(config: EvalConfig) -> Path:
    """The folder that --regrade and --show work on. Raises InputError when it holds no generations, or when the model was
    trained on since."""
    subject = None if config.out else find_subject(config.model)
    folder = subject.out if subject else Path(config.out)
    if not (folder / "generations.jsonl").is_file():
        raise InputError(f"folder {folder} holds no generations.jsonl; evaluate first, or name the folder with --out")
    if subject and held_settings(folder).get("weights") != weights_digest(Path(subject.weights)):
        raise InputError(
            f"folder {folder} holds generations made with other weights; evaluate anew with --overwrite, or name it with --out"
        )
    return folder


def held_settings(folder: Path) -> dict[str, Any]:
    """What a folder's generations were made with. Raises InputError where it does not say."""
    try:
        return json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"folder {folder} has no readable settings.json ({error}); evaluate anew with --overwrite"
        ) from None


def regrade(config: EvalConfig) -> str:
    """Grade all generations anew, write them back, and sum up."""
    folder = kept_folder(config)
    generations = list(read_generations(folder).values())
    changed = [g for g in tqdm(generations, desc="grading") if g.regrade()]
    write_generations(folder, generations)
    lines = [
        f"{g.benchmark} {g.id} sample {g.sample}: now {'right' if g.correct else 'wrong'}, "
        f"answer {g.answer!r}, gold {g.gold!r}"
        for g in changed
    ]
    settings = held_settings(folder)
    config = dataclasses.replace(config, seed=settings["seed"])
    lines.append(f"{len(changed)} of {len(generations)} verdicts changed")
    return "\n".join(lines) + "\n" + report(folder, config, generations, {"model": settings["model"], "regraded": True})


def show(config: EvalConfig) -> None:
    """Page through the generations of one kind; waits for Enter on a terminal."""
    kinds = {
        "wrong": lambda g: not g.correct,
        "right": lambda g: g.correct,
        "truncated": lambda g: g.truncated,
        "unparsable": lambda g: g.answer is None,
    }
    generations = list(read_generations(kept_folder(config)).values())
    if config.bench:
        generations = [g for g in generations if g.benchmark in config.bench.split(",")]
    chosen = [g for g in generations if kinds[config.show](g)]
    for number, g in enumerate(chosen, start=1):
        print(f"\n===== {number} of {len(chosen)} {config.show}: {g.benchmark} {g.id}, sample {g.sample} =====")
        cut_off = ", cut off at the limit" if g.truncated else ""
        print(f"{g.prompt}\n----- response, {g.tokens} tokens{cut_off}\n{g.response}\n-----\n{g.explain()}")
        on_terminal = sys.stdin.isatty() and sys.stdout.isatty() and number < len(chosen)
        if on_terminal and input("Enter for the next, q to stop: ").strip().lower() == "q":
            return
    print(f"\n{len(chosen)} of {len(generations)} responses are {config.show}")


# ------------------------------------------------------------------------------------- command line


def parse(argv: list[str] | None) -> tuple[EvalConfig, set[str], list[str] | None]:
    """(settings, names of those given as flags, the two sides of --compare). Raises InputError."""
    parser = CommandLine("eval.py", "Evaluate a language model on benchmarks.")
    parser.add_settings(EvalConfig, {})
    parser.add_argument(
        "--compare", nargs=2, metavar=("A", "B"), help="runs, models or folders of generations: is B better than A?"
    )
    given = vars(parser.parse_args(argv))
    sides = given.pop("compare")
    config = EvalConfig(**given)
    if not all(k.strip().isdigit() and int(k) > 0 for k in config.k.split(",")) and config.k:
        raise InputError(f"--k must be whole numbers separated by commas, got {config.k}")
    if sides and (config.model or config.out):
        raise InputError("--compare names both models itself and writes to their own folders; drop --model and --out")
    return config, set(given), sides


def main(argv: list[str] | None = None) -> int:
    try:
        config, given, sides = parse(argv)
        if sides:
            print(compare(config, given, sides))
        elif config.show:
            show(config)
        elif config.regrade:
            print(regrade(config))
        else:
            evaluate_model(config, given)
    except InputError as error:
        print(f"eval.py: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # "| head" has read enough
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        print("\neval.py: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
