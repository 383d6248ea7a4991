"""Tests of keys and values of 8-bit floats in a Problem: its dtypes and scales, and every reason to refuse them."""

from __future__ import annotations

from typing import Any

import pytest

from cutlass_py_attn.problem.serialize import from_json, to_json
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.tensors import Tensor

PAGED = parse("bf16_d64_q1_s64_b3_h8k2_full_paged16_kv8").problem("forward")
SHAPES = "(), (1,), (2,), (3, 2), (13, 16, 2)"


def scale(*shape: int, dtype: str = "float32", alignment: int = 16) -> Tensor:
    """A dense scale."""
    return Tensor(shape, Tensor.contiguous(shape, dtype).strides, dtype, alignment)


@pytest.mark.parametrize("shape", [(), (1,), (2,), (3, 2), (13, 16, 2)])
def test_shapes_of_scales(shape: tuple[int, ...]) -> None:
    problem = PAGED.replace(key_scale=scale(*shape))
    assert problem.reasons() == []
    assert ("kv8row" in problem.features) == (len(shape) == 3)
    assert from_json(to_json(problem)) == problem


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint8"])
def test_dtypes_of_codes(dtype: str) -> None:
    key, value = (Tensor.contiguous(tensor.shape, dtype) for tensor in (PAGED.key, PAGED.value))
    assert PAGED.replace(key=key, value=value).reasons() == []


BF16 = {name: Tensor.contiguous(tensor.shape, "bfloat16") for name, tensor in PAGED.tensors().items()}
QUERY = {name: Tensor.contiguous(BF16[name].shape, "float32") for name in ("query", "output")}


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        (
            {"key_scale": None},
            [f"key_scale is missing: key and value of float8_e4m3fn need float32 {SHAPES}; pass it"],
        ),
        (
            {"value_scale": scale(3)},
            [f"value_scale has shape (3,) and dtype float32: must be float32 {SHAPES}; reshape or cast it"],
        ),
        (
            {"value_scale": scale(2, dtype="float16")},
            [f"value_scale has shape (2,) and dtype float16: must be float32 {SHAPES}; reshape or cast it"],
        ),
        (
            {"key_scale": scale(2, alignment=2)},
            ["key_scale is 2-byte aligned: must be aligned to its 4-byte elements; copy it"],
        ),
        (
            {"value": BF16["value"]},
            ["value has dtype bfloat16 but key has float8_e4m3fn: both must agree; cast one of them"],
        ),
        (QUERY, ["query has dtype float32 with key of float8_e4m3fn: must be one of float16, bfloat16; cast it"]),
        (
            {"key": BF16["key"], "value": BF16["value"]},
            [
                f"{name} is given, but key has dtype bfloat16: only 8-bit floats have scales; leave it out"
                for name in ("key_scale", "value_scale")
            ],
        ),
    ],
)
def test_reasons(changes: dict[str, Any], reasons: list[str]) -> None:
    assert PAGED.replace(**changes).reasons() == reasons


def test_a_backward_is_refused() -> None:
    problem = parse("bf16_d64_q4_s64_b3_h8k2_full_kv8").problem("forward")
    dense = parse("bf16_d64_q4_s64_b3_h8k2_full").problem("backward")
    changes = {name: getattr(problem, name) for name in ("key", "value", "key_scale", "value_scale")}
    said = "direction = 'backward' with key of float8_e4m3fn: must be forward"
    assert any(reason.startswith(said) for reason in dense.replace(**changes).reasons())
