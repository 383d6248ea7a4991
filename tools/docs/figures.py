"""Figures: the matplotlib style of every picture of the documentation, and SVG text that is the same on each run."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, Final

import matplotlib.style
from matplotlib.figure import Figure

INK, GRAY, PALE = "#1f2933", "#7b8794", "#e4e7eb"
# Ten colors that stay apart in print and for color-blind readers (after Paul Tol's schemes); 0 is for no step.
COLORS: Final = (
    *("#bbbbbb", "#4477aa", "#ee6677", "#228833", "#bb9f2b"),
    *("#3aa6cc", "#aa3377", "#ee8866", "#44bb99", "#77aadd"),
)
STYLE: Final[dict[str, Any]] = {
    "svg.hashsalt": "cutlass_py_attn",  # element ids are random without it
    "svg.fonttype": "none",  # text stays text: small files, readable by search and by screen readers
    "font.family": ["DejaVu Sans", "sans-serif"],  # matplotlib ships the first, which fixes the layout
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titleweight": "bold",
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.edgecolor": GRAY,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": PALE,
    "legend.frameon": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.6,
    "ytick.major.size": 0,
}
NO_METADATA: Final = {"Date": None, "Creator": None, "Format": None, "Type": None}


def svg(draw: Callable[[Figure], None], width: float, height: float) -> str:
    """Returns the SVG text of a figure of `width` by `height` inches that `draw` fills."""
    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
        draw(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=NO_METADATA)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
