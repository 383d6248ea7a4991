"""Tests of plan/tile_shares.py: counted by hand for small tiles, and in the text of a plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cutlass_py_attn import (
    BlockSparse,
    Causal,
    Full,
    KeyRanges,
    MaskFunction,
    NotSupported,
    Problem,
    Shape,
    Window,
    plan_forward,
)
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.plan.tile_shares import TileShares, tile_shares


def plan_of(num_queries: int = 512, num_keys: int = 512) -> Plan:
    shape = Shape(32, num_queries, num_keys, 16, 128, 128)
    return plan_forward(Problem.dense("forward", shape, "bfloat16"), "sm_90a")


TRIANGLE = (512 * 513 / 2) / 512**2
IDS = np.repeat(np.arange(4), 128)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (Full(), TileShares(1.0, 1.0, 0.0)),
        (Causal(), TileShares(TRIANGLE, 10 / 16, 4 / 10)),
        (KeyRanges.of(Causal(), 512, 512), TileShares(TRIANGLE, 10 / 16, 4 / 10)),
        (KeyRanges.documents([0, 128, 256, 512], 512), TileShares(6 / 16, 6 / 16, 0.0)),
        (BlockSparse(np.eye(4, dtype=bool)[None, None], within=Causal()), TileShares(4 * 8256 / 512**2, 0.25, 1.0)),
        (MaskFunction(lambda b, h, q, k, ids: ids[q] == ids[k], {"ids": IDS}), TileShares(0.25, 0.25, 0.0)),
        (MaskFunction(lambda b, h, q, k: k < 0), TileShares(0.0, 0.0, 0.0)),
    ],
    ids=["full", "causal", "causal ranges", "documents", "blocks", "function", "nothing"],
)
def test_shares(mask: Any, expected: TileShares) -> None:
    plan = plan_of()
    assert (plan.build.tile_m, plan.build.tile_n) == (128, 128)
    assert tile_shares(plan, mask) == expected


def test_tiles_that_the_lengths_cut_are_partial() -> None:
    """Keys behind the last one are hidden in every query tile, queries behind the last one in none."""
    shares = tile_shares(plan_of(200, 300), Full())
    assert shares == TileShares(1.0, 1.0, 2 / 6)


def test_a_head_and_a_sequence() -> None:
    mask = MaskFunction(lambda b, h, q, k: (h == 1) & (b == 0))
    assert tile_shares(plan_of(), mask).visited == 0
    assert tile_shares(plan_of(), mask, head=1).pairs == 1
    assert tile_shares(plan_of(), mask, batch=1, head=1).pairs == 0


def test_the_text_of_a_plan() -> None:
    text = plan_of().explain(mask=Window(127, 0))
    assert (
        "of the first sequence and head: 43.8% of the tiles visited, 100.0% of these partial; 21.9% of the pairs"
        in text
    )
    assert "of the first sequence" not in plan_of().explain()


def test_what_is_refused() -> None:
    with pytest.raises(NotSupported, match="must be a mask; create one, such as Causal"):
        plan_of().explain(mask="causal")  # type: ignore[arg-type]
    with pytest.raises(NotSupported, match="must be of the plan's 512 queries, 512 keys and 16 heads"):
        tile_shares(plan_of(), KeyRanges.of(Causal(), 100, 512))
