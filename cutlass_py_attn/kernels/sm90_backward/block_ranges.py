"""Block ranges: the mask of the sm90 backward where each query has a range of keys."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.kernels.common import params, tile_copy, tma
from cutlass_py_attn.kernels.common.masking import WORD_BITS
from cutlass_py_attn.kernels.sm90_backward.query_tile_order import QueryBlock
from cutlass_py_attn.kernels.sm90_backward.smem import COLUMNS, QUAD_COLUMNS
from cutlass_py_attn.kernels.sm90_common.listed_tiles import range_place
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.tensors import RANGE_WORDS

PAIR_WORDS = QUAD_COLUMNS * RANGE_WORDS  # of the ranges of a pair of neighbouring queries
PAIR_BYTES = 16


class BlockRanges:
    """The ranges of a query block's rows, which are loaded to shared memory with grad_output."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.words = build.block_queries * RANGE_WORDS  # of a stage

    def load(self, p: Any, pipe: Any, batch: Int32, block: QueryBlock, state: Any) -> None:
        """Issues the load of the ranges of a query block to a stage that the producer has acquired."""
        place = range_place(p, batch, block.head, Int64(block.index) * self.build.block_queries)
        source = params.pointer(p.key_ranges, Int32) + params.assume_multiple(place, PAIR_WORDS)
        tma.load_rows(source, self._stage(state.index), self.words, pipe.producer_get_barrier(state))

    def mask(self, weights: cute.Tensor, coordinates: cute.Tensor, stage: Int32, key0: Int32) -> None:
        """Sets weights (queries x keys) outside of the ranges to zero, with a bit for each weight of the thread.

        key0: first key of the tile
        """
        queries, num_keys = (cute.size(weights, mode=[mode]) for mode in (0, 1))
        keys = [key0 + coordinates[0, key][1] for key in range(num_keys)]
        first = self._stage(stage) + coordinates[0, 0][0] * RANGE_WORDS
        of_word = WORD_BITS // num_keys  # queries
        for word in range(ceil_div(queries, of_word)):
            pairs = of_word // QUAD_COLUMNS
            seen = self.seen_by_pairs(keys, first + word * pairs * COLUMNS * RANGE_WORDS, pairs)
            for query in range(of_word):
                for key in range(num_keys):
                    bit = seen & Uint32(1 << (query * num_keys + key))
                    at = word * of_word + query, key
                    weights[at] = cutlass.select_(bit != Uint32(0), weights[at], Float32(0.0))

    @cute.jit
    def seen_by_pairs(self, keys: list, first: cute.Pointer, pairs: cutlass.Constexpr):
        """Returns a word with a bit for each pair of queries, query of it and key: whether the query sees the key.

        A rolled loop, so that the ranges of one pair are in registers at a time. first: ranges of the first pair; a
        thread has a pair of every eight queries.
        """
        seen = Uint32(0)
        for pair in cutlass.range(pairs, unroll=1):
            ranges = cute.make_rmem_tensor(PAIR_WORDS, Int32)
            source = (first + pair * (COLUMNS * RANGE_WORDS)).align(PAIR_BYTES)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(PAIR_WORDS)), ranges)
            of_pair = Uint32(0)
            for query in cutlass.range_constexpr(QUAD_COLUMNS):
                for key in cutlass.range_constexpr(len(keys)):
                    inside = (keys[key] >= ranges[2 * query]) & (keys[key] < ranges[2 * query + 1])
                    bit = Uint32(1 << (query * len(keys) + key))
                    of_pair = of_pair | cutlass.select_(inside, bit, Uint32(0))
            seen = seen | (of_pair << Uint32(pair * (QUAD_COLUMNS * len(keys))))
        return seen

    def _stage(self, stage: Int32) -> cute.Pointer:
        return tile_copy.smem_pointer(self.build, "key_ranges", Int32) + stage * self.words
