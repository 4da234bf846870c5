"""The core needs torch, transformers, sympy and tqdm, and nothing else that is not part of these."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import textwrap

import pytest
from conftest import ROOT

import nano_exgrpo

OPTIONAL = (
    "matplotlib datasets torchao trl pandas scipy accelerate math_verify latex2sympy2_extended bitsandbytes vllm antlr4"
).split()

BLOCK = """
    import importlib.machinery, sys

    class Hide(importlib.machinery.PathFinder):  # as if these had never been installed
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            return None if name.split(".")[0] in {blocked} else super().find_spec(name, path, target)

    sys.meta_path[:] = [Hide if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
"""


def run(code: str, **settings) -> subprocess.CompletedProcess[str]:
    code = textwrap.dedent(BLOCK.format(blocked=set(OPTIONAL))) + textwrap.dedent(code)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, **settings)


def test_training_without_any_optional_package(tmp_path):
    """A whole small run; without matplotlib it says how to get plots, and all else is there."""
    result = run(
        """
        import train
        code = train.main(
            "--run r --steps 2 --warmup-steps 2 --questions-per-step 2 --group-size 2 --toy-questions 9 --held-out 2 "
            "--save-every 1 --toy-skill-steps 0 --device cpu".split()
        )
        third = {name.split(".")[0] for name in sys.modules} & BLOCKED
        print("LOADED", sorted(third), "CODE", code)
        """.replace("BLOCKED", repr(set(OPTIONAL))),
        cwd=tmp_path,
    )
    assert "LOADED [] CODE 0" in result.stdout, result.stdout + result.stderr
    assert "pip install matplotlib" in result.stderr and "Traceback" not in result.stderr
    assert sorted(p.name for p in (tmp_path / "r").iterdir()) == [
        "checkpoints",
        "config.json",
        "metrics.jsonl",
        "model",
        "samples.jsonl",
    ]
    assert [json.loads(line)["step"] for line in (tmp_path / "r" / "metrics.jsonl").open()] == [0, 1, 2]


def names(node) -> list[str]:
    """The modules that a statement imports; `from a import b` counts as a.b where that is a module of ours."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom) or node.level:
        return []
    inner = [f"{node.module}.{alias.name}" for alias in node.names]
    ours = [name for name in inner if (ROOT / f"{name.replace('.', '/')}.py").exists()]
    return ours or [node.module]


def imports(path) -> set[str]:
    """Top-level packages that a file imports anywhere in it."""
    return {name.split(".")[0] for node in ast.walk(ast.parse(path.read_text())) for name in names(node)}


CORE = {
    "torch",
    "transformers",
    "sympy",
    "tqdm",
    "tokenizers",
    "numpy",
    "mpmath",
    "nano_exgrpo",
    *sys.stdlib_module_names,
}
FILES = [ROOT / "train.py", *sorted((ROOT / "nano_exgrpo").rglob("*.py"))]


def name(path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_import_the_core_packages_and_no_others(path):
    """Others only inside a function, where an error can say what to install; never bench or tests."""
    top = {name for node in ast.parse(path.read_text()).body for name in names(node)}
    assert {name.split(".")[0] for name in top} <= CORE, top
    around = {"safetensors", "matplotlib", "datasets", "scipy", "gguf"}
    assert imports(path) <= CORE | around, imports(path) - CORE - around


# The reading order of the method, as the package's map gives it: each file builds on those above it.
METHOD = re.findall(r"^    (\w+)  ", nano_exgrpo.__doc__.split("Then read")[0], re.MULTILINE)


def own(path, *, at_once: bool = False) -> set[str]:
    """What a file imports of the package, "replay", "infra.session", …; at_once: when it is itself imported."""
    tree = ast.parse(path.read_text())
    found = {name for node in (tree.body if at_once else ast.walk(tree)) for name in names(node)}
    return {name.removeprefix("nano_exgrpo.") for name in found if name.startswith("nano_exgrpo.")}


def test_who_may_import_whom():
    for path in FILES:
        if "/nano_exgrpo/" not in f"/{name(path)}" or path.name.startswith("__"):
            continue
        inside, part = own(path), path.parent.name
        if part == "checker":
            assert all(name.split(".")[0] == "checker" for name in inside), (path, inside)
        elif part == "evaluation":
            assert "infra.session" not in inside, path
        elif part == "nano_exgrpo":
            rest = {name.split(".")[0] for name in inside if name not in ("infra.distributed", "infra.files")}
            assert rest <= {"checker", *METHOD[: METHOD.index(path.stem)]}, (path, rest)


def test_no_file_imports_in_a_circle():
    at = lambda path: own(path, at_once=True)  # noqa: E731
    graph = {".".join(path.relative_to(ROOT / "nano_exgrpo").with_suffix("").parts): at(path) for path in FILES[1:]}
    while leaves := [name for name, uses in graph.items() if not (uses & graph.keys()) - {name}]:
        for name in leaves:
            del graph[name]
    assert not graph
