"""Block ranges: the mask of the sm90 backward where each query has a range of keys."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cutlass_py_attn.kernels.common import params, tile_copy, tma
from cutlass_py_attn.kernels.common.key_ranges import range_place
from cutlass_py_attn.kernels.common.mask_function import MaskFunction
from cutlass_py_attn.kernels.common.masking import COLUMNS, QUAD_COLUMNS, WORD_BITS
from cutlass_py_attn.kernels.sm90_backward.query_tile_order import QueryBlock
from cutlass_py_attn.kernels.sm90_common.score_tile import ScoreTile
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.tensors import RANGE_WORDS

PAIR_WORDS = QUAD_COLUMNS * RANGE_WORDS  # of the ranges of a pair of neighbouring queries
PAIR_BYTES = 16
PAIRS_AT_ONCE = 2  # whose elements of arrays are loaded at the same time


class BlockRanges:
    """The ranges of a query block's rows, which are loaded to shared memory with grad_output."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.words = build.block_queries * RANGE_WORDS  # of a stage
        self.function = MaskFunction(build) if build.form.program else None

    def load(self, p: Any, pipe: Any, batch: Int32, block: QueryBlock, state: Any) -> None:
        """Issues the load of the ranges of a query block to a stage that the producer has acquired."""
        place = range_place(p, batch, block.head, Int64(block.index) * self.build.block_queries)
        source = params.pointer(p.key_ranges, Int32) + params.assume_multiple(place, PAIR_WORDS)
        tma.load_rows(source, self._stage(state.index), self.words, pipe.producer_get_barrier(state))

    def mask(self, weights: cute.Tensor, coordinates: cute.Tensor, stage: Int32, key0: Int32) -> None:
        """Sets weights (queries x keys) outside of the ranges to zero; a thread has a pair of every eight queries.

        key0: first key of the tile
        """
        queries, num_keys = (cute.size(weights, mode=[mode]) for mode in (0, 1))
        keys = [key0 + coordinates[0, key][1] for key in range(num_keys)]
        first = self._stage(stage) + coordinates[0, 0][0] * RANGE_WORDS
        for pair in range(queries // QUAD_COLUMNS):
            ranges = cute.make_rmem_tensor(PAIR_WORDS, Int32)
            source = (first + pair * (COLUMNS * RANGE_WORDS)).align(PAIR_BYTES)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(PAIR_WORDS)), ranges)
            for query in range(QUAD_COLUMNS):
                for key in range(num_keys):
                    start, end = ranges[RANGE_WORDS * query], ranges[RANGE_WORDS * query + 1]
                    inside = (keys[key] >= start) & (keys[key] < end)
                    at = pair * QUAD_COLUMNS + query, key
                    weights[at] = cutlass.select_(inside, weights[at], Float32(0.0))

    def mask_by_function(
        self, p: Any, weights: cute.Tensor, coordinates: cute.Tensor, tile: ScoreTile, place: tuple[Int32, Int32]
    ) -> None:
        """Sets weights (queries x keys) that the mask function hides to zero, by a bit for each.

        place: the query block and the first key of the tile
        """
        block, key0 = place
        queries, num_keys = (cute.size(weights, mode=[mode]) for mode in (0, 1))
        keys = [key0 + coordinates[0, key][1] for key in range(num_keys)]
        query0 = block * self.build.block_queries + coordinates[0, 0][0]
        word_queries = WORD_BITS // num_keys
        for first in range(0, queries, word_queries):
            count = min(word_queries, queries - first)
            start = query0 + first // QUAD_COLUMNS * COLUMNS
            seen = self.seen_bits(p, (tile.seqlen.index, tile.head), start, keys, count // QUAD_COLUMNS)
            for query in range(count):
                for key in range(num_keys):
                    bit = seen & Uint32(1 << (query * num_keys + key))
                    at = first + query, key
                    weights[at] = cutlass.select_(bit != Uint32(0), weights[at], Float32(0.0))

    @cute.jit
    def seen_bits(self, p: Any, place: tuple[Int32, Int32], query: Int32, keys: list[Int32], pairs: cutlass.Constexpr):
        """Returns a bit of each key of each query from `query` on, as the mask function says.

        place: sequence and query head; pairs: of neighbouring queries
        """
        seen = Uint32(0)
        for pair in cutlass.range(pairs, unroll=self.function.at_once(PAIRS_AT_ONCE)):
            word = Uint32(0)
            for index in cutlass.range_constexpr(QUAD_COLUMNS):
                for number in cutlass.range_constexpr(len(keys)):
                    is_seen = self.function.sees(p, *place, query + pair * COLUMNS + index, keys[number])
                    bit = Uint32(1 << (index * len(keys) + number))
                    word = word | cutlass.select_(is_seen, bit, Uint32(0))
            seen = seen | (word << Uint32(pair * (QUAD_COLUMNS * len(keys))))
        return seen

    def _stage(self, stage: Int32) -> cute.Pointer:
        return tile_copy.smem_pointer(self.build, "key_ranges", Int32) + stage * self.words
