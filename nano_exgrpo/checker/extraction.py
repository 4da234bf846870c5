"""The final answer of a response, and the reward for it.

    response -> `extract_answer` or `extract_choice` -> an answer -> `is_equal` with the gold answer -> reward 1 or 0

    python -m nano_exgrpo.checker GOLD RESPONSE     shows every stage of one verdict

A response is hostile input. Nothing here evaluates, imports or executes text. Each pattern below reads a character a
bounded number of times: no two repeats stand side by side or inside each other over the same characters, and only the
last `MAX_READ` characters of a response are read at all. There are no signals and no subprocesses, and the verdict is
the same from any thread. `docs/checker.md` has the map of the checker, its policy, and how to add a rule.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

MAX_READ = 200_000  # characters at the end of a response that are read: five times the longest response of a run
MAX_JOINED, MAX_GAP = 64, 60  # boxes that may form one list, and the characters between two of them
MAX_STATEMENTS, MAX_STATED = 20, 2_000  # closing statements that are read, and the characters of each

_BOX = r"\\f?box(?:ed)?(?![a-zA-Z])\s*"
_BOX_NAME = re.compile(_BOX)
_BOX_OR_BRACE = re.compile(_BOX + r"(?P<argument>\{|[0-9]+|[A-Za-z](?![A-Za-z]))?|\\.|[{}]", re.DOTALL)
_GLUE = re.compile(r"[\s${}]|\\(?:quad|text|[()\[\]])")  # between boxes that form a list, besides a joint
_JOINT = re.compile(r"(?:,|,?(?:and|or))(?:[A-Za-z](?:_?[A-Za-z0-9])?=)?")  # `\boxed{1}` and `x_2=\boxed{2}`
_STATES = r"[\s*_]{0,4}(?:is\b[\s*_]{0,4}:?|:|\n)"
_ANSWER_IS = re.compile("####|answer" + _STATES, re.IGNORECASE)
_CHOICE_IS = re.compile(r"####|\b(?:answer|option|choice)" + _STATES, re.IGNORECASE)
_IS_RIGHT = re.compile(r"\(?\b([A-Z])\)? is (?:the )?(?:correct|right|best)\b(?! if)")
_SENTENCE_END = re.compile(r"\.(?: |$)|, (?=[a-zA-Z])|; | (?:because|since|so) ")
_MATH = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_MORE_MATH = re.compile(r" ?(?:,|and|or|, and) ?(?:\$|\\\()")
_FONT = re.compile(r"\\(?:text|math|rm|bf|boxed|fbox)[a-z]*|[{$*_]")
_SPACE = re.compile(r"[\s}]|\\(?:[ ,;:!]|q?quad\b)")
_LETTER = re.compile(
    r"(?i:the )?(?i:final |correct |right |best )?(?i:(?:answer|option|choice)\b(?: is)? ?:? ?)?"
    r"(?i:option |choice |letter )?"
    r"(?P<open>[(\[]?) ?(?P<letter>[A-Za-z])"
    r"(?P<mark> ?[)\]]| ?[.:,;!](?= |$)| (?=[–—] |(?:because|since|as|which)\b)|$)\.? ?"
)
_SECOND_LETTER = re.compile(r"[ ,;&/]{0,3}(?:and |or )?[(\[]?([A-Z]+)(?:[)\].,;]|$| and\b| or\b)")
_PLAIN = re.compile(r"0|-?[1-9]\d{0,17}")
_LISTED_LETTER = re.compile(r"[,;] \([A-Z]\)")


def extract_answer(response: str) -> str | None:
    """The final answer of a response, or None if it gives none.

    It is the content of the last `\\boxed{...}` or `\\fbox{...}` after any `</think>`; of boxes in each other, the
    outermost. Boxes joined by a comma, "and" or "or" form a list. If the last box is empty or cut off there is no
    answer, whatever came before. Without any box, an explicit closing statement counts: `<answer>...</answer>`,
    `#### 72`, `Final answer: 72`, `The answer is 72.` A response that is cut off while thinking gives none.
    """
    text = _after_thinking(response)
    shown = _shown(text)
    if shown is None:
        shown = next((_stated_value(stated) for stated in _statements(text, _ANSWER_IS)), "")
    return shown or None


def extract_choice(response: str, letters: str = "ABCDEFGHIJ", options: tuple[str, ...] = ()) -> str | None:
    """The letter of a multiple-choice answer, or None: boxed, or in a closing statement such as "the answer is (B)".

    An answer that is the full text of just one option is that option, unless it is a letter, which the prompt asks for.
    A letter that stands before another option's text is no answer.

    Args:
        response: the whole response.
        letters: the letters that are choices.
        options: the texts of the options in the order of `letters`, if they are known.
    """
    text = _after_thinking(response)
    if (shown := _shown(text)) is not None:
        return _choice(shown, letters, options)
    stated = list(_statements(text, _CHOICE_IS))
    for after in stated:
        value = _stated_value(after)
        for part in (after.partition("\n")[0], value if len(value) > 3 else ""):  # "I, II and III" does not state I
            if chosen := _choice(part, letters, options):
                return chosen
    if right := deque(_IS_RIGHT.finditer(text), maxlen=1):
        return right[0][1] if right[0][1] in letters else None
    return None if stated or "\n" in text.strip() else _choice(text, letters, options)


def _after_thinking(response: str) -> str:
    """What is read of a response: nothing if it is cut off while thinking."""
    text = response.rpartition("</think>")[2]
    return "" if "<think>" in text else text[-MAX_READ:]


def _shown(text: str) -> str | None:
    """What a box or `<answer>` holds: "" if it is empty or cut off, None if there is neither."""
    if boxes := _boxes(text):
        return _joined(text, boxes)
    return text.rpartition("</answer>")[0].rpartition("<answer>")[2].strip() if "</answer>" in text else None


@dataclass(slots=True)
class _Box:
    """Where a box stands in a text, and its content there; `closes` is -1 if it is cut off."""

    start: int
    opens: int
    closes: int
    end: int


def _boxes(text: str) -> list[_Box]:
    """The boxes of a text that stand in no other box, in order; one that is cut off is told of if it is the last.

    One pass with a stack of open braces: its work is bounded by the number of braces and boxes."""
    boxes: list[_Box] = []
    opened: list[_Box | None] = []  # a box, or None for another brace
    first = _BOX_NAME.search(text)
    for mark in _BOX_OR_BRACE.finditer(text, first.start()) if first else ():
        argument = mark["argument"]
        if argument == "{":
            opened.append(_Box(mark.start(), mark.end(), -1, -1))
        elif argument:
            boxes.append(_Box(mark.start(), mark.start("argument"), mark.end(), mark.end()))
        elif mark[0] == "{":
            opened.append(None)
        elif mark[0] == "}" and opened and (box := opened.pop()):
            box.closes, box.end = mark.start(), mark.end()
            _take_in(text, box, boxes)
            boxes.append(box)
    begun = [box for box in opened if box and (not boxes or box.start > boxes[-1].start)]
    return boxes + begun[-1:]


def _take_in(text: str, box: _Box, boxes: list[_Box]) -> None:
    """Drop the boxes inside a box; one that is all of it gives its content, `\\boxed{\\boxed{5}}`."""
    inside = []
    while boxes and boxes[-1].start > box.start:
        inside.append(boxes.pop())
    if len(inside) == 1 and not (text[box.opens : inside[0].start] + text[inside[0].end : box.closes]).strip():
        box.opens, box.closes = inside[0].opens, inside[0].closes


def _joined(text: str, boxes: list[_Box]) -> str:
    """The answer in the last box and in those that are joined to it; "" if that box is empty or cut off."""
    contents: list[str] = []
    for at, box in enumerate(reversed(boxes[-MAX_JOINED:])):
        content = text[box.opens : box.closes].strip() if box.closes >= 0 else ""
        gap = text[box.end : boxes[-at].start] if at else ""
        if not content or at and not (len(gap) <= MAX_GAP and _JOINT.fullmatch(_GLUE.sub("", gap))):
            break
        if at and "or" in gap:
            contents[-1] = f"{content} or {contents[-1]}"
        else:
            contents.append(content)
    return _BOX_NAME.sub("", ", ".join(reversed(contents)))


def _statements(text: str, marks: re.Pattern[str]) -> Iterator[str]:
    """What follows the closing statements of a text without a box, the last one first."""
    for mark in reversed(deque(marks.finditer(text), maxlen=MAX_STATEMENTS)):
        yield text[mark.end() : mark.end() + MAX_STATED].strip(" \t\r\n*_")


def _stated_value(stated: str) -> str:
    """The value at the start of a statement: its formula, or its first sentence as far as it gives no reason."""
    for opening, closing in _MATH:
        if stated.startswith(opening):
            inside, closed, after = stated[len(opening) :].partition(closing)
            if closed and not inside.endswith("\\") and not _MORE_MATH.match(after):
                return inside.strip()
    line = " ".join(stated.partition("\n")[0].split())
    return _SENTENCE_END.split(line, maxsplit=1)[0].strip(" *_.")


def _choice(text: str, letters: str, options: tuple[str, ...]) -> str | None:
    """The letter that an answer is: by itself, before its option's text, or as the full text of just one option."""
    plain = " ".join(_SPACE.sub(" ", _FONT.sub("", text)).split())
    letter, content = _leading_letter(plain, letters)
    if named := _named(plain, letters, options):
        written = letter is not None and not content and letter in plain  # C, where another option's text is "C"
        return letter if written else named  # the letter is what the prompt asks for
    return None if content and _named(content, letters, options) not in (None, letter) else letter


def _leading_letter(plain: str, letters: str) -> tuple[str | None, str]:
    """The choice letter at the start of an answer, and what follows it; no letter if a second one stands beside it."""
    found = _LETTER.match(plain)
    if not found or found["open"] and found["mark"][-1:] not in (")", "]"):
        return None, ""
    letter, content = found["letter"], plain[found.end() :]
    if letter not in letters and not content:
        letter = letter.upper()
    second = _SECOND_LETTER.match(content)
    listed = second and set(second[1]) <= set(letters) or found["open"] and _LISTED_LETTER.search(content)
    if listed or letter not in letters:
        return None, ""
    return letter, content


def _named(plain: str, letters: str, options: tuple[str, ...]) -> str | None:
    """The letter of the only option with this text; the case of letters counts in short ones only (`Aa`, `CO`)."""
    key, *texts = (_SPACE.sub("", _FONT.sub("", part)).strip(".,;:!?") for part in (plain, *options))
    for same in (str, str.casefold) if len(key) > 3 else (str,):
        found = [letter for letter, text in zip(letters, texts) if same(text) == same(key)]
        if key and found:
            return found[0] if len(found) == 1 else None
    return None


def is_equal(gold: str, answer: str) -> bool:
    """Whether `answer` states the same answer as `gold` (the policy: see `verdict`)."""
    gold, answer = gold.strip(), answer.strip()
    if not answer:
        return False
    if _PLAIN.fullmatch(gold) and _PLAIN.fullmatch(answer):
        return gold == answer
    from nano_exgrpo.checker.verdict import compare  # most answers are plain numbers and never need it

    return gold == answer or compare(gold, answer)[0]


def reward(response: str, gold: str) -> float:
    """1.0 if the final answer of `response` equals `gold`, else 0.0."""
    return answer_reward(extract_answer(response), gold)


def answer_reward(answer: str | None, gold: str) -> float:
    """1.0 if `answer` equals `gold`, else 0.0; no answer is never right.

    A fault of the checker counts as 0 and is said on stderr: a strange answer must not end a run of days."""
    try:
        return float(answer is not None and is_equal(gold, answer))
    except Exception as error:
        fault = type(error).__name__
        print(f"checker: {fault} on {answer[:200]!r} against {gold[:200]!r}; counted as wrong", file=sys.stderr)
        return 0.0


def explain(gold: str, response: str) -> str:
    """How the verdict on a response comes about, stage by stage, for people to read."""
    from nano_exgrpo.checker.lexer import MAX_CHARS, tokenize
    from nano_exgrpo.checker.parser import ParseError, parse, parse_latex
    from nano_exgrpo.checker.tree import drawn
    from nano_exgrpo.checker.verdict import compare

    def tokens(text: str) -> str:
        return " ".join(token.text for token in tokenize(text[:MAX_CHARS])[:-1])

    stages = {"tokens": tokens, "tree": lambda text: drawn(parse(text)), "in sympy": parse_latex}
    answer = extract_answer(response)
    lines = [f"extracted   {answer!r}"]
    for name, text in (("gold", gold), ("answer", answer)) if answer is not None else ():
        lines.append(f"{name:<12}{text}")
        for stage, form in stages.items():
            try:
                lines.append(f"  {stage:<10}{form(text)}")
            except ParseError as error:
                lines.append(f"  {stage:<10}none ({error})")
    if answer is not None:
        lines.append(f"why         {compare(gold, answer)[1]}")
    return "\n".join([*lines, f"reward      {answer_reward(answer, gold)}"])


def main(arguments: list[str]) -> int:
    """Show how a verdict comes about."""
    if len(arguments) != 2:
        print("usage: python -m nano_exgrpo.checker GOLD RESPONSE", file=sys.stderr)
        return 2
    print(explain(*arguments))
    return 0
