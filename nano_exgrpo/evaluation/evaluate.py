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
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nano_exgrpo.checker import is_equal
from nano_exgrpo.errors import InputError, is_out_of_memory
from nano_exgrpo.evaluation.generations import Generation, by_question
from nano_exgrpo.evaluation.statistics import (
    Interval,
    accuracy_interval,
    clustered_interval,
    group_answers,
    maj_at_k,
    pass_at_k,
)
from nano_exgrpo.logprobs import token_batches
from nano_exgrpo.policy import Policy
from nano_exgrpo.questions import Question
from nano_exgrpo.rollout import generate_responses, make_trajectory
from nano_exgrpo.trajectory import Trajectory

Row = tuple[int, int]  # (index of the question, number of the sample): one response to generate


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
        yield (
            rows,
            [
                make_trajectory(policy, questions[i], response)
                for (i, _), (response,) in zip(rows, responses, strict=True)
            ],
        )


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Whatever is seeded and drawn inside, the CPU's and the device's random numbers go on afterwards as if it had not been."""
    metal = (
        torch.mps.get_rng_state() if device.type == "mps" else None
    )  # fork_rng knows no MPS, which manual_seed seeds too
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        if metal is not None:
            torch.mps.set_rng_state(metal)


def batch_seed(seed: int, rows: Sequence[tuple[str, int]]) -> int:
    """63 bits that depend on nothing but the seed and the (question id, sample) pairs of the batch."""
    return int.from_bytes(hashlib.sha256(repr((seed, list(rows))).encode()).digest()[:8], "big") >> 1


# ---------------------------------------------------------------------------------------------- figures


@dataclass
class Figures:
    """What a benchmark's generations say. Shares and accuracies lie in 0..1, lengths are in tokens."""

    questions: int
    samples: int  # k of avg@k; the fewest that a question has
    accuracy: Interval
    pass_at: dict[int, Interval] = field(default_factory=dict)
    maj_at: dict[int, Interval] = field(default_factory=dict)
    mean_tokens: float = 0.0
    truncated: float = 0.0  # share of responses cut off at the length limit
    unparsable: float = 0.0  # share of responses without a final answer to grade


def summarise(generations: Sequence[Generation], ks: Sequence[int] = ()) -> Figures:
    """ks: those k of pass@k and maj@k to work out; the ones above the number of samples are left out.

    Intervals take the question as the unit (`stats.accuracy_interval`). Raises ValueError on an empty list."""
    groups = list(by_question(generations).values())
    if not groups:
        raise ValueError("no generations to sum up")
    samples = min(len(group) for group in groups)
    figures = Figures(
        len(groups),
        samples,
        accuracy_interval([[float(g.correct) for g in group] for group in groups]),
        mean_tokens=sum(g.tokens for g in generations) / len(generations),
        truncated=sum(g.truncated for g in generations) / len(generations),
        unparsable=sum(g.answer is None for g in generations) / len(generations),
    )
    ks = sorted({k for k in ks if 1 < k <= samples})
    votes = [count_votes(group) for group in groups] if ks else []
    for k in ks:
        figures.pass_at[k] = clustered_interval([pass_at_k(len(g), sum(x.correct for x in g), k) for g in groups])
        figures.maj_at[k] = clustered_interval(
            [maj_at_k(correct, others, len(g), k) for g, (correct, others) in zip(groups, votes, strict=True)]
        )
    return figures


def count_votes(group: Sequence[Generation]) -> tuple[int, list[int]]:
    """(right votes, sizes of the groups of equal wrong answers); letters are equal only to themselves."""
    equal = str.__eq__ if group[0].letters else is_equal
    return group_answers([g.answer for g in group], [g.correct for g in group], equal)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells in columns; the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def figures_table(figures: dict[str, Figures], averages: dict[str, Interval]) -> str:
    """One line a benchmark, then one an average over a group of benchmarks."""
    ks = sorted({k for f in figures.values() for k in f.pass_at})
    head = ["benchmark", "questions", "metric", "accuracy [95 %]"]
    head += [f"{kind}@{k}" for k in ks for kind in ("pass", "maj")] + ["tokens", "truncated", "no answer"]
    rows = [head]
    for name, f in figures.items():
        at_k = [f"{at[k].value:.3f}" if k in at else "" for k in ks for at in (f.pass_at, f.maj_at)]
        metric = "pass@1" if f.samples == 1 else f"avg@{f.samples}"
        shares = [f"{f.mean_tokens:.0f}", f"{f.truncated:.1%}", f"{f.unparsable:.1%}"]
        rows.append([name, str(f.questions), metric, str(f.accuracy), *at_k, *shares])
    for group, interval in averages.items():
        rows.append([f"average, {group}", "", "", str(interval)] + [""] * (len(head) - 4))
    return table(rows)


# ------------------------------------------------------------------------------------------ all at once


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
