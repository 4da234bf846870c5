"""The verdict on a response: extract its answer, compare it with the gold answer, reward 1 or 0.

A small compiler front end for mathematics. In the order in which an answer is processed:

    extraction    response -> its final answer -> verdict
    lexer         characters -> tokens
    units         units of measurement
    tree          what a tree is made of
    words         answers in words
    parser        tokens -> tree: one class, the grammar on top
    functions     one table: how each function is written, read, computed and called in sympy
    evaluator     tree -> number at one point
    real_sets     intervals, inequalities, unions
    sympy_form    tree -> sympy
    verdict       two trees -> equal or not: the policy

    python -m nano_exgrpo.checker GOLD RESPONSE     shows every stage of one verdict

Model output is hostile input. Nothing here evaluates, imports or executes text. Every step is bounded before it
starts: a verdict takes microseconds for plain numbers and milliseconds for anything. There are no signals and no
subprocesses, and the verdict is the same from any thread.
"""

from nano_exgrpo.checker.extraction import answer_reward, explain, extract_answer, extract_choice, is_equal, reward

__all__ = ["answer_reward", "explain", "extract_answer", "extract_choice", "is_equal", "reward"]
