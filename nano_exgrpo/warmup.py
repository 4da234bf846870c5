"""Supervised warm-up: before it learns from rewards, the policy is shown demonstrations.

It is for a base model that would never be rewarded, because it does not box its answers, say. It takes no more memory
than an update of as many rows: it trains what they train (adapters where there are any), with their optimiser and their
micro-batches. The toy learns its task by the same `warm_up`, with settings of its own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from nano_exgrpo.errors import InputError
from nano_exgrpo.policy import Policy, encode_questions, end_of_turn
from nano_exgrpo.questions import Question, read_jsonl
from nano_exgrpo.trajectory import Trajectory

BATCH = 16  # demonstrations a step


def warm_up(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    examples: Sequence[Trajectory],
    *,
    steps: int,
    batch_size: int = BATCH,
    seed: int,
    on_step: Callable[[int, float], None] | None = None,
) -> None:
    """Maximise the mean log-probability of a batch's response tokens, all tokens alike whatever the micro-batches.

    The optimiser's learning rate is the peak. It is reached linearly over the first 5 % of the steps and cooled to a
    tenth of it along a cosine. on_step: called with (step, loss in nats a token). Of several processes each does the
    same, all of it.
    """
    policy = policy.at(1.0)  # a demonstration was sampled at no temperature of ours
    # Not by torch's schedulers: they tie the optimiser into a cycle, and its moments would outlive it into the run.
    peaks = [float(group["lr"]) for group in optimizer.param_groups]
    rng = random.Random(seed)
    for step in range(steps):
        batch = [examples[rng.randrange(len(examples))] for _ in range(batch_size)]
        tokens = sum(len(example.response_ids) for example in batch)
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for rows in policy.batches(batch):
            # Sorted, as they were drawn: a batch in one piece is not reordered.
            logprobs = policy.score([batch[row] for row in sorted(rows)], with_entropy=False).logprobs  # [B, T]
            loss = -logprobs.sum() / tokens
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        if not torch.isfinite(norm):
            raise InputError("the warm-up's gradient is NaN or infinite; lower --warmup-lr or use float32")
        for group, peak in zip(optimizer.param_groups, peaks):
            group["lr"] = peak * rate(step, steps)
        optimizer.step()
        if on_step is not None:
            on_step(step, total)
    optimizer.zero_grad(set_to_none=True)


def rate(step: int, steps: int) -> float:
    """The share of the peak learning rate at a step."""
    rise = max(1, steps // 20)
    if step < rise:
        return (step + 1) / rise
    return 0.55 + 0.45 * torch.cos(torch.tensor(math.pi * (step - rise) / max(1, steps - rise))).item()


def encode_demonstrations(
    policy: Policy, pairs: Sequence[tuple[Question, str]], system_prompt: str
) -> list[Trajectory]:
    """Demonstrations as the policy will meet them: the prompt of a rollout, the response with the token that ends
    it."""
    end = [end_of_turn(policy.tokenizer)]
    questions = encode_questions(policy, [question for question, _ in pairs], system_prompt)
    return [
        Trajectory(
            question,
            torch.tensor(policy.tokenizer(text, add_special_tokens=False)["input_ids"] + end, dtype=torch.long),
            text,
        )
        for question, (_, text) in zip(questions, pairs, strict=True)
    ]


def read_demonstrations(path: str) -> list[tuple[Question, str]]:
    """(question, response) pairs of a JSONL file. Raises InputError where there are none or one lacks a field."""
    pairs = []
    for where, row in read_jsonl(Path(path)):
        if not isinstance(row.get("question"), str) or not isinstance(row.get("response"), str):
            raise InputError(f"{where} needs the text fields 'question' and 'response'")
        pairs.append((Question(where, row["question"], ""), row["response"]))
    if not pairs:
        raise InputError(f"--warmup-data {path} holds no demonstrations")
    return pairs


def fitting_demonstrations(examples: Sequence[Trajectory], max_prompt: int, max_response: int) -> list[Trajectory]:
    """Those that a rollout could equal, of at most so many tokens. Raises InputError where none is short enough."""
    fitting = [e for e in examples if len(e.prompt_ids) <= max_prompt and len(e.response_ids) <= max_response]
    limits = "--max-prompt-length or --max-response-length"
    if not fitting:
        raise InputError(f"every demonstration is longer than {limits}; raise them")
    if len(fitting) < len(examples):
        print(f"skipped {len(examples) - len(fitting)} of {len(examples)} demonstrations: longer than {limits}")
    return fitting
