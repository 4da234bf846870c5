"""Evaluation: sampled responses to questions, graded, and summed up in figures with their uncertainty.

`train.py` watches its held-out questions with `evaluate`; `eval.py` streams batches of its own to disk. Both
sample with temperature and top-p as asked and nothing else (no top-k, no repetition penalty), and grade with the
checker that gives the reward.

Every batch has its own random seed, made of the run's seed and of what is in the batch. So a batch gives the same
responses whatever was generated before it, and an interrupted evaluation that goes on equals one that was not.
"""

from __future__ import annotations

import gc
import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from nano_exgrpo.errors import InputError, is_out_of_memory
from nano_exgrpo.evaluation.generations import (
    Generation,
    Key,
    add_generations,
    make_generation,
    pin_prompts,
    write_generations,
)
from nano_exgrpo.evaluation.settings import EvalConfig
from nano_exgrpo.logprobs import token_batches
from nano_exgrpo.policy import Policy, encode_questions
from nano_exgrpo.questions import Question, questions_digest
from nano_exgrpo.rollout import generate_responses, make_trajectory
from nano_exgrpo.trajectory import Trajectory

Row = tuple[int, int]  # (index of the question, number of the sample): one response to generate


@dataclass
class Task:
    """One benchmark: its questions, and how many responses to each."""

    name: str
    questions: list[Question]
    samples: int

    def key(self, row: Row) -> Key:
        return self.name, self.questions[row[0]].id, row[1]

    @property
    def keys(self) -> list[Key]:
        return [self.key((i, sample)) for i in range(len(self.questions)) for sample in range(self.samples)]


# ------------------------------------------------------------------------------------------- generating


def plan_batches(
    policy: Policy, prompts: Sequence[Tensor], samples: int, *, max_new_tokens: int, token_budget: int
) -> list[list[Row]]:
    """Batches of rows whose prompts [P] are of like length, longest first; each at most `token_budget` tokens when
    every response is as long as it may be. Raises InputError for a prompt that fills the model's context."""
    longest = max((len(p) for p in prompts), default=0)
    if longest >= policy.context:
        raise InputError(
            f"a prompt of {longest} tokens leaves no room to answer in the model's context of {policy.context}"
        )
    rows = [(question, sample) for question in range(len(prompts)) for sample in range(samples)]
    lengths = [min(len(prompts[question]) + max_new_tokens, policy.context) for question, _ in rows]
    return [[rows[i] for i in batch] for batch in token_batches(lengths, token_budget)]


def generate_batches(
    policy: Policy,
    questions: Sequence[Question],
    batches: Iterable[list[Row]],
    *,
    top_p: float = 1.0,
    max_new_tokens: int,
    seed: int,
) -> Iterator[tuple[list[Row], list[Trajectory]]]:
    """Generate batch after batch, yielding each as soon as it is done.

    questions: with their prompts encoded. A batch that runs out of memory is halved, and so is
    every later one of its size before it is tried. Prompts too long for `max_new_tokens` more within the model's
    context get what room there is. Leaves the global random state as it was.
    Raises InputError when a single response does not fit the memory.
    """
    queue = deque(batches)
    too_large = math.inf  # tokens, padding included, of the smallest batch that did not fit
    while queue:
        rows = queue.popleft()
        prompts = [questions[i].prompt_ids for i, _ in rows]
        longest = max(len(p) for p in prompts)
        new_tokens = min(max_new_tokens, policy.context - longest)
        size = len(rows) * (longest + new_tokens)
        responses = None
        if size < too_large or len(rows) == 1:
            with random_state_kept(policy.device):
                torch.manual_seed(batch_seed(seed, [(questions[i].id, sample) for i, sample in rows]))
                try:
                    responses = generate_responses(
                        policy, prompts, 1, top_p=top_p, max_new_tokens=new_tokens, batch_size=len(rows)
                    )
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
        if responses is None:  # outside the handler, whose traceback would keep the batch's memory alive
            if len(rows) == 1:
                raise InputError(
                    f"a single response of up to {size} tokens does not fit the memory; lower --max-new-tokens"
                )
            too_large = min(too_large, size)
            queue.extendleft([rows[len(rows) // 2 :], rows[: len(rows) // 2]])
            gc.collect()
            if policy.device.type == "cuda":
                torch.cuda.empty_cache()
            continue
        answers = zip(rows, responses, strict=True)
        yield rows, [make_trajectory(policy, questions[i], response) for (i, _), (response,) in answers]


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Whatever is seeded and drawn inside, the CPU's and the device's random numbers go on afterwards as if it had not
    been. (fork_rng knows no MPS, which manual_seed seeds, too.)"""
    metal = torch.mps.get_rng_state() if device.type == "mps" else None
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        if metal is not None:
            torch.mps.set_rng_state(metal)


def batch_seed(seed: int, rows: Sequence[tuple[str, int]]) -> int:
    """63 bits that depend on nothing but the seed and the (question id, sample) pairs of the batch."""
    return int.from_bytes(hashlib.sha256(repr((seed, list(rows))).encode()).digest()[:8], "big") >> 1


# ------------------------------------------------------------------------------------------ all at once


def answer_task(policy: Policy, task: Task, config: EvalConfig, folder: Path, found: dict[Key, Generation]) -> None:
    """Generate and grade what `found` lacks of a task, adding to it and to the folder batch by batch."""
    asked = encode_questions(policy, task.questions, config.system_prompt)
    pin_prompts(folder, task.name, questions_digest(asked))
    prompts, longest = [q.prompt_ids for q in asked], config.max_new_tokens
    plan = plan_batches(policy, prompts, task.samples, max_new_tokens=longest, token_budget=config.batch_tokens)
    room = policy.context - max(map(len, prompts))
    if room < longest:
        print(f"{task.name}: the longest prompt leaves {room} of {longest} new tokens in the context")

    # A batch cut short by an interruption is generated anew and whole, or its responses would differ from those of
    # an evaluation that was not interrupted.
    pending = [batch for batch in plan if not all(task.key(row) in found for row in batch)]
    if torn := [task.key(row) for batch in pending for row in batch if task.key(row) in found]:
        for key in torn:
            del found[key]
        write_generations(folder, found.values())

    done = [found[key] for key in task.keys if key in found]
    answered, correct = len(done), sum(g.correct for g in done)
    with tqdm(desc=task.name, total=len(task.keys), initial=answered, unit=" responses") as progress:
        settings: dict[str, Any] = dict(top_p=config.top_p, max_new_tokens=longest, seed=config.seed)
        for rows, trajectories in generate_batches(policy, asked, pending, **settings):
            fresh = [
                make_generation(task.name, asked[index], sample, trajectory)
                for (index, sample), trajectory in zip(rows, trajectories, strict=True)
            ]
            add_generations(folder, fresh)
            found.update((g.key, g) for g in fresh)
            answered, correct = answered + len(fresh), correct + sum(g.correct for g in fresh)
            progress.update(len(fresh))
            progress.set_postfix(accuracy=f"{correct / answered:.3f}")


def evaluate(
    policy: Policy,
    questions: Sequence[Question],
    *,
    samples: int,
    max_new_tokens: int,
    batch_size: int,
    seed: int,
    reward: Callable[[Trajectory], float],
) -> list[list[Trajectory]]:
    """`samples` responses to each encoded question, in batches of about `batch_size` sequences, rewarded.

    Leaves the global random state as it was, so that evaluating more often changes no training."""
    prompts = [q.prompt_ids for q in questions]
    budget = batch_size * (max(len(p) for p in prompts) + max_new_tokens)
    plan = plan_batches(policy, prompts, samples, max_new_tokens=max_new_tokens, token_budget=budget)
    groups: list[list[Trajectory]] = [[] for _ in questions]
    for rows, trajectories in generate_batches(policy, questions, plan, max_new_tokens=max_new_tokens, seed=seed):
        for (index, _), trajectory in zip(rows, trajectories, strict=True):
            trajectory.reward = reward(trajectory)
            groups[index].append(trajectory)
    return groups
