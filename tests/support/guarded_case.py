"""Guarded case: a case bound to guarded buffers, with the numbers of its dropout."""

from __future__ import annotations

from cutlass_py_attn.testing import device_memory, guarded_check
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Kernels


def guarded_case(case: Case, expected: guarded_check.Expected, kernels: Kernels) -> device_memory.GuardedLaunch:
    """Returns the bound kernels and buffers of a case whose seed is not in device memory."""
    philox = {"philox_seed": case.philox_seed, "philox_offset": case.philox_offset} if case.spec.dropout_p else None
    return device_memory.guarded_launch(case.problem(), expected.arrays, kernels, philox)
