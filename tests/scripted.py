"""The real train step with decided rewards: no module is patched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from conftest import tiny_toy

from nano_exgrpo.config import resolve
from nano_exgrpo.infra.precision import make_optimizer
from nano_exgrpo.infra.session import State
from nano_exgrpo.policy import Policy, encode_questions
from nano_exgrpo.questions import Question, QuestionSampler
from nano_exgrpo.replay import ReplayBuffer
from nano_exgrpo.trajectory import Trajectory
from train import train_step

# Of a group's K trajectories, given the step, the question's number and the group's place in the batch: how many are
# right, the replayed one included, or the reward of each.
Plan = Callable[[int, int, int], "int | list[float]"]


@dataclass
class Step:
    """What one step did. policy: as it was before it. stored: the buffer's, before. bucket, retired: after it."""

    row: dict[str, Any]
    samples: list[dict[str, Any]]
    groups: list[list[Trajectory]]
    policy: Policy
    stored: dict[str, list[Trajectory]]
    bucket: dict[str, int]
    retired: list[str]
    trajectories: int

    @property
    def asked(self) -> list[str]:
        """Ids of the questions, in the order of the batch."""
        return [group[0].question.id for group in self.groups]

    @property
    def everyone(self) -> list[Trajectory]:
        return [t for group in self.groups for t in group]

    @property
    def fresh(self) -> list[Trajectory]:
        return [t for t in self.everyone if not t.replayed]

    @property
    def replayed(self) -> list[Trajectory]:
        return [t for t in self.everyone if t.replayed]

    @property
    def taught(self) -> list[bool]:
        """Of each group: whether the update scored its fresh rows, as it does those with an advantage."""
        return [group[-1].logprobs is not None for group in self.groups]


class Watched(ReplayBuffer):
    """Remembers what it gave to be replayed."""

    given: list[Trajectory]

    def choose(self, *args: Any, **settings: Any) -> Trajectory:
        self.given.append(super().choose(*args, **settings))
        return self.given[-1]


class Script:
    """A run of `train_step` on an untrained policy and questions q0, q1, … with the rewards of a plan."""

    def __init__(self, count: int, plan: Plan, **settings: Any) -> None:
        given = dict(questions_per_step=4, group_size=4, max_response_length=2, lr=1e-4, log_samples=0, preset="none")
        config = resolve({**given, **settings})
        self.config, self.plan, self.steps = config, plan, []
        policy = replace(tiny_toy(), temperature=config.temperature, token_budget=config.train_batch_tokens)
        questions = encode_questions(policy, [Question(f"q{i}", str(i % 99), "") for i in range(count)], "")
        self.buffer = Watched(config.group_size, seed=0, max_per_question=config.max_per_question)
        optimizer = make_optimizer(policy.model.parameters(), config.optimizer, lr=config.lr, weight_decay=0.0)
        sampler = QuestionSampler(questions, seed=0)
        self.state = State(policy, optimizer, sampler, self.buffer, questions, [], "", self.reward)
        torch.manual_seed(0)

    def reward(self, trajectory: Trajectory) -> float:
        id, K = trajectory.question.id, self.config.group_size
        if id not in self.left:
            planned = self.plan(self.state.step + 1, int(id[1:]), len(self.left))
            rewards = [1.0] * planned + [0.0] * (K - planned) if isinstance(planned, int) else list(planned)
            self.left[id] = rewards[any(t.question.id == id for t in self.buffer.given) :]
        self.fresh.append(trajectory)
        return self.left[id].pop(0)

    def step(self) -> Step:
        self.left: dict[str, list[float]] = {}
        self.fresh: list[Trajectory] = []
        self.buffer.given = []
        stored = {id: list(kept) for id, kept in self.buffer.stored.items()}
        policy = replace(self.state.policy, model=copy.deepcopy(self.state.policy.model))
        row, samples = train_step(self.state, self.config)
        groups: dict[str, list[Trajectory]] = {}
        for t in self.buffer.given + self.fresh:
            groups.setdefault(t.question.id, []).append(t)
        memory = dict(self.buffer.bucket), list(self.buffer.retired), len(self.buffer)
        self.steps.append(Step(row, samples, list(groups.values()), policy, stored, *memory))
        return self.steps[-1]

    def run(self, steps: int) -> list[Step]:
        return [self.step() for _ in range(steps)]


def values(steps: list[Step], name: str) -> list[Any]:
    """A metric's value in each step."""
    return [step.row[name] for step in steps]


def plain(policy: Policy, t: Trajectory) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities [T], entropies [T]) of a response from the model's own full logits."""
    logits = policy.model(input_ids=torch.cat([t.prompt_ids, t.response_ids])[None]).logits[0] / policy.temperature
    logp = logits[len(t.prompt_ids) - 1 : -1].log_softmax(-1)  # [T, V]: position p predicts token p + 1
    return logp.gather(1, t.response_ids[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
