r"""What a study's finished runs say: curves at equal cost, paired differences, what its samples hold.

`study.py` decides what is run; this file only reads run folders. Everything but the figures is plain Python.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from nano_exgrpo.errors import InputError
from nano_exgrpo.evaluation.statistics import Comparison, Interval, mean_interval, paired_seeds
from nano_exgrpo.infra.files import read_json
from nano_exgrpo.infra.run_folder import read_lines

Runs = Mapping[str, Mapping[str, Sequence[Path]]]  # setting → arm → its run folders, in the order of the seeds

# ------------------------------------------------------------------------------------------------- curves


@dataclass(frozen=True)
class Curve:
    """Held-out accuracy of one run at each evaluation, and what had been spent by then.

    rollouts: fresh trajectories. compute: token passes, in forward passes of one token: 1 for a token that is
    generated or scored to choose a trajectory, 3 for one that is trained on (forward and backward)."""

    steps: list[int]
    rollouts: list[float]
    compute: list[float]
    accuracy: list[float]
    trained_rows: float  # mean share of rows with a gradient
    last_entropy: float

    @property
    def mean(self) -> float:
        """Mean accuracy over the evaluations after the start: how fast, not only how far."""
        return fmean(self.accuracy[1:])


def read_curve(run: Path) -> Curve:
    steps, rollouts, compute, accuracy = [], [], [], []
    spent_rollouts = spent_compute = tokens = 0.0
    rows = read_lines(run / "metrics.jsonl")
    for row in rows:
        if row["step"]:
            spent_rollouts += row["rollouts"]
            spent_compute += row["num_tokens"] - tokens + row["scored_tokens"] + 3 * row["trained_tokens"]
            tokens = row["num_tokens"]
        if "eval/accuracy" in row:
            steps.append(row["step"])
            rollouts.append(spent_rollouts)
            compute.append(spent_compute)
            accuracy.append(row["eval/accuracy"])
    return Curve(steps, rollouts, compute, accuracy, fmean(r["trained_rows"] for r in rows[1:]), rows[-1]["entropy"])


def at(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """y at x on the line through the points (xs increasing); beyond the ends, the end's.

    >>> at([0, 10, 20], [0.0, 0.5, 0.7], 15)
    0.6
    """
    if x <= xs[0]:
        return ys[0]
    for (x0, y0), (x1, y1) in pairwise(zip(xs, ys)):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return ys[-1]


def at_equal(key: str, curves: Sequence[Curve], others: Sequence[Curve]) -> tuple[list[float], list[float]]:
    """Accuracies of both sides, seed by seed, where both have spent as much: the less of their totals. key:
    "rollouts" or "compute"."""
    pairs = []
    for a, b in zip(curves, others, strict=True):
        x = min(getattr(a, key)[-1], getattr(b, key)[-1])
        pairs.append((at(getattr(a, key), a.accuracy, x), at(getattr(b, key), b.accuracy, x)))
    return [a for a, _ in pairs], [b for _, b in pairs]


# ----------------------------------------------------------------------------------------------- reporting


def table(curves: Mapping[str, Mapping[str, Sequence[Curve]]], baseline: str) -> str:
    """Markdown from setting → arm → the curves of its seeds: one row for each setting and arm. Intervals are 95 %,
    Student's t over seeds; differences are paired by seed, arm minus baseline, with the exact sign-flip test's p."""
    lines = [
        f"| setting | arm | start | end | curve mean | rows with gradient | end − {baseline}, equal fresh rollouts | p | equal compute | curve mean − {baseline} |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for setting, arms in curves.items():
        base = arms[baseline]
        for arm, own in arms.items():
            cells = [
                setting,
                arm,
                f"{fmean(c.accuracy[0] for c in own):.2f}",
                show(mean_interval([c.accuracy[-1] for c in own])),
                show(mean_interval([c.mean for c in own])),
                f"{fmean(c.trained_rows for c in own):.2f}",
            ]
            if arm == baseline:
                cells += ["", "", "", ""]
            else:
                fresh = paired_seeds(*at_equal("rollouts", base, own))
                compute = paired_seeds(*at_equal("compute", base, own))
                speed = paired_seeds([c.mean for c in base], [c.mean for c in own])
                cells += [
                    show_difference(fresh),
                    f"{fresh.p:.3f}" if fresh.p >= 0.001 else "< 0.001",
                    show_difference(compute),
                    show_difference(speed),
                ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def show(interval: Interval) -> str:
    half = interval.high - interval.value
    return f"{interval.value:.3f} ± {half:.3f}" if math.isfinite(half) else f"{interval.value:.3f}"


def show_difference(comparison: Comparison) -> str:
    d = comparison.difference
    ends = f" [{d.low:+.3f}, {d.high:+.3f}]" if math.isfinite(d.low) else ""
    return f"{d.value:+.3f}{ends} ({comparison.wins}:{comparison.losses})"


def pyplot() -> Any:
    """matplotlib's pyplot without a screen. Raises InputError where it is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise InputError("the table is written, but figures need matplotlib (pip install matplotlib)") from None
    return pyplot


def save_figure(figure: Any, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    figure.savefig(temporary, dpi=110, format="png")
    os.replace(temporary, target)


def plot_study(curves: Mapping[str, Mapping[str, Sequence[Curve]]], target: Path) -> None:
    """A panel for each setting: mean held-out accuracy of each arm over fresh rollouts, with its 95 % interval."""
    plt = pyplot()
    rows = math.ceil(len(curves) / 4)
    columns = math.ceil(len(curves) / rows)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.5 * columns, 3.4 * rows), squeeze=False, constrained_layout=True
    )
    for axis in axes.flat[len(curves) :]:
        axis.set_visible(False)
    for axis, (setting, arms) in zip(axes.flat, curves.items()):
        for number, (arm, own) in enumerate(arms.items()):
            x = [fmean(values) for values in zip(*(c.rollouts for c in own))]
            intervals = [mean_interval(values) for values in zip(*(c.accuracy for c in own))]
            (line,) = axis.plot(x, [i.value for i in intervals], label=arm, linestyle="-" if number < 10 else "--")
            if len(own) > 1 and len(arms) <= 4:
                low, high = [i.low for i in intervals], [i.high for i in intervals]
                axis.fill_between(x, low, high, alpha=0.2, color=line.get_color(), linewidth=0)
        axis.set_title(setting, fontsize=10)
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
        axis.locator_params(axis="x", nbins=5)
    axes[-1][0].set_xlabel("fresh rollouts")
    axes[0][0].set_ylabel("held-out accuracy")
    if len(arms) <= 4:
        axes[0][0].legend(fontsize=8)
    else:
        figure.legend(*axes[0][0].get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    save_figure(figure, target)
    plt.close(figure)


# ------------------------------------------------------------------------------------------------ samples

KINDS = ("reasoned", "lucky", "wrong")


def kind(prompt: str, response: str, reward: float) -> str:
    r"""One of `KINDS`: a success whose every running sum is right, a success without that, a failure.

    prompt: as decoded with its chat template; the terms are its numbers.

    >>> kind("3 + 8 + 5", r"11 16 \boxed{ 16 }", 1.0), kind("3 + 8 + 5", r"\boxed{ 16 }", 1.0)
    ('reasoned', 'lucky')
    """
    if not reward:
        return "wrong"
    terms = [int(word) for word in re.findall(r"\d+", prompt)]
    sums = [sum(terms[:i]) for i in range(2, len(terms) + 1)]
    said = [int(word) for word in re.findall(r"\d+", response)]
    return "reasoned" if said == [*sums, sum(terms)] else "lucky"


def fresh_groups(samples: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The fresh trajectories of each (step, question), in order; replayed rows are left out. Needs a run that logged
    every sample (log_samples -1)."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in samples:
        if not row["replayed"]:
            groups.setdefault((row["step"], row["question"]), []).append(row)
    return list(groups.values())


def lucky_share(groups: Sequence[Sequence[dict[str, Any]]], group_size: int) -> dict[int, tuple[int, int]]:
    """Successes of the group k → (lucky ones, all of them), over groups of K fresh trajectories."""
    counts: dict[int, tuple[int, int]] = {}
    for group in groups:
        kinds = [kind(row["prompt"], row["response"], row["reward"]) for row in group]
        k = len(group) - kinds.count("wrong")
        if len(group) == group_size and k:
            lucky, total = counts.get(k, (0, 0))
            counts[k] = (lucky + kinds.count("lucky"), total + k)
    return dict(sorted(counts.items()))


def separation(low: Sequence[float], high: Sequence[float]) -> float:
    """P(a value of `low` < a value of `high`), ties counting half: 0.5 is no separation, 1 is perfect (the ROC area).

    >>> separation([1, 2], [2, 3])
    0.875
    """
    below = sum((a < b) + 0.5 * (a == b) for a in low for b in high)
    return below / (len(low) * len(high))


def report_samples(runs: Runs, target: Path) -> str:
    """The preliminary study: a column of panels for each setting, from all samples of its runs; returns a table.

    Above, the mean token entropy of reasoned successes, lucky guesses and failures in the first 20 steps of the grpo
    arm; then how many of the successes are luck, by the successes of their group; below, the exgrpo arm's buffer. The
    table also tells how many of that arm's replayed trajectories are luck."""
    plt = pyplot()
    figure, axes = plt.subplots(3, len(runs), figsize=(5 * len(runs), 9), squeeze=False, constrained_layout=True)
    lines = [
        "| setting | reasoned / lucky / wrong | mean entropy of each | P(reasoned < wrong) | P(reasoned < lucky) "
        "| luck among successes, k = 1 | k = K/2 | luck among the replayed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for column, (setting, arms) in enumerate(runs.items()):
        rows = [row for run in arms["grpo"] for row in read_lines(run / "samples.jsonl")]
        early = [row for row in rows if row["step"] <= 20]
        entropies: dict[str, list[float]] = {name: [] for name in KINDS}
        for row in early:
            entropies[kind(row["prompt"], row["response"], row["reward"])].append(row["entropy"])
        for name, values in entropies.items():
            weights = [1 / max(1, len(values))] * len(values)
            axes[0][column].hist(
                values, bins=40, range=(0, 2), weights=weights, alpha=0.5, label=f"{name} (n = {len(values)})"
            )
        axes[0][column].set(title=f"{setting}: entropy of a response, nats a token", yticks=[])
        axes[0][column].legend(fontsize=8)
        K = read_json(arms["grpo"][0] / "config.json", str(arms["grpo"][0]))["group_size"]
        shares = lucky_share(fresh_groups(early), K)
        axes[1][column].bar(list(shares), [lucky / total for lucky, total in shares.values()])
        axes[1][column].set(
            title="share of lucky guesses among the successes", xlabel="successes of the group, of K", ylim=(0, 1)
        )
        metrics = read_lines(arms["exgrpo"][0] / "metrics.jsonl")[1:]
        counts = [[row["buffer/buckets"].get(str(k), 0) for row in metrics] for k in range(1, K)]
        axes[2][column].stackplot(
            [row["step"] for row in metrics], counts, labels=[f"k = {k}" for k in range(1, K)], cmap="viridis"
        )
        axes[2][column].plot(
            [row["step"] for row in metrics], [row["buffer/retired"] for row in metrics], "k--", label="retired"
        )
        axes[2][column].set(title="questions in the buffer, by bucket (first seed)", xlabel="step")
        axes[2][column].legend(fontsize=7, ncols=2)
        samples = (row for run in arms["exgrpo"] for row in read_lines(run / "samples.jsonl"))
        replayed = [kind(row["prompt"], row["response"], row["reward"]) for row in samples if row["replayed"]]
        few = {name: values[:2000] for name, values in entropies.items()}
        luck = lambda k: f"{shares[k][0] / shares[k][1]:.2f} of {shares[k][1]}" if k in shares else "none"  # noqa: E731
        cells = [
            setting,
            " / ".join(str(len(values)) for values in entropies.values()),
            " / ".join(f"{fmean(values):.2f}" if values else "none" for values in entropies.values()),
            f"{separation(few['reasoned'], few['wrong']):.2f}" if few["reasoned"] and few["wrong"] else "none",
            f"{separation(few['reasoned'], few['lucky']):.2f}" if few["reasoned"] and few["lucky"] else "none",
            luck(1),
            luck(K // 2),
            f"{replayed.count('lucky') / len(replayed):.2f} of {len(replayed)}" if replayed else "none",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    save_figure(figure, target)
    plt.close(figure)
    return "\n".join(lines) + "\n"
