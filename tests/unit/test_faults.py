"""Tests of faults of machines and processes: each row of docs/faults.md, its message and what stays as it was."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import json
import os
import re
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cutlass_py_attn import load_bundle
from cutlass_py_attn.api import calls
from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.artifact import Artifact, Folder
from cutlass_py_attn.bundle import files, reading, replacing
from cutlass_py_attn.compilation.cache import Cache
from cutlass_py_attn.errors import AttentionError, NoDevice, Stale
from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.runtime import binding, driver
from cutlass_py_attn.runtime.arrays import DeviceArray
from cutlass_py_attn.runtime.binding import Bound, bind
from tests.support import fakes
from tests.support.bundles import export, snapshot
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import InterfaceArray, addresses, aligned
from tools.docs import faults_table
from tools.docs.faults_table import NO_ERROR

ROOT = Path(__file__).resolve().parents[2]
STREAM = 0x77
B, MQ, MK, H, D, DV = 2, 40, 50, 3, 16, 24
FAULTS = faults_table.read()


def test_every_fault_of_the_page_is_tested() -> None:
    """And each message is compared, because `refused` and `survived` compare it."""
    shown = re.findall(r'(?:refused|survived|compare)\(\s*"([^"]+)"', Path(__file__).read_text())
    assert set(shown) == set(FAULTS)
    assert {fault.what for fault in FAULTS.values() if (fault.error, fault.message) == (NO_ERROR, "")} == set(
        re.findall(r'survived\("([^"]+)"', Path(__file__).read_text())
    )


def test_the_tests_on_a_gpu_exist_and_compare_the_fault() -> None:
    text = (ROOT / faults_table.GPU_TESTS).read_text()
    tests = dict(re.findall(r"^def (test_\w+)\((.*?)(?=^def |^@|\Z)", text, re.MULTILINE | re.DOTALL))
    listed = [(name, fault.what) for fault in FAULTS.values() for name in fault.on_gpu]
    assert sorted(name for name, _ in listed) == sorted(tests)
    for name, what in listed:
        assert f'"{what}"' in tests[name], f"{name} must compare with the entry"


def compare(fault: str, error: BaseException) -> None:
    """Checks that the page has this error for the fault."""
    assert FAULTS[fault].objection(type(error).__name__, str(error)) == ""


@contextlib.contextmanager
def refused(fault: str) -> Iterator[None]:
    """Context manager for code that raises the page's error."""
    with pytest.raises((AttentionError, OSError)) as caught:
        yield
    compare(fault, caught.value)


@contextlib.contextmanager
def survived(fault: str) -> Iterator[None]:
    """Context manager for code that raises no error, nor warns, in spite of the fault."""
    assert (FAULTS[fault].error, FAULTS[fault].message) == (NO_ERROR, "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def operands() -> list[np.ndarray[Any, Any]]:
    """Returns query, key and value."""
    shapes = ((B, MQ, H, D), (B, MK, H, D), (B, MK, H, DV))
    return [aligned(shape, ml_dtypes.bfloat16, seed) for seed, shape in enumerate(shapes)]


def backward_operands() -> list[np.ndarray[Any, Any]]:
    """Returns grad_output, query, key, value, output and logsumexp."""
    gradient, output = (aligned((B, MQ, H, DV), ml_dtypes.bfloat16, seed) for seed in (3, 4))
    return [gradient, *operands(), output, aligned((B, H, 64), "f4", 5)]


@contextlib.contextmanager
def untouched(log: FakeDriver, arrays: list[np.ndarray[Any, Any]], failed_allocations: int = 0) -> Iterator[None]:
    """Checks that operands keep their bytes, that no kernel is launched and that all device memory is free again."""
    before = [array.tobytes() for array in arrays]
    yield
    gc.collect()
    assert [array.tobytes() for array in arrays] == before
    assert log.of("cuLaunchKernelEx") == log.of("cuGraphLaunch") == []
    allocated = sum(call.name in ("cuMemAlloc", "cuMemAllocAsync") for call in log.calls)
    freed = sum(call.name in ("cuMemFree", "cuMemFreeAsync") for call in log.calls)
    assert allocated - failed_allocations == freed
    assert int(driver.call("cuCtxGetCurrent")) == 0, "the thread's context is as it was"
    log.clear()


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    calls._prepared.clear()
    monkeypatch.setattr(binding, "_libraries", {})


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two bundles: forward and backward. Tests copy them."""
    folder = tmp_path_factory.mktemp("exported")
    for name in ("forward", "backward"):
        export(folder / name, name)
    return folder


# Device memory


def test_no_memory_for_the_workspace(driver_log: FakeDriver) -> None:
    given = backward_operands()
    arrays = [InterfaceArray(array) for array in given]

    def call() -> Any:
        return attention_backward(*arrays, kernels=fakes.artifact, stream=STREAM)

    driver_log.fail("cuMemAllocAsync", 2)
    with untouched(driver_log, given, failed_allocations=1), refused("device memory runs out at the workspace"):
        call()
    call()
    assert len(driver_log.of("cuLaunchKernelEx")) > 1


@pytest.mark.parametrize("name", ["output", "logsumexp"])
def test_no_memory_for_a_result(driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    given = operands()
    arrays = [InterfaceArray(array) for array in given]
    allocate, kept = driver.allocate_now, []

    def second_fails(size: int, purpose: str) -> int:
        kept.append(size)
        if len(kept) == 1 + (name == "logsumexp"):
            driver_log.fail("cuMemAlloc", 2)
        return allocate(size, purpose)

    with monkeypatch.context() as patched, untouched(driver_log, given, failed_allocations=1):
        patched.setattr(driver, "allocate_now", second_fails)
        if name == "output":
            with refused("device memory runs out at a result"):
                attention_forward(*arrays, kernels=fakes.artifact)
        else:
            with pytest.raises(driver.DriverError, match=r"for a result \(2, 3, 64\) float32 \(1536 bytes\)"):
                attention_forward(*arrays, kernels=fakes.artifact)
    attention_forward(*arrays, kernels=fakes.artifact)
    assert len(driver_log.of("cuLaunchKernelEx")) == 1


def test_no_memory_for_a_copy(driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands()
    allocate = driver.allocate

    def fails_for_output(size: int, stream: int, purpose: str) -> int:
        if purpose.endswith("output"):
            driver_log.fail("cuMemAllocAsync", 2)
        return allocate(size, stream, purpose)

    with monkeypatch.context() as patched, untouched(driver_log, given, failed_allocations=1):
        patched.setattr(driver, "allocate", fails_for_output)
        with refused("device memory runs out at the copy of a NumPy array"):
            attention_forward(*given, kernels=fakes.artifact)
    attention_forward(*given, kernels=fakes.artifact)
    assert len(driver_log.of("cuLaunchKernelEx")) == 1


def test_no_memory_for_kernels(driver_log: FakeDriver) -> None:
    given = operands()
    driver_log.fail("cuLibraryLoadData", 2)
    with untouched(driver_log, given), refused("device memory runs out when kernels are loaded"):
        attention_forward(*given, kernels=fakes.artifact)
    attention_forward(*given, kernels=fakes.artifact)
    assert len(driver_log.of("cuLaunchKernelEx")) == 1


def test_a_cubin_whose_code_found_no_memory_is_loaded_anew(driver_log: FakeDriver) -> None:
    given = operands()
    driver_log.fail("cuKernelGetFunction", 2)
    with untouched(driver_log, given), pytest.raises(driver.DriverError, match=r"for the kernels of .*OUT_OF_MEMORY"):
        attention_forward(*given, kernels=fakes.artifact)
    driver_log.clear()
    attention_forward(*given, kernels=fakes.artifact)
    assert len(driver_log.of("cuLibraryLoadData")) == 1


# Context, GPU, driver


def test_a_destroyed_context(driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [InterfaceArray(array) for array in operands()]
    output, _ = attention_forward(*arrays, kernels=fakes.artifact)
    driver_log.fail("cuLaunchKernelEx", 709)
    with refused("the context of the GPU is destroyed"):
        attention_forward(*arrays, kernels=fakes.artifact)
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    driver_log.clear()
    driver_log.fail("cuMemFree", 709)
    del output
    gc.collect()
    assert len(driver_log.of("cuMemFree")) >= 1
    assert ignored == []


def test_kernels_of_another_gpu(driver_log: FakeDriver) -> None:
    problem, plan = fakes.plan_of("forward", "sm_90")
    with untouched(driver_log, []), refused("kernels are for another GPU"):
        bind(fakes.artifact(plan.build), plan, problem, device=1)
    assert driver_log.of("cuLibraryLoadData") == []
    driver_log.fail("cuLibraryLoadData", 209)
    with untouched(driver_log, []), refused("the driver finds no code for its GPU in a cubin"):
        bind(fakes.artifact(plan.build), plan, problem)


def test_a_cubin_of_other_kernels(driver_log: FakeDriver) -> None:
    problem, plan = fakes.plan_of("forward", "sm_90")
    _, other = fakes.plan_of("backward", "sm_90")
    artifact = dataclasses.replace(fakes.artifact(plan.build), cubin=fakes.artifact(other.build).cubin)
    with untouched(driver_log, []), refused("a cubin has other kernels than its description"):
        bind(artifact, plan, problem)
    with untouched(driver_log, []), refused("a cubin has another kernel under the name of ours"):
        bind(fakes.artifact(plan.build, driver_sizes=(8, 16)), plan, problem)
    bind(fakes.artifact(plan.build), plan, problem)


def test_kernels_of_another_version(driver_log: FakeDriver, tmp_path: Path) -> None:
    folder, artifact = Folder(tmp_path), made("// of another version")
    folder.put(dataclasses.replace(artifact, abi="0" * 64))
    before = snapshot(tmp_path)
    with untouched(driver_log, []), refused("kernels are of another version"):
        folder(artifact.build)
    assert snapshot(tmp_path) == before


def test_an_old_driver(driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands()
    driver.initialise.cache_clear()
    driver.device.cache_clear()
    driver.function.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(driver.bindings(), "cuDriverGetVersion", lambda: (0, 12030))
        with pytest.raises(NoDevice) as caught:
            driver.device_count()
        compare("the NVIDIA driver is too old", caught.value)
        with pytest.raises(NoDevice, match=r"550\.54\.14 or later; backend=\"reference\" computes on the CPU"):
            attention_forward(*given, kernels=fakes.artifact)
        assert set(driver_log.names) == {"cuInit"}
    attention_forward(*given, kernels=fakes.artifact)


# Files


def made(ptx: str) -> Artifact:
    _, plan = fakes.plan_of("forward", "sm_80")
    return dataclasses.replace(fakes.artifact(plan.build), ptx=ptx)


@contextlib.contextmanager
def forked(work: Callable[[], object]) -> Iterator[int]:
    """Context manager with a child that runs `work`: its process id. The child is gone on exit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fork beside threads
        child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            sys.stderr.flush()
            os._exit(code)
    try:
        yield child
    finally:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def killed_before(function: str, count: int, work: Callable[[], object]) -> None:
    """Runs `work` in a child that kills itself at call `count` of this method of Path."""
    calls = 0
    original = getattr(Path, function)

    def method(self: Path, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *arguments)

    def run() -> None:
        setattr(Path, function, method)
        work()

    with forked(run) as child:
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("count", [1, 2, 3])
def test_killed_between_write_and_rename_of_a_kernel(tmp_path: Path, count: int) -> None:
    folder, old, new = Folder(tmp_path / "kernels"), made("// old"), made("// new")
    folder.put(old)
    killed_before("replace", count, lambda: folder.put(new))
    assert [path for path in (folder.path / "sm_80").iterdir() if path.name.startswith(".")], "what was being written"
    if count == 1:
        assert folder(old.build) == old
        assert folder.all() == [old]
    else:
        with refused("a process is killed while it writes other kernels to a folder"):
            folder(old.build)
    folder.put(new)
    assert folder(new.build) == new


def test_killed_while_the_same_kernel_is_written(tmp_path: Path) -> None:
    folder, old = Folder(tmp_path / "kernels"), made("// old")
    folder.put(old)
    for count in (1, 2, 3):
        killed_before("replace", count, lambda: folder.put(old))
        assert folder(old.build) == old
    killed_before("replace", 3, lambda: Folder(tmp_path / "fresh").put(old))
    with pytest.raises(Stale, match=r"not in .*fresh; build it with"):
        Folder(tmp_path / "fresh")(old.build)


@pytest.mark.parametrize(("function", "count"), [("write_bytes", 3), ("rename", 1)])
def test_killed_while_a_bundle_is_written(tmp_path: Path, exported: Path, function: str, count: int) -> None:
    folder = Path(shutil.copytree(exported / "forward", tmp_path / "bundle"))
    before = snapshot(folder)
    with survived("a process is killed while it exports a bundle"):
        killed_before(function, count, lambda: export(folder, "backward"))
        assert snapshot(folder) == before
        assert next(path.name for path in tmp_path.iterdir() if path != folder).startswith(".bundle.")
        assert load_bundle(folder).problem("forward")


def test_killed_between_the_renames_of_a_file_system_that_cannot_exchange(
    tmp_path: Path, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(exported / "forward", tmp_path / "bundle"))
    before = snapshot(folder)
    monkeypatch.setattr(replacing, "_renameat2", lambda one, other: errno.EINVAL)
    killed_before("rename", 3, lambda: export(folder, "backward"))
    assert not folder.exists()
    (hidden,) = tmp_path.iterdir()
    assert snapshot(hidden / "aside") == before


def test_killed_after_the_new_bundle_is_there(tmp_path: Path, exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(exported / "forward", tmp_path / "bundle"))

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(replacing, "_remove", die)
    with survived("a process is killed while it exports a bundle"), forked(lambda: export(folder, "backward")):
        pass
    assert snapshot(folder) == snapshot(exported / "backward")


def test_processes_that_write_the_same_folder(tmp_path: Path) -> None:
    """Of kernels: each writes another one many times, in turns. At the end all files are those of one process."""
    folder, artifacts = Folder(tmp_path / "kernels"), [made(f"// {number}" * 2000) for number in range(3)]
    start = time.monotonic() + 0.05

    def write(artifact: Artifact) -> None:
        while time.monotonic() < start:
            pass
        for _ in range(10):
            folder.put(artifact)
            time.sleep(0)

    with survived("processes write the same kernels or bundle at once"), contextlib.ExitStack() as children:
        for artifact in artifacts:
            children.enter_context(forked(lambda it=artifact: write(it)))  # type: ignore[misc]
    assert folder(artifacts[0].build) in artifacts
    assert len(list((folder.path / "sm_80").iterdir())) == 3


def test_a_writer_waits_for_the_other(tmp_path: Path) -> None:
    """A second process writes nothing until the first one has written all three files."""
    folder, first, second = Folder(tmp_path / "kernels"), made("// first"), made("// second")
    reader, writer = os.pipe()
    replace = Path.replace

    def slow(self: Path, target: Path) -> Path:
        os.write(writer, b"1")
        time.sleep(0.03)
        return replace(self, target)

    def write_slowly() -> None:
        Path.replace = slow  # type: ignore[method-assign, assignment]
        folder.put(first)

    with forked(write_slowly):
        os.read(reader, 1)  # the first file is about to be renamed
        folder.put(second)
    assert folder(first.build) == second


def test_a_reader_waits_for_a_writer_between_two_files(tmp_path: Path) -> None:
    folder, first, second = Folder(tmp_path / "kernels"), made("// first"), made("// second")
    folder.put(first)
    reader, writer = os.pipe()
    replace = Path.replace

    def slow(self: Path, target: Path) -> Path:
        found = replace(self, target)
        os.write(writer, b"1")
        time.sleep(0.03)
        return found

    def write_slowly() -> None:
        Path.replace = slow  # type: ignore[method-assign, assignment]
        folder.put(second)

    with forked(write_slowly):
        os.read(reader, 1)  # the first file is of the other kernel, the description is not yet
        assert folder(first.build) == second


def test_processes_that_export_the_same_bundle(tmp_path: Path, exported: Path) -> None:
    """Each gets the bundle that it wrote, and the folder is that of one of them."""
    folder = tmp_path / "bundle"
    expected = [snapshot(exported / name) for name in ("forward", "backward")]

    def export_often(name: str) -> None:
        for _ in range(10):
            assert export(folder, name).directions == (name,)

    with survived("processes write the same kernels or bundle at once"), contextlib.ExitStack() as children:
        found = [children.enter_context(forked(lambda it=name: export_often(it)))  # type: ignore[misc]
                 for name in ("forward", "backward")]  # fmt: skip
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in found]
    assert codes == [0, 0]
    assert snapshot(folder) in expected
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


@pytest.mark.parametrize("step", ["check", "read"])
def test_an_export_waits_for_another_one(
    tmp_path: Path, exported: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Nobody replaces the folder while an export looks for other files in it, nor before it has read what it wrote."""
    folder = Path(shutil.copytree(exported / "backward", tmp_path / "bundle"))
    reader, writer = os.pipe()
    module, name = (reading, "intact_files") if step == "check" else (files, "load_bundle")
    original = getattr(module, name)

    def slow(path: Path) -> Any:
        found = original(path) if step == "check" else None
        os.write(writer, b"1")
        time.sleep(0.1)
        return found or original(path)

    def export_slowly() -> None:
        monkeypatch.setattr(module, name, slow)
        assert export(folder, "backward").directions == ("backward",)

    with forked(export_slowly) as child:
        os.read(reader, 1)
        assert export(folder, "forward").directions == ("forward",)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_a_bundle_that_is_replaced_while_it_is_read(
    tmp_path: Path, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(exported / "forward", tmp_path / "bundle"))
    original = reading._manifest

    def replaced(path: Path) -> Any:
        found = original(path)
        monkeypatch.setattr(reading, "_manifest", original)
        export(folder, "backward")
        return found

    monkeypatch.setattr(reading, "_manifest", replaced)
    with survived("processes write the same kernels or bundle at once"):
        assert load_bundle(folder).directions == ("backward",)


class FullDisk:
    """A file to which only half of the data goes."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> int:
        self._file.write(bytes(data)[: len(data) // 2])
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("count", [1, 3])
def test_a_full_disk(tmp_path: Path, exported: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """At the first file, and at a later one. A kernel folder whose first files are new is `Stale`, as after a kill."""
    folder, old = Folder(tmp_path / "kernels"), made("// old")
    folder.put(old)
    bundle = Path(shutil.copytree(exported / "forward", tmp_path / "bundle"))
    before = snapshot(tmp_path)
    open_file, opened = Path.open, 0

    def full(self: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        nonlocal opened
        file = open_file(self, mode, *arguments, **options)
        opened += mode in ("xb", "wb")
        return FullDisk(file) if mode in ("xb", "wb") and opened == count else file

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        with refused("the disk is full: folder of kernels"):
            folder.put(old)
        opened = 0
        with refused("the disk is full: bundle"):
            export(bundle, "backward")
        assert snapshot(tmp_path) == before
        assert folder(old.build) == old
        assert load_bundle(bundle).problem("forward")
        opened = 0
        with pytest.raises(OSError, match="No space left"):
            folder.put(made("// new"))
    assert len(list((folder.path / "sm_80").iterdir())) == 3
    if count == 1:
        assert folder(old.build) == old
    else:
        with pytest.raises(Stale, match=r"PTX or cubin are not those of the description.*; build it with"):
            folder(old.build)


def test_a_full_disk_below_the_cache(tmp_path: Path) -> None:
    pytest.importorskip("cuda.core.utils")
    cache, artifact = Cache(tmp_path / "cache"), made("// kernel")

    class Full(dict[bytes, bytes]):
        def __setitem__(self, key: bytes, data: bytes) -> None:
            raise OSError(28, "No space left on device")

    cache._files = Full()
    with pytest.warns(UserWarning, match="not cached") as caught:
        cache.put(artifact)
    (warning,) = caught
    assert isinstance(warning.message, UserWarning)
    compare("the disk is full: kernel cache", warning.message)
    assert cache.get(artifact.build, artifact.toolchain) is None


# Forks


def told(log: FakeDriver, work: Callable[[], object]) -> tuple[str, str, list[str]]:
    """Runs `work` in a forked child: its error's type and text, and the driver calls that the child made."""
    reader, writer = os.pipe()

    def run() -> None:
        log.clear()
        ignored: list[Any] = []
        sys.unraisablehook = ignored.append
        name, text = "", ""
        try:
            work()
        except Exception as error:
            name, text = type(error).__name__, str(error)
        with os.fdopen(writer, "w") as file:
            json.dump([name, text, log.names, len(ignored)], file)

    with forked(run):
        os.close(writer)
        with os.fdopen(reader) as file:
            name, text, names, ignored = json.load(file)
    assert ignored == 0, "errors of finalizers"
    return name, text, names


def warm_bound(direction: str) -> tuple[Bound, dict[str, int]]:
    """Returns kernels with a launcher on STREAM, and the addresses in its parameters."""
    problem, plan = fakes.plan_of(direction, "sm_90")
    bound = bind(fakes.artifact(plan.build), plan, problem)
    given = addresses(bound.tensor_names)
    for _ in range(2):
        bound(given, STREAM)
    return bound, given


def test_a_forked_child_is_refused(driver_log: FakeDriver) -> None:
    host = operands()
    arrays = [InterfaceArray(array) for array in host]
    alive = [DeviceArray((2, 3), "float32", 0, 0)]
    bound, given = warm_bound("backward")
    one_kernel, operands_of_it = warm_bound("forward")
    assert one_kernel.workspace_bytes == 0, "its launcher calls the driver without anything before"
    attention_forward(*arrays, kernels=fakes.artifact)

    calls: list[Callable[[], object]] = [
        lambda: bound(given, STREAM),  # type: ignore[func-returns-value]
        lambda: one_kernel(operands_of_it, STREAM),  # type: ignore[func-returns-value]
        lambda: attention_forward(*arrays, kernels=fakes.artifact),
        lambda: attention_forward(*host, kernels=fakes.artifact),
        lambda: DeviceArray((2, 3), "float32", 0, 0),
        lambda: driver.device(0),
        lambda: driver.synchronise(0),
        lambda: driver.stream_ordinal(STREAM),
        lambda: bound.device.current().__enter__(),
    ]
    driver.call("cuCtxSetCurrent", 0xC0)  # as in a thread that uses CUDA: the child inherits it
    for call in calls:
        name, text, names = told(driver_log, call)
        assert names == [], "the child asks nothing of the driver"
        with refused("a process forks after a call, and the child calls"):
            raise {"ForkedChild": driver.ForkedChild}[name]
        assert text.startswith(str(driver.ForkedChild()))
    assert told(driver_log, lambda: attention_forward(*host, backend="reference")) == ("", "", [])
    assert len(bound._launchers) == 1
    for end in (alive.clear, bound._launchers.clear):
        assert told(driver_log, end) == ("", "", []), "arrays and graphs of the parent die quietly"
    driver_log.clear()
    bound(given, STREAM)
    attention_forward(*arrays, kernels=fakes.artifact)
    assert len(driver_log.of("cuGraphLaunch")) == 1, "the parent goes on"
    assert len(driver_log.of("cuLaunchKernelEx")) == len(bound.plan.launches) + 1
    assert not driver.is_forked_child


def test_a_child_that_another_library_s_parent_forked(driver_log: FakeDriver) -> None:
    """If the parent used CUDA without this package, cuInit tells."""
    driver.initialise.cache_clear()
    driver_log.fail("cuInit", 3)
    with refused("a process forks after a call, and the child calls"):
        driver.device_count()
    assert driver.device_count() == 2


# Values


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_values_that_are_not_finite(direction: str, value: float) -> None:
    """One such value in query, key or value of head 0: nothing raises, and head 1 has the same bits."""
    query, key, value_array = (np.random.default_rng(seed).standard_normal((1, 8, 2, 4)) for seed in range(3))
    names = {"query": query, "key": key, "value": value_array}
    given = {name: array.astype("f4") for name, array in names.items()}

    def results(**operands: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        output, logsumexp = attention_forward(**operands, mask=Causal(), backend="reference")
        if direction == "forward":
            return [output]
        grad_output = np.ones_like(output)
        found = attention_backward(
            grad_output, **operands, output=output, logsumexp=logsumexp, mask=Causal(), backend="reference"
        )
        return [found.query, found.key, found.value]

    right = results(**given)
    for name in given:
        wrong = {other: array.copy() for other, array in given.items()}
        wrong[name][0, 5, 0, 1] = value
        with survived("NaN or infinity in operands"):
            found = results(**wrong)
        for expected, array in zip(right, found, strict=True):
            assert np.array_equal(array[:, :, 1], expected[:, :, 1])
        if direction == "forward":
            rows = slice(0, 5) if name == "key" else [0, 1, 2, 3, 4, 6, 7]
            if name == "value":  # 0 times NaN is NaN: a row has it from a key that its mask excludes
                assert np.array_equal(found[0][..., 0, [0, 2, 3]], right[0][..., 0, [0, 2, 3]])
            else:
                assert np.array_equal(found[0][:, rows, 0], right[0][:, rows, 0]), "rows that do not see it"
        assert any(
            not np.array_equal(array[:, 5:, 0], expected[:, 5:, 0])
            for array, expected in zip(found, right, strict=True)
        )
        if np.isnan(value):
            assert any(np.isnan(array[:, 5:, 0]).any() for array in found)
