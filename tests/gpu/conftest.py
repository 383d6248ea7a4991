"""Fixtures: the GPU, its memory and the kernels. Without a GPU one skipped test stands for all, with the reason.

Workers of pytest-xdist share the GPU. Each test holds a share of its memory, DEFAULT_GIB unless it says
`device_memory(gib=...)`, and starts when the tests of all workers leave enough (card.py).
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from cutlass_py_attn.errors import AttentionError
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.binding import portable_arch
from cutlass_py_attn.testing import check
from tests.gpu.card import Card
from tests.gpu.schedule import long_first

HERE = Path(__file__).parent
GIB: Final = 1 << 30
DEFAULT_GIB: Final = 1.0
WORKER_GIB: Final = 2.0  # of each worker beside its tests' arrays: contexts, loaded kernels, caches of array libraries
CHUNK: Final = 8  # tests that a worker gets at once: neighbours share cached references


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --kernels, the folder of prebuilt kernels."""
    parser.addoption(
        "--kernels", type=Path, help="folder of prebuilt kernels (tools/release/build_ptx.py --suite FOLDER)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Makes JAX allocate what it uses in place of three quarters of the GPU; workers inherit it."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if getattr(config.option, "numprocesses", None) and config.option.maxschedchunk is None:
        config.option.maxschedchunk = CHUNK


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str) -> None:
    """Names a test that ended its worker at once: the summary of pytest-xdist comes too late if the run is cut off."""
    sys.stderr.write(f"\nended its worker: {crashitem}\n")


def _missing(config: pytest.Config) -> str:
    """Says in one line why no test here can run; empty if they can."""
    try:
        portable_arch(driver.device(0).compute_capability)
    except AttentionError as error:
        return f"no usable GPU: {error}"
    if config.getoption("--kernels") is None and importlib.util.find_spec("cutlass") is None:
        return "no kernels: pass --kernels FOLDER, or install the compiler"
    return ""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks every test here as `gpu`. Without a GPU one skipped test stands for all; else long tests come early."""
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.gpu)
    reason = _missing(config) if ours else ""
    if reason:
        ours[0].add_marker(pytest.mark.skip(reason=f"all {len(ours)} tests of tests/gpu: {reason}"))
        config.hook.pytest_deselected(items=ours[1:])
        items[:] = [item for item in items if item not in ours[1:]]
    elif len(ours) == len(items):
        items[:] = long_first(items, _seconds, CHUNK)


def _seconds(item: pytest.Item) -> float:
    marker = item.get_closest_marker("expected_seconds")
    return float(marker.args[0]) if marker else 0.0


@pytest.fixture(scope="session")
def gpu() -> driver.Device:
    """The first GPU."""
    return driver.device(0)


@pytest.fixture(scope="session")
def arch(gpu: driver.Device) -> str:
    """The target of the fused kernels on this GPU."""
    return portable_arch(gpu.compute_capability)


@pytest.fixture(scope="session")
def kernels(request: pytest.FixtureRequest) -> check.Kernels:
    """The source of artifacts: one object, because it is part of the key of the cache of bound kernels."""
    return check.kernels_from(request.config.getoption("--kernels"))


@pytest.fixture
def on_this_gpu(request: pytest.FixtureRequest, gpu: driver.Device) -> None:
    """Skips a test of the parameter `family` if the GPU does not run these kernels."""
    if request.getfixturevalue("family") == "sm90" and gpu.compute_capability != (9, 0):
        pytest.skip(f"{gpu.name} does not run sm90 kernels")


@pytest.fixture(scope="session")
def card(gpu: driver.Device) -> Card:
    """The memory that tests may use: that of the GPU without what every worker needs beside it."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    total = int(driver.call("cuDeviceTotalMem", gpu.handle)) / GIB
    uuid = bytes(driver.call("cuDeviceGetUuid", gpu.handle).bytes).hex()
    path = Path(tempfile.gettempdir()) / f"cutlass_py_attn_tests_{os.getuid()}_{uuid}.json"
    return Card(path, max(total - WORKER_GIB * workers, DEFAULT_GIB))


@pytest.fixture(autouse=True)
def _device_memory(request: pytest.FixtureRequest, card: Card) -> Iterator[None]:
    """Holds the test's share of the GPU's memory, and returns what array libraries cached of a large one."""
    marker = request.node.get_closest_marker("device_memory")
    given = marker.kwargs["gib"] if marker else DEFAULT_GIB
    gib = card.gib if given is None else given
    if gib > card.gib:
        pytest.skip(f"the test needs {gib} GiB of device memory: the tests may use {card.gib:.1f} GiB of this card")
    with card.share(gib):
        yield
        if marker:
            release_caches()


def release_caches() -> None:
    """Returns unused memory of torch, CuPy and the driver's pool to the GPU."""
    gc.collect()
    loaded: dict[str, Any] = sys.modules  # type: ignore[assignment]
    if "torch" in loaded and loaded["torch"].cuda.is_initialized():
        loaded["torch"].cuda.empty_cache()
    if "cupy" in loaded:
        loaded["cupy"].get_default_memory_pool().free_all_blocks()
    pool = driver.call("cuDeviceGetDefaultMemPool", driver.device(0).handle)
    driver.call("cuMemPoolTrimTo", pool, 0)


@pytest.fixture(autouse=True)
def _current(gpu: driver.Device, _device_memory: None) -> Iterator[None]:
    """Makes the GPU's context current while a test creates buffers and streams."""
    with gpu.current():
        yield
