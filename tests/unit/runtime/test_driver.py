"""Tests of the driver calls: error texts, every kind of stream, limits, lazy imports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cutlass_py_attn.errors import DoesNotFit, DriverError, NoDevice, NotSupported
from cutlass_py_attn.plan.plan import Launch, TensorMap
from cutlass_py_attn.runtime import driver, kernel_launch, tensor_maps
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import CtypesStream

ROOT = Path(__file__).resolve().parents[3]


def run(program: str) -> str:
    """The output of a fresh interpreter."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def test_importing_loads_neither_cuda_nor_the_compiler() -> None:
    program = (
        "import sys, cutlass_py_attn\n"
        "import cutlass_py_attn.api.attention, cutlass_py_attn.runtime.binding, cutlass_py_attn.runtime.arrays\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('cuda', 'cutlass', 'ml_dtypes')])"
    )
    assert run(program) == "[]"


def test_missing_cuda_python_is_named() -> None:
    program = (
        "import sys\nsys.modules['cuda.bindings'] = None\n"
        "from cutlass_py_attn.runtime import driver\n"
        "try: driver.device(0)\nexcept Exception as e: print(type(e).__name__, e)"
    )
    assert run(program).startswith("NoDevice cuda-python is not installed (")


def test_missing_driver_is_named() -> None:
    program = (
        "from cuda import pathfinder\n"
        "from cuda.bindings import driver as cuda\n"
        "def absent(flags): raise pathfinder.DynamicLibNotFoundError('libcuda')\n"
        "cuda.cuInit = absent\n"
        "from cutlass_py_attn.runtime import driver\n"
        "try: driver.device(0)\nexcept Exception as e: print(type(e).__name__, e)"
    )
    assert run(program) == "NoDevice there is no NVIDIA driver (libcuda) on this machine: install one"


def test_no_gpu_has_nvidia_s_text(driver_log: FakeDriver) -> None:
    driver.initialise.cache_clear()
    driver_log.fail("cuInit", 100)
    with pytest.raises(NoDevice) as caught:
        driver.device_count()
    assert str(caught.value) == (
        "there is no usable GPU on this machine: cuInit(0): CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected"
    )
    assert driver.device_count() == 2


OLD_DRIVER = (
    "from types import SimpleNamespace as Namespace\n"
    "from cuda.bindings import driver as cuda\n"
    "from cutlass_py_attn.runtime import driver\n"
    "cuda.cuInit, cuda.cuDriverGetVersion = lambda flags: (0,), lambda: (0, {version})\n"
    "cuda.cuDeviceGetCount = lambda: (0, 1)\n"
    "try: print(driver.device_count())\nexcept Exception as e: print(type(e).__name__, e)"
)


def test_an_old_driver_is_refused_before_anything_is_launched() -> None:
    assert run(OLD_DRIVER.format(version=12030)) == (
        "OldDriver this machine's NVIDIA driver is for CUDA 12.3: must be for CUDA 12.4 or later; update it to version "
        "550.54.14 or later"
    )
    assert run(OLD_DRIVER.format(version=12040)) == "1"


def test_the_minimum_driver_is_that_of_the_newest_function() -> None:
    """The header of NVIDIA's wheel names the CUDA version of each function; a later one raises the minimum."""
    headers = [Path(folder, "nvidia/cu13/include/cudaTypedefs.h") for folder in sys.path]
    header = next((path for path in headers if path.is_file()), None)
    if header is None:
        pytest.skip("nvidia-cuda-runtime is not installed")
    since: dict[str, list[int]] = {}
    for name, version in re.findall(r"PFN_(cu\w+?)_v(\d+)(?:_ptsz)?\)", header.read_text()):
        since.setdefault(name, []).append(int(version))
    folders = (ROOT / "cutlass_py_attn" / name for name in ("runtime", "jax", "bundle"))
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".j2")]
    used = {name for path in files for name in re.findall(r"\bcu[A-Z]\w+", path.read_text())} & since.keys()
    assert {"cuLaunchKernelEx", "cuLibraryLoadData", "cuTensorMapEncodeTiled"} <= used
    major, minor = driver.MINIMUM_CUDA
    assert max(min(since[name]) for name in used) == 1000 * major + 10 * minor


def test_device_facts(driver_log: FakeDriver) -> None:
    gpu = driver.device(1)
    assert (gpu.name, gpu.compute_capability, gpu.num_sms) == ("fake GPU 1", (8, 6), 84)
    assert gpu.shared_memory_per_block == 101376
    assert driver.driver_version() == (13, 0)
    with pytest.raises(NoDevice, match="device = 2: this machine has 2 visible GPUs, numbered from 0"):
        driver.device(2)


def test_context_is_restored(driver_log: FakeDriver) -> None:
    with driver.device(0).current():
        assert driver.current_ordinal() == 0
        with driver.device(1).current():
            assert driver.current_ordinal() == 1
        assert driver.current_ordinal() == 0
    assert [call.numbers[0] for call in driver_log.of("cuCtxSetCurrent")] == [0xC0, 0xC1, 0xC0, 0]


def test_failure_names_call_arguments_and_nvidia_s_text(driver_log: FakeDriver) -> None:
    driver_log.fail("cuMemAllocAsync", 2)
    with pytest.raises(DriverError) as caught:
        driver.allocate(4096, 7, "the workspace")
    assert caught.value.code == 2
    assert str(caught.value) == (
        "cuMemAllocAsync(4096, 7) for the workspace (4096 bytes): CUDA_ERROR_OUT_OF_MEMORY: out of memory; "
        "free memory on the device or use a smaller problem"
    )


def test_failed_launch_names_grid_and_stream(driver_log: FakeDriver) -> None:
    driver.call("cuCtxSetCurrent", driver.device(0).context)
    driver_log.fail("cuLaunchKernelEx", 400)
    kernel = driver.get_kernel(driver.load_library(b"k_0 8\n"), "k_0")
    start = kernel_launch.KernelLaunch(kernel, Launch("k_0", (1, 2, 3), (128, 1, 1), 1024), 0)
    with pytest.raises(DriverError) as caught:
        start(0xABC)
    message = str(caught.value)
    assert "grid (1, 2, 3), block (128, 1, 1), shared memory 1024, stream 0xabc" in message
    assert message.endswith(
        "for k_0: CUDA_ERROR_INVALID_HANDLE: invalid resource handle; "
        "a stream, event or kernel handle is closed or belongs to another device"
    )


def test_unknown_code_and_missing_function(driver_log: FakeDriver) -> None:
    driver_log.fail("cuMemFree", 12345)
    with pytest.raises((DriverError, ValueError)):
        driver.free_now(0)
    with pytest.raises(
        DriverError, match=r"cuCtxResetPersistingL2Cache.*does not have it; update it to version 550\.54\.14 or"
    ):
        driver.call("cuCtxResetPersistingL2Cache")


def test_a_cubin_that_the_driver_cannot_read_names_the_minimum(driver_log: FakeDriver) -> None:
    driver_log.fail("cuLibraryLoadData", 200)
    with pytest.raises(DriverError, match=r"the cubin is damaged, or .*needs 550\.54\.14 or later$"):
        driver.load_library(b"k_0 8\n")


def test_missing_symbol(driver_log: FakeDriver) -> None:
    library = driver.load_library(b"k_0 8\n")
    with pytest.raises(DriverError, match=r"b'other'.*CUDA_ERROR_NOT_FOUND: named symbol not found"):
        driver.get_kernel(library, "other")


def test_shared_memory_opt_in_and_its_limit(driver_log: FakeDriver) -> None:
    kernel = driver.get_kernel(driver.load_library(b"k_0 8\n"), "k_0")
    driver.allow_shared_memory(kernel, driver.device(1), 100 * 1024 - 1024, 0)
    assert driver_log.of("cuKernelSetAttribute")[-1].numbers[:3] == (8, 101376, 1)
    with pytest.raises(DoesNotFit, match="shared memory = 101377 bytes per block: fake GPU 1 allows 101376"):
        driver.allow_shared_memory(kernel, driver.device(1), 101376, 1)


def test_events_and_streams(driver_log: FakeDriver) -> None:
    driver.call("cuCtxSetCurrent", driver.device(0).context)
    stream = driver.create_stream()
    timer = driver.StreamTimer(stream)
    driver_log.clear()
    timer.start()
    timer.stop()
    start, stop = driver_log.of("cuEventRecord")
    assert start.numbers[1] == stop.numbers[1] == stream
    assert timer.milliseconds() == 1.25
    assert driver_log.of("cuEventElapsedTime")[0].numbers[:2] == (start.numbers[0], stop.numbers[0])
    driver_log.fail("cuEventRecord", 400)
    with pytest.raises(DriverError, match=r"cuda\.core, recording an event: CUDA_ERROR_INVALID_HANDLE"):
        timer.start()
    driver.order_streams(stream, stream)
    assert not driver_log.of("cuStreamWaitEvent")
    driver.order_streams(stream, 5)
    assert driver_log.of("cuStreamWaitEvent")[0].numbers[0] == 5
    driver.synchronise(stream)
    driver.destroy_stream(stream)
    assert driver_log.of("cuStreamSynchronize")[0].numbers[0] == stream


def test_tensor_map_is_written_to_its_slot(driver_log: FakeDriver) -> None:
    import ctypes

    raw = ctypes.create_string_buffer(256)
    slot = -(-ctypes.addressof(raw) // 64) * 64
    tensor_maps.encode(slot, 0x1000, TensorMap("a", (128, 64), (128,), (64, 32), 128), "bfloat16")
    (made,) = driver_log.of("cuTensorMapEncodeTiled")
    # slot, bfloat16, rank, address, columns and rows, row bytes, box, 128-byte swizzle, L2 128B, no fill
    assert made.numbers[:12] == (slot, 9, 2, 0x1000, 128, 64, 256, 64, 32, 3, 2, 0)
    assert ctypes.c_uint64.from_address(slot).value == 0x1000
    tensor_maps.encode(slot, 0x1000, TensorMap("a", (128, 64), (128,), (64, 32), 0), "float32")
    assert driver_log.of("cuTensorMapEncodeTiled")[1].numbers[6:10] == (512, 64, 32, 0)
    driver_log.fail("cuTensorMapEncodeTiled", 1)
    with pytest.raises(DriverError, match=r"cuTensorMapEncodeTiled.*for TensorMap.*of float32"):
        tensor_maps.encode(slot, 0x1000, TensorMap("a", (128, 64), (128,), (64, 32), 0), "float32")


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (None, 0),
        (0x55, 0x55),
        (SimpleNamespace(__cuda_stream__=lambda: (0, 0x66)), 0x66),
        (SimpleNamespace(__cuda_stream__=(0, 0x67)), 0x67),
        (SimpleNamespace(ptr=0x77), 0x77),
        (SimpleNamespace(cuda_stream=0x88), 0x88),
        (CtypesStream(0x99), 0x99),
        (CtypesStream(0), 0),
        (SimpleNamespace(handle=driver.bindings().CUstream(0x9A)), 0x9A),
        (driver.bindings().CUstream(0x9B), 0x9B),
    ],
)
def test_streams_of_every_kind(stream: Any, handle: int) -> None:
    assert driver.stream_handle(stream) == handle


@pytest.mark.parametrize("stream", [True, "s", -1, 1.5, object()])
def test_what_is_not_a_stream(stream: Any) -> None:
    with pytest.raises(NotSupported, match="must be None"):
        driver.stream_handle(stream)
