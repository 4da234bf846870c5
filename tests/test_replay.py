"""The replay buffer: buckets, draws, choices, retirement, and its state."""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

import pytest
import torch

from nano_exgrpo.questions import Question
from nano_exgrpo.replay import ReplayBuffer
from nano_exgrpo.trajectory import Trajectory

K = 8


def asked(id: str) -> Question:
    return Question(id, "?", "", prompt_ids=torch.tensor([0]))


def success(id: str, *ids: int, reward: float = 1.0, scored: bool = True) -> Trajectory:
    response = torch.tensor(ids or (1, 2))
    logprobs = -torch.arange(1.0, len(response) + 1) if scored else None
    return Trajectory(asked(id), response, "text", reward=reward, logprobs=logprobs)


def drawn(buffer: ReplayBuffer, count: int, **settings: Any) -> list[str]:
    """Ids of the questions that it draws."""
    return [question.id for question in buffer.draw_questions(count, **settings)]


def group(id: str, successes: int, *, size: int = K, start: int = 0) -> list[Trajectory]:
    """`size` different trajectories, the first `successes` of them right."""
    return [success(id, start + i, reward=float(i < successes)) for i in range(size)]


def filled(buckets: dict[int, int], seed: int = 0) -> ReplayBuffer:
    """A buffer with so many questions in each bucket, named "k-i"."""
    buffer = ReplayBuffer(K, seed=seed)
    for k, count in buckets.items():
        for i in range(count):
            buffer.update(group(f"{k}-{i}", k))
    return buffer


# ------------------------------------------------------------------------------------------ update


@pytest.mark.parametrize("k", range(K + 1))
def test_bucket_is_the_number_of_successes(k):
    buffer = ReplayBuffer(K, seed=0)
    buffer.update(group("q", k))
    assert buffer.eligible() == ({k: ["q"]} if 0 < k < K else {})
    assert list(buffer.retired) == (["q"] if k == K else [])
    assert len(buffer) == (k if k < K else 0)


def test_latest_group_decides_and_a_failed_one_changes_nothing():
    buffer = ReplayBuffer(K, seed=0)
    buffer.update(group("q", 3))
    buffer.update(group("q", 6, start=10))
    assert buffer.eligible() == {6: ["q"]} and len(buffer) == 9
    before = [tuple(t.response_ids.tolist()) for t in buffer.stored["q"]]
    buffer.update(group("q", 0, start=20))
    assert buffer.eligible() == {6: ["q"]} and [tuple(t.response_ids.tolist()) for t in buffer.stored["q"]] == before


def test_only_successes_are_stored_each_sequence_once_with_its_first_log_probabilities():
    buffer = ReplayBuffer(4, seed=0)
    again = success("q", 5, 6)
    again.logprobs = torch.tensor([-9.0, -9.0])
    buffer.update([success("q", 5, 6), success("q", 5, 6), success("q", 7), success("q", 8, reward=0.0)])
    buffer.update([again, success("q", 9), success("q", 3, reward=0.0), success("q", 4, reward=0.0)])
    assert [t.response_ids.tolist() for t in buffer.stored["q"]] == [[5, 6], [7], [9]]
    assert buffer.stored["q"][0].logprobs.tolist() == [-1.0, -2.0]
    assert buffer.bucket["q"] == 2


def test_the_replayed_row_counts_as_a_success_but_is_not_stored_again():
    buffer = ReplayBuffer(4, seed=0)
    buffer.update(group("q", 1, size=4))
    old = buffer.choose(asked("q"), [0.5])
    buffer.update([old, success("q", 11), success("q", 12, reward=0.0), success("q", 13, reward=0.0)])
    assert buffer.bucket["q"] == 2 and len(buffer) == 2
    # Alone against three failures it is one success of four.
    buffer.update([buffer.choose(asked("q"), [0.5, 0.6])] + [success("q", 20 + i, reward=0.0) for i in range(3)])
    assert buffer.bucket["q"] == 1 and len(buffer) == 2
    # With three fresh successes all four succeed: nothing is left to learn.
    buffer.update([buffer.choose(asked("q"), [0.5, 0.6])] + [success("q", 30 + i) for i in range(3)])
    assert list(buffer.retired) == ["q"] and len(buffer) == 0 and buffer.bucket == {}


def test_retired_stays_retired():
    buffer = ReplayBuffer(K, seed=0)
    buffer.update(group("q", K))
    buffer.update(group("q", 4))
    assert list(buffer.retired) == ["q"] and buffer.eligible() == {} and buffer.draw_questions(5) == []


def test_where_retirement_is_off_a_solved_question_waits_outside_the_draw():
    buffer = ReplayBuffer(K, seed=0)
    buffer.update(group("q", 3))
    buffer.update(group("q", K, start=10), may_retire=False)
    assert not buffer.retired and buffer.eligible() == {} and len(buffer) == 11
    buffer.update(group("q", 5, start=30), may_retire=False)
    assert buffer.eligible() == {5: ["q"]}


def test_a_success_without_log_probabilities_cannot_be_replayed_and_is_not_stored():
    buffer = ReplayBuffer(4, seed=0)
    buffer.update([success("q", 1, scored=False), success("q", 2, reward=0.0)])
    assert len(buffer) == 0 and buffer.eligible() == {}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_log_probabilities_that_are_not_finite_are_never_stored(bad):
    """Not even beside good ones of the same group, and one bad token is enough."""
    buffer = ReplayBuffer(4, seed=0)
    spoiled = success("q", 1, 2, 3)
    spoiled.logprobs[1] = bad
    buffer.update([spoiled, success("q", 9, reward=0.0)])
    assert len(buffer) == 0 and buffer.eligible() == {} and drawn(buffer, 1) == []
    buffer.update([spoiled, success("q", 4), success("q", 9, reward=0.0)])
    assert [t.response_ids.tolist() for t in buffer.stored["q"]] == [[4]]


@pytest.mark.parametrize("limit", [1, 2, 0])
def test_capacity_keeps_the_newest(limit):
    buffer = ReplayBuffer(4, seed=0, max_per_question=limit)
    for n in range(1, 6):
        buffer.update([success("q", n), success("q", 99, reward=0.0)])
    kept = [t.response_ids.item() for t in buffer.stored["q"]]
    assert kept == ([1, 2, 3, 4, 5] if limit == 0 else [5] if limit == 1 else [4, 5])


# ------------------------------------------------------------------------------------------ draw


def chi_square(counts, probabilities) -> float:
    total = sum(counts.values())
    return sum((counts[k] - total * p) ** 2 / (total * p) for k, p in probabilities.items())


@pytest.mark.parametrize("sigma", [1.0, 2.0, 8.0])
def test_buckets_are_drawn_by_a_normal_in_counts(sigma):
    """Weights exp(−(k − K/2)² / 2σ²) over buckets 1..7, whatever their sizes; chi-square, 6 degrees of freedom:
    22.5 is exceeded once in 1,000 seeds."""
    buffer = filled({1: 3, 2: 1, 3: 5, 4: 2, 5: 4, 6: 1, 7: 6})
    weights = {k: torch.tensor(-((k - 4) ** 2) / (2 * sigma**2)).exp().item() for k in range(1, 8)}
    probabilities = {k: w / sum(weights.values()) for k, w in weights.items()}
    counts = Counter(int(drawn(buffer, 1, sigma=sigma)[0].split("-")[0]) for _ in range(5000))
    assert chi_square(counts, probabilities) < 22.5
    if sigma == 1.0:  # the numbers of the paper's figure: 0.4 in the middle, 0.24 beside it, 0.05 and 0.004 outside
        assert probabilities[4] == pytest.approx(0.399, abs=0.001) and probabilities[1] == pytest.approx(
            0.0044, abs=0.0002
        )


def test_inside_a_bucket_all_questions_are_alike_and_none_comes_twice():
    buffer = filled({4: 5})
    counts: Counter[str] = Counter()
    for _ in range(1000):
        ids = drawn(buffer, 3)
        assert len(set(ids)) == 3
        counts.update(ids)
    assert chi_square(counts, {f"4-{i}": 0.2 for i in range(5)}) < 18.5  # 4 degrees of freedom, 0.001


def test_uniform_draw_ignores_buckets():
    buffer = filled({1: 3, 4: 3, 7: 4})
    counts = Counter(drawn(buffer, 1, method="uniform")[0] for _ in range(3000))
    assert len(counts) == 10 and chi_square(counts, dict.fromkeys(counts, 0.1)) < 27.9  # 9 degrees, 0.001


@pytest.mark.parametrize("method", ["gaussian", "uniform"])
def test_asking_for_more_than_there_is(method):
    buffer = filled({4: 2, 1: 3})
    assert sorted(drawn(buffer, 99, method=method)) == ["1-0", "1-1", "1-2", "4-0", "4-1"]
    assert buffer.draw_questions(0, method=method) == []
    assert ReplayBuffer(K, seed=0).draw_questions(3, method=method) == []
    assert sorted(buffer.stored) == ["1-0", "1-1", "1-2", "4-0", "4-1"]  # drawing takes nothing out


def test_a_surplus_goes_to_the_other_buckets():
    counts = Counter(id[0] for id in drawn(filled({4: 2, 7: 10}), 6, sigma=0.2))
    assert counts == {"4": 2, "7": 4}


def test_tiny_sigma_does_not_underflow():
    assert len(filled({1: 1, 7: 1}).draw_questions(2, sigma=1e-3)) == 2


def test_group_of_two_has_one_bucket():
    buffer = ReplayBuffer(2, seed=0)
    buffer.update([success("q", 1), success("q", 2, reward=0.0)])
    assert buffer.eligible() == {1: ["q"]} and drawn(buffer, 1) == ["q"]


# ---------------------------------------------------------------------------------------- choose


def test_choice_by_entropy():
    buffer = ReplayBuffer(K, seed=0)
    buffer.update(group("q", 4))
    entropies = [0.5, 0.2, 0.9, 0.2]
    lowest = buffer.choose(asked("q"), entropies)
    assert lowest.response_ids.tolist() == [1] and lowest.replayed and lowest.entropy == 0.2  # ties: the oldest
    assert buffer.choose(asked("q"), entropies, method="highest").response_ids.tolist() == [2]
    assert not any(t.replayed for t in buffer.stored["q"])  # what is stored stays as it is
    assert lowest.logprobs is buffer.stored["q"][1].logprobs
    picks = Counter(
        buffer.choose(asked("q"), [float("nan")] * 4, method="random").response_ids.item() for _ in range(2000)
    )
    assert chi_square(picks, dict.fromkeys(range(4), 0.25)) < 16.3  # 3 degrees of freedom, 0.001


# ----------------------------------------------------------------------------------------- state


def test_state_survives_torch_save_and_the_draws_go_on_alike():
    buffer = filled({2: 4, 4: 4, 6: 4}, seed=5)
    buffer.update(group("solved", K))
    buffer.draw_questions(3)
    file = io.BytesIO()
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    again = ReplayBuffer(K, seed=77)
    questions = {id: asked(id) for id in buffer.stored}
    again.load_state_dict(torch.load(file, weights_only=True), questions)
    assert (
        again.bucket == buffer.bucket
        and list(again.retired) == list(buffer.retired)
        and list(again.stored) == list(buffer.stored)
    )
    for id, trajectories in buffer.stored.items():
        for a, b in zip(trajectories, again.stored[id], strict=True):
            assert b.question is questions[id]
            plain = ("text", "reward", "truncated", "replayed")
            assert [getattr(a, name) for name in plain] == [getattr(b, name) for name in plain]
            assert torch.equal(a.response_ids, b.response_ids) and torch.equal(a.logprobs, b.logprobs)
    assert [buffer.draw_questions(4) for _ in range(20)] == [again.draw_questions(4) for _ in range(20)]
    assert buffer.choose(asked("2-0"), [0, 0], method="random").response_ids.equal(
        again.choose(asked("2-0"), [0, 0], method="random").response_ids
    )


def test_saved_state_does_not_change_with_the_buffer():
    buffer = filled({4: 1})
    state = buffer.state_dict()
    buffer.update(group("4-0", K, start=50))
    assert state["bucket"] == {"4-0": 4} and len(state["stored"]["4-0"]) == 4 and state["retired"] == []
