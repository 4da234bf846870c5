#!/usr/bin/env python
"""Draws the figures of TUTORIAL.md into docs/: dataflow, life, shaping and curves (from docs/run.json), as SVG.

    python docs/figures.py

Each is drawn on an opaque card, so that it reads the same on light and dark pages. Needs matplotlib.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT))

import matplotlib  # noqa: E402

matplotlib.use("Agg")
import torch  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.patches import FancyBboxPatch  # noqa: E402

from nano_exgrpo.config import TrainConfig  # noqa: E402
from nano_exgrpo.loss import shape  # noqa: E402

Point = tuple[float, float]
PAPER, INK, DIM, LINE = "#fbfbfa", "#22262b", "#5f6670", "#d4d7dc"
BLUE, ORANGE, GREEN, RED = "#1f6feb", "#d1570a", "#17803d", "#b42318"
plt.rcParams.update({
    "figure.facecolor": PAPER, "axes.facecolor": PAPER, "savefig.facecolor": PAPER,
    "text.color": INK, "axes.edgecolor": LINE, "axes.labelcolor": DIM,
    "xtick.color": DIM, "ytick.color": DIM, "axes.titlecolor": INK,
    "axes.grid": True, "grid.color": LINE, "grid.linewidth": 0.6,
    "axes.titlesize": 11, "axes.titleweight": "bold", "font.size": 9.5,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "svg.hashsalt": "nano-exgrpo",
})  # fmt: skip


# ------------------------------------------------------------------------------------------------ diagrams


def canvas(width: float, height: float) -> tuple[Any, Any]:
    """A figure whose one axis has inches as units."""
    figure = plt.figure(figsize=(width, height))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, width), ylim=(0, height))
    axis.axis("off")
    return figure, axis


def box(
    axis: Any,
    x: float,
    y: float,
    title: str,
    text: str,
    *,
    width: float = 1.75,
    height: float = 0.95,
    colour: str = BLUE,
) -> None:
    """A box centred on (x, y)."""
    corner = (x - width / 2, y - height / 2)
    axis.add_patch(
        FancyBboxPatch(corner, width, height, boxstyle="round,pad=0,rounding_size=0.09", fc="white", ec=colour, lw=1.5)
    )
    axis.text(x, y + height / 2 - 0.2, title, ha="center", va="center", weight="bold", size=10, color=colour)
    axis.text(x, y - 0.13, text, ha="center", va="center", size=8.6, color=INK, linespacing=1.25)


def arrow(
    axis: Any,
    start: Point,
    end: Point,
    label: str = "",
    *,
    at: Point | None = None,
    bend: float = 0.0,
    colour: str = DIM,
    align: str = "center",
) -> None:
    """An arrow, bent by `bend`, with a label at `at` (default: above its middle)."""
    style = {
        "arrowstyle": "-|>",
        "color": colour,
        "lw": 1.4,
        "shrinkA": 0,
        "shrinkB": 0,
        "connectionstyle": f"arc3,rad={bend}",
    }
    axis.annotate("", xy=end, xytext=start, arrowprops=style)
    if label:
        x, y = at or ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.13)
        axis.text(x, y, label, ha=align, va="center", size=8.4, color=colour, linespacing=1.2)


def dataflow() -> Any:
    figure, axis = canvas(10.6, 5.0)
    middle, top, bottom = 2.55, 4.15, 0.75
    box(axis, 1.1, middle, "questions.py", "fresh questions,\nretired ones skipped")
    box(axis, 3.6, middle, "rollout.py", "K or K−1 responses\nper question")
    box(axis, 6.9, middle, "checker", "final answer right?\nr ∈ {0, 1}")
    box(axis, 9.5, middle, "loss.py", "A = r − mean(group)\nclip · shape · sum")
    box(axis, 5.25, top, "policy.py", "the model: $\\log\\,\\pi_\\theta$ of each\ntoken, its entropy", width=2.1)
    box(axis, 5.25, bottom, "replay.py", "stored successes,\nbuckets, retired set", width=2.1, colour=ORANGE)
    arrow(axis, (1.98, middle), (2.72, middle), "prompt\nids", at=(2.35, middle + 0.27))
    arrow(axis, (4.48, middle), (6.02, middle), "group of\nTrajectory", at=(4.9, middle + 0.27))
    arrow(axis, (7.78, middle), (8.62, middle), "with\nreward", at=(8.2, middle + 0.27))
    arrow(
        axis,
        (4.2, top - 0.15),
        (3.6, middle + 0.48),
        "samples come\nfrom $\\pi_\\theta$ itself",
        at=(3.6, 3.75),
        align="right",
    )
    arrow(axis, (9.5, middle + 0.48), (6.3, top), "gradient", at=(9.1, 4.05), bend=0.28, colour=BLUE)
    arrow(
        axis,
        (5.55, top - 0.48),
        (5.55, bottom + 0.48),
        "entropies of\nstored successes",
        at=(5.63, 3.25),
        colour=ORANGE,
        align="left",
    )
    arrow(
        axis,
        (6.9, middle - 0.48),
        (6.1, bottom + 0.48),
        "store successes,\nset bucket k, retire",
        at=(6.65, 1.6),
        colour=ORANGE,
        align="left",
    )
    arrow(
        axis,
        (6.3, bottom),
        (9.5, middle - 0.48),
        "replayed trajectory with $\\log\\,\\pi_{past}$",
        at=(8.95, 0.62),
        bend=0.28,
        colour=ORANGE,
    )
    arrow(
        axis,
        (4.2, bottom),
        (1.1, middle - 0.48),
        "questions to replay,\nids of retired ones",
        at=(1.75, 0.85),
        bend=-0.28,
        colour=ORANGE,
    )
    axis.text(0.22, 4.7, "One step of train.py", size=12, weight="bold")
    return figure


def life() -> Any:
    figure, axis = canvas(10.6, 3.6)
    middle = 2.0
    box(axis, 1.1, middle, "unseen", "waits in the\nepoch's queue", width=1.6, colour=DIM)
    box(axis, 3.75, middle, "asked fresh", "K new\ntrajectories", width=1.6)
    box(
        axis,
        6.75,
        middle,
        "stored in bucket k",
        "k = latest successes,\nsuccesses kept with $\\log\\,\\pi_{past}$",
        width=2.35,
        colour=ORANGE,
    )
    box(axis, 9.65, middle, "retired", "never asked again,\nfresh or replayed", width=1.6, colour=GREEN)
    arrow(axis, (1.9, middle), (2.95, middle), "drawn")
    arrow(axis, (4.55, middle), (5.57, middle), "1..K−1\nright", at=(5.06, middle + 0.28), colour=ORANGE)
    arrow(axis, (7.93, middle), (8.85, middle), "K right", colour=GREEN)
    arrow(
        axis,
        (3.3, middle - 0.48),
        (1.55, middle - 0.48),
        "0 right: nothing stored",
        at=(2.3, middle - 1.0),
        bend=-0.45,
    )
    arrow(
        axis,
        (4.05, middle + 0.48),
        (9.5, middle + 0.48),
        "K right at once",
        at=(6.5, 3.28),
        bend=-0.19,
        colour=GREEN,
    )
    arrow(axis, (6.2, middle - 0.48), (7.3, middle - 0.48), bend=1.25, colour=ORANGE)
    text = (
        "replayed (one stored success + K−1 fresh, so k ≥ 1) or asked fresh in a later epoch:\n"
        "new bucket k, new successes added; if all of a fresh group fail, bucket and store stay"
    )
    axis.text(6.75, 0.42, text, ha="center", va="center", size=8.6, color=ORANGE, linespacing=1.3)
    return figure


# -------------------------------------------------------------------------------------------------- curves


def shaping() -> Any:
    beta, epsilon = TrainConfig().beta, TrainConfig().clip_range
    w = torch.logspace(-3, 2, 501, dtype=torch.float64).requires_grad_()
    f = shape(w, beta)
    (slope,) = torch.autograd.grad(f.sum(), w)
    x, gradient = w.detach(), (slope * w).detach()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.6, 3.6), constrained_layout=True)
    left.plot(x, f.detach(), color=ORANGE, lw=2, label="shaped, f(w*) = w*/(w*+β)")
    left.plot(x, x, color=DIM, lw=1.3, ls="--", label="unshaped, w*")
    left.set(
        xscale="log",
        ylim=(0, 1.6),
        title="weight of a replayed token",
        xlabel="$w^* = \\pi_\\theta\\,/\\,\\pi_{past}$",
    )
    right.plot(x, gradient, color=ORANGE, lw=2, label="shaped, β w*/(w*+β)²")
    right.plot(x, x, color=DIM, lw=1.3, ls="--", label="unshaped, w*")
    for value, name, place in (
        (beta, "w* = β: 0.25", (-8, 2)),
        (1.0, f"w* = 1: {beta / (1 + beta) ** 2:.3f}", (8, 8)),
    ):
        height = beta * value / (value + beta) ** 2
        right.plot([value], [height], "o", color=ORANGE)
        right.annotate(
            name,
            (value, height),
            xytext=place,
            textcoords="offset points",
            ha="right" if place[0] < 0 else "left",
        )
    right.axvspan(1 - epsilon, 1 + epsilon, color=BLUE, alpha=0.12, lw=0)
    right.text(1.35, 0.305, "fresh tokens live here\n(clip, 1 ± ε)", size=8.4, color=BLUE)
    right.set(
        xscale="log",
        ylim=(0, 0.35),
        title="its gradient, by $\\log\\,\\pi_\\theta$, per unit of A",
        xlabel="$w^* = \\pi_\\theta\\,/\\,\\pi_{past}$",
    )
    right.text(0.0011, 0.14, "lost tokens:\npushed back up", size=8.4, color=DIM)
    right.text(110, 0.03, "already far above:\nleft alone", size=8.4, color=DIM, ha="right")
    left.legend(loc="upper left")
    right.legend(loc="upper left")
    return figure


def curves() -> Any:
    run = json.loads((DOCS / "run.json").read_text(encoding="utf-8"))
    rows, started, group_size = run["metrics"], run["started"], run["settings"]["group_size"]
    figure, axes = plt.subplots(2, 3, figsize=(10.6, 5.4), constrained_layout=True)

    def draw(axis: Any, key: str, title: str, colour: str = BLUE, **options: Any) -> None:
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        axis.plot(*zip(*points), color=colour, lw=1.4, **options)
        axis.set_title(title)

    draw(axes[0, 0], "eval/accuracy", "held-out accuracy", marker="o", ms=3.5)
    measured = [row for row in rows if "eval/low" in row]
    axes[0, 0].fill_between(
        [r["step"] for r in measured],
        [r["eval/low"] for r in measured],
        [r["eval/high"] for r in measured],
        alpha=0.18,
        lw=0,
    )
    draw(axes[0, 1], "reward", "reward of fresh rollouts")
    draw(axes[0, 2], "entropy", "entropy, nats a token")
    draw(axes[1, 0], "trained_rows", "share of rows with a gradient")
    draw(axes[1, 1], "replay/ratio_mean", "replayed tokens: mean f(w*)", ORANGE)
    for axis in (axes[0, 0], axes[0, 1], axes[1, 0]):
        axis.set_ylim(0, 1)
    steps = [row["step"] for row in rows if "buffer/buckets" in row]
    counts = [
        [row["buffer/buckets"].get(str(k), 0) for row in rows if "buffer/buckets" in row] for k in range(1, group_size)
    ]
    counts.append([row["buffer/retired"] for row in rows if "buffer/buckets" in row])
    colours = [plt.get_cmap("viridis")(k / (group_size - 1)) for k in range(group_size - 1)] + ["#8b929c"]
    labels = [f"k = {k}" for k in range(1, group_size)] + ["retired"]
    axes[1, 2].stackplot(steps, counts, colors=colours, labels=labels, lw=0)
    axes[1, 2].set_title("questions, by bucket")
    axes[1, 2].legend(fontsize=7, ncols=2, loc="upper left")
    for axis in axes.flat:
        axis.axvline(started, color=ORANGE, lw=1, ls=":")
        axis.set_xlim(0, rows[-1]["step"])
    axes[0, 1].text(started, 0.94, " replay starts", color=ORANGE, size=8.4)
    for axis in axes[1]:
        axis.set_xlabel("step")
    return figure


FIGURES: dict[str, Callable[[], Any]] = {"dataflow": dataflow, "life": life, "shaping": shaping, "curves": curves}


def draw_all(folder: Path = DOCS) -> None:
    """Every figure as <name>.svg in `folder`, whole or not at all; the same bytes every time."""
    for name, draw in FIGURES.items():
        figure = draw()
        temporary = folder / f".{name}.svg.tmp"
        figure.savefig(temporary, format="svg", metadata={"Date": None})
        plt.close(figure)
        os.replace(temporary, folder / f"{name}.svg")
        print(f"{name}.svg")


if __name__ == "__main__":
    draw_all()
