"""The verdict on a response: extract its answer, compare it with the gold answer, reward 1 or 0."""

from nano_exgrpo.checker.extraction import answer_reward, explain, extract_answer, extract_choice, is_equal, reward

__all__ = ["answer_reward", "explain", "extract_answer", "extract_choice", "is_equal", "reward"]
