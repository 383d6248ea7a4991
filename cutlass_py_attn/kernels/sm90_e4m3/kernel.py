"""Kernel of variant e4m3: the forward of 8-bit operands."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cutlass_py_attn.kernels.kernel import Refusals, listed, refuse
from cutlass_py_attn.kernels.sm90_common import kernel as sm90_common
from cutlass_py_attn.kernels.sm90_e4m3 import layout
from cutlass_py_attn.kernels.sm90_forward import kernel as sm90_forward
from cutlass_py_attn.kernels.sm90_forward.rules import forward_rows, two_key_tiles
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.variants import E4M3
from cutlass_py_attn.score_terms import registry


def _refusals(build: Build) -> Refusals:
    yield from forward_rows(build, layout.REGISTERS)
    if build.tile_n not in layout.TILE_N:
        yield refuse(build, "tile_n", "a transposed value tile has whole strips", f"use {listed(layout.TILE_N)}")
    yield from two_key_tiles(build)


def _accumulators(build: Build) -> int:
    return layout.consumer_registers(build, sm90_common.consumer_threads(build))


FORWARD: Final = replace(
    sm90_forward.FORWARD,
    variant=E4M3,
    takes_registered_terms=False,
    beside_ranges=None,
    module="sm90_e4m3.forward",
    summary="persistent blocks over query tiles of 8-bit operands; two warps transpose every value tile",
    layouts=(*registry.LAYOUTS, registry.FLOAT16_OUTPUT),
    terms=(),
    refusals=_refusals,
    shared_memory=layout.forward_map,
    accumulators=_accumulators,
    accumulator_limit=sm90_common.limited_by(layout.registers),
    reason=sm90_forward.forward_reason(loads="one warp loads, two transpose values"),
)
KERNELS: Final = (FORWARD,)
