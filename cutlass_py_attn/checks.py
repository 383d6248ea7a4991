"""Checks: every reason to refuse a problem; each says what was given, what is allowed and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Real

from cutlass_py_attn import masks
from cutlass_py_attn.problem import (
    BIASES,
    BMHK,
    DIRECTIONS,
    ITEM_BYTES,
    Problem,
    Tensor,
)

MAX_LENGTH = 2**29  # a query's number, a key's number and a window's edge together stay in 32 bits
MAX_HEAD_DIM = 65536
MAX_FACTOR = 2.0**127  # of the scores; times log2(e) it still is a float32
MIN_SOFTCAP = 2.0**-126  # scores are divided by it in float32
_WRITTEN = ("grad_query", "grad_key", "grad_value", "grad_bias")


def objections(problem: Problem) -> list[str]:
    """All of them; those about ranks alone where a rank is wrong, for nothing else can be said then."""
    ranks = list(_rank_objections(problem))
    if ranks:
        return ranks
    return [
        *_size_objections(problem),
        *_bias_objections(problem),
        *_vector_objections(problem),
        *_tensor_objections(problem),
        *_option_objections(problem),
        *_gradient_objections(problem),
    ]


def _rank_objections(problem: Problem) -> Iterator[str]:
    for label in ("count", "max_seqlen_q", "max_seqlen_k") if problem.sequences is not None else ():
        number = getattr(problem.sequences, label)
        if not isinstance(number, int):
            yield f"sequences.{label} = {number!r}: must be an int; convert it"
    if problem.direction not in DIRECTIONS:
        yield f"direction = {problem.direction!r}: must be one of {', '.join(DIRECTIONS)}"
    if problem.direction == "backward" and problem.grad_output is None:
        yield "grad_output is missing: the backward needs it; pass a tensor of the matching BMHK shape"
    for name, tensor in problem.tensors().items():
        if len(tensor.shape) != 4 or len(tensor.strides) != 4:
            axes = "[batch, heads, queries, keys]" if name in BIASES else "[batch, seqlen, heads, head_dim]"
            yield (
                f"{name} has shape {tensor.shape} and strides {tensor.strides}: must be 4-D "
                f"{axes}; add the missing axes with size 1"
            )


def _size_objections(problem: Problem) -> Iterator[str]:
    shape = problem.shape
    if shape.num_heads_key and shape.num_heads % shape.num_heads_key:
        yield (
            f"query has {shape.num_heads} heads and key {shape.num_heads_key}: query's must be a multiple of key's; "
            "repeat or drop heads"
        )
    for name, tensor in problem.tensors().items():
        wanted = (problem.query.shape[0], *shape.of(name)[1:])
        if name in BMHK and tensor.shape != wanted:
            yield (
                f"{name} has shape {tensor.shape}: must be {wanted} to match query {problem.query.shape}, "
                f"key {problem.key.shape} and value {problem.value.shape}"
            )
    for label, size in (("head_dim", shape.head_dim), ("head_dim_value", shape.head_dim_value)):
        if not 1 <= size <= MAX_HEAD_DIM:
            remedy = "split the head" if size > MAX_HEAD_DIM else "give every row at least one element"
            yield f"{label} = {size}: must be from 1 to {MAX_HEAD_DIM}; {remedy}"
    for label in ("num_queries", "num_keys", "batch", "num_heads"):
        size = getattr(shape, label)
        if size > MAX_LENGTH:
            yield f"{label} = {size}: must be at most {MAX_LENGTH}; call once per slice"
    yield from _sequence_objections(problem)


def _sequence_objections(problem: Problem) -> Iterator[str]:
    given, shape = problem.sequences, problem.shape
    if given is None or shape.tokens is None:
        return
    if given.count < 0:
        yield f"number of sequences = {given.count}: cu_seqlens must have at least one entry; pass [0] for none"
    for label, longest, tokens in (
        ("max_seqlen_q", given.max_seqlen_q, shape.tokens[0]),
        ("max_seqlen_k", given.max_seqlen_k, shape.tokens[1]),
    ):
        if not 0 <= longest <= tokens:
            yield f"{label} = {longest}: must be from 0 to the {tokens} tokens; pass the longest sequence's length"
    if problem.query.shape[0] != 1:
        yield (
            f"query has batch {problem.query.shape[0]} with cu_seqlens: must be 1; put the sequences behind each other "
            "in [1, tokens, heads, head_dim]"
        )


def _bias_objections(problem: Problem) -> Iterator[str]:
    if problem.bias is None:
        return
    whole = problem.shape.bias
    if not _broadcasts(problem.bias, whole):
        yield (
            f"bias has shape {problem.bias.shape}: each axis must be 1 or that of [batch, heads, queries, keys] = "
            f"{whole}; reshape or expand it"
        )
    elif problem.grad_bias is not None and not _broadcasts(problem.grad_bias, whole):
        yield (
            f"grad_bias has shape {problem.grad_bias.shape}: each axis must be 1 (summed over) or that of {whole}; "
            "allocate it like the bias"
        )


def _broadcasts(tensor: Tensor, whole: tuple[int, ...]) -> bool:
    return all(size in (1, full) for size, full in zip(tensor.shape, whole, strict=True))


def _vector_objections(problem: Problem) -> Iterator[str]:
    shape = problem.shape
    heads = (shape.num_heads,)
    slopes = (heads, (shape.batch, shape.num_heads))
    for name, tensor in problem.vectors().items():
        if name not in ("alibi_slopes", "sinks", "grad_sinks"):
            continue
        allowed = slopes if name == "alibi_slopes" else (heads,)
        if tensor.shape not in allowed or tensor.dtype != "float32":
            shapes = " or ".join(str(list(item)) for item in allowed)
            yield f"{name} has shape {tensor.shape} and dtype {tensor.dtype}: must be float32 {shapes}; convert it"
        elif 0 not in tensor.shape and tensor.steps != Tensor.contiguous(tensor.shape, "float32").steps:
            yield f"{name} has strides {tensor.strides}: must be contiguous; copy it"
        elif tensor.alignment < ITEM_BYTES["float32"]:
            yield f"{name} starts at an address that is only {tensor.alignment}-byte aligned: must be 4; copy it"


def _tensor_objections(problem: Problem) -> Iterator[str]:
    for name, tensor in problem.tensors().items():
        if tensor.dtype not in ITEM_BYTES:
            yield f"{name} has dtype {tensor.dtype}: must be one of {', '.join(ITEM_BYTES)}; cast it"
            continue
        if tensor.dtype != problem.dtype:
            yield f"{name} has dtype {tensor.dtype} but query has {problem.dtype}: all must agree; cast one of them"
        if name in BMHK and name != "grad_output" and tensor.shape[3] > 1 and tensor.strides[3] != 1:
            yield f"{name} has last stride {tensor.strides[3]}: must be 1; make the head dimension contiguous"
        item = ITEM_BYTES[tensor.dtype]
        if tensor.alignment < item:
            yield (
                f"{name} starts at an address that is only {tensor.alignment}-byte aligned: must be aligned to its "
                f"{item}-byte elements (16 bytes is fastest); copy it"
            )
        if name in _WRITTEN or (name == "output" and problem.direction == "forward"):
            yield from _overlap_objections(name, tensor)


def _overlap_objections(name: str, tensor: Tensor) -> Iterator[str]:
    labels = ("batch", "head", "query", "key") if name in BIASES else ("batch", "row", "head", "last")
    for axis, label in enumerate(labels):
        if tensor.shape[axis] > 1 and tensor.strides[axis] == 0:
            yield f"{name} has {label} stride 0: an output must not overlap itself; allocate it in full"


def _option_objections(problem: Problem) -> Iterator[str]:
    yield from masks.objections(problem.mask)
    scale, softcap = problem.scale, problem.softcap
    if scale is not None and not _is_within(scale, -MAX_FACTOR, MAX_FACTOR):
        yield f"scale = {scale}: must be a number that float32 holds, or None for 1/sqrt(head_dim); correct it"
    if softcap != 0 and not _is_within(softcap, MIN_SOFTCAP, MAX_FACTOR):
        yield f"softcap = {softcap}: must be a number above 0 that float32 holds, or 0 to switch it off; correct it"
    if not _is_within(problem.dropout_p, 0, 1):
        yield f"dropout_p = {problem.dropout_p}: must be a probability from 0 to 1; correct it"
    yield from _split_objections(problem)


def _is_within(value: object, low: float, high: float) -> bool:
    """Whether this is a number in that range; NaN is not."""
    return isinstance(value, Real) and low <= float(value) <= high


def _split_objections(problem: Problem) -> Iterator[str]:
    splits = problem.num_splits_key
    if splits is None:
        return
    if problem.direction == "forward":
        yield f"num_splits_key = {splits}: only the backward splits keys; leave it None"
    elif not isinstance(splits, int) or splits < 1:
        yield f"num_splits_key = {splits}: must be an int of at least 1, or None to let the plan choose"
    elif splits > 1 and problem.deterministic:
        yield (
            f"num_splits_key = {splits} with deterministic: must be 1, or None for one block a key tile: with "
            "another number a block would wait for one that starts after it"
        )


def _gradient_objections(problem: Problem) -> Iterator[str]:
    if problem.direction == "forward":
        for name in ("grad_output", *_WRITTEN, "grad_sinks"):
            if getattr(problem, name) is not None:
                yield f"{name} is given: the forward writes no gradients; leave it None"
        return
    if not problem.gradients:
        yield (
            "no gradient is asked for: must be at least one of grad_query, grad_key, grad_value, grad_bias, "
            "grad_sinks; pass a tensor for it"
        )
    for name in ("bias", "sinks"):
        if getattr(problem, f"grad_{name}") is not None and getattr(problem, name) is None:
            yield f"grad_{name} is given without {name}: must come together; pass {name} or leave grad_{name} None"
