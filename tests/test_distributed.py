"""Two gloo processes on the CPU: the gradient of the whole batch, save and resume, and what a death does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")

# What each process of the first test does: its groups of one batch of eight through the real update.
UPDATE = """
import dataclasses, sys
import torch
sys.path[:0] = ["tests"]
from conftest import build, trajectory
from nano_exgrpo.infra import distributed
from nano_exgrpo.config import resolve
from nano_exgrpo.loss import group_advantages
from nano_exgrpo.infra.precision import make_optimizer
from nano_exgrpo.update import update_policy

out, *cases = sys.argv[1:]
distributed.start("cpu")
for case in cases:
    policy = dataclasses.replace(build("llama"), token_budget=40)
    generator = torch.Generator().manual_seed(3)
    draw = lambda n: torch.randint(1, 40, (n,), generator=generator)
    groups = []
    for g in range(8):  # ragged; the odd groups have a replayed row
        prompt = draw(2 + g)
        lengths = torch.randint(1, 9, (4,), generator=generator).tolist()
        rows = [trajectory(prompt, draw(length), id=str(g)) for length in lengths]
        for i, t in enumerate(rows):
            t.reward = float(torch.rand(1, generator=generator) < 0.5)
        if case == "one idle":  # every group of the second process has failed outright
            for t in rows:
                t.reward *= g % 2 == 0
        if g % 4 == 1 and case != "one idle":
            rows[0].replayed, rows[0].reward = True, 1.0
            rows[0].logprobs = -torch.rand(len(rows[0].response_ids), generator=generator) * 5
        groups.append(rows)
    groups = distributed.shard(groups)
    advantages = group_advantages(torch.tensor([[t.reward for t in group] for group in groups]))
    config = resolve(dict(
        preset="none", questions_per_step=8, group_size=4, max_response_length=9, entropy_coef=0.01,
        updates_per_step=2 if case == "two updates" else 1,
    ))
    parameters = list(policy.model.parameters())
    optimizer = make_optimizer(parameters, "adamw", lr=1e-2, weight_decay=0.1)
    gradients, step = [], optimizer.step
    def record():
        gradients.append(torch.cat([p.grad.flatten() for p in parameters]).clone())
        step()
    optimizer.step = record
    metrics = update_policy(policy, optimizer, groups, advantages, config, clip_range=0.2)
    weights = torch.cat([p.detach().flatten() for p in parameters])
    name = f"{case}-{distributed.world_size()}-{distributed.rank()}.pt"
    torch.save({"gradients": gradients, "weights": weights, "metrics": metrics}, f"{out}/{name}")
distributed.finish()
"""
CASES = ["one update", "one idle", "two updates"]


def environment():
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }


def start(processes, *command, options=(), **settings):
    """`command` as torchrun starts it with these options, on a free port."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
        *options,
        "--",
    ]  # else torchrun takes --run for its own
    return subprocess.Popen(
        [*launcher, *map(str, command)], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, **settings,
    )  # fmt: skip


def run(processes, *command, timeout=120):
    child = start(processes, *command)
    try:
        out, err = child.communicate(timeout=timeout)
    finally:
        child.kill()
    return child.returncode, out, err


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What UPDATE left: for each case one process's file, and those of two."""
    folder = tmp_path_factory.mktemp("update")
    script = folder / "update.py"
    script.write_text(UPDATE)
    status, _, err = run(2, script, folder, *CASES)
    assert status == 0, err[-2000:]
    subprocess.run([sys.executable, script, folder, *CASES], cwd=ROOT, env=environment(), check=True, timeout=120)
    return {case: [torch.load(folder / f"{case}-{name}.pt") for name in ("1-0", "2-0", "2-1")] for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_two_processes_have_the_gradient_of_one(case, results):
    """Same gradient, weights after the sharded optimiser's step, and metrics, as one process on the whole batch."""
    one, first, second = results[case]
    updates = 2 if case == "two updates" else 1
    assert [len(process["gradients"]) for process in (one, first, second)] == [updates] * 3
    assert torch.equal(first["weights"], second["weights"]) and first["metrics"] == second["metrics"]
    if case == "two updates":
        return  # each process cuts its own groups into two shares, so the updates are not one process's
    expected = one["gradients"][0]
    scale = expected.abs().max()
    assert 1e-4 < scale
    assert (first["gradients"][0] - expected).abs().max() <= 1e-6 * max(1.0, scale.item())
    clear = expected.abs() > 1e-4 * scale  # Adam makes full steps of rounding errors, too
    assert clear.sum() > 1000
    assert torch.allclose(first["weights"][clear], one["weights"][clear], rtol=0, atol=1e-5)
    for name, value in one["metrics"].items():
        found = first["metrics"][name]
        assert (found is None) if value is None else found == pytest.approx(value, rel=1e-5, abs=1e-7), name


# A process with a fault of its own, in step 2.
FAULT = """
import sys
import train
from nano_exgrpo.infra import distributed

step = train.train_step
def faulty(state, config):
    if distributed.rank() == 1 and state.step == 1:
        raise RuntimeError("shapes do not match")
    return step(state, config)
train.train_step = faulty
sys.exit(train.main())
"""


FLAGS = [
    "train.py", *"--warmup-steps 0 --toy-skill-steps 0 --questions-per-step 4 --group-size 4 --held-out 4".split(),
    *"--eval-every 0 --device cpu --lr 1e-2 --start-threshold -1".split(),
]  # fmt: skip


@pytest.mark.slow
def test_save_on_two_resume_on_two(tmp_path):
    """4 steps == 2 + resume + 2 with two processes, bit for bit; one process refuses their checkpoint."""
    from safetensors.torch import load_file

    from nano_exgrpo.infra.run_folder import read_lines

    for command in (
        [*FLAGS, "--run", tmp_path / "whole", "--steps", 4],
        [*FLAGS, "--run", tmp_path / "half", "--steps", 2, "--save-every", 2],
        ["train.py", "--resume", tmp_path / "half", "--steps", 4],
    ):
        status, out, err = run(2, *command)
        assert status == 0, err[-2000:]
        assert out.count("held-out accuracy") == 1  # one process speaks
    whole, half = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "half"))
    assert all(torch.equal(whole[name], half[name]) for name in whole)
    rows = [read_lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "half")]
    for one, two in zip(*rows, strict=True):  # the halves were also evaluated at step 2, and time is time
        shared = [k for k in one if k in two and not k.startswith(("time", "tokens_per_second"))]
        assert len(shared) > 4 and [one[k] for k in shared] == [two[k] for k in shared]
    assert rows[0][-1]["rollouts"] + rows[0][-1]["replay/questions"] == 16 and rows[0][-1]["eval/questions"] == 4
    alone = subprocess.run(
        [sys.executable, "train.py", "--resume", tmp_path / "half", "--steps", "6"], cwd=ROOT, env=environment(),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert alone.returncode == 2 and "saved by 2 processes" in alone.stderr and "--nproc-per-node 2" in alone.stderr


@pytest.mark.slow
def test_a_fault_keeps_its_traceback_and_the_others_say_that_they_are_alone(tmp_path):
    script = tmp_path / "fault.py"
    script.write_text(FAULT)
    status, _, err = run(2, script, *FLAGS[1:], "--run", tmp_path / "r", "--steps", 3)
    assert status != 0 and "RuntimeError: shapes do not match" in err and "in faulty" in err
    assert "another process has ended, so this one (rank 0) stops too" in err and "(rank 1) stops" not in err


@pytest.mark.slow
def test_uneven_shares_are_refused(tmp_path):
    status, _, err = run(2, *FLAGS, "--run", tmp_path / "r", "--questions-per-step", 3)
    assert status != 0 and "--questions-per-step 3 cannot be shared by 2 processes" in err


@pytest.mark.slow
def test_a_real_model_is_warmed_up_alike_everywhere(tmp_path):
    """Two processes with sharded moments and bf16 weights, rounded at random: each ends with the same weights."""
    import json

    from conftest import build

    policy = build("llama")
    policy.model.save_pretrained(tmp_path / "m")
    policy.tokenizer.save_pretrained(tmp_path / "m")
    for name, answer in (("data", "answer"), ("demos", "response")):
        rows = [json.dumps({"question": f"w{i}", answer: f"w{i}"}) + "\n" for i in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    script = tmp_path / "watch.py"
    script.write_text(WATCH)
    status, _, err = run(
        2, script, tmp_path, "--model", tmp_path / "m", "--data", tmp_path / "data.jsonl",
        "--warmup-data", tmp_path / "demos.jsonl",
        "--warmup-steps", 5, "--warmup-lr", "1e-2", "--train-batch-tokens", 20, "--dtype", "bfloat16",
        "--run", tmp_path / "r", "--steps", 1, "--questions-per-step", 2, "--group-size", 2, "--held-out", 4,
        "--system-prompt", "w1", "--max-response-length", 4, "--device", "cpu",
    )  # fmt: skip
    assert status == 0, err[-2000:]
    first, second = (torch.load(tmp_path / f"after-{rank}.pt") for rank in (0, 1))
    before = torch.cat([p.detach().flatten().bfloat16() for p in policy.model.parameters()])
    assert torch.equal(first, second) and not torch.equal(first, before) and err.count(" 0/5 ") == 1


WATCH = """
import sys, torch, train
from nano_exgrpo.infra import distributed, prepare
folder, *flags = sys.argv[1:]
learn = prepare.follow_demonstrations
def watched(policy, *arguments):
    learn(policy, *arguments)
    weights = torch.cat([p.detach().flatten() for p in policy.model.parameters()])
    torch.save(weights, f"{folder}/after-{distributed.rank()}.pt")
prepare.follow_demonstrations = watched
sys.exit(train.main(flags))
"""
SLOW = """
import pathlib, sys, time, train
*flags, mark = sys.argv[1:]
step = train.train_step
def slowly(state, config):
    pathlib.Path(mark).touch()
    time.sleep(4)
    return step(state, config)
train.train_step = slowly
sys.exit(train.main(flags))
"""


@pytest.mark.slow
@pytest.mark.parametrize("patience", [60, 1])
def test_torchrun_waits_for_the_step_as_long_as_it_is_told(patience, tmp_path):
    """SIGTERM in the middle of a step of four seconds: saved and resumable if torchrun is patient, else lost."""
    slow = tmp_path / "slow.py"
    slow.write_text(SLOW)
    run_folder, mark = tmp_path / "r", tmp_path / "in the step"
    flags = [*FLAGS[1:], "--run", run_folder, "--steps", 100_000, mark]
    child = start(2, slow, *flags, options=["--shutdown-timeout", str(patience)])
    try:
        deadline = time.monotonic() + 100
        while not mark.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        child.send_signal(signal.SIGTERM)
        _, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert err.count("stopping after this step") == 1 and "--shutdown-timeout" in err
    saved = [p.name for p in (run_folder / "checkpoints").glob("step-*")]
    assert saved == (["step-000001"] if patience == 60 else [])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the processes in Linux's /proc")
def test_a_death_stops_all_within_a_minute(tmp_path):
    child = start(2, *FLAGS, "--run", tmp_path / "r", "--steps", 100_000, start_new_session=True)
    try:
        metrics = tmp_path / "r" / "metrics.jsonl"
        deadline = time.monotonic() + 100
        while not (metrics.exists() and len(metrics.read_text().splitlines()) > 3) and time.monotonic() < deadline:
            time.sleep(0.2)
        workers = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        assert len(workers) == 2
        os.kill(int(workers[1]), signal.SIGKILL)
        start_of_end = time.monotonic()
        _, err = child.communicate(timeout=60)
        assert child.returncode != 0 and time.monotonic() - start_of_end < 60
        assert "another process has ended" in err or "stopping after this step" in err
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
