"""The curves of runs as a picture."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from nano_exgrpo.infra.files import write_whole
from nano_exgrpo.infra.run_folder import read_lines

PANELS = [
    ("eval/accuracy", "held-out accuracy"),
    ("reward", "reward of fresh rollouts"),
    ("entropy", "entropy (nats a token)"),
    ("completions/mean_length", "response length (tokens)"),
    ("buffer/questions", "questions in the buffer"),
    ("buffer/retired", "retired questions"),
]


def plot_curves(runs: dict[str, Path], target: Path) -> bool:
    """Draw the curves of one or more runs {label: folder}. False, with a hint, without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no curves.png: plots need matplotlib (pip install matplotlib)", file=sys.stderr)
        return False
    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6), constrained_layout=True)
    for label, folder in runs.items():
        rows = read_lines(folder / "metrics.jsonl")
        for axis, (key, _) in zip(axes.flat, PANELS):
            points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
            if not points:
                continue
            x, y = zip(*points)
            (line,) = axis.plot(x, y, label=label, marker="o" if key.startswith("eval") else None, markersize=3)
            if key == "eval/accuracy":
                low, high = zip(*[(row["eval/low"], row["eval/high"]) for row in rows if row.get(key) is not None])
                axis.fill_between(x, low, high, alpha=0.2, color=line.get_color(), linewidth=0)
    for axis, (key, title) in zip(axes.flat, PANELS):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.grid(alpha=0.3)
        if key in ("eval/accuracy", "reward"):
            axis.set_ylim(0, 1)
    axes.flat[0].legend(fontsize=8)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    pyplot.close(figure)
    write_whole(target, picture.getvalue())
    return True
