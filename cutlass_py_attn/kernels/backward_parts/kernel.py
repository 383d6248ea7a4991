"""Kernels around a backward: which one writes the gradient of the bias, and how a separate one is launched."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from cutlass_py_attn.kernels.backward_parts.grad_bias_layout import WGMMA_TILE, grad_bias_build
from cutlass_py_attn.kernels.backward_parts.layout import dq_piece_columns, dq_pieces
from cutlass_py_attn.kernels.kernel import BufferRule
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.entry_points import delta_clears_sums
from cutlass_py_attn.launch.expressions import ONE, Expr, Grid, ceil_div, maximum, minimum, times
from cutlass_py_attn.launch.gemm_spec import MMA_ROWS
from cutlass_py_attn.launch.grad_bias import suits_wgmma, uses_wgmma
from cutlass_py_attn.launch.names import BATCH, NUM_HEADS, NUM_KEYS, NUM_QUERIES, NUM_SMS, TOTAL_TILES
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import F32_BYTES, OPERANDS, ROW_ALIGNMENT_BYTES, WORD_BYTES
from cutlass_py_attn.score_terms import registry

LEAST_PART_PAIRS: Final = 4  # (batch, head) pairs of a part of a tile's sum, if blocks share tiles
_SIZES: Final = {"b": BATCH, "h": NUM_HEADS}


def grad_bias_mode(problem: Problem) -> str:
    """Returns which kernel writes grad_bias, see Build.

    The main kernel has dS in registers. With a score term that has a derivative it only has dS times the derivative.
    """
    if problem.grad_bias is None:
        return ""
    summed = [
        axis
        for axis, size, full in zip("bhqk", problem.grad_bias.shape, problem.shape.bias, strict=True)
        if size == 1 and full > 1
    ]
    has_main = any(getattr(problem, f"grad_{name}") is not None for name in OPERANDS)
    if not summed and has_main and not any(term.has_derivative for term in registry.present(problem)):
        return "main"
    return "".join(summed) or "none"


def has_wgmma(problem: Problem) -> bool:
    """Returns whether an sm90 backward of this problem, of narrow heads, has a grad_bias kernel that uses wgmma."""
    tensor = problem.grad_bias
    return tensor is not None and suits_wgmma(grad_bias_mode(problem), problem.features, tensor.vector_bytes)


def unsupported_sm90(problem: Problem) -> Iterator[str]:
    """Yields what a grad_bias that the main kernel writes has and that of the sm90 family does not store, by TMA."""
    tensor = problem.grad_bias
    if tensor is None or grad_bias_mode(problem) != "main":
        return
    if problem.sequences is not None:
        yield "full gradient of the bias of variable lengths"
    if tensor.vector_bytes < ROW_ALIGNMENT_BYTES:
        yield f"full gradient of the bias with rows aligned to less than {ROW_ALIGNMENT_BYTES} bytes"
    if any(stride <= 0 for size, stride in zip(tensor.shape, tensor.strides, strict=True) if size > 1):
        yield "full gradient of the bias with strides of 0 or less"


def grad_bias_grid(build: Build, sizes: tuple[Expr, ...]) -> Grid:
    """Returns the grid: a block for each tile of grad_bias, which has these sizes; of wgmma persistent blocks."""
    if uses_wgmma(build):
        return maximum(minimum(NUM_SMS, _num_tiles(build) * num_splits(build)), 1), ONE, ONE
    (batch, heads, queries, keys), own = sizes, grad_bias_build(build)
    return ceil_div(queries, own.tile_m) * ceil_div(keys, own.tile_n), heads, batch


def num_splits(build: Build) -> Expr:
    """Returns how many blocks of the kernel of wgmma share the pairs of a tile, if tiles are fewer than SMs."""
    summed = [_SIZES[axis] for axis in "bh" if axis in _summed(build)]
    pairs = functools.reduce(operator.mul, summed) if summed else ONE
    return maximum(minimum(NUM_SMS // maximum(_num_tiles(build), 1), pairs // LEAST_PART_PAIRS), 1)


def _parts_bytes(build: Build) -> dict[str, Expr]:
    """Returns the bytes of what blocks that share tiles exchange: counts of parts by warp, and float32 sums."""
    tiles, rows = _num_tiles(build), WGMMA_TILE // MMA_ROWS
    sums = tiles * num_splits(build) * (WGMMA_TILE * WGMMA_TILE * F32_BYTES)
    return {"grad_bias_counts": tiles * (rows * WORD_BYTES), "grad_bias_parts": sums}


def query_sums(build: Build) -> list[BufferRule]:
    """Returns the buffers of the sum of dQ over key tiles, which begins as zeros.

    grad_query_accum: (num_heads, total_tiles, tile_m, columns) float32
    dq_semaphore: (num_heads, total_tiles) int32 semaphore of each query tile, if deterministic

    Where `entry_points.delta_clears_sums`, the delta kernel writes the zeros.
    """
    if "query" not in build.gradients:
        return []
    is_zeroed = not delta_clears_sums(build)
    pieces = times(NUM_HEADS * TOTAL_TILES, dq_pieces(build))
    piece_bytes = build.tile_m * dq_piece_columns(build) * F32_BYTES
    buffers = [BufferRule("grad_query_accum", pieces * piece_bytes, is_zeroed=is_zeroed)]
    if build.deterministic:
        buffers.append(BufferRule("dq_semaphore", pieces * WORD_BYTES, is_zeroed=is_zeroed))
    return buffers


def workspace(build: Build, sums: Iterable[BufferRule]) -> tuple[BufferRule, ...]:
    """Returns the workspace buffers of a backward; sums: those of the sums of gradients, and counters.

    delta, logsumexp_log2: (num_heads, total_tiles, tile_m) float32
    grad_bias_counts, grad_bias_parts: of tiles of grad_bias, if blocks share them, the int32 counts of the parts that
        warps have stored, and the float32 parts
    """
    rows = NUM_HEADS * TOTAL_TILES * (build.tile_m * F32_BYTES)
    own = *sums, BufferRule("delta", rows), BufferRule("logsumexp_log2", rows)
    if not uses_wgmma(build):
        return own
    shared = num_splits(build) > 1
    counts, parts = (BufferRule(name, size, condition=shared) for name, size in _parts_bytes(build).items())
    return replace(counts, is_zeroed=True), *own, parts


def _num_tiles(build: Build) -> Expr:
    """Returns the tiles of grad_bias of the kernel of wgmma."""
    whole = (_SIZES[axis] for axis in "bh" if axis not in _summed(build))
    return functools.reduce(operator.mul, whole, ceil_div(NUM_QUERIES, WGMMA_TILE) * ceil_div(NUM_KEYS, WGMMA_TILE))


def _summed(build: Build) -> str:
    return build.grad_bias_mode.replace("none", "")
