"""Pytest plugin of the mutation run: maps lines to the tests that execute them, or runs a list of tests in its order.

MUTATION_MAP names the file that a run over all tests writes; MUTATION_TESTS names the list of a mutant's tests, and
MUTATION_RESULT the file that gets the first test that fails.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PACKAGE = "cutlass_py_attn"
# Kernel modules need the compiler, whose import takes seconds, and are not mutated.
NOT_IMPORTED = (f"{PACKAGE}.kernels.", f"{PACKAGE}.__main__", f"{PACKAGE}.bench.")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the part that the environment asks for."""
    if "MUTATION_MAP" in os.environ:
        config.pluginmanager.register(_Mapper(Path(os.environ["MUTATION_MAP"]), config.rootpath))
    elif "MUTATION_TESTS" in os.environ:
        tests = Path(os.environ["MUTATION_TESTS"]).read_text().splitlines()
        config.pluginmanager.register(_Selection(tests, Path(os.environ["MUTATION_RESULT"])))


class _Mapper:
    """Records which tests execute each line, and how long each test takes. Tests that fail are left out."""

    def __init__(self, target: Path, root: Path) -> None:
        import coverage

        self.target, self.root = target, root
        self.coverage = coverage.Coverage(data_file=None, source=[str(root / PACKAGE)], config_file=False)
        self.coverage.start()
        _import_all()  # here, so that no test counts as the only one that executes the lines of a module
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        _clear_caches()  # else only the first of many tests executes a function with a cache
        self.coverage.switch_context(item.nodeid)
        result = yield
        self.coverage.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        data = self.coverage.get_data()
        tests = [test for test in self.seconds if test not in self.failed]
        numbers = {test: number for number, test in enumerate(tests)}
        lines: dict[str, dict[int, list[int]]] = {}
        for path in sorted(data.measured_files()):
            contexts = data.contexts_by_lineno(path)
            lines[Path(path).relative_to(self.root).as_posix()] = {
                line: sorted(numbers[name] for name in names if name in numbers) for line, names in contexts.items()
            }
        seconds = [[test, round(self.seconds[test], 4)] for test in tests]
        self.target.write_text(json.dumps({"tests": seconds, "lines": lines}))
        if self.failed:
            print(f"left out, as they fail in the unchanged tree: {', '.join(sorted(self.failed))}", file=sys.stderr)


class _Selection:
    """Runs the listed tests in the order of the list, and writes down the first that fails."""

    def __init__(self, tests: list[str], result: Path) -> None:
        self.order = {test: number for number, test in enumerate(tests)}
        self.result = result

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = sorted((item for item in items if item.nodeid in self.order), key=lambda item: self.order[item.nodeid])
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in self.order])
        items[:] = chosen

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.result.exists():
            self.result.write_text(report.nodeid)


def _import_all() -> None:
    package = importlib.import_module(PACKAGE)
    for module in pkgutil.walk_packages(package.__path__, f"{PACKAGE}.", onerror=lambda name: None):
        if not module.name.startswith(NOT_IMPORTED):
            importlib.import_module(module.name)


def _clear_caches() -> None:
    """Clears the caches of functions, but for those of driver calls, which tests count."""
    for name, module in list(sys.modules.items()):
        if name.startswith(PACKAGE) and not name.startswith(f"{PACKAGE}.runtime."):
            owners = [module, *(each for each in vars(module).values() if isinstance(each, type))]
            for cached in (each for owner in owners for each in list(vars(owner).values())):
                clear: Any = getattr(cached, "cache_clear", None)
                if callable(clear):
                    clear()
