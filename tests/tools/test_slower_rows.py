"""Tests of the table of rows in which a peer is faster."""

from __future__ import annotations

from typing import Any

from tools.docs import slower_rows


def row(case: str, ours: float, peer: str, rate: float | None, direction: str = "forward") -> dict[str, Any]:
    return {"case": case, "direction": direction, "ours_tflops": ours, "peer": peer, "peer_tflops": rate}


def test_rows_below_the_best_peer_in_order() -> None:
    bursts = [
        *(row("fast", 500, "cudnn", 400), row("fast", 500, "fa4", None)),
        *(row("slow", 500, "cudnn", 550), row("slow", 500, "fa4", 625)),
        row("slower", 300, "fa4", 600, "backward"),
        row("slow for long", 500, "fa4", 490),
        row("alone", 500, "fa4", None),
    ]
    sustained = [row("slow for long", 450, "fa4", 500), row("fast", 450, "cudnn", 400)]
    bursts.append(row("old peer", 400, "flash", 100))
    mean, first, _, _, _, *rows = slower_rows.table(bursts, sustained).splitlines()
    assert mean == (
        "The geometric mean of ours / best peer is 1.15 in the 5 rows that a peer takes and 0.85 in the 4 that "
        "FlashAttention-4 or cuDNN takes. 2 rows are below 1 in bursts."
    )
    assert first == "With the rates at the power limit 3 are, TFLOP/s:"
    assert rows == [
        "| `slower` | backward | 300 | 600 (fa4) | 0.500 |  |",
        "| `slow` | forward | 500 | 625 (fa4) | 0.800 |  |",
        "| `slow for long` | forward | 500 | 490 (fa4) | 1.020 | 0.900 of fa4 |",
    ]
