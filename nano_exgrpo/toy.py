r"""The toy: a real tokenizer and a real (tiny) Qwen2 that go through exactly the code of a 1.5B model.

The task is sums such as "3 + 8 + 5". Demonstrations for the supervised warm-up come in two styles:

    reasoning   11 16 \boxed{ 16 }      the running sums, then the answer: nearly always right
    guessing    \boxed{ 14 }            a number at once: right only by luck

and the reasoning style is rare. So the warmed-up policy *can* reason but seldom does, its lucky guesses
have a high entropy, and reinforcement learning has something true to teach: what a base model looks like
to RL, in a minute on a laptop.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from nano_exgrpo.policy import Policy, make_policy
from nano_exgrpo.questions import Question

LARGEST_NUMBER = 99
# A template, so that the toy's prompts go through the chat template like those of a chat model.
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|> {{ m.content }}"
    "{% elif m.role == 'assistant' %}<|assistant|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer() -> Any:
    r"""Qwen2's tokenizer class with a vocabulary of our own: one token for each number 0..99 and each symbol.

    Nothing is downloaded. Every word carries the space before it, as in GPT-2's vocabulary, so that decoding
    gives the text back: " 11 16 \boxed{ 16 }". Other characters have no token and are dropped.
    """
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(special)},
        merges=[],
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token=None,
        additional_special_tokens=["<|user|>", "<|assistant|>"],
    )
    words = [" \\boxed{", " }", " +"] + [f" {n}" for n in range(LARGEST_NUMBER + 1)]
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_policy(*, seed: int, device: torch.device | str = "cpu", hidden: int = 96, layers: int = 3) -> Policy:
    """A fresh Qwen2 with random weights, about 340k of them at the default size."""
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
    return make_policy(model.to(device), tokenizer)


def demonstrations(
    questions: Sequence[Question], *, reasoning: float, seed: int, largest: int = 9, widest_guess: int = 0
) -> list[tuple[str, str]]:
    r"""(prompt, response) pairs, one a question: a share `reasoning` of them reasons, the rest guesses.

    A guess is drawn uniformly from all sums that so many terms of 1..largest can have: it tells the reader
    nothing but the range. widest_guess: draw it from 1..widest_guess instead, so that luck is rarer. Reasoning of
    "3 + 8 + 5" reads " 11 16 \boxed{ 16 }", with the leading space that is part of every token.
    """
    rng = random.Random(seed)
    pairs = []
    for question in questions:
        numbers = [int(word) for word in question.prompt.split(" + ")]
        if rng.random() < reasoning:
            running = [sum(numbers[:i]) for i in range(2, len(numbers) + 1)]
            steps, answer = "".join(f" {number}" for number in running), sum(numbers)
        else:
            least, most = (1, widest_guess) if widest_guess else (len(numbers), largest * len(numbers))
            steps, answer = "", rng.randint(least, most)
        pairs.append((question.prompt, f"{steps} \\boxed{{ {answer} }}"))
    return pairs
