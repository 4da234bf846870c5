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
the same questions, so they are compared in pairs. Runs lie in OUT/runs/<setting>-<arm>-seed<n>. A finished run with
the same configuration is kept, so a study that was interrupted goes on, and studies share runs. Table and figure
are written to OUT/<study>.md and OUT/<study>.png.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while importing ends without a traceback

import argparse
import contextlib
import multiprocessing
import os
import re
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nano_exgrpo.config import CommandLine, TrainConfig, resolve
from nano_exgrpo.errors import InputError
from nano_exgrpo.evaluation.study_report import plot_study, read_curve, report_samples, study_table
from nano_exgrpo.infra.files import read_json, read_rows, write_text
from nano_exgrpo.infra.run_folder import sole_writer

Changes = dict[str, Any]  # of train.py's settings
Study = dict[str, dict[str, Changes]]  # question setting → arm → what makes the run

# train.py's preset `hard`, but with every question within reach; a setting below says which are not.
BASE: Changes = dict(preset="hard", out_of_reach=0.0, log_samples=0, sampler="loop")
# Question sets. Held-out questions are always within reach and rightly labelled.
SETTINGS: dict[str, Changes] = {
    "clean": {},
    "hard": dict(out_of_reach=0.98),  # as for a weak policy on a hard data set: one question in fifty teaches anything
    "harder": dict(out_of_reach=0.99),
    "noisy": dict(wrong_answers=0.8),
    "weak": dict(toy_reasoning=0.05),  # a policy that seldom reasons
}
GRPO: Changes = dict(algo="grpo")
EXGRPO: Changes = dict(algo="exgrpo")
ARMS = {"grpo": GRPO, "exgrpo": EXGRPO}
TRIED = {f"{arm}, lr {lr:g}": {**algo, "lr": lr} for lr in (2.5e-5, 5e-5, 1e-4, 2e-4) for arm, algo in ARMS.items()}
# setting → the best learning rate of each arm, by their accuracy at the end in `tuning`.
BEST = {
    "clean": dict(grpo=1e-4, exgrpo=1e-4),
    "hard": dict(grpo=5e-5, exgrpo=5e-5),
    "harder": dict(grpo=1e-4, exgrpo=2.5e-5),
    "noisy": dict(grpo=5e-5, exgrpo=2.5e-5),
    "weak": dict(grpo=2e-4, exgrpo=2e-4),
}
ABLATED: dict[str, Changes] = {
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
LEVELS = {level: {**GRPO, "difficulty": level} for level in ("all", "hard", "medium", "easy")}
# How often the warmed-up policy reasons × how many of the questions are out of reach; then fewer questions.
REGIMES = {
    f"reasons {reasoning:g}, {count} questions, {far:g} out of reach": dict(
        toy_reasoning=reasoning, toy_questions=count, out_of_reach=far
    )
    for reasoning, count in ((0.05, 1500), (0.2, 1500), (0.4, 1500), (0.2, 300))
    for far in (0.0, 0.9, 0.98)
}


def grid(settings: dict[str, Changes], arms: dict[str, Changes]) -> Study:
    return {name: {arm: {**BASE, **changes, **own} for arm, own in arms.items()} for name, changes in settings.items()}


STUDIES: dict[str, Study] = {
    "default": {"train.py's default": ARMS},
    "tuning": grid(SETTINGS, TRIED),
    "compare": {
        name: {arm: {**run, "lr": BEST[name][arm]} for arm, run in arms.items()}
        for name, arms in grid(SETTINGS, ARMS).items()
    },
    "ablations": grid({"hard": SETTINGS["hard"]}, ABLATED),
    "regimes": grid(REGIMES, ARMS),
    "difficulty": grid({"clean": SETTINGS["clean"]}, LEVELS),
    "preliminary": grid({f"{s}, all samples": {**SETTINGS[s], "log_samples": -1} for s in ("clean", "hard")}, ARMS),
}
# The arm that the others of its setting are compared with.
BASELINES = {**dict.fromkeys(STUDIES, "grpo"), "tuning": "grpo, lr 5e-05", "ablations": "exgrpo", "difficulty": "all"}


# ------------------------------------------------------------------------------------------------ running


def plan(study: Study, seed: int, changes: Changes, out: Path) -> list[TrainConfig]:
    """Every run with this seed, which one worker does in turn, so that a warmed-up policy is made once: all lie side by
    side and share its cache. `changes` win over the study's own settings. Raises InputError on a bad value."""
    folder = lambda *name: str(out / "runs" / re.sub(r"[^\w.]+", "-", " ".join(name)))  # noqa: E731
    return [
        resolve({**own, **changes, "seed": seed, "run": folder(setting, arm, f"seed{seed}")})
        for setting, arms in study.items()
        for arm, own in arms.items()
    ]


def is_finished(config: TrainConfig) -> bool:
    """Whether this very run is there: the same configuration, and its last step logged. A setting that is newer than
    the run counts as having had its default."""
    with contextlib.suppress(InputError):
        defaults = {setting.name: setting.default for setting in fields(TrainConfig)}
        recorded = {**defaults, **read_json(Path(config.run) / "config.json", "run"), "overwrite": False}
        steps = [row.get("step") for row in read_rows(Path(config.run) / "metrics.jsonl")]
        return recorded == {**asdict(config), "overwrite": False} and steps[-1:] == [config.steps]
    return False


def run_job(configs: Sequence[TrainConfig]) -> None:
    """Do what is not done yet, one after the other, in a worker process. Raises InputError."""
    from train import train  # not at the top: the command line answers before torch is loaded

    for config in configs:
        if is_finished(config):
            continue
        config.overwrite = True  # an unfinished run, or one with other settings
        try:
            with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
                with sole_writer(Path(config.run)):
                    train(config)
        except InputError as error:  # its advice names train.py's flags
            raise InputError(f"{config.run}: {error}".replace("with --run", "with --out")) from None


def start_worker() -> None:
    """A worker ends with study.py: where that is killed, it would train on, and then wait for ever."""
    parent: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def run_all(jobs: Sequence[Sequence[TrainConfig]], workers: int) -> None:
    """Do the jobs, `workers` at a time. Raises InputError."""
    open_jobs = [job for job in jobs if not all(map(is_finished, job))]
    count = sum(not is_finished(config) for job in open_jobs for config in job)
    print(f"{sum(map(len, jobs))} runs, {count} to do, {workers} seeds at a time", flush=True)
    os.environ.update(OMP_NUM_THREADS="1", TQDM_DISABLE="1")  # of the workers
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=start_worker) as pool:
        run = pool.map if workers > 1 else map  # one worker is this process
        for _ in tqdm(run(run_job, open_jobs), total=len(open_jobs), unit=" seeds"):
            pass


# -------------------------------------------------------------------------------------------- command line


def parse_changes(texts: Sequence[str]) -> Changes:
    """NAME=VALUE texts as settings of train.py, read as its own flags are. Raises InputError."""
    flags = []
    for text in texts:
        name, separator, value = text.partition("=")
        name = name.strip().replace("_", "-")
        if not separator or name in ("run", "seed", "resume", "overwrite"):
            raise InputError(f"--set {text}: give NAME=VALUE with a setting of train.py that is not the study's own")
        flags.append({"true": f"--{name}", "false": f"--no-{name}"}.get(value.lower(), f"--{name}={value}"))
    parser = CommandLine("train.py", "")
    parser.add_settings(TrainConfig, {})
    return vars(parser.parse_args(flags))


def pick(everything: dict[str, Any], wanted: str | None, option: str) -> dict[str, Any]:
    names = [name.strip() for name in wanted.split(";")] if wanted else list(everything)
    for name in names:
        if name not in everything:
            raise InputError(f"{option} has no {name!r}; there are: {', '.join(everything)}")
    return {name: everything[name] for name in everything if name in names}


def run_study(options: argparse.Namespace) -> None:
    baseline, changes = BASELINES[options.study], parse_changes(options.set)
    wanted = options.arms and f"{options.arms};{baseline}"
    settings = pick(STUDIES[options.study], options.settings, "--settings")
    study = {setting: pick(arms, wanted, "--arms") for setting, arms in settings.items()}
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    jobs = [plan(study, seed, changes, options.out) for seed in seeds]
    run_all(jobs, options.workers)
    columns = iter(zip(*jobs))  # in plan's order of settings and arms
    runs = {name: {arm: [Path(c.run) for c in next(columns)] for arm in arms} for name, arms in study.items()}
    target = options.out / options.study
    if options.study == "preliminary":
        text = report_samples(runs, target.with_suffix(".png"))
    else:
        curves = {name: {arm: list(map(read_curve, own)) for arm, own in arms.items()} for name, arms in runs.items()}
        text = study_table(curves, baseline)
        plot_study(curves, target.with_suffix(".png"))
    write_text(target.with_suffix(".md"), text)
    print(f"\n{text}\n{target}.md, {target}.png")


def main(argv: list[str] | None = None) -> int:
    parser = CommandLine("study.py", __doc__)
    parser.usage, parser.formatter_class = None, argparse.RawDescriptionHelpFormatter
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--seeds", type=int, default=8, help="number of seeds (default 8)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them (default 0)")
    parser.add_argument("--arms", help="only these arms, separated by semicolons (the baseline always runs)")
    parser.add_argument("--settings", help="only these question settings, separated by semicolons")
    changed: dict[str, Any] = dict(action="append", default=[], dest="set")
    parser.add_argument("--set", **changed, metavar="NAME=VALUE", help="a training setting, for every run")
    parser.add_argument("--steps", **changed, type="steps={}".format, help="the same as --set steps=STEPS")
    parser.add_argument("--workers", type=int, default=2, help="seeds at a time (default 2)")
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="folder for runs, tables and figures")
    try:
        options = parser.parse_args(argv)
        if not (1 <= options.seeds <= 10_000 and 1 <= options.workers <= 64):
            raise InputError("--seeds must be between 1 and 10000, --workers between 1 and 64")
        run_study(options)
    except InputError as error:
        print(f"study.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstudy.py: stopped; the same command goes on with what is left", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
