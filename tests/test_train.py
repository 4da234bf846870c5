"""The loop: whole steps of `train_step`, driven by scripted rewards."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from conftest import metrics, tiny_config
from scripted import Script, plain, values

import train
from nano_exgrpo.infra.prepare import load_data
from nano_exgrpo.infra.run_folder import read_lines

NOW = dict(start_threshold=-1.0)  # replay from the first step on


def test_delayed_start_stays_on():
    """Success rates 5/20, 0.35 exactly (7/20), more, then none: replay starts with the third step for good."""
    rates = {1: [2, 2, 1, 0, 0], 2: [2, 2, 1, 1, 1], 3: [2, 2, 2, 2, 0]}
    # Later only the replayed row itself succeeds.
    script = Script(40, lambda step, n, place: rates[step][place] if step < 4 else 1, questions_per_step=5)
    steps = script.run(6)
    assert values(steps, "reward")[:3] == [0.25, 0.35, 0.4]
    assert values(steps, "replay/started") == [False, False, True, True, True, True]
    assert values(steps, "buffer/trajectories")[:3] == [0, 0, 8]  # storing begins with the step that starts it
    assert values(steps, "replay/questions") == [0, 0, 0, 2, 2, 2]  # ⌊0.5 · 5⌋
    assert steps[4].row["reward"] < 0.35


def test_start_threshold_minus_one_starts_at_once():
    steps = Script(20, lambda step, n, place: 1, **NOW).run(2)
    assert steps[0].row["replay/started"] and steps[1].row["replay/questions"] == 2


def test_buckets_follow_the_latest_group_and_groups_have_k_rows():
    """Each question's success count depends on it and on the step; the replayed row counts among the successes."""
    latest: dict[str, int] = {}
    steps = Script(13, lambda step, n, place: 1 + (n + step) % 3, **NOW).run(12)
    for number, step in enumerate(steps, start=1):
        assert len(step.asked) == 4 and len(set(step.asked)) == 4  # no question twice in a step
        again = [group[0].replayed for group in step.groups]
        assert again == sorted(again, reverse=True)  # replayed groups stand first
        for id, group in zip(step.asked, step.groups):
            assert len(group) == 4 and {t.question.id for t in group} == {id}
            assert not any(t.replayed for t in group[1:])
            latest[id] = 1 + (int(id[1:]) + number) % 3
            assert sum(t.reward for t in group) == latest[id]
        assert step.bucket == latest and step.retired == []
        counts = Counter(latest.values())
        assert step.row["buffer/buckets"] == {k: counts[k] for k in sorted(counts)}
    assert sum(values(steps, "replay/questions")) == 22


def test_draw_frequencies_in_the_loop():
    """Nine questions stay in buckets 1, 2, 3 of K = 4. One of two questions a step is replayed: chi-square against
    exp(−½) : 1 : exp(−½), 2 degrees of freedom; 13.8 is exceeded once in 1,000 seeds."""
    script = Script(9, lambda step, n, place: 1 + n % 3, questions_per_step=2, max_per_question=1, **NOW)
    counts: Counter[int] = Counter()
    before: dict[str, int] = {}
    for step in script.run(150):
        if len(set(before.values())) == 3:  # all three buckets hold something
            counts.update(1 + int(t.question.id[1:]) % 3 for t in step.replayed)
        before = step.bucket
    weights = {1: math.exp(-0.5), 2: 1.0, 3: math.exp(-0.5)}
    total, norm = sum(counts.values()), sum(weights.values())
    assert total > 130
    assert sum((counts[k] - total * w / norm) ** 2 / (total * w / norm) for k, w in weights.items()) < 13.8


def test_retirement_keeps_a_batch_and_the_retired_are_never_asked():
    steps = Script(13, lambda step, n, place: 4, **NOW).run(8)
    retired: set[str] = set()
    for step in steps:
        assert len(step.asked) == 4 and not set(step.asked) & retired  # always a full batch
        retired = set(step.retired)
    assert values(steps, "buffer/retired") == [4, 8, 9, 9, 9, 9, 9, 9]  # 13 to train on, 4 must stay
    assert steps[-1].row["buffer/questions"] == 0 and steps[-1].row["questions/solved"] == 1.0


def test_fewer_questions_than_a_batch():
    steps = Script(3, lambda step, n, place: 4, questions_per_step=8, **NOW).run(3)
    assert [len(step.asked) for step in steps] == [3, 3, 3] and steps[-1].row["buffer/retired"] == 0


def test_exhaustion_replays_what_there_is():
    """ρ = 1 wants 4 of 4, but only the 2 partly solved questions are eligible; fresh ones fill the batch. Once
    those two are solved as well, nothing is left to replay and the run goes on fresh."""
    partly: set[int] = set()

    def plan(step: int, n: int, place: int) -> int:
        if step == 1 and place < 2:
            partly.add(n)
        return (2 if step < 4 else 4) if n in partly else 0

    steps = Script(11, plan, replay_ratio=1.0, **NOW).run(7)
    assert values(steps, "replay/questions") == [0, 2, 2, 2, 0, 0, 0]
    assert all(len(step.asked) == 4 for step in steps)
    assert set(steps[-1].retired) == {f"q{n}" for n in partly} and steps[-1].trajectories == 0


@pytest.mark.parametrize(
    ("ratio", "B", "expected"), [(0.0, 8, 0), (0.3, 8, 2), (0.49, 8, 3), (1.0, 8, 8), (0.58, 50, 29)]
)
def test_share_of_replayed_questions(ratio, B, expected):
    """⌊ρB⌋; 0.58 · 50 is 28.999999999999996 in floating point."""
    plan = lambda step, n, place: 1  # noqa: E731
    steps = Script(5 * B, plan, questions_per_step=B, group_size=2, replay_ratio=ratio, **NOW).run(3)
    assert values(steps, "replay/questions") == [0, expected, expected]
    assert steps[2].row["rollouts"] == B * 2 - expected  # K − 1 beside a replayed trajectory


def test_failed_groups_leave_stored_successes_and_bucket():
    """With ρ = 0 nothing is replayed; a question that succeeds at first and fails on its second turn keeps both."""
    script = Script(4, lambda step, n, place: 2 if step == 1 else 0, replay_ratio=0.0, **NOW)
    first, second = script.run(2)
    assert first.bucket == second.bucket and set(second.bucket.values()) == {2}
    assert sorted(first.asked) == sorted(second.asked) and first.trajectories == second.trajectories


@pytest.mark.parametrize("method", ["lowest", "highest"])
def test_trajectory_choice_is_by_entropy_under_the_current_policy(method):
    """Recomputed independently at every step with the policy as it is then, over response tokens alone."""
    plan = lambda step, n, place: 3  # noqa: E731
    script = Script(5, plan, lr=3e-2, max_response_length=4, trajectory_choice=method, **NOW)
    seen = 0
    for step in script.run(8):
        for chosen in step.replayed:
            stored = step.stored[chosen.question.id]
            with torch.no_grad():
                means = [plain(step.policy, t)[1].mean().item() for t in stored]
            best = min(means) if method == "lowest" else max(means)
            assert chosen.entropy == pytest.approx(best, abs=1e-5)
            assert any(
                torch.equal(chosen.response_ids, t.response_ids) for t, m in zip(stored, means) if abs(m - best) < 1e-5
            )
            seen += len(stored) > 3
    assert seen > 5


def test_a_question_can_be_asked_again_without_a_stored_trajectory():
    """The control for replay: the buffer says which questions to ask, and all K of their trajectories are fresh."""
    script = Script(40, lambda step, n, place: 2, questions_per_step=8, trajectory_choice="none", **NOW)
    steps = script.run(3)
    assert values(steps, "replay/questions") == [0, 4, 4]  # replayed all the same
    first = set(steps[0].asked)
    assert set(steps[1].asked[:4]) <= first and not set(steps[1].asked[4:]) & first
    assert all(len(group) == 4 for step in steps for group in step.groups)
    assert not any(step.replayed for step in steps)


def test_replayed_log_probabilities_are_those_of_the_generating_policy():
    """π_past is what the policy said when it sampled, through all later steps: recomputed from kept weights."""
    plan = lambda step, n, place: 2  # noqa: E731
    steps = Script(5, plan, lr=3e-2, max_response_length=4, temperature=0.8, **NOW).run(5)
    born, checked = {}, 0
    for number, step in enumerate(steps):
        for t in step.fresh:
            born.setdefault((t.question.id, tuple(t.response_ids.tolist())), number)
        for t in step.replayed:
            origin = born[t.question.id, tuple(t.response_ids.tolist())]
            with torch.no_grad():
                expected, now = plain(steps[origin].policy, t)[0], plain(step.policy, t)[0]
            assert origin < number and torch.allclose(t.logprobs, expected, atol=1e-5)
            assert not torch.allclose(t.logprobs, now, atol=1e-3)
            checked += 1
    assert checked == 8


@pytest.mark.parametrize("clip_when_mixed", [True, False])
def test_clip_of_fresh_rows_once_mixing_has_started(clip_when_mixed):
    """The second update of a step finds a policy that has moved away from π_old, so there is something to clip."""
    plan = lambda step, n, place: 2  # noqa: E731
    script = Script(20, plan, start_threshold=0.4, updates_per_step=2, lr=0.1, clip_when_mixed=clip_when_mixed)
    clipped = values(script.run(2), "clip_ratio")
    assert clipped[0] > 0 and (clipped[1] > 0) == clip_when_mixed


@pytest.mark.parametrize(
    ("settings", "shaped"),
    [
        (dict(beta=0.3), lambda weight: weight / (weight + 0.3)),
        (dict(shaping=False), lambda weight: weight),
        (dict(importance_correction=False), lambda weight: weight.new_ones(()) / 1.1),
        (dict(importance_correction=False, shaping=False), lambda weight: weight.new_ones(())),
    ],
    ids=["beta", "no shaping", "no correction", "neither"],
)
def test_ablation_flags_reach_the_loss(settings, shaped):
    """The mean of f(w*) over replayed tokens, from the policy before the step and the log-probabilities stored."""
    _, step = Script(4, lambda step, n, place: 2, lr=3e-2, **NOW, **settings).run(2)
    with torch.no_grad():
        weight = torch.cat([(plain(step.policy, t)[0] - t.logprobs).exp() for t in step.replayed])
    assert (weight - 1).abs().max() > 0.01
    assert step.row["replay/ratio_mean"] == pytest.approx(shaped(weight).mean().item(), rel=1e-4)


def test_the_released_code_divides_by_the_length_alone():
    one, other = (
        Script(8, lambda step, n, place: 1, normalize_rows=rows).step().row["grad_norm"] for rows in (True, False)
    )
    assert one > 0 and other == pytest.approx(16 * one, rel=1e-4)  # the 16 rows


def untimed(row: dict) -> dict:
    return {k: v for k, v in row.items() if not k.startswith("time/") and k != "tokens_per_second"}


def test_grpo_is_the_loop_without_replay_and_retirement():
    plan = lambda step, n, place: 4 if n % 2 else 2  # noqa: E731
    steps = Script(8, plan, algo="grpo", **NOW).run(5)
    assert all(len(step.fresh) == 16 for step in steps)
    assert (steps[-1].bucket, steps[-1].retired, steps[-1].trajectories) == ({}, [], 0)
    assert not any(values(steps, "replay/started"))
    # With replay off, exgrpo before its start is the same thing to the bit.
    twin = Script(8, plan, start_threshold=1.0).run(5)
    assert [untimed(step.row) for step in steps] == [untimed(step.row) for step in twin]


def test_held_out_questions_are_never_trained_on(tiny, tmp_path):
    config = tiny_config(tmp_path, steps=12, log_samples=-1)
    train.train(config)
    trained = {row["question"] for row in read_lines(tmp_path / "run" / "samples.jsonl")}
    held_out = {question.id for question in load_data(config)[1]}
    assert len(trained) == 24 and len(held_out) == 5 and not trained & held_out
    assert metrics(config)[0]["eval/questions"] == 5
