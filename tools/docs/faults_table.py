"""Faults table: faults.toml as Markdown, for docs/faults.md; the tests compare what a fault raises with its entries."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

REGISTRY: Final = Path(__file__).with_name("faults.toml")
HEADINGS: Final = ("fault", "error", "message", "what stays as it was", "test on a GPU")
GPU_TESTS: Final = "tests/gpu/test_faults.py"
NO_ERROR: Final = "none"


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry. error: name of the type, NO_ERROR for none; message: "..." stands for any text; on_gpu: tests."""

    what: str
    error: str
    message: str
    kept: str
    on_gpu: tuple[str, ...]

    def objection(self, error: str, message: str) -> str:
        """Returns how an error, by the name of its type, differs from the entry; empty if it does not."""
        pattern = ".*".join(map(re.escape, self.message.split("...")))
        if error == self.error and re.fullmatch(pattern, message, re.DOTALL):
            return ""
        return f"{self.what}: got {error}: {message}\nexpected {self.error}: {self.message}"


def read() -> dict[str, Fault]:
    """Returns every fault by what it is, in order."""
    entries = tomllib.loads(REGISTRY.read_text())["fault"]
    faults = [Fault(**{**entry, "on_gpu": tuple(entry["on_gpu"])}) for entry in entries]
    return {fault.what: fault for fault in faults}


def table() -> str:
    """Returns the table of all faults."""
    lines = [f"| {' | '.join(HEADINGS)} |", f"|{' --- |' * len(HEADINGS)}"]
    return "\n".join([*lines, *map(_row, read().values())])


def _row(fault: Fault) -> str:
    error = fault.error if fault.error == NO_ERROR else f"`{fault.error}`"
    message = f"`{fault.message}`" if fault.message else ""
    tests = ", ".join(f"`{name}`" for name in fault.on_gpu)
    return f"| {' | '.join([fault.what, error, message, fault.kept, tests])} |".replace("|  |", "| |")
