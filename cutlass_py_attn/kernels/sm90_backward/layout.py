"""Roles, shared memory and registers of the sm90 backward: what its machine code reads of a Build."""

from __future__ import annotations

from typing import Final

from cutlass_py_attn.kernels.sm90_common.layout import DROPOUT_TILES, dropout_tile_bytes
from cutlass_py_attn.launch.build import Buffer, Build
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_ROWS, WARPGROUP_WARPS
from cutlass_py_attn.launch.smem import BARRIER_BYTES, first_that_fits, stack, tile_bytes
from cutlass_py_attn.launch.variants import KEY_REGISTERS, PER_HEAD, TWO_CTA
from cutlass_py_attn.problem.tensors import F32_BYTES, RANGE_BYTES, WORD_BYTES

DQ_WARPGROUPS: Final = 1  # of the backward
CONSUMER_WARPGROUPS: Final = 2  # most of the backward: they hold dK and dV of 64 keys each
KEY_REGISTERS_PIECE: Final = (32, 64)  # (rows, columns) of dQ in one product of variant key_registers
KEY_REGISTERS_STAGED: Final = 2  # of these pieces in the staging buffer; a query tile has a multiple of it
ADDING_WARPS: Final = 2  # of a deterministic backward, which take turns to add dQ of a query tile
GRAD_BIAS_WARP: Final = WARPGROUP_WARPS - 1  # of a backward: it stores dS as the gradient of the bias
WORK_TILE_WORDS: Final = 12  # int32 of the record of one work tile in the backward
WORK_TILE_RECORDS: Final = 2  # for each stage of the key
DROPOUT_WORD_KEYS, DROPOUT_WORD_QUERIES = 16, 64  # whose bits a warp of the backward generates together


def stored_tiles(build: Build) -> dict[str, tuple[int, int]]:
    """Returns (rows, columns) of the tiles that TMA stores, by tensor; their maps follow those of loads."""
    return {"grad_bias": (build.tile_m, build.tile_n)} if build.maps_grad_bias else {}


def backward_map(build: Build) -> tuple[Buffer, ...]:
    """Returns the map of the backward, with dropout bits of as many query tiles as fit."""
    dropout_tiles = DROPOUT_TILES if build.has("dropout") else (0,)
    maps = {count: _backward_with(build, count) for count in dropout_tiles}
    return maps[first_that_fits(build, maps.items())]


def _backward_with(build: Build, dropout_tiles: int) -> tuple[Buffer, ...]:
    """Places the stages of every operand, of dS and of the row statistics, and what the warpgroups exchange.

    Also the staged dQ, the ranges of keys, the dropout bits, a full and an empty barrier for each stage, and the
    records of work tiles. With one block per head there is one more barrier, for the loads of the dQ sum. If dQ is
    added in order, two warps that add the staged dQ have two barriers each.
    """
    dtype, tile_m, tile_n = build.dtype, build.tile_m, build.tile_n
    query_stages, grad_output_stages, rows = build.query_stages, build.grad_output_stages, build.block_queries
    ds_stages = grad_output_stages * rows // tile_m
    stages = query_stages + grad_output_stages + ds_stages + build.key_stages + 1
    stages += ADDING_WARPS if adds_in_order(build) else 0
    return stack(
        ("key", build.key_stages * tile_bytes(dtype, tile_n, build.columns), 0, 7),
        ("value", tile_bytes(dtype, tile_n, build.columns_value), 0, 3),
        ("query", query_stages * tile_bytes(dtype, rows, build.columns), 0, 6),
        ("grad_output", grad_output_stages * tile_bytes(dtype, rows, build.columns_value), 0, 5),
        ("ds", ds_stages * tile_bytes(dtype, tile_m, tile_n), 4, 7),
        ("staging", grad_query_bytes(build), 7, 7),
        ("key_ranges", grad_output_stages * rows * RANGE_BYTES if build.form.has_ranges else 0, 0, 2),
        ("logsumexp", query_stages * rows * F32_BYTES, 0, 2),
        ("delta", grad_output_stages * rows * F32_BYTES, 0, 4),
        ("bias", tile_bytes(dtype, rows, tile_n) if build.has("bias") else 0, 0, 2),
        ("dropout_bits", dropout_tiles * dropout_tile_bytes(build), 0, 2),
        ("barriers", BARRIER_BYTES * (2 * stages + (build.variant == PER_HEAD)), 0, 8),
        ("work_tiles", build.key_stages * WORK_TILE_RECORDS * WORK_TILE_WORDS * WORD_BYTES, 0, 8),
    )


def adds_in_order(build: Build) -> bool:
    """Returns whether warps of their own add the staged dQ to its sums, in an order that semaphores keep.

    With one block per head the order is that of the block's key tiles. With 128 queries a tile and one stage of K the
    dQ warpgroup adds, which is 2 % faster; so it does in variant key_registers, which would spill with adding warps.
    """
    is_faster = build.tile_m == WARPGROUP_ROWS or build.key_stages > 1
    needs_order = build.deterministic and build.variant not in (PER_HEAD, KEY_REGISTERS)
    return needs_order and grad_query_bytes(build) > 0 and is_faster


def registers(build: Build) -> tuple[int, ...]:
    """Returns the registers per thread of each role: loads, computes dQ, computes the others.

    The last warpgroups hold scores, and dK and dV of 64 keys, and need a few registers beside them.
    """
    if build.variant == TWO_CTA:
        return 32, 64, 208
    if build.tile_n == WARPGROUP_ROWS:  # one warpgroup less
        return 32, 120, 240
    if build.block_queries < build.tile_m:
        return 24, 56, 216
    if build.variant == KEY_REGISTERS:  # the warpgroup of dQ has K^T
        return 32, 80, 200
    accumulators = (build.columns + build.columns_value) // 2 + build.tile_m
    if accumulators <= 176:
        return 24, 104, 192
    return (24, 72, 208) if build.variant == PER_HEAD and not build.has("dropout") else (32, 64, 208)


def grad_query_piece(build: Build) -> tuple[int, int]:
    """Returns (rows, columns) of dQ for which its warpgroup has registers at once.

    The columns are all columns, or as many as divide a swizzled strip of the key tile.
    """
    if build.variant == KEY_REGISTERS:
        return KEY_REGISTERS_PIECE
    dq_registers = registers(build)[1]
    if dq_registers >= build.columns // 2 + 40:
        return WARPGROUP_ROWS, build.columns
    return WARPGROUP_ROWS, 32 if build.columns % 64 or dq_registers < 64 else 64


def grad_query_bytes(build: Build) -> int:
    """Returns the bytes of the staged float32 pieces of dQ; 0 if score_rows or the 2-CTA body add from registers."""
    if build.block_queries < build.tile_m or build.variant == TWO_CTA:
        return 0
    rows, columns = grad_query_piece(build)
    return staged_pieces(build) * rows * columns * F32_BYTES


def staged_pieces(build: Build) -> int:
    """Returns how many pieces of dQ the staging buffer holds."""
    return KEY_REGISTERS_STAGED if build.variant == KEY_REGISTERS else 1
