"""Questions: what the policy is asked, where the questions come from, and in which order.

A question is a prompt with a known final answer. The answer is all the supervision there is: no
reference solution is shown to the policy, only whether its own final answer is right (RLVR).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nano_exgrpo.checker import extract_answer
from nano_exgrpo.errors import InputError
from nano_exgrpo.infra.files import read_jsonl

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Question:
    """One question with its known answer a.

    id: unique within a data set; the replay buffer and the retired set are keyed by it.
    prompt: what the user asks, before the chat template; the options of a multiple-choice question are part of it.
    answer: the final answer only, as plain text or LaTeX; for multiple choice the letter.
    choices: the options of a multiple-choice question in the order of their letters, else empty.
    source: the data set's name.
    prompt_ids [P]: the prompt as the policy reads it, once it is encoded (`policy.encode_questions`).
    """

    id: str
    prompt: str
    answer: str
    choices: tuple[str, ...] = ()
    source: str = ""
    prompt_ids: Any = field(default=None, compare=False, repr=False)  # Tensor [P]

    @property
    def letters(self) -> str:
        """Those of the options; empty for a free answer."""
        return LETTERS[: len(self.choices)]


# --------------------------------------------------------------------------- rows of a file or of the hub


@dataclass(frozen=True)
class Layout:
    """In which fields the rows of a data set keep a question.

    question: text, or chat messages, of which the last user's counts. answer: text or a number.
    choices: the options, as a list or as a dictionary of a `text` and a `label` list. "" stands for `choices`, where a
        row has it. Several names are one field an option; `answer` is then the field of the right one.
    context: a field that stands before the question, where a row has it. several: the answer is a list of values.
    padding: an option that is none. shuffle: order the options by the id, since the data set has the right one first.
    """

    question: str = "question"
    answer: str = "answer"
    choices: str | tuple[str, ...] = ""
    context: str = ""
    several: bool = False
    padding: str = ""
    shuffle: bool = False

    @property
    def fields(self) -> set[str]:
        """Those that every row must have."""
        choices = (self.choices,) if isinstance(self.choices, str) else self.choices
        return {self.question, self.answer, *choices} - {""}


IDS = ("id", "unique_id", "question_id", "Record ID")  # where rows name themselves


def load_questions(source: str, *, question_field: str = "question", answer_field: str = "answer") -> list[Question]:
    """Questions to train on, from a JSONL file or from a data set of the Hugging Face hub (needs `datasets`).

    source: a file, or a hub id with an optional configuration and split after colons ("openai/gsm8k:main:test").
    Raises InputError: file missing or malformed (with its line), a field missing, no rows, hub unreachable.
    """
    layout = Layout(question_field, answer_field)
    try:
        return read_questions(source, (layout,), split="train", name=Path(source).stem)
    except MissingField as error:
        raise InputError(f"{error}; name the right ones with --question-field and --answer-field") from None


def read_questions(source: str, layouts: Sequence[Layout], *, split: str, name: str) -> list[Question]:
    """The one reader of rows, for training and for benchmarks. A row is read by the first layout whose fields it has.

    name: of the data set. Ids key the buffer and the evaluation's folder, so rows that repeat one are numbered instead.
    Raises InputError."""
    path = Path(source)
    if os.path.isdir(path):
        raise InputError(f"data {source} is a folder; give a .jsonl file in it or a hub id")
    is_file = os.path.exists(path) or not HUB_ID.fullmatch(source) or path.suffix in (".json", ".jsonl", ".csv", ".txt")
    questions = []
    for number, (where, row) in enumerate(read_jsonl(path) if is_file else read_hub(source, split)):
        layout = next((each for each in layouts if each.fields <= row.keys()), layouts[0])
        questions.append(to_question(row, where, layout, f"{name}-{number}", name))
    if not questions:
        raise InputError(f"data {source} holds no questions")
    if len({q.id for q in questions}) < len(questions):
        return [replace(q, id=f"{name}-{number}") for number, q in enumerate(questions)]
    return questions


HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?(:[\w.-]*){0,2}")


def read_hub(name: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) for every row of a hub data set "id", "id:configuration" or "id:configuration:split". Raises
    InputError."""
    try:
        import datasets
    except ImportError:
        raise InputError(f"data set {name} is on the hub, which needs: pip install datasets") from None
    hub_id, configuration, own_split = (*name.split(":"), "", "")[:3]
    split = own_split or split
    try:
        rows = datasets.load_dataset(hub_id, configuration or None, split=split)
    except Exception as error:  # the hub library raises dozens of kinds; its own sentence says which
        reason = str(error).split("\n")[0][:200]
        raise InputError(
            f"data set {hub_id} (split {split}) is no file here and could not be loaded from the hub: {reason}; "
            f"check its name and the network, or give a .jsonl file"
        ) from None
    for number, row in enumerate(rows):
        yield f"{name} row {number}", dict(row)


class MissingField(InputError):
    """A row lacks a field; names of fields can be wrong."""


def get_field(row: dict[str, Any], name: str, where: str) -> Any:
    if name not in row:
        raise MissingField(f"{where} has no field '{name}' (it has: {', '.join(sorted(map(str, row))) or 'none'})")
    if row[name] is None:
        raise InputError(f"{where}: field '{name}' is null")
    return row[name]


def to_question(row: dict[str, Any], where: str, layout: Layout, id: str, source: str) -> Question:
    """One row to a question. id, source: where the row names none. Raises InputError, naming `where` and the field.

    Rows of Elliott/Openr1-Math-46k-8192 are understood whatever the layout: the prompt stands in `prompt`, as chat
    messages, the answer in `reward_model`."""
    if layout.question not in row and isinstance(row.get("reward_model"), dict):
        row = {**row, **{f"reward_model.{name}": value for name, value in row["reward_model"].items()}}
        layout = replace(layout, question="prompt", answer="reward_model.ground_truth")
    id = next((str(row[name]) for name in IDS if row.get(name) is not None), id)
    source = str(row.get("source") or source)
    prompt = read_prompt(get_field(row, layout.question, where), f"{where}: field '{layout.question}'")
    if layout.context and row.get(layout.context):
        prompt = f"{row[layout.context]}\n\n{prompt}"
    options: list[str] = []
    if layout.choices or row.get("choices"):
        options, right = read_options(row, layout, where)
        if layout.shuffle:  # by the id, so that a question is asked alike whichever others are loaded
            order = list(range(len(options)))
            random.Random(f"0 {id}").shuffle(order)
            options, right = [options[i] for i in order], order.index(right)
        prompt, answer = multiple_choice_prompt(prompt, options), LETTERS[right]
    else:
        answer = read_answer(get_field(row, layout.answer, where), f"{where}: field '{layout.answer}'", layout.several)
    if any("\ud800" <= letter <= "\udfff" for letter in prompt + answer + id + source):
        raise InputError(
            f"{where} holds half of a surrogate pair (\\ud800 to \\udfff), which no tokenizer takes as text"
        )
    return Question(id, prompt, answer, tuple(options), source)


def read_prompt(found: Any, place: str) -> str:
    """Text, whether it stands there as text, as chat messages (the last user's counts) or as the text parts of one."""
    if isinstance(found, (list, tuple)):
        users = [m.get("content") for m in found if isinstance(m, dict) and m.get("role") == "user"]
        found = users[-1] if users else found
    if isinstance(found, (list, tuple)):
        parts = [part.get("text") if isinstance(part, dict) else None for part in found]  # an image has no text
        found = "\n".join(map(str, parts)) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(found, str) or not found.strip():
        raise InputError(f"{place} must be non-empty text, or chat messages with nothing but text from the user")
    return found.strip()


def read_answer(found: Any, place: str, several: bool = False) -> str:
    """An answer as text. several: a list of values, which are all asked for, joined by commas."""
    if several and isinstance(found, (list, tuple)) and found:
        return ", ".join(read_answer(value, place) for value in found)
    if isinstance(found, float) and found.is_integer():
        found = int(found)  # 27.0 is 27
    if isinstance(found, bool) or not isinstance(found, (str, int, float)):
        raise InputError(f"{place} must be text or a number, not {type(found).__name__}")
    if isinstance(found, float) and not math.isfinite(found):
        raise InputError(f"{place} is {found}, which is no number to compare an answer with")
    answer = final_answer(str(found))
    if not answer:
        raise InputError(f"{place} is empty")
    return answer


def final_answer(answer: str) -> str:
    r"""A whole solution's last words: what stands after GSM8K's "####", or in the box, read as a response's is.

    >>> final_answer("2+2 = <<2+2=4>>4 apples.\n#### 1,004"), final_answer(r"Hence $x = \boxed{7}$.")
    ('1,004', '7')
    """
    answer = answer.rsplit("####", 1)[-1].strip()
    return extract_answer(answer) or answer if "\\boxed" in answer or "\\fbox" in answer else answer


def read_options(row: dict[str, Any], layout: Layout, where: str) -> tuple[list[str], int]:
    """(options, place of the right one). Raises InputError.

    The answer is a label: a letter, where the options bring no labels of their own. Or it is a whole number: the right
    one's place, counted from 0. Or it is the text of just one option."""
    if isinstance(layout.choices, tuple):
        options = [read_prompt(get_field(row, name, where), f"{where}: field '{name}'") for name in layout.choices]
        return options, layout.choices.index(layout.answer)
    name = layout.choices or "choices"
    found, given = get_field(row, name, where), get_field(row, layout.answer, where)
    texts, labels = (found.get("text"), found.get("label")) if isinstance(found, dict) else (found, None)
    options = [str(o).strip() for o in texts] if isinstance(texts, (list, tuple)) else []
    labels = list(LETTERS[: len(options)]) if labels is None else labels
    if not isinstance(labels, (list, tuple)) or not 2 <= len(options) == len(set(map(str, labels))) <= len(LETTERS):
        raise InputError(
            f"{where}: field '{name}' must be a list of 2 to 26 options (or a dict of text and label lists)"
        )
    place = f"{where}: field '{layout.answer}'"
    gold, labels = read_answer(given, place), [str(label) for label in labels]
    if gold in labels:
        right = labels.index(gold)
    elif not isinstance(given, str):
        if not gold.isdigit() or int(gold) >= len(options):
            raise InputError(
                f"{place} is {gold}, and as a number it must be a label or a place from 0 to {len(options) - 1}"
            )
        right = int(gold)
    elif options.count(gold) == 1:
        right = options.index(gold)
    else:
        raise InputError(
            f"{place} is {gold!r}, which is none of the options {', '.join(labels)} and not the text of just one"
        )
    kept = [i for i, option in enumerate(options) if not layout.padding or option != layout.padding or i == right]
    return [options[i] for i in kept], kept.index(right)


def multiple_choice_prompt(question: str, options: list[str]) -> str:
    r"""The question, its options lettered, and how to answer.

    >>> print(multiple_choice_prompt("Which is a metal?", ["iron", "argon"]))
    Which is a metal?
    <BLANKLINE>
    A. iron
    B. argon
    <BLANKLINE>
    Give the letter of the right option in \boxed{}.
    """
    lettered = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))
    return f"{question}\n\n{lettered}\n\nGive the letter of the right option in \\boxed{{}}."


def questions_digest(questions: Iterable[Question]) -> str:
    """16 hexadecimal digits that change when an id, a prompt, its token ids or an answer does, or the order. Token ids
    too, because a chat template may write today's date."""
    rows = [(q.id, q.prompt, q.answer, [] if q.prompt_ids is None else q.prompt_ids.tolist()) for q in questions]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------- split and order


def split_held_out(questions: list[Question], count: int, *, seed: int) -> tuple[list[Question], list[Question]]:
    """(train, held out): `count` random questions are set aside; no prompt stands on both sides.

    Raises InputError when fewer than one training question would be left."""
    order = list(questions)
    random.Random(seed).shuffle(order)
    held_out = order[:count]
    asked = {q.prompt for q in held_out}
    train = [q for q in order[count:] if q.prompt not in asked]
    if not train and len(order) > count:
        raise InputError(
            f"no question is left to train on: all {len(order)} repeat the prompts of the {count} held out"
        )
    if not train:
        raise InputError(f"{len(questions)} questions are too few to hold {count} out; lower --held-out")
    return train, held_out


def mislabel(questions: list[Question], share: float, *, seed: int) -> list[Question]:
    """The same questions, `share` of them with the answer of another one, as label noise (its source ends in
    "mislabelled"). A question for which 20 draws find no different answer keeps its own."""
    # A stream of its own: seeded like `QuestionSampler`, it would choose the very questions that are drawn first.
    rng = random.Random(f"mislabel {seed}")
    chosen = set(rng.sample(range(len(questions)), round(share * len(questions))))
    noisy = []
    for i, question in enumerate(questions):
        others = (rng.choice(questions).answer for _ in range(20)) if i in chosen else ()
        wrong = next((answer for answer in others if answer != question.answer), None)
        noisy.append(
            question if wrong is None else replace(question, answer=wrong, source=f"{question.source} mislabelled")
        )
    return noisy


class QuestionSampler:
    """Draws fresh questions, every one once an epoch, in an order shuffled anew each epoch. (One whose turn comes in a
    step that replays it has had its turn.)"""

    def __init__(self, questions: list[Question], *, seed: int) -> None:
        self.questions = {q.id: q for q in questions}
        self.rng = random.Random(seed)
        self.epoch = 0
        self.queue: list[str] = []  # what is left of this epoch, next one last

    def draw(self, count: int, *, skip: Collection[str] = ()) -> list[Question]:
        """`count` different questions, none of them in `skip` (retired, or replayed in this step).

        Returns fewer only when fewer than `count` questions are outside `skip`."""
        drawn: dict[str, Question] = {}
        postponed: list[str] = []  # just drawn, at the end of the last epoch: they keep their turn in this one
        available = sum(1 for id in self.questions if id not in skip)
        while len(drawn) < min(count, available):
            if not self.queue:
                self.epoch += 1
                self.queue = list(self.questions)
                self.rng.shuffle(self.queue)
            id = self.queue.pop()
            if id in drawn:
                postponed.append(id)
            elif id not in skip:
                drawn[id] = self.questions[id]
        self.queue.extend(postponed)
        return list(drawn.values())

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "queue": list(self.queue), "rng": self.rng.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]
        self.queue = list(state["queue"])
        version, internal, gauss = state["rng"]
        self.rng.setstate((version, tuple(internal), gauss))
