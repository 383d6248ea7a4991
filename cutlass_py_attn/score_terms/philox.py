"""Philox: the random words of dropout in NumPy, bit for bit those of PyTorch's memory-efficient attention.

Philox-4x32 with ten rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), keyed by the seed. The
stream is one sequence of 32-bit words: word n is component n mod 4 of the block whose counter is n div 4.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)  # added to the two halves of the key after each round
ROUNDS: Final = 10
BLOCK_WORDS: Final = 4
WORD_MASK: Final = 2**32 - 1


def words(seed: int, indices: Array) -> Array:
    """Returns the uint32 words of the stream of `seed`, in the shape of `indices` (integers from 0 to 2**64 - 1)."""
    index = np.asarray(indices).astype(np.uint64)
    blocks = blocks_of(seed, index >> np.uint64(2))
    component = (index & np.uint64(3)).astype(np.intp)
    return np.take_along_axis(blocks, component[..., None], axis=-1)[..., 0]


def uniforms(random_words: npt.ArrayLike) -> Array:
    """Returns float32 numbers in (0, 1] of uint32 words; the conversion to float32 and the sum round to nearest."""
    numbers = np.asarray(random_words, np.uint32).astype(np.float32)
    return numbers * np.float32(2**-32) + np.float32(2**-33)


def blocks_of(seed: int, counters: Array) -> Array:
    """Returns the blocks (..., 4) uint32 of uint64 counters; the two upper words of Philox's 128-bit counter are 0."""
    mask, half = np.uint64(WORD_MASK), np.uint64(32)
    # 32-bit words in 64-bit arrays, so that no product overflows.
    multipliers, steps = ([np.uint64(value) for value in pair] for pair in (MULTIPLIERS, KEY_STEPS))
    key = [np.uint64(seed & WORD_MASK), np.uint64(seed >> 32 & WORD_MASK)]
    x0, x1 = counters & mask, counters >> half
    x2 = x3 = np.zeros_like(counters)
    for _ in range(ROUNDS):
        product0, product1 = multipliers[0] * x0, multipliers[1] * x2
        x0, x1 = product1 >> half ^ x1 ^ key[0], product1 & mask
        x2, x3 = product0 >> half ^ x3 ^ key[1], product0 & mask
        key = [(part + step) & mask for part, step in zip(key, steps, strict=True)]
    return np.stack([x0, x1, x2, x3], axis=-1).astype(np.uint32)
