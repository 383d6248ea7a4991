"""Quads: an accumulator's rows between registers and global memory, 16 bytes a thread.

A thread of a quad holds two columns of every eight of its rows, one word; four such words and three exchanges later it
holds eight columns of one row.

    thread of the quad    before, of columns 0-31        after
    0                     0, 1    8, 9    16, 17  24, 25    0 to 7
    1                     2, 3   10, 11   18, 19  26, 27    8 to 15
    2                     4, 5   12, 13   20, 21  28, 29   16 to 23
    3                     6, 7   14, 15   22, 23  30, 31   24 to 31
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from cutlass_py_attn.parts import params
from cutlass_py_attn.parts.moves import Source
from cutlass_py_attn.parts.softmax import QUAD

EIGHT = 8  # columns that a quad's threads have one word of each; also 16-bit numbers of a vector


def store_rows(values: cute.Tensor, where: cute.Tensor, target: Source) -> None:
    """Write 16-bit `values` (rows x columns) that lie inside the target; `where` holds their (row, column) in it. All
    threads of a warp call this together."""
    words = cute.make_tensor(cute.recast_ptr(values.iterator, dtype=Uint32), cute.make_layout(cute.size(values) // 2))
    lane = cute.arch.lane_idx() % QUAD
    for row in range(cute.size(values, mode=[0])):
        index = where[row, 0][0]
        start = target.start + params.multiple(Int64(index) * target.row, EIGHT)
        for first in range(0, cute.size(values, mode=[1]), 2 * QUAD):
            places = [cute.crd2idx((row, first + 2 * word), values.layout) // 2 for word in range(QUAD)]
            mine = turned([words[place] for place in places], lane)
            column = first * QUAD + lane * EIGHT
            inside = (index < target.rows) & (column < target.columns)
            _put(start + params.multiple(Int64(column), EIGHT), mine, inside)


def turned(words: list[Uint32], lane: Int32) -> list[Uint32]:
    """Of four words the one at this thread's place in the quad, of every thread in the quad's order; done twice, it
    changes nothing."""
    is_odd, is_upper = (lane & 1) != 0, (lane & 2) != 0
    (a, b), (c, d) = (_exchanged(low, high, is_odd, 1) for low, high in (words[:2], words[2:]))
    (a, c), (b, d) = (_exchanged(low, high, is_upper, 2) for low, high in ((a, c), (b, d)))
    return [a, b, c, d]


def _exchanged(low: Uint32, high: Uint32, gives_low: Boolean, distance: int) -> tuple[Uint32, Uint32]:
    """The thread that gives its low word gets the other's high one in its place, and the other way round."""
    other = cute.arch.shuffle_sync_bfly(_choice(gives_low, low, high), offset=distance)
    return _choice(gives_low, other, low), _choice(gives_low, high, other)


def _choice(condition: Boolean, a: Uint32, b: Uint32) -> Uint32:
    return Uint32(cutlass.select_(condition, a, b))


def vector_at(source: cute.Pointer) -> list[Uint32]:
    """The four words there."""
    vector = cute.make_rmem_tensor(QUAD, Uint32)
    cute.autovec_copy(cute.make_tensor(cute.recast_ptr(source, dtype=Uint32), cute.make_layout(QUAD)), vector)
    return [vector[i] for i in range(QUAD)]


@cute.jit
def _put(target: cute.Pointer, words: list, condition: Boolean):
    """Write 16 bytes where `condition` holds."""
    if condition:
        vector = cute.make_rmem_tensor(QUAD, Uint32)
        for i in cutlass.range_constexpr(QUAD):
            vector[i] = words[i]
        place = cute.make_tensor(cute.recast_ptr(target, dtype=Uint32), cute.make_layout(QUAD))
        cute.autovec_copy(vector, place)
