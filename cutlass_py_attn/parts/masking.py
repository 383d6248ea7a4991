"""Masking: scores that a query must not see become minus infinity."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutlass_py_attn.masks import Mask


def hide(mask: Mask, scores: cute.Tensor, where: cute.Tensor, corner: tuple[Int32, Int32], lengths: Any) -> None:
    """Set scores (rows x columns) outside the mask or past the last key to -inf.

    `where` holds each element's (row, column) in the tile, `corner` the tile's first query and key, `lengths`
    (num_queries, num_keys).
    """
    _replace_unseen(mask, scores, where, corner, lengths, -Float32.inf)


def clear(mask: Mask, weights: cute.Tensor, where: cute.Tensor, corner: tuple[Int32, Int32], lengths: Any) -> None:
    """Set weights (rows x columns) outside the mask or past the last key to zero; arguments as for `hide`."""
    _replace_unseen(mask, weights, where, corner, lengths, Float32(0.0))


def _replace_unseen(
    mask: Mask, values: cute.Tensor, where: cute.Tensor, corner: Any, lengths: Any, other: Float32
) -> None:
    query0, key0 = corner
    for row in range(cute.size(values, mode=[0])):
        # columns below `end` are seen: one comparison an element
        end = mask.key_end(query0 + where[row, 0][0], *lengths) - key0
        for column in range(cute.size(values, mode=[1])):
            values[row, column] = cutlass.select_(where[0, column][1] < end, values[row, column], other)
