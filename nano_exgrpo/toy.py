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
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nano_exgrpo.policy import Policy, make_policy, token_logprobs
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


def warm_up(
    policy: Policy,
    examples: Sequence[tuple[Tensor, Tensor]],
    *,
    steps: int,
    batch_size: int,
    lr: float,
    seed: int,
    on_step: Callable[[int, float], None] | None = None,
) -> None:
    """Supervised fine-tuning, for any model: maximise the mean log-probability of the response tokens.

    examples: (prompt ids [P], response ids [T] with EOS). lr: peak, reached linearly over the first 5 % of
    the steps and cooled to a tenth of it along a cosine. on_step: called with (step, loss in nats a token).
    """
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    rise = max(1, steps // 20)

    def factor(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        return 0.55 + 0.45 * torch.cos(torch.tensor(torch.pi * (step - rise) / max(1, steps - rise))).item()

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    rng = random.Random(seed)
    for step in range(steps):
        batch = [examples[rng.randrange(len(examples))] for _ in range(batch_size)]
        logprobs, _, mask = token_logprobs(
            policy, [p for p, _ in batch], [r for _, r in batch], with_entropy=False
        )  # [B, T]
        loss = -logprobs.sum() / mask.sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if on_step is not None:
            on_step(step, loss.item())
