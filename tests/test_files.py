"""Files that are written whole or not at all, and JSON that says where it cannot be read."""

from __future__ import annotations

import errno
import os
import pickle
import signal

import pytest

from nano_exgrpo.errors import InputError
from nano_exgrpo.infra import files
from nano_exgrpo.infra.files import Unwritable, append_lines, read_json, read_jsonl, write_text


def test_a_file_is_written_whole_or_not_at_all_and_leaves_nothing_behind(tmp_path, monkeypatch):
    write_text(tmp_path / "f", "old")
    for name, error in (("fsync", OSError(errno.ENOSPC, "full")), ("replace", KeyboardInterrupt())):
        with monkeypatch.context() as patch:
            patch.setattr(files.os, name, lambda *args, error=error: (_ for _ in ()).throw(error))
            with pytest.raises(type(error)) as caught:
                write_text(tmp_path / "f", "new")
        assert name == "replace" or str(caught.value) == f"{tmp_path / 'f'} cannot be written (full)"
        assert (tmp_path / "f").read_text() == "old" and os.listdir(tmp_path) == ["f"]


def test_what_is_written_is_flushed_before_it_is_renamed(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(files.os, name, lambda *a, name=name, real=real: (calls.append(name), real(*a)))
    write_text(tmp_path / "f", "text")
    assert calls == ["fsync", "replace", "fsync"]  # the file, its name, the folder


def test_rows_are_added_all_or_none(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    append_lines(path, [{"step": 1, "loss": float("nan"), "more": {"a": [float("-inf"), 0.5]}, "text": "\ud800\u2028"}])
    assert [row for _, row in read_jsonl(path)] == [
        {"step": 1, "loss": None, "more": {"a": [None, 0.5]}, "text": "\ud800\u2028"}
    ]
    resource, before = pytest.importorskip("resource"), path.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limit[1]))
        with pytest.raises(Unwritable, match="rows.jsonl cannot be written .File too large"):
            append_lines(path, [{"step": 2, "text": "x" * 10_000}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before


DAMAGE = ["{", "[1]", "null", "[" * 100_000, '{"a": ' + "9" * 5000 + "}", "NaN"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_line_is_named(tmp_path, damage):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n' + damage + '\n{"a": 2}\n')
    with pytest.raises(InputError, match=r"rows.jsonl line 3 is not (valid JSON|a JSON object)") as error:
        list(read_jsonl(path, torn_end=True))  # only the last line may be torn
    assert "\n" not in str(error.value)


def test_a_torn_last_line_is_left_out_where_it_may_be(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2')
    assert [row for _, row in read_jsonl(path, torn_end=True)] == [{"a": 1}]
    with pytest.raises(InputError, match="line 2"):
        list(read_jsonl(path))


@pytest.mark.parametrize("name", ["file/deeper/f", "n" * 300, "/proc/f", "a\0b"])
def test_what_cannot_be_written_is_one_sentence(tmp_path, name):
    (tmp_path / "file").touch()
    for write in (lambda path: write_text(path, "x"), lambda path: append_lines(path, [{}])):
        with pytest.raises(Unwritable, match="cannot be written") as error:
            write(tmp_path / name)
        again = pickle.loads(pickle.dumps(error.value))  # as from a worker of study.py
        assert str(again) == str(error.value) and again.strerror == error.value.strerror
        assert isinstance(error.value, InputError) and isinstance(error.value, OSError)  # known to both handlers
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_object_that_is_none_is_named(tmp_path, damage):
    (tmp_path / "config.json").write_text(damage)
    with pytest.raises(InputError, match="run x: .*config.json is not (valid JSON|a JSON object)"):
        read_json(tmp_path / "config.json", "run x")


def test_what_is_no_text_file_is_named(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    os.mkfifo(tmp_path / "pipe")
    for name, words in (
        ("binary", "cannot be read as UTF-8"), ("pipe", "is not a file"), ("absent", "does not exist"),
        ("n" * 300, "does not exist"), ("a\0b", "does not exist"), (".", "is not a file"),
    ):  # fmt: skip
        for read in (lambda path: read_json(path, "run x"), lambda path: list(read_jsonl(path))):
            with pytest.raises(InputError, match=words):
                read(tmp_path / name)
    (tmp_path / "bom").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n')
    assert read_json(tmp_path / "bom", "") == {"a": 1}
