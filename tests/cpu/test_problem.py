"""Tests of Problem: every objection word for word, several at once, and what supported problems derive."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.masks import Causal
from cutlass_py_attn.problem import Problem, Shape, Tensor

SHAPE = Shape(batch=2, num_queries=40, num_keys=50, num_heads=3, head_dim=16, head_dim_value=24)


def dense(direction: str = "forward", dtype: str = "float16", **sizes: int) -> Problem:
    """A contiguous problem of SHAPE with some sizes changed."""
    names = SHAPE.__dataclass_fields__
    return Problem.dense(direction, Shape(**{n: sizes.get(n, getattr(SHAPE, n)) for n in names}), dtype)


def changed(name: str, direction: str = "forward", **fields: Any) -> Problem:
    """The dense float16 problem with some fields of tensor `name` changed."""
    problem = dense(direction)
    old: Tensor = getattr(problem, name)
    new = {
        "shape": old.shape,
        "strides": old.strides,
        "dtype": old.dtype,
        "alignment": old.alignment,
    } | fields
    return problem.replace(**{name: Tensor(**new)})


FOUR_D = "must be 4-D [batch, seqlen, heads, head_dim]; add the missing axes with size 1"
DTYPES = "must be one of float16, bfloat16, float32; cast it"
PADDED = "copy it to a padded or contiguous buffer"
WHOLE = "an output must not overlap itself; allocate it in full"

BAD: list[tuple[str, Problem, str]] = [
    (
        "direction",
        dense().replace(direction="sideways"),
        "direction = 'sideways': must be one of forward, backward",
    ),
    (
        "missing gradient",
        dense("backward").replace(grad_key=None),
        "grad_key is missing: the backward needs it; pass a tensor of the matching BMHK shape",
    ),
    (
        "rank of the shape",
        changed("key", shape=(50, 3, 16), strides=(48, 16, 1)),
        f"key has shape (50, 3, 16) and strides (48, 16, 1): {FOUR_D}",
    ),
    (
        "rank of the strides",
        changed("query", strides=(48, 16, 1)),
        f"query has shape (2, 40, 3, 16) and strides (48, 16, 1): {FOUR_D}",
    ),
    (
        "shape",
        changed("output", shape=(2, 40, 3, 16)),
        "output has shape (2, 40, 3, 16): must be (2, 40, 3, 24) to match query (2, 40, 3, 16), "
        "key (2, 50, 3, 16) and value (2, 50, 3, 24)",
    ),
    (
        "head_dim too wide",
        dense(head_dim=136),
        "head_dim = 136: must be a multiple of 8 from 8 to 128; split the head",
    ),
    (
        "batch",
        dense(batch=65536),
        "batch = 65536: must be at most 65535 (grid limit); call once per slice",
    ),
    (
        "num_heads",
        dense(num_heads=65536),
        "num_heads = 65536: must be at most 65535 (grid limit); call once per slice",
    ),
    (
        "num_queries",
        dense(num_queries=2**31),
        "num_queries = 2147483648: must be at most 2147418112; split the sequence",
    ),
    (
        "num_keys",
        dense(num_keys=2**31),
        "num_keys = 2147483648: must be at most 2147418112; split the sequence",
    ),
    (
        "other dtype",
        changed("value", dtype="float64"),
        f"value has dtype float64: {DTYPES}",
    ),
    (
        "two dtypes",
        changed("value", dtype="bfloat16"),
        "value has dtype bfloat16 but query has float16: all must agree; cast one of them",
    ),
    (
        "last stride",
        changed("key", strides=(4800, 96, 32, 2)),
        "key has last stride 2: must be 1; make the head dimension contiguous",
    ),
    (
        "batch stride",
        changed("key", strides=(2404, 48, 16, 1)),
        f"key has batch stride 2404: must be a multiple of 8 elements (16 bytes); {PADDED}",
    ),
    (
        "row stride",
        changed("key", strides=(2600, 52, 16, 1)),
        f"key has row stride 52: must be a multiple of 8 elements (16 bytes); {PADDED}",
    ),
    (
        "head stride",
        changed("key", strides=(3200, 64, 20, 1)),
        f"key has head stride 20: must be a multiple of 8 elements (16 bytes); {PADDED}",
    ),
    (
        "float32 stride",
        dense(dtype="float32").replace(key=Tensor((2, 50, 3, 16), (3200, 64, 18, 1), "float32")),
        f"key has head stride 18: must be a multiple of 4 elements (16 bytes); {PADDED}",
    ),
    (
        "overlapping output",
        changed("output", strides=(0, 72, 24, 1)),
        f"output has batch stride 0: {WHOLE}",
    ),
    (
        "overlapping gradient",
        changed("grad_value", "backward", strides=(3600, 0, 24, 1)),
        f"grad_value has row stride 0: {WHOLE}",
    ),
    (
        "alignment",
        changed("query", alignment=4),
        "query starts at an address that is only 4-byte aligned: must be 16-byte aligned; copy it or slice "
        "at a multiple of 8 elements",
    ),
    (
        "scale",
        dense().replace(scale=math.inf),
        "scale = inf: must be a finite number, or None for 1/sqrt(head_dim)",
    ),
    (
        "splits in the forward",
        dense().replace(num_splits_key=2),
        "num_splits_key = 2: only the backward splits keys; leave it None",
    ),
    (
        "splits of zero",
        dense("backward").replace(num_splits_key=0),
        "num_splits_key = 0: must be at least 1, or None to let the plan choose",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("problem", "objection"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_objection(problem: Problem, objection: str) -> None:
    assert problem.reasons() == [objection]
    with pytest.raises(NotSupported) as caught:
        problem.check()
    assert caught.value.reasons == (objection,)


@pytest.mark.parametrize(("size", "remedy"), [(20, 24), (127, 128), (1, 8), (0, 8)])
def test_padding_is_computed(size: int, remedy: int) -> None:
    found = [text for text in dense(head_dim_value=size).reasons() if text.startswith("head_dim_value")]
    assert found == [
        f"head_dim_value = {size}: must be a multiple of 8 from 8 to 128; pad to {remedy} columns with zeros"
    ]


def test_all_objections_together() -> None:
    problem = changed("query", alignment=2).replace(scale=math.nan, num_splits_key=1)
    assert [text.split()[0] for text in problem.reasons()] == ["query", "scale", "num_splits_key"]


def test_read_operands_may_be_broadcast() -> None:
    assert changed("key", strides=(0, 48, 16, 1)).reasons() == []
    assert changed("grad_output", "backward", strides=(2880, 72, 0, 1)).reasons() == []


def test_strides_of_single_rows_do_not_matter() -> None:
    problem = dense(batch=1).replace(key=Tensor((1, 50, 3, 16), (7, 48, 16, 1), "float16"))
    assert problem.reasons() == []


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", ["batch", "num_queries", "num_keys", "num_heads"])
def test_empty_problems_are_supported(direction: str, name: str) -> None:
    problem = dense(direction, **{name: 0})
    assert problem.is_empty
    assert problem.reasons() == []


def test_what_follows_from_a_problem() -> None:
    problem = dense("backward").replace(mask=Causal())
    assert problem.scale_value == 0.25
    assert problem.replace(scale=2).scale_value == 2.0
    assert problem.shape == SHAPE
    assert problem.shape.logsumexp == (2, 3, 64)
    forward = 2 * 2 * 3 * 40 * 50 * (16 + 24)
    assert dense().flops == forward
    assert problem.flops == forward // 2 * 5 // 2
