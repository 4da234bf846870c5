"""The reward of a response, and that training and evaluation take it from one place."""

import pytest
import torch

from nano_exgrpo import reward as rewards
from nano_exgrpo.checker import answer_reward, extraction, reward
from nano_exgrpo.questions import Question
from nano_exgrpo.reward import grade, reward_of
from nano_exgrpo.trajectory import RIGHT, Trajectory


def test_reward_is_one_or_zero():
    assert reward(r"\boxed{1{,}024}", "1024") == RIGHT and reward(r"\boxed{1025}", "1024") == 0.0
    assert reward("1024", "1024") == 0.0
    assert answer_reward("1,024", "1024") == RIGHT and answer_reward(None, "1024") == 0.0


@pytest.mark.parametrize(
    "response, gold, letters, options, graded",
    [
        (r"so \boxed{0.5}", "1/2", "", (), ("0.5", RIGHT)),
        (r"so \boxed{0.6}", "1/2", "", (), ("0.6", 0.0)),
        ("no idea", "1/2", "", (), (None, 0.0)),
        (r"<think>\boxed{0.5}", "1/2", "", (), (None, 0.0)),
        (r"\boxed{B}", "B", "ABCD", (), ("B", RIGHT)),
        ("The answer is (C).", "B", "ABCD", (), ("C", 0.0)),
        (r"\boxed{G}", "B", "ABCD", (), (None, 0.0)),
        (r"\boxed{A bear}", "B", "AB", (), (None, 0.0)),
        (r"\boxed{A bear}", "B", "AB", ("A salmon", "A bear"), ("B", RIGHT)),
        (r"\boxed{A bear}", "A", "AB", ("A salmon", "A bear"), ("B", 0.0)),
    ],
)
def test_grade(response, gold, letters, options, graded):
    assert grade(response, gold, letters, options) == graded


def test_an_answer_is_extracted_once(monkeypatch):
    calls = []
    monkeypatch.setattr(rewards, "extract_answer", lambda response: calls.append(response) or "5")
    assert grade("five", "5") == ("5", RIGHT) and calls == ["five"]


def test_a_trajectory_s_question_gives_its_options_to_the_reward():
    question = Question("q", "Which animal swims?", "B", choices=("A bear", "A salmon"))
    right, wrong = (Trajectory(question, torch.tensor([1]), rf"\boxed{{{text}}}") for text in question.choices[::-1])
    assert reward_of(right) == RIGHT and reward_of(wrong) == 0.0


def test_a_fault_of_the_checker_is_a_wrong_answer_not_the_end_of_a_run(monkeypatch, capsys):
    def faulty(gold: str, answer: str) -> bool:
        raise KeyError("unforeseen")

    monkeypatch.setattr(extraction, "is_equal", faulty)
    assert reward(r"so \boxed{5}", "5") == 0.0 and grade(r"so \boxed{5}", "5") == ("5", 0.0)
    assert "KeyError on '5' against '5'" in capsys.readouterr().err
