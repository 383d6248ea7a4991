"""Held terms: the score terms where a thread reads its part of the bias straight into registers.

The reads are asked for while the products run, so that they are there when the scores are.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cutlass_py_attn.parts import lengths, params
from cutlass_py_attn.parts.integers import smaller
from cutlass_py_attn.parts.moves import VECTOR_BYTES, Source
from cutlass_py_attn.parts.quads import EIGHT, turned, vector_at
from cutlass_py_attn.parts.softmax import QUAD
from cutlass_py_attn.parts.terms import Terms, bias_of
from cutlass_py_attn.problem import WORD_BYTES


class HeldTerms(Terms):
    """The score terms of one Build; the bias that `apply` takes is what `bias_ahead` gave."""

    def bias_ahead(self, p: Any, of: lengths.Sequence, head: Int32, corner: tuple, where: cute.Tensor) -> Any:
        """This thread's share of the bias of a tile of scores, as words (rows x pairs of columns); None without one.

        `where` holds each element's (row, column) in the tile. What no query or key belongs to is some other number of
        the bias. Where a row is read 16 bytes at a time, the words are those of neighbouring columns, not yet `turned`.
        """
        if not self.build.has("bias"):
            return None
        query0, key0 = corner
        source = bias_of(self.build, p, "bias", of, head, (query0, 0))
        shape = cute.size(where, mode=[0]), cute.size(where, mode=[1]) // 2
        words = cute.make_rmem_tensor(cute.make_layout(shape, stride=(shape[1], 1)), Uint32)
        if source.access < WORD_BYTES:
            _read_elements(source, where, key0, words)
        elif source.access < VECTOR_BYTES:
            _read_words(source, where, key0, words)
        else:
            _read_vectors(source, where, key0, words)
        return words

    def _bias_row(self, scores: cute.Tensor, part: cute.Tensor, row: int) -> Any:
        words = [part[row, pair] for pair in range(cute.size(part, mode=[1]))]
        if self.build.bias_access_bytes == VECTOR_BYTES:
            lane = cute.arch.lane_idx() % QUAD
            fours = (turned(words[first : first + QUAD], lane) for first in range(0, len(words), QUAD))
            words = [word for four in fours for word in four]
        held = cute.make_rmem_tensor(len(words), Uint32)
        for index, word in enumerate(words):
            held[index] = word
        values = cute.make_tensor(
            cute.recast_ptr(held.iterator, dtype=params.DTYPES[self.build.dtype]),
            cute.make_layout(scores[row, None].layout.shape),
        )
        return values.load().to(Float32)


@cute.jit
def _read_vectors(source: Any, where: cute.Tensor, key0: Int32, words: cute.Tensor):
    """Eight columns at a time, of every 32 the thread's share."""
    lane = cute.arch.lane_idx() % QUAD
    for row in cutlass.range_constexpr(cute.size(words, mode=[0])):
        start = _row(source, where, row)
        for first in cutlass.range_constexpr(0, cute.size(words, mode=[1]), QUAD):
            column = key0 + (first * EIGHT + lane * EIGHT)
            column = Int64(cutlass.select_(column < source.columns, column, Int32(0)))
            four = vector_at(start + params.multiple(column, EIGHT))
            for i in cutlass.range_constexpr(QUAD):
                words[row, first + i] = four[i]


@cute.jit
def _read_words(source: Any, where: cute.Tensor, key0: Int32, words: cute.Tensor):
    """Two columns at a time."""
    for row in cutlass.range_constexpr(cute.size(words, mode=[0])):
        start = _row(source, where, row)
        for pair in cutlass.range_constexpr(cute.size(words, mode=[1])):
            column = key0 + where[0, 2 * pair][1]
            column = params.multiple(cutlass.select_(column < source.columns, column, Int32(0)), 2)
            word = cute.recast_ptr(start + column, dtype=Uint32)
            words[row, pair] = cute.make_tensor(word, cute.make_layout(1))[0]


@cute.jit
def _read_elements(source: Any, where: cute.Tensor, key0: Int32, words: cute.Tensor):
    """One column at a time, wherever it lies."""
    elements = cute.make_tensor(
        cute.recast_ptr(words.iterator, dtype=source.start.dtype), cute.make_layout(2 * cute.size(words))
    )
    columns = cute.size(where, mode=[1])
    for row in cutlass.range_constexpr(cute.size(where, mode=[0])):
        start = _row(source, where, row)
        for column in cutlass.range_constexpr(columns):
            place = key0 + where[0, column][1]
            place = cutlass.select_(place < source.columns, place, Int32(0))
            element = cute.make_tensor(start + Int64(place) * source.column, cute.make_layout(1))[0]
            elements[row * columns + column] = element


def _row(source: Source, where: cute.Tensor, row: int) -> cute.Pointer:
    """Where a row of the bias starts; the last one's behind the last query."""
    index = smaller(where[row, 0][0], source.rows - 1)
    return source.start + params.multiple(Int64(index) * source.row, source.access // (source.start.dtype.width // 8))
