"""Plans of the rooms: tiles, warps and shared memory of one product alone, as a Plan."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cutlass_py_attn import budget
from cutlass_py_attn.budget import MMA_ROWS
from cutlass_py_attn.checks import MAX_LENGTH
from cutlass_py_attn.device import Architecture, architecture
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.gemm import ROOMS
from cutlass_py_attn.gemm.gemm import Gemm
from cutlass_py_attn.masks import Full
from cutlass_py_attn.parts.integers import round_up
from cutlass_py_attn.plan import COLUMN_MULTIPLE, Buffer, Build, Launch, Plan, TensorMap, Warps, Workspace
from cutlass_py_attn.plan_table import Tile
from cutlass_py_attn.shared_memory import TILE_ALIGNMENT, tile_bytes

FAMILIES = {"generic": ("float16", "bfloat16", "float32"), "hopper": ("float16", "bfloat16")}
HEAD_DIMS = (64, 96, 128, 192, 256)
MAX_HEAD_DIM = 256
MAX_ACCUMULATORS = {"generic": 128, "hopper": 200}  # registers a thread; wgmma keeps no operands in registers
BARRIER_BYTES = 8
SWIZZLES = (128, 64, 32)

# Widest first. One warpgroup where C is narrow, two where it is wide; the last rows serve 99 KiB and float32.
_TILES = {
    "generic": (Tile(128, 128, 8), Tile(64, 64, 4), Tile(64, 32, 4), Tile(32, 32, 4)),
    "hopper": (Tile(128, 128, 8),),
}
_NARROW = {"hopper": (Tile(64, 64, 4),)}
NARROW_HEAD_DIM = 64

_PRODUCT_WARPS = {
    "matmul_qk": "scores",
    "doivj": "scores",
    "grad_v": "grad_v",
    "grad_k": "grad_k",
    "grad_q": "grad_q",
}


def spec_of(build: Build) -> Gemm:
    """The product of a room's Build."""
    return importlib.import_module(f"cutlass_py_attn.gemm.{build.room}").spec(build)


def plan_room(
    name: str, family: str, dtype: str, head_dim: int, arch: str, tiles: int = 1, tile: Tile | None = None
) -> Plan:
    """Room `name` alone on `tiles` tiles; NotSupported lists every objection.

    tile: rows and warps of the product; None takes the first of the table that fits.
    """
    limits = architecture(arch)
    reasons = [*_objections(name, family, dtype, head_dim, limits), *_tiles_objections(tiles)]
    if reasons:
        raise NotSupported(reasons)
    chosen = _NARROW.get(family, ()) if head_dim <= NARROW_HEAD_DIM else ()
    misfits: list[str] = []
    for candidate in (tile,) if tile else (*chosen, *_TILES[family]):
        build = _build(name, family, dtype, head_dim, arch, candidate)
        misfits = _misfits(build, limits)
        if not misfits:
            return _plan(build, tiles)
    raise NotSupported(f"{name}: no tile fits {arch}: {'; '.join(misfits)}; use a smaller tile or head_dim")


def all_rooms(arch: str) -> list[Plan]:
    """Every room that `arch` has: all families, dtypes and head dims."""
    limits = architecture(arch)
    return [
        plan_room(name, family, dtype, head_dim, arch)
        for family, dtypes in FAMILIES.items()
        for dtype in dtypes
        for head_dim in HEAD_DIMS
        for name in ROOMS
        if not list(_objections(name, family, dtype, head_dim, limits))
    ]


def swizzle_bytes(columns: int) -> int:
    """Width of the swizzle of a 16-bit tile with that many columns: the widest that divides a row."""
    width = next((width for width in SWIZZLES if columns * 2 % width == 0), None)
    assert width is not None, f"columns = {columns}: wgmma reads multiples of {SWIZZLES[-1] // 2}"
    return width


def _objections(name: str, family: str, dtype: str, head_dim: int, limits: Architecture) -> Iterator[str]:
    if name not in ROOMS:
        yield f"room = {name!r}: must be one of {', '.join(ROOMS)}"
    if family not in FAMILIES:
        yield f"family = {family!r}: must be one of {', '.join(FAMILIES)}"
    elif dtype not in FAMILIES[family]:
        yield f"dtype = {dtype!r}: the {family} family takes {', '.join(FAMILIES[family])}"
    if family == "hopper" and not limits.has_wgmma:
        yield f"arch = {limits.name}: has no wgmma; use sm_90a, or family generic"
    if head_dim < COLUMN_MULTIPLE or head_dim > MAX_HEAD_DIM or head_dim % COLUMN_MULTIPLE:
        yield (
            f"head_dim = {head_dim}: must be a multiple of {COLUMN_MULTIPLE} up to {MAX_HEAD_DIM}, "
            "for a room alone reads whole tiles; pad with zero columns"
        )


def _tiles_objections(tiles: int) -> Iterator[str]:
    if not 0 <= tiles <= MAX_LENGTH // MAX_HEAD_DIM:
        yield f"tiles = {tiles}: must be from 0 to {MAX_LENGTH // MAX_HEAD_DIM}; call several times"


def _build(name: str, family: str, dtype: str, head_dim: int, arch: str, tile: Tile) -> Build:
    none = (0, 0)
    build = Build(
        kind="room",
        family=family,
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
        scores=none,
        grad_v=none,
        grad_k=none,
        grad_q=none,
        deterministic=False,
        register_usage_level=5,
        min_blocks_per_sm=0,
        room=name,
        shared_memory=(),
    )
    spec = spec_of(build)
    warps: dict[str, Any] = {_PRODUCT_WARPS[name]: _warps(build, spec)}
    return replace(build, **warps, shared_memory=_shared_memory(build, spec))


def _warps(build: Build, spec: Gemm) -> Warps:
    if build.family == "hopper":
        return build.warps, 1  # warpgroups share the rows
    return budget.warp_grid(build.warps, spec.m, spec.n, build.item_bytes)


def _shared_memory(build: Build, spec: Gemm) -> tuple[Buffer, ...]:
    """Tiles a and b, and for TMA the barrier that counts their bytes."""
    a, b = tile_bytes(build.dtype, *spec.a_shape), tile_bytes(build.dtype, *spec.b_shape)
    b_offset = round_up(a, TILE_ALIGNMENT)
    tiles = (Buffer("a", 0, a, 0, 1), Buffer("b", b_offset, b, 0, 1))
    if build.family != "hopper":
        return tiles
    return (*tiles, Buffer("barrier", round_up(b_offset + b, BARRIER_BYTES), BARRIER_BYTES, 0, 0))


def _misfits(build: Build, limits: Architecture) -> list[str]:
    warps = getattr(build, _PRODUCT_WARPS[build.room])
    if warps[0] * warps[1] != build.warps:
        return [f"{build.room}: {build.tile_m} x {build.tile_n} tiles do not divide among {build.warps} warps"]
    spec = spec_of(build)
    found = spec.objections()
    if build.family == "hopper" and spec.accumulate and spec.m > build.warps * MMA_ROWS:
        # The zeros of its second 64 rows would be set between two wgmma, and ptxas would wait there.
        found.append(f"{build.room}: m = {spec.m}: a room that starts from zeros takes 64 rows a warpgroup")
    if spec.accumulator_registers > MAX_ACCUMULATORS[build.family]:
        found.append(
            f"accumulator = {spec.accumulator_registers} registers a thread: "
            f"{MAX_ACCUMULATORS[build.family]} are allowed"
        )
    if build.shared_memory_bytes > limits.shared_memory_per_block:
        found.append(
            f"shared memory = {build.shared_memory_bytes} bytes: {limits.name} allows "
            f"{limits.shared_memory_per_block} a block"
        )
    return found


def _plan(build: Build, tiles: int) -> Plan:
    spec = spec_of(build)
    maps: tuple[TensorMap, ...] = ()
    if build.family == "hopper":
        maps = (_tensor_map("a", spec.a_shape, tiles), _tensor_map("b", spec.b_shape, tiles))
    launch = Launch(f"{build.symbol}_0", (tiles, 1, 1), (build.threads, 1, 1), build.shared_memory_bytes, maps)
    why = (
        f"{spec.equation} alone: {spec.m} x {spec.n} over {spec.k}, {build.warps} warps, "
        f"{spec.instructions} instructions each, {spec.accumulator_registers} accumulator registers a thread"
    )
    return Plan(build, (launch,) if tiles else (), Workspace(), (("tiles", tiles),), why)


def _tensor_map(field: str, shape: tuple[int, int], tiles: int) -> TensorMap:
    """All tiles below each other; a box is one strip of a tile, as wide as the swizzle."""
    rows, columns = shape
    swizzle = swizzle_bytes(columns)
    return TensorMap(field, (columns, tiles * rows), (columns,), (swizzle // 2, rows), swizzle)
