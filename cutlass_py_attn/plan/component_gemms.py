"""Plans of standalone component GEMMs: tile, warps, shared memory and launch of one product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.integers import round_up
from cutlass_py_attn.kernels.component_gemms import COMPONENT_GEMMS
from cutlass_py_attn.kernels.component_gemms.kernel import KERNELS, NARROW_HEAD_DIM, ComponentGemmKernel, spec_of
from cutlass_py_attn.kernels.component_gemms.products import BY_NAME
from cutlass_py_attn.kernels.families import FAMILIES as FUSED_FAMILIES
from cutlass_py_attn.launch.arch import Architecture, architecture
from cutlass_py_attn.launch.build import COLUMN_MULTIPLE, Buffer, Build
from cutlass_py_attn.launch.gemm_spec import GemmSpec
from cutlass_py_attn.launch.smem import BARRIER_BYTES, TILE_ALIGNMENT, swizzle_bytes, tile_bytes
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan.plan import Launch, Plan, TensorMap, Workspace
from cutlass_py_attn.problem.masks import Full
from cutlass_py_attn.problem.validation import MAX_LENGTH

FAMILIES = {kernel.family: kernel.dtypes for kernel in KERNELS}
HEAD_DIMS = (64, 96, 128, 192, 256)
MAX_HEAD_DIM = 256
_KERNELS = {kernel.family: kernel for kernel in KERNELS}


def plan_component_gemm(
    name: str, family: str, dtype: str, head_dim: int, arch: str, tiles: int = 1, tile: TileConfig | None = None
) -> Plan:
    """Returns the plan of component GEMM `name` on `tiles` tiles.

    name: one of COMPONENT_GEMMS
    family: one of FAMILIES
    dtype, head_dim: of the operands; both head dims are `head_dim`
    arch: target, such as "sm_90a"
    tiles: tiles that the kernel multiplies, one per block
    tile: rows and warps of the product; None for the first tile of the table that fits

    NotSupported lists every objection.
    """
    limits = architecture(arch)
    reasons = [*_objections(name, family, dtype, head_dim, limits), *_tiles_objections(tiles)]
    if reasons:
        raise NotSupported(reasons)
    kernel = _KERNELS[family]
    narrow = kernel.narrow_tiles if head_dim <= NARROW_HEAD_DIM else ()
    misfits: list[str] = []
    for candidate in (tile,) if tile else (*narrow, *kernel.tiles):
        build = _build(name, kernel, dtype, head_dim, arch, candidate)
        misfits = _misfits(build, kernel, limits)
        if not misfits:
            return _plan(build, kernel, tiles)
    raise NotSupported(f"{name}: no tile fits {arch}: {'; '.join(misfits)}; use a smaller tile or head_dim")


def all_component_gemms(arch: str) -> list[Plan]:
    """Returns the plan of every component GEMM that `arch` has: all families, dtypes and head dims."""
    limits = architecture(arch)
    return [
        plan_component_gemm(name, family, dtype, head_dim, arch)
        for family, dtypes in FAMILIES.items()
        for dtype in dtypes
        for head_dim in HEAD_DIMS
        for name in COMPONENT_GEMMS
        if not list(_objections(name, family, dtype, head_dim, limits))
    ]


def families_of(dtype: str, arch: str) -> list[str]:
    """Returns the families that multiply operands of a dtype on a target."""
    limits = architecture(arch)
    return [name for name, dtypes in FAMILIES.items() if dtype in dtypes and _runs_on(name, limits)]


def _runs_on(family: str, limits: Architecture) -> bool:
    return limits.has_wgmma or not FUSED_FAMILIES[family].needs_wgmma


def _objections(name: str, family: str, dtype: str, head_dim: int, limits: Architecture) -> Iterator[str]:
    if name not in COMPONENT_GEMMS:
        yield f"component_gemm = {name!r}: must be one of {', '.join(COMPONENT_GEMMS)}"
    if family not in FAMILIES:
        yield f"family = {family!r}: must be one of {', '.join(FAMILIES)}"
    elif dtype not in FAMILIES[family]:
        yield f"dtype = {dtype!r}: the {family} family has {', '.join(FAMILIES[family])}; use one of them"
    if family in FAMILIES and not _runs_on(family, limits):
        yield f"arch = {limits.name}: has no wgmma; use sm_90a, or family sm80"
    if head_dim < COLUMN_MULTIPLE or head_dim > MAX_HEAD_DIM or head_dim % COLUMN_MULTIPLE:
        yield (
            f"head_dim = {head_dim}: must be a multiple of {COLUMN_MULTIPLE} up to {MAX_HEAD_DIM}, "
            "because a standalone component GEMM reads whole tiles; pad with zero columns"
        )


def _tiles_objections(tiles: int) -> Iterator[str]:
    if not 0 <= tiles <= MAX_LENGTH // MAX_HEAD_DIM:
        yield f"tiles = {tiles}: must be from 0 to {MAX_LENGTH // MAX_HEAD_DIM}; call several times"


def _build(name: str, kernel: ComponentGemmKernel, dtype: str, head_dim: int, arch: str, tile: TileConfig) -> Build:
    none = (0, 0)
    build = Build(
        kind="component_gemm",
        family=kernel.family,
        variant=kernel.variant,
        arch=arch,
        dtype=dtype,
        head_dim=head_dim,
        head_dim_value=head_dim,
        mask=Full().name,
        tile_m=tile.tile_m,
        tile_n=tile.tile_n,
        warps=tile.warps,
        query_stages=1,
        grad_output_stages=1,
        warps_scores=none,
        warps_grad_v=none,
        warps_grad_k=none,
        warps_grad_q=none,
        deterministic=False,
        register_usage_level=5,
        min_blocks_per_sm=0,
        component_gemm=name,
        shared_memory=(),
    )
    spec = spec_of(build)
    warps: dict[str, Any] = {BY_NAME[name].warps: kernel.warps_of(build, spec)}
    return replace(build, **warps, shared_memory=_shared_memory(build, spec, has_barrier=kernel.has_barrier))


def _shared_memory(build: Build, spec: GemmSpec, *, has_barrier: bool) -> tuple[Buffer, ...]:
    """Places tiles a and b, and the barrier that counts their bytes."""
    a, b = tile_bytes(build.dtype, *spec.a_shape), tile_bytes(build.dtype, *spec.b_shape)
    b_offset = round_up(a, TILE_ALIGNMENT)
    tiles = (Buffer("a", 0, a, 0, 1), Buffer("b", b_offset, b, 0, 1))
    if not has_barrier:
        return tiles
    return (*tiles, Buffer("barrier", round_up(b_offset + b, BARRIER_BYTES), BARRIER_BYTES, 0, 0))


def _misfits(build: Build, kernel: ComponentGemmKernel, limits: Architecture) -> list[str]:
    warps = getattr(build, BY_NAME[build.component_gemm].warps)
    if warps[0] * warps[1] != build.warps:
        return [
            f"{build.component_gemm}: {build.tile_m} x {build.tile_n} tiles do not divide among {build.warps} warps; "
            "use another tile"
        ]
    spec = spec_of(build)
    found = [*spec.objections(), *kernel.misfits(build, spec)]
    if spec.accumulator_registers > kernel.accumulator_limit:
        found.append(
            f"accumulator = {spec.accumulator_registers} registers a thread: "
            f"{kernel.accumulator_limit} are allowed; use a smaller tile or more warps"
        )
    if build.shared_memory_bytes > limits.shared_memory_per_block:
        found.append(
            f"shared memory = {build.shared_memory_bytes} bytes: {limits.name} allows "
            f"{limits.shared_memory_per_block} a block; use a smaller tile"
        )
    return found


def _plan(build: Build, kernel: ComponentGemmKernel, tiles: int) -> Plan:
    spec = spec_of(build)
    maps = tuple(_tensor_map(field, shape, tiles) for field, shape in kernel.tensor_maps(build).items())
    launch = Launch(f"{build.symbol}_0", (tiles, 1, 1), (build.threads, 1, 1), build.shared_memory_bytes, maps)
    reason = (
        f"{spec.equation} alone: {spec.m} x {spec.n} over {spec.k}, {build.warps} warps, "
        f"{spec.instructions} instructions each, {spec.accumulator_registers} accumulator registers a thread"
    )
    return Plan(build, (launch,) if tiles else (), Workspace(), (("tiles", tiles),), reason)


def _tensor_map(field: str, shape: tuple[int, int], tiles: int) -> TensorMap:
    """Returns the map of all tiles, stored one below another; a box is one strip of a tile, as wide as the swizzle."""
    rows, columns = shape
    swizzle = swizzle_bytes(columns)
    return TensorMap(field, (columns, tiles * rows), (columns,), (swizzle // 2, rows), swizzle)
