"""Masking: scores outside the mask become minus infinity, and dropped weights zero."""

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cutlass_py_attn.integers import larger, smaller
from cutlass_py_attn.kernels.common import dropout
from cutlass_py_attn.kernels.common.mma_sync import row_view
from cutlass_py_attn.problem.masks import Band
from cutlass_py_attn.score_terms.dropout import DROPOUT

WORD_BITS = 32
QUAD_COLUMNS, COLUMNS = 2, 8  # of an accumulator's row: neighbours in a thread, and columns that a quad shares


def mask_scores(band: Band, scores: cute.Tensor, coordinates: cute.Tensor, tile_origin: tuple[Int32, Int32]) -> None:
    """Sets scores (rows x columns) outside the mask or past the last key to -inf.

    coordinates: (row, column) of each element in the tile
    tile_origin: first query and first key of the tile
    """
    _replace_masked(band, scores, coordinates, tile_origin, -Float32.inf)


def mask_by_bits(band: Band, scores: cute.Tensor, coordinates: cute.Tensor, tile_origin: tuple[Int32, Int32]) -> None:
    """Does `mask_scores` with a word for each row, which has a bit for each of its up to 32 columns.

    A thread of wgmma holds pairs of neighbouring columns, one pair of every eight columns.
    """
    query0, key0 = tile_origin
    first = key0 + coordinates[0, 0][1]
    for row in range(cute.size(scores, mode=[0])):
        query = query0 + coordinates[row, 0][0]
        seen = bits_before(band.key_end(query) - first)
        if band.form.has_left:
            seen = seen & ~bits_before(band.key_start(query) - first)
        for column in range(cute.size(scores, mode=[1])):
            bit = seen & Uint32(1 << column)
            scores[row, column] = cutlass.select_(bit != Uint32(0), scores[row, column], -Float32.inf)


def bits_before(end: Int32) -> Uint32:
    """Returns a word with a bit for each column of a thread that is less than `end` columns after its first."""
    end = larger(end, 0)
    count = end // COLUMNS * QUAD_COLUMNS + smaller(end % COLUMNS, QUAD_COLUMNS)
    return cutlass.select_(count < WORD_BITS, (Uint32(1) << Uint32(count)) - 1, Uint32(0xFFFFFFFF))


def mask_packed_scores(
    band: Band, scores: cute.Tensor, coordinates: cute.Tensor, key0: Int32, queries: Sequence[Int32]
) -> None:
    """Does `mask_scores` for rows with any queries: queries[row] is the query of a row."""
    for row, query in enumerate(queries):
        _replace_in_row(band, scores, coordinates, (row, query, key0), -Float32.inf)


def mask_weights(band: Band, weights: cute.Tensor, coordinates: cute.Tensor, tile_origin: tuple[Int32, Int32]) -> None:
    """Sets weights (rows x columns) outside the mask or past the last key to zero; arguments as of `mask_scores`."""
    _replace_masked(band, weights, coordinates, tile_origin, Float32(0.0))


def apply_dropout(values: cute.Tensor, bits: cute.Tensor) -> None:
    """Sets values (rows x columns) that dropout does not keep to zero; bits: the result of dropout.keep_bits."""
    for row in range(cute.size(values, mode=[0])):
        for column in range(cute.size(values, mode=[1])):
            is_kept = dropout.is_kept(bits, row, column)
            values[row, column] = DROPOUT.kept_or_zero(values[row, column], is_kept, Float32(0.0))


def scale_kept(gradients: cute.Tensor, bits: cute.Tensor | None, scale: Float32) -> None:
    """Multiplies the gradients (rows x columns) of kept weights by `scale` and sets the others to zero.

    Nothing changes when `bits` is None, without dropout.
    """
    if bits is not None:
        gradients.store(gradients.load() * scale)
        apply_dropout(gradients, bits)


def with_dropout(weights: cute.Tensor, bits: cute.Tensor) -> cute.Tensor:
    """Returns a copy of an accumulator's weights with zeros where dropout drops them; 16-bit weights go in pairs."""
    result = cute.make_rmem_tensor_like(weights)
    result.store(weights.load())
    view = row_view(result)
    if weights.element_type is Float32:
        apply_dropout(view, bits)
        return result
    words = cute.make_tensor(cute.recast_ptr(result.iterator, dtype=Uint32), cute.make_layout(cute.size(result) // 2))
    for row in range(cute.size(view, mode=[0])):
        for column in range(0, cute.size(view, mode=[1]), 2):
            pair = cute.crd2idx((row, column), view.layout) // 2
            low = DROPOUT.kept_or_zero(Uint32(0xFFFF), dropout.is_kept(bits, row, column), Uint32(0))
            high = DROPOUT.kept_or_zero(Uint32(0xFFFF0000), dropout.is_kept(bits, row, column + 1), Uint32(0))
            words[pair] = words[pair] & (low | high)
    return result


def _replace_masked(
    band: Band, values: cute.Tensor, coordinates: cute.Tensor, tile_origin: Any, other: Float32
) -> None:
    query0, key0 = tile_origin
    for row in range(cute.size(values, mode=[0])):
        _replace_in_row(band, values, coordinates, (row, query0 + coordinates[row, 0][0], key0), other)


def _replace_in_row(
    band: Band, values: cute.Tensor, coordinates: cute.Tensor, at: tuple[int, Int32, Int32], other: Float32
):
    """Replaces what a query does not see; `at` is (row, query of the row, first key of the tile)."""
    row, query, key0 = at
    # Columns in [start, end) are visible: one comparison an element for each edge.
    end = band.key_end(query) - key0
    start = band.key_start(query) - key0
    for column in range(cute.size(values, mode=[1])):
        place = coordinates[0, column][1]
        seen = place < end
        if band.form.has_left:
            seen = seen & (place >= start)
        values[row, column] = cutlass.select_(seen, values[row, column], other)
