"""Environment and distribution of the tests, and the fake driver: loaded once per process, cleared for each test."""

from __future__ import annotations

import functools
import gc
import os
import re
import sys
from collections.abc import Iterator
from importlib import metadata

import pytest

from cutlass_py_attn.runtime import lifetimes
from tests.support import fake_driver

pytest_plugins = ("tests.support.machine_code",)


def xla_flags() -> str:
    """The flags of XLA for the installed jaxlib, or for none; read without importing JAX.

    JAX programs are tiny here and run once: XLA's fusion emitters would take half of their compilation. From 0.11.1 on
    jaxlib has no flag against them, and XLA ends the process at a flag that it does not know.
    """
    flags = ["--xla_cpu_parallel_codegen_split_count=1"]
    try:
        jaxlib = metadata.version("jaxlib")
    except metadata.PackageNotFoundError:
        return flags[0]
    if [int(number) for number in re.findall(r"\d+", jaxlib)[:3]] < [0, 11, 1]:
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return " ".join(flags)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Lets a worker without tests steal some, and otherwise keeps those of a module, with what they share, together."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"


def pytest_configure(config: pytest.Config) -> None:
    """Sets the environment of the tests, which the workers inherit, so it counts however early a plugin imports there.

    The BLAS of each worker gets one thread, because the workers share the cores.
    """
    os.environ.setdefault("XLA_FLAGS", xla_flags())
    if getattr(config.option, "numprocesses", None):
        for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ.setdefault(variable, "1")


@functools.cache
def _loaded() -> fake_driver.FakeDriver:
    return fake_driver.FakeDriver()


@pytest.fixture
def driver_log() -> Iterator[fake_driver.FakeDriver]:
    """The fake driver with an empty log; skips the test if there is no C compiler."""
    fake_driver.need_compiler("the fake driver")
    fake = _loaded()
    fake.busy(False)
    lifetimes.release()
    gc.collect()  # else this test's log gets the cuMemFree of an earlier test's array
    gc.freeze()  # what is alive now stays: the next collection reads new objects alone, in place of all modules
    fake.clear_context()
    fake.clear()
    yield fake
    fake.clear()


@pytest.fixture
def graphs(driver_log: fake_driver.FakeDriver, monkeypatch: pytest.MonkeyPatch) -> fake_driver.FakeDriver:
    """The fake driver for code that captures CUDA graphs, which stay empty, in a process without torch."""
    monkeypatch.setitem(sys.modules, "torch", None)
    return driver_log
