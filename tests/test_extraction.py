"""The final answer of a response: boxes, closing statements, choices; and that reading it takes linear time."""

import json
import re
import time
from pathlib import Path

import pytest

from nano_exgrpo.checker import extract_answer, extract_choice, extraction

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"


@pytest.mark.parametrize(
    "response, answer",
    [
        (r"First \boxed{5}, no: \boxed{7}.", "7"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox{$8\sqrt{6}$}", r"$8\sqrt{6}$"),
        (r"\boxed 7$.", "7"),
        (r"put it in \boxed . Here: \boxed{42}", "42"),
        (r"put it in \boxed . The answer is 42.", "42"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{a}} and {", "a"),
        ("{ \\boxed{3} and no more braces", "3"),
        # empty, cut off
        (r"\boxed{42}. Once more: \boxed{4", None),
        (r"\boxed{}", None),
        (r"\boxed{42} or \boxed{}", None),
        (r"\boxed{so it is \boxed{5}", "5"),
        (r"\boxed{\boxed{5}", "5"),
        (r"\boxed{\boxed{5", None),
        # boxes in each other: the outermost holds the answer
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{ \boxed{\fbox{5}} }", "5"),
        (r"\boxed{x = \boxed{5}}", "x = {5}"),
        (r"\boxed{\frac{1}{\boxed{2}}}", r"\frac{1}{{2}}"),
        (r"\boxed{1, 2, \boxed{5}}", "1, 2, {5}"),
        (r"\boxed{3}, so \boxed{\boxed{4} + 1}", "{4} + 1"),
        # several boxes that form one list
        (r"\(\boxed{1}\) and \(\boxed{-2}\).", "1, -2"),
        (r"$\boxed{2}, \boxed{3}$", "2, 3"),
        (r"$\boxed{2}$ or $\boxed{3}$", "2 or 3"),
        (r"$\boxed{1}$, $\boxed{2}$, or $\boxed{3}$", "1, 2 or 3"),
        (r"$x=\boxed{2} \text{ or } x=\boxed{3}$", "2 or 3"),
        (r"$x_1=\boxed{2}$ and $x_2=\boxed{3}$", "2, 3"),
        (r"\boxed{9} \boxed{9} and finally \boxed{42}", "42"),
        (r"\boxed{2} for n = 1, but \boxed{3}", "3"),
        # thinking
        (r"<think>\boxed{5}</think> so \boxed{7}", "7"),
        (r"<think>\boxed{5}</think> I give up", None),
        (r"\boxed{5}</think> I give up", None),
        (r"<think>It is \boxed{5}", None),
        (r"\boxed{5} <think>But wait", None),
        ("<think>one</think><think>The answer is 7.", None),
        # closing statements without a box
        ("so 72.\n#### 72", "72"),
        ("Final Answer: **73**", "73"),
        ("The answer is 72, in total.", "72"),
        ("Answer: $13$", "13"),
        ("Answer: 5.5", "5.5"),
        ("Final Answer: The final answer is $2\\sqrt{3}$. I hope it is correct.", r"2\sqrt{3}"),
        ("The answer is\n\\[\n\\frac12\n\\]", r"\frac12"),
        ("The answer is\n$$\nx^2\n$$\nas was shown.", "x^2"),
        ("The answer is $2$ and $3$.", "$2$ and $3$"),
        ("The answer is $2$ or $3$.", "$2$ or $3$"),
        (r"The answer is $\$5$.", r"$\$5$"),
        ("The answer is _120°_.", "120°"),
        ("The answer is: Yes, because 2 is prime.", "Yes"),
        ("The answer is 4. No, the answer is 5.", "5"),
        ("<answer>72</answer>", "72"),
        ("<answer> x, y </answer>.", "x, y"),
        ("<answer></answer>", None),
        ("The answer is 5. <answer></answer>", None),
        ("<answer>72", None),
        ("we must still test 6", None),
        ("The answer is", None),
        ("", None),
    ],
)
def test_extraction(response, answer):
    assert extract_answer(response) == answer


@pytest.mark.parametrize(
    "response, letter",
    [
        # a letter by itself or before its content
        (r"\boxed{C}", "C"),
        (r"\boxed{c}", "C"),
        (r"\boxed{(c)}", "C"),
        (r"\boxed{\text{(C)}}", "C"),
        (r"\boxed{(\mathrm{C})}", "C"),
        (r"\boxed{C)}", "C"),
        (r"\boxed{\textbf{(B) }12}", "B"),
        (r"\boxed{\textbf{(B)}\ 12}", "B"),
        (r"\boxed{\text{D.}\quad 12}", "D"),
        (r"\boxed{\text{Option D}}", "D"),
        (r"\boxed{\text{Option C)}}", "C"),
        (r"\boxed{\text{The correct answer is C}}", "C"),
        (r"\boxed{C, \text{ not } A}", "C"),
        (r"\boxed{C. Option A is wrong.}", "C"),
        (r"\boxed{\boxed{C}}", "C"),
        (r"The correct option is \boxed{C}. A common mistake is B.", "C"),
        # closing statements
        ("<answer>C</answer>", "C"),
        ("<answer>\nc\n</answer>", "C"),
        ("so it is\n#### C", "C"),
        ("The answer is (B).", "B"),
        ("the correct answer is: D", "D"),
        ("Answer: B", "B"),
        ("Answer:\n\nB", "B"),
        ("Final answer: **(A)**", "A"),
        ("The answer is $\\text{C}$.", "C"),
        ("The answer is (J) because", "J"),
        ("The answer is C because A is too small.", "C"),
        ("The answer is C. Option A is wrong.", "C"),
        ("The answer is C.\nA and B are too small.", "C"),
        ("The answer is B? No: the answer is D.", "D"),
        ("The correct choice is option E, as shown.", "E"),
        ("Therefore option B is correct.", "B"),
        ("B is the right answer", "B"),
        ("B", "B"),
        ("(C)", "C"),
        ("Option D", "D"),
        # no choice
        (r"\boxed{B, C}", None),
        (r"\boxed{\text{B and C}}", None),
        (r"\boxed{(B) and (C)}", None),
        (r"\boxed{B} or \boxed{C}", None),
        (r"\boxed{BC}", None),
        (r"\boxed{12}", None),
        (r"\boxed{}", None),
        (r"\boxed{C", None),
        (r"The answer is C. \boxed{}", None),
        (r"\boxed{A salmon migrates up a river.}", None),
        (r"\boxed{\text{A salmon migrates up a river.}}", None),
        (r"\boxed{Has no effect}", None),
        (r"\boxed{I, II and III}", None),
        (r"\boxed{I only}", None),
        (r"\boxed{H:O:H}", None),
        (r"\boxed{C is wrong}", None),
        (r"\boxed{\text{not C}}", None),
        ("The answer is A salmon migrates.", None),
        ("The answer is not C.", None),
        ("A nice problem.", None),
        ("The answer is A or B", None),
        ("The answer is unclear", None),
        ("<think>The answer is C.", None),
        ("<answer>C", None),
        ("", None),
    ],
)
def test_choice(response, letter):
    assert extract_choice(response) == letter


def test_choice_letters_are_an_argument():
    assert extract_choice("The answer is (H).", letters="ABCD") is None
    assert extract_choice(r"\boxed{x}", letters="ABCD") is None
    assert extract_choice(r"\boxed{Z}", letters="XYZ") == "Z"


@pytest.mark.parametrize(
    "answer, options, letter",
    [
        ("calcium ions", ("cAMP", "calcium ions"), "B"),
        ("Calcium ions.", ("cAMP", "calcium ions"), "B"),
        (r"\text{calcium ions}", ("cAMP", "calcium ions"), "B"),
        ("calcium", ("cAMP", "calcium ions"), None),
        ("A salmon migrates.", ("A bear sleeps.", "A salmon migrates."), "B"),
        ("E. coli", ("E. coli", "S. aureus", "B. subtilis", "x", "y"), "A"),
        ("I, II and III", ("I", "I, II and III"), "B"),
        (r"\frac{1}{2}\ \text{m}", ("2 m", r"$\frac{1}{2}$ m"), "B"),
        ("(b)", ("(a)", "neither", "(b)"), "C"),
        ("Aa", ("AA", "aa", "Aa"), "C"),
        ("aA", ("AA", "aa", "Aa"), None),
        ("same", ("same", "same", "other"), None),  # two options: which of them?
        ("B. calcium ions", ("cAMP", "calcium ions"), "B"),
        ("A. calcium ions", ("cAMP", "calcium ions"), None),  # a letter and another option's text
        ("A. cyclic AMP", ("cAMP", "calcium ions"), "A"),
        ("C", ("C", "NO_{2}", "O_{2}", "CO"), "C"),  # carbon is A, but the prompt asks for the letter
        ("(C)", ("C", "NO_{2}", "O_{2}", "CO"), "C"),
        ("c", ("0.6c", "c", "0.8c"), "B"),
        ("H", ("~H", "x"), None),
    ],
)
def test_an_option_s_own_text_is_that_option(answer, options, letter):
    letters = "ABCDEFGHIJ"[: len(options)]
    for response in (rf"\boxed{{{answer}}}", f"<answer>{answer}</answer>", f"The answer is {answer}"):
        assert extract_choice(response, letters, options) == letter, response


@pytest.mark.skipif(not DATA.is_dir(), reason="the handed data are not here")
@pytest.mark.parametrize("file, unread", [("arc_challenge", 0), ("mmlu_pro", 7)])
def test_no_option_s_text_is_read_as_another_letter(file, unread):
    """unread: options that equal another one but for white space and case. An option that is itself a letter is that letter."""
    wrong, none = [], []
    for line in (DATA / f"{file}.jsonl").read_text(encoding="utf-8").splitlines():
        options = tuple(json.loads(line)["choices"])
        letters = "ABCDEFGHIJ"[: len(options)]
        for letter, option in zip(letters, options):
            chosen = extract_choice(rf"\boxed{{{option}}}", letters, options)
            if chosen != letter and option not in letters:
                (wrong if chosen else none).append((letter, option))
    assert wrong == [] and len(none) <= unread


# ------------------------------------------------------------------------------------------- bounded in time

TEN_MEGABYTES = 10_000_000


@pytest.mark.parametrize("opening", [r"\boxed{", r"\boxed{$", "The answer is ", "Final answer: x", "<answer>", ""])
def test_ten_megabytes_are_read_in_two_seconds(opening):
    for unit in (" ", "x", "{}", r"\{", "\\", r"\textoption", r"\boxed{", r"\boxed{1},", "answer is ", "option ", "$"):
        response = opening + unit * (TEN_MEGABYTES // len(unit)) + "!}"
        start = time.thread_time()
        extract_answer(response)
        extract_choice(response, "ABCD", ("x", "A salmon", "12", "option"))
        assert time.thread_time() - start < 2.0, (opening, unit)


def test_only_the_end_of_a_response_is_read():
    filler = "word " * extraction.MAX_READ
    assert extract_answer(filler + r"\boxed{42}") == "42"
    assert extract_answer(r"\boxed{42}" + filler) is None
    assert extract_answer(rf"\boxed{{{filler}}}") is None


def _overlaps(pattern: str) -> list[str]:
    """What makes a pattern more than linear: an unbounded repeat of a group, two of them over the same character."""
    parts = re.findall(r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\.|\{\d*,\}|.", pattern, re.DOTALL)
    atoms = [atom for atom, sign in zip(parts, parts[1:]) if sign in "*+" or sign.endswith(",}")]
    found = ["a repeated group"] * atoms.count(")")
    for character in map(chr, range(128)):
        readers = [atom for atom in atoms if atom != ")" and re.fullmatch(atom, character, re.IGNORECASE)]
        if len(readers) > 1:
            found.append(f"{character!r} by {readers}")
    return found


def test_no_pattern_has_repeats_over_the_same_characters():
    """So that none can go back over a character more than once: what reads model text is linear by its shape."""
    patterns = {name: value for name, value in vars(extraction).items() if isinstance(value, re.Pattern)}
    assert len(patterns) > 10
    assert {name: found for name, pattern in patterns.items() if (found := _overlaps(pattern.pattern))} == {}


@pytest.mark.parametrize(
    "pattern", [r"(?:[\s:*$({]|\\text\w*|option)*", r"\s*\$?\s*", r"(.+?)\$(.+?)", r"a+[ab]+", "x{2,}x*"]
)
def test_such_a_pattern_would_be_seen(pattern):
    assert _overlaps(pattern)
