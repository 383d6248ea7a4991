"""Tests of masks in memory in the C library: ranges of keys and visible blocks, launched as by the package."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from cutlass_py_attn.bundle.files import Bundle
from cutlass_py_attn.problem import spec
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Window
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import DIRECTIONS, Shape, Tensor
from cutlass_py_attn.runtime.driver import device
from tests.support import fake_driver
from tests.support.bundle_hosts import ADDRESSES
from tests.support.fake_driver import FakeDriver
from tests.support.library_host import FLAGS, STATUS, LibraryHost, compiled, exported, filled, target_of
from tests.support.library_launches import FREE, by_library, by_package, expected_plan
from tests.support.listed_plans import with_blocks

CASES = (
    "bf16_d128_s512_b2_h4k2_causal_ranges11documents",
    "bf16_d128_s512_b2_h4_full_rangesbh",
    "f16_d64_s512_b2_h4_causal_rangesb1",
)
H200 = target_of("sm_90a")
DRAWN = 300
BLOCK_SIZES = ((128, 128), (128, 128), (256, 128), (384, 384), (64, 64), (192, 256))
BANDS = (Full(), Causal(), CausalBottomRight(), Window(40, 9), Window(None, 3))


def exported_problems() -> list[Problem]:
    """Those of CASES, and one whose blocks the first tile of its head dim does not divide."""
    found = [spec.parse(case).problem(direction) for case in CASES for direction in DIRECTIONS]
    without = found[4].replace(key_start=None, key_end=None)
    return [*found, with_blocks(without, (128, 128), (True, True), 4)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    fake_driver.need_compiler("the library")
    return exported(tmp_path_factory.mktemp("masks") / "made", tuple(exported_problems()))


@pytest.fixture(scope="module")
def host(bundle: Bundle) -> LibraryHost:
    options = "-fsanitize=signed-integer-overflow,integer-divide-by-zero,shift", "-fno-sanitize-recover=all"
    return LibraryHost(compiled(bundle, bundle.path.parent / "attention.so", *options))


def drawn(draw: random.Random) -> Problem:
    """A problem of other sizes with ranges, blocks or both, of each axes and layout, within a band."""
    case, direction = draw.choice(CASES), draw.choice(DIRECTIONS)
    old = spec.parse(case).problem(direction)
    group = draw.choice((1, 2, 4)) if old.shape.group > 1 else 1
    heads_key, batch = draw.randint(1, 5), draw.choice((1, 2, 3, 40))
    queries = draw.choice((1, 90, 300, 5000))
    keys = draw.choice((queries, draw.randint(1, 9000)))
    dims = old.shape.head_dim, old.shape.head_dim_value
    shape = Shape(batch, queries, keys, heads_key * group, *dims, heads_key)
    problem = Problem.dense(direction, shape, old.dtype, draw.choice(BANDS))
    problem = problem.replace(scale=draw.choice((None, 0.3)))
    kind = draw.choice(("ranges", "blocks", "both"))
    if kind != "blocks":
        lists = draw.choice((1, batch)), draw.choice((1, shape.num_heads))
        problem = problem.replace(key_start=edge(draw, *lists, queries), key_end=edge(draw, *lists, queries))
    if kind != "ranges":
        heads = draw.choice((heads_key, shape.num_heads)) if direction == "forward" else heads_key
        axes = draw.random() < 0.5, draw.random() < 0.5
        problem = with_blocks(problem, draw.choice(BLOCK_SIZES), axes, heads)
    return problem


def edge(draw: random.Random, batch: int, heads: int, queries: int) -> Tensor:
    """An int32 array of starts or ends: contiguous, with gaps, or with the queries outermost."""
    layouts = (heads * queries, queries, 1), (heads * queries * 3 + 5, queries * 3, 3), (1, batch, batch * heads)
    return Tensor((batch, heads, queries), draw.choice(layouts), "int32", 4)


def test_library_chooses_and_launches_what_the_planner_plans(
    driver_log: FakeDriver, bundle: Bundle, host: LibraryHost
) -> None:
    """Symbol and workspace for two devices; on one of them every byte of each launch."""
    draw = random.Random(0)
    with device(0).current():
        status, opened = host.opened()
        assert status == 0, host.text
    driver_log.without_memory(True)
    found = {"OK": 0, "INVALID": 0, "NO_KERNEL": 0}
    kinds = set()
    for number in range(DRAWN):
        problem = drawn(draw)
        assert problem.reasons() == []
        call = filled(host.new_call(), problem, first_address=ADDRESSES)
        sms = (132, 16)[number % 2]
        plan, choice = expected_plan(bundle, problem, "sm_90a", sms), host.chosen(call, target_of("sm_90a", sms))
        found[choice.status] += 1
        if plan is None:
            assert choice.status == "INVALID", problem
            assert "of which a tile is; export a problem with such a block_size" in choice.text
            continue
        assert (choice.status, choice.symbol, choice.workspace) == ("OK", plan.symbol, plan.workspace.bytes), problem
        sizes = dict(plan.params)
        kinds.add((problem.direction, sizes["ranges_batch"] > 1, sizes["ranges_heads"] > 1))
        if sms == 132:
            assert by_library(driver_log, host, opened, call, choice.workspace) == by_package(
                driver_log, plan, problem, 0
            ), problem
    driver_log.without_memory(False)
    host.close(opened)
    assert len(kinds) == 8
    assert found["OK"] > DRAWN // 2
    assert 0 < found["INVALID"] < DRAWN // 4
    assert found["NO_KERNEL"] == 0


def call_of(host: LibraryHost, direction: str = "backward", kind: str = "both") -> Any:
    """The call of a problem of two sequences and grouped heads, each with a mask of its own."""
    problem = spec.parse(CASES[0].replace("ranges11documents", "rangesbh")).problem(direction)
    if kind != "ranges":
        problem = with_blocks(problem, (128, 128), (True, True), problem.shape.num_heads_key)
    if kind == "blocks":
        problem = problem.replace(key_start=None, key_end=None)
    return filled(host.new_call(), problem, first_address=ADDRESSES)


def put(call: Any, name: str, value: int) -> None:
    """Sets a field, or one of an array: `key_start.row`."""
    *above, last = name.split(".")
    for part in above:
        call = getattr(call, part)
    setattr(call, last, value)


TILED = "of which a tile is; export a problem with such a block_size"
# direction, kind of mask, the fields that are wrong, the text
WRONG: tuple[tuple[str, str, dict[str, int], str], ...] = (
    ("forward", "ranges", {"flags": 0},
     "key_start has an address, and flags has no ATTENTION_KEY_RANGES; set the flag, or clear the address; key_end has "
     "an address, and flags has no ATTENTION_KEY_RANGES; set the flag, or clear the address"),
    ("backward", "blocks", {"flags": 0},
     "visible_blocks has an address, and flags has no ATTENTION_VISIBLE_BLOCKS; set the flag, or clear the address"),
    ("forward", "ranges", {"key_start.address": 4098},
     "forward: key_start must be a device address, 4-byte aligned"),
    ("backward", "ranges", {"key_end.address": 4097}, "backward: key_end must be a device address, 4-byte aligned"),
    ("forward", "both", {"mask_block_rows": 0}, "forward: mask_block_rows must be at least 1"),
    ("forward", "both", {"mask_block_rows": 64}, f"forward: mask_block_rows must be a multiple of 128, {TILED}"),
    ("backward", "blocks", {"mask_block_columns": 2**31 - 128 + 1},
     f"backward: mask_block_columns must be a multiple of 128, {TILED}"),
    ("backward", "blocks", {"mask_block_columns": 2**31}, "backward: mask_block_columns must be at most 2147483647"),
    ("forward", "both", {"mask_block_heads": 3}, "forward: mask_block_heads must be num_heads / num_heads_key, or 1"),
    ("backward", "both", {"mask_block_heads": 1},
     "backward: mask_block_heads must be num_heads / num_heads_key, or 1 with visible_blocks.head = 0"),
    ("backward", "both", {"mask_block_heads": 2**62}, "backward: mask_block_heads must be num_heads / num_heads_key"),
    ("backward", "both", {"key_start.row": 2**62},
     "backward: an array ends beyond the addresses of 63 bits; correct its address, sizes and strides"),
)  # fmt: skip


@pytest.mark.parametrize(("direction", "kind", "fields", "text"), WRONG)
def test_wrong_calls(host: LibraryHost, direction: str, kind: str, fields: dict[str, int], text: str) -> None:
    call = call_of(host, direction, kind)
    assert host.chosen(call, H200).status == "OK"
    for name, value in fields.items():
        put(call, name, value)
    choice = host.chosen(call, H200)
    assert choice.status == "INVALID"
    assert choice.text.startswith(text)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ["key_start", "key_end", "visible_blocks"])
def test_a_launch_needs_the_arrays_of_its_flags(
    driver_log: FakeDriver, host: LibraryHost, name: str, direction: str
) -> None:
    """And no other: ranges or blocks alone are a mask. A choice needs no address."""
    call = call_of(host, direction)
    getattr(call, name).address = 0
    assert host.chosen(call, H200).status == "OK"
    bits = 1 if name == "visible_blocks" else 4
    with device(0).current():
        _, opened = host.opened()
        driver_log.without_memory(True)
        driver_log.clear()
        assert host.launched(opened, call, FREE, 2**40) == STATUS["INVALID"]
        assert host.text == f"{direction}: {name} must be a device address, {bits}-byte aligned"
        assert driver_log.of("cuLaunchKernelEx") == []
        for array in ("visible_blocks",) if name == "visible_blocks" else ("key_start", "key_end"):
            getattr(call, array).address = 0
        call.flags &= ~FLAGS["VISIBLE_BLOCKS" if name == "visible_blocks" else "KEY_RANGES"]
        assert host.launched(opened, call, FREE, 2**40) == 0, host.text
        driver_log.without_memory(False)
        host.close(opened)


def test_a_result_over_a_mask_is_refused(host: LibraryHost) -> None:
    for name in ("key_start", "key_end", "visible_blocks"):
        call = call_of(host)
        call.grad_key.address = getattr(call, name).address + 512 - 16
        getattr(call, name).address += 512
        choice = host.chosen(call, H200)
        assert choice.status == "INVALID"
        assert f"{name} and grad_key share memory" in choice.text


def test_strides_of_contiguous_arrays(host: LibraryHost) -> None:
    """Of every sequence and head; a stride of 0 then says that one mask serves all, and shortens the workspace."""
    call = call_of(host)
    wanted = {name: bytes(getattr(call, name)) for name in ("key_start", "key_end", "visible_blocks")}
    for name in wanted:
        array = getattr(call, name)
        array.batch = array.head = array.row = 0
    assert host.pack(call) == 0, host.text
    assert {name: bytes(getattr(call, name)) for name in wanted} == wanted
    whole = host.chosen(call, H200).workspace
    for name in wanted:
        getattr(call, name).batch = 0
    assert host.chosen(call, H200).workspace < whole
    call.mask_block_rows = 0
    assert host.pack(call) == STATUS["INVALID"]


def test_other_kernels_take_no_masks_in_memory(host: LibraryHost) -> None:
    """Nor do these take a call without one; of deterministic gradients there is no kernel."""
    call = filled(host.new_call(), spec.parse("bf16_d128_s512_b2_h4k2_causal").problem("forward"))
    assert "mask causal, features: grouped" in host.chosen(call, H200).text
    call = call_of(host)
    call.flags |= FLAGS["DETERMINISTIC"]
    assert "mask ranges, features: grouped, gradients 0x7, deterministic" in host.chosen(call, H200).text


def test_problems_that_differ_by_axes_alone_have_one_kernel(tmp_path: Path) -> None:
    """A call says which axes its arrays have."""
    problems = [spec.parse(f"bf16_d128_s512_b2_h4_causal_ranges{axes}").problem("forward") for axes in ("11", "bh")]
    problems.append(with_blocks(problems[0], (128, 128), (True, False)))
    found = exported(tmp_path / "made", tuple(problems)).plans("forward")
    assert [plan.symbol for plan in found] == ["fwd_sm90_bf16_d128_ranges_128x128"]
