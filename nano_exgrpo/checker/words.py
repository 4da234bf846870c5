"""Answers in words, for the answer checker: the same words and signs in the same order are the same answer.

Symbols are case-sensitive, words are not: `YES` is `yes`, but `CO` is not `Co`, nor `Aa` `aa`.
"""

from __future__ import annotations

import re
from fractions import Fraction

from nano_exgrpo.checker.lexer import Token, has_vowel

CHOICES = set("ABCDEFGHIJ")
VERDICTS = {"yes", "no", "true", "false"}
DENIALS = set(
    "no not never neither nor cannot isn doesn aren false wrong incorrect impossible unless if whether except without "
    "than less least most more or about approximately between from".split()
)  # a sentence with one of them states no value
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
        len(run) > 2 and (run[1:].islower() or run.isupper()) and has_vowel(run)
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


# ------------------------------------------------------------------------------------------------ readings of an answer


def readings(gold: list[Token], answer: list[Token]) -> list[tuple[list[Token], list[Token]]]:
    """The pairs of token lists, one of which must be equal for the answer to be right.

    A choice counts by its letter if the other side has a letter, else by its content (`B. 12`). A letter in math mode
    in brackets (`(B) 12`) may be a factor, so its content alone is not read.
    """
    left, right = choice(gold), choice(answer)
    if left and right:
        if left[0].text != right[0].text:
            return []
        return [(left[1], right[1])] if len(left[1]) > 1 and len(right[1]) > 1 else [([left[0]], [right[0]])]
    pairs = [(gold, answer)]
    if left and len(left[1]) > 1 and left[2]:
        pairs.append((left[1], answer))
    if right and len(right[1]) > 1 and right[2]:
        pairs.append((gold, right[1]))
    return [(x, y) for g, a in pairs for x in statements(g) for y in statements(a)]


def choice(tokens: list[Token]) -> tuple[Token, list[Token], bool] | None:
    """(letter, content, whether the content can stand alone) of `C`, `(C)`, `Option C)`, `C. 1-i`; None for others."""
    while is_word(tokens[0]) and tokens[0].text.lower() in ("option", "choice") and len(tokens) > 2:
        tokens = tokens[1:]
    bracketed = tokens[0].text == "("
    letter, *rest = tokens[bracketed:]
    if letter.kind not in ("name", "roman") or letter.text not in CHOICES or not rest:
        return None
    mark, *content = rest
    if mark.kind == "end" and not bracketed:
        return letter, [mark], False
    if mark.text not in ((")",) if bracketed else (")", ".", ":")) or not content:
        return None
    first, second = content[0], content[-1] if len(content) < 2 else content[1]
    if first.kind == "op" and first.text not in ("(", "[", "{", r"\{", "|", "pm"):
        if first.text != "-" or second.kind != "num":  # (E) + 3 is a sum
            return None
    for token, after in zip(content, content[1:]):  # B) or C)
        if token.text in CHOICES and after.text in (")", ".", ":", "end", ""):
            return None
    return letter, content, letter.kind == "roman" or not bracketed


def statements(tokens: list[Token]) -> list[list[Token]]:
    """An answer, and what it states: `Yes` of "Yes, because ...", the value of "The rank is 3"."""
    if not any(is_word(token) for token in tokens):
        return [tokens]
    found = [numbered(tokens)]
    if is_word(tokens[0]) and tokens[0].text.lower() in VERDICTS and tokens[1].text in (",", "."):
        if tokens[2].text.lower() not in VERDICTS:
            found.append([tokens[0], tokens[-1]])
    texts = [token.text.lower() if is_word(token) else token.text for token in tokens]
    at = max((at for at, text in enumerate(texts) if text in ("is", "equals") and is_word(tokens[at])), default=0)
    if not at and "=" in texts[1:] and all(is_word(t) and looks_like_word(t.text) for t in tokens[: texts.index("=")]):
        at = texts.index("=")
    spoken = any(token.kind in ("text", "word", "name", "roman", "cmd") for token in tokens[:at])
    if (
        spoken
        and texts.count("is") + texts.count("equals") < 2
        and not {*texts} & DENIALS
        and not {*texts[:at]} & {".", ";"}
        and len(tokens) > at + 2
    ):
        found.append(numbered(tokens[at + 1 :]))
    return found


def is_word(token: Token) -> bool:
    return token.kind in ("text", "word")


_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
NUMBERS = {word: n for n, word in enumerate(_ONES)} | {word: 10 * n for n, word in enumerate(_TENS, 2)}
_ODD_ORDINALS = dict(
    one="first", two="second", three="third", five="fifth", eight="eighth", nine="ninth", twelve="twelfth"
)
ORDINALS = {_ODD_ORDINALS.get(word, re.sub("y$", "ie", word) + "th"): n for word, n in NUMBERS.items()}
_SUFFIXES = {"st", "nd", "rd", "th"}


def numbered(tokens: list[Token]) -> list[Token]:
    """The tokens with a number in words, or an ordinal, at their start as a numeral: `twenty-one`, `the 12^{th}`."""
    start = is_word(tokens[0]) and tokens[0].text.lower() == "the"
    texts = [token.text.lower() if is_word(token) else "" for token in tokens[start : start + 5]] + [""] * 3
    value, at = (NUMBERS | ORDINALS).get(texts[0]), 1
    if tokens[start].kind == "num":
        marks = [token.text for token in tokens[start + 1 : start + 5]]
        for mark in (["^", "{", None, "}"], ["^", None], [None]):
            suffix = len(marks) >= len(mark) and marks[mark.index(None)] in _SUFFIXES
            if suffix and all(m in (None, given) for m, given in zip(mark, marks)):
                return [tokens[start], *tokens[start + 1 + len(mark) :]]
        return tokens
    if value is None:
        return tokens
    if texts[0] in _TENS:
        hyphen = tokens[start + 1].text == "-"
        unit = (NUMBERS | ORDINALS).get(texts[1 + hyphen], 0)
        if 0 < unit < 10:
            value, at = value + unit, 2 + hyphen
    elif value == 1 and texts[1] in ("hundred", "hundredth"):
        value, at = 100, 2
    ordinal = texts[at - 1] in ORDINALS or texts[at - 1] == "hundredth"
    if tokens[start + at].text.lower() in NUMBERS or ordinal and tokens[start + at].kind != "end":  # the second root
        return tokens
    return [Token("num", str(value), Fraction(value)), *tokens[start + at :]]
