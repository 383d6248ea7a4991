"""Problem: what to compute, in shapes, strides, dtype, mask, scale and score terms; `checks` holds what is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.masks import Full, Mask
from cutlass_py_attn.parts.integers import round_up

ITEM_BYTES: dict[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4}
F32_BYTES = ITEM_BYTES["float32"]
WORD_BYTES = 4  # of an int32, or of whatever else a register holds
SHORT_NAMES: dict[str, str] = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
DIRECTIONS = ("forward", "backward")
ROW_ALIGNMENT_BYTES = 16  # the widest load; narrower ones are planned where rows are aligned to less
LSE_PADDING = 32

OPERANDS = ("query", "key", "value")
BMHK = (*OPERANDS, "output", "grad_output", "grad_query", "grad_key", "grad_value")
BIASES = ("bias", "grad_bias")
VECTORS = ("alibi_slopes", "sinks", "grad_sinks")


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of an attention problem; `head_dim_value` is V's and O's.

    num_heads_key: heads of key and value, a divisor of num_heads (GQA, MQA); 0 means num_heads.
    tokens: (queries, keys) of all sequences together in the variable-length layout, where tensors are
    [1, tokens, heads, head_dim], batch counts sequences, and num_queries and num_keys are the longest of them.
    """

    batch: int
    num_queries: int
    num_keys: int
    num_heads: int
    head_dim: int
    head_dim_value: int
    num_heads_key: int = 0
    tokens: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_heads_key", self.num_heads_key or self.num_heads)

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.num_heads // max(self.num_heads_key, 1)

    @property
    def logsumexp(self) -> tuple[int, int, int]:
        """[batch, num_heads, num_queries rounded up to a multiple of 32]."""
        return self.batch, self.num_heads, round_up(self.num_queries, LSE_PADDING)

    def of(self, name: str) -> tuple[int, int, int, int]:
        """BMHK shape of tensor `name` (query, grad_key, ...)."""
        role = name.removeprefix("grad_")
        of_key = role in ("key", "value")
        rows = self.num_keys if of_key else self.num_queries
        heads = self.num_heads_key if of_key else self.num_heads
        columns = self.head_dim if role in ("query", "key") else self.head_dim_value
        if self.tokens is not None:
            return 1, self.tokens[of_key], heads, columns
        return self.batch, rows, heads, columns

    @property
    def bias(self) -> tuple[int, int, int, int]:
        """[batch, num_heads, num_queries, num_keys]: what a bias broadcasts to."""
        return self.batch, self.num_heads, self.num_queries, self.num_keys


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where one operand lies: shape and strides in elements; `alignment` of its address in bytes (up to 16)."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    alignment: int = ROW_ALIGNMENT_BYTES

    @staticmethod
    def contiguous(shape: tuple[int, ...], dtype: str) -> Tensor:
        """A dense row-major tensor."""
        strides = [1] * len(shape)
        for axis in range(len(shape) - 2, -1, -1):
            strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
        return Tensor(tuple(shape), tuple(strides), dtype)

    @property
    def steps(self) -> tuple[int, ...]:
        """The strides, with 0 for an axis of size 1: nothing ever steps along it."""
        return tuple(0 if size == 1 else stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def access_bytes(self) -> int:
        """The widest power of two, up to 16 bytes, that every row and the last axis is a multiple of; one element
        where the last axis is not contiguous."""
        item = ITEM_BYTES[self.dtype]
        if self.shape[-1] > 1 and self.strides[-1] != 1:
            return item
        parts = (self.alignment, *(step * item for step in self.steps[:-1]), self.shape[-1] * item)
        return math.gcd(ROW_ALIGNMENT_BYTES, *parts)


@dataclass(frozen=True, slots=True)
class Sequences:
    """The variable-length layout: sequence b has the queries [cu_seqlens_q[b], cu_seqlens_q[b + 1]) and the keys
    [cu_seqlens_k[b], cu_seqlens_k[b + 1]), int32 arrays of count + 1 on the device.

    max_seqlen_q, max_seqlen_k: at least the longest sequence. seqused_k: an int32 array says how many of its
    keys each sequence uses.
    """

    count: int
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_k: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention pass. Tensors are [batch, seqlen, heads, head_dim] by shape and strides.

    direction: "forward" or "backward". scale: None means 1/sqrt(head_dim).
    Scores are softcap * tanh(scale Q K^T / softcap) (softcap 0: scale Q K^T), plus
    -alibi_slopes * |i + num_keys - num_queries - j|, plus bias, then masked.
    bias: [batch, heads, queries, keys], any axis of size 1 or stride 0 broadcast; grad_bias has the bias's shape, and
    is summed over the axes in which that is 1. alibi_slopes: float32 [heads] or [batch, heads].
    sinks: float32 [heads], logits that join every row's denominator; grad_sinks likewise.
    dropout_p: probability of a weight being dropped; philox_on_device: seed and offset are int64 in device memory.
    sequences: the variable-length layout.
    deterministic: the query gradient is bitwise repeatable. num_splits_key: blocks that share one
    (batch, head) in the backward; None lets the plan choose.
    The backward reads output and logsumexp and writes those of grad_query, grad_key, grad_value, grad_bias and
    grad_sinks that are given. logsumexp is float32 [batch, num_heads, ceil32(num_queries)], contiguous.
    """

    direction: str
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    grad_output: Tensor | None = None
    grad_query: Tensor | None = None
    grad_key: Tensor | None = None
    grad_value: Tensor | None = None
    bias: Tensor | None = None
    grad_bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    grad_sinks: Tensor | None = None
    mask: Mask = field(default_factory=Full)
    scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    philox_on_device: bool = False
    sequences: Sequences | None = None
    deterministic: bool = False
    num_splits_key: int | None = None

    @staticmethod
    def dense(direction: str, shape: Shape, dtype: str, mask: Mask | None = None) -> Problem:
        """A problem whose tensors are all contiguous; change the rest with dataclasses.replace.

        A shape with `tokens` gives the variable-length layout.
        """

        def tensor(name: str) -> Tensor:
            return Tensor.contiguous(shape.of(name), dtype)

        query, key, value, output = (tensor(name) for name in (*OPERANDS, "output"))
        operands = Problem(direction, query, key, value, output, mask=mask or Full())
        if shape.tokens is not None:
            operands = operands.replace(sequences=Sequences(shape.batch, shape.num_queries, shape.num_keys))
        if direction != "backward":
            return operands
        gradients = ("grad_output", "grad_query", "grad_key", "grad_value")
        return operands.replace(**{name: tensor(name) for name in gradients})

    @property
    def shape(self) -> Shape:
        """The sizes, read from query, key, value and the sequences."""
        batch, num_queries, num_heads, head_dim = self.query.shape
        num_keys, num_heads_key, head_dim_value = self.key.shape[1], self.key.shape[2], self.value.shape[3]
        given = self.sequences
        if given is None:
            return Shape(batch, num_queries, num_keys, num_heads, head_dim, head_dim_value, num_heads_key)
        lengths = given.count, given.max_seqlen_q, given.max_seqlen_k
        return Shape(*lengths, num_heads, head_dim, head_dim_value, num_heads_key, (num_queries, num_keys))

    @property
    def dtype(self) -> str:
        """Element type of all tensors except logsumexp, alibi_slopes and sinks."""
        return self.query.dtype

    @property
    def scale_value(self) -> float:
        """The factor of Q K^T: `scale`, or 1/sqrt(head_dim)."""
        return 1.0 / math.sqrt(max(self.query.shape[-1], 1)) if self.scale is None else float(self.scale)

    @property
    def is_empty(self) -> bool:
        """Nothing to launch: there are no sequences, heads, queries or keys.

        A forward with sinks is launched without keys too, for they make a logsumexp; so is one of several lengths,
        for only the kernel knows where the rows of each sequence end.
        """
        sizes, forward = self.shape, self.direction == "forward"
        runs_without_keys = forward and (self.sinks is not None or self.sequences is not None)
        return 0 in (sizes.batch, sizes.num_heads, sizes.num_queries, 1 if runs_without_keys else sizes.num_keys)

    @property
    def features(self) -> tuple[str, ...]:
        """What the kernels do beside masked attention, in alphabetical order."""
        present = {
            "alibi": self.alibi_slopes is not None,
            "bias": self.bias is not None,
            "dropout": self.dropout_p != 0,
            "grouped": self.shape.group > 1,
            "seqused": self.sequences is not None and self.sequences.seqused_k,
            "sinks": self.sinks is not None,
            "softcap": self.softcap != 0,
            "varlen": self.sequences is not None,
        }
        return tuple(name for name, is_present in present.items() if is_present)

    @property
    def gradients(self) -> tuple[str, ...]:
        """Which gradients the backward writes: query, key, value, bias, sinks."""
        names = (*OPERANDS, "bias", "sinks")
        return tuple(name for name in names if getattr(self, f"grad_{name}") is not None)

    @property
    def flops(self) -> int:
        """2 B H Mq Mk (D + Dv), half with a causal mask, 2.5 times that for the backward.

        With a window the visible pairs count; in the variable-length layout every sequence as the longest.
        """
        s = self.shape
        pairs = s.num_queries * s.num_keys
        if self.mask.form == "local":
            pairs = self.mask.pairs(s.num_queries, s.num_keys)
        forward = 2 * s.batch * s.num_heads * pairs * (s.head_dim + s.head_dim_value)
        forward //= 2 if self.mask.form == "causal" else 1
        return forward if self.direction == "forward" else forward * 5 // 2

    def tensors(self) -> dict[str, Tensor]:
        """Every strided tensor that this direction reads or writes, by name."""
        names = (*BMHK, *BIASES)
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    def vectors(self) -> dict[str, Tensor]:
        """The small contiguous arrays of this problem, by name."""
        found = {name: tensor for name in VECTORS if (tensor := getattr(self, name)) is not None}
        if self.sequences is not None:
            bounds = Tensor((self.sequences.count + 1,), (1,), "int32", 4)
            found |= {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
            if self.sequences.seqused_k:
                found["seqused_k"] = Tensor((self.sequences.count,), (1,), "int32", 4)
        if self.philox_on_device:
            found |= {name: Tensor((1,), (1,), "int64", 8) for name in ("philox_seed", "philox_offset")}
        return found

    def replace(self, **changes: object) -> Problem:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def reasons(self) -> list[str]:
        """Every objection to this problem: what was given, what is allowed, what to do. Empty when supported."""
        from cutlass_py_attn.checks import objections

        return objections(self)

    def check(self) -> None:
        """Raise NotSupported with every objection, if there is one."""
        reasons = self.reasons()
        if reasons:
            raise NotSupported(reasons)
