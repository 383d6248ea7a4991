"""Artifacts: compiles or loads kernels with a progress bar, and prints the resources of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cutlass_py_attn import extras
from cutlass_py_attn.artifact import Artifact, Folder
from cutlass_py_attn.compilation.cache import Cache
from cutlass_py_attn.compilation.compiler import toolchain
from cutlass_py_attn.compilation.turns import artifact_for
from cutlass_py_attn.errors import CompileError
from cutlass_py_attn.inspection.facts import dynamic_bytes
from cutlass_py_attn.inspection.listing import entry_text
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan.plan import Plan

WARP_PRODUCT, WARPGROUP_PRODUCT = "mma.sync", "wgmma.mma_async"
PIPE_COLUMNS = 160
MOST_COLUMNS = 1000  # of a table

Source = Callable[[Build], tuple[Artifact, str]]


@dataclass(frozen=True, slots=True)
class Made:
    """A plan's artifact. origin: compile seconds, "cached" or "prebuilt"."""

    plan: Plan
    artifact: Artifact
    origin: str

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields one object for each entry of the cubin."""
        for kernel in self.artifact.kernels:
            body = entry_text(self.artifact.ptx, kernel.symbol)
            yield {
                "kernel": kernel.symbol.rpartition("_")[0],
                "arch": self.plan.build.arch,
                "registers": kernel.registers,
                "frame_bytes": kernel.frame_bytes,
                "spill_bytes": kernel.spill_bytes,
                "shared_memory_bytes": dynamic_bytes(self.plan, kernel.symbol),
                "mma": body.count(f"{WARP_PRODUCT}."),
                "wgmma": body.count(f"{WARPGROUP_PRODUCT}."),
                "origin": self.origin,
            }


def compiler() -> Source:
    """Returns a source that compiles, or reads this user's cache."""
    expect_compiler()

    def source(build: Build) -> tuple[Artifact, str]:
        kept = Cache().get(build, toolchain())
        if kept is not None:
            return kept, "cached"
        start = time.perf_counter()
        artifact = artifact_for(build)
        return artifact, f"{time.perf_counter() - start:.1f} s"

    return source


def expect_compiler() -> None:
    """Raises CompileError with the packages to install if there is no compiler."""
    try:
        toolchain()
    except CompileError as error:
        raise CompileError(
            f"there is no compiler, so nothing can be compiled: {extras.remedy('compile')}; or launch prebuilt kernels "
            "with --kernels"
        ) from error


def prebuilt(folder: Path) -> Source:
    """Returns a source that reads the files of a `build` command."""
    files = Folder(folder)
    return lambda build: (files(build), "prebuilt")


def obtain(
    plans: Sequence[Plan], source: Source, quiet: bool = False, keep: Callable[[Artifact], None] | None = None
) -> tuple[list[Made], list[str]]:
    """Returns the artifact of every plan, once for each build, and a message for each that failed.

    Shows a progress bar on stderr unless `quiet`. keep: called with each artifact as soon as there is one.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    made: list[Made] = []
    failures: list[str] = []
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as progress:
        unique = {plan.build: plan for plan in plans}
        task = progress.add_task("kernels", total=len(unique))
        for build, plan in unique.items():
            progress.update(task, description=f"{build.symbol} {build.arch}")
            try:
                made.append(Made(plan, *source(build)))
                if keep is not None:
                    keep(made[-1].artifact)
            except CompileError as error:
                failures.append(str(error))
            progress.advance(task)
    return made, failures


def show(made: Sequence[Made]) -> None:
    """Prints one line for each kernel: its resources and its matrix instructions."""
    table = Table("kernel", "target", box=None, pad_edge=False)
    for title in ("registers", "frame", "spills", "shared memory", "mma", "wgmma", "compiled"):
        table.add_column(title, justify="right")
    for row in (row for item in made for row in item.rows()):
        cells = [str(value) for value in row.values()]
        table.add_row(*cells)
    print_table(table)


def print_table(table: Table) -> None:
    """Prints a table as wide as its cells: a narrow terminal wraps the lines, and no symbol or number is cut."""
    usual = console()
    needed = Measurement.get(usual, usual.options.update(max_width=MOST_COLUMNS), table).maximum
    Console(width=max(usual.width, needed)).print(table)


def console() -> Console:
    """Standard output; wide where it is no terminal, so that logs and pipes get whole lines."""
    found = Console()
    return found if found.is_terminal else Console(width=PIPE_COLUMNS)
