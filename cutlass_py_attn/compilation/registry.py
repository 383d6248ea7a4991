"""Registry: which module traces a Build, and which sources decide its machine code."""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.kernels.catalogue import KERNELS, kernel_of
from cutlass_py_attn.launch.build import Build

Trace = tuple[Callable[..., Any], tuple[object, ...]]

_PACKAGE: Final = Path(__file__).parents[1]
_KERNELS: Final = f"{_PACKAGE.name}.kernels"
# The compiler's options, which allocation is sound, and how a kernel module is called.
_COMPILER: Final = ("compilation/compiler.py", "compilation/report.py", "compilation/registry.py")

# Imports of this package by their whole names. An ast of 40 files takes 300 ms, these expressions 10 ms, and a
# cached kernel must load within 50 ms. tests/compile/test_compiler.py compares both ways.
_IMPORT: Final = re.compile(
    rf"^[ \t]*(?:from ({_PACKAGE.name}[\w.]*) import (\([^)]*\)|[^\n]*)|import ({_PACKAGE.name}[\w.]*))", re.MULTILINE
)
# These imports are for type checkers alone, and do not decide machine code.
_FOR_TYPES: Final = re.compile(r"^if TYPE_CHECKING:\n(?:[ \t]+[^\n]*\n|\n)+", re.MULTILINE)
_NAME: Final = re.compile(r"(\w+)(?: as \w+)?,?(?:[ \t]*#.*)?")


def trace(build: Build) -> Trace:
    """Returns the @cute.jit host function of `build` and its representative arguments, as cute.compile takes them.

    The kernel module is imported on use, because it imports the DSL; each defines trace(build).
    """
    kernel = KERNELS.get((build.kind, build.family, build.variant))
    if kernel is None:
        known = ", ".join("/".join(filter(None, key)) for key in KERNELS)
        given = "/".join(filter(None, (build.kind, build.family, build.variant)))
        raise NotSupported(f"kind/family/variant = {given}: has no kernel; allowed are {known}")
    host, arguments = importlib.import_module(f"{_KERNELS}.{kernel.module}").trace(build)
    return host, arguments


def sources_of(build: Build) -> tuple[str, ...]:
    """Returns the files, relative to the package, whose text decides the machine code of `build` beside its fields.

    These are the kernel module that traces the build, every module of the package that it imports, directly or not, and
    the compiler's options. What decides the fields of a Build, such as the planner, is not among them.
    """
    return _closure(f"{_KERNELS}.{kernel_of(build).module}")


def source_modules() -> tuple[str, ...]:
    """Returns the files, relative to the package, whose text decides the machine code of any kernel."""
    return _closure(*(f"{_KERNELS}.{kernel.module}" for kernel in KERNELS.values()))


@functools.cache
def _closure(*modules: str) -> tuple[str, ...]:
    """Returns the files of these modules and of all that they import from the package, sorted."""
    found: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += _imports(module)
    return tuple(sorted({_file(module).removeprefix(f"{_PACKAGE}/") for module in found} | {*_COMPILER}))


@functools.cache
def _imports(module: str) -> tuple[str, ...]:
    """Returns the modules of the package that a module imports when it runs, wherever the import is written."""
    found = []
    text = _FOR_TYPES.sub("", Path(_file(module)).read_text())
    for parent, names, plain in _IMPORT.findall(text):
        children = [f"{parent}.{name}" for name in _NAME.findall(names)]
        found += [plain] if plain else [child if _is_module(child) else parent for child in children]
    return tuple(dict.fromkeys(found))


@functools.cache
def _is_module(name: str) -> bool:
    return os.path.isfile(f"{_path(name)}.py") or os.path.isdir(_path(name))


def _file(module: str) -> str:
    """Returns the file of a module, or the __init__.py of a package."""
    path = _path(module)
    return f"{path}/__init__.py" if os.path.isdir(path) else f"{path}.py"


def _path(module: str) -> str:
    return f"{_PACKAGE.parent}/{module.replace('.', '/')}"
