"""The host as a machine: NumPy arrays, and the reference in float64. For tests without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cutlass_py_attn.api import cpu_backend
from cutlass_py_attn.api.attention import AttentionRequest
from cutlass_py_attn.api.options import Options
from cutlass_py_attn.distributed.communicator import Message
from cutlass_py_attn.distributed.machine import Arrays, Machine, as_options
from cutlass_py_attn.reference import serving
from cutlass_py_attn.runtime.arrays import numpy_dtype


class Host(Machine):
    """Computes with `backend="reference"`."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return np.empty(shape, numpy_dtype(dtype))

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        return np.zeros(shape, numpy_dtype(dtype))

    def constant(self, values: np.ndarray[Any, Any]) -> Any:
        return values.copy()

    def result(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        return self.empty(shape, dtype)

    def copy(self, target: Any, source: Any) -> None:
        target[...] = source

    def fill_infinite(self, logsumexp: Any) -> None:
        logsumexp[...] = np.inf

    def forward(self, options: Options, operands: Arrays, output: Any = None) -> Arrays:
        given = as_options(options, operands, out=output, grad_logsumexp=None)
        return cpu_backend.compute(AttentionRequest("forward", operands, given))

    def backward(self, options: Options, operands: Arrays, gradients: tuple[str, ...]) -> Arrays:
        changes = {"out": None, "gradients": gradients, "grad_logsumexp": operands.get("grad_logsumexp")}
        given = as_options(options, operands, **changes)
        results = cpu_backend.compute(AttentionRequest("backward", operands, given))
        return {name: results[f"grad_{name}"] for name in gradients}

    def merge(self, total: Any, logsumexp: Any, part: Any, logsumexp_part: Any) -> Any:
        output, merged = serving.merge(total, logsumexp, part, logsumexp_part)
        total[...] = output.astype(total.dtype)
        return merged.astype(np.float32)

    def add(self, total: Any, part: Any, target: Any = None) -> None:
        target = total if target is None else target
        target[...] = (total.astype(np.float64) + part.astype(np.float64)).astype(target.dtype)

    def start(self, sends: list[Message], receives: list[Message]) -> Callable[[], None]:
        self.group.exchange(sends, receives)
        return lambda: None
