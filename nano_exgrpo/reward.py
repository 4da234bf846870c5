"""The reward: 1 for a response whose final answer is right, else 0."""

from __future__ import annotations

from nano_exgrpo.checker import extract_answer, extract_choice, reward


def grade(response: str, gold: str, letters: str = "") -> tuple[str | None, bool]:
    """(extracted answer or None, whether it is right). letters: those of a multiple-choice question's options.

    Training takes its reward from here as well: it and evaluation cannot disagree."""
    if letters:
        answer = extract_choice(response, letters)
        return answer, answer == gold
    return extract_answer(response), reward(response, gold) == 1.0
