"""Fake launch: stands in for `device_memory.GuardedLaunch` where there is no GPU, with given results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.artifact import first_available
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan.planner import plans_on
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.reference.numpy_reference import DTYPES
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Kernels
from cutlass_py_attn.testing.guarded_check import Expected

Array = npt.NDArray[Any]


class FakeLaunch:
    """A launch of `build` that returns `results`."""

    def __init__(self, build: Build, results: Mapping[str, Array]) -> None:
        self.bound = SimpleNamespace(plan=SimpleNamespace(build=build))
        self._results = dict(results)

    def run(self) -> dict[str, Array]:
        return self._results

    def __enter__(self) -> FakeLaunch:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def stored(case: Case, expected: Expected) -> dict[str, Array]:
    """The expected results, in the types in which kernels store them, with NaN where kernels write nothing."""
    found = {}
    for name, truth in expected.truth.items():
        found[name] = truth.astype(np.float32 if name in ("logsumexp", "grad_sinks") else DTYPES[case.spec.dtype])
        if case.spec.sequences and name not in ("logsumexp", "grad_sinks", "grad_bias"):
            found[name][:, case.spec.num_tokens[name in ("grad_key", "grad_value")] :] = np.nan
    return found


def on_hopper(results: Callable[[Build], Mapping[str, Array]]) -> Callable[..., FakeLaunch]:
    """`guarded_launch` of a GPU of compute capability 9.0 with 132 multiprocessors, whose kernels give `results`."""

    def guarded_launch(problem: Problem, operands: object, kernels: Kernels, philox: object = None) -> FakeLaunch:
        plan, _ = first_available(plans_on(problem, (9, 0), 132), kernels)
        return FakeLaunch(plan.build, results(plan.build))

    return guarded_launch
