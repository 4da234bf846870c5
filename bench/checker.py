"""Accuracy and latency of the answer checker against math-verify, on the same cases in one run.

    python bench/checker.py [CASES.jsonl] [--skip-others]

A case is a line `{"kind", "gold", "response", "expected"}`. Without the file, the handed cases beside the project are, else a small built-in set. Each
verdict runs in this process, one after another, in the main thread (math-verify's time limits only work there); the
last columns count what a training loop would suffer: wrong answers rewarded, right answers missed, slow verdicts.
Times are CPU time of the thread; sympy's import, once a process where a verdict needs it, is not among them.
`math-verify` is optional: `pip install "math-verify[antlr4_13_2]"`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nano_exgrpo.checker import reward  # noqa: E402

DEFAULT = Path(__file__).resolve().parent.parent.parent / "shared" / "checker" / "handed.jsonl"
APART = ("nobox", "convention")  # kinds whose verdict is a grader's policy
BUILT_IN = [  # kind, gold, what is boxed, expected
    ("number", "1234", "1{,}234", True),
    ("number", "10000", "10001", False),
    ("number", "1/3", "0.33", False),
    ("sci", "4.5e33", r"4.5\times 10^{33}", True),
    ("algebra", "x^2-1", "(x-1)(x+1)", True),
    ("algebra", "R+r", "2R", False),
    ("algebra", r"\sqrt{8}", r"2\sqrt2", True),
    ("algebra", "Nn", "n^2", False),
    ("interval", "(0,1)", "0<x<1", True),
    ("interval", "(0,1)", "[0,1)", False),
    ("list", "1,-2", "-2, 1", True),
    ("list", "1,2", "1", False),
    ("units", r"5\text{ cm}", "5", True),
    ("units", r"5\text{ cm}", r"5\text{ m}", False),
    ("text", "Yes", r"\text{yes}", True),
    ("unicode", r"\frac12", "½", True),
    ("robust", "5", "9^{9^{9^{9}}}", False),
    ("robust", "5", "99999999999999!", False),
    ("robust", "5", "__import__('os')", False),
]


def load(path: Path | None) -> list[dict]:
    """The cases of a file, or the built-in ones.

    Raises:
        OSError: there is no such file.
        ValueError: a line is not a case.
    """
    if path is None:
        return [
            dict(kind=kind, gold=gold, response=rf"The answer is $\boxed{{{answer}}}$.", expected=expected)
            for kind, gold, answer, expected in BUILT_IN
        ]
    cases = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            case = json.loads(line)
            cases.append({name: case[name] for name in ("kind", "gold", "response", "expected")})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}: not a case with kind, gold, response, expected ({error!r})"
            ) from None
    return cases


def math_verify_reward(response: str, gold: str) -> float:
    """math-verify, used as its documentation says: both sides parsed, the gold answer first."""
    from math_verify import parse, verify

    return float(verify(parse(f"${gold}$"), parse(response)))


def measure(grader: Callable[[str, str], float], cases: list[dict]) -> tuple[list[bool], list[float]]:
    """(verdict, seconds) of each case; a grader that raises says no."""
    verdicts, seconds = [], []
    grader(r"\boxed{\sqrt2}", r"\frac{1}{2}")  # imports and caches
    import sympy  # noqa: F401

    for case in cases:
        start = time.thread_time()
        try:
            verdict = grader(case["response"], case["gold"]) == 1.0
        except Exception:
            verdict = False
        seconds.append(time.thread_time() - start)
        verdicts.append(verdict)
    return verdicts, seconds


def report(names: list[str], results: list[tuple[list[bool], list[float]]], cases: list[dict]) -> None:
    """Print accuracy by kind, then the summary, as Markdown tables."""
    total = Counter(case["kind"] for case in cases)
    right: dict[str, Counter] = defaultdict(Counter)
    for name, (verdicts, _) in zip(names, results):
        right[name].update(case["kind"] for case, verdict in zip(cases, verdicts) if verdict is case["expected"])
    print("| kind | cases | " + " | ".join(names) + " |\n|---|---|" + "---|" * len(names))
    for kind in sorted(total, key=lambda k: (k in APART, k)):
        shares = (f"{right[name][kind] / total[kind]:.1%}" for name in names)
        print(f"| {kind} | {total[kind]} | " + " | ".join(shares) + " |")
    print("\n| grader | accuracy | accepts wrong | rejects right | over 0.25 s | median ms | p99 ms | slowest ms |")
    print("|---|---|---|---|---|---|---|---|")
    asked = [kind for kind in total if kind not in APART]
    for name, (verdicts, seconds) in zip(names, results):
        wrong = Counter(case["expected"] for case, verdict in zip(cases, verdicts) if verdict is not case["expected"])
        accuracy = sum(right[name][kind] for kind in asked) / sum(total[kind] for kind in asked)
        ranked = sorted(1e3 * s for s in seconds)
        median, p99 = ranked[len(ranked) // 2], ranked[int(0.99 * len(ranked))]
        print(
            f"| {name} | {accuracy:.2%} | {wrong[False]} | {wrong[True]} | {sum(s > 0.25 for s in seconds)} | "
            f"{median:.3f} | {p99:.1f} | {ranked[-1]:.0f} |"
        )
    print(f"\n{len(cases)} cases; the accuracy leaves out {', '.join(APART)}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "cases",
        nargs="?",
        type=Path,
        help="JSON lines; default: the handed cases beside the project, else a built-in set",
    )
    parser.add_argument("--skip-others", action="store_true", help="measure this project alone")
    args = parser.parse_args()
    path = args.cases or (DEFAULT if DEFAULT.exists() else None)
    try:
        cases = load(path)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"cases: {path.name if path else 'built in'}\n")
    graders: dict[str, Callable[[str, str], float]] = {"nano-exgrpo": reward}
    if not args.skip_others:
        try:
            import math_verify  # noqa: F401

            logging.disable(logging.CRITICAL)  # it logs each answer that it cannot read
            graders["math-verify"] = math_verify_reward
        except ImportError:
            print('math-verify is not installed: pip install "math-verify[antlr4_13_2]"\n')
    report(list(graders), [measure(grader, cases) for grader in graders.values()], cases)


if __name__ == "__main__":
    main()
