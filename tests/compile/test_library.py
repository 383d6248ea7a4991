"""Tests of the C library: it chooses and launches what the planner plans, from C and C++, on the fake driver."""

from __future__ import annotations

import ctypes
import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from cutlass_py_attn.bundle.files import Bundle
from cutlass_py_attn.problem import spec
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Window
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import BIASES, BMHK, DIRECTIONS, Sequences, Shape, Tensor
from cutlass_py_attn.runtime import binding
from cutlass_py_attn.runtime.driver import device
from tests.support import fake_driver
from tests.support.bundle_hosts import ADDRESSES, STREAM, WORKSPACE, bound_calls, compared
from tests.support.fake_driver import FakeDriver
from tests.support.library_host import STATUS, LibraryHost, compiled, exported, filled, target_of
from tests.support.library_launches import SEEDS, by_library, by_package, expected_plan, other_plan

MANY = "_causal_window64_biassum_dropout0.1_softcap30_alibi_sinks"
# (exported case, directions, cases of other sizes that the same kernels serve)
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "bf16_d128_s512_b2_h4_causal": (DIRECTIONS, ("bf16_d128_s300_b3_h7_causal_br", "bf16_d128_s1_b1_h1_causal")),
    "bf16_d128_s512_b2_h4k2_causal": (DIRECTIONS, ("bf16_d128_q90_s300_b3_h8k2_causal_br",)),
    "f16_d64v32_s512_b2_h4k2_full": (DIRECTIONS, ("f16_d64v32_s130_b1_h2k1_full",)),
    "bf16_d256_s512_b1_h2_causal": (DIRECTIONS, ("bf16_d256_s100_b3_h70_causal",)),
    "f32_d96_s200_b2_h3_causal": (DIRECTIONS, ("f32_d96_s2000_b7_h40_causal",)),
    "bf16_d128_s700_t5000_h4k2_causal": (DIRECTIONS, ("bf16_d128_s300_t1900_h8k2_causal",)),
    "f32_d64_s700_t5000_h2_full_deterministic": (DIRECTIONS, ("f32_d64_s700_t1900_h2_full_deterministic",)),
    f"bf16_d128_s1000_b2_h4k2{MANY}": (DIRECTIONS, (f"bf16_d128_s264_b5_h6k3{MANY}",)),
    "bf16_d64_s1024_b2_h4_causal_biassum": (("backward",), ("bf16_d64_q200_s264_b24_h3_causal_biassum",)),
    "bf16_d128_q1_s8192_b4_h32k8_full": (("forward",), ("bf16_d128_q1_s300_b500_h32k8_full",)),
    "bf16_d128_q4_s8192_b1_h32k4_full": (("forward",), ("bf16_d128_q2_s8192_b1_h24k2_full",)),
    "bf16_d128_q8_s8192_b1_h32k4_full": (("forward",), ("bf16_d128_q16_s999_b1_h8k2_full",)),
    "bf16_d128_s512_b2_h4k2_full": (
        ("forward",),
        ("bf16_d128_q100_s300_b1_h8k2_full", "bf16_d128_q1100_s1500_b1_h16k4_full"),
    ),
    "f16_d128_q1_s8192_b4_h8_full": (("forward",), ("f16_d128_q3_s256_b1_h1_full",)),
    "f16_d72_s512_b2_h4_window_left30_right9": (("forward",), ("f16_d72_s77_b2_h4_window_left30_right9",)),
    "bf16_d128_s8192_b1_h4_causal": (("forward",), ("bf16_d128_q4096_s5000_b3_h7_causal_br",)),
    "bf16_d128_q512_s8192_b1_h4_causal_br": (("forward",), ("bf16_d128_q900_s3000_b2_h3_causal_br",)),
    "bf16_d128_s8192_b1_h4k2_causal": (("forward",), ("bf16_d128_q4096_s5000_b3_h6k2_causal_br",)),
    "bf16_d128_q1_s8192_b4_h32k8_full_paged16": (("forward",), ("bf16_d128_q3_s1024_b9_h8k2_full_paged64",)),
    "bf16_d128_q1_s1024_b256_h32k8_full_paged16": (("forward",), ("bf16_d128_q2_s64_b80_h16k2_full_paged2",)),
    "bf16_d128_q4_s8192_b4_h32k4_full_paged16": (("forward",), ("bf16_d128_q1_s999_b3_h17k1_full_paged1",)),
    "bf16_d128_q8_s8192_b4_h32k4_full_paged16": (("forward",), ("bf16_d128_q2_s9000_b70_h128k2_full_paged256",)),
    "bf16_d128_q512_s4096_b2_h32k8_causal_br_paged128": (
        ("forward",),
        ("bf16_d128_q300_s1000_b3_h8k2_causal_br_paged16", "bf16_d128_q2048_s5000_b1_h6k3_causal_br_paged512"),
    ),
    "bf16_d128_n512x512,256_h32k8_causal_br_paged16": (
        ("forward",),
        ("bf16_d128_n200x900,33x40_h8k2_causal_br_paged64",),
    ),
    "bf16_d128_n500x9000,64x1000_h8k2_causal_br_paged16": (
        ("forward",),
        ("bf16_d128_n300x5000,33x40_h4k2_causal_br_paged64", "bf16_d128_n900x9000,5x9000_h32k8_causal_br_paged64"),
    ),
    "bf16_d64_q2_s900_b3_h8k2_window_left200_right0_softcap30_alibib_sinks_paged16": (
        ("forward",),
        ("bf16_d64_q3_s77_b9_h4k2_window_left9_right0_softcap5_alibib_sinks_paged1",),
    ),
    "bf16_d128_n2x900,1x700_h8k2_causal_br_paged16": (
        ("forward",),
        ("bf16_d128_n1x30,4x70,2x5_h4k2_causal_br_paged4",),
    ),
    "bf16_d64_s128_b64_h16_full": (("backward",), ("bf16_d64_s300_b30_h9_full", "bf16_d64_q70_s90_b90_h3_full")),
    "bf16_d96_s200_b64_h4_causal_br": (("backward",), ("bf16_d96_q300_s150_b70_h2_causal_br",)),
    "f16_d100_s512_b2_h4_full": (DIRECTIONS, ("f16_d100_s77_b2_h5_full",)),
}


def problems_of(case: str) -> list[Problem]:
    """The exported problems; of pages also with a list of them, and with results that no other sequence changes."""
    if "q1" in case and "paged" in case:
        problem = spec.parse(case).problem("forward")
        assert problem.pages is not None
        return [problem, problem.replace(pages=replace(problem.pages, invariant=True)), listed(problem)]
    if "q512" in case and "paged" in case:
        return [spec.parse(case).problem("forward"), listed(spec.parse(case).problem("forward"))]
    return [spec.parse(case).problem(direction) for direction in CASES[case][0]]


def listed(problem: Problem) -> Problem:
    """The problem with the pages of all sequences in one list."""
    assert problem.pages is not None
    table = Tensor.contiguous((problem.pages.table_entries,), "int32")
    return problem.replace(pages=replace(problem.pages, page_table=table, page_indptr=True))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    if fake_driver.compiler() is None:
        pytest.skip("no C compiler to build the library with")
    folder = tmp_path_factory.mktemp("library")
    return exported(folder / "made", tuple(each for case in CASES for each in problems_of(case)), "sm_80,sm_86,sm_90a")


@pytest.fixture(scope="module")
def host(bundle: Bundle) -> LibraryHost:
    """Compiled with the sanitizers of undefined arithmetic alone, which compile fast; test_library_builds has all."""
    names = "signed-integer-overflow,integer-divide-by-zero,shift,float-cast-overflow"
    options = f"-fsanitize={names}", "-fno-sanitize-recover=all"
    return LibraryHost(compiled(bundle, bundle.path.parent / "attention.so", *options))


def library_calls(log: FakeDriver, host: LibraryHost, problem: Problem) -> tuple[list[tuple[Any, ...]], int]:
    """What a launch of the library asks of the driver, and the bytes of its workspace, as `bound_calls`."""
    call = filled(host.new_call(), problem, first_address=ADDRESSES)
    if "dropout" in problem.features and not problem.philox_on_device:
        call.philox_seed, call.philox_offset = SEEDS
    with device(0).current():
        status, opened = host.opened()
        assert status == 0, host.text
        chosen = host.chosen(call, target_of("sm_90a"))
        size = chosen.workspace
        log.clear()
        status = host.launched(opened, call, WORKSPACE, size, STREAM)
        assert status == 0, host.text
        found = compared(log)
        host.close(opened)
    return found, size


@pytest.mark.parametrize("case", CASES)
def test_library_asks_what_the_package_asks(
    driver_log: FakeDriver, bundle: Bundle, host: LibraryHost, case: str
) -> None:
    """For the exported problem and for other sizes, of a kernel that is one of many."""
    for name in (case, *CASES[case][1]):
        for direction in CASES[case][0]:
            problem = spec.parse(name).problem(direction)
            wanted = bound_calls(driver_log, bundle, problem)
            assert len(wanted[0]) > 0
            assert library_calls(driver_log, host, problem) == wanted


# The choice of a kernel

# The first two are those of the fake driver's GPUs, on which the call is launched too.
TARGETS = (("sm_90a", 132), ("sm_86", 84), ("sm_90a", 16), ("sm_80", 108), ("sm_89", 142))
DRAWN = 500


def drawn(draw: random.Random, case: str) -> Problem:
    """A problem of the kinds of a case with other sizes, strides, alignments, masks and factors."""
    if "paged" in case:
        return drawn_prefill(draw) if "causal" in case else drawn_pages(draw)
    problem = spec.parse(case).problem(draw.choice(CASES[case][0]))
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
    assert symbols == ["fwd_sm90_bf16_d128_causal_128x128_0", "fwd_sm80_bf16_d128_causal_128x64_0"]


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
