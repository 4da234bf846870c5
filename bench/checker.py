"""Accuracy and latency of the answer checker, alone or against math-verify, on the same cases in one run.

    python bench/checker.py [CASES.jsonl] [--against math-verify]

A case is a line `{"kind", "gold", "response", "expected"}`, or a pair `{"gold", "answer", "equal"[, "kind"]}`, whose
answer is put into a box. Without the file, the handed cases beside the project are, else a small built-in set. Each
verdict runs in this process, one after another, in the main thread (math-verify's time limits only work there). Wrong
accepts are shares of the unequal cases: what a training loop would reward by mistake. Wrong rejects are shares of the
equal ones. Times are CPU time of the thread; the import of sympy is not among them.
`math-verify` is optional: `pip install "math-verify[antlr4_13_2]"`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a script in a folder of its own, of a project that need not be installed

from nano_exgrpo.checker import reward  # noqa: E402
from nano_exgrpo.evaluation.statistics import wilson  # noqa: E402

HANDED = ROOT.parent / "shared" / "checker" / "handed.jsonl"
APART = ("nobox", "convention")  # kinds whose verdict is a grader's policy: in the table of kinds only
SLOW = 5.0  # seconds: math-verify's own limit
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


@dataclass(frozen=True)
class Case:
    kind: str
    gold: str
    response: str
    expected: bool


@dataclass(frozen=True)
class Verdict:
    """What a grader said to a case, and the seconds that it took."""

    case: Case
    accepted: bool
    seconds: float

    @property
    def right(self) -> bool:
        return self.accepted == self.case.expected


def load(path: Path | None) -> list[Case]:
    """The cases of a file, or the built-in ones. Raises ValueError if a line is no case, OSError without the file."""
    if path is None:
        return [Case(kind, gold, boxed(answer), expected) for kind, gold, answer, expected in BUILT_IN]
    cases = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            if "response" in row:
                cases.append(Case(row["kind"], row["gold"], row["response"], row["expected"]))
            else:
                cases.append(Case(row.get("kind", "pair"), row["gold"], boxed(row["answer"]), row["equal"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: neither a case nor a pair ({error!r})") from None
    if not cases:
        raise ValueError(f"{path} holds no cases")
    return cases


def boxed(answer: str) -> str:
    return rf"The answer is $\boxed{{{answer}}}$."


def math_verify_reward(response: str, gold: str) -> float:
    """math-verify, used as its documentation says: both sides parsed, the gold answer first."""
    from math_verify import parse, verify

    return float(verify(parse(f"${gold}$"), parse(response)))


def measure(grader: Callable[[str, str], float], cases: list[Case]) -> list[Verdict]:
    """The verdicts of a grader; one that raises says no."""
    import sympy  # noqa: F401

    grader(r"\boxed{\sqrt2}", r"\frac{1}{2}")  # imports and caches
    verdicts = []
    for case in cases:
        start = time.thread_time()
        try:
            accepted = grader(case.response, case.gold) == 1.0
        except Exception:
            accepted = False
        verdicts.append(Verdict(case, accepted, time.thread_time() - start))
    return verdicts


def share(count: int, of: int) -> str:
    """`count` and its share with Wilson's 95 % interval.

    >>> share(1, 200)
    '1: 0.5 % (0.1 to 2.8)'
    """
    if not of:
        return "0 of 0"
    interval = wilson(count, of)
    value, low, high = (100 * part for part in (interval.value, interval.low, interval.high))
    return f"{count}: {value:.1f} % ({low:.1f} to {high:.1f})"


def table_of_kinds(results: dict[str, list[Verdict]], cases: list[Case]) -> str:
    """The share of right verdicts of each kind, as a Markdown table."""
    lines = ["| kind | cases | " + " | ".join(results) + " |", "|---|---|" + "---|" * len(results)]
    for kind in sorted({case.kind for case in cases}, key=lambda kind: (kind in APART, kind)):
        of_kind = [[v.right for v in verdicts if v.case.kind == kind] for verdicts in results.values()]
        shares = " | ".join(f"{sum(right) / len(right):.1%}" for right in of_kind)
        lines.append(f"| {kind} | {len(of_kind[0])} | {shares} |")
    return "\n".join(lines)


def summary(results: dict[str, list[Verdict]]) -> str:
    """Accuracy and latency of each grader, as a Markdown table."""
    lines = [
        f"| grader | right | wrong accepts | wrong rejects | median ms | p99 ms | slowest ms | over {SLOW:.0f} s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, verdicts in results.items():
        asked = [v for v in verdicts if v.case.kind not in APART]
        equal = [v for v in asked if v.case.expected]
        unequal = [v for v in asked if not v.case.expected]
        shares = (
            share(sum(v.right for v in asked), len(asked)),
            share(sum(v.accepted for v in unequal), len(unequal)),
            share(sum(not v.accepted for v in equal), len(equal)),
        )
        times = sorted(1e3 * v.seconds for v in verdicts)
        median, p99 = times[len(times) // 2], times[int(0.99 * len(times))]
        slow = sum(v.seconds > SLOW for v in verdicts)
        lines.append(f"| {name} | {' | '.join(shares)} | {median:.2f} | {p99:.1f} | {times[-1]:.0f} | {slow} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "cases", nargs="?", type=Path, help="JSON lines; default: the handed cases, else a built-in set"
    )
    parser.add_argument("--against", choices=["math-verify"], help="measure this grader on the same cases as well")
    args = parser.parse_args()
    path = args.cases or (HANDED if HANDED.exists() else None)
    try:
        cases = load(path)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    graders: dict[str, Callable[[str, str], float]] = {"nano-exgrpo": reward}
    if args.against:
        try:
            import math_verify  # noqa: F401
        except ImportError:
            parser.error('math-verify is not installed: pip install "math-verify[antlr4_13_2]"')
        logging.disable(logging.CRITICAL)  # it logs each answer that it cannot read
        graders["math-verify"] = math_verify_reward
    results = {name: measure(grader, cases) for name, grader in graders.items()}
    print(f"{len(cases)} cases: {path.name if path else 'built in'}\n\n{table_of_kinds(results, cases)}\n")
    print(f"{summary(results)}\n\nCounts, shares and Wilson's 95 % intervals; they leave out {' and '.join(APART)}.")


if __name__ == "__main__":
    main()
