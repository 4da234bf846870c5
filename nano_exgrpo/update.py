"""One step's update (step 6): from groups with advantages to moved weights, within a bounded memory.

The loss of `loss.py` is summed over micro-batches of like length under a token budget, so that the result does not
depend on how they are cut; a step may have several updates, each on its share of the groups.
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
from nano_exgrpo.logprobs import token_batches, token_logprobs
from nano_exgrpo.loss import exgrpo_loss
from nano_exgrpo.policy import Policy
from nano_exgrpo.rollout import Trajectory


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

    Fresh trajectories that are trained on leave with their behaviour log-probabilities filled in, as the buffer will store them.
    Rows without advantage (their whole group succeeded or failed, or is of another --difficulty) have no policy gradient and are left out of
    forward and backward, but count as rows in the normalisation. The entropy bonus is the mean over the tokens
    of the rows that are left, replayed ones included, and so is the metric `entropy`.
    """

    def forward(batch: Sequence[Trajectory], with_entropy: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        return token_logprobs(
            policy,
            [t.prompt_ids for t in batch],
            [t.response_ids for t in batch],
            temperature=config.temperature,
            with_entropy=with_entropy,
            chunk_bytes=config.logits_megabytes * 2**20,
        )

    def batches(rows: Sequence[tuple[Trajectory, float]]) -> list[list[tuple[Trajectory, float]]]:
        lengths = [len(t.prompt_ids) + len(t.response_ids) for t, _ in rows]
        return [[rows[i] for i in batch] for batch in token_batches(lengths, config.train_batch_tokens)]

    # Every update gets its share of the replayed groups, which stand first, and of the fresh ones.
    shares = [range(len(groups))[i :: config.updates_per_step] for i in range(config.updates_per_step)]
    rows_of = [
        [(t, a) for g in share for t, a in zip(groups[g], advantages[g].tolist(), strict=True) if a != 0]
        for share in shares
    ]
    if config.updates_per_step > 1:
        # π_old is the policy before the first update. With one update it is the one being differentiated, and
        # its log-probabilities are the new ones, detached: no second forward.
        with torch.no_grad():
            for batch in batches([row for rows in rows_of for row in rows if row[0].logprobs is None]):
                logprobs, _, _ = forward([t for t, _ in batch], with_entropy=False)  # [B, T]
                keep_behavior_logprobs([t for t, _ in batch], logprobs)

    totals: dict[str, float] = dict.fromkeys(
        (
            "loss",
            "entropy",
            "tokens",
            "fresh_tokens",
            "clipped",
            "approx_kl",
            "replay_tokens",
            "replay_weight",
            "replay_ratio",
        ),
        0.0,
    )
    grad_norms, skipped = [], 0
    for share, rows in zip(shares, rows_of):
        # Sums over all processes, so that their gradients add up to that of the whole batch.
        whole = distributed.total(
            {"groups": len(share), "trained": len(rows), "tokens": sum(len(t.response_ids) for t, _ in rows)}
        )
        if not whole["trained"]:
            continue
        optimizer.zero_grad(set_to_none=True)
        denominator = config.max_response_length * (whole["groups"] * config.group_size if config.normalize_rows else 1)
        for batch in batches(rows):
            trajectories = [t for t, _ in batch]
            logprobs, entropies, mask = forward(trajectories, with_entropy=True)  # [B, T] each
            keep_behavior_logprobs(trajectories, logprobs)
            behavior = pad_sequence([t.logprobs for t in trajectories], batch_first=True)  # [B, T]
            parts = exgrpo_loss(
                logprobs,
                behavior.to(logprobs.device),
                torch.tensor([a for _, a in batch], device=logprobs.device),
                mask,
                torch.tensor([t.replayed for t in trajectories], device=logprobs.device),
                denominator=denominator,
                clip_range=clip_range,
                beta=config.beta,
                shaping=config.shaping,
                importance_correction=config.importance_correction,
            )
            loss = parts.loss
            if config.entropy_coef:  # left out where it is 0, so that nothing is derived from the entropies
                loss = loss - config.entropy_coef * entropies.sum() / whole["tokens"]
            loss.backward()
            for name in (
                "loss",
                "fresh_tokens",
                "clipped",
                "approx_kl",
                "replay_tokens",
                "replay_weight",
                "replay_ratio",
            ):
                totals[name] += getattr(parts, name).item()
            totals["entropy"] += entropies.sum().item()
            totals["tokens"] += mask.sum().item()
        distributed.sum_gradients(policy.model.parameters())
        norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), config.grad_clip).item()
        if math.isfinite(norm):
            optimizer.step()
            grad_norms.append(norm)
        else:
            skipped += 1
    optimizer.zero_grad(set_to_none=True)  # gradients would sit in memory during the next rollouts

    totals.update(rows=advantages.numel(), trained_rows=sum(map(len, rows_of)))
    totals = distributed.total(totals)

    def per(name: str, count: str) -> float | None:
        return totals[name] / totals[count] if totals[count] else None

    return {
        "loss": totals["loss"] / config.updates_per_step,
        "entropy": per("entropy", "tokens"),
        "grad_norm": sum(grad_norms) / len(grad_norms) if grad_norms else None,
        "skipped_updates": skipped,
        "clip_ratio": per("clipped", "fresh_tokens"),
        "approx_kl": per("approx_kl", "fresh_tokens"),
        "replay/weight_mean": per("replay_weight", "replay_tokens"),
        "replay/ratio_mean": per("replay_ratio", "replay_tokens"),
        "trained_tokens": totals["tokens"],
        "trained_rows": totals["trained_rows"] / totals["rows"],
    }


def keep_behavior_logprobs(trajectories: Sequence[Trajectory], logprobs: Tensor) -> None:
    """Note log π_old [B, T] on those that have none yet; a replayed trajectory keeps its log π_past."""
    for trajectory, row in zip(trajectories, logprobs.detach().cpu(), strict=True):
        if trajectory.logprobs is None:
            trajectory.logprobs = row[: len(trajectory.response_ids)].clone()
