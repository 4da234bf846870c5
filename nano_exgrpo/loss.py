r"""The loss: from rewards to the numbers that are back-propagated. Pure functions on tensors.

For a group of K trajectories with rewards r_1 … r_K:

    A_i       = r_i − mean(r)                                      group advantage (Dr. GRPO)
    fresh     : min(w A, clip(w, 1−ε, 1+ε) A),  w  = π_θ / π_old     the PPO surrogate, per token
    replayed  : f(w*) A,                        w* = π_θ / π_past    f(w) = w / (w + β), per token
    loss      = − Σ_rows Σ_tokens term / (L · rows)

π_old is the policy at the start of this step, π_past the one that generated the replayed trajectory when
it was stored. L is a constant, the longest response allowed: dividing by each response's own length would
favour short right answers and long wrong ones.

Why shaping. The plain weight w* of an old trajectory is unbiased but unbounded. f is bounded by 1, and its
gradient with respect to log π_θ,

    f'(w) w = β w / (w + β)²,

is 0.083 at w = 1 (β = 0.1), peaks at 1/4 where w = β, and vanishes where the policy is already far above
π_past: replay pushes hardest on tokens of a success that the policy has lost since.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nano_exgrpo.trajectory import RIGHT


def group_advantages(rewards: Tensor, *, normalize_std: bool = False) -> Tensor:
    """A [G, K] from rewards [G, K], one row a group: the reward minus its group's mean.

    normalize_std: also divide by the group's sample standard deviation (ddof 1) + 1e-6, as GRPO first did
    and Dr. GRPO stopped doing, since it weighs very easy and very hard questions up. A group of equal
    rewards gives exactly 0 either way: nothing in it is better than anything else.
    Raises ValueError on fewer than two columns, or a reward that is not finite.

    >>> group_advantages(torch.tensor([[1., 0., 0., 1.], [1., 1., 1., 1.]])).tolist()
    [[0.5, -0.5, -0.5, 0.5], [0.0, 0.0, 0.0, 0.0]]
    """
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError(
            f"rewards must be [groups, K] with K >= 2, got {tuple(rewards.shape)}: one alone differs from no mean"
        )
    if not torch.isfinite(rewards).all():
        raise ValueError("every reward must be finite; the checker returned NaN or infinity")
    advantages = rewards - rewards.mean(1, keepdim=True)  # [G, K]
    if normalize_std:
        advantages = advantages / (rewards.std(1, keepdim=True) + 1e-6)
    equal = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)  # [G, 1]
    return advantages.masked_fill(equal, 0.0)


def keep_difficulty(advantages: Tensor, rewards: Tensor, difficulty: str) -> Tensor:
    """A [G, K] with the groups of other difficulty set to 0, so that only questions of one kind teach: the paper's
    preliminary study (section 3), which found that those of medium difficulty teach most.

    difficulty, by the share s of the group's K that succeed: "hard" 0 < s ≤ 1/4, "medium" 1/4 < s < 3/4, "easy"
    3/4 ≤ s < 1; "all" changes nothing. rewards: [G, K].

    >>> rewards = torch.tensor([[1., 0., 0., 0.], [1., 1., 0., 0.]])
    >>> keep_difficulty(group_advantages(rewards), rewards, "medium").tolist()
    [[0.0, 0.0, 0.0, 0.0], [0.5, 0.5, -0.5, -0.5]]
    """
    share = (rewards == RIGHT).float().mean(1, keepdim=True)  # [G, 1]
    kept = {"hard": (share > 0) & (share <= 0.25), "medium": (share > 0.25) & (share < 0.75), "easy": share >= 0.75}
    return advantages if difficulty == "all" else advantages.masked_fill(~kept[difficulty], 0.0)


def on_policy_term(ratio: Tensor, advantages: Tensor, clip_range: float | None = 0.2) -> Tensor:
    """The clipped surrogate min(w A, clip(w, 1−ε, 1+ε) A), elementwise (PPO, eq. 7).

    ratio: w = π_θ/π_old. clip_range: ε; None leaves the clip away, as the released code does for fresh rows
    once mixing has started. At w = 1 the clip does nothing."""
    plain = ratio * advantages
    if clip_range is None:
        return plain
    return torch.minimum(plain, ratio.clamp(1 - clip_range, 1 + clip_range) * advantages)


def shape(weight: Tensor, beta: float) -> Tensor:
    """Policy shaping f(w) = w / (w + β), increasing and bounded by 1 (paper, eq. 7; from LUFFY)."""
    return weight / (weight + beta)


# Sums over tokens that the loss gives for metrics: over the fresh tokens, how many are clipped and the estimated
# KL(π_old ‖ π_θ); over the replayed ones, w* and f(w*).
LOSS_SUMS = ("fresh_tokens", "clipped", "approx_kl", "replay_tokens", "replay_weight", "replay_ratio")


def exgrpo_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    replayed: Tensor,
    *,
    denominator: float,
    clip_range: float | None = 0.2,
    beta: float = 0.1,
    shaping: bool = True,
    importance_correction: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:
    """ExGRPO's objective on B rows, negated (paper, section 4.2), and its `LOSS_SUMS`, detached.

    logprobs [B, T]: log π_θ of the response tokens, with gradient. behavior_logprobs [B, T]: log π_old of
    fresh rows, log π_past of replayed ones. advantages [B]. mask [B, T] bool: response tokens. replayed [B]
    bool. denominator: L · rows of the *whole* batch, so that micro-batches add up to it exactly; L alone is
    the released code's form. clip_range: see `on_policy_term`. beta: β.
    shaping False: f(w) = w, the unbiased estimator. importance_correction False: replayed tokens are taken
    for the current policy's own, w* = 1 in value with the gradient of log π_θ (f is still applied if shaping).
    """
    behavior_logprobs = behavior_logprobs.detach()
    if not importance_correction:
        behavior_logprobs = torch.where(replayed[:, None], logprobs.detach(), behavior_logprobs)
    # Masked before exp: whatever stands in the padding must reach neither the value nor the gradient.
    log_ratio = (logprobs - behavior_logprobs).masked_fill(~mask, 0.0)  # [B, T]
    ratio = log_ratio.clamp(max=30.0).exp()  # [B, T]; e^30 is far beyond any clip, and e^90 would be inf
    signed = advantages[:, None]  # [B, 1]
    replay_ratio = shape(ratio, beta) if shaping else ratio  # [B, T]
    fresh_term = on_policy_term(ratio, signed, clip_range)  # [B, T]
    term = torch.where(replayed[:, None], replay_ratio * signed, fresh_term)  # [B, T]
    loss = -term.masked_fill(~mask, 0.0).sum() / denominator

    with torch.no_grad():
        fresh, replay = mask & ~replayed[:, None], mask & replayed[:, None]  # [B, T] each
        unclipped = fresh_term == ratio * signed  # [B, T]
        return loss, {
            "fresh_tokens": fresh.sum(),
            "clipped": (fresh & ~unclipped).sum(),
            "approx_kl": ((ratio - 1) - log_ratio)[fresh].sum(),  # Schulman's k3 estimate of KL(π_old ‖ π_θ)
            "replay_tokens": replay.sum(),
            "replay_weight": ratio[replay].sum(),  # w*
            "replay_ratio": replay_ratio[replay].sum(),  # f(w*)
        }
