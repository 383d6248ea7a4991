"""Decode: supported problems, splits of the keys, grids, workspace, parameters and machine code."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutlass_py_attn.cli.symbols import parse_symbol
from cutlass_py_attn.kernels.decode import kernel as decode
from cutlass_py_attn.kernels.decode import layout as decode_smem
from cutlass_py_attn.launch import entry_points, split_kv
from cutlass_py_attn.launch.arch import ARCHITECTURES
from cutlass_py_attn.launch.smem import threads_of_row
from cutlass_py_attn.launch.tile_order import tiles_of_split
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.plan import Plan, Workspace
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Mask, Window
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape, Tensor
from cutlass_py_attn.runtime.binding import Bound, bind
from tests.cases import decode_cases
from tests.support import fakes
from tests.support.fake_driver import FakeDriver
from tests.support.machine_code import MachineCode

LAW = settings(max_examples=300, deadline=None)
SHAPE = Shape(2, 1, 1000, 8, 128, 128, 2)
PORTABLE = [name for name, arch in ARCHITECTURES.items() if arch.is_portable]


def problem(dtype: str = "bfloat16", mask: Mask | None = None, **sizes: Any) -> Problem:
    """Returns a dense problem of SHAPE with some sizes changed."""
    return Problem.dense("forward", replace(SHAPE, **sizes), dtype, mask or Full())


NARROW_ROWS = Tensor((2, 1000, 2, 128), (256000, 256, 128, 1), "bfloat16", 2)
EVEN_ROWS = replace(NARROW_ROWS, alignment=4)
LACKING: dict[str, tuple[Problem, tuple[str, ...]]] = {
    "one query": (problem(), ()),
    "16 queries of 4 heads": (problem(num_queries=16), ()),
    "16 queries of 8 heads": (problem(num_queries=16, num_heads_key=1), ("more than 64 queries of a group of heads",)),
    "17 queries": (problem(num_queries=17, num_heads_key=8), ("more than 16 queries",)),
    "few keys": (problem(num_keys=255), ("fewer than 256 keys",)),
    "wide heads": (problem(head_dim=264), ("head dims beyond 256",)),
    "wide heads in float32": (problem("float32", head_dim=136), ("head dims beyond 128",)),
    "a window": (problem(mask=Window(3, 4)), ()),
    "several lengths": (problem(tokens=(2, 1500)), ()),
    "rows of 4 bytes": (problem().replace(key=EVEN_ROWS), ()),
    "rows of 2 bytes": (problem().replace(value=NARROW_ROWS), ("rows aligned to less than 4 bytes",)),
    "a softcap and dropout": (problem().replace(softcap=3.0, dropout_p=0.5), ("dropout", "softcap")),
    "a bias": (problem().replace(bias=Tensor.contiguous((2, 8, 1, 1000), "bfloat16")), ("bias",)),
    "sinks": (problem().replace(sinks=Tensor.contiguous((8,), "float32")), ("sinks",)),
    "ALiBi": (problem().replace(alibi_slopes=Tensor.contiguous((8,), "float32")), ("alibi",)),
}


@pytest.mark.parametrize(("asked", "lacking"), LACKING.values(), ids=LACKING)
def test_supported_problems(asked: Problem, lacking: tuple[str, ...]) -> None:
    """An unsupported problem is planned for another family, and the plan says why."""
    assert asked.reasons() == []
    assert decode.unsupported_features(asked) == lacking
    for arch in ("sm_90", "sm_90a"):
        plan = planner.plan(asked, arch)
        assert (plan.build.family == "decode") == (not lacking)
        if decode.is_decode_step(asked):
            assert not lacking or plan.reason.endswith(f"a decode kernel takes no {', '.join(lacking)}")
        else:
            assert "decode" not in plan.reason


def test_the_backward_has_no_decode_kernel() -> None:
    backward = Problem.dense("backward", SHAPE, "bfloat16")
    assert decode.unsupported_features(backward) == ("backward",)
    assert planner.plan(backward, "sm_90").build.family == "sm80"


def test_decode_plans_come_first() -> None:
    families = [plan.build.family for plan in planner.plans_on(problem(), (9, 0), 132)]
    assert list(dict.fromkeys(families)) == ["decode", "sm90", "sm80"]
    assert families == sorted(families, key=["decode", "sm90", "sm80"].index)
    assert [plan.build.arch for plan in planner.plans_on(problem(), (9, 0), 132) if plan.build.family == "decode"] == [
        "sm_90"
    ] * families.count("decode")


@pytest.mark.parametrize("arch", PORTABLE)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("queries", [1, 16])
def test_every_target_has_a_decode_kernel(arch: str, dtype: str, queries: int) -> None:
    for dim in (1, 40, 64, 72, 128):
        asked = problem(dtype, num_queries=queries, head_dim=2 * dim, head_dim_value=dim)
        assert (planner.plan(asked, arch).build.family == "decode") == (2 * dim <= decode.MAX_HEAD_DIM[4]) or (
            dtype != "float32"
        )
        if not decode.unsupported_features(asked):
            build = planner.plan(asked, arch).build
            rows, teams = build.warps_scores
            assert rows * teams == build.warps
            assert build.buffer("ring").bytes >= teams * decode_smem.team_output_bytes(build)
            assert build.tile_m // rows * build.columns_value <= decode_smem.WARP_OUTPUT[build.item_bytes]
            assert build.tile_m <= max(queries * 4, 16)


# Splits


@LAW
@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(1, 300))
def test_splits_cover_all_tiles_evenly(first: int, end: int, splits: int) -> None:
    """If `end` is before `first` there are no tiles."""
    shares = [tiles_of_split(first, end, split, splits) for split in range(splits)]
    assert shares[0][0] == first
    assert shares[-1][1] == max(first, end)
    assert all(left[1] == right[0] for left, right in pairwise(shares))
    sizes = [stop - start for start, stop in shares]
    assert max(sizes) - min(sizes) <= 1


@LAW
@given(st.integers(0, 20000), st.integers(1, 5000), st.integers(1, 300))
def test_splits_minimise_the_work_of_the_busiest_sm(groups: int, key_tiles: int, num_sms: int) -> None:
    def busiest(splits: int) -> int:
        blocks = -(-max(groups, 1) * splits // num_sms)
        return blocks * (-(-key_tiles // splits) + split_kv.SPLIT_OVERHEAD_TILES)

    found = split_kv.fewest_splits(groups, key_tiles, num_sms)
    possible = range(1, min(key_tiles, split_kv.MAX_SPLITS) + 1)
    assert found in possible
    assert busiest(found) == min(map(busiest, possible))
    assert all(busiest(fewer) > busiest(found) for fewer in range(1, found))


@pytest.mark.parametrize(
    ("batch", "keys", "num_sms", "splits"),
    [(64, 8192, 132, 1), (1, 8192, 132, 16), (8, 8192, 132, 2), (1, 8192, 8, 1), (1, 256, 132, 2), (40, 8192, 132, 2)],
)
def test_splits_of_known_shapes(batch: int, keys: int, num_sms: int, splits: int) -> None:
    asked = problem(batch=batch, num_keys=keys, num_heads=32, num_heads_key=8)
    assert planner.plan_forward(asked, "sm_90", num_sms).num_splits_key == splits


# Plans


def test_one_split_has_no_second_kernel_and_no_workspace() -> None:
    plan = planner.plan(problem(batch=300), "sm_90")
    main, combine = entry_points.entries(plan.build).values()
    assert (main, combine) == (f"{plan.symbol}_0", f"{plan.symbol}_combine_1")
    (launch,) = plan.launches
    assert (launch.symbol, launch.grid, launch.block) == (main, (1, 2, 300), (plan.build.threads, 1, 1))
    assert plan.workspace == Workspace()


def test_each_split_has_its_partial_results_in_the_workspace() -> None:
    """3 queries of 4 heads of a group are 12 of the tile's 16 rows; head_dim_value 90 is padded to 96 columns."""
    plan = planner.plan(problem(num_queries=3, num_keys=4000, head_dim_value=90), "sm_90")
    splits, build = plan.num_splits_key, plan.build
    assert splits > 1
    main, combine = plan.launches
    assert main.grid == (splits, 2, 2)
    assert (combine.grid, combine.block) == ((3, 8, 2), (128, 1, 1))
    assert combine.symbol == entry_points.entries(build)["combine"]
    assert combine.shared_memory_bytes == 4 * 96 * 4
    rows = 2 * 8 * 3 * splits
    assert [(part.name, part.bytes) for part in plan.workspace.buffers] == [
        ("partial_output", rows * 96 * 4),
        ("partial_logsumexp", rows * 4),
    ]
    assert plan.workspace.zero_bytes == 0
    assert "16 rows of queries and heads x" in plan.explain()
    assert f"num_splits_key: {splits}" in plan.explain()


def test_blocks_divide_more_rows_than_a_tile_has() -> None:
    plan = planner.plan(problem("float32", num_queries=15, batch=300, head_dim=64, head_dim_value=64), "sm_90")
    assert plan.build.tile_m == 32
    assert plan.launches[0].grid == (2, 2, 300)
    team = planner.plan(problem(num_queries=15, batch=300), "sm_90")
    assert (team.build.tile_m, team.build.warps_scores) == (64, (2, 4))
    assert team.launches[0].grid == (1, 2, 300)
    wide = planner.plan(problem(num_queries=15, batch=300, head_dim=192), "sm_90")
    assert wide.build.tile_m == 16
    assert wide.launches[0].grid == (4, 2, 300)


@pytest.mark.parametrize("queries", [1, 5, 16])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("heads_key", [2, 4, 8])
@pytest.mark.parametrize("tokens", [None, (40, 1500)])
def test_a_symbol_gives_its_build(queries: int, dtype: str, heads_key: int, tokens: tuple[int, int] | None) -> None:
    asked = problem(dtype, num_queries=queries, num_heads_key=heads_key, tokens=tokens, head_dim=64)
    build = planner.plan(asked, "sm_90").build
    assert build.family == "decode"
    for symbol in (build.symbol, *entry_points.entry_symbols(build)):
        assert parse_symbol(symbol, "sm_90").build == build


def test_the_build_does_not_depend_on_lengths() -> None:
    builds = {
        planner.plan(problem(batch=b, num_queries=q, num_keys=k, num_heads=h, num_heads_key=2), "sm_90").build
        for b, q, k, h in ((1, 1, 256, 4), (70, 4, 5000, 8), (300, 2, 100000, 16))
    }
    assert len(builds) == 1


def test_an_empty_batch_launches_nothing() -> None:
    plan = planner.plan(problem(batch=0), "sm_90")
    assert plan.build.family == "decode"
    assert (plan.launches, plan.workspace) == ((), Workspace())


def test_large_grids_are_split() -> None:
    """The first kernel has a block for each key head, the second one for each query head."""
    plan = planner.plan(problem(batch=1, num_heads=70000, num_heads_key=35000, num_keys=4096), "sm_90", 60000)
    main, combine = entry_points.entries(plan.build).values()
    pieces = [
        (launch.symbol, launch.grid[1:], dict(launch.param_overrides).get("first_head", 0)) for launch in plan.launches
    ]
    assert plan.num_splits_key > 1
    assert pieces == [(main, (35000, 1), 0), (combine, (65535, 1), 0), (combine, (4465, 1), 65535)]


def bound_of(asked: Problem, num_sms: int = 132) -> tuple[Plan, Bound]:
    plan = planner.plan(asked, "sm_90", num_sms)
    return plan, bind(fakes.artifact(plan.build), plan, asked)


def test_parameters(driver_log: FakeDriver) -> None:
    plan, bound = bound_of(problem(num_queries=3, mask=CausalBottomRight()))
    pointers = fakes.addresses(bound.tensor_names)
    bound(pointers, workspace=0x7F1000000000)
    launches = driver_log.of("cuLaunchKernelEx")
    assert [launch.text for launch in launches] == list(entry_points.entry_symbols(plan.build))
    for launch in launches:
        struct = fakes.decode(plan.build, launch.parameters)
        offsets = {part.name: part.offset for part in plan.workspace.buffers}
        assert {name: struct[name] - 0x7F1000000000 for name in offsets} == offsets
        assert (struct["num_splits_key"], struct["group"], struct["key"]) == (
            plan.num_splits_key,
            4,
            pointers["key"],
        )


def test_parameters_of_one_split(driver_log: FakeDriver) -> None:
    plan, bound = bound_of(problem(batch=300))
    assert bound.workspace_bytes == 0
    bound(fakes.addresses(bound.tensor_names))
    (launch,) = driver_log.of("cuLaunchKernelEx")
    struct = fakes.decode(plan.build, launch.parameters)
    assert (struct["num_splits_key"], struct["partial_output"], struct["partial_logsumexp"]) == (1, 0, 0)


# The cases of the GPU suite


def test_the_gpu_cases_are_supported_and_their_symbols_are_unique() -> None:
    assert [
        one.line for one in decode_cases.ALL if one.problem().reasons() or decode.unsupported_features(one.problem())
    ] == []
    assert len({one.line for one in decode_cases.ALL}) == len(decode_cases.ALL)
    names = [first.symbol for first, *_ in decode_cases.builds()]
    assert len(set(names)) == len(names)
    splits = [planner.plan(one.problem(), "sm_90", 132).num_splits_key for one in decode_cases.ALL]
    assert splits.count(1) >= len(decode_cases.UNSPLIT)
    assert sum(count > 4 for count in splits) > 10


# Machine code


@pytest.mark.parametrize(
    ("dtype", "dim", "mask", "arch"),
    [
        ("bfloat16", 128, Full(), "sm_90"),
        ("float16", 64, Causal(50), "sm_80"),
        ("float32", 64, CausalBottomRight(), "sm_90"),
    ],
    ids=str,
)
@pytest.mark.parametrize("queries", [1, 16])
def test_machine_code(dtype: str, dim: int, mask: Mask, arch: str, queries: int, machine_code: MachineCode) -> None:
    """The number of MMA and cp.async instructions. compile() itself rejects spills.

    Each GEMM is issued in one place; the copies of a stage are issued in the loop, and before it for all stages but
    one, once with those of the queries.
    """
    plan = planner.plan(problem(dtype, mask, num_queries=queries, head_dim=dim, head_dim_value=dim), arch)
    build, made = plan.build, machine_code(plan)
    assert [kernel.symbol for kernel in made.kernels] == list(entry_points.entry_symbols(build))
    keys, warps = decode_smem.team_keys(build), build.warps_scores[0]
    depth, times = (8, 3) if dtype == "float32" else (16, 1)
    products = times * (keys // 8 * dim // depth + dim // 8 * keys // depth)
    assert made.ptx.count("mma.sync.") == products * (build.tile_m // warps // 16)
    copies = 2 * keys * dim * build.item_bytes // 16 // (32 * warps)
    row_threads = threads_of_row(dim * build.item_bytes, 16)
    at_once = min(build.threads // row_threads, build.tile_m // warps)
    queries_of_thread = build.tile_m * dim * build.item_bytes // 16 // (at_once * row_threads)
    assert made.ptx.count("cp.async.cg") == build.query_stages * copies + queries_of_thread
