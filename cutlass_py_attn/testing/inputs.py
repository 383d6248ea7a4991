"""Inputs: seeded families of query, key, value and grad_output, each of which shows another kind of fault.

`gaussian` spreads the weight over all keys, so a wrong row or element hides in the sum. `needle` gives each row exactly
two keys that matter, `one_key` a single one. `integers` makes every product exact. `gaussian_x3` sharpens the softmax.
With `equal_keys` all weights of a row are equal and the query gradient cancels. With `zero_scores` query and key are
zero, and value and grad_output are integers: a row with one visible key has an exact output. With `saturated` every
score reaches the softcap, so that an error of the softcap changes the weights of the backward and logsumexp. `rising`
has rows whose scores rise from key tile to key tile, in the order of a forward, by more than weights may exceed 1. With
`one_sign` value and grad_output are positive, so that the rows' parts of the gradient of a sink do not cancel.

A bias has families of its own: `gaussian` hides every tenth pair by -inf; `lowest` has the most negative finite number
of the dtype beside ordinary keys, as frameworks hide keys; `hidden_rows` hides whole rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.mask_function import ArrayMask
from cutlass_py_attn.problem.masks import Mask
from cutlass_py_attn.problem.tensors import FLOAT8, OPERAND_BYTES, Shape
from cutlass_py_attn.reference.numpy_reference import DTYPES
from cutlass_py_attn.reference.score_mod import SeqlenInfo

Array = npt.NDArray[Any]
Tensors = tuple[Array, Array, Array, Array]
Sequences = Sequence[SeqlenInfo]
AnyMask = Mask | ArrayMask

NAMES = ("query", "key", "value", "grad_output")
# Size of the terms of a gradient relative to gaussian inputs (query or key, value and grad_output multiply): the
# factor of the absolute floor of accuracy.check, whose rules are for these families alone.
MAGNITUDE = {"gaussian": 1.0, "gaussian_x3": 27.0, "integers": 1.0, "needle": 4.0, "equal_keys": 1.0}
ZERO_SHARE = 0.8
# Scaled scores of the two keys of a needle row exceed the mean of the others by at least this much.
NEEDLE_SCORE = 16.0
NEEDLE_FACTOR = 2.0
SATURATED_SCORE = 300.0  # ten times the largest softcap that random_cases.py draws; its tanh is 1 in float32
RISING_STEP = 20.0  # least step between the scaled scores of neighbouring blocks; 24 in base 2 is 16.6
RISING_KEYS, RISING_BLOCKS = 128, 8  # keys of a block, and blocks until the scores are the lowest again
RISING_SHARE = 0.5  # of the rows
HIDDEN_SHARE = 0.1  # pairs that a bias hides by -inf
LOWEST_SHARE = 0.3  # keys that `lowest` gives the most negative number
# The most negative finite number of each dtype, with which frameworks hide keys.
MOST_NEGATIVE = {"float16": -65504.0, "bfloat16": -(2.0**128 - 2.0**120), "float32": -(2.0**128 - 2.0**104)}
HIDDEN_ROWS = 3  # `hidden_rows` hides one row of as many
ROW_BLOCK = 256


def make(family: str, shape: Shape, dtype: str, mask: AnyMask, seed: int) -> Tensors:
    """Returns (query, key, value, grad_output) of one family; the same arguments always give the same bits.

    Shapes are (batch, num_queries, num_heads, head_dim) and so on, as `shape.of` has them.
    dtype: "float16", "bfloat16" or "float32". Only `needle` and `one_key` read the mask; they assume the scale
    1 / sqrt(head_dim).
    Raises ValueError for an unknown family or dtype.
    """
    return draw(family, shape, dtype, mask, np.random.default_rng(seed))


def draw(
    family: str,
    shape: Shape,
    dtype: str,
    mask: AnyMask,
    rng: np.random.Generator,
    sequences: Sequences = (),
) -> Tensors:
    """Returns `make`'s tensors from the random numbers of `rng`; in float32 for e4m3.

    sequences: rows of each sequence in the variable-length layout; () if every batch element is one sequence.
    """
    if family not in FAMILIES:
        raise ValueError(f"family {family!r}: must be one of {', '.join(FAMILIES)}")
    if dtype not in OPERAND_BYTES:
        raise ValueError(f"dtype {dtype!r}: must be one of {', '.join(OPERAND_BYTES)}")
    query, key, value, grad_output = FAMILIES[family](shape, mask, rng, sequences or _dense(shape))
    if dtype == FLOAT8:  # `Case.arrays` quantises
        return query, key, value, grad_output
    target = DTYPES[dtype]
    return query.astype(target), key.astype(target), value.astype(target), grad_output.astype(target)


def _dense(shape: Shape) -> Sequences:
    """Returns the sequences of dense tensors: one for each batch element."""
    return [
        SeqlenInfo(number, number, slice(0, shape.num_queries), slice(0, shape.num_keys))
        for number in range(shape.batch)
    ]


def _gaussian(shape: Shape, mask: AnyMask, rng: np.random.Generator, sequences: Sequences) -> Tensors:
    query, key, value, grad_output = (rng.standard_normal(shape.of(name), dtype=np.float32) for name in NAMES)
    return query, key, value, grad_output


def _gaussian_x3(shape: Shape, mask: AnyMask, rng: np.random.Generator, sequences: Sequences) -> Tensors:
    query, key, value, grad_output = _gaussian(shape, mask, rng, sequences)
    return 3 * query, 3 * key, 3 * value, 3 * grad_output


def _integers(shape: Shape, mask: AnyMask, rng: np.random.Generator, sequences: Sequences) -> Tensors:
    def sparse(name: str) -> Array:
        values = rng.integers(-2, 3, shape.of(name)).astype(np.float32)
        values[rng.random(values.shape, dtype=np.float32) < ZERO_SHARE] = 0
        return values

    return sparse("query"), sparse("key"), sparse("value"), sparse("grad_output")


def _needle(shape: Shape, mask: AnyMask, rng: np.random.Generator, sequences: Sequences) -> Tensors:
    """Keys are vectors of signs. A query is the sum of two keys, so both have the same score."""
    _, _, value, grad_output = _gaussian(shape, mask, rng, sequences)
    key = rng.choice(np.array([-1, 1], np.float32), shape.of("key"))
    draws = rng.random((len(sequences), shape.num_heads, shape.num_queries))
    query = np.zeros(shape.of("query"), np.float32)
    for each in sequences:
        last, earlier = _two_keys(each, mask, draws[each.index, :, : each.num_queries])
        _point(query, key, each, last)
        _point(query, key, each, earlier)
    return _needle_factor(shape) * query, key, value, grad_output


def _one_key(shape: Shape, mask: AnyMask, rng: np.random.Generator, sequences: Sequences) -> Tensors:
    """Keys are vectors of signs. A query is twice one of its visible keys, which gets nearly all of the weight."""
    _, _, value, grad_output = _gaussian(shape, mask, rng, sequences)
    key = rng.choice(np.array([-1, 1], np.float32), shape.of("key"))
    draws = rng.random((len(sequences), shape.num_heads, shape.num_queries))
    query = np.zeros(shape.of("query"), np.float32)
    for each in sequences:
        _point(query, key, each, _any_key(each, mask, draws[each.index, :, : each.num_queries]))
    return 2 * _needle_factor(shape) * query, key, value, grad_output


def _needle_factor(shape: Shape) -> float:
    return max(NEEDLE_FACTOR, NEEDLE_SCORE / math.sqrt(shape.head_dim))


def _point(query: Array, key: Array, sequence: SeqlenInfo, chosen: Array) -> None:
    """Adds the chosen key (num_heads, num_queries) to each query of a sequence."""
    if not sequence.num_keys:
        return
    heads, group = query.shape[2], query.shape[2] // max(key.shape[2], 1)
    for head in range(heads):
        keys = key[sequence.batch, sequence.keys, head // group]
        query[sequence.batch, sequence.queries, head] += keys[chosen[head]]


def _two_keys(sequence: SeqlenInfo, mask: AnyMask, draws: Array) -> tuple[Array, Array]:
    """Returns the last visible key of each row, and an earlier one; both are (num_heads, num_queries).

    draws: random numbers in [0, 1) that choose the earlier key. A row with a single visible key gets it twice; a row
    without visible keys gets key 0.
    """
    last, earlier = np.zeros((2, *draws.shape), np.int64)
    for heads, rows, columns, starts, counts in _visible(sequence, mask, len(draws)):
        last[heads, rows] = columns[starts + counts - 1]
        rank = (draws[heads, rows] * np.maximum(counts - 1, 1)).astype(np.int64)
        earlier[heads, rows] = columns[starts + rank]
    return last, earlier


def _any_key(sequence: SeqlenInfo, mask: AnyMask, draws: Array) -> Array:
    """Returns a visible key of each row, (num_heads, num_queries), that `draws` in [0, 1) chooses; key 0 for none."""
    chosen = np.zeros(draws.shape, np.int64)
    for heads, rows, columns, starts, counts in _visible(sequence, mask, len(draws)):
        chosen[heads, rows] = columns[starts + (draws[heads, rows] * counts).astype(np.int64)]
    return chosen


def _visible(sequence: SeqlenInfo, mask: AnyMask, num_heads: int) -> Iterator[tuple[slice, Array, Array, Array, Array]]:
    """Yields heads, their rows that see keys, the visible keys of all of these one after another, and each row's start
    and count. Heads come together, or each alone if their masks may differ."""
    keys = np.arange(sequence.num_keys)[None, :]
    if isinstance(mask, Mask):
        lists = 1
    elif isinstance(mask, KeyRanges):
        lists = mask.key_start.shape[1]
    else:
        lists, mask = num_heads, mask.resolved(num_heads, sequence.num_queries, sequence.num_keys)
    parts = [slice(head, head + 1) for head in range(lists)] if lists > 1 else [slice(None)]
    for heads, start in itertools.product(parts, range(0, sequence.num_queries, ROW_BLOCK)):
        rows = np.arange(start, min(start + ROW_BLOCK, sequence.num_queries))
        if isinstance(mask, Mask):
            seen = mask.sees(rows[:, None], keys, sequence.num_queries, sequence.num_keys)
        elif isinstance(mask, KeyRanges):
            seen = mask.sees(sequence.index, heads.start or 0, rows[:, None], keys, sequence.num_keys)
        else:
            seen = mask.reach(sequence.index, heads.start or 0, rows[:, None], keys)
        seen = np.broadcast_to(seen, (rows.size, keys.size))
        counts = seen.sum(axis=1)
        some = counts > 0
        rows, counts = rows[some], counts[some]
        yield heads, rows, np.nonzero(seen)[1], np.cumsum(counts) - counts, counts


def _equal_keys(shape: Shape, mask: AnyMask, rng: np.random.Generator, sequences: Sequences) -> Tensors:
    query, key, value, grad_output = _gaussian(shape, mask, rng, sequences)
    key[:, 1:] = key[:, :1]
    return query, key, value, grad_output


def _zero_scores(shape: Shape, mask: AnyMask, rng: np.random.Generator, sequences: Sequences) -> Tensors:
    query, key = (np.zeros(shape.of(name), np.float32) for name in NAMES[:2])
    value, grad_output = (rng.integers(-2, 3, shape.of(name)).astype(np.float32) for name in NAMES[2:])
    return query, key, value, grad_output


def _saturated(shape: Shape, mask: AnyMask, rng: np.random.Generator, sequences: Sequences) -> Tensors:
    """All scores of a row are SATURATED_SCORE, or all are -SATURATED_SCORE."""
    _, _, value, grad_output = _gaussian(shape, mask, rng, sequences)
    size = math.sqrt(SATURATED_SCORE / math.sqrt(shape.head_dim))
    signs = rng.choice(np.array([-1, 1], np.float32), (*shape.of("query")[:3], 1))
    query = np.broadcast_to(size * signs, shape.of("query"))
    return query, np.full(shape.of("key"), size, np.float32), value, grad_output


def _rising(shape: Shape, mask: AnyMask, rng: np.random.Generator, sequences: Sequences) -> Tensors:
    """Keys are one vector of signs, times the level of their block; the queries of some rows are that vector, enlarged.

    A forward visits the last keys first. The scores of these rows are integers times the scale. The others are normal.
    """
    query, _, value, grad_output = _gaussian(shape, mask, rng, sequences)
    signs = rng.choice(np.array([-1, 1], np.float32), shape.head_dim)
    key = np.zeros(shape.of("key"), np.float32)
    for each in sequences:
        blocks = np.arange(each.num_keys) // RISING_KEYS
        levels = RISING_BLOCKS - 1 - blocks % RISING_BLOCKS
        key[each.batch, each.keys] = levels[:, None, None] * signs
    rises = rng.random((*shape.of("query")[:3], 1)) < RISING_SHARE
    factor = math.ceil(RISING_STEP / math.sqrt(shape.head_dim))
    return np.where(rises, factor * signs, query), key, value, grad_output


def _one_sign(shape: Shape, mask: AnyMask, rng: np.random.Generator, sequences: Sequences) -> Tensors:
    query, key, value, grad_output = _gaussian(shape, mask, rng, sequences)
    return query, key, np.abs(value), np.abs(grad_output)


FAMILIES: dict[str, Callable[[Shape, AnyMask, np.random.Generator, Sequences], Tensors]] = {
    "gaussian": _gaussian,
    "gaussian_x3": _gaussian_x3,
    "integers": _integers,
    "needle": _needle,
    "equal_keys": _equal_keys,
    "one_key": _one_key,
    "zero_scores": _zero_scores,
    "saturated": _saturated,
    "rising": _rising,
    "one_sign": _one_sign,
}


def draw_bias(
    family: str,
    size: Sequence[int],
    dtype: str,
    mask: AnyMask,
    rng: np.random.Generator,
    sequences: Sequences,
    num_heads: int,
) -> Array:
    """Returns a bias of (batch or 1, num_heads or 1, num_queries or 1, num_keys or 1) of a family of BIAS_FAMILIES.

    A row with the most negative number alone would be an empty row for kernels, which work in base 2, and a row of
    equal weights for the reference. So in `lowest` the first visible key of every row is an ordinary one.
    """
    if family not in BIAS_FAMILIES:
        raise ValueError(f"bias family {family!r}: must be one of {', '.join(BIAS_FAMILIES)}")
    target = DTYPES[dtype]
    bias = rng.standard_normal(size, dtype=np.float32)
    bias[rng.random(bias.shape) < HIDDEN_SHARE] = -np.inf
    bias = bias.astype(target)
    if family == "hidden_rows":
        bias[:, :, HIDDEN_ROWS - 1 :: HIDDEN_ROWS] = -np.inf
    elif family == "lowest":
        bias[rng.random(bias.shape) < LOWEST_SHARE] = MOST_NEGATIVE[dtype]
        for each in sequences:
            number = each.index if bias.shape[0] > 1 else 0
            for heads, rows, columns, starts, _ in _visible(each, mask, num_heads):
                its_heads, first = heads if size[1] > 1 else slice(None), columns[starts]
                row, key = (
                    part if length > 1 else 0 * part for part, length in zip((rows, first), size[2:], strict=True)
                )
                bias[number, its_heads, row, key] = 0
    return bias


BIAS_FAMILIES = ("gaussian", "lowest", "hidden_rows")
