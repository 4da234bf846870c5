"""The documents: short enough to be read, and true where a machine can tell."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT

import nano_exgrpo

DOCUMENTS = [ROOT / name for name in ("README.md", "RESULTS.md", "CONTRIBUTING.md")] + sorted(ROOT.glob("docs/*.md"))
LAST = 130  # lines of the README: what somebody reads before deciding whether to go on
WIDEST = 100  # columns of it


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_the_readme_is_one_sitting() -> None:
    lines = text(ROOT / "README.md").splitlines()
    assert len(lines) <= LAST
    assert [line for line in lines if len(line) > WIDEST] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", text(path))
    missing = [link for link in links if "://" not in link and not (path.parent / link.split("#")[0]).exists()]
    assert missing == []


def test_files_named_in_the_documents_exist() -> None:
    """Where a name in code style has a folder: tests/test_x.py, docs/y.py, bench/z.py."""
    for path in DOCUMENTS:
        named = re.findall(r"(?<![\w/.-])((?:tests|docs|bench|nano_exgrpo)/[\w/]+\.\w+)", text(path))
        assert [file for file in named if not (ROOT / file).exists()] == [], name(path)


@cache
def flags_of(command: str) -> set[str]:
    """The flags of a program, from its --help. torchrun's own are few: those that the documents use."""
    if command == "torchrun":
        return {"--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--shutdown-timeout"}
    if command == "pip":
        return {"--no-deps", "--quiet"}
    script = command.endswith(".py")
    kept = {**os.environ}, [*sys.path], [*sys.argv]
    sys.argv = [command, "--help"]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
            if script:
                runpy.run_path(str(ROOT / command), run_name="__main__")
            else:
                runpy.run_module(command, run_name="__main__")
    finally:
        os.environ.clear()
        os.environ.update(kept[0])
        sys.path[:], sys.argv = kept[1], kept[2]
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", out.getvalue()))


PROGRAMS = re.compile(
    r"(?:python (?:-m )?)?((?:bench|docs)/\w+\.py|(?:train|eval|study)\.py|nano_exgrpo\.[\w.]+|torchrun|pip(?= install))"
)


def commands(path: Path) -> list[tuple[str, str]]:
    """(program, its arguments) of every command in a code block or in code style, with torchrun's script apart."""
    blocks = re.findall(r"```sh\n(.*?)```", text(path), re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += [
        span.replace("\n", " ")
        for span in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text(path), flags=re.DOTALL))
    ]
    found = []
    for line in lines:
        line = line.split("  #")[0]
        places = [*PROGRAMS.finditer(line)]
        for place, after in zip(places, [*places[1:], None]):
            found.append((place[1], line[place.end() : after.start() if after else None]))
    return found


def test_every_flag_of_a_quoted_command_exists() -> None:
    seen = 0
    for path in DOCUMENTS:
        for program, arguments in commands(path):
            for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", arguments):
                assert flag in flags_of(program), f"{name(path)}: {program} has no {flag}"
                seen += 1
    assert seen > 50


def test_every_flag_named_by_itself_exists() -> None:
    known = set().union(*map(flags_of, ("train.py", "eval.py", "study.py", "torchrun")))
    for path in DOCUMENTS:
        for flag in re.findall(r"`(--[a-z][a-z0-9-]*)(?: [^`]*)?`", text(path)):
            if flag not in known:
                assert path.name == "performance.md" and flag in flags_of("bench/step.py"), f"{name(path)}: {flag}"


def test_there_is_one_reading_order() -> None:
    """The README lists the files as the package's own map does, and the map names each file once."""
    order = re.findall(r"^    (\w+)  ", nano_exgrpo.__doc__.split("Then read")[0], re.MULTILINE)
    section = text(ROOT / "README.md").split("## What to read")[1].split("Then [train.py]")[0]
    assert [word for word in re.findall(r"`(\w+)`", section)] == order
    assert sorted(order) == sorted(p.stem for p in (ROOT / "nano_exgrpo").glob("*.py") if not p.stem.startswith("__"))


@pytest.mark.parametrize("part", ["checker", "infra", "evaluation"])
def test_each_folder_has_a_map_of_its_files(part: str) -> None:
    folder = ROOT / "nano_exgrpo" / part
    files = sorted(p.stem for p in folder.glob("*.py") if not p.stem.startswith("__"))
    named = re.findall(r"^ *(\w+)  +\S", text(folder / "__init__.py").split('"""')[1], re.MULTILINE)
    assert sorted(set(named) & set(files)) == files


def test_tables_that_are_read_first_have_four_columns_at_most() -> None:
    """The full tables of RESULTS.md are folded away."""
    read_first = re.sub(r"<details>.*?</details>", "", text(ROOT / "RESULTS.md"), flags=re.DOTALL)
    rows = re.findall(r"^ *\|(.+)\|$", read_first, re.MULTILINE)
    assert len(rows) > 50 and max(row.count("|") + 1 for row in rows) <= 4


def test_numbers_of_the_readme_are_those_of_the_results() -> None:
    section = text(ROOT / "README.md").split("## Does it help?")[1].split("##")[0]
    numbers = re.findall(r"0\.\d{3}", section)
    assert len(numbers) >= 7
    assert [number for number in numbers if number not in text(ROOT / "RESULTS.md")] == []
