"""Precision and optimisers: how small steps survive small number formats.

Reinforcement learning takes steps of about lr = 1e-6 a weight. bf16 has 8 significant bits, so next to a weight of
0.02 the nearest other number is 1e-4 away, and a step of 1e-6 rounds to nothing, every time. Hence what is offered:

    --dtype     --optimizer  weights        products  optimiser state   bytes a weight, gradient and 8-bit scales included
    float32     adamw        fp32           fp32      fp32              16
    bfloat16    adamw        fp32           bf16      fp32              16, and 2 for bf16 copies while computing
    bfloat16    adamw8bit    bf16           bf16      8 bit              6
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

from nano_exgrpo.distributed import world_size
from nano_exgrpo.questions import InputError


def resolve_dtypes(dtype: str, optimizer: str, lora_rank: int, device: torch.device) -> tuple[torch.dtype, torch.dtype | None]:
    """(dtype of the weights, dtype of matrix products under autocast or None) for these settings.

    "auto" is bfloat16 on a GPU that has it, else float32."""
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    if dtype == "float32":
        return torch.float32, None
    if lora_rank:
        return torch.bfloat16, torch.bfloat16
    return (torch.bfloat16, None) if optimizer == "adamw8bit" else (torch.float32, torch.bfloat16)


def make_optimizer(parameters: Iterable[Tensor], name: str, *, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW on what requires a gradient. name "adamw": torch's, fused, which needs no copies of all weights as the
    foreach form does. "adamw8bit": torchao's, its two moments in 8 bits, with stochastic rounding of bf16 weights.

    Raises InputError where torchao is missing, ValueError for bf16 weights with "adamw"."""
    trained = [p for p in parameters if p.requires_grad]
    if name == "adamw8bit":
        kind, settings = adamw8bit_class(trained[0].device), {"lr": torch.tensor(lr), "bf16_stochastic_round": True}
    elif any(p.dtype == torch.bfloat16 for p in trained):
        raise ValueError("bf16 weights would lose steps of 1e-6 under plain AdamW; train them with adamw8bit")
    else:
        kind, settings = torch.optim.AdamW, {"lr": lr, "fused": True}
    if world_size() > 1:  # each process keeps the moments of its share of the weights
        return ZeroRedundancyOptimizer(trained, kind, weight_decay=weight_decay, **settings)
    return kind(trained, weight_decay=weight_decay, **settings)


def own_part(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """What this process keeps of the optimiser, to save and load: its share of a sharded one, else all of it."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def adamw8bit_class(device: torch.device) -> Any:
    """torchao's AdamW8bit. Importing it also lets `torch.load` read its state."""
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        raise InputError("--optimizer adamw8bit needs the package torchao: pip install torchao") from None
    if device.type == "cuda":
        return AdamW8bit

    class EagerAdamW8bit(AdamW8bit):
        """torchao compiles its step for every shape of weight: right on a GPU, minutes of waiting on a CPU."""

        def step(self, closure: Any = None) -> Any:
            with torch.compiler.set_stance("force_eager"):
                return super().step(closure)

    return EagerAdamW8bit
