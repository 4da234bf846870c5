"""Batches that can be repeated and halved, grading, figures, and the folder that keeps it all."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from nano_exgrpo.errors import InputError
from nano_exgrpo.evaluation import evaluate as evaluate_module
from nano_exgrpo.evaluation.benchmarks import load_benchmark
from nano_exgrpo.evaluation.evaluate import evaluate, generate_batches, plan_batches
from nano_exgrpo.evaluation.figures import summarise
from nano_exgrpo.evaluation.generations import (
    Generation,
    open_folder,
    pin_prompts,
    read_generations,
    weights_digest,
    write_generations,
)
from nano_exgrpo.evaluation.statistics import clustered_interval, wilson
from nano_exgrpo.infra.metrics import eval_metrics
from nano_exgrpo.policy import Policy, encode_questions
from nano_exgrpo.questions import Question
from nano_exgrpo.reward import grade, reward_of
from nano_exgrpo.toy import sum_questions

HANDED = Path(__file__).parent.parent / ".." / "shared" / "data"


def _asked(policy, count=12):
    return encode_questions(policy, sum_questions(count, seed=1), "")


def _prompts(asked):
    return [q.prompt_ids for q in asked]


def _generate(policy, asked, plan, temperature=0.8, **changes):
    settings = {"max_new_tokens": 6, "seed": 3, **changes}
    found = {}
    for rows, trajectories in generate_batches(policy.at(temperature), asked, plan, **settings):
        for row, trajectory in zip(rows, trajectories, strict=True):
            assert row not in found and trajectory.question is asked[row[0]]
            found[row] = trajectory.response_ids.tolist()
    return found


# ------------------------------------------------------------------------------------ generating


def test_plan_asks_every_row_once_within_the_budget_longest_first(policy):
    prompts = _prompts(_asked(policy))
    plan = plan_batches(policy, prompts, 3, max_new_tokens=6, token_budget=60)
    assert sorted(row for batch in plan for row in batch) == [(q, s) for q in range(12) for s in range(3)]
    sizes = [len(batch) * (max(len(prompts[q]) for q, _ in batch) + 6) for batch in plan]
    longest = [max(len(prompts[q]) for q, _ in batch) for batch in plan]
    assert max(sizes) <= 60 and len(plan) > 3 and longest == sorted(longest, reverse=True)
    with pytest.raises(InputError, match="200 tokens leaves no room.*context of 128"):
        plan_batches(policy, [torch.zeros(200, dtype=torch.long)], 1, max_new_tokens=6, token_budget=60)


def test_a_batch_gives_the_same_whatever_went_before(policy):
    asked = _asked(policy)
    plan = plan_batches(policy, _prompts(asked), 2, max_new_tokens=6, token_budget=60)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    whole = _generate(policy, asked, plan)
    assert torch.equal(torch.get_rng_state(), before)  # evaluation leaves the caller's randomness alone
    torch.manual_seed(99)
    resumed = _generate(policy, asked, plan[2:])
    assert resumed == {row: whole[row] for batch in plan[2:] for row in batch}
    assert _generate(policy, asked, plan, seed=4) != whole
    # the samples of one question differ, in one batch and across batches (which must not share a random stream)
    assert any(whole[q, 0] != whole[q, 1] for q in range(len(asked)))
    apart = _generate(policy, asked, [[(0, sample)] for sample in range(8)])
    assert len({tuple(ids) for ids in apart.values()}) > 4


def test_greedy_is_greedy_and_prompts_may_nearly_fill_the_context(policy):
    asked = _asked(policy, 4)
    plan = plan_batches(policy, _prompts(asked), 1, max_new_tokens=6, token_budget=600)
    greedy = _generate(policy, asked, plan, temperature=0.0)
    ids = asked[0].prompt_ids
    with torch.no_grad():
        first = policy.model(input_ids=ids[None]).logits[0, -1].argmax().item()
    assert greedy[0, 0][0] == first and greedy == _generate(policy, asked, plan, temperature=0.0, seed=8)
    long = [Question("long", "?", "1", prompt_ids=torch.full((policy.context - 5,), 20))]
    assert 1 <= len(_generate(policy, long, [[(0, 0)]], max_new_tokens=50)[0, 0]) <= 5


def _with_memory_for(monkeypatch, most_rows, error):
    real, tried = evaluate_module.generate_responses, []

    def generate_responses(policy, prompts, *arguments, **keywords):
        tried.append(len(prompts))
        if len(prompts) > most_rows:
            raise error
        return real(policy, prompts, *arguments, **keywords)

    monkeypatch.setattr(evaluate_module, "generate_responses", generate_responses)
    return tried


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_out_of_memory_halves_the_batch_and_goes_on(policy, monkeypatch, error):
    asked = _asked(policy, 16)
    tried = _with_memory_for(monkeypatch, 3, error)
    rows = [(q, 0) for q in range(16)]
    found = _generate(policy, asked, [rows[:8], rows[8:]])
    assert sorted(found) == rows  # each answered once
    # 8 fails, its halves of 4 fail once; from then on batches of that size are not even tried
    assert Counter(tried)[8] == 1 and Counter(tried)[4] <= 2 and Counter(tried)[2] == 8


def test_a_single_response_that_does_not_fit_and_other_errors(policy, monkeypatch):
    asked = _asked(policy, 2)
    _with_memory_for(monkeypatch, 0, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(InputError, match="single response.*--max-new-tokens"):
        _generate(policy, asked, [[(0, 0), (1, 0)]])
    _with_memory_for(monkeypatch, 0, RuntimeError("shape mismatch"))
    with pytest.raises(RuntimeError, match="shape mismatch"):
        _generate(policy, asked, [[(0, 0), (1, 0)]])


def test_evaluate_counts_what_it_returns(policy):
    questions = sum_questions(20, seed=2) + [Question("choice", "3", "B", ("x", "y"))]
    asked = encode_questions(policy, questions, "")
    groups = evaluate(policy, asked, samples=2, max_new_tokens=8, batch_size=16, seed=0, reward=reward_of)
    assert [len(group) for group in groups] == [2] * 21
    for question, group in zip(asked, groups, strict=True):
        assert all(t.question is question and t.reward == reward_of(t) for t in group)
    rates = [sum(t.reward for t in group) / 2 for group in groups]
    interval = clustered_interval(rates)
    assert eval_metrics([[t.reward for t in group] for group in groups]) == {
        "eval/accuracy": sum(rates) / 21, "eval/low": interval.low, "eval/high": interval.high, "eval/questions": 21,
    }  # fmt: skip


# --------------------------------------------------------------------------------------- grading


def test_grading():
    assert grade("so \\boxed{0.5}", "1/2") == ("0.5", True)
    assert grade("no idea", "1/2") == (None, False)
    assert grade("\\boxed{B}", "B", "ABCD") == ("B", True)
    assert grade("The answer is (C).", "B", "ABCD") == ("C", False)
    assert grade("\\boxed{G}", "B", "ABCD")[1] == 0


@pytest.mark.skipif(not HANDED.is_dir(), reason="the handed data are not here")
@pytest.mark.parametrize(
    "file, name",
    [("aime24", "aime24"), ("aime25", "aime25"), ("amc23", "amc23"), ("minerva_math", "minerva_math"),
     ("olympiadbench", "olympiadbench"), ("arc_challenge", "arc_challenge"), ("mmlu_pro", "mmlu_pro"),
     ("gsm8k_test", "gsm8k")],
)  # fmt: skip
def test_every_gold_answer_grades_itself_right(file, name):
    questions = load_benchmark(name, data=str(HANDED / f"{file}.jsonl"))
    graded = {q.id: grade(f"So it is $\\boxed{{{q.answer}}}$.", q.answer, q.letters, q.choices) for q in questions}
    assert [id for id, (_, right) in graded.items() if not right] == []


# --------------------------------------------------------------------------------------- figures


def _generation(id, sample, answer, correct, *, letters="", tokens=10, truncated=False):
    return Generation("b", id, sample, "?", "text", tokens, truncated, answer, "1/2", correct, letters)


def test_figures_by_hand():
    rows = [
        _generation("a", 0, "0.5", True),
        _generation("a", 1, "3", False),
        _generation("a", 2, "3.0", False),  # the same wrong answer, spelled otherwise
        _generation("a", 3, "\\frac12", True),
        _generation("b", 0, None, False, truncated=True, tokens=50),
        _generation("b", 1, "0.5", True),
        _generation("b", 2, "7", False),
        _generation("b", 3, None, False),
    ]
    figures = summarise(rows, ks=[1, 2, 4, 8])
    assert (figures.questions, figures.samples) == (2, 4)
    assert figures.accuracy == clustered_interval([0.5, 0.25])
    assert figures.pass_at[2].value == pytest.approx(((1 - 1 / 6) + (1 - 3 / 6)) / 2)
    # maj@4: "a" ties two to two, "b" ties one to one
    assert figures.maj_at[4].value == pytest.approx(0.5)
    # maj@2 of "a": pairs RR 1/6 right, WW 1/6 wrong, RW 4/6 tie; of "b": R· 2/6 right, RW 1/6 tie, the rest wrong
    assert figures.maj_at[2].value == pytest.approx(((1 / 6 + 2 / 6) + (2 / 6 + 1 / 12)) / 2)
    assert set(figures.pass_at) == {2, 4}
    assert (figures.mean_tokens, figures.truncated, figures.unparsable) == (15.0, 1 / 8, 2 / 8)


def test_figures_of_single_samples_use_wilson():
    figures = summarise([_generation(str(i), 0, "A", i < 3, letters="ABCD") for i in range(10)])
    assert figures.accuracy == wilson(3, 10) and not figures.pass_at


# ------------------------------------------------------------------------------------- the folder

WANTED = {
    "model": "m", "weights": "w", "temperature": 0.6, "seed": 0,
    "benchmarks": {"b": {"samples": 1, "questions": 2, "digest": "d"}},
}  # fmt: skip


def test_a_folder_goes_on_only_under_the_same_settings(tmp_path):
    assert open_folder(tmp_path / "out", WANTED, overwrite=False) == {}
    write_generations(tmp_path / "out", [_generation("a", 0, "1", False)])
    assert list(open_folder(tmp_path / "out", WANTED, overwrite=False)) == [("b", "a", 0)]
    more = {**WANTED, "benchmarks": {"c": {"samples": 4, "questions": 1, "digest": "e"}}}
    assert len(open_folder(tmp_path / "out", more, overwrite=False)) == 1  # another benchmark joins
    assert set(json.loads((tmp_path / "out" / "settings.json").read_text())["benchmarks"]) == {"b", "c"}
    for change, words in [
        ({"temperature": 1.0}, "made with --temperature 0.6"),
        ({"weights": "x"}, "made with other weights"),
        ({"benchmarks": {"b": {"samples": 2, "questions": 2, "digest": "d"}}}, "holds b with samples 1"),
        ({"benchmarks": {"b": {"samples": 1, "questions": 2, "digest": "x"}}}, "holds b with digest d"),
    ]:
        with pytest.raises(InputError, match=words + ".*--overwrite.*--out"):
            open_folder(tmp_path / "out", {**WANTED, **change}, overwrite=False)
    assert open_folder(tmp_path / "out", {**WANTED, "temperature": 1.0}, overwrite=True) == {}


def test_a_torn_last_line_is_forgotten_and_not_continued(tmp_path):
    rows = [_generation("a", i, "1", False) for i in range(3)]
    write_generations(tmp_path, rows)
    path = tmp_path / "generations.jsonl"
    path.write_text(path.read_text()[:-20])
    assert list(read_generations(tmp_path).values()) == rows[:2]
    assert path.read_text().endswith("}\n") and len(path.read_text().splitlines()) == 2
    whole = dataclasses.asdict(rows[0])
    wrong = dict(id=["a"], tokens=None, correct="yes", response=None, answer=1, letters=None, choices="AB", more=1)
    for name, value in wrong.items():
        path.write_text(json.dumps({**whole, name: value}) + "\n")
        with pytest.raises(InputError, match="generations.jsonl line 1 is a row of another kind"):
            read_generations(tmp_path)
    path.write_text("[" * 100_000 + "\n{}\n")
    with pytest.raises(InputError, match="generations.jsonl line 1 is not valid JSON"):
        read_generations(tmp_path)


@pytest.mark.parametrize(
    "text", ["[]", "5", "{", "{}", '{"benchmarks": []}', '{"benchmarks": {"b": 5}}', "[" * 100_000]
)
def test_settings_that_are_none_are_one_sentence(tmp_path, text):
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(InputError, match="settings.json.*|evaluate anew") as error:
        open_folder(tmp_path, WANTED, overwrite=False)
    assert "\n" not in str(error.value) and (tmp_path / "settings.json").read_text() == text
    assert open_folder(tmp_path, WANTED, overwrite=True) == {}


def test_weights_digest_tells_retrained_weights(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x" * 3_000_000)
    first = weights_digest(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 2_999_999 + b"y")
    assert weights_digest(tmp_path) != first and weights_digest(tmp_path / "absent") == "hub"


def test_regrading():
    row = _generation("a", 0, "old", False)
    row.response = "\\boxed{0.50}"
    assert row.regrade() and row.correct and row.answer == "0.50" and not row.regrade()
    assert "reward      1.0" in row.explain()


def test_evaluation_leaves_a_macs_random_numbers_alone(policy, mac, monkeypatch):
    """Training goes on with the stream that it had, although every batch has a seed of its own; a failure changes nothing."""
    drawn = []

    def responses(policy, prompts, *arguments, **settings):
        drawn.append(mac.draw())
        return [[torch.tensor([5, policy.stop_ids[0]])] for _ in prompts]

    monkeypatch.setattr(evaluate_module, "generate_responses", responses)
    monkeypatch.setattr(Policy, "device", torch.device("mps"))
    ids = {"a": [4, 5], "b": [6]}
    asked = [Question(id, "?", "1", prompt_ids=torch.tensor(tokens)) for id, tokens in ids.items()]
    generate = lambda: list(generate_batches(policy, asked, [[(0, 0)], [(1, 0)]], max_new_tokens=4, seed=0))  # noqa: E731
    torch.manual_seed(3)
    mac.draw()
    before = mac.generator.get_state()
    for _ in range(2):
        generate()
        assert torch.equal(mac.generator.get_state(), before)
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])  # each batch from its own seed
    monkeypatch.setattr(evaluate_module, "generate_responses", lambda *a, **k: (mac.draw(), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        generate()
    assert torch.equal(mac.generator.get_state(), before)


def test_a_folder_goes_on_only_with_the_prompts_it_was_asked(tmp_path):
    """A chat template may write today's date."""
    wanted = {"model": "m", "benchmarks": {"b": {"samples": 1}}}
    for _ in range(2):
        open_folder(tmp_path, wanted, overwrite=False)
        pin_prompts(tmp_path, "b", "monday")
    with pytest.raises(InputError, match="chat template"):
        pin_prompts(tmp_path, "b", "tuesday")
    open_folder(tmp_path, wanted, overwrite=True)
    pin_prompts(tmp_path, "b", "tuesday")
