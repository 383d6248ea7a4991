"""Key ranges in memory: the range of keys that each query sees, as the first kernel of the tile lists leaves it."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from cutlass_py_attn.integers import round_up
from cutlass_py_attn.kernels.common import params
from cutlass_py_attn.launch.tile_lists import ROWS_PADDING, list_of
from cutlass_py_attn.problem.tensors import RANGE_WORDS, WORD_BYTES


def load_int32(address: Int64, place: Any, count: int) -> cute.Tensor:
    """Loads `count` int32 from a place in an array in global memory that is a multiple of `count`, 2 or 4."""
    start = params.pointer(address, Int32, count * WORD_BYTES) + params.assume_multiple(Int64(place), count)
    words = cute.make_rmem_tensor(count, Int32)
    cute.autovec_copy(cute.make_tensor(start, cute.make_layout(count)), words)
    return words


def range_place(p: Any, batch: Int32, head: Int32, query: Any) -> Int64:
    """Returns where the range of a query starts in key_ranges (elements)."""
    of_head = Int64(list_of(batch, head, p.ranges_batch, p.ranges_heads)) * round_up(p.num_queries, ROWS_PADDING)
    return (of_head + query) * RANGE_WORDS
