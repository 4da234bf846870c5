"""Files of a run: claimed before work is done, never torn, rewound on resume; and the plot."""

from __future__ import annotations

import json
import sys

import pytest

from nano_exgrpo.errors import InputError
from nano_exgrpo.infra import run_folder as runlog
from nano_exgrpo.infra.files import append_lines
from nano_exgrpo.infra.run_folder import claim_run, open_run, plot_curves, read_config, read_lines, rewind, write_text


def test_a_folder_with_another_run_is_refused_and_left_alone(tmp_path):
    run = tmp_path / "run"
    claim_run(run, overwrite=False)
    open_run(run, {"seed": 1})
    append_lines(run / "metrics.jsonl", [{"step": 1}])
    with pytest.raises(
        InputError, match=r"already holds a run; go on with --resume .*run, replace it with --overwrite"
    ) as error:
        claim_run(run, overwrite=False)
    assert "\n" not in str(error.value)
    claim_run(run, overwrite=True)  # not a byte is touched before the new run really begins
    assert read_config(run) == {"seed": 1} and read_lines(run / "metrics.jsonl") == [{"step": 1}]
    (run / "notes.txt").write_text("mine")
    (run / "checkpoints" / "step-000001").mkdir(parents=True)
    for name in (
        "eval",
        "eval-step-000001",
    ):  # of the replaced run: --show and --regrade would take them for the new one's
        (run / name).mkdir()
        (run / name / "generations.jsonl").write_text("{}\n")
    open_run(run, {"seed": 2})
    assert sorted(p.name for p in run.iterdir()) == ["config.json", "notes.txt"] and read_config(run) == {"seed": 2}


def test_unwritable_folders_are_named(tmp_path):
    (tmp_path / "file").write_text("I am no folder")
    for place in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(InputError, match=r"file.* cannot be written .*; name another with --run"):
            claim_run(place, overwrite=False)
    assert (tmp_path / "file").read_text() == "I am no folder"


@pytest.mark.parametrize("content", [None, "", "{", "[1]", "\x00"])
def test_no_config_is_no_run(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match="is not a run folder: it has no readable config.json"):
        read_config(tmp_path)


def test_text_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    write_text(tmp_path / "f", "old")
    with pytest.raises(TypeError):
        write_text(tmp_path / "f", None)
    assert (tmp_path / "f").read_text() == "old"

    def crash(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(runlog.os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        write_text(tmp_path / "f", "new")
    assert (tmp_path / "f").read_text() == "old"


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


def test_damaged_rows_end_what_is_read(tmp_path):
    for damage in (b"\xff\xfe", b"[1]", b"null", b'{"step": 1'):
        (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n' + damage + b'\n{"step": 2}\n')
        assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 0}]


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
