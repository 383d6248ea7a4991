"""Tests of the C library: it chooses and launches what the planner plans, from C and C++, on the fake driver."""

from __future__ import annotations

import ctypes
import itertools
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from cutlass_py_attn.bundle.files import Bundle
from cutlass_py_attn.problem import spec
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Window
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import BIASES, BMHK, Sequences, Shape, Tensor
from cutlass_py_attn.runtime import binding
from cutlass_py_attn.runtime.driver import device
from tests.support import front_ends
from tests.support.bundle_hosts import ADDRESSES, STREAM, WORKSPACE
from tests.support.fake_driver import FakeDriver
from tests.support.library_host import STATUS, LibraryHost, filled, target_of
from tests.support.library_launches import SEEDS, by_library, by_package, expected_plan, library, listed, other_plan

# The calls of calls.txt by exported case, with their directions: those whose layouts `drawn` can change.
CASES = {
    row.exported: row.directions
    for row in front_ends.rows()
    if not re.search("kv8|mla|e4m3|gradlse|deviceseed|u30|ranges", row.exported)
}


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return library()[0]


@pytest.fixture(scope="module")
def host() -> LibraryHost:
    return library()[1]


# The choice of a kernel

# The first two are those of the fake driver's GPUs, on which the call is launched too.
TARGETS = (("sm_90a", 132), ("sm_86", 84), ("sm_90a", 16), ("sm_80", 108), ("sm_89", 142))
DRAWN = 500


def drawn(draw: random.Random, case: str) -> Problem:
    """A problem of the kinds of a case with other sizes, strides, alignments, masks and factors."""
    if "paged" in case:
        return drawn_prefill(draw) if "causal" in case else drawn_pages(draw)
    problem = spec.parse(case).problem(draw.choice(CASES[case]))
    old = problem.shape
    is_decode = old.num_queries <= 16
    group = draw.choice((1, 2, 3, 4, 8, 16)) if old.group > 1 or draw.random() < 0.2 else 1
    heads_key = draw.randint(1, 9)
    queries = draw.randint(1, 20 if is_decode else draw.choice((200, 3000, 9000)))
    keys = draw.choice((draw.randint(1, 300), draw.randint(1, 9000), queries if not is_decode else 9000))
    batch = draw.choice((1, 2, 300, draw.randint(1, 70)))
    tokens = None if old.tokens is None else (queries + draw.randint(0, 99), keys + draw.randint(0, 99))
    shape = Shape(batch, queries, keys, heads_key * group, old.head_dim, old.head_dim_value, heads_key, tokens)
    alignment = draw.choice((16,) * 12 + (8, 4))
    changes: dict[str, Any] = {}
    for name, tensor in problem.tensors().items():
        wanted = shape.of(name) if name in BMHK else shape.bias
        if name in BIASES:
            wanted = tuple(1 if size == 1 else full for size, full in zip(tensor.shape, wanted, strict=True))
        strides = Tensor.contiguous(wanted, tensor.dtype).strides
        factor = draw.choice((1, 1, 3))
        strides = (*(step * factor for step in strides[:3]), strides[3])
        if name in ("query", "key") and draw.random() < 0.1:
            strides = (strides[0], -strides[1], *strides[2:])
        found = alignment if name in BMHK else 16
        changes[name] = replace(tensor, shape=wanted, strides=strides, alignment=max(found, 4))
    for name, tensor in problem.vectors().items():
        if name in ("alibi_slopes", "sinks", "grad_sinks"):
            changes[name] = Tensor.contiguous((batch, shape.num_heads)[-len(tensor.shape) :], "float32")
    if problem.sequences is not None:
        changes["sequences"] = Sequences(batch, queries, keys, problem.sequences.seqused_k)
    if problem.mask.form == "causal":
        changes["mask"] = draw.choice((Causal(), CausalBottomRight(), Window(None, 7)))
    changes["scale"] = draw.choice((None, 0.3, -0.3, 0.0))
    return problem.replace(**changes)


def drawn_pages(draw: random.Random) -> Problem:
    """A decode step on a cache in pages, with any number of query rows, and the table as rows or as a list."""
    heads_key, group = draw.randint(1, 9), draw.choice((2, 4, 8, 16, 32))
    sizes = f"q{draw.choice((1, 1, 2, 4, 5))}_s{draw.choice((1, 300, 9000))}_b{draw.choice((1, 3, 70))}"
    case = f"bf16_d128_{sizes}_h{heads_key * group}k{heads_key}_full_paged{2 ** draw.randint(0, 8)}"
    problem = spec.parse(case).problem("forward")
    if draw.random() < 0.2:
        assert problem.pages is not None
        problem = problem.replace(pages=replace(problem.pages, invariant=True))
    elif draw.random() < 0.3:
        problem = listed(problem)
    return in_pools(draw, problem).replace(scale=draw.choice((None, 0.3)))


def in_pools(draw: random.Random, problem: Problem) -> Problem:
    """The problem with pools of another layout and number of pages, and a table with rows that are farther apart."""
    assert problem.pages is not None
    count, (_, rows, heads, columns) = draw.choice((1, 5, 1000)), problem.key.shape
    steps = draw.choice((
        (heads * rows * columns, heads * columns, columns),  # NHD
        (heads * rows * columns, columns, rows * columns),  # HND
        (2 * heads * rows * columns, heads * columns, columns),  # pages of keys and values in turn
        (2 * heads * rows * columns, 2 * heads * columns, 2 * columns),  # heads of keys and values in turn
    ))  # fmt: skip
    pool = Tensor((count, rows, heads, columns), (*steps, 1), problem.dtype)
    table = problem.pages.page_table
    if not problem.pages.page_indptr:
        table = replace(table, strides=(table.strides[0] + draw.choice((0, 7)), 1))
    return problem.replace(key=pool, value=pool, pages=replace(problem.pages, page_table=table))


def drawn_prefill(draw: random.Random) -> Problem:
    """A prefill on a cache in pages of any size, with the queries of all sequences one after another or not."""
    heads_key, group, page_size = draw.randint(1, 9), draw.choice((2, 4, 8)), 2 ** draw.randint(0, 9)
    queries = [draw.choice((40, 300, 2000)) for _ in range(draw.choice((2, 3)))]
    keys = [count + draw.randint(0, 900) for count in queries]
    packed = "n" + ",".join(f"{count}x{length}" for count, length in zip(queries, keys, strict=True))
    sizes = draw.choice((packed, f"q{queries[0]}_s{keys[0]}_b{draw.choice((1, 3, 70))}"))
    name = f"bf16_d128_{sizes}_h{heads_key * group}k{heads_key}_causal_br_paged{page_size}"
    problem = spec.parse(name).problem("forward")
    return in_pools(draw, listed(problem) if sizes != packed and draw.random() < 0.3 else problem)


@pytest.mark.slow
def test_library_chooses_what_the_planner_chooses(driver_log: FakeDriver, bundle: Bundle, host: LibraryHost) -> None:
    """Symbol and workspace without a GPU; every byte of each launch on the fake driver's two GPUs.

    If the library has none of the planner's kernels, what it chooses is another one that computes the problem.
    """
    draw = random.Random(0)
    same_bytes = 0
    builds = {plan.build for direction in bundle.directions for plan in bundle.plans(direction)}
    found = {"same": 0, "none": 0, "other": 0}
    kinds = set()
    differing = []
    opened = []
    for ordinal in (0, 1):
        with device(ordinal).current():
            status, handle = host.opened()
            assert status == 0, host.text
            opened.append(handle)
    driver_log.without_memory(True)
    few_queries = [name for name in CASES if "q512_s8192" in name]
    cases = [*CASES, *6 * few_queries, *(name for name in CASES if "s8192_b1_h4" in name or "d256" in name)]
    for number in itertools.count():
        if sum(found.values()) >= DRAWN:
            break
        problem = drawn(draw, cases[number % len(cases)])
        if problem.reasons():
            continue
        arch, num_sms = target = draw.choice(TARGETS)
        plan = expected_plan(bundle, problem, arch, num_sms)
        call = filled(host.new_call(), problem, first_address=ADDRESSES)
        call.philox_seed, call.philox_offset = SEEDS if problem.dropout_p else (0, 0)
        choice = host.chosen(call, target_of(arch, num_sms))
        if plan is None and choice.status == "OK":
            found["other"] += 1
            plan = other_plan(builds, problem, choice.symbol, arch, num_sms)
        elif plan is None:
            found["none"] += 1
            assert choice.status in ("INVALID", "NO_KERNEL")
            assert choice.text != ""
            continue
        else:
            found["same"] += 1
        kinds.add(f"{plan.build.family} {plan.build.variant}".strip())
        if (choice.status, choice.symbol, choice.workspace) != ("OK", plan.symbol, plan.workspace.bytes):
            differing.append((problem, arch, num_sms, plan.symbol, plan.workspace.bytes, choice))
        elif target in TARGETS[:2] and not any(binding._problem_mismatches(plan, problem)):
            ordinal = TARGETS.index(target)
            wanted = by_package(driver_log, plan, problem, ordinal)
            assert by_library(driver_log, host, opened[ordinal], call, choice.workspace) == wanted
            same_bytes += 1
    driver_log.without_memory(False)
    for handle in opened:
        host.close(handle)
    assert differing == []
    assert same_bytes > DRAWN // 5
    assert found["same"] > DRAWN // 2
    assert min(found.values()) > DRAWN // 100
    variants = ("multicast", "split_kv", "query_heads", "2cta", "ds_registers")
    assert kinds >= {"decode", "decode persistent", "sm80", "sm90", *(f"sm90 {name}" for name in variants)}


# Drivers


def test_each_device_has_kernels_of_its_own(driver_log: FakeDriver, bundle: Bundle, host: LibraryHost) -> None:
    """Two devices at once, of different generations; each launch in its device's context, whichever is current."""
    problem = spec.parse("bf16_d128_s512_b2_h4_causal").problem("forward")
    call = filled(host.new_call(), problem, first_address=ADDRESSES)
    opened = []
    for ordinal in (0, 1):
        with device(ordinal).current():
            status, handle = host.opened()
            assert status == 0
            opened.append(handle)
    symbols = []
    with device(1).current():
        for ordinal, handle in enumerate(opened):
            driver_log.clear()
            assert host.launched(handle, call, 0, 0) == 0, host.text
            (launched,) = driver_log.of("cuLaunchKernelEx")
            assert launched.numbers[9] == 0xC0 + ordinal, "the context of the device"
            symbols.append(launched.text)
        host.close(opened[0])
        assert host.launched(opened[1], call, 0, 0) == 0
        host.close(opened[1])
    assert symbols == ["fwd_sm90_bf16_d128_causal_64x128_0", "fwd_sm80_bf16_d128_causal_128x64_0"]


def test_nothing_is_loaded_after_open(driver_log: FakeDriver, host: LibraryHost) -> None:
    """So that launches may be captured; and open may load, and close unload, while another thread captures."""
    problem = spec.parse("bf16_d128_s512_b2_h4_causal").problem("backward")
    call = filled(host.new_call(), problem, first_address=ADDRESSES)
    size = host.chosen(call, target_of("sm_90a")).workspace
    library = driver_log._library
    with device(0).current():
        library.cuStreamBeginCapture(ctypes.c_void_p(STREAM), 0)
        status, opened = host.opened()
        assert status == 0, host.text
        loaded = {call.text for call in driver_log.of("cuKernelGetFunction")}
        driver_log.clear()
        assert host.launched(opened, call, WORKSPACE, size, STREAM) == 0
        graph = ctypes.c_void_p()
        host.close(opened)
        assert library.cuStreamEndCapture(ctypes.c_void_p(STREAM), ctypes.byref(graph)) == 0, "still valid"
    assert {*driver_log.names} <= {
        "cuLaunchKernelEx", "cuMemsetD8Async", "cuTensorMapEncodeTiled", "cuStreamEndCapture", "cuLibraryUnload",
    }  # fmt: skip
    assert {call.text for call in driver_log.of("cuLaunchKernelEx")} <= loaded


@pytest.mark.parametrize(
    ("case", "function", "what"),
    [
        ("bf16_d128_s512_b2_h4_causal", "cuTensorMapEncodeTiled", "query"),
        ("f32_d96_s200_b2_h3_causal", "cuMemsetD8Async", "the workspace"),
        ("bf16_d128_s512_b2_h4_causal", "cuLaunchKernelEx", "bwd_sm90_bf16_d128_causal_64x64_delta_1"),
    ],
)
def test_a_launch_names_the_driver_call_that_fails(
    driver_log: FakeDriver, host: LibraryHost, case: str, function: str, what: str
) -> None:
    problem = spec.parse(case).problem("backward")
    call = filled(host.new_call(), problem, first_address=ADDRESSES)
    size = host.chosen(call, target_of("sm_90a")).workspace
    with device(0).current():
        _, opened = host.opened()
        driver_log.clear()
        driver_log.fail(function, 400)
        assert host.launched(opened, call, WORKSPACE, size) == STATUS["DRIVER"]
        assert host.error.driver_code == 400
        assert host.text.startswith(f"{function} of {what}: CUDA_ERROR_INVALID_HANDLE: ")
        assert len(driver_log.of("cuLaunchKernelEx")) == (function == "cuLaunchKernelEx"), "nothing follows"
        assert host.launched(opened, call, WORKSPACE, size) == 0
        assert (host.error.driver_code, host.text) == (0, "")
        host.close(opened)


@pytest.mark.parametrize(
    "function", ["cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelSetAttribute", "cuKernelGetFunction"]
)
def test_an_open_that_fails_leaves_nothing(driver_log: FakeDriver, host: LibraryHost, function: str) -> None:
    with device(0).current():
        driver_log.clear()
        driver_log.fail(function, 209)
        status, opened = host.opened()
    assert (status, opened.value) == (STATUS["DRIVER"], None)
    assert host.error.driver_code == 209
    assert host.text.startswith(f"{function} of ")
    assert ": CUDA_ERROR_NO_BINARY_FOR_GPU: " in host.text
    loaded = len(driver_log.of("cuLibraryLoadData")) - (function == "cuLibraryLoadData")
    assert len(driver_log.of("cuLibraryUnload")) == loaded
