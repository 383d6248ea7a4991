"""Tests of problem/split_rows.py: how often key heads are repeated for devices with whole groups of query heads."""

from __future__ import annotations

import pytest

from cutlass_py_attn.problem.split_rows import repeats_of_key


@pytest.mark.parametrize(
    ("heads", "heads_key", "size", "repeats"),
    [
        (8, 8, 4, 1),  # two key heads a device
        (8, 2, 2, 1),
        (8, 2, 4, 2),  # a key head for two devices
        (12, 2, 4, 2),
        (6, 3, 2, 2),  # three copies a device, each with one query head
        (12, 3, 8, None),  # 24 copies for 12 query heads
        (8, 2, 3, None),
    ],
)
def test_repeats_of_key(heads: int, heads_key: int, size: int, repeats: int | None) -> None:
    assert repeats_of_key(heads, heads_key, size) == repeats
