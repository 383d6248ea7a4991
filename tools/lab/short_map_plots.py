"""Short map plots: our speed beside the best peer's for short sequences, as one picture a direction."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure

from tools.docs.figures import GRAY, INK, svg
from tools.release import record

RESULTS: Final = "tools/bench/results/short_map.json"
NOT_MEASURED: Final = f"Not measured yet: `python -m tools.lab.short_map --kernels FOLDER --record {RESULTS}`."
DIRECTIONS: Final = ("forward", "backward")
COLORS: Final = LinearSegmentedColormap.from_list("ratio", ("#ee6677", "#ffffff", "#4477aa"))  # slower, equal, faster
LIMIT: Final = 2.0  # ratios beyond 1 / LIMIT and LIMIT have the outermost colors


def read(root: Path) -> record.Json:
    """Returns the record; {} if nothing was measured."""
    path = root / RESULTS
    found: record.Json = json.loads(path.read_text()) if path.is_file() else {}
    return found


def ratio(point: record.Json) -> float | None:
    """Best peer's time / ours: more than 1 is faster than every peer. None if every peer refused."""
    times: list[float] = list(point["peers_us"].values())
    return min(times) / float(point["ours_us"]) if times else None


def pictures(found: record.Json) -> dict[str, str]:
    """Returns the SVG text of each picture by its name; none if nothing was measured."""
    return {f"short_map_{name}": _picture(found, name) for name in DIRECTIONS} if found else {}


def block(found: record.Json) -> str:
    """Returns the Markdown of the pictures, with the machine and the peers; a sentence if nothing was measured."""
    if not found:
        return NOT_MEASURED
    peers = ", ".join(found["peers"].values())
    about = (
        f"On {found['gpu']} ({found['driver']}), {found['date'][:10]}, commit {found['commit'][:12]}. Peers: {peers}."
    )
    images = [f"![short sequences, {name}](../pictures/short_map_{name}.svg)" for name in DIRECTIONS]
    return "\n\n".join([about, *images])


def _picture(found: record.Json, direction: str) -> str:
    points = [point for point in found["points"] if point["direction"] == direction]
    panels = sorted(
        {(point["head_dim"], point["mask"]) for point in points}, key=lambda key: (key[0], key[1] != "full")
    )
    rows = len({_problems(point) for point in points})
    title = f"{direction}, bf16, {found['gpu']}: best peer's time / ours"
    draw = partial(_draw, points=points, panels=panels, title=title)
    return svg(draw, 9.6, 0.6 + math.ceil(len(panels) / 2) * (0.75 + 0.27 * rows))


def _problems(point: record.Json) -> tuple[int, int]:
    return point["batch"], point["heads"]


def _draw(figure: Figure, points: Sequence[record.Json], panels: Sequence[tuple[int, str]], title: str) -> None:
    figure.suptitle(title, fontsize=10, fontweight="bold")
    axes: Any = figure.subplots(math.ceil(len(panels) / 2), 2, squeeze=False, sharex=True, sharey=True)
    lengths = sorted({point["seqlen"] for point in points})
    problems = sorted({_problems(point) for point in points})
    for axis, (head_dim, mask) in zip(axes.flat, panels, strict=False):
        chosen = [point for point in points if (point["head_dim"], point["mask"]) == (head_dim, mask)]
        places = {(problems.index(_problems(point)), lengths.index(point["seqlen"])): ratio(point) for point in chosen}
        _draw_panel(axis, places, len(problems), len(lengths))
        axis.set_title(f"head dim {head_dim}, {mask}")
        axis.set_xticks([index + 0.5 for index in range(len(lengths))], lengths)
        axis.set_yticks([index + 0.5 for index in range(len(problems))], [f"{b} x {h}" for b, h in problems])
    for axis in axes[-1]:
        axis.set_xlabel("sequence length")
    for axis in axes[:, 0]:
        axis.set_ylabel("batch x heads")


def _draw_panel(axis: Any, places: dict[tuple[int, int], float | None], rows: int, columns: int) -> None:
    values = [[places.get((row, column)) or math.nan for column in range(columns)] for row in range(rows)]
    norm = LogNorm(1 / LIMIT, LIMIT, clip=True)
    axis.pcolormesh(values, cmap=COLORS, norm=norm, edgecolors="white", linewidth=0.8)
    for (row, column), value in places.items():
        text, color = (f"{value:.2f}", INK) if value else ("-", GRAY)
        axis.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=7, color=color)
    axis.set_ylim(rows, 0)
    axis.spines[:].set_visible(False)
