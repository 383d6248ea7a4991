"""Inputs: what a host passes to a launch, a number or the address of an array, as a manifest describes it."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass_py_attn.launch.expressions import Expr


@dataclass(frozen=True, slots=True)
class Input:
    """A number that may differ from launch to launch. type: i64 or f64; value: that of the exported problem."""

    type: str
    value: float
    meaning: str


@dataclass(frozen=True, slots=True)
class Pointer:
    """An array in device memory. shape: rules; strides: names of inputs, or rules; alignment (bytes)."""

    dtype: str
    shape: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    alignment: int
    access: str  # read or write
    meaning: str
