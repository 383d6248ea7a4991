"""Fixtures of the command line's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def few_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A catalogue of few head dims, which is planned in a tenth of the time."""
    from cutlass_py_attn.cli import catalogue

    monkeypatch.setattr(catalogue, "HEAD_DIMS", ("d128",))
    monkeypatch.setattr(catalogue, "COMPONENT_GEMM_HEAD_DIMS", (128,))
    monkeypatch.setattr(catalogue, "FEATURE_HEAD_DIMS", ())
    catalogue.plans.cache_clear()
    yield
    catalogue.plans.cache_clear()
