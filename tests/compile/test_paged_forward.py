"""Paged forward: where boxes and table entries lie, and the machine code of both families."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from cutlass_py_attn.kernels.sm90_common.layout import tma_tiles
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.variants import SPLIT_KV
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.plan import TensorMap
from tests.cases.paged_forward_cases import SINGLE, PagedCase
from tests.support.machine_code import MachineCode

NAME = "bf16_d128_h4k2_causal_br"
HEAD, PAGE, COLUMN = 1, 5, 64


def build_of(case: PagedCase, family: str) -> Build:
    """The best kernel of a family for a case, without parts of few query tiles."""
    arch = "sm_90a" if family == "sm90" else "sm_90"
    return next(build for build in case.builds(arch) if build.family == family and build.variant != SPLIT_KV)


def reads(recipe: TensorMap, coordinates: tuple[int, ...], row: int) -> int | None:
    """The element that TMA reads for row `row` of a box; None for a zero, which it reads outside of the map."""
    place = [COLUMN, coordinates[0] + row, *coordinates[1:]]
    if not all(0 <= index < size for index, size in zip(place, recipe.sizes, strict=True)):
        return None
    total = sum(index * stride for index, stride in zip(place, (1, *recipe.strides), strict=True))
    return 2 * total % 2**64 // 2


@pytest.mark.parametrize("pool", ["nhd", "hnd", "combined", "interleaved"])
@pytest.mark.parametrize(("page_size", "row"), [(16, 0), (16, 112), (64, 64), (256, 128)])
def test_boxes_read_the_rows_of_their_page(pool: str, page_size: int, row: int) -> None:
    """TMA reads zeros outside of a map and wraps addresses at 64 bits."""
    from cutlass_py_attn.kernels.sm90_common import paged_loads

    problem = PagedCase(NAME, page_size, ((1, 3000),), pool=pool).problem()
    plan = next(plan for plan in planner.plans(problem, "sm_90a") if plan.build.family == "sm90")
    key, value, last = plan.launches[0].tensor_maps[1:]
    rows, p = key.box[1], SimpleNamespace(**dict(plan.params))

    def element(strides: tuple[int, ...], place: int) -> int:
        return PAGE * strides[0] + place * strides[1] + HEAD * strides[2] + COLUMN

    coordinates = paged_loads.box_coordinates(p, row, HEAD, PAGE)
    for recipe, tensor in ((key, problem.key), (value, problem.value)):
        expected = [element(tensor.strides, row % page_size + place) for place in range(rows)]
        assert [reads(recipe, coordinates, place) for place in range(rows)] == expected
        outside = paged_loads.box_coordinates(p, row, HEAD, paged_loads.NO_PAGE)
        assert [reads(recipe, outside, place) for place in range(rows)] == [None] * rows
    for count in (0, 1, rows - 1, rows):
        coordinates = paged_loads.last_box_coordinates(p, row, count, HEAD, PAGE)
        expected = [element(problem.value.strides, row % page_size + place) for place in range(count)]
        assert [reads(last, coordinates, place) for place in range(rows)] == [*expected, *[None] * (rows - count)]
    behind = paged_loads.last_box_coordinates(p, row, 0, HEAD, paged_loads.NO_PAGE)
    assert [reads(last, behind, place) for place in range(rows)] == [None] * rows


@pytest.mark.parametrize("name", [NAME, "bf16_d96_h2_full", "f16_d256_h2_full"])
def test_each_number_of_boxes_has_code(name: str) -> None:
    """The producer has a branch for each page size, and leaves a tile of an unknown number of boxes empty."""
    from cutlass_py_attn.kernels.common.layout import most_box_rows
    from cutlass_py_attn.kernels.sm90_common import paged_loads

    build = build_of(PagedCase(name, 16), "sm90")
    loads, tile_n = paged_loads.PagedLoads(build), tma_tiles(build)["key"][0]
    assert set(loads.counts) == {tile_n // min(most_box_rows(build), 2**shift) for shift in range(4, 13)}
    assert all(2**4 * count <= tile_n for count in loads.counts)


@pytest.mark.parametrize("name", [NAME, "bf16_d96_h2_full", "f16_d256_h2_full"])
def test_lanes_have_a_box_each(name: str) -> None:
    """Lane i of the producer warp reads the entry of box i."""
    from cutlass_py_attn.kernels.common.layout import most_box_rows

    build = build_of(PagedCase(name, 16), "sm90")
    tiles = tma_tiles(build)
    assert tiles["key"][0] % most_box_rows(build) == 0
    assert tiles["key"][0] // 16 <= 32


# Kernels of each tile of the sm90 family, of each body of the sm80 family, and with loads of single elements.
NAMES = {
    "sm90": (NAME, "bf16_d256_h2k1_causal_br", "bf16_d96_h2k1_causal_br", "bf16_d192v128_h2_full", "bf16_d64_h2_full"),
    "sm80": (NAME, "f16_d40_h4k2_window_left100_right0", "f32_d200_h2_full"),
}
BODIES = {(case.name, family): (case, family) for case, family in SINGLE if case.name in NAMES[family]}


@pytest.mark.parametrize(("case", "family"), BODIES.values(), ids=lambda it: getattr(it, "label", it))
def test_machine_code(case: PagedCase, family: str, machine_code: MachineCode) -> None:
    """`compile` refuses kernels that spill. The sm90 producer issues TMA for pages; the sm80 family has cp.async."""
    build = build_of(case, family)
    artifact = machine_code(build)
    (kernel,) = artifact.kernels
    assert kernel.spill_bytes == kernel.frame_bytes == 0
    copies, loads = artifact.ptx.count("cp.async.bulk.tensor.4d"), artifact.ptx.count("ld.global")
    assert loads > 0, "no entry of the table is read"
    if family == "sm90":
        strips = sum(columns * 2 for _, columns in list(tma_tiles(build).values())[1:]) // 128
        assert copies >= strips
        # The rows of a box that are keys are at least 0: the difference is signed.
        last = artifact.ptx.rpartition("cp.async.bulk.tensor.4d")[2].partition("cp.async.bulk.tensor.5d")
        assert last[1]
        assert re.search(r"max\.s32 [^;]*, 0;", last[0])
        assert len(re.findall(r"setmaxnreg\.(?:inc|dec)", artifact.ptx)) == 2
    else:
        assert copies == 0
        assert ("cp.async." in artifact.ptx) or build.vector_bytes < 4
