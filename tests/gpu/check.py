"""Check: runs a case through the public functions and judges every result against float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn import driver, inputs, judge, reference
from cutlass_py_attn.artifact import Artifact, Folder
from cutlass_py_attn.attention import attention_backward, attention_forward
from cutlass_py_attn.errors import Stale
from cutlass_py_attn.plan import Build
from cutlass_py_attn.planner import plans_on
from tests.gpu.cases import Case

Array = npt.NDArray[Any]
Kernels = Callable[[Build], Artifact]

# The rounding of one query's output goes into every key's gradient. Low may have been lucky with a few queries,
# however many keys there are, so its error counts this many times.
FEW_QUERIES: Final = 64
LUCK: Final = 3.0
# With a single key dP - delta is a difference of equal numbers, each a whole row's sum of products. The errors of
# three TF32 products, summed by tensor cores that round towards zero, are about three times float32's own.
SINGLE_KEY: Final = {"float16": 5.0, "bfloat16": 5.0, "float32": 15.0}
GRADIENTS: Final[tuple[str, ...]] = ("grad_query", "grad_key", "grad_value")
OPERANDS: Final = ("query", "key", "value")


def kernels_from(folder: Path | None) -> Kernels:
    """Prebuilt kernels of a folder, or None for the compiler."""
    if folder is not None:
        return Folder(folder)
    from cutlass_py_attn.compiler import artifact_for

    return artifact_for


@functools.cache
def of_family(kernels: Kernels, family: str, direction: str) -> Kernels:
    """The same, but of the fused kernels of one direction those of one family alone, of the other's any; one object
    for each, for it is part of the key of what stays bound."""

    def chosen(build: Build) -> Artifact:
        if build.kind == direction and build.family != family:
            raise Stale(f"{build.symbol}: not of the {family} family")
        return kernels(build)

    return chosen


def families(case: Case) -> list[str]:
    """The families that this GPU has kernels of for a case, the first choice first."""
    gpu = driver.device(0)
    return list({plan.build.family: None for plan in plans_on(case.problem(), gpu.compute_capability, gpu.num_sms)})


def make(case: Case) -> dict[str, Array]:
    """query, key, value and grad_output of a case."""
    tensors = inputs.make(case.family, case.shape, case.variant.dtype, case.mask, case.seed)
    return dict(zip(inputs.NAMES, tensors, strict=True))


def attend(case: Case, arrays: dict[str, Array], kernels: Kernels) -> dict[str, Array]:
    """output and logsumexp, and the gradients of a backward case; arrays may be another library's."""
    common: dict[str, Any] = {"mask": case.mask, "scale": case.scale, "kernels": kernels}
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
            deterministic=case.variant.deterministic,
            num_splits_key=case.num_splits_key,
            **common,
        )
        found |= dict(zip(GRADIENTS, (gradients.query, gradients.key, gradients.value), strict=True))
    return found


def run(case: Case, kernels: Kernels) -> list[judge.Verdict]:
    """The verdicts on what this direction writes."""
    arrays = make(case)
    return verdicts(case, arrays, attend(case, arrays, kernels))


def verdicts(case: Case, arrays: dict[str, Array], found: dict[str, Array]) -> list[judge.Verdict]:
    """What judge.py says of results of this case: of the forward's, or of the gradients alone."""
    truth, low = (by_reference(case, arrays, kind) for kind in ("float64", case.variant.dtype))
    seen: Array = case.mask.materialise(case.num_queries, case.num_keys)
    rows, keys = (np.logical_not(seen.any(axis=axis)) for axis in (1, 0))
    unseen = {"output": rows, "grad_query": rows, "grad_key": keys, "grad_value": keys}
    names = ("output",) if case.direction == "forward" else GRADIENTS
    absolute = _cancelled(case, arrays)
    luck = LUCK if case.direction == "backward" and case.num_queries < FEW_QUERIES else 1.0
    result = []
    for name in names:
        yardstick = truth[name] + luck * (low[name] - truth[name])
        result += judge.judge(name, found[name], truth[name], yardstick, unseen=unseen[name], absolute=absolute[name])
    if case.direction == "forward":
        result.append(judge.judge_logsumexp(found["logsumexp"], truth["logsumexp"]))
    return result


def by_reference(case: Case, arrays: dict[str, Array], precision: str) -> dict[str, Array]:
    """The same results as `attend`'s, from NumPy in that precision."""
    options: dict[str, Any] = {"mask": case.mask, "scale": case.scale, "precision": precision}
    query, key, value = (arrays[name] for name in OPERANDS)
    output, logsumexp = reference.forward(query, key, value, **options)
    found = {"output": output, "logsumexp": logsumexp}
    if case.direction == "backward":
        gradients = reference.backward(arrays["grad_output"], query, key, value, output, logsumexp, **options)
        found |= dict(zip(GRADIENTS, gradients[:3], strict=True))
    return found


def _cancelled(case: Case, arrays: dict[str, Array]) -> dict[str, float]:
    """The judge's absolute floor supposes inputs of about one; what cancels here is a product of larger ones."""
    size = {name: max(1.0, _root_mean_square(array)) for name, array in arrays.items()}
    floor = judge.FLOORS[case.variant.dtype].absolute
    grad_scores = size["grad_output"] * size["value"]
    many = 1.0
    if case.num_keys == 1:
        grad_scores *= SINGLE_KEY[case.variant.dtype]
        many = max(1.0, math.sqrt(case.num_queries / FEW_QUERIES))  # errors of one sign or the other, one a query
    return {
        "output": floor * size["value"],
        "grad_query": floor * grad_scores * size["key"],
        "grad_key": floor * grad_scores * size["query"] * many,
        "grad_value": floor * size["grad_output"],
    }


def _root_mean_square(array: Array) -> float:
    return float(np.sqrt(np.mean(np.square(array.astype(np.float64))))) if array.size else 0.0


def expect(case: Case, found: Sequence[judge.Verdict]) -> None:
    """AssertionError with every verdict above 1 and the line that runs the case again."""
    failed = [verdict for verdict in found if not verdict.worst <= 1]
    assert not failed, "\n".join([*map(shown, failed), f'python -m tests.gpu.run --case "{case.line}"'])


def shown(verdict: judge.Verdict) -> str:
    """A verdict in one line: tensor, rule, error / allowed, place."""
    return f"{verdict.tensor:<11} {verdict.rule:<9} {verdict.worst:7.3f}  {verdict.where}"


def same_bits(left: Array, right: Array) -> bool:
    """Whether shape, dtype and every bit agree, NaN included."""
    return (
        left.shape == right.shape
        and left.dtype == right.dtype
        and np.ascontiguousarray(left).tobytes() == np.ascontiguousarray(right).tobytes()
    )
