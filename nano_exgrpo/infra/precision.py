"""Precision and optimisers: how small steps survive small number formats.

Reinforcement learning takes steps of about lr = 1e-6 a weight. bf16 has 8 significant bits, so next to a weight of
0.02 the nearest other number is 1e-4 away, and a step of 1e-6 rounds to nothing, every time. Hence what is offered:

    --dtype     --optimizer  weights        products  optimiser state   bytes a weight, gradient included
    float32     adamw        fp32           fp32      fp32              16
    bfloat16    adamw        fp32           bf16      fp32              16, and 2 for bf16 copies while computing
    bfloat16    adamw16      bf16           bf16      bf16               8
    bfloat16    either       bf16, frozen   bf16      of the adapters    2, with --lora-rank (adapters in fp32)

Weights in bf16 are trained with stochastic rounding: a step that is a hundredth of the gap to the next number goes
there once in a hundred times, so that it is right on average. Plain rounding of bf16 weights is not offered.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer

from nano_exgrpo.infra.distributed import world_size


def resolve_dtypes(
    dtype: str, optimizer: str, lora_rank: int, device: torch.device
) -> tuple[torch.dtype, torch.dtype | None]:
    """(dtype of the weights, dtype of matrix products under autocast or None) for these settings.

    "auto" is bfloat16 on a GPU that has it, else float32."""
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    if dtype == "float32":
        return torch.float32, None
    if lora_rank:
        return torch.bfloat16, torch.bfloat16
    return (torch.float32, torch.bfloat16) if optimizer == "adamw" else (torch.bfloat16, None)


def make_optimizer(parameters: Iterable[Tensor], name: str, *, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW on what requires a gradient. name "adamw": torch's, fused, which needs no copies of all weights as the
    foreach form does. "adamw16": `StochasticAdamW`.

    Raises ValueError for bf16 weights with "adamw"."""
    trained = [p for p in parameters if p.requires_grad]
    if name == "adamw16":
        kind, settings = StochasticAdamW, {"lr": lr}
    elif any(p.dtype == torch.bfloat16 for p in trained):
        raise ValueError("bf16 weights would lose steps of 1e-6 under plain AdamW; train them with adamw16")
    else:
        kind, settings = torch.optim.AdamW, {"lr": lr, "fused": True}
    if world_size() > 1:  # each process keeps the moments of its share of the weights
        return ZeroRedundancyOptimizer(trained, kind, weight_decay=weight_decay, **settings)
    return kind(trained, weight_decay=weight_decay, **settings)


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW whose weights and moments are kept in the weights' own dtype. Each step is computed in fp32 and, for
    bf16, rounded stochastically: moments too lose a change of a thousandth (1 − β₂) under plain rounding."""

    def __init__(
        self, parameters: Any, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
    ) -> None:  # fmt: skip
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
                state["step"] += 1
                correction1, correction2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
                tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
                # In pieces, so that the fp32 copies of a large embedding do not fill the memory that bf16 saved.
                for w, g, m, v in zip(*(t.view(-1).split(2**24) for t in tensors), strict=True):
                    gradient = g.float()
                    first = m.float().lerp_(gradient, 1 - beta1)
                    second = v.float().lerp_(gradient * gradient, 1 - beta2)
                    weight = w.float().mul_(1 - group["lr"] * group["weight_decay"])
                    weight.addcdiv_(
                        first, (second / correction2).sqrt_().add_(group["eps"]), value=-group["lr"] / correction1
                    )
                    for kept, exact in ((w, weight), (m, first), (v, second)):
                        kept.copy_(round_stochastically(exact) if kept.dtype == torch.bfloat16 else exact)


def round_stochastically(exact: Tensor) -> Tensor:
    """fp32 → bf16: to one of the two neighbours, each with the probability that makes the mean exact.

    bf16 is the upper half of an fp32's bits, so it is enough to add a random lower half and cut."""
    noise = torch.randint(0, 2**16, exact.shape, dtype=torch.int32, device=exact.device)
    return ((exact.view(torch.int32) + noise) & -(2**16)).view(torch.float32).bfloat16()


def own_part(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """What this process keeps of the optimiser, to save and load: its share of a sharded one, else all of it."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
