"""Tests of api/dropout_mask.py: every objection to a Dropout, and none to another part of it."""

from __future__ import annotations

from typing import Any

import pytest

import cutlass_py_attn
from cutlass_py_attn import Dropout
from cutlass_py_attn.errors import NotSupported

DEVICE = type("DeviceInt64", (), {"dtype": "int64", "__dlpack__": None, "__repr__": lambda self: "a device's int64"})()
SEED_ON_DEVICE = "philox_seed = a device's int64"


def test_a_mask_of_a_dropout() -> None:
    found = cutlass_py_attn.dropout_mask(Dropout(0.5, 1), 2, 3, 4, 5)
    assert (found.shape, found.any(), found.all()) == ((2, 3, 4, 5), True, False)


@pytest.mark.parametrize(("probability", "kept"), [(0.0, True), (1.0, False)])
def test_a_mask_that_keeps_all_or_nothing(probability: float, kept: bool) -> None:
    assert (cutlass_py_attn.dropout_mask(Dropout(probability, 1), 1, 2, 3, 4) == kept).all()


@pytest.mark.parametrize(
    ("dropout", "reasons"),
    [
        (Dropout(0.5, DEVICE, DEVICE), [SEED_ON_DEVICE]),
        (Dropout(2.0, 1), ["dropout_p = 2.0 (float): must be a probability from 0 to 1"]),
        (Dropout(2.0, 2**64), ["philox_seed = 18446744073709551616", "dropout_p = 2.0"]),
        (Dropout("x", 1), ["dropout_p = 'x' (str)"]),  # type: ignore[arg-type]
        (0.5, ["dropout = 0.5 (float): must be a Dropout object"]),
    ],
)
def test_a_wrong_dropout_is_refused_for_what_is_wrong(dropout: Any, reasons: list[str]) -> None:
    with pytest.raises(NotSupported) as caught:
        cutlass_py_attn.dropout_mask(dropout, 1, 1, 2, 2)
    found = str(caught.value).splitlines()
    assert len(found) == len(reasons)
    assert all(line.startswith(reason) for line, reason in zip(found, reasons, strict=True))
