"""Supervised warm-up: before it learns from rewards, the policy is shown demonstrations.

For a base model that would never be rewarded, because it does not box its answers, say. It takes no more memory than
an update of as many rows: it trains what they train (adapters where there are any), with their optimiser and their
micro-batches. The toy learns its task by the same `warm_up`, with settings of its own (start.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from tqdm import tqdm

from nano_exgrpo.arithmetic import DEMONSTRATIONS, arithmetic_demonstrations, is_arithmetic
from nano_exgrpo.config import TrainConfig
from nano_exgrpo.errors import InputError, Interrupted
from nano_exgrpo.infra import distributed
from nano_exgrpo.infra.memory import warms_up
from nano_exgrpo.infra.precision import make_optimizer
from nano_exgrpo.infra.stop import StopRequest
from nano_exgrpo.logprobs import token_batches, token_logprobs
from nano_exgrpo.policy import Policy, encode_prompt, end_of_turn
from nano_exgrpo.questions import Question, read_jsonl

Example = tuple[Tensor, Tensor]  # prompt ids [P], response ids [T] with the token that ends it


def warm_up(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    examples: Sequence[Example],
    *,
    steps: int,
    batch_size: int,
    seed: int,
    token_budget: int = 2**30,
    chunk_bytes: int = 256 * 2**20,
    on_step: Callable[[int, float], None] | None = None,
) -> None:
    """Maximise the mean log-probability of a batch's response tokens, all tokens alike whatever the micro-batches.

    The optimiser's learning rate is the peak, reached linearly over the first 5 % of the steps and cooled to a tenth of
    it along a cosine. token_budget: tokens, padding included, of a micro-batch. chunk_bytes: as in `token_logprobs`.
    on_step: called with (step, loss in nats a token). Of several processes each does the same, all of it.
    """
    rise = max(1, steps // 20)

    def factor(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        return 0.55 + 0.45 * torch.cos(torch.tensor(torch.pi * (step - rise) / max(1, steps - rise))).item()

    # Not by torch's schedulers: they tie the optimiser into a cycle, and its moments would outlive it into the run's updates.
    peaks = [float(group["lr"]) for group in optimizer.param_groups]
    rng = random.Random(seed)
    for step in range(steps):
        batch = [examples[rng.randrange(len(examples))] for _ in range(batch_size)]
        tokens = sum(len(response) for _, response in batch)
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for rows in token_batches([len(p) + len(r) for p, r in batch], token_budget):
            part = [batch[row] for row in sorted(rows)]  # as drawn: a batch in one piece is not reordered
            logprobs, _, _ = token_logprobs(
                policy, [p for p, _ in part], [r for _, r in part], with_entropy=False, chunk_bytes=chunk_bytes
            )  # [B, T]
            loss = -logprobs.sum() / tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        for group, peak in zip(optimizer.param_groups, peaks):
            group["lr"] = 0 * group["lr"] + peak * factor(step)  # a tensor, as torchao wants it, stays one
        optimizer.step()
        if on_step is not None:
            on_step(step, total)
    optimizer.zero_grad(set_to_none=True)


def encode_demonstrations(policy: Policy, pairs: Sequence[tuple[str, str]], system_prompt: str) -> list[Example]:
    """(question, response) texts as the policy will meet them: the prompt of a rollout, the response with its end."""
    end = [end_of_turn(policy.tokenizer)]
    return [
        (
            encode_prompt(policy, question, system_prompt),
            torch.tensor(policy.tokenizer(response, add_special_tokens=False)["input_ids"] + end, dtype=torch.long),
        )
        for question, response in pairs
    ]


def load_demonstrations(config: TrainConfig, held_out: Sequence[Question]) -> list[tuple[str, str]]:
    """The (question, response) pairs that a real model is to be shown; none where no warm-up is asked for. Those of
    `--data arithmetic` are generated, on other questions than the held-out ones.

    Raises InputError where there are none or one lacks a field."""
    if not warms_up(config):
        return []
    if not config.warmup_data and is_arithmetic(config.data):
        return arithmetic_demonstrations(config.data, DEMONSTRATIONS, seed=config.seed, avoid=held_out)
    if not config.warmup_data:
        raise InputError(
            "--warmup-steps on a real model needs demonstrations: name them with --warmup-data, or set it to 0"
        )
    pairs = []
    for where, row in read_jsonl(config.warmup_data):
        if not isinstance(row.get("question"), str) or not isinstance(row.get("response"), str):
            raise InputError(f"{where} needs the text fields 'question' and 'response'")
        pairs.append((row["question"], row["response"]))
    if not pairs:
        raise InputError(f"--warmup-data {config.warmup_data} holds no demonstrations")
    return pairs


def follow_demonstrations(
    policy: Policy, pairs: Sequence[tuple[str, str]], config: TrainConfig, stop: StopRequest
) -> None:
    """Warm up a real model, as the run is going to train it. Demonstrations that no rollout could equal, because they
    are longer, are left out. Raises InputError where none is short enough, Interrupted where `stop` is requested."""
    examples = [
        (prompt, response)
        for prompt, response in encode_demonstrations(policy, pairs, config.system_prompt)
        if len(prompt) <= min(config.max_prompt_length, policy.context - config.max_response_length)
        and len(response) <= config.max_response_length
    ]
    if len(examples) < len(pairs):
        print(
            f"skipped {len(pairs) - len(examples)} of {len(pairs)} demonstrations: longer than --max-prompt-length or --max-response-length"
        )
    if not examples:
        raise InputError("every demonstration is longer than --max-prompt-length or --max-response-length; raise them")
    optimizer = make_optimizer(policy.model.parameters(), config.optimizer, lr=config.warmup_lr, weight_decay=0.0)
    with shown(config.warmup_steps, stop) as on_step:
        warm_up(
            policy,
            optimizer,
            examples,
            steps=config.warmup_steps,
            batch_size=config.warmup_batch,
            seed=config.seed,
            token_budget=config.train_batch_tokens,
            chunk_bytes=config.logits_megabytes * 2**20,
            on_step=on_step,
        )


@contextmanager
def shown(steps: int, stop: StopRequest) -> Iterator[Callable[[int, float], None]]:
    """An `on_step` with a progress bar. Raises Interrupted after the step in which `stop` was requested."""
    with tqdm(total=steps, desc="warm-up", disable=not distributed.is_main()) as progress:

        def on_step(step: int, loss: float) -> None:
            progress.update()
            progress.set_postfix(loss=f"{loss:.3f}")
            if stop.requested:
                raise Interrupted("stopped during the warm-up; nothing was saved, so start again with the same command")

        yield on_step
