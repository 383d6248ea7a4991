"""Context plots: measured times of split rows beside the model, and the model alone for more GPUs, from one record.

The record has a part for each entry: "jax" by tools/bench/bench_context.py, "nccl" by tools/bench/bench_distributed.py.
Markers are measured; lines are the model's, and shaded where nothing was measured. The record has further parts:
"sharding" by bench_context, and one for each handler of XLA's calls by tools/bench/bench_jax.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from tools.bench import bench_context
from tools.docs import jax_table
from tools.docs.figures import GRAY, PALE, svg
from tools.lab.context_model import BOTH, FORWARD, JAX, NCCL, STRATEGIES, Model
from tools.release import record

RESULTS: Final = ("tools/bench/results/h200_x2.json", "tools/bench/results/h100_x2.json")  # the first that is there
NOT_MEASURED: Final = (
    "No recorded run yet: on a machine with two GPUs `python -m tools.bench.bench_context` and\n"
    f"`python -m tools.bench.bench_distributed`, each with `--kernels FOLDER --record {RESULTS[0]}`, and\n"
    f"`python -m tools.bench.bench_jax --kernels FOLDER --host {RESULTS[0]}` with each handler."
)
SHARDING: Final = "sharding"
HANDLERS: Final = ("python", "native")
TITLES: Final = {FORWARD: "forward", BOTH: "forward + backward"}
ENTRIES: Final = {JAX: "JAX", NCCL: "NCCL, a process each"}
COLORS: Final = {"all_gather": "#4477aa", "ulysses": "#228833", "ring": "#ee6677"}
MARKERS: Final = {JAX: "o", NCCL: "s"}
GPUS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
LABELLED: Final = (1, 2, 8, 64, 512)
UNMEASURED_TOKENS: Final = 1048576
# What no benchmark of this repository measures.
HOST: Final = 264e9  # NVLink of two H200, 128 MiB sent and received at once, 2026-11-22; a record may have its own
NETWORK: Final = 45e9  # assumed: a 400 Gbit/s adapter for each GPU
MEMORY: Final = {"H200": 4e12, "H100": 2.8e12}  # assumed: of 4.8 TB/s, and of 3.35 TB/s
GPUS_OF_HOST: Final = 8


@dataclass(frozen=True, slots=True)
class Point:
    """One measured call of several GPUs. milliseconds: by FORWARD and BOTH, where they were measured."""

    entry: str
    strategy: str
    tokens: int
    gpus: int
    milliseconds: dict[str, float]
    alone: dict[str, float]

    def share(self, part: str) -> float:
        """Returns the share of a perfect split, beside one GPU of the same run."""
        return self.alone[part] / self.gpus / self.milliseconds[part]


def read(root: Path) -> record.Json:
    """Returns the record; {} if nothing was measured."""
    paths = [root / name for name in RESULTS if (root / name).is_file()]
    found: record.Json = json.loads(paths[0].read_text()) if paths else {}
    return found


def points(found: record.Json) -> list[Point]:
    """Returns every measured call of several GPUs of the record."""
    return [point for entry in ENTRIES if entry in found for point in _points_of(entry, found[entry]["rows"])]


def _points_of(entry: str, rows: list[record.Json]) -> Iterator[Point]:
    alone = {row["tokens"]: _times(row) for row in rows if row["name"] == "one GPU"}
    for row in rows:
        strategy, gpus = row["name"].partition(",")[0], _gpus(row)
        one = alone.get(row["tokens"], {})
        times = {part: time for part, time in _times(row).items() if part in one}
        if strategy in STRATEGIES and gpus > 1 and times:
            yield Point(entry, strategy, row["tokens"], gpus, times, one)


def _gpus(row: record.Json) -> int:
    return int(row["devices"] if "devices" in row else row["ranks"])


def _times(row: record.Json) -> dict[str, float]:
    """Returns the milliseconds that were measured; a call that was refused has none."""
    return {part: float(row[part]) for part in TITLES if row.get(part) is not None}


def model(found: record.Json, entry: str) -> Model:
    """Returns the model with the speed of one GPU, and of the exchange if it was measured, in the record."""
    rows = [row for row in found[entry]["rows"] if row["name"] == "one GPU"]
    alone = {(part, row["tokens"]): time for row in rows for part, time in _times(row).items()}
    sizes = bench_context.HEADS, bench_context.HEADS_KEY, bench_context.HEAD_DIM
    return Model(*sizes, alone, _host(found)[0], NETWORK, GPUS_OF_HOST, _memory(found[entry]))


def _memory(part: record.Json) -> float:
    """Returns the bytes in a second of a GPU's memory that are assumed."""
    return next((speed for name, speed in MEMORY.items() if name in part["gpu"]), min(MEMORY.values()))


def _host(found: record.Json) -> tuple[float, str]:
    """Returns the bytes in a second within a host, and where they are from."""
    measured = found.get(NCCL, {}).get("exchange_gb_s")
    return (measured * 1e9, "measured in this run") if measured else (HOST, "measured before")


def pictures(found: record.Json) -> dict[str, str]:
    """Returns the SVG text of the picture by its name; none if nothing was measured."""
    if not (measured := points(found)):
        return {}
    return {"context_parallel": svg(partial(_draw, found=found, measured=measured), 9.6, 6.4)}


def block(found: record.Json) -> str:
    """Returns the Markdown of the comparison and the picture; a sentence if nothing was measured."""
    if not (measured := points(found)):
        return NOT_MEASURED
    abouts = [
        f"{ENTRIES[entry]}: {found[entry]['gpu']} ({found[entry]['driver']}), {found[entry]['date'][:10]}, "
        f"commit {found[entry]['commit'][:12]}."
        for entry in ENTRIES
        if entry in found
    ]
    host, source = _host(found)
    abouts.append(
        f"Model: {host / 1e9:.0f} GB/s within a host ({source}), {NETWORK / 1e9:.0f} GB/s between hosts and "
        f"{_memory(found[measured[0].entry]) / 1e12:g} TB/s of memory (assumed)."
    )
    lines = [
        " ".join(abouts),
        "",
        "| tokens | GPUs | | forward, ms: measured | model | forward + backward, ms: measured | model |",
        f"|{' --- |' * 7}",
    ]
    for point in sorted(measured, key=lambda point: (point.tokens, point.gpus)):
        cells = [str(point.tokens), str(point.gpus), f"{point.strategy}, {ENTRIES[point.entry]}"]
        for part in TITLES:
            time = point.milliseconds.get(part)
            expected = model(found, point.entry)
            arguments = point.strategy, part, point.tokens, point.gpus, point.entry
            cells += ["", ""] if time is None else [f"{time:.3g}", f"{expected.milliseconds(*arguments):.3g}"]
        lines.append(f"| {' | '.join(cells)} |")
    title = "share of a perfect split by number of GPUs: measured points, and the model"
    picture = f"![{title}](../pictures/context_parallel.svg)"
    tables = _peers(found), _sharding(found), _handlers(found)
    return "\n".join([*lines, "", picture, *(line for table in tables if table for line in ("", *table))])


def _time(row: record.Json, part: str, one: record.Json | None) -> str:
    """Returns a measured time, with the share of a perfect split for several GPUs; "refused" if there is none."""
    time = row.get(part)
    if time is None:
        return "refused"
    alone = (one or {}).get(part)
    return f"{time:.3g}" + (f" ({alone / _gpus(row) / time:.2f})" if alone and _gpus(row) > 1 else "")


def _table(rows: Iterable[record.Json], ones: Mapping[int, record.Json], places: Mapping[int, str]) -> Iterator[str]:
    """Yields the lines of a table. ones: the row of one GPU by its tokens; places: the entry of each row by its id."""
    yield "| tokens | GPUs | | forward, ms (share) | forward + backward, ms (share) | memory, MiB | error |"
    yield f"|{' --- |' * 7}"
    for row in rows:
        name = f"{row['name']}{places.get(id(row), '')}"
        memory, error = row.get("memory_mib"), row.get("error")
        cells = [
            str(row["tokens"]),
            str(_gpus(row)),
            name,
            *(_time(row, part, ones.get(row["tokens"])) for part in TITLES),
        ]
        cells += ["" if memory is None else f"{memory:.0f}", f"{error:.1e}" if isinstance(error, float) else ""]
        yield f"| {' | '.join(cells)} |"


def _peers(found: record.Json) -> list[str]:
    """Returns the table of every row beside the peers of the same run."""
    lines: list[str] = []
    for entry in (name for name in ENTRIES if name in found):
        rows = sorted(found[entry]["rows"], key=lambda row: row["tokens"])
        ones = {row["tokens"]: row for row in rows if row["name"] == "one GPU"}
        places = {id(row): f", {ENTRIES[entry]}" for row in rows}
        lines += list(_table(rows, ones, places))[2 if lines else 0 :]
    heading = (
        "These runs with their peers. The memory is that of temporary buffers on each device, of forward and backward. "
        "The error is the largest relative one (rms) beside one GPU's results."
    )
    return [heading, "", *lines]


def _sharding(found: record.Json) -> list[str]:
    """Returns the table of batch and heads; [] if they were not measured."""
    if SHARDING not in found:
        return []
    rows = found[SHARDING]["rows"]
    named = {row["name"]: row for row in rows if _gpus(row) == 1}
    lines = ["| tokens | batch | GPUs | | forward, ms (times as fast) | forward + backward, ms (times as fast) |"]
    lines.append(f"|{' --- |' * 6}")
    for row in rows:
        alone = named.get("one GPU, cuDNN" if "cuDNN" in row["name"] else "one GPU", {})
        cells = [str(row["tokens"]), str(row["batch"]), str(_gpus(row)), row["name"]]
        for part in TITLES:
            time, before = row.get(part), alone.get(part)
            speedup = f" ({before / time:.2f})" if time and before and _gpus(row) > 1 else ""
            cells.append("refused" if time is None else f"{time:.3g}{speedup}")
        lines.append(f"| {' | '.join(cells)} |")
    return [f"Batch and heads, JAX, {found[SHARDING]['gpu']}:", "", *lines]


def _handlers(found: record.Json) -> list[str]:
    """Returns the table of small programs by each handler; [] if not both were measured."""
    runs = [found.get(f"{name} handler") for name in HANDLERS]
    if not all(runs):
        return []
    lines = [f"| small program, times in ms | {' | '.join(f'{name} handler' for name in HANDLERS)} | cuDNN |"]
    lines.append(f"|{' --- |' * 4}")
    for rows in zip(*(run["host"] for run in runs if run), strict=True):
        numbers = [row["ours_ms"] for row in rows] + [rows[-1]["cudnn_ms"]]
        cells = [jax_table.program(rows[0]), *("refused" if it is None else f"{it:.3f}" for it in numbers)]
        lines.append(f"| {' | '.join(cells)} |")
    return ["Small programs in one process, in which host time dominates, by the handler of our calls:", "", *lines]


def _draw(figure: Figure, found: record.Json, measured: list[Point]) -> None:
    lengths = sorted({point.tokens for point in measured})
    columns = [*dict.fromkeys((lengths[-1], max(UNMEASURED_TOKENS, lengths[-1])))]
    axes: Any = figure.subplots(len(TITLES), len(columns), squeeze=False, sharex=True, sharey=True)
    for line, part in zip(axes, TITLES, strict=True):
        for axis, tokens in zip(line, columns, strict=True):
            _draw_panel(axis, found, [point for point in measured if point.tokens == tokens], part, tokens)
        line[0].set_ylabel("share of a perfect split")
    for axis in axes[-1]:
        axis.set_xlabel("GPUs")
    _draw_legend(figure, found)


def _draw_panel(axis: Any, found: record.Json, measured: list[Point], part: str, tokens: int) -> None:
    shown = [point for point in measured if part in point.milliseconds]
    last = max((point.gpus for point in shown), default=GPUS[0])
    axis.axvspan(last * 1.3, GPUS[-1] * 1.3, color=PALE, linewidth=0)
    note = "model, not measured" if shown else "model alone: nothing here is measured"
    axis.text(last * 1.5, 0.03, note, color=GRAY, fontsize=8)
    entry = next(name for name in ENTRIES if name in found)
    expected = model(found, entry)
    if any(name == part for name, _ in expected.one_gpu):
        for strategy in STRATEGIES:
            gpus = [count for count in GPUS if expected.is_possible(strategy, count)]
            shares = [expected.share(strategy, part, tokens, count, entry) for count in gpus]
            axis.plot(gpus, shares, "--", color=COLORS[strategy], linewidth=1.2)
    for point in shown:
        axis.plot(point.gpus, point.share(part), MARKERS[point.entry], color=COLORS[point.strategy], markersize=6,
                  markeredgecolor="white", gid=f"measured_{point.entry}_{point.strategy}")  # fmt: skip
    axis.set_title(f"{TITLES[part]}, {tokens} tokens")
    axis.set_xscale("log", base=2)
    axis.set_xlim(GPUS[0] / 1.3, GPUS[-1] * 1.3)
    axis.set_xticks(LABELLED, [str(count) for count in LABELLED])
    axis.minorticks_off()
    axis.set_ylim(0, max([1.1, *(point.share(part) * 1.08 for point in shown)]))
    axis.axvline(GPUS_OF_HOST * 2**0.5, color=GRAY, linewidth=0.6, linestyle=":")
    axis.grid(axis="y")


def _draw_legend(figure: Figure, found: record.Json) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=COLORS[strategy], linestyle="--", label=f"{strategy}: model") for strategy in STRATEGIES
    ]
    for entry in (name for name in ENTRIES if name in found):
        label = f"measured, {ENTRIES[entry]}, {found[entry]['gpu']}"
        handles.append(Line2D([], [], color=GRAY, marker=MARKERS[entry], linestyle="", label=label))
    label = f"more than {GPUS_OF_HOST} GPUs: over the network"
    handles.append(Line2D([], [], color=GRAY, linewidth=0.6, linestyle=":", label=label))
    figure.legend(handles=handles, loc="outside upper center", ncols=3)
