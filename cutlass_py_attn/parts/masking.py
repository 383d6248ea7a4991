"""Masking: scores that a query must not see become minus infinity, weights that are dropped zero."""

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cutlass_py_attn.gemm.mma_sync import row_view
from cutlass_py_attn.masks import Band
from cutlass_py_attn.parts import dropout


def hide(band: Band, scores: cute.Tensor, where: cute.Tensor, corner: tuple[Int32, Int32]) -> None:
    """Set scores (rows x columns) outside the mask or past the last key to -inf.

    `where` holds each element's (row, column) in the tile, `corner` the tile's first query and key.
    """
    _replace_unseen(band, scores, where, corner, -Float32.inf)


def hide_packed(band: Band, scores: cute.Tensor, where: cute.Tensor, key0: Int32, queries: Sequence[Int32]) -> None:
    """`hide` where each row of the scores has a query of its own."""
    for row, query in enumerate(queries):
        _replace_in_row(band, scores, where, (row, query, key0), -Float32.inf)


def clear(band: Band, weights: cute.Tensor, where: cute.Tensor, corner: tuple[Int32, Int32]) -> None:
    """Set weights (rows x columns) outside the mask or past the last key to zero; arguments as for `hide`."""
    _replace_unseen(band, weights, where, corner, Float32(0.0))


def drop(values: cute.Tensor, kept: cute.Tensor) -> None:
    """Set values (rows x columns) that dropout does not keep to zero; `kept` is what dropout.keep_bits gave."""
    for row in range(cute.size(values, mode=[0])):
        for column in range(cute.size(values, mode=[1])):
            is_kept = dropout.keep(kept, row, column)
            values[row, column] = cutlass.select_(is_kept, values[row, column], Float32(0.0))


def keep(gradients: cute.Tensor, kept: cute.Tensor | None, scale: Float32) -> None:
    """The gradients (rows x columns) of weights that dropout keeps grow by `scale`, the others become zero; all stay
    as they are without dropout, where `kept` is None."""
    if kept is not None:
        gradients.store(gradients.load() * scale)
        drop(gradients, kept)


def dropped(weights: cute.Tensor, kept: cute.Tensor) -> cute.Tensor:
    """A copy of an accumulator's weights with zeros where dropout does not keep them; 16-bit ones in pairs."""
    result = cute.make_rmem_tensor_like(weights)
    result.store(weights.load())
    view = row_view(result)
    if weights.element_type is Float32:
        drop(view, kept)
        return result
    words = cute.make_tensor(cute.recast_ptr(result.iterator, dtype=Uint32), cute.make_layout(cute.size(result) // 2))
    for row in range(cute.size(view, mode=[0])):
        for column in range(0, cute.size(view, mode=[1]), 2):
            pair = cute.crd2idx((row, column), view.layout) // 2
            low = cutlass.select_(dropout.keep(kept, row, column), Uint32(0xFFFF), Uint32(0))
            high = cutlass.select_(dropout.keep(kept, row, column + 1), Uint32(0xFFFF0000), Uint32(0))
            words[pair] = words[pair] & (low | high)
    return result


def _replace_unseen(band: Band, values: cute.Tensor, where: cute.Tensor, corner: Any, other: Float32) -> None:
    query0, key0 = corner
    for row in range(cute.size(values, mode=[0])):
        _replace_in_row(band, values, where, (row, query0 + where[row, 0][0], key0), other)


def _replace_in_row(band: Band, values: cute.Tensor, where: cute.Tensor, at: tuple[int, Int32, Int32], other: Float32):
    """What query `at[1]`, which has row `at[0]`, does not see of the keys from `at[2]` on."""
    row, query, key0 = at
    # columns in [start, end) are seen: one comparison an element for each edge
    end = band.key_end(query) - key0
    start = band.key_start(query) - key0
    for column in range(cute.size(values, mode=[1])):
        place = where[0, column][1]
        seen = place < end
        if band.form == "local":
            seen = seen & (place >= start)
        values[row, column] = cutlass.select_(seen, values[row, column], other)
