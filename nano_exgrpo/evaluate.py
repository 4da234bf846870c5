"""Evaluation: responses of a policy to held-out questions, graded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nano_exgrpo.checker import reward
from nano_exgrpo.policy import Policy, encode_prompt
from nano_exgrpo.questions import Question
from nano_exgrpo.rollout import Trajectory, rollout


@dataclass
class Evaluation:
    accuracy: float
    low: float
    high: float
    questions: int
    trajectories: list[list[Trajectory]]


def evaluate(
    policy: Policy,
    questions: Sequence[Question],
    *,
    samples: int,
    temperature: float,
    max_new_tokens: int,
    system_prompt: str,
    batch_size: int,
    seed: int,
    on_question: Callable[[int], None] | None = None,
) -> Evaluation:
    """Leaves the global random state as it was, so that evaluating more often changes no training."""
    devices = [policy.device] if policy.device.type == "cuda" else []
    groups: list[list[Trajectory]] = []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        asked = [(q.id, encode_prompt(policy, q.prompt, system_prompt)) for q in questions]
        groups = rollout(policy, asked, samples, temperature=temperature, max_new_tokens=max_new_tokens, batch_size=batch_size)
    for question, group in zip(questions, groups, strict=True):
        for trajectory in group:
            trajectory.reward = reward(trajectory.text, question.answer)
    accuracy = sum(t.reward for g in groups for t in g) / (len(questions) * samples)
    spread = 1.96 * (accuracy * (1 - accuracy) / len(questions)) ** 0.5
    return Evaluation(accuracy, accuracy - spread, accuracy + spread, len(questions), groups)
