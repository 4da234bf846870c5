"""Every loader against rows in its hub's real layout (the words of the rows are ours), and against bad rows.

Layouts as published: field names and types of the data set cards of the hub ids in `BENCHMARKS`.
"""

import json
import sys
import types
from pathlib import Path

import pytest

from nano_exgrpo.errors import InputError
from nano_exgrpo.evaluation import benchmarks
from nano_exgrpo.evaluation.benchmarks import BENCHMARKS, GROUPS, benchmark_names, load_benchmark

HANDED = Path(__file__).parent.parent / ".." / "shared" / "data"

# name → (a row in the hub's layout, the answer that must come out)
ROWS = {
    "aime24": (
        {"id": 60, "problem": "Find $1+1$.", "solution": "It is \\boxed{002}.", "answer": "002", "url": "u",
         "year": "2024"},
        "002",
    ),
    "aime25": ({"problem": "Find $2^5$.", "answer": "32", "id": "0"}, "32"),
    "amc23": ({"id": 0, "question": "Find $3\\cdot9$.", "answer": 27.0, "url": "u"}, "27"),
    "math500": (
        {"problem": "Convert.", "solution": "s", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
         "subject": "Precalculus", "level": 2, "unique_id": "test/precalculus/807.json"},
        "\\left( 3, \\frac{\\pi}{2} \\right)",
    ),
    "minerva_math": ({"question": "How long?", "answer": "3.2e-7"}, "3.2e-7"),
    "olympiadbench": (
        {"id": 1606, "question": "Find all $x$.", "solution": ["s"], "final_answer": ["$1$", "$-2$"], "context": None,
         "image_1": None, "modality": "Text-only", "difficulty": "Competition", "is_multiple_answer": True,
         "unit": None, "answer_type": "Numerical", "error": None, "question_type": "Open-ended", "subfield": "Algebra",
         "subject": "Math", "language": "English"},
        "$1$, $-2$",
    ),
    "arc_challenge": (
        {"id": "Mercury_7175875", "question": "Which?",
         "choices": {"text": ["p", "q", "r", "s"], "label": ["1", "2", "3", "4"]},
         "answerKey": "3"},
        "C",
    ),
    "gpqa_diamond": (
        {"Record ID": "rec0", "Question": "Which?", "Correct Answer": "yes\n", "Incorrect Answer 1": "no",
         "Incorrect Answer 2": "perhaps", "Incorrect Answer 3": "never", "Subdomain": "x", "High-level domain": "y"},
        None,  # shuffled
    ),
    "mmlu_pro": (
        {"question_id": 70, "question": "Which?", "options": ["a", "b", "c", "d", "N/A"], "answer": "B",
         "answer_index": 1, "cot_content": "", "category": "business", "src": "ori_mmlu"},
        "B",
    ),
    "gsm8k": ({"question": "How many?", "answer": "2+2 = <<2+2=4>>4\n#### 1,004"}, "1,004"),
}  # fmt: skip


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the hub: `datasets.load_dataset` answers from here, and every call is recorded."""
    calls, answers = [], {}

    def load_dataset(hub_id, configuration=None, *, split):
        calls.append((hub_id, configuration, split))
        if isinstance(answers[hub_id], Exception):
            raise answers[hub_id]
        return answers[hub_id]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return types.SimpleNamespace(calls=calls, answers=answers)


def _write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_paper_s_nine_and_their_metrics():
    assert len(benchmark_names("all")) == 9 and set(ROWS) == set(BENCHMARKS) - {"toy"}
    assert benchmark_names("ood,arc_challenge, gsm8k") == [*GROUPS["ood"], "gsm8k"]
    assert {name for name, b in BENCHMARKS.items() if b.samples == 32} == {"aime24", "aime25", "amc23"}
    for wrong, named in (("math501", "math501"), (",", ","), ("gsm8k,math501", "math501")):
        with pytest.raises(InputError, match=f"benchmark {named} is unknown.*math500"):
            benchmark_names(wrong)


@pytest.mark.parametrize("name", ROWS)
def test_rows_in_the_hub_s_layout(name, hub):
    row, answer = ROWS[name]
    hub_id, _, configuration = BENCHMARKS[name].hub.partition(":")
    hub.answers[hub_id] = [row]
    (question,) = load_benchmark(name)
    assert hub.calls == [(hub_id, configuration or None, BENCHMARKS[name].split)]
    assert question.source == name and question.prompt.startswith(row[BENCHMARKS[name].layout.question])
    if answer is not None:
        assert question.answer == answer
    assert bool(question.choices) == (name in GROUPS["ood"])


@pytest.mark.parametrize("name", ROWS)
def test_a_missing_field_is_named(name, hub, tmp_path):
    row, _ = ROWS[name]
    for field in BENCHMARKS[name].layout.fields:
        broken = {key: value for key, value in row.items() if key != field}
        data = _write(tmp_path / "rows.jsonl", row, broken)
        with pytest.raises(InputError, match="line 2.*'" + field + "'"):
            load_benchmark(name, data=data)


def test_multiple_choice_prompt_and_letters(hub):
    hub.answers["allenai/ai2_arc"] = [ROWS["arc_challenge"][0]]
    (question,) = load_benchmark("arc_challenge")
    assert question.prompt.split("\n\n")[:2] == ["Which?", "A. p\nB. q\nC. r\nD. s"]
    hub.answers["TIGER-Lab/MMLU-Pro"] = [ROWS["mmlu_pro"][0]]
    assert load_benchmark("mmlu_pro")[0].choices == ("a", "b", "c", "d")  # padding dropped


def test_gpqa_is_shuffled_and_the_right_option_is_everywhere(hub):
    row = ROWS["gpqa_diamond"][0]
    hub.answers["Idavidrein/gpqa"] = [{**row, "Record ID": f"rec{i}"} for i in range(200)]
    questions = load_benchmark("gpqa_diamond")
    counts = [sum(q.answer == letter for q in questions) for letter in "ABCD"]
    assert min(counts) > 30  # 50 expected, standard deviation 6
    assert all(
        q.choices["ABCD".index(q.answer)] == "yes" and set(q.choices) == {"yes", "no", "perhaps", "never"}
        for q in questions
    )
    assert load_benchmark("gpqa_diamond") == questions
    # a question is asked alike whichever others are loaded
    hub.answers["Idavidrein/gpqa"] = hub.answers["Idavidrein/gpqa"][100:]
    assert load_benchmark("gpqa_diamond") == questions[100:]


def test_padding_is_dropped_wherever_it_stands_and_the_letter_follows(tmp_path):
    row = {"question": "Which?", "options": ["N/A", "a", "N/A", "b", "N/A"], "answer": "D"}
    (question,) = load_benchmark("mmlu_pro", data=_write(tmp_path / "rows.jsonl", row))
    assert (question.choices, question.answer) == (("a", "b"), "B")


@pytest.mark.parametrize(
    "name, error, words",
    [
        ("gpqa_diamond", "Dataset 'Idavidrein/gpqa' is a gated dataset on the Hub. You must be authenticated to access it.",
         "is gated: accept its terms.*--data"),
        ("gpqa_diamond", "Couldn't reach 'Idavidrein/gpqa' on the Hub (LocalEntryNotFoundError)",
         "Couldn't reach.*network.*--data"),
        ("math500", "Couldn't reach 'HuggingFaceH4/MATH-500' on the Hub (ConnectError)\nmore",
         "Couldn't reach.*network.*--data"),
    ],
)  # fmt: skip
def test_gated_or_unreachable_is_one_sentence(name, error, words, hub):
    hub.answers[BENCHMARKS[name].hub.partition(":")[0]] = ConnectionError(error)
    with pytest.raises(InputError, match=words) as caught:
        load_benchmark(name)
    assert "\n" not in str(caught.value) and ("accept" in str(caught.value)) == ("gated" in error)


def test_own_files_stand_in_for_any_benchmark(tmp_path):
    plain = {"id": "a", "question": "1 + 1?", "answer": "2", "source": "mine"}
    choice = {"id": "b", "question": "Which?", "choices": ["x", "y"], "answer": "B"}
    data = _write(tmp_path / "mine.jsonl", plain, choice)
    for name in ("math500", "olympiadbench", "mine"):
        first, second = load_benchmark(name, data=data)
        assert (first.id, first.prompt, first.answer, first.choices) == ("a", "1 + 1?", "2", ())
        assert (second.answer, second.choices) == ("B", ("x", "y")) and "A. x\nB. y" in second.prompt
    twice = load_benchmark("mine", data=_write(tmp_path / "twice.jsonl", plain, plain))
    assert len({q.id for q in twice}) == 2


@pytest.mark.parametrize(
    "row, words",
    [
        ({"question": "Which?", "choices": ["x", "y"], "answer": "C"}, "'answer' is 'C'.*none of the options A, B"),
        ({"question": "Which?", "choices": ["x"], "answer": "A"}, "'choices' must be a list of 2"),
        ({"question": "Which?", "answer": {"value": 1}}, "'answer' must be text or a number"),
        ({"question": "Which?", "answer": "so it is ####  "}, "'answer' is empty"),
        ({"question": "", "answer": "1"}, "'question' must be non-empty text"),
        ({"question": "Which?", "choices": {"text": 5, "label": 6}, "answer": "A"}, "'choices' must be a list of 2"),
        ({"question": "Which?", "choices": ["\ud83d", "y"], "answer": "B"}, "half of a surrogate pair"),
        ({"question": "\ud83d", "answer": "1"}, "half of a surrogate pair"),
    ],
)
def test_bad_rows(row, words, tmp_path):
    with pytest.raises(InputError, match=words):
        load_benchmark("mine", data=_write(tmp_path / "rows.jsonl", row))


def test_no_rows_and_unknown_name(tmp_path):
    with pytest.raises(InputError, match="holds no questions"):
        load_benchmark("math500", data=_write(tmp_path / "rows.jsonl"))
    with pytest.raises(InputError, match="is unknown"):
        load_benchmark("mine")


@pytest.mark.skipif(not HANDED.is_dir(), reason="the handed data are not here")
@pytest.mark.parametrize(
    "file, name, size",
    [("aime24", "aime24", 30), ("aime25", "aime25", 30), ("amc23", "amc23", 40), ("minerva_math", "minerva_math", 272),
     ("olympiadbench", "olympiadbench", 675), ("arc_challenge", "arc_challenge", 1172), ("mmlu_pro", "mmlu_pro", 1400),
     ("gsm8k_test", "gsm8k", 1319)],
)  # fmt: skip
def test_handed_files_load(file, name, size):
    questions = load_benchmark(name, data=str(HANDED / f"{file}.jsonl"))
    assert len(questions) == len({q.id for q in questions}) == size
    assert all(bool(q.choices) == (name in GROUPS["ood"]) for q in questions)
    assert benchmarks.BENCHMARKS[name].size in (size, 674, 12032)  # the hub's newer OlympiadBench, all of MMLU-Pro
