"""Benchmark plots: the rates of our kernels and of the peers, drawn from the committed benchmark."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from matplotlib.figure import Figure

from cutlass_py_attn.integers import ceil_div
from tools.docs.figures import GRAY, svg
from tools.release import record

BENCHMARK: Final = "tools/bench/results/h200.json"
# The benchmark calls FlashAttention-4 itself, and the other peers through torch's operators.
LABELS: Final = {
    "ours": "cutlass_py_attn",
    "fa4": "FlashAttention-4",
    "cudnn": "cuDNN (torch)",
    "cudnn_frontend": "cuDNN (its frontend)",
    "flash": "FlashAttention-2 (torch)",
    "mem_efficient": "memory-efficient (torch)",
}
COLORS: Final = {
    "ours": "#4477aa",
    "fa4": "#228833",
    "cudnn": "#ccbb44",
    "cudnn_frontend": "#aa3377",
    "flash": "#ee6677",
    "mem_efficient": "#c3c8ce",
}
DIRECTIONS: Final = ("forward", "backward")
LEGEND_COLUMNS: Final = 4
DTYPES: Final = ("bf16", "f16", "f32")
FEW_QUERIES: Final = 128  # the most of a case whose time is that of reading its keys
PLAIN_PARTS: Final = 6  # of a case's name without features: dtype, head dim, length, batch, heads, mask
# One model size, so many sequences that each batch has 32768 tokens: the sweep that attention papers show.
SWEEP: Final = {
    512: "bf16_d128_s512_b64_h16_causal",
    2048: "bf16_d128_s2048_b16_h16_causal",
    8192: "bf16_d128_s8192_b4_h16_causal",
    16384: "bf16_d128_s16384_b2_h16_causal",
}


@dataclass(frozen=True, slots=True)
class Bars:
    """Data of one bar chart: for each case (label, rate by implementation); rates in `unit`.

    labels: what the legend says for an implementation.
    """

    title: str
    unit: str
    groups: tuple[tuple[str, dict[str, float]], ...]
    labels: Mapping[str, str] = field(default_factory=lambda: LABELS)

    @property
    def implementations(self) -> list[str]:
        """Ours and the peers that have a rate, in the order of LABELS."""
        return [name for name in LABELS if any(name in rates for _, rates in self.groups)]


def plots(rows: Sequence[record.Json]) -> dict[str, str]:
    """Returns the SVG text of every plot by its name."""
    found = {name: horizontal_bars(bars) for name, bars in charts(rows)}
    return {"overview": overview(rows), **found}


def labels(rows: Sequence[record.Json]) -> dict[str, str]:
    """Returns LABELS with the versions of the peers that the record names."""
    versions = {row["peer"]: row["peer_version"] for row in rows if row.get("peer_version")}
    kinds = {peer: version.partition(" of torch ") for peer, version in versions.items()}
    return {**LABELS, **{peer: f"{kind} (torch)" if torch else kind for peer, (kind, torch, _) in kinds.items()}}


def charts(rows: Sequence[record.Json]) -> Iterator[tuple[str, Bars]]:
    """Yields (name, data) of each bar chart; together they show every rate of the benchmark."""
    gpu, shown = rows[0]["gpu"], labels(rows)
    for direction in DIRECTIONS:
        of_direction = [row for row in rows if row["direction"] == direction and not _is_decode(row)]
        for dtype in DTYPES:
            chosen = [row for row in of_direction if _is_plain(row) and row["case"].startswith(f"{dtype}_")]
            yield (
                f"{direction}_{dtype}",
                Bars(f"{direction}, {dtype}, {gpu}", "TFLOP/s", _groups(chosen, "tflops"), shown),
            )
        chosen = [row for row in of_direction if not _is_plain(row)]
        title = f"{direction}, features and other shapes, {gpu}"
        yield f"{direction}_features", Bars(title, "TFLOP/s", _groups(chosen, "tflops"), shown)
    chosen = [row for row in rows if _is_decode(row)]
    yield "decode", Bars(f"decode: few queries, many keys, {gpu}", "GB/s", _groups(chosen, "gb_s"), shown)


def overview(rows: Sequence[record.Json]) -> str:
    """Returns the plot for a first look: bf16, head dim 128, causal, by sequence length, forward and backward."""
    panels = []
    for direction in DIRECTIONS:
        chosen = [row for row in rows if row["direction"] == direction]
        rates = dict(_groups(chosen, "tflops"))
        groups = tuple((str(length), rates[name]) for length, name in SWEEP.items())
        panels.append(Bars(direction, "TFLOP/s", groups, labels(rows)))
    title = f"Attention on {rows[0]['gpu']}: bf16, head dim 128, causal, 16 heads, 32768 tokens"
    return svg(partial(_draw_overview, panels=panels, title=title), 9.6, 3.6)


def _draw_overview(figure: Figure, panels: Sequence[Bars], title: str) -> None:
    names = list(dict.fromkeys(name for panel in panels for name in panel.implementations))
    width = 0.84 / len(names)
    size = 7 if len(names) <= LEGEND_COLUMNS else 6  # of the numbers above the bars
    axes: Any = figure.subplots(1, len(panels), sharey=True)
    for axis, panel in zip(axes, panels, strict=True):
        for index, name in enumerate(names):
            offset = (index - (len(names) - 1) / 2) * width
            places = [(at + offset, rates[name]) for at, (_, rates) in enumerate(panel.groups) if name in rates]
            bars = axis.bar([at for at, _ in places], [rate for _, rate in places], width * 0.94, color=COLORS[name],
                            label=panel.labels[name])  # fmt: skip
            axis.bar_label(bars, fmt="%.0f", padding=1, fontsize=size, color=GRAY)
        axis.set_title(panel.title)
        axis.set_xticks(range(len(panel.groups)), [label for label, _ in panel.groups])
        axis.set_xlabel("sequence length")
        axis.grid(axis="y")
    axes[0].set_ylabel(panels[0].unit)
    handles, labels = axes[0].get_legend_handles_labels()
    _legend(figure, title, handles=handles, labels=labels, loc="outside upper center", ncols=_columns(names))


def _columns(names: Collection[str]) -> int:
    """Columns of a legend: one line if it fits in a figure's width."""
    return len(names) if len(names) <= LEGEND_COLUMNS else ceil_div(len(names), 2)


def _legend(figure: Figure, title: str, **options: Any) -> None:
    figure.legend(title=title, title_fontproperties={"size": 10, "weight": "bold"}, **options)


def horizontal_bars(bars: Bars) -> str:
    """Returns a chart with one group of horizontal bars for each case."""
    count = sum(len(rates) for _, rates in bars.groups)
    return svg(partial(_draw_bars, bars=bars), 9.6, 0.9 + 0.17 * count + 0.1 * len(bars.groups))


def _draw_bars(figure: Figure, bars: Bars) -> None:
    axis = figure.subplots()
    ticks, at = [], 0.0
    places: dict[str, list[tuple[float, float]]] = {name: [] for name in bars.implementations}
    for _, rates in bars.groups:
        present = [name for name in places if name in rates]
        ticks.append(at + (len(present) - 1) / 2)
        for name in present:
            places[name].append((at, rates[name]))
            at += 1
        at += 0.6  # between groups
    for name, found in places.items():
        drawn = axis.barh([y for y, _ in found], [rate for _, rate in found], 0.9, color=COLORS[name],
                          label=bars.labels[name])  # fmt: skip
        axis.bar_label(drawn, fmt="%.0f", padding=3, fontsize=7.5, color=GRAY)
    axis.set_yticks(ticks, [tick_label(case) for case, _ in bars.groups])
    axis.set_ylim(at - 0.9, -0.7)
    axis.set_xlabel(f"{bars.unit}, higher is better")
    axis.grid(axis="x")
    _legend(figure, bars.title, loc="outside upper center", ncols=_columns(places))


def tick_label(case: str) -> str:
    """Returns a case's name; equal sequences that follow one another are written once, with their number."""
    first, *others = case.split(",")
    head, mark, sequence = first.rpartition("_n")
    if not mark:
        return case
    *sequences, last = sequence, *others
    last, _, rest = last.partition("_")
    counted = [(each, len(list(group))) for each, group in itertools.groupby([*sequences, last])]
    return f"{head}_n{','.join(f'{count} x ({each})' if count > 1 else each for each, count in counted)}_{rest}"


def _is_decode(row: record.Json) -> bool:
    """Whether a case has a rate in GB/s and few queries; a chunk of a prompt has the rate, and a time of its FLOPs."""
    queries = [int(part[1:]) for part in row["case"].split("_") if part[0] == "q" and part[1:].isdigit()]
    return bool(row["ours_gb_s"]) and queries[0] <= FEW_QUERIES


def _is_plain(row: record.Json) -> bool:
    """Whether a case is masked attention alone, of the shapes that each of DTYPES is measured with."""
    parts = row["case"].split("_")
    is_shaped = len(parts) == PLAIN_PARTS and parts[1] in ("d64", "d128") and parts[2] in ("s2048", "s8192")
    return parts[0] in DTYPES and is_shaped and parts[3].startswith("b") and "k" not in parts[4]


def _groups(rows: Sequence[record.Json], what: str) -> tuple[tuple[str, dict[str, float]], ...]:
    """Returns (case, rate by implementation) of each case; a peer's GB/s follow from its ratio to ours."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        rates = found.setdefault(row["case"], {"ours": row[f"ours_{what}"]})
        if row["peer"] and row["ratio"] is not None:  # None: the peer refused the case
            rates[row["peer"]] = row["peer_tflops"] if what == "tflops" else row["ours_gb_s"] / row["ratio"]
    return tuple(found.items())
