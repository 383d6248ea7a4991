"""Dropout: weights P are dropped by a random mask Z, and the kept ones are scaled by 1 / (1 - dropout_p).

    O = (Z P) V,   dV = (Z P)^T dO,   dP = Z * (dO V^T)      Z_ij = 1 / (1 - dropout_p) if kept, else 0

The mask is PyTorch's Philox stream bit for bit (philox.py): which word belongs to which element of the attention matrix
depends on no tile and no order of work. The kernels apply the factor 1 / (1 - dropout_p) of P once, to O and dV, and
that of dP to each element. kernels/common/dropout.py draws the bits of a tile; the sm90 kernels draw those of several
tiles at once (kernels/sm90_common/dropout_prefetch.py, dropout_transposed.py).
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.integers import choose, round_up
from cutlass_py_attn.refusals import Refusal, refuse
from cutlass_py_attn.score_terms.philox import BLOCK_WORDS, WORD_MASK, blocks_of, uniforms
from cutlass_py_attn.score_terms.term import ScoreTerm, StructFields

if TYPE_CHECKING:
    from cutlass_py_attn.problem.problem import Problem
    from cutlass_py_attn.problem.tensors import Shape

Array = npt.NDArray[Any]

PHILOX: Final = ("philox_seed", "philox_offset")

_WORD_INDICES: Final = 2**64  # the kernels' 64-bit sums wrap
_BLOCKS_AT_ONCE: Final = 2**16  # some megabytes of intermediates, however large the mask


@dataclass(frozen=True, slots=True)
class Dropout:
    """Dropout of the attention weights, and where its random numbers start.

    dropout_p: probability that an element is dropped, from 0 to 1; the kept ones are scaled by 1 / (1 - dropout_p)
    philox_seed: 64-bit key
    philox_offset: index of the first random word

    Seed and offset are Python ints, or int64 scalars in device memory that the kernels read when they run. The
    functions of this module take ints only.
    """

    dropout_p: float
    philox_seed: Any
    philox_offset: Any = 0

    @property
    def is_active(self) -> bool:
        """Whether anything is dropped at all."""
        return self.dropout_p != 0

    def advance(self, words: int) -> int:
        """Returns the offset after a pass that used `words` words: PyTorch reserves whole blocks of four words."""
        return int(self.philox_offset) + int(round_up(words, BLOCK_WORDS))


class DropoutTerm(ScoreTerm):
    """Dropout as a term of a Problem: dropout_p, and philox_on_device."""

    name = "dropout"
    field = "dropout_p"
    # philox_seed and philox_offset are numbers. Where an address is not 0, the int64 in device memory there is the
    # seed, or is added to the offset.
    struct = StructFields(
        addresses=(*PHILOX, *(f"{name}_address" for name in PHILOX)),
        sizes=("dropout_threshold",),
        factors=("keep_scale",),
    )
    needs_registers_sm90 = True
    modifies_scores = False
    meanings = (
        ("dropout_threshold", "int32 with the bits of the smallest 32-bit word that keeps a weight"),
        ("keep_scale", "factor of the weights that are kept: 1 / (1 - dropout_p)"),
        ("philox_seed", "key of the random numbers, all 64 bits"),
        ("philox_offset", "index of the first random word, all 64 bits"),
    )

    def is_present(self, problem: Problem) -> bool:
        return problem.dropout_p != 0

    def refusals(self, problem: Problem) -> Iterator[Refusal]:
        p = problem.dropout_p
        if not (isinstance(p, Real) and 0 <= float(p) <= 1):
            yield refuse("dropout_p", p, "must be a probability from 0 to 1", "correct it")

    def device_scalars(self, problem: Problem) -> tuple[str, ...]:
        return PHILOX if problem.philox_on_device else ()

    def immediate_numbers(self, problem: Problem) -> tuple[str, ...]:
        return PHILOX if self.is_present(problem) and not problem.philox_on_device else ()

    def sizes(self, problem: Problem) -> dict[str, int]:
        word = threshold(problem.dropout_p)
        return {"dropout_threshold": word - 2**32 if word >= 2**31 else word}

    def numbers(self, problem: Problem) -> dict[str, float]:
        return {"keep_scale": keep_scale(problem.dropout_p)}

    def example(self, shape: Shape) -> dict[str, Any]:
        return {"dropout_p": 0.5}

    def kept_or_zero(self, value: Any, is_kept: Any, zero: Any) -> Any:
        """Returns a weight, or its gradient, on the device: `value` if dropout keeps the element, else `zero`."""
        return choose(is_kept, value, zero)

    def reference_multiplier(self, kept: Array, dropout_p: float, dtype: np.dtype[Any]) -> Array:
        """Returns Z of a boolean tile `kept`, in that dtype; P and dP are multiplied by it."""
        return kept.astype(dtype) * dtype.type(keep_scale(dropout_p))


DROPOUT = DropoutTerm()


def threshold(dropout_p: float) -> int:
    """Returns the smallest word that is kept; a word is kept if and only if it is not smaller.

    The rule is uniforms(word) > float32(dropout_p), and uniforms never falls as the word grows. When nothing is kept
    (dropout_p rounds to 1) the threshold is 2**32 - 1, and keep_scale multiplies the one word left by zero.

    Raises ValueError for dropout_p outside [0, 1].
    """
    return _threshold(_checked(dropout_p))


@functools.lru_cache(maxsize=256)
def _threshold(limit: np.float32) -> int:
    found = bisect_left(range(2**32), True, key=lambda word: bool(uniforms(np.uint32(word)) > limit))
    return min(found, WORD_MASK)


def keep_scale(dropout_p: float) -> float:
    """Returns the factor of the kept elements: 1 / (1 - float32(dropout_p)) in float64, rounded to float32.

    The factor is 0.0 when dropout_p rounds to 1. Raises ValueError for dropout_p outside [0, 1].
    """
    kept = 1.0 - float(_checked(dropout_p))
    return float(np.float32(1.0 / kept)) if kept else 0.0


def keep_mask(dropout: Dropout, base: int, num_queries: int, num_keys: int) -> Array:
    """Returns the mask of one sequence and head, (num_queries, num_keys) bool, True where the element is kept.

    Element (i, j) takes word philox_offset + base + i * num_keys + j. base is (b * num_heads + h) times
    num_queries * num_keys for dense tensors, and times max_seqlen_q * max_seqlen_k for variable lengths, where num_keys
    is the sequence's own. All elements are False when dropout_p rounds to 1.

    Raises ValueError for dropout_p outside [0, 1].
    """
    kept = np.empty(num_queries * num_keys, np.bool_)
    smallest, nothing = threshold(dropout.dropout_p), keep_scale(dropout.dropout_p) == 0.0
    start = int(dropout.philox_offset) + base
    position = -(start % BLOCK_WORDS)  # of the block's first word in `kept`; below 0 if the block begins before `kept`
    while position < kept.size:
        first = np.uint64((start + position) % _WORD_INDICES // BLOCK_WORDS)
        count = min(_BLOCKS_AT_ONCE, -(-(kept.size - position) // BLOCK_WORDS))
        counters = (first + np.arange(count, dtype=np.uint64)) % np.uint64(_WORD_INDICES // BLOCK_WORDS)
        found = blocks_of(dropout.philox_seed, counters).ravel()
        here = kept[max(position, 0) : position + found.size]
        here[...] = (found >= smallest)[max(-position, 0) :][: here.size]
        position += found.size
    return (kept & (not nothing)).reshape(num_queries, num_keys)


def keeper(dropout: Dropout, num_heads: int, num_queries: int, num_keys: int) -> Callable[[int, int, int, int], Array]:
    """Returns keep_mask as a function of (sequence, head, queries, keys) of the sequence.

    num_queries, num_keys: those of the longest sequence
    """

    def keep(sequence: int, head: int, queries: int, keys: int) -> Array:
        return keep_mask(dropout, (sequence * num_heads + head) * num_queries * num_keys, queries, keys)

    return keep


def dropout_mask(dropout: Dropout, batch: int, num_heads: int, num_queries: int, num_keys: int) -> Array:
    """Returns the mask of dense tensors, (batch, num_heads, num_queries, num_keys) bool, True where kept.

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
