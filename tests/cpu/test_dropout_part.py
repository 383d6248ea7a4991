"""parts/dropout.py: the layouts it relies on, its machine code, and that code executed against philox.py."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
from ptx_threads import Array, Threads

from cutlass_py_attn import abi, kernels, philox
from cutlass_py_attn import compiler as compiling
from cutlass_py_attn.cubin import read
from cutlass_py_attn.gemm.plans import plan_room
from cutlass_py_attn.philox import Dropout
from cutlass_py_attn.plan import Build
from cutlass_py_attn.plan_table import Tile
from cutlass_py_attn.planner import plan_backward, plan_forward
from cutlass_py_attn.problem import Problem, Shape

SHAPE = Shape(1, 256, 256, 1, 64, 64)
SCALARS, OUT = 16, 64  # addresses in the emulated memory: the seed and the offset, and the bytes of the result

# direction, dtype, target, (tile_m, tile_n), warps as (rows, columns)
GRIDS = [
    ("forward", "bfloat16", "sm_90", (128, 128), (4, 1)),
    ("forward", "float16", "sm_80", (128, 64), (4, 1)),
    ("forward", "float32", "sm_80", (64, 32), (4, 1)),
    ("forward", "float16", "sm_80", (64, 80), (4, 1)),  # 5 groups of 8 columns fill no word
    ("backward", "bfloat16", "sm_90", (128, 128), (2, 4)),
    ("backward", "bfloat16", "sm_80", (64, 128), (2, 4)),
    ("backward", "float32", "sm_80", (64, 64), (2, 2)),
    ("backward", "float32", "sm_90", (32, 32), (2, 4)),
    ("hopper", "bfloat16", "sm_90a", (128, 128), (8, 1)),
]
SMALL = GRIDS[6]
TURNED = [64, 128]  # head dims of the Hopper backward; its tiles have 128 and 64 queries
NAMES = [f"{way}-{dtype}-{arch}-{m}x{n}" for way, dtype, arch, (m, n), _ in GRIDS]


def build_of(way: str, dtype: str, arch: str, tile: tuple[int, int], warps: tuple[int, int]) -> Build:
    """A build with these scores; nothing else of it matters here."""
    if way == "hopper":
        return plan_room("matmul_qk", "hopper", dtype, 64, arch, tile=Tile(*tile, 8)).build
    plan = plan_forward if way == "forward" else plan_backward
    build = plan(Problem.dense(way, SHAPE, dtype), arch).build
    return replace(build, tile_m=tile[0], tile_n=tile[1], warps=warps[0] * warps[1], scores=warps)


@functools.cache
def compiled(build: Build) -> compiling.Output:
    """The dropout kernel for the scores of a build."""
    dropout_kernel = pytest.importorskip("dropout_kernel")
    before = kernels.trace
    kernels.trace = (
        dropout_kernel.trace_turned if build.kind == "backward" and build.family == "hopper" else dropout_kernel.trace
    )
    try:
        return compiling.run(build)
    finally:
        kernels.trace = before


def run(build: Build, dropout: Dropout, base: int, sizes: tuple[int, int], in_memory: bool = False) -> Array:
    """The bytes of the kernel [num_queries, num_keys]; `in_memory`: it reads seed and offset through addresses."""
    dropout_kernel = pytest.importorskip("dropout_kernel")
    memory = np.full(OUT + sizes[0] * sizes[1], 255, np.uint8)
    more = 5 if in_memory else 0  # an offset beside that in memory: the kernel adds them
    scalars = np.array([dropout.philox_seed, dropout.philox_offset - more], np.uint64)
    given = (0, more, SCALARS, SCALARS + 8) if in_memory else (*scalars.view(np.int64), 0, 0)
    memory[SCALARS : SCALARS + 16] = scalars.view(np.uint8)
    threshold = np.uint32(philox.threshold(dropout.dropout_p)).astype(np.int32)
    struct = abi.numpy_struct(dropout_kernel.FIELDS)
    parameters = np.array([(OUT, base, *given, threshold, *sizes, 1, 1)], struct)
    grid = -(-sizes[0] // build.tile_m), -(-sizes[1] // build.tile_n)
    Threads(compiled(build).ptx, grid, build.threads, memory, parameters).run()
    return memory[OUT:].reshape(sizes)


@pytest.mark.parametrize("grid", GRIDS, ids=NAMES)
def test_quads_hold_eight_columns_of_two_rows(grid) -> None:
    """What the module's drawing says of the accumulators of every product that makes scores."""
    layouts, dropout_kernel = pytest.importorskip("room_layouts"), pytest.importorskip("dropout_kernel")
    build = build_of(*grid)
    rows = 2 * build.tile_m // (16 * (build.warps if build.family == "hopper" else build.scores[0]))
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
    """Few registers, for the kernels around it have none to spare, and none of them in local memory."""
    output = compiled(build_of(*grid))
    (kernel,) = read(output.cubin).kernels.values()
    assert compiling.spilled_bytes(output.report) == {kernel.symbol: 0}
    assert kernel.frame_bytes == 0
    assert kernel.registers <= 48


@pytest.mark.parametrize("grid", GRIDS, ids=NAMES)
@pytest.mark.parametrize(
    ("offset", "base", "more_keys"),
    [
        (8, 4, 4),  # rows start at a block
        (3, 0, 0),  # all rows start one word before a block
        (0, 6, 1),  # each row starts elsewhere
        (1, 2**40 + 1, 3),
    ],
)
def test_bits_are_those_of_the_stream(grid, offset: int, base: int, more_keys: int) -> None:
    build, dropout = build_of(*grid), Dropout(0.3, 2**63 + 42, offset)
    sizes = build.tile_m + 5, build.tile_n + more_keys
    assert (run(build, dropout, base, sizes) == philox.keep_mask(dropout, base, *sizes)).all()


@pytest.mark.parametrize("grid", GRIDS, ids=NAMES)
@pytest.mark.parametrize("more_keys", [0, 1])
def test_the_counter_carries_into_its_upper_half(grid, more_keys: int) -> None:
    """2**34 words into the stream, amid a row amid a tile; with a seed and an offset that are read from memory."""
    build = build_of(*grid)
    sizes = build.tile_m, build.tile_n + more_keys
    dropout = Dropout(0.7, 5, 2**50 + 2**34 - sizes[0] // 2 * sizes[1] - build.tile_n // 2 - 4)
    assert (run(build, dropout, 0, sizes, in_memory=True) == philox.keep_mask(dropout, 0, *sizes)).all()


@pytest.mark.parametrize("dropout_p", [0.0, 1e-10, 1e-6, 0.5, 0.999, 1 - 2**-24, 1.0])
def test_probabilities(dropout_p: float) -> None:
    build, dropout, sizes = build_of(*SMALL), Dropout(dropout_p, 11), (64, 64)
    assert (run(build, dropout, 0, sizes) == philox.keep_mask(dropout, 0, *sizes)).all()


def test_the_threshold_itself_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    build, dropout, sizes = build_of(*SMALL), Dropout(0.5, 11), (16, 16)
    smallest = int(np.median(philox.words(11, np.arange(255))))  # of an odd number of words: one of them
    monkeypatch.setattr(philox, "threshold", lambda _: smallest)
    assert (run(build, dropout, 0, sizes) == philox.keep_mask(dropout, 0, *sizes)).all()


def test_varlen_rows_are_as_long_as_the_sequence() -> None:
    """Two sequences: the base counts the longest of each, the rows their own keys."""
    build, dropout = build_of(*SMALL), Dropout(0.4, 3, 4)
    for group, sizes in enumerate([(40, 50), (64, 61)]):
        base = group * 64 * 61
        assert (run(build, dropout, base, sizes) == philox.keep_mask(dropout, base, *sizes)).all()


def turned_build(head_dim: int) -> Build:
    """The Hopper backward's, of the warps that hold scores alone."""
    shape = Shape(1, 256, 256, 1, head_dim, head_dim)
    build = plan_backward(Problem.dense("backward", shape, "bfloat16").replace(dropout_p=0.1), "sm_90a").build
    return replace(build, warps=build.scores[0])


@pytest.mark.parametrize("head_dim", TURNED)
@pytest.mark.parametrize(("offset", "base", "more_keys"), [(8, 4, 4), (3, 0, 0), (0, 6, 1), (1, 2**40 + 1, 3)])
def test_turned_bits_are_those_of_the_stream(head_dim: int, offset: int, base: int, more_keys: int) -> None:
    build, dropout = turned_build(head_dim), Dropout(0.3, 2**63 + 42, offset)
    sizes = build.tile_m + 5, build.tile_n + more_keys
    assert (run(build, dropout, base, sizes) == philox.keep_mask(dropout, base, *sizes)).all()


@pytest.mark.parametrize("more_keys", [0, 1])
def test_a_turned_counter_carries_into_its_upper_half(more_keys: int) -> None:
    build = turned_build(128)
    sizes = build.tile_m, build.tile_n + more_keys
    dropout = Dropout(0.7, 5, 2**50 + 2**34 - sizes[0] // 2 * sizes[1] - build.tile_n // 2 - 4)
    assert (run(build, dropout, 0, sizes, in_memory=True) == philox.keep_mask(dropout, 0, *sizes)).all()
