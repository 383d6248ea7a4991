"""Sampled rows in float64: attention of some queries, and gradients of some queries and keys, of a large problem.

Each function takes the rows that it samples and every row that these see or that sees them, so a row costs
O(length * head_dim). A backward's reference takes the output and logsumexp that the kernels took.

truth is computed in float64, low with weights and gradients of scores rounded to the problem's dtype, as kernels round
them before a product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.testing import guarded_check

Array = npt.NDArray[Any]

ABSOLUTE: Final = 2e-5  # error of an element of a result that cancels, for inputs of about one


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one head. query, grad_output, output: (queries, channels); logsumexp: (queries,); key, value: (keys,
    channels); visible: (queries, keys). dtype: that of the problem; values may be wider."""

    query: Array
    key: Array
    value: Array
    visible: Array
    scale: float
    dtype: Any
    grad_output: Array | None = None
    output: Array | None = None
    logsumexp: Array | None = None

    def scores(self) -> Array:
        """Returns (queries, keys), minus infinity where the mask hides the key."""
        return np.where(self.visible, self.scale * (_wide(self.query) @ _wide(self.key).T), -np.inf)


def forward(rows: Rows, *, low: bool) -> dict[str, Array]:
    """Returns output (queries, channels) and logsumexp (queries,); `rows` must have all visible keys of its queries."""
    scores = rows.scores()
    largest = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - largest)
    total = weights.sum(axis=1, keepdims=True)
    output = _rounded(weights, rows, low) @ _wide(rows.value) / total
    return {"output": _rounded(output, rows, low), "logsumexp": (largest + np.log(total))[:, 0]}


def grad_query(rows: Rows, *, low: bool) -> dict[str, Array]:
    """Returns grad_query (queries, channels); `rows` must have every visible key of its queries."""
    _, grad_scores = _weights_and_grad_scores(rows, low)
    return {"grad_query": _rounded(rows.scale * (grad_scores @ _wide(rows.key)), rows, low)}


def grad_key_value(rows: Rows, *, low: bool) -> dict[str, Array]:
    """Returns grad_key and grad_value (keys, channels); `rows` must have every query that sees one of its keys."""
    weights, grad_scores = _weights_and_grad_scores(rows, low)
    found = {
        "grad_key": rows.scale * (grad_scores.T @ _wide(rows.query)),
        "grad_value": weights.T @ _wide(_of(rows)[0]),
    }
    return {name: _rounded(array, rows, low) for name, array in found.items()}


def _weights_and_grad_scores(rows: Rows, low: bool) -> tuple[Array, Array]:
    grad_output, output, logsumexp = map(_wide, _of(rows))
    weights = np.exp(rows.scores() - logsumexp[:, None])
    delta = (grad_output * output).sum(axis=1, keepdims=True)
    grad_scores = weights * (grad_output @ _wide(rows.value).T - delta)
    return _rounded(weights, rows, low), _rounded(grad_scores, rows, low)


def _of(rows: Rows) -> tuple[Array, Array, Array]:
    assert rows.grad_output is not None
    assert rows.output is not None
    assert rows.logsumexp is not None
    return rows.grad_output, rows.output, rows.logsumexp


def _wide(array: Array) -> Array:
    return np.asarray(array, np.float64)


def _rounded(array: Array, rows: Rows, low: bool) -> Array:
    return array.astype(rows.dtype).astype(np.float64) if low else array


def ratios(found: Mapping[str, Array], truth: Mapping[str, Array], low: Mapping[str, Array]) -> dict[str, float]:
    """Returns error / allowed of the worst sampled row of each result: above 1 is a failure, infinity stands for a NaN.

    found: as the kernels wrote it; its dtype chooses the floor. The rules are those of `guarded_check`, for each row.
    """
    worst = {}
    for name, array in found.items():
        error = np.atleast_2d(_wide(array) - truth[name])
        if name == "logsumexp":
            allowed = guarded_check.LOGSUMEXP * (1 + np.abs(truth[name]) * 1e-2)
            ratio = np.abs(error[0]) / allowed
        else:
            lost = np.linalg.norm(low[name] - truth[name], axis=1)
            floor = guarded_check.FLOOR[array.dtype.name]
            absolute = ABSOLUTE * np.sqrt(error.shape[1])
            allowed = guarded_check.TIMES_LOW * lost + floor * np.linalg.norm(truth[name], axis=1) + absolute
            ratio = np.linalg.norm(error, axis=1) / allowed
        worst[name] = float(np.nan_to_num(ratio, nan=np.inf).max())
    return worst


def check(found: Mapping[str, Array], truth: Mapping[str, Array], low: Mapping[str, Array], what: str) -> None:
    """AssertionError if a sampled row is too far from the truth."""
    worst = ratios(found, truth, low)
    assert all(ratio <= 1 for ratio in worst.values()), f"{what}: error / allowed {worst}"
