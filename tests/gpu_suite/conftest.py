"""Plans of the suite's problems: several tests list all of them, and each is planned once."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from cutlass_py_attn.plan import planner


@pytest.fixture(scope="package", autouse=True)
def _planned_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(planner, "builds", functools.cache(planner.builds))
        yield
