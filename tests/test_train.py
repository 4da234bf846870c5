"""The loop: one update taken apart, whole steps driven by scripted rewards, resume, signals, bad input, learning."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT, ragged, tiny_toy
from tabular import exact_probabilities, outcomes, prompt, tabular_policy
from test_policy import plain

import train
from nano_exgrpo import replay as replay_module
from nano_exgrpo import toy
from nano_exgrpo import update as update_module
from nano_exgrpo.config import TrainConfig, resolve
from nano_exgrpo.loss import exgrpo_loss, group_advantages
from nano_exgrpo.metrics import summary
from nano_exgrpo.policy import load_policy, token_logprobs
from nano_exgrpo.questions import InputError
from nano_exgrpo.replay import ReplayBuffer
from nano_exgrpo.rollout import Trajectory
from nano_exgrpo.runlog import append_lines, read_lines
from nano_exgrpo.update import update_policy

# ------------------------------------------------------------------------------------------- helpers


class Recorder(torch.optim.Optimizer):
    """Steps nowhere; keeps the gradient of every step, as one vector."""

    def __init__(self, parameters: Any) -> None:
        super().__init__([p for p in parameters if p.requires_grad], {})
        self.gradients: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        self.gradients.append(torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]))


def loss_config(**changes: Any) -> TrainConfig:
    return TrainConfig(**{"grad_clip": 1e9, "max_response_length": 8, "group_size": 2, **changes})


def random_groups(policy: Any, questions: int, size: int, *, replayed: int = 0, seed: int = 0) -> list[list[Trajectory]]:
    """Groups of ragged random trajectories; the first row of the first `replayed` groups has a stored, older log π."""
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for q in range(questions):
        lengths = [(3 + q, int(n)) for n in torch.randint(1, 9, (size,), generator=generator)]
        prompts, responses = ragged(policy, lengths, seed=seed + q)
        groups.append([Trajectory(f"q{q}", prompts[0], r, "") for r in responses])
        if q < replayed:
            old = groups[q][0]
            old.replayed, old.logprobs = True, -3 - 3 * torch.rand(len(old.response_ids), generator=generator)
    return groups


def tiny_config(folder: Path, **changes: Any) -> TrainConfig:
    """A run of milliseconds a step on an untrained policy."""
    given = dict(
        run=str(folder / "run"), steps=4, questions_per_step=4, group_size=4, max_response_length=6, warmup_steps=0,
        toy_questions=24, toy_most_terms=3, held_out=5, eval_every=0, log_samples=0, threads=0, device="cpu",
        toy_hidden=16, toy_layers=1, toy_fewest_terms=2, toy_largest=9, toy_skill_steps=0, toy_demonstrations=0,
        max_prompt_length=32, start_threshold=0.35,
    )  # fmt: skip
    return resolve({**given, **changes})


@pytest.fixture
def tiny(monkeypatch):
    """A checker that a random policy satisfies about half of the time; and no time spent on plots."""
    monkeypatch.setattr(train, "plot_curves", lambda *args: None)
    monkeypatch.setattr(train, "reward", coin)


def coin(text: str, gold: str) -> float:
    return float(hashlib.sha256((text + gold).encode()).digest()[0] < 128)


def metrics(config: TrainConfig) -> list[dict[str, Any]]:
    return read_lines(Path(config.run) / "metrics.jsonl")


# ------------------------------------------------------------------------------------ one update, exactly


@pytest.mark.parametrize("updates", [1, 2])
def test_update_is_the_policy_gradient_by_enumeration(updates):
    """The real update on all 16 groups of two outcomes, weighted by their probability: −(K−1)/K · ∇J / L."""
    policy = tabular_policy(2, 2, seed=3)
    everything = outcomes(policy)
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    probabilities = exact_probabilities(policy)
    expected = -0.5 * torch.autograd.grad((probabilities * rewards).sum(), policy.model.table)[0].flatten() / 8
    optimizer = Recorder(policy.model.parameters())
    total = torch.zeros_like(expected)
    for i, j in itertools.product(range(4), repeat=2):
        group = [Trajectory("q", prompt(policy), everything[o], "") for o in (i, j)]
        advantages = group_advantages(rewards[[i, j]][None])
        optimizer.gradients.clear()
        update_policy(policy, optimizer, [group], advantages, loss_config(updates_per_step=updates), clip_range=0.2)
        for gradient in optimizer.gradients:
            total += (probabilities[i] * probabilities[j]).item() * gradient
    assert expected.abs().max() > 1e-3
    assert torch.allclose(total, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("entropy_coef", [0.0, 0.5])
@pytest.mark.parametrize("normalize_rows", [True, False])
def test_micro_batches_do_not_change_the_gradient(entropy_coef, normalize_rows):
    """Batches of one row, of a few, and of all; ragged lengths, replayed rows, an entropy bonus."""
    policy = tiny_toy()
    policy.model.double()
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 1.0]]))
    found, values = [], []
    for tokens in (1, 25, 40, 100_000):
        optimizer = Recorder(policy.model.parameters())
        config = loss_config(train_batch_tokens=tokens, entropy_coef=entropy_coef, normalize_rows=normalize_rows, group_size=3)
        values.append(update_policy(policy, optimizer, random_groups(policy, 4, 3, replayed=2), advantages, config, clip_range=0.2))
        found.append(optimizer.gradients[0])
    assert found[0].norm() > 1e-5
    for gradient, value in zip(found, values):
        assert torch.allclose(gradient, found[0], rtol=0, atol=1e-9 * found[0].abs().max().item())
        assert value == pytest.approx(values[0], rel=1e-6)


@pytest.mark.parametrize("normalize_rows", [True, False])
def test_update_equals_the_loss_of_the_whole_batch(normalize_rows):
    """Against one plain autograd pass over all rows, also those without advantage, from the model's full logits."""
    policy = tiny_toy()
    policy.model.double()
    groups = random_groups(policy, 4, 3, replayed=2)
    rewards = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    advantages = group_advantages(rewards)
    rows = [t for g in groups for t in g]
    logprobs, entropies = plain(policy, [t.prompt_ids for t in rows], [t.response_ids for t in rows], 0.7)
    objective, bonus, tokens = torch.zeros((), dtype=torch.float64), 0.0, 0
    for i, (t, a) in enumerate(zip(rows, advantages.flatten().tolist())):
        n = len(t.response_ids)
        logp = logprobs[i, :n]
        if t.replayed:
            w = (logp - t.logprobs).exp()
            objective = objective + (a * w / (w + 0.1)).sum()
        else:
            objective = objective + (a * (logp - logp.detach()).exp()).sum()
        if a != 0:
            bonus, tokens = bonus + entropies[i, :n].sum(), tokens + n
    denominator = 8 * (12 if normalize_rows else 1)
    (-objective / denominator - 0.3 * bonus / tokens).backward()
    expected = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    optimizer = Recorder(policy.model.parameters())
    config = loss_config(temperature=0.7, normalize_rows=normalize_rows, group_size=3, entropy_coef=0.3)
    result = update_policy(policy, optimizer, groups, advantages, config, clip_range=0.2)
    difference = (optimizer.gradients[0] - expected).abs().max() / expected.abs().max()
    assert difference < 1e-7, difference  # advantages are float32
    assert result["loss"] == pytest.approx(-objective.item() / denominator)
    assert result["entropy"] == pytest.approx(bonus.item() / tokens)
    assert result["grad_norm"] == pytest.approx(expected.norm().item())
    assert result["trained_rows"] == 0.5


def test_ratio_leaves_one_after_the_first_update_and_replayed_rows_keep_theirs():
    """Two updates a batch: π_old is the policy before the first, so the second sees w ≠ 1; w* is never 1."""
    policy = tiny_toy()
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-2)
    groups = random_groups(policy, 4, 4, replayed=2)
    stored = groups[0][0].logprobs.clone()
    before = plain(policy, [t.prompt_ids for t in groups[3]], [t.response_ids for t in groups[3]])[0]
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0]] * 4))
    result = update_policy(policy, optimizer, groups, advantages, loss_config(updates_per_step=2, group_size=4), clip_range=0.2)
    assert result["approx_kl"] > 1e-6
    assert torch.equal(groups[0][0].logprobs, stored)
    for row, t in zip(before, groups[3]):  # the last group is trained in the second update, with π_old of the start
        assert torch.allclose(t.logprobs, row[: len(t.response_ids)], atol=1e-5)
    once = update_policy(policy, optimizer, random_groups(policy, 4, 4, replayed=2), advantages, loss_config(group_size=4), clip_range=0.2)
    assert once["approx_kl"] == pytest.approx(0.0, abs=1e-9) and once["clip_ratio"] == 0.0
    assert abs(once["replay/weight_mean"] - 1) > 0.01 and 0 < once["replay/ratio_mean"] < 1


def test_each_update_gets_its_share_of_replayed_and_fresh_groups():
    policy = tiny_toy()
    optimizer = Recorder(policy.model.parameters())
    groups = random_groups(policy, 5, 2, replayed=2)
    advantages = group_advantages(torch.tensor([[1.0, 0.0]] * 5))
    update_policy(policy, optimizer, groups, advantages, loss_config(updates_per_step=2), clip_range=None)
    expected = []
    for share in ([0, 2, 4], [1, 3]):
        alone = Recorder(policy.model.parameters())
        update_policy(policy, alone, [groups[g] for g in share], advantages[share], loss_config(), clip_range=None)
        expected.append(alone.gradients[0])
    assert len(optimizer.gradients) == 2
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(optimizer.gradients, expected))


def test_groups_without_advantage_change_nothing(policy):
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=0.1, weight_decay=0.1)
    before = [p.clone() for p in policy.model.parameters()]
    result = update_policy(policy, optimizer, random_groups(policy, 2, 3), torch.zeros(2, 3), loss_config(group_size=3), clip_range=0.2)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters()))
    assert result["loss"] == 0.0 and result["trained_rows"] == 0.0 and result["skipped_updates"] == 0
    assert result["grad_norm"] is None and result["entropy"] is None and result["clip_ratio"] is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_gradients_are_skipped_and_counted(policy, bad):
    """The step is left out, the weights and the optimiser's averages stay clean, and the next update works."""
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=0.1)
    before = [p.clone() for p in policy.model.parameters()]
    advantages = torch.tensor([[bad, -0.5]])
    result = update_policy(policy, optimizer, random_groups(policy, 1, 2), advantages, loss_config(), clip_range=0.2)
    assert result["skipped_updates"] == 1 and result["grad_norm"] is None
    assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters())) and not optimizer.state
    good = update_policy(policy, optimizer, random_groups(policy, 1, 2), torch.tensor([[0.5, -0.5]]), loss_config(), clip_range=0.2)
    assert good["skipped_updates"] == 0 and all(torch.isfinite(p).all() for p in policy.model.parameters())


def test_ten_coherent_steps_move_every_weight():
    """At lr 1e-6, weights kept in bfloat16 alone would lose nearly all of their updates to rounding."""
    policy = tiny_toy()
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-6, weight_decay=0.0)
    used = torch.arange(policy.model.config.vocab_size)  # every token occurs, so that every embedding has a gradient
    group = [Trajectory("q", torch.tensor([2, 3]), used, ""), Trajectory("q", torch.tensor([2, 3]), used.flip(0), "")]
    before = [p.detach().clone() for p in policy.model.parameters()]
    for _ in range(10):
        update_policy(policy, optimizer, [group], torch.tensor([[0.5, -0.5]]), loss_config(max_response_length=len(used)), clip_range=None)
    moved = sum((a != b).sum().item() for a, b in zip(before, policy.model.parameters()))
    assert moved / sum(p.numel() for p in before) > 0.99


def test_gradient_clipping_bounds_the_norm(policy):
    optimizer = Recorder(policy.model.parameters())
    advantages = torch.tensor([[50.0, -50.0]])
    result = update_policy(policy, optimizer, random_groups(policy, 1, 2), advantages, loss_config(grad_clip=0.25), clip_range=None)
    assert optimizer.gradients[0].norm().item() == pytest.approx(0.25, rel=1e-4)
    assert result["grad_norm"] > 0.25  # what is logged is the norm before clipping


# ------------------------------------------------------------------------------------ scripted whole steps


class Script:
    """Drives the real train step: decides how many of each group succeed, and records what the step did.

    successes(step, question id): how many of the question's K trajectories succeed at that step, the replayed one
    included. Questions are named by their answers.
    """

    def __init__(self, monkeypatch: Any, folder: Path, questions: int, successes: Any) -> None:
        self.successes, self.step, self.left = successes, 0, Counter()
        self.asked: list[list[tuple[str, int]]] = []  # per step: (question, samples)
        self.chosen: list[list[Trajectory]] = []
        self.groups: list[list[list[Trajectory]]] = []
        self.rewards: list[torch.Tensor] = []
        self.clip_ranges: list[float | None] = []
        self.buffer: ReplayBuffer | None = None
        self.states: list[tuple[dict[str, int], list[str], int]] = []  # after each step: buckets, retired, stored
        self.data = folder / "questions.jsonl"
        rows = [{"id": f"q{i}", "question": str(i % 99), "answer": f"q{i}"} for i in range(questions)]
        # One more question, with a prompt of its own, to be held out (seed 0 or not, it is asked by name never).
        self.data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        original = SimpleNamespace(rollout=train.rollout, update=train.update_policy, choose=train.choose_trajectories)

        def rollout(policy: Any, asked: Any, samples: Any, **settings: Any) -> Any:
            self.step += 1
            self.asked.append([(id, n) for (id, _), n in zip(asked, samples, strict=True)])
            for (id, _), n in zip(asked, samples):
                self.left[id] = self.successes(self.step, id) - (n < settings_of["group_size"])
            return original.rollout(policy, asked, samples, **settings)

        def reward(text: str, gold: str) -> float:
            self.left[gold] -= 1
            return float(self.left[gold] >= 0)

        def choose(*args: Any, **settings: Any) -> Any:
            self.chosen.append(original.choose(*args, **settings))
            return self.chosen[-1]

        def update(policy: Any, optimizer: Any, groups: Any, advantages: Any, config: Any, *, clip_range: Any) -> Any:
            self.groups.append([list(g) for g in groups])
            self.rewards.append(torch.tensor([[t.reward for t in g] for g in groups]))
            self.clip_ranges.append(clip_range)
            return original.update(policy, optimizer, groups, advantages, config, clip_range=clip_range)

        def make_buffer(*args: Any, **kwargs: Any) -> ReplayBuffer:
            self.buffer = ReplayBuffer(*args, **kwargs)
            return self.buffer

        def log(path: Path, rows: Any) -> None:
            if path.name == "metrics.jsonl" and self.step:
                b = self.buffer
                self.states.append((dict(b.bucket), list(b.retired), len(b)))
            append(path, rows)

        append, settings_of = train.append_lines, {}
        self.settings_of = settings_of
        monkeypatch.setattr(train, "rollout", rollout)
        monkeypatch.setattr(train, "reward", reward)
        monkeypatch.setattr(train, "choose_trajectories", choose)
        monkeypatch.setattr(train, "update_policy", update)
        monkeypatch.setattr(train, "ReplayBuffer", make_buffer)
        monkeypatch.setattr(train, "append_lines", log)

    def run(self, folder: Path, **settings: Any) -> list[dict[str, Any]]:
        given = dict(held_out=1, max_response_length=2, data=str(self.data), lr=1e-4)
        config = tiny_config(folder, **{**given, **settings})
        self.settings_of["group_size"] = config.group_size
        train.train(config)
        return [row for row in metrics(config) if row["step"] > 0]


def test_delayed_start_stays_on(tiny, monkeypatch, tmp_path):
    """Success rates 5/16, 0.35 exactly (7/20), more, then none: replay starts with the third step for good."""
    rates = {1: [2, 2, 1, 0, 0], 2: [2, 2, 1, 1, 1], 3: [2, 2, 2, 2, 0], 4: [0] * 5, 5: [0] * 5, 6: [0] * 5}
    order: dict[tuple[int, str], int] = {}

    def successes(step: int, id: str) -> int:
        position = sum(1 for s, _ in order if s == step)
        order[step, id] = position
        return rates[step][position] if step < 4 else 1  # later: only the replayed row itself succeeds

    script = Script(monkeypatch, tmp_path, 40, successes)
    rows = script.run(tmp_path, steps=6, questions_per_step=5, group_size=4)
    assert [row["reward"] for row in rows[:3]] == [0.25, 0.35, 0.4]
    assert [row["replay/started"] for row in rows] == [False, False, True, True, True, True]
    assert [row["buffer/trajectories"] for row in rows[:3]] == [0, 0, 8]  # storing begins with the step that starts it
    assert [row["replay/questions"] for row in rows] == [0, 0, 0, 2, 2, 2]  # ⌊0.5 · 5⌋
    assert rows[4]["reward"] < 0.35 and rows[5]["replay/started"]


def test_start_threshold_minus_one_starts_at_once(tiny, monkeypatch, tmp_path):
    script = Script(monkeypatch, tmp_path, 20, lambda step, id: 1)
    rows = script.run(tmp_path, steps=2, start_threshold=-1.0)
    assert rows[0]["replay/started"] and rows[1]["replay/questions"] == 2


def test_buckets_follow_the_latest_group_and_groups_have_k_rows(tiny, monkeypatch, tmp_path):
    """Each question's success count depends on it and on the step; the replayed row counts among the successes."""
    K = 4

    def successes(step: int, id: str) -> int:
        return 1 + (int(id[1:]) + step) % 3  # 1, 2 or 3 of 4

    script = Script(monkeypatch, tmp_path, 13, successes)
    rows = script.run(tmp_path, steps=12, questions_per_step=4, group_size=K, start_threshold=-1.0)
    latest: dict[str, int] = {}
    for step, (asked, groups, state) in enumerate(zip(script.asked, script.groups, script.states), start=1):
        assert len(asked) == 4 and len({id for id, _ in asked}) == 4  # no question twice in a step
        replays = [id for id, n in asked if n == K - 1]
        assert [id for id, _ in asked[: len(replays)]] == replays  # replayed groups stand first
        for (id, n), group in zip(asked, groups):
            assert len(group) == K and {t.question_id for t in group} == {id}
            assert [t.replayed for t in group] == [n == K - 1] + [False] * (K - 1)
            latest[id] = successes(step, id)
            assert sum(t.reward for t in group) == latest[id]
        assert state[0] == latest and state[1] == []
        counts = Counter(latest.values())
        assert rows[step - 1]["buffer/buckets"] == {str(k): counts[k] for k in sorted(counts)}
    assert sum(row["replay/questions"] for row in rows) == 22


def test_draw_frequencies_in_the_loop(tiny, monkeypatch, tmp_path):
    """Nine questions stay in buckets 1, 2, 3 of K = 4. One of two questions a step is replayed: chi-square against
    exp(−½) : 1 : exp(−½), 2 degrees of freedom; 13.8 is exceeded once in 1,000 seeds."""
    script = Script(monkeypatch, tmp_path, 10, lambda step, id: 1 + int(id[1:]) % 3)
    script.run(tmp_path, steps=150, questions_per_step=2, group_size=4, start_threshold=-1.0, max_per_question=1)
    counts: Counter[int] = Counter()
    for asked, before in zip(script.asked[1:], script.states):
        if len(set(before[0].values())) == 3:  # all three buckets hold something
            counts.update(1 + int(id[1:]) % 3 for id, n in asked if n == 3)
    weights = {1: math.exp(-0.5), 2: 1.0, 3: math.exp(-0.5)}
    total, norm = sum(counts.values()), sum(weights.values())
    assert total > 130
    assert sum((counts[k] - total * w / norm) ** 2 / (total * w / norm) for k, w in weights.items()) < 13.8


def test_retirement_keeps_a_batch_and_the_retired_are_never_asked(tiny, monkeypatch, tmp_path):
    script = Script(monkeypatch, tmp_path, 14, lambda step, id: 4)
    rows = script.run(tmp_path, steps=8, questions_per_step=4, group_size=4, start_threshold=-1.0)
    retired: set[str] = set()
    for asked, state in zip(script.asked, script.states):
        assert len(asked) == 4 and not {id for id, _ in asked} & retired  # always a full batch
        retired = set(state[1])
    assert [row["buffer/retired"] for row in rows] == [4, 8, 9, 9, 9, 9, 9, 9]  # 13 to train on, 4 must stay
    assert rows[-1]["buffer/questions"] == 0 and rows[-1]["questions/solved"] == 1.0


def test_fewer_questions_than_a_batch(tiny, monkeypatch, tmp_path):
    script = Script(monkeypatch, tmp_path, 4, lambda step, id: 4)
    rows = script.run(tmp_path, steps=3, questions_per_step=8, group_size=4, start_threshold=-1.0)
    assert [len(asked) for asked in script.asked] == [3, 3, 3] and rows[-1]["buffer/retired"] == 0


def test_exhaustion_replays_what_there_is(tiny, monkeypatch, tmp_path):
    """ρ = 1 wants 4 of 4, but only the 2 partly solved questions are eligible; fresh ones fill the batch. Once
    those two are solved as well, nothing is left to replay and the run goes on fresh."""

    def successes(step: int, id: str) -> int:
        return (2 if step < 4 else 4) if id in partly else 0

    partly: set[str] = set()
    script = Script(monkeypatch, tmp_path, 12, lambda step, id: successes(step, id))
    original = train.rollout

    def first_two(policy: Any, asked: Any, samples: Any, **settings: Any) -> Any:
        if not partly:
            partly.update(id for id, _ in asked[:2])
        return original(policy, asked, samples, **settings)

    monkeypatch.setattr(train, "rollout", first_two)
    rows = script.run(tmp_path, steps=7, questions_per_step=4, group_size=4, replay_ratio=1.0, start_threshold=-1.0)
    assert [row["replay/questions"] for row in rows] == [0, 2, 2, 2, 0, 0, 0]
    assert all(len(asked) == 4 for asked in script.asked)
    assert set(script.states[-1][1]) == partly and rows[-1]["buffer/trajectories"] == 0


@pytest.mark.parametrize(("ratio", "B", "expected"), [(0.0, 8, 0), (0.3, 8, 2), (0.49, 8, 3), (1.0, 8, 8), (0.58, 50, 29)])
def test_share_of_replayed_questions(tiny, monkeypatch, tmp_path, ratio, B, expected):
    """⌊ρB⌋; 0.58 · 50 is 28.999999999999996 in floating point."""
    script = Script(monkeypatch, tmp_path, 5 * B, lambda step, id: 1)
    rows = script.run(tmp_path, steps=3, questions_per_step=B, group_size=2, replay_ratio=ratio, start_threshold=-1.0)
    assert [row["replay/questions"] for row in rows] == [0, expected, expected]
    assert rows[2]["rollouts"] == B * 2 - expected  # K − 1 beside a replayed trajectory


def test_failed_groups_leave_stored_successes_and_bucket(tiny, monkeypatch, tmp_path):
    """With ρ = 0 nothing is replayed; a question that succeeds at first and fails on its second turn keeps both."""
    script = Script(monkeypatch, tmp_path, 5, lambda step, id: 2 if step == 1 else 0)
    script.run(tmp_path, steps=2, questions_per_step=4, group_size=4, replay_ratio=0.0, start_threshold=-1.0)
    assert script.states[0] == script.states[1] and set(script.states[1][0].values()) == {2}


@pytest.mark.parametrize("method", ["lowest", "highest"])
def test_trajectory_choice_is_by_entropy_under_the_current_policy(tiny, monkeypatch, tmp_path, method):
    """Recomputed independently at every step with the policy as it is then, over response tokens alone."""
    script = Script(monkeypatch, tmp_path, 6, lambda step, id: 3)
    seen = 0
    original = train.choose_trajectories  # records into script.chosen

    def check(policy: Any, buffer: ReplayBuffer, ids: Any, **settings: Any) -> Any:
        nonlocal seen
        chosen = original(policy, buffer, ids, **settings)
        for id, t in zip(ids, chosen, strict=True):
            stored = buffer.stored[id]
            with torch.no_grad():
                _, entropies = plain(policy, [s.prompt_ids for s in stored], [s.response_ids for s in stored], settings["temperature"])
            means = [row[: len(s.response_ids)].mean().item() for row, s in zip(entropies, stored)]
            best = min(means) if method == "lowest" else max(means)
            assert t.entropy == pytest.approx(best, abs=1e-5) and t.replayed
            assert any(torch.equal(t.response_ids, s.response_ids) for s, m in zip(stored, means) if abs(m - best) < 1e-5)
            seen += len(stored) > 3
        return chosen

    monkeypatch.setattr(train, "choose_trajectories", check)
    script.run(tmp_path, steps=8, group_size=4, lr=3e-2, max_response_length=4, start_threshold=-1.0, trajectory_choice=method)
    assert seen > 5


def test_a_question_can_be_asked_again_without_a_stored_trajectory(tiny, monkeypatch, tmp_path):
    """The control for replay: the buffer says which questions to ask, and all K of their trajectories are fresh."""
    script = Script(monkeypatch, tmp_path, 40, lambda step, id: 2)
    script.run(tmp_path, steps=3, questions_per_step=8, group_size=4, start_threshold=-1.0, trajectory_choice="none")
    first = {id for id, _ in script.asked[0]}
    assert {id for id, _ in script.asked[1][:4]} <= first and not {id for id, _ in script.asked[1][4:]} & first
    assert all(n == 4 for asked in script.asked for _, n in asked)
    assert not any(t.replayed for groups in script.groups for group in groups for t in group)


@pytest.mark.parametrize(("difficulty", "taught"), [("hard", {1, 2}), ("medium", {3, 4, 5}), ("easy", {6, 7})])
def test_only_groups_of_the_chosen_difficulty_teach(tiny, monkeypatch, tmp_path, difficulty, taught):
    """K 8, and every question has a number of successes of its own, 0 to 8."""
    script = Script(monkeypatch, tmp_path, 19, lambda step, id: int(id[1:]) % 9)
    seen = []
    update = train.update_policy

    def spy(policy: Any, optimizer: Any, groups: Any, advantages: Any, *args: Any, **kwargs: Any) -> Any:
        seen.extend((int(g[0].question_id[1:]) % 9, bool(row.any())) for g, row in zip(groups, advantages))
        return update(policy, optimizer, groups, advantages, *args, **kwargs)

    monkeypatch.setattr(train, "update_policy", spy)
    script.run(tmp_path, steps=1, algo="grpo", questions_per_step=18, group_size=8, difficulty=difficulty)
    assert len({k for k, _ in seen}) == 9 and all(moved == (k in taught) for k, moved in seen)


def test_replayed_log_probabilities_are_those_of_the_generating_policy(tiny, monkeypatch, tmp_path):
    """π_past is what the policy said when it sampled, through all later steps: recomputed from kept weights."""
    import copy

    script = Script(monkeypatch, tmp_path, 6, lambda step, id: 2)
    snapshots, born = [], {}
    update = train.update_policy

    def spy(policy: Any, optimizer: Any, groups: Any, *args: Any, **kwargs: Any) -> Any:
        snapshots.append(copy.deepcopy(policy))
        result = update(policy, optimizer, groups, *args, **kwargs)
        for t in (t for g in groups for t in g if not t.replayed):
            born.setdefault((t.question_id, tuple(t.response_ids.tolist())), len(snapshots) - 1)
        return result

    monkeypatch.setattr(train, "update_policy", spy)
    script.run(tmp_path, steps=5, group_size=4, lr=3e-2, max_response_length=4, start_threshold=-1.0, temperature=0.8)
    checked = 0
    for step, groups in enumerate(script.groups):
        for t in (t for g in groups for t in g if t.replayed):
            origin = born[t.question_id, tuple(t.response_ids.tolist())]
            expected, _, _ = token_logprobs(snapshots[origin], [t.prompt_ids], [t.response_ids], temperature=0.8)
            now, _, _ = token_logprobs(snapshots[step], [t.prompt_ids], [t.response_ids], temperature=0.8)
            assert origin < step and torch.allclose(t.logprobs, expected[0], atol=1e-5)
            assert not torch.allclose(t.logprobs, now[0], atol=1e-3)
            checked += 1
    assert checked == 8


def test_clip_of_fresh_rows_once_mixing_has_started(tiny, monkeypatch, tmp_path):
    script = Script(monkeypatch, tmp_path, 20, lambda step, id: 2)
    script.run(tmp_path / "a", steps=2, start_threshold=0.4)
    assert script.clip_ranges == [0.2, 0.2]
    script.run(tmp_path / "b", steps=2, start_threshold=0.4, clip_when_mixed=False)
    assert script.clip_ranges[2:] == [0.2, None]


def test_ablation_flags_reach_the_loss(tiny, monkeypatch, tmp_path):
    seen = []
    original = update_module.exgrpo_loss
    monkeypatch.setattr(update_module, "exgrpo_loss", lambda *a, **k: seen.append(k) or original(*a, **k))
    train.train(tiny_config(tmp_path, steps=1, shaping=False, importance_correction=False, beta=0.3, normalize_rows=False))
    assert {k: seen[0][k] for k in ("shaping", "importance_correction", "beta", "denominator")} == {
        "shaping": False, "importance_correction": False, "beta": 0.3, "denominator": 6,
    }  # fmt: skip


def test_grpo_is_the_loop_without_replay_and_retirement(tiny, monkeypatch, tmp_path):
    script = Script(monkeypatch, tmp_path, 9, lambda step, id: 4 if int(id[1:]) % 2 else 2)
    rows = script.run(tmp_path, steps=5, algo="grpo", start_threshold=-1.0)
    assert all(n == 4 for asked in script.asked for _, n in asked)
    assert script.states[-1] == ({}, [], 0) and not any(row["replay/started"] for row in rows)
    # With replay off, exgrpo before its start is the same thing to the bit.
    again = Script(monkeypatch, tmp_path, 9, lambda step, id: 4 if int(id[1:]) % 2 else 2)
    twin = again.run(tmp_path / "twin", steps=5, start_threshold=1.0)
    drop = lambda row: {k: v for k, v in row.items() if not k.startswith("time/") and k != "tokens_per_second"}  # noqa: E731
    assert [drop(row) for row in rows] == [drop(row) for row in twin]


# -------------------------------------------------------------------------------------------- metrics


def test_every_metric_equals_an_independent_recomputation(tiny, monkeypatch, tmp_path):
    """From the trajectories of each step and the weights before it; by plain logits, one row at a time."""
    import copy

    script = Script(monkeypatch, tmp_path, 16, lambda step, id: (int(id[1:]) * 7 + step) % 5)
    snapshots, scored = [], Counter()
    update, entropies = train.update_policy, replay_module.mean_entropies
    monkeypatch.setattr(replay_module, "mean_entropies", lambda p, ps, rs, **k: scored.update({script.step + 1: sum(map(len, rs))}) or entropies(p, ps, rs, **k))
    monkeypatch.setattr(train, "update_policy", lambda policy, *a, **k: snapshots.append(copy.deepcopy(policy)) or update(policy, *a, **k))
    rows = script.run(
        tmp_path, steps=6, group_size=4, start_threshold=-1.0, lr=1e-2, max_response_length=5, log_samples=-1, eval_every=3, temperature=0.9
    )
    samples = read_lines(tmp_path / "run" / "samples.jsonl")
    total_tokens, replays = 0, 0
    for step, (row, groups, policy, state) in enumerate(zip(rows, script.groups, snapshots, script.states, strict=True), start=1):
        everyone = [t for g in groups for t in g]
        fresh = [t for t in everyone if not t.replayed]
        rewards = [[t.reward for t in g] for g in groups]
        lengths = [len(t.response_ids) for t in fresh]
        total_tokens += sum(lengths)
        trained = [(t, r - sum(g) / 4) for g, ts in zip(rewards, groups) for t, r in zip(ts, g) if len(set(g)) > 1]
        loss = kl = entropy = weight = shaped = 0.0
        tokens = replay_tokens = 0
        policy.model.zero_grad()
        objective = torch.zeros(())
        for t, a in trained:
            logp, ent = plain(policy, [t.prompt_ids], [t.response_ids], 0.9)
            tokens, entropy = tokens + ent.numel(), entropy + ent.sum().item()
            if t.replayed:
                w = (logp[0] - t.logprobs).exp()
                objective = objective - (a * w / (w + 0.1)).sum() / (5 * 16)
                weight, shaped, replay_tokens = weight + w.sum().item(), shaped + (w / (w + 0.1)).sum().item(), replay_tokens + len(w)
            else:
                objective = objective - (a * (logp - logp.detach()).exp()).sum() / (5 * 16)
        loss = objective.item()
        if trained:
            objective.backward()
        norm = math.sqrt(sum(p.grad.pow(2).sum().item() for p in policy.model.parameters() if p.grad is not None))
        expected = {
            "step": step,
            "reward": sum(t.reward for t in fresh) / len(fresh),
            "questions/solved": sum(sum(g) == 4 for g in rewards) / 4,
            "questions/failed": sum(sum(g) == 0 for g in rewards) / 4,
            "completions/mean_length": sum(lengths) / len(lengths),
            "completions/clipped_ratio": sum(policy.tokenizer.eos_token_id not in t.response_ids.tolist() for t in fresh) / len(fresh),
            "loss": loss,
            "entropy": entropy / tokens if tokens else None,
            "grad_norm": norm if trained else None,
            "skipped_updates": 0,
            "clip_ratio": 0.0 if len(trained) > 0 else None,
            "approx_kl": kl if len(trained) > 0 else None,
            "replay/weight_mean": weight / replay_tokens if replay_tokens else None,
            "replay/ratio_mean": shaped / replay_tokens if replay_tokens else None,
            "trained_rows": len(trained) / 16,
            "replay/started": True,
            "replay/questions": sum(g[0].replayed for g in groups),
            "buffer/questions": len(state[0]),
            "buffer/trajectories": state[2],
            "buffer/retired": len(state[1]),
            "rollouts": len(fresh),
            "num_tokens": total_tokens,
            "trained_tokens": tokens,
            "scored_tokens": scored[step],
        }
        for name, value in expected.items():
            assert row[name] == (value if value is None else pytest.approx(value, rel=1e-3, abs=1e-6)), (step, name)
        replays += expected["replay/questions"]
        # What is left has to be known, so that no new metric escapes this test.
        known = {*expected, "buffer/buckets", "epoch", "tokens_per_second", "eval/accuracy", "eval/low", "eval/high", "eval/questions"}
        assert {name for name in row if not name.startswith("time/")} <= known
        spent = sum(row[f"time/{part}"] for part in ("choose", "generate", "reward", "update"))
        assert row["tokens_per_second"] == pytest.approx(sum(lengths) / spent, rel=0.02, abs=1)
        # Every trajectory of the step is in samples.jsonl, with the entropy of each of its tokens.
        logged = [s for s in samples if s["step"] == step]
        assert len(logged) == len(everyone)
        for s, t in zip(logged, everyone):
            assert (s["question"], s["response"], s["reward"], s["replayed"], s["truncated"]) == (
                t.question_id, t.text, t.reward, t.replayed, t.truncated,
            )  # fmt: skip
            with torch.no_grad():
                _, ent = plain(policy, [t.prompt_ids], [t.response_ids], 0.9)
            assert s["token_entropies"] == pytest.approx(ent[0].tolist(), abs=1e-3)
            assert s["entropy"] == pytest.approx(ent.mean().item(), abs=1e-3) and len(s["tokens"]) == len(t.response_ids)
    assert replays >= 4


# --------------------------------------------------------------------------------- sameness and resume

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
    assert_equal(load_file(first / "model" / "model.safetensors"), load_file(second / "model" / "model.safetensors"), "weights")
    state, twin = (torch.load(f / "state.pt", weights_only=True) for f in (first, second))
    assert {"optimizer", "adapter", "sampler", "buffer", "random", "step", "started", "bad_steps", "tokens_seen"} <= set(state)
    assert_equal(state, twin)
    assert stable(read_lines(one / "metrics.jsonl")) == stable(read_lines(other / "metrics.jsonl"))
    assert (one / "samples.jsonl").read_text() == (other / "samples.jsonl").read_text()
    assert_equal(load_file(one / "model" / "model.safetensors"), load_file(other / "model" / "model.safetensors"), "final weights")


@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(updates_per_step=2, trajectory_choice="random", question_draw="uniform", entropy_coef=0.01, max_per_question=2),
        dict(algo="grpo", save_every=1, normalize_std=True),
    ],
    ids=["exgrpo", "random choices", "grpo"],
)
def test_four_steps_are_two_a_resume_and_two(tiny, tmp_path, settings):
    common = dict(save_every=2, eval_every=2, log_samples=-1, lr=1e-2, start_threshold=-1.0, **{k: v for k, v in settings.items() if k != "save_every"})
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


def test_a_crash_after_the_checkpoint_is_forgotten(tiny, tmp_path):
    """The process dies in step 4, after step 3 was logged but not saved, in the middle of a line: the run goes on
    from step 2 and equals one that was never interrupted."""
    common = dict(save_every=2, eval_every=1, log_samples=2, lr=1e-2, start_threshold=-1.0)
    whole, broken = (tiny_config(tmp_path / name, steps=4, **common) for name in ("whole", "broken"))
    train.train(whole)

    class Crash(Exception):
        pass

    original, calls = train.update_policy, 0

    def crash(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise Crash
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "update_policy", crash)
        with pytest.raises(Crash):
            train.train(broken)
    with (Path(broken.run) / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    assert [row["step"] for row in metrics(broken)] == [0, 1, 2, 3]
    assert train.main(["--resume", broken.run]) == 0
    assert_same_end(Path(whole.run), Path(broken.run))


def test_same_seed_same_run_and_watching_changes_nothing(tiny, tmp_path):
    """More evaluations, more samples logged, more checkpoints: the same training, to the bit."""
    common = dict(steps=3, lr=1e-2, start_threshold=-1.0)
    first = tiny_config(tmp_path / "a", **common)
    watched = tiny_config(tmp_path / "b", eval_every=1, eval_samples=2, log_samples=-1, save_every=1, **common)
    other = tiny_config(tmp_path / "c", seed=1, **common)
    for config in (first, watched, other):
        train.train(config)
    keep = lambda config: [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in stable(metrics(config))[1:]]  # noqa: E731
    assert keep(first) == keep(watched) != keep(other)
    weights = [load_policy(f"{c.run}/model", device=torch.device("cpu")).model.state_dict() for c in (first, watched)]
    assert_equal(*weights)


def test_warm_up_cache_changes_nothing(tiny, tmp_path, capsys):
    """A policy read from the cache leads to the same run as the one that was just made."""
    common = dict(steps=2, warmup_steps=5, warmup_batch=4)
    first, second = (tiny_config(tmp_path, run=str(tmp_path / name), **common) for name in ("a", "b"))
    train.train(first)
    assert "warmed-up policy from" not in capsys.readouterr().out
    train.train(second)
    assert "warmed-up policy from" in capsys.readouterr().out
    assert stable(metrics(first)) == stable(metrics(second))
    train.train(tiny_config(tmp_path, run=str(tmp_path / "c"), warmup_cache=False, **common))
    train.train(tiny_config(tmp_path, run=str(tmp_path / "d"), **{**common, "warmup_steps": 6}))
    assert "warmed-up policy from" not in capsys.readouterr().out


def test_held_out_questions_are_never_trained_on(tiny, monkeypatch, tmp_path):
    trained, evaluated = set(), set()
    rollout, evaluate = train.rollout, train.evaluate
    monkeypatch.setattr(train, "rollout", lambda p, asked, *a, **k: trained.update(id for id, _ in asked) or rollout(p, asked, *a, **k))
    monkeypatch.setattr(train, "evaluate", lambda p, qs, *a, **k: evaluated.update(q.id for q in qs) or evaluate(p, qs, *a, **k))
    train.train(tiny_config(tmp_path, steps=12))
    assert len(trained) == 24 and len(evaluated) == 5 and not trained & evaluated


# ------------------------------------------------------------------------------------- stop and resume


def test_stop_request_saves_and_says_how_to_go_on(tiny, monkeypatch, tmp_path, capsys):
    """SIGINT in the middle of step 2: the step is finished, saved, and the resumed run equals a whole one."""
    before = signal.getsignal(signal.SIGINT)
    common = dict(steps=4, lr=1e-2, start_threshold=-1.0, log_samples=1)
    whole = tiny_config(tmp_path / "whole", save_every=4, **common)
    train.train(whole)
    original, calls = train.update_policy, 0

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            signal.raise_signal(signal.SIGINT)
        return original(*args, **kwargs)

    stopped = tiny_config(tmp_path / "stopped", **common)
    monkeypatch.setattr(train, "update_policy", interrupt)
    with train.StopRequest() as stop:
        train.train(stopped, stop)
    out = capsys.readouterr().out
    assert "stopped after step 2" in out and f"python train.py --resume {stopped.run}" in out
    assert signal.getsignal(signal.SIGINT) is before  # handed back
    assert [p.name for p in (Path(stopped.run) / "checkpoints").iterdir()] == ["step-000002"]
    assert not (Path(stopped.run) / "model").exists()
    assert train.main(["--resume", stopped.run, "--save-every", "4"]) == 0
    assert_same_end(Path(whole.run), Path(stopped.run))


def test_stop_in_the_last_step_just_ends(tiny, tmp_path, capsys):
    config = tiny_config(tmp_path, steps=1)
    stop = train.StopRequest()
    stop.requested = True
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
        tmp_path, *"--run r --steps 100000 --warmup-steps 0 --toy-skill-steps 0 --toy-demonstrations 0".split(),
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
    warm_up, ready = toy.warm_up, False

    def interrupted(policy: Any, examples: Any, *, on_step: Any, **settings: Any) -> None:
        def step(number: int, loss: float) -> None:
            if number == 3 and not ready:
                signal.raise_signal(signal.SIGTERM)
            on_step(number, loss)
            assert number <= 3 or ready

        warm_up(policy, examples, on_step=step, **settings)

    monkeypatch.setattr(toy, "warm_up", interrupted)
    flags = flags_of(tiny_config(tmp_path, steps=1, warmup_steps=6, warmup_batch=2))
    assert train.main(flags) == 130
    err = capsys.readouterr().err
    assert "stopped during the warm-up" in err and "Traceback" not in err
    ready = True
    assert train.main(flags) == 0


# ------------------------------------------------------------------------------------------- bad input


def flags_of(config: TrainConfig) -> list[str]:
    """The command line that gives this configuration."""
    flags = []
    for name, value in vars(config).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        elif value != "":
            flags += [flag, str(value)]
    return flags


def refuse(capsys: Any, *flags: str) -> str:
    """Run the script's main; it must end with code 2 and one sentence on stderr, which is returned."""
    capsys.readouterr()
    code = train.main(list(flags))
    out, err = capsys.readouterr()
    sentence = [line for line in err.splitlines() if line.startswith("train.py: ")]
    assert code == 2 and len(sentence) == 1 and "Traceback" not in err + out, (code, err)
    assert err.rstrip().splitlines()[-1] == sentence[0]
    return sentence[0]


def test_bad_flags_and_bad_data_end_with_one_sentence(tiny, tmp_path, capsys):
    run = ["--run", str(tmp_path / "run")]
    (tmp_path / "bad.jsonl").write_text('{"question": "q", "answer": "1"}\n{oops\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "few.jsonl").write_text('{"question": "q", "answer": "1"}\n')
    (tmp_path / "model").mkdir()
    cases = {
        "--group-size must be at least 2": ["--group-size", "1"],
        "--replay-ratio must be between 0 and 1": ["--replay-ratio", "2"],
        "invalid float value: 'x'": ["--lr", "x"],
        "device cuda:9": ["--device", "cuda:9"],
        "nowhere.jsonl does not exist": ["--data", str(tmp_path / "nowhere.jsonl")],
        "bad.jsonl line 2 is not valid JSON": ["--data", str(tmp_path / "bad.jsonl")],
        "few.jsonl line 1 has no field 'problem'": ["--data", str(tmp_path / "few.jsonl"), "--question-field", "problem"],
        "holds no questions": ["--data", str(tmp_path / "empty.jsonl")],
        "too few to hold 7 out; lower --held-out": ["--data", str(tmp_path / "few.jsonl"), "--held-out", "7"],
        "neither a folder nor a hub id": ["--model", "Qwen9", "--data", str(data_file(tmp_path)), "--held-out", "1"],
        "only 810 different sums": ["--toy-largest", "9", "--toy-fewest-terms", "2", "--toy-most-terms", "3", "--toy-questions", "5000"],
        "--toy-most-terms must be at most 11": ["--toy-largest", "9", "--toy-most-terms", "40"],
        "leaves no room for a prompt": ["--max-response-length", "128", "--warmup-steps", "0"],
        "every prompt is longer than 2 tokens; raise --max-prompt-length": ["--max-prompt-length", "2", "--warmup-steps", "0"],
        "every prompt is longer than 2 tokens; lower --max-response-length": ["--max-response-length", "126", "--warmup-steps", "0"],
        "is not a run folder": ["--resume", str(tmp_path / "nothing")],
    }
    for sentence, flags in cases.items():
        assert sentence in refuse(capsys, *flags, *([] if "--resume" in flags else run)), flags
    assert not list((tmp_path / "run").iterdir())  # and nothing was left that would be in the way


def test_model_folder_without_tokenizer(tiny, tmp_path, capsys):
    tiny_toy().model.save_pretrained(tmp_path / "m")
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps({"question": str(i), "answer": "1"}) + "\n" for i in range(9)))
    flags = ["--model", str(tmp_path / "m"), "--data", str(data), "--held-out", "2", "--run", str(tmp_path / "run")]
    assert "has no tokenizer" in refuse(capsys, *flags)
    tiny_toy().tokenizer.save_pretrained(tmp_path / "m")
    flags += ["--system-prompt", "", "--max-response-length", "4"]
    assert "needs demonstrations: name them with --warmup-data" in refuse(capsys, *flags, "--warmup-steps", "2")
    (tmp_path / "none.jsonl").write_text("")
    assert "none.jsonl holds no demonstrations" in refuse(capsys, *flags, "--warmup-steps", "2", "--warmup-data", str(tmp_path / "none.jsonl"))
    (tmp_path / "demos.jsonl").write_text('{"question": "1 + 1"}\n')
    sentence = refuse(capsys, *flags, "--warmup-steps", "2", "--warmup-data", str(tmp_path / "demos.jsonl"))
    assert "demos.jsonl line 1 needs the text fields 'question' and 'response'" in sentence


def test_run_folder_that_cannot_be_used(tiny, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    small = flags_of(tiny_config(tmp_path, steps=1))
    assert "cannot be written" in refuse(capsys, *small, "--run", str(tmp_path / "file"))
    assert "cannot be written" in refuse(capsys, *small, "--run", str(tmp_path / "file" / "deeper"))
    assert train.main(small) == 0
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert "already holds a run; go on with --resume" in refuse(capsys, *small)
    # Not even --overwrite touches it before the new run can really start.
    assert "neither a folder" in refuse(capsys, *small, "--overwrite", "--model", "Qwen9", "--data", str(data_file(tmp_path)))
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before
    assert train.main([*small, "--overwrite"]) == 0


def data_file(folder: Path, count: int = 12) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i} + 1", "answer": str(i + 1)}) + "\n" for i in range(count)))
    return path


def test_long_prompts_are_skipped_and_counted(tiny, tmp_path, capsys):
    """In training and in evaluation; toy prompts have two tokens more than their words."""
    rows = [{"question": " + ".join(["1"] * (2 if i % 4 else 8)), "answer": str(i), "id": str(i)} for i in range(40)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({**r, "question": r["question"] + f" + {i}"}) + "\n" for i, r in enumerate(rows)))
    config = tiny_config(tmp_path, steps=3, data=str(tmp_path / "d.jsonl"), held_out=10, max_prompt_length=10)
    train.train(config)
    out = capsys.readouterr().out
    import re

    found = re.findall(r"skipped (\d+) of (\d+) (\w+)", out)
    assert sum(int(n) for n, _, _ in found) == 10 and sum(int(n) for _, n, _ in found) == 40
    assert metrics(config)[0]["eval/questions"] == 10 - int(found[1][0])


def test_resume_refusals(tiny, tmp_path, capsys):
    config = tiny_config(tmp_path, steps=2, save_every=1)
    train.train(config)
    assert "--lr 0.5 contradicts the run" in refuse(capsys, "--resume", config.run, "--lr", "0.5")
    assert "already at step 2; to go on, raise --steps" in refuse(capsys, "--resume", config.run, "--steps", "1")
    assert train.main(["--resume", config.run]) == 0  # all done: says so again, changes nothing
    newest = Path(config.run) / "checkpoints" / "step-000002"
    weights = newest / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert "could not be loaded from that folder" in refuse(capsys, "--resume", config.run)
    (newest / "state.pt").write_bytes(b"")
    assert "is damaged" in refuse(capsys, "--resume", config.run)
    import shutil

    shutil.rmtree(newest)
    assert train.main(["--resume", config.run]) == 0
    assert [row["step"] for row in metrics(config)] == [0, 1, 2]
    shutil.rmtree(Path(config.run) / "checkpoints")
    assert "has no checkpoint to resume from" in refuse(capsys, "--resume", config.run)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError()],
    ids=["cuda", "cpu", "python"],
)
@pytest.mark.parametrize("place", ["update_policy", "rollout"])
def test_out_of_memory_names_the_settings_to_lower(tiny, monkeypatch, tmp_path, capsys, error, place):
    original, calls = getattr(train, place), 0

    def exhausted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(train, place, exhausted)
    config = tiny_config(tmp_path, save_every=2)
    sentence = refuse(capsys, *flags_of(config))
    for flag in ("--rollout-batch", "--train-batch-tokens", "--max-response-length", "--gradient-checkpointing"):
        assert flag in sentence
    assert f"--resume {config.run}" in sentence  # what was saved is still good
    assert train.main(["--resume", config.run, "--train-batch-tokens", "64", "--rollout-batch", "2"]) == 0
    assert [row["step"] for row in metrics(config)] == [0, 1, 2, 3, 4]


def test_other_errors_are_not_hidden(tiny, monkeypatch, tmp_path):
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(train, "update_policy", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        train.main(flags_of(tiny_config(tmp_path)))


def test_a_full_disk_ends_with_one_sentence(tiny, monkeypatch, tmp_path, capsys):
    def full(path: Path, rows: Any) -> None:
        if any(row["step"] == 2 for row in rows):
            raise OSError(28, "No space left on device")
        append_lines(path, rows)

    monkeypatch.setattr(train, "append_lines", full)
    config = tiny_config(tmp_path, save_every=1)
    sentence = refuse(capsys, *flags_of(config))
    assert f"run folder {config.run} could not be written (No space left on device); make room" in sentence
    assert sentence.endswith(f"go on with --resume {config.run}")


def test_nan_gradients_stop_the_run_after_several_in_a_row(tiny, monkeypatch, tmp_path, capsys):
    """Steps 2 and 3 are bad and skipped, step 4 is good, and from step 5 on all are bad: the end is step 9."""
    original, step = update_module.exgrpo_loss, 0
    update = train.update_policy

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal step
        step += 1
        return update(*args, **kwargs)

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        parts = original(*args, **kwargs)
        if step in (2, 3) or step >= 5:
            parts.loss = parts.loss * float("nan")
        return parts

    monkeypatch.setattr(train, "update_policy", count)
    monkeypatch.setattr(update_module, "exgrpo_loss", poisoned)
    config = tiny_config(tmp_path, steps=20)
    sentence = refuse(capsys, *flags_of(config))
    assert "NaN or infinite in 5 steps in a row" in sentence and "--lr" in sentence
    rows = metrics(config)
    assert rows[-1]["step"] == 9
    assert [row["skipped_updates"] for row in rows[1:]] == [0, 1, 1, 0, 1, 1, 1, 1, 1]
    state = Path(config.run) / "checkpoints" / "step-000009"
    policy = load_policy(str(state / "model"), device=torch.device("cpu"))
    assert all(torch.isfinite(p).all() for p in policy.model.parameters())  # the weights before the bad steps


def test_diverged_weights_end_with_one_sentence(tiny, monkeypatch, tmp_path, capsys):
    update = train.update_policy

    def explode(policy: Any, *args: Any, **kwargs: Any) -> Any:
        result = update(policy, *args, **kwargs)
        policy.model.get_input_embeddings().weight.data.fill_(float("nan"))
        return result

    monkeypatch.setattr(train, "update_policy", explode)
    sentence = refuse(capsys, *flags_of(tiny_config(tmp_path)))
    assert "diverged" in sentence and "--lr" in sentence


# ------------------------------------------------------------------------------------ a real model's road


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_any_model_folder_with_warm_up_data(tmp_path, family):
    """A saved model of another family, JSONL questions and demonstrations, checkpointing on: the whole road."""
    from conftest import build

    policy = build(family)
    policy.model.save_pretrained(tmp_path / "m")
    policy.tokenizer.save_pretrained(tmp_path / "m")
    word = (lambda i: str(i)) if family == "qwen2" else (lambda i: f"w{i}")
    data, demos = tmp_path / "d.jsonl", tmp_path / "demos.jsonl"
    data.write_text("".join(json.dumps({"q": word(i), "a": i}) + "\n" for i in range(20)))
    demos.write_text("".join(json.dumps({"question": word(i), "response": word(i)}) + "\n" for i in range(20)))
    flags = [
        "--model", str(tmp_path / "m"), "--data", str(data), "--question-field", "q", "--answer-field", "a", "--held-out", "4",
        "--run", str(tmp_path / "run"), "--steps", "2", "--questions-per-step", "3", "--group-size", "3", "--max-response-length", "5",
        "--max-prompt-length", "20", "--warmup-steps", "3", "--warmup-batch", "4", "--warmup-data", str(demos), "--device", "cpu",
        "--system-prompt", word(1), "--start-threshold", "-1", "--save-every", "1", "--updates-per-step", "2",
    ]  # fmt: skip
    assert train.main(flags) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["preset"] == "24gb" and config["gradient_checkpointing"] is True
    again = load_policy(str(tmp_path / "run" / "model"), device=torch.device("cpu"))
    assert again.stop_ids == policy.stop_ids
    assert train.main(["--resume", str(tmp_path / "run"), "--steps", "3"]) == 0


# -------------------------------------------------------------------------------------------- learning

LEARNING = (
    "--steps 80 --eval-every 0 --toy-largest 5 --toy-fewest-terms 2 --toy-most-terms 4 --toy-questions 500 --held-out 100 "
    "--toy-hidden 64 --toy-layers 1 --toy-demonstrations 775 --toy-skill-steps 600 --toy-skill-lr 1e-2 --warmup-steps 60 "
    "--warmup-batch 32 --warmup-lr 1e-3 --toy-reasoning 0.2 --questions-per-step 16 --max-response-length 10 --lr 5e-4 --device cpu"
)


@pytest.mark.parametrize("algo", ["exgrpo", "grpo"])
def test_the_toy_learns(tmp_path_factory, algo, capsys):
    """`python train.py`, smaller: sums of two to four numbers, from seldom right to mostly right. (Three seeds of either
    algorithm started between 0.05 and 0.20 and ended between 0.76 and 0.94.)"""
    folder = tmp_path_factory.getbasetemp() / "learning"  # both share the warmed-up policy
    run = folder / algo
    assert train.main(["--run", str(run), "--algo", algo, *LEARNING.split()]) == 0
    rows = read_lines(run / "metrics.jsonl")
    first, last = rows[0], rows[-1]
    assert last["step"] == 80 and first["eval/accuracy"] < 0.3
    assert last["eval/accuracy"] > 0.6 and sum(row["reward"] for row in rows[-10:]) / 10 > 0.4  # retired: what is easy is no longer asked
    assert last["eval/low"] > first["eval/high"]  # the 95 % intervals do not even touch
    if algo == "exgrpo":
        assert last["replay/started"] and last["buffer/retired"] > 20 and max(r.get("replay/questions", 0) for r in rows) == 8
    else:
        assert not any(row.get("replay/started") for row in rows) and last["buffer/retired"] == 0
        twin = read_lines(folder / "exgrpo" / "metrics.jsonl")
        if twin:  # the same start, and the same number of rollouts until replay begins
            assert twin[0]["eval/accuracy"] == first["eval/accuracy"]
    out = capsys.readouterr().out
    assert f"improved: {first['eval/accuracy']:.3f} [" in out and f"] -> {last['eval/accuracy']:.3f} [" in out and "(100 questions" in out
    for name in ("config.json", "metrics.jsonl", "samples.jsonl", "model/config.json"):
        assert (run / name).exists(), name
    load_policy(str(run / "model"), device=torch.device("cpu"))


def test_the_summary_says_what_changed_and_how_sure_that_is(tmp_path):
    """By hand: 0.2 in [0.1, 0.3] to 0.6 in [0.5, 0.7] is 0.4 more, give or take the hypotenuse of 0.1 and 0.1."""
    rows = [
        {"step": s, "eval/accuracy": a, "eval/low": a - 0.1, "eval/high": a + 0.1, "eval/questions": 50}
        for s, a in ((0, 0.2), (5, 0.9), (10, 0.6))
    ]
    for end, words in ((0.6, "improved"), (0.25, "did not change beyond chance"), (-0.1, "fell")):
        rows[-1].update({"eval/accuracy": end, "eval/low": end - 0.1, "eval/high": end + 0.1})
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        text = summary(tmp_path, resolve({}))
        gain = end - 0.2
        assert f"accuracy {words}: 0.200" in text and "(50 questions, 10 steps of exgrpo" in text
        assert f"difference of {gain:+.3f} [{gain - 0.02**0.5:+.3f}, {gain + 0.02**0.5:+.3f}]" in text


def test_the_toy_refuses_words_that_it_would_drop(tmp_path, capsys):
    data = tmp_path / "words.jsonl"
    data.write_text("".join(json.dumps({"question": f"What is {i} + 1?", "answer": str(i + 1)}) + "\n" for i in range(9)))
    flags = ["--data", str(data), "--held-out", "2", "--run", str(tmp_path / "r"), "--warmup-steps", "0", "--toy-skill-steps", "0"]
    assert train.main(flags) == 2
    assert "the toy reads only sums" in capsys.readouterr().err
