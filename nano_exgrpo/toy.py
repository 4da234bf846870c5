r"""The toy: a real tokenizer and a real (tiny) Qwen2 that go through exactly the code of a 1.5B model.

The task is sums such as "3 + 2 + 5". Demonstrations for the supervised warm-up come in two styles:

    reasoning   5 10 \boxed{ 10 }       the running sums, then the answer: nearly always right
    guessing    \boxed{ 14 }            a number at once: right only by luck

and the reasoning style is rare. So the warmed-up policy *can* reason but seldom does, its lucky guesses
have a high entropy, and reinforcement learning has something true to teach: what a base model looks like
to RL, in a minute on a laptop.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from nano_exgrpo.errors import InputError
from nano_exgrpo.policy import Policy, make_policy
from nano_exgrpo.questions import Question

LARGEST, FEWEST_TERMS, MOST_TERMS = 5, 3, 5  # of a sum: every term lies in 1..LARGEST
OUT_OF_REACH_TERMS = 2 * MOST_TERMS  # of the sums that are too hard for the warmed-up policy
LARGEST_NUMBER = 99  # that has a token
SKILL_LR = 6e-3  # peak learning rate of the first phase of the warm start
WARMUP_BATCH = 64  # demonstrations a step of it
# A template, so that the toy's prompts go through the chat template like those of a chat model.
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|> {{ m.content }}"
    "{% elif m.role == 'assistant' %}<|assistant|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def sum_questions(count: int, *, seed: int, fewest: int = FEWEST_TERMS, most: int = MOST_TERMS) -> list[Question]:
    """`count` different sums such as "3 + 2 + 5", of `fewest` to `most` terms.

    Raises InputError when there are not that many different sums."""
    possible = possible_sums(fewest, most)
    if count > possible:
        raise InputError(f"there are only {possible} different sums of {fewest} to {most} terms, asked for {count}")
    rng = random.Random(seed)
    seen: dict[tuple[int, ...], None] = {}
    while len(seen) < count:
        length = rng.randint(fewest, most)
        numbers = tuple(rng.randint(1, LARGEST) for _ in range(length))
        if fewest < most and LARGEST**length < count and rng.random() < 0.5:
            continue  # short sums run out early: do not keep drawing them
        seen.setdefault(numbers)
    return [Question("sum-" + "-".join(map(str, n)), " + ".join(map(str, n)), str(sum(n)), source="sums") for n in seen]


def possible_sums(fewest: int, most: int) -> int:
    """How many different sums of `fewest` to `most` terms there are, order counted."""
    return sum(LARGEST**n for n in range(fewest, most + 1))


def put_out_of_reach(questions: list[Question], share: float, *, seed: int) -> list[Question]:
    """The same sums, `share` of them replaced by longer ones (source "out of reach"): the many questions of a hard data
    set from which a weak policy learns nothing yet. Raises InputError where there are not so many."""
    chosen = random.Random(f"reach {seed}").sample(range(len(questions)), round(share * len(questions)))
    longer = sum_questions(len(chosen), seed=seed, fewest=OUT_OF_REACH_TERMS, most=OUT_OF_REACH_TERMS)
    hard = {i: replace(question, source="out of reach") for i, question in zip(chosen, longer)}
    return [hard.get(i, question) for i, question in enumerate(questions)]


def build_tokenizer() -> Any:
    r"""Qwen2's tokenizer class with a vocabulary of our own: one token for each number 0..99 and each symbol.

    Nothing is downloaded. Every word carries the space before it, as in GPT-2's vocabulary, so that decoding
    gives the text back: " 5 10 \boxed{ 10 }". Other characters have no token and are dropped.
    """
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(special)},
        merges=[],
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token=None,  # type: ignore[arg-type]
        additional_special_tokens=["<|user|>", "<|assistant|>"],
    )
    words = [" \\boxed{", " }", " +"] + [f" {n}" for n in range(LARGEST_NUMBER + 1)]
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_policy(*, seed: int, device: torch.device | str = "cpu", hidden: int = 64, layers: int = 2) -> Policy:
    """A fresh Qwen2 with random weights, about 100,000 of them at the default size."""
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    tokenizer = build_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.to(device)  # type: ignore[arg-type]
    return make_policy(model, tokenizer)


def demonstrations(questions: Sequence[Question], *, reasoning: float, seed: int) -> list[tuple[Question, str]]:
    r"""(question, response) pairs: a share `reasoning` of them reasons, the rest guesses.

    A guess is drawn uniformly from all sums that so many terms can have: it tells the reader nothing but the range.
    Reasoning of "3 + 2 + 5" reads " 5 10 \boxed{ 10 }", with the leading space that is part of every token.
    """
    rng = random.Random(seed)
    pairs = []
    for question in questions:
        numbers = [int(word) for word in question.prompt.split(" + ")]
        if rng.random() < reasoning:
            running = [sum(numbers[:i]) for i in range(2, len(numbers) + 1)]
            steps, answer = "".join(f" {number}" for number in running), sum(numbers)
        else:
            steps, answer = "", rng.randint(len(numbers), LARGEST * len(numbers))
        pairs.append((question, f"{steps} \\boxed{{ {answer} }}"))
    return pairs


class Phase(NamedTuple):
    """Of the warm start: (question, response) pairs, optimiser steps on them, peak learning rate."""

    pairs: list[tuple[Question, str]]
    steps: int
    lr: float


def warm_start(
    held_out: Sequence[Question], *, skill_steps: int, steps: int, lr: float, reasoning: float, seed: int
) -> list[Phase]:
    """First the skill, from reasoning alone; then the bad habit, from demonstrations that mostly guess. The sums are
    all there are but the held-out ones."""
    kept = {question.prompt for question in held_out}
    every = sum_questions(possible_sums(FEWEST_TERMS, MOST_TERMS), seed=seed)
    shown = [question for question in every if question.prompt not in kept]
    skill = Phase(demonstrations(shown, reasoning=1.0, seed=seed), skill_steps, SKILL_LR)
    habit = Phase(demonstrations(shown, reasoning=reasoning, seed=seed), steps, lr)
    return [phase for phase in (skill, habit) if phase.steps]
