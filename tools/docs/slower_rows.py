"""Table of docs/performance.md: the rows of the committed benchmark in which a peer is faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

Row = Mapping[str, Any]
Key = tuple[str, str]  # case and direction

HEADS: Final = ("case", "direction", "ours", "best peer", "ours / best peer", "at the power limit")


def table(bursts: Sequence[Row], sustained: Sequence[Row]) -> str:
    """Returns how many rows are below 1, and a row for each of them in order of the ratio.

    bursts, sustained: rows of tools/bench/results/h200.json and sustained.json, one for each case, direction and peer.
    """
    found, limited = best_peers(bursts), best_peers(sustained)
    ratios = {key: min(_ratio(each[key]) for each in (found, limited) if key in each) for key in found}
    slower = sorted((ratio, key) for key, ratio in ratios.items() if ratio < 1)
    lines = [f"| {' | '.join(HEADS)} |", f"|{' --- |' * len(HEADS)}"]
    for _, key in slower:
        row = found[key]
        limit = f"{_ratio(limited[key]):.2f} of {limited[key]['peer']}" if key in limited else ""
        cells = [f"`{key[0]}`", key[1], f"{row['ours_tflops']:.0f}", f"{row['peer_tflops']:.0f} ({row['peer']})"]
        lines.append(f"| {' | '.join([*cells, f'{_ratio(row):.2f}', limit])} |")
    return "\n".join([f"{len(slower)} of {len(found)} rows, TFLOP/s:", "", *lines])


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
