"""Fixtures of the unit tier: no unit test compiles a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import pytest

from cutlass_py_attn.compilation import compiler
from cutlass_py_attn.runtime import driver
from tests.support import fake_libraries
from tests.support.fake_driver import FakeDriver


@pytest.fixture(autouse=True)
def no_dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test that traces a kernel; such a test belongs to tests/compile."""

    def refuse(name: str, *_: object) -> NoReturn:
        pytest.fail(f"{name}: a unit test must not compile a kernel; move it to tests/compile")

    monkeypatch.setattr(compiler, "compile_trace", refuse)


@pytest.fixture
def log(driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The fake driver, with a fake torch and a fake CuPy on streams of their own, and the first GPU's context."""
    fake_libraries.install(monkeypatch)
    driver.call("cuCtxSetCurrent", 0xC0)
    return driver_log


@pytest.fixture
def few_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A catalogue of few head dims, which is planned in a tenth of the time."""
    from cutlass_py_attn.cli import catalogue

    monkeypatch.setattr(catalogue, "HEAD_DIMS", ("d128",))
    monkeypatch.setattr(catalogue, "COMPONENT_GEMM_HEAD_DIMS", (128,))
    monkeypatch.setattr(catalogue, "FEATURE_HEAD_DIMS", ())
    catalogue.entries.cache_clear()
    yield
    catalogue.entries.cache_clear()
