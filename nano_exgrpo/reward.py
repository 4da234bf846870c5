"""The reward: 1 for a response whose final answer is right, else 0. A reward of your own belongs here."""

from __future__ import annotations

from nano_exgrpo.checker import extract_answer, extract_choice, reward
from nano_exgrpo.trajectory import RIGHT, Trajectory


def reward_of(trajectory: Trajectory) -> float:
    """r of a trajectory. Training and evaluation both ask here, so they cannot disagree."""
    question = trajectory.question
    return RIGHT if grade(trajectory.text, question.answer, question.letters)[1] else 0.0


def grade(response: str, gold: str, letters: str = "") -> tuple[str | None, bool]:
    """(extracted answer or None, whether it is right). letters: those of a multiple-choice question's options."""
    if letters:
        answer = extract_choice(response, letters)
        return answer, answer == gold
    return extract_answer(response), reward(response, gold) == 1.0
