"""Logsumexp: how the forward kernels store it, shape (batch, num_heads, padded queries) float32, natural log.

Rows from num_queries to the padding's end are +inf.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutlass_py_attn.kernels.common import params, seqlen_info
from cutlass_py_attn.kernels.common.softmax import QUAD
from cutlass_py_attn.problem.tensors import F32_BYTES


def store_tile(
    p: Any, lse: list[Float32], coordinates: cute.Tensor, row: params.RowCoordinates, tile_m: int, num_queries: Int32
) -> None:
    """Stores the rows of an accumulator, one thread of each quad, with the padding.

    lse: the values of this thread's rows.
    coordinates: (row, column) of this thread's accumulator in the tile.
    row: the first row of the tile; its batch is the number of the sequence.
    """
    padded = seqlen_info.padded_rows(num_queries)
    start = seqlen_info.logsumexp_offset(p, row.batch, row.head) + row.row
    target = cute.make_tensor(params.pointer(p.logsumexp, Float32, F32_BYTES) + start, cute.make_layout(tile_m))
    thread, _, _ = cute.arch.thread_idx()
    for index, value in enumerate(lse):
        _store_row(target, coordinates[index, 0][0], value, row.row, num_queries, padded, thread)


@cute.jit
def _store_row(
    target: cute.Tensor,
    row: Int32,
    value: Float32,
    query0: Int32,
    num_queries: Int32,
    padded: Int32,
    thread: Int32,
):
    """Stores one row, or +inf past the last query."""
    if (thread % QUAD == 0) & (query0 + row < padded):
        target[row] = cutlass.select_(query0 + row < num_queries, value, Float32.inf)


def store(p: Any, row: params.RowCoordinates, value: Float32) -> None:
    """Stores one value."""
    start = seqlen_info.logsumexp_offset(p, row.batch, row.head) + row.row
    cute.make_tensor(params.pointer(p.logsumexp, Float32, F32_BYTES) + start, cute.make_layout(1))[0] = value


def store_or_pad(p: Any, row: params.RowCoordinates, value: Float32, num_queries: Int32) -> None:
    """Stores one value, or +inf past the last query."""
    target = params.pointer(p.logsumexp, Float32, F32_BYTES) + seqlen_info.logsumexp_offset(p, row.batch, row.head)
    value = cutlass.select_(row.row < num_queries, value, Float32.inf)
    cute.make_tensor(target + row.row, cute.make_layout(1))[0] = value


@cute.jit
def store_padding(p: Any, batch: Int32, head: Int32, num_queries: Int32, thread: Int32):
    """Stores +inf from the last query of (batch, head) to the padding's end, one row a thread."""
    if (thread >= num_queries) & (thread < seqlen_info.padded_rows(num_queries)):
        store(p, params.RowCoordinates(batch, head, thread), Float32.inf)
