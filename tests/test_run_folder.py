"""Files of a run: claimed before work is done, only ever a run replaced, rewound on resume; and the plot."""

from __future__ import annotations

import json
import sys

import pytest

from nano_exgrpo.errors import InputError
from nano_exgrpo.infra.curves import plot_curves
from nano_exgrpo.infra.files import append_lines, read_json
from nano_exgrpo.infra.run_folder import claim_run, open_run, read_lines, reopen_run, rewind


def config_of(run) -> dict:
    return read_json(run / "config.json", "")


def test_a_folder_with_another_run_is_refused_and_left_alone(tmp_path):
    run = tmp_path / "run"
    claim_run(run, overwrite=False)
    open_run(run, {"algo": "grpo", "group_size": 2, "run": "run", "seed": 1})
    append_lines(run / "metrics.jsonl", [{"step": 1}])
    with pytest.raises(
        InputError, match=r"already holds a run; go on with --resume .*run, replace it with --overwrite"
    ) as error:
        claim_run(run, overwrite=False)
    assert "\n" not in str(error.value)
    claim_run(run, overwrite=True)  # not a byte is touched before the new run really begins
    assert config_of(run)["seed"] == 1 and read_lines(run / "metrics.jsonl") == [{"step": 1}]
    for mine in ("notes.txt", ".secret.tmp", ".notes.old"):
        (run / mine).write_text("mine")
    (run / "checkpoints" / "step-000001").mkdir(parents=True)
    for name in ("eval", "eval-step-000001"):  # of the replaced run: --show would take them for the new one's
        (run / name).mkdir()
        (run / name / "generations.jsonl").write_text("{}\n")
    for litter in (".model.12.tmp", "checkpoints/.step-000002.12.tmp", ".model.12.old"):  # of a kill in a save
        (run / litter).mkdir()
    open_run(run, {"algo": "grpo", "seed": 2})
    assert sorted(p.name for p in run.iterdir()) == [".notes.old", ".secret.tmp", "config.json", "notes.txt"]
    assert config_of(run)["seed"] == 2


@pytest.mark.parametrize("config", [None, "", "{", "[1]", '{"model_type": "qwen2"}', '{"algo": "gptq"}'])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_with_something_else_in_it_is_never_replaced(tmp_path, config, overwrite):
    """A model's folder has a config.json, too. Only one of train.py proves a run."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("mine")
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(InputError, match="holds something that is no run; name another with --run"):
        claim_run(tmp_path, overwrite=overwrite)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("name", ["file", "file/deeper", "n" * 300, "d/" * 2500])
def test_unwritable_folders_are_named(tmp_path, name):
    (tmp_path / "file").write_text("I am no folder")
    with pytest.raises(InputError, match=r"cannot be written .*; name another with --run") as error:
        claim_run(tmp_path / name, overwrite=False)
    assert (tmp_path / "file").read_text() == "I am no folder" and len(str(error.value)) < 400


def test_rewind_forgets_later_steps_and_a_torn_line(tmp_path):
    rows = [{"step": s, "value": 0.1 + s, "text": "ü \\boxed{"} for s in range(5)]
    for name in ("metrics.jsonl", "samples.jsonl"):
        append_lines(tmp_path / name, rows)
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 5, "val')  # the power went
    expected = "".join(json.dumps(row) + "\n" for row in rows[:4])
    assert read_lines(tmp_path / "metrics.jsonl") == rows
    rewind(tmp_path, 3)
    assert (tmp_path / "metrics.jsonl").read_text() == (tmp_path / "samples.jsonl").read_text() == expected
    append_lines(tmp_path / "metrics.jsonl", [{"step": 4}])
    assert read_lines(tmp_path / "metrics.jsonl")[-1] == {"step": 4}
    assert read_lines(tmp_path / "absent.jsonl") == []


@pytest.mark.parametrize("damage", ["\x00", "[1]", "null", '{"step": 1', "[" * 100_000, '{"step": ' + "9" * 5000 + "}"])
def test_a_damaged_row_is_named_and_nothing_is_dropped(tmp_path, damage):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n' + damage + '\n{"step": 2}\n')
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for use in (lambda: read_lines(tmp_path / "metrics.jsonl"), lambda: rewind(tmp_path, 1)):
        with pytest.raises(InputError, match="metrics.jsonl line 2 is not"):
            use()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("step", [None, "two", 1.5, [], True])
def test_a_row_whose_step_is_no_number_is_named(tmp_path, step):
    append_lines(tmp_path / "metrics.jsonl", [{"step": 0}, {"step": step}])
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for use in (lambda: rewind(tmp_path, 1), lambda: reopen_run(tmp_path, {}, 1)):
        with pytest.raises(InputError, match="has a damaged row, whose step is"):
            use()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_rows_survive_unusual_text(tmp_path):
    rows = [{"step": 1, "response": "line\u2028separator \x85 \x1c and \ud800 half a pair\r\n"}]
    append_lines(tmp_path / "samples.jsonl", rows)
    assert read_lines(tmp_path / "samples.jsonl") == rows


def test_curves_are_drawn_from_runs_with_gaps(tmp_path):
    pytest.importorskip("matplotlib")
    append_lines(
        tmp_path / "metrics.jsonl",
        [{"step": 0, "eval/accuracy": 0.1, "eval/low": 0.0, "eval/high": 0.2}]
        + [{"step": s, "reward": 0.5, "entropy": None if s == 2 else 1.0} for s in (1, 2, 3)],
    )
    assert plot_curves({"a": tmp_path, "b": tmp_path / "empty"}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert not list(tmp_path.glob(".*tmp"))


def test_without_matplotlib_it_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot_curves({"a": tmp_path}, tmp_path / "curves.png") is False
    assert "pip install matplotlib" in capsys.readouterr().err and not (tmp_path / "curves.png").exists()
