"""Block ranges: the mask of the sm90 backward where each query has a range of keys."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.kernels.common import params, tile_copy, tma
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

    def _stage(self, stage: Int32) -> cute.Pointer:
        return tile_copy.smem_pointer(self.build, "key_ranges", Int32) + stage * self.words
