"""The Hopper family: which problems it takes, its plans and tensor maps, and the machine code of its forward."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from fakes import expect_taken

from cutlass_py_attn import hopper, launch, plan_table, planner
from cutlass_py_attn.compiler import compile as compile_now
from cutlass_py_attn.device import architecture, targets
from cutlass_py_attn.gemm.plans import swizzle_bytes
from cutlass_py_attn.masks import Causal, CausalBottomRight, Full, Mask
from cutlass_py_attn.plan import Plan, TensorMap
from cutlass_py_attn.problem import Problem, Sequences, Shape, Tensor

SHAPE = Shape(2, 200, 300, 4, 128, 128)


def forward(dim: int = 128, dim_value: int = 128, dtype: str = "bfloat16", mask: Mask | None = None) -> Problem:
    """A dense problem that the family takes."""
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
def test_what_the_family_takes(changes: dict[str, Any], lacking: tuple[str, ...]) -> None:
    expect_taken(forward().replace(**changes), lacking)


def test_a_plan_refuses_a_scale_that_its_kernel_does_not_take() -> None:
    """The scale is no part of a plan, so that only the launch can tell."""
    plan, problem = planner.plan(forward(), "sm_90a"), forward().replace(scale=-0.1)
    assert [line for line in launch._problem_objections(plan, problem) if "a scale below 0" in line]
    assert not [*launch._problem_objections(plan, forward().replace(scale=0.1))]


def of_lengths(num_keys: int = 900, **changes: Any) -> Problem:
    """Three sequences of up to 400 queries and 300 keys, packed."""
    shape = Shape(3, 400, min(300, num_keys), 4, 128, 128, tokens=(1000, num_keys))
    sequences = Sequences(3, shape.num_queries, shape.num_keys, False)
    return Problem.dense("forward", shape, "bfloat16", Causal()).replace(sequences=sequences, **changes)


def test_sequences_of_several_lengths() -> None:
    """Without a key there is nothing that a map could say."""
    plan = planner.plan(of_lengths(), "sm_90a")
    assert plan.build.family == "hopper"
    assert {len(recipe.sizes) for recipe in plan.launches[0].tensor_maps} == {5}
    assert hopper.lacking(of_lengths(num_keys=0)) == ("axes without an index",)


@pytest.mark.parametrize(("dim", "queries", "tiles"), [(64, 2, 32), (128, 2, 16), (256, 1, 32)])
def test_bits_of_several_key_tiles_with_dropout(dim: int, queries: int, tiles: int) -> None:
    """As many as there is room for beside two query tiles, where those fit."""
    build = planner.plan(forward(dim, dim).replace(dropout_p=0.1), "sm_90a").build
    assert hopper.slots(build)["query"] == queries
    assert build.buffer("kept").bytes == tiles * build.tile_m * build.tile_n // 8
    assert build.shared_memory_bytes <= architecture("sm_90a").shared_memory_per_block


@pytest.mark.parametrize(
    ("first", "rows", "tile"), [(0, 300, 0), (37, 300, 256), (37, 1, 0), (300, 0, 0), (0, 90, 128)]
)
def test_a_copy_ends_with_its_sequence(first: int, rows: int, tile: int) -> None:
    """As TMA counts: what lies past an axis is zero, an address is 64 bits wide. 128 rows from row `tile` on of keys
    that start behind `first` others; head 2, columns from 64 on."""
    from cutlass_py_attn.parts import lengths, tma

    plan = planner.plan(of_lengths(), "sm_90a")
    recipe = plan.launches[0].tensor_maps[1]
    of = lengths.Sequence(0, 0, 0, first, 0, rows, rows, 0)
    corner = 64, *tma.place(plan.build, tile, 2, of, "key")
    assert recipe.box == (64, 128, 1, 1, 1)
    assert all(0 < size <= 2**32 for size in recipe.sizes)
    assert all(0 < 2 * stride < 2**40 and 2 * stride % 16 == 0 for stride in recipe.strides)
    for row in range(recipe.box[1]):
        at = [corner[0], corner[1] + row, *corner[2:]]
        is_there = all(0 <= place < size for place, size in zip(at, recipe.sizes, strict=True))
        assert is_there == (tile + row < rows)
        offset = 2 * sum(place * stride for place, stride in zip(at, (1, *recipe.strides), strict=True))
        assert not is_there or offset % 2**64 == 2 * ((first + tile + row) * 4 * 128 + 2 * 128 + 64)


def test_dtypes_and_widths_it_has_no_kernel_for() -> None:
    assert hopper.lacking(forward(dtype="float32")) == ("float32",)
    assert hopper.lacking(forward(64, 264)) == ("head dims beyond 256",)


@pytest.mark.parametrize(
    ("compute_capability", "names"),
    [((9, 0), ("sm_90a", "sm_90")), ((8, 9), ("sm_89",)), ((8, 8), ("sm_87",)), ((12, 1), ("sm_120",)), ((7, 5), ())],
)
def test_targets_of_a_device(compute_capability: tuple[int, int], names: tuple[str, ...]) -> None:
    assert targets(compute_capability) == names


def test_a_hopper_gpu_has_both_families_and_others_one() -> None:
    first, *others = planner.plans_on(forward(), (9, 0), 132)
    assert (first.build.family, first.build.arch) == ("hopper", "sm_90a")
    assert {(plan.build.family, plan.build.arch) for plan in others[1:]} == {("generic", "sm_90")}
    assert {plan.build.family for plan in planner.plans_on(forward(), (8, 0), 108)} == {"generic"}


@pytest.mark.parametrize("dims", [(8, 8), (64, 64), (96, 96), (128, 64), (192, 128), (256, 128), (256, 256)])
def test_plans_fit_and_come_back_from_json(dims: tuple[int, int]) -> None:
    plan = planner.plan(forward(*dims), "sm_90a")
    assert plan.build.family == "hopper"
    assert plan.build.shared_memory_bytes <= architecture("sm_90a").shared_memory_per_block
    assert Plan.from_json(plan.to_json()) == plan
    assert f"fwd_hopper_bf16_d{dims[0]}" in plan.explain()
    slots, barriers = hopper.slots(plan.build), plan.build.buffer("barriers")
    assert barriers.bytes == 16 * sum(slots.values())
    # The next query tile arrives early where there is room for it.
    assert slots == {"query": 1 if dims in ((192, 128), (256, 256)) else 2, "key": 2, "value": 2}


def test_a_row_that_is_not_for_the_target_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = plan_table.hopper_tiles(forward())
    not_there = replace(first, not_on=("sm_90a",))
    monkeypatch.setattr(planner, "hopper_tiles", lambda problem: (not_there, *others))
    found = [build.tile_n for build in planner.builds(forward(), "sm_90a") if build.family == "hopper"]
    assert found == [tile.tile_n for tile in others] != []


def test_a_block_for_each_sm_or_each_tile() -> None:
    """200 queries of 4 heads in 2 batches are 16 tiles of 128."""
    (launch,) = planner.plans(forward(), "sm_90a", 132)[0].launches
    assert launch.grid == (16, 1, 1)
    (launch,) = planner.plans(forward(), "sm_90a", 10)[0].launches
    assert launch.grid == (10, 1, 1)
    empty = Problem.dense("forward", Shape(0, 200, 300, 4, 128, 128), "float16", Full())
    assert planner.plan(empty, "sm_90a").launches == ()


def long(queries: int = 4096, keys: int = 4096, dims: tuple[int, int] = (128, 128), heads: int = 4) -> Problem:
    """A causal problem of a head dim in whose forward blocks of a cluster may share keys and values."""
    return Problem.dense("forward", Shape(2, queries, keys, heads, *dims), "bfloat16", Causal())


@pytest.mark.parametrize(
    ("problem", "is_shared"),
    [
        (long(), True),
        (long(5000, 4096, (192, 128)), True),
        (long(dims=(104, 104)).replace(mask=CausalBottomRight()), True),
        (Problem.dense("forward", Shape(2, 4096, 4096, 4, 128, 128, 2), "bfloat16", Causal()), True),
        (long(4095), False),
        (long(keys=4000), False),
        (long(dims=(96, 96)), False),
        (long(dims=(256, 256)), False),
        (long().replace(mask=Full()), False),
        (long().replace(mask=Causal(500)), False),
        (long().replace(dropout_p=0.1), False),
        (long().replace(softcap=3.0), False),
    ],
)
def test_which_forwards_share_keys_and_values(problem: Problem, is_shared: bool) -> None:
    first, *others = planner.builds(problem, "sm_90a")
    assert first.multicast == is_shared
    assert not any(build.multicast for build in others)


def test_a_plan_of_clusters() -> None:
    """32 query tiles of 8 heads are 128 pairs; a cluster has one in its turn."""
    plan = planner.plans(long(), "sm_90a", 131)[0]
    (launch,) = plan.launches
    assert (launch.cluster, launch.grid) == (2, (130, 1, 1))
    assert planner.plans(long(heads=1), "sm_90a", 131)[0].launches[0].grid == (64, 1, 1)
    assert plan.symbol == "fwd_hopper_bf16_d128_causal_multicast"
    assert Plan.from_json(plan.to_json()) == plan
    assert "load keys and values for both" in plan.explain()


def test_machine_code_of_clusters() -> None:
    """Each block asks for its own query tile, and for every second strip of keys and values, for both."""
    made = compile_now(planner.plan(long(), "sm_90a"))
    copies = re.findall(r"cp\.async\.bulk\.tensor\.4d\S*", made.ptx)
    shared = [copy for copy in copies if "multicast::cluster" in copy]
    assert (len(copies), len(shared)) == (4, 2)
    assert re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k16", made.ptx).count("128") == 3 * 8 + 2 * 8


def test_tensor_maps_follow_strides() -> None:
    """Heads before rows for key; one batch, whose stride says nothing; 96 columns in strips of 32."""
    shape = Shape(1, 200, 300, 4, 96, 96)
    key = Tensor((1, 300, 4, 96), (7, 96, 300 * 96, 1), "float16")
    problem = Problem.dense("forward", shape, "float16", Full()).replace(key=key)
    (launch,) = planner.plan(problem, "sm_90a").launches
    assert launch.tensor_maps == (
        TensorMap("query", (96, 200, 4, 1), (384, 96, 96), (32, 192, 1, 1), 64),
        TensorMap("key", (96, 300, 4, 1), (96, 28800, 96), (32, 96, 1, 1), 64),
        TensorMap("value", (96, 300, 4, 1), (384, 96, 96), (32, 96, 1, 1), 64),
    )


BIAS = Tensor.contiguous((1, 4, 200, 304), "bfloat16")
CODE = [
    (forward(64, 64), 128),
    (forward(mask=Causal()), 128),
    (forward(96, 96), 96),
    (forward(256, 256), 64),
    (forward(mask=Causal(50)), 128),
    (forward(mask=Causal()).replace(dropout_p=0.1), 128),
    (Problem.dense("forward", Shape(2, 200, 304, 4, 128, 128), "bfloat16", Full()).replace(bias=BIAS), 128),
    (of_lengths(softcap=3.0), 128),
]


@pytest.mark.parametrize(("problem", "tile_n"), CODE, ids=lambda value: getattr(value, "features", value))
def test_machine_code(problem: Problem, tile_n: int) -> None:
    """compile() itself refuses spills and ptxas remarks, which say that products wait for each other."""
    plan = planner.plan(problem, "sm_90a")
    assert plan.build.tile_n == tile_n
    build, made = plan.build, compile_now(plan)
    products = re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k16", made.ptx)
    rows = build.tile_m // 64 // (build.warps // 4 - 1)
    # Each product stands twice: before the loop or behind it, and in it. Where there is room for the next item's
    # query, its scores stand behind the loop too.
    times = 1 + hopper.slots(build)["query"]
    scores, values = times * rows * build.columns // 16, 2 * rows * build.tile_n // 16
    expected = [str(build.tile_n)] * scores + [str(build.columns_value)] * values
    assert sorted(products) == sorted(expected)
    strips = sum(columns * 2 // swizzle_bytes(columns) for _, columns in hopper.loaded_tiles(build).values())
    axes = 5 if build.has("varlen") else 4
    assert len(re.findall(rf"cp\.async\.bulk\.tensor\.{axes}d", made.ptx)) == strips
    assert len(re.findall(r"setmaxnreg\.(?:inc|dec)", made.ptx)) == 2
