"""Compiles a kernel of the tests in place of the kernel of a build."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cutlass_py_attn.compilation import compiler, registry
from cutlass_py_attn.launch.build import Build


def compile_traced(build: Build, trace: Callable[[Build], tuple[Any, tuple[Any, ...]]]) -> compiler.CompilerOutput:
    """Returns what the compiler makes of the kernel that `trace` gives for a build; it replaces `registry.trace`."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(registry, "trace", trace)
        return compiler.compile_unchecked(build)
