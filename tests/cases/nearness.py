"""Nearness: a score term from a function, which a user registers; it uses every kind of operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from cutlass_py_attn import ScoreFunction, score_terms

NAME: Final = "nearness"


def nearness_of(query: Any, key: Any, num_queries: Any, num_keys: Any, weight: Any) -> Any:
    """Falls with the logarithm of the distance, but within blocks of 50, and rises to the left of query 30."""
    distance = np.absolute(query + num_keys - num_queries - key)
    near = (query - 30) // 50 == key // 50
    return np.where(near, weight, -weight * np.log(1 + distance)) + np.tanh((query - 30) / 100) / np.sqrt(1 + key)


@contextmanager
def nearness() -> Iterator[score_terms.ScoreTerm]:
    """Registers the term for a while."""
    term = score_terms.register(ScoreFunction(NAME, nearness_of))
    try:
        yield term
    finally:
        score_terms.unregister(NAME)
