"""ABI: the parameters of every kernel, as one C struct that kernels read and the launch packs.

A field is (name, kind): "i64" a device address or a stride in elements, "i32" a size, "f32" a factor.
"""

from __future__ import annotations

from typing import Final

import numpy as np

Fields = tuple[tuple[str, str], ...]

_NUMPY: Final = {"i64": "<i8", "i32": "<i4", "f32": "<f4"}


def _strided(*names: str) -> Fields:
    """An address and the batch, row and head strides (elements) of each tensor."""
    return tuple((field, "i64") for name in names for field in (name, f"{name}_batch", f"{name}_row", f"{name}_head"))


_STEPS: Final = ("batch", "head", "row", "column")  # of a bias; an axis that broadcasts has stride 0
SEED: Final = ("philox_seed", "philox_offset")

# Addresses of what a problem may lack are 0 then. cu_seqlens_q, cu_seqlens_k, seqused_k: int32. alibi_slopes
# (alibi_batch elements from one batch to the next) and sinks: float32. philox_seed and philox_offset are added to
# the int64 at their _address, where that is not 0.
_TERMS: Fields = (
    ("bias", "i64"),
    *((f"bias_{step}", "i64") for step in _STEPS),
    *((name, "i64") for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")),
    *((name, "i64") for name in ("alibi_slopes", "alibi_batch", "sinks")),
    *((name, "i64") for name in (*SEED, *(f"{name}_address" for name in SEED))),
)

# batch counts sequences, num_queries and num_keys are the longest where lengths vary. group: query heads that share
# a key head. first_batch, first_head: what grid position 0 stands for; y and z of a grid end at 65535. A window
# reaches window_left before and window_right behind the diagonal, which bottom_right (0 or 1) moves by num_keys -
# num_queries. dropout_threshold: the smallest 32-bit word that keeps a weight. scale_log2 is scale * log2(e): the
# kernels exponentiate in base 2. keep_scale: 1 / (1 - dropout_p).
_SIZES: Fields = tuple(
    (name, "i32")
    for name in (
        *("batch", "num_heads", "num_queries", "num_keys", "group", "first_batch", "first_head"),
        *("window_left", "window_right", "bottom_right", "dropout_threshold"),
    )
)
_FACTORS: Fields = tuple((name, "f32") for name in ("scale", "scale_log2", "softcap", "keep_scale"))

FORWARD: Fields = (
    *_strided("query", "key", "value", "output"),
    ("logsumexp", "i64"),
    *_TERMS,
    *_SIZES,
    *_FACTORS,
)

# Of the decode kernels. partial_output: float32 [batch, heads of key, num_queries * group, num_splits_key, columns];
# partial_logsumexp likewise without columns, in base 2. Both are 0 where num_splits_key is 1.
DECODE: Fields = (
    *_strided("query", "key", "value", "output"),
    ("logsumexp", "i64"),
    ("partial_output", "i64"),
    ("partial_logsumexp", "i64"),
    *_TERMS,
    *_SIZES,
    ("num_splits_key", "i32"),
    *_FACTORS,
)

# total_tiles: query tiles of all sequences of one head. grad_query_accum: float32 [heads, total_tiles,
# tile_m * head_dim] in the kernel's own element order. delta and logsumexp_log2 (logsumexp * log2(e), +inf on rows
# without keys and past the end): float32 [heads, total_tiles * tile_m]. turn: int32 [heads, total_tiles], a turn for
# each query tile; started: int32 [heads, batch], blocks that have started, in the
# Hopper family int32 [1], key tiles.
BACKWARD: Fields = (
    *_strided("query", "key", "value", "output", "grad_output", "grad_query", "grad_key", "grad_value"),
    ("grad_output_column", "i64"),
    ("logsumexp", "i64"),
    ("grad_query_accum", "i64"),
    ("delta", "i64"),
    ("logsumexp_log2", "i64"),
    ("turn", "i64"),
    ("started", "i64"),
    ("grad_bias", "i64"),
    *((f"grad_bias_{step}", "i64") for step in _STEPS),
    ("grad_sinks", "i64"),
    *_TERMS,
    *_SIZES,
    ("num_splits_key", "i32"),
    ("total_tiles", "i32"),
    *_FACTORS,
)

# A room alone: tiles of A and B in, float32 tiles of C out, all contiguous.
ROOM: Fields = (("a", "i64"), ("b", "i64"), ("c", "i64"), ("tiles", "i32"))

# By Build.kind, or by Build.family where that has a struct of its own.
FIELDS: Final[dict[str, Fields]] = {"forward": FORWARD, "backward": BACKWARD, "room": ROOM, "decode": DECODE}

TENSOR_MAP_BYTES: Final = 128


def fields_of(kind: str, family: str) -> Fields:
    """The struct of a build's kernels."""
    return FIELDS[family if family in FIELDS else kind]


def numpy_struct(fields: Fields) -> np.dtype[np.void]:
    """The struct as an aligned NumPy dtype: the same bytes as the kernel's C struct."""
    return np.dtype([(name, _NUMPY[kind]) for name, kind in fields], align=True)


def layout(fields: Fields) -> tuple[tuple[str, int, int], ...]:
    """(name, offset, size) in bytes of every field of the struct."""
    struct = numpy_struct(fields)
    assert struct.fields is not None
    return tuple((name, struct.fields[name][1], struct.fields[name][0].itemsize) for name, _ in fields)
