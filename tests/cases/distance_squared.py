"""Distance squared: a score term that is not built in, score += slope * (i + num_keys - num_queries - j)^2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn import score_terms
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan.planner import plans
from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import DIRECTIONS, Shape, Tensor

# batch, num_queries, num_keys, num_heads, head_dim, head_dim_value, num_heads_key: lengths off the tiles.
SHAPE: Final = Shape(2, 200, 300, 4, 64, 64, 2)
DTYPE: Final = "float16"


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


def builds(name: str, arch: str) -> list[tuple[Build, ...]]:
    """Returns the kernels of tests/gpu/test_new_term.py with a term, each before what is taken if it spills.

    The term must be registered, also while they are compiled.
    """
    slopes = (name, Tensor.contiguous((SHAPE.batch, SHAPE.num_heads), "float32"))
    problems = (Problem.dense(way, SHAPE, DTYPE, Causal()).replace(score_terms=(slopes,)) for way in DIRECTIONS)
    return [tuple(plan.build for plan in plans(problem, arch)) for problem in problems]
