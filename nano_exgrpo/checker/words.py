"""Answers in words, for the answer checker: the same words and signs in the same order are the same answer.

Symbols are case-sensitive, words are not: `YES` is `yes`, but `CO` is not `Co`, nor `Aa` `aa`.
"""

from __future__ import annotations

from nano_exgrpo.checker.lexer import Token

CHOICES = set("ABCDEFGHIJ")
_SAME = {
    **dict.fromkeys(
        ["no real solution", "no real solutions", "there is no real solution", "has no solution"], "no solution"
    ),
    **dict.fromkeys(["does not exist", "dne", "undefined", "doesn t exist"], "undefined"),
}


def words(tokens: list[Token]) -> tuple[str, ...]:
    """The tokens as strings, words in lower case."""
    out = []
    for at, (kind, text, _, _, written) in enumerate(tokens):
        if (
            text in ("an", "the")
            and kind in ("text", "word")
            or (text == "a" and kind == "roman" and tokens[at + 1].kind == "text")
        ):
            continue  # "a parabola"
        if kind in ("word", "text") and looks_like_word(written or text):
            text = text.lower()
        elif kind == "text":
            text = written or text
        if kind != "end":
            out.append(text)
    return tuple(out)


def looks_like_word(run: str) -> bool:
    """Whether letters are a word and not a product of symbols: `Yes`, `even`, `DNE`, not `Nn`, `abC`, `MW`."""
    return run.lower() in ("no", "yes", "true", "false", "none", "am", "pm") or (
        len(run) > 2 and (run[1:].islower() or run.isupper()) and any(c in "aeiouy" for c in run.lower())
    )


def same_words(gold: list[Token], answer: list[Token]) -> bool:
    """Whether two token lists are the same statement, word by word."""
    left, right = words(gold), words(answer)
    if not left or not right:
        return False
    if left == right:
        return True
    if all(t.kind in ("text", "word", "roman") or t.text in ("and", ",") for t in (*gold[:-1], *answer[:-1])):
        parts = [sorted(" ".join(side).replace(" , ", " and ").split(" and ")) for side in (left, right)]
        if parts[0] == parts[1]:  # Ann and Bob; Bob and Ann
            return True
    return _SAME.get(" ".join(left), "gold") == _SAME.get(" ".join(right), "answer")


def choice_readings(answer: list[Token], gold: list[Token]) -> list[list[Token]]:
    """The answer, and where it is a choice with its content (`(B) 12`, `B. 12`), the letter or the content alone.

    The letter if the gold answer is a letter, the content otherwise; a letter in math mode before its content
    (`(B) 12`) may be a factor, so that its content alone is not read.
    """
    while answer[0].kind in ("text", "word") and answer[0].text.lower() in ("option", "choice") and len(answer) > 2:
        answer = answer[1:]
    bracketed = answer[0].text == "("
    letter, *rest = answer[bracketed:]
    if letter.kind not in ("name", "roman") or letter.text not in CHOICES or not rest:
        return [answer]
    mark, *content = rest
    if mark.text not in ((")",) if bracketed else (")", ".", ":")) or not content or content[0].kind == "end":
        return [answer]
    more_letters = any(t.kind in ("name", "roman") and t.text in CHOICES for t in content)
    if more_letters or content[0].text in (",", ";", "and", "or"):
        return [answer]
    if is_letter(gold):
        return [answer, [letter, answer[-1]]]
    return [answer, content] if letter.kind == "roman" or not bracketed else [answer]


def is_letter(tokens: list[Token]) -> bool:
    """Whether an answer is one choice letter, perhaps in parentheses."""
    inner = [t for t in tokens if t.kind != "end" and t.text not in ("(", ")", ".")]
    return len(inner) == 1 and inner[0].kind in ("name", "roman") and inner[0].text in CHOICES
