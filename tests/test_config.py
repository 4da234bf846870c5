"""Settings: flag, then preset, then default; every bad value is one sentence that names its flag."""

from __future__ import annotations

import dataclasses
import json

import pytest

from nano_exgrpo.config import MAY_CHANGE, PRESETS, TrainConfig, parse_train_config, resolve, to_dict
from nano_exgrpo.errors import InputError


def parse(line: str) -> TrainConfig:
    return parse_train_config(line.split())


def test_flag_beats_preset_beats_default(monkeypatch):
    monkeypatch.setitem(PRESETS["toy"], "lr", 3e-4)
    assert TrainConfig().lr == 1e-6
    assert parse("").lr == 3e-4 and parse("").preset == "toy"
    assert parse("--lr 0.5").lr == 0.5
    assert parse("--preset none").lr == 1e-6
    assert parse("--model a/b").preset == "24gb" and parse("--model a/b").gradient_checkpointing
    assert not parse("--model a/b --no-gradient-checkpointing").gradient_checkpointing
    assert parse("--no-retire").retire is False


def test_default_data_and_run_folder():
    assert parse("").data == "" and parse("--model a/b").data == "openai/gsm8k:main"
    assert parse("--model a/b --data x.jsonl").data == "x.jsonl"
    assert parse("--algo grpo --seed 3").run == "runs/toy-grpo-seed3"
    assert parse("--model org/Name-1B").run == "runs/Name-1B-exgrpo-seed0"


def test_the_toys_width_divides_into_four_even_heads():
    for width in (3, 4, 12, 100):
        with pytest.raises(InputError, match=f"--toy-hidden must be a multiple of 8: .* got {width}"):
            parse(f"--toy-hidden {width}")
    assert parse("--toy-hidden 8").toy_hidden == 8


def test_paper_preset_is_the_released_run():
    config = parse("--model Qwen2.5-Math-1.5B --preset paper")
    expected = dict(
        questions_per_step=128, group_size=8, updates_per_step=2, lr=1e-6, grad_clip=1.0, replay_ratio=0.5, start_threshold=0.35,
        beta=0.1, temperature=1.0, eval_temperature=0.6, max_prompt_length=1024, max_response_length=8192,
        entropy_coef=0.001, steps=700, clip_range=0.2, draw_sigma=1.0, data="Elliott/Openr1-Math-46k-8192",
        trajectory_choice="lowest", normalize_std=False, max_per_question=0, weight_decay=0.01, retire=True, shaping=True,
        normalize_rows=False, clip_when_mixed=False, importance_correction=True,
    )  # fmt: skip
    assert {name: getattr(config, name) for name in expected} == expected


def test_every_setting_explains_itself_and_every_preset_names_settings(capsys):
    fields = {f.name: f for f in dataclasses.fields(TrainConfig)}
    assert all(f.metadata["help"] for f in fields.values())
    assert all(set(preset) <= set(fields) for preset in PRESETS.values()) and MAY_CHANGE <= set(fields)
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    assert stop.value.code == 0
    help_text = capsys.readouterr().out
    assert all("--" + name.replace("_", "-") in help_text for name in fields)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--group-size 1", "--group-size must be at least 2"),
        ("--replay-ratio 1.5", "--replay-ratio must be between 0 and 1, got 1.5"),
        ("--replay-ratio -0.1", "--replay-ratio must be between 0 and 1"),
        ("--replay-ratio nan", "--replay-ratio must be a finite number"),
        ("--lr 0", "--lr must be above 0"),
        ("--lr inf", "--lr must be a finite number"),
        ("--beta 0", "--beta must be above 0"),
        ("--temperature 0", "--temperature must be above 0"),
        ("--eval-temperature -1", "--eval-temperature"),
        ("--clip-range 1", "--clip-range must be between 0 and 1"),
        ("--grad-clip 0", "--grad-clip must be above 0"),
        ("--weight-decay -1", "--weight-decay must be 0 or more"),
        ("--draw-sigma 0", "--draw-sigma must be above 0"),
        ("--start-threshold nan", "--start-threshold must be a finite number"),
        ("--steps -1", "--steps must be 0 or more"),
        ("--seed -1", "--seed must be between 0"),
        ("--questions-per-step 0", "--questions-per-step must be at least 1"),
        ("--questions-per-step 16 --updates-per-step 17", "--updates-per-step must be at most --questions-per-step"),
        ("--max-response-length 0", "--max-response-length must be at least 1"),
        ("--rollout-batch 0", "--rollout-batch must be at least 1"),
        ("--threads 100000", "--threads must be at most 1024"),
        ("--held-out 0", "--held-out must be at least 1"),
        ("--toy-reasoning 2", "--toy-reasoning must be between 0 and 1"),
        ("--toy-largest 9 --toy-most-terms 12", "--toy-most-terms must be at most 11"),
        ("--algo ppo", "--algo"),
        ("--steps many", "--steps"),
        ("--no-such-flag 1", "unrecognized arguments: --no-such-flag"),
        ("--step 5", "unrecognized arguments: --step"),  # no abbreviations: --steps may come to mean something else
    ],
)
def test_bad_values_name_their_flag(line, message):
    with pytest.raises(InputError) as error:
        parse(line)
    assert message in str(error.value) and "\n" not in str(error.value)


# ----------------------------------------------------------------------------------------- resume


@pytest.fixture
def run(tmp_path):
    config = resolve({"run": str(tmp_path / "run"), "seed": 3, "lr": 0.01})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(to_dict(config)))
    return str(tmp_path / "run")


def test_resume_takes_the_runs_own_settings(run):
    config = parse(f"--resume {run}")
    assert (config.seed, config.lr, config.run, config.resume) == (3, 0.01, run, run)


def test_what_may_change_changes(run):
    config = parse(
        f"--resume {run} --steps 7 --eval-every 3 --save-every 2 --device cpu --train-batch-tokens 99 --rollout-batch 5 "
        "--logits-megabytes 3 --gradient-checkpointing --threads 2 --log-samples 1 --dry-run"
    )
    assert (config.steps, config.eval_every, config.save_every, config.device, config.train_batch_tokens) == (
        7,
        3,
        2,
        "cpu",
        99,
    )
    assert (config.rollout_batch, config.logits_megabytes, config.gradient_checkpointing, config.threads) == (
        5,
        3,
        True,
        2,
    )
    assert config.lr == 0.01


def test_equal_flags_are_fine_and_others_are_errors(run):
    assert parse(f"--resume {run} --lr 0.01 --seed 3 --algo exgrpo --run {run}").lr == 0.01
    for flag in (
        "--lr 0.02",
        "--seed 4",
        "--algo grpo",
        "--run elsewhere",
        "--model a/b",
        "--group-size 4",
        "--no-retire",
        "--max-response-length 9",
    ):
        with pytest.raises(
            InputError, match=f"{flag.split()[0].replace('--no-', '--')} .*contradicts the run in"
        ) as error:
            parse(f"--resume {run} {flag}")
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="--overwrite replaces a run and --resume goes on with it"):
        parse(f"--resume {run} --overwrite")
    with pytest.raises(InputError, match="--steps must be 0 or more"):
        parse(f"--resume {run} --steps -1")


def test_resume_of_what_is_no_run(tmp_path, run):
    with pytest.raises(InputError, match="is not a run folder"):
        parse(f"--resume {tmp_path / 'nothing'}")
    with open(f"{run}/config.json", "w") as file:
        json.dump({"seed": 1, "flux": 2}, file)
    with pytest.raises(InputError, match="names settings that this version does not have: flux"):
        parse(f"--resume {run}")
    with open(f"{run}/config.json", "w") as file:
        json.dump({"seed": None}, file)
    with pytest.raises(InputError, match="config.json is damaged: seed is None"):
        parse(f"--resume {run}")


def test_the_paper_preset_sets_what_the_help_calls_the_released_run():
    config = resolve({"preset": "paper", "model": "someone/model"})
    released = {f.name: f.metadata["paper"] for f in dataclasses.fields(TrainConfig) if f.metadata["paper"] is not None}
    assert len(released) > 20
    assert {name: getattr(config, name) for name in released} == released
