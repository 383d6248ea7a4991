"""Validation: every reason to refuse a problem; each says what was given, what is allowed and what to do.

The conditions of a score term are in its own file, score_terms/<term>.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Real
from typing import TYPE_CHECKING

from cutlass_py_attn.problem import masks
from cutlass_py_attn.problem.tensors import BIASES, BMHK, DIRECTIONS, ITEM_BYTES, OPERANDS, Tensor
from cutlass_py_attn.score_terms import registry

if TYPE_CHECKING:
    from cutlass_py_attn.problem.problem import Problem

MAX_LENGTH = 2**29  # the sum of a query index, a key index and a window edge stays in 32 bits
MAX_HEAD_DIM = 65536
MAX_SCALE = 2.0**127  # times log2(e) it still is a float32
_WRITTEN = ("grad_query", "grad_key", "grad_value", "grad_bias")


def objections(problem: Problem) -> list[str]:
    """Returns every reason; only those about ranks when a rank is wrong, because every other check needs the ranks."""
    ranks = list(_rank_objections(problem))
    if ranks:
        return ranks
    return [
        *_size_objections(problem),
        *_score_term_objections(problem),
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
    vectors = (item for term in registry.terms() for item in term.vectors(problem).items())
    for name, tensor in vectors:
        if len(tensor.shape) != len(tensor.strides):
            given = f"{name} has shape {tensor.shape} and strides {tensor.strides}"
            yield f"{given}: must have a stride for each axis; add the missing strides, or leave some out"


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
            f"query has batch {problem.query.shape[0]} with cu_seqlens: must be 1; concatenate the sequences "
            "in [1, tokens, heads, head_dim]"
        )


def _score_term_objections(problem: Problem) -> Iterator[str]:
    """Yields what the terms refuse, and names of terms that nothing registered."""
    for term in registry.terms():
        yield from term.objections(problem)
    known = registry.registered()
    for name, _ in problem.score_terms:
        if name not in known:
            yield (
                f"score_terms has {name!r}: must be registered terms, {', '.join(known) or 'of which there is none'}; "
                "call score_terms.register first"
            )


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
    scale = problem.scale
    if scale is not None and not _is_within(scale, -MAX_SCALE, MAX_SCALE):
        yield f"scale = {scale}: must be a number that float32 holds, or None for 1/sqrt(head_dim); correct it"
    yield from _split_objections(problem)


def _is_within(value: object, low: float, high: float) -> bool:
    """Returns whether this is a number in the range; NaN is not."""
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
    names = [f"grad_{name}" for name in (*OPERANDS, *registry.gradients())]
    if problem.direction == "forward":
        for name in ("grad_output", *names):
            if getattr(problem, name) is not None:
                yield f"{name} is given: the forward writes no gradients; leave it None"
        return
    if not problem.gradients:
        yield f"no gradient is asked for: must be at least one of {', '.join(names)}; pass a tensor for it"
    for name in registry.gradients():
        if getattr(problem, f"grad_{name}") is not None and getattr(problem, name) is None:
            yield f"grad_{name} is given without {name}: must come together; pass {name} or leave grad_{name} None"
