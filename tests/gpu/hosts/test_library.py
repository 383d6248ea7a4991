"""The C library on the GPU: what it chooses and launches is right, in graphs, from threads and on every device."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cutlass_py_attn.bundle.files import Bundle, export_library
from cutlass_py_attn.bundle.row_rules import RowProblem
from cutlass_py_attn.bundle.rules import AnyProblem
from cutlass_py_attn.errors import AttentionError
from cutlass_py_attn.launch.arch import targets
from cutlass_py_attn.problem.tensors import FLOAT8
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.testing import device_memory, guarded_check
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Kernels, only_family, same_bits
from cutlass_py_attn.testing.device_memory import GuardedLaunch
from cutlass_py_attn.testing.guarded_check import guarded_case
from tests.cases import block_masks, kv8_cases, mla_cases, paged_forward_cases, serving_cases, suite
from tests.cases.block_masks import BlockCase
from tests.gpu.test_launch import captured
from tests.support.library_host import LibraryHost, Target, compiled, filled, filled_rows, row_cases

pytest.importorskip("jinja2", reason="an export writes C sources with it")

CASES = [case for pair in suite.LIBRARY for case in pair]
EXPORTED = [exported for exported, _ in suite.LIBRARY]
# Scales of every kind, prompts over e4m3 caches, and keys that contain the values: by kernels of their own tests.
CODES = [*suite.E4M3_EXACT, *kv8_cases.DECODE[::4], *kv8_cases.PREFILL[:3], *mla_cases.CASES[1::6]]
# Ranges of keys of several axes and layouts, some in other sizes than those whose kernels they share.
RANGED = suite.RANGES
BLOCKED = block_masks.CASES
GRAPHED = EXPORTED[2]
MHA = Case.parse("forward bf16_d128_q200_s300_b2_h3_causal seed=7")  # by the kernels of grouped heads
REPLAYS = 10
ROW_SEEDS = 60


@dataclass(frozen=True)
class Opened:
    """A library that is open on a device."""

    host: LibraryHost
    bundle: Bundle
    device: ctypes.c_void_p
    target: Target

    def launch(self, case: Case, guarded: GuardedLaunch, stream: int = 0) -> None:
        """Launches the case once on the buffers of a GuardedLaunch."""
        call = filled(self.host.new_call(), case.problem(), addresses=guarded.pointers)
        if case.spec.dropout_p:
            call.philox_seed, call.philox_offset = case.philox_seed, case.philox_offset
            call.philox_seed_address = call.philox_offset_address = 0
        self.launch_call(call, guarded, stream)

    def launch_call(self, call: Any, guarded: GuardedLaunch, stream: int = 0) -> None:
        """Launches a call with the workspace of a GuardedLaunch."""
        choice = self.host.chosen(call, self.target)
        assert choice.status == "OK", choice.text
        assert choice.workspace <= guarded.bound.workspace_bytes
        status = self.host.launched(self.device, call, guarded.workspace or 0, choice.workspace, stream)
        assert status == 0, self.host.text


@pytest.fixture(scope="module")
def opened(kernels: Kernels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """The library of EXPORTED, compiled as C and open on device 0."""
    with opened_library([case.problem() for case in EXPORTED], kernels, tmp_path_factory.mktemp("library")) as found:
        yield found


@contextmanager
def opened_library(problems: Sequence[AnyProblem], kernels: Kernels, folder: Path) -> Iterator[Opened]:
    """The library of these problems for device 0."""
    gpu = driver.device(0)
    bundle = export_library(folder / "made", problems, targets(gpu.compute_capability)[:1], kernels=kernels)
    host = LibraryHost(compiled(bundle, folder / "attention.so", "-O2"))
    with gpu.current():
        status, device = host.opened()
        assert status == 0, host.text
    target = Target()
    assert host.target_of(device, ctypes.byref(target), None) == 0
    assert (target.major, target.minor) == gpu.compute_capability
    assert (target.num_sms, target.shared_memory) == (gpu.num_sms, gpu.shared_memory_per_block)
    yield Opened(host, bundle, device, target)
    host.close(device)


def assert_right(case: Case, opened: Opened, source: Any) -> None:
    """Asserts that a call of the library gives the results in float64.

    source: the kernels of the plan whose workspace the call has
    """
    expected = guarded_check.expect(case)
    with guarded_case(case, expected, source) as guarded:
        guarded.reset()
        opened.launch(case, guarded)
        driver.synchronise(0)
        ratios = guarded_check.ratios(case, expected, guarded.read())
    assert all(ratio <= 1 for ratio in ratios.values()), ratios


@pytest.mark.parametrize("case", [*CASES, MHA], ids=lambda case: case.line.replace(" ", "_"))
def test_library_is_right(case: Case, opened: Opened, kernels: Kernels, gpu: driver.Device) -> None:
    """Against float64, into outputs of NaN, in exported and in other sizes."""
    assert_right(case, opened, kernels if case == MHA else opened.bundle)


@pytest.fixture(scope="module")
def opened_codes(kernels: Kernels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """The library of CODES; without those that the GPU has no kernels for."""
    known = [case for case in CODES if not _is_for_sm90(case) or driver.device(0).compute_capability == (9, 0)]
    with opened_library([case.problem() for case in known], kernels, tmp_path_factory.mktemp("codes")) as found:
        yield found


def _is_for_sm90(case: Case) -> bool:
    """Whether only sm_90a has kernels: of e4m3 operands, and of latent caches of e4m3 codes."""
    return case.spec.dtype == FLOAT8 or case.problem().key_rope is not None


@pytest.mark.parametrize("case", CODES, ids=lambda case: case.line.replace(" ", "_"))
def test_codes_and_latent_caches_are_right(case: Case, opened_codes: Opened, gpu: driver.Device) -> None:
    """As `test_library_is_right`."""
    if _is_for_sm90(case) and gpu.compute_capability != (9, 0):
        pytest.skip(f"{gpu.name} does not run the kernels of e4m3 operands and of latent caches of codes")
    assert_right(case, opened_codes, opened_codes.bundle)


@pytest.fixture(scope="module")
def opened_masks(kernels: Kernels, gpu: driver.Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """The library of RANGED and BLOCKED."""
    if gpu.compute_capability != (9, 0):
        pytest.skip(f"{gpu.name} does not run kernels of masks in memory")
    problems = [*(case.problem() for case in RANGED), *(case.problem("forward") for case in BLOCKED)]
    with opened_library(problems, kernels, tmp_path_factory.mktemp("masks")) as found:
        yield found


@pytest.mark.parametrize("case", RANGED, ids=lambda case: case.line.replace(" ", "_"))
def test_ranges_of_keys_are_right(case: Case, opened_masks: Opened, gpu: driver.Device) -> None:
    """As `test_library_is_right`."""
    assert_right(case, opened_masks, opened_masks.bundle)


@pytest.mark.parametrize("case", BLOCKED, ids=lambda case: case.name)
def test_visible_blocks_have_the_same_bits(case: BlockCase, opened_masks: Opened, gpu: driver.Device) -> None:
    """As by the package's own launch."""
    problem, (_, query, key, value) = case.problem("forward"), case.operands()
    operands = {"query": query, "key": key, "value": value, **case.mask().arrays()}
    with device_memory.guarded_launch(problem, operands, opened_masks.bundle) as guarded:
        wanted = guarded.run()
        guarded.reset()
        call = filled(opened_masks.host.new_call(), problem, addresses=guarded.pointers)
        opened_masks.launch_call(call, guarded)
        driver.synchronise(0)
        found = guarded.read()
    assert all(same_bits(wanted[name], found[name]) for name in wanted)


def test_pages_of_other_sizes(kernels: Kernels, gpu: driver.Device, tmp_path: Path) -> None:
    """A prefill that was exported with pages of one size has the same bits with others, and with other pools."""
    each = next(each for each in paged_forward_cases.SAME_BITS if each.family == "sm90")
    given = [paged_forward_cases.inputs(case) for case in each.cases()]
    source = only_family(kernels, "sm90", "forward")
    with opened_library([given[0].case.problem()], kernels, tmp_path) as library:
        for inputs in given:
            problem = inputs.case.problem()
            with device_memory.guarded_launch(problem, inputs.arrays, source) as guarded:
                wanted = guarded.run()
                guarded.reset()
                library.launch_call(filled(library.host.new_call(), problem, addresses=guarded.pointers), guarded)
                driver.synchronise(0)
                found = guarded.read()
            assert all(same_bits(wanted[name], found[name]) for name in wanted), inputs.case.label


def test_random_appends_and_merges(
    kernels: Kernels, arch: str, gpu: driver.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of tests/gpu/test_append.py and test_merge.py, launched by the library."""
    cases = row_cases(ROW_SEEDS)
    with opened_library([case.problem for case in cases], kernels, tmp_path) as library:

        def launched(problem: RowProblem, pointers: Mapping[str, int]) -> None:
            call = filled_rows(library.host.new_call(), problem, addresses=pointers)
            assert library.host.launched(library.device, call, 0, 0) == 0, library.host.text

        for case in cases:
            launch = functools.partial(launched, case.problem)
            monkeypatch.setattr(serving_cases, "bind", lambda *_, launch=launch: launch)
            assert not case.check(kernels, arch)[1]


def test_captured_launches_are_replayed(opened: Opened, gpu: driver.Device) -> None:
    """A decode in a graph: every replay gives the bits of a direct launch, from fresh NaN."""
    case = GRAPHED
    expected = guarded_check.expect(case)
    with guarded_case(case, expected, opened.bundle) as guarded, device_memory.stream() as stream:
        wanted = guarded.run()
        graph = captured(lambda on: opened.launch(case, guarded, on), stream)
        for _ in range(REPLAYS):
            guarded.reset()
            driver.call("cuGraphLaunch", graph, stream)
            driver.synchronise(stream)
            found = guarded.read()
            assert all((found[name].view("u1") == wanted[name].view("u1")).all() for name in wanted)
        driver.call("cuGraphExecDestroy", graph)


def test_threads_share_the_device(opened: Opened, gpu: driver.Device) -> None:
    """Two threads without a context of their own, each with its case, buffers and stream."""
    cases = EXPORTED[:2]
    expected = [guarded_check.expect(case) for case in cases]
    failures: list[BaseException] = []

    def work(case: Case, guarded: GuardedLaunch, stream: int) -> None:
        try:
            for _ in range(50):
                opened.launch(case, guarded, stream)
        except BaseException as error:
            failures.append(error)

    first, second = (guarded_case(case, it, opened.bundle) for case, it in zip(cases, expected, strict=True))
    with first, second, device_memory.stream() as one, device_memory.stream() as other:
        for each in (first, second):
            each.reset()
        given = zip(cases, (first, second), (one, other), strict=True)
        threads = [threading.Thread(target=work, args=each) for each in given]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        driver.call("cuCtxSynchronize")
        for case, it, guarded in zip(cases, expected, (first, second), strict=True):
            found = guarded_check.ratios(case, it, guarded.read())
            assert all(ratio <= 1 for ratio in found.values()), found


def test_every_device_has_a_handle(opened: Opened, gpu: driver.Device) -> None:
    """Opened, asked and closed on each; a second one beside the first."""
    count = 0
    while True:
        try:
            other = driver.device(count)
        except AttentionError:
            break
        count += 1
        with other.current():
            status, device = opened.host.opened()
            assert status == 0, opened.host.text
            target = Target()
            assert opened.host.target_of(device, ctypes.byref(target), None) == 0
            assert (target.major, target.minor) == other.compute_capability
            opened.host.close(device)
    assert count >= 1
