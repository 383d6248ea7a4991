"""Tests of e4m3 codes in a Problem: its dtypes and scales, and every reason to refuse them."""

from __future__ import annotations

from typing import Any

import pytest

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.serialize import from_json, to_json
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.tensors import Tensor
from tests.support.refusals import expect, expect_among

PAGED = parse("bf16_d64_q1_s64_b3_h8k2_full_paged16_kv8_descalehead").problem("forward")
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
    ("changes", "expected"),
    [
        ({"key_scale": None, "value_scale": None}, []),
        ({"query_scale": scale(2)}, ["query_scale: only e4m3 codes are scaled, and query has dtype bfloat16"]),
        ({"value_scale": scale(3)}, [f"value_scale: float32 {SHAPES}"]),
        ({"value_scale": scale(2, dtype="float16")}, [f"value_scale: float32 {SHAPES}"]),
        ({"key_scale": scale(2, alignment=2)}, ["key_scale.alignment: the 4 bytes"]),
        ({"value": BF16["value"]}, ["value.dtype: float8_e4m3fn as key"]),
        (QUERY, ["query.dtype: float16 or bfloat16 with key of float8_e4m3fn, or float8_e4m3fn too"]),
        (
            {"key": BF16["key"], "value": BF16["value"]},
            [f"{name}_scale: only e4m3 codes are scaled, and {name} has dtype bfloat16" for name in ("key", "value")],
        ),
    ],
)
def test_refusals(changes: dict[str, Any], expected: list[str]) -> None:
    expect(PAGED.replace(**changes).refusals(), expected)


OPERANDS = parse("e4m3_d64_s100_b3_h4k2_full_descalebatch").problem("forward")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint8"])
def test_e4m3_operands(dtype: str) -> None:
    problem = OPERANDS.replace(
        **{name: Tensor.contiguous(getattr(OPERANDS, name).shape, dtype) for name in ("query", "key", "value")},
        query_scale=scale(),
        key_scale=Tensor((3, 2), (1, 3), "float32", 4),
    )
    assert problem.reasons() == []
    assert (problem.dtype, problem.output.dtype, problem.has_e4m3_cache) == ("float8_e4m3fn", "bfloat16", False)
    assert from_json(to_json(problem)) == problem


def test_refusals_of_e4m3_operands() -> None:
    wrong = OPERANDS.replace(
        key=Tensor.contiguous(OPERANDS.key.shape, "bfloat16"),
        query_scale=scale(2, 3),
        key_scale=None,
        value_scale=scale(3, 100, 2),
        output=Tensor.contiguous(OPERANDS.output.shape, "float32"),
    )
    allowed = "float32 (), (1,), (2,), (3, 2)"
    expected = [
        "value.dtype: bfloat16 as key",
        "key.dtype: float8_e4m3fn as query",
        "output.dtype: bfloat16 or float16",
    ]
    expect(wrong.refusals(), [*expected, f"query_scale: {allowed}", f"value_scale: {allowed}"])


LATENT = parse("bf16_d576v512_q1_s100_b3_h16k1_full_paged16_mla_kv8_descaletile").problem("forward")


@pytest.mark.parametrize("pages", ["", "_paged16"])
def test_latent_caches_with_columns_of_16_bits(pages: str) -> None:
    problem = parse(f"f16_d576v512_q1_s100_b3_h16k1_full{pages}_mla_kv8_descaletile").problem("forward")
    rows = problem.key.shape[:3]
    assert problem.reasons() == []
    assert problem.key_rope == Tensor.contiguous((*rows, 64), "float16")
    assert problem.key == problem.value == Tensor.contiguous((*rows, 512), "float8_e4m3fn")
    assert problem.key_scale == Tensor.contiguous((*rows, 4), "float32")
    assert problem.shape.head_dim == 576
    assert problem.operands()["key_scale"].strides["key_scale_tile"] == 1
    assert from_json(to_json(problem)) == problem
    packed = problem.replace(  # rows of 656 bytes
        key=Tensor(problem.key.shape, (656 * rows[1], 656, 656, 1), "uint8"),
        key_rope=Tensor((*rows, 64), (328 * rows[1], 328, 328, 1), "float16"),
        key_scale=Tensor((*rows, 4), (164 * rows[1], 164, 164, 1), "float32"),
    ).with_value_in_key()
    assert packed.reasons() == []
    assert packed.operands()["key_scale"].strides["key_scale_row"] == 164


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"key_scale": None}, "key_scale: float32 (22, 16, 1, 4) with key_rope, a scale of each 128"),
        ({"key_scale": scale(22, 16, 1)}, "key_scale: float32 (22, 16, 1, 4)"),
        ({"value_scale": scale()}, "value_scale: absent with key_rope, because value is in key"),
        ({"value_in_key": False}, "key_rope: query of bfloat16 with value_in_key = False"),
        ({"key_rope": Tensor.contiguous((22, 16, 1, 32), "bfloat16")}, "key_rope.shape: must be (22"),
        ({"key_rope": Tensor.contiguous((22, 16, 64), "bfloat16")}, "key_rope.shape: 4-D"),
        ({"key_rope": 3}, "key_rope: a Tensor, or None"),
    ],
)
def test_refusals_of_latent_caches(changes: dict[str, Any], expected: str) -> None:
    expect_among(LATENT.replace(**changes).refusals(), expected)


@pytest.mark.parametrize("name", ["e4m3_d64_q4_s64_b3_h8k2_full", "bf16_d64_q4_s64_b3_h8k2_full_kv8_descalerow"])
def test_a_backward_is_refused(name: str) -> None:
    forward, dense = parse(name).problem("forward"), parse("bf16_d64_q4_s64_b3_h8k2_full").problem("backward")
    changes = {name: getattr(forward, name) for name in ("query", "key", "value", "key_scale", "value_scale")}
    expect_among(dense.replace(**changes).refusals(), "direction: forward with operands of float8_e4m3fn")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "e4m3_d64_s64_b1_h1_full_kv8",
            "'kv8' belongs to f16 or bf16 or f32; write f16 or bf16 or f32 or leave it out",
        ),
        ("bf16_d64_s64_b1_h1_full_f16out", "'f16out' belongs to e4m3; write e4m3 or leave it out"),
        ("bf16_d64_s64_b1_h1_full_descalehead", "'descalehead' belongs to e4m3 or kv8"),
        ("e4m3_d64_s64_b1_h1_full_descalerow", "descalerow belongs to kv8"),
    ],
)
def test_contradictions_of_words(name: str, said: str) -> None:
    with pytest.raises(NotSupported, match=said):
        parse(name)


@pytest.mark.parametrize(
    "name",
    [
        "e4m3_d64_s64_b1_h1_full_descaletensor_f16out",
        "bf16_d64_s64_b1_h1_full_kv8",
        "f16_d64_s64_b1_h1_full_kv8_descalerow",
    ],
)
def test_words(name: str) -> None:
    assert parse(name).name == name
