"""The reward: 1 for a response whose final answer is right, else 0. A reward of your own belongs here."""

from __future__ import annotations

from nano_exgrpo.checker import answer_reward, extract_answer, extract_choice
from nano_exgrpo.trajectory import RIGHT, Trajectory


def reward_of(trajectory: Trajectory) -> float:
    """r of a trajectory. Training and evaluation both ask here, so they cannot disagree."""
    question = trajectory.question
    return grade(trajectory.text, question.answer, question.letters, question.choices)[1]


def grade(response: str, gold: str, letters: str = "", options: tuple[str, ...] = ()) -> tuple[str | None, float]:
    """(final answer or None, reward) of a response.

    Args:
        response: the whole response.
        gold: the right answer; of a multiple-choice question, the letter of the right option.
        letters: the letters of a multiple-choice question's options; empty for a free answer.
        options: the texts of these options, where they are known.
    """
    if letters:
        answer = extract_choice(response, letters, options)
        return answer, RIGHT * (answer == gold)
    answer = extract_answer(response)
    return answer, answer_reward(answer, gold)
