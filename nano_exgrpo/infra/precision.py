"""Precision, optimisers and LoRA: how small steps survive small number formats.

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
from torch.nn.functional import linear

from nano_exgrpo.errors import InputError
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
    kind: Any = torch.optim.AdamW
    settings: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    if name == "adamw16":
        kind = StochasticAdamW
    elif any(p.dtype == torch.bfloat16 for p in trained):
        raise ValueError("bf16 weights would lose steps of 1e-6 under plain AdamW; train them with adamw16")
    else:
        settings["fused"] = True
    if world_size() > 1:  # each process keeps the moments of its share of the weights
        return ZeroRedundancyOptimizer(trained, kind, **settings)
    return kind(trained, **settings)


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW whose weights and moments are kept in the weights' own dtype. Each step is computed in fp32 and, for
    bf16, rounded stochastically: moments too lose a change of a thousandth (1 − β₂) under plain rounding."""

    def __init__(self, parameters: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
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


# ------------------------------------------------------------------------------------------------ LoRA


def add_lora(model: Any, rank: int) -> None:
    """Freeze the model and give each of its plain linear layers but the output projection two thin matrices of this
    rank, in fp32: W + 2 B A (that is, α = 2 · rank). B starts as zero, so the policy is unchanged.

    Fused experts are no linear layers and stay frozen. Raises InputError where there is nothing to adapt."""
    model.requires_grad_(False)
    # Subclasses may do more than a product, which a merged weight would not give back.
    layers = [m for m in model.modules() if type(m) is torch.nn.Linear or is_transposed(m)]
    layers = [m for m in layers if m is not model.get_output_embeddings()]
    if not layers:
        raise InputError(f"model type {model.config.model_type} has no plain linear layers for --lora-rank")
    for layer in layers:
        inward, outward = layer.weight.shape if is_transposed(layer) else layer.weight.shape[::-1]
        device = layer.weight.device
        layer.lora_A = torch.nn.Parameter(torch.empty(rank, inward, device=device).uniform_(-1, 1) / inward**0.5)
        layer.lora_B = torch.nn.Parameter(torch.zeros(outward, rank, device=device))
        layer.register_forward_hook(add_low_rank)


def is_transposed(layer: Any) -> bool:
    """GPT-2's linear layers keep W as [in, out]."""
    return type(layer).__name__ == "Conv1D"


def add_low_rank(layer: Any, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """x → W x + 2 B A x, for x [..., in]."""
    thin = linear(arguments[0].to(layer.lora_A.dtype), layer.lora_A)  # [..., r]
    return output + (2 * linear(thin, layer.lora_B)).to(output.dtype)


def has_lora(model: Any) -> bool:
    return any("lora_" in name for name, _ in model.named_parameters())


def adapter_state(model: Any) -> dict[str, Tensor]:
    """The trained matrices alone, on the CPU."""
    return {name: p.detach().cpu() for name, p in model.named_parameters() if "lora_" in name}


def load_adapter(model: Any, state: dict[str, Tensor]) -> None:
    """Put back what `adapter_state` gave. Raises InputError if it belongs to other adapters."""
    own = {name: p for name, p in model.named_parameters() if "lora_" in name}
    if {n: p.shape for n, p in own.items()} != {n: t.shape for n, t in state.items()}:
        raise InputError("the checkpoint's LoRA adapters do not fit this model and --lora-rank")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(state[name])


def plain_state_dict(model: Any, *, merge: bool) -> dict[str, Tensor]:
    """The weights that the model has without adapters.

    merge: W + 2 B A, everything in fp32 and on the CPU: in bf16 the small changes of RL would round away, and the
    device that trained may have no room for the model in fp32. Otherwise the frozen W, as it is."""
    plain = {name: tensor for name, tensor in model.state_dict().items() if "lora_" not in name}
    if not merge:
        return plain
    adapted = {m.weight.data_ptr(): m for m in model.modules() if hasattr(m, "lora_A")}
    shared: dict[int, Tensor] = {}  # tied weights stay one tensor
    for name, tensor in plain.items():  # one module at a time, so that nothing is there twice
        where = tensor.data_ptr()
        if where not in shared and where in adapted:
            A, B = adapted[where].lora_A.detach(), adapted[where].lora_B.detach()
            change = A.T @ B.T if is_transposed(adapted[where]) else B @ A  # as W is
            shared[where] = change.mul_(2).cpu().add_(tensor.cpu())
        elif where not in shared:
            shared[where] = tensor.cpu().float()
        plain[name] = shared[where]
    return plain
