"""Tests of launch/gemm_spec.py: instruction counts and refused shapes of a product."""

from __future__ import annotations

from typing import Any

import pytest

from cutlass_py_attn.launch.gemm_spec import GemmSpec


def spec(m: int, n: int, k: int, **changes: Any) -> GemmSpec:
    given: dict[str, Any] = {"item_bytes": 2, "family": "sm80", "warps": (4, 2)} | changes
    return GemmSpec("S", "S = Q K^T", m, n, k, False, False, False, **given)


@pytest.mark.parametrize(
    ("of", "count"),
    [
        (spec(128, 64, 32), 2 * 4 * 2),  # a warp has 32 x 32: m16n8k16
        (spec(128, 64, 32, item_bytes=4), 2 * 4 * 4 * 3),  # m16n8k8, three times for float32
        (spec(128, 64, 32, warps=(2, 4)), 4 * 2 * 2),
        (spec(128, 64, 32, family="sm90", warps=(8, 1)), 2),  # a warpgroup has 64 rows: m64n64k16
        (spec(128, 64, 32, family="sm90", warps=(4, 1)), 4),
    ],
)
def test_instructions_are_those_of_one_warp_or_warpgroup(of: GemmSpec, count: int) -> None:
    assert of.instructions == count
    assert of.objections() == []


@pytest.mark.parametrize(
    ("of", "texts"),
    [
        (spec(64, 64, 32, family="sm90", warps=(4, 1)), []),
        (spec(96, 64, 32, family="sm90", warps=(4, 1)), ["S: m = 96: each of 1 warpgroups"]),
        (spec(64, 64, 32, family="sm90", warps=(5, 1)), ["S: m = 64: each of 1 warpgroups"]),
        (spec(64, 264, 32, family="sm90", warps=(4, 1)), ["S: n = 264: wgmma has"]),
        (spec(64, 256, 32, family="sm90", warps=(4, 1)), []),
        (spec(64, 60, 32, family="sm90", warps=(4, 1)), ["S: n = 60: wgmma has"]),
        (spec(96, 64, 32), ["S: 96 x 64: not divisible by 4 x 2 warps of 16 x 16"]),
        (spec(64, 48, 32), ["S: 64 x 48: not divisible by 4 x 2 warps of 16 x 16"]),
        (spec(64, 48, 32, item_bytes=4), []),
        (spec(64, 64, 24), ["S: k = 24: must be a multiple of 16"]),
        (spec(64, 64, 24, item_bytes=4), []),
        (spec(16, 32, 16, warps=(1, 2)), []),  # fewer rows than a warpgroup has
        (spec(64, 320, 32), []),  # wider than wgmma
    ],
)
def test_shapes_that_the_warps_do_not_divide_are_refused(of: GemmSpec, texts: list[str]) -> None:
    found = of.objections()
    assert len(found) == len(texts)
    assert all(each.startswith(text) for each, text in zip(found, texts, strict=True))
