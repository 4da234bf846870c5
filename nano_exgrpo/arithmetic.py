r"""Arithmetic in words: questions for a real but small model, generated from a seed (`--data arithmetic`).

Five levels of difficulty, from "What is 7 plus 5?" to short word problems with two steps and three-digit numbers.
A mixture of levels is graded: what is out of the policy's reach today comes into reach as it learns.

    arithmetic        all levels alike
    arithmetic:easy   levels 1 and 2: within reach of SmolLM2-135M after its warm-up, if not every time
    arithmetic:hard   nine in ten of levels 4 and 5: mostly out of its reach

A demonstration is a question with a short worked answer, such as "7+5=12. \boxed{12}".
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator

from nano_exgrpo.errors import InputError
from nano_exgrpo.questions import Question

# name → how often each of the levels 1 to 5 is drawn
MIXTURES: dict[str, tuple[int, ...]] = {
    "arithmetic": (1, 1, 1, 1, 1),
    "arithmetic:easy": (1, 1, 0, 0, 0),
    "arithmetic:hard": (1, 1, 0, 9, 9),
}
TRAINING_QUESTIONS, DEMONSTRATIONS = 3000, 500  # more than a short run asks, or is shown
SIGNS = {"plus": "+", "minus": "-", "times": "*"}
NAMES = ("Ann", "Ben", "Tom", "Eva", "Sam", "Mia")
THINGS = ("apples", "books", "coins", "cards", "pens", "eggs")


def is_arithmetic(data: str) -> bool:
    return data.split(":")[0] == "arithmetic"


def arithmetic_questions(data: str, count: int, *, seed: int) -> list[Question]:
    """`count` questions of a mixture, no prompt twice. Raises InputError for an unknown mixture or too many."""
    return [question for question, _ in distinct(data, count, rng=random.Random(f"questions {seed}"))]


def arithmetic_demonstrations(
    data: str, count: int, *, seed: int, avoid: Collection[Question]
) -> list[tuple[Question, str]]:
    """`count` pairs of (question, worked answer), none of them a question in `avoid`."""
    known = {question.prompt for question in avoid}
    return list(distinct(data, count, rng=random.Random(f"demonstrations {seed}"), known=known))


def distinct(
    data: str, count: int, *, rng: random.Random, known: Collection[str] = ()
) -> Iterator[tuple[Question, str]]:
    """(question, worked answer) pairs whose prompts differ from each other and from the known ones."""
    if data not in MIXTURES:
        raise InputError(f"data {data} is not known; the mixtures are {', '.join(MIXTURES)}")
    seen = set(known)
    for _ in range(20 * count):
        (level,) = rng.choices((1, 2, 3, 4, 5), MIXTURES[data])
        prompt, working, answer = make_problem(level, rng)
        if prompt in seen:
            continue
        seen.add(prompt)
        yield Question(prompt, prompt, answer, source=f"level {level}"), f"{working}. \\boxed{{{answer}}}"
        count -= 1
        if not count:
            return
    raise InputError(f"data {data} has fewer different questions than asked for; lower --held-out")


def make_problem(level: int, rng: random.Random) -> tuple[str, str, str]:
    """(prompt, working, answer) of one problem. No result is negative."""
    if level == 1:
        return rng.choice((two_numbers, comparison))(rng, 20, ("plus", "minus"))
    if level == 2:
        return rng.choice((two_numbers, comparison, one_step_story))(rng, 60, ("plus", "minus"))
    if level == 3:
        return rng.choice((chain, two_numbers))(rng, 9, ("plus", "minus", "times"))
    if level == 4:
        return rng.choice((chain, two_step_story))(rng, 50, ("plus", "minus"))
    return rng.choice((two_step_story, two_numbers))(rng, 400, ("plus", "minus"))


def calculate(first: int, word: str, second: int) -> int:
    return {"plus": first + second, "minus": first - second, "times": first * second}[word]


def operands(rng: random.Random, largest: int, word: str) -> tuple[int, int]:
    """Two numbers from 2..largest; the larger one first where the second is taken away."""
    pair = [rng.randint(2, largest), rng.randint(2, largest)]
    return (max(pair), min(pair)) if word == "minus" else (pair[0], pair[1])


def two_numbers(rng: random.Random, largest: int, words: tuple[str, ...]) -> tuple[str, str, str]:
    word = rng.choice(words)
    a, b = operands(rng, largest, word)
    result = calculate(a, word, b)
    return f"What is {a} {word} {b}?", f"{a}{SIGNS[word]}{b}={result}", str(result)


def comparison(rng: random.Random, largest: int, words: tuple[str, ...]) -> tuple[str, str, str]:
    a, b = rng.sample(range(2, largest + 1), 2)
    larger = rng.random() < 0.5
    result = max(a, b) if larger else min(a, b)
    return f"Which is {'larger' if larger else 'smaller'}, {a} or {b}?", f"{max(a, b)}>{min(a, b)}", str(result)


def chain(rng: random.Random, largest: int, words: tuple[str, ...]) -> tuple[str, str, str]:
    """Three numbers, worked from left to right; a product stands first."""
    word = rng.choice(words)
    a, b = operands(rng, largest, word)
    middle, c = calculate(a, word, b), rng.randint(2, largest)
    then = "minus" if middle >= c and rng.random() < 0.5 else "plus"
    result = calculate(middle, then, c)
    working = f"{a}{SIGNS[word]}{b}={middle}, {middle}{SIGNS[then]}{c}={result}"
    return f"What is {a} {word} {b} {then} {c}?", working, str(result)


def one_step_story(rng: random.Random, largest: int, words: tuple[str, ...]) -> tuple[str, str, str]:
    word, name, thing = rng.choice(words), rng.choice(NAMES), rng.choice(THINGS)
    a, b = operands(rng, largest, word)
    result = calculate(a, word, b)
    act = "gets" if word == "plus" else "loses"
    return f"{name} has {a} {thing} and {act} {b}. How many now?", f"{a}{SIGNS[word]}{b}={result}", str(result)


def two_step_story(rng: random.Random, largest: int, words: tuple[str, ...]) -> tuple[str, str, str]:
    """So many boxes of as many things, then some more or fewer."""
    name, thing, word = rng.choice(NAMES), rng.choice(THINGS), rng.choice(words)
    boxes, each = rng.randint(2, 9), rng.randint(2, max(9, largest // 10))
    total = boxes * each
    c = rng.randint(2, total) if word == "minus" else rng.randint(2, largest)
    result = calculate(total, word, c)
    act = "gets" if word == "plus" else "loses"
    prompt = f"{name} has {boxes} boxes of {each} {thing} and {act} {c}. How many now?"
    return prompt, f"{boxes}*{each}={total}, {total}{SIGNS[word]}{c}={result}", str(result)
