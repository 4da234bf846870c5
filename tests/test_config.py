"""Settings: flag, then preset, then default; every bad value is one sentence that names its flag."""

from __future__ import annotations

import dataclasses
import json

import pytest

from nano_exgrpo.config import MAY_CHANGE, PRESETS, TrainConfig, parse_train_config, recorded_config, resolve
from nano_exgrpo.errors import InputError


def parse(line: str) -> TrainConfig:
    return parse_train_config(line.split())[0]


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


def test_dry_run_and_card():
    """None: train; else the memory in GB to compare with, 0 for this machine's."""
    for line, card in (("", None), ("--dry-run", 0.0), ("--card 24", 24.0), ("--dry-run --card 12", 12.0)):
        assert parse_train_config(line.split())[1] == card
    for line in ("--card 0", "--card -1", "--card nan", "--card 1e12"):
        with pytest.raises(InputError, match="--card must be the memory of a card in GB"):
            parse(line)


def test_the_paper_preset_is_the_released_run():
    config = parse("--model Qwen2.5-Math-1.5B --preset paper")
    expected = dict(
        questions_per_step=128, group_size=8, updates_per_step=2, lr=1e-6, replay_ratio=0.5, start_threshold=0.35,
        beta=0.1, temperature=1.0, max_prompt_length=1024, max_response_length=8192, entropy_coef=0.001, steps=700,
        clip_range=0.2, draw_sigma=1.0, data="Elliott/Openr1-Math-46k-8192", trajectory_choice="lowest",
        normalize_std=False, max_per_question=0, weight_decay=0.01, retire=True, shaping=True, normalize_rows=False,
        clip_when_mixed=False, importance_correction=True,
    )  # fmt: skip
    assert {name: getattr(config, name) for name in expected} == expected
    released = {f.name: f.metadata["paper"] for f in dataclasses.fields(TrainConfig) if f.metadata["paper"] is not None}
    assert len(released) > 20  # what --help calls the released run's
    assert {name: getattr(config, name) for name in released} == released


def test_settings_are_few_explain_themselves_and_fit_the_page(capsys):
    fields = {f.name: f for f in dataclasses.fields(TrainConfig)}
    assert len(fields) <= 58
    assert all(f.metadata["help"] for f in fields.values())
    assert all(set(preset) <= set(fields) for preset in PRESETS.values()) and MAY_CHANGE <= set(fields)
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    assert stop.value.code == 0
    help_text = capsys.readouterr().out
    assert all("--" + name.replace("_", "-") in help_text for name in fields)
    assert max(map(len, help_text.splitlines())) <= 100


def test_every_preset_is_within_the_bounds():
    for preset in PRESETS:
        model = "toy" if preset in ("toy", "hard", "none") else "a/b"
        assert resolve({"preset": preset, "model": model}).preset == preset


# ------------------------------------------------------------------------------------- bad values

# A field, a value for it, what the sentence says.
BAD = [
    ("group_size", 1, "--group-size must be at least 2"),
    ("replay_ratio", 1.5, "--replay-ratio must be between 0 and 1, got 1.5"),
    ("replay_ratio", -0.1, "--replay-ratio must be between 0 and 1"),
    ("lr", 0.0, "--lr must be between 1e-12 and 1"),
    ("beta", 0.0, "--beta must be between"),
    ("temperature", 0.0, "--temperature must be between 0.01 and 100"),
    ("temperature", 1e-38, "--temperature must be between 0.01 and 100"),
    ("clip_range", 0.0, "--clip-range must be between"),
    ("clip_range", 1.5, "--clip-range must be between"),
    ("weight_decay", -1.0, "--weight-decay must be between 0 and 1"),
    ("draw_sigma", 0.0, "--draw-sigma must be between"),
    ("draw_sigma", 1e200, "--draw-sigma must be between"),
    ("draw_sigma", 1e-300, "--draw-sigma must be between"),
    ("entropy_coef", 1e39, "--entropy-coef must be between 0 and 10"),
    ("start_threshold", -2.0, "--start-threshold must be between -1 and 1"),
    ("steps", -1, "--steps must be at least 0"),
    ("steps", 10**30, "--steps must be between 0"),
    ("seed", -1, "--seed must be between 0"),
    ("questions_per_step", 0, "--questions-per-step must be at least 1"),
    ("max_response_length", 0, "--max-response-length must be at least 1"),
    ("rollout_batch", 0, "--rollout-batch must be at least 1"),
    ("threads", 100000, "--threads must be between 0 and 1024"),
    ("lora_rank", 10**30, "--lora-rank must be between 0 and 4096"),
    ("log_samples", -5, "--log-samples must be at least -1"),
    ("held_out", 0, "--held-out must be at least 1"),
    ("toy_reasoning", 2.0, "--toy-reasoning must be between 0 and 1"),
    ("algo", "ppo", "--algo must be one of exgrpo, grpo, got ppo"),
    ("question_draw", "unifrom", "--question-draw must be one of gaussian, uniform, got unifrom"),
    ("difficulty", "brutal", "--difficulty must be one of all, hard, medium, easy, got brutal"),
    ("system_prompt", "half \ud800", "--system-prompt must be Unicode text"),
    ("run", "a\0b", "--run must be Unicode text"),
    ("preset", "huge", "--preset must be one of"),
    ("updates_per_step", 999, "--updates-per-step must be at most --questions-per-step"),
]
FLOATS = [f.name for f in dataclasses.fields(TrainConfig) if type(f.default) is float]
BAD += [
    (name, value, f"--{name.replace('_', '-')} must be between")
    for name in FLOATS
    for value in (float("nan"), float("inf"))
]
# Of another type: no flag can give one, but JSON, study.py and Python can.
WRONG_TYPES = [
    ("steps", True), ("steps", 3.0), ("steps", "3"), ("steps", None), ("lr", True), ("lr", "0.1"), ("lr", 10**400),
    ("retire", 1), ("retire", "yes"), ("algo", 1), ("algo", []), ("run", 3), ("model", None), ("data", ["a"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a run, to write other settings into."""
    return tmp_path_factory.mktemp("run")


def refused(make) -> str:
    with pytest.raises(InputError) as error:
        make()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_a_bad_value_is_refused_whatever_the_configuration_is_made_from(folder, name, value, message):
    """From Python, from flags and preset, by dataclasses.replace, and from the config.json of a run that goes on."""
    flag = f"--{name.replace('_', '-')}"
    assert message in refused(lambda: TrainConfig(**{name: value}))
    assert message in refused(lambda: resolve({name: value}))
    assert message in refused(lambda: dataclasses.replace(resolve({}), **{name: value}))
    assert message in refused(lambda: parse_train_config([flag, str(value)]))
    (folder / "config.json").write_text(json.dumps({**dataclasses.asdict(resolve({})), name: value}))
    for sentence in (
        refused(lambda: recorded_config(folder)),
        refused(lambda: parse(f"--resume {folder}")),
    ):
        assert f"{folder}/config.json is damaged: {message}" in sentence


@pytest.mark.parametrize(("name", "value"), WRONG_TYPES)
def test_a_value_of_another_type_is_refused(folder, name, value):
    flag = f"--{name.replace('_', '-')}"
    kind = type(getattr(TrainConfig(), name)).__name__
    for make in (lambda: TrainConfig(**{name: value}), lambda: resolve({name: value})):
        assert f"{flag} must be of type {kind}" in refused(make)
    if value != 10**400:  # no number of JSON's is read that long
        (folder / "config.json").write_text(json.dumps({name: value}))
        assert f"config.json is damaged: {flag} must be of type {kind}" in refused(lambda: parse(f"--resume {folder}"))


def test_a_whole_number_is_good_for_a_fraction():
    assert type(TrainConfig(lr=1).lr) is float and type(resolve({"replay_ratio": 0}).replay_ratio) is float


def test_the_settings_of_the_toys_sums_are_refused_for_other_data():
    assert resolve({"out_of_reach": 0.5}).out_of_reach == 0.5
    for given in ({"data": "d.jsonl"}, {"model": "a/b"}):
        message = "--out-of-reach must be 0 unless the questions are the toy's sums, got 0.5"
        assert message in refused(lambda: resolve({**given, "out_of_reach": 0.5}))  # noqa: B023


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--steps many", "argument --steps: invalid int value: 'many'"),
        ("--steps 1.5", "argument --steps: invalid int value"),
        ("--lr x", "argument --lr: invalid float value: 'x'"),
        ("--steps", "argument --steps: expected one argument"),
        ("--no-such-flag 1", "unrecognized arguments: --no-such-flag"),
        ("--step 5", "unrecognized arguments: --step"),  # no abbreviations: --steps may come to mean something else
    ],
)
def test_bad_flags_are_named(line, message):
    assert message in refused(lambda: parse(line))


# ----------------------------------------------------------------------------------------- resume


@pytest.fixture
def run(tmp_path):
    config = resolve({"run": str(tmp_path / "run"), "seed": 3, "lr": 0.01})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    return str(tmp_path / "run")


def test_resume_takes_the_runs_own_settings(run):
    config = parse(f"--resume {run}")
    assert (config.seed, config.lr, config.run, config.resume) == (3, 0.01, run, run)


def test_what_may_change_changes(run):
    changes = dict(
        steps=7, eval_every=3, save_every=2, device="cpu", train_batch_tokens=99, rollout_batch=5, threads=2,
        log_samples=1, sampler="loop", dtype="float32", tracker="tensorboard",
    )  # fmt: skip
    assert MAY_CHANGE == {*changes, "gradient_checkpointing"}
    flags = [word for name, value in changes.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    config, card = parse_train_config(["--resume", run, *flags, "--gradient-checkpointing", "--dry-run"])
    assert {name: getattr(config, name) for name in changes} == changes and card == 0.0
    assert config.gradient_checkpointing and config.lr == 0.01


def test_equal_flags_are_fine_and_others_are_errors(run):
    assert parse(f"--resume {run} --lr 0.01 --seed 3 --algo exgrpo").lr == 0.01
    for flag in (
        "--lr 0.02", "--seed 4", "--algo grpo", "--model a/b", "--group-size 4", "--no-retire",
        "--max-response-length 9",
    ):  # fmt: skip
        sentence = refused(lambda: parse(f"--resume {run} {flag}"))  # noqa: B023
        assert sentence.startswith(flag.split()[0].replace("--no-", "--")) and "contradicts the run in" in sentence
    sentence = "--overwrite replaces a run and --resume goes on with it"
    assert sentence in refused(lambda: parse(f"--resume {run} --overwrite"))
    assert "--steps must be at least 0" in refused(lambda: parse(f"--resume {run} --steps -1"))


def test_the_run_of_a_resume_may_be_named_again(run, monkeypatch, tmp_path):
    """Also by a slash or a path of another form; another folder contradicts it."""
    monkeypatch.chdir(tmp_path)
    for again in (run, run + "/", "run", "./run/"):
        assert parse(f"--resume {run} --run {again}").run == run
        assert parse(f"--resume {again} --run {run}").lr == 0.01
    assert f"--resume goes on in {run}; leave --run out" in refused(lambda: parse(f"--resume {run} --run elsewhere"))


def test_an_empty_resume_starts_no_new_run():
    sentence = refused(lambda: parse_train_config(["--resume", ""]))
    assert sentence == "--resume needs the folder of the run that is to go on"


def test_resume_of_what_is_no_run(tmp_path, run):
    assert "is not a run folder" in refused(lambda: parse(f"--resume {tmp_path / 'nothing'}"))
    (tmp_path / "run" / "config.json").write_text('{"seed": 1, "flux": 2}')
    assert "has settings that this version has not: flux" in refused(lambda: parse(f"--resume {run}"))
