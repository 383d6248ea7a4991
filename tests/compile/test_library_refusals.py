"""Tests of the C library's refusals: every wrong call has a status and a text, and asks nothing of the driver."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cutlass_py_attn.bundle import interface
from cutlass_py_attn.bundle.files import Bundle
from cutlass_py_attn.launch import abi
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem import spec
from cutlass_py_attn.problem.overlap import Region, overlap
from cutlass_py_attn.problem.tensors import DIRECTIONS, Tensor
from cutlass_py_attn.runtime.binding import bind
from cutlass_py_attn.runtime.driver import device
from cutlass_py_attn.score_terms.dropout import keep_scale, threshold
from tests.support import fake_driver
from tests.support.bundle_hosts import ADDRESSES, STREAM, WORKSPACE, compared
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import artifact, decode
from tests.support.library_host import STATUS, Call, LibraryHost, compiled, exported, filled, made_up, target_of

CASE = "bf16_d128_s512_b2_h4k2_causal"
DECODE = "bf16_d128_q1_s8192_b4_h32k8_full"
H200 = target_of("sm_90a")
ANY_DTYPE = "must be ATTENTION_F16, ATTENTION_BF16, ATTENTION_F32, or of a forward ATTENTION_E4M3; choose one"
OVERLAP = "its strides must be those of an array of these sizes; set them with the sizes"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    fake_driver.need_compiler("the library")
    problems = (*(spec.parse(CASE).problem(it) for it in DIRECTIONS), spec.parse(DECODE).problem("forward"))
    return exported(tmp_path_factory.mktemp("refusals") / "made", problems)


@pytest.fixture(scope="module")
def host(bundle: Bundle) -> LibraryHost:
    return LibraryHost(compiled(bundle, bundle.path.parent / "attention.so"))


def call_of(host: LibraryHost, direction: str = "backward", case: str = CASE) -> Any:
    return filled(host.new_call(), spec.parse(case).problem(direction), first_address=ADDRESSES)


def test_the_struct_is_what_the_header_says(host: LibraryHost) -> None:
    """Of this version: a later one may only be longer."""
    assert host.abi() == interface.ABI == 1
    assert ctypes.sizeof(Call) >= interface.FIRST_BYTES == 584
    assert (Call.scale.offset, Call.query.offset, Call.logsumexp.offset, Call.grad_sinks.offset) == (120, 176, 520, 576)


def test_a_new_call_has_defaults(host: LibraryHost) -> None:
    call = host.new_call()
    found = {field.name: getattr(call, field.name) for field in interface.CALL if field.kind not in ("array", "bias")}
    set_fields = {name: value for name, value in found.items() if value != 0}
    assert set_fields.pop("scale") != 0  # not a number
    assert set_fields == {
        "bytes": ctypes.sizeof(Call), "abi": 1, "gradients": 7, "window_left": -1, "window_right": -1,
        "bottom_right": 1, "grad_bias_axes": 15, "grad_output_column": 1, "key_scale_tile": 1,
        "mask_block_rows": 128, "mask_block_columns": 128, "mask_block_heads": 1,
    }  # fmt: skip


# (field, value, status, words of the text)
WRONG: tuple[tuple[str, Any, str, str], ...] = (
    ("direction", 4, "INVALID", "direction = 4: must be ATTENTION_FORWARD, ATTENTION_BACKWARD, ATTENTION_APPEND or "
                                "ATTENTION_MERGE; choose one"),
    ("dtype", 0, "INVALID", f"dtype = 0: {ANY_DTYPE}"),
    ("dtype", 4, "INVALID", f"dtype = 4: {ANY_DTYPE}"),
    ("dtype", 1, "NO_KERNEL", "no kernel of this library for backward, float16, head_dim 128, head_dim_value 128, mask "
                              "causal, features: grouped, gradients 0x7; export such a problem too"),
    ("head_dim", 0, "INVALID", "head_dim = 0: must be at least 1; set it"),
    ("head_dim_value", -5, "INVALID", "head_dim_value = -5: must be at least 1; set it"),
    ("head_dim", 64, "NO_KERNEL", "head_dim 64, head_dim_value 128"),
    ("flags", 1, "NO_KERNEL", "features: grouped varlen"),
    ("flags", 2, "INVALID", "flags has ATTENTION_SEQUSED without ATTENTION_VARLEN; set both"),
    ("flags", 32, "NO_KERNEL", "gradients 0x7, deterministic; export such a problem too"),
    ("gradients", 0, "INVALID", "gradients = 0x0: must be some of ATTENTION_GRAD_QUERY, ...; name those to write"),
    ("gradients", 32, "INVALID", "gradients = 0x20: must be some of"),
    ("gradients", 15, "INVALID", "gradients has ATTENTION_GRAD_BIAS, and flags has no ATTENTION_BIAS"),
    ("gradients", 16, "INVALID", "gradients has ATTENTION_GRAD_SINKS, and flags has no ATTENTION_SINKS"),
    ("gradients", 3, "NO_KERNEL", "gradients 0x3"),
    ("batch", 0, "INVALID", "backward: batch must be at least 1; with none there is nothing to launch"),
    ("batch", 65536, "INVALID", "backward: batch must be at most 65535; call once for each slice"),
    ("num_heads", 5, "INVALID", "backward: num_heads must be a multiple of num_heads_key"),
    ("num_heads_key", 0, "INVALID", "backward: num_heads_key must be at least 1"),
    ("num_queries", 3000, "INVALID", f"backward: rows of grad_query overlap: {OVERLAP}"),
    ("tokens_q", 7, "INVALID", "tokens_q = 7, tokens_k = 0, and flags has no ATTENTION_VARLEN"),
    ("window_left", -2, "INVALID", "window_left = -2: must be at least 0, or -1 for no limit; correct it"),
    ("window_right", -9, "INVALID", "window_right = -9: must be at least 0, or -1 for no limit; correct it"),
    ("window_left", 5, "NO_KERNEL", "mask local"),
    ("window_right", -1, "NO_KERNEL", "mask full"),
    ("bottom_right", 2, "INVALID", "bottom_right = 2: must be 0 or 1; correct it"),
    ("num_splits_key", -1, "INVALID", "num_splits_key = -1: must be at least 1, or 0 for the library's choice"),
    ("grad_bias_axes", 16, "INVALID", "grad_bias_axes = 0x10: must be a sum of 1 (batch), 2 (heads)"),
    ("reserved", 1, "INVALID", "reserved = 1: must be 0; clear it"),
    ("scale", float("nan"), "INVALID", "scale is not a number: it has no default; set it, for example to 1 / sqrt("),
    ("scale", 1e-31, "INVALID", "backward: scale must be 0 or have a magnitude of at least 1e-30"),
    ("softcap", -1.0, "INVALID", "softcap = -1: must be above 0, or 0 for none; correct it"),
    ("softcap", float("nan"), "INVALID", "softcap = "),
    ("flags", 64, "NO_KERNEL", "features: grouped paged"),
    ("flags", 66, "INVALID", "flags has ATTENTION_SEQUSED and ATTENTION_PAGED, which has seqused_k anyway; clear the"),
    ("flags", 128, "INVALID", "flags has ATTENTION_INVARIANT or ATTENTION_PAGE_INDPTR without ATTENTION_PAGED"),
    ("flags", 65536, "INVALID", "flags = 0x10000: has bits that this library does not know; clear them, or update"),
    ("page_size", 16, "INVALID", "page_size = 16, max_pages = 0, num_pages = 0, and flags has no ATTENTION_PAGED; set"),
    ("page_table", 4096, "INVALID", "page_table has an address, and flags has no ATTENTION_PAGED; set the flag"),
    ("softcap", 30.0, "NO_KERNEL", "features: grouped softcap"),
    ("dropout_p", 1.5, "INVALID", "dropout_p = 1.5: must be a probability from 0 to 1; correct it"),
    ("dropout_p", 0.5, "NO_KERNEL", "features: dropout grouped"),
    ("philox_seed_address", 4, "INVALID", "must be 8-byte aligned device addresses, or 0; correct them"),
    ("flags", 16384, "NO_KERNEL", "mask ranges, features: grouped"),
    ("flags", 32768, "NO_KERNEL", "mask ranges, features: grouped"),
    ("bias.address", 4096, "INVALID", "bias has an address, and flags has no ATTENTION_BIAS; set the flag, or clear"),
    ("alibi_slopes", 4096, "INVALID", "alibi_slopes has an address, and flags has no ATTENTION_ALIBI"),
    ("cu_seqlens_k", 4096, "INVALID", "cu_seqlens_k has an address, and flags has no ATTENTION_VARLEN"),
    ("query.row", 257, "INVALID", "backward: query_row must be a multiple of 8 elements"),
    ("query.head", -128, "INVALID", "backward: query_head must be above 0: a tensor map steps forward"),
    ("grad_value.row", 8, "INVALID", f"backward: rows of grad_value overlap: {OVERLAP}"),
    ("key.row", 2**62, "INVALID", "backward: key_row must be at most 549755813880, as in any tensor map"),
    ("value.address", ADDRESSES + 8, "INVALID", "backward: value must be a device address, 16-byte aligned"),
    ("abi", 2, "WRONG_ABI", "call.abi = 2: this library has ABI 1; initialise the call with ATTENTION_CALL_INIT"),
    ("bytes", 2**32 - 1, "WRONG_ABI", "call.bytes = 4294967295: must be from 584 to 65536"),
    ("grad_logsumexp", 4098, "INVALID", "grad_logsumexp: must be a 4-byte aligned device address, or 0; correct it"),
    ("bytes", 583, "WRONG_ABI", "call.bytes = 583: must be from 584 to 65536; initialise the call"),
)  # fmt: skip


def put(call: Any, name: str, value: Any) -> None:
    """Sets a field, or one of an array: `query.row`."""
    *above, last = name.split(".")
    for part in above:
        call = getattr(call, part)
    setattr(call, last, value)


@pytest.mark.parametrize(("name", "value", "status", "words"), WRONG)
def test_wrong_calls_are_refused(
    driver_log: FakeDriver, host: LibraryHost, name: str, value: Any, status: str, words: str
) -> None:
    """By the choice, and by a launch before it asks the driver for anything."""
    call = call_of(host)
    assert host.chosen(call, H200).status == "OK"
    put(call, name, value)
    choice = host.chosen(call, H200)
    assert (choice.status, choice.symbol, choice.workspace) == (status, "", 0)
    assert words in choice.text
    with device(0).current():
        opened_status, opened = host.opened()
        assert opened_status == 0
        driver_log.clear()
        assert host.launched(opened, call, WORKSPACE, 2**40) == STATUS[status]
        assert words in host.text
        assert driver_log.calls == []
        host.close(opened)


def test_a_number_that_is_none_is_refused_with_fast_math(bundle: Bundle) -> None:
    """A scale that nobody set is NaN. Linking with -ffast-math itself would change the arithmetic of the process."""
    library = LibraryHost(compiled(bundle, bundle.path.parent / "fast.so", "-O1", "-ffinite-math-only"))
    for name in ("scale", "softcap", "dropout_p"):
        call = call_of(library)
        assert library.chosen(call, H200).status == "OK", library.text
        put(call, name, float("nan"))
        choice = library.chosen(call, H200)
        assert (choice.status, choice.text.split()[0]) == ("INVALID", name)


def test_every_objection_to_the_fields_at_once(host: LibraryHost) -> None:
    call = call_of(host)
    call.dtype, call.dropout_p, call.bottom_right = 9, -1.0, 3
    text = host.chosen(call, H200).text
    assert text == (
        f"dtype = 9: {ANY_DTYPE}; bottom_right = 3: must be 0 or 1; correct it; "
        "dropout_p = -1: must be a probability from 0 to 1; correct it"
    )
    for field in ("direction", "head_dim", "head_dim_value", "reserved", "window_left", "window_right", "flags"):
        put(call, field, -7 if field not in ("reserved", "flags") else 2**32 - 1)
    assert len(host.chosen(call, H200).text) == interface.ERROR_BYTES - 5, "as much as the struct holds"


def test_fields_of_the_other_direction_are_not_read(host: LibraryHost) -> None:
    call = call_of(host, "forward")
    call.gradients, call.num_splits_key, call.grad_query.row = 99, -3, -1
    assert host.chosen(call, H200).status == "OK"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_launch_needs_every_address(driver_log: FakeDriver, host: LibraryHost, direction: str) -> None:
    """A choice does not: memory is allocated after it."""
    problem = spec.parse(CASE).problem(direction)
    for name in (*problem.tensors(), "logsumexp"):
        call = call_of(host, direction)
        put(call, name if name == "logsumexp" else f"{name}.address", 0)
        assert host.chosen(call, H200).status == "OK"
        with device(0).current():
            _, opened = host.opened()
            driver_log.clear()
            assert host.launched(opened, call, WORKSPACE, 2**40) == STATUS["INVALID"]
            alignment = 4 if name == "logsumexp" else 16
            assert host.text == f"{direction}: {name} must be a device address, {alignment}-byte aligned"
            assert driver_log.calls == []
            host.close(opened)


def test_a_launch_needs_its_workspace(driver_log: FakeDriver, host: LibraryHost) -> None:
    call = call_of(host)
    need = host.chosen(call, H200).workspace
    assert need > 0
    with device(0).current():
        _, opened = host.opened()
        driver_log.clear()
        for address, size in ((0, need), (WORKSPACE, need - 1), (WORKSPACE + 8, need), (WORKSPACE, 0)):
            assert host.launched(opened, call, address, size) == STATUS["WORKSPACE"]
            assert host.text == (
                f"bwd_sm90_bf16_d128_causal_grouped_query_heads_64x128 needs {need} bytes of workspace, 16-byte "
                f"aligned; got {size} at address {address:#x}; ask attention_choose"
            )
        assert driver_log.calls == []
        assert host.launched(opened, call, WORKSPACE, need) == 0
        assert host.text == ""
        host.close(opened)


def test_null_arguments_are_refused(driver_log: FakeDriver, host: LibraryHost) -> None:
    error, call, target = ctypes.byref(host.error), ctypes.byref(call_of(host)), ctypes.byref(H200)
    checks: tuple[tuple[Callable[[], int], str], ...] = (
        (lambda: host.choose(None, target, None, None, error), "call is NULL; pass the address of the call's struct"),
        (lambda: host.choose(call, None, None, None, error), "target is NULL"),
        (lambda: host.packed(None, error), "call is NULL"),
        (lambda: host.open(None, None, 0, error), "device is NULL; pass the address of a pointer"),
        (lambda: host.launch(None, call, 0, 0, None, error), "device is NULL; open it with attention_open"),
        (lambda: host.target_of(None, target, error), "device is NULL; open it with attention_open"),
    )
    for number, (check, words) in enumerate(checks):
        assert check() == STATUS["INVALID"], number
        assert words in host.text
    assert host.choose(call, target, None, None, None) == 0, "nothing is wanted but the status"
    assert host.choose(None, target, None, None, None) == STATUS["INVALID"]
    host.close(None)
    host.call_init(None, 584, 1)
    assert driver_log.calls == []


def test_targets_are_checked(host: LibraryHost) -> None:
    call = call_of(host)
    for field in ("num_sms", "shared_memory"):
        target = target_of("sm_90a")
        setattr(target, field, 0)
        choice = host.chosen(call, target)
        assert choice.status == "INVALID"
        assert choice.text.startswith("target: num_sms = ")
    assert host.chosen(call, target_of("sm_86")).text == (
        "no kernel runs on compute capability 8.6 with 101376 bytes of shared memory a block; this library has "
        "bwd_sm90_bf16_d128_causal_grouped_query_heads_64x128 for sm_90a; export it for this device too"
    )
    assert host.chosen(call, target_of("sm_86")).status == "NO_KERNEL"


# Versions


class LongerCall(Call):  # type: ignore[misc]
    """The call of a later version."""

    _fields_ = (("later", ctypes.c_uint64 * 3),)


def test_a_program_of_a_later_version_is_served_unless_it_asks_for_more(host: LibraryHost) -> None:
    call = LongerCall()
    ctypes.memset(ctypes.byref(call), 0xA5, ctypes.sizeof(call))
    host.call_init(ctypes.byref(call), ctypes.sizeof(call), 1)
    assert list(call.later) == [0, 0, 0]
    filled(call, spec.parse(CASE).problem("forward"))
    assert host.chosen(call, H200).status == "OK"
    call.later[2] = 1
    choice = host.chosen(call, H200)
    assert choice.status == "WRONG_ABI"
    assert choice.text == (
        f"call.bytes = {ctypes.sizeof(call)}: sets a field that this library, with {ctypes.sizeof(Call)} bytes, does "
        "not know; update the library"
    )


def test_a_shorter_struct_is_not_written_behind_its_end(host: LibraryHost) -> None:
    memory = (ctypes.c_ubyte * ctypes.sizeof(Call))(*[0xA5] * ctypes.sizeof(Call))
    host.call_init(ctypes.byref(memory), 100, 1)
    assert set(memory[100:]) == {0xA5}
    assert set(memory[8:16]) == {0}


# Memory that is shared

SHARED = "share memory, and what is written must not: give each its own, or equal strides in one array"
ROW = 128  # columns of CASE, which has batch 2, 512 queries and keys, 4 heads, 2 of keys


def packed(order: str, slots: dict[str, int], slot_heads: int, count: int) -> dict[str, Any]:
    """Strides and addresses of gradients that are parts of one array.

    order: its axes from the slowest, of b(atch), s(eqlen), h(eads) and 3, the slots. slots: the first of each gradient.
    slot_heads: heads of a slot. count: slots
    """
    sizes = {"b": 2, "s": 512, "h": slot_heads, "3": count}
    steps, step = {}, ROW
    for axis in reversed(order):
        steps[axis] = step
        step *= sizes[axis]
    found: dict[str, Any] = {}
    for name, slot in slots.items():
        found |= {f"{name}.batch": steps["b"], f"{name}.row": steps["s"], f"{name}.head": steps["h"]}
        found[f"{name}.address"] = ADDRESSES + 2 * slot * steps["3"]
    return found


EACH_SLOT = {"grad_query": 0, "grad_key": 1, "grad_value": 2}
HEADS = {"grad_query": 0, "grad_key": 4, "grad_value": 6}  # heads of query, then those of key, then those of value


@pytest.mark.parametrize(
    ("direction", "changes", "says"),
    [
        ("forward", {"output.address": "query"}, f"forward: query and output {SHARED}"),
        ("forward", {"logsumexp": "value"}, f"forward: value and logsumexp {SHARED}"),
        ("forward", {"key.address": "value"}, ""),  # what is read may be
        ("backward", {"grad_key.address": "grad_value"}, f"backward: grad_key and grad_value {SHARED}"),
        ("backward", {"grad_query.address": "grad_output"}, f"backward: grad_output and grad_query {SHARED}"),
        ("backward", {"grad_value.address": "value"}, f"backward: value and grad_value {SHARED}"),
        ("backward", packed("bs3h", EACH_SLOT, 4, 3), ""),
        ("backward", packed("bsh3", EACH_SLOT, 4, 3), ""),
        ("backward", packed("b3hs", EACH_SLOT, 4, 3), ""),
        ("backward", packed("3bsh", EACH_SLOT, 4, 3), ""),
        ("backward", packed("b3sh", EACH_SLOT, 4, 3), ""),
        ("backward", packed("bs3h", HEADS, 1, 8), ""),  # one row of all heads: GQA
        ("backward", packed("bs3h", {**HEADS, "grad_key": 3}, 1, 8), f"backward: grad_query and grad_key {SHARED}"),
        ("backward", packed("bsh3", {**EACH_SLOT, "grad_key": 2}, 4, 3), f"backward: grad_key and grad_value {SHARED}"),
        ("backward", {"grad_key.address": 2**63}, "backward: an array ends beyond the addresses of 63 bits; correct"),
        ("forward", {"query.address": 2**63 - 16}, "forward: an array ends beyond the addresses of 63 bits; correct"),
    ],
)
def test_results_have_memory_of_their_own(
    driver_log: FakeDriver, host: LibraryHost, direction: str, changes: dict[str, Any], says: str
) -> None:
    """They may be parts of one array, but never share a byte with each other or with an operand."""
    call = call_of(host, direction)
    for name, value in changes.items():
        put(call, name, getattr(call, value).address if isinstance(value, str) else value)
    choice = host.chosen(call, H200)
    assert says in choice.text
    assert choice.status == ("INVALID" if says else "OK"), choice.text
    with device(0).current():
        _, opened = host.opened()
        driver_log.clear()
        assert host.launched(opened, call, WORKSPACE, 2**40) == STATUS[choice.status], host.text
        assert bool(driver_log.calls) == (not says)
        host.close(opened)


def test_memory_is_never_taken_for_apart(host: LibraryHost) -> None:
    """Of drawn strides and distances; few arrays that are apart are refused too."""
    draw = random.Random(0)
    found = {"apart": 0, "shared": 0, "not seen": 0}
    sizes = {"grad_query": (2, 3, 4), "grad_key": (2, 3, 2)}  # batch, row, head
    for _ in range(600):
        call = call_of(host)
        call.batch, call.num_queries, call.num_keys = 2, 3, 3
        regions = []
        for name, shape in sizes.items():
            orders = list(draw.sample(range(3), 3))
            strides, step = [0, 0, 0], ROW * draw.choice((1, 1, 2))
            for axis in orders:
                strides[axis] = step * draw.choice((1, 1, -1))
                step *= shape[axis] * draw.choice((1, 1, 2))
            address = ADDRESSES + 2 * ROW * draw.randint(0, 60) + draw.choice((0, 0, 16))
            for axis, stride in zip(("batch", "row", "head"), strides, strict=True):
                put(call, f"{name}.{axis}", stride)
            put(call, f"{name}.address", address)
            regions.append(Region(address, (*shape, ROW), (*(2 * stride for stride in strides), 2), 2))
        for name in ("grad_value", "query", "key", "value", "output", "grad_output"):
            array = getattr(call, name)
            array.batch, array.row, array.head = 4096, 1024, 128
        choice = host.chosen(call, H200)
        assert choice.text in ("", f"backward: grad_query and grad_key {SHARED}")
        is_shared = overlap(*regions)
        assert choice.text or not is_shared, "memory that is shared is refused"
        found["shared" if is_shared else "not seen" if choice.text else "apart"] += 1
    assert found["apart"] > 100
    assert found["shared"] > 100
    assert found["not seen"] < found["apart"] / 5


def test_gradients_that_are_not_written_have_no_memory(host: LibraryHost) -> None:
    call = call_of(host, "forward")
    call.output_a.address = call.grad_query.address = call.output.address
    assert host.chosen(call, H200).status == "OK"


def test_a_workspace_is_memory_of_its_own(driver_log: FakeDriver, host: LibraryHost) -> None:
    call = call_of(host)
    size = host.chosen(call, H200).workspace
    driver_log.without_memory(True)
    with device(0).current():
        _, opened = host.opened()
        driver_log.clear()
        assert host.launched(opened, call, call.key.address - size + 16, size) == STATUS["INVALID"]
        assert host.text == f"backward: key and workspace {SHARED}"
        assert driver_log.calls == []
        assert host.launched(opened, call, call.key.address - size - 256, size) == 0, host.text
        host.close(opened)
    driver_log.without_memory(False)


def test_gradient_of_logsumexp_is_passed_to_any_kernel(
    driver_log: FakeDriver, host: LibraryHost, tmp_path: Path
) -> None:
    """A problem with it is exported as one without; each call says whether it has one."""
    problem = spec.parse(CASE).problem("backward")
    with_it = problem.replace(grad_logsumexp=Tensor.contiguous(problem.shape.logsumexp, "float32"))
    assert exported(tmp_path / "made", (problem, with_it)).problems == (problem,)
    plan = planner.plans(with_it, "sm_90a", 132)[0]
    addresses = made_up(with_it, ADDRESSES)
    with device(0).current():
        _, opened = host.opened()
        for name, given in (("with", with_it), ("without", problem)):
            call = filled(host.new_call(), given, addresses=addresses)
            size = host.chosen(call, H200).workspace
            wanted = {key: value for key, value in addresses.items() if name == "with" or key != "grad_logsumexp"}
            driver_log.clear()
            bind(artifact(plan.build), plan, given)(wanted, STREAM, workspace=WORKSPACE)
            expected = compared(driver_log)
            driver_log.clear()
            assert host.launched(opened, call, WORKSPACE, size, STREAM) == 0, host.text
            assert compared(driver_log) == expected
        call.grad_logsumexp = call.grad_key.address
        assert host.chosen(call, H200).text == f"backward: grad_logsumexp and grad_key {SHARED}"
        host.close(opened)


# Strides


@pytest.mark.parametrize("case", [CASE, "bf16_d128v64_s300_t900_h4k2_causal", "f16_d64_s70_b3_h5_full_biasgrad"])
def test_packed_strides_are_those_of_contiguous_arrays(host: LibraryHost, case: str) -> None:
    problem = spec.parse(case).problem("backward")
    wanted, found = (filled(host.new_call(), problem) for _ in range(2))
    for name, tensor in problem.tensors().items():
        for axis in ("batch", "row", "head"):
            put(found, f"{name}.{axis}", -1)
            assert getattr(getattr(wanted, name), axis) != -1, (name, tensor)
    assert host.pack(found) == 0
    for name in (name for name in problem.tensors() if name != "bias"):
        for axis, _ in getattr(wanted, name)._fields_:
            assert getattr(getattr(found, name), axis) == getattr(getattr(wanted, name), axis), (name, axis)


def test_packed_strides_that_do_not_fit_are_refused(host: LibraryHost) -> None:
    call = call_of(host)
    call.num_queries = 2**62
    assert host.pack(call) == STATUS["INVALID"]
    assert host.text == "strides of these sizes do not fit in 64 bits; correct the sizes"
    call.abi = 7
    assert host.pack(call) == STATUS["WRONG_ABI"]


def test_sizes_changed_without_strides_overlap_and_are_refused(host: LibraryHost) -> None:
    """The accident that `packed` is for."""
    call = call_of(host, "forward")
    call.num_queries = call.num_keys = 999
    assert host.chosen(call, H200).text == f"forward: rows of output overlap: {OVERLAP}"
    assert host.pack(call) == 0
    assert host.chosen(call, H200).status == "OK"


# Kernels of a group of heads take heads without one


def test_grouped_kernels_take_heads_of_their_own(host: LibraryHost) -> None:
    """A library without kernels for as many key heads as heads has kernels that compute these too."""
    problem = spec.parse(CASE.replace("h4k2", "h4")).problem("forward")
    assert "grouped" not in problem.features
    choice = host.chosen(filled(host.new_call(), problem), H200)
    assert (choice.status, choice.symbol) == ("OK", "fwd_sm90_bf16_d128_causal_grouped_64x128")


def test_decode_comes_before_prefill(host: LibraryHost) -> None:
    found = {}
    for case in (DECODE, DECODE.replace("s8192", "s256"), DECODE.replace("s8192", "s255"), DECODE.replace("q1", "q17")):
        choice = host.chosen(filled(host.new_call(), spec.parse(case).problem("forward")), H200)
        found[case] = choice.symbol or choice.text
    assert list(found.values()) == [
        *["fwd_decode_bf16_d128_full_grouped_16x128"] * 2,
        "forward: num_keys must be at least 256",
        "forward: num_queries must be at most 16",
    ]


def test_dropout_of_every_probability(tmp_path_factory: pytest.TempPathFactory, driver_log: FakeDriver) -> None:
    """Threshold and factor of the kept weights are Python's, bit for bit; seed and offset may be on the device."""
    folder = tmp_path_factory.mktemp("dropout")
    problem = spec.parse("bf16_d64_s200_b2_h3_causal_dropout0.5").problem("forward")
    made = exported(folder / "made", (problem, problem.replace(philox_on_device=True)))
    assert len(made.plans("forward")) == 1, "one kernel serves both"
    library = LibraryHost(compiled(made, folder / "attention.so"))
    build = planner.plan(problem, "sm_90a").build
    names = {name for name, _ in abi.fields_of(build)}
    assert {"dropout_threshold", "keep_scale", "philox_seed_address"} <= names
    with device(0).current():
        _, opened = library.opened()
        for p in (1e-30, 1e-10, 2.0**-33, 1e-6, 0.1, 0.25, 1 / 3, 0.5, 0.9, 1 - 2.0**-24, 1 - 1e-9, 1.0):
            call = filled(library.new_call(), replace(problem, dropout_p=p), first_address=ADDRESSES)
            call.philox_seed, call.philox_offset = 2**63 + 5, 2**40
            call.philox_seed_address, call.philox_offset_address = 4096, 8192
            driver_log.clear()
            assert library.launched(opened, call, 0, 0) == 0, library.text
            (launched,) = driver_log.of("cuLaunchKernelEx")
            found = decode(build, launched.parameters)
            assert found["dropout_threshold"] % 2**32 == threshold(p), p
            assert found["keep_scale"] == keep_scale(p), p
            assert (found["philox_seed"] % 2**64, found["philox_offset"]) == (2**63 + 5, 2**40)
            assert (found["philox_seed_address"], found["philox_offset_address"]) == (4096, 8192)
        library.close(opened)
