"""Sizes: a call is planned for the sizes of its arrays, so that all of them are known when it is traced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cutlass_py_attn.refusals import Refusal, refuse


def refusals(arrays: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yields why arrays with symbolic sizes, such as those of jax.export.symbolic_shape, are refused."""
    for name, array in arrays.items():
        shape = _shape_of(array)
        symbolic = [str(size) for size in shape if not isinstance(size, (int, np.integer))]
        if symbolic:
            rule = f"must have no symbolic size, {', '.join(symbolic)}, for a call is planned for its sizes"
            yield refuse(f"{name}.shape", shape, rule, "export a program for each of them")


def _shape_of(array: Any) -> tuple[Any, ...]:
    """Returns the shape of an array; () for what has none, which is refused where it is read."""
    try:
        shape = getattr(array, "shape", ())
    except Exception:  # an attribute that raises whatever it likes
        return ()
    return shape if isinstance(shape, tuple) else ()
