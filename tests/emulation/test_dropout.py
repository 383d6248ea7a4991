"""Dropout mask bits: the layouts they rely on, their machine code, and the emulated result."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from cutlass_py_attn.compilation import compiler as compiling
from cutlass_py_attn.compilation import report
from cutlass_py_attn.compilation.cubin import read
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan.component_gemms import plan_component_gemm
from cutlass_py_attn.plan.planner import plan_backward, plan_forward
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape
from cutlass_py_attn.score_terms import dropout as masks_of
from cutlass_py_attn.score_terms.dropout import Dropout
from cutlass_py_attn.score_terms.philox import words
from tests.support.ptx_threads import Array, Threads
from tests.support.traced import compile_traced

SHAPE = Shape(1, 256, 256, 1, 64, 64)
SCALARS, OUT = 16, 64  # addresses in the emulated memory: of the seed and the offset, and of the result

# direction, dtype, target, (tile_m, tile_n), warps as (rows, columns)
GRIDS = [
    ("forward", "bfloat16", "sm_90", (128, 128), (4, 1)),
    ("forward", "float16", "sm_80", (128, 64), (4, 1)),
    ("forward", "float32", "sm_80", (64, 32), (4, 1)),
    ("forward", "float16", "sm_80", (64, 80), (4, 1)),  # 5 groups of 8 columns do not fill a word
    ("backward", "bfloat16", "sm_90", (128, 128), (2, 4)),
    ("backward", "bfloat16", "sm_80", (64, 128), (2, 4)),
    ("backward", "float32", "sm_80", (64, 64), (2, 2)),
    ("backward", "float32", "sm_90", (32, 32), (2, 4)),
    ("sm90", "bfloat16", "sm_90a", (128, 128), (8, 1)),
]
SMALL = GRIDS[6]
TRANSPOSED = [64, 128]  # head dims of the sm90 backward; its tiles have 128 and 64 queries
NAMES = [f"{way}-{dtype}-{arch}-{m}x{n}" for way, dtype, arch, (m, n), _ in GRIDS]


def build_of(way: str, dtype: str, arch: str, tile: tuple[int, int], warps: tuple[int, int]) -> Build:
    """Returns a build with this tile and these warps of S; its other fields do not matter here."""
    if way == "sm90":
        return plan_component_gemm("matmul_qk", "sm90", dtype, 64, arch, tile=TileConfig(*tile, 8)).build
    plan = plan_forward if way == "forward" else plan_backward
    build = plan(Problem.dense(way, SHAPE, dtype), arch).build
    return replace(build, tile_m=tile[0], tile_n=tile[1], warps=warps[0] * warps[1], warps_scores=warps)


@functools.cache
def compiled(build: Build) -> compiling.CompilerOutput:
    """Compiles the dropout kernel for the scores of a build."""
    dropout_kernel = pytest.importorskip("tests.support.dropout_kernel")
    is_transposed = build.kind == "backward" and build.family == "sm90"
    return compile_traced(build, dropout_kernel.trace_transposed if is_transposed else dropout_kernel.trace)


def run(build: Build, dropout: Dropout, base: int, sizes: tuple[int, int], in_memory: bool = False) -> Array:
    """Returns the kernel's result, (num_queries, num_keys) uint8.

    in_memory: whether the kernel reads seed and offset from memory.
    """
    dropout_kernel = pytest.importorskip("tests.support.dropout_kernel")
    memory = np.full(OUT + sizes[0] * sizes[1], 255, np.uint8)
    more = 5 if in_memory else 0  # the kernel adds this offset to the one in memory
    scalars = np.array([dropout.philox_seed, dropout.philox_offset - more], np.uint64)
    given = (0, more, SCALARS, SCALARS + 8) if in_memory else (*scalars.view(np.int64), 0, 0)
    memory[SCALARS : SCALARS + 16] = scalars.view(np.uint8)
    threshold = np.uint32(masks_of.threshold(dropout.dropout_p)).astype(np.int32)
    struct = abi.numpy_struct(dropout_kernel.FIELDS)
    parameters = np.array([(OUT, base, *given, threshold, *sizes, 1)], struct)
    grid = -(-sizes[0] // build.tile_m), -(-sizes[1] // build.tile_n)
    Threads(compiled(build).ptx, grid, build.threads, memory, parameters).run()
    return memory[OUT:].reshape(sizes)


@pytest.mark.parametrize("grid", GRIDS, ids=NAMES)
def test_a_quad_has_eight_columns_of_two_rows(grid) -> None:
    """The table in the module's docstring is right for the accumulators of every GEMM of S."""
    layouts, dropout_kernel = (
        pytest.importorskip("tests.support.gemm_layouts"),
        pytest.importorskip("tests.support.dropout_kernel"),
    )
    build = build_of(*grid)
    rows = 2 * build.tile_m // (16 * (build.warps if build.family == "sm90" else build.warps_scores[0]))
    columns = build.tile_m * build.tile_n // build.threads // rows
    shape = (build.threads, rows, columns, 2)
    views = layouts.run(dropout_kernel.row_views, shape, build, rows, columns, arch=build.arch)
    row, column = views[:, :, 0, 0], views[:, 0, :, 1]
    assert (views[..., 0] == row[:, :, None]).all()
    assert (views[..., 1] == column[:, None, :]).all()
    assert (row[:, 1::2] == row[:, ::2] + 8).all()
    assert ((row[:, ::2] - row[:, :1]) % 16 == 0).all()
    assert (column[:, 1::2] == column[:, ::2] + 1).all()
    lane = np.arange(build.threads)[:, None] % 4
    assert (column[:, ::2] % 8 == 2 * lane).all()
    assert (row.reshape(-1, 4, rows) == row[::4, None]).all()
    elements = np.unique(views.reshape(-1, 2), axis=0)
    assert len(elements) == build.tile_m * build.tile_n


@pytest.mark.parametrize("grid", GRIDS, ids=NAMES)
def test_machine_code(grid) -> None:
    """Few registers, because the fused kernels have none to spare, and no local memory."""
    output = compiled(build_of(*grid))
    (kernel,) = read(output.cubin).kernels.values()
    assert report.spilled_bytes(output.report) == {kernel.symbol: 0}
    assert kernel.frame_bytes == 0
    assert kernel.registers <= 48


@pytest.mark.parametrize("grid", GRIDS, ids=NAMES)
@pytest.mark.parametrize(
    ("offset", "base", "more_keys"),
    [
        (8, 4, 4),  # rows start at a Philox block
        (3, 0, 0),  # all rows start one word before a Philox block
        (0, 6, 1),  # rows start at different words of a Philox block
        (1, 2**40 + 1, 3),
    ],
)
def test_bits_are_those_of_the_stream(grid, offset: int, base: int, more_keys: int) -> None:
    build, dropout = build_of(*grid), Dropout(0.3, 2**63 + 42, offset)
    sizes = build.tile_m + 5, build.tile_n + more_keys
    assert (run(build, dropout, base, sizes) == masks_of.keep_mask(dropout, base, *sizes)).all()


@pytest.mark.parametrize("grid", GRIDS, ids=NAMES)
@pytest.mark.parametrize("more_keys", [0, 1])
def test_the_counter_carries_into_its_upper_half(grid, more_keys: int) -> None:
    """The carry, 2**34 words into the stream, is inside a row of a tile; seed and offset are read from memory."""
    build = build_of(*grid)
    sizes = build.tile_m, build.tile_n + more_keys
    dropout = Dropout(0.7, 5, 2**50 + 2**34 - sizes[0] // 2 * sizes[1] - build.tile_n // 2 - 4)
    assert (run(build, dropout, 0, sizes, in_memory=True) == masks_of.keep_mask(dropout, 0, *sizes)).all()


@pytest.mark.parametrize("dropout_p", [0.0, 1e-10, 1e-6, 0.5, 0.999, 1 - 2**-24, 1.0])
def test_probabilities(dropout_p: float) -> None:
    build, dropout, sizes = build_of(*SMALL), Dropout(dropout_p, 11), (64, 64)
    assert (run(build, dropout, 0, sizes) == masks_of.keep_mask(dropout, 0, *sizes)).all()


def test_the_threshold_itself_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    build, dropout, sizes = build_of(*SMALL), Dropout(0.5, 11), (16, 16)
    smallest = int(np.median(words(11, np.arange(255))))  # of an odd number of words: one of them
    monkeypatch.setattr(masks_of, "threshold", lambda _: smallest)
    assert (run(build, dropout, 0, sizes) == masks_of.keep_mask(dropout, 0, *sizes)).all()


def test_varlen_rows_are_as_long_as_the_sequence() -> None:
    """The base counts the words of the longest sequence; rows are as long as their own sequence has keys."""
    build, dropout = build_of(*SMALL), Dropout(0.4, 3, 4)
    for group, sizes in enumerate([(40, 50), (64, 61)]):
        base = group * 64 * 61
        assert (run(build, dropout, base, sizes) == masks_of.keep_mask(dropout, base, *sizes)).all()


def transposed_build(head_dim: int) -> Build:
    """Returns the build of an sm90 backward with its warps of S alone."""
    shape = Shape(1, 256, 256, 1, head_dim, head_dim)
    build = plan_backward(Problem.dense("backward", shape, "bfloat16").replace(dropout_p=0.1), "sm_90a").build
    return replace(build, warps=build.warps_scores[0])


@pytest.mark.parametrize("head_dim", TRANSPOSED)
@pytest.mark.parametrize(("offset", "base", "more_keys"), [(8, 4, 4), (3, 0, 0), (0, 6, 1), (1, 2**40 + 1, 3)])
def test_transposed_bits_are_those_of_the_stream(head_dim: int, offset: int, base: int, more_keys: int) -> None:
    build, dropout = transposed_build(head_dim), Dropout(0.3, 2**63 + 42, offset)
    sizes = build.tile_m + 5, build.tile_n + more_keys
    assert (run(build, dropout, base, sizes) == masks_of.keep_mask(dropout, base, *sizes)).all()


@pytest.mark.parametrize("more_keys", [0, 1])
def test_a_transposed_counter_carries_into_its_upper_half(more_keys: int) -> None:
    build = transposed_build(128)
    sizes = build.tile_m, build.tile_n + more_keys
    dropout = Dropout(0.7, 5, 2**50 + 2**34 - sizes[0] // 2 * sizes[1] - build.tile_n // 2 - 4)
    assert (run(build, dropout, 0, sizes, in_memory=True) == masks_of.keep_mask(dropout, 0, *sizes)).all()
