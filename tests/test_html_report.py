"""The run report: what it shows is what was logged, and nothing in a response becomes markup."""

from __future__ import annotations

import itertools
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from nano_exgrpo.evaluation import html_report
from nano_exgrpo.infra.files import read_rows

HOSTILE = "</span></div><script>alert(1)</script><img src=x onerror=alert(1)>\"'&amp;\x00\u202e\ud800"


class Reader(HTMLParser):
    """Collects tags, attributes and visible text; notes tags that are closed out of order."""

    VOID = {"meta", "link", "br", "input", "img", "td", "th"}

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert tag in self.VOID or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def sample(
    step: int, question: str, reward: float, *, replayed: bool = False, tokens: tuple[str, ...] = ("5", "}")
) -> dict[str, Any]:
    return {
        "step": step, "question": question, "prompt": f"what is {question}", "response": " ".join(tokens), "reward": reward,
        "entropy": 0.25, "replayed": replayed, "truncated": False, "tokens": list(tokens), "token_entropies": [0.5] * len(tokens),
    }  # fmt: skip


def write_run(folder: Path, samples: list[dict[str, Any]], **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"algo": "exgrpo", "model": "toy", "group_size": 2, "retire": True, **config})
    )
    rows = [
        {"step": 0, "eval/accuracy": 0.1, "eval/low": 0.05, "eval/high": 0.2, "eval/questions": 50},
        {"step": 1, "reward": 0.4, "entropy": None, "replay/started": False, "buffer/buckets": {}, "buffer/retired": 0},
        {"step": 2, "reward": 0.5, "entropy": float("nan"), "replay/started": True, "buffer/buckets": {"1": 3}, "buffer/retired": 1},
        {"step": 3, "reward": 0.6, "entropy": 0.2, "replay/started": True, "buffer/buckets": {"1": 4}, "buffer/retired": 2,
         "eval/accuracy": 0.7, "eval/low": 0.6, "eval/high": 0.8, "eval/questions": 50},
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    return folder


def test_page_shows_what_was_logged(tmp_path: Path) -> None:
    samples = [
        sample(1, "early", 1), sample(1, "early", 1, tokens=("6", "}")),
        sample(2, "solved", 1), sample(2, "solved", 1),
        sample(2, "half", 1, tokens=("7", "}")), sample(2, "half", 0, tokens=("8", "}")),
        sample(3, "half", 1, replayed=True, tokens=("7", "}")), sample(3, "half", 0, tokens=("9", "}")),
    ]  # fmt: skip
    run = write_run(tmp_path / "run", samples)
    assert html_report.main([str(run)]) == 0
    page = (run / "report.html").read_text()
    reader = read(page)
    text = "".join(reader.text)
    assert "exgrpo" in text and "0.100 → 0.700 [0.600, 0.800]" in text
    assert "step 3 · half · 1 of 2 right" in text
    assert "generated in step 2, entropy then 0.250" in text
    tokens = [attributes for tag, attributes in reader.tags if attributes.get("title") == "0.50 nats"]
    assert len(tokens) == 16
    assert "held-out accuracy" in text and "retired" in text  # titles of the picture are text
    assert sum(tag == "details" for tag, _ in reader.tags) == 5  # four groups and the settings
    assert sum(attributes.get("class") == "replayed" for _, attributes in reader.tags) == 2  # the row and its group
    assert not list(run.glob(".*"))


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    row = sample(2, HOSTILE, 1, tokens=(HOSTILE, "}"))
    row["prompt"] = HOSTILE
    run = write_run(
        tmp_path / "run", [row, row, {**row, "tokens": None}], system_prompt=HOSTILE, algo=HOSTILE, model=HOSTILE
    )
    assert html_report.main([str(run)]) == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    reader = read(page)
    assert {tag for tag, _ in reader.tags} <= {
        "html", "head", "meta", "link", "title", "style", "body", "h1", "h2", "p", "b", "br", "i", "div", "span", "small",
        "svg", "g", "path", "defs", "clippath", "rect", "use", "text", "table", "tr", "th", "td", "details", "summary",
        "input", "label",
    }  # fmt: skip
    for _, attributes in reader.tags:
        assert not any(name.startswith("on") for name in attributes)
        assert (attributes.get("href") or "data:,") == "data:,"
        assert "src" not in attributes and (attributes.get("xlink:href") or "#").startswith("#")
    assert "<script" not in page and "\x00" not in page and "\u202e" not in page
    assert "".join(reader.text).count("<script>alert(1)</script>") >= 8
    assert "default-src 'none'" in page


def test_long_responses_lose_their_middle() -> None:
    row = sample(1, "q", 1, tokens=tuple(str(n) for n in range(1000)))
    spans = html_report.token_spans(row, 1.0)
    assert spans.count('class="token"') == html_report.LONGEST
    assert ">0<" in spans and ">999<" in spans and ">500<" not in spans and "400 tokens left out" in spans


def test_colour_follows_entropy() -> None:
    row = {**sample(1, "q", 1, tokens=("a", "b", "c")), "token_entropies": [0.0, 1.0, 9.0]}
    spans = html_report.token_spans(row, 2.0)
    assert [part[:4] for part in spans.split("--a:")[1:]] == ["0.00", "0.38", "0.75"]


def test_groups_are_picked_over_the_whole_run() -> None:
    samples = [sample(step, "q", 1, replayed=step % 3 == 0) for step in range(100)]
    page = html_report.sample_section(samples)
    steps = [int(part.split()[0]) for part in page.split("<summary>step ")[1:]]
    assert len(steps) <= html_report.GROUPS_SHOWN and steps == sorted(steps)
    assert steps[0] == 0 and steps[-1] >= 95 and sum(step % 3 == 0 for step in steps) >= 10


def test_curves_of_two_runs_stand_in_one_picture(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "one", []), write_run(tmp_path / "two $\\frac$ <b>", [], algo="grpo")
    page = html_report.build_page([one, two])
    assert page.count("<svg") == 1 and page == html_report.build_page([one, two])  # the same page every time
    for index, cells in enumerate((("one", "exgrpo"), ("two $\\frac$ <b>", "grpo"))):
        colour = html_report.COLOURS[index]
        assert f"background:{colour}" in page and page.count(f"stroke: {colour}") >= 2  # accuracy and reward
        text = "".join(read(page).text)
        assert all(cell in text for cell in cells)


VALUES = ["<meta http-equiv=refresh content='0;url=//x'>", [1], 10**400]


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_whatever_a_row_holds_it_is_a_page_or_one_sentence(tmp_path, name, monkeypatch, capsys) -> None:
    """Every field in turn; the picture, which takes a second, only where the metrics are changed."""
    run = write_run(tmp_path / "run", [sample(2, "a", 1), sample(3, "a", 1, replayed=True)])
    if name == "samples.jsonl":
        monkeypatch.setattr(html_report, "draw_curves", lambda runs: "")
    else:
        monkeypatch.setattr(html_report, "PANELS", html_report.PANELS[:3])
    rows = read_rows(run / name)
    for key, value in itertools.product(rows[-1], VALUES):
        changed = [*rows[:-1], {**rows[-1], key: value}]
        (run / name).write_text("".join(json.dumps(row) + "\n" for row in changed))
        code, page = html_report.main([str(run)]), run / "report.html"
        error = capsys.readouterr().err
        assert code == 0 or code == 2 and error.count("\n") == 1, (key, value)
        assert not page.exists() or "<meta http-equiv=refresh" not in page.read_text(encoding="utf-8")


def test_bad_folders_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert html_report.main([str(tmp_path / "nothing")]) == 2
    run = write_run(tmp_path / "run", [])
    (run / "metrics.jsonl").unlink()
    assert html_report.main([str(run)]) == 2
    other = write_run(tmp_path / "other", [])
    assert html_report.main([str(other), "--out", str(other / "config.json" / "x.html")]) == 2
    whole = (other / "metrics.jsonl").read_text()
    for line in ('{"step": "one"}', "{not json", "[" * 100_000, '{"step": ' + "9" * 5000 + "}"):
        (other / "metrics.jsonl").write_text(whole.replace("\n", f"\n{line}\n", 1))
        assert html_report.main([str(other)]) == 2
    (other / "config.json").write_text("[" * 100_000)
    assert html_report.main([str(other)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 8 and "is not a run folder" in errors[0] and "metrics.jsonl does not exist" in errors[1]
    assert "cannot be written" in errors[2] and "is not as train.py writes it" in errors[3]
    assert all("metrics.jsonl line 2 is not valid JSON" in error for error in errors[4:7])
    assert "config.json is not valid JSON" in errors[7]
