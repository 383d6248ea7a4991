"""Quad transpose: rows of an accumulator between registers and global memory, 16 bytes a thread.

Of every eight columns of a row, a thread of a quad has two 16-bit numbers, which are one word. A transpose of four such
words among the four threads gives each thread eight neighbouring columns of the row.

    thread of the quad    columns before, of 0-31        columns after
    0                     0, 1    8, 9    16, 17  24, 25    0 to 7
    1                     2, 3   10, 11   18, 19  26, 27    8 to 15
    2                     4, 5   12, 13   20, 21  28, 29   16 to 23
    3                     6, 7   14, 15   22, 23  30, 31   24 to 31
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from cutlass_py_attn.kernels.common import params
from cutlass_py_attn.kernels.common.softmax import QUAD
from cutlass_py_attn.kernels.common.tile_copy import GmemTile

VECTOR_ELEMENTS = 8  # 16-bit numbers of a 16-byte vector; a quad has one word a thread of so many columns


def store_rows(values: cute.Tensor, coordinates: cute.Tensor, target: GmemTile) -> None:
    """Stores 16-bit `values`, (rows, columns), except what is outside the target. All threads of a warp call this.

    coordinates: (row, column) of each value in the target.
    """
    words, lane = _words_and_lane(values)
    for row in range(cute.size(values, mode=[0])):
        row_index = coordinates[row, 0][0]
        start = target.start + params.assume_multiple(Int64(row_index) * target.row_stride, VECTOR_ELEMENTS)
        _store_row(words, lane, values.layout, row, start, (row_index, target.rows), target.columns)


def store_row(values: cute.Tensor, row: int, start: cute.Pointer, place: tuple[Any, Any], columns: int) -> None:
    """Stores a row of 16-bit `values`, (rows, columns), from `start` on. All threads of a warp call this.

    place: (number of this thread's row, rows): a row from `rows` on is not stored. columns: how many are stored
    """
    _store_row(*_words_and_lane(values), values.layout, row, start, place, columns)


def _words_and_lane(values: cute.Tensor) -> tuple[cute.Tensor, Int32]:
    """Returns 16-bit values as words, and the number of this thread in its quad."""
    words = cute.make_tensor(cute.recast_ptr(values.iterator, dtype=Uint32), cute.make_layout(cute.size(values) // 2))
    return words, cute.arch.lane_idx() % QUAD


def _store_row(
    words: cute.Tensor,
    lane: Int32,
    layout: cute.Layout,
    row: int,
    start: cute.Pointer,
    place: tuple[Any, Any],
    columns: Any,
) -> None:
    """Stores a row of words, which has the place `layout` of 16-bit values."""
    row_index, rows = place
    for first in range(0, cute.size(layout, mode=[1]), 2 * QUAD):
        indices = [cute.crd2idx((row, first + 2 * word), layout) // 2 for word in range(QUAD)]
        vector = transpose_quad([words[index] for index in indices], lane)
        column = first * QUAD + lane * VECTOR_ELEMENTS
        in_bounds = (row_index < rows) & (column < columns)
        _store_vector(start + params.assume_multiple(Int64(column), VECTOR_ELEMENTS), vector, in_bounds)


def transpose_quad(words: list[Uint32], lane: Int32) -> list[Uint32]:
    """Transposes the 4 x 4 words of a quad: thread i returns word i of threads 0 to 3. Its own inverse.

    lane: this thread's number in the quad.
    """
    is_odd, is_upper = (lane & 1) != 0, (lane & 2) != 0
    (a, b), (c, d) = (_exchange(low, high, is_odd, 1) for low, high in (words[:2], words[2:]))
    (a, c), (b, d) = (_exchange(low, high, is_upper, 2) for low, high in ((a, c), (b, d)))
    return [a, b, c, d]


def _exchange(low: Uint32, high: Uint32, sends_low: Boolean, distance: int) -> tuple[Uint32, Uint32]:
    """Exchanges a word with the thread `distance` away; if `sends_low` the low word for its high one, else reversed."""
    other = cute.arch.shuffle_sync_bfly(_select(sends_low, low, high), offset=distance)
    return _select(sends_low, other, low), _select(sends_low, high, other)


def _select(condition: Boolean, a: Uint32, b: Uint32) -> Uint32:
    return Uint32(cutlass.select_(condition, a, b))


def load_vector(source: cute.Pointer) -> list[Uint32]:
    """Loads four words."""
    vector = cute.make_rmem_tensor(QUAD, Uint32)
    cute.autovec_copy(cute.make_tensor(cute.recast_ptr(source, dtype=Uint32), cute.make_layout(QUAD)), vector)
    return [vector[i] for i in range(QUAD)]


@cute.jit
def _store_vector(target: cute.Pointer, words: list, predicate: Boolean):
    """Stores four words if `predicate` holds."""
    if predicate:
        vector = cute.make_rmem_tensor(QUAD, Uint32)
        for i in cutlass.range_constexpr(QUAD):
            vector[i] = words[i]
        destination = cute.make_tensor(cute.recast_ptr(target, dtype=Uint32), cute.make_layout(QUAD))
        cute.autovec_copy(vector, destination)
