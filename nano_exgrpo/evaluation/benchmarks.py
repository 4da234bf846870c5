"""The benchmarks: where each one's questions come from, how it is asked, graded and averaged.

The paper's nine (section 4, "Evaluation"): six of competition and university mathematics, called in-distribution
because training is on mathematics, and three of general reasoning, called out-of-distribution (ood). GSM8K and
the toy's sums are added for small models. Temperature 0.6, top-p 1. The three small ones are scored avg@32, the
mean accuracy over 32 samples; the others pass@1, a single sample.

A benchmark is a few lines of data, no code: to add one, add an entry to `BENCHMARKS`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from nano_exgrpo.errors import InputError
from nano_exgrpo.questions import (
    LETTERS,
    Question,
    final_answer,
    multiple_choice_prompt,
    read_hub,
    read_jsonl,
    read_options,
    refuse_surrogates,
    sum_questions,
)


@dataclass(frozen=True)
class Benchmark:
    """The layout of one data set.

    hub: its hub id[:configuration]. split: of the hub's. size: its questions when this was written.
    question, answer: names of the fields. context: a field to put before the question, where a row has it.
    options: multiple choice. The name of the field with the options (a list, or a dict with `text` and `label`
        lists), the answer then being a letter or label; or the names of one field an option, the answer then being
        one of those names. Empty: a final answer in a box, compared by value.
    samples: k of avg@k; 1 is pass@1.
    shuffle: shuffle the options even if not asked to, because the data set always has the right one first.
    terms: what one must do before the hub hands it out.
    """

    hub: str
    split: str
    size: int
    question: str = "question"
    answer: str = "answer"
    options: str | tuple[str, ...] = ()
    context: str = ""
    samples: int = 1
    shuffle: bool = False
    terms: str = ""

    @property
    def fields(self) -> set[str]:
        options = (self.options,) if isinstance(self.options, str) else self.options
        return {self.question, self.answer, *options} - {""}

    @property
    def metric(self) -> str:
        return f"avg@{self.samples}" if self.samples > 1 else "pass@1"


BENCHMARKS: dict[str, Benchmark] = {
    # in-distribution: mathematics
    "aime24": Benchmark("HuggingFaceH4/aime_2024", "train", 30, question="problem", samples=32),
    "aime25": Benchmark("math-ai/aime25", "test", 30, question="problem", samples=32),
    "amc23": Benchmark("math-ai/amc23", "test", 40, samples=32),
    "math500": Benchmark("HuggingFaceH4/MATH-500", "test", 500, question="problem"),
    "minerva_math": Benchmark("math-ai/minervamath", "test", 272),
    "olympiadbench": Benchmark(
        "Hothan/OlympiadBench:OE_TO_maths_en_COMP", "train", 674, answer="final_answer", context="context"
    ),
    # out of distribution: multiple choice
    "arc_challenge": Benchmark("allenai/ai2_arc:ARC-Challenge", "test", 1172, answer="answerKey", options="choices"),
    "gpqa_diamond": Benchmark(
        "Idavidrein/gpqa:gpqa_diamond", "train", 198, question="Question", answer="Correct Answer",
        options=("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"), shuffle=True,
        terms="accept its terms on its hub page, then log in with: hf auth login",
    ),
    "mmlu_pro": Benchmark("TIGER-Lab/MMLU-Pro", "test", 12032, options="options"),
    # beside the paper's
    "gsm8k": Benchmark("openai/gsm8k:main", "test", 1319),
    "toy": Benchmark("", "", 1000),
}  # fmt: skip

GROUPS = {
    "in-distribution": ["aime24", "aime25", "amc23", "math500", "minerva_math", "olympiadbench"],
    "ood": ["arc_challenge", "gpqa_diamond", "mmlu_pro"],
}
GROUPS["all"] = GROUPS["in-distribution"] + GROUPS["ood"]

# The fields of this project's own JSONL files, accepted in place of any benchmark's.
PLAIN = Benchmark("", "", 0)


def benchmark_names(text: str) -> list[str]:
    """ "math500,ood" → the names, groups spelled out, each once. Raises InputError for an unknown one."""
    names: list[str] = []
    for word in filter(None, (w.strip() for w in text.split(","))):
        if word not in GROUPS and word not in BENCHMARKS:
            raise InputError(f"benchmark {word} is unknown; there are {', '.join([*BENCHMARKS, *GROUPS])}")
        names += GROUPS.get(word, [word])
    return list(dict.fromkeys(names))


def load_benchmark(name: str, *, data: str = "", shuffle_seed: int | None = None) -> list[Question]:
    """The questions of benchmark `name` as they are asked, multiple choice with lettered options.

    data: a JSONL file in place of the hub, its rows in the hub's layout or with the fields question, answer and,
    for multiple choice, choices (the answer then being a letter or an option's text). `name` may then be one that is not known here.
    shuffle_seed: shuffles the options of every question; None keeps the data set's order (GPQA is always shuffled).
    Raises InputError: file or hub cannot be read, terms not accepted, a row without a field, no rows.
    """
    benchmark = BENCHMARKS.get(name, PLAIN)
    if data:
        rows: Iterable[tuple[str, dict[str, Any]]] = read_jsonl(data)
    elif name == "toy":
        return sum_questions(benchmark.size, seed=2**20)
    else:
        rows = _from_hub(name, benchmark)
    if benchmark.shuffle and shuffle_seed is None:
        shuffle_seed = 0
    questions = [
        to_question(row, where, name, benchmark, index, shuffle_seed) for index, (where, row) in enumerate(rows)
    ]
    if not questions:
        raise InputError(f"benchmark {name}: {data or benchmark.hub} holds no questions")
    if len({q.id for q in questions}) < len(questions):
        questions = [replace(q, id=f"{name}-{index}") for index, q in enumerate(questions)]
    return questions


def _from_hub(name: str, benchmark: Benchmark) -> Iterable[tuple[str, dict[str, Any]]]:
    if not benchmark.hub:
        raise InputError(f"benchmark {name} is unknown; there are {', '.join([*BENCHMARKS, *GROUPS])}")
    try:
        yield from read_hub(benchmark.hub, benchmark.split)
    except InputError as error:
        # 401 and 403 also come as "doesn't exist or cannot be accessed", so the terms are named for every refusal.
        gated = any(word in str(error) for word in ("gated", "authenticated", "cannot be accessed", "401", "403"))
        if benchmark.terms and gated:
            raise InputError(f"benchmark {name} is gated: {benchmark.terms}; or give a file with --data") from None
        raise InputError(
            f"benchmark {name}: {str(error).replace('give a .jsonl file', 'give a file with --data')}"
        ) from None


def to_question(
    row: dict[str, Any], where: str, name: str, benchmark: Benchmark, index: int, shuffle_seed: int | None
) -> Question:
    """One row of the data set to the question that is asked. Raises InputError naming `where` and the field."""
    plain = {"question", "answer"} | ({"choices"} if benchmark.options else set())
    layout = PLAIN if plain <= row.keys() and not benchmark.fields <= row.keys() else benchmark
    options_field = layout.options or ("choices" if row.get("choices") else "")
    prompt = str(_field(row, layout.question, where)).strip()
    if layout.context and row.get(layout.context):
        prompt = f"{row[layout.context]}\n\n{prompt}".strip()
    refuse_surrogates(prompt, where)
    id = next(
        (str(row[key]) for key in ("id", "unique_id", "question_id", "Record ID") if row.get(key) is not None), ""
    )
    id = id or f"{name}-{index}"
    if not options_field:
        return Question(id, prompt, _answer_text(_field(row, layout.answer, where), where, layout.answer), (), name)

    options, right = _options(row, options_field, layout.answer, where)
    if shuffle_seed is not None:  # by id, so that a question is asked alike in any subset or order
        order = list(range(len(options)))
        random.Random(f"{shuffle_seed} {id}").shuffle(order)
        options, right = [options[i] for i in order], order.index(right)
    return Question(id, multiple_choice_prompt(prompt, options), LETTERS[right], tuple(options), name)


def _field(row: dict[str, Any], name: str, where: str) -> Any:
    if row.get(name) in (None, "", []):
        raise InputError(f"{where} has no field '{name}' (it has: {', '.join(sorted(row)) or 'none'})")
    return row[name]


def _answer_text(answer: Any, where: str, name: str) -> str:
    """The final answer as text: lists (OlympiadBench's several values) joined by commas, 27.0 (AMC) as 27."""
    if isinstance(answer, (list, tuple)):
        return ", ".join(_answer_text(part, where, name) for part in answer)
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise InputError(f"{where}: field '{name}' must be text or a number, not {type(answer).__name__}")
    text = final_answer(str(answer))
    if not text:
        raise InputError(f"{where}: field '{name}' is empty")
    return text


def _options(row: dict[str, Any], field: str | tuple[str, ...], answer: str, where: str) -> tuple[list[str], int]:
    """(the options in the data set's order, index of the right one)."""
    if isinstance(field, tuple):
        return [str(_field(row, name, where)).strip() for name in field], field.index(answer)
    found, gold = _field(row, field, where), str(_field(row, answer, where)).strip()
    options, right = read_options(found, gold, f"{where}: field '{field}'", f"{where}: field '{answer}'")
    # MMLU-Pro once padded short questions to ten options with "N/A": those are no options.
    kept = [i for i, option in enumerate(options) if option != "N/A" or i == right]
    return [options[i] for i in kept], kept.index(right)
