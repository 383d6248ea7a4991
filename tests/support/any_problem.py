"""Any problem: drawn supported problems with every score term, layout and choice of gradients, for property tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from cutlass_py_attn.launch.arch import ARCHITECTURES
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import ITEM_BYTES, OPERANDS, Sequences, Shape, Tensor
from cutlass_py_attn.score_terms import registry
from tests.support.mask_cases import MASKS

ARCHS = st.sampled_from(sorted(ARCHITECTURES))
LENGTHS = st.one_of(st.integers(0, 5000), st.integers(0, 3))
HEAD_DIMS = st.one_of(
    st.integers(1, 16).map(lambda eighths: 8 * eighths), st.integers(1, 256), st.sampled_from([257, 512, 1000, 65536])
)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Draws sizes, with grouped heads and variable lengths among them."""
    group, heads_key = draw(st.integers(1, 4)), draw(st.integers(0, 12))
    sizes = draw(st.integers(0, 9)), draw(LENGTHS), draw(LENGTHS)
    tokens = None
    if draw(st.booleans()):
        tokens = sizes[1] + draw(st.integers(0, 300)), sizes[2] + draw(st.integers(0, 300))
    return Shape(*sizes, group * heads_key, draw(HEAD_DIMS), draw(HEAD_DIMS), heads_key, tokens)


@st.composite
def biases(draw: st.DrawFn, whole: tuple[int, ...], dtype: str) -> Tensor:
    """Draws a tensor that broadcasts to `whole` by sizes of 1 or strides of 0, some with odd strides or addresses."""
    made = Tensor.contiguous(tuple(draw(st.sampled_from([1, size])) for size in whole), dtype)
    if draw(st.booleans()):
        made = replace(made, alignment=draw(st.sampled_from([ITEM_BYTES[dtype], 8])))
    return replace(made, strides=tuple(draw(st.sampled_from([0, stride])) for stride in made.strides))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Draws a supported problem."""
    direction, dtype = draw(st.sampled_from(["forward", "backward"])), draw(st.sampled_from(sorted(ITEM_BYTES)))
    shape = draw(shapes())
    problem = Problem.dense(direction, shape, dtype, draw(MASKS))
    dropout_p = draw(st.sampled_from([0.0, 0.0, 1e-6, 0.5, 1.0]))
    changes: dict[str, Any] = {"softcap": draw(st.sampled_from([0.0, 0.0, 30.0])), "dropout_p": dropout_p}
    changes["philox_on_device"] = bool(dropout_p) and draw(st.booleans())
    if shape.tokens is not None:
        lengths = shape.batch, shape.num_queries, shape.num_keys
        changes["sequences"] = Sequences(*lengths, seqused_k=draw(st.booleans()))
    for term in registry.BUILT_IN:
        if term.vector is not None and draw(st.booleans()):
            allowed = term.vector.shapes(shape)
            changes[term.field] = Tensor.contiguous(draw(st.sampled_from(allowed)), "float32")
    if draw(st.booleans()):
        changes["bias"] = draw(biases(shape.bias, dtype))
    if direction == "backward":
        changes |= draw(gradients(problem.replace(**changes)))
    return problem.replace(**changes)


@st.composite
def gradients(draw: st.DrawFn, problem: Problem) -> dict[str, Any]:
    """Draws which gradients are written, and how many blocks share the keys."""
    changes: dict[str, Any] = {}
    if problem.bias is not None and draw(st.booleans()):
        sizes = tuple(draw(st.sampled_from([1, size])) for size in problem.bias.shape)
        changes["grad_bias"] = Tensor.contiguous(sizes, problem.dtype)
    if problem.sinks is not None and draw(st.booleans()):
        changes["grad_sinks"] = problem.sinks
    unwanted = draw(st.sets(st.sampled_from(OPERANDS), max_size=3 if changes else 2))
    changes |= dict.fromkeys((f"grad_{name}" for name in unwanted), None)
    if (problem.shape.num_keys or "grad_sinks" not in changes) and draw(st.booleans()):
        changes["grad_logsumexp"] = Tensor.contiguous(problem.shape.logsumexp, "float32")
    deterministic = draw(st.booleans())
    splits = st.none() | (st.just(1) if deterministic else st.integers(1, 300))
    return changes | {"deterministic": deterministic, "num_splits_key": draw(splits)}
