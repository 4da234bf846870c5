"""TUTORIAL.md is true: its quotations are the package's code, its outputs are real, its links lead somewhere."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import xml.etree.ElementTree as ElementTree
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from nano_exgrpo.config import MAY_CHANGE, TrainConfig, resolve
from nano_exgrpo.errors import InputError
from nano_exgrpo.policy import Policy

TUTORIAL = ROOT / "TUTORIAL.md"
Row = dict[str, Any]


def load(name: str) -> Any:
    """docs/<name>.py as a module; docs is a folder of scripts and no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sync = load("sync")


@cache
def text() -> str:
    return TUTORIAL.read_text(encoding="utf-8")


def test_quotations_and_outputs_are_up_to_date() -> None:
    rendered, problems = sync.render(text())
    assert problems == [], "mend by hand, then: python docs/sync.py"
    found, wanted = text().splitlines(), rendered.splitlines()
    stale = [f"line {n}: {a!r} should read {b!r}" for n, (a, b) in enumerate(zip(found, wanted), start=1) if a != b]
    assert stale == [], "run: python docs/sync.py"
    assert len(found) == len(wanted), "run: python docs/sync.py"


def test_the_notebook_is_made_from_the_text() -> None:
    nbformat = pytest.importorskip("nbformat", reason="the notebook is made with nbformat: pip install nbformat")
    kept = nbformat.read(ROOT / "docs" / "tutorial.ipynb", as_version=4)
    nbformat.validate(kept)
    assert kept == sync.notebook(text()), "run: python docs/sync.py"
    code = [cell for cell in kept.cells if cell.cell_type == "code"]
    assert len(code) == text().count("```python run") + 1
    prose = "\n".join(cell.source for cell in kept.cells if cell.cell_type == "markdown")
    assert "# nano_exgrpo/loss.py, on_policy_term" in prose and "<!--" not in prose and "<details>" not in prose
    headings = {heading.replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", prose, re.MULTILINE)}
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        assert link[1:] in headings if link[0] == "#" else "://" in link or (ROOT / "docs" / link).is_file(), link


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom() -> None:
    """In a kernel of its own, opened in docs/ as a reader would; every output is the recorded one."""
    nbformat = pytest.importorskip("nbformat", reason="pip install nbformat")
    nbclient = pytest.importorskip(
        "nbclient", reason="the notebook is run with nbclient: pip install nbclient ipykernel"
    )
    pytest.importorskip("ipykernel", reason="pip install ipykernel")
    book = nbformat.read(ROOT / "docs" / "tutorial.ipynb", as_version=4)
    recorded = [printed(cell) for cell in book.cells]
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(ROOT / "docs")}}).execute()
    assert [printed(cell) for cell in book.cells] == recorded


def printed(cell: Any) -> str:
    outputs = cell.get("outputs", ())
    return "".join(output.text for output in outputs if output.get("name") == "stdout").rstrip("\n")


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_links_lead_somewhere() -> None:
    anchors = {slug(heading) for heading in re.findall(r"^#+ (.+)$", text(), re.MULTILINE)}
    links = re.findall(r"\]\(([^)\s]+)\)", text())
    assert len(links) > 20
    for link in links:
        if link.startswith("#"):
            assert link[1:] in anchors, link
        elif "://" not in link:
            assert (ROOT / link).is_file(), link


def test_every_section_has_an_exercise_with_an_answer_that_was_run() -> None:
    sections = re.findall(r"^## (\d+)\. .+?(?=^## )", text(), re.MULTILINE | re.DOTALL)
    exercises = re.findall(r"^\*\*Exercise (\d+)\.\*\*.+?</details>", text(), re.MULTILINE | re.DOTALL)
    assert sections == exercises == [str(n) for n in range(1, len(sections) + 1)] and len(sections) >= 10
    answers = re.findall(r"<details><summary>Answer</summary>\n\n(.+?)\n</details>", text(), re.DOTALL)
    assert len(answers) == len(exercises)
    assert all("```python run" in answer and "```text" in answer for answer in answers)


def test_every_flag_in_the_text_exists() -> None:
    names = {field.name for field in dataclasses.fields(TrainConfig)} | {
        "help",
        "dry_run",
        "card",
        "check",
        "nproc_per_node",
        "arms",
    }
    flags = set(
        re.findall(r"(?<![\w-])--([a-z][a-z-]+)", re.sub(r"<!--.*?-->|<!--=.*?-->", "", text(), flags=re.DOTALL))
    )
    assert len(flags) > 20
    for flag in flags:
        name = flag.replace("-", "_")
        assert name in names or name.removeprefix("no_") in names, flag


def test_every_metric_in_the_table_is_written() -> None:
    source = "".join(
        path.read_text(encoding="utf-8") for path in [ROOT / "train.py", *(ROOT / "nano_exgrpo").rglob("*.py")]
    )
    table = text()[text().index("| metric (in") :].split("\n\n")[0]
    metrics = re.findall(r"`([a-z_/]+)`", "\n".join(row.split("|")[1] for row in table.splitlines()[2:]))
    assert len(metrics) > 12
    for metric in metrics:
        assert f'"{metric}"' in source, metric


def test_figures_are_plain_svg() -> None:
    figures = re.findall(r"!\[.+?\]\((docs/\w+\.svg)\)", text())
    assert len(figures) == 4
    for figure in figures:
        tree = ElementTree.parse(ROOT / figure)
        tags = {element.tag.rsplit("}")[-1] for element in tree.iter()}
        assert "svg" in tags and not tags & {"script", "image", "foreignObject"}


def test_figures_are_what_the_script_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures = load("figures")
    figures.FIGURES = {"shaping": figures.FIGURES["shaping"], "life": figures.FIGURES["life"]}
    figures.draw_all(tmp_path)
    for name in figures.FIGURES:
        drawn, kept = (
            ElementTree.parse(tmp_path / f"{name}.svg"),
            ElementTree.parse(ROOT / "docs" / f"{name}.svg"),
        )
        assert [e.tag for e in drawn.iter()] == [e.tag for e in kept.iter()], f"{name}.svg: run python docs/figures.py"
    assert not list(tmp_path.glob(".*"))


# ---------------------------------------------------------------------------- the mechanism itself


QUOTE = '<!-- quote nano_exgrpo/loss.py shape from "return weight" -->\n'
CODE = "```python\n# nano_exgrpo/loss.py, shape\nreturn weight / (weight + beta)\n```\n"


def test_a_drifted_quotation_is_found_and_mended() -> None:
    assert sync.render(QUOTE + CODE) == (QUOTE + CODE, [])
    assert sync.render(QUOTE) == (QUOTE + CODE, [])
    drifted = QUOTE + CODE.replace("+ beta", "- beta")
    assert sync.render(drifted) == (QUOTE + CODE, [])


def test_moved_code_is_found_again_only_when_asked_to() -> None:
    moved = QUOTE.replace("loss.py", "replay.py") + CODE
    unchanged, problems = sync.render(moved)
    assert unchanged == moved and len(problems) == 1 and "no such code" in problems[0]
    assert sync.render(moved, relocate=True) == (QUOTE + CODE, [])
    renamed = QUOTE.replace(" shape ", " squash ") + CODE
    assert sync.render(renamed, relocate=True) == (QUOTE + CODE, [])
    gone = QUOTE.replace("return weight", "return height") + CODE
    assert len(sync.render(gone, relocate=True)[1]) == 1


def test_docstrings_are_left_out_and_ambiguous_ends_refused() -> None:
    whole, problems = sync.render("<!-- quote nano_exgrpo/loss.py shape -->\n")
    assert problems == [] and '"""' not in whole and "def shape" in whole and "\n\n" not in whole
    assert sync.render('<!-- quote nano_exgrpo/loss.py exgrpo_loss from "replayed[:, None]" -->\n')[1]


def test_outputs_checks_and_values() -> None:
    block = "```python run\nx = 6 * 7\nprint(x)\n```\n"
    assert sync.render(block)[0] == block + "\n```text\n42\n```\n"
    assert sync.render(block + "\n```text\n41\n```\n")[0] == block + "\n```text\n42\n```\n"
    assert sync.render("```python run\nx = 1\n```\n\n```text\nold\n```\n")[0] == "```python run\nx = 1\n```\n"
    assert sync.render(block + "<!-- check x == 42 -->")[1] == []
    assert "line 5: not true: x == 41" in sync.render(block + "<!-- check x == 41 -->")[1][0]
    assert sync.render(block + "<!--= x + 1 -->old<!--/-->")[0].endswith("<!--= x + 1 -->43<!--/-->")
    assert "ZeroDivisionError" in sync.render("```python run\n1 / 0\n```\n")[1][0]


# -------------------------------------------------------------------------------- the recorded run


def toy_sample(step: int, question: str, response: str, reward: float, entropy: float, replayed: bool = False) -> Row:
    prompt = "<|user|> " + question.replace("-", " + ") + " <|assistant|>"
    return {
        "step": step, "question": question, "prompt": prompt, "response": response, "reward": reward,
        "entropy": entropy, "replayed": replayed, "tokens": [], "token_entropies": [],
    }  # fmt: skip


def test_what_is_kept_of_a_run(tmp_path: Path) -> None:
    record = load("record").record
    samples = [
        toy_sample(1, "1-2", "\\boxed{ 3 }", 1, 0.9), toy_sample(1, "1-2", "\\boxed{ 4 }", 0, 0.8),
        toy_sample(2, "1-2", "\\boxed{ 3 }", 1, 0.7), toy_sample(2, "1-2", "3 \\boxed{ 3 }", 1, 0.2),
        toy_sample(2, "2-2", "\\boxed{ 4 }", 1, 0.6), toy_sample(2, "2-2", "\\boxed{ 5 }", 0, 0.5),
        toy_sample(3, "2-2", "\\boxed{ 4 }", 1, 0.6, True), toy_sample(3, "2-2", "4 \\boxed{ 4 }", 1, 0.1),
    ]  # fmt: skip
    rows = [
        {"step": 0, "eval/accuracy": 0.5},
        *({"step": n, "reward": 0.5, "replay/started": n > 1} for n in (1, 2, 3)),
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    (tmp_path / "config.json").write_text(json.dumps({"group_size": 2, "log_samples": -1}))
    kept = record(tmp_path)
    assert kept["started"] == 2 and len(kept["metrics"]) == 4
    assert kept["pair"]["lucky"]["entropy"] == 0.7 and kept["pair"]["reasoned"]["entropy"] == 0.2
    assert kept["early"]["wrong"] == {"count": 2, "mean": 0.65, "median": 0.65}
    assert kept["reasoned below"] == {"lucky": 1.0, "wrong": 1.0}
    assert kept["luck of a random choice"] == 1.0
    assert kept["replayed"] == {"reasoned": 0, "lucky": 1, "wrong": 0}
    assert kept["fresh since start"] == {"reasoned": 2, "lucky": 2, "wrong": 1}
    assert kept["life"]["question"] == "2-2" and [group["step"] for group in kept["life"]["groups"]] == [2, 3]
    assert kept["life"]["groups"][1]["replayed"] and kept["life"]["groups"][1]["rewards"] == [1, 1]
    (tmp_path / "config.json").write_text(json.dumps({"group_size": 2, "log_samples": 8}))
    with pytest.raises(InputError, match="--log-samples -1"):
        record(tmp_path)


def test_entropy_over_padding_is_another_choice(policy: Policy) -> None:
    """Three questions with two successes each on an untrained policy; the counts are what the function says."""
    samples = [
        {**toy_sample(1, question, response, 1, 0.5), "truncated": False}
        for question in ("1-2", "2-1", "1-1")
        for response in ("\\boxed{ 3 }", "3 \\boxed{ 3 }", "\\boxed{ 3 }")
    ]
    found = load("record").inverted_mask(
        policy, [*samples, {**samples[0], "question": "alone"}, {**samples[0], "reward": 0}]
    )
    assert found["questions"] == 3 and found["chance"] == 0.5 and 0 <= found["same choice"] <= 1


def test_the_recorded_run_is_one_of_the_default_toy() -> None:
    """Else the text shows curves that `python train.py` does not give: record it anew (see the text's last section)."""
    recorded = json.loads((ROOT / "docs" / "run.json").read_text(encoding="utf-8"))["settings"]
    default = dataclasses.asdict(resolve({"log_samples": -1}))
    watched = [name for name in default if name not in ("run", "resume", "overwrite", *MAY_CHANGE)] + ["steps"]
    changed = {name: (recorded.get(name, default[name]), default[name]) for name in watched}
    assert {name: pair for name, pair in changed.items() if pair[0] != pair[1]} == {}
