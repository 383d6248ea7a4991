"""Tests of large runs on the fake driver: right results pass, and a row at a wrong place does not."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.arrays import numpy_dtype
from cutlass_py_attn.testing import guarded_check
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Array
from tests.gpu import large_run
from tests.gpu.large_run import LargeRun, Repeated, Sample, samples_at
from tests.support.fake_driver import FakeDriver

DENSE = Case.parse("backward bf16_d16_q40_s50_b3_h2_causal seed=1")
PACKED = Case.parse("backward f16_d16_n40x50,1,33_h2_window_left9_right0 seed=2")
GROUPED = Case.parse("forward bf16_d16_q1_s50_b3_h4k2_full seed=3")


def memory(run: LargeRun, name: str) -> Array:
    """Returns a view of a tensor."""
    tensor = run.tensors[name]
    dtype = numpy_dtype(tensor.dtype)
    size = int(np.prod(tensor.shape)) * dtype.itemsize
    buffer = (ctypes.c_ubyte * size).from_address(run.addresses[name])
    return np.frombuffer(buffer, dtype).reshape(tensor.shape)


def compute(run: LargeRun) -> None:
    """Writes the reference's results, as kernels would."""
    case = run.case
    arrays = {name: memory(run, name).copy() for name in run.sources}
    arrays |= case.feature_arrays(case.problem(), np.random.default_rng(0))
    forward = guarded_check.by_reference(case.replace(direction="forward"), arrays, "float64")
    output = forward["output"].astype(arrays["query"].dtype)
    results = forward | {"output": output}
    if case.direction == "backward":
        given = arrays | {"output": output, "logsumexp": forward["logsumexp"].astype(np.float32)}
        found = guarded_check.by_reference(case, given, "float64")
        results |= {f"grad_{name}": found[f"grad_{name}"] for name in ("query", "key", "value")}
    for name, array in results.items():
        memory(run, name)[...] = array.astype(memory(run, name).dtype)


@pytest.mark.parametrize("period", [7, large_run.PERIOD])
@pytest.mark.parametrize("case", [DENSE, PACKED, GROUPED], ids=lambda case: case.spec.name)
def test_right_results_pass_and_moved_ones_do_not(
    case: Case, period: int, driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_run, "PERIOD", period)
    samples = [Sample(0, 1, (0,)), Sample(2, case.spec.num_heads - 1, (0,))]
    if case.spec.num_queries > 1:
        samples += [Sample(0, 0, (30, 39)), Sample(2, 1, (31, 32))]
    with driver.device(0).current(), large_run.large_run(case, large_run.repeated(case)) as run:
        names = [name for name in run.tensors if name not in run.sources and name != "logsumexp"]
        run.expect_guards()
        with pytest.raises(AssertionError, match="elements are NaN"):
            run.expect_written(names)
        compute(run)
        run.check(samples)
        if not case.spec.sequences:
            run.expect_written(names)
        for name in names:
            view = memory(run, name)
            view[...] = np.roll(view, 1, axis=2)
            with pytest.raises(AssertionError, match="error / allowed"):
                run.check(samples)
            view[...] = np.roll(view, -1, axis=2)
        run.check(samples)
        memory(run, "query")
        guard = run.addresses["output"] + large_run._bytes_of(run.tensors["output"])
        ctypes.c_ubyte.from_address(guard).value = 0
        with pytest.raises(AssertionError, match="memory behind output"):
            run.expect_guards()
    assert len(driver_log.of("cuMemAlloc")) == len(driver_log.of("cuMemFree"))


def test_samples_are_at_the_elements() -> None:
    row = DENSE.spec.head_dim
    heads, queries = DENSE.spec.num_heads, DENSE.spec.num_queries
    element = ((1 * queries + 39) * heads + 1) * row + 3
    assert samples_at(DENSE, [0, element]) == [Sample(0, 0, (0, 1, 2)), Sample(1, 1, (37, 38, 39))]
    assert samples_at(PACKED, [40 * heads * row, 41 * heads * row]) == [Sample(1, 0, (0,)), Sample(2, 0, (0, 1, 2))]


def test_a_repeated_block_differs_wherever_an_address_wraps() -> None:
    """At powers of two of elements and bytes, for rows of any power of two of channels."""
    block = Repeated(np.random.default_rng(0).standard_normal((large_run.PERIOD, 8), np.float32))
    rows = np.arange(100)
    for bits in range(10, 40):
        assert not (block.rows(rows) == block.rows(rows + 2**bits)).all(axis=1).any()
