"""Score modification with the bias in registers: a thread loads its part of a bias tile straight from global memory.

The loads are issued while the matrix products run, so that the bias arrives before the scores.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cutlass_py_attn.integers import smaller
from cutlass_py_attn.kernels.common import params, seqlen_info
from cutlass_py_attn.kernels.common.quad_transpose import VECTOR_ELEMENTS, load_vector, transpose_quad
from cutlass_py_attn.kernels.common.score_mod import ScoreMod, bias_of
from cutlass_py_attn.kernels.common.softmax import QUAD
from cutlass_py_attn.kernels.common.tile_copy import VECTOR_BYTES, GmemTile
from cutlass_py_attn.problem.tensors import WORD_BYTES


class ScoreModRegisters(ScoreMod):
    """The score terms of one Build; `apply` receives the bias that `load_bias` returned."""

    def load_bias(
        self, p: Any, of: seqlen_info.SeqlenInfo, head: Int32, tile_origin: tuple, coordinates: cute.Tensor
    ) -> Any:
        """Issues the loads of this thread's part of a bias tile; None without a bias.

        coordinates: (row, column) of each element in the tile

        The result is a tensor of 32-bit words, (rows, pairs of columns). Past the last query or key the words are other
        elements of the bias. With loads of 16 bytes a thread has the words of neighbouring columns, which `bias_row`
        exchanges within the quad.
        """
        if not self.build.has("bias"):
            return None
        query0, key0 = tile_origin
        source = bias_of(self.build, p, "bias", of, head, (query0, 0))
        shape = cute.size(coordinates, mode=[0]), cute.size(coordinates, mode=[1]) // 2
        words = cute.make_rmem_tensor(cute.make_layout(shape, stride=(shape[1], 1)), Uint32)
        if source.vector_bytes < WORD_BYTES:
            _load_elements(source, coordinates, key0, words)
        elif source.vector_bytes < VECTOR_BYTES:
            _load_words(source, coordinates, key0, words)
        else:
            _load_vectors(source, coordinates, key0, words)
        return words

    def bias_row(self, scores: cute.Tensor, part: cute.Tensor, row: int) -> Any:
        words = [part[row, pair] for pair in range(cute.size(part, mode=[1]))]
        if self.build.bias_vector_bytes == VECTOR_BYTES:
            lane = cute.arch.lane_idx() % QUAD
            fours = (transpose_quad(words[first : first + QUAD], lane) for first in range(0, len(words), QUAD))
            words = [word for four in fours for word in four]
        registers = cute.make_rmem_tensor(len(words), Uint32)
        for index, word in enumerate(words):
            registers[index] = word
        values = cute.make_tensor(
            cute.recast_ptr(registers.iterator, dtype=params.DTYPES[self.build.dtype]),
            cute.make_layout(scores[row, None].layout.shape),
        )
        return values.load().to(Float32)


@cute.jit
def _load_vectors(source: Any, coordinates: cute.Tensor, key0: Int32, words: cute.Tensor):
    """Loads eight columns at a time: of every 32 columns each thread of a quad loads eight."""
    lane = cute.arch.lane_idx() % QUAD
    for row in cutlass.range_constexpr(cute.size(words, mode=[0])):
        start = _row_start(source, coordinates, row)
        for first in cutlass.range_constexpr(0, cute.size(words, mode=[1]), QUAD):
            column = key0 + (first * VECTOR_ELEMENTS + lane * VECTOR_ELEMENTS)
            column = Int64(cutlass.select_(column < source.columns, column, Int32(0)))
            four = load_vector(start + params.assume_multiple(column, VECTOR_ELEMENTS))
            for i in cutlass.range_constexpr(QUAD):
                words[row, first + i] = four[i]


@cute.jit
def _load_words(source: Any, coordinates: cute.Tensor, key0: Int32, words: cute.Tensor):
    """Loads two columns at a time."""
    for row in cutlass.range_constexpr(cute.size(words, mode=[0])):
        start = _row_start(source, coordinates, row)
        for pair in cutlass.range_constexpr(cute.size(words, mode=[1])):
            column = key0 + coordinates[0, 2 * pair][1]
            column = params.assume_multiple(cutlass.select_(column < source.columns, column, Int32(0)), 2)
            word = cute.recast_ptr(start + column, dtype=Uint32)
            words[row, pair] = cute.make_tensor(word, cute.make_layout(1))[0]


@cute.jit
def _load_elements(source: Any, coordinates: cute.Tensor, key0: Int32, words: cute.Tensor):
    """Loads one column at a time, with any stride between columns."""
    elements = cute.make_tensor(
        cute.recast_ptr(words.iterator, dtype=source.start.dtype), cute.make_layout(2 * cute.size(words))
    )
    columns = cute.size(coordinates, mode=[1])
    for row in cutlass.range_constexpr(cute.size(coordinates, mode=[0])):
        start = _row_start(source, coordinates, row)
        for column in cutlass.range_constexpr(columns):
            place = key0 + coordinates[0, column][1]
            place = cutlass.select_(place < source.columns, place, Int32(0))
            element = cute.make_tensor(start + Int64(place) * source.column_stride, cute.make_layout(1))[0]
            elements[row * columns + column] = element


def _row_start(source: GmemTile, coordinates: cute.Tensor, row: int) -> cute.Pointer:
    """Returns the start of a row of the bias; rows past the last query are the last row."""
    index = smaller(coordinates[row, 0][0], source.rows - 1)
    return source.start + params.assume_multiple(
        Int64(index) * source.row_stride, source.vector_bytes // (source.start.dtype.width // 8)
    )
