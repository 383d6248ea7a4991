"""Philox: the random numbers of dropout in NumPy, bit for bit those of PyTorch's memory-efficient attention.

Philox-4x32 with ten rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), keyed by the
seed. It is read as one sequence of 32-bit words: word n is component n mod 4 of the block whose counter is
n div 4. Which word belongs to which element of the attention matrix depends on no tile and no order of work.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.parts.integers import round_up

Array = npt.NDArray[Any]

MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)  # what the two halves of the key grow by from round to round
ROUNDS: Final = 10
BLOCK_WORDS: Final = 4

_WORD_MASK: Final = 2**32 - 1
_WORD_INDICES: Final = 2**64  # the kernels' 64-bit sums wrap
_BLOCKS_AT_ONCE: Final = 2**16  # some megabytes of intermediates, however large the mask


@dataclass(frozen=True, slots=True)
class Dropout:
    """Dropout of the attention weights, and where its random numbers start.

    dropout_p: probability that an element is dropped, from 0 to 1; the rest is scaled by 1 / (1 - dropout_p).
    philox_seed, philox_offset: 64-bit key, and the index of the first word used. Python ints, or int64 scalars
    that lie in device memory and are read when the kernels run; functions of this module take only ints.
    """

    dropout_p: float
    philox_seed: Any
    philox_offset: Any = 0

    @property
    def is_active(self) -> bool:
        """Whether anything is dropped at all."""
        return self.dropout_p != 0

    def advance(self, words: int) -> int:
        """The offset after a pass that used `words` words: passes reserve whole blocks of four, as PyTorch does."""
        return int(self.philox_offset) + int(round_up(words, BLOCK_WORDS))


def words(seed: int, indices: Array) -> Array:
    """uint32 words of the stream of `seed`, in the shape of `indices` (integers from 0 to 2**64 - 1)."""
    index = np.asarray(indices).astype(np.uint64)
    blocks = _blocks(seed, index >> np.uint64(2))
    lane = (index & np.uint64(3)).astype(np.intp)
    return np.take_along_axis(blocks, lane[..., None], axis=-1)[..., 0]


def uniforms(random_words: npt.ArrayLike) -> Array:
    """float32 numbers in (0, 1] of uint32 words; the conversion to float32 and the sum both round to nearest."""
    numbers = np.asarray(random_words, np.uint32).astype(np.float32)
    return numbers * np.float32(2**-32) + np.float32(2**-33)


def threshold(dropout_p: float) -> int:
    """The smallest word that is kept: a word is kept exactly when it is not smaller.

    The rule is uniforms(word) > float32(dropout_p), and uniforms never falls as the word grows. Where nothing is
    kept (dropout_p rounds to 1) this is 2**32 - 1, and keep_scale makes the one word left count zero.

    Raises ValueError for dropout_p outside [0, 1].
    """
    limit = _checked(dropout_p)
    found = bisect_left(range(2**32), True, key=lambda word: bool(uniforms(np.uint32(word)) > limit))
    return min(found, _WORD_MASK)


def keep_scale(dropout_p: float) -> float:
    """Factor of the elements that are kept: 1 / (1 - float32(dropout_p)) in float64, rounded to float32.

    0.0 where dropout_p rounds to 1. Raises ValueError for dropout_p outside [0, 1].
    """
    kept = 1.0 - float(_checked(dropout_p))
    return float(np.float32(1.0 / kept)) if kept else 0.0


def keep_mask(dropout: Dropout, base: int, num_queries: int, num_keys: int) -> Array:
    """bool [num_queries, num_keys] of one sequence and head, True where the element is kept.

    Element (i, j) takes word philox_offset + base + i * num_keys + j. base is (b * num_heads + h) times
    num_queries * num_keys for dense tensors, and times max_seqlen_q * max_seqlen_k for sequences of several
    lengths, whose num_keys is their own. All False where dropout_p rounds to 1.

    Raises ValueError for dropout_p outside [0, 1].
    """
    kept = np.empty(num_queries * num_keys, np.bool_)
    smallest, nothing = threshold(dropout.dropout_p), keep_scale(dropout.dropout_p) == 0.0
    start = int(dropout.philox_offset) + base
    position = -(start % BLOCK_WORDS)  # of the block's first word in `kept`: the first block may begin before it
    while position < kept.size:
        first = np.uint64((start + position) % _WORD_INDICES // BLOCK_WORDS)
        count = min(_BLOCKS_AT_ONCE, -(-(kept.size - position) // BLOCK_WORDS))
        counters = (first + np.arange(count, dtype=np.uint64)) % np.uint64(_WORD_INDICES // BLOCK_WORDS)
        found = _blocks(dropout.philox_seed, counters).ravel()
        here = kept[max(position, 0) : position + found.size]
        here[...] = (found >= smallest)[max(-position, 0) :][: here.size]
        position += found.size
    return (kept & (not nothing)).reshape(num_queries, num_keys)


def keeper(dropout: Dropout, num_heads: int, num_queries: int, num_keys: int) -> Callable[[int, int, int, int], Array]:
    """keep_mask by (sequence, head, its queries, its keys), where the longest have num_queries and num_keys."""

    def keep(sequence: int, head: int, queries: int, keys: int) -> Array:
        return keep_mask(dropout, (sequence * num_heads + head) * num_queries * num_keys, queries, keys)

    return keep


def dropout_mask(dropout: Dropout, batch: int, num_heads: int, num_queries: int, num_keys: int) -> Array:
    """bool [batch, num_heads, num_queries, num_keys] of dense tensors, True where the element is kept.

    Raises ValueError for dropout_p outside [0, 1].
    """
    kept = np.empty((batch, num_heads, num_queries, num_keys), np.bool_)
    keep = keeper(dropout, num_heads, num_queries, num_keys)
    for b, h in np.ndindex(batch, num_heads):
        kept[b, h] = keep(b, h, num_queries, num_keys)
    return kept


def _checked(dropout_p: float) -> np.float32:
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p = {dropout_p}: must be from 0 to 1")
    return np.float32(dropout_p)


def _blocks(seed: int, counters: Array) -> Array:
    """uint32 blocks [..., 4] of uint64 counters; the two upper words of Philox's 128-bit counter are zero."""
    mask, half = np.uint64(_WORD_MASK), np.uint64(32)
    # 32-bit words in 64-bit arrays, so that products are whole.
    multipliers, steps = ([np.uint64(value) for value in pair] for pair in (MULTIPLIERS, KEY_STEPS))
    key = [np.uint64(seed & _WORD_MASK), np.uint64(seed >> 32 & _WORD_MASK)]
    x0, x1 = counters & mask, counters >> half
    x2 = x3 = np.zeros_like(counters)
    for _ in range(ROUNDS):
        product0, product1 = multipliers[0] * x0, multipliers[1] * x2
        x0, x1 = product1 >> half ^ x1 ^ key[0], product1 & mask
        x2, x3 = product0 >> half ^ x3 ^ key[1], product0 & mask
        key = [(part + step) & mask for part, step in zip(key, steps, strict=True)]
    return np.stack([x0, x1, x2, x3], axis=-1).astype(np.uint32)
