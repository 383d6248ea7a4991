"""Check: runs a dense case through the public functions and compares every result with float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.artifact import Artifact, Folder
from cutlass_py_attn.errors import Stale
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan.planner import plans_on
from cutlass_py_attn.problem.masks import Mask
from cutlass_py_attn.reference import numpy_reference
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.testing import accuracy
from cutlass_py_attn.testing.cases import Case

Array = npt.NDArray[Any]
Kernels = Callable[[Build], Artifact]

# The rounding of one query's output is part of every key's gradient. With few queries the error of `low` may be small
# by luck, however many keys there are, so it counts LUCK times.
FEW_QUERIES: Final = 64
LUCK: Final = 3.0
# With a single key dP - delta is a difference of equal numbers, each a whole row's sum of products. The errors of
# three TF32 products, summed by tensor cores that round towards zero, are about three times float32's own.
SINGLE_KEY: Final = {"float16": 5.0, "bfloat16": 5.0, "float32": 15.0}
GRADIENTS: Final[tuple[str, ...]] = ("grad_query", "grad_key", "grad_value")
OPERANDS: Final = ("query", "key", "value")


def kernels_from(folder: Path | None) -> Kernels:
    """Returns the prebuilt kernels of a folder; for None the compiler."""
    if folder is not None:
        return Folder(folder)
    from cutlass_py_attn.compilation.compiler import artifact_for

    return artifact_for


@functools.cache
def only_family(kernels: Kernels, family: str, direction: str) -> Kernels:
    """Returns `kernels` without the fused kernels of this direction that belong to other families.

    Equal arguments give the same object, which is part of the key of the cache of bound kernels.
    """

    def select(build: Build) -> Artifact:
        if build.kind == direction and build.family != family:
            raise Stale(f"{build.symbol}: does not belong to the {family} family")
        return kernels(build)

    return select


def families(case: Case) -> list[str]:
    """Returns the kernel families that serve a case on this GPU, the planner's first choice first."""
    gpu = driver.device(0)
    return list({plan.build.family: None for plan in plans_on(case.problem(), gpu.compute_capability, gpu.num_sms)})


def attend(case: Case, arrays: dict[str, Array], kernels: Kernels) -> dict[str, Array]:
    """Returns output and logsumexp, and the gradients of a backward case, in the array library of `arrays`."""
    spec = case.spec
    common: dict[str, Any] = {"mask": case.mask_of(arrays), "scale": spec.scale, "kernels": kernels}
    query, key, value = (arrays[name] for name in OPERANDS)
    output, logsumexp = attention_forward(query, key, value, **common)
    found = {"output": output, "logsumexp": logsumexp}
    if case.direction == "backward":
        gradients = attention_backward(
            arrays["grad_output"],
            query,
            key,
            value,
            output,
            logsumexp,
            deterministic=spec.deterministic,
            num_splits_key=spec.num_splits_key,
            **common,
        )
        found |= dict(zip(GRADIENTS, (gradients.query, gradients.key, gradients.value), strict=True))
    return found


def run(case: Case, kernels: Kernels) -> list[accuracy.CheckResult]:
    """Runs a case and checks what its direction writes."""
    arrays = case.arrays()
    return results(case, arrays, attend(case, arrays, kernels))


def results(case: Case, arrays: dict[str, Array], found: dict[str, Array]) -> list[accuracy.CheckResult]:
    """Returns the accuracy checks of the forward's results, or of the gradients of a backward case."""
    spec = case.spec
    truth, low = (by_reference(case, arrays, kind) for kind in ("float64", spec.dtype))
    unseen = unseen_rows(case, arrays)
    names = ("output",) if case.direction == "forward" else GRADIENTS
    absolute = _absolute_floors(case, arrays)
    luck = LUCK if case.direction == "backward" and spec.num_queries < FEW_QUERIES else 1.0
    checked = []
    for name in names:
        yardstick = truth[name] + luck * (low[name] - truth[name])
        checked += accuracy.check(
            name, found[name], truth[name], yardstick, unseen=unseen[name], absolute=absolute[name]
        )
    if case.direction == "forward":
        checked.append(accuracy.check_logsumexp(found["logsumexp"], truth["logsumexp"]))
    return checked


def unseen_rows(case: Case, arrays: dict[str, Array]) -> dict[str, Array]:
    """Returns which rows of each result no visible pair reaches, bool (rows), or (batch, rows, heads) with a mask
    in memory. The case has one length."""
    spec, mask = case.spec, case.mask_of(arrays)
    if isinstance(mask, Mask):
        visible: Array = mask.materialise(spec.num_queries, spec.num_keys)
        rows, keys = (np.logical_not(visible.any(axis=axis)) for axis in (1, 0))
    else:
        heads = spec.num_heads_key, spec.num_heads // spec.num_heads_key
        visible = case.visible(mask)
        rows = np.logical_not(visible.any(axis=3)).swapaxes(1, 2)
        by_head = visible.any(axis=2).reshape(spec.batch, *heads, spec.num_keys)
        keys = np.logical_not(by_head.any(axis=2)).swapaxes(1, 2)
    return {"output": rows, "grad_query": rows, "grad_key": keys, "grad_value": keys}


def by_reference(case: Case, arrays: dict[str, Array], precision: str) -> dict[str, Array]:
    """Returns the results of `attend` from the NumPy reference in that precision."""
    options: dict[str, Any] = {"mask": case.mask_of(arrays), "scale": case.spec.scale, "precision": precision}
    query, key, value = (arrays[name] for name in OPERANDS)
    output, logsumexp = numpy_reference.forward(query, key, value, **options)
    found = {"output": output, "logsumexp": logsumexp}
    if case.direction == "backward":
        gradients = numpy_reference.backward(arrays["grad_output"], query, key, value, output, logsumexp, **options)
        found |= dict(zip(GRADIENTS, gradients[:3], strict=True))
    return found


def _absolute_floors(case: Case, arrays: dict[str, Array]) -> dict[str, float]:
    """Returns the absolute floor of each result. Floor.absolute assumes inputs of about one; these may be larger."""
    spec = case.spec
    size = {name: max(1.0, _root_mean_square(array)) for name, array in arrays.items()}
    floor = accuracy.FLOORS[spec.dtype].absolute
    grad_scores = size["grad_output"] * size["value"]
    accumulated = 1.0
    if spec.num_keys == 1:
        grad_scores *= SINGLE_KEY[spec.dtype]
        accumulated = max(1.0, math.sqrt(spec.num_queries / FEW_QUERIES))  # one error of random sign for each query
    return {
        "output": floor * size["value"],
        "grad_query": floor * grad_scores * size["key"],
        "grad_key": floor * grad_scores * size["query"] * accumulated,
        "grad_value": floor * size["grad_output"],
    }


def _root_mean_square(array: Array) -> float:
    return float(np.sqrt(np.mean(np.square(array.astype(np.float64))))) if array.size else 0.0


def assert_accurate(case: Case, checked: Sequence[accuracy.CheckResult]) -> None:
    """Raises AssertionError with every check above 1 and the command that runs the case again."""
    failed = [result for result in checked if not result.worst <= 1]
    assert not failed, "\n".join([*map(str, failed), f'python -m tests.gpu.run --case "{case.line}"'])


def same_bits(left: Array, right: Array) -> bool:
    """Whether shape, dtype and every bit agree, NaN included."""
    return (
        left.shape == right.shape
        and left.dtype == right.dtype
        and np.ascontiguousarray(left).tobytes() == np.ascontiguousarray(right).tobytes()
    )
