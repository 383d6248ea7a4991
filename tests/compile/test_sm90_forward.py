"""The sm90 family: supported problems, plans, tensor maps, and the machine code of the forward."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from cutlass_py_attn.kernels import families
from cutlass_py_attn.kernels.sm90_common.layout import num_stages, tma_tiles
from cutlass_py_attn.kernels.sm90_family import choice as sm90_choice
from cutlass_py_attn.kernels.sm90_family import tiles as plan_table
from cutlass_py_attn.kernels.sm90_forward.layout import splits_key_loop
from cutlass_py_attn.launch.arch import architecture, targets
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.smem import swizzle_bytes
from cutlass_py_attn.launch.variants import HALVES, SPECULATIVE, STANDARD
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.plan import Plan, TensorMap
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Mask
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Sequences, Shape, Tensor
from cutlass_py_attn.runtime import binding
from tests.support.fakes import expect_taken
from tests.support.machine_code import MachineCode
from tools.release import feature_ptx

SHAPE = Shape(2, 200, 300, 4, 128, 128)


def forward(dim: int = 128, dim_value: int = 128, dtype: str = "bfloat16", mask: Mask | None = None) -> Problem:
    """Returns a dense problem that the family supports."""
    return Problem.dense("forward", Shape(2, 200, 300, 4, dim, dim_value), dtype, mask or Full())


@pytest.mark.parametrize(
    ("changes", "lacking"),
    [
        ({}, ()),
        ({"mask": Causal(17)}, ()),
        ({"mask": CausalBottomRight()}, ()),
        ({"softcap": 2.0, "dropout_p": 0.1}, ()),
        ({"bias": Tensor.contiguous((2, 4, 200, 300), "bfloat16")}, ()),
        ({"alibi_slopes": Tensor.contiguous((4,), "float32"), "sinks": Tensor.contiguous((4,), "float32")}, ()),
        ({"scale": -0.1}, ("a scale below 0",)),
        ({"key": Tensor((2, 300, 4, 128), (0, 512, 128, 1), "bfloat16")}, ("strides of 0 or less",)),
        ({"value": Tensor((2, 300, 4, 128), (300 * 512, 512, 128, 1), "bfloat16", 8)},
         ("rows aligned to less than 16 bytes",)),
    ],
)  # fmt: skip
def test_supported_problems(changes: dict[str, Any], lacking: tuple[str, ...]) -> None:
    expect_taken(forward().replace(**changes), lacking)


def test_the_launch_rejects_a_negative_scale() -> None:
    """The scale is not part of a plan, so only the launch can check it."""
    plan, problem = planner.plan(forward(), "sm_90a"), forward().replace(scale=-0.1)
    assert [line for line in binding._problem_mismatches(plan, problem) if "a scale below 0" in line]
    assert not [*binding._problem_mismatches(plan, forward().replace(scale=0.1))]


def varlen(num_keys: int = 900, **changes: Any) -> Problem:
    """Returns three packed sequences of up to 400 queries and 300 keys."""
    shape = Shape(3, 400, min(300, num_keys), 4, 128, 128, tokens=(1000, num_keys))
    sequences = Sequences(3, shape.num_queries, shape.num_keys, False)
    return Problem.dense("forward", shape, "bfloat16", Causal()).replace(sequences=sequences, **changes)


def test_variable_lengths_have_five_dimensional_maps() -> None:
    """A tensor map cannot describe an empty tensor."""
    plan = planner.plan(varlen(), "sm_90a")
    assert plan.build.family == "sm90"
    assert {len(recipe.sizes) for recipe in plan.launches[0].tensor_maps} == {5}
    assert sm90_choice.unsupported_features(varlen(num_keys=0)) == ("axes without an index",)


@pytest.mark.parametrize(("row", "family"), [(2**33 - 8, "sm90"), (2**33, "sm80")])
def test_the_last_axis_of_variable_lengths_steps_forward(row: int, family: str) -> None:
    """Its stride is 2^34 bytes less a row."""
    rows = Tensor((1, 1000, 4, 128), (1000 * row, row, 128, 1), "bfloat16")
    plan = planner.plan(varlen(query=rows), "sm_90a")
    assert plan.build.family == family
    assert all(stride > 0 for launch in plan.launches for each in launch.tensor_maps for stride in each.strides)


@pytest.mark.parametrize(("dim", "queries", "tiles"), [(64, 2, 32), (128, 2, 16), (256, 1, 32)])
def test_dropout_prefetches_the_bits_of_several_key_tiles(dim: int, queries: int, tiles: int) -> None:
    """As many as fit into shared memory, beside two query tiles if those fit."""
    build = planner.plan(forward(dim, dim).replace(dropout_p=0.1), "sm_90a").build
    assert num_stages(build)["query"] == queries
    assert build.buffer("dropout_bits").bytes == tiles * build.tile_m * build.tile_n // 8
    assert build.shared_memory_bytes <= architecture("sm_90a").shared_memory_per_block


@pytest.mark.parametrize(
    ("first", "rows", "tile"), [(0, 300, 0), (37, 300, 256), (37, 1, 0), (300, 0, 0), (0, 90, 128)]
)
def test_a_copy_ends_with_its_sequence(first: int, rows: int, tile: int) -> None:
    """A copy reads rows of its own sequence alone; TMA reads zeros outside an axis and wraps addresses at 64 bits.

    The copy: 128 rows from row `tile` on of `rows` keys that start at row `first`; head 2, columns from 64 on.
    """
    from cutlass_py_attn.kernels.common import seqlen_info, tma

    plan = planner.plan(varlen(), "sm_90a")
    recipe = plan.launches[0].tensor_maps[1]
    seqlen = seqlen_info.SeqlenInfo(0, 0, 0, first, 0, rows, rows, 0)
    tile_origin = 64, *tma.tile_coordinates(plan.build, tile, 2, seqlen, "key")
    assert recipe.box == (64, 128, 1, 1, 1)
    assert all(0 < size <= 2**32 for size in recipe.sizes)
    assert all(0 < 2 * stride < 2**40 and 2 * stride % 16 == 0 for stride in recipe.strides)
    for row in range(recipe.box[1]):
        coordinates = [tile_origin[0], tile_origin[1] + row, *tile_origin[2:]]
        in_bounds = all(0 <= index < size for index, size in zip(coordinates, recipe.sizes, strict=True))
        assert in_bounds == (tile + row < rows)
        offset = 2 * sum(index * stride for index, stride in zip(coordinates, (1, *recipe.strides), strict=True))
        assert not in_bounds or offset % 2**64 == 2 * ((first + tile + row) * 4 * 128 + 2 * 128 + 64)


def test_unsupported_dtypes_and_head_dims() -> None:
    assert sm90_choice.unsupported_features(forward(dtype="float32")) == ("float32",)
    assert sm90_choice.unsupported_features(forward(64, 520)) == ("head dims beyond 512",)


@pytest.mark.parametrize(
    ("compute_capability", "names"),
    [((9, 0), ("sm_90a", "sm_90")), ((8, 9), ("sm_89",)), ((8, 8), ("sm_87",)), ((12, 1), ("sm_120",)), ((7, 5), ())],
)
def test_targets_of_a_device(compute_capability: tuple[int, int], names: tuple[str, ...]) -> None:
    assert targets(compute_capability) == names


def test_a_hopper_gpu_has_both_families_and_others_one() -> None:
    first, *others = planner.plans_on(forward(), (9, 0), 132)
    assert (first.build.family, first.build.arch) == ("sm90", "sm_90a")
    assert {(plan.build.family, plan.build.arch) for plan in others} == {("sm90", "sm_90a"), ("sm80", "sm_90")}
    families = [plan.build.family for plan in others]
    assert families == sorted(families, reverse=True), "the portable kernels come last"
    assert {plan.build.family for plan in planner.plans_on(forward(), (8, 0), 108)} == {"sm80"}


@pytest.mark.parametrize("dims", [(8, 8), (64, 64), (96, 96), (128, 64), (192, 128), (256, 128), (256, 256)])
def test_plans_fit_and_come_back_from_json(dims: tuple[int, int]) -> None:
    plan = planner.plan(forward(*dims), "sm_90a", 8)
    assert plan.build.family == "sm90"
    assert plan.build.shared_memory_bytes <= architecture("sm_90a").shared_memory_per_block
    assert Plan.from_json(plan.to_json()) == plan
    assert f"fwd_sm90_bf16_d{dims[0]}" in plan.explain()
    slots, barriers = num_stages(plan.build), plan.build.buffer("barriers")
    assert barriers.bytes == 16 * sum(slots.values())
    # The next query tile is loaded early if two fit.
    assert slots == {"query": 1 if dims in ((192, 128), (256, 256)) else 2, "key": 2, "value": 2}


def test_a_tile_that_is_not_for_the_target_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = plan_table.sm90_tiles(forward())
    not_there = replace(first, not_on=("sm_90a",))
    family = replace(families.FAMILIES["sm90"], tiles=lambda problem, num_sms, any_length: (not_there, *others))
    monkeypatch.setitem(families.FAMILIES, "sm90", family)
    found = [plan.build for plan in planner.plans(forward(), "sm_90a", 8) if plan.build.family == "sm90"]
    assert [(build.tile_m, build.tile_n) for build in found] == [(tile.tile_m, tile.tile_n) for tile in others] != []


def test_the_grid_is_the_smaller_of_sms_and_tiles() -> None:
    """200 queries of 4 heads in 2 batches are 32 tiles of 64, or 16 of 128."""
    for num_sms, blocks, threads in ((132, 32, 256), (16, 16, 384), (10, 10, 384)):
        (launch,) = planner.plans(forward(), "sm_90a", num_sms)[0].launches
        assert (launch.grid, launch.block) == ((blocks, 1, 1), (threads, 1, 1))
    empty = Problem.dense("forward", Shape(0, 200, 300, 4, 128, 128), "float16", Full())
    assert planner.plan(empty, "sm_90a").launches == ()


def long_causal(queries: int = 4096, keys: int = 4096, dims: tuple[int, int] = (128, 128), heads: int = 4) -> Problem:
    """Returns a causal problem whose forward may load keys and values for a cluster (multicast)."""
    return Problem.dense("forward", Shape(2, queries, keys, heads, *dims), "bfloat16", Causal())


@pytest.mark.parametrize(
    ("problem", "is_shared"),
    [
        (long_causal(), True),
        (long_causal(5000, 4096, (192, 128)), True),
        (long_causal(dims=(104, 104)).replace(mask=CausalBottomRight()), True),
        (Problem.dense("forward", Shape(2, 4096, 4096, 4, 128, 128, 2), "bfloat16", Causal()), True),
        (long_causal(4095), False),
        (long_causal(keys=4000), False),
        (long_causal(dims=(96, 96)), False),
        (long_causal(dims=(256, 256)), False),
        (long_causal().replace(mask=Full()), False),
        (long_causal().replace(mask=Causal(500)), False),
        (long_causal().replace(dropout_p=0.1), False),
        (long_causal().replace(softcap=3.0), False),
    ],
)
def test_which_forwards_multicast_keys_and_values(problem: Problem, is_shared: bool) -> None:
    first, *others = planner.builds(problem, "sm_90a")
    assert (first.variant == "multicast") == is_shared
    assert not any(build.variant == "multicast" for build in others)


def test_a_plan_of_clusters() -> None:
    """32 query tiles of 8 heads are 128 pairs; each wave assigns one pair to a cluster."""
    plan = planner.plans(long_causal(), "sm_90a", 131)[0]
    (launch,) = plan.launches
    assert (launch.cluster, launch.grid) == (2, (130, 1, 1))
    assert planner.plans(long_causal(heads=2), "sm_90a", 131)[0].launches[0].grid == (128, 1, 1)
    assert plan.symbol == "fwd_sm90_bf16_d128_causal_multicast_128x128"
    assert Plan.from_json(plan.to_json()) == plan
    assert "load keys and values for both" in plan.explain()


def test_machine_code_of_clusters(machine_code: MachineCode) -> None:
    """Each block loads its own query tile, and every second strip of keys and values for both blocks.

    The loops over key tiles with and without a mask have both GEMMs; S is also issued before and after the loops, and
    O += P V after them. Weights without a mask are speculative: S is issued again to repeat a tile.
    """
    made = machine_code(planner.plan(long_causal(), "sm_90a"))
    copies = re.findall(r"cp\.async\.bulk\.tensor\.4d\S*", made.ptx)
    shared = [copy for copy in copies if "multicast::cluster" in copy]
    assert (len(copies), len(shared)) == (4, 2)
    assert re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k16", made.ptx).count("128") == (2 + 1 + 2) * 8 + (2 + 1) * 8


def test_tensor_maps_follow_strides() -> None:
    """The key is stored by heads; the stride of a single batch does not matter; 96 columns are strips of 32."""
    shape = Shape(1, 600, 700, 4, 96, 96)
    key = Tensor((1, 700, 4, 96), (7, 96, 700 * 96, 1), "float16")
    problem = Problem.dense("forward", shape, "float16", Full()).replace(key=key)
    (launch,) = planner.plan(problem, "sm_90a", 4).launches
    assert launch.tensor_maps == (
        TensorMap("query", (96, 600, 4, 1), (384, 96, 96), (32, 128, 1, 1), 64),
        TensorMap("key", (96, 700, 4, 1), (96, 67200, 96), (32, 128, 1, 1), 64),
        TensorMap("value", (96, 700, 4, 1), (384, 96, 96), (32, 128, 1, 1), 64),
    )


LONG_96 = Problem.dense("forward", Shape(2, 3000, 3000, 4, 96, 96), "bfloat16", Full())
# problem, multiprocessors, and the tile
CODE = [
    (forward(64, 64), 8, (128, 128)),
    (forward(mask=Causal()), 8, (128, 128)),
    (forward(96, 96), 8, (128, 128)),
    (Problem.dense("forward", Shape(2, 3000, 3000, 4, 64, 64), "bfloat16", Full()), 132, (192, 128)),
    (LONG_96, 132, (192, 112)),
    (LONG_96.replace(mask=Causal()), 132, (192, 96)),
    (forward(256, 256), 8, (128, 64)),
    (varlen(softcap=3.0), 132, (128, 128)),
    (forward(mask=Causal()), 132, (64, 128)),
    (forward(256, 256), 132, (64, 64)),
]


def test_tiles_of_the_machine_code() -> None:
    builds = [planner.plan(problem, "sm_90a", num_sms).build for problem, num_sms, _ in CODE]
    assert [(build.tile_m, build.tile_n) for build in builds] == [tile for *_, tile in CODE]


BUILDS = [
    *(planner.plan(problem, "sm_90a", num_sms).build for problem, num_sms, _ in CODE),
    *(
        build
        for build in feature_ptx.builds().values()
        if (build.kind, build.family, build.variant) == ("forward", "sm90", STANDARD) and not build.has("paged")
    ),
]


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.symbol)
def test_machine_code(build: Build, machine_code: MachineCode) -> None:
    """The number of wgmma, TMA and setmaxnreg instructions.

    compile() itself rejects spills, and ptxas remarks that wgmma instructions are serialised.
    """
    made = machine_code(build)
    products = re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k16", made.ptx)
    rows = build.tile_m // 64 // (build.warps // 4 - 1)
    # Each GEMM is issued in each loop over key tiles and either before or after the loops. If two query tiles fit, S of
    # the next work tile is issued after the loops as well. With option speculative, S is issued again to repeat a tile
    # without a mask, with option halves in two parts.
    loops = {"full": 1, "causal": 2, "local": 3}[build.mask] if splits_key_loop(build) else 1
    times = loops + num_stages(build)["query"]
    values = (loops + 1) * rows * build.tile_n // 16
    whole, parts = 2 * (SPECULATIVE in build.options), 1 + (HALVES in build.options)
    expected = [
        *[str(build.tile_n)] * ((times - whole // 2) * rows * build.columns // 16),
        *[str(build.tile_n // parts)] * (whole * parts * rows * build.columns // 16),
        *[str(build.columns_value)] * values,
    ]
    assert sorted(products) == sorted(expected)
    strips = sum(columns * 2 // swizzle_bytes(columns) for _, columns in tma_tiles(build).values())
    axes = 5 if build.has("varlen") else 4
    assert len(re.findall(rf"cp\.async\.bulk\.tensor\.{axes}d", made.ptx)) == strips
    assert len(re.findall(r"setmaxnreg\.(?:inc|dec)", made.ptx)) == 2
