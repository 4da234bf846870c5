"""A run that is stopped, killed or resumed ends where one that was left alone ends, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, files_of, flags_of, in_step, metrics, tiny_config

import train
from nano_exgrpo.infra import prepare, session
from nano_exgrpo.infra.loading import load_policy
from nano_exgrpo.infra.run_folder import read_lines
from nano_exgrpo.infra.stop import StopRequest

VOLATILE = ("tokens_per_second",)


def stable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/") and k not in VOLATILE} for row in rows]


def assert_equal(a: Any, b: Any, where: str = "") -> None:
    """Bit for bit, tensors and containers alike."""
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            assert_equal(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b)):
            assert_equal(x, y, f"{where}[{i}]")
    else:
        assert a == b or (a != a and b != b), where  # NaN equals NaN here


def assert_same_end(one: Path, other: Path) -> None:
    from safetensors.torch import load_file

    first, second = (sorted((run / "checkpoints").iterdir())[-1] for run in (one, other))
    assert first.name == second.name
    for a, b in ((first, second), (one, other)):  # the checkpoint's weights and those of the end
        assert_equal(*(load_file(folder / "model" / "model.safetensors") for folder in (a, b)), "weights")
    state, twin = (torch.load(f / "state.pt", weights_only=True) for f in (first, second))
    known = "optimizer adapter questions sampler buffer random step started bad_steps tokens_seen".split()
    assert set(known) <= set(state)
    assert_equal(state, twin)
    assert stable(read_lines(one / "metrics.jsonl")) == stable(read_lines(other / "metrics.jsonl"))
    assert (one / "samples.jsonl").read_text() == (other / "samples.jsonl").read_text()


@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(
            updates_per_step=2, trajectory_choice="random", question_draw="uniform", entropy_coef=0.01,
            max_per_question=2,
        ),
        dict(algo="grpo", normalize_std=True),
    ],
    ids=["exgrpo", "random choices", "grpo"],
)  # fmt: skip
def test_four_steps_are_two_a_resume_and_two(tiny, tmp_path, settings):
    common = dict(save_every=2, eval_every=2, log_samples=-1, lr=1e-2, start_threshold=-1.0, **settings)
    whole = tiny_config(tmp_path / "whole", steps=4, **common)
    train.train(whole)
    half = tiny_config(tmp_path / "half", steps=2, **common)
    train.train(half)
    torch.manual_seed(999)  # what the process did in between must not matter
    torch.rand(5)
    assert train.main(["--resume", half.run, "--steps", "4"]) == 0
    assert_same_end(Path(whole.run), Path(half.run))
    rows = metrics(whole)
    if whole.algo == "exgrpo":
        assert rows[4]["replay/questions"] == 2 and rows[4]["buffer/trajectories"] > 4
    config = json.loads((Path(half.run) / "config.json").read_text())
    assert config["steps"] == 4 and config["resume"] == ""


def test_a_crash_after_the_checkpoint_is_forgotten(tiny, monkeypatch, tmp_path, capsys):
    """The process dies in step 4, after step 3 was logged but not saved, in the middle of a line: the run goes on
    from step 2 and equals one that was never interrupted."""
    common = dict(save_every=2, eval_every=1, log_samples=2, lr=1e-2, start_threshold=-1.0)
    whole, broken = (tiny_config(tmp_path / name, steps=4, **common) for name in ("whole", "broken"))
    train.train(whole)

    class Crash(Exception):
        pass

    def crash(state: session.State) -> None:
        raise Crash

    with monkeypatch.context() as patch, pytest.raises(Crash):
        in_step(patch, 4, crash)
        train.train(broken)
    with (Path(broken.run) / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    assert [row["step"] for row in metrics(broken)] == [0, 1, 2, 3]
    capsys.readouterr()
    assert train.main(["--resume", broken.run]) == 0
    sentence = "the last checkpoint is of step 2: what came after it, up to step 3, is done again"
    assert sentence in capsys.readouterr().out
    assert_same_end(Path(whole.run), Path(broken.run))


def test_same_seed_same_run_and_watching_changes_nothing(tiny, tmp_path):
    """More evaluations, more samples logged, more checkpoints: the same training, to the bit."""
    common = dict(steps=3, lr=1e-2, start_threshold=-1.0)
    first = tiny_config(tmp_path / "a", **common)
    watched = tiny_config(tmp_path / "b", eval_every=1, log_samples=-1, save_every=1, **common)
    other = tiny_config(tmp_path / "c", seed=1, **common)
    for config in (first, watched, other):
        train.train(config)
    rows = [
        [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in stable(metrics(config))[1:]]
        for config in (first, watched, other)
    ]
    assert rows[0] == rows[1] != rows[2]
    weights = [load_policy(f"{c.run}/model", device=torch.device("cpu")).model.state_dict() for c in (first, watched)]
    assert_equal(*weights)


def test_warm_up_cache_changes_nothing(tiny, tmp_path, capsys):
    """A policy read from the cache leads to the same run as the one that was just made."""
    first, second, longer = (
        tiny_config(tmp_path, run=str(tmp_path / name), steps=2, warmup_steps=steps)
        for name, steps in (("a", 5), ("b", 5), ("c", 6))
    )
    train.train(first)
    assert "warmed-up policy from" not in capsys.readouterr().out
    train.train(second)
    assert "warmed-up policy from" in capsys.readouterr().out
    assert stable(metrics(first)) == stable(metrics(second))
    train.train(longer)
    assert "warmed-up policy from" not in capsys.readouterr().out


def test_stop_request_saves_and_says_how_to_go_on(tiny, monkeypatch, tmp_path, capsys):
    """SIGINT in step 2: the step is finished, saved, and the resumed run equals a whole one."""
    before = signal.getsignal(signal.SIGINT)
    common = dict(steps=4, lr=1e-2, start_threshold=-1.0, log_samples=1)
    whole = tiny_config(tmp_path / "whole", save_every=4, **common)
    train.train(whole)
    stopped = tiny_config(tmp_path / "stopped", **common)
    with monkeypatch.context() as patch:
        in_step(patch, 2, lambda state: signal.raise_signal(signal.SIGINT))
        assert train.main(flags_of(stopped)) == 0
    out = capsys.readouterr().out
    assert "stopped after step 2" in out and f"python train.py --resume {stopped.run}" in out
    assert signal.getsignal(signal.SIGINT) is before  # handed back
    assert [p.name for p in (Path(stopped.run) / "checkpoints").iterdir()] == ["step-000002"]
    assert not (Path(stopped.run) / "model").exists()
    assert train.main(["--resume", stopped.run, "--save-every", "4"]) == 0
    assert_same_end(Path(whole.run), Path(stopped.run))


def test_a_resumed_run_can_be_extended_from_its_end(tiny, tmp_path, capsys):
    """Interrupted at 2, finished at 4 without --save-every, extended to 5: steps 3 and 4 are not done again."""
    config = tiny_config(tmp_path, steps=2, save_every=2, start_threshold=-1.0)
    train.train(config)
    assert train.main(["--resume", config.run, "--steps", "4", "--save-every", "0"]) == 0
    assert [p.name for p in sorted((Path(config.run) / "checkpoints").iterdir())] == ["step-000002", "step-000004"]
    before = metrics(config)
    assert [row["step"] for row in before] == [0, 1, 2, 3, 4]
    assert train.main(["--resume", config.run, "--steps", "5"]) == 0
    assert "is done again" not in capsys.readouterr().out
    assert metrics(config)[:5] == before and metrics(config)[5]["step"] == 5


def test_stop_in_the_last_step_just_ends(tiny, monkeypatch, tmp_path, capsys):
    config, stop = tiny_config(tmp_path, steps=1), StopRequest()
    in_step(monkeypatch, 1, lambda state: setattr(stop, "requested", True))
    train.train(config, stop)
    assert "held-out accuracy" in capsys.readouterr().out and (Path(config.run) / "model").is_dir()


def run_script(folder: Path, *flags: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *flags], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_sigterm_to_the_script(tmp_path):
    """The real thing: a process that is told to end in mid-run leaves a checkpoint, a hint and exit code 0."""
    process = run_script(
        tmp_path,
        *"--run r --steps 100000 --warmup-steps 0 --toy-skill-steps 0".split(),
        *"--toy-questions 30 --held-out 4 --eval-every 0".split(),
    )
    try:
        for _ in range(600):
            time.sleep(0.1)
            if len(read_lines(tmp_path / "r" / "metrics.jsonl")) > 2:
                break
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
    last = read_lines(tmp_path / "r" / "metrics.jsonl")[-1]["step"]
    assert f"stopped after step {last}" in out and "--resume r" in out and "Traceback" not in err
    assert [p.name for p in (tmp_path / "r" / "checkpoints").iterdir()] == [f"step-{last:06d}"]


def test_interrupt_during_warm_up_leaves_nothing_in_the_way(tiny, monkeypatch, tmp_path, capsys):
    """One sentence, exit code 130, and the same command starts anew without --overwrite."""
    warm_up, ready = prepare.warm_up, False

    def interrupted(*arguments: Any, on_step: Any, **settings: Any) -> None:
        def step(number: int, loss: float) -> None:
            if number == 3 and not ready:
                signal.raise_signal(signal.SIGTERM)
            on_step(number, loss)
            assert number <= 3 or ready

        warm_up(*arguments, on_step=step, **settings)

    monkeypatch.setattr(prepare, "warm_up", interrupted)
    flags = flags_of(tiny_config(tmp_path, steps=1, warmup_steps=6))
    assert train.main(flags) == 130
    err = capsys.readouterr().err
    assert "stopped during the warm-up" in err and "Traceback" not in err
    ready = True
    assert train.main(flags) == 0


@pytest.mark.parametrize(
    ("module", "moment"), [(prepare, "load_data"), (session, "evaluate")], ids=["data", "evaluation"]
)
def test_interrupt_before_the_first_step_does_no_step_and_leaves_nothing_in_the_way(
    tiny, monkeypatch, tmp_path, capsys, module, moment
):
    """One sentence, exit code 130; the folder, be it new, of a run to be replaced or of one to go on, is as it was."""
    config, original = tiny_config(tmp_path, steps=1, save_every=1), getattr(module, moment)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        signal.raise_signal(signal.SIGINT)
        return result

    def stopped(flags: list[str]) -> None:
        with monkeypatch.context() as patch:
            if moment == "load_data":  # it asks for the stop in time, so nothing is evaluated
                patch.setattr(session, "evaluate", lambda *args, **kwargs: pytest.fail("evaluated"))
            patch.setattr(module, moment, interrupted)
            patch.setattr(train, "train_step", lambda *args: pytest.fail("a step was begun"))
            assert train.main(flags) == 130
        err = capsys.readouterr().err
        assert "stopped before the first step; the run's folder is as it was" in err and "Traceback" not in err

    stopped(flags_of(config))
    assert not Path(config.run).exists()
    assert train.main(flags_of(config)) == 0
    kept = files_of(config.run)
    stopped([*flags_of(config), "--overwrite"])
    if moment == "load_data":
        stopped(["--resume", config.run, "--steps", "2"])
    assert files_of(config.run) == kept


def test_a_folder_in_use_is_refused_and_free_again_afterwards(tiny, monkeypatch, tmp_path, capsys):
    """A second process may neither resume nor replace a run that goes on; an ended one, failed or not, lets go."""
    config, codes = tiny_config(tmp_path, save_every=1), []

    def meanwhile(state: session.State) -> None:  # a lock asked for a second time is refused, be it by this process
        for flags in (["--resume", config.run, "--steps", "9"], [*flags_of(config), "--overwrite"]):
            codes.append(train.main(flags))

    with monkeypatch.context() as patch:
        in_step(patch, 1, meanwhile)
        assert train.main(flags_of(config)) == 0
    assert codes == [2, 2] and capsys.readouterr().err.count("is being written by another process") == 2
    assert [row["step"] for row in metrics(config)] == [0, 1, 2, 3, 4]
    assert train.main(["--resume", config.run, "--steps", "5"]) == 0

    def failing(state: session.State) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        in_step(patch, 6, failing)
        assert train.main(["--resume", config.run, "--steps", "6"]) == 2
    assert train.main(["--resume", config.run, "--steps", "6"]) == 0
