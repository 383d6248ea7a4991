"""Fixtures of tests of programs of JAX."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The NumPy reference behind the custom call."""
    from cutlass_py_attn.jax import primitive
    from tests.support import xla_reference

    xla_reference.register()
    monkeypatch.setattr(primitive, "TARGET", xla_reference.TARGET)
    yield
    xla_reference.computed.clear()
