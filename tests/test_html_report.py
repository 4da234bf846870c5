"""The run report: what it shows is what was logged, and nothing in a response becomes markup."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from nano_exgrpo.evaluation import html_report as htmlreport

HOSTILE = "</span></div><script>alert(1)</script><img src=x onerror=alert(1)>\"'&amp;\x00\u202e\ud800"


class Reader(HTMLParser):
    """Collects tags, attributes and visible text; notes tags that are closed out of order."""

    VOID = {"meta", "link", "br", "input", "img", "line", "polyline", "polygon"}

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
        assert self.open.pop() == tag

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
    assert htmlreport.main([str(run)]) == 0
    page = (run / "report.html").read_text()
    reader = read(page)
    text = "".join(reader.text)
    assert "0.100 → 0.700 [0.600, 0.800] on 50 questions" in text
    assert "2 retired" in text and "1 of them were logged whole" in text  # "early" came before storing began
    cells = [data for data in reader.text if data in ("solved", "early", "half")]
    assert cells == ["solved"]
    assert "step 3 · half · 1 of 2 right" in text
    assert "generated in step 2, entropy then 0.250" in text
    assert "other successes" not in text  # the same tokens are no other success
    tokens = [attributes for tag, attributes in reader.tags if attributes.get("title") == "0.50 nats"]
    assert len(tokens) == 16
    assert sum(tag == "details" for tag, _ in reader.tags) == 5  # four groups and the settings
    assert sum(attributes.get("class") == "row replayed-row" for _, attributes in reader.tags) == 1
    assert not (run / ".report.html.tmp").exists()


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    row = sample(2, HOSTILE, 1, tokens=(HOSTILE, "}"))
    row["prompt"] = HOSTILE
    run = write_run(
        tmp_path / "run", [row, row, {**row, "tokens": None}], system_prompt=HOSTILE, algo=HOSTILE, model=HOSTILE
    )
    assert htmlreport.main([str(run)]) == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    reader = read(page)
    assert {tag for tag, _ in reader.tags} <= {
        "html", "head", "meta", "link", "title", "style", "body", "h1", "h2", "p", "b", "br", "i", "div", "span", "small", "figure",
        "figcaption", "svg", "line", "text", "polyline", "polygon", "table", "tr", "th", "td", "details", "summary", "input", "label",
    }  # fmt: skip
    for _, attributes in reader.tags:
        assert not any(name.startswith("on") for name in attributes)
        assert (attributes.get("href") or "data:,") == "data:,"
        assert "src" not in attributes
    assert "<script" not in page and "\x00" not in page and "\u202e" not in page
    assert "".join(reader.text).count("<script>alert(1)</script>") >= 8
    assert "default-src 'none'" in page


def test_long_responses_lose_their_middle() -> None:
    row = sample(1, "q", 1, tokens=tuple(str(n) for n in range(1000)))
    spans = htmlreport.token_spans(row, 1.0)
    assert spans.count('class="token"') == htmlreport.LONGEST
    assert ">0<" in spans and ">999<" in spans and ">500<" not in spans and "400 tokens left out" in spans


def test_colour_follows_entropy() -> None:
    row = {**sample(1, "q", 1, tokens=("a", "b", "c")), "token_entropies": [0.0, 1.0, 9.0]}
    spans = htmlreport.token_spans(row, 2.0)
    assert [part[:4] for part in spans.split("--a:")[1:]] == ["0.00", "0.38", "0.75"]


def test_groups_are_picked_over_the_whole_run() -> None:
    groups = {(step, "q"): [sample(step, "q", 1, replayed=step % 2 == 0)] for step in range(100)}
    picked = htmlreport.pick_groups(groups, 10)
    assert len(picked) == 10 and picked == sorted(picked)
    assert sum(step % 2 == 0 for step, _ in picked) == 5
    assert picked[0][0] <= 1 and picked[-1][0] >= 98
    assert htmlreport.pick_groups(groups, 0) == []
    assert len(htmlreport.pick_groups(groups, 1000)) == 100


def test_curves_of_several_runs_and_stacked_buckets(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "one", []), write_run(tmp_path / "two", [])
    page = htmlreport.build_page([one, two])
    lines = [attributes for tag, attributes in read(page).tags if tag == "polyline"]
    assert len(lines) == 4  # accuracy and reward of both; of the entropy there is one finite value only
    metrics = htmlreport.read_lines(one / "metrics.jsonl")
    areas = [a for tag, a in read(htmlreport.bucket_panel(metrics, 2)).tags if tag == "polygon"]
    assert len(areas) == 2
    assert areas[1]["points"].split()[3] == areas[0]["points"].split()[4]  # "retired" stands on the bucket's upper edge


@pytest.mark.parametrize(
    "values, expected", [([0.0, 0.0], (0.0, 1.05)), ([2.0, 2.0], (1.78, 2.22)), ([1.0, 1.2], (0.99, 1.21))]
)
def test_axis_ranges_are_never_empty(values: list[float], expected: tuple[float, float]) -> None:
    assert htmlreport.spread(values) == pytest.approx(expected)


def test_bad_folders_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert htmlreport.main([str(tmp_path / "nothing")]) == 2
    run = write_run(tmp_path / "run", [])
    (run / "metrics.jsonl").unlink()
    assert htmlreport.main([str(run)]) == 2
    other = write_run(tmp_path / "other", [])
    assert htmlreport.main([str(other), "--out", str(tmp_path / "no" / "folder.html")]) == 2
    with (other / "metrics.jsonl").open("a") as file:
        file.write('{"reward": 0.5}\n')
    assert htmlreport.main([str(other)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 4
    assert "is not a run folder" in errors[0] and "train first" in errors[1] and "--out" in errors[2]
    assert "is not as train.py writes it (KeyError('step'))" in errors[3]
