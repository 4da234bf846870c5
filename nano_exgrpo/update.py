"""One step's update (step 6): from groups with advantages to moved weights, within a bounded memory.

The loss of `loss.py` is summed over micro-batches of like length under a token budget. All of them share one
denominator, so the result does not depend on how they are cut. A step may have several updates, each on its share of
the groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nano_exgrpo.config import TrainConfig
from nano_exgrpo.infra import distributed
from nano_exgrpo.loss import LOSS_SUMS, exgrpo_loss
from nano_exgrpo.policy import Policy
from nano_exgrpo.trajectory import Trajectory

GRAD_CLIP = 1.0  # largest norm of the gradient, as in the released run


def update_policy(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[Trajectory]],
    advantages: Tensor,
    config: TrainConfig,
    *,
    clip_range: float | None,
) -> dict[str, Any]:
    """Step 6 on the groups of one batch, with advantages [B, K]; returns its metrics.

    Fresh trajectories that are trained on leave with their behavior log-probabilities filled in, as the buffer will
    store them. Rows without advantage have no policy gradient: their whole group succeeded or failed, or is of another
    --difficulty. They are left out of forward and backward, but count as rows in the denominator. The entropy bonus is
    the mean over the tokens of the rows that are left, replayed ones included, and so is the metric `entropy`.
    """
    # Every update gets its share of the replayed groups, which stand first, and of the fresh ones.
    shares = [range(len(groups))[i :: config.updates_per_step] for i in range(config.updates_per_step)]
    rows_of = [
        [(t, a) for g in share for t, a in zip(groups[g], advantages[g].tolist(), strict=True) if a != 0]
        for share in shares
    ]
    if config.updates_per_step > 1:
        # π_old is the policy before the first update. With one update it is the one being differentiated, and
        # its log-probabilities are the new ones, detached: no second forward.
        note_behavior_logprobs(policy, [t for rows in rows_of for t, _ in rows])

    totals = dict.fromkeys(("loss", "entropy", "tokens", *LOSS_SUMS, "trained_rows"), 0.0)
    grad_norms, skipped = [], 0
    for share, rows in zip(shares, rows_of):
        # Sums over all processes, so that their gradients add up to that of the whole batch.
        whole = distributed.total(
            {"groups": len(share), "trained": len(rows), "tokens": sum(len(t.response_ids) for t, _ in rows)}
        )
        if not whole["trained"]:
            continue
        denominator = config.max_response_length * (whole["groups"] * config.group_size if config.normalize_rows else 1)
        optimizer.zero_grad(set_to_none=True)
        loss_value = 0.0
        for batch in policy.batches([t for t, _ in rows]):
            loss, sums = batch_loss(policy, [rows[i] for i in batch], config, denominator, clip_range)
            if config.entropy_coef:  # left out where it is 0, so that nothing is derived from the entropies
                loss = loss - config.entropy_coef * sums["entropy"] / whole["tokens"]
            loss.backward()
            loss_value += loss.item()
            for name, value in sums.items():
                totals[name] += value.item()
        distributed.sum_gradients(policy.model.parameters())
        norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), GRAD_CLIP).item()
        # The loss of a NaN has a gradient of 0 where `clamp` stops it: a finite norm alone proves nothing.
        if math.isfinite(norm) and math.isfinite(distributed.total({"loss": loss_value})["loss"]):
            optimizer.step()
            grad_norms.append(norm)
        else:
            skipped += 1
        totals["trained_rows"] += len(rows)
    optimizer.zero_grad(set_to_none=True)  # gradients would sit in memory during the next rollouts
    totals = distributed.total({**totals, "rows": advantages.numel()})
    mean_norm = sum(grad_norms) / len(grad_norms) if grad_norms else None
    return {**update_metrics(totals, config.updates_per_step), "grad_norm": mean_norm, "skipped_updates": skipped}


def update_metrics(totals: dict[str, float], updates: int) -> dict[str, float | None]:
    """Names and means of what an update has summed over its tokens; None where there is nothing to take the mean of."""

    def per(name: str, count: str) -> float | None:
        return totals[name] / totals[count] if totals[count] else None

    return {
        "loss": totals["loss"] / updates,
        "entropy": per("entropy", "tokens"),
        "clip_ratio": per("clipped", "fresh_tokens"),
        "approx_kl": per("approx_kl", "fresh_tokens"),
        "replay/weight_mean": per("replay_weight", "replay_tokens"),
        "replay/ratio_mean": per("replay_ratio", "replay_tokens"),
        "trained_tokens": totals["tokens"],
        "trained_rows": totals["trained_rows"] / totals["rows"],
    }


def batch_loss(
    policy: Policy,
    rows: Sequence[tuple[Trajectory, float]],
    config: TrainConfig,
    denominator: float,
    clip_range: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of one micro-batch of (trajectory, advantage), scalar, and its sums over tokens; `entropy` has a gradient.

    The forward pass that trains a fresh trajectory also notes its π_old, for the buffer: nothing has moved yet."""
    trajectories = [t for t, _ in rows]
    scores = policy.score(trajectories)  # [B, T] each
    keep_behavior_logprobs(trajectories, scores.logprobs)
    behavior = pad_sequence([torch.as_tensor(t.logprobs) for t in trajectories], batch_first=True)  # [B, T]
    loss, sums = exgrpo_loss(
        scores.logprobs,
        behavior.to(policy.device),
        torch.tensor([a for _, a in rows], device=policy.device),
        scores.mask,
        torch.tensor([t.replayed for t in trajectories], device=policy.device),
        denominator=denominator,
        clip_range=clip_range,
        beta=config.beta,
        shaping=config.shaping,
        importance_correction=config.importance_correction,
    )
    return loss, {"loss": loss.detach(), "entropy": scores.entropies.sum(), "tokens": scores.mask.sum(), **sums}


def note_behavior_logprobs(policy: Policy, trajectories: Sequence[Trajectory]) -> None:
    """Score those that have no behavior log-probabilities yet."""
    unscored = [t for t in trajectories if t.logprobs is None]
    with torch.no_grad():
        for batch in policy.batches(unscored):
            part = [unscored[i] for i in batch]
            keep_behavior_logprobs(part, policy.score(part, with_entropy=False).logprobs)


def keep_behavior_logprobs(trajectories: Sequence[Trajectory], logprobs: Tensor) -> None:
    """Note log π_old [B, T] on those that have none yet; a replayed trajectory keeps its log π_past."""
    for trajectory, row in zip(trajectories, logprobs.detach().cpu(), strict=True):
        if trajectory.logprobs is None:
            trajectory.logprobs = row[: len(trajectory.response_ids)].clone()
