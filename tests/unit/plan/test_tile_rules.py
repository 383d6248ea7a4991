"""Tests of the rules of kernels and plan_with_tile: tiles that no kernel body can have are refused, with the field."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cutlass_py_attn
from cutlass_py_attn.errors import DoesNotFit, NotSupported
from cutlass_py_attn.kernels.catalogue import KERNELS
from cutlass_py_attn.kernels.decode import tiles as decode_tiles
from cutlass_py_attn.kernels.sm80 import tiles as sm80_tiles
from cutlass_py_attn.kernels.sm90_family import choice as sm90_choice
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan import build_rules, resources
from cutlass_py_attn.plan.builder import build_for
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.plan.planner import plan, plan_with_tile, plans
from cutlass_py_attn.problem.masks import Causal, Full, Window
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.tensors import Shape
from tests.support.any_problem import ARCHS, problems

ARCH_OF = {"sm90": "sm_90a", "sm80": "sm_90", "decode": "sm_90"}


GROUPED: dict[str, Any] = {"heads_key": 2}


def problem_of(
    kind: str, head_dim: int = 128, length: int = 512, dtype: str = "bfloat16", heads_key: int = 4, **changes: Any
) -> Problem:
    queries = 1 if kind == "decode" else length
    direction = "forward" if kind == "decode" else kind
    shape = Shape(2, queries, length, 4, head_dim, head_dim, heads_key)
    return Problem.dense(direction, shape, dtype, Causal()).replace(**changes)


def reasons_of(problem: Problem, family: str, tile: str | TileConfig) -> list[str]:
    """What plan_with_tile says; empty if it gives a plan."""
    parsed = TileConfig.parse(tile) if isinstance(tile, str) else tile
    try:
        plan_with_tile(problem, ARCH_OF[family], parsed, family=family)
    except DoesNotFit as error:
        return [*error.reasons]
    return []


INVALID: list[tuple[str, str, str, str, dict[str, Any]]] = [
    # (family, kind, tile, refused field and value, what the problem has)
    ("sm80", "forward", "128x64x4:2", "query_stages = 2", {}),
    ("sm80", "forward", "128x64x3:1", "warps = 3", {}),
    ("sm80", "forward", "64x64x8:1", "tile_m = 64", {}),
    ("sm80", "forward", "72x64x4:1", "tile_m = 72", {}),
    ("sm80", "forward", "128x40x4:1", "tile_n = 40", {}),
    ("sm80", "forward", "128x64x4:1,1", "grad_output_stages = 1", {}),
    ("sm80", "forward", "128x64x4:1k2", "key_stages = 2", {}),
    ("sm80", "forward", "128x64x4:1q32", "score_rows = 32", {}),
    ("sm80", "forward", "128x64x4:1@11", "register_usage_level = 11", {}),
    ("sm80", "forward", "128x64x4:1c128", "head_dim_split = 128", {}),
    ("sm80", "forward", "64x64x8:2+split_d", "head_dim_split = 0", {}),
    ("sm80", "forward", "128x64x4:1+multicast", "variant = 'multicast'", {}),
    ("sm80", "forward", "128x64x4:1+wide", "variant = 'wide'", {}),
    ("sm80", "forward", "0x64x4:1", "tile_m = 0", {}),
    ("sm80", "forward", "128x64x4:0", "query_stages = 0", {}),
    ("sm80", "backward", "64x64x4:2,1", "grad_output_stages = 1", {}),
    ("sm80", "backward", "64x64x4:3,3", "query_stages = 3", {}),
    ("sm80", "backward", "64x64x4:1,0", "grad_output_stages = 0", {}),
    ("sm80", "backward", "64x64x16:1,1", "warps = 16", {}),
    ("sm80", "backward", "64x64x4:1,1+per_head", "variant = 'per_head'", {}),
    ("sm80", "backward", "32x32x8:1,1", "tile_m = 32", {"head_dim": 32}),
    ("sm80", "backward", "64x128x4:2,2", "accumulators = ", {"head_dim": 128}),
    ("sm80", "forward", "128x64x8:2c512+split_d", "tile_m = 128", {"head_dim": 512}),
    ("sm80", "forward", "64x64x4:2c512+split_d", "warps = 4", {"head_dim": 512}),
    ("sm80", "forward", "64x64x8:1c512+split_d", "query_stages = 1", {"head_dim": 512}),
    ("sm80", "forward", "64x64x8:2c100+split_d", "head_dim_split = 100", {"head_dim": 512}),
    ("sm80", "forward", "64x64x8:2c1024+split_d", "head_dim_split = 1024", {"head_dim": 2048}),
    ("sm80", "backward", "64x128x8:3,3c256+split_d", "tile_n = 128", {"head_dim": 512}),
    ("sm80", "backward", "64x64x8:3,2c256+split_d", "grad_output_stages = 2", {"head_dim": 512}),
    ("sm90", "forward", "192x128x12:2", "tile_m = 192", {"head_dim": 64}),
    ("sm90", "forward", "128x72x12:2", "tile_n = 72", {"head_dim": 64}),
    ("sm90", "forward", "128x272x12:2", "tile_n = 272", {"head_dim": 64}),
    ("sm90", "forward", "128x128x8:2", "tile_m = 128", {}),
    ("sm90", "forward", "64x128x4:2", "warps = 4", {}),
    ("sm90", "forward", "128x128x13:2", "warps = 13", {}),
    ("sm90", "forward", "128x128x12:1", "query_stages = 1", {}),
    ("sm90", "forward", "128x112x12:2", "tile_n = 112", {"dropout_p": 0.1}),
    ("sm90", "forward", "192x128x16:2", "accumulators = 160 (int): 160 registers a thread are left", {}),
    ("sm90", "forward", "192x64x16:2+multicast", "tile_m = 192", {"head_dim": 64}),
    ("sm90", "forward", "128x128x12:2+multicast", "mask = 'full'", {"mask": Full()}),
    ("sm90", "forward", "128x128x12:2+multicast", "features = ('softcap',)", {"softcap": 9.0}),
    ("sm90", "forward", "128x128x12:2+2cta", "variant = '2cta'", {}),
    ("sm90", "forward", "128x64x12:2", "head_dim = 512 (int): the sm90 kernels of narrower heads", {"head_dim": 512}),
    ("sm90", "forward", "128x64x12:2+wide", "tile_m = 128", {"head_dim": 512}),
    ("sm90", "forward", "64x128x12:2+wide", "tile_n = 128", {"head_dim": 512}),
    ("sm90", "forward", "64x64x16:2+wide", "warps = 16", {"head_dim": 512}),
    ("sm90", "forward", "64x64x12:1+wide", "query_stages = 1", {"head_dim": 512}),
    ("sm90", "forward", "64x64x12:2+wide", "head_dim = 256", {"head_dim": 256}),
    ("sm90", "backward", "64x64x12:2,2+wide", "head_dim = 256", {"head_dim": 256}),
    ("sm90", "backward", "128x64x12:2,2+wide", "tile_m = 128", {"head_dim": 512}),
    ("sm90", "backward", "64x128x12:2,2+wide", "tile_n = 128", {"head_dim": 512}),
    ("sm90", "backward", "64x64x16:2,2+wide", "warps = 16", {"head_dim": 512}),
    ("sm90", "backward", "64x64x12:1,1+wide", "query_stages = 1", {"head_dim": 512}),
    ("sm90", "backward", "64x64x12:2,3+wide", "grad_output_stages = 3", {"head_dim": 512}),
    ("sm90", "backward", "64x64x12:2,2k2+wide", "key_stages = 2", {"head_dim": 512}),
    ("sm90", "backward", "64x64x12:2,2q32+wide", "score_rows = 32", {"head_dim": 512}),
    ("sm90", "forward", "64x64x12:2+mla", "head_dim = 128", {}),
    ("sm90", "forward", "128x64x12:2+mla", "tile_m = 128", {}),
    ("sm90", "forward", "64x128x12:2+mla", "tile_n = 128", {}),
    ("sm90", "forward", "64x64x16:2+mla", "warps = 16", {}),
    ("sm90", "forward", "64x64x12:3+mla", "query_stages = 3", {}),
    ("sm90", "backward", "64x64x16:2,2", "tile_n = 64", {}),
    ("sm90", "backward", "64x128x12:2,2", "tile_n = 128", {}),
    ("sm90", "backward", "64x64x8:2,2", "warps = 8", {}),
    ("sm90", "backward", "64x64x12:2,2", "warps = 12", {"dropout_p": 0.1}),
    ("sm90", "backward", "64x64x12:2,2+per_head", "warps = 12", {}),
    ("sm90", "backward", "96x128x16:2,2", "tile_m = 96", {}),
    ("sm90", "backward", "64x128x16:1,1", "query_stages = 1", {}),
    ("sm90", "backward", "64x128x16:2,2k3", "key_stages = 3", {}),
    ("sm90", "backward", "64x128x16:4,3", "shared memory = ", {}),
    ("sm90", "backward", "64x128x16:4,4q24", "score_rows = 24", {}),
    ("sm90", "backward", "64x128x16:4,3q32", "grad_output_stages = 3", {}),
    ("sm90", "backward", "64x128x16:4,2q64", "score_rows = 64", {}),
    ("sm90", "backward", "192x128x16:2,2", "tile_m = 192", {"head_dim": 32}),
    ("sm90", "backward", "64x128x16:4,4q32k2", "key_stages = 2", {}),
    ("sm90", "backward", "64x128x16:4,4q32", "score_rows = 32", {"dropout_p": 0.1}),
    ("sm90", "backward", "64x128x16:4,4q32+per_head", "score_rows = 32", {}),
    ("sm90", "backward", "64x128x16:3,2+query_heads", "features = ()", {}),
    ("sm90", "backward", "64x128x16:3,2+query_heads", "deterministic = True", {**GROUPED, "deterministic": True}),
    ("sm90", "backward", "64x64x12:2,2+ds_registers", "warps = 12", {}),
    ("sm90", "backward", "128x128x16:2,2+ds_registers", "tile_m = 128", {}),
    ("sm90", "backward", "64x128x16:3,2+ds_registers", "tile_m = 64", {"head_dim": 64}),
    ("sm90", "backward", "64x128x16:3,2+ds_registers", "head_dim = 136", {"head_dim": 136}),
    ("sm90", "backward", "64x128x16:4,4q32+ds_registers", "score_rows = 32", {}),
    ("sm90", "backward", "64x128x16:3,2+ds_registers", "features = ('softcap',)", {"softcap": 9.0}),
    ("sm90", "backward", "64x128x16:3,2+ds_registers", "mask = 'local'", {"dtype": "float16", "mask": Window(64, 0)}),
    ("sm90", "backward", "64x128x16:3,2+ds_registers", "variant = 'ds_registers' (str): S starts from", {"scale": 0.0}),
    ("sm90", "backward", "64x128x16:3,2+key_registers", "tile_m = 64", {"head_dim": 64}),
    ("sm90", "backward", "128x128x16:2,2+key_registers", "head_dim = 128", {}),
    ("sm90", "backward", "128x128x16:3,2+key_registers", "dropout", {"head_dim": 64, "dropout_p": 0.1}),
    ("sm90", "backward", "64x128x16:3,2+multicast", "variant = 'multicast'", {}),
    ("sm90", "backward", "64x128x16:3,2+split_d", "variant = 'split_d'", {}),
    ("sm90", "backward", "64x128x16:2,2", "score_rows = 0", {"head_dim": 160}),
    ("sm90", "backward", "64x128x16:5,4q32", "head_dim = 256", {"head_dim": 256}),
    ("sm90", "backward", "64x64x16:2,2+2cta", "head_dim = 128", {}),
    ("sm90", "backward", "64x128x16:2,2+2cta", "tile_n = 128", {"head_dim": 256}),
    ("sm90", "backward", "128x64x16:2,2+2cta", "tile_m = 128", {"head_dim": 256}),
    ("sm90", "backward", "64x64x16:2,1+2cta", "grad_output_stages = 1", {"head_dim": 256}),
    ("sm90", "backward", "64x64x16:2,2k2+2cta", "key_stages = 2", {"head_dim": 256}),
    ("sm90", "backward", "64x64x16:2,2q32+2cta", "score_rows = 32", {"head_dim": 256}),
    ("sm80", "forward", "128x96x4:1-speculative", "have options; use ()", {"head_dim": 64}),
    ("sm90", "backward", "64x128x16:3,2-speculative", "backwards have option shared_end alone", {}),
    ("sm90", "backward", "64x128x16:3,2+per_head-shared_end", "have options; use ()", {"length": 128}),
    ("sm90", "backward", "64x128x16:3,2+ds_registers-shared_end", "full masks", {}),
    (
        "sm90",
        "backward",
        "64x128x16:3,2+ds_registers-shared_end",
        "not deterministic",
        {"mask": Full(), "deterministic": True},
    ),
    ("decode", "decode", "16x64x4:3-speculative", "have options; use ()", {}),
    ("sm90", "forward", "128x128x12:2-speculative", "for scores without dropout", {"dropout_p": 0.5}),
    ("sm90", "forward", "128x128x12:2-speculative", "for scores without dropout", {"softcap": 30.0}),
    ("sm90", "forward", "128x128x12:2-speculative", "is for bfloat16 and e4m3", {"dtype": "float16"}),
    ("sm90", "forward", "128x128x12:2-halves", "use both", {}),
    ("sm90", "forward", "128x128x12:2-speculative-bits", "is for windows", {"mask": Full()}),
    ("sm90", "forward", "128x128x12:2-speculative-bits", "is for windows", {}),
    ("sm90", "forward", "128x208x12:2-speculative-bits", "up to 128", {"head_dim": 64, "mask": Window(100, 0)}),
    ("sm90", "forward", "128x128x12:2-bits", "use both", {"mask": Window(100, 0)}),
    ("sm90", "forward", "128x128x12:2+e4m3-speculative-halves", "not for variant e4m3", {"dtype": "float8_e4m3fn"}),
    ("sm90", "forward", "128x128x12:2-shared_end", "full masks", {}),
    ("sm90", "forward", "128x128x12:2-shared_end", "full masks", {"mask": Full(), "softcap": 30.0}),
    ("sm90", "forward", "128x112x12:2-speculative-halves", "tiles of a multiple of 32 keys", {}),
    ("sm90", "forward", "128x128x12:2+e4m3-shared_end", "full masks", {"dtype": "float8_e4m3fn"}),
    ("sm90", "forward", "64x64x12:2+wide-speculative", "have options; use ()", {"head_dim": 512}),
    ("decode", "decode", "48x64x4:2", "tile_m = 48", {}),
    ("decode", "decode", "16x64x3:2", "warps = 3", {}),
    ("decode", "decode", "64x64x1:2", "warps = 1", {}),
    ("decode", "decode", "32x64x4:2", "tile_m = 32", {"head_dim": 256}),
    ("decode", "decode", "16x48x4:2", "tile_n = 48", {}),
    ("decode", "decode", "16x64x4:1", "query_stages = 1", {}),
    ("decode", "decode", "16x64x4:2+split_d", "variant = 'split_d'", {}),
    ("decode", "decode", "16x64x4:9", "shared memory = ", {"head_dim": 256}),
]


@pytest.mark.parametrize(("family", "kind", "tile", "field", "problem"), INVALID)
def test_an_invalid_tile_is_refused_with_its_field(
    family: str, kind: str, tile: str, field: str, problem: dict[str, Any]
) -> None:
    found = reasons_of(problem_of(kind, **problem), family, tile)
    assert any(field in text for text in found), found
    assert all(re.search(r" = .*: .*; (use|set|increase|align|change) ", text) for text in found), found


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kind": "sideways"}, "kind"),
        ({"family": "hopper"}, "family"),
        ({"kind": "backward", "family": "decode"}, "family"),
        ({"arch": "sm_90"}, "arch"),
        ({"dtype": "float32"}, "dtype"),
        ({"head_dim": 264}, "head_dim"),
        ({"vector_bytes": 8}, "vector_bytes"),
        ({"gradients": ("key", "value")}, "gradients"),
        ({"features": ("paged",)}, "features"),
        ({"variant": "per_head", "features": ("varlen",)}, "features"),
    ],
)
def test_a_build_that_no_body_has_is_refused(changes: dict[str, Any], field: str) -> None:
    build = plan(problem_of("backward"), "sm_90a").build
    assert resources.refusals(build, architecture("sm_90a")) == []
    found = resources.refusals(dataclasses.replace(build, **changes), architecture("sm_90a"))
    assert field in [refusal.field for refusal in found]


def test_a_deterministic_2cta_backward_is_refused() -> None:
    build = plan(problem_of("backward", 256), "sm_90a").build
    assert build.variant == "2cta"
    (found,) = build_rules.refusals(dataclasses.replace(build, deterministic=True))
    assert found.field == "deterministic"


VALID = [
    ("sm80", "forward", "128x96x4:1", {"head_dim": 64}),
    ("sm80", "backward", "64x64x8:1,1@3", {}),
    ("sm80", "forward", "64x64x8:3c256+split_d", {"head_dim": 512}),
    ("sm80", "backward", "32x64x8:3,3c128+split_d", {"head_dim": 512}),
    ("sm90", "forward", "128x112x12:2", {"head_dim": 64}),
    ("sm90", "forward", "192x96x16:3", {"head_dim": 64}),
    ("sm90", "forward", "128x128x12:2+multicast", {}),
    ("sm90", "forward", "64x64x12:3+wide", {"head_dim": 320}),
    ("sm90", "backward", "64x128x16:2,2k2", {}),
    ("sm90", "backward", "64x128x16:4,4q32", {}),
    ("sm90", "backward", "64x128x16:3,2+per_head", {"length": 128}),
    ("sm90", "backward", "64x128x16:3,2+query_heads", GROUPED),
    ("sm90", "backward", "64x128x16:3,2+ds_registers", {"head_dim": 104, "scale": -1.0}),
    ("sm90", "backward", "64x128x16:3,2k2+ds_registers", {"deterministic": True}),
    ("sm90", "backward", "64x128x16:3,2k2+ds_registers", {"mask": Window(64, 0)}),
    ("sm90", "backward", "128x128x16:3,2k2+ds_registers", {"head_dim": 64, "deterministic": True}),
    ("sm90", "backward", "128x128x16:3,2k2+key_registers", {"head_dim": 40, "scale": 0.0}),
    ("sm90", "backward", "128x128x16:3,2+key_registers", {"head_dim": 64, "deterministic": True}),
    ("sm90", "backward", "64x64x16:3,2+2cta", {"head_dim": 192}),
    ("sm90", "backward", "64x64x12:3,3+wide", {"head_dim": 320}),
    ("sm90", "backward", "64x128x16:3,2-shared_end", {"mask": Full()}),
    ("sm90", "backward", "128x128x16:3,2k2+key_registers-shared_end", {"head_dim": 64, "mask": Full()}),
    ("sm90", "forward", "128x128x12:2-speculative-halves", {}),
    ("sm90", "forward", "128x128x12:2+multicast-speculative", {}),
    ("sm90", "forward", "192x128x16:2-speculative-halves", {"head_dim": 64}),
    ("sm90", "forward", "128x128x12:2-speculative-halves-bits", {"mask": Window(100, 0)}),
    ("sm90", "forward", "128x128x12:2-speculative", {"mask": Window(100, 0)}),
    ("sm90", "forward", "128x128x12:2-speculative-shared_end", {"mask": Full()}),
    ("sm90", "forward", "128x128x12:2+e4m3-speculative-bits", {"dtype": "float8_e4m3fn", "mask": Window(100, 0)}),
    ("decode", "decode", "16x128x8:2", {}),
]


@pytest.mark.parametrize(("family", "kind", "tile", "problem"), VALID)
def test_a_valid_tile_gives_its_plan(family: str, kind: str, tile: str, problem: dict[str, Any]) -> None:
    asked = problem_of(kind, **problem)
    found = plan_with_tile(asked, ARCH_OF[family], TileConfig.parse(tile), family=family)
    assert isinstance(found, Plan)
    assert found.build.family == family
    asked_tile, found_tile = TileConfig.parse(tile), TileConfig.of(found.build)
    assert found_tile == (asked_tile if asked_tile.options else replace(asked_tile, options=found_tile.options))


def test_the_family_is_that_of_the_variant_or_of_the_best_plan() -> None:
    wide = problem_of("forward", 512)
    assert plan_with_tile(wide, "sm_90a", TileConfig.parse("64x64x8:2c512+split_d")).build.family == "sm80"
    narrow = problem_of("forward", 64)
    assert plan_with_tile(narrow, "sm_90a", TileConfig(128, 64, 12, 2)).build.family == "sm90"
    assert plan_with_tile(narrow, "sm_90", TileConfig(128, 64, 4)).build.family == "sm80"
    assert plan_with_tile(problem_of("decode"), "sm_90a", TileConfig(16, 64, 4, 2)).build.family == "decode"
    with pytest.raises(DoesNotFit, match="warps = 4"):
        plan_with_tile(narrow, "sm_90a", TileConfig(128, 64, 4))


@pytest.mark.parametrize(
    ("problem", "arch", "family", "said"),
    [
        (problem_of("forward", 520), "sm_90a", "sm90", "takes no head dims beyond 512"),
        (problem_of("backward", 520), "sm_90a", "sm90", "takes no head dims beyond 512"),
        (problem_of("forward"), "sm_80", "sm90", "takes no targets without wgmma"),
        (problem_of("forward"), "sm_90a", "decode", "takes no more than 16 queries"),
        (problem_of("forward", scale=-1.0), "sm_90a", "sm90", "takes no a scale below 0"),
    ],
)
def test_a_problem_that_the_family_does_not_take_is_refused(
    problem: Problem, arch: str, family: str, said: str
) -> None:
    with pytest.raises(NotSupported, match=said):
        plan_with_tile(problem, arch, TileConfig(128, 128, 12, 2), family=family)


def test_one_block_per_head_is_refused_for_what_it_would_compute_wrongly() -> None:
    tile = TileConfig.parse("64x128x16:3,2+per_head")
    varlen = Problem.dense("backward", Shape(2, 128, 128, 4, 128, 128, tokens=(256, 256)), "bfloat16", Causal())
    assert "one block per head needs sequences of one length" in "".join(map(str, sm90_choice.refusals(varlen, tile)))
    unseen = Problem.dense("backward", Shape(2, 512, 128, 4, 128, 128), "bfloat16", Window(16, 0))
    assert any("some query tiles see no key" in text for text in reasons_of(unseen, "sm90", tile))


def test_a_slow_variant_can_be_tried() -> None:
    """The planner leaves these variants out for these lengths; a caller may measure them."""
    long, short = problem_of("backward", 128, 8192), problem_of("forward", 128, 512)
    per_head, multicast = TileConfig.parse("64x128x16:3,2+per_head"), TileConfig.parse("128x128x12:2+multicast")
    assert not sm90_choice.applies(long, per_head, 132)
    assert not sm90_choice.applies(short, multicast, 132)
    assert plan_with_tile(long, "sm_90a", per_head).build.variant == "per_head"
    grouped = problem_of("backward", heads_key=2, mask=Full())
    query_heads = TileConfig.parse("64x128x16:3,2+query_heads")
    assert not sm90_choice.applies(grouped, query_heads, 8)
    assert plan_with_tile(grouped, "sm_90a", query_heads).build.variant == "query_heads"
    assert plan_with_tile(short, "sm_90a", multicast).build.variant == "multicast"


def test_public_names() -> None:
    assert cutlass_py_attn.plan_with_tile is plan_with_tile
    assert cutlass_py_attn.TileConfig is TileConfig


def _table_rows() -> list[tuple[str, str, TileConfig]]:
    found = []
    for (direction, _), by_term in sm80_tiles._TABLES.items():
        found += [("sm80", direction, tile) for table in by_term.values() for row in table.values() for tile in row]
    found += [("sm80", direction, tile) for (direction, _), row in sm80_tiles._SPLIT_D.items() for tile in row]
    for by_rows in decode_tiles._DECODE.values():
        found += [("decode", "forward", tile) for table in by_rows.values() for row in table.values() for tile in row]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize(("family", "direction", "tile"), _table_rows(), ids=str)
def test_every_tile_of_the_tables_passes_for_some_problem(family: str, direction: str, tile: TileConfig) -> None:
    dims = (256, 192, 160) if tile.variant == "2cta" or tile.score_rows else (32, 64, 96, 128, 256, 512)
    found = []
    for head_dim in dims:
        for dtype in ("float8_e4m3fn",) if tile.variant == "e4m3" else ("bfloat16", "float32"):
            heads_key = 2 if tile.variant == "query_heads" else 4
            problem = problem_of("decode" if family == "decode" else direction, head_dim, 512, dtype, heads_key)
            if tile.score_rows:
                problem = Problem.dense(direction, Shape(2, 512, 512, 4, 192, 128, heads_key), dtype, Causal())
            if tile.variant == "e4m3_cache":
                problem = parse(f"bf16_d{head_dim}_s512_b2_h4_causal_kv8").problem("forward")
            if tile.variant == "mla":
                shape = Shape(2, 1, 512, 4, 576, 512, 1)
                problem = Problem.dense(direction, shape, dtype).with_value_in_key()
            build, wrong = build_for(problem, ARCH_OF[family], tile, family)
            found.append(wrong or resources.refusals(build, architecture(build.arch)))
    assert [] in found, found


@settings(max_examples=100, deadline=None)
@given(problems(), ARCHS)
def test_every_planned_build_passes(problem: Problem, arch: str) -> None:
    for planned in plans(problem, arch):
        assert resources.refusals(planned.build, architecture(arch)) == []
        assert (planned.build.kind, planned.build.family, planned.build.variant) in KERNELS


TILES = st.builds(
    TileConfig,
    tile_m=st.sampled_from([0, 16, 32, 48, 64, 96, 128, 192, 256]),
    tile_n=st.sampled_from([0, 16, 32, 64, 72, 80, 96, 128, 256, 272]),
    warps=st.sampled_from([0, 1, 2, 3, 4, 8, 12, 16, 40]),
    query_stages=st.integers(0, 6),
    grad_output_stages=st.integers(0, 6),
    register_usage_level=st.integers(-1, 11),
    head_dim_split=st.sampled_from([0, 0, 32, 64, 128, 192, 512, 576]),
    score_rows=st.sampled_from([0, 0, 16, 24, 32, 64, 128]),
    key_stages=st.integers(0, 3),
    variant=st.sampled_from(
        ["", "", "split_d", "multicast", "per_head", "ds_registers", "key_registers", "2cta", "other"]
    ),
)


TOO_SMALL = [
    # (family, kind, tile, refused field and value): rules that divide by rows or threads must not divide by 0.
    ("sm80", "forward", "64x64x1:1", "warps = 1"),
    ("sm80", "backward", "64x64x1:1,1", "warps = 1"),
    ("sm90", "backward", "0x64x16:2,2+per_head", "tile_m = 0"),
    ("sm90", "backward", "64x0x16:2,2+per_head", "tile_n = 0"),
]


@pytest.mark.parametrize(("family", "kind", "tile", "refused"), TOO_SMALL)
def test_a_tile_too_small_to_count_with_is_refused(family: str, kind: str, tile: str, refused: str) -> None:
    """Rows of 33 elements are aligned to 2 bytes: one warp then copies less than one row."""
    width = 128 if family == "sm90" else 33
    found = reasons_of(problem_of(kind, head_dim=width), family, tile)
    assert any(refused in line for line in found), found


@settings(max_examples=300, deadline=None)
@given(problems(), TILES, st.sampled_from(["sm80", "sm90", "decode"]), st.sampled_from(["sm_90a", "sm_80"]))
def test_any_tile_gives_a_plan_or_is_refused(problem: Problem, tile: TileConfig, family: str, arch: str) -> None:
    """No other error: neither while the warps and the shared memory are computed nor later."""
    try:
        found = plan_with_tile(problem, arch, tile, family=family)
    except (DoesNotFit, NotSupported):
        return
    assert found.build.variant == tile.variant
    products = (found.build.warps_scores, found.build.warps_grad_v, found.build.warps_grad_k, found.build.warps_grad_q)
    if family == "sm80":
        assert {rows * columns for rows, columns in products} <= {0, tile.warps}
