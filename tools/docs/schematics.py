"""Schematics: the schedule and the shared memory of the sm_90a backward, drawn for docs/concepts.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from matplotlib.figure import Figure

from cutlass_py_attn.inspection.facts import shared_memory_rows
from cutlass_py_attn.launch.build import STEPS
from cutlass_py_attn.plan.planner import plan_backward
from cutlass_py_attn.problem import masks
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape
from tools.docs.figures import COLORS, GRAY, INK, PALE, svg

ROLES: Final = ("1 warp: TMA loads", "2 warpgroups: tensor cores", "2 warpgroups: registers", "1 warpgroup: dQ")
PERIOD: Final = 12.0
# (role, step of sm90_backward/backward.py, label, begin, length) of one iteration, in units of no particular time.
SCHEDULE: Final = (
    (0, 0, "Q, dO of a later iteration", 0.0, 11.8),
    (1, 6, "6  dK of {previous}", 0.0, 2.9),
    (1, 3, "3  dP", 3.0, 2.9),
    (1, 5, "5  dV", 6.0, 2.9),
    (1, 1, "1  S of {next}", 9.0, 2.8),
    (2, 2, "2  P", 0.0, 2.9),
    (2, 4, "4  dS", 6.0, 2.9),
    (3, 7, "7  dQ of {previous}", 0.0, 2.9),
    (3, 7, "7  dQ", 9.1, 2.7),
)
DS_STORED: Final = 9.0  # dS is in shared memory
MINIMUM_HEIGHT: Final = 0.045  # of a buffer, as a fraction of all shared memory: enough for its label


def schematics() -> dict[str, str]:
    """Returns the SVG text of every schematic by its name."""
    shape = Shape(1, 128, 128, 132, 128, 128)  # a head for each multiprocessor
    build = plan_backward(Problem.dense("backward", shape, "bfloat16", masks.Causal()), "sm_90a").build
    rows, steps = shared_memory_rows(build), STEPS[build.kind]
    title = f"Shared memory of {build.symbol}"
    return {
        "backward_schedule": svg(_draw_schedule, 11, 3.1),
        "backward_shared_memory": svg(partial(_draw_shared_memory, rows=rows, steps=steps, title=title), 9.6, 5.2),
    }


def _draw_schedule(figure: Figure) -> None:
    axis = figure.subplots()
    for iteration, tiles in enumerate((("n - 1", "n", "n + 1"), ("n", "n + 1", "n + 2"))):
        start = PERIOD * iteration
        axis.axvline(start, color=GRAY, linewidth=0.8)
        axis.text(start + PERIOD / 2, -0.62, f"query tile {tiles[1]}", ha="center", fontweight="bold")
        for role, step, label, begin, length in SCHEDULE:
            axis.barh(role, length, 0.72, start + begin, color=COLORS[step])
            text = label.format(previous=tiles[0], next=tiles[2])
            axis.text(start + begin + 0.15, role, text, va="center", fontsize=8, fontweight="bold",
                      color=INK if step == 0 else "white")  # fmt: skip
        arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0}
        axis.annotate("", (start + DS_STORED + 0.05, 2.66), (start + DS_STORED + 0.05, 2.0), arrowprops=arrow)
    axis.set_yticks(range(len(ROLES)), ROLES)
    axis.set_xlim(0, 2 * PERIOD)
    axis.set_ylim(len(ROLES) - 0.5, -0.95)
    axis.set_xticks([])
    axis.spines[["left", "bottom"]].set_visible(False)
    axis.set_title("Two iterations of the sm_90a backward (widths are not times)", pad=10)
    axis.set_xlabel("Arrows: dS goes through shared memory. dK and dV stay in registers until the last iteration.")


def _draw_shared_memory(figure: Figure, rows: Sequence[Mapping[str, Any]], steps: Sequence[str], title: str) -> None:
    axis = figure.subplots()
    total = max(row["offset"] + row["bytes"] for row in rows)
    columns = max(len(steps), 1 + max(row["last"] for row in rows))
    labels, edges = [], [0.0]
    for index, row in enumerate(rows):
        height = max(MINIMUM_HEIGHT, row["bytes"] / total)
        color = COLORS[1 + index % (len(COLORS) - 1)]
        axis.barh(edges[-1], row["last"] - row["first"] + 1, height, row["first"], align="edge", color=color,
                  edgecolor="white", linewidth=1.5)  # fmt: skip
        axis.text(row["first"] + 0.06, edges[-1] + height / 2, f"{row['name']}  {_size(row['bytes'])}", va="center",
                  fontsize=7.5, fontweight="bold", color="white")  # fmt: skip
        labels.append(str(row["offset"]))
        edges.append(edges[-1] + height)
    axis.set_yticks(edges, [*labels, str(total)])
    axis.set_ylabel(f"offset in bytes, {_size(total)} in all")
    axis.set_ylim(edges[-1], 0)
    axis.set_xlim(0, columns)
    for column in range(1, columns):
        axis.axvline(column, color=PALE, linewidth=0.8, zorder=0)
    names = [*steps, *map(str, range(len(steps), columns))]
    axis.set_xticks([column + 0.5 for column in range(columns)], [f"{n}  {name}" for n, name in enumerate(names)])
    axis.tick_params(bottom=False, labelbottom=False, labeltop=True)
    axis.spines["bottom"].set_visible(False)
    axis.set_title(title, pad=24)


def _size(count: int) -> str:
    return f"{count / 1024:.0f} KiB" if count >= 1024 else f"{count} B"
