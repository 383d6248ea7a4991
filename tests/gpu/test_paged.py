"""Caches in pages on the GPU, in guarded buffers: NaN in every row and 2**30 in every entry that no kernel may use."""

from __future__ import annotations

import numpy as np
import pytest

from cutlass_py_attn.runtime import driver
from cutlass_py_attn.testing import check, guarded_check
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Array, same_bits
from cutlass_py_attn.testing.device_memory import GuardedLaunch, guarded_launch, stream
from tests.cases import paged_cases
from tests.gpu.test_launch import captured

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
CACHE = ("key", "value", "page_table", "seqused_k")
TABLES = ("page_table", "seqused_k", "page_indptr")


def name_of(case: Case) -> str:
    """Returns the id of a test."""
    return case.line.replace(" ", "_")


def change_cache(guarded: GuardedLaunch, arrays: dict[str, Array]) -> None:
    """Writes the pools, the table and the lengths of a case to the device."""
    for name in ("query", *CACHE):
        guarded.buffers[name].change(arrays[name])


@pytest.mark.parametrize("case", paged_cases.DECODE, ids=name_of)
def test_decode(case: Case, kernels: check.Kernels) -> None:
    """Two launches give the same bits, from a workspace full of ones."""
    guarded_check.check_decode(case, kernels)


def test_one_captured_launch_serves_all_lengths(kernels: check.Kernels) -> None:
    first = paged_cases.REPLAYED
    with guarded_launch(first.problem(), first.arrays(), kernels) as guarded, stream() as handle:
        guarded.launch(handle)  # what is loaded at first use must be before the capture
        graph = captured(guarded.launch, handle)
        for used in paged_cases.REPLAYED_LENGTHS:
            case = paged_cases.with_lengths(first, used).replace(seed=sum(used))
            expected = guarded_check.expect(case)
            change_cache(guarded, expected.arrays)
            guarded.reset()
            driver.call("cuGraphLaunch", graph, handle)
            driver.synchronise(handle)
            worst = guarded_check.ratios(case, expected, guarded.read())
            assert all(ratio <= 1 for ratio in worst.values()), (used, worst)


def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(kernels: check.Kernels) -> None:
    whole = paged_cases.INVARIANT
    arrays = whole.arrays()
    with guarded_launch(whole.problem(), arrays, kernels) as guarded:
        together = guarded.run()
    for number, lengths in enumerate(whole.spec.sequences):
        case = whole.replace(sequences=(lengths,))
        one = {name: arrays[name][number : number + 1] for name in ("query", "page_table", "seqused_k")}
        problem = case.problem().replace(key=whole.problem().key, value=whole.problem().value)
        with guarded_launch(problem, arrays | one, kernels) as guarded:
            found = guarded.run()
        for name in ("output", "logsumexp"):
            assert same_bits(found[name], together[name][number : number + 1]), (number, name)


@pytest.mark.parametrize("table", ["rows", "csr"])
def test_wrong_tables_and_lengths_lead_nowhere(table: str, kernels: check.Kernels) -> None:
    """What a kernel reads is clamped: no guard changes, and sequences that are right have the results of right ones."""
    rng = np.random.default_rng(5)
    case = paged_cases.REPLAYED.replace(table=table, seed=3)
    expected = guarded_check.expect(case)
    arrays = expected.arrays
    with guarded_launch(case.problem(), arrays, kernels) as guarded:
        right = guarded.run()
        for _ in range(20):
            wrong = {name: arrays[name].copy() for name in TABLES if name in arrays}
            broken = int(rng.integers(0, 2)) * 3  # the sequence with one key, or the one with all
            values = (INT_MIN, -1, INT_MAX, 1 << 30, arrays["key"].shape[0])
            wrong["seqused_k"][broken] = values[int(rng.integers(0, 3))]
            value = values[int(rng.integers(0, len(values)))]
            if table == "rows":
                wrong["page_table"][broken] = value
            else:
                wrong["page_indptr"][int(rng.integers(0, case.spec.batch + 1))] = value
            for name, array in wrong.items():
                guarded.buffers[name].change(array)
            found = guarded.run()
            for number in range(case.spec.batch):
                if number != broken and table == "rows":
                    close = np.abs(found["output"][number].astype(float) - right["output"][number].astype(float))
                    assert close.max() <= 0.02, number
