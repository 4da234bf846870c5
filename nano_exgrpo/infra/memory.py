"""Will it fit? An estimate of the memory that a training run takes, from the model's shape and the settings.

    python train.py --model Qwen2.5-Math-1.5B --dry-run

Two phases take turns: rollouts (weights, optimiser state, KV cache) and the update (weights, optimiser state,
gradients, activations, logits). The larger one decides. Activations are counted for layers as in Llama, Qwen2 and
Mistral: what autograd keeps of one layer, per token. On the CPU the
estimate was 0.67 to 1.25 of measured peaks (tests/test_memory.py).
"""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from typing import Any

import torch

from nano_exgrpo import toy
from nano_exgrpo.config import TrainConfig
from nano_exgrpo.errors import InputError
from nano_exgrpo.infra.loading import BACKBONES, read_config, resolve_device
from nano_exgrpo.infra.precision import resolve_dtypes
from nano_exgrpo.logprobs import CHUNK_BYTES
from nano_exgrpo.policy import context_of
from nano_exgrpo.warmup import BATCH

CUDA_OVERHEAD = 1.0e9  # bytes: context, cuBLAS workspaces, fragmentation; an allowance, not a measurement


@dataclass
class ModelShape:
    """weights: all of them, tied ones once. linear: those of linear layers outside the projection. vocabulary V,
    hidden H, intermediate, layers; query and kv: heads times head dimension. context: most tokens of prompt and
    response."""

    weights: int
    linear: int
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    query: int
    kv: int
    context: int = 2**20


def shape_of(model: Any) -> ModelShape:
    """The shape of a HF model, which may stand on the meta device. Raises InputError for state-space layers and others
    that the estimate does not know."""
    config = model.config.get_text_config(decoder=True)
    projection = model.get_output_embeddings().weight
    linear = sum(p.numel() for m in model.modules() if isinstance(m, torch.nn.Linear) for p in m.parameters())
    try:
        heads = int(config.num_attention_heads)
        head = getattr(config, "head_dim", None) or config.hidden_size // heads
        return ModelShape(
            weights=sum(p.numel() for p in model.parameters()),
            linear=linear - projection.numel(),
            vocabulary=projection.shape[0],
            hidden=projection.shape[1],
            intermediate=int(getattr(config, "intermediate_size", None) or 4 * projection.shape[1]),
            layers=config.num_hidden_layers,
            query=head * heads,
            kv=head * int(getattr(config, "num_key_value_heads", None) or heads),
            context=context_of(config),
        )
    except (AttributeError, TypeError, ZeroDivisionError):
        kind = model.config.model_type
        raise InputError(
            f"the memory of model type {kind} cannot be estimated: not all its layers are attention"
        ) from None


def load_shape(name: str) -> ModelShape:
    """The shape of one of the paper's backbones, which needs no network, or of a model folder or hub id, from its
    configuration alone. Raises InputError as `load_policy` does."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if name in BACKBONES:
        config = AutoConfig.for_model(**BACKBONES[name].shape())
    else:
        config = read_config(name)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # a configuration of another kind of model, or one that contradicts itself
        raise InputError(f"model {name} cannot be built: {str(error).strip().splitlines()[0][:200]}") from None
    return shape_of(model)


def estimate(shape: ModelShape, config: TrainConfig, device: torch.device, world_size: int = 1) -> dict[str, float]:
    """Bytes on each device: weights, optimiser, gradients, bf16 copies, activations, logits, KV cache, overhead,
    "update" and "rollout" (everything that is held in that phase) and "total", the larger of the two."""
    dtype, autocast = resolve_dtypes(config.dtype, config.optimizer, config.lora_rank, device)
    width, compute = dtype.itemsize, (autocast or dtype).itemsize
    fp32_stream = dtype == torch.float32  # the residual stream has the embeddings' dtype
    prompt, response = config.max_prompt_length, config.max_response_length
    rows = config.questions_per_step * config.group_size / world_size

    # LoRA: in + out for each of a layer's seven linear maps, in fp32.
    h, i, q, kv = shape.hidden, shape.intermediate, shape.query, shape.kv
    adapters = config.lora_rank * shape.layers * ((h + q) + 2 * (h + kv) + (q + h) + 2 * (h + i) + (i + h))
    trained = adapters if config.lora_rank else shape.weights
    trained_width = 4 if config.lora_rank else width
    moments = trained * {"adamw": 8, "adamw16": 2 * width}[config.optimizer]

    # What autograd keeps of a layer for each token, in bytes. Two norms keep their input, the normalised and the
    # scaled values; attention its inputs (keys and values repeated to the queries' heads) and its output, twice;
    # the MLP gate, silu(gate), up and their product.
    norms = 2 * h * (12 if fp32_stream and not autocast else 10 if fp32_stream else 8)
    layer = norms + compute * (5 * q + 4 * i) + (compute + 4) * 7 * config.lora_rank
    most_rows = max(rows, BATCH if warms_up(config) else 0)  # the warm-up takes what an update takes
    tokens = min(config.train_batch_tokens, most_rows * (prompt + response))
    tokens = max(tokens, prompt + response)
    if config.gradient_checkpointing:
        activations = tokens * (shape.layers * h * (4 if fp32_stream else width) + layer)
    else:
        activations = tokens * shape.layers * layer

    # A chunk's logits, their log-softmax and its exponential; the projection's weight once more in the dtype of the
    # product, and its gradient as product, sum, and the embedding's part where they are tied.
    trained_tokens = tokens * response / (prompt + response)
    chunk = min(CHUNK_BYTES, 4 * trained_tokens * shape.vocabulary)
    head = shape.vocabulary * h
    logits = 3 * chunk + head * (compute if autocast and dtype == torch.float32 else 0)
    if not config.lora_rank:
        logits += head * (compute + 2 * width)

    batch = min(config.rollout_batch, rows)
    cache = batch * (prompt + response) * shape.layers * 2 * kv * compute
    cache += cache / shape.layers + batch * shape.vocabulary * 16  # torch.cat of a layer; logits, softmax and its sums

    parts = {
        "weights": shape.weights * width + (4 * adapters),
        "optimiser": moments / world_size,
        "gradients": trained * trained_width,
        "bf16 copies": 2.0 * shape.linear if autocast and dtype == torch.float32 else 0.0,
        "activations": activations,
        "logits": logits,
        "KV cache": cache,
        "overhead": CUDA_OVERHEAD if device.type == "cuda" else 0.0,
    }
    base = parts["weights"] + parts["optimiser"] + parts["bf16 copies"] + parts["overhead"]
    update = base + parts["gradients"] + activations + logits
    rollout = base + cache
    return {**parts, "update": update, "rollout": rollout, "total": max(update, rollout)}


def warms_up(config: TrainConfig) -> bool:
    """Whether a real model is shown demonstrations first (the toy's warm-up never fills a memory)."""
    return config.model != "toy" and config.warmup_steps > 0


def one_remedy(
    shape: ModelShape, config: TrainConfig, device: torch.device, limit: float, world_size: int
) -> tuple[str, float]:
    """(the one setting, cheapest first, with which the estimate stays within `limit` bytes, what it then is); ("", inf)
    where no single one does."""
    remedies: list[tuple[str, dict[str, Any]]] = [
        (f"--rollout-batch {rows}", {"rollout_batch": rows}) for rows in (64, 32, 16, 8) if rows < config.rollout_batch
    ]
    remedies += [
        ("--gradient-checkpointing", {"gradient_checkpointing": True}),
        ("--train-batch-tokens 2048", {"train_batch_tokens": min(2048, config.train_batch_tokens)}),
        ("--optimizer adamw16", {"optimizer": "adamw16"}),
        ("--lora-rank 32", {"lora_rank": 32}),
    ]
    for flag, change in remedies:
        total = estimate(shape, dataclasses.replace(config, **change), device, world_size)["total"]
        if total <= limit:
            return flag, total
    return "", math.inf


def dry_run(config: TrainConfig, card: float) -> str:
    """What --dry-run says. card: GB of a CUDA card to compare with, which need not be here; 0: what this device has."""
    if card and config.dtype == "auto":
        config = dataclasses.replace(config, dtype="bfloat16")
    device = torch.device("cuda") if card else resolve_device(config.device)
    if config.model == "toy":
        shape = shape_of(toy.build_policy(seed=config.seed).model)
    else:
        shape = load_shape(config.model)
    return fit_table(shape, config, device, int(os.environ.get("WORLD_SIZE", 1)), card * 1e9)


def fit_table(
    shape: ModelShape, config: TrainConfig, device: torch.device, world_size: int = 1, card: float = 0.0
) -> str:
    """The table of --dry-run. card: bytes to compare with; 0: what this device has."""
    found = estimate(shape, config, device, world_size)
    each = f" on each of {world_size} devices" if world_size > 1 else ""
    lines = [f"{shape.weights / 1e9:.2f} billion weights; estimated memory in GB (10^9 bytes){each}"]
    change = {
        "weights": "--dtype, --lora-rank",
        "optimiser": "--optimizer, --lora-rank" + (", more devices" if world_size > 1 else ""),
        "gradients": "--lora-rank",
        "bf16 copies": "--dtype",
        "activations": "--train-batch-tokens, --gradient-checkpointing",
        "logits": "",
        "KV cache": "--rollout-batch, --max-response-length",
        "overhead": "",
    }
    lines += [f"  {name:12} {found[name] / 1e9:7.2f}   {flags}" for name, flags in change.items()]
    warmup = "; the warm-up takes no more" if warms_up(config) else ""
    lines.append(f"  {'update':12} {found['update'] / 1e9:7.2f}   all but the KV cache{warmup}")
    lines.append(f"  {'rollout':12} {found['rollout'] / 1e9:7.2f}   all but gradients, activations, logits")
    lines.append(f"  {'peak':12} {found['total'] / 1e9:7.2f}")
    room = shape.context - config.max_response_length
    if room < 1:
        lines.append(
            f"will not start: --max-response-length {config.max_response_length} leaves no room for a prompt in the "
            f"model's context of {shape.context} tokens"
        )
    elif room < config.max_prompt_length:
        lines.append(
            f"will skip prompts longer than {room} tokens: with the response they exceed the model's context of "
            f"{shape.context} tokens"
        )
    capacity = card or device_memory(device)
    limit, size = 0.95 * capacity, f"{capacity / 1e9:.1f} GB"
    if capacity and found["total"] <= limit:
        lines.append(f"fits in {size}")
    elif capacity:
        flag, total = one_remedy(shape, config, device, limit, world_size)
        remedy = f"fits with {flag}: {total / 1e9:.1f} GB" if flag else "no single setting makes it fit"
        lines.append(f"does not fit in {size}; {remedy}")
    return "\n".join(lines)


def device_memory(device: torch.device) -> int:
    """Bytes of a CUDA card, or of this machine for the CPU and MPS; 0 where unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
