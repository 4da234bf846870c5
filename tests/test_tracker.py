"""Metrics in a tracker: the same names as in metrics.jsonl."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from conftest import metrics, tiny_config

import train
from nano_exgrpo.errors import InputError
from nano_exgrpo.infra.tracker import numbers, open_tracker


def test_tensorboard_files_hold_what_metrics_jsonl_holds(tiny, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = tiny_config(tmp_path, steps=2, tracker="tensorboard")
    train.train(config)
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    found.Reload()
    rows = metrics(config)
    for name in ("reward", "eval/accuracy", "buffer/questions"):
        expected = [(row["step"], row[name]) for row in rows if name in row]
        assert [(e.step, pytest.approx(e.value, abs=1e-6)) for e in found.Scalars(name)] == expected


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_other_trackers_get_every_row(name, tiny, tmp_path, monkeypatch):
    started, logged = [], []
    stub = SimpleNamespace(
        init=lambda **settings: started.append(settings), log=lambda row, step: logged.append((step, row))
    )
    monkeypatch.setitem(sys.modules, name, stub)
    config = tiny_config(tmp_path, steps=2, tracker=name)
    train.train(config)
    assert started[0]["project"] == "nano-exgrpo" and started[0].get("mode") == ("offline" if name == "wandb" else None)
    assert logged == [(row.pop("step"), numbers(row)) for row in metrics(config)]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_tracker_is_one_sentence(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=f"pip install {name}"):
        open_tracker(tiny_config(tmp_path, tracker=name))


def test_without_a_terminal_there_is_a_line_every_ten_steps(tiny, tmp_path, capsys):
    train.train(tiny_config(tmp_path, steps=12))
    said = capsys.readouterr()
    assert "step 10 of 12: reward" in said.out and "step 12 of 12: reward" in said.out
    assert said.out.count("step ") == 2 and "\r" not in said.out + said.err
    assert "evaluating on 5 held-out questions" in said.out
