"""The benchmarks: where each one's questions come from, how its rows are read, and how it is averaged.

The paper's nine (section 4, "Evaluation"): six of competition and university mathematics, called in-distribution
because training is on mathematics, and three of general reasoning, called out-of-distribution (ood). GSM8K and
the toy's sums are added for small models. Temperature 0.6, top-p 1. The three small ones are scored avg@32, the
mean accuracy over 32 samples. The others are scored pass@1, by a single sample.

A benchmark is a line of data, no code: to add one, add an entry to `BENCHMARKS`.
"""

from __future__ import annotations

from dataclasses import dataclass

from nano_exgrpo.errors import InputError
from nano_exgrpo.questions import Layout, Question, read_questions
from nano_exgrpo.toy import sum_questions


@dataclass(frozen=True)
class Benchmark:
    """hub: id[:configuration] of its data set. split: of the hub's. size: its questions when this was written.
    layout: the fields of its rows. samples: k of avg@k; 1 is pass@1. terms: what the hub asks for first."""

    hub: str = ""
    split: str = "test"
    size: int = 0
    layout: Layout = Layout()
    samples: int = 1
    terms: str = ""


PROBLEM = Layout(question="problem")
GPQA = Layout(
    question="Question",
    answer="Correct Answer",
    choices=("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
    shuffle=True,
)
BENCHMARKS: dict[str, Benchmark] = {
    # in-distribution: mathematics
    "aime24": Benchmark("HuggingFaceH4/aime_2024", "train", 30, PROBLEM, samples=32),
    "aime25": Benchmark("math-ai/aime25", "test", 30, PROBLEM, samples=32),
    "amc23": Benchmark("math-ai/amc23", "test", 40, samples=32),
    "math500": Benchmark("HuggingFaceH4/MATH-500", "test", 500, PROBLEM),
    "minerva_math": Benchmark("math-ai/minervamath", "test", 272),
    "olympiadbench": Benchmark(
        "Hothan/OlympiadBench:OE_TO_maths_en_COMP",
        "train",
        674,
        Layout(answer="final_answer", context="context", several=True),
    ),
    # out of distribution: multiple choice
    "arc_challenge": Benchmark(
        "allenai/ai2_arc:ARC-Challenge", "test", 1172, Layout(answer="answerKey", choices="choices")
    ),
    "gpqa_diamond": Benchmark(
        "Idavidrein/gpqa:gpqa_diamond",
        "train",
        198,
        GPQA,
        terms="accept its terms on its hub page, then log in with: hf auth login",
    ),
    "mmlu_pro": Benchmark("TIGER-Lab/MMLU-Pro", "test", 12032, Layout(choices="options", padding="N/A")),
    # beside the paper's
    "gsm8k": Benchmark("openai/gsm8k:main", "test", 1319),
    "toy": Benchmark(size=1000),
}
GROUPS = {
    "in-distribution": ["aime24", "aime25", "amc23", "math500", "minerva_math", "olympiadbench"],
    "ood": ["arc_challenge", "gpqa_diamond", "mmlu_pro"],
}
GROUPS["all"] = GROUPS["in-distribution"] + GROUPS["ood"]
REFUSALS = ("gated", "authenticated", "cannot be accessed", "401", "403")  # the hub's words for terms not accepted


def benchmark_names(text: str) -> list[str]:
    """ "math500,ood" → the names, groups spelled out, each once. Raises InputError for none or an unknown one."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words or [text]:
        if word not in GROUPS and word not in BENCHMARKS:
            raise InputError(f"benchmark {word} is unknown; there are {', '.join([*BENCHMARKS, *GROUPS])}")
    return list(dict.fromkeys(name for word in words for name in GROUPS.get(word, [word])))


def load_benchmark(name: str, data: str = "") -> list[Question]:
    """The questions of a benchmark as they are asked, multiple choice with lettered options.

    data: a JSONL file in place of the hub, its rows in the hub's layout or with this project's own fields. `name` may
    then be one that is not known here. Raises InputError: file or hub cannot be read, terms not accepted, a row without
    a field, no rows."""
    if not data:
        benchmark_names(name)  # refuses an unknown one
    benchmark = BENCHMARKS.get(name, Benchmark())
    if name == "toy" and not data:
        return sum_questions(benchmark.size, seed=2**20)
    own = Layout(choices="choices" if benchmark.layout.choices else "")
    try:
        return read_questions(data or benchmark.hub, (benchmark.layout, own), split=benchmark.split, name=name)
    except InputError as error:
        if data:
            raise
        if benchmark.terms and any(word in str(error) for word in REFUSALS):
            raise InputError(f"benchmark {name} is gated: {benchmark.terms}; or give a file with --data") from None
        raise InputError(f"benchmark {name}: {error} with --data") from None
