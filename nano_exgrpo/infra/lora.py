"""LoRA: train two thin matrices beside every frozen linear layer, W + (α/r) · B A, and merge them on save.

The adapters are injected into the model itself, without peft's wrapper, so that the rest of the package sees the
model that it knows. They stay in fp32 whatever the frozen weights are in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nano_exgrpo.errors import InputError


def require_peft() -> Any:
    """The package peft. Raises InputError where it is missing."""
    try:
        import peft
    except ImportError:
        raise InputError("--lora-rank needs the package peft: pip install peft") from None
    return peft


def add_lora(model: Any, rank: int) -> None:
    """Freeze the model and add adapters of this rank to all its linear layers but the output projection, with
    α = 2 · rank. They start as zero, so the policy is unchanged. Raises InputError where peft is missing."""
    peft = require_peft()
    peft.inject_adapter_in_model(peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "lora_" in name
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.eval()


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
    """The weights under the names that the model has without adapters.

    merge: W + (α/r) · B A, everything in fp32 and on the CPU: in bf16 the small changes of RL would round away, and the
    device that trained may have no room for the model in fp32. Otherwise the frozen W, as it is."""
    from peft.tuners.lora import LoraLayer

    plain = {name.replace(".base_layer.", "."): t for name, t in model.state_dict().items() if "lora_" not in name}
    if not merge:
        return plain
    adapted = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    shared: dict[int, Tensor] = {}  # tied weights stay one tensor
    for name, tensor in plain.items():  # one module at a time, so that nothing is there twice
        where = tensor.data_ptr()
        if name in adapted:
            with torch.no_grad():
                shared[where] = adapted[name].get_delta_weight("default").cpu().float().add_(tensor.cpu())  # [out, in]
        elif where not in shared:
            shared[where] = tensor.cpu().float()
        plain[name] = shared[where]
    return plain
