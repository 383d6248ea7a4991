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


_SIZES: Fields = (("batch", "i32"), ("num_heads", "i32"), ("num_queries", "i32"), ("num_keys", "i32"))

# scale_log2 is scale * log2(e): the kernels exponentiate in base 2.
FORWARD: Fields = (
    *_strided("query", "key", "value", "output"),
    ("logsumexp", "i64"),
    *_SIZES,
    ("scale", "f32"),
    ("scale_log2", "f32"),
)

# grad_query_accum: float32 [batch, heads, query tiles, tile_m * head_dim] in the kernel's own element order.
# delta and logsumexp_log2 (logsumexp * log2(e), +inf on rows without keys and past the end): float32
# [batch, heads, query_tiles * tile_m]. turn: int32 [batch, heads, query_tiles + 1],
# a turn for each query tile and the number of blocks that have started.
BACKWARD: Fields = (
    *_strided("query", "key", "value", "output", "grad_output", "grad_query", "grad_key", "grad_value"),
    ("logsumexp", "i64"),
    ("grad_query_accum", "i64"),
    ("delta", "i64"),
    ("logsumexp_log2", "i64"),
    ("turn", "i64"),
    *_SIZES,
    ("num_splits_key", "i32"),
    ("query_tiles", "i32"),
    ("scale", "f32"),
    ("scale_log2", "f32"),
)

# A room alone: tiles of A and B in, float32 tiles of C out, all contiguous.
ROOM: Fields = (("a", "i64"), ("b", "i64"), ("c", "i64"), ("tiles", "i32"))

FIELDS: Final[dict[str, Fields]] = {"forward": FORWARD, "backward": BACKWARD, "room": ROOM}  # by Build.kind

TENSOR_MAP_BYTES: Final = 128


def numpy_struct(fields: Fields) -> np.dtype[np.void]:
    """The struct as an aligned NumPy dtype: the same bytes as the kernel's C struct."""
    return np.dtype([(name, _NUMPY[kind]) for name, kind in fields], align=True)


def layout(fields: Fields) -> tuple[tuple[str, int, int], ...]:
    """(name, offset, size) in bytes of every field of the struct."""
    struct = numpy_struct(fields)
    assert struct.fields is not None
    return tuple((name, struct.fields[name][1], struct.fields[name][0].itemsize) for name, _ in fields)
