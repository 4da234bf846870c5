#!/usr/bin/env python
"""Rollouts alone, three ways on the same prompts, in turns: HF `generate` (--sampler generate), our loop over tokens
(--sampler loop) and transformers' continuous batching (`generate_batch`, which this project does not use).

    python bench/generate.py                 a 135M Llama shape, 64 responses of up to 128 tokens, two cores
    python bench/generate.py --stops 400     the same where responses end early: each token ends one with p = 400 / V

Weights are random, so that every token of the vocabulary is about equally likely. Figures are medians, in tokens/s; a
first turn does not count.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from step import SHAPES, Shape

from nano_exgrpo.rollout import generate_responses, sampling_config


def own(shape: Shape, sampler: str, rows: int) -> list[int]:
    """The lengths of all responses by --sampler `sampler`, at most `rows` at a time."""
    groups = generate_responses(
        replace(shape.policy, sampler=sampler),
        [question.prompt_ids for question in shape.questions],
        shape.group_size,
        max_new_tokens=shape.response_length,
        batch_size=rows,
    )
    return [len(response) for group in groups for response in group]


def continuous(shape: Shape, rows: int) -> list[int]:
    """The same by `generate_batch`, which fills a finished response's place with the next one."""
    from transformers import ContinuousBatchingConfig

    prompts = [question.prompt_ids.tolist() for question in shape.questions for _ in range(shape.group_size)]
    page = 64
    blocks = rows * -(-(len(prompts[0]) + shape.response_length) // page)
    found = shape.policy.model.generate_batch(
        prompts,
        generation_config=sampling_config(shape.policy, 1.0, shape.response_length),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=page, num_blocks=blocks, max_requests_per_batch=rows, max_batch_tokens=rows * page
        ),
    )
    return [len(output.generated_tokens) for output in found.values()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="b")
    parser.add_argument("--stops", type=int, default=1, help="tokens of the vocabulary that end a response")
    parser.add_argument("--rows", type=int, default=64, help="responses at a time")
    parser.add_argument("--steps", type=int, default=3, help="turns that count")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.disable(logging.WARNING)
    shape = SHAPES[args.shape]()
    shape.policy = replace(shape.policy, stop_ids=tuple(range(1, 1 + args.stops)))
    ways: dict[str, Callable[[], list[int]]] = {
        "generate": lambda: own(shape, "generate", args.rows),
        "loop": lambda: own(shape, "loop", args.rows),
        "continuous": lambda: continuous(shape, args.rows),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(1 + args.steps):
        for name, way in ways.items():
            start = time.perf_counter()
            lengths = way()
            rates[name].append(sum(lengths) / (time.perf_counter() - start))
            mean = statistics.mean(lengths)
            print(
                f"turn {turn} {name:10} {rates[name][-1]:7.0f} tokens/s, {len(lengths)} responses of {mean:.1f} tokens",
                flush=True,
            )
    base = statistics.median(rates["generate"][1:])
    for name, own_rates in rates.items():
        median = statistics.median(own_rates[1:])
        print(f"{name:10} {median:7.0f} tokens/s, {median / base:.2f} of generate")
    return 0


if __name__ == "__main__":
    sys.exit(main())
