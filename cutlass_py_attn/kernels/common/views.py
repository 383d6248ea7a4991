"""Views: a tile in shared memory read in transposed order, without a copy."""

from __future__ import annotations

from typing import Any


def transposed(tile: Any) -> Any:
    """Returns a (rows, columns[, stages]) tile as (columns, rows[, stages]) over the same bytes."""
    # The component GEMMs' specs and references are used where the compiler is not installed.
    from cutlass import cute

    order = [1, 0, *range(2, cute.rank(tile.layout))]
    if isinstance(tile.layout, cute.ComposedLayout):
        # (rows, columns) -> (columns, rows): the swizzle stays on the outside.
        shape = [cute.size(tile, mode=[axis]) for axis in order]
        return cute.composition(tile, cute.make_ordered_layout(tuple(shape), order=tuple(order)))
    return cute.make_tensor(tile.iterator, cute.select(tile.layout, mode=order))
