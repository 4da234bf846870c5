"""Rollouts: K responses to each question, sampled from exactly the policy that is trained.

The gradient estimate E[A · ∇ log π_θ] is only right if the responses come from π_θ itself: whatever cuts or
bends the sampling distribution (top-k, top-p, a repetition penalty) must be off. HF `generate` turns some of
it on by itself, from the checkpoint's `generation_config` (Qwen2.5: top_k 20, top_p 0.8, repetition_penalty
1.05) and its own defaults (top_k 50). So the loop over tokens is written out here: softmax, draw, append.

That also makes it faster than `generate` (bench/step.py): the prompt of a group is read once and its KV cache
copied to the K samples, finished responses leave the batch, and a draw costs one random number, not V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nano_exgrpo.policy import Policy
from nano_exgrpo.questions import InputError

SHRINK = 0.75  # finished responses leave the batch, which copies the KV cache, when no more than this share goes on


@dataclass
class Trajectory:
    """One response o to one question q, with all that the method needs to know about it.

    prompt_ids [P], response_ids [T]: token ids on the CPU; the EOS that ends a response is its last token.
    text: the response without special tokens, as the checker reads it.
    truncated: it reached the length limit without an EOS.
    reward: r ∈ {0, 1}. entropy: mean token entropy in nats when it was last scored.
    logprobs [T]: log π_past of each token under the policy that generated it, in nats, on the CPU; None
        until they are computed.
    replayed: it comes from the buffer; its behaviour policy is a past one.
    """

    question_id: str
    prompt_ids: Tensor
    response_ids: Tensor
    text: str
    truncated: bool = False
    reward: float = 0.0
    entropy: float = float("nan")
    logprobs: Tensor | None = field(default=None, repr=False)
    replayed: bool = False


def generate_responses(
    policy: Policy,
    prompts: Sequence[Tensor],
    samples: int | Sequence[int],
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    max_new_tokens: int,
    batch_size: int = 64,
    on_batch: Callable[[list[int], list[Tensor]], None] | None = None,
) -> list[list[Tensor]]:
    """`samples` responses to each prompt.

    prompts: ragged prompt ids [P] each. samples: one number for all prompts or one for each. temperature: 0 is
    greedy. batch_size: most sequences at a time; a group may be spread over several batches.
    on_batch: called as soon as a batch is done, with the prompt index of each of its rows and the responses.
    Returns for every prompt a list of its response ids [T], T ≤ max_new_tokens, EOS kept.
    Raises ValueError when prompt and response would not fit the model's context.
    """
    counts = [samples] * len(prompts) if isinstance(samples, int) else list(samples)
    longest = max(len(p) for p in prompts)
    if longest + max_new_tokens > policy.context:
        raise ValueError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed the model's context of {policy.context}"
        )
    responses: list[list[Tensor]] = [[] for _ in prompts]
    # Prompts of like length share a batch, so that little of it is padding.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    rows = [i for i in order for _ in range(counts[i])]
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        sequences = _generate_batch(policy, [prompts[i] for i in batch], temperature, top_p, max_new_tokens)
        for row, sequence in zip(batch, sequences, strict=True):
            responses[row].append(sequence)
        if on_batch is not None:
            on_batch(batch, sequences)
    return responses


def _generate_batch(
    policy: Policy, prompts: list[Tensor], temperature: float, top_p: float, max_new_tokens: int
) -> list[Tensor]:
    """One response for each row. Rows whose prompts are the same tensor share its forward pass."""
    model, project = policy.model, policy.model.get_output_embeddings()
    unique = {id(p): p for p in prompts}
    index = {key: i for i, key in enumerate(unique)}
    prompt_of = torch.tensor([index[id(p)] for p in prompts], device=policy.device)  # [B]
    ids, attention = pad_left(list(unique.values()), policy)  # [G, P] each
    stops = torch.tensor(policy.stop_ids, device=policy.device)
    responses = torch.full((len(prompts), max_new_tokens), policy.pad_id, device=policy.device)  # [B, T]

    with torch.no_grad(), policy.precision(), cache_on(model):
        positions = (attention.cumsum(1) - 1).clamp(min=0)  # [G, P]: padding on the left shifts no position
        output = model.base_model(input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=True)
        logits = project(output.last_hidden_state[:, -1])  # [G, V]
        if not logits.logsumexp(-1).isfinite().all():
            raise InputError("the policy's logits are NaN or infinite: training has diverged; lower --lr, or use fp32")
        logits = logits[prompt_of]  # [B, V]
        name = "cache" if hasattr(output, "cache") else "past_key_values"  # transformers renamed it in 5.24
        cache = getattr(output, name)
        cache.batch_select_indices(prompt_of)
        attention = attention[prompt_of]  # [B, P]
        row_of = torch.arange(len(prompts), device=policy.device)  # [B]: the response that a row of the batch writes
        done = torch.zeros_like(row_of, dtype=torch.bool)  # [B]
        for step in range(max_new_tokens):
            tokens = draw_tokens(logits, temperature, top_p)  # [B]
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
    return [cut_at_stop(row, policy.stop_ids) for row in responses.cpu()]


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
    """
    if temperature == 0:
        return logits.argmax(-1)
    probs = (logits.float() / temperature).softmax(-1)  # [B, V]
    if top_p < 1:
        ordered, tokens = probs.sort(-1, descending=True)  # [B, V] each
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0.0)  # the token that reaches top_p stays
        probs = torch.zeros_like(probs).scatter(-1, tokens, ordered)
    cumulated = probs.cumsum(-1, dtype=torch.float32 if probs.device.type == "mps" else torch.float64)  # [B, V]
    # In [0, 1) of the total, so that the answer is never a token of probability 0.
    uniform = torch.rand(len(probs), 1, dtype=cumulated.dtype, device=probs.device) * cumulated[:, -1:]  # [B, 1]
    return torch.searchsorted(cumulated, uniform, right=True).clamp(max=probs.shape[-1] - 1).squeeze(-1)


@contextmanager
def cache_on(model: Any) -> Iterator[None]:
    """Pause gradient checkpointing, which would switch the KV cache off and make generation quadratic."""
    checkpointed = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) and m.training]
    for module in checkpointed:
        module.training = False  # see `policy.enable_gradient_checkpointing`
    try:
        yield
    finally:
        for module in checkpointed:
            module.training = True


def cut_at_stop(ids: Tensor, stop_ids: Sequence[int]) -> Tensor:
    """Response ids up to and with the first stop token; all of them where there is none.

    >>> cut_at_stop(torch.tensor([7, 8, 0, 3]), stop_ids=(0,)).tolist()
    [7, 8, 0]
    """
    stops = torch.isin(ids, torch.tensor(stop_ids)).nonzero()
    return ids[: int(stops[0]) + 1] if len(stops) else ids


def rollout(
    policy: Policy,
    questions: Sequence[tuple[str, Tensor]],
    samples: int | Sequence[int],
    *,
    temperature: float,
    max_new_tokens: int,
    batch_size: int = 64,
    top_p: float = 1.0,
) -> list[list[Trajectory]]:
    """One group of `samples` trajectories for each (question id, prompt ids [P]); see `generate_responses`."""
    groups = generate_responses(
        policy,
        [prompt for _, prompt in questions],
        samples,
        temperature=temperature,
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
    )
    return [
        [make_trajectory(policy, question_id, prompt, response) for response in group]
        for (question_id, prompt), group in zip(questions, groups, strict=True)
    ]


def make_trajectory(policy: Policy, question_id: str, prompt_ids: Tensor, response_ids: Tensor) -> Trajectory:
    ids = response_ids.tolist()
    return Trajectory(
        question_id,
        prompt_ids,
        response_ids,
        text=policy.tokenizer.decode(ids, skip_special_tokens=True),
        truncated=not ids or ids[-1] not in policy.stop_ids,
    )
