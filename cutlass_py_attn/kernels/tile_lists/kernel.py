"""Tile lists: how the kernels that make them are launched, and the workspace that they write."""

from __future__ import annotations

from typing import Final

from cutlass_py_attn.kernels.kernel import BufferRule
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.entry_points import ROW_THREADS
from cutlass_py_attn.launch.expressions import ONE, Expr, Grid, Name, ceil_div, maximum, round_up, times
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS
from cutlass_py_attn.launch.names import BATCH, GROUP, NUM_HEADS, NUM_HEADS_KEY, NUM_KEYS, NUM_QUERIES, NUM_SMS
from cutlass_py_attn.launch.tile_lists import RECORD_WORDS, ROWS_PADDING, SIZE_WORDS, STATE_TILES, STATE_WORDS
from cutlass_py_attn.problem.mask_program import MaskProgram
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import RANGE_EDGES, RANGE_WORDS, VISIBLE_BLOCKS, WORD_BYTES

RANGES_BATCH: Final = Name("ranges_batch")
RANGES_HEADS: Final = Name("ranges_heads")
_LIST_WARPS: Final = ROW_THREADS // WARP_THREADS  # of a block, each of which writes a list


def definitions(problem: Problem, build: Build) -> dict[str, Expr]:
    """Returns the sizes of the axes of the ranges of keys, and the multiprocessors for which work tiles are ordered."""
    if not build.form.has_ranges:
        return {}
    arrays = (getattr(problem, name) for name in (RANGE_EDGES[0], VISIBLE_BLOCKS))
    shapes = [array.shape for array in arrays if array is not None]
    read = MaskProgram.parse(build.form.program).coordinates if build.form.program else frozenset()
    has_batch, has_heads = (
        name in read or any(shape[axis] > 1 for shape in shapes) for axis, name in enumerate(("batch", "head"))
    )
    axes = {"ranges_batch": BATCH if has_batch else ONE, "ranges_heads": NUM_HEADS if has_heads else ONE}
    return {**axes, "device_sms": NUM_SMS}


def grids(build: Build) -> dict[str, Grid]:
    """Returns the grids: a block for a query tile or a word of its states, a warp for a list, a thread for a record."""
    if not build.form.has_ranges:
        return {}
    return {
        "ranges": (_query_tiles(build) * RANGES_BATCH * RANGES_HEADS, ONE, ONE),
        "pairs": (_query_tiles(build) * _state_words(build) * RANGES_BATCH * RANGES_HEADS, ONE, ONE),
        "lists": (ceil_div(_lists(build), _LIST_WARPS), ONE, ONE),
        "order": (ceil_div(_work_tiles(build), ROW_THREADS), ONE, ONE),
    }


def workspace(build: Build) -> tuple[BufferRule, ...]:
    """Returns the buffers of launch/tile_lists.py."""
    if not build.form.has_ranges:
        return ()
    lists = RANGES_BATCH * RANGES_HEADS
    words = {
        "key_ranges": times(lists * round_up(NUM_QUERIES, ROWS_PADDING), RANGE_WORDS),
        "tile_states": times(lists * _query_tiles(build) * _state_words(build), STATE_WORDS),
        "tile_entries": _lists(build) * (_key_tiles(build) if build.kind == "forward" else _query_tiles(build)),
        "list_sizes": times(_lists(build), SIZE_WORDS),
        "work_list": times(_work_tiles(build), RECORD_WORDS),
    }
    return tuple(BufferRule(name, size * WORD_BYTES) for name, size in words.items())


def _query_tiles(build: Build) -> Expr:
    return ceil_div(NUM_QUERIES, build.tile_m)


def _key_tiles(build: Build) -> Expr:
    return ceil_div(NUM_KEYS, build.tile_n)


def _state_words(build: Build) -> Expr:
    return ceil_div(_key_tiles(build), STATE_TILES)


def _lists(build: Build) -> Expr:
    """Returns the lists of all work tiles: those of a group's query heads are one list of a backward."""
    if build.kind == "forward":
        return RANGES_BATCH * RANGES_HEADS * _query_tiles(build)
    return RANGES_BATCH * maximum(RANGES_HEADS // GROUP, 1) * _key_tiles(build)


def _work_tiles(build: Build) -> Expr:
    if build.kind == "forward":
        return BATCH * NUM_HEADS * _query_tiles(build)
    return BATCH * NUM_HEADS_KEY * _key_tiles(build)
