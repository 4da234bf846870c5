r"""What a study's finished runs say: curves at equal cost, paired differences, what its samples hold.

`study.py` decides what is run; this file only reads run folders.
"""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy

from nano_exgrpo.errors import InputError
from nano_exgrpo.evaluation.statistics import Difference, Interval, mean_interval, paired_seeds
from nano_exgrpo.infra.files import read_json, read_rows, write_whole

# ------------------------------------------------------------------------------------------------- curves


@dataclass(frozen=True)
class Curve:
    """Held-out accuracy of one run at each evaluation, and what had been spent by then.

    rollouts: fresh trajectories. compute: token passes, in forward passes of one token: 1 for a token that is
    generated or scored to choose a trajectory, 3 for one that is trained on (forward and backward)."""

    rollouts: list[float]
    compute: list[float]
    accuracy: list[float]
    trained_rows: float  # mean share of rows with a gradient

    @property
    def mean(self) -> float:
        """Mean accuracy over the evaluations after the start: how fast, not only how far."""
        return fmean(self.accuracy[1:])


Curves = Mapping[str, Mapping[str, Sequence[Curve]]]  # setting → arm → the curves of its seeds


def read_curve(run: Path) -> Curve:
    """Raises InputError where the run's metrics are not as train.py writes them."""
    rows = read_rows(run / "metrics.jsonl")
    rollouts, compute, accuracy, spent, tokens = [], [], [], numpy.zeros(2), 0
    try:
        for row in rows:
            if row["step"]:
                passes = row["num_tokens"] - tokens + row["scored_tokens"] + 3 * row["trained_tokens"]
                spent, tokens = spent + (row["rollouts"], passes), row["num_tokens"]
            if "eval/accuracy" in row:
                rollouts.append(float(spent[0]))
                compute.append(float(spent[1]))
                accuracy.append(float(row["eval/accuracy"]))
        return Curve(rollouts, compute, accuracy, fmean(row["trained_rows"] for row in rows[1:]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{run}/metrics.jsonl is not as train.py writes it ({error!r}); delete that run") from None


def at_equal(cost: str, curves: Sequence[Curve], others: Sequence[Curve]) -> tuple[list[float], list[float]]:
    """Accuracies of both sides, seed by seed, where both have spent as much: the less of their totals. cost:
    "rollouts" or "compute". Between two evaluations the curve is a line."""
    at = lambda curve, x: float(numpy.interp(x, getattr(curve, cost), curve.accuracy))  # noqa: E731
    ends = [min(getattr(a, cost)[-1], getattr(b, cost)[-1]) for a, b in zip(curves, others, strict=True)]
    return [at(a, x) for a, x in zip(curves, ends)], [at(b, x) for b, x in zip(others, ends)]


# ----------------------------------------------------------------------------------------------- reporting


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *rows))


def study_table(curves: Curves, baseline: str) -> str:
    """Markdown: one row for each setting and arm. Intervals are 95 %, Student's t over seeds; differences are paired by
    seed, arm minus baseline, with the exact sign-flip test's p."""
    head = f"setting|arm|start|end|curve mean|rows with gradient|end − {baseline}, equal fresh rollouts|p|equal compute"
    rows = []
    for setting, arms in curves.items():
        base = arms[baseline]
        for arm, own in arms.items():
            ends, means = mean_interval([c.accuracy[-1] for c in own]), mean_interval([c.mean for c in own])
            shares = f"{fmean(c.trained_rows for c in own):.2f}"
            rows.append([setting, arm, f"{fmean(c.accuracy[0] for c in own):.2f}", spread(ends), spread(means), shares])
            if arm == baseline:
                rows[-1] += [""] * 4
                continue
            fresh = paired_seeds(*at_equal("rollouts", base, own))
            compute = paired_seeds(*at_equal("compute", base, own))
            speed = paired_seeds([c.mean for c in base], [c.mean for c in own])
            p = f"{fresh.p:.3f}" if fresh.p >= 0.001 else "< 0.001"
            rows[-1] += [gain(fresh), p, gain(compute), gain(speed)]
    return markdown([*head.split("|"), f"curve mean − {baseline}"], rows)


def spread(interval: Interval) -> str:
    half = interval.high - interval.value
    return f"{interval.value:.3f} ± {half:.3f}" if math.isfinite(half) else f"{interval.value:.3f}"


def gain(difference: Difference) -> str:
    d = difference.interval
    ends = f" [{d.low:+.3f}, {d.high:+.3f}]" if math.isfinite(d.low) else ""
    return f"{d.value:+.3f}{ends} ({difference.wins}:{difference.losses})"


def pyplot() -> Any:
    """matplotlib's pyplot without a screen. Raises InputError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise InputError("pictures need matplotlib (pip install matplotlib)") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def picture(figure: Any, format: str) -> bytes:
    """The content of a PNG or SVG file. Closes the figure."""
    file = io.BytesIO()
    about = (
        dict.fromkeys(("Creator", "Date", "Format", "Type")) if format == "svg" else None
    )  # the same file every time
    figure.savefig(file, dpi=110, format=format, transparent=format == "svg", metadata=about)
    pyplot().close(figure)
    return file.getvalue()


def plot_study(curves: Curves, target: Path) -> None:
    """A panel for each setting: mean held-out accuracy of each arm over fresh rollouts, with its 95 % interval."""
    rows = math.ceil(len(curves) / 4)
    columns = math.ceil(len(curves) / rows)
    size = dict(figsize=(4.5 * columns, 3.4 * rows), squeeze=False, constrained_layout=True)
    figure, axes = pyplot().subplots(rows, columns, **size)
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
    write_whole(target, picture(figure, "png"))


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


def kind_of(row: dict[str, Any]) -> str:
    return kind(row["prompt"], row["response"], row["reward"])


def lucky_share(samples: Iterable[dict[str, Any]], group_size: int) -> dict[int, tuple[int, int]]:
    """Successes k of a group → (lucky ones, all of them), over the groups of K fresh trajectories. Needs a run that
    logged every sample (log_samples -1)."""
    groups: dict[tuple[int, str], list[str]] = {}
    for row in samples:
        if not row["replayed"]:
            groups.setdefault((row["step"], row["question"]), []).append(kind_of(row))
    lucky: Counter[int] = Counter()
    total: Counter[int] = Counter()
    for kinds in groups.values():
        k = len(kinds) - kinds.count("wrong")
        if len(kinds) == group_size and k:
            lucky[k] += kinds.count("lucky")
            total[k] += k
    return {k: (lucky[k], total[k]) for k in sorted(total)}


def separation(low: Sequence[float], high: Sequence[float]) -> float:
    """P(a value of `low` < a value of `high`), ties counting half: 0.5 is no separation, 1 is perfect (the ROC area).

    >>> separation([1, 2], [2, 3])
    0.875
    """
    from scipy.stats import mannwhitneyu

    return float(mannwhitneyu(high, low).statistic) / (len(low) * len(high))


def report_samples(runs: Mapping[str, Mapping[str, Sequence[Path]]], target: Path) -> str:
    """The preliminary study: a column of panels for each setting, from all samples of its runs; returns a table.

    runs: setting → arm → run folders. Above, the mean token entropy of reasoned successes, lucky guesses and failures
    in the first 20 steps of the grpo arm. Then how many of the successes are luck, by the successes of their group.
    Below, the exgrpo arm's buffer. The table also tells how many of that arm's replayed trajectories are luck."""
    size = dict(figsize=(5 * len(runs), 9), squeeze=False, constrained_layout=True)
    figure, axes = pyplot().subplots(3, len(runs), **size)
    head = "setting|reasoned / lucky / wrong|mean entropy of each|P(reasoned < wrong)|P(reasoned < lucky)"
    head += "|luck among successes, k = 1|k = K/2|luck among the replayed"
    rows = []
    for (top, middle, below), (setting, arms) in zip(axes.T, runs.items()):
        K = read_json(arms["grpo"][0] / "config.json", "run")["group_size"]
        early = [row for run in arms["grpo"] for row in read_rows(run / "samples.jsonl") if row["step"] <= 20]
        entropies = {name: [row["entropy"] for row in early if kind_of(row) == name] for name in KINDS}
        for name, values in entropies.items():
            weights, label = [1 / max(1, len(values))] * len(values), f"{name} (n = {len(values)})"
            top.hist(values, bins=40, range=(0, 2), weights=weights, alpha=0.5, label=label)
        top.set(title=f"{setting}: entropy of a response, nats a token", yticks=[])
        shares = lucky_share(early, K)
        middle.bar(list(shares), [lucky / total for lucky, total in shares.values()])
        middle.set(
            title="share of lucky guesses among the successes", xlabel="successes of the group, of K", ylim=(0, 1)
        )
        draw_buffer(below, read_rows(arms["exgrpo"][0] / "metrics.jsonl"))
        for axis in (top, below):
            axis.legend(fontsize=7)
        samples = (row for run in arms["exgrpo"] for row in read_rows(run / "samples.jsonl"))
        replayed = [kind_of(row) for row in samples if row["replayed"]]
        luck = [*(shares.get(k, (0, 0)) for k in (1, K // 2)), (replayed.count("lucky"), len(replayed))]
        cells = [f"{part / whole:.2f} of {whole}" if whole else "none" for part, whole in luck]
        rows.append([setting, *entropy_cells(entropies), *cells])
    write_whole(target, picture(figure, "png"))
    return markdown(head.split("|"), rows)


def entropy_cells(entropies: Mapping[str, Sequence[float]]) -> list[str]:
    """Counts and means of each kind's entropies, and how well those of the reasoned are told from the others'."""
    numbers = " / ".join(str(len(values)) for values in entropies.values())
    means = " / ".join(f"{fmean(values):.2f}" if values else "none" for values in entropies.values())
    few = {name: values[:2000] for name, values in entropies.items()}
    pairs = [(few["reasoned"], few[other]) for other in ("wrong", "lucky")]
    return [numbers, means, *(f"{separation(low, high):.2f}" if low and high else "none" for low, high in pairs)]


def draw_buffer(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Questions in the buffer by the successes k of their latest group, stacked, and the retired ones, over steps."""
    rows = [row for row in rows if "buffer/buckets" in row]  # not the first, before training
    steps, ks = [row["step"] for row in rows], sorted({int(k) for row in rows for k in row["buffer/buckets"]})
    if ks:
        counts = [[row["buffer/buckets"].get(str(k), 0) for row in rows] for k in ks]
        colours = pyplot().get_cmap("viridis")(numpy.linspace(0, 1, len(ks)))
        axis.stackplot(steps, counts, labels=[f"k = {k}" for k in ks], colors=colours)
    axis.plot(steps, [row["buffer/retired"] for row in rows], "k--", label="retired")
    axis.set(title="questions in the buffer, by bucket (first run)", xlabel="step")
