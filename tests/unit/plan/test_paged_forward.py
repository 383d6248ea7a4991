"""Paged forward: which family serves a problem, why, and the tensor maps of its pools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from cutlass_py_attn.kernels.catalogue import kernel_of
from cutlass_py_attn.kernels.sm90_common.layout import num_stages
from cutlass_py_attn.kernels.sm90_family import choice as sm90_choice
from cutlass_py_attn.launch import abi
from cutlass_py_attn.plan import entry_parameters, planner
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Tensor
from tests.cases import paged_forward_cases
from tests.cases.paged_forward_cases import PagedCase

NAME = "bf16_d128_h32k8_causal_br"
LENGTHS = ((300, 2000), (1, 129), (0, 40), (200, 0))


def forward_plan(problem: Problem) -> Plan:
    """The best plan on a Hopper GPU that is no decode."""
    plans = planner.plans(problem, "sm_90a", any_length=True)
    return next(plan for plan in plans if plan.build.family != "decode")


@pytest.mark.parametrize(("case", "family"), paged_forward_cases.all_cases(), ids=lambda it: getattr(it, "label", it))
def test_every_case_has_kernels_of_its_family(case: PagedCase, family: str) -> None:
    plans = planner.plans_on(case.problem(), (9, 0), 132)
    assert family in {plan.build.family for plan in plans}
    assert all("paged" in plan.build.features and "paged" in plan.build.symbol for plan in plans)
    assert all(Plan.from_json(plan.to_json()) == plan for plan in plans)


@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
def test_small_pages_are_for_the_sm80_family(page_size: int) -> None:
    plan = forward_plan(PagedCase(NAME, page_size, LENGTHS).problem())
    assert plan.build.family == "sm80"
    assert "the sm90 family takes no pages of fewer than 16 rows" in plan.explain()


def with_pools(change: Callable[[Tensor], Tensor], page_size: int = 16) -> Problem:
    """A problem with other layouts of key and value."""
    problem = PagedCase(NAME, page_size, LENGTHS).problem()
    return problem.replace(key=change(problem.key), value=change(problem.value))


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (PagedCase("f32_d64_h4_full", 16, LENGTHS).problem(), "float32"),
        (
            PagedCase(NAME, 16, LENGTHS, pool="uneven").problem(),
            "pages of value whose stride is no multiple of its row stride",
        ),
        (PagedCase(NAME, 16, LENGTHS, pool="shifted").problem(), "rows aligned to less than 16 bytes"),
        (
            with_pools(lambda pool: Tensor((2**22, *pool.shape[1:]), (2**18 * 1024, *pool.strides[1:]), pool.dtype)),
            "2^30 rows of value or more",
        ),
        (with_pools(lambda pool: Tensor(pool.shape, (0, *pool.strides[1:]), pool.dtype)), "strides of 0 or less"),
        (PagedCase("bf16_d320_h2_full", 16, LENGTHS).problem(), "paged"),
    ],
    ids=lambda it: "" if isinstance(it, Problem) else it.replace(" ", "_"),
)
def test_what_tensor_maps_cannot_describe_is_for_the_sm80_family(problem: Problem, reason: str) -> None:
    plan = forward_plan(problem)
    assert plan.build.family == "sm80"
    assert reason in plan.reason.partition("the sm90 family takes no ")[2]


def test_pools_without_pages_have_no_entries_for_a_kernel() -> None:
    problem = with_pools(lambda pool: Tensor.contiguous((0, *pool.shape[1:]), pool.dtype))
    plans = planner.plans(problem, "sm_90a")
    assert {plan.build.family for plan in plans} == {"sm80"}
    assert "axes without an index" in forward_plan(problem).reason
    for plan in plans:
        found = dict(plan.params)
        assert [found[name] for name in ("num_pages", "max_pages", "table_entries", "num_keys")] == [0] * 4


def test_one_page_may_have_any_page_stride() -> None:
    problem = with_pools(lambda pool: Tensor((1, *pool.shape[1:]), (7, *pool.strides[1:]), pool.dtype), 64)
    plan = forward_plan(problem)
    assert plan.build.family == "sm90"
    assert dict(plan.params)["value_page_rows"] == 0


@pytest.mark.parametrize(
    ("pool", "strides", "page_rows"),
    [
        ("nhd", (1024, 128, 64 * 1024), 64),
        ("hnd", (128, 64 * 128, 64 * 1024), 8 * 64),
        ("combined", (1024, 128, 2 * 64 * 1024), 2 * 64),
        ("interleaved", (2048, 256, 64 * 2048), 64),
    ],
)
def test_tensor_maps_of_pools(pool: str, strides: tuple[int, int, int], page_rows: int) -> None:
    """(columns, rows of a page, heads, pages), and the map of the tile with the last key."""
    case = PagedCase(NAME, 64, LENGTHS, pool=pool)
    plan = forward_plan(case.problem())
    query, key, value, last = plan.launches[0].tensor_maps
    pages = sum(case.num_pages) + paged_forward_cases.SPARE_PAGES
    assert (query.field, len(query.sizes), query.box) == ("query", 5, (64, 128, 1, 1, 1))
    assert (key.field, value.field, last.field) == ("key", "value", "value")
    assert key.sizes == value.sizes == (128, 64, 8, pages)
    assert key.strides == value.strides == strides
    assert key.box == value.box == (64, 64, 1, 1)
    assert last.sizes == (128, 2**30, 8, (pages - 1) * page_rows + 64 + 1, 2**30 + 1)
    assert last.strides == (strides[0], strides[1], strides[0], 2**34 // 2 - strides[0])
    assert last.box == (64, 64, 1, 1, 1)
    assert dict(plan.params)["value_page_rows"] == page_rows


def test_dense_queries_have_a_map_of_their_own() -> None:
    plan = forward_plan(PagedCase(NAME, 16, LENGTHS, is_packed=False).problem())
    assert plan.launches[0].tensor_maps[0].sizes == (128, 300, 32, len(LENGTHS))
    assert "varlen" not in plan.build.features


@pytest.mark.parametrize(
    ("name", "page_size", "rows"),
    [
        ("bf16_d128_h4_full", 16, 16),
        ("bf16_d128_h4_full", 128, 128),
        ("bf16_d128_h4_full", 1024, 128),  # a tile of 128 keys has one box
        ("bf16_d256_h4_full", 128, 64),  # 64 keys
        ("bf16_d96_h4_full", 64, 16),  # 112 keys: seven boxes of a part of a page
    ],
)
def test_boxes_divide_pages_and_tiles(name: str, page_size: int, rows: int) -> None:
    plan = forward_plan(PagedCase(name, page_size, LENGTHS).problem())
    maps = plan.launches[0].tensor_maps[1:]
    assert {recipe.box[1] for recipe in maps} == {rows}
    assert plan.build.tile_n % rows == 0
    assert page_size % rows == 0
    assert rows * maps[0].swizzle_bytes % 1024 == 0  # boxes start where the swizzle does


@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_page_sizes_share_a_kernel(page_size: int) -> None:
    """The page size is in the struct."""
    plan = forward_plan(PagedCase(NAME, page_size, LENGTHS).problem())
    assert plan.build == forward_plan(PagedCase(NAME, 32, LENGTHS, has_indptr=True).problem()).build
    assert dict(plan.params)["page_size"] == page_size


def test_parameters_of_the_entry() -> None:
    build = forward_plan(PagedCase(NAME, 16, LENGTHS).problem()).build
    names = [name for name, _ in entry_parameters.parameters(build)]
    assert names == ["map_query", "map_key", "map_value", "map_value_last", "params"]
    fields = dict(abi.fields_of(build))
    assert {"page_table", "page_size", "value_page_rows"} <= fields.keys()
    small = forward_plan(PagedCase(NAME, 1, LENGTHS).problem()).build
    assert "value_page_rows" not in dict(abi.fields_of(small))
    assert not kernel_of(small).tensor_maps(small)


@pytest.mark.parametrize(
    ("name", "stages"), [(NAME, (1, 3, 3)), ("bf16_d64_h2_full", (2, 3, 3)), ("bf16_d192v128_h2_full", (1, 2, 2))]
)
def test_keys_and_values_have_a_stage_more_where_it_fits(name: str, stages: tuple[int, int, int]) -> None:
    build = forward_plan(PagedCase(name, 16, LENGTHS).problem()).build
    assert tuple(num_stages(build).values()) == stages


def test_a_problem_without_pages_has_three_maps() -> None:
    problem = PagedCase(NAME, 16, LENGTHS, is_packed=False).problem()
    keys = Tensor.contiguous((len(LENGTHS), 500, 8, 128), "bfloat16")
    build = forward_plan(problem.replace(pages=None, key=keys, value=keys)).build
    assert [*kernel_of(build).tensor_maps(build)] == ["query", "key", "value"]
    assert "page_table" not in dict(abi.fields_of(build))


def test_no_size_decides_the_tile() -> None:
    """Tiles decide the order of sums, so that results with other sizes in a call would have other bits.

    With invariant pages; others may have few query tiles in parts.
    """
    for name in ("bf16_d64_h8_full", "bf16_d96_h8_causal_br"):
        tiles: dict[bool, set[tuple[int, int]]] = {True: set(), False: set()}
        for batch, keys in ((1, 208), (1, 3000), (64, 208)):
            paged = PagedCase(name, 16, ((300, keys),) * batch, is_packed=False).problem()
            paged = paged.replace(pages=replace(paged.pages, invariant=True))
            pool = Tensor.contiguous((batch, keys, 8, paged.shape.head_dim), "bfloat16")
            for problem in (paged, paged.replace(pages=None, key=pool, value=pool)):
                build = next(plan.build for plan in planner.plans(problem, "sm_90a") if plan.build.family == "sm90")
                tiles[problem.pages is not None].add((build.tile_m, build.tile_n))
        assert len(tiles[True]) == 1 < len(tiles[False])


def test_reasons_name_everything() -> None:
    problem = PagedCase("f32_d64_h4_full", 4, LENGTHS, pool="uneven").problem()
    assert sm90_choice.unsupported_features(problem) == (
        "float32",
        "pages of fewer than 16 rows",
        "pages of value whose stride is no multiple of its row stride",
    )
