"""The loop over tokens that HF `generate` hides, written out: read the prompts, draw a token, append, again.

`rollout.py` uses it instead of `generate` with --sampler loop. It draws from the same distribution and is faster
(bench/step.py): the prompt of a group is read once and its KV cache copied to the K samples, finished responses
leave the batch, and a draw costs one random number, not V.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nano_exgrpo.errors import InputError
from nano_exgrpo.policy import Policy

SHRINK = 0.75  # finished responses leave the batch, which copies the KV cache, when no more than this share goes on
DIVERGED = "the policy's logits are NaN or infinite: training has diverged; lower --lr, or use fp32"


def decode(policy: Policy, prompts: list[Tensor], top_p: float, max_new_tokens: int) -> list[Tensor]:
    """Response ids [max_new_tokens] for each row of prompt ids [P]; what stands after a stop token is padding.

    Rows whose prompts are the same tensor share its forward pass. Raises InputError when logits are NaN or infinite."""
    model, project = policy.model, policy.model.get_output_embeddings()
    unique = {id(p): p for p in prompts}
    index = {key: i for i, key in enumerate(unique)}
    prompt_of = torch.tensor([index[id(p)] for p in prompts], device=policy.device)  # [B]
    ids, attention = pad_left(list(unique.values()), policy)  # [G, P] each
    stops = torch.tensor(policy.stop_ids, device=policy.device)
    responses = torch.full((len(prompts), max_new_tokens), policy.pad_id, device=policy.device)  # [B, T]

    with torch.no_grad(), policy.precision():
        positions = (attention.cumsum(1) - 1).clamp(min=0)  # [G, P]: padding on the left shifts no position
        output = model.base_model(input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=True)
        logits = project(output.last_hidden_state[:, -1])  # [G, V]
        logits = logits[prompt_of]  # [B, V]
        name = "cache" if hasattr(output, "cache") else "past_key_values"  # transformers renamed it in 5.24
        cache: Any = getattr(output, name, None)
        require_keys_and_values(cache, model.config.model_type)
        cache.batch_select_indices(prompt_of)
        attention = attention[prompt_of]  # [B, P]
        row_of = torch.arange(len(prompts), device=policy.device)  # [B]: the response that a row of the batch writes
        done = torch.zeros_like(row_of, dtype=torch.bool)  # [B]
        for step in range(max_new_tokens):
            tokens = draw_tokens(logits, policy.temperature, top_p)  # [B]
            responses[row_of, step] = tokens
            done |= torch.isin(tokens, stops)
            left = int((~done).sum())
            if left == 0 or step == max_new_tokens - 1:
                break
            if left <= SHRINK * len(done):
                keep = (~done).nonzero().squeeze(-1)
                cache.batch_select_indices(keep)
                tokens, attention, row_of, done = tokens[keep], attention[keep], row_of[keep], done[keep]
            attention = torch.cat([attention, torch.ones_like(attention[:, :1])], 1)  # [B, P + step + 1]
            output = model.base_model(
                input_ids=tokens[:, None],
                attention_mask=attention,
                position_ids=attention.sum(1, keepdim=True) - 1,
                use_cache=True,
                **{name: cache},
            )
            logits = project(output.last_hidden_state[:, -1])  # [B, V]
    return list(responses.cpu())


def require_keys_and_values(cache: Any, kind: str) -> None:
    """Raises InputError for a cache from which rows cannot be chosen: that of a state-space layer, say."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    layers = getattr(cache, "layers", [])
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
    if not plain or not hasattr(cache, "batch_select_indices"):
        raise InputError(f"model type {kind} keeps more than keys and values; use --sampler generate")


def pad_left(prompts: Sequence[Tensor], policy: Policy) -> tuple[Tensor, Tensor]:
    """Ragged prompts → ids [G, P] and attention mask [G, P], on the policy's device."""
    width = max(len(p) for p in prompts)
    ids = torch.full((len(prompts), width), policy.pad_id)
    attention = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        attention[row, width - len(prompt) :] = 1
    return ids.to(policy.device), attention.to(policy.device)


def draw_tokens(logits: Tensor, temperature: float, top_p: float = 1.0) -> Tensor:
    """One token [B] from each row of softmax(logits [B, V] / temperature); temperature 0 takes the likeliest.

    By inversion: the first token at which the cumulated probability exceeds a uniform number. Summed in fp64,
    because in fp32 tokens below 1e-7 would lose their probability (MPS has no fp64). `torch.multinomial` draws
    V random numbers a row instead, on a CPU a fifth of all generation time.
    top_p: keep only the likeliest tokens that together reach this probability; 1 keeps all.
    Raises InputError for a row with NaN or +∞, or with nothing but −∞: they show in its largest logit or its total.
    """
    if temperature == 0:
        largest, tokens = logits.max(-1)  # [B] each
        require_finite(largest)
        return tokens
    probs = (logits.float() / temperature).softmax(-1)  # [B, V]
    if top_p < 1:
        ordered, tokens = probs.sort(-1, descending=True)  # [B, V] each
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0.0)  # the token that reaches top_p stays
        probs = torch.zeros_like(probs).scatter(-1, tokens, ordered)
    cumulated = probs.cumsum(-1, dtype=torch.float32 if probs.device.type == "mps" else torch.float64)  # [B, V]
    require_finite(cumulated[:, -1])
    # In [0, 1) of the total, so that the answer is never a token of probability 0.
    uniform = torch.rand(len(probs), 1, dtype=cumulated.dtype, device=probs.device) * cumulated[:, -1:]  # [B, 1]
    return torch.searchsorted(cumulated, uniform, right=True).clamp(max=probs.shape[-1] - 1).squeeze(-1)


def require_finite(values: Tensor) -> None:
    if not values.isfinite().all():
        raise InputError(DIVERGED)
