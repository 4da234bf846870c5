"""Generations summed up: accuracies with their intervals, and whether one evaluation is better than another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nano_exgrpo.checker import is_equal
from nano_exgrpo.errors import InputError
from nano_exgrpo.evaluation.generations import Generation, by_benchmark, by_question
from nano_exgrpo.evaluation.statistics import (
    Interval,
    accuracy_interval,
    average,
    clustered_interval,
    group_answers,
    maj_at_k,
    paired_difference,
    pass_at_k,
)


@dataclass
class Figures:
    """What a benchmark's generations say. Shares and accuracies lie in 0..1, lengths are in tokens."""

    questions: int
    samples: int  # k of avg@k; the fewest that a question has
    accuracy: Interval
    pass_at: dict[int, Interval] = field(default_factory=dict)
    maj_at: dict[int, Interval] = field(default_factory=dict)
    mean_tokens: float = 0.0
    truncated: float = 0.0  # share of responses cut off at the length limit
    unparsable: float = 0.0  # share of responses without a final answer to grade


def summarise(generations: Sequence[Generation], ks: Sequence[int] = ()) -> Figures:
    """ks: those k of pass@k and maj@k to work out; the ones above the number of samples are left out.

    Intervals take the question as the unit (`stats.accuracy_interval`). Raises ValueError on an empty list."""
    groups = list(by_question(generations).values())
    if not groups:
        raise ValueError("no generations to sum up")
    samples = min(len(group) for group in groups)
    figures = Figures(
        len(groups),
        samples,
        accuracy_interval([[float(g.correct) for g in group] for group in groups]),
        mean_tokens=sum(g.tokens for g in generations) / len(generations),
        truncated=sum(g.truncated for g in generations) / len(generations),
        unparsable=sum(g.answer is None for g in generations) / len(generations),
    )
    ks = sorted({k for k in ks if 1 < k <= samples})
    votes = [count_votes(group) for group in groups] if ks else []
    for k in ks:
        figures.pass_at[k] = clustered_interval([pass_at_k(len(g), sum(x.correct for x in g), k) for g in groups])
        figures.maj_at[k] = clustered_interval(
            [maj_at_k(correct, others, len(g), k) for g, (correct, others) in zip(groups, votes, strict=True)]
        )
    return figures


def count_votes(group: Sequence[Generation]) -> tuple[int, list[int]]:
    """(right votes, sizes of the groups of equal wrong answers); letters are equal only to themselves."""
    equal = str.__eq__ if group[0].letters else is_equal
    return group_answers([g.answer for g in group], [g.correct for g in group], equal)


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells in columns; the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def figures_table(figures: dict[str, Figures], averages: dict[str, Interval]) -> str:
    """One line a benchmark, then one an average over a group of benchmarks."""
    ks = sorted({k for f in figures.values() for k in f.pass_at})
    head = ["benchmark", "questions", "metric", "accuracy [95 %]"]
    head += [f"{kind}@{k}" for k in ks for kind in ("pass", "maj")] + ["tokens", "truncated", "no answer"]
    rows = [head]
    for name, f in figures.items():
        at_k = [f"{at[k].value:.3f}" if k in at else "" for k in ks for at in (f.pass_at, f.maj_at)]
        metric = "pass@1" if f.samples == 1 else f"avg@{f.samples}"
        shares = [f"{f.mean_tokens:.0f}", f"{f.truncated:.1%}", f"{f.unparsable:.1%}"]
        rows.append([name, str(f.questions), metric, str(f.accuracy), *at_k, *shares])
    for group, interval in averages.items():
        rows.append([f"average, {group}", "", "", str(interval)] + [""] * (len(head) - 4))
    return text_table(rows)


def comparison_table(names: Sequence[str], sides: Sequence[Sequence[Generation]]) -> str:
    """Is B better than A? Both evaluations on all benchmarks that they have in common, and the verdict.

    names: of A and B. Raises InputError when the two did not answer the same questions."""
    a, b = (by_benchmark(side) for side in sides)
    common = [name for name in a if name in b]
    if not common:
        raise InputError(f"{names[0]} and {names[1]} have no benchmark in common ({', '.join(a)}; {', '.join(b)})")
    rows, intervals = [["benchmark", "questions", "A", "B", "B - A [95 %]", "p", "B better", "worse", "same"]], []
    for name in common:
        left, right = by_question(a[name]), by_question(b[name])
        asked = [{id: (group[0].prompt, group[0].gold) for id, group in side.items()} for side in (left, right)]
        if asked[0] != asked[1]:
            raise InputError(
                f"{names[0]} and {names[1]} answered different questions on {name}; evaluate both on the same"
            )
        verdicts = [[[float(g.correct) for g in side[id]] for id in left] for side in (left, right)]
        result = paired_difference(*verdicts)
        accuracies = [f"{sum(sum(v) / len(v) for v in side) / len(side):.3f}" for side in verdicts]
        counts = map(str, (result.wins, result.losses, result.ties))
        rows.append([name, str(len(left)), *accuracies, signed(result.interval), f"{result.p:.2g}", *counts])
        intervals.append(result.interval)
    d = average(intervals)
    if len(common) > 1:
        rows.append(["average", "", "", "", signed(d), "", "", "", ""])
    verdict = "B is better than A" if d.low > 0 else "A is better than B" if d.high < 0 else "no difference is shown"
    legend = "p: two-sided exact sign-flip test by question (single samples: McNemar's)"
    table = f"{text_table(rows)}\n\n{verdict} (95 % interval of B - A). {legend}"
    return f"\nA  {names[0]}\nB  {names[1]}\n\n{table}"


def signed(d: Interval) -> str:
    return f"{d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"
