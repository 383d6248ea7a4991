"""Tensors: shapes, strides and dtypes of the tensors of a problem, and their names."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cutlass_py_attn.integers import ceil_div, round_up
from cutlass_py_attn.problem.scalars import integer_of

ITEM_BYTES: dict[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4}
F32_BYTES = ITEM_BYTES["float32"]
WORD_BYTES = 4  # bytes of a register
FLOAT8 = "float8_e4m3fn"
E4M3 = (FLOAT8, "uint8")  # dtypes of arrays of e4m3 codes: their own, and their bytes
E4M3_BYTES = 1
OPERAND_BYTES: dict[str, int] = {**ITEM_BYTES, **dict.fromkeys(E4M3, E4M3_BYTES)}  # of query, key and value
SHORT_NAMES: dict[str, str] = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
OPERAND_NAMES: dict[str, str] = {**SHORT_NAMES, FLOAT8: "e4m3"}
DIRECTIONS = ("forward", "backward")
ROW_ALIGNMENT_BYTES = 16  # bytes of the widest load; rows aligned to less are loaded in smaller pieces
LSE_PADDING = 32  # rows of logsumexp are padded to a multiple of this
RANGE_EDGES = ("key_start", "key_end")  # arrays of the range of keys that each query sees
VISIBLE_BLOCKS = "visible_blocks"  # array of which blocks of queries and keys have visible pairs
RANGE_AXES = ("batch", "head", "row")  # along which they have strides
BLOCK_AXES = (*RANGE_AXES, "column")
MASK_ARRAYS = tuple(f"mask_array_{index}" for index in range(4))  # arrays that a mask function reads
MASK_ARRAY_AXES = tuple(f"axis_{axis}" for axis in range(4))
RANGE_WORDS = 2  # of the range of a query, its start and its end
RANGE_BYTES = RANGE_WORDS * WORD_BYTES
STATE_BYTES = 2 * WORD_BYTES  # of a word of bits of visited tiles, and one of whole tiles
OPERANDS = ("query", "key", "value")
BMHK = (*OPERANDS, "output", "grad_output", "grad_query", "grad_key", "grad_value")
BIASES = ("bias", "grad_bias")
ROW_STRIDES = ("batch", "row", "head")  # of rows, whose columns are contiguous; those of a pool begin with "page"
KEY_ROPE = "key_rope"  # the columns of key that have 16 bits, of a latent cache of e4m3 codes
CACHED = ("key", "value", KEY_ROPE)  # rows of a cache, which may be in pages


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of an attention problem.

    batch: batch size; with variable lengths the number of sequences
    num_queries, num_keys: rows of query and of key; with variable lengths those of the longest sequence
    num_heads: heads of query
    head_dim: columns of query and key
    head_dim_value: columns of value and output
    num_heads_key: heads of key and value, a divisor of num_heads (GQA, MQA); 0 for num_heads
    tokens: (rows of query, rows of key) of all sequences together in the variable-length layout, where tensors are
        (1, tokens, num_heads, head_dim); None for the dense layout
    pool: (pages, page_size) of key and value in the paged layout, where they are (pages, page_size, num_heads_key,
        head_dim), and num_keys is the most keys of a sequence; None for other layouts. tokens then is that of query
        alone, with rows of key 0
    """

    batch: int
    num_queries: int
    num_keys: int
    num_heads: int
    head_dim: int
    head_dim_value: int
    num_heads_key: int = 0
    tokens: tuple[int, int] | None = None
    pool: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if integer_of(self.num_heads_key) == 0:
            object.__setattr__(self, "num_heads_key", self.num_heads)

    @property
    def group(self) -> int:
        """Number of query heads that share one key head."""
        return self.num_heads // max(self.num_heads_key, 1)

    @property
    def logsumexp(self) -> tuple[int, int, int]:
        """Shape of logsumexp: (batch, num_heads, num_queries rounded up to a multiple of 32)."""
        return self.batch, self.num_heads, round_up(self.num_queries, LSE_PADDING)

    def axes(self, name: str) -> tuple[str, ...]:
        """Returns what the axes of BMHK tensor `name` (query, grad_key, ...) count, as named in `sizes`."""
        role = name.removeprefix("grad_")
        of_key = role in CACHED
        if of_key and self.pool is not None:
            rows = "num_pages", "page_size"
        elif self.tokens is not None:
            rows = "packed", "tokens_k" if of_key else "tokens_q"
        else:
            rows = "batch", "num_keys" if of_key else "num_queries"
        columns = "head_dim" if role in ("query", "key") else "rope_columns" if role == KEY_ROPE else "head_dim_value"
        return *rows, "num_heads_key" if of_key else "num_heads", columns

    def of(self, name: str) -> tuple[int, ...]:
        """Returns the BMHK shape of tensor `name` (query, grad_key, ...)."""
        columns = {"packed": 1, "head_dim": self.head_dim, "head_dim_value": self.head_dim_value}
        sizes = self.sizes | columns
        return tuple(sizes[axis] for axis in self.axes(name))

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that may differ between launches of one kernel, by name."""
        found = {
            name: getattr(self, name) for name in ("batch", "num_queries", "num_keys", "num_heads", "num_heads_key")
        }
        found |= {} if self.pool is None else dict(zip(("page_size", "num_pages"), reversed(self.pool), strict=True))
        return found | ({} if self.tokens is None else dict(zip(("tokens_q", "tokens_k"), self.tokens, strict=True)))

    @property
    def range_edges(self) -> tuple[int, int, int]:
        """Shape that the starts and ends of ranges of keys broadcast to: (batch, num_heads, num_queries)."""
        return self.batch, self.num_heads, self.num_queries

    def visible_blocks(self, block_size: tuple[int, int]) -> tuple[int, int, int, int]:
        """Shape that visible blocks broadcast to: (batch, num_heads, blocks of queries, blocks of keys)."""
        rows, columns = block_size
        return self.batch, self.num_heads, ceil_div(self.num_queries, rows), ceil_div(self.num_keys, columns)

    @property
    def bias(self) -> tuple[int, int, int, int]:
        """Shape that a bias broadcasts to: (batch, num_heads, num_queries, num_keys)."""
        return self.batch, self.num_heads, self.num_queries, self.num_keys


@dataclass(frozen=True, slots=True)
class Tensor:
    """Layout of one operand in memory.

    shape, strides: in elements
    dtype: name of the element type
    alignment: of the address, in bytes, up to 16
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    alignment: int = ROW_ALIGNMENT_BYTES

    @staticmethod
    def contiguous(shape: tuple[int, ...], dtype: str) -> Tensor:
        """Returns a dense row-major tensor."""
        strides = [1] * len(shape)
        for axis in range(len(shape) - 2, -1, -1):
            strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
        return Tensor(tuple(shape), tuple(strides), dtype)

    @property
    def steps(self) -> tuple[int, ...]:
        """The strides, with 0 for an axis of size 1, whose stride is never used."""
        return tuple(0 if size == 1 else stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def is_contiguous(self) -> bool:
        """Whether the tensor is dense and row-major."""
        return 0 in self.shape or self.steps == Tensor.contiguous(self.shape, self.dtype).steps

    @property
    def vector_bytes(self) -> int:
        """Bytes of one load of a row: the widest power of two, up to 16, that divides address, strides and row.

        It is one element when the last axis is not contiguous.
        """
        item = OPERAND_BYTES[self.dtype]
        if self.shape[-1] > 1 and self.strides[-1] != 1:
            return item
        parts = (self.alignment, *(step * item for step in self.steps[:-1]), self.shape[-1] * item)
        return math.gcd(ROW_ALIGNMENT_BYTES, *parts)


@dataclass(frozen=True, slots=True)
class Sequences:
    """The variable-length layout.

    Sequence b has the query rows [cu_seqlens_q[b], cu_seqlens_q[b + 1]) and the key rows [cu_seqlens_k[b],
    cu_seqlens_k[b + 1]). Both arrays are int32 (count + 1,) on the device.

    count: number of sequences
    max_seqlen_q, max_seqlen_k: length of the longest sequence, or more
    seqused_k: whether an int32 array (count,) says how many of its keys each sequence uses
    """

    count: int
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_k: bool = False
