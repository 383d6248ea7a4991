"""Attention of keys that a mask selects, and its gradients, in float64: it shares nothing with the package."""

from __future__ import annotations

from typing import Any

import numpy as np


def selected_keys(
    arrays: tuple[Any, Any, Any], visible: Any, bias: Any, of_output: Any, of_residual: Any
) -> dict[str, Any]:
    """Returns output, residual and the gradients of query, key, value and bias, (num_heads, num_queries, num_keys).

    arrays: query (batch, num_queries, num_heads, head_dim), key and value with heads that divide those of query
    visible: bool (batch, num_heads, num_queries, num_keys)
    bias: broadcasts like `visible`; None for none
    of_output, of_residual: gradients of the output and of the residual (batch, num_queries, num_heads)

    A hidden key has weight 0. A row without keys has output 0, residual -inf and zero gradients.
    """
    query, key, value, of_output = (np.asarray(array, np.float64) for array in (*arrays, of_output))
    batch, keys, heads, width = *key.shape[:2], query.shape[2], query.shape[3]
    group = heads // key.shape[2]
    key, value = (np.repeat(array, group, axis=2) for array in (key, value))
    scores = np.einsum("btnd,bsnd->bnts", query, key) / np.sqrt(width)
    scores = np.where(visible, scores + (0 if bias is None else np.asarray(bias, np.float64)), -np.inf)
    top = scores.max(-1, keepdims=True)
    top = np.where(np.isneginf(top), 0, top)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    of_weights = np.einsum("btnd,bsnd->bnts", of_output, value)
    delta = (of_weights * weights).sum(-1, keepdims=True)
    of_scores = weights * (of_weights - delta + np.swapaxes(np.float64(of_residual), 1, 2)[..., None])

    def of_groups(gradient: Any) -> Any:
        return gradient.reshape(batch, keys, heads // group, group, -1).sum(3)

    with np.errstate(divide="ignore"):
        residual = np.swapaxes((top + np.log(total))[..., 0], 1, 2)
    return {
        "output": np.einsum("bnts,bsnd->btnd", weights, value),
        "residual": residual,
        "query": np.einsum("bnts,bsnd->btnd", of_scores, key) / np.sqrt(width),
        "key": of_groups(np.einsum("bnts,btnd->bsnd", of_scores, query)) / np.sqrt(width),
        "value": of_groups(np.einsum("bnts,btnd->bsnd", weights, of_output)),
        "bias": of_scores.sum(0, keepdims=True),
    }
