"""The verdict on an answer: extract it from a response, compare it with the gold answer, reward 1 or 0.

A first version: plain numbers and literal text; the LaTeX front end follows.
"""

from __future__ import annotations

import re
from fractions import Fraction

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|[-+]?\.\d+")
_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")


def _last_box(text: str) -> str | None:
    """The content of the last `\\boxed{...}` or `\\fbox{...}`; "" if it is cut off, None if there is none."""
    last = None
    for last in _BOX.finditer(text):
        pass
    if last is None:
        return None
    depth = 1
    for at in range(last.end(), len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[last.end():at].strip()
    return ""


def extract_answer(response: str) -> str | None:
    """The final answer of a response: its last box after any `</think>`; None if there is none."""
    return _last_box(response.rpartition("</think>")[2])


def extract_choice(response: str, letters: str = "ABCDEFGHIJ") -> str | None:
    """The letter of a multiple-choice answer: in the box, or in a final "the answer is (B)"."""
    tail = response.rpartition("</think>")[2]
    box = _last_box(tail)
    if box is not None:
        match = re.fullmatch(rf"(?:\\text\w*\{{)?\s*\(?([{letters}])\)?[.:]?.*", box, re.DOTALL)
        return match[1] if match else None
    found = re.findall(rf"answer(?:\s+is)?\s*:?\s*\(?([{letters}])\b", tail, re.IGNORECASE)
    return found[-1].upper() if found else None


def _number(text: str) -> Fraction | None:
    return Fraction(text.replace(",", "")) if len(text) < 400 and _NUMBER.fullmatch(text) else None


def is_equal(gold: str, answer: str) -> bool:
    """Whether `answer` states the same value as `gold`."""
    gold, answer = gold.strip(), answer.strip()
    left, right = _number(gold), _number(answer)
    if left is None or right is None:
        return bool(gold) and gold == answer
    return left == right


def reward(response: str, gold: str) -> float:
    """1.0 if the final answer of `response` equals `gold`, else 0.0."""
    answer = extract_answer(response)
    return float(answer is not None and is_equal(gold, answer))
