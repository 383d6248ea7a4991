"""Philox: the random words of dropout in jax.numpy, the same as `score_terms.philox` computes in NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cutlass_py_attn.score_terms.philox import BLOCK_WORDS, KEY_STEPS, MULTIPLIERS, ROUNDS


def words(philox: Any, count: int) -> Any:
    """Returns (count,) uint32: the words of the stream from an offset on.

    philox: (4,) uint32, the seed and the offset, each with its low half first
    """
    low, high = philox[2], philox[3]
    blocks = np.arange(count // BLOCK_WORDS + 2, dtype=np.uint32)  # one more than whole ones at either end
    first = low >> 2 | high << 30
    counters = first + blocks
    upper = (high >> 2) + (counters < first).astype(jnp.uint32) & np.uint32(2**30 - 1)  # word indices have 64 bits
    return jax.lax.dynamic_slice(_blocks(philox, counters, upper).ravel(), [low & 3], [count])


def _blocks(philox: Any, low: Any, high: Any) -> Any:
    """Returns the blocks (count, 4) of 64-bit counters."""
    key = [philox[0], philox[1]]
    x0, x1 = low, high
    x2 = x3 = jnp.zeros_like(low)
    for _ in range(ROUNDS):
        (upper0, lower0), (upper1, lower1) = _product(MULTIPLIERS[0], x0), _product(MULTIPLIERS[1], x2)
        x0, x1 = upper1 ^ x1 ^ key[0], lower1
        x2, x3 = upper0 ^ x3 ^ key[1], lower0
        key = [part + np.uint32(step) for part, step in zip(key, KEY_STEPS, strict=True)]
    return jnp.stack([x0, x1, x2, x3], axis=-1)


def _product(factor: int, word: Any) -> tuple[Any, Any]:
    """Returns the upper and the lower half of a product of 32-bit numbers, from products of their 16-bit halves."""
    low, high = np.uint32(factor & 0xFFFF), np.uint32(factor >> 16)
    word_low, word_high = word & 0xFFFF, word >> 16
    middle = high * word_low + (low * word_low >> 16)
    other = low * word_high + (middle & 0xFFFF)
    return high * word_high + (middle >> 16) + (other >> 16), np.uint32(factor) * word
