"""A policy small enough to enumerate: a table of logits behind the interface of a causal language model.

    vocabulary  response tokens 0 … V−1 and one prompt token for each question, V + q
    states      (question, response so far): the table holds V logits for each
    outcomes    all V^L responses of length L

So every expectation over responses is a finite sum, and a claim about gradients can be proved, not sampled.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from nano_exgrpo.policy import Policy
from nano_exgrpo.questions import Question
from nano_exgrpo.trajectory import Trajectory


class TabularModel(nn.Module):
    """logits[state] for every state; `table` [states, V] is the only trained parameter θ."""

    def __init__(
        self, vocabulary: int, length: int, questions: int = 1, seed: int = 0, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        self.vocabulary, self.length = vocabulary, length
        prefixes = [p for n in range(length) for p in itertools.product(range(vocabulary), repeat=n)]
        self.states = {(q, p): i for i, (q, p) in enumerate(itertools.product(range(questions), prefixes))}
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(len(self.states), vocabulary, generator=generator, dtype=dtype))
        self.head = nn.Linear(vocabulary, vocabulary, bias=False, dtype=dtype)
        self.head.weight = nn.Parameter(torch.eye(vocabulary, dtype=dtype), requires_grad=False)
        self.config = SimpleNamespace(model_type="tabular", max_position_embeddings=64)
        self.generation_config: Any = SimpleNamespace(eos_token_id=None)

    def state(self, ids: list[int]) -> int:
        """Row of the table for the text so far: a prompt token, then response tokens. Last state where it is over."""
        question, prefix = ids[0] - self.vocabulary, tuple(ids[1:])
        return self.states.get((question, prefix), 0)

    def base_model(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        past_key_values: Prefix | None = None, use_cache: bool = False,
    ) -> Any:  # fmt: skip
        """The KV cache of a table is the text so far."""
        known = 0 if past_key_values is None else past_key_values.ids.shape[1]
        ids = input_ids if past_key_values is None else torch.cat([past_key_values.ids, input_ids], 1)
        cache = past_key_values or Prefix()
        cache.ids = ids
        rows = [[self.state(row[: p + 1]) for p in range(known, len(row))] for row in ids.tolist()]
        return SimpleNamespace(last_hidden_state=self.table[torch.tensor(rows)], past_key_values=cache)  # [B, S, V]

    def get_output_embeddings(self) -> nn.Module:
        return self.head


class Prefix:
    """What the loop over tokens asks of a KV cache."""

    ids: Tensor

    def batch_select_indices(self, rows: Tensor) -> None:
        self.ids = self.ids[rows]


class Words:
    """The least that a tokenizer must do here: one digit a token."""

    eos_token_id = pad_token_id = None

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return " ".join(str(int(i)) for i in ids)


def tabular_policy(vocabulary: int = 2, length: int = 2, questions: int = 1, seed: int = 0) -> Policy:
    """stop_ids: none, so that all responses have the full length. A table has no
    HF `generate`: it is sampled by our own loop. The prompt of question q is [V + q]."""
    model = TabularModel(vocabulary, length, questions, seed)
    return Policy(model, Words(), stop_ids=(), pad_id=0, context=64, sampler="loop")


def outcomes(policy: Policy) -> list[Tensor]:
    """All V^L responses [L]."""
    model = policy.model
    return [torch.tensor(o) for o in itertools.product(range(model.vocabulary), repeat=model.length)]


def prompt(policy: Policy, question: int = 0) -> Tensor:
    return torch.tensor([policy.model.vocabulary + question])


def asked(policy: Policy, question: int = 0) -> Question:
    """Question number `question` as it is asked; its id is q0, q1, …"""
    return Question(f"q{question}", "?", "", prompt_ids=prompt(policy, question))


def answers(policy: Policy) -> list[Trajectory]:
    """All outcomes as trajectories of question 0."""
    question = asked(policy)
    return [Trajectory(question, outcome, "") for outcome in outcomes(policy)]


def exact_probabilities(policy: Policy, question: int = 0) -> Tensor:
    """π_θ(o) of every outcome [V^L], with gradient, straight from the table."""
    model = policy.model
    logp = model.table.log_softmax(-1)
    total = [
        sum(logp[model.states[question, tuple(o[:t])], o[t]] for t in range(model.length))
        for o in (outcome.tolist() for outcome in outcomes(policy))
    ]
    return torch.stack(total).exp()
