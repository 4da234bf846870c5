"""Questions: reading them, refusing what is not one, splitting, and their order."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

import pytest

from nano_exgrpo.errors import InputError
from nano_exgrpo.questions import (
    Question,
    QuestionSampler,
    load_questions,
    mislabel,
    multiple_choice_prompt,
    split_held_out,
)
from nano_exgrpo.toy import put_out_of_reach, sum_questions


def write(tmp_path, *rows) -> str:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


# --------------------------------------------------------------------------------------- the toy's


def test_sums_are_different_right_and_reproducible():
    questions = sum_questions(500, seed=3, fewest=2, most=4)
    assert len({q.prompt for q in questions}) == len({q.id for q in questions}) == 500
    for q in questions:
        numbers = [int(n) for n in q.prompt.split(" + ")]
        assert 2 <= len(numbers) <= 4 and all(1 <= n <= 5 for n in numbers) and str(sum(numbers)) == q.answer
    again, other = (sum_questions(500, seed=seed, fewest=2, most=4) for seed in (3, 4))
    assert questions == again != other
    assert {len(q.prompt.split(" + ")) for q in questions} == {2, 3, 4}


def test_all_sums_there_are_and_not_one_more():
    assert len(sum_questions(25 + 5, seed=0, fewest=1, most=2)) == 30
    with pytest.raises(InputError, match="only 30 different sums"):
        sum_questions(31, seed=0, fewest=1, most=2)


# --------------------------------------------------------------------------------------- layouts


def test_plain_rows_with_text_and_numbers(tmp_path):
    path = write(
        tmp_path, {"question": " 1+1? ", "answer": 2}, "", {"question": "half", "answer": 0.5, "id": "h", "source": "s"}
    )
    first, second = load_questions(path)
    assert (first.prompt, first.answer, first.source) == ("1+1?", "2", "data")
    assert second == Question("h", "half", "0.5", (), "s")


def test_a_byte_order_mark_and_windows_line_ends_are_no_obstacle(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes("\ufeff".encode() + b'{"question": "q", "answer": "1"}\r\n{"question": "r", "answer": "2"}\r\n')
    assert [q.prompt for q in load_questions(str(path))] == ["q", "r"]


def test_gsm8k_answers_keep_what_stands_after_the_mark(tmp_path):
    (q,) = load_questions(write(tmp_path, {"question": "q", "answer": "#### is a mark\n<<2*9=18>>\n#### 1,018"}))
    assert q.answer == "1,018"


def test_openr1_layout(tmp_path):
    row = {
        "data_source": "openr1", "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "What?"}],
        "reward_model": {"ground_truth": "\\frac{1}{2}", "style": "rule"}, "target": [{"content": "solution", "role": "assistant"}],
    }  # fmt: skip
    (q,) = load_questions(write(tmp_path, row))
    assert (q.prompt, q.answer) == ("What?", "\\frac{1}{2}")


def test_content_parts_are_joined(tmp_path):
    parts = [{"type": "text", "text": "What"}, {"type": "text", "text": "now?"}]
    row = {"prompt": [{"role": "user", "content": parts}], "reward_model": {"ground_truth": 2.0}}
    (q,) = load_questions(write(tmp_path, row))
    assert (q.prompt, q.answer) == ("What\nnow?", "2")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (r"We add. So $x = \boxed{7}$.", "7"),
        (r"First \boxed{1}. Then, at last, \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"It is \boxed{1} and \boxed{2}.", "2, 1"),  # several boxes in one sentence are a list, as in a response
        (r"\boxed{", r"\boxed{"),  # no box to read
        ("x = 7", "x = 7"),  # a final answer stays as it is
    ],
)
def test_of_a_whole_solution_the_box_counts(tmp_path, answer, expected):
    (q,) = load_questions(write(tmp_path, {"question": "q", "answer": answer}))
    assert sorted(q.answer.split(", ")) == sorted(expected.split(", "))


def test_named_fields(tmp_path):
    path = write(tmp_path, {"problem": "p", "solution": "3", "question": "wrong", "answer": "wrong"})
    (q,) = load_questions(path, question_field="problem", answer_field="solution")
    assert (q.prompt, q.answer) == ("p", "3")


@pytest.mark.parametrize(
    ("answer", "choices"),
    [("B", ["iron", "argon"]), ("argon", ["iron", " argon "]), ("2", {"text": ["iron", "argon"], "label": ["1", "2"]}),
     (2, {"text": ["iron", "argon"], "label": [1, 2]}), (1, ["iron", "argon"]), (1.0, ["iron", "argon"]),
     (r"so \boxed{B}", ["iron", "argon"])],
)  # fmt: skip
def test_multiple_choice_is_asked_with_its_options_and_answered_by_a_letter(tmp_path, answer, choices):
    (q,) = load_questions(write(tmp_path, {"question": "Which is a gas?", "choices": choices, "answer": answer}))
    assert (q.answer, q.choices, q.letters) == ("B", ("iron", "argon"), "AB")
    assert q.prompt == multiple_choice_prompt("Which is a gas?", ["iron", "argon"]) and "B. argon" in q.prompt


def test_a_number_beside_options_is_the_right_one_s_place_from_0(tmp_path):
    row = {"question": "How many?", "choices": ["4", "2", "1", "3"]}
    by_place, by_text = load_questions(write(tmp_path, {**row, "answer": 1}, {**row, "answer": "1"}))
    assert (by_place.answer, by_text.answer) == ("B", "C")


def test_ids_that_repeat_are_replaced(tmp_path):
    """The buffer and the retired set are keyed by id: two questions must never share one."""
    path = write(tmp_path, *[{"question": f"q{i}", "answer": "1", "id": "same"} for i in range(3)])
    assert len({q.id for q in load_questions(path)}) == 3


def test_hub_data_sets_go_through_datasets(monkeypatch):
    calls = []

    def load_dataset(name, configuration, split):
        calls.append((name, configuration, split))
        return [{"question": "q", "answer": "solution #### 4"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert load_questions("openai/gsm8k:main:test")[0].answer == "4"
    load_questions("Elliott/Openr1-Math-46k-8192")
    assert calls == [("openai/gsm8k", "main", "test"), ("Elliott/Openr1-Math-46k-8192", None, "train")]


def test_hub_failures_are_one_sentence(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("no network\nand a long traceback")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(InputError, match="openai/gsm8k .*no network; check its name") as error:
        load_questions("openai/gsm8k")
    assert "\n" not in str(error.value)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets"):
        load_questions("openai/gsm8k")


# --------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{not json", "line 2 is not valid JSON"),
        ('{"question": "q", "answer": ' + "9" * 5000 + "}", "line 2 is not valid JSON"),
        ("[" * 100_000, "line 2 is not valid JSON"),
        ("[1, 2]", "line 2 is not a JSON object"),
        ({"answer": "1"}, "line 2 has no field 'question' .it has: answer.; name the right ones with --question-field"),
        ({"question": "q"}, "line 2 has no field 'answer'"),
        ({"question": "q", "answer": None}, "line 2: field 'answer' is null"),
        ({"question": None, "answer": "1"}, "line 2: field 'question' is null"),
        ('{"question": "q", "answer": NaN}', "line 2: field 'answer' is nan, which is no number"),
        ('{"question": "q", "answer": -1e999}', "line 2: field 'answer' is -inf, which is no number"),
        ({"question": "", "answer": "1"}, "line 2: field 'question' must be non-empty text"),
        ({"question": ["q"], "answer": "1"}, "line 2: field 'question' must be non-empty text"),
        ({"question": "q", "answer": " "}, "line 2: field 'answer' is empty"),
        ({"question": "q", "answer": "steps ####"}, "line 2: field 'answer' is empty"),
        ({"question": "q", "answer": True}, "line 2: field 'answer' must be text or a number, not bool"),
        ({"question": "q", "answer": ["1"]}, "line 2: field 'answer' must be text or a number, not list"),
        (
            {"prompt": [{"role": "system", "content": "s"}], "reward_model": {"ground_truth": "1"}},
            "line 2: field 'prompt' must be non-empty text",
        ),
        (
            {
                "prompt": [{"role": "user", "content": [{"type": "image", "image": "x"}]}],
                "reward_model": {"ground_truth": "1"},
            },
            "line 2: field 'prompt' must be non-empty text, or chat messages with nothing but text",
        ),
        ({"prompt": "p", "reward_model": {}}, "line 2 has no field"),
        (
            {"question": "q", "choices": ["x", "y"], "answer": "C"},
            "line 2: field 'answer' is 'C', which is none of the options A, B and not",
        ),
        (
            {"question": "q", "choices": ["x", "x"], "answer": "x"},
            "line 2: field 'answer' is 'x', which is none .* text of just one",
        ),
        (
            {"question": "q", "choices": ["x"], "answer": "A"},
            "line 2: field 'choices' must be a list of 2 to 26 options",
        ),
        (
            {"question": "q", "choices": "xy", "answer": "A"},
            "line 2: field 'choices' must be a list of 2 to 26 options",
        ),
        (
            {"question": "q", "choices": {"text": 5, "label": 6}, "answer": "A"},
            "line 2: field 'choices' must be a list of 2 to 26 options",
        ),
        (
            {"question": "q", "choices": {"text": ["x", "y"], "label": ["A", "A"]}, "answer": "A"},
            "line 2: field 'choices' must be a list of 2 to 26 options",
        ),
        (
            {"question": "q", "choices": ["3", "4"], "answer": 2},
            "line 2: field 'answer' is 2, and as a number it must be a label or a place from 0 to 1",
        ),
        ({"question": "q", "choices": ["3", "4"], "answer": 10**400}, "as a number it must be a label or a place"),
        ({"question": "q", "choices": ["3", "4"], "answer": None}, "line 2: field 'answer' is null"),
        ('{"question": "\\ud83d", "answer": "1"}', "line 2 holds half of a surrogate pair"),
        ('{"question": "q", "choices": ["\\ud83d", "y"], "answer": "B"}', "line 2 holds half of a surrogate pair"),
        ('{"question": "q", "id": "\\ud83d", "answer": "B"}', "line 2 holds half of a surrogate pair"),
    ],
)
def test_bad_rows_are_named_by_line_and_field(tmp_path, row, message):
    path = write(tmp_path, {"question": "fine", "answer": "1"}, row)
    with pytest.raises(InputError, match=message) as error:
        load_questions(path)
    assert "data.jsonl" in str(error.value) and "\n" not in str(error.value)


def test_bad_files_are_named(tmp_path):
    with pytest.raises(InputError, match="missing.jsonl does not exist"):
        load_questions(str(tmp_path / "missing.jsonl"))
    with pytest.raises(InputError, match="holds no questions"):
        load_questions(write(tmp_path, "", "  "))
    with pytest.raises(InputError, match="is a folder"):
        load_questions(str(tmp_path))
    for name in ("nowhere/deeper/x", "./nowhere", "questions.csv", "a b", "~/q"):  # none of these is a hub id
        with pytest.raises(InputError, match="does not exist"):
            load_questions(name)
    os.mkfifo(tmp_path / "pipe")  # which may never end
    with pytest.raises(InputError, match="pipe is not a file"):
        load_questions(str(tmp_path / "pipe"))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(InputError, match="cannot be read as UTF-8"):
        load_questions(str(tmp_path / "binary.jsonl"))


# ---------------------------------------------------------------------------------- split and order


def test_no_prompt_stands_on_both_sides_of_the_split():
    questions = [Question(str(i), f"prompt {i % 40}", "1") for i in range(100)]  # prompts repeat under other ids
    train, held_out = split_held_out(questions, 20, seed=1)
    assert len(held_out) == 20 and not {q.prompt for q in train} & {q.prompt for q in held_out}
    assert split_held_out(questions, 20, seed=1) == (train, held_out)
    assert split_held_out(questions, 20, seed=2)[1] != held_out
    assert questions[0].id == "0"  # the caller's list keeps its order
    with pytest.raises(InputError, match="all 5 repeat the prompts of the 1 held out"):
        split_held_out([Question(str(i), "same", "1") for i in range(5)], 1, seed=0)
    with pytest.raises(InputError, match="too few to hold 100 out; lower --held-out"):
        split_held_out(questions, 100, seed=1)


def make_sampler(count: int, seed: int = 0) -> QuestionSampler:
    return QuestionSampler([Question(str(i), f"prompt {i}", "1") for i in range(count)], seed=seed)


@pytest.mark.parametrize("batch", [1, 3, 4, 7, 10])
def test_every_question_once_an_epoch(batch):
    """Also where an epoch ends in the middle of a batch: no question is asked twice in a step, none loses its turn."""
    sampler = make_sampler(10)
    asked: list[str] = []
    for _ in range(70):
        drawn = [q.id for q in sampler.draw(batch)]
        assert len(set(drawn)) == batch
        asked += drawn
    counts = [asked.count(str(i)) for i in range(10)]
    assert max(counts) - min(counts) <= 1
    epochs = [asked[i : i + 10] for i in range(0, 70, 10)]
    if 10 % batch == 0:
        assert all(len(set(epoch)) == 10 for epoch in epochs) and epochs[0] != epochs[1]


def test_skipped_questions_are_not_drawn():
    sampler = make_sampler(10)
    for _ in range(20):
        assert not {"1", "2", "3"} & {q.id for q in sampler.draw(4, skip={"1", "2", "3"})}
    assert sorted(q.id for q in sampler.draw(99, skip={"1"})) == ["0"] + [
        str(i) for i in range(2, 10)
    ]  # fewer than asked
    assert sampler.draw(3, skip={str(i) for i in range(10)}) == [] and sampler.draw(0) == []


def test_sampler_resumes_in_the_middle_of_an_epoch():
    sampler = make_sampler(10)
    sampler.draw(7)
    state = json.loads(json.dumps(sampler.state_dict()))  # plain containers only
    again = make_sampler(10, seed=99)
    again.load_state_dict(state)
    assert [sampler.draw(4) for _ in range(20)] == [again.draw(4) for _ in range(20)]
    assert sampler.epoch == again.epoch > 5
    with pytest.raises(KeyError):  # a queue of other questions: now, not in the step that asks for one
        again.load_state_dict({**state, "queue": ["99"]})


# ------------------------------------------------------------------------------------------- label noise


def test_mislabelled_questions_get_another_ones_answer():
    questions = sum_questions(400, seed=0, fewest=3, most=4)
    noisy = mislabel(questions, 0.25, seed=5)
    wrong = [(a, b) for a, b in zip(questions, noisy, strict=True) if a != b]
    assert len(wrong) == 100 and all(a.id == b.id and a.prompt == b.prompt and a.answer != b.answer for a, b in wrong)
    assert {b.answer for _, b in wrong} <= {q.answer for q in questions}
    assert all(b.source.endswith(" mislabelled") for _, b in wrong)
    assert noisy == mislabel(questions, 0.25, seed=5) != mislabel(questions, 0.25, seed=6)
    assert mislabel(questions, 0.0, seed=5) == questions
    same = [Question("a", "1 + 1", "2"), Question("b", "2 + 0", "2")]
    assert mislabel(same, 1.0, seed=0) == same  # no different answer to be had


def test_label_noise_is_spread_over_the_order_in_which_questions_are_drawn():
    """With one seed for both, a shuffle and a sample from the same stream put every wrong answer first."""
    for seed in range(5):
        noisy = mislabel(sum_questions(1000, seed=seed), 0.5, seed=seed)
        first = QuestionSampler(noisy, seed=seed).draw(300)
        assert 100 < sum(q.source.endswith("mislabelled") for q in first) < 200  # 150 expected, 5 deviations


def test_questions_out_of_reach_replace_a_share_and_leave_the_rest() -> None:
    questions = sum_questions(400, seed=1)
    mixed = put_out_of_reach(questions, 0.9, seed=1)
    hard = [q for q in mixed if q.source == "out of reach"]
    assert len(mixed) == 400 and len(hard) == 360 == len({q.id for q in hard})
    assert [b for a, b in zip(questions, mixed) if b in questions] == [a for a, b in zip(questions, mixed) if a == b]
    for question in hard:
        terms = [int(word) for word in question.prompt.split(" + ")]
        assert len(terms) == 10 and sum(terms) == int(question.answer)
    assert put_out_of_reach(questions, 0.0, seed=1) == questions
    # Spread evenly over the order of drawing, as in mislabel: not just the first ones drawn.
    first = QuestionSampler(mixed, seed=1).draw(100)
    assert 80 < sum(q.source == "out of reach" for q in first) < 98  # 90 expected, 3 deviations
