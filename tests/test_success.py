"""One definition of success: a reward of 0.5 is better than nothing, and right it is not. Everything asks `right`."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_config, trajectory
from scripted import Script

from nano_exgrpo.infra.session import held_out_metrics
from nano_exgrpo.loss import group_advantages, keep_difficulty
from nano_exgrpo.replay import ReplayBuffer

NOW = dict(start_threshold=-1.0)
HALF_RIGHT = [1.0, 0.5, 0.5, 0.5]
MOSTLY_RIGHT = [1.0, 1.0, 1.0, 0.5]
ONLY_BETTER = [0.5, 0.5, 0.0, 0.0]
ALL_BETTER = [0.5, 0.5, 0.5, 0.5]
ALL_RIGHT = [1.0, 1.0, 1.0, 1.0]


def test_a_group_of_half_and_full_rewards_teaches_and_is_not_retired():
    """One of each kind in a batch of five."""
    plans = [HALF_RIGHT, MOSTLY_RIGHT, ONLY_BETTER, ALL_BETTER, ALL_RIGHT]
    script = Script(20, lambda step, n, place: plans[place], questions_per_step=5, max_response_length=6, **NOW)
    step = script.step()
    half_right, mostly_right, only_better, all_better, all_right = step.asked
    assert step.taught == [True, True, True, False, False]  # as the rewards differ
    assert step.retired == [all_right]
    assert step.bucket == {half_right: 1, mostly_right: 3}
    assert {id: len(kept) for id, kept in script.buffer.stored.items()} == {half_right: 1, mostly_right: 3}
    assert all(t.reward == 1.0 for kept in script.buffer.stored.values() for t in kept)
    assert step.row["questions/solved"] == 1 / 5 and step.row["questions/failed"] == 2 / 5
    assert step.row["reward"] == pytest.approx((2.5 + 3.5 + 1 + 2 + 4) / 20)
    assert step.row["buffer/questions"] == 2 and step.row["buffer/trajectories"] == 4


def test_a_replayed_success_beside_half_rewards_keeps_its_question():
    """Its own reward is 1; the three fresh ones that are only better do not make the group a solved one."""
    script = Script(4, lambda step, n, place: HALF_RIGHT, **NOW)
    first, second = script.run(2)
    assert len(second.replayed) == 2 and second.retired == [] and set(second.bucket.values()) == {1}
    assert second.taught == [True] * 4
    assert all(t.right for kept in script.buffer.stored.values() for t in kept) and first.trajectories == 4


def test_the_delayed_start_counts_what_is_right():
    """Rewards of 0.5 throughout have a mean above the threshold of 0.35, and start nothing; 8 right of 20 do."""
    script = Script(40, lambda step, n, place: ALL_BETTER if step == 1 else [1.0, 1.0, 0.0, 0.0])
    first, second = script.run(2)
    assert first.row["reward"] == 0.5 and not first.row["replay/started"]
    assert second.row["reward"] == 0.5 and second.row["replay/started"]


@pytest.mark.parametrize(
    ("difficulty", "taught"),
    [
        ("all", [True, True, True, False]),
        ("hard", [True, False, False, False]),
        ("easy", [False, True, False, False]),
        ("medium", [False] * 4),
    ],
)
def test_difficulty_counts_what_is_right(difficulty, taught):
    """A quarter right is hard and three quarters are easy, whatever the others got. No difficulty has none right."""
    plans = [HALF_RIGHT, MOSTLY_RIGHT, ONLY_BETTER, ALL_BETTER]
    step = Script(20, lambda step, n, place: plans[place], difficulty=difficulty, max_response_length=6).step()
    assert step.taught == taught
    rewards = torch.tensor(plans)
    kept = keep_difficulty(group_advantages(rewards), rewards, difficulty)
    assert kept.any(1).tolist() == taught


@pytest.mark.parametrize(("difficulty", "taught"), [("hard", {1, 2}), ("medium", {3, 4, 5}), ("easy", {6, 7})])
def test_only_groups_of_the_chosen_difficulty_teach(difficulty, taught):
    """K 8, and every question has a number of successes of its own, 0 to 8."""
    script = Script(
        18, lambda step, n, place: n % 9, algo="grpo", questions_per_step=18, group_size=8, difficulty=difficulty
    )
    step = script.step()
    successes = [int(id[1:]) % 9 for id in step.asked]
    assert set(successes) == set(range(9)) and step.taught == [k in taught for k in successes]


@pytest.mark.parametrize("reward", [0.0, 0.5, 0.999, 1.0, 1.5, -1.0])
def test_only_a_reward_of_one_is_right(reward):
    t = trajectory([1], [2], reward=reward, logprobs=torch.zeros(1))
    assert t.right == (reward == 1.0)
    buffer = ReplayBuffer(2, seed=0)
    buffer.update([t, trajectory([1], [3], reward=0.5, logprobs=torch.zeros(1))])
    assert len(buffer) == t.right and not buffer.retired


def test_held_out_accuracy_counts_what_is_right(tmp_path):
    """Every second response is right, the others are only better."""
    config = tiny_config(tmp_path)
    script = Script(8, lambda step, n, place: 0)
    rewards = iter([1.0, 0.5] * 4)
    script.state.held_out, script.state.reward = script.state.questions, lambda t: next(rewards)
    found = held_out_metrics(script.state, config)
    assert found["eval/accuracy"] == 0.5 and found["eval/questions"] == 8
