"""Tests of launch/tile_config.py: the text form of a tile, and the tile of a Build."""

from __future__ import annotations

import dataclasses

import pytest

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan.planner import plan, plan_with_tile
from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape


@pytest.mark.parametrize(
    ("text", "tile"),
    [
        ("64x128x16:3,2", TileConfig(64, 128, 16, 3, 2)),
        ("128x64x12:2", TileConfig(128, 64, 12, 2)),
        ("128x64x4", TileConfig(128, 64, 4)),
        ("64x64x8:3,3@3c256", TileConfig(64, 64, 8, 3, 3, 3, head_dim_split=256)),
        ("64x128x16:4,4q32", TileConfig(64, 128, 16, 4, 4, score_rows=32)),
        ("64x128x16:3,2k2+per_head", TileConfig(64, 128, 16, 3, 2, key_stages=2, variant="per_head")),
        ("128x128x12:2+multicast", TileConfig(128, 128, 12, 2, variant="multicast")),
        ("128x128x12:2-speculative-halves", TileConfig(128, 128, 12, 2, options=("speculative", "halves"))),
        ("128x128x12:2-plain", TileConfig(128, 128, 12, 2, options=())),
        (
            "128x128x12:2+multicast-speculative",
            TileConfig(128, 128, 12, 2, variant="multicast", options=("speculative",)),
        ),
    ],
)
def test_a_tile_is_read_and_written(text: str, tile: TileConfig) -> None:
    assert TileConfig.parse(text) == tile
    assert TileConfig.parse(str(tile)) == tile


@pytest.mark.parametrize("text", ["", "64x128", "64x128x16:", "64x128x16;3,2", "64x128x16:3,2@5c"])
def test_a_wrong_tile_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(NotSupported, match="must be like 64x128x16:3,2"):
        TileConfig.parse(text)


@pytest.mark.parametrize("options", [("halves", "speculative"), ("halves", "halves"), ("fast",), "halves"])
def test_wrong_options_are_refused(options: object) -> None:
    problem = Problem.dense("forward", Shape(2, 300, 300, 4, 64, 64), "bfloat16", Causal())
    tile = dataclasses.replace(TileConfig(128, 128, 12, 2), options=options)  # type: ignore[arg-type]
    with pytest.raises(NotSupported, match=r"tile.options = .*: must be a tuple of some of speculative, halves"):
        plan_with_tile(problem, "sm_90a", tile)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("arch", "head_dim"), [("sm_90a", 64), ("sm_90a", 256), ("sm_80", 128), ("sm_80", 1000)])
def test_the_tile_of_a_build_gives_that_build(direction: str, arch: str, head_dim: int) -> None:
    problem = Problem.dense(direction, Shape(2, 300, 300, 4, head_dim, head_dim), "bfloat16", Causal())
    planned = plan(problem, arch)
    tile = TileConfig.of(planned.build)
    again = plan_with_tile(problem, arch, tile)
    assert dataclasses.replace(again, reason="") == dataclasses.replace(planned, reason="")
