"""Whole runs of train.py: other models and data, evaluation beside training, and the toy that learns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import build, tiny_config

import train
from nano_exgrpo.config import TrainConfig
from nano_exgrpo.infra import session
from nano_exgrpo.infra.loading import load_policy
from nano_exgrpo.infra.prepare import prepare
from nano_exgrpo.infra.run_folder import read_lines
from nano_exgrpo.infra.session import Run, held_out_metrics
from nano_exgrpo.infra.stop import StopRequest
from nano_exgrpo.policy import Policy
from nano_exgrpo.reward import reward_of


def save(policy: Policy, folder: Path) -> str:
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return str(folder)


def state_of(config: TrainConfig) -> session.State:
    return prepare(config, Run(config, StopRequest()))


@pytest.mark.parametrize(("answer", "right"), [("B", 1.0), ("argon", 0.0)])
def test_multiple_choice_is_asked_and_graded_alike_in_training_and_evaluation(tmp_path, answer, right):
    """Golds as letters and as texts. A policy that always boxes the letter is always right, and one that boxes a text
    which stands in no option never is."""
    rows = [{"question": f"w{i}", "choices": ["iron", "neon"], "answer": "B" if i % 2 else "neon"} for i in range(12)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny_config(
        tmp_path, model=save(build("llama"), tmp_path / "m"), data=str(tmp_path / "d.jsonl"), held_out=4, steps=1,
        max_response_length=2, max_prompt_length=60, preset="none",
    )  # fmt: skip
    state, asked = state_of(config), []

    def reward(trajectory):
        asked.append(trajectory.question.prompt)
        return reward_of(replace(trajectory, text=f"\\boxed{{{answer}}}"))

    state.reward = reward
    before, (row, _) = held_out_metrics(state, config), train.train_step(state, config)
    assert before["eval/accuracy"] == row["reward"] == right
    assert len(set(asked)) == 8 and all("A. iron\nB. neon" in prompt for prompt in asked)


def test_evaluation_asks_as_training_does_but_at_its_own_temperature(tmp_path, monkeypatch):
    """The same prompts, made with the same system prompt, and the same longest response; the paper's 0.6 and no top-p.
    (The policy of a plain template shows its system prompt.)"""
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps({"question": f"w{i}", "answer": "1"}) + "\n" for i in range(12)))
    config = tiny_config(
        tmp_path, model=save(build("llama"), tmp_path / "m"), data=str(data), held_out=4, steps=1, preset="none",
        system_prompt="w37", temperature=0.9,
    )  # fmt: skip
    state, generated = state_of(config), []
    w37 = state.policy.tokenizer("w37").input_ids[0]
    assert all(w37 in q.prompt_ids for q in state.questions + state.held_out)
    generate = session.evaluate

    def spy(policy, questions, **settings):
        generated.append((policy.temperature, settings["max_new_tokens"], settings.get("top_p", 1.0), len(questions)))
        return generate(policy, questions, **settings)

    monkeypatch.setattr(session, "evaluate", spy)
    held_out_metrics(state, config)
    assert generated == [(0.6, 6, 1.0, 4)] and state.policy.temperature == 0.9


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_any_model_folder_with_warm_up_data(tmp_path, family):
    """A saved model of another family, JSONL questions and demonstrations, checkpointing on: the whole road."""
    policy = build(family)
    word = (lambda i: str(i)) if family == "qwen2" else (lambda i: f"w{i}")
    data, demos = tmp_path / "d.jsonl", tmp_path / "demos.jsonl"
    data.write_text("".join(json.dumps({"q": word(i), "a": i}) + "\n" for i in range(20)))
    demos.write_text("".join(json.dumps({"question": word(i), "response": word(i)}) + "\n" for i in range(20)))
    flags = [
        "--model", save(policy, tmp_path / "m"), "--data", str(data), "--question-field", "q", "--answer-field", "a",
        "--warmup-data", str(demos), "--system-prompt", word(1), "--run", str(tmp_path / "run"),
        *"--held-out 4 --steps 2 --questions-per-step 3 --group-size 3 --max-response-length 5".split(),
        *"--max-prompt-length 20 --warmup-steps 3 --device cpu --start-threshold -1 --save-every 1".split(),
        "--updates-per-step", "2",
    ]  # fmt: skip
    assert train.main(flags) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["preset"] == "24gb" and config["gradient_checkpointing"] is True
    again = load_policy(str(tmp_path / "run" / "model"), device=torch.device("cpu"))
    assert again.stop_ids == policy.stop_ids
    assert train.main(["--resume", str(tmp_path / "run"), "--steps", "3"]) == 0


# -------------------------------------------------------------------------------------------- learning

LEARNING = (
    "--steps 30 --eval-every 0 --toy-questions 500 --held-out 100 --toy-skill-steps 600 --warmup-steps 60 "
    "--questions-per-step 16 --max-response-length 10 --lr 5e-4 --device cpu"
)


@pytest.mark.parametrize("algo", ["exgrpo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_the_toy_learns(tmp_path_factory, algo, capsys):
    """`python train.py`, smaller: from seldom right to mostly right. (Measured: 0.25 to 0.8 and more in 30 steps.)"""
    folder = tmp_path_factory.getbasetemp() / "learning"  # both share the warmed-up policy
    run = folder / algo
    assert train.main(["--run", str(run), "--algo", algo, *LEARNING.split()]) == 0
    rows = read_lines(run / "metrics.jsonl")
    first, last = rows[0], rows[-1]
    assert last["step"] == 30 and first["eval/accuracy"] < 0.4
    # Retired: what is easy is no longer asked, so the reward of what is left stays behind.
    assert last["eval/accuracy"] > 0.6 and sum(row["reward"] for row in rows[-10:]) / 10 > 0.4
    assert last["eval/low"] > first["eval/high"]  # the 95 % intervals do not even touch
    if algo == "exgrpo":
        assert last["replay/started"] and last["buffer/retired"] > 20
        assert max(row.get("replay/questions", 0) for row in rows) == 8
    else:
        assert not any(row.get("replay/started") for row in rows) and last["buffer/retired"] == 0
        twin = read_lines(folder / "exgrpo" / "metrics.jsonl")
        if twin:  # the same start
            assert twin[0]["eval/accuracy"] == first["eval/accuracy"]
    out = capsys.readouterr().out
    assert f"improved: {first['eval/accuracy']:.3f} [" in out and f"] -> {last['eval/accuracy']:.3f} [" in out
    assert "(100 questions" in out
    for name in ("config.json", "metrics.jsonl", "samples.jsonl", "model/config.json"):
        assert (run / name).exists(), name
    load_policy(str(run / "model"), device=torch.device("cpu"))
