r"""log π_θ and entropy of response tokens, without ever holding their logits.

A small GPU runs out of memory here: Qwen2.5 has V = 151,936 tokens, so the logits of every 1,024 tokens fill 0.62 GB in
fp32, several times over once softmax and gradients exist. `ProjectedLogprobs` takes the last hidden states instead. It
projects a few tokens at a time, and backward projects them again. What fits one chunk is kept and not projected twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 256 * 2**20  # most bytes of fp32 logits at a time


def response_mask(response_ids: Sequence[Tensor]) -> Tensor:
    """[B, T] bool, true on response tokens. By position, never by token id: pad may equal EOS, and the EOS
    that ends a response is an action like any other, or the policy never learns to stop.

    >>> response_mask([torch.tensor([5, 6, 0]), torch.tensor([0])]).int().tolist()
    [[1, 1, 1], [1, 0, 0]]
    """
    lengths = torch.tensor([len(r) for r in response_ids])  # [B]
    return torch.arange(int(lengths.max()))[None, :] < lengths[:, None]  # [B, T]


class ProjectedLogprobs(torch.autograd.Function):
    """(log p_t [N], entropy H [N]) of targets t [N] under p = softmax(hidden [N, H] @ weight.T / temperature).

    Autograd would keep several [n, V] tensors of a chunk. Here each chunk's log p is the only one, worked into the
    gradient in place, and it is kept for backward only if it is the single chunk (saves a quarter of the
    projection's work); else backward projects again. With g the gradient that comes in,

        d/d logits = [ g_logp · (onehot(t) − p)  −  g_H · p (log p + H) ] / temperature

    The second part is left out where nothing is derived from the entropy. A bias of the projection is not trained.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, projection: torch.nn.Module, targets: Tensor,
        temperature: float, chunk: int, with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        logprobs, entropies = [], []
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            logp = project_logp(projection, h, temperature)  # [n, V]
            logprobs.append(logp.gather(-1, t[:, None]).squeeze(-1))  # [n]
            if with_entropy:
                entropies.append(-(logp.exp().mul_(logp)).sum(-1))  # [n]
        entropy = torch.cat(entropies) if with_entropy else None  # [N]
        ctx.save_for_backward(hidden, weight, targets, entropy, logp if len(logprobs) == 1 else None)
        ctx.projection, ctx.temperature, ctx.chunk = projection, temperature, chunk
        ctx.autocast = (
            torch.get_autocast_dtype(hidden.device.type) if torch.is_autocast_enabled(hidden.device.type) else None
        )
        ctx.set_materialize_grads(False)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, entropy, kept = ctx.saved_tensors
        dtype = ctx.autocast or weight.dtype
        matrix = weight.to(dtype)  # [V, H]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            h, n = hidden[part], len(targets[part])
            if kept is None:
                with torch.autocast(hidden.device.type, dtype=ctx.autocast, enabled=ctx.autocast is not None):
                    logp = project_logp(ctx.projection, h, ctx.temperature)  # [n, V]
            else:
                logp = kept
            # By the temperature here, where there are n numbers, and not below, where there are n · V.
            g = (
                hidden.new_zeros(n, dtype=logp.dtype) if grad_logprob is None else grad_logprob[part] / ctx.temperature
            )  # [n]
            if grad_entropy is None:
                grad = (logp.exp() if kept is not None else logp.exp_()).mul_(-g[:, None])  # [n, V]
            else:
                slope = grad_entropy[part][:, None] / ctx.temperature  # [n, 1]
                grad = (logp + entropy[part][:, None]).mul_(slope).add_(g[:, None]).mul_(logp.exp()).neg_()  # [n, V]
            grad[torch.arange(n, device=grad.device), targets[part]] += g
            grad = grad.to(dtype)
            grad_hidden[part] = grad @ matrix
            if ctx.needs_input_grad[1]:
                product = grad.T @ h.to(dtype)  # [V, H]
                grad_weight = product.to(weight.dtype) if grad_weight is None else grad_weight.add_(product)
        return grad_hidden, grad_weight, None, None, None, None, None


def project_logp(projection: torch.nn.Module, hidden: Tensor, temperature: float) -> Tensor:
    """hidden [n, H] → log p [n, V], in fp32 (fp64 for an fp64 model)."""
    logits = projection(hidden)  # [n, V]
    wide = logits.dtype if logits.dtype == torch.float64 else torch.float32
    return (logits if temperature == 1 else logits.to(wide).div_(temperature)).log_softmax(-1, dtype=wide)


def token_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Split rows into batches of like length whose padded size (rows × longest) stays within the budget.

    Returns lists of row indices, longest rows first, so that running out of memory happens at once and not
    after minutes. A row longer than the budget stands alone.

    >>> token_batches([3, 9, 4, 10], token_budget=20)
    [[3, 1], [2, 0]]
    """
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[batches[-1][0]] if batches else 0
        if batches and (len(batches[-1]) + 1) * longest <= token_budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches
