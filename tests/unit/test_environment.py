"""Tests of the environment that tests/conftest.py sets: threads of BLAS, and flags of XLA."""

from __future__ import annotations

import os
from importlib import metadata

import pytest

from tests import conftest


def test_blas_of_a_worker_has_one_thread(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    """Workers are started after this, so it counts before they load NumPy."""
    variables = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    if "PYTEST_XDIST_WORKER" in os.environ:
        assert all(os.environ[name] for name in variables)
    for name in variables:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pytestconfig.option, "numprocesses", 2, raising=False)
    conftest.pytest_configure(pytestconfig)
    assert [os.environ[name] for name in variables] == ["1", "1", "1"]
    for name in variables:
        monkeypatch.setenv(name, "3")
    conftest.pytest_configure(pytestconfig)
    assert os.environ["OMP_NUM_THREADS"] == "3", "what the user sets stays"


@pytest.mark.parametrize(
    ("jaxlib", "is_known"),
    [("0.10.2", True), ("0.11.0", True), ("0.11.1", False), ("0.12.0.1", False), ("1.0.dev20270101", False)],
)
def test_xla_gets_only_flags_that_it_knows(jaxlib: str, is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At an unknown one it ends the process."""
    monkeypatch.setattr(metadata, "version", {"jaxlib": jaxlib}.__getitem__)
    assert ("--xla_cpu_use_fusion_emitters=false" in conftest.xla_flags()) == is_known


def test_flags_of_xla_without_jaxlib(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert conftest.xla_flags().startswith("--xla_cpu_parallel_codegen_split_count=")
