"""kernels/common/paging.py and paged_tile_copy.py: machine code, executed on right and wrong tables and lengths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cutlass_py_attn.launch import abi
from cutlass_py_attn.plan import launch_rules, planner
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.runtime import params
from tests.cases.paged_forward_cases import PagedCase
from tests.support.ptx_threads import Array, Threads
from tests.support.traced import compile_traced

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
BATCH, PAGES, MAX_PAGES = 60, 40, 9
OUTPUT = 256
HUGE = 2**34  # elements from one page to the next: offsets need 64 bits


def problem_of(page_size: int, *, has_indptr: bool) -> Problem:
    """A problem whose pools are far larger than 32 bits count."""
    lengths = ((1, MAX_PAGES * page_size),) * BATCH
    problem = PagedCase("f32_d64_h4k2_full", page_size, lengths, has_indptr=has_indptr).problem()
    pool = Tensor((PAGES, page_size, 2, 64), (HUGE, 4096, 256, 1), "float32")
    value = Tensor((PAGES, page_size, 2, 64), (3 * 2**20, 2048, 64, 1), "float32")
    assert problem.pages is not None
    return problem.replace(key=pool, value=value, pages=replace(problem.pages, batch=BATCH))


def arrays_of(rng: np.random.Generator, page_size: int, *, has_indptr: bool) -> dict[str, Array]:
    """Tables and lengths, of which about a third are wrong."""
    wrong = np.array([INT_MIN, INT_MIN + 1, -1, PAGES, 2**30, INT_MAX])
    shape = (BATCH * MAX_PAGES,) if has_indptr else (BATCH, MAX_PAGES)
    table = rng.integers(0, PAGES, shape)
    used = rng.integers(0, MAX_PAGES * page_size + 1, BATCH)
    found = {"page_table": table, "seqused_k": used}
    if has_indptr:
        found["page_indptr"] = np.sort(rng.integers(0, BATCH * MAX_PAGES, BATCH + 1))
    for array in found.values():
        places = rng.random(array.shape) < 0.3
        array[places] = rng.choice(wrong, int(places.sum()))
    return {name: array.astype(np.int32) for name, array in found.items()}


def expected(problem: Problem, arrays: dict[str, Array], number: int, row: int) -> tuple[int, int, int]:
    """The keys of a sequence, and where a row of it lies in key and value at head 1."""
    table = arrays["page_table"].astype(np.int64)
    page_size = problem.key.shape[1]
    if "page_indptr" in arrays:
        first, end = arrays["page_indptr"][number : number + 2].astype(np.int64)
        first = min(max(first, 0), table.size)
        entries = table[first : min(max(end, first), table.size)]
    else:
        entries = table[number]
    keys = min(max(int(arrays["seqused_k"][number]), 0), entries.size * page_size)
    if row >= keys:
        return keys, problem.key.strides[2], problem.value.strides[2]
    page = min(max(int(entries[row // page_size]), 0), PAGES - 1)
    place = page, row % page_size, 1, 0
    offsets = (int(np.dot(place, tensor.strides)) for tensor in (problem.key, problem.value))
    return keys, *offsets


@pytest.mark.parametrize("has_indptr", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16, 256])
def test_rows_lie_in_their_pages(page_size: int, has_indptr: bool) -> None:
    paging_kernel = pytest.importorskip("tests.support.paging_kernel")
    problem = problem_of(page_size, has_indptr=has_indptr)
    build = next(it.build for it in planner.plans(problem, "sm_80") if it.build.family == "sm80")
    ptx = compile_traced(build, paging_kernel.trace).ptx
    arrays = arrays_of(np.random.default_rng(page_size), page_size, has_indptr=has_indptr)
    rows = np.zeros((BATCH, build.threads, len(paging_kernel.FIELDS)), np.int64)
    named = {"output": rows, **arrays}
    starts = dict(zip(named, OUTPUT + np.cumsum([0, *(array.nbytes for array in named.values())]), strict=False))
    memory = np.concatenate(
        [np.zeros(OUTPUT, np.uint8), *(np.ascontiguousarray(it).reshape(-1).view(np.uint8) for it in named.values())]
    )
    struct = np.zeros(1, abi.numpy_struct(abi.fields_of(build)))
    for field, value in {
        **params.numbers(problem, problem.operands()),
        **dict(launch_rules.params(problem, build)),
        **starts,
    }.items():
        struct[field] = value
    Threads(ptx, (BATCH, 1), build.threads, memory, struct).run()
    found = memory[OUTPUT : OUTPUT + rows.nbytes].view(np.int64).reshape(rows.shape)
    for number in range(BATCH):
        for thread in range(build.threads):
            row = paging_kernel.FIRST_ROW + thread
            assert tuple(found[number, thread]) == expected(problem, arrays, number, row), (number, row)
