#!/usr/bin/env python
"""Does experience help? The paper's studies on the toy, over seeds, with paired statistics.

    python study.py default                     train.py as it is, with and without replay, over seeds
    python study.py tuning --first-seed 200     the learning rates tried, for both alike, on seeds of their own
    python study.py compare                     GRPO against ExGRPO, each at its best learning rate
    python study.py ablations                   one part of the method changed at a time
    python study.py regimes                     where replay helps, where it does not, where it hurts
    python study.py difficulty                  which questions teach: learning from hard, medium or easy ones alone
    python study.py preliminary                 entropy of right and wrong reasoning; the buffer over time
    python study.py compare --seeds 2 --steps 20       a short look; --set NAME=VALUE changes any training setting

A study is a grid: question settings × arms × seeds. The arms of one seed start from the same warmed-up policy and
the same questions, so they are compared in pairs. Runs lie in OUT/runs/<setting>-<arm>-seed<n>; a finished run with
the same configuration is kept, so a study that was interrupted goes on, and studies share runs. Table and figure
are written to OUT/<study>.md and OUT/<study>.png.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from nano_exgrpo.config import PRESETS, TrainConfig, resolve
from nano_exgrpo.errors import InputError
from nano_exgrpo.evaluation.study_report import plot_study, read_curve, report_samples, table
from nano_exgrpo.infra.files import read_json, write_text
from nano_exgrpo.infra.run_folder import read_lines, sole_writer

# train.py's preset `hard`, but with every question within reach; a setting below says which are not.
BASE: dict[str, Any] = {**PRESETS["hard"], "out_of_reach": 0.0, "log_samples": 0, "sampler": "loop"}

# Question sets. Held-out questions are always within reach and rightly labelled.
SETTINGS: dict[str, dict[str, Any]] = {
    "clean": {},
    "hard": dict(out_of_reach=0.98),  # as for a weak policy on a hard data set: one question in fifty teaches anything
    "harder": dict(out_of_reach=0.99),
    "noisy": dict(wrong_answers=0.8),
    "weak": dict(toy_reasoning=0.05),  # a policy that seldom reasons
}
GRPO: dict[str, Any] = dict(algo="grpo")
EXGRPO: dict[str, Any] = dict(algo="exgrpo")
ARMS = {"grpo": GRPO, "exgrpo": EXGRPO}
RATES = (2.5e-5, 5e-5, 1e-4, 2e-4)
# setting → the best learning rate of GRPO and of ExGRPO, by their accuracy at the end in `tuning`.
BEST = {
    "clean": (1e-4, 1e-4),
    "hard": (5e-5, 5e-5),
    "harder": (1e-4, 2.5e-5),
    "noisy": (5e-5, 2.5e-5),
    "weak": (2e-4, 2e-4),
}
ABLATED: dict[str, dict[str, Any]] = {
    "exgrpo": EXGRPO,
    "grpo": GRPO,
    "question again, no trajectory": dict(trajectory_choice="none"),
    "retirement only": dict(replay_ratio=0.0),
    "no retirement": dict(retire=False),
    "uniform question draw": dict(question_draw="uniform"),
    "highest entropy": dict(trajectory_choice="highest"),
    "random trajectory": dict(trajectory_choice="random"),
    "no shaping": dict(shaping=False),
    "no importance correction": dict(importance_correction=False),
    "beta 1": dict(beta=1.0),
    "rho 0.25": dict(replay_ratio=0.25),
    "rho 0.75": dict(replay_ratio=0.75),
    "delayed start": dict(start_threshold=0.35),
}


def grid(settings: dict[str, dict[str, Any]], arms: dict[str, dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """setting → arm → the changes of both together."""
    return {setting: {arm: {**changes, **own} for arm, own in arms.items()} for setting, changes in settings.items()}


@dataclass(frozen=True)
class Study:
    """cells: setting → arm → changes to BASE, every one run with every seed. baseline: the arm that the others of its
    setting are compared with."""

    cells: dict[str, dict[str, dict[str, Any]]]
    baseline: str


def tuning() -> dict[str, dict[str, dict[str, Any]]]:
    return grid(SETTINGS, {f"{arm}, lr {lr:g}": {**algo, "lr": lr} for lr in RATES for arm, algo in ARMS.items()})


def compare() -> dict[str, dict[str, dict[str, Any]]]:
    return {
        setting: {arm: {**changes, **algo, "lr": lr} for (arm, algo), lr in zip(ARMS.items(), BEST[setting])}
        for setting, changes in SETTINGS.items()
    }


def regimes() -> dict[str, dict[str, dict[str, Any]]]:
    """How often the warmed-up policy reasons × how many of the questions are out of reach; then fewer questions."""
    cells = [(reasoning, 1500, far) for reasoning in (0.05, 0.2, 0.4) for far in (0.0, 0.9, 0.98)]
    cells += [(0.2, 300, far) for far in (0.0, 0.9, 0.98)]
    settings = {
        f"reasons {reasoning:g}, {count} questions, {far:g} out of reach": dict(
            toy_reasoning=reasoning, toy_questions=count, out_of_reach=far
        )
        for reasoning, count, far in cells
    }
    return grid(settings, ARMS)


STUDIES: dict[str, Study] = {
    "default": Study(
        grid({"train.py's default": {**{name: getattr(TrainConfig, name) for name in BASE}, **PRESETS["toy"]}}, ARMS),
        "grpo",
    ),
    "tuning": Study(tuning(), "grpo, lr 5e-05"),
    "compare": Study(compare(), "grpo"),
    "ablations": Study(grid({"hard": SETTINGS["hard"]}, ABLATED), "exgrpo"),
    "regimes": Study(regimes(), "grpo"),
    "difficulty": Study(
        grid(
            {"clean": SETTINGS["clean"]},
            {difficulty: {**GRPO, "difficulty": difficulty} for difficulty in ("all", "hard", "medium", "easy")},
        ),
        "all",
    ),
    "preliminary": Study(
        grid({f"{name}, all samples": {**SETTINGS[name], "log_samples": -1} for name in ("clean", "hard")}, ARMS),
        "grpo",
    ),
}


# ------------------------------------------------------------------------------------------------ running


def plan(study: Study, seeds: Sequence[int], changes: dict[str, Any], out: Path) -> list[list[TrainConfig]]:
    """Every run of the study: one list for each seed, which one worker does in turn, so that a warmed-up policy is made
    once. `changes` win over the study's own settings. Raises InputError on a bad value."""
    return [
        [
            resolve({**BASE, **own, **changes, "seed": seed, "run": str(folder(out, setting, arm, seed))})
            for setting, arms in study.cells.items()
            for arm, own in arms.items()
        ]
        for seed in seeds
    ]


def folder(out: Path, setting: str, arm: str, seed: int) -> Path:
    """All runs side by side: they share the cache of warmed-up policies."""
    return out / "runs" / re.sub(r"[^\w.]+", "-", f"{setting} {arm} seed{seed}")


def is_finished(config: TrainConfig) -> bool:
    """Whether this very run is there: the same configuration, and its last step logged. A setting that is newer than
    the run counts as having had its default."""
    run = Path(config.run)
    with contextlib.suppress(InputError):
        recorded = {
            **{field.name: field.default for field in fields(TrainConfig)},
            **read_json(run / "config.json", str(run)),
            "overwrite": False,
        }
        rows = read_lines(run / "metrics.jsonl")
        return recorded == {**asdict(config), "overwrite": False} and bool(rows) and rows[-1]["step"] == config.steps
    return False


def run_job(configs: Sequence[TrainConfig]) -> list[str]:
    """In a worker process: do what is not done yet, one after the other. Returns the folders that it filled."""
    from train import train  # not at the top: the command line answers before torch is loaded

    done = []
    for config in configs:
        if is_finished(config):
            continue
        config.overwrite = True  # an unfinished run, or one with other settings
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            with sole_writer(Path(config.run)):
                train(config)
        done.append(config.run)
    return done


def run_all(jobs: Sequence[Sequence[TrainConfig]], workers: int) -> None:
    """Do the jobs, `workers` at a time, each in a process of its own; one worker is this process."""
    open_jobs = [job for job in jobs if not all(map(is_finished, job))]
    count = sum(not is_finished(config) for job in open_jobs for config in job)
    print(f"{sum(map(len, jobs))} runs, {count} to do, {workers} at a time")
    if not open_jobs:
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    started, done = time.perf_counter(), 0

    def report(filled: Sequence[str]) -> None:
        nonlocal done
        done += len(filled)
        print(f"{done} of {count} runs after {time.perf_counter() - started:.0f} s", flush=True)

    if workers == 1:
        for job in open_jobs:
            report(run_job(job))
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(run_job, job) for job in open_jobs]
        try:
            for future in as_completed(futures):
                report(future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def runs_of(study: Study, jobs: Sequence[Sequence[TrainConfig]]) -> dict[str, dict[str, list[Path]]]:
    """setting → arm → its run folders, in the order of the seeds."""
    columns = iter(zip(*jobs))  # in plan's order of settings and arms
    return {
        setting: {arm: [Path(config.run) for config in next(columns)] for arm in arms}
        for setting, arms in study.cells.items()
    }


# -------------------------------------------------------------------------------------------- command line


def parse_changes(texts: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE texts as settings of TrainConfig. Raises InputError for an unknown name or a bad value."""
    defaults = {field.name: field.default for field in fields(TrainConfig)}
    changes = {}
    for text in texts:
        name, separator, value = text.partition("=")
        name = name.replace("-", "_")
        if not separator or name not in defaults or name in ("run", "seed", "resume", "overwrite"):
            raise InputError(f"--set {text}: give NAME=VALUE with a setting of train.py (python train.py --help)")
        kind = type(defaults[name])
        try:
            changes[name] = {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)
        except (ValueError, KeyError):
            raise InputError(
                f"--set {text}: {name} takes {'true or false' if kind is bool else kind.__name__}, got {value!r}"
            ) from None
    return changes


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "study.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--seeds", type=int, default=8, help="number of seeds (default 8)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them (default 0)")
    parser.add_argument("--steps", type=int, help="training steps of every run (default: the study's)")
    parser.add_argument("--arms", help="only these arms, separated by semicolons (the baseline always runs)")
    parser.add_argument("--settings", help="only these question settings, separated by semicolons")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a training setting, for every run"
    )
    parser.add_argument("--workers", type=int, default=2, help="runs at a time (default 2)")
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="folder for runs, tables and figures")
    options = parser.parse_args(argv)
    try:
        run_study(options)
    except InputError as error:
        print(f"study.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstudy.py: stopped; the same command goes on with what is left", file=sys.stderr)
        return 130
    return 0


def pick(everything: dict[str, Any], wanted: str | None, separator: str, option: str) -> dict[str, Any]:
    names = [name.strip() for name in wanted.split(separator)] if wanted else list(everything)
    for name in names:
        if name not in everything:
            raise InputError(f"{option} has no {name!r}; there are: {', '.join(everything)}")
    return {name: everything[name] for name in everything if name in names}


def run_study(options: argparse.Namespace) -> None:
    study = STUDIES[options.study]
    settings = pick(study.cells, options.settings, ";", "--settings")
    wanted = options.arms and f"{options.arms};{study.baseline}"
    study = Study({setting: pick(arms, wanted, ";", "--arms") for setting, arms in settings.items()}, study.baseline)
    if options.seeds < 1 or options.workers < 1:
        raise InputError("--seeds and --workers must be at least 1")
    changes = parse_changes(options.set)
    if options.steps is not None:
        changes["steps"] = options.steps
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    jobs = plan(study, seeds, changes, options.out)
    run_all(jobs, options.workers)
    runs, target = runs_of(study, jobs), options.out / options.study
    if options.study == "preliminary":
        text = report_samples(runs, target.with_suffix(".png"))
    else:
        curves = {
            setting: {arm: [read_curve(run) for run in own] for arm, own in arms.items()}
            for setting, arms in runs.items()
        }
        text = table(curves, study.baseline)
        plot_study(curves, target.with_suffix(".png"))
    write_text(target.with_suffix(".md"), text)
    print(f"\n{text}\n{target}.md, {target}.png")


if __name__ == "__main__":
    sys.exit(main())
