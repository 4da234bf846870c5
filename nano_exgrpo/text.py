"""Answers in words, for the answer checker: the same words and signs in the same order are the same answer.

Symbols are case-sensitive, words are not.
"""

from __future__ import annotations

from nano_exgrpo.tokens import Token

_EMPTY = "no solution"
_SAME = {
    **dict.fromkeys(["no solution", "no solutions", "no real solution", "no real solutions", "there is no solution",
                     "there are no solutions", "there is no real solution", "there are no real solutions", "has no solution",
                     "no such solution", "emptyset"], _EMPTY),
    **dict.fromkeys(["does not exist", "dne", "undefined", "doesn t exist"], "undefined"),
    **dict.fromkeys(["all real numbers", "all reals", "all real x", "the set of all real numbers", "reals", "the real numbers"], "reals"),
    **dict.fromkeys(["infinity", "infinite", "infinitely many", "infinitely many solutions"], "infinity"),
    **dict.fromkeys(["true", "t"], "true"),
}


def words(tokens: list[Token]) -> tuple[str, ...]:
    """The tokens as strings, words in lower case."""
    out = []
    for kind, text, *_ in tokens:
        if kind == "word" and looks_like_word(text) or kind in ("text", "op", "cmd"):
            text = text.lower()
        if kind != "end":
            out.append(text)
    return tuple(out)


def looks_like_word(run: str) -> bool:
    """Whether bare letters are a word and not a product of symbols: `Yes`, `even`, not `Nn`, `abC`."""
    return len(run) > 1 and (run[1:].islower() or len(run) > 3) and run.lower() in ("no", "yes") or (
        len(run) > 2 and run[1:].islower() and any(c in "aeiouy" for c in run.lower()))


def same_words(gold: list[Token], answer: list[Token]) -> bool:
    """Whether two token lists are the same statement, word by word."""
    left, right = words(gold), words(answer)
    if not left or not right:
        return False
    if left == right:
        return True
    return _SAME.get(" ".join(left), "gold") == _SAME.get(" ".join(right), "answer")
