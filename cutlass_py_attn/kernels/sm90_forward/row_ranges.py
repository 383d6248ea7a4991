"""Row ranges: the mask of the sm90 forward where each query has a range of keys."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cutlass_py_attn.integers import ceil_div, round_up, smaller
from cutlass_py_attn.kernels.common.key_ranges import load_int32, range_place
from cutlass_py_attn.kernels.common.mask_function import MaskFunction
from cutlass_py_attn.kernels.common.masking import COLUMNS, QUAD_COLUMNS, WORD_BITS, bits_before
from cutlass_py_attn.kernels.sm90_common.listed_tiles import Record
from cutlass_py_attn.kernels.sm90_common.tile_scheduler import WorkTile
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.tile_lists import ROWS_PADDING
from cutlass_py_attn.problem.tensors import RANGE_WORDS

PAIRS_AT_ONCE = 4  # whose elements of arrays are loaded at the same time
WORD_KEYS = 4 * WORD_BITS  # of a row, of which a thread holds a quarter


class RowRanges:
    """The ranges of the rows that a thread holds, in registers for a work tile."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.function = MaskFunction(build) if build.form.program else None

    def registers(self, rows: int) -> cute.Tensor:
        """Returns registers for the ranges of so many rows."""
        return cute.make_rmem_tensor((RANGE_WORDS, rows), Int32)

    def load(self, p: Any, cursor: Record, coordinates: cute.Tensor, r_ranges: cute.Tensor) -> None:
        """Loads the ranges of the rows of a work tile; a row past the last query has any."""
        last = round_up(p.num_queries, ROWS_PADDING) - 1
        for row in range(cute.size(coordinates, mode=[0])):
            query = smaller(cursor.tile * self.build.tile_m + coordinates[row, 0][0], last)
            words = load_int32(p.key_ranges, range_place(p, cursor.batch, cursor.head, query), RANGE_WORDS)
            r_ranges[0, row], r_ranges[1, row] = words[0], words[1]

    def mask(self, work: WorkTile, scores: cute.Tensor, consumer: Any, key0: Int32) -> None:
        """Sets scores (rows x columns) that the mask hides to -inf, with a bit for each of a row's columns.

        consumer: has the coordinates of the scores, the ranges of the rows and the parameters
        key0: first key of the tile
        """
        coordinates, r_ranges = consumer.coordinates, consumer.r_ranges
        first = key0 + coordinates[0, 0][1]
        columns = cute.size(scores, mode=[1])
        for row in range(cute.size(scores, mode=[0])):
            start, end = r_ranges[0, row] - first, r_ranges[1, row] - first
            befores = range(0, ceil_div(columns, WORD_BITS) * WORD_KEYS, WORD_KEYS)
            words = [bits_before(end - before) & ~bits_before(start - before) for before in befores]
            if self.function is not None:
                query = work.tile * self.build.tile_m + coordinates[row, 0][0]
                count = smaller(columns, WORD_BITS) // 2
                words = [
                    word & self.seen_bits(consumer.p, work.seqlen.index, work.head, query, first + before, count)
                    for word, before in zip(words, befores, strict=True)
                ]
            for column in range(columns):
                bit = words[column // WORD_BITS] & Uint32(1 << column % WORD_BITS)
                scores[row, column] = cutlass.select_(bit != Uint32(0), scores[row, column], -Float32.inf)

    @cute.jit
    def seen_bits(self, p: Any, batch: Int32, head: Int32, query: Int32, key: Int32, pairs: cutlass.Constexpr):
        """Returns a bit of each column of a row from `key` on, as the mask function says.

        pairs: of neighbouring columns
        """
        seen = Uint32(0)
        for pair in cutlass.range(pairs, unroll=self.function.at_once(PAIRS_AT_ONCE)):
            for column in cutlass.range_constexpr(QUAD_COLUMNS):
                is_seen = self.function.sees(p, batch, head, query, key + pair * COLUMNS + column)
                bit = cutlass.select_(is_seen, Uint32(1 << column), Uint32(0))
                seen = seen | (bit << Uint32(pair * QUAD_COLUMNS))
        return seen
