"""eval.py from the command line to the files it leaves, on tiny policies and without network."""

import dataclasses
import json
import re

import pytest
import torch
from conftest import tiny_config

import eval as script
import train
from nano_exgrpo import toy
from nano_exgrpo.config import resolve
from nano_exgrpo.errors import InputError
from nano_exgrpo.evaluation import generations as generations_module
from nano_exgrpo.evaluation.evaluate import evaluate
from nano_exgrpo.evaluation.generations import read_generations
from nano_exgrpo.evaluation.settings import EvalConfig
from nano_exgrpo.evaluation.statistics import paired_difference, wilson
from nano_exgrpo.infra import files, session
from nano_exgrpo.infra.checkpoint import save_model
from nano_exgrpo.infra.files import Unwritable
from nano_exgrpo.infra.loading import load_policy
from nano_exgrpo.infra.prepare import load_data
from nano_exgrpo.policy import encode_questions
from nano_exgrpo.reward import reward_of


def _make_run(folder, seed=0):
    """What train.py leaves behind, with random weights in place of trained ones."""
    config = resolve({"run": str(folder), "held_out": 30, "toy_questions": 60, "system_prompt": ""})
    save_model(toy.build_policy(seed=seed, hidden=16, layers=1), folder / "model")
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    return config


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _make_run(tmp_path / "run")
    return tmp_path / "run"


def _call(*arguments):
    return script.main([str(a) for a in arguments])


def _file(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _lines(folder):
    return sorted((folder / "generations.jsonl").read_text().splitlines())


def test_loading_shows_no_bars_of_its_own(run, capsys):
    assert _call("--model", run, "--limit", 3) == 0
    assert "Loading weights" not in capsys.readouterr().err


def test_a_run_on_its_own_held_out_questions(run, capsys):
    assert _call("--model", run) == 0
    output = capsys.readouterr().out
    results = json.loads((run / "eval" / "results.json").read_text())
    rows = [json.loads(line) for line in _lines(run / "eval")]
    config = resolve({"held_out": 30, "toy_questions": 60, "run": str(run), "system_prompt": ""})
    held_out = load_data(config)[1]
    assert {r["id"]: (r["prompt"], r["gold"]) for r in rows} == {q.id: (q.prompt, q.answer) for q in held_out}
    correct = sum(r["correct"] for r in rows)
    figures = results["benchmarks"]["toy"]
    assert figures["accuracy"] == dataclasses.asdict(wilson(correct, 30)) and str(wilson(correct, 30)) in output
    assert figures["mean_tokens"] == sum(r["tokens"] for r in rows) / 30 and figures["questions"] == 30
    assert figures["truncated"] == sum(r["truncated"] for r in rows) / 30
    assert results["settings"]["max_new_tokens"] == config.max_response_length == 10  # the run's own
    assert set(results) >= {"model", "settings", "versions", "git_commit"} and set(results["versions"]) >= {
        "torch",
        "transformers",
    }


def test_a_setting_of_the_run_with_a_wrong_type_is_one_sentence(run, capsys):
    settings = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**settings, "held_out": "30"}))
    assert _call("--model", run) == 2
    assert "config.json is damaged: --held-out must be of type int" in capsys.readouterr().err


def test_the_evaluated_policy_is_the_trained_one(run, monkeypatch):
    """--dtype auto, by how the run computed and by what its file holds; a flag decides alone."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    cpu, cuda, fp32, bf16 = torch.device("cpu"), torch.device("cuda"), torch.float32, torch.bfloat16
    found = lambda device, dtype="auto", **settings: script.find_dtypes(  # noqa: E731
        EvalConfig(dtype=dtype), script.Subject("m", str(run / "model"), resolve(settings), run), device
    )
    assert found(cpu) == (fp32, None) and found(cuda) == (fp32, bf16)
    assert found(cuda, lora_rank=4) == (fp32, None)  # merged in fp32: bf16 would round what was learned away
    assert found(cuda, "bfloat16") == found(cpu, "bfloat16") == (bf16, None)
    assert script.find_dtypes(EvalConfig(), script.Subject("m", str(run / "model"), None, run), cuda) == (fp32, None)
    for trained, expected in (("float32", (fp32, None)), ("bfloat16", (fp32, bf16))):  # on whichever device
        config = resolve({"dtype": trained})
        assert {
            script.find_dtypes(EvalConfig(), script.Subject("m", str(run / "model"), config, run), d)
            for d in (cpu, cuda)
        } == {expected}
    half = toy.build_policy(seed=0, hidden=16, layers=1)
    half.model.to(bf16)
    save_model(half, run / "model")
    assert (
        found(cuda) == (bf16, None) and found(cuda, optimizer="adamw16") == (bf16, None) and found(cpu) == (fp32, None)
    )


def test_training_and_the_script_agree(run):
    """The evaluation inside train.py and eval.py give the same responses for the same settings."""
    assert _call("--model", run / "model", "--temperature", "1.0", "--samples", "2") == 0
    config = resolve({"held_out": 30, "toy_questions": 60, "run": str(run), "system_prompt": ""})
    policy = load_policy(str(run / "model"), device="cpu")
    asked = encode_questions(policy, load_data(config)[1], "")
    longest = config.max_response_length
    groups = evaluate(policy, asked, samples=2, max_new_tokens=longest, batch_size=512, seed=0, reward=reward_of)
    expected = {(t.question.id, i): t.text for group in groups for i, t in enumerate(group)}
    assert {(g.id, g.sample): g.response for g in read_generations(run / "eval").values()} == expected


def test_interrupted_and_continued_equals_uninterrupted(run, tmp_path, monkeypatch, capsys):
    arguments = ("--model", run, "--samples", "3", "--batch-tokens", "300", "--temperature", "1")
    assert _call(*arguments, "--out", tmp_path / "whole") == 0
    real, written = generations_module.append_lines, []

    def append_lines(path, rows):
        rows = list(rows)
        written.append(len(rows))
        if len(written) == 3:  # killed in the middle of writing a batch: some rows whole, one torn
            real(path, rows[:4])
            with path.open("a") as file:
                file.write(json.dumps(rows[4])[:50])
            raise KeyboardInterrupt
        real(path, rows)

    monkeypatch.setattr(generations_module, "append_lines", append_lines)
    assert _call(*arguments, "--out", tmp_path / "parts") == 130
    assert "same command goes on" in capsys.readouterr().err
    monkeypatch.setattr(generations_module, "append_lines", real)
    whole = _lines(tmp_path / "whole")
    assert 0 < len(read_generations(tmp_path / "parts")) < len(whole) == 90
    assert _call(*arguments, "--out", tmp_path / "parts") == 0
    assert _lines(tmp_path / "parts") == whole

    # a third time there is nothing left to generate, and no model is loaded
    monkeypatch.setattr(script, "load", lambda *_: pytest.fail("the model was loaded"))
    assert _call(*arguments, "--out", tmp_path / "parts") == 0


def test_a_full_disk_is_one_sentence_and_loses_nothing(run, monkeypatch, capsys):
    real, calls = generations_module.append_lines, []

    def append_lines(path, rows):
        calls.append(path)
        if len(calls) > 1:
            raise Unwritable(path, OSError(28, "No space left on device"))
        real(path, rows)

    monkeypatch.setattr(generations_module, "append_lines", append_lines)
    assert _call("--model", run, "--batch-tokens", "300") == 2
    assert "cannot be written (No space left on device); the same command goes on" in capsys.readouterr().err
    kept = _lines(run / "eval")
    monkeypatch.setattr(generations_module, "append_lines", real)
    assert _call("--model", run, "--batch-tokens", "300") == 0
    assert 0 < len(kept) < 30 and set(kept) < set(_lines(run / "eval"))


def test_other_settings_or_weights_are_not_mixed_in(run, capsys):
    assert _call("--model", run) == 0
    assert _call("--model", run, "--temperature", "1") == 2
    assert "made with --temperature 0.6" in capsys.readouterr().err
    assert _call("--model", run, "--sampler", "loop") == 2
    assert "made with --sampler 'generate'" in capsys.readouterr().err
    save_model(toy.build_policy(seed=5, hidden=16, layers=1), run / "model")
    assert _call("--model", run) == 2
    assert "other weights" in capsys.readouterr().err
    before = _lines(run / "eval")
    assert _call("--model", run, "--overwrite") == 0
    assert _lines(run / "eval") != before and len(before) == 30


def test_regrade_corrects_the_kept_verdicts_without_the_model(run, monkeypatch, capsys):
    assert _call("--model", run) == 0
    path = run / "eval" / "generations.jsonl"
    true = _lines(run / "eval")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[:4]:
        row["correct"] = not row["correct"]
    _file(path, *rows)
    monkeypatch.setattr(script, "load", lambda *_: pytest.fail("the model was loaded"))
    assert _call("--model", run, "--regrade") == 0
    assert "4 of 30 verdicts changed" in capsys.readouterr().out
    assert _lines(run / "eval") == true


def test_responses_of_other_weights_are_neither_shown_nor_regraded(run, capsys):
    assert _call("--model", run) == 0
    save_model(toy.build_policy(seed=5, hidden=16, layers=1), run / "model")
    for flags in (("--show", "wrong"), ("--regrade",)):
        assert _call("--model", run, *flags) == 2
        assert "made with other weights; evaluate anew with --overwrite" in capsys.readouterr().err
        assert _call("--out", run / "eval", *flags) == 0  # asked for by name
    assert _call("--model", run, "--overwrite") == 0 and _call("--model", run, "--show", "wrong") == 0
    (run / "eval" / "settings.json").write_text("{")
    assert _call("--model", run, "--regrade") == 2 and "settings.json is not valid JSON" in capsys.readouterr().err


def test_show_explains_failures(run, capsys):
    assert _call("--model", run, "--temperature", "1") == 0
    generations = read_generations(run / "eval").values()
    capsys.readouterr()
    for kind, chosen in [
        ("wrong", [g for g in generations if not g.correct]),
        ("unparsable", [g for g in generations if g.answer is None]),
    ]:
        assert _call("--model", run, "--show", kind) == 0
        output = capsys.readouterr().out
        assert len(re.findall(r"===== \d+ of", output)) == len(chosen)
        assert all(g.prompt in output for g in chosen) and output.count("extracted   None") >= sum(
            g.answer is None for g in chosen
        )
        assert f"{len(chosen)} of 30 responses are {kind}" in output


def test_what_is_shown_cannot_steer_the_terminal(run, capsys):
    assert _call("--model", run, "--limit", "3") == 0
    _tamper(run / "eval", lambda row: row.update(response="\x1b[2J\x07\ud800 \u202e", correct=False, gold="\x9b1"))
    capsys.readouterr()
    for flags in (("--show", "wrong"), ("--regrade",)):
        assert _call("--model", run, *flags) == 0
        output = capsys.readouterr().out
        assert not set("\x1b\x07\ud800\u202e\x9b") & set(output)
    assert _call("--model", run, "--show", "wrong") == 0
    assert "\\u001b[2J\\u0007\\ud800 \\u202e" in capsys.readouterr().out
    assert _call("--model", run, "--show", "wrong", "--bench", "nope") == 2
    assert "no generations of --bench nope" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_sentence_and_loses_nothing(run, tmp_path, monkeypatch, capsys):
    assert _call("--model", run, "--limit", "3") == 0
    before = {path.name: path.read_bytes() for path in (run / "eval").iterdir()}
    monkeypatch.setattr(files.os, "replace", lambda *names: (_ for _ in ()).throw(OSError(30, "Read-only file system")))
    for flags in ((), ("--regrade",), ("--overwrite",)):
        capsys.readouterr()
        assert _call("--model", run, "--limit", "3", *flags) == 2
        error = capsys.readouterr().err
        assert "cannot be written (Read-only file system); the same command goes on once it can" in error
        if flags != ("--overwrite",):
            assert {path.name: path.read_bytes() for path in (run / "eval").iterdir()} == before
    (tmp_path / "file").touch()
    assert _call("--model", run, "--out", tmp_path / "file" / "deeper") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_multiple_choice_from_a_file_with_a_limit(run, tmp_path):
    rows = [{"id": f"c{i}", "question": "3 + 4", "choices": ["7", "8"], "answer": "A"} for i in range(9)]
    data = _file(tmp_path / "arc_challenge.jsonl", *rows)
    out = tmp_path / "out"
    settings = ("--bench", "arc_challenge", "--limit", "5", "--seed", "4", "--samples", "4", "--k", "2,3")
    assert _call("--model", run, "--data", data, "--out", out, *settings) == 0
    kept = list(read_generations(out).values())
    assert len(kept) == 20 and len({g.id for g in kept}) == 5 and {g.letters for g in kept} == {"AB"}
    assert "A. 7\nB. 8" in kept[0].prompt
    assert set(json.loads((out / "results.json").read_text())["benchmarks"]["arc_challenge"]["pass_at"]) == {"2", "3"}
    # the folder that holds the file stands in for the hub as well, and asks the same questions
    assert _call("--model", run, "--data", tmp_path, "--out", out, *settings) == 0


def test_compare_two_runs(tmp_path, capsys):
    for seed in (0, 1):
        _make_run(tmp_path / f"run{seed}", seed)
    a, b = tmp_path / "run0", tmp_path / "run1"
    assert _call("--compare", a, b, "--samples", "2", "--temperature", "1") == 0
    output = capsys.readouterr().out
    sides = [read_generations(folder / "eval") for folder in (a, b)]
    ids = list(dict.fromkeys(id for _, id, _ in sides[0]))
    verdicts = [[[float(side["toy", id, s].correct) for s in range(2)] for id in ids] for side in sides]
    expected = paired_difference(*verdicts)
    d = expected.interval
    assert f"{d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}]" in output and f"{expected.p:.2g}" in output
    # kept generations compare as well, the other way round
    assert _call("--compare", b / "eval", a / "eval") == 0
    assert (
        f"{-d.value:+.3f} [{-d.high:+.3f}, {-d.low:+.3f}]" in capsys.readouterr().out.replace("-0.000", "+0.000")
        or d.value == 0
    )


def _tamper(folder, change):
    rows = [json.loads(line) for line in (folder / "generations.jsonl").read_text().splitlines()]
    for row in rows:
        change(row)
    _file(folder / "generations.jsonl", *rows)


def test_compare_says_which_is_better_and_refuses_different_questions(run, tmp_path, capsys):
    for out, right in (("a", False), ("b", True)):
        assert _call("--model", run, "--out", tmp_path / out) == 0
        _tamper(tmp_path / out, lambda row, right=right: row.update(correct=right))
    assert _call("--compare", tmp_path / "a", tmp_path / "b") == 0
    assert "B is better than A" in capsys.readouterr().out
    assert _call("--compare", tmp_path / "b", tmp_path / "a") == 0
    assert "A is better than B" in capsys.readouterr().out
    assert _call("--compare", tmp_path / "a", tmp_path / "a") == 0
    assert "no difference is shown" in capsys.readouterr().out
    _tamper(tmp_path / "a", lambda row: row.update(gold="1"))
    assert _call("--compare", tmp_path / "a", tmp_path / "b") == 2
    assert "different questions on toy" in capsys.readouterr().err
    _tamper(tmp_path / "a", lambda row: row.update(benchmark="other"))
    assert _call("--compare", tmp_path / "a", tmp_path / "b") == 2
    assert "no benchmark in common" in capsys.readouterr().err


def test_which_weights(run, tmp_path, capsys):
    found = script.find_subject(str(run / "model"))
    assert found.run is not None and found.out == (run / "eval").resolve()
    checkpoint = run / "checkpoints" / "step-000004"
    save_model(toy.build_policy(seed=1, hidden=16, layers=1), checkpoint / "model")
    (checkpoint / "state.pt").touch()
    assert script.find_subject(str(checkpoint / "model")).out.name == "eval-step-000004"
    (run / "model").rename(tmp_path / "model")
    unfinished = script.find_subject(str(run))
    assert unfinished.weights == str(checkpoint / "model") and "not finished" in capsys.readouterr().out
    elsewhere = script.find_subject(str(tmp_path / "model"))
    assert elsewhere.run is None and str(elsewhere.out) == "evals/model"
    (checkpoint / "state.pt").unlink()
    with pytest.raises(InputError, match="has saved no model yet.*--resume"):
        script.find_subject(str(run))


def test_an_extended_run_is_judged_by_its_new_weights(tmp_path, monkeypatch, capsys):
    """Finished at step 1, then killed in step 3 of a longer run: the model of step 1 is not the run's result any more."""
    config = tiny_config(tmp_path, steps=1, save_every=1)
    monkeypatch.setattr(session, "plot_curves", lambda *args: None)
    train.train(config)
    assert script.find_subject(config.run).weights.endswith("run/model")
    update, calls = train.update_policy, []

    def killed(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise ZeroDivisionError
        return update(*args, **kwargs)

    monkeypatch.setattr(train, "update_policy", killed)
    assert (
        train.main(["--resume", config.run, "--steps", "3", "--lr", "1"]) == 2
    )  # a resume that is refused takes nothing away
    assert script.find_subject(config.run).weights.endswith("run/model")
    with pytest.raises(ZeroDivisionError):
        train.main(["--resume", config.run, "--steps", "3"])
    assert script.find_subject(config.run).weights.endswith("step-000002/model")
    assert "not finished" in capsys.readouterr().out


def test_the_frozen_weights_of_an_unfinished_lora_run_are_not_evaluated(run, capsys):
    settings = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**settings, "lora_rank": 4}))
    assert script.find_subject(str(run)).weights == str(run / "model")  # merged
    checkpoint = run / "checkpoints" / "step-000004"
    checkpoint.mkdir(parents=True)
    (run / "model").rename(checkpoint / "model")
    (checkpoint / "state.pt").touch()
    for model in (run, checkpoint / "model"):
        assert _call("--model", model) == 2
        assert "holds the frozen weights of a LoRA run; finish it with train.py --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "--model"),
        (["--model", "toy"], "train.py"),
        (["--model", "nowhere", "--bench", "toy"], "neither a folder nor a hub id"),
        (["--model", "RUN", "--bench", "math501"], "math501 is unknown"),
        (["--model", "RUN/model/..", "--bench", "math500"], "math500.*hub.*--data"),  # no network here
        (["--model", "RUN", "--bench", "ood", "--data", "x.jsonl"], "one file and cannot stand in for 3"),
        (["--model", "RUN", "--data", "x.jsonl", "--bench", "gsm8k"], "x.jsonl does not exist"),
        (["--model", "n" * 300], "neither a folder nor a hub id"),
        (["--model", "RUN", "--data", "n" * 300], "does not exist"),
        (["--model", "RUN", "--regrade", "--out", "n" * 300], "holds no generations.jsonl"),
        (["--model", "a/b"], "a/b is no run: name benchmarks with --bench"),
        (["--model", "a/b", "--bench", "held-out"], "only a run has held-out questions"),
        (["--model", "RUN", "--temperature", "-1"], "--temperature must be between 0 and 100"),
        (["--model", "RUN", "--temperature", "nan"], "--temperature must be between 0 and 100"),
        (["--model", "RUN", "--k", "²"], "--k must be whole numbers"),
        (["--model", "RUN", "--k", "9" * 30], "--k must be whole numbers"),
        (["--model", "RUN", "--limit", str(10**30)], "--limit must be between"),
        (["--model", "RUN", "--bench", ","], "benchmark , is unknown"),
        (["--model", "RUN", "--show", "odd"], "--show must be one of"),
        (["--compare", "RUN"], "--compare: expected 2 arguments"),
        (["--model", "RUN", "--top-p", "0"], "--top-p"),
        (["--model", "RUN", "--k", "two"], "--k must be whole numbers"),
        (["--model", "RUN", "--show", "wrong"], "holds no generations.jsonl"),
        (["--model", "RUN", "--regrade"], "holds no generations.jsonl"),
        (["--model", "RUN", "--compare", "RUN", "RUN"], "drop --model"),
        (["--model", "RUN", "--device", "cuda:99"], "device cuda:99"),
    ],
)
def test_bad_input_is_one_sentence(arguments, words, run, capsys):
    assert _call(*[a.replace("RUN", str(run)) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(words, error) and error.startswith("eval.py: ") and error.count("\n") == 1
