"""Fixtures of tests of the public functions."""

from __future__ import annotations

import pytest

from cutlass_py_attn.api import calls
from cutlass_py_attn.launch.build import Build
from tests.support.fake_driver import FakeDriver


@pytest.fixture
def built(driver_log: FakeDriver) -> list[Build]:
    """The Builds whose kernels calls ask for, from the first on: a list that a test fills."""
    calls._repeated.clear()
    calls._prepared.clear()
    return []
