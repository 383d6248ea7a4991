"""Tests of e4m3 codes and of keys that contain the values in the C library: chosen and launched as by the package."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cutlass_py_attn.bundle.dispatch import preferred_when
from cutlass_py_attn.bundle.files import Bundle
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.variants import E4M3, E4M3_CACHE, MLA
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem import spec
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.quantization import GRANULARITIES, SCALES, granularity
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.runtime import binding
from cutlass_py_attn.runtime.driver import device
from tests.cases import random_cases
from tests.support import fake_driver
from tests.support.bundle_hosts import ADDRESSES
from tests.support.fake_driver import FakeDriver
from tests.support.library_host import FLAGS, STATUS, Call, LibraryHost, compiled, exported, filled, target_of
from tests.support.library_launches import by_library, by_package, expected_plan, other_plan

H200 = target_of("sm_90a")
KERNELS = {random_cases.E4M3_FROM: 12, random_cases.MLA_FROM: 5}  # numbers of the random cases' kernels
RUNS = 6
OPERANDS = "e4m3_d128_s512_b2_h4k2_causal_descalebatch"
FLOAT16 = "e4m3_d128_s512_b2_h4k2_causal_f16out"
CACHE = "bf16_d128_q1_s8192_b4_h32k8_full_paged16_kv8_descalehead"
ROWS = "bf16_d128_q1_s8192_b4_h32k8_full_paged16_kv8_descalerow"
PROMPT = "bf16_d128_q300_s700_b4_h32k8_causal_br_kv8"
LATENT = "bf16_d576v512_q1_s640_b4_h16k1_full_paged64_mla"
CODES = "bf16_d576v512_q1_s640_b4_h16k1_full_paged64_mla_kv8_descaletile"
CASES = (OPERANDS, FLOAT16, CACHE, ROWS, PROMPT, LATENT, CODES)
SHARED = "share memory, and what is written must not: give each its own, or equal strides in one array"


def parsed(case: str) -> Problem:
    return spec.parse(case).problem("forward")


def drawn(run: int) -> list[Problem]:
    """Run `run` of each kernel number: e4m3 operands, e4m3 caches, and keys that contain the values, some as codes."""
    numbers = [first + number for first, count in KERNELS.items() for number in range(count)]
    found = [random_cases.draw(number, run).problem() for number in numbers]
    return [each for each in found if each.shape.num_keys > 0 and not (each.is_empty or each.reasons())]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    fake_driver.need_compiler("the library")
    problems = (*map(parsed, CASES), *drawn(0))
    return exported(tmp_path_factory.mktemp("codes") / "made", problems, "sm_90a")


@pytest.fixture(scope="module")
def host(bundle: Bundle) -> LibraryHost:
    return LibraryHost(compiled(bundle, bundle.path.parent / "attention.so"))


def call_of(host: LibraryHost, case: str, first_address: int = ADDRESSES) -> Any:
    return filled(host.new_call(), parsed(case), first_address=first_address)


def put(call: Any, name: str, value: Any) -> None:
    """Sets a field, or one of an array: `key_scale.row`."""
    *above, last = name.split(".")
    for part in above:
        call = getattr(call, part)
    setattr(call, last, value)


def compare_launches(
    log: FakeDriver, host: LibraryHost, pairs: Sequence[tuple[Problem, Plan]], ordinal: int = 0
) -> None:
    """Checks that the library chooses these plans, and that each launch has the bytes of the package's own."""
    limits = architecture(pairs[0][1].build.arch)
    with device(ordinal).current():
        status, opened = host.opened()
        assert status == 0, host.text
    log.without_memory(True)
    for problem, plan in pairs:
        call = filled(host.new_call(), problem, first_address=ADDRESSES)
        choice = host.chosen(call, target_of(limits.name) if ordinal else H200)
        wanted = "OK", plan.symbol, plan.workspace.bytes
        assert (choice.status, choice.symbol, choice.workspace) == wanted, (choice.text, problem)
        if not any(binding._problem_mismatches(plan, problem)):
            found = by_library(log, host, opened, call, choice.workspace)
            assert found == by_package(log, plan, problem, ordinal), problem
    log.without_memory(False)
    host.close(opened)


def test_library_chooses_and_launches_what_the_planner_plans(
    driver_log: FakeDriver, bundle: Bundle, host: LibraryHost
) -> None:
    """For other sizes, layouts and scales than the exported ones; every byte of each launch."""
    builds = {plan.build for plan in bundle.plans("forward")}
    pairs, refused = [], 0
    for problem in (problem for run in range(RUNS) for problem in drawn(run)):
        plan = expected_plan(bundle, problem, "sm_90a", 132)
        choice = host.chosen(filled(host.new_call(), problem), H200)
        if plan is None and choice.status != "OK":
            assert choice.status == "NO_KERNEL", choice.text
            refused += 1
        else:
            pairs.append((problem, plan or other_plan(builds, problem, choice.symbol, "sm_90a", 132)))
    compare_launches(driver_log, host, pairs)
    assert refused < len(pairs) // 2
    kinds = {f"{plan.build.family} {plan.build.variant}".strip() for _, plan in pairs}
    assert kinds == {"decode persistent", f"sm90 {E4M3}", f"sm90 {E4M3_CACHE}", f"sm90 {MLA}"}
    grains = {(each.has_e4m3_cache, granularity(scale)) for each, _ in pairs for scale in each.scales.values()}
    assert len(grains) == 2 * len(GRANULARITIES), "only caches have scales of rows, and of tiles of columns"
    assert {each.pages is None for each, _ in pairs if each.key_rope is not None} == {True, False}


def test_a_kernel_takes_scales_of_every_kind(driver_log: FakeDriver, host: LibraryHost) -> None:
    """Also some without the others, one of rows beside one of heads, and scales with strides."""
    heads, batch = 8, 4
    apart = Tensor((batch, heads), (3 * heads, 2), "float32")
    of_rows = parsed(ROWS).key_scale
    assert of_rows is not None
    wide = replace(of_rows, strides=(16 * 8 * 34, 8 * 34, 34))
    changed = [
        parsed(OPERANDS).replace(query_scale=None, key_scale=Tensor((1,), (1,), "float32")),
        parsed(CACHE).replace(key_scale=apart, value_scale=None),
        parsed(CACHE).replace(key_scale=None, value_scale=Tensor((), (), "float32")),
        parsed(ROWS).replace(key_scale=wide, value_scale=Tensor((heads,), (5,), "float32")),
        parsed(ROWS).replace(value_scale=None),
    ]
    compare_launches(driver_log, host, [(each, planner.plans(each, "sm_90a", 132)[0]) for each in changed])


def test_kernels_of_other_targets_take_caches_alone(driver_log: FakeDriver, tmp_path: Path) -> None:
    """Where no kernel reads value through key alone, others do."""
    problems = [parsed(case) for case in (CACHE, ROWS, LATENT)]
    made = exported(tmp_path / "made", tuple(problems), "sm_86")
    library = LibraryHost(compiled(made, tmp_path / "attention.so"))
    compare_launches(driver_log, library, [(each, planner.plans(each, "sm_86", 84)[0]) for each in problems], 1)
    with pytest.raises(NotSupported, match="the kernel of sm_86 takes no"):
        exported(tmp_path / "other", (parsed(OPERANDS),), "sm_86")


def test_decode_tiles_of_a_scale_of_each_row(tmp_path: Path) -> None:
    """The dispatcher knows the tile that the planner chooses for as many query rows, with scales of rows or not."""
    for grain in ("head", "row"):
        for queries, rows in ((1, (1, 16)), (8, (17, 32)), (16, (33, 128))):
            case = f"bf16_d128_q{queries}_s8192_b4_h32k8_full_kv8_descale{grain}"
            rule = preferred_when(planner.builds(parsed(case), "sm_90")[0])
            taken = [count for count in range(1, 129) if rule.evaluate({"num_queries": count, "group": 1})]
            assert (taken[0], taken[-1]) == rows


# Keys that contain the values


def test_kernels_of_keys_that_contain_the_values_need_the_flag(driver_log: FakeDriver, host: LibraryHost) -> None:
    """Value then is what key says, whatever its strides are; without the flag no kernel believes it."""
    call = call_of(host, LATENT)
    assert host.chosen(call, H200).symbol == "fwd_sm90_bf16_d576v512_full_grouped_paged_mla_64x64"
    call.value.address = call.value.row = 0
    assert host.chosen(call, H200).status == "OK"
    with device(0).current():
        _, opened = host.opened()
        driver_log.without_memory(True)
        assert host.launched(opened, call, 2**45, 2**40) == 0, host.text
        call.key.address = 0
        assert host.launched(opened, call, 2**45, 2**40) == STATUS["INVALID"]
        assert host.text == "forward: key must be a device address, 16-byte aligned"
        driver_log.without_memory(False)
        host.close(opened)
    call = call_of(host, LATENT)
    call.flags &= ~FLAGS["VALUE_IN_KEY"]
    choice = host.chosen(call, H200)
    assert choice.status == "NO_KERNEL"
    assert choice.text.endswith("features: grouped paged, gradients 0x0; export such a problem too")


def test_other_kernels_take_keys_that_contain_the_values(host: LibraryHost) -> None:
    """Of head dims for which there is no such kernel."""
    call = call_of(host, PROMPT)
    wanted = host.chosen(call, H200).symbol
    call.flags |= FLAGS["VALUE_IN_KEY"]
    call.value.address = 0
    choice = host.chosen(call, H200)
    assert (choice.status, choice.symbol) == ("OK", wanted)


# Refusals

IN_FORWARD = (
    "ATTENTION_E4M3_CACHE, ATTENTION_ROW_SCALES, ATTENTION_FLOAT16_OUTPUT, ATTENTION_VALUE_IN_KEY and "
    "ATTENTION_TILE_SCALES"
)
ALL_THREE = "flags has ATTENTION_TILE_SCALES without ATTENTION_E4M3_CACHE and ATTENTION_VALUE_IN_KEY; set all three"
ANY_DTYPE = "must be ATTENTION_F16, ATTENTION_BF16, ATTENTION_F32, or of a forward ATTENTION_E4M3; choose one"
# A case, the fields that are wrong, the text.
WRONG: tuple[tuple[str, dict[str, Any], str], ...] = (
    (OPERANDS, {"direction": 1}, f"dtype = 4: {ANY_DTYPE}"),
    (OPERANDS, {"direction": 2}, f"dtype = 4: {ANY_DTYPE}"),
    (OPERANDS, {"dtype": 5}, f"dtype = 5: {ANY_DTYPE}"),
    (OPERANDS, {"dtype": 2, "key_scale.address": 0, "value_scale.address": 0},
     "query_scale has an address, and dtype is not ATTENTION_E4M3; set it, or clear the address"),
    (OPERANDS, {"dtype": 2, "query_scale.address": 0, "value_scale.address": 0},
     "key_scale has an address, and flags has no ATTENTION_E4M3_CACHE, nor is dtype ATTENTION_E4M3; set it, or clear "
     "the address"),
    (OPERANDS, {"query_scale.address": 4098},
     "query_scale: must be a 4-byte aligned device address, or 0 for a scale of 1; correct it"),
    (OPERANDS, {"query_scale.row": 2},
     "query_scale.row = 2: must be 0, because rows of query have no scales; clear it"),
    (OPERANDS, {"value_scale.row": 2},
     "value_scale.row = 2: must be 0 without ATTENTION_ROW_SCALES; set the flag, or clear it"),
    (OPERANDS, {"flags": 512}, "dtype = 4 with ATTENTION_E4M3_CACHE: must be ATTENTION_F16 or ATTENTION_BF16, that of "
                               "query; choose one, or clear the flag"),
    (OPERANDS, {"flags": 1024}, "flags has ATTENTION_ROW_SCALES without ATTENTION_E4M3_CACHE; set both"),
    (CACHE, {"dtype": 3}, "dtype = 3 with ATTENTION_E4M3_CACHE: must be ATTENTION_F16 or ATTENTION_BF16"),
    (CACHE, {"key_scale.row": 8}, "key_scale.row = 8: must be 0 without ATTENTION_ROW_SCALES; set the flag, or clear"),
    (CACHE, {"flags": 64 | 512 | 2048},
     "flags has ATTENTION_FLOAT16_OUTPUT, and dtype is not ATTENTION_E4M3: output has the dtype; clear the flag"),
    (CACHE, {"direction": 1}, f"flags = 0x240: {IN_FORWARD} are for ATTENTION_FORWARD alone; clear them"),
    (CACHE, {"flags": 64}, "key_scale has an address, and flags has no ATTENTION_E4M3_CACHE"),
    (CACHE, {"key.row": 8 * 128 + 8}, "forward: key_row must be a multiple of 16 elements"),
    (LATENT, {"head_dim_value": 640},
     "head_dim_value = 640 with ATTENTION_VALUE_IN_KEY: must be at most head_dim, 576; lower it, or clear the flag"),
    (LATENT, {"value.address": 4096},
     "value.address = 0x1000 with ATTENTION_VALUE_IN_KEY: must be that of key, or 0; clear it, or the flag"),
    (LATENT, {"direction": 2}, "flags = 0x1040: ATTENTION_APPEND takes ATTENTION_E4M3_CACHE, ATTENTION_ROW_SCALES"),
    (LATENT, {"flags": 65536}, "flags = 0x10000: has bits that this library does not know; clear them, or update"),
    (CODES, {"flags": 64 | 512 | 8192}, ALL_THREE),
    (CODES, {"flags": 64 | 4096 | 8192, "key_scale.address": 0}, ALL_THREE),
    (CODES, {"flags": 64 | 512 | 1024 | 4096 | 8192},
     "flags has ATTENTION_TILE_SCALES and ATTENTION_ROW_SCALES; clear the latter"),
    (CODES, {"flags": 64 | 512 | 4096},
     "key_rope has an address, and flags has no ATTENTION_TILE_SCALES; set the flag, or clear the address"),
    (CODES, {"direction": 1}, f"flags = 0x3240: {IN_FORWARD} are for ATTENTION_FORWARD alone; clear them"),
    (CODES, {"value_scale.address": 4096},
     "value_scale has an address with ATTENTION_TILE_SCALES: must be 0, because value is in key; clear it"),
    (CODES, {"key_scale.address": 4098}, "key_scale: must be a 4-byte aligned device address; correct it"),
    (CODES, {"key_rope.address": 4104}, "forward: key_rope must be a device address, 16-byte aligned"),
    (CODES, {"key_rope.row": 68}, "forward: key_rope_row must be a multiple of 8 elements"),
    (CODES, {"key_rope.batch": -64}, "forward: key_rope_page must be above 0: a tensor map steps forward"),
    (CODES, {"key.row": 520}, "forward: key_row must be a multiple of 16 elements"),
    (CODES, {"page_size": 8, "num_keys": 80},
     "forward: page_size must be at least 16: no kernel reads smaller pages of such a cache"),
)  # fmt: skip


@pytest.mark.parametrize(("case", "changes", "words"), WRONG)
def test_wrong_calls_are_refused(
    driver_log: FakeDriver, host: LibraryHost, case: str, changes: dict[str, Any], words: str
) -> None:
    """By the choice, and by a launch before it asks the driver for anything."""
    call = call_of(host, case)
    assert host.chosen(call, H200).status == "OK", host.text
    for name, value in changes.items():
        put(call, name, value)
    choice = host.chosen(call, H200)
    assert (choice.status, choice.symbol) == ("INVALID", ""), choice.text
    assert words in choice.text
    with device(0).current():
        _, opened = host.opened()
        driver_log.clear()
        assert host.launched(opened, call, 2**45, 2**40) == STATUS["INVALID"]
        assert words in host.text
        assert driver_log.calls == []
        host.close(opened)


@pytest.mark.parametrize(
    ("case", "changes", "text"),
    [
        (CACHE, {"flags": 64 | 512 | 1024, "head_dim": 64, "head_dim_value": 64},
         "forward, bfloat16, head_dim 64, head_dim_value 64, mask full, features: e4m3_cache grouped paged row_scales"),
        (OPERANDS, {"window_right": -1, "flags": 2048},
         "forward, float8_e4m3fn, head_dim 128, head_dim_value 128, mask full, features: float16_output grouped"),
    ],
)  # fmt: skip
def test_calls_without_a_kernel_are_named(host: LibraryHost, case: str, changes: dict[str, Any], text: str) -> None:
    call = call_of(host, case)
    for name, value in changes.items():
        put(call, name, value)
    choice = host.chosen(call, H200)
    assert choice.status == "NO_KERNEL"
    assert choice.text == f"no kernel of this library for {text}, gradients 0x0; export such a problem too"


@pytest.mark.parametrize(
    ("case", "name"), [(OPERANDS, "query_scale"), (CACHE, "key_scale"), (ROWS, "value_scale"), (CODES, "key_scale")]
)
def test_results_have_memory_apart_from_scales(host: LibraryHost, case: str, name: str) -> None:
    """Of all batches and heads, or of all rows of the pool, or of their tiles of columns."""
    call = call_of(host, case)
    size = 4 * math.prod(parsed(case).scales[name].shape)
    start = getattr(call, name).address
    call.output.address = start + size
    assert host.chosen(call, H200).status == "OK", host.text
    call.output.address = start + size - 16
    assert host.chosen(call, H200).text == f"forward: output and {name} {SHARED}"


def test_results_of_codes_have_two_bytes(host: LibraryHost) -> None:
    """Output is twice as large as query; key and value of a cache have one byte beside a query of two."""
    call = call_of(host, OPERANDS)
    count = 2 * 512 * 4 * 128
    call.query.address = call.output.address + 2 * count
    assert host.chosen(call, H200).status == "OK", host.text
    call.query.address -= 16
    assert host.chosen(call, H200).text == f"forward: query and output {SHARED}"
    call = call_of(host, CACHE)
    call.output.address = call.value.address + parsed(CACHE).value.shape[0] * 16 * 8 * 128
    assert host.chosen(call, H200).status == "OK", host.text
    call.output.address -= 16
    assert host.chosen(call, H200).text == f"forward: value and output {SHARED}"


@pytest.mark.parametrize(
    ("name", "columns", "both"), [("key", 512, "key and output"), ("key_rope", 2 * 64, "output and key_rope")]
)
def test_results_have_memory_apart_from_codes_of_a_latent_cache(
    host: LibraryHost, name: str, columns: int, both: str
) -> None:
    """columns: bytes of a row. Codes are those of the columns of value."""
    call, problem = call_of(host, CODES), parsed(CODES)
    end = getattr(call, name).address + math.prod(problem.key.shape[:3]) * columns
    call.output.address = end
    assert host.chosen(call, H200).status == "OK", host.text
    call.output.address = end - 16
    assert host.chosen(call, H200).text.startswith(f"forward: {both} {SHARED}")


# A latent cache of e4m3 codes


def test_rows_of_a_latent_cache_may_be_packed(driver_log: FakeDriver, host: LibraryHost) -> None:
    """Codes, scales and columns of 16 bits of a row one after another, 656 bytes, as other libraries store them."""
    problem = parsed(CODES)
    assert problem.key_scale is not None
    assert problem.key_rope is not None
    arrays = {"key": problem.key, "value": problem.value, "key_scale": problem.key_scale, "key_rope": problem.key_rope}
    steps = {name: 656 // (4 if name == "key_scale" else 2 if name == "key_rope" else 1) for name in arrays}
    packed = {
        name: replace(array, strides=(64 * steps[name], steps[name], steps[name], 1)) for name, array in arrays.items()
    }
    tiles = replace(problem.key_scale, strides=(4 * 64 * 5, 4 * 5, 4 * 5, 5))
    changed = [problem.replace(**packed), problem.replace(key_scale=tiles)]
    compare_launches(driver_log, host, [(each, planner.plans(each, "sm_90a", 132)[0]) for each in changed])


def test_scales_and_columns_of_16_bits_beside_codes_are_needed(driver_log: FakeDriver, host: LibraryHost) -> None:
    with device(0).current():
        _, opened = host.opened()
        driver_log.without_memory(True)
        for name, alignment in (("key_scale", 4), ("key_rope", 16)):
            call = call_of(host, CODES)
            getattr(call, name).address = 0
            assert host.launched(opened, call, 2**45, 2**40) == STATUS["INVALID"]
            assert host.text == f"forward: {name} must be a device address, {alignment}-byte aligned"
        driver_log.without_memory(False)
        host.close(opened)


def test_no_kernel_of_numbers_takes_codes(host: LibraryHost) -> None:
    """Nor does one of codes take numbers: of another mask there is no kernel of codes."""
    call = call_of(host, CODES)
    call.window_right = 0
    choice = host.chosen(call, H200)
    assert choice.status == "NO_KERNEL"
    assert "features: e4m3_cache grouped paged tile_scales value_in_key, gradients 0x0" in choice.text


@pytest.mark.parametrize("case", [CODES, "bf16_d576v512_q3_s90_b2_h16k2_full_mla_kv8_descaletile"])
def test_packed_strides_of_codes_are_those_of_contiguous_arrays(host: LibraryHost, case: str) -> None:
    wanted, found = (filled(host.new_call(), parsed(case)) for _ in range(2))
    names = [f"{name}.{axis}" for name in ("key", "key_scale", "key_rope") for axis in ("batch", "row", "head")]
    for name in (*names, "key_scale_tile"):
        put(found, name, -1)
    assert host.pack(found) == 0
    heads = parsed(case).shape.num_heads_key
    for name in (*names, "key_scale_tile"):
        if heads > 1 or name != "key_scale.head":  # along which nothing steps
            assert get(found, name) == get(wanted, name), name


def get(call: Any, name: str) -> int:
    """A field, or one of an array: `key_scale.row`."""
    found: int = functools.reduce(getattr, name.split("."), call)
    return found


# Strides, and programs of other versions


@pytest.mark.parametrize("case", [ROWS, "bf16_d128_q300_s700_b4_h32k8_causal_br_kv8_descalerow"])
def test_packed_strides_of_rows_are_those_of_contiguous_arrays(host: LibraryHost, case: str) -> None:
    wanted, found = (filled(host.new_call(), parsed(case)) for _ in range(2))
    for name in ("key_scale", "value_scale"):
        for axis in ("batch", "row", "head"):
            put(found, f"{name}.{axis}", -1)
    assert host.pack(found) == 0
    for name in ("key_scale", "value_scale"):
        for axis in ("batch", "row", "head"):
            assert getattr(getattr(found, name), axis) == getattr(getattr(wanted, name), axis), (name, axis)


def test_other_scales_are_packed_by_head(host: LibraryHost) -> None:
    call = call_of(host, OPERANDS)
    assert host.pack(call) == 0
    for name in SCALES:
        scale = getattr(call, name)
        assert (scale.batch, scale.row, scale.head) == (0, 0, 1)
    assert host.chosen(call, H200).status == "OK", host.text


def test_a_program_without_the_last_field_has_scales_of_key_and_value(
    driver_log: FakeDriver, host: LibraryHost
) -> None:
    """query_scale came last: what lies behind the struct of an earlier header is not read."""
    problem = parsed(OPERANDS).replace(query_scale=None)
    plan = planner.plans(problem, "sm_90a", 132)[0]
    call = filled(host.new_call(), problem, first_address=ADDRESSES)
    call.bytes = Call.query_scale.offset
    call.query_scale.address = 1
    driver_log.without_memory(True)
    with device(0).current():
        _, opened = host.opened()
        assert by_library(driver_log, host, opened, call, 0) == by_package(driver_log, plan, problem, 0)
        host.close(opened)
    driver_log.without_memory(False)
