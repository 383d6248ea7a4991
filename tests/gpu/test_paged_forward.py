"""Paged forward on the GPU: chunks of a prefill over pools of pages, against float64.

Every row of a pool that is no key is NaN, and so is every page that no sequence has. Entries of the table behind the
last key are far outside of the pools.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from cutlass_py_attn.runtime import driver
from cutlass_py_attn.testing.check import Array, Kernels, only_family, same_bits
from cutlass_py_attn.testing.device_memory import guarded_launch, stream
from tests.cases import paged_forward_cases
from tests.cases.paged_forward_cases import PagedCase, PagedInputs, PageSizes
from tests.gpu.test_launch import captured

pytestmark = pytest.mark.usefixtures("on_this_gpu")
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
GUARD = 1 << 17  # elements: more than the rows of a pool


def label(value: object) -> str:
    """The name of a parameter in the name of a test."""
    if isinstance(value, PageSizes):
        return value.name
    return value.label if isinstance(value, PagedCase) else str(value)


def launch(given: PagedInputs, family: str, kernels: Kernels) -> dict[str, Array]:
    """The results of one launch by kernels of a family."""
    with guarded_launch(given.case.problem(), given.arrays, only_family(kernels, family, "forward")) as guarded:
        return guarded.run()


SAME_BITS = [(each, each.family) for each in paged_forward_cases.SAME_BITS]


@pytest.mark.parametrize(("each", "family"), SAME_BITS, ids=label)
def test_page_size_and_pool_change_no_bit(each: PageSizes, family: str, kernels: Kernels) -> None:
    first, *others = (paged_forward_cases.inputs(case) for case in each.cases())
    expected = launch(first, family, kernels)
    assert paged_forward_cases.worst_ratio(first, expected) <= 1, first.case.label
    for given in others:
        found = launch(given, family, kernels)
        assert all(same_bits(expected[name], found[name]) for name in expected), given.case.label


@pytest.mark.parametrize(("case", "family"), paged_forward_cases.SINGLE, ids=label)
def test_results(case: PagedCase, family: str, kernels: Kernels) -> None:
    given = paged_forward_cases.inputs(case)
    assert paged_forward_cases.worst_ratio(given, launch(given, family, kernels)) <= 1


def wrong(given: PagedInputs) -> Iterator[tuple[int, dict[str, Array]]]:
    """Yields (sequence, arrays) with wrong lengths, bounds or entries of that sequence; others keep theirs."""
    case, arrays = given.case, given.arrays
    longest = max(case.num_pages) * case.page_size
    for number in range(len(case.lengths)):
        for length in (INT_MIN, -1, longest + 1, INT_MAX):
            yield number, arrays | {"seqused_k": with_value(arrays["seqused_k"], number, length)}
    for number in (0, 4):
        for entry in (INT_MIN, -1, 2**30, INT_MAX):
            if case.has_indptr:
                place = int(arrays["page_indptr"][number])
                yield number, arrays | {"page_table": with_value(arrays["page_table"], place, entry)}
            else:
                table = arrays["page_table"].copy()
                table[number, 0] = entry
                yield number, arrays | {"page_table": table}
    if case.has_indptr:  # the last bound is of the last sequence alone
        for bound in (INT_MIN, -1, INT_MAX):
            bounds = with_value(arrays["page_indptr"], len(case.lengths), bound)
            yield len(case.lengths) - 1, arrays | {"page_indptr": bounds}


def with_value(array: Array, place: int, value: int) -> Array:
    """A copy of the array with another value at one place."""
    found = array.copy()
    found[place] = value
    return found


@pytest.mark.parametrize(("case", "family"), paged_forward_cases.WRONG, ids=label)
def test_wrong_values_concern_their_sequence_alone(case: PagedCase, family: str, kernels: Kernels) -> None:
    given = paged_forward_cases.inputs(case)
    starts = given.arrays["cu_seqlens_q"]
    select = only_family(kernels, family, "forward")
    with guarded_launch(case.problem(), given.arrays, select, guard=GUARD) as guarded:
        expected = guarded.run()
        for number, arrays in wrong(given):
            for name in ("seqused_k", "page_table", *(["page_indptr"] if case.has_indptr else [])):
                guarded.buffers[name].change(arrays[name])
            found = guarded.run()
            for other in set(range(len(case.lengths))) - {number}:
                rows = slice(starts[other], starts[other + 1])
                assert same_bits(expected["output"][:, rows], found["output"][:, rows]), (number, other)


@pytest.mark.parametrize(("case", "family"), paged_forward_cases.WRONG, ids=label)
def test_one_captured_launch_serves_all_lengths(case: PagedCase, family: str, kernels: Kernels) -> None:
    given = paged_forward_cases.inputs(case)
    select = only_family(kernels, family, "forward")
    with guarded_launch(case.problem(), given.arrays, select) as guarded, stream() as handle:
        guarded.launch(handle)  # what is loaded at first use must be before the capture
        graph = captured(guarded.launch, handle)
        for divisor in (2, 1000, 1):
            lengths = tuple((queries, keys // divisor) for queries, keys in case.lengths)
            used = given.arrays | {"seqused_k": np.array([keys for _, keys in lengths], np.int32)}
            guarded.buffers["seqused_k"].change(used["seqused_k"])
            guarded.reset()
            driver.call("cuGraphLaunch", graph, handle)
            driver.synchronise(handle)
            shorter = PagedInputs(replace(case, lengths=lengths), used, given.pages)
            assert paged_forward_cases.worst_ratio(shorter, guarded.read()) <= 1, divisor
