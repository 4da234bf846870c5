"""Studies: paired intervals on simulated seeds, curves at equal cost, and the script end to end on tiny runs."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

import study
from nano_exgrpo.config import resolve
from nano_exgrpo.errors import InputError
from nano_exgrpo.evaluation.statistics import paired_seeds
from nano_exgrpo.evaluation.study_report import (
    Curve,
    at_equal,
    kind,
    lucky_share,
    read_curve,
    separation,
    study_table,
)
from nano_exgrpo.infra.run_folder import sole_writer

TINY = [
    "--seeds", "2", "--steps", "3", "--workers", "1", "--set", "toy_skill_steps=0", "--set", "toy_questions=4",
    "--set", "held_out=8", "--set", "questions_per_step=2", "--set", "warmup_steps=20", "--set", "eval_every=1",
    "--set", "start_threshold=-1",
]  # fmt: skip


def curve(accuracy: list[float], rollouts: list[float], compute: list[float]) -> Curve:
    return Curve(rollouts, compute, accuracy, trained_rows=0.5)


# ------------------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize("effect", [0.0, 0.1])
def test_the_paired_interval_covers_the_true_difference_and_sees_through_the_spread_of_seeds(effect: float) -> None:
    """Seeds differ by 0.3, arms within a seed by 0.05: unpaired, an effect of 0.1 would be lost at 8 seeds."""
    rng = random.Random(0)
    covered = found = 0
    trials = 600
    for _ in range(trials):
        level = [rng.gauss(0.5, 0.3) for _ in range(8)]
        a = [x + rng.gauss(0, 0.05) for x in level]
        b = [x + effect + rng.gauss(0, 0.05) for x in level]
        interval = paired_seeds(a, b).interval
        covered += interval.low <= effect <= interval.high
        found += interval.low > 0
    assert 0.93 <= covered / trials <= 0.97  # binomial standard error 0.009
    assert found / trials > 0.9 if effect else found / trials < 0.05


# ----------------------------------------------------------------------------------------------- curves


def test_equal_cost_cuts_each_pair_at_the_cheaper_run() -> None:
    long, short = curve([0.0, 0.4, 0.8], [0, 100, 200], [0, 10, 20]), curve([0.0, 0.5, 0.6], [0, 75, 150], [0, 20, 40])
    assert at_equal("rollouts", [long], [short]) == ([pytest.approx(0.6)], [0.6])
    assert at_equal("compute", [long], [short]) == ([0.8], [0.5])


def test_compute_counts_generated_scored_and_three_times_the_trained_tokens(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "eval/accuracy": 0.1},
        {"step": 1, "rollouts": 16, "num_tokens": 100, "scored_tokens": 0, "trained_tokens": 50.0, "trained_rows": 0.5, "entropy": 1.0},
        {"step": 2, "rollouts": 15, "num_tokens": 190, "scored_tokens": 7, "trained_tokens": 20.0, "trained_rows": 0.25, "entropy": 0.9,
         "eval/accuracy": 0.3},
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = read_curve(tmp_path)
    assert (read.rollouts, read.accuracy) == ([0, 31], [0.1, 0.3])
    assert read.compute == [0, 190 + 7 + 3 * 70]
    assert read.trained_rows == 0.375 and read.mean == 0.3


def test_the_table_pairs_by_seed_and_leaves_the_baseline_without_a_difference() -> None:
    base = [curve([0.1, v], [0, 100], [0, 10]) for v in (0.2, 0.6, 0.4)]
    better = [curve([0.1, v], [0, 100], [0, 10]) for v in (0.3, 0.7, 0.5)]
    rows = study_table({"s": {"grpo": base, "exgrpo": better}}, "grpo").splitlines()
    assert len(rows) == 4
    assert rows[2].split("|")[-4:-1] == ["  ", "  ", "  "]
    assert "+0.100 [+0.100, +0.100] (3:0)" in rows[3]
    assert (
        study_table({"s": {"grpo": base[:1], "exgrpo": better[:1]}}, "grpo").count("±") == 0
    )  # one seed has no interval


# ---------------------------------------------------------------------------------------------- samples


@pytest.mark.parametrize(
    ("prompt", "response", "reward", "expected"),
    [
        ("<|user|> 3 + 8 + 5 <|assistant|>", r"11 16 \boxed{ 16 }", 1.0, "reasoned"),
        ("<|user|> 3 + 8 + 5 <|assistant|>", r"\boxed{ 16 }", 1.0, "lucky"),
        ("<|user|> 3 + 8 + 5 <|assistant|>", r"12 16 \boxed{ 16 }", 1.0, "lucky"),
        ("<|user|> 3 + 8 + 5 <|assistant|>", r"11 16 \boxed{ 17 }", 0.0, "wrong"),
        ("<|user|> 3 + 8 + 5 <|assistant|>", r"11 16 \boxed{ 17 }", 1.0, "lucky"),  # agrees with a wrong label only
    ],
)
def test_a_success_is_reasoned_only_if_every_step_is_right(
    prompt: str, response: str, reward: float, expected: str
) -> None:
    assert kind(prompt, response, reward) == expected


def test_luck_is_counted_by_the_successes_of_whole_fresh_groups() -> None:
    def row(question: str, response: str, reward: float, replayed: bool = False) -> dict:
        return {
            "step": 1,
            "question": question,
            "prompt": "1 + 2",
            "response": response,
            "reward": reward,
            "replayed": replayed,
        }

    right, luck, miss = (r"3 \boxed{ 3 }", 1.0), (r"\boxed{ 3 }", 1.0), (r"\boxed{ 4 }", 0.0)
    rows = [row("a", *right), row("a", *luck), row("a", *miss), row("b", *luck), row("b", *miss), row("b", *miss)]
    rows += [row("c", *right, replayed=True), row("c", *right), row("c", *miss)]  # K − 1 fresh: not a whole group
    assert lucky_share(rows, 3) == {1: (1, 1), 2: (1, 2)}


def test_separation_is_the_area_under_the_roc_curve() -> None:
    assert separation([1, 2], [3, 4]) == 1 and separation([3, 4], [1, 2]) == 0 and separation([5], [5]) == 0.5


# --------------------------------------------------------------------------------------------- the script


@pytest.fixture(autouse=True)
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run's own picture takes longer than the tiny run."""
    monkeypatch.setattr("nano_exgrpo.infra.session.plot_curves", lambda runs, target: True)


def whole_study(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert study.main(["compare", "--settings", "clean", *TINY, "--out", str(folder)]) == 0
    return capsys.readouterr().out


def metrics(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/") and k != "tokens_per_second"} for row in rows]


def test_a_tiny_study_end_to_end_and_a_resumed_one_equals_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = whole_study(tmp_path / "whole", capsys)
    assert "4 runs, 4 to do" in out and "| clean | exgrpo |" in out
    assert (tmp_path / "whole" / "compare.png").stat().st_size > 1000
    text = (tmp_path / "whole" / "compare.md").read_text()

    # Again with one run missing, one broken off and one made with another setting.
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "whole", resumed)
    runs = resumed / "runs"
    for config in runs.glob("*/config.json"):  # a run knows its own folder
        config.write_text(config.read_text().replace("/whole/", "/resumed/"))
    shutil.rmtree(runs / "clean-grpo-seed0")
    lines = (runs / "clean-grpo-seed1" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (runs / "clean-grpo-seed1" / "metrics.jsonl").write_text("".join(lines[:-1]))
    other = json.loads((runs / "clean-exgrpo-seed0" / "config.json").read_text())
    (runs / "clean-exgrpo-seed0" / "config.json").write_text(json.dumps({**other, "lr": 0.5}))
    kept = (runs / "clean-exgrpo-seed1" / "metrics.jsonl").stat().st_mtime_ns
    assert "4 runs, 3 to do" in whole_study(resumed, capsys)
    assert (runs / "clean-exgrpo-seed1" / "metrics.jsonl").stat().st_mtime_ns == kept
    assert (resumed / "compare.md").read_text() == text
    for run in runs.glob("*-seed*"):
        assert metrics(run) == metrics(tmp_path / "whole" / "runs" / run.name)
    assert "4 runs, 0 to do" in whole_study(resumed, capsys)


def test_the_arms_of_a_seed_start_from_the_same_policy_and_questions(tmp_path: Path) -> None:
    changes = study.parse_changes([TINY[i + 1] for i, word in enumerate(TINY) if word == "--set"])
    job = study.plan(study.grid({"s": {}}, study.ARMS), 3, {**changes, "steps": 1}, tmp_path)
    assert not any(map(study.is_finished, job))
    study.run_job(job)
    assert all(map(study.is_finished, job))
    starts = [json.loads((Path(config.run) / "metrics.jsonl").read_text().splitlines()[0]) for config in job]
    assert starts[0] == starts[1]
    assert len(list((tmp_path / "runs" / ".warmup").iterdir())) == 1


def test_bad_options_are_one_sentence_and_exit_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for options, named in [
        (["--set", "no_such=1"], "no-such"),
        (["--set", "lr=fast"], "--lr"),
        (["--set", "lr=true"], "--lr"),
        (["--set", "retire=maybe"], "maybe"),
        (["--set", "seed=3"], "seed"),
        (["--set", "question_draw=unifrom"], "unifrom"),  # not measured as something else
        (["--set", "difficulty=hardest"], "hardest"),
        (["--set", "steps"], "NAME=VALUE"),
        (["--workers", "²"], "--workers"),
        (["--workers", str(10**30)], "--workers"),
        (["--arms", "ppo"], "'ppo'"),
        (["--settings", "dirty"], "'dirty'"),
        (["--seeds", "0"], "--seeds"),
        (["--set", "lr=-1"], "--lr"),
    ]:
        assert study.main(["compare", *options, "--out", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert named in error and error.count("\n") == 1 and "Traceback" not in error


def test_a_run_whose_files_were_changed_is_made_again_or_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    config = resolve({"run": str(run), "steps": 0})
    for text in ("[" * 100_000, "[]", "{}", json.dumps(asdict(config))):
        (run / "config.json").write_text(text)
        for rows in ('{"step": null}\n', '{"step": "one"}\n', "[\n", '{"step": ' + "9" * 5000 + "}\n", ""):
            (run / "metrics.jsonl").write_text(rows)
            assert not study.is_finished(config)
    for row in ({"step": 1}, {"step": "x"}, {"step": None, "eval/accuracy": []}):
        (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        with pytest.raises(InputError, match="run/metrics.jsonl is not as train.py writes it"):
            read_curve(run)


def test_a_run_that_another_process_writes_is_named_in_this_script_s_words(tmp_path: Path) -> None:
    config = resolve({"run": str(tmp_path / "run"), "steps": 0})
    with sole_writer(tmp_path / "run"):
        with pytest.raises(InputError, match="another process.*--out") as error:
            study.run_job([config])
    assert "--run" not in str(error.value)


LIVING = """
import multiprocessing, os, signal, sys, time
sys.path.insert(0, {root!r})
import study

def work(folder):
    open(os.path.join(folder, str(os.getpid())), "w").close()
    time.sleep(60)

if __name__ == "__main__":
    import concurrent.futures
    pool = concurrent.futures.ProcessPoolExecutor(
        2, mp_context=multiprocessing.get_context("spawn"), initializer=study.start_worker
    )
    for _ in range(2):
        pool.submit(work, sys.argv[1])
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_workers_end_with_the_process_that_started_them(tmp_path: Path, name: str) -> None:
    script, folder = tmp_path / "living.py", tmp_path / "pids"
    script.write_text(LIVING.format(root=str(Path(study.__file__).parent)))
    folder.mkdir()
    parent = subprocess.Popen([sys.executable, str(script), str(folder)], stderr=subprocess.DEVNULL)
    wait_for(lambda: len(list(folder.iterdir())) == 2)
    parent.send_signal(getattr(signal, name))
    parent.wait()
    wait_for(lambda: not any(is_alive(int(path.name)) for path in folder.iterdir()))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 40) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)


def test_every_study_resolves_and_has_its_baseline_among_its_arms() -> None:
    for name, each in study.STUDIES.items():
        assert all(study.BASELINES[name] in arms for arms in each.values())
        job = study.plan(each, 0, {}, Path("out"))
        assert len(job) == sum(map(len, each.values())) == len({config.run for config in job})


def test_the_default_study_is_train_py_as_it_is_and_the_hard_one_its_preset() -> None:
    def differences(setting: str, name: str, preset: str) -> set[str]:
        ran = study.plan({setting: study.STUDIES[name][setting]}, 0, {}, Path("out"))[1]
        meant = resolve({"preset": preset})
        return {field for field, value in asdict(ran).items() if value != getattr(meant, field)}

    assert differences("train.py's default", "default", "toy") == {"run"}
    assert differences("hard", "compare", "hard") == {"run", "sampler", "log_samples"}
