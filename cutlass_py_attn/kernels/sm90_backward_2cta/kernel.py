"""Kernel of variant 2cta: the backward whose pairs of thread blocks have dK and dV of two key tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cutlass_py_attn.kernels.kernel import Refusals, fixed_order, refuse
from cutlass_py_attn.kernels.problem_kind import NARROW_HEAD_DIM
from cutlass_py_attn.kernels.sm90_backward import kernel as sm90_backward
from cutlass_py_attn.kernels.sm90_backward.layout import CONSUMER_WARPGROUPS
from cutlass_py_attn.kernels.sm90_backward.rules import all_gradients, backward_warp_rules
from cutlass_py_attn.kernels.sm90_backward_2cta.layout import backward_2cta_map
from cutlass_py_attn.kernels.sm90_common import kernel as sm90_common
from cutlass_py_attn.kernels.sm90_common.rules import sm90_standard
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_ROWS
from cutlass_py_attn.launch.variants import TWO_CTA


def _refusals(build: Build) -> Refusals:
    """Yields the rules of the kernel."""
    yield from sm90_standard(build)
    yield from all_gradients(build)
    yield from backward_warp_rules(build, (CONSUMER_WARPGROUPS,))
    for field, reason in (("tile_m", "dQ of both blocks has"), ("tile_n", "one warpgroup has one gradient of")):
        if getattr(build, field) != WARPGROUP_ROWS:
            yield refuse(build, field, f"in variant 2cta {reason} {WARPGROUP_ROWS} rows", f"use {WARPGROUP_ROWS}")
    if max(build.head_dim, build.head_dim_value) <= NARROW_HEAD_DIM:
        rule = f"variant 2cta is for head dims beyond {NARROW_HEAD_DIM}"
        yield refuse(build, "head_dim", rule, "use the standard variant")
    if build.grad_output_stages < 2:
        rule = "a stage is in use until the next tile is multiplied"
        yield refuse(build, "grad_output_stages", rule, "use 2 or more")
    if build.key_stages != 1:
        yield refuse(build, "key_stages", "variant 2cta has one key tile in flight", "use 1")
    if build.score_rows:
        yield refuse(build, "score_rows", "variant 2cta computes all rows of a tile at once", "use 0")
    if build.deterministic:
        yield refuse(build, "deterministic", "variant 2cta adds dQ in any order", "use family sm80")


def _accumulators(build: Build) -> int:
    """Returns the registers of a warpgroup that has one of both gradients."""
    widest = max(build.columns, build.columns_value)
    return build.tile_n * (build.tile_m + build.tile_m // 2 + widest) // sm90_common.consumer_threads(build)


BACKWARD: Final = replace(
    sm90_backward.BACKWARD,
    variant=TWO_CTA,
    takes_registered_terms=False,
    beside_ranges=None,
    steps=fixed_order,
    module="sm90_backward_2cta.backward",
    summary="clusters of two blocks over neighbouring key tiles; one warpgroup has dV, one dK, one dQ of both blocks",
    layouts=("grouped",),
    terms=(),
    refusals=_refusals,
    shared_memory=backward_2cta_map,
    accumulators=_accumulators,
    reason=sm90_common.reason(
        lambda build: (
            "one warpgroup computes P and dV, one dS and dK, one dQ of both blocks of a cluster, one warp loads"
        )
    ),
)
KERNELS: Final = (BACKWARD,)
