"""Tests of Problem, validation and options: every refusal, and what supported problems derive."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cutlass_py_attn
from cutlass_py_attn.api.results import Gradients
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Window
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.scalars import MIN_SCALE
from cutlass_py_attn.problem.tensors import Sequences, Shape, Tensor
from cutlass_py_attn.problem.validation import LARGEST_SOFTCAP
from cutlass_py_attn.runtime.params import LOG2_E
from cutlass_py_attn.score_terms.dropout import Dropout
from tests.support import refused_calls, refused_problems
from tests.support.refusals import expect_all_of_module, expect_raised
from tests.support.requests import LENGTHS, SHAPE, called, changed, dense, lengths, with_terms

REFUSED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    **{f"problem: {name}": (problem.check, texts) for name, (problem, texts) in refused_problems.ALL.items()},
    **{f"call: {name}": case for name, case in refused_calls.ALL.items()},
    **{f"shape: {name}": case for name, case in refused_problems.SHAPES.items()},
    **{f"append: {name}": (problem.check, texts) for name, (problem, texts) in refused_problems.APPENDS.items()},
}


@pytest.mark.parametrize(("ask", "expected"), REFUSED.values(), ids=REFUSED)
def test_refusals(ask: Callable[[], Any], expected: list[str]) -> None:
    expect_raised(ask, expected)


OBJECTING = (
    *("problem/validation.py", "api/options.py", "api/attention.py", "problem/masks.py"),
    *(f"score_terms/{name}.py" for name in ("softcap", "bias", "dropout", "term", "registry")),
)


@pytest.mark.parametrize("module", OBJECTING)
def test_no_refusal_is_left_out(module: str) -> None:
    expect_all_of_module(module, [ask for ask, _ in REFUSED.values()])


ODD = Tensor((2, 50, 3, 16), (50 * 51, 51, 17, 1), "float16", 2)  # no row is aligned to more than an element
WHOLE_BIAS = (2, 3, 40, 50)
SUPPORTED: dict[str, Problem] = {
    "addresses and strides of single elements": dense().replace(key=ODD),
    "gradients at such addresses": dense("backward").replace(grad_key=ODD),
    "head dims that are no multiple of anything": dense("backward", head_dim=7, head_dim_value=1),
    "float32 head dims that are no multiple of 4": dense(dtype="float32", head_dim=33, head_dim_value=65),
    "the widest head": dense("backward", head_dim=65536, head_dim_value=65536),
    "broadcast keys": changed("key", strides=(0, 48, 0, 1)),
    "a broadcast grad_output": changed("grad_output", "backward", strides=(0, 0, 0, 1)),
    "a single column of any stride": dense(head_dim_value=1).replace(
        value=Tensor((2, 50, 3, 1), (150, 3, 1, 7), "float16")
    ),
    "a single batch of any stride": dense(batch=1).replace(key=Tensor((1, 50, 3, 16), (7, 48, 16, 1), "float16")),
    "a bias of any strides": dense().replace(bias=Tensor(WHOLE_BIAS, (1, 2, 6, 240), "float16", 2)),
    "a bias that broadcasts by size and by stride": dense().replace(
        bias=Tensor((1, 3, 1, 50), (9, 0, 9, 0), "float16")
    ),
    "a bias of sequences": with_terms("backward", base=LENGTHS, bias=(2, 1, 25, 30), grad_bias=(2, 1, 25, 30)),
    "a gradient summed over all of a bias": with_terms("backward", bias=WHOLE_BIAS, grad_bias=(1, 1, 1, 1)),
    "slopes of one batch of any stride": dense(batch=1).replace(alibi_slopes=Tensor((1, 3), (7, 1), "float32")),
    "sinks at any float32": dense().replace(sinks=Tensor((3,), (1,), "float32", 4)),
    "more batches and heads than a grid has": dense("backward", batch=2**17, num_heads=2**17),
    "the longest sequences": dense(num_queries=2**29, num_keys=2**29),
    "one key head": dense("backward", num_heads_key=1),
    "more splits than key tiles": dense("backward").replace(num_splits_key=10**6),
    "one block in turns": dense("backward").replace(num_splits_key=1, deterministic=True),
    "all weights dropped": dense("backward").replace(dropout_p=1),
    "a scale of any sign": dense().replace(scale=-(2.0**127)),
    "the smallest scale": dense("backward").replace(scale=-1e-30),
    "a scale of zero": dense().replace(scale=0, softcap=1e-37),
    "the smallest softcap for a scale": dense().replace(scale=1.0, softcap=2.0**-126),
    "the largest softcap for a scale": dense().replace(scale=2.0**-26, softcap=2.0**100),
    "the largest softcap of float32": dense(dtype="float32").replace(softcap=8192),
    "a NumPy scale": dense().replace(scale=np.float32(0.5), softcap=np.float64(2), dropout_p=np.float32(0.5)),
    "windows and rows without keys": dense(num_keys=3).replace(mask=Causal(1)),
    "a window without limits": dense().replace(mask=Window(None, None)),
    "sequences without tokens": dense(base=replace(LENGTHS, num_queries=0, num_keys=0)),
    "no sequences": dense("backward", base=replace(LENGTHS, batch=0)),
}


@pytest.mark.parametrize("problem", SUPPORTED.values(), ids=SUPPORTED)
def test_supported(problem: Problem) -> None:
    assert problem.reasons() == []
    problem.check()


def test_the_smallest_scale_is_not_raised_by_the_kernels() -> None:
    """The forward raises |scale * log2(e)| to TINY."""
    source = (Path(cutlass_py_attn.__file__).parent / "kernels/common/softmax.py").read_text()
    tiny = float(re.findall(r"^TINY = (\S+)", source, re.MULTILINE)[0])
    assert np.float32(MIN_SCALE * LOG2_E) > np.float32(tiny) > np.float32(MIN_SCALE / 2 * LOG2_E)


@pytest.mark.parametrize("dtype", LARGEST_SOFTCAP)
@pytest.mark.parametrize("softcap", [2.0**-20, 1.0, 50.0, 8192.0, 2.0**99])
def test_allowed_softcaps_are_computed_in_float32(dtype: str, softcap: float) -> None:
    """By the arithmetic of the kernels: tanh is exact to a part of its value for 16-bit operands, else to 2**-23."""
    problem = dense(dtype=dtype).replace(scale=0.125, softcap=softcap)
    if problem.reasons():
        assert (dtype, softcap) == ("float32", 2.0**99)
        return
    products = np.linspace(-400, 400, 4001)
    exact = softcap * np.tanh(0.125 * products / softcap)
    with np.errstate(over="ignore"):
        inside = products.astype("f4") * (np.float32(0.125) / np.float32(softcap))
        tanh = np.tanh(inside) if dtype != "float32" else np.float32(2) / (1 + np.exp(-2 * inside)) - np.float32(1)
    assert tanh.dtype == np.float32
    worst = np.abs(tanh * np.float32(softcap) - exact).max()
    assert worst <= max(softcap if dtype == "float32" else 0, 50) * 2.0**-22


def test_supported_calls() -> None:
    seed = Tensor((), (), "int64", 8)
    assert called(dropout=Dropout(0.25, seed, seed)).philox_on_device
    assert not called(dropout=Dropout(0.0, seed, seed)).philox_on_device, "nothing is drawn"
    assert not called(dropout=Dropout(0.25, 2**64 - 1, 2**64 - 1)).philox_on_device
    longest = np.diff([0, 15, 40]).max()
    assert called(base=LENGTHS, sequences=lengths(max_seqlen_q=longest)).shape == LENGTHS
    aligned_to_elements = Tensor((2, 3, 64), (192, 64, 1), "float32", 4)
    assert called("backward", {"logsumexp": aligned_to_elements}).gradients == ("query", "key", "value")


def test_gradients_of_a_call() -> None:
    bias, sinks = Tensor.contiguous((1, 3, 1, 50), "float16"), Tensor.contiguous((3,), "float32")
    problem = called("backward", bias=bias, sinks=sinks, gradients=["sinks", "key", "bias"])
    assert problem.gradients == ("key", "bias", "sinks")
    assert (problem.grad_bias, problem.grad_sinks) == (bias, sinks)
    strided = Tensor(SHAPE.of("key"), (9600, 192, 64, 1), "float16")
    problem = called("backward", {"grad_key": strided}, gradients=("key",), out=Gradients(key=strided))
    assert problem.grad_key == strided
    same = Shape(2, 40, 40, 3, 20, 20)
    packed = called("backward", base=same, packed=True)
    found = [packed.grad_query, packed.grad_key, packed.grad_value]
    assert [tensor and (tensor.shape, tensor.strides) for tensor in found] == [
        (same.of("query"), (3 * 40 * 60, 3 * 60, 20, 1))
    ] * 3
    assert [tensor and tensor.alignment for tensor in found] == [16, 8, 16], "60 contiguous float16"


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", ["batch", "num_queries", "num_keys", "num_heads"])
def test_empty_problems_are_supported(direction: str, name: str) -> None:
    sizes: dict[str, Any] = {name: 0}
    problem = dense(direction, **sizes)
    assert problem.is_empty
    assert problem.reasons() == []


def test_a_forward_that_must_run_without_keys() -> None:
    sinks = Tensor.contiguous((3,), "float32")
    no_keys = dense(base=replace(LENGTHS, num_keys=0, tokens=(40, 0)))
    assert not dense(num_keys=0).replace(sinks=sinks).is_empty
    assert not no_keys.is_empty, "only the kernel knows which rows of logsumexp belong to a sequence"
    assert dense("backward", num_keys=0).replace(sinks=sinks, grad_sinks=sinks).is_empty
    assert dense("backward", base=no_keys.shape).is_empty


def test_features_and_gradients() -> None:
    assert (dense().features, dense().gradients) == ((), ())
    seed = {"dropout_p": 1e-6, "softcap": 5.0, "sequences": Sequences(2, 25, 30, seqused_k=True)}
    vectors = {"alibi_slopes": (2, 3), "sinks": (3,), "grad_sinks": (3,)}
    bias = {"bias": (1, 1, 25, 30), "grad_bias": (1, 1, 25, 30)}
    problem = with_terms("backward", base=replace(LENGTHS, num_heads_key=1), **seed, **vectors, **bias)
    assert problem.features == ("alibi", "bias", "dropout", "grouped", "seqused", "sinks", "softcap", "varlen")
    assert problem.gradients == ("query", "key", "value", "bias", "sinks")
    assert problem.replace(grad_query=None, grad_value=None, grad_sinks=None).gradients == ("key", "bias")
    assert set(problem.vectors()) == {
        "alibi_slopes",
        "sinks",
        "grad_sinks",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "seqused_k",
    }
    on_device = dense().replace(philox_on_device=True, dropout_p=0.1)
    assert {name: tensor.dtype for name, tensor in on_device.vectors().items()} == {
        "philox_seed": "int64", "philox_offset": "int64",
    }  # fmt: skip


def test_shapes() -> None:
    grouped = Shape(2, 40, 50, 6, 16, 24, num_heads_key=2)
    assert (grouped.group, SHAPE.group, SHAPE.num_heads_key) == (3, 1, 3)
    assert (grouped.of("grad_query"), grouped.of("output")) == ((2, 40, 6, 16), (2, 40, 6, 24))
    assert (grouped.of("grad_key"), grouped.of("value")) == ((2, 50, 2, 16), (2, 50, 2, 24))
    assert (grouped.logsumexp, grouped.bias) == ((2, 6, 64), (2, 6, 40, 50))
    assert dense(num_heads=6, num_heads_key=2).shape == grouped
    assert LENGTHS.of("query") == (1, 40, 3, 16)
    assert LENGTHS.of("grad_value") == (1, 50, 3, 24)
    assert (LENGTHS.logsumexp, LENGTHS.bias) == ((2, 3, 32), (2, 3, 25, 30))
    assert dense("backward", base=LENGTHS).shape == LENGTHS
    assert dense(base=LENGTHS).sequences == Sequences(2, 25, 30)


def test_scale_and_flops() -> None:
    assert dense().scale_value == 0.25
    assert dense().replace(scale=2).scale_value == 2.0
    forward = 2 * 2 * 3 * 40 * 50 * (16 + 24)
    assert dense().flops == forward
    causal = dense("backward").replace(mask=CausalBottomRight())
    assert causal.flops == forward // 2 * 5 // 2
    pairs = sum(min(row + 1, 7) for row in range(40))
    assert dense().replace(mask=Causal(7)).flops == 2 * 2 * 3 * pairs * (16 + 24)
    assert dense(base=LENGTHS).flops == 2 * 2 * 3 * 25 * 30 * (16 + 24)


@pytest.mark.parametrize(
    ("tensor", "access"),
    [
        (Tensor.contiguous((2, 40, 3, 16), "float16"), 16),
        (Tensor.contiguous((2, 40, 3, 20), "float16"), 8),
        (Tensor.contiguous((2, 40, 3, 7), "bfloat16"), 2),
        (Tensor.contiguous((2, 40, 3, 7), "float32"), 4),
        (Tensor.contiguous((2, 40, 3, 6), "float32"), 8),
        (Tensor((2, 40, 3, 16), (1920, 48, 16, 1), "float16", 4), 4),
        (Tensor((2, 40, 3, 16), (2000, 50, 16, 1), "float16"), 4),
        (Tensor((2, 40, 1, 16), (1600, 40, 7, 1), "float16"), 16),
        (Tensor((2, 40, 3, 16), (0, -48, 16, 1), "float16"), 16),
    ],
)
def test_access_bytes(tensor: Tensor, access: int) -> None:
    """The widest load that all rows allow: by address, by strides that are walked, and by the row's length."""
    assert tensor.vector_bytes == access
