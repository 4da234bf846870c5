"""What goes wrong at the user's end: one sentence that names the remedy, exit code 2, nothing lost."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, data_file, files_of, flags_of, in_step, metrics, tiny_config, tiny_toy

import train
from nano_exgrpo.infra import distributed
from nano_exgrpo.infra.loading import load_policy
from nano_exgrpo.infra.prepare import load_data
from nano_exgrpo.infra.session import State


def refuse(capsys: Any, *flags: str) -> str:
    """Run the script's main; it must end with code 2 and one sentence on stderr, which is returned."""
    capsys.readouterr()
    code = train.main(list(flags))
    out, err = capsys.readouterr()
    sentence = [line for line in err.splitlines() if line.startswith("train.py: ")]
    assert code == 2 and len(sentence) == 1 and "Traceback" not in err + out, (code, err)
    assert err.rstrip().splitlines()[-1] == sentence[0]
    return sentence[0]


def test_bad_flags_and_bad_data_end_with_one_sentence(tiny, tmp_path, capsys):
    run = ["--run", str(tmp_path / "run")]
    (tmp_path / "bad.jsonl").write_text('{"question": "q", "answer": "1"}\n{oops\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "few.jsonl").write_text('{"question": "q", "answer": "1"}\n')
    (tmp_path / "model").mkdir()
    few, cold = ["--data", str(tmp_path / "few.jsonl")], ["--warmup-steps", "0"]
    other = ["--model", "Qwen9", "--data", str(data_file(tmp_path)), "--held-out", "1"]
    cases = {
        "--group-size must be at least 2": ["--group-size", "1"],
        "--replay-ratio must be between 0 and 1": ["--replay-ratio", "2"],
        "invalid float value: 'x'": ["--lr", "x"],
        "device cuda:9": ["--device", "cuda:9"],
        "nowhere.jsonl does not exist": ["--data", str(tmp_path / "nowhere.jsonl")],
        "bad.jsonl line 2 is not valid JSON": ["--data", str(tmp_path / "bad.jsonl")],
        "few.jsonl line 1 has no field 'problem'": [*few, "--question-field", "problem"],
        "holds no questions": ["--data", str(tmp_path / "empty.jsonl")],
        "too few to hold 7 out; lower --held-out": [*few, "--held-out", "7"],
        "neither a folder nor a hub id": other,
        "only 3875 different sums": ["--toy-questions", "5000"],
        "leaves no room for a prompt": [*cold, "--max-response-length", "128"],
        "every prompt is longer than 2 tokens; raise --max-prompt-length": [*cold, "--max-prompt-length", "2"],
        "every prompt is longer than 2 tokens; lower --max-response-length": [*cold, "--max-response-length", "126"],
        "is not a run folder": ["--resume", str(tmp_path / "nothing")],
        "--resume needs the folder of the run": ["--resume", ""],
        "--draw-sigma must be between": ["--draw-sigma", "1e200"],
        "--lora-rank must be between 0 and 4096": ["--lora-rank", str(10**30)],
        **{f"device {name}": ["--device", name] for name in ("meta", "hpu", "privateuseone", "toaster")},
    }
    for sentence, flags in cases.items():
        assert sentence in refuse(capsys, *flags, *([] if "--resume" in flags else run)), flags
    assert not (tmp_path / "run").exists()  # and nothing was left that would be in the way


def test_too_few_groups_for_the_updates_are_refused(tiny, monkeypatch, tmp_path, capsys):
    """An update without a group of its own would silently not be made; a process without a question would crash."""
    data = ["--data", str(data_file(tmp_path, 6)), "--held-out", "3"]
    config = flags_of(tiny_config(tmp_path, updates_per_step=4, steps=1))
    assert (
        "needs at least 4 questions, one for each update (--updates-per-step 4) of each process, and has 3"
        in refuse(capsys, *config, *data)
    )
    monkeypatch.setattr(distributed, "world_size", lambda: 4)
    monkeypatch.setattr(distributed, "same_everywhere", lambda parameters: None)
    config = flags_of(tiny_config(tmp_path, updates_per_step=2, steps=1))
    assert (
        "needs at least 8 questions, one for each update (--updates-per-step 2) of each process, and has 4"
        in refuse(capsys, *config)
    )
    config = flags_of(tiny_config(tmp_path, steps=1))
    assert (
        "needs at least 4 questions, one for each update (--updates-per-step 1) of each process, and has 3"
        in refuse(capsys, *config, *data)
    )


def test_model_folder_without_tokenizer(tiny, tmp_path, capsys):
    tiny_toy().model.save_pretrained(tmp_path / "m")
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps({"question": str(i), "answer": "1"}) + "\n" for i in range(9)))
    flags = ["--model", str(tmp_path / "m"), "--data", str(data), "--held-out", "2", "--run", str(tmp_path / "run")]
    assert "has no tokenizer" in refuse(capsys, *flags)
    tiny_toy().tokenizer.save_pretrained(tmp_path / "m")
    flags += ["--system-prompt", "", "--max-response-length", "4"]
    assert "needs demonstrations: name them with --warmup-data" in refuse(capsys, *flags, "--warmup-steps", "2")
    (tmp_path / "none.jsonl").write_text("")
    assert "none.jsonl holds no demonstrations" in refuse(
        capsys, *flags, "--warmup-steps", "2", "--warmup-data", str(tmp_path / "none.jsonl")
    )
    (tmp_path / "demos.jsonl").write_text('{"question": "1 + 1"}\n')
    sentence = refuse(capsys, *flags, "--warmup-steps", "2", "--warmup-data", str(tmp_path / "demos.jsonl"))
    assert "demos.jsonl line 1 needs the text fields 'question' and 'response'" in sentence


def test_run_folder_that_cannot_be_used(tiny, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    small = flags_of(tiny_config(tmp_path, steps=1))
    assert "cannot be written" in refuse(capsys, *small, "--run", str(tmp_path / "file"))
    assert "cannot be written" in refuse(capsys, *small, "--run", str(tmp_path / "file" / "deeper"))
    assert train.main(small) == 0
    before = files_of(tmp_path / "run")
    assert "already holds a run; go on with --resume" in refuse(capsys, *small)
    # Not even --overwrite touches it before the new run can really start.
    assert "neither a folder" in refuse(
        capsys, *small, "--overwrite", "--model", "Qwen9", "--data", str(data_file(tmp_path))
    )
    assert files_of(tmp_path / "run") == before
    assert train.main([*small, "--overwrite"]) == 0


def test_long_prompts_are_skipped_and_counted(tiny, tmp_path, capsys):
    """In training and in evaluation; toy prompts have two tokens more than their words."""
    rows = [{"question": " + ".join(["1"] * (2 if i % 4 else 8)), "answer": str(i), "id": str(i)} for i in range(40)]
    (tmp_path / "d.jsonl").write_text(
        "".join(json.dumps({**r, "question": r["question"] + f" + {i}"}) + "\n" for i, r in enumerate(rows))
    )
    config = tiny_config(tmp_path, steps=3, data=str(tmp_path / "d.jsonl"), held_out=10, max_prompt_length=10)
    train.train(config)
    out = capsys.readouterr().out
    import re

    found = re.findall(r"skipped (\d+) of (\d+) (\w+)", out)
    assert sum(int(n) for n, _, _ in found) == 10 and sum(int(n) for _, n, _ in found) == 40
    assert metrics(config)[0]["eval/questions"] == 10 - int(found[1][0])


def test_resume_refusals(tiny, tmp_path, capsys):
    config = tiny_config(tmp_path, steps=2, save_every=1)
    train.train(config)
    assert "--lr 0.5 contradicts the run" in refuse(capsys, "--resume", config.run, "--lr", "0.5")
    assert "already at step 2; to go on, raise --steps" in refuse(capsys, "--resume", config.run, "--steps", "1")
    assert train.main(["--resume", config.run]) == 0  # all done: says so again, changes nothing
    newest = Path(config.run) / "checkpoints" / "step-000002"
    weights = newest / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert "could not be loaded from that folder" in refuse(capsys, "--resume", config.run)
    (newest / "state.pt").write_bytes(b"")
    assert "is damaged" in refuse(capsys, "--resume", config.run)
    import shutil

    shutil.rmtree(newest)
    assert train.main(["--resume", config.run]) == 0
    assert [row["step"] for row in metrics(config)] == [0, 1, 2]
    shutil.rmtree(Path(config.run) / "checkpoints")
    assert "has no checkpoint to resume from" in refuse(capsys, "--resume", config.run)


@pytest.mark.parametrize("change", ["a line less", "a line more", "another answer", "another held-out answer"])
def test_a_resume_on_changed_data_is_refused_and_changes_nothing(tiny, tmp_path, capsys, change):
    """Questions without ids are known by their line: after one more, stored rows would answer the wrong ones."""
    data = data_file(tmp_path)
    config = tiny_config(tmp_path, steps=2, save_every=1, data=str(data), held_out=2, start_threshold=-1.0)
    train.train(config)
    lines = data.read_text().splitlines()
    training, held_out = load_data(config)
    if change == "a line less":
        del lines[3]
    elif change == "a line more":
        lines.insert(0, '{"question": "9 + 9", "answer": "18"}')
    else:
        changed = int((held_out if "held-out" in change else training)[0].id.split("-")[-1]) - 1
        lines[changed] = json.dumps({**json.loads(lines[changed]), "answer": "7"})
    kept = data.read_text()
    data.write_text("\n".join(lines))
    before = files_of(config.run)
    sentence = refuse(capsys, "--resume", config.run, "--steps", "3")
    assert f"the questions of {data}" in sentence and f"not those that run {config.run} was trained on" in sentence
    assert files_of(config.run) == before
    data.write_text(kept)
    assert train.main(["--resume", config.run, "--steps", "3"]) == 0


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
    ids=["cuda", "cpu", "python"],
)
def test_out_of_memory_names_what_tells_the_settings_to_lower(tiny, monkeypatch, tmp_path, capsys, error):
    def exhausted(state: State) -> None:
        raise error

    config = tiny_config(tmp_path, save_every=2)
    with monkeypatch.context() as patch:
        in_step(patch, 3, exhausted)
        sentence = refuse(capsys, *flags_of(config))
    assert "out of memory; --dry-run says which setting makes it fit" in sentence
    assert f"--resume {config.run}" in sentence  # what was saved is still good
    assert train.main(["--resume", config.run, "--train-batch-tokens", "64", "--rollout-batch", "2"]) == 0
    assert [row["step"] for row in metrics(config)] == [0, 1, 2, 3, 4]


def test_other_errors_are_not_hidden(tiny, monkeypatch, tmp_path):
    def broken(state: State) -> None:
        raise RuntimeError("shapes do not match")

    in_step(monkeypatch, 1, broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        train.main(flags_of(tiny_config(tmp_path)))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_full_disk_ends_with_one_sentence_and_loses_nothing(tiny, monkeypatch, tmp_path, capsys):
    config = tiny_config(tmp_path, save_every=1)
    path, kept = Path(config.run) / "metrics.jsonl", tmp_path / "kept"

    def fill(state: State) -> None:
        path.rename(kept)
        path.symlink_to("/dev/full")

    with monkeypatch.context() as patch:
        in_step(patch, 2, fill)
        sentence = refuse(capsys, *flags_of(config))
    assert "full" in sentence and sentence.endswith(f"go on with --resume {config.run}")
    kept.replace(path)  # there is room again
    assert train.main(["--resume", config.run]) == 0
    assert [row["step"] for row in metrics(config)] == [0, 1, 2, 3, 4]


def test_nan_gradients_stop_the_run_after_several_in_a_row(tiny, monkeypatch, tmp_path, capsys):
    """Steps 2 and 3 are bad and skipped, step 4 is good, and from step 5 on all are bad: the end is step 9."""

    def poison(state: State) -> None:
        weight = state.policy.model.get_input_embeddings().weight
        weight.register_hook(lambda gradient: gradient * (float("nan") if state.step + 1 in (2, 3, *BAD) else 1))

    BAD = range(5, 99)
    in_step(monkeypatch, 1, poison)
    config = tiny_config(tmp_path, steps=20)
    sentence = refuse(capsys, *flags_of(config))
    assert "the update was not finite in 5 steps in a row" in sentence and "--lr" in sentence
    rows = metrics(config)
    assert rows[-1]["step"] == 9
    assert [row["skipped_updates"] for row in rows[1:]] == [0, 1, 1, 0, 1, 1, 1, 1, 1]
    state = Path(config.run) / "checkpoints" / "step-000009"
    policy = load_policy(str(state / "model"), device=torch.device("cpu"))
    assert all(torch.isfinite(p).all() for p in policy.model.parameters())  # the weights before the bad steps


def test_diverged_weights_end_with_one_sentence(tiny, monkeypatch, tmp_path, capsys):
    def explode(state: State) -> None:
        state.policy.model.get_input_embeddings().weight.data.fill_(float("nan"))

    in_step(monkeypatch, 2, explode)
    sentence = refuse(capsys, *flags_of(tiny_config(tmp_path)))
    assert "diverged" in sentence and "--lr" in sentence


def test_the_toy_refuses_words_that_it_would_drop(tmp_path, capsys):
    data = tmp_path / "words.jsonl"
    data.write_text(
        "".join(json.dumps({"question": f"What is {i} + 1?", "answer": str(i + 1)}) + "\n" for i in range(9))
    )
    flags = ["--data", str(data), "--held-out", "2", "--run", str(tmp_path / "r"), "--warmup-steps", "0"]
    assert train.main(flags) == 2
    assert "the toy reads only sums" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["train.py", "eval.py", "study.py"])
def test_ctrl_c_while_importing_is_no_traceback(script):
    child = subprocess.Popen(
        [sys.executable, script, "--help"], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    time.sleep(0.5)  # the imports take seconds
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert child.returncode != 0 and b"Traceback" not in said
