"""The catalogue has one Kernel for each Build, and each Kernel says what the planner asks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from cutlass_py_attn.kernels.catalogue import KERNELS, kernel_of
from cutlass_py_attn.kernels.families import FAMILIES
from cutlass_py_attn.kernels.kernel import FusedKernel, Kernel
from cutlass_py_attn.kernels.sm80 import kernel as sm80
from cutlass_py_attn.kernels.sm90_backward import kernel as sm90_backward
from cutlass_py_attn.kernels.sm90_backward_2cta import kernel as sm90_backward_2cta
from cutlass_py_attn.kernels.sm90_family import tiles
from cutlass_py_attn.kernels.sm90_forward import kernel as sm90_forward
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan.planner import plan_forward, plans_on
from cutlass_py_attn.problem.masks import RANGES
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.tensors import DIRECTIONS
from cutlass_py_attn.score_terms import registry

FUSED = [kernel for kernel in KERNELS.values() if isinstance(kernel, FusedKernel)]
TERMS = set(registry.names())


def tile_tables() -> Iterator[tuple[str, TileConfig]]:
    """Yields (direction, tile) of every row of the tables of the sm90 family."""
    for name, table in tiles.SM90.items():
        direction = name.split()[0]
        yield from ((direction, row.tile) for rows in table.values() for row in rows)


def build_with(features: tuple[str, ...], mask: str = "full") -> Build:
    """Returns a Build that asks for features."""
    problem = parse("bf16_d128_s512_b1_h2_full").problem("forward")
    return dataclasses.replace(plan_forward(problem, "sm_90a").build, features=features, mask=mask)


def test_each_kernel_is_listed_once() -> None:
    listed = (*sm80.KERNELS, *sm90_forward.KERNELS, *sm90_backward.KERNELS)
    assert all(KERNELS[kernel.kind, kernel.family, kernel.variant] is kernel for kernel in listed)
    assert all(key == (kernel.kind, kernel.family, kernel.variant) for key, kernel in KERNELS.items())


def test_every_row_of_the_tile_tables_has_a_kernel() -> None:
    rows = list(tile_tables())
    assert len(rows) > 50
    assert all((direction, "sm90", tile.variant) in KERNELS for direction, tile in rows)


@pytest.mark.parametrize(
    ("direction", "text"),
    [
        ("forward", "bf16_d128_s512_b1_h2_causal"),
        ("forward", "bf16_d128_q1_s4096_b1_h8k1_full_paged16"),
        ("forward", "bf16_d512_s512_b1_h2_causal"),
        ("backward", "bf16_d128_s512_b1_h2_causal"),
        ("backward", "bf16_d256_s512_b1_h2_causal"),
    ],
)
def test_each_build_has_a_kernel_and_the_order_of_families(direction: str, text: str) -> None:
    builds = [plan.build for plan in plans_on(parse(text).problem(direction), (9, 0))]
    assert all((build.kind, build.family, build.variant) in KERNELS for build in builds)
    order = [[*FAMILIES].index(build.family) for build in builds]
    assert order == sorted(order)
    assert all(set(build.features) <= set(kernel_of(build).features) for build in builds)


def test_a_kernel_without_one_of_its_rules_is_refused() -> None:
    fields = {field.name: getattr(sm80.FORWARD, field.name) for field in dataclasses.fields(FusedKernel)}
    assert FusedKernel(**fields) == sm80.FORWARD
    required = [field for field in dataclasses.fields(FusedKernel) if field.default is dataclasses.MISSING]
    assert len(required) > 12
    for field in required:
        rest = {name: value for name, value in fields.items() if name != field.name}
        with pytest.raises(TypeError, match=field.name):
            FusedKernel(**rest)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: "/".join((kernel.kind, kernel.module)))
def test_fields(kernel: Kernel) -> None:
    assert isinstance(kernel, FusedKernel) == (kernel.kind in DIRECTIONS)
    assert set(kernel.layouts) <= {*registry.LAYOUTS, *registry.OPTIONAL_LAYOUTS}
    assert set(kernel.terms) <= TERMS
    assert kernel.lengths in ("any", "short", "long", "few_queries")
    assert kernel.features == tuple(sorted((*kernel.layouts, *kernel.terms)))


@pytest.mark.parametrize(
    ("kernel", "lacking"),
    [
        (sm80.FORWARD, set()),
        (sm80.BACKWARD, set()),
        (sm90_forward.FORWARD, set()),
        (sm90_backward.BACKWARD, set()),
        (sm90_backward.DS_REGISTERS_BACKWARD, TERMS - {"bias", "sinks"}),
        (sm90_backward.KEY_REGISTERS_BACKWARD, TERMS - {"sinks"}),
        (sm90_backward.SCORE_ROWS_BACKWARD, {"dropout"}),
        (sm90_backward_2cta.BACKWARD, TERMS),
        (KERNELS["forward", "decode", ""], TERMS),
    ],
)
def test_terms(kernel: Kernel, lacking: set[str]) -> None:
    assert set(kernel.lacks(build_with(registry.names()))) == lacking


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: "/".join((kernel.kind, kernel.module)))
def test_ranges_of_keys(kernel: Kernel) -> None:
    """A kernel made of another does not inherit that it reads tile lists."""
    reads_lists = kernel in (
        sm90_forward.FORWARD,
        sm90_backward.BACKWARD,
        sm90_backward.DS_REGISTERS_BACKWARD,
        sm90_backward.KEY_REGISTERS_BACKWARD,
    )
    assert kernel.lacks(build_with((), mask=RANGES)) == ([] if reads_lists else ["ranges of keys"])
    if reads_lists:
        found = kernel.lacks(build_with(kernel.features, mask=RANGES))
        taken = {"grouped", "sinks", "softcap"}
        assert found == [f"{name} with ranges of keys" for name in kernel.features if name not in taken]


def test_kernels_of_plans_name_their_launches() -> None:
    plan = plan_forward(parse("bf16_d128_s512_b1_h2_causal").problem("forward"), "sm_90a")
    assert [*kernel_of(plan.build).tensor_maps(plan.build)] == ["query", "key", "value"]
    assert kernel_of(plan.build).main_grid(plan.build)
