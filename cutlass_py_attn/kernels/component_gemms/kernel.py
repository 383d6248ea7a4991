"""Kernels of the standalone component GEMMs."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cutlass_py_attn.kernels.component_gemms.products import BY_NAME
from cutlass_py_attn.kernels.kernel import Kernel, Tile, no_tensor_maps
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.expressions import ONE, Grid, Name
from cutlass_py_attn.launch.gemm_spec import GemmSpec
from cutlass_py_attn.launch.variants import STANDARD


def spec_of(build: Build) -> GemmSpec:
    """Returns the product of a component GEMM's Build."""
    return BY_NAME[build.component_gemm].spec(build)


def _grid(build: Build) -> Grid:
    """Returns the grid: a block for each tile."""
    return Name("tiles"), ONE, ONE


def _maps(build: Build) -> dict[str, Tile]:
    spec = spec_of(build)
    return {"a": spec.a_shape, "b": spec.b_shape}


SM80: Final = Kernel(
    kind="component_gemm",
    family="sm80",
    variant=STANDARD,
    module="component_gemms.standalone_sm80",
    summary="one block per tile",
    layouts=(),
    main_grid=_grid,
    tensor_maps=no_tensor_maps,
)
SM90: Final = replace(SM80, family="sm90", module="component_gemms.standalone_sm90", tensor_maps=_maps)
KERNELS: Final = (SM80, SM90)
