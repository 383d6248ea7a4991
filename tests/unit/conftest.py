"""Fixtures of the unit tier: no unit test compiles a kernel."""

from __future__ import annotations

from typing import NoReturn

import pytest

from cutlass_py_attn.compilation import compiler


@pytest.fixture(autouse=True)
def no_dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test that traces a kernel; such a test belongs to tests/compile."""

    def refuse(name: str, *_: object) -> NoReturn:
        pytest.fail(f"{name}: a unit test must not compile a kernel; move it to tests/compile")

    monkeypatch.setattr(compiler, "compile_trace", refuse)
