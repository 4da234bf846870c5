"""What every picture of this folder needs of matplotlib."""

from __future__ import annotations

import io
from typing import Any

from nano_exgrpo.errors import InputError


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
    figure.savefig(file, dpi=110, format=format, transparent=format == "svg")
    pyplot().close(figure)
    return file.getvalue()


def line_with_band(axis: Any, x: list[float], intervals: list[tuple[float, float, float]], **style: Any) -> None:
    """A curve of (value, low, high) over x, and a band from low to high."""
    value, low, high = zip(*intervals)
    (line,) = axis.plot(x, value, **style)
    axis.fill_between(x, low, high, alpha=0.2, color=line.get_color(), linewidth=0)
