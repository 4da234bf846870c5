#!/usr/bin/env python
"""Keeps TUTORIAL.md true: code that it quotes is the package's own, outputs that it shows are real ones.

    python docs/sync.py                 bring TUTORIAL.md up to date (or the files named as arguments)
    python docs/sync.py --check         only say what is out of date; exit code 1 if anything is

The text is plain Markdown with four kinds of marks:

    <!-- quote FILE FUNCTION from "A" to "B" -->   the next code block is cut out of FUNCTION in FILE, from the line
    that
                                                   contains A to the next one that contains B; without `to` one line,
                                                   without both all of it but its docstring
    ```python run                                  the block is run, all of them in order in one namespace, and the
                                                   ```text block after it is what it printed
    <!-- check EXPRESSION -->                      must be true there: holds the numbers of the prose
    <!--= EXPRESSION -->…<!--/-->                  its value, in the prose

docs/tutorial.ipynb is made from the same text: a block that is run becomes a cell with its output, all else, quotations
included, is text. It needs nbformat; where that is not installed, the notebook is left as it is and a sentence says so.

A function that has moved to another file, or code that has moved to another function, is found again if its text is
still there once; what cannot be found is an error. tests/test_tutorial.py fails when anything is out of date.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "docs" / "tutorial.ipynb"
SOURCES = ("train.py", "eval.py", "study.py", "nano_exgrpo/**/*.py")

MARK = re.compile(
    r"(?P<quote><!-- quote (?P<file>\S+) (?P<function>\S+)"
    r"(?: from \"(?P<first>.+?)\")?(?: to \"(?P<last>.+?)\")? -->\n)"
    r"(?P<quoted>```python\n.*?\n```\n)?"
    r"|(?P<run>```python run\n(?P<code>.*?)\n```\n)(?P<output>\n```text\n.*?\n?```\n)?"
    r"|<!-- check (?P<check>.+?) -->"
    r"|<!--=(?P<value>.+?)-->(?P<shown>.*?)<!--/-->",
    re.DOTALL,
)


class Stale(Exception):
    """Something in the text is not true any more, and no rule says how to mend it."""


# ---------------------------------------------------------------------------------------------- quotations


@cache
def functions_of(source: str) -> list[tuple[str, list[str]]]:
    """(qualified name, source lines without the docstring) of the module ("-"), its classes and functions."""
    lines = source.splitlines()

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, list[str]]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                first = child.body[0]
                hidden = range(0)
                if (
                    isinstance(first, ast.Expr)
                    and isinstance(first.value, ast.Constant)
                    and isinstance(first.value.value, str)
                ):
                    after = first.end_lineno  # line number of the docstring's last line; a blank one after it goes too
                    hidden = range(first.lineno, after + 1 + (after < len(lines) and not lines[after].strip()))
                yield (
                    prefix + child.name,
                    [lines[n - 1] for n in range(child.lineno, child.end_lineno + 1) if n not in hidden],
                )
                yield from walk(child, f"{prefix}{child.name}.")

    return [("-", lines), *walk(ast.parse(source), "")]


def cut(lines: list[str], first: str | None, last: str | None) -> list[str] | None:
    """The lines from the only one that contains `first` to the next that contains `last`; None if there are none."""
    if first is None:
        return lines
    starts = [i for i, line in enumerate(lines) if first in line]
    if len(starts) != 1:
        return None
    start = starts[0]
    if last is None:
        return lines[start : start + 1]
    end = next((i for i in range(start, len(lines)) if last in lines[i]), None)
    return None if end is None else lines[start : end + 1]


def find(
    file: str, function: str, first: str | None, last: str | None, *, relocate: bool
) -> tuple[str, str, list[str]]:
    """(file, function, quoted lines). With `relocate`, also under another name or in another file. Raises Stale."""
    paths = [path for pattern in SOURCES for path in sorted(ROOT.glob(pattern))] if relocate else [ROOT / file]
    places = [
        (path.relative_to(ROOT).as_posix(), name, found)
        for path in paths
        if path.is_file()
        for name, lines in functions_of(path.read_text(encoding="utf-8"))
        if (found := cut(lines, first, last)) is not None and (first is not None or name == function)
    ]
    exact = [place for place in places if place[:2] == (file, function)]
    if exact:
        return exact[0]
    if relocate:
        same_name = [place for place in places if place[1].rsplit(".")[-1] == function.rsplit(".")[-1]]
        inner = [
            place for place in places if place[1] != "-" and not any(p[1].startswith(place[1] + ".") for p in places)
        ]
        for candidates in (same_name, inner):
            if len(candidates) == 1:
                return candidates[0]
    what = f"{function} in {file}" + (f' from "{first}"' if first else "") + (f' to "{last}"' if last else "")
    raise Stale(f"no such code (or not exactly once): {what}")


def quote(match: re.Match[str], *, relocate: bool) -> str:
    file, function, lines = find(*match.group("file", "function", "first", "last"), relocate=relocate)
    ends = "".join(f' {word} "{match[group]}"' for word, group in (("from", "first"), ("to", "last")) if match[group])
    code = textwrap.dedent("\n".join(lines)).strip("\n")
    place = file if function == "-" else f"{file}, {function}"
    return f"<!-- quote {file} {function}{ends} -->\n```python\n# {place}\n{code}\n```\n"


# ------------------------------------------------------------------------------------------------- the text


def render(text: str, *, relocate: bool = False) -> tuple[str, list[str]]:
    """(the text brought up to date, what could not be). Runs the text's code blocks, in the project's folder."""
    namespace: dict[str, Any] = {"__name__": "tutorial"}
    problems: list[str] = []

    def replace(match: re.Match[str]) -> str:
        line = text.count("\n", 0, match.start()) + 1
        try:
            if match["quote"]:
                return quote(match, relocate=relocate)
            if match["run"]:
                printed = io.StringIO()
                # Padded with blank lines, so that a traceback names the line of the text.
                code = compile("\n" * line + match["code"], "TUTORIAL.md", "exec")
                with contextlib.redirect_stdout(printed):
                    exec(code, namespace)  # noqa: S102 - the project's own text, as its tests are
                output = printed.getvalue().rstrip("\n")
                return match["run"] + (f"\n```text\n{output}\n```\n" if output else "")
            if match["check"]:
                if not eval(match["check"], namespace):  # noqa: S307
                    raise Stale(f"not true: {match['check']}")
                return match[0]
            return f"<!--={match['value']}-->{eval(match['value'].strip(), namespace)}<!--/-->"  # noqa: S307
        except Stale as error:
            problems.append(f"line {line}: {error}")
        except Exception:
            problems.append(f"line {line}: {traceback.format_exc(limit=-1)}")
        return match[0]

    before = Path.cwd()
    os.chdir(ROOT)
    try:
        return MARK.sub(replace, text), problems
    finally:
        os.chdir(before)


# --------------------------------------------------------------------------------------------- the notebook

RUN = re.compile(r"```python run\n(?P<code>.*?)\n```\n(?:\n```text\n(?P<output>.*?)\n?```\n)?", re.DOTALL)
START = """# Run from the project's folder, wherever the notebook was opened.
import os
import sys
from pathlib import Path

os.chdir(next(folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / "train.py").is_file()))
sys.path.insert(0, os.getcwd())"""


def prose(text: str) -> str:
    """Markdown of a cell: no marks, no folds (an answer spans several cells), links as seen from docs/."""
    text = re.sub(r"(?m)^<!--.*?-->\n|<!--.*?-->", "", text)
    text = text.replace("<details><summary>Answer</summary>", "**Answer.**").replace("</details>", "")

    def link(match: re.Match[str]) -> str:
        target = match[1]
        if target.startswith("#") or "://" in target:
            return f"]({target})"
        return f"]({target.removeprefix('docs/')})" if target.startswith("docs/") else f"](../{target})"

    return re.sub(r"\n{3,}", "\n\n", re.sub(r"\]\(([^)\s]+)\)", link, text)).strip("\n")


def anchors(text: str) -> dict[str, str]:
    """GitHub's anchor of each heading (lower case, no punctuation) -> Jupyter's (its words)."""
    headings = [heading.strip() for heading in re.findall(r"^#+ (.+)$", RUN.sub("", text), re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-"): h.replace(" ", "-") for h in headings}


def notebook(text: str) -> Any:
    """The text as a notebook (nbformat 4). Raises ImportError without nbformat."""
    from nbformat import v4

    for github, jupyter in anchors(text).items():
        text = text.replace(f"](#{github})", f"](#{jupyter})")
    cells = [v4.new_code_cell(START)]
    end = 0
    for match in [*RUN.finditer(text), None]:
        between = prose(text[end : match.start() if match else None])
        if between:
            cells.append(v4.new_markdown_cell(between))
        if match:
            outputs = [v4.new_output("stream", text=match["output"] + "\n")] if match["output"] else []
            cells.append(v4.new_code_cell(match["code"], outputs=outputs))
            end = match.end()
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return v4.new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def sync_notebook(text: str, *, check: bool) -> bool:
    """Bring the notebook up to date with the text; whether it is, or cannot be told."""
    try:
        import nbformat
    except ImportError:
        print(f"{NOTEBOOK.name}: left as it is; pip install nbformat to make it")
        return True
    made = nbformat.writes(notebook(text)) + "\n"
    fresh = NOTEBOOK.is_file() and NOTEBOOK.read_text(encoding="utf-8") == made
    if not fresh and not check:
        write_whole(NOTEBOOK, made)
    print(f"{NOTEBOOK.name}: {'up to date' if fresh else 'out of date' if check else 'updated'}")
    return fresh or not check


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "docs/sync.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, default=[ROOT / "TUTORIAL.md"], help="default: TUTORIAL.md")
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(argv)
    sys.path.insert(0, str(ROOT))
    code = 0
    for path in options.files:
        old = path.read_text(encoding="utf-8")
        new, problems = render(old, relocate=not options.check)
        for problem in problems:
            print(f"{path.name} {problem}")
        state = "up to date" if new == old else "out of date" if options.check else "updated"
        if new != old and not options.check:
            write_whole(path, new)
        print(f"{path.name}: {state}" + (f", {len(problems)} problems to mend by hand" if problems else ""))
        code |= bool(problems) or state == "out of date"
        if path.resolve() == ROOT / "TUTORIAL.md":
            code |= not sync_notebook(new, check=options.check)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
