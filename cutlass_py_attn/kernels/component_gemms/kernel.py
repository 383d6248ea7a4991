"""Kernels of the standalone component GEMMs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from cutlass_py_attn.kernels.component_gemms.products import BY_NAME
from cutlass_py_attn.kernels.kernel import Kernel, Tile, no_tensor_maps, warp_grid
from cutlass_py_attn.launch.build import Build, Warps
from cutlass_py_attn.launch.expressions import ONE, Grid, Name
from cutlass_py_attn.launch.gemm_spec import MMA_ROWS, GemmSpec
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.launch.variants import STANDARD

NARROW_HEAD_DIM: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentGemmKernel(Kernel):
    """A kernel body of one product.

    dtypes: of its operands
    tiles: those of all head dims, the widest first; narrow_tiles: those before them up to NARROW_HEAD_DIM
    warps_of: the warps over the product
    accumulator_limit: registers of a thread for the product
    has_barrier: whether a barrier in shared memory counts the bytes of its operands
    misfits: why it cannot compute a product, beside what the instruction and the warps do not divide
    """

    dtypes: tuple[str, ...]
    tiles: tuple[TileConfig, ...]
    narrow_tiles: tuple[TileConfig, ...] = ()
    warps_of: Callable[[Build, GemmSpec], Warps]
    accumulator_limit: int
    has_barrier: bool
    misfits: Callable[[Build, GemmSpec], Iterator[str]] = lambda build, spec: iter(())


def spec_of(build: Build) -> GemmSpec:
    """Returns the product of a component GEMM's Build."""
    return BY_NAME[build.component_gemm].spec(build)


def _grid(build: Build) -> Grid:
    """Returns the grid: a block for each tile."""
    return Name("tiles"), ONE, ONE


def _maps(build: Build) -> dict[str, Tile]:
    spec = spec_of(build)
    return {"a": spec.a_shape, "b": spec.b_shape}


def _wgmma_misfits(build: Build, spec: GemmSpec) -> Iterator[str]:
    if spec.accumulate and spec.m > build.warps * MMA_ROWS:
        # ptxas would wait between two wgmma to set the zeros of the second 64 rows.
        yield f"{build.component_gemm}: m = {spec.m}: an accumulating component GEMM has 64 rows a warpgroup; use them"


SM80: Final = ComponentGemmKernel(
    kind="component_gemm",
    family="sm80",
    variant=STANDARD,
    module="component_gemms.standalone_sm80",
    summary="one block per tile",
    layouts=(),
    dtypes=("float16", "bfloat16", "float32"),
    # The last tiles are for 99 KiB and for float32.
    tiles=(TileConfig(128, 128, 8), TileConfig(64, 64, 4), TileConfig(64, 32, 4), TileConfig(32, 32, 4)),
    warps_of=lambda build, spec: warp_grid(build.warps, spec.m, spec.n, build.item_bytes),
    accumulator_limit=128,
    has_barrier=False,
    main_grid=_grid,
    tensor_maps=no_tensor_maps,
)
SM90: Final = replace(
    SM80,
    family="sm90",
    module="component_gemms.standalone_sm90",
    dtypes=("float16", "bfloat16"),
    # One warpgroup for a narrow C, two for a wide C.
    tiles=(TileConfig(128, 128, 8),),
    narrow_tiles=(TileConfig(64, 64, 4),),
    warps_of=lambda build, spec: (build.warps, 1),  # warpgroups divide the rows
    accumulator_limit=200,  # wgmma keeps no operands in registers
    has_barrier=True,
    misfits=_wgmma_misfits,
    tensor_maps=_maps,
)
KERNELS: Final = (SM80, SM90)
