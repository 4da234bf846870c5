"""The loop: whole steps driven by scripted rewards, its metrics, and the toy that learns."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import metrics, tiny_config
from test_policy import plain

import train
from nano_exgrpo import replay as replay_module
from nano_exgrpo import update as update_module
from nano_exgrpo.config import resolve
from nano_exgrpo.evaluation import evaluate as evaluate_module
from nano_exgrpo.infra import session as start_module
from nano_exgrpo.infra.loading import load_policy
from nano_exgrpo.infra.metrics import choose_samples, summary
from nano_exgrpo.infra.run_folder import read_lines
from nano_exgrpo.logprobs import token_logprobs
from nano_exgrpo.policy import encode_prompt
from nano_exgrpo.replay import ReplayBuffer
from nano_exgrpo.reward import grade
from nano_exgrpo.trajectory import Trajectory


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

        def grade(text: str, gold: str, letters: str) -> tuple[None, bool]:
            self.left[gold] -= 1
            return None, self.left[gold] >= 0

        def choose(*args: Any, **settings: Any) -> Any:
            chosen, scored_tokens = original.choose(*args, **settings)
            self.chosen.append(chosen)
            return chosen, scored_tokens

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
        monkeypatch.setattr(train, "grade", grade)
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


@pytest.mark.parametrize(
    ("ratio", "B", "expected"), [(0.0, 8, 0), (0.3, 8, 2), (0.49, 8, 3), (1.0, 8, 8), (0.58, 50, 29)]
)
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
        chosen, scored_tokens = original(policy, buffer, ids, **settings)
        for id, t in zip(ids, chosen, strict=True):
            stored = buffer.stored[id]
            with torch.no_grad():
                _, entropies = plain(
                    policy, [s.prompt_ids for s in stored], [s.response_ids for s in stored], settings["temperature"]
                )
            means = [row[: len(s.response_ids)].mean().item() for row, s in zip(entropies, stored)]
            best = min(means) if method == "lowest" else max(means)
            assert t.entropy == pytest.approx(best, abs=1e-5) and t.replayed
            assert any(
                torch.equal(t.response_ids, s.response_ids) for s, m in zip(stored, means) if abs(m - best) < 1e-5
            )
            seen += len(stored) > 3
        return chosen, scored_tokens

    monkeypatch.setattr(train, "choose_trajectories", check)
    script.run(
        tmp_path, steps=8, group_size=4, lr=3e-2, max_response_length=4, start_threshold=-1.0, trajectory_choice=method
    )
    assert seen > 5


def test_a_question_can_be_asked_again_without_a_stored_trajectory(tiny, monkeypatch, tmp_path):
    """The control for replay: the buffer says which questions to ask, and all K of their trajectories are fresh."""
    script = Script(monkeypatch, tmp_path, 40, lambda step, id: 2)
    rows = script.run(
        tmp_path, steps=3, questions_per_step=8, group_size=4, start_threshold=-1.0, trajectory_choice="none"
    )
    assert [row["replay/questions"] for row in rows] == [0, 4, 4]  # replayed all the same
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
    train.train(
        tiny_config(tmp_path, steps=1, shaping=False, importance_correction=False, beta=0.3, normalize_rows=False)
    )
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


def test_every_metric_equals_an_independent_recomputation(tiny, monkeypatch, tmp_path):
    """From the trajectories of each step and the weights before it; by plain logits, one row at a time."""
    import copy

    script = Script(monkeypatch, tmp_path, 16, lambda step, id: (int(id[1:]) * 7 + step) % 5)
    snapshots, scored = [], Counter()
    update, entropies = train.update_policy, replay_module.mean_entropies
    monkeypatch.setattr(
        replay_module,
        "mean_entropies",
        lambda p, ps, rs, **k: scored.update({script.step + 1: sum(map(len, rs))}) or entropies(p, ps, rs, **k),
    )
    monkeypatch.setattr(
        train,
        "update_policy",
        lambda policy, *a, **k: snapshots.append(copy.deepcopy(policy)) or update(policy, *a, **k),
    )
    rows = script.run(
        tmp_path,
        steps=6,
        group_size=4,
        start_threshold=-1.0,
        lr=1e-2,
        max_response_length=5,
        log_samples=-1,
        eval_every=3,
        temperature=0.9,
    )
    samples = read_lines(tmp_path / "run" / "samples.jsonl")
    total_tokens, replays = 0, 0
    for step, (row, groups, policy, state) in enumerate(
        zip(rows, script.groups, snapshots, script.states, strict=True), start=1
    ):
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
                weight, shaped, replay_tokens = (
                    weight + w.sum().item(),
                    shaped + (w / (w + 0.1)).sum().item(),
                    replay_tokens + len(w),
                )
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
            "completions/clipped_ratio": sum(
                policy.tokenizer.eos_token_id not in t.response_ids.tolist() for t in fresh
            )
            / len(fresh),
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
        known = {
            *expected,
            "buffer/buckets",
            "epoch",
            "tokens_per_second",
            "eval/accuracy",
            "eval/low",
            "eval/high",
            "eval/questions",
        }
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
            assert s["entropy"] == pytest.approx(ent.mean().item(), abs=1e-3) and len(s["tokens"]) == len(
                t.response_ids
            )
    assert replays >= 4


def test_held_out_questions_are_never_trained_on(tiny, monkeypatch, tmp_path):
    trained, evaluated = set(), set()
    rollout, evaluate = train.rollout, train.evaluate
    monkeypatch.setattr(
        train, "rollout", lambda p, asked, *a, **k: trained.update(id for id, _ in asked) or rollout(p, asked, *a, **k)
    )
    monkeypatch.setattr(
        train, "evaluate", lambda p, qs, *a, **k: evaluated.update(q.id for q in qs) or evaluate(p, qs, *a, **k)
    )
    train.train(tiny_config(tmp_path, steps=12))
    assert len(trained) == 24 and len(evaluated) == 5 and not trained & evaluated


def test_multiple_choice_is_asked_and_graded_alike_in_training_and_evaluation(monkeypatch, tmp_path):
    """Golds as letters and as texts; a policy that always gives the letter is always right, the text of the option is not."""
    from conftest import build

    policy = build("llama")
    policy.model.save_pretrained(tmp_path / "m")
    policy.tokenizer.save_pretrained(tmp_path / "m")
    rows = [{"question": f"w{i}", "choices": ["iron", "argon"], "answer": "B" if i % 2 else "argon"} for i in range(12)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = set()
    for answer, right in (("B", 1.0), ("argon", 0.0)):
        for module in (train, evaluate_module):
            monkeypatch.setattr(module, "grade", lambda text, *gold: grade(f"\\boxed{{{answer}}}", *gold))  # noqa: B023
        monkeypatch.setattr(
            start_module,
            "encode_prompt",
            lambda policy, prompt, system: asked.add(prompt) or encode_prompt(policy, prompt, system),
        )
        config = tiny_config(
            tmp_path / answer, model=str(tmp_path / "m"), data=str(tmp_path / "d.jsonl"), held_out=4, steps=1,
            max_response_length=2, max_prompt_length=60, preset="none",
        )  # fmt: skip
        monkeypatch.setattr(train, "plot_curves", lambda *args: None)
        train.train(config)
        first, last = metrics(config)
        assert first["eval/accuracy"] == last["eval/accuracy"] == last["reward"] == right
    assert len(asked) == 12 and all("A. iron\nB. argon" in prompt for prompt in asked)


def test_evaluation_asks_as_training_does_but_at_its_own_temperature(tiny, monkeypatch, tmp_path):
    """Before and after: the same system prompt and longest response. (The toy's template has no place for a system prompt,
    so it is caught on its way there.)"""
    asked, generated = [], []
    encode, generate = evaluate_module.encode_prompt, evaluate_module.generate_responses

    def spy(policy: Any, prompts: Any, samples: Any, **settings: Any) -> Any:
        generated.extend([(settings["temperature"], settings["max_new_tokens"], settings["top_p"])] * len(prompts))
        return generate(policy, prompts, samples, **settings)

    monkeypatch.setattr(
        evaluate_module, "encode_prompt", lambda policy, *text: asked.append(text) or encode(policy, *text)
    )
    monkeypatch.setattr(evaluate_module, "generate_responses", spy)
    config = tiny_config(tmp_path, steps=1, system_prompt="Add.", temperature=0.9, eval_temperature=0.4, eval_samples=2)
    train.train(config)
    held_out = start_module.load_data(config)[1]
    assert asked == 2 * [(q.prompt, "Add.") for q in held_out] and generated == 2 * 2 * len(held_out) * [(0.4, 6, 1.0)]


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
    assert (
        last["eval/accuracy"] > 0.6 and sum(row["reward"] for row in rows[-10:]) / 10 > 0.4
    )  # retired: what is easy is no longer asked
    assert last["eval/low"] > first["eval/high"]  # the 95 % intervals do not even touch
    if algo == "exgrpo":
        assert (
            last["replay/started"]
            and last["buffer/retired"] > 20
            and max(r.get("replay/questions", 0) for r in rows) == 8
        )
    else:
        assert not any(row.get("replay/started") for row in rows) and last["buffer/retired"] == 0
        twin = read_lines(folder / "exgrpo" / "metrics.jsonl")
        if twin:  # the same start, and the same number of rollouts until replay begins
            assert twin[0]["eval/accuracy"] == first["eval/accuracy"]
    out = capsys.readouterr().out
    assert (
        f"improved: {first['eval/accuracy']:.3f} [" in out
        and f"] -> {last['eval/accuracy']:.3f} [" in out
        and "(100 questions" in out
    )
    for name in ("config.json", "metrics.jsonl", "samples.jsonl", "model/config.json"):
        assert (run / name).exists(), name
    load_policy(str(run / "model"), device=torch.device("cpu"))


def test_logged_samples_are_of_replayed_and_of_fresh_groups(tiny, monkeypatch, tmp_path):
    """B 8, K 4, half of it replayed, and eight rows a step: two of every second group, the first of each in the order of the batch."""
    script = Script(monkeypatch, tmp_path, 40, lambda step, id: 2)
    script.run(tmp_path, steps=3, questions_per_step=8, group_size=4, start_threshold=-1.0, log_samples=8)
    samples = [row for row in read_lines(tmp_path / "run" / "samples.jsonl") if row["step"] == 3]
    expected = [t for group in script.groups[2][::2] for t in group[:2]]
    assert [(s["question"], s["response"], s["replayed"]) for s in samples] == [
        (t.question_id, t.text, t.replayed) for t in expected
    ]
    assert [s["replayed"] for s in samples] == [True, False, True, False, False, False, False, False]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 15, 16, 31, 32, 99, -1])
def test_as_many_samples_are_logged_as_asked_for(count):
    groups = [[Trajectory(str(g), torch.tensor([0]), torch.tensor([k]), "") for k in range(4)] for g in range(8)]
    chosen = [(t.question_id, int(t.response_ids)) for t in choose_samples(groups, count)]
    assert len(set(chosen)) == len(chosen) == (min(count, 32) if count >= 0 else 32)
    assert chosen == sorted(chosen) and len({id for id, _ in chosen}) == (
        min(8, math.ceil(count / 2)) if count >= 0 else 8
    )


def test_the_summary_suggests_what_works(tiny, monkeypatch, tmp_path, capsys):
    """Its commands, run as they stand: the evaluation, and then its wrong responses."""
    import eval as script

    config = tiny_config(tmp_path, steps=1)
    train.train(config)
    (flags,) = re.findall(r"python eval\.py (.+), then the same with --show wrong", capsys.readouterr().out)
    assert script.main(flags.split()) == 0 and script.main([*flags.split(), "--show", "wrong"]) == 0


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
