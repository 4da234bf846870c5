"""Rollouts: K responses to each question, sampled from exactly the policy that is trained.

The gradient estimate E[A · ∇ log π_θ] is only right if the responses come from π_θ itself: whatever cuts or
bends the sampling distribution (top-k, top-p, a repetition penalty) must be off. HF `generate` turns some of
it on by itself: every field left open is filled from the checkpoint's `generation_config` (Qwen2.5: top_k 20,
top_p 0.8, repetition_penalty 1.05) and then from its own defaults (top_k 50). So every field is set here, and
the checkpoint's configuration is out of the way meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nano_exgrpo.errors import InputError
from nano_exgrpo.policy import Policy, response_text
from nano_exgrpo.questions import Question
from nano_exgrpo.sampling_loop import DIVERGED, decode, pad_left
from nano_exgrpo.trajectory import Trajectory


def generate_responses(
    policy: Policy,
    prompts: Sequence[Tensor],
    samples: int | Sequence[int],
    *,
    top_p: float = 1.0,
    max_new_tokens: int,
    batch_size: int = 64,
) -> list[list[Tensor]]:
    """`samples` responses to each prompt.

    prompts: ragged prompt ids [P] each. samples: one number for all prompts or one for each. top_p: less than 1 only
    to evaluate. batch_size: most sequences at a time; a group may be spread over several batches.
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
        sequences = _generate_batch(policy, [prompts[i] for i in batch], top_p, max_new_tokens)
        for row, sequence in zip(batch, sequences, strict=True):
            responses[row].append(sequence)
    return responses


def _generate_batch(policy: Policy, prompts: list[Tensor], top_p: float, max_new_tokens: int) -> list[Tensor]:
    """One response for each row of prompt ids [P]."""
    if policy.sampler == "loop":
        rows = decode(policy, prompts, top_p, max_new_tokens)  # B × [T]
    else:
        ids, attention = pad_left(prompts, policy)  # [B, P] each
        with torch.no_grad(), policy.precision(), bare_generation(policy.model) as generate:
            try:
                output = generate(
                    input_ids=ids,
                    attention_mask=attention,
                    generation_config=sampling_config(policy, top_p, max_new_tokens),
                )  # [B, P + T]
            except RuntimeError as error:
                if "probability tensor contains" not in str(error):  # torch.multinomial on NaN or infinity
                    raise
                raise InputError(DIVERGED) from None
        rows = list(output[:, ids.shape[1] :].cpu())
    return [cut_at_stop(row, policy.stop_ids) for row in rows]


def sampling_config(policy: Policy, top_p: float, max_new_tokens: int) -> Any:
    """The GenerationConfig of the bare softmax at the policy's temperature: every other filter explicitly off."""
    from transformers import GenerationConfig

    greedy = policy.temperature == 0
    return GenerationConfig(
        do_sample=not greedy,
        temperature=None if greedy else policy.temperature,
        top_k=None if greedy else 0,
        top_p=None if greedy else top_p,
        num_beams=1,
        repetition_penalty=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(policy.stop_ids),
        pad_token_id=policy.pad_id,
    )


@contextmanager
def bare_generation(model: Any) -> Iterator[Callable[..., Tensor]]:
    """`model.generate` with the checkpoint's own generation_config out of its way."""
    from transformers import GenerationConfig

    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield model.generate
    finally:
        model.generation_config = own


def cut_at_stop(ids: Tensor, stop_ids: Sequence[int]) -> Tensor:
    """Response ids up to and with the first stop token; all of them where there is none. A copy: a view would keep the
    whole batch in memory for as long as the response is stored, and in every checkpoint.

    >>> cut_at_stop(torch.tensor([7, 8, 0, 3]), stop_ids=(0,)).tolist()
    [7, 8, 0]
    """
    stops = torch.isin(ids, torch.tensor(stop_ids)).nonzero()
    return ids[: int(stops[0]) + 1 if len(stops) else len(ids)].clone()


def rollout(
    policy: Policy,
    questions: Sequence[Question],
    samples: int | Sequence[int],
    *,
    max_new_tokens: int,
    batch_size: int = 64,
) -> list[list[Trajectory]]:
    """One group of `samples` trajectories for each question; see `generate_responses`."""
    prompts = [question.prompt_ids for question in questions]
    groups = generate_responses(policy, prompts, samples, max_new_tokens=max_new_tokens, batch_size=batch_size)
    return [
        [make_trajectory(policy, question, response) for response in group]
        for question, group in zip(questions, groups, strict=True)
    ]


def make_trajectory(policy: Policy, question: Question, response_ids: Tensor) -> Trajectory:
    """A fresh trajectory from response ids [T], decoded; not yet rewarded or scored."""
    ids = response_ids.tolist()
    return Trajectory(
        question,
        response_ids,
        text=response_text(policy, ids),
        truncated=not ids or ids[-1] not in policy.stop_ids,
    )
