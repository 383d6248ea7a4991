"""Problem: what one attention pass computes: tensors, mask, scale and score terms. validation.py refuses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem import masks, operands
from cutlass_py_attn.problem.masks import RANGES, Form, Full, Mask
from cutlass_py_attn.problem.operands import Operand
from cutlass_py_attn.problem.paging import FEATURE, Pages
from cutlass_py_attn.problem.quantization import ROW, SCALES, granularity, output_dtype
from cutlass_py_attn.problem.scalars import SCALARS, with_python_numbers
from cutlass_py_attn.problem.tensors import (
    BIASES,
    BMHK,
    E4M3,
    F32_BYTES,
    FLOAT8,
    KEY_ROPE,
    MASK_ARRAYS,
    OPERANDS,
    RANGE_EDGES,
    VISIBLE_BLOCKS,
    WORD_BYTES,
    Sequences,
    Shape,
    Tensor,
)
from cutlass_py_attn.problem.validation import TENSORS, refusals, score_terms_refusals, shape_refusals
from cutlass_py_attn.refusals import Refusal
from cutlass_py_attn.score_terms import registry


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention pass. Tensors are (batch, seqlen, num_heads, head_dim) by shape and strides.

    Scores are softcap * tanh(scale Q K^T / softcap) (softcap 0: scale Q K^T), plus bias, minus
    alibi_slopes * |i + num_keys - num_queries - j|, plus what registered score terms add, then masked.

    direction: "forward" or "backward"
    bias: (batch, num_heads, num_queries, num_keys) of the operands' dtype; an axis of size 1 or stride 0 broadcasts
    grad_bias: gradient of the bias, summed over the axes in which its size is 1
    alibi_slopes: float32 (num_heads,) or (batch, num_heads)
    sinks, grad_sinks: float32 (num_heads,); logits that join the denominator of every row, and their gradient
    scale: factor of Q K^T; None for 1/sqrt(head_dim)
    softcap: bound of the scores; 0 for none
    key_start, key_end: int32 (batch, num_heads, num_queries); the first key that each query sees, and one past its
        last. An axis of size 1 before the last is that of every sequence or head. Kernels cut ranges to the keys, and
        to the mask; one whose start is at or behind its end has no key. None for no ranges
    visible_blocks: bool, or uint8 of zeros and ones, (batch, num_heads_key, blocks of queries, blocks of keys); whether
        a query of a block may see a key of a block. Both first sizes may be 1; in a forward they may be those of every
        query head. None for all blocks
    block_size: queries and keys of a block
    mask_program: text of the MaskProgram that hides keys as well; None for none
    mask_scalars: the integers that it takes, an int32 each
    mask_array_0 to mask_array_3: the arrays that it takes, of bool or uint8, int32 or float32
    dropout_p: probability that a weight is dropped
    philox_on_device: whether dropout's seed and offset are int64 in device memory
    sequences: the variable-length layout; None when all sequences have the length of the tensors
    pages: the paged layout, in which key and value are pools (pages, page_size, num_heads_key, head_dim) and the
        lengths of key are in device memory; forward only. None for other layouts
    value_in_key: whether value is the first head_dim_value columns of key, in the same memory: a latent cache (MLA);
        forward only
    deterministic: whether the gradients of query, key and value have the same bits in every run
    num_splits_key: thread blocks that share one (batch, head) in the backward; None lets the planner choose
    score_terms: (name, array) of every term of `score_terms.register`, in alphabetical order
    query_scale, key_scale, value_scale: float32, of e4m3 codes (float8_e4m3fn, or uint8 for their bytes), whose numbers
        are code times scale: () or (1,), (num_heads_key,), or (batch, num_heads_key); of an e4m3 cache, whose query has
        16 bits, also a scale of each row, (pages, page_size, num_heads_key) or (batch, num_keys, num_heads_key). None
        for 1 and for other dtypes
    key_rope: the last columns of a latent cache whose first columns are e4m3 codes: (pages, page_size, num_heads_key,
        columns) or (batch, num_keys, num_heads_key, columns) in the dtype of query, which has the columns of key and
        then those of key_rope. key_scale then has a scale of each 128 columns of a row, (..., num_heads_key, tiles),
        and value none of its own. None for other problems

    The backward reads output and logsumexp, and writes those of grad_query, grad_key, grad_value, grad_bias and
    grad_sinks that are given. logsumexp is (batch, num_heads, ceil32(num_queries)) float32, contiguous. So is
    grad_logsumexp, the gradient of logsumexp; None if only the output has a gradient.

    Numbers may be those of NumPy or JAX, or 0-d arrays on the host: the fields hold Python numbers. A value of another
    kind is kept, and `check` refuses it.
    """

    direction: str
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    grad_output: Tensor | None = None
    grad_logsumexp: Tensor | None = None
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
    pages: Pages | None = None
    value_in_key: bool = False
    deterministic: bool = False
    num_splits_key: int | None = None
    score_terms: tuple[tuple[str, Tensor], ...] = ()
    query_scale: Tensor | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    key_rope: Tensor | None = None
    key_start: Tensor | None = None
    key_end: Tensor | None = None
    visible_blocks: Tensor | None = None
    block_size: tuple[int, int] = (128, 128)
    mask_program: str | None = None
    mask_scalars: tuple[int, ...] | None = None
    mask_array_0: Tensor | None = None
    mask_array_1: Tensor | None = None
    mask_array_2: Tensor | None = None
    mask_array_3: Tensor | None = None

    def __post_init__(self) -> None:
        for name, value in self._python_numbers():
            object.__setattr__(self, name, value)

    def _python_numbers(self) -> Iterator[tuple[str, Any]]:
        """Yields the fields with numbers of other libraries, with Python numbers in their place."""
        for name, scalar in SCALARS.items():
            yield name, scalar.normalised(getattr(self, name))
        for name in ("mask", "sequences", *TENSORS):
            value = getattr(self, name)
            if isinstance(value, (Tensor, Sequences)) or type(value) in masks.ALL.values():
                yield name, with_python_numbers(value)
        if isinstance(self.pages, Pages):
            pages = with_python_numbers(self.pages)
            is_tensor = isinstance(pages.page_table, Tensor)
            yield "pages", replace(pages, page_table=with_python_numbers(pages.page_table)) if is_tensor else pages
        if not any(score_terms_refusals(self.score_terms)):
            yield "score_terms", tuple((name, with_python_numbers(tensor)) for name, tensor in self.score_terms)

    @staticmethod
    def dense(direction: str, shape: Shape, dtype: str, mask: Mask | None = None) -> Problem:
        """Returns a problem whose tensors are all contiguous, without score terms; `replace` changes the rest.

        A shape with `tokens` gives the variable-length layout. NotSupported: `shape` is no Shape of ints.
        """
        if wrong := shape_refusals(shape):
            raise NotSupported(wrong)
        shape = with_python_numbers(shape)

        def tensor(name: str) -> Tensor:
            return Tensor.contiguous(shape.of(name), dtype)

        query, key, value = (tensor(name) for name in OPERANDS)
        output = Tensor.contiguous(shape.of("output"), output_dtype(dtype))
        found = Problem(direction, query, key, value, output, mask=Full() if mask is None else mask)
        if shape.tokens is not None:
            found = found.replace(sequences=Sequences(shape.batch, shape.num_queries, shape.num_keys))
        if direction != "backward":
            return found
        gradients = ("grad_output", "grad_query", "grad_key", "grad_value")
        return found.replace(**{name: tensor(name) for name in gradients})

    @property
    def shape(self) -> Shape:
        """Sizes of query, key, value and the sequences."""
        batch, num_queries, num_heads, head_dim = self.query.shape
        num_keys, num_heads_key, head_dim_value = self.key.shape[1], self.key.shape[2], self.value.shape[3]
        given, pages = self.sequences, self.pages
        if pages is not None:
            pool = self.key.shape[:2]
            most = pages.max_pages * pool[1] if pool[0] else 0
            queries = pages.max_seqlen_q if pages.cu_seqlens_q else num_queries
            lengths, tokens = (pages.batch, queries, most), (num_queries, 0) if pages.cu_seqlens_q else None
            return Shape(*lengths, num_heads, head_dim, head_dim_value, num_heads_key, tokens, (pool[0], pool[1]))
        if given is None:
            return Shape(batch, num_queries, num_keys, num_heads, head_dim, head_dim_value, num_heads_key)
        lengths = given.count, given.max_seqlen_q, given.max_seqlen_k
        return Shape(*lengths, num_heads, head_dim, head_dim_value, num_heads_key, (num_queries, num_keys))

    @property
    def form(self) -> Form:
        """Form of the mask in kernels."""
        if self.mask_program is not None:
            return Form(f"{RANGES} {self.mask_program}")
        return self.mask.form if self.key_start is None and self.visible_blocks is None else RANGES

    @property
    def dtype(self) -> str:
        """Element type of query, float8_e4m3fn for its bytes too, and of all tensors that have none of their own.

        logsumexp, alibi_slopes, sinks and the scales of e4m3 codes are float32. The output of e4m3 operands has 16
        bits, and key and value of an e4m3 cache have 8.
        """
        return FLOAT8 if self.query.dtype in E4M3 else self.query.dtype

    @property
    def scale_value(self) -> float:
        """Factor of Q K^T: `scale`, or 1/sqrt(head_dim)."""
        return 1.0 / math.sqrt(max(self.query.shape[-1], 1)) if self.scale is None else float(self.scale)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to launch: no sequences, heads, queries or keys.

        A forward with sinks is launched without keys too: a sink gives every row a logsumexp. So is a forward with
        variable lengths or pages: only the kernel knows where the rows of each sequence end.
        """
        sizes, forward = self.shape, self.direction == "forward"
        has_lengths = self.sequences is not None or self.pages is not None
        runs_without_keys = forward and (self.sinks is not None or has_lengths)
        return 0 in (sizes.batch, sizes.num_heads, sizes.num_queries, 1 if runs_without_keys else sizes.num_keys)

    @property
    def has_ragged_rows(self) -> bool:
        """Whether rows of query may belong to no sequence: no kernel writes their results."""
        return self.sequences is not None or (self.pages is not None and self.pages.cu_seqlens_q)

    @property
    def has_e4m3_cache(self) -> bool:
        """Whether key and value are e4m3 codes beside a query of 16 bits."""
        return self.key.dtype in E4M3 and self.query.dtype not in E4M3

    @property
    def scales(self) -> dict[str, Tensor]:
        """The scales of e4m3 codes that are given, by name."""
        return {name: scale for name in SCALES if (scale := getattr(self, name)) is not None}

    @property
    def features(self) -> tuple[str, ...]:
        """Score terms and layouts of the problem, in alphabetical order; a kernel without one has no code for it."""
        layouts = {
            registry.FLOAT16_OUTPUT: self.dtype == FLOAT8 and self.output.dtype == "float16",
            "grouped": self.shape.group > 1,
            registry.KV8: self.has_e4m3_cache,
            registry.KV8_TILE: self.key_rope is not None,
            registry.KV8_ROW: any(granularity(scale) == ROW for scale in self.scales.values()),
            FEATURE: self.pages is not None,
            "seqused": self.sequences is not None and self.sequences.seqused_k,
            "varlen": self.has_ragged_rows,
        }
        found = [name for name, is_present in layouts.items() if is_present]
        return tuple(sorted([*found, *(term.name for term in registry.present(self))]))

    @property
    def gradients(self) -> tuple[str, ...]:
        """Operands whose gradients the backward writes: of query, key, value, bias, sinks."""
        names = (*OPERANDS, *registry.gradients())
        return tuple(name for name in names if getattr(self, f"grad_{name}") is not None)

    @property
    def flops(self) -> int:
        """2 B H Mq Mk (D + Dv), half of it with a causal mask, 2.5 times that for the backward.

        With a window only the visible pairs count. With variable lengths or pages every sequence counts as the longest
        one.
        """
        s = self.shape
        pairs = s.num_queries * s.num_keys
        if self.mask.form.has_left:
            pairs = self.mask.pairs(s.num_queries, s.num_keys)
        forward = 2 * s.batch * s.num_heads * pairs * (s.head_dim + s.head_dim_value)
        forward //= 2 if self.mask.form.grows else 1
        return forward if self.direction == "forward" else forward * 5 // 2

    def tensors(self) -> dict[str, Tensor]:
        """Returns every strided tensor that this direction reads or writes, by name."""
        names = (*BMHK, KEY_ROPE, *BIASES)
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    def vectors(self) -> dict[str, Tensor]:
        """Returns the small contiguous arrays of this problem, by name."""
        found = {name: tensor for term in registry.terms() for name, tensor in term.vectors(self).items()}
        if self.sequences is not None:
            bounds = Tensor((self.sequences.count + 1,), (1,), "int32", 4)
            found |= {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
            if self.sequences.seqused_k:
                found["seqused_k"] = Tensor((self.sequences.count,), (1,), "int32", 4)
        found |= {name: replace(scale, alignment=F32_BYTES) for name, scale in self.scales.items()}
        if self.visible_blocks is not None:
            found[VISIBLE_BLOCKS] = replace(self.visible_blocks, alignment=1)
        words = ((name, getattr(self, name)) for name in (*RANGE_EDGES, *MASK_ARRAYS))
        found |= {
            name: replace(array, alignment=1 if array.dtype in ("bool", "uint8") else WORD_BYTES)
            for name, array in words
            if array is not None
        }
        if self.grad_logsumexp is not None:
            found["grad_logsumexp"] = self.grad_logsumexp
        if self.pages is not None:
            found |= self.pages.arrays()
        scalars = [name for term in registry.terms() for name in term.device_scalars(self)]
        return found | {name: Tensor((1,), (1,), "int64", 8) for name in scalars}

    def operands(self) -> dict[str, Operand]:
        """Returns every array by name, with what its axes count, in the order in which a launch names them."""
        return operands.of_problem(self)

    def with_value_in_key(self) -> Problem:
        """Returns the problem with the first head_dim_value columns of key as value."""
        value = replace(self.key, shape=(*self.key.shape[:3], self.value.shape[3]))
        return self.replace(value=value, value_in_key=True)

    def replace(self, **changes: object) -> Problem:
        """Returns a copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def refusals(self) -> list[Refusal]:
        """Returns every reason to refuse this problem: what was given, what is allowed, what to do."""
        return refusals(self)

    def reasons(self) -> list[str]:
        """Returns `refusals` as sentences."""
        return [*map(str, self.refusals())]

    def check(self) -> None:
        """Raises NotSupported with every reason to refuse this problem, if there is one."""
        if wrong := self.refusals():
            raise NotSupported(wrong)
