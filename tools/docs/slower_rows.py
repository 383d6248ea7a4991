"""Table of docs/performance.md: the rows of the committed benchmark in which a peer is faster."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from tools.docs.benchmark_plots import tick_label

Row = Mapping[str, Any]
Key = tuple[str, str]  # case and direction

WGMMA: Final = ("fa4", "cudnn", "cudnn_frontend")  # the peers with kernels of wgmma
DECIMALS_BELOW: Final = 100  # TFLOP/s: decode steps have few
HEADS: Final = ("case", "direction", "ours", "best peer", "ours / best peer", "at the power limit")


def table(bursts: Sequence[Row], sustained: Sequence[Row]) -> str:
    """Returns the mean ratio, how many rows are below 1, and a row for each of them in order of the ratio.

    bursts, sustained: rows of a record of tools/bench/results, one for each case, direction and peer.
    """
    found, limited = best_peers(bursts), best_peers(sustained)
    ratios = {key: min(_ratio(each[key]) for each in (found, limited) if key in each) for key in found}
    slower = sorted((ratio, key) for key, ratio in ratios.items() if ratio < 1)
    lines = [f"| {' | '.join(HEADS)} |", f"|{' --- |' * len(HEADS)}"]
    for _, key in slower:
        row = found[key]
        limit = f"{_ratio(limited[key]):.3f} of {limited[key]['peer']}" if key in limited else ""
        cells = [
            f"`{tick_label(key[0])}`",
            key[1],
            _rate(row["ours_tflops"]),
            f"{_rate(row['peer_tflops'])} ({row['peer']})",
        ]
        lines.append(f"| {' | '.join([*cells, f'{_ratio(row):.3f}', limit])} |")
    return "\n".join([summary(bursts), f"With the rates at the power limit {len(slower)} are, TFLOP/s:", "", *lines])


def summary(bursts: Sequence[Row]) -> str:
    """Returns the geometric mean of all rows, that of the rows which a peer of WGMMA takes, and the rows below 1."""
    found = best_peers(bursts)
    taken = {(row["case"], row["direction"]) for row in bursts if row["peer"] in WGMMA and row["peer_tflops"]}
    of_wgmma = [row for key, row in found.items() if key in taken]
    below = sum(_ratio(row) < 1 for row in found.values())
    return (
        f"The geometric mean of ours / best peer is {_mean(found.values())} in the {len(found)} rows that a peer takes "
        f"and {_mean(of_wgmma)} in the {len(of_wgmma)} that FlashAttention-4 or cuDNN takes. "
        f"{below} rows are below 1 in bursts."
    )


def _rate(tflops: float) -> str:
    return f"{tflops:.0f}" if tflops >= DECIMALS_BELOW else f"{tflops:.1f}"


def _mean(rows: Iterable[Row]) -> str:
    ratios = [_ratio(row) for row in rows]
    return f"{statistics.geometric_mean(ratios):.2f}" if ratios else "undefined"


def best_peers(rows: Sequence[Row]) -> dict[Key, Row]:
    """Returns the row of the fastest peer of each case and direction that a peer takes."""
    found: dict[Key, Row] = {}
    for row in rows:
        key = row["case"], row["direction"]
        if row["peer_tflops"] and (key not in found or row["peer_tflops"] > found[key]["peer_tflops"]):
            found[key] = row
    return found


def _ratio(row: Row) -> float:
    return float(row["ours_tflops"] / row["peer_tflops"])
