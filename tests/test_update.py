"""One update, taken apart: its gradient against enumeration and against the loss of the whole batch."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import ragged, tiny_config, tiny_toy, trajectory
from tabular import asked, exact_probabilities, outcomes, tabular_policy
from test_policy import plain

from nano_exgrpo import update
from nano_exgrpo.config import TrainConfig
from nano_exgrpo.infra.prepare import prepare
from nano_exgrpo.infra.session import Run
from nano_exgrpo.infra.stop import StopRequest
from nano_exgrpo.loss import group_advantages
from nano_exgrpo.trajectory import Trajectory
from nano_exgrpo.update import update_policy
from train import train_step


class Recorder(torch.optim.Optimizer):
    """Steps nowhere; keeps the gradient of every step, as one vector."""

    def __init__(self, parameters: Any) -> None:
        super().__init__([p for p in parameters if p.requires_grad], {})
        self.gradients: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        self.gradients.append(
            torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
        )


def loss_config(**changes: Any) -> TrainConfig:
    return TrainConfig(**{"max_response_length": 8, "group_size": 2, **changes})


@pytest.fixture
def unclipped(monkeypatch):
    """Gradients as they are."""
    monkeypatch.setattr(update, "GRAD_CLIP", 1e9)


def random_groups(
    policy: Any, questions: int, size: int, *, replayed: int = 0, seed: int = 0
) -> list[list[Trajectory]]:
    """Groups of ragged random trajectories; the first row of the first `replayed` groups has a stored, older log π."""
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for q in range(questions):
        lengths = [(3 + q, int(n)) for n in torch.randint(1, 9, (size,), generator=generator)]
        rows = ragged(policy, lengths, seed=seed + q)
        groups.append([trajectory(rows[0].prompt_ids, t.response_ids, id=f"q{q}") for t in rows])
        if q < replayed:
            old = groups[q][0]
            old.replayed, old.logprobs = True, -3 - 3 * torch.rand(len(old.response_ids), generator=generator)
    return groups


@pytest.mark.parametrize("updates", [1, 2])
def test_update_is_the_policy_gradient_by_enumeration(updates, unclipped):
    """The real update on all 16 groups of two outcomes, weighted by their probability: −(K−1)/K · ∇J / L."""
    policy = tabular_policy(2, 2, seed=3)
    everything = outcomes(policy)
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    probabilities = exact_probabilities(policy)
    expected = -0.5 * torch.autograd.grad((probabilities * rewards).sum(), policy.model.table)[0].flatten() / 8
    optimizer = Recorder(policy.model.parameters())
    total = torch.zeros_like(expected)
    for i, j in itertools.product(range(4), repeat=2):
        group = [Trajectory(asked(policy), everything[o], "") for o in (i, j)]
        advantages = group_advantages(rewards[[i, j]][None])
        optimizer.gradients.clear()
        update_policy(policy, optimizer, [group], advantages, loss_config(updates_per_step=updates), clip_range=0.2)
        for gradient in optimizer.gradients:
            total += (probabilities[i] * probabilities[j]).item() * gradient
    assert expected.abs().max() > 1e-3
    assert torch.allclose(total, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("entropy_coef", [0.0, 0.5])
@pytest.mark.parametrize("normalize_rows", [True, False])
def test_micro_batches_do_not_change_the_gradient(entropy_coef, normalize_rows, unclipped):
    """Batches of one row, of a few, and of all; ragged lengths, replayed rows, an entropy bonus."""
    policy = tiny_toy()
    policy.model.double()
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 1.0]]))
    found, values = [], []
    for budget in (1, 25, 40, 100_000):
        optimizer = Recorder(policy.model.parameters())
        config = loss_config(entropy_coef=entropy_coef, normalize_rows=normalize_rows, group_size=3)
        groups = random_groups(policy, 4, 3, replayed=2)
        cut = replace(policy, token_budget=budget)
        values.append(update_policy(cut, optimizer, groups, advantages, config, clip_range=0.2))
        found.append(optimizer.gradients[0])
    assert found[0].norm() > 1e-5
    for gradient, value in zip(found, values):
        assert torch.allclose(gradient, found[0], rtol=0, atol=1e-9 * found[0].abs().max().item())
        assert value == pytest.approx(values[0], rel=1e-6)


@pytest.mark.parametrize("normalize_rows", [True, False])
def test_update_equals_the_loss_of_the_whole_batch(normalize_rows, unclipped):
    """Against one plain autograd pass over all rows, also those without advantage, from the model's full logits."""
    policy = tiny_toy().at(0.7)
    policy.model.double()
    groups = random_groups(policy, 4, 3, replayed=2)
    rewards = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    advantages = group_advantages(rewards)
    rows = [t for g in groups for t in g]
    logprobs, entropies = plain(policy, rows)
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
    config = loss_config(normalize_rows=normalize_rows, group_size=3, entropy_coef=0.3)
    result = update_policy(policy, optimizer, groups, advantages, config, clip_range=0.2)
    difference = (optimizer.gradients[0] - expected).abs().max() / expected.abs().max()
    assert difference < 1e-6, difference  # advantages are float32, of which an ulp is 1.2e-7
    assert result["loss"] == pytest.approx(-objective.item() / denominator)
    assert result["entropy"] == pytest.approx(bonus.item() / tokens)
    assert result["grad_norm"] == pytest.approx(expected.norm().item())
    assert result["trained_rows"] == 0.5


def test_ratio_leaves_one_after_the_first_update_and_replayed_rows_keep_theirs(unclipped):
    """Two updates a batch: π_old is the policy before the first, so the second sees w ≠ 1; w* is never 1."""
    policy = tiny_toy()
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-2)
    groups = random_groups(policy, 4, 4, replayed=2)
    stored = groups[0][0].logprobs.clone()
    before = plain(policy, groups[3])[0]
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0]] * 4))
    result = update_policy(
        policy, optimizer, groups, advantages, loss_config(updates_per_step=2, group_size=4), clip_range=0.2
    )
    assert result["approx_kl"] > 1e-6
    assert torch.equal(groups[0][0].logprobs, stored)
    for row, t in zip(before, groups[3]):  # the last group is trained in the second update, with π_old of the start
        assert torch.allclose(t.logprobs, row[: len(t.response_ids)], atol=1e-5)
    once = update_policy(
        policy,
        optimizer,
        random_groups(policy, 4, 4, replayed=2),
        advantages,
        loss_config(group_size=4),
        clip_range=0.2,
    )
    assert once["approx_kl"] == pytest.approx(0.0, abs=1e-9) and once["clip_ratio"] == 0.0
    assert abs(once["replay/weight_mean"] - 1) > 0.01 and 0 < once["replay/ratio_mean"] < 1


def test_each_update_gets_its_share_of_replayed_and_fresh_groups(unclipped):
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
    result = update_policy(
        policy, optimizer, random_groups(policy, 2, 3), torch.zeros(2, 3), loss_config(group_size=3), clip_range=0.2
    )
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
    good = update_policy(
        policy, optimizer, random_groups(policy, 1, 2), torch.tensor([[0.5, -0.5]]), loss_config(), clip_range=0.2
    )
    assert good["skipped_updates"] == 0 and all(torch.isfinite(p).all() for p in policy.model.parameters())


def test_ten_coherent_steps_move_every_weight():
    """At lr 1e-6, weights kept in bfloat16 alone would lose nearly all of their updates to rounding."""
    policy = tiny_toy()
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-6, weight_decay=0.0)
    used = torch.arange(policy.model.config.vocab_size)  # every token occurs, so that every embedding has a gradient
    group = [trajectory([2, 3], used), trajectory([2, 3], used.flip(0))]
    before = [p.detach().clone() for p in policy.model.parameters()]
    for _ in range(10):
        update_policy(
            policy,
            optimizer,
            [group],
            torch.tensor([[0.5, -0.5]]),
            loss_config(max_response_length=len(used)),
            clip_range=None,
        )
    moved = sum((a != b).sum().item() for a, b in zip(before, policy.model.parameters()))
    assert moved / sum(p.numel() for p in before) > 0.99


def test_a_loss_that_is_not_finite_is_skipped_even_if_its_gradient_is(policy):
    """A replayed row with log π_past NaN: `clamp` gives NaN gradient 0, so the norm is finite and looks harmless."""
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=0.1)
    before = [p.clone() for p in policy.model.parameters()]
    groups = random_groups(policy, 2, 2, replayed=1)
    groups[0][0].logprobs[0] = float("nan")
    advantages = torch.tensor([[0.5, -0.5], [0.5, -0.5]])
    result = update_policy(policy, optimizer, groups, advantages, loss_config(), clip_range=0.2)
    assert result["skipped_updates"] == 1 and result["grad_norm"] is None and math.isnan(result["loss"])
    assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters())) and not optimizer.state
    assert all(torch.isfinite(p.grad).all() for p in policy.model.parameters() if p.grad is not None)


def test_one_batch_of_nan_leaves_no_trace(tiny, tmp_path):
    """NaN logits in the update of step 1, once: the step counts as bad, the weights stay, the buffer holds nothing that
    is not finite, and the steps that replay from it are as good as ever."""
    config = tiny_config(tmp_path, start_threshold=0.0, questions_per_step=8, retire=False)
    state = prepare(config, Run(config, StopRequest()))
    before = [p.clone() for p in state.policy.model.parameters()]

    def spoil(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits * float("nan") if logits.dim() == 2 else logits  # scores [N, V]; rollouts have [B, 1, V]

    hook = state.policy.model.get_output_embeddings().register_forward_hook(spoil)
    row, _ = train_step(state, config)
    hook.remove()
    assert row["skipped_updates"] == 1 and state.bad_steps == 1 and math.isnan(row["loss"])
    assert state.started and len(state.buffer) == 0 and state.buffer.eligible() == {}
    assert all(torch.equal(a, b) for a, b in zip(before, state.policy.model.parameters()))
    rows = [train_step(state, config)[0] for _ in range(6)]
    assert state.bad_steps == 0 and all(math.isfinite(row["loss"]) for row in rows)
    assert any(row["replay/questions"] for row in rows)
    assert len(state.buffer) > 0
    assert all(t.logprobs.isfinite().all() for stored in state.buffer.stored.values() for t in stored)


def test_gradient_clipping_bounds_the_norm(policy, monkeypatch):
    monkeypatch.setattr(update, "GRAD_CLIP", 0.25)
    optimizer = Recorder(policy.model.parameters())
    advantages = torch.tensor([[50.0, -50.0]])
    result = update_policy(policy, optimizer, random_groups(policy, 1, 2), advantages, loss_config(), clip_range=None)
    assert optimizer.gradients[0].norm().item() == pytest.approx(0.25, rel=1e-4)
    assert result["grad_norm"] > 0.25  # what is logged is the norm before clipping
