"""Run on the CPU: checks the NumPy reference against independent laws, on machines without a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cutlass_py_attn.problem import masks
from cutlass_py_attn.problem.spec import parse_mask
from cutlass_py_attn.problem.tensors import Shape
from cutlass_py_attn.reference import numpy_reference
from cutlass_py_attn.reference.numpy_reference import Array
from cutlass_py_attn.testing import inputs

SHAPE = Shape(batch=2, num_queries=40, num_keys=56, num_heads=2, head_dim=16, head_dim_value=24)
NAMES = ("Q", "K", "V")
SEED = 1
STEP = 1e-5  # of the central difference, whose own error is about STEP**2
DIFFERENCE_LIMIT = 1e-9
LAW_LIMIT = 1e-12


@dataclass(frozen=True, slots=True)
class Check:
    """One law under one mask: the error found and the limit."""

    mask: str
    law: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the limit; NaN is not."""
        return self.error <= self.limit


def check(mask_name: str) -> list[Check]:
    """Checks the gradients against finite differences, and sum(dV) = sum(dO) over the rows with a visible key.

    mask_name: words of problem/spec.py
    """
    mask = parse_mask(mask_name)
    made = inputs.make("gaussian", SHAPE, "float32", mask, SEED)
    query, key, value, grad_output = (tensor.astype(np.float64) for tensor in made)
    output, logsumexp = numpy_reference.forward(query, key, value, mask=mask)
    gradients = numpy_reference.backward(grad_output, query, key, value, output, logsumexp, mask=mask)
    checks = [
        Check(mask_name, f"d{name} = finite difference", error, DIFFERENCE_LIMIT)
        for name, error in _difference_errors((query, key, value), gradients[:3], grad_output, mask).items()
    ]
    sees = mask.materialise(SHAPE.num_queries, SHAPE.num_keys).any(axis=1)
    law = relative_error(gradients[2].sum(axis=1), grad_output[:, sees].sum(axis=1))
    return [*checks, Check(mask_name, "sum(dV) = sum(dO)", law, LAW_LIMIT)]


def relative_error(found: Array, truth: Array) -> float:
    """Returns the relative L2 distance of `found` from `truth`."""
    wanted = np.asarray(truth, np.float64)
    distance = float(np.linalg.norm(np.asarray(found, np.float64) - wanted))
    return distance / max(float(np.linalg.norm(wanted)), np.finfo(np.float64).tiny)


def _difference_errors(
    operands: tuple[Array, ...], gradients: tuple[Array, ...], grad_output: Array, mask: masks.Mask
) -> dict[str, float]:
    """Compares, for each operand, the slope of sum(O dO) along a random direction with the gradient's."""
    rng = np.random.default_rng(SEED)
    errors = {}
    for index, (name, gradient) in enumerate(zip(NAMES, gradients, strict=True)):
        direction = rng.standard_normal(gradient.shape)
        ends = []
        for step in (STEP, -STEP):
            moved = list(operands)
            moved[index] = operands[index] + step * direction
            output, _ = numpy_reference.forward(moved[0], moved[1], moved[2], mask=mask)
            ends.append(float((output * grad_output).sum()))
        slope = (ends[0] - ends[1]) / (2 * STEP)
        size = float(np.linalg.norm(gradient) * np.linalg.norm(direction))
        errors[name] = abs(slope - float((gradient * direction).sum())) / size
    return errors
