"""Fixtures: the GPU and the kernels. Without them one skipped test stands for all, with the reason in one line."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutlass_py_attn.errors import AttentionError
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.launch import portable_arch
from cutlass_py_attn.testing import check

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --kernels, the folder of prebuilt kernels."""
    parser.addoption(
        "--kernels", type=Path, help="folder of prebuilt kernels (tools/release/build_ptx.py --suite FOLDER)"
    )


def _missing(config: pytest.Config) -> str:
    """Says in one line why no test here can run; empty if they can."""
    try:
        portable_arch(driver.device(0).compute_capability)
    except AttentionError as error:
        return f"no usable GPU: {error}"
    if config.getoption("--kernels") is None and importlib.util.find_spec("cutlass") is None:
        return "no kernels: pass --kernels FOLDER, or install the compiler"
    return ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks every test here as `gpu`. Without a GPU one skipped test stands for all."""
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.gpu)
    reason = _missing(config) if ours else ""
    if reason:
        ours[0].add_marker(pytest.mark.skip(reason=f"all {len(ours)} tests of tests/gpu: {reason}"))
        config.hook.pytest_deselected(items=ours[1:])
        items[:] = [item for item in items if item not in ours[1:]]


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


@pytest.fixture(autouse=True)
def _current(gpu: driver.Device) -> Iterator[None]:
    """Makes the GPU's context current while a test creates buffers and streams."""
    with gpu.current():
        yield
