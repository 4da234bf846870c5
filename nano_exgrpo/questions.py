"""Questions: what the policy is asked, where the questions come from, and in which order.

A question is a prompt with a known final answer. The answer is all the supervision there is: no
reference solution is shown to the policy, only whether its own final answer is right (RLVR).
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from nano_exgrpo.errors import InputError

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
    prompt_ids: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def letters(self) -> str:
        """Those of the options; empty for a free answer."""
        return LETTERS[: len(self.choices)]


# --------------------------------------------------------------------------------- JSONL and the hub


def load_questions(
    source: str, *, question_field: str = "question", answer_field: str = "answer", split: str = "train"
) -> list[Question]:
    """Questions from a JSONL file, or from a data set of the Hugging Face hub (needs `datasets`).

    source: a path that ends in .jsonl/.json or exists, else a hub id, with an optional configuration after a
    colon ("openai/gsm8k:main"). split: used for the hub only.
    Raises InputError: file missing or malformed (with its line), a field missing, no rows, hub unreachable.
    """
    path = Path(source)
    if path.is_dir():
        raise InputError(f"data {source} is a folder; give a .jsonl file in it or a hub id")
    if path.is_file() or path.suffix in (".jsonl", ".json"):
        rows: Iterable[tuple[str, dict[str, Any]]] = read_jsonl(path)
    else:
        rows = read_hub(source, split)
    questions = [to_question(row, where, question_field, answer_field, name=path.stem) for where, row in rows]
    if not questions:
        raise InputError(f"data {source} holds no questions")
    unique = {q.id: q for q in questions}
    if len(unique) < len(questions):
        # Ids key the buffer, so they must differ: number the rows instead.
        questions = [
            Question(f"{path.stem}-{i}", q.prompt, q.answer, q.choices, q.source) for i, q in enumerate(questions)
        ]
    return questions


def read_jsonl(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) for every non-blank line; place reads "FILE line N". Raises InputError."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"data file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"data file {path} cannot be read as UTF-8 text: {error}") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # not only JSONDecodeError: an integer may have too many digits
            raise InputError(f"{where} is not valid JSON; the file must hold one JSON object a line") from None
        if not isinstance(row, dict):
            raise InputError(f"{where} is not a JSON object; the file must hold one JSON object a line")
        yield where, row


def read_hub(name: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) for every row of a hub data set "id" or "id:configuration". Raises InputError."""
    try:
        import datasets
    except ImportError:
        raise InputError(f"data set {name} is on the hub, which needs: pip install datasets") from None
    hub_id, _, configuration = name.partition(":")
    try:
        rows = datasets.load_dataset(hub_id, configuration or None, split=split)
    except Exception as error:  # the hub library raises dozens of kinds; its own sentence says which
        reason = str(error).split("\n")[0][:200]
        raise InputError(
            f"data set {hub_id} (split {split}) could not be loaded from the hub: {reason}; "
            f"check its name and the network, or give a .jsonl file"
        ) from None
    for number, row in enumerate(rows):
        yield f"{name} row {number}", dict(row)


def to_question(row: dict[str, Any], where: str, question_field: str, answer_field: str, *, name: str) -> Question:
    """One row to a Question. Understands, beside the named fields, GSM8K's "… #### 42" answers and the
    layout of Elliott/Openr1-Math-46k-8192 (`prompt`: chat messages, `reward_model.ground_truth`).
    Raises InputError, naming `where` and the field."""
    if question_field not in row and isinstance(row.get("reward_model"), dict):
        prompt, answer = _last_user_message(row.get("prompt")), row["reward_model"].get("ground_truth")
        missing = "prompt" if prompt is None else "reward_model.ground_truth"
    else:
        prompt, answer = row.get(question_field), row.get(answer_field)
        missing = question_field if prompt is None else answer_field
    if prompt is None or answer is None:
        raise InputError(
            f"{where} has no field '{missing}' (it has: {', '.join(sorted(row)) or 'none'}); "
            f"name the right ones with --question-field and --answer-field"
        )
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise InputError(f"{where}: field '{answer_field}' must be text or a number, not {type(answer).__name__}")
    if not isinstance(prompt, str) or not prompt.strip():
        raise InputError(f"{where}: field '{question_field}' must be non-empty text")
    answer = final_answer(str(answer))
    refuse_surrogates(prompt + answer, where)
    if not answer:
        raise InputError(f"{where}: field '{answer_field}' is empty")
    id, prompt, source = str(row.get("id", where)), prompt.strip(), str(row.get("source", name))
    if not row.get("choices"):
        return Question(id, prompt, answer, (), source)
    options, right = read_options(
        row["choices"], answer, f"{where}: field 'choices'", f"{where}: field '{answer_field}'"
    )
    refuse_surrogates("".join(options), where)
    return Question(id, multiple_choice_prompt(prompt, options), LETTERS[right], tuple(options), source)


def read_options(found: Any, gold: str, choices: str, answer: str) -> tuple[list[str], int]:
    """(options, index of the right one). gold: its label, a letter where the options have no others; or, if it is none of
    these, the text of just one option. choices, answer: the places of the two, for InputError's sentence."""
    if isinstance(found, dict):  # ARC: labels are letters in most rows, "1" to "4" in some
        options, labels = [str(o).strip() for o in found.get("text") or ()], [str(x) for x in found.get("label") or ()]
    else:
        options = [str(o).strip() for o in found] if isinstance(found, (list, tuple)) else []
        labels = list(LETTERS[: len(options)])
    if not 2 <= len(options) == len(labels) <= len(LETTERS):
        raise InputError(f"{choices} must be a list of 2 to 26 options (or a dict of text and label lists)")
    if gold in labels:
        return options, labels.index(gold)
    if options.count(gold) != 1:
        raise InputError(
            f"{answer} is {gold!r}, which is none of the options {', '.join(labels)} and not the text of just one of them"
        )
    return options, options.index(gold)


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


def refuse_surrogates(text: str, where: str) -> None:
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise InputError(
            f"{where} holds half of a surrogate pair (\\ud800 to \\udfff), which no tokenizer takes as text"
        )


def final_answer(answer: str) -> str:
    r"""GSM8K's answers are whole solutions that end in "#### answer": keep what stands after the mark.

    >>> final_answer("2+2 = <<2+2=4>>4 apples.\n#### 1,004")
    '1,004'
    """
    return answer.rsplit("####", 1)[-1].strip()


def _last_user_message(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return prompt
    messages = prompt if isinstance(prompt, (list, tuple)) else []
    users = [m.get("content") for m in messages if isinstance(m, dict) and m.get("role") == "user"]
    return users[-1] if users else None


def questions_digest(questions: Iterable[Question]) -> str:
    """16 hexadecimal digits that change when an id, a prompt or an answer does, or the order."""
    return hashlib.sha256(json.dumps([(q.id, q.prompt, q.answer) for q in questions]).encode()).hexdigest()[:16]


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
    """Draws fresh questions, every one once an epoch, in an order shuffled anew each epoch. (One whose turn comes in a step
    that replays it has had its turn.)"""

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
