"""Tests of appends and merges in the C library: launched as by the package, and refused with a text that says why."""

from __future__ import annotations

from typing import Any

import pytest

from cutlass_py_attn.bundle import interface, row_spec
from cutlass_py_attn.bundle.files import Bundle
from cutlass_py_attn.plan.append import plan_append
from cutlass_py_attn.problem.append import AppendProblem
from cutlass_py_attn.problem.merge import MergeProblem
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.runtime.binding import bind
from cutlass_py_attn.runtime.driver import device
from tests.cases.serving_cases import RowCase
from tests.support import fake_driver
from tests.support.bundle_hosts import ADDRESSES, STREAM, compared
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import artifact
from tests.support.library_host import SPACE, STATUS, LibraryHost, compiled, exported, filled_rows, row_cases, target_of

H200 = target_of("sm_90a")
SEEDS = 60
OVERLAP = "its strides must be those of an array of these sizes; set them with the sizes"
SHARED = "share memory, and what is written must not: give each its own, or equal strides in one array"
POOLS = AppendProblem.dense((5, 8, 128), (10, 16), "bfloat16")
SCALED = AppendProblem.dense((5, 8, 128), (10, 16), "bfloat16", scales="row")
LATENT = AppendProblem.dense((5, 2, 512), (10, 16), "bfloat16", head_dim_value=64, scales="tile")
DENSE = MergeProblem.dense((3, 5, 4, 128), "bfloat16")
PACKED = MergeProblem.packed(3, 5, (14, 4, 128), "bfloat16")
PROBLEMS = {"pools": POOLS, "scaled": SCALED, "latent": LATENT, "dense": DENSE, "packed": PACKED}


@pytest.fixture(scope="module")
def drawn() -> list[RowCase]:
    """Dims, dtypes, scales, layouts of the pools, alignments, packed rows."""
    return row_cases(SEEDS)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, drawn: list[RowCase]) -> Bundle:
    fake_driver.need_compiler("the library")
    problems = (*(case.problem for case in drawn), POOLS, SCALED, LATENT, DENSE, PACKED)
    return exported(tmp_path_factory.mktemp("rows") / "made", problems, "sm_86,sm_90a")


@pytest.fixture(scope="module")
def host(bundle: Bundle) -> LibraryHost:
    names = "signed-integer-overflow,integer-divide-by-zero,shift"
    options = f"-fsanitize={names}", "-fno-sanitize-recover=all"
    return LibraryHost(compiled(bundle, bundle.path.parent / "attention.so", *options))


def addresses_of(case: RowCase) -> dict[str, int]:
    """Addresses of the arrays of a case, of which some are in the same memory."""
    memories = list(dict.fromkeys(id(placed.memory) for placed in case.arrays.values()))
    return {
        name: ADDRESSES + 2**30 * memories.index(id(placed.memory)) + placed.offset
        for name, placed in case.arrays.items()
    }


def test_library_launches_what_the_package_launches(
    driver_log: FakeDriver, drawn: list[RowCase], bundle: Bundle, host: LibraryHost
) -> None:
    """Kernel, grid and every byte of the parameters, for pools of all layouts."""
    symbols = set()
    with device(0).current():
        _, opened = host.opened()
        for case in drawn:
            plan, addresses = case.plan("sm_90"), addresses_of(case)
            call = filled_rows(host.new_call(), case.problem, addresses=addresses)
            choice = host.chosen(call, H200)
            assert (choice.status, choice.symbol, choice.workspace) == ("OK", plan.symbol, 0), (choice.text, case)
            driver_log.clear()
            bind(artifact(plan.build), plan)(addresses, STREAM)
            wanted = compared(driver_log)
            driver_log.clear()
            assert host.launched(opened, call, 0, 0, STREAM) == 0, host.text
            assert compared(driver_log) == wanted, case
            symbols.add(plan.symbol)
        host.close(opened)
    assert len(symbols) > 20
    assert bundle.directions == ("append", "merge")


def test_python_takes_the_kernels_of_the_library(driver_log: FakeDriver, bundle: Bundle) -> None:
    """The folder of a library is a source of kernels, and binds its problems, which it reads from its manifest."""
    plan = plan_append(POOLS, "sm_90")
    assert bundle(plan.build).build == plan.build
    assert {type(problem) for problem in Bundle(bundle.path).problems} == {AppendProblem, MergeProblem}
    with device(0).current():
        assert bundle.bind("append", POOLS).plan.build == plan.build


def call_of(host: LibraryHost, problem: AppendProblem | MergeProblem) -> Any:
    return filled_rows(host.new_call(), problem, first_address=ADDRESSES)


def put(call: Any, name: str, value: Any) -> None:
    """Sets a field, or one of an array: `key_cache.row`."""
    *above, last = name.split(".")
    for part in above:
        call = getattr(call, part)
    setattr(call, last, value)


# (problem, field, wrong value, text)
WRONG: tuple[tuple[AppendProblem | MergeProblem, str, Any, str], ...] = (
    (POOLS, "tokens_k", 0, "append: tokens_k must be at least 1; with none there is nothing to launch"),
    (POOLS, "key_cache.batch", 2**59, "append: an array ends beyond the addresses of 63 bits; correct its address, "
                                      "sizes and strides"),
    (POOLS, "tokens_k", 2**30, "append: num_rows must be at most 2147482624; call once for each slice"),
    (POOLS, "page_size", 0, "append: page_size must be at least 1; with none there is nothing to launch"),
    (POOLS, "num_pages", -3, "append: num_pages must be at least 1; with none there is nothing to launch"),
    (POOLS, "num_pages", 2**28, "append: num_pages * page_size must be at most 2147483647; use several caches"),
    (POOLS, "key_cache.row", 100, "append: key_cache_row must be a multiple of 8 elements"),
    (POOLS, "key_cache.row", 0, f"append: rows of key_cache overlap: {OVERLAP}"),
    (POOLS, "value_cache.head", 64, f"append: rows of value_cache overlap: {OVERLAP}"),
    (POOLS, "value_cache.batch", 128, f"append: rows of value_cache overlap: {OVERLAP}"),
    (POOLS, "page_size", 17, f"append: rows of key_cache overlap: {OVERLAP}"),
    (POOLS, "num_heads_key", 9, f"append: rows of key_cache overlap: {OVERLAP}"),
    (POOLS, "key_cache.address", ADDRESSES + 2**36 + 8, "append: key_cache must be a device address, 16-byte aligned"),
    (POOLS, "slots", 12, "append: slots must be a device address, 8-byte aligned"),
    (POOLS, "flags", 64, "flags = 0x40: ATTENTION_APPEND takes ATTENTION_E4M3_CACHE, ATTENTION_ROW_SCALES and "
                         "ATTENTION_TILE_SCALES alone; clear the others"),
    (POOLS, "flags", 1024, "flags has ATTENTION_ROW_SCALES without ATTENTION_E4M3_CACHE; set both"),
    (POOLS, "key_scale.address", 4096, "key_scale has an address, and flags has no ATTENTION_E4M3_CACHE; set the flag, "
                                       "or clear the address"),
    (POOLS, "head_dim", 0, "head_dim = 0: must be at least 1; set it"),
    (POOLS, "head_dim_value", 0, "head_dim_value = 0: must be at least 1; set it"),
    (POOLS, "direction", 4, "direction = 4: must be ATTENTION_FORWARD, ATTENTION_BACKWARD, ATTENTION_APPEND or "
                            "ATTENTION_MERGE; choose one"),
    (SCALED, "key_scale.row", 0, f"append: rows of key_scale overlap: {OVERLAP}"),
    (SCALED, "value_scale.address", 4098, "append: value_scale must be a device address, 4-byte aligned"),
    (LATENT, "flags", 8192, "flags has ATTENTION_TILE_SCALES without ATTENTION_E4M3_CACHE; set both"),
    (LATENT, "flags", 512 + 1024 + 8192, "flags has ATTENTION_TILE_SCALES and ATTENTION_ROW_SCALES; clear the latter"),
    (LATENT, "value_scale.address", 4096, "value_scale has an address with ATTENTION_TILE_SCALES: must be 0, because "
                                          "value_cache has no codes; clear it"),
    (LATENT, "key_scale_tile", 0, f"append: rows of key_scale overlap: {OVERLAP}"),
    (LATENT, "key_scale.row", 2, f"append: rows of key_scale overlap: {OVERLAP}"),
    (LATENT, "key_scale.address", 4098, "append: key_scale must be a device address, 4-byte aligned"),
    (LATENT, "value_cache.address", 4104, "append: value_cache must be a device address, 16-byte aligned"),
    (DENSE, "batch", 0, "merge: batch must be at least 1; with none there is nothing to launch"),
    (DENSE, "output.row", 0, f"merge: rows of output overlap: {OVERLAP}"),
    (DENSE, "output_b.head", 4, "merge: output_b_head must be a multiple of 8 elements"),
    (DENSE, "tokens_q", 5, "tokens_q = 5, and flags has no ATTENTION_VARLEN; set the flag, or clear it"),
    (DENSE, "flags", 3, "flags = 0x3: ATTENTION_MERGE takes ATTENTION_VARLEN alone; clear the others"),
    (DENSE, "num_queries", 2**31, "merge: rows of output overlap"),
    (PACKED, "num_queries", 15, "merge: num_queries, of the longest sequence, must be at most tokens_q"),
    (PACKED, "tokens_q", 2**40, "merge: tokens_q must be at most 2147482624; call once for each slice"),
)  # fmt: skip


@pytest.mark.parametrize(("problem", "name", "value", "words"), WRONG)
def test_wrong_calls_are_refused(
    driver_log: FakeDriver, host: LibraryHost, problem: Any, name: str, value: Any, words: str
) -> None:
    """By the choice, and by a launch before it asks the driver for anything."""
    call = call_of(host, problem)
    assert host.chosen(call, H200).status == "OK", host.text
    put(call, name, value)
    choice = host.chosen(call, H200)
    assert (choice.status, choice.symbol) == ("INVALID", "")
    assert words in choice.text
    with device(0).current():
        _, opened = host.opened()
        driver_log.clear()
        assert host.launched(opened, call, 0, 0) == STATUS["INVALID"]
        assert words in host.text
        assert driver_log.calls == []
        host.close(opened)


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_a_launch_needs_every_address(driver_log: FakeDriver, host: LibraryHost, problem: Any) -> None:
    names = [*problem.tensors(), *(("logsumexp",) if isinstance(problem, MergeProblem) else ())]
    with device(0).current():
        _, opened = host.opened()
        for name in names:
            call = call_of(host, problem)
            put(call, name if isinstance(getattr(call, name), int) else f"{name}.address", 0)
            assert host.chosen(call, H200).status == "OK", "memory is allocated after a choice"
            assert host.launched(opened, call, 0, 0) == STATUS["INVALID"]
            assert host.text.startswith(f"{problem.direction}: {name} must be a device address, ")
        host.close(opened)


def test_scales_without_a_kernel_are_named(host: LibraryHost, tmp_path: Any) -> None:
    made = exported(tmp_path / "made", (POOLS,))
    other = LibraryHost(compiled(made, tmp_path / "attention.so"))
    choice = other.chosen(call_of(other, SCALED), H200)
    assert choice.status == "NO_KERNEL"
    assert choice.text == (
        "no kernel of this library for append, bfloat16, head_dim 128, head_dim_value 128, mask full, features: "
        "e4m3_cache row_scales, gradients 0x0; export such a problem too"
    )
    choice = other.chosen(call_of(other, DENSE), H200)
    assert (choice.status, choice.text.split(",")[0]) == ("NO_KERNEL", "no kernel of this library for merge")


# Memory that is shared

PART = 8 * 128 * 2  # bytes of a row of all heads


def in_one_pool(key: tuple[int, int, int], distance: int) -> dict[str, Any]:
    """Caches with these strides (page, row, head), the value's `distance` bytes behind the key's."""
    found: dict[str, Any] = {"value_cache.address": ADDRESSES + distance, "key_cache.address": ADDRESSES}
    for name in ("key_cache", "value_cache"):
        found |= {f"{name}.{axis}": step for axis, step in zip(("batch", "row", "head"), key, strict=True)}
    return found


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (in_one_pool((16 * 2048, 2048, 256), 256), ""),  # heads of key and value in turn
        (in_one_pool((16 * 2048, 2048, 128), PART), ""),  # each row has its keys, then its values
        (in_one_pool((32 * 1024, 1024, 128), 16 * PART), ""),  # each page likewise
        (in_one_pool((16 * 1024, 1024, 128), 160 * PART), ""),  # one pool behind the other
        (in_one_pool((16 * 1024, 1024, 128), 160 * PART - 16), f"append: key_cache and value_cache {SHARED}"),
        (in_one_pool((16 * 2048, 2048, 256), 128), f"append: key_cache and value_cache {SHARED}"),
        (in_one_pool((16 * 2048, 2048, 128), PART // 2), f"append: key_cache and value_cache {SHARED}"),
        (in_one_pool((16 * 2048, 2048, 256), 0), f"append: key_cache and value_cache {SHARED}"),
        ({**in_one_pool((16 * 2048, 2048, 256), 256), "value_cache.row": 4096, "value_cache.batch": 65536},
         f"append: key_cache and value_cache {SHARED}"),
        ({"key.address": ADDRESSES + SPACE * 3 + 64}, f"append: key_cache and key {SHARED}"),
        ({"slots": ADDRESSES + SPACE * 4 + 64}, f"append: value_cache and slots {SHARED}"),
        ({"value_cache.address": 2**63}, "append: an array ends beyond the addresses of 63 bits"),
    ],
)  # fmt: skip
def test_caches_may_be_parts_of_one_pool_but_not_share_rows(
    host: LibraryHost, changes: dict[str, Any], says: str
) -> None:
    call = call_of(host, POOLS)
    for name, value in changes.items():
        put(call, name, value)
    choice = host.chosen(call, H200)
    assert says in choice.text
    assert choice.status == ("INVALID" if says else "OK"), choice.text


def test_scales_may_be_in_the_rows_of_a_pool(host: LibraryHost) -> None:
    """Each head of a row has its codes, then its scale: 136 bytes for 128 columns."""
    call = call_of(host, SCALED)
    steps = {"batch": 16 * 8 * 136, "row": 8 * 136, "head": 136}
    for number, name in enumerate(("key", "value")):
        for axis, step in steps.items():
            put(call, f"{name}_cache.{axis}", step)
            put(call, f"{name}_scale.{axis}", step // 4)
        put(call, f"{name}_cache.address", ADDRESSES + 2**30 * number)
        put(call, f"{name}_scale.address", ADDRESSES + 2**30 * number + 128)
    assert host.chosen(call, H200).status == "OK", host.text
    call.key_scale.address -= 4
    assert host.chosen(call, H200).text == f"append: key_cache and key_scale {SHARED}"


@pytest.mark.parametrize("of_page", [False, True], ids=["rows", "pages"])
def test_latent_rows_of_656_bytes(host: LibraryHost, of_page: bool) -> None:
    """Each row of a head, or each page, has its codes, its scales and its columns of 16 bits."""
    call, count = call_of(host, LATENT), 32 if of_page else 1
    parts = {"key_cache": (512, 1), "key_scale": (16, 4), "value_cache": (128, 2)}
    first = ADDRESSES
    for name, (width, item) in parts.items():
        row = (width if of_page else 656) // item
        for field, value in {"batch": 32 * 656 // item, "row": 2 * row, "head": row, "address": first}.items():
            put(call, f"{name}.{field}", value)
        first += count * width
    assert host.chosen(call, H200).status == "OK", host.text
    call.key_scale.address -= 4
    assert host.chosen(call, H200).text == f"append: key_cache and key_scale {SHARED}"


@pytest.mark.parametrize("name", ["output_a.address", "logsumexp_b"])
def test_a_merge_writes_memory_of_its_own(host: LibraryHost, name: str) -> None:
    call = call_of(host, DENSE)
    written = "logsumexp" if name.startswith("logsumexp") else "output"
    put(call, name, getattr(call, written) if written == "logsumexp" else call.output.address)
    assert host.chosen(call, H200).text == f"merge: {written} and {name.removesuffix('.address')} {SHARED}"


# Strides


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_packed_strides_are_those_of_contiguous_arrays(host: LibraryHost, problem: Any) -> None:
    wanted, found = (filled_rows(host.new_call(), problem) for _ in range(2))
    arrays = [name for name in problem.tensors() if not isinstance(getattr(found, name), int)]
    for name in arrays:
        for axis in ("row", "head"):
            put(found, f"{name}.{axis}", -1)
    found.key_scale_tile = -1
    assert host.pack(found) == 0
    assert found.key_scale_tile == (1 if problem is LATENT else -1)
    for name in arrays:
        pairs = [(getattr(getattr(call, name), axis)) for axis in ("row", "head") for call in (wanted, found)]
        assert pairs[::2] == pairs[1::2], name
    assert host.chosen(found, H200).status == "OK", host.text


def test_given_scales_are_packed_by_head(host: LibraryHost) -> None:
    problem = AppendProblem.dense((5, 8, 128), (10, 16), "bfloat16", scales="given")
    call = filled_rows(host.new_call(), problem)
    assert host.pack(call) == 0
    for scale in (call.key_scale, call.value_scale):
        assert (scale.batch, scale.row, scale.head) == (0, 0, 1)
    assert host.pack(filled_rows(host.new_call(), DENSE)) == 0


def test_a_program_of_the_first_version_is_served(driver_log: FakeDriver, host: LibraryHost) -> None:
    """It knows no field of appends: a call of its size has no slots, and nothing behind it is read or written."""
    call = call_of(host, POOLS)
    call.bytes = interface.FIRST_BYTES
    before = bytes(call)
    assert host.pack(call) == 0
    assert bytes(call)[interface.FIRST_BYTES :] == before[interface.FIRST_BYTES :]
    assert host.chosen(call, H200).text == "append: page_size must be at least 1; with none there is nothing to launch"


# Names


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("append_bf16_d128", AppendProblem.dense((1, 1, 128), (1, 1), "bfloat16")),
        ("append_f16_d72v40_e4m3", AppendProblem.dense((1, 1, 72), (1, 1), "float16", head_dim_value=40,
                                                       scales="given")),
        ("append_f32_d64_e4m3_row", AppendProblem.dense((1, 1, 64), (1, 1), "float32", scales="row")),
        ("append_bf16_d512v64_e4m3_tile", AppendProblem.dense((1, 1, 512), (1, 1), "bfloat16", head_dim_value=64,
                                                              scales="tile")),
        ("merge_bf16_d128", MergeProblem.dense((1, 1, 1, 128), "bfloat16")),
        ("merge_f16_d96_varlen", MergeProblem.packed(1, 1, (1, 1, 96), "float16")),
    ],
)  # fmt: skip
def test_words_of_the_command_line(text: str, problem: Any) -> None:
    assert row_spec.parse(text) == problem
    assert problem.reasons() == []
    assert isinstance(problem.tensors()[next(iter(problem.tensors()))], Tensor)
