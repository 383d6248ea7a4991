"""Problem: what to compute, in shapes, strides, dtype, mask and scale; knows every reason to refuse."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.masks import Full, Mask
from cutlass_py_attn.parts.integers import round_up

ITEM_BYTES: dict[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4}
SHORT_NAMES: dict[str, str] = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
DIRECTIONS = ("forward", "backward")
ROW_ALIGNMENT_BYTES = 16
MAX_GRID_YZ = 65535
MAX_LENGTH = 2**31 - 2**16
HEAD_DIM_MULTIPLE = 8
MAX_HEAD_DIM = 128
LSE_PADDING = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """The six sizes of an attention problem; `head_dim_value` is V's and O's."""

    batch: int
    num_queries: int
    num_keys: int
    num_heads: int
    head_dim: int
    head_dim_value: int

    @property
    def logsumexp(self) -> tuple[int, int, int]:
        """[batch, num_heads, num_queries rounded up to a multiple of 32]."""
        return self.batch, self.num_heads, round_up(self.num_queries, LSE_PADDING)

    def of(self, name: str) -> tuple[int, int, int, int]:
        """BMHK shape of tensor `name` (query, grad_key, ...)."""
        role = name.removeprefix("grad_")
        rows = self.num_keys if role in ("key", "value") else self.num_queries
        columns = self.head_dim if role in ("query", "key") else self.head_dim_value
        return self.batch, rows, self.num_heads, columns


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where one operand lies: BMHK shape and strides in elements; `alignment` of its address in bytes (up to 16)."""

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


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention pass. Tensors are [batch, seqlen, heads, head_dim] by shape and strides.

    direction: "forward" or "backward". scale: None means 1/sqrt(head_dim).
    deterministic: the query gradient is bitwise repeatable. num_splits_key: blocks that share one
    (batch, head) in the backward; None lets the plan choose.
    The backward reads output and logsumexp and writes grad_query, grad_key, grad_value.
    logsumexp is float32 [batch, num_heads, ceil32(num_queries)], contiguous.
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
    mask: Mask = field(default_factory=Full)
    scale: float | None = None
    deterministic: bool = False
    num_splits_key: int | None = None

    @staticmethod
    def dense(direction: str, shape: Shape, dtype: str, mask: Mask | None = None) -> Problem:
        """A problem whose tensors are all contiguous; change the rest with dataclasses.replace."""

        def tensor(name: str) -> Tensor:
            return Tensor.contiguous(shape.of(name), dtype)

        operands = Problem(
            direction, tensor("query"), tensor("key"), tensor("value"), tensor("output"), mask=mask or Full()
        )
        if direction != "backward":
            return operands
        gradients = ("grad_output", "grad_query", "grad_key", "grad_value")
        return operands.replace(**{name: tensor(name) for name in gradients})

    @property
    def shape(self) -> Shape:
        """The six sizes, read from query, key and value."""
        batch, num_queries, num_heads, head_dim = self.query.shape
        return Shape(batch, num_queries, self.key.shape[1], num_heads, head_dim, self.value.shape[3])

    @property
    def dtype(self) -> str:
        """Element type of all tensors except logsumexp."""
        return self.query.dtype

    @property
    def scale_value(self) -> float:
        """The factor of Q K^T: `scale`, or 1/sqrt(head_dim)."""
        return 1.0 / math.sqrt(max(self.query.shape[-1], 1)) if self.scale is None else float(self.scale)

    @property
    def is_empty(self) -> bool:
        """Nothing to launch: some of batch, heads, queries or keys is zero."""
        sizes = self.shape
        return 0 in (sizes.batch, sizes.num_heads, sizes.num_queries, sizes.num_keys)

    @property
    def flops(self) -> int:
        """2 B H Mq Mk (D + Dv), half with a causal mask, 2.5 times that for the backward."""
        s = self.shape
        forward = 2 * s.batch * s.num_heads * s.num_queries * s.num_keys * (s.head_dim + s.head_dim_value)
        forward //= 2 if self.mask.bounded else 1
        return forward if self.direction == "forward" else forward * 5 // 2

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that this direction reads or writes, by name."""
        names = ("query", "key", "value", "output", "grad_output", "grad_query", "grad_key", "grad_value")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    def replace(self, **changes: object) -> Problem:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def reasons(self) -> list[str]:
        """Every objection to this problem: what was given, what is allowed, what to do. Empty when supported."""
        ranks = list(_rank_objections(self))
        if ranks:
            return ranks
        return [*_size_objections(self), *_tensor_objections(self), *_option_objections(self)]

    def check(self) -> None:
        """Raise NotSupported with every objection, if there is one."""
        reasons = self.reasons()
        if reasons:
            raise NotSupported(reasons)


def _rank_objections(problem: Problem) -> Iterator[str]:
    if problem.direction not in DIRECTIONS:
        yield f"direction = {problem.direction!r}: must be one of {', '.join(DIRECTIONS)}"
    needed = ("grad_output", "grad_query", "grad_key", "grad_value") if problem.direction == "backward" else ()
    for name in needed:
        if getattr(problem, name) is None:
            yield f"{name} is missing: the backward needs it; pass a tensor of the matching BMHK shape"
    for name, tensor in problem.tensors().items():
        if len(tensor.shape) != 4 or len(tensor.strides) != 4:
            yield (
                f"{name} has shape {tensor.shape} and strides {tensor.strides}: must be 4-D "
                "[batch, seqlen, heads, head_dim]; add the missing axes with size 1"
            )


def _size_objections(problem: Problem) -> Iterator[str]:
    shape = problem.shape
    for name, tensor in problem.tensors().items():
        if tensor.shape != shape.of(name):
            yield (
                f"{name} has shape {tensor.shape}: must be {shape.of(name)} to match query {problem.query.shape}, "
                f"key {problem.key.shape} and value {problem.value.shape}"
            )
    for label, size in (("head_dim", shape.head_dim), ("head_dim_value", shape.head_dim_value)):
        if size <= 0 or size % HEAD_DIM_MULTIPLE or size > MAX_HEAD_DIM:
            allowed = f"must be a multiple of {HEAD_DIM_MULTIPLE} from {HEAD_DIM_MULTIPLE} to {MAX_HEAD_DIM}"
            padded = min(max(round_up(max(size, 1), HEAD_DIM_MULTIPLE), HEAD_DIM_MULTIPLE), MAX_HEAD_DIM)
            remedy = f"pad to {padded} columns with zeros" if size <= MAX_HEAD_DIM else "split the head"
            yield f"{label} = {size}: {allowed}; {remedy}"
    for label, size in (("batch", shape.batch), ("num_heads", shape.num_heads)):
        if size > MAX_GRID_YZ:
            yield f"{label} = {size}: must be at most {MAX_GRID_YZ} (grid limit); call once per slice"
    for label, size in (("num_queries", shape.num_queries), ("num_keys", shape.num_keys)):
        if size > MAX_LENGTH:
            yield f"{label} = {size}: must be at most {MAX_LENGTH}; split the sequence"


def _tensor_objections(problem: Problem) -> Iterator[str]:
    for name, tensor in problem.tensors().items():
        if tensor.dtype not in ITEM_BYTES:
            yield f"{name} has dtype {tensor.dtype}: must be one of {', '.join(ITEM_BYTES)}; cast it"
            continue
        if tensor.dtype != problem.dtype:
            yield f"{name} has dtype {tensor.dtype} but query has {problem.dtype}: all must agree; cast one of them"
        if tensor.shape[3] > 1 and tensor.strides[3] != 1:
            yield f"{name} has last stride {tensor.strides[3]}: must be 1; make the head dimension contiguous"
        multiple = ROW_ALIGNMENT_BYTES // ITEM_BYTES[tensor.dtype]
        for axis, label in ((0, "batch"), (1, "row"), (2, "head")):
            if tensor.shape[axis] > 1 and tensor.strides[axis] % multiple:
                yield (
                    f"{name} has {label} stride {tensor.strides[axis]}: must be a multiple of {multiple} elements "
                    f"({ROW_ALIGNMENT_BYTES} bytes); copy it to a padded or contiguous buffer"
                )
            written = name.startswith("grad_") and name != "grad_output"
            written = written or (name == "output" and problem.direction == "forward")
            if written and tensor.shape[axis] > 1 and tensor.strides[axis] == 0:
                yield f"{name} has {label} stride 0: an output must not overlap itself; allocate it in full"
        if tensor.alignment < ROW_ALIGNMENT_BYTES:
            yield (
                f"{name} starts at an address that is only {tensor.alignment}-byte aligned: must be "
                f"{ROW_ALIGNMENT_BYTES}-byte aligned; copy it or slice at a multiple of {multiple} elements"
            )


def _option_objections(problem: Problem) -> Iterator[str]:
    if problem.scale is not None and not math.isfinite(problem.scale):
        yield f"scale = {problem.scale}: must be a finite number, or None for 1/sqrt(head_dim)"
    splits = problem.num_splits_key
    if splits is None:
        return
    if problem.direction == "forward":
        yield f"num_splits_key = {splits}: only the backward splits keys; leave it None"
    elif splits < 1:
        yield f"num_splits_key = {splits}: must be at least 1, or None to let the plan choose"
    elif splits > 1 and problem.deterministic:
        yield (
            f"num_splits_key = {splits} with deterministic: must be 1, or None for one block a key tile: with "
            "another number a block would wait for one that starts after it"
        )
