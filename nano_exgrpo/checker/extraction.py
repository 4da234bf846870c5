"""The verdict on a response: extract its answer, compare it with the gold answer, reward 1 or 0.

Read in the order in which an answer is processed:

    tokens.py                            characters -> tokens
    units.py, tree.py                    units of measurement; what a tree is made of
    cursor.py, commands.py,
    expressions.py, latex.py             tokens -> tree: one grammar in three parts, shown in their docstrings
    arithmetic.py, values.py             tree -> number, within bounds
    sympy_form.py                        tree -> sympy, within bounds
    reals.py, comparison.py, equality.py two trees -> equal or not: sets of reals, expressions, all else (the policy)
    words.py                             answers in words
    checker.py                           response -> answer -> verdict

    python -m nano_exgrpo.checker GOLD RESPONSE     shows every stage of one verdict

Model output is hostile input: nothing here evaluates, imports or executes text, every step is bounded before it
starts (a verdict takes microseconds for plain numbers, milliseconds for anything), there are no signals and no
subprocesses, and the verdict is the same from any thread.
"""

from __future__ import annotations

import re
import sys

_BOX = re.compile(r"\\f?box(?:ed)?(?![a-zA-Z])\s*(\{|[0-9]+|[A-Za-z](?![A-Za-z]))?")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_GLUE = re.compile(r"[\s${}]|\\(?:quad|text|[()\[\]])")  # between boxes that form a list, besides "," and "and"
_STATEMENT = re.compile(r"####|answer(?:\s+is)?\s?(?:\*\*)?\s?:|answer\s+is\b|answer[*_ ]{0,4}\n", re.IGNORECASE)
_PLAIN = re.compile(r"0|-?[1-9]\d{0,17}")
MAX_JOINED, MAX_GAP = 64, 60  # boxes that may form one list, and the characters between two of them


def extract_answer(response: str) -> str | None:
    """The final answer of a response, or None if it gives none.

    It is the content of the last `\\boxed{...}` or `\\fbox{...}` after any `</think>`; boxes joined by commas or
    "and" form a list. If that box is empty or cut off there is no answer, whatever came before. Without any box, an
    explicit closing statement counts: `<answer>...</answer>`, `#### 72`, `Final answer: 72`, `The answer is 72.`
    """
    text = response.rpartition("</think>")[2]
    boxes = [match for match in _BOX.finditer(text) if match[1]]
    if not boxes:
        return _statement(text)
    answer = _content(text, boxes[-1])
    if answer is None or not answer[0]:
        return None
    contents, start = [answer[0]], boxes[-1].start()
    for box in reversed(boxes[-MAX_JOINED:-1]):
        before = _content(text, box)
        if before is None or not before[0] or not 0 < start - before[1] <= MAX_GAP:
            break
        if _GLUE.sub("", text[before[1] : start]) not in (",", "and", ",and"):
            break
        contents.append(before[0])
        start = box.start()
    return ", ".join(reversed(contents))


def _content(text: str, box: re.Match[str]) -> tuple[str, int] | None:
    """The content of a box and the index after it; None if its brace never closes."""
    if box[1] != "{":
        return box[1], box.end()
    depth = 1
    for brace in _BRACE.finditer(text, box.end()):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[box.end() : brace.start()].strip(), brace.end()
    return None


def _statement(text: str) -> str | None:
    """The answer of a closing statement without a box."""
    if "</answer>" in text:
        return text.rpartition("</answer>")[0].rpartition("<answer>")[2].strip() or None
    last = None
    for last in _STATEMENT.finditer(text, max(0, len(text) - 20_000)):
        pass
    if last is None:
        return None
    line = text[last.end() :].strip().partition("\n")[0].strip()
    if math := re.match(r"[*_\s]*(?:\$\$?(.+?)\$|\\\((.+?)\\\))", line):
        return (math[1] or math[2]).strip()
    line = re.split(r"\.(?:\s|$)|,\s+(?=[a-zA-Z])|;\s|\s+(?:because|since|so)\s", line, maxsplit=1)[0]
    return line.strip(" *_.") or None


def extract_choice(response: str, letters: str = "ABCDEFGHIJ") -> str | None:
    """The letter of a multiple-choice answer: boxed, or in a final statement such as "the answer is (B)".

    Args:
        response: the whole response.
        letters: the letters that are choices.
    """
    text = response.rpartition("</think>")[2]
    alone = rf"([{letters}])(?![A-Za-z])(?!\s*(?:,|and\b|or\b|\(?[{letters}]\b))"  # no second letter beside it
    if "\\boxed" in text or "\\fbox" in text:
        answer = re.sub(r"\\(?:text|math|rm|bf|boxed)\w*\s*|[{}$*]", "", extract_answer(response) or "")
        found = re.match(
            rf"\s*(?i:(?:the\s+)?(?:correct\s+)?(?:answer|option|choice)?(?:\s+is)?\s*:?)\s*\(?{alone}", answer
        )
        return found[1] if found else None
    found = re.findall(
        rf"(?i:\b(?:answer|option|choice)\b(?:\s+is|\s*:)?)(?i:[\s:*$({{]|\\text\w*|option)*{alone}", text[-20_000:]
    )
    lone = re.fullmatch(rf"[\s*(]*([{letters}])[\s*.):]*", text)
    return found[-1] if found else lone[1] if lone else None


def is_equal(gold: str, answer: str) -> bool:
    """Whether `answer` states the same answer as `gold` (the policy: see `equality`)."""
    gold, answer = gold.strip(), answer.strip()
    if not answer:
        return False
    if _PLAIN.fullmatch(gold) and _PLAIN.fullmatch(answer):
        return gold == answer
    return gold == answer or _compare(gold, answer)[0]


def _compare(gold: str, answer: str) -> tuple[bool, str]:
    """(verdict, reason); imported lazily, since most answers are plain numbers."""
    from nano_exgrpo.checker.lexer import AMBIGUOUS_COMMA, tokenize
    from nano_exgrpo.checker.parser import MAX_CHARS, ParseError, parse_tokens
    from nano_exgrpo.checker.verdict import Judge
    from nano_exgrpo.checker.words import choice_readings, same_words

    if max(len(gold), len(answer)) > MAX_CHARS:
        return False, f"longer than {MAX_CHARS} characters"
    ambiguous = AMBIGUOUS_COMMA.search(gold), AMBIGUOUS_COMMA.search(answer)
    why = ""
    for lists in (False, True) if any(ambiguous) else (False,):
        tokens = tokenize(gold, lists)
        for reading in choice_readings(tokenize(answer, lists), tokens):
            if same_words(tokens, reading):
                return True, "the same words and signs"
            try:
                judge = Judge(parse_tokens(list(tokens)), parse_tokens(reading))
            except ParseError as error:
                why = why or f"not parsed: {error}"
                continue
            if judge.verdict():
                return True, "equal"
            why = why or judge.why
    return False, why


def reward(response: str, gold: str) -> float:
    """1.0 if the final answer of `response` equals `gold`, else 0.0.

    A fault of the checker counts as 0 and is said on stderr: a strange answer must not end a run of days."""
    try:
        answer = extract_answer(response)
        return float(answer is not None and is_equal(gold, answer))
    except Exception as error:
        print(
            f"checker: {type(error).__name__} on {response[-200:]!r} against {gold!r}; counted as wrong",
            file=sys.stderr,
        )
        return 0.0


def explain(gold: str, response: str) -> str:
    """How the verdict on a response comes about, stage by stage, for people to read."""
    from nano_exgrpo.checker.parser import ParseError, parse, parse_latex
    from nano_exgrpo.checker.tree import show

    answer = extract_answer(response)
    lines = [f"extracted   {answer!r}"]
    if answer is not None:
        for name, text in (("gold", gold), ("answer", answer)):
            for what, form in ((name, lambda: show(parse(text))), ("  in sympy", lambda: parse_latex(text))):
                try:
                    lines.append(f"{what:<12}{form()}")
                except ParseError as error:
                    lines.append(f"{what:<12}none ({error})")
        lines.append(f"why         {_compare(gold, answer)[1]}")
    return "\n".join([*lines, f"reward      {reward(response, gold)}"])


def main(arguments: list[str]) -> int:
    """Show how a verdict comes about."""
    if len(arguments) != 2:
        print("usage: python -m nano_exgrpo.checker GOLD RESPONSE", file=sys.stderr)
        return 2
    print(explain(*arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
