"""Distance squared: a score term that is not built in, score += slope * (i + num_keys - num_queries - j)^2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from cutlass_py_attn import score_terms


class DistanceSquared(score_terms.ScoreTerm):
    """A slope for each head, or for each batch and head, times the squared distance from the diagonal."""

    name = "distance_squared"
    vector = score_terms.VectorOperand(
        name,
        axes=(("num_heads",), ("batch", "num_heads")),
        meaning="slope of each head's squared distance",
        batch_field="distance_squared_batch",
    )
    struct = score_terms.StructFields(addresses=(name, "distance_squared_batch"))

    def modify_scores(self, row: Any, operand: Any) -> None:
        for column in range(row.num_columns):
            distance = row.float32(row.distance(column))
            row.add(column, operand * distance * distance)

    def reference_added(self, tile: Any, operand: float) -> npt.NDArray[Any]:
        distance = tile.queries + tile.num_keys - tile.num_queries - tile.keys
        return (operand * np.square(distance.astype(np.float64))).astype(tile.dtype)


@contextmanager
def distance_squared() -> Iterator[score_terms.ScoreTerm]:
    """Registers the term for a while."""
    term = score_terms.register(DistanceSquared())
    try:
        yield term
    finally:
        score_terms.unregister(term.name)
