"""Drawn mask functions: functions of masks with seeded arguments, which problem specs and test cases share.

    stripes      every few diagonals, others in each head, and all far ones; numbers below 0 are divided
    documents    the keys of its document, of which a sequence has a few; neither padding nor what padding would see
    marked       the keys that are marked, and close ones
    weights      the keys whose weight for a head is in a range, another one before the diagonal than behind it
    tree         the keys whose bit is set in words of 32, as of a tree; in some neighbouring queries none is
    dilated      keys in steps that heads have of their own, up to a distance of each head
    images       a causal mask, in which the tokens of two spans see all of each other
    prefix       a causal mask, in which all see the first keys, of which each sequence and head has its own number

A function is compiled into kernels; what is drawn by a seed are its arrays. Its integers follow from the sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.problem.block_sparse import BlockSparse
from cutlass_py_attn.problem.key_ranges import FULL, KeyRanges
from cutlass_py_attn.problem.mask_function import MaskFunction
from cutlass_py_attn.problem.masks import Mask
from cutlass_py_attn.problem.tensors import Tensor

Array = npt.NDArray[Any]
Sizes = tuple[int, int, int, int]  # sequences, query heads, queries and keys
Arguments = dict[str, Any]
WORD_BITS: Final = 32
PADDED_SHARE: Final = 0.3  # sequences of `documents` with padding
MARKED_SHARE: Final = 0.3  # `marked` and `tree`
HIDDEN_HEAD_SHARE: Final = 0.15  # heads of `dilated` without a key
LONGEST_EMPTY_RUN: Final = 300  # queries of `tree` without a key, enough for whole query tiles


def mask(name: str, sizes: Sizes, seed: int, within: Mask | KeyRanges | BlockSparse = FULL) -> MaskFunction:
    """Returns a drawn function within another mask; the same arguments always give the same bits."""
    function, arguments = FUNCTIONS[name]
    batch, heads, queries, keys = (max(size, 1) for size in sizes)  # an array has an element
    return MaskFunction(function, arguments(np.random.default_rng((seed, 3)), (batch, heads, queries, keys)), within)


@functools.lru_cache(maxsize=512)
def fields(name: str, sizes: Sizes) -> tuple[tuple[str, Any], ...]:
    """Returns the fields of a Problem that a function decides, with contiguous arrays, by name."""
    drawn = mask(name, sizes, 0)
    arrays = drawn.arrays().items()
    layouts = {array_name: Tensor.contiguous(array.shape, str(array.dtype)) for array_name, array in arrays}
    return tuple({**layouts, **drawn.numbers()}.items())


def _stripes(batch: Any, head: Any, query: Any, key: Any, width: Any, far: Any) -> Any:
    return ((query - key + head) % width == 0) | ((key - query) // far < -1)


def _stripe_arguments(rng: np.random.Generator, sizes: Sizes) -> Arguments:
    return {"width": 2 + sizes[2] % 5, "far": 40 + sizes[3] % 90}


def _same_document(batch: Any, head: Any, query: Any, key: Any, ids: Any) -> Any:
    return (ids[batch, query] == ids[batch, key]) & (ids[batch, query] >= 0)


def _documents(rng: np.random.Generator, sizes: Sizes) -> Arguments:
    batch, longest = sizes[0], max(sizes[2:])
    ids = np.sort(rng.integers(0, rng.integers(1, 9, (batch, 1)), (batch, longest), np.int32))
    used = np.where(rng.random(batch) < PADDED_SHARE, rng.integers(0, longest + 1, batch), longest)
    ids[np.arange(longest) >= used[:, None]] = -1
    return {"ids": ids}


def _marked_or_close(batch: Any, head: Any, query: Any, key: Any, marked: Any, distance: Any) -> Any:
    return marked[key] | (abs(query - key) < distance)


def _marks(rng: np.random.Generator, sizes: Sizes) -> Arguments:
    blocks = np.repeat(rng.random(-(-sizes[3] // 64)) < 0.5, 64)[: sizes[3]]
    return {"marked": blocks & (rng.random(sizes[3]) < MARKED_SHARE), "distance": 1 + sizes[2] % 30}


def _weighted(batch: Any, head: Any, query: Any, key: Any, weight: Any) -> Any:
    least = np.where(query < key, 0.5, -0.25)
    return (weight[head, key] >= least) & (weight[head, key] < 1.5)


def _weights(rng: np.random.Generator, sizes: Sizes) -> Arguments:
    return {"weight": rng.standard_normal((sizes[1], sizes[3]), np.float32)}


def _in_tree(batch: Any, head: Any, query: Any, key: Any, words: Any) -> Any:
    return (words[batch, query, key >> 5] >> (key & 31)) & 1 != 0


def _tree(rng: np.random.Generator, sizes: Sizes) -> Arguments:
    batch, _, queries, keys = sizes
    words = rng.integers(-(2**31), 2**31, (2, batch, queries, -(-keys // WORD_BITS))).astype(np.int32)
    first = int(rng.integers(0, queries))
    words[:, :, first : first + int(rng.integers(1, LONGEST_EMPTY_RUN))] = 0
    return {"words": words[0] & words[1]}


def _in_step(batch: Any, head: Any, query: Any, key: Any, steps: Any, reach: Any) -> Any:
    return ((query - key) % steps[head] == 0) & (query - key < reach[head]) & (key - query < reach[head])


def _steps(rng: np.random.Generator, sizes: Sizes) -> Arguments:
    heads, longest = sizes[1], max(sizes[2:])
    return {
        "steps": rng.integers(-3, 9, heads, np.int32),  # one of 0 sees every key in reach
        "reach": np.where(rng.random(heads) < HIDDEN_HEAD_SHARE, 0, rng.integers(1, longest + 1, heads, np.int32)),
    }


def _causal_or_images(batch: Any, head: Any, query: Any, key: Any, spans: Any) -> Any:
    def is_image(token: Any) -> Any:
        inside = [(spans[batch, span, 0] <= token) & (token < spans[batch, span, 1]) for span in range(2)]
        return inside[0] | inside[1]

    return (query >= key) | (is_image(query) & is_image(key))


def _images(rng: np.random.Generator, sizes: Sizes) -> Arguments:
    bounds = np.sort(rng.integers(0, max(sizes[2:]) + 1, (sizes[0], 4), np.int32))
    return {"spans": bounds.reshape(sizes[0], 2, 2)}


def _causal_or_first(batch: Any, head: Any, query: Any, key: Any, lengths: Any) -> Any:
    return (key <= query) | (key < lengths[batch, head])


def _prefixes(rng: np.random.Generator, sizes: Sizes) -> Arguments:
    return {"lengths": rng.integers(0, sizes[3] + 1, sizes[:2], np.int32)}


FUNCTIONS: Final[dict[str, tuple[Callable[..., Any], Callable[[np.random.Generator, Sizes], Arguments]]]] = {
    "stripes": (_stripes, _stripe_arguments),
    "documents": (_same_document, _documents),
    "marked": (_marked_or_close, _marks),
    "weights": (_weighted, _weights),
    "tree": (_in_tree, _tree),
    "dilated": (_in_step, _steps),
    "images": (_causal_or_images, _images),
    "prefix": (_causal_or_first, _prefixes),
}
