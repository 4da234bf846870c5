"""The loss: golden values, values worked out by hand, and proofs by enumeration of all outcomes."""

from __future__ import annotations

import copy
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tabular import answers, exact_probabilities, outcomes, tabular_policy

from nano_exgrpo.loss import LOSS_SUMS, exgrpo_loss, group_advantages, on_policy_term, shape


def loss_and_gradient(logprobs, old, advantages, lengths, replayed, **settings):
    logprobs = torch.as_tensor(logprobs, dtype=torch.float64).clone().requires_grad_()
    mask = torch.arange(logprobs.shape[1])[None] < torch.tensor(lengths)[:, None]
    loss, sums = exgrpo_loss(
        logprobs, torch.as_tensor(old, dtype=torch.float64), torch.as_tensor(advantages, dtype=torch.float64),
        mask, torch.tensor(replayed), **settings,
    )  # fmt: skip
    loss.backward()
    return SimpleNamespace(loss=loss, **sums), logprobs.grad


# ------------------------------------------------------------------------------------ golden values


RELEASED = Path(__file__).resolve().parent / "released_loss.json"


def test_equals_the_released_loss():
    """released_loss.json holds seven cases, computed once in float64 with the loss of the authors' released code, as
    its run script configures it, on random inputs. Three are from before mixing starts ("on-policy"), where it clips,
    four from after it ("mixed"), where it does not. Each has K rows of `lengths` tokens, and padding after them.

    What goes in: the log-probability of each token under the current policy and under the policy that produced it, the
    rewards, and which rows are replayed. What comes out: the advantages, the loss (it is divided by L =
    max_response_length alone), its gradient, and the mean of f(w*) over the replayed tokens."""
    cases = json.loads(RELEASED.read_text(encoding="utf-8"))
    assert len(cases) == 7 and {case["phase"] for case in cases} == {"on-policy", "mixed"}
    for case in cases:
        advantages = group_advantages(torch.tensor([case["rewards"]], dtype=torch.float64))[0]
        assert torch.allclose(advantages, torch.tensor(case["advantages"], dtype=torch.float64), atol=1e-9)
        parts, gradient = loss_and_gradient(
            case["logprobs"], case["old_logprobs"], advantages, case["lengths"], case["replayed"],
            denominator=case["max_response_length"], clip_range=0.2 if case["phase"] == "on-policy" else None,
        )  # fmt: skip
        assert abs(parts.loss.item() - case["loss"]) < 1e-8
        assert (gradient - torch.tensor(case["grad_logprobs"], dtype=torch.float64)).abs().max() < 1e-8
        if case["replay_ratio_mean"] is not None:
            assert abs((parts.replay_ratio / parts.replay_tokens).item() - case["replay_ratio_mean"]) < 1e-8


def test_a_mixed_group_worked_out_by_hand():
    """K = 2, L = 2. The replayed row (A = 1/2): w* = 1 and 1/2, f = 10/11 and 5/6. The fresh row (A = −1/2),
    one token: w = 2. Released form, no clip: −(10/11 + 5/6)/2/2 + 2/2/2.
    Gradients: −A β w/(w+β)²/L = −(0.1/1.21)/4 and −(0.05/0.36)/4; fresh +w/2/2."""
    half, two = math.log(0.5), math.log(2.0)
    parts, gradient = loss_and_gradient(
        [[-1.0, half], [two - 3, 9.0]], [[-1.0, 0.0], [-3.0, -5.0]], [0.5, -0.5], [2, 1], [True, False],
        denominator=2, clip_range=None,
    )  # fmt: skip
    assert parts.loss.item() == pytest.approx(-(10 / 11 + 5 / 6) / 4 + 0.5, abs=1e-12)
    expected = torch.tensor([[-0.1 / 1.21 / 4, -0.05 / 0.36 / 4], [0.5, 0.0]], dtype=torch.float64)
    assert torch.allclose(gradient, expected, rtol=0, atol=1e-12)
    assert (parts.replay_tokens, parts.fresh_tokens, parts.clipped) == (2, 1, 0)
    assert parts.replay_weight.item() == pytest.approx(1.5) and parts.replay_ratio.item() == pytest.approx(
        10 / 11 + 5 / 6
    )
    assert parts.approx_kl.item() == pytest.approx(2 - 1 - two)
    # The clip acts on fresh rows with positive advantage above 1.2; here A < 0 and w > 1, so not.
    clipped, _ = loss_and_gradient(
        [[-1.0, half], [two - 3, 9.0]], [[-1.0, 0.0], [-3.0, -5.0]], [0.5, -0.5], [2, 1], [True, False], denominator=2
    )
    assert clipped.loss.item() == parts.loss.item()


# --------------------------------------------------------------------------------------- advantages


def test_advantages_by_hand_and_their_groups_do_not_mix():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0]])
    advantages = group_advantages(rewards)
    assert advantages.tolist() == [[0.75, -0.25, -0.25, -0.25], [0.25, 0.25, -0.75, 0.25]]
    shifted = rewards.clone()
    shifted[0] += 5
    assert torch.equal(group_advantages(shifted), advantages)  # a group's level is irrelevant …
    shifted[0, 0] += 5
    assert torch.equal(group_advantages(shifted)[1], advantages[1])  # … and so are the other groups


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3])
def test_equal_rewards_give_exactly_zero(value, normalize):
    """0.1 is not a binary fraction: its mean over 7 differs from it by rounding, which /std would blow up to 1."""
    assert group_advantages(torch.full((2, 7), value), normalize_std=normalize).eq(0).all()


def test_standard_deviation_is_the_sample_one():
    """[1, 0]: deviations ±1/2, ddof 1 gives std √½, so ±0.7071; ddof 0 would give ±1."""
    advantages = group_advantages(torch.tensor([[1.0, 0.0]], dtype=torch.float64), normalize_std=True)
    assert advantages[0].tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-5)


@pytest.mark.parametrize(
    "bad", [torch.ones(3, 1), torch.ones(3), torch.tensor([[1.0, float("nan")]]), torch.tensor([[1.0, float("inf")]])]
)
def test_groups_of_one_and_nan_rewards_are_refused(bad):
    with pytest.raises(ValueError):
        group_advantages(bad)


def test_inputs_are_unchanged():
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    logprobs, old = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    mask = torch.tensor([[True, True, False]] * 4)
    replayed = torch.tensor([True, False, False, False])
    inputs = [rewards, logprobs, old, mask, replayed]
    before = copy.deepcopy(inputs)
    advantages = group_advantages(rewards, normalize_std=True).flatten()
    for settings in ({}, {"clip_range": None, "shaping": False}, {"importance_correction": False}):
        exgrpo_loss(logprobs, old, advantages, mask, replayed, denominator=3.0, **settings)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before))


# ------------------------------------------------------------------------------- clip and shaping


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        # ε = 0.2. value = min(w A, clip(w) A); slope = d value / d w.
        (1.0, 1.0, 1.0, 1.0),
        (1.1, 1.0, 1.1, 1.0),
        (1.3, 1.0, 1.2, 0.0),  # good and already likelier: no further push
        (0.5, 1.0, 0.5, 1.0),  # good but lost: pushed, unclipped
        (1.0, -1.0, -1.0, -1.0),
        (0.9, -1.0, -0.9, -1.0),
        (0.5, -1.0, -0.8, 0.0),  # bad and already rarer: no further push
        (1.5, -1.0, -1.5, -1.0),  # bad and likelier: pushed, unclipped
        (1.3, 0.5, 0.6, 0.0),
        (0.5, -2.0, -1.6, 0.0),
    ],
)
def test_clip_table(ratio, advantage, value, slope):
    w = torch.tensor(ratio, dtype=torch.float64, requires_grad=True)
    term = on_policy_term(w, torch.tensor(advantage, dtype=torch.float64), 0.2)
    term.backward()
    assert term.item() == pytest.approx(value) and w.grad.item() == pytest.approx(slope)
    w.grad = None
    plain = on_policy_term(w, torch.tensor(advantage, dtype=torch.float64), None)
    plain.backward()
    assert plain.item() == pytest.approx(ratio * advantage) and w.grad.item() == pytest.approx(advantage)


def test_clipped_tokens_are_counted():
    """Four fresh tokens, w = 1.3, 0.5 with A = 1 and w = 1.3, 0.5 with A = −1: one clipped in each row."""
    logs = [math.log(1.3), math.log(0.5)]
    parts, gradient = loss_and_gradient(
        [logs, logs], torch.zeros(2, 2), [1.0, -1.0], [2, 2], [False, False], denominator=1
    )
    assert parts.clipped == 2 and parts.fresh_tokens == 4 and parts.replay_tokens == 0
    assert gradient[0, 0] == 0 and gradient[1, 1] == 0
    assert gradient[0, 1].item() == pytest.approx(-0.5) and gradient[1, 0].item() == pytest.approx(1.3)


def test_shaping_is_the_papers():
    """f(w) = w/(w+β); its gradient by log w: 0.083 at w = 1, 1/4 at w = β, → 0 for large w."""
    for w, expected in [(1.0, 0.1 / 1.21), (0.1, 0.25), (100.0, 10 / 100.1**2)]:
        log_w = torch.tensor(math.log(w), dtype=torch.float64, requires_grad=True)
        value = shape(log_w.exp(), 0.1)
        value.backward()
        assert value.item() == pytest.approx(w / (w + 0.1)) and log_w.grad.item() == pytest.approx(expected)
    steps = torch.logspace(-6, 6, 1000, dtype=torch.float64)
    assert (shape(steps, 0.1).diff() > 0).all() and (shape(steps, 0.1) < 1).all()


def test_replayed_rows_are_not_clipped_and_use_their_stored_log_probabilities():
    """w* = e² ≈ 7.4, far outside 1 ± 0.2; a recomputed π_past would make it 1."""
    for settings, value in [
        ({}, math.exp(2) / (math.exp(2) + 0.1)),
        ({"shaping": False}, math.exp(2)),
        ({"beta": 1.0}, math.exp(2) / (math.exp(2) + 1)),
    ]:
        parts, gradient = loss_and_gradient([[-1.0]], [[-3.0]], [0.5], [1], [True], denominator=1, **settings)
        assert parts.loss.item() == pytest.approx(-0.5 * value)
        assert gradient.item() < 0


def test_without_importance_correction_the_weight_is_one_with_the_gradient_of_log_pi():
    parts, gradient = loss_and_gradient(
        [[-1.0]], [[-3.0]], [0.5], [1], [True], denominator=1, shaping=False, importance_correction=False
    )
    assert parts.loss.item() == pytest.approx(-0.5) and gradient.item() == pytest.approx(-0.5)
    shaped, gradient = loss_and_gradient(
        [[-1.0]], [[-3.0]], [0.5], [1], [True], denominator=1, importance_correction=False
    )
    assert shaped.loss.item() == pytest.approx(-0.5 / 1.1) and gradient.item() == pytest.approx(-0.5 * 0.1 / 1.21)
    fresh, _ = loss_and_gradient([[-1.0]], [[-1.1]], [0.5], [1], [False], denominator=1, importance_correction=False)
    assert fresh.loss.item() == pytest.approx(-0.5 * math.exp(0.1))  # fresh rows keep their ratio


# --------------------------------------------------------------------------------- padding and masks


def test_what_stands_in_the_padding_changes_nothing():
    """Ten more columns, with NaN and infinity in them, change neither loss, gradient nor metrics."""
    generator = torch.Generator().manual_seed(0)
    logprobs, old = (
        -torch.rand(3, 4, generator=generator, dtype=torch.float64),
        -torch.rand(3, 4, generator=generator, dtype=torch.float64),
    )
    lengths, replayed, advantages = [4, 2, 1], [True, False, False], [0.6, -0.3, -0.3]
    expected, expected_gradient = loss_and_gradient(logprobs, old, advantages, lengths, replayed, denominator=12)
    for junk in (0.0, 7.0, float("nan"), float("inf"), -float("inf")):
        wide, wide_old = (torch.nn.functional.pad(x, (0, 10), value=junk) for x in (logprobs, old))
        for row, length in enumerate(lengths):
            wide[row, length:] = junk
        parts, gradient = loss_and_gradient(wide, wide_old, advantages, lengths, replayed, denominator=12)
        # A wider row is summed in another order, so the sums may differ by an ulp or two; the gradient is no sum.
        torch.testing.assert_close(parts.loss, expected.loss, rtol=1e-14, atol=0)
        assert torch.equal(gradient[:, :4], expected_gradient) and (gradient[:, 4:] == 0).all()
        for name in LOSS_SUMS:
            torch.testing.assert_close(getattr(parts, name), getattr(expected, name), rtol=1e-14, atol=1e-16)


def test_a_fully_masked_row_has_no_effect():
    for replayed in (True, False):
        parts, gradient = loss_and_gradient(
            [[-1.0, -2.0], [-1.0, -1.0]],
            [[-1.0, -1.0], [-1.0, -1.0]],
            [0.5, -0.5],
            [2, 0],
            [False, replayed],
            denominator=4,
        )
        assert math.isfinite(parts.loss.item()) and (gradient[1] == 0).all()
    parts, gradient = loss_and_gradient([[-1.0]], [[-1.0]], [0.5], [0], [True], denominator=4)
    assert parts.loss.item() == 0 and gradient.item() == 0


def test_huge_ratios_stay_finite():
    """A token that π_past found all but impossible: e^90 is infinite in float32."""
    for replayed in (True, False):
        logprobs = torch.tensor([[-0.1]], requires_grad=True)
        loss, _ = exgrpo_loss(
            logprobs,
            torch.tensor([[-300.0]]),
            torch.tensor([0.5]),
            torch.tensor([[True]]),
            torch.tensor([replayed]),
            denominator=1,
        )
        loss.backward()
        assert torch.isfinite(loss) and torch.isfinite(logprobs.grad).all()


def test_the_denominator_is_a_constant():
    """Twice the tokens of the same kind make twice the loss (no 1/|o|), and rows only count where asked to."""
    one, _ = loss_and_gradient([[-1.0]], [[-1.0]], [0.5], [1], [False], denominator=8)
    two, _ = loss_and_gradient([[-1.0, -1.0]], [[-1.0, -1.0]], [0.5], [2], [False], denominator=8)
    assert two.loss.item() == 2 * one.loss.item() == -2 * 0.5 / 8


# ----------------------------------------------------------------------------- proofs by enumeration


def reward_of(outcome) -> float:
    """An arbitrary task: some outcomes succeed."""
    return float(sum(outcome.tolist()) % 2 == 0)


def exact_gradient(policy, rewards):
    """∇_θ J with J = Σ_o π_θ(o) r(o), straight from the table."""
    objective = (exact_probabilities(policy) * rewards).sum()
    return torch.autograd.grad(objective, policy.model.table)[0]


@pytest.mark.parametrize(("vocabulary", "length", "group_size"), [(2, 2, 2), (2, 2, 3), (3, 2, 2), (2, 2, 4)])
@pytest.mark.parametrize("clip_range", [0.2, None])
def test_expected_gradient_is_that_of_expected_reward(vocabulary, length, group_size, clip_range):
    """E[∇ loss] = −(K−1)/K · ∇J / L over *all* groups of K outcomes: the group mean contains the row's own
    reward, which shrinks the gradient by 1/K and biases it in no other way."""
    policy = tabular_policy(vocabulary, length, seed=5)
    everything = outcomes(policy)
    rewards = torch.tensor([reward_of(o) for o in everything], dtype=torch.float64)
    probabilities = exact_probabilities(policy).detach()
    logprobs = policy.score(answers(policy)).logprobs  # [O, L]
    expected_loss = torch.zeros((), dtype=torch.float64)
    for group in itertools.product(range(len(everything)), repeat=group_size):
        rows = list(group)
        advantages = group_advantages(rewards[rows][None])[0]
        loss, _ = exgrpo_loss(
            logprobs[rows], logprobs[rows], advantages, torch.ones(group_size, length, dtype=torch.bool),
            torch.zeros(group_size, dtype=torch.bool), denominator=length * group_size, clip_range=clip_range,
        )  # fmt: skip
        expected_loss = expected_loss + probabilities[rows].prod() * loss
    found = torch.autograd.grad(expected_loss, policy.model.table)[0]
    expected = -(group_size - 1) / group_size * exact_gradient(policy, rewards) / length
    assert expected.abs().max() > 0.01
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("group_size", [2, 3])
def test_a_replayed_row_from_pi_past_is_unbiased(group_size):
    """One row from π_past with its exact weight and K−1 from π_θ: the expected gradient of the whole group is the
    on-policy one, −(K−1)/K · ∇J / L. Exact where a response is one action (vocabulary 3)."""
    policy, past = tabular_policy(3, 1, seed=6), tabular_policy(3, 1, seed=7)
    rewards = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    now, before = exact_probabilities(policy).detach(), exact_probabilities(past).detach()
    assert (now - before).abs().max() > 0.2
    logprobs = policy.score(answers(policy)).logprobs  # [3, 1]
    stored = past.score(answers(past)).logprobs.detach()  # [3, 1]
    replayed = torch.tensor([True] + [False] * (group_size - 1))

    def expected_gradient(**settings):
        total = torch.zeros((), dtype=torch.float64)
        for group in itertools.product(range(3), repeat=group_size):
            rows = list(group)
            behavior = torch.cat([stored[rows[:1]], logprobs[rows[1:]]])
            loss, _ = exgrpo_loss(
                logprobs[rows], behavior, group_advantages(rewards[rows][None])[0],
                torch.ones(group_size, 1, dtype=torch.bool), replayed,
                denominator=group_size, clip_range=None, **settings,
            )  # fmt: skip
            total = total + before[rows[0]] * now[rows[1:]].prod() * loss
        return torch.autograd.grad(total, policy.model.table, retain_graph=True)[0]

    expected = -(group_size - 1) / group_size * exact_gradient(policy, rewards)
    assert torch.allclose(expected_gradient(shaping=False), expected, rtol=0, atol=1e-12)
    # What is given up otherwise: neither shaped nor uncorrected replay has that expectation.
    assert not torch.allclose(expected_gradient(), expected, atol=1e-3)
    assert not torch.allclose(expected_gradient(shaping=False, importance_correction=False), expected, atol=1e-3)


def test_replay_is_unbiased_token_by_token():
    """Responses of two tokens: after every prefix, the expected term of the next token under π_past equals the
    on-policy one. (The weights are those of tokens, not of whole responses: how often a prefix occurs is π_past's.)"""
    policy, past = tabular_policy(3, 2, seed=8), tabular_policy(3, 2, seed=9)
    logprobs = policy.score(answers(policy)).logprobs  # [9, 2]: all 9 answers, in the order 00 01 02 10 …
    stored = past.score(answers(past)).logprobs.detach()  # [9, 2]
    value = torch.tensor([0.7, -1.0, 0.4], dtype=torch.float64)  # an advantage of the token in question
    cases = [(0, [0, 3, 6])] + [(1, [3 * first + v for v in range(3)]) for first in range(3)]  # (position, rows)
    for position, rows in cases:
        mask = torch.zeros(3, 2, dtype=torch.bool)
        mask[:, position] = True
        weights_past, weights_now = stored[rows, position].exp(), logprobs[rows, position].detach().exp()
        total_past = torch.zeros((), dtype=torch.float64)
        total_now = torch.zeros((), dtype=torch.float64)
        for i, row in enumerate(rows):
            one = dict(advantages=value[i : i + 1], mask=mask[i : i + 1], denominator=2)
            replay, _ = exgrpo_loss(logprobs[[row]], stored[[row]], replayed=torch.tensor([True]), shaping=False, **one)
            fresh, _ = exgrpo_loss(logprobs[[row]], logprobs[[row]].detach(), replayed=torch.tensor([False]), **one)
            total_past = total_past + weights_past[i] * replay
            total_now = total_now + weights_now[i] * fresh
        found = torch.autograd.grad(total_past, policy.model.table, retain_graph=True)[0]
        expected = torch.autograd.grad(total_now, policy.model.table, retain_graph=True)[0]
        assert expected.abs().max() > 0.01
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_shaped_replay_is_bounded_and_plain_replay_is_not():
    """All outcomes, ever rarer under π_past: a shaped token's term stays below |A| and its gradient by log π below
    |A|/4, while the unbiased estimator's grows without bound."""
    largest = []
    for scale in (1.0, 3.0, 6.0):
        policy, past = tabular_policy(3, 2, seed=1), tabular_policy(3, 2, seed=2)
        past.model.table.data *= scale
        logprobs = policy.score(answers(policy)).logprobs.detach()
        stored = past.score(answers(past)).logprobs.detach()
        for row in range(9):
            shaped, gradient = loss_and_gradient(logprobs[[row]], stored[[row]], [0.5], [2], [True], denominator=1)
            assert abs(shaped.loss.item()) < 2 * 0.5 and gradient.abs().max() <= 0.5 / 4 + 1e-12
        plain = [
            loss_and_gradient(logprobs[[row]], stored[[row]], [0.5], [2], [True], denominator=1, shaping=False)[1]
            .abs()
            .max()
            for row in range(9)
        ]
        largest.append(max(plain).item())
    assert largest[1] > 10 * largest[0] and largest[2] > 10 * largest[1]
