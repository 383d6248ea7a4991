"""MergeProblem: two partial results of attention over different keys, joined by their logsumexps.

Without logsumexps the two are added, as partial gradients are. A running total of many parts is float32 beside parts of
16 bits, so that it is rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar, Final

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.integers import round_up
from cutlass_py_attn.problem.operands import LOGSUMEXP, Operand, named_strides
from cutlass_py_attn.problem.scalars import integer_of
from cutlass_py_attn.problem.tensors import ITEM_BYTES, LSE_PADDING, ROW_STRIDES, Tensor
from cutlass_py_attn.problem.validation import memory_refusals, stride_refusals, tensor_refusals
from cutlass_py_attn.refusals import Refusal, one_of, refuse

MAX_HEAD_DIM: Final = 1024
MAX_ROWS: Final = 2**31 - 2**10  # counted in 32 bits up to the end of the last block
OUTPUTS: Final = ("output_a", "output_b", "output")
LOGSUMEXPS: Final = ("logsumexp_a", "logsumexp_b")


@dataclass(frozen=True, slots=True)
class MergeProblem:
    """The layouts of one `merge_states`, or of one sum.

    output_a, output_b, output: (batch, num_queries, num_heads, head_dim_value), of one dtype: float16, bfloat16 or
        float32; packed (1, tokens, num_heads, head_dim_value). output_a may be a float32 total beside an output_b of 16
        bits; output is then float32, or of output_b's dtype.
    logsumexp_a, logsumexp_b: (batch, num_heads, ceil32(num_queries)) float32, contiguous; packed
        (count, num_heads, ceil32(max_seqlen_q)). The result has the same shape. None, both, for output = output_a +
        output_b: output_a is float32 then, and nothing is packed.
    cu_seqlens_q: (count + 1,) int32 if the outputs are packed; else None
    max_seqlen_q: length of the longest sequence, or more, if the outputs are packed; else None
    """

    output_a: Tensor
    output_b: Tensor
    output: Tensor
    logsumexp_a: Tensor | None = None
    logsumexp_b: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    max_seqlen_q: int | None = None

    direction: ClassVar = "merge"

    @staticmethod
    def dense(shape: tuple[int, int, int, int], dtype: str) -> MergeProblem:
        """Returns the problem of dense outputs (batch, num_queries, num_heads, head_dim_value)."""
        output = Tensor.contiguous(shape, dtype)
        logsumexp = Tensor.contiguous((shape[0], shape[2], round_up(shape[1], LSE_PADDING)), "float32")
        return MergeProblem(output, output, output, logsumexp, logsumexp)

    @staticmethod
    def packed(count: int, max_seqlen_q: int, shape: tuple[int, int, int], dtype: str) -> MergeProblem:
        """Returns the problem of `count` sequences in packed outputs (tokens, num_heads, head_dim_value)."""
        output = Tensor.contiguous((1, *shape), dtype)
        logsumexp = Tensor.contiguous((count, shape[1], round_up(max_seqlen_q, LSE_PADDING)), "float32")
        bounds = Tensor.contiguous((count + 1,), "int32")
        return MergeProblem(output, output, output, logsumexp, logsumexp, bounds, max_seqlen_q)

    @staticmethod
    def into_total(shape: tuple[int, int, int, int], dtype: str, is_sum: bool, is_last: bool) -> MergeProblem:
        """Returns the problem of a float32 total and a part of `dtype`, both dense; the last result has `dtype`."""
        total, part = Tensor.contiguous(shape, "float32"), Tensor.contiguous(shape, dtype)
        logsumexp = Tensor.contiguous((shape[0], shape[2], round_up(shape[1], LSE_PADDING)), "float32")
        logsumexps = (None, None) if is_sum else (logsumexp, logsumexp)
        return MergeProblem(total, part, part if is_last else total, *logsumexps)

    @property
    def is_sum(self) -> bool:
        """Whether the rows are added."""
        return self.logsumexp_a is None

    @property
    def is_packed(self) -> bool:
        """Whether the rows of several sequences follow each other in the outputs."""
        return self.cu_seqlens_q is not None

    @property
    def batch(self) -> int:
        """Batch size; the number of sequences if the outputs are packed."""
        return self.output_a.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def num_queries(self) -> int:
        """Rows of a batch, or of the longest sequence."""
        return self.output_a.shape[1] if self.max_seqlen_q is None else self.max_seqlen_q

    @property
    def num_rows(self) -> int:
        """Rows of all batches and heads, those beyond the end of a sequence included."""
        return self.batch * self.num_queries * self.output_a.shape[2]

    @property
    def is_empty(self) -> bool:
        """Whether there is no row to merge."""
        return self.num_rows == 0

    @property
    def logsumexp_shape(self) -> tuple[int, int, int]:
        """Shape of each logsumexp."""
        return self.batch, self.output_a.shape[2], round_up(self.num_queries, LSE_PADDING)

    @property
    def dtype(self) -> str:
        """Element type of output_a."""
        return self.output_a.dtype

    @property
    def features(self) -> tuple[str, ...]:
        """("varlen",) if the outputs are packed."""
        return ("varlen",) if self.is_packed else ()

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that may differ between launches of one kernel, by name."""
        _, tokens, heads, _ = self.output_a.shape
        packed = {"tokens_q": tokens} if self.is_packed else {}
        return {"batch": self.batch, "num_queries": self.num_queries, "num_heads": heads, **packed}

    def operands(self) -> dict[str, Operand]:
        """Returns every array of a problem without objections by name, the logsumexp of the result too."""
        rows = ("packed", "tokens_q") if self.is_packed else ("batch", "num_queries")
        axes: dict[str, tuple[str, ...]] = dict.fromkeys(OUTPUTS, (*rows, "num_heads", "head_dim_value"))
        axes |= {**dict.fromkeys((*LOGSUMEXPS, "logsumexp"), LOGSUMEXP), "cu_seqlens_q": ("bounds",)}
        arrays = self.tensors()
        if not self.is_sum:
            arrays["logsumexp"] = Tensor.contiguous(self.logsumexp_shape, "float32")
        operands = {}
        for name in (name for name in axes if name in arrays):
            strides = named_strides(name, ROW_STRIDES, arrays[name].steps) if name in OUTPUTS else {}
            operands[name] = Operand(name, arrays[name], axes[name], strides, name in ("output", "logsumexp"))
        return operands

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that the problem has, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in found.items() if name != "max_seqlen_q" and tensor is not None}

    def refusals(self) -> list[Refusal]:
        """Returns every reason to refuse the problem: what was given, what is allowed, what to do."""
        wrong = [*_kinds(self)] or [*_ranks(self)]
        return wrong or [*_shapes(self), *_dtypes(self), *_memory(self)]

    def reasons(self) -> list[str]:
        """Returns `refusals` as sentences."""
        return [*map(str, self.refusals())]

    def check(self) -> None:
        """Raises NotSupported with every reason to refuse the problem, if there is one."""
        if refusals := self.refusals():
            raise NotSupported(refusals)


def _kinds(problem: MergeProblem) -> Iterator[Refusal]:
    for name in (*OUTPUTS, *LOGSUMEXPS, "cu_seqlens_q"):
        yield from tensor_refusals(name, getattr(problem, name), is_required=name in OUTPUTS)
    if (problem.logsumexp_a is None) != (problem.logsumexp_b is None):
        missing = "logsumexp_a" if problem.logsumexp_a is None else "logsumexp_b"
        yield refuse(missing, None, "must be a Tensor, or both None for a sum", "pass both, or neither")
    if problem.is_sum and problem.is_packed:
        rule = "must be None without logsumexps, for rows are added as they lie"
        yield refuse("cu_seqlens_q", problem.cu_seqlens_q, rule, "leave it out")
    longest = problem.max_seqlen_q
    if longest is not None and (integer_of(longest) is None or longest < 0):
        yield refuse("max_seqlen_q", longest, "must be an int of at least 0", "pass the longest sequence's length")
    if (problem.cu_seqlens_q is None) != (longest is None):
        missing, other = ("max_seqlen_q", "cu_seqlens_q") if longest is None else ("cu_seqlens_q", "max_seqlen_q")
        yield refuse(missing, None, f"must come with {other}, for packed outputs", "pass both, or neither")


def _ranks(problem: MergeProblem) -> Iterator[Refusal]:
    for name in OUTPUTS:
        shape = getattr(problem, name).shape
        if len(shape) != 4:
            rule = "must be (batch, num_queries, num_heads, head_dim_value)"
            yield refuse(f"{name}.shape", shape, rule, "add the missing axes with size 1")
    for name in LOGSUMEXPS if not problem.is_sum else ():
        shape = getattr(problem, name).shape
        if len(shape) != 3:
            rule = "must be (batch, num_heads, ceil32(num_queries)), as attention_forward returns it"
            yield refuse(f"{name}.shape", shape, rule, "pass that array")
    lengths = problem.cu_seqlens_q
    if lengths is not None and (len(lengths.shape) != 1 or lengths.shape[0] < 1):
        yield refuse("cu_seqlens_q.shape", lengths.shape, "must be (count + 1,)", "pass [0] for no sequence")
    yield from stride_refusals(problem.tensors())


def _shapes(problem: MergeProblem) -> Iterator[Refusal]:
    wanted = problem.output_a.shape
    for name in OUTPUTS[1:]:
        shape = getattr(problem, name).shape
        if shape != wanted:
            yield refuse(f"{name}.shape", shape, f"must be {wanted} as output_a", "reshape it")
    for name in LOGSUMEXPS if not problem.is_sum else ():
        shape = getattr(problem, name).shape
        if shape != problem.logsumexp_shape:
            rule = (
                f"must be {problem.logsumexp_shape}, (batch, num_heads, num_queries rounded up to a multiple of 32), "
                "as attention_forward returns it"
            )
            yield refuse(f"{name}.shape", shape, rule, "pass that")
    if problem.is_packed and wanted[0] != 1:
        remedy = "concatenate the sequences in one axis"
        yield refuse("batch of output_a", wanted[0], "must be 1 with cu_seqlens_q", remedy)
    if problem.is_packed and not 0 <= problem.num_queries <= wanted[1]:
        rule = f"must be from 0 to the {wanted[1]} tokens"
        yield refuse("max_seqlen_q", problem.num_queries, rule, "pass the longest sequence's length")
    if not 1 <= wanted[3] <= MAX_HEAD_DIM:
        yield refuse("head_dim_value", wanted[3], f"must be from 1 to {MAX_HEAD_DIM}", "merge slices of the columns")
    if problem.num_rows > MAX_ROWS:
        product = "batch * num_queries * num_heads"
        yield refuse(product, problem.num_rows, f"must be at most {MAX_ROWS}", "merge in several calls")


def _dtypes(problem: MergeProblem) -> Iterator[Refusal]:
    dtype, total, result = problem.output_b.dtype, problem.output_a.dtype, problem.output.dtype
    if dtype not in ITEM_BYTES:
        yield refuse("output_b.dtype", dtype, one_of(ITEM_BYTES), "cast it")
    if total != "float32" and (problem.is_sum or total != dtype):
        allowed = "float32" if problem.is_sum or dtype == "float32" else f"{dtype} as output_b, or float32"
        yield refuse("output_a.dtype", total, f"must be {allowed}", "cast it")
    elif result not in (total, dtype):
        rule = f"must be {' or '.join(dict.fromkeys((total, dtype)))}"
        yield refuse("output.dtype", result, rule, "pass another array")
    names = () if problem.is_sum else LOGSUMEXPS
    expected = dict.fromkeys(names, "float32") | ({"cu_seqlens_q": "int32"} if problem.is_packed else {})
    for name, wanted in expected.items():
        if getattr(problem, name).dtype != wanted:
            yield refuse(f"{name}.dtype", getattr(problem, name).dtype, f"must be {wanted}", "cast it")


def _memory(problem: MergeProblem) -> Iterator[Refusal]:
    for name, tensor in problem.tensors().items():
        axes = ROW_STRIDES if name in OUTPUTS else ()
        yield from memory_refusals(name, tensor, axes, is_written=name == "output")
