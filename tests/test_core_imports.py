"""The core needs torch, transformers, sympy and tqdm, and nothing else that is not part of these."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import textwrap

import pytest
from conftest import ROOT

OPTIONAL = "matplotlib datasets peft torchao trl pandas scipy accelerate math_verify latex2sympy2_extended bitsandbytes vllm antlr4".split()

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


def imports(path) -> set[str]:
    """Top-level packages that a file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize(
    "path", [ROOT / "train.py", *sorted((ROOT / "nano_exgrpo").glob("*.py"))], ids=lambda path: path.name
)
def test_files_import_the_core_packages_and_no_others(path):
    """(tokenizers comes with transformers, mpmath with sympy.) Optional packages only inside a function, where an error can say what to install; never bench or tests."""
    core = {"torch", "transformers", "sympy", "tqdm", "tokenizers", "mpmath", "nano_exgrpo", *sys.stdlib_module_names}
    top = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            top |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            top.add(node.module.split(".")[0])
    assert top <= core, top - core
    assert imports(path) <= core | {"matplotlib", "datasets", "peft", "torchao"}, imports(path) - core
