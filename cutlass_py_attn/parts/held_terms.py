"""Held terms: the score terms where a thread reads its part of the bias straight into registers.

The reads are asked for while the products run, so that they are there when the scores are.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cutlass_py_attn.parts import lengths, params
from cutlass_py_attn.parts.integers import smaller
from cutlass_py_attn.parts.moves import Source
from cutlass_py_attn.parts.terms import Terms, bias_of

WORD_BYTES = 4  # two neighbouring columns, which a thread holds


class HeldTerms(Terms):
    """The score terms of one Build; the bias that `apply` takes is what `bias_ahead` gave."""

    def bias_ahead(self, p: Any, of: lengths.Sequence, head: Int32, corner: tuple, where: cute.Tensor) -> Any:
        """This thread's part (rows x columns) of the bias of a tile of scores; None without one.

        `where` holds each element's (row, column) in the tile. What no query or key belongs to is some other number of
        the bias.
        """
        if not self.build.has("bias"):
            return None
        query0, key0 = corner
        source = bias_of(self.build, p, "bias", of, head, (query0, 0))
        held = cute.make_rmem_tensor(
            cute.make_layout(where.shape, stride=_packed(where)), params.DTYPES[self.build.dtype]
        )
        if source.access < WORD_BYTES:
            _read_elements(source, where, key0, held)
        else:
            _read_words(source, where, key0, held, self.build.tile_n)
        return held

    def _bias_row(self, scores: cute.Tensor, part: cute.Tensor, row: int) -> Any:
        return part[row, None].load().to(Float32)


def _packed(where: cute.Tensor) -> tuple:
    """Strides of a row view in which neighbouring columns are neighbours."""
    (rows, _), (columns, groups) = where.shape
    assert columns == 2, f"no row view of an accumulator: {where}"
    row = columns * groups
    return (row, rows * row), (1, columns)


@cute.jit
def _read_words(source: Any, where: cute.Tensor, key0: Int32, held: cute.Tensor, tile_n: cutlass.Constexpr):
    """Two columns at a time."""
    words = cute.make_tensor(cute.recast_ptr(held.iterator, dtype=Uint32), cute.make_layout(cute.size(held) // 2))
    first = where[0, 0][1]
    for row in cutlass.range_constexpr(cute.size(where, mode=[0])):
        start = _row(source, where, row)
        if key0 + tile_n <= source.columns:
            inside = start + params.multiple(Int64(key0 + first), 2)
            for pair in cutlass.range_constexpr(cute.size(where, mode=[1]) // 2):
                words[_word(held, row, pair)] = _word_at(inside, where.layout((0, 2 * pair))[1])
        else:
            for pair in cutlass.range_constexpr(cute.size(where, mode=[1]) // 2):
                column = key0 + where[0, 2 * pair][1]
                column = cutlass.select_(column < source.columns, column, Int32(0))
                words[_word(held, row, pair)] = _word_at(start, params.multiple(column, 2))


@cute.jit
def _read_elements(source: Any, where: cute.Tensor, key0: Int32, held: cute.Tensor):
    """One column at a time, wherever it lies."""
    for row in cutlass.range_constexpr(cute.size(where, mode=[0])):
        start = _row(source, where, row)
        for column in cutlass.range_constexpr(cute.size(where, mode=[1])):
            place = key0 + where[0, column][1]
            place = cutlass.select_(place < source.columns, place, Int32(0))
            held[row, column] = cute.make_tensor(start + Int64(place) * source.column, cute.make_layout(1))[0]


def _row(source: Source, where: cute.Tensor, row: int) -> cute.Pointer:
    """Where a row of the bias starts; the last one's behind the last query."""
    index = smaller(where[row, 0][0], source.rows - 1)
    return source.start + params.multiple(Int64(index) * source.row, source.access // (source.start.dtype.width // 8))


def _word(held: cute.Tensor, row: int, pair: int) -> int:
    return cute.crd2idx((row, 2 * pair), held.layout) // 2


def _word_at(start: cute.Pointer, column: Any) -> Uint32:
    return cute.make_tensor(cute.recast_ptr(start + column, dtype=Uint32), cute.make_layout(1))[0]
