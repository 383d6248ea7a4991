"""Run: the main job; compiles the rooms and the fused kernels, shows their cost, runs and checks them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from cutlass_py_attn import judge
from cutlass_py_attn.artifact import Folder
from cutlass_py_attn.cli import kernels, on_host
from cutlass_py_attn.cli.selection import ARCHS, DTYPES, KINDS, MASKS, Selection
from cutlass_py_attn.cli.target import DEFAULT_ARCH, Gpu, first_gpu, hopper_arch
from cutlass_py_attn.compiler import artifact_for
from cutlass_py_attn.errors import CompileError
from cutlass_py_attn.plan import Plan
from cutlass_py_attn.problem import SHORT_NAMES, Shape

DEFAULT_MASKS = ("full", "causal")


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `run`, as they were given."""

    dtypes: tuple[str, ...]
    head_dim: int
    batch: int
    heads: int
    seqlen: int
    mask: str | None
    folder: Path | None
    arch: str | None
    as_json: bool

    @property
    def selection(self) -> Selection:
        """Kernels to show: rooms, forward and backward of every dtype and mask."""
        masks = MASKS if self.mask == "all" else (self.mask,) if self.mask else DEFAULT_MASKS
        return Selection(KINDS, tuple(DTYPES[short] for short in self.dtypes or DTYPES), (self.head_dim,), masks)

    @property
    def shape(self) -> Shape:
        """The problem that a GPU runs."""
        return Shape(self.batch, self.seqlen, self.seqlen, self.heads, self.head_dim, self.head_dim)

    def plans(self, gpu: Gpu | None) -> Iterator[Plan]:
        """All plans for one target; for a target that was not named, the Hopper rooms of its sm_90a too."""
        target = self.arch or (gpu.arch if gpu else DEFAULT_ARCH)
        yield from self.selection.plans(target)
        featured = hopper_arch(target)
        if self.arch is None and featured not in (None, target):
            rooms = Selection(("rooms",), self.selection.dtypes, (self.head_dim,), ())
            yield from (plan for plan in rooms.plans(str(featured)) if plan.build.family == "hopper")


@click.command()
@click.option("--dtype", "dtypes", type=click.Choice(list(DTYPES)), multiple=True,
              help="May be given several times.  [default: all]")  # fmt: skip
@click.option("--head-dim", type=int, default=128, show_default=True)
@click.option("--batch", type=click.IntRange(1), default=2, show_default=True)
@click.option("--heads", type=click.IntRange(1), default=16, show_default=True)
@click.option("--seqlen", type=click.IntRange(1), default=2048, show_default=True, help="Queries and keys.")
@click.option("--mask", type=click.Choice([*MASKS, "all"]), help="[default: full and causal]")
@click.option("--kernels", "folder", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="Use the kernels in this folder of a `build`; nothing is compiled.")  # fmt: skip
@click.option(
    "--arch",
    type=click.Choice(ARCHS),
    help="Target to show; a GPU runs its own.  [default: the GPU's, else sm_90]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def run(**given: Any) -> None:
    """Compile the kernels, show what they cost, run them, check them against float64 and time them.

    Batch, heads and seqlen are those of the GPU run. Without a GPU the kernels are compiled only, and the
    float64 reference is checked on a small problem. The exit code is 1 when a check fails.
    """
    options = Options(**given)
    gpu = first_gpu()
    source = kernels.prebuilt(options.folder) if options.folder else kernels.compiler()
    made, failures = kernels.obtain(list(options.plans(gpu)), source, quiet=options.as_json)
    if not options.as_json:
        kernels.show(made)
    if failures:
        raise CompileError("\n".join(failures))
    report = _on_gpu(options, gpu) if gpu else _on_host(options)
    if options.as_json:
        rows = [row for item in made for row in item.rows()]
        click.echo(json.dumps({"kernels": rows, **report}, indent=1))
    if not report["passed"]:
        sys.exit(1)


def _on_gpu(options: Options, gpu: Gpu) -> dict[str, Any]:
    """Run every dtype and mask; the tables, unless JSON was asked for, and the same as an object."""
    from cutlass_py_attn.cli import on_gpu

    source = Folder(options.folder) if options.folder else artifact_for
    cases = [(dtype, mask) for dtype in options.selection.dtypes for mask in options.selection.masks]
    results = [on_gpu.run(options.shape, dtype, mask, source) for dtype, mask in cases]
    if not options.as_json:
        shape = options.shape
        click.echo(
            f"\n{gpu.name}: batch {shape.batch}, heads {shape.num_heads}, seqlen {shape.num_queries}, "
            f"head_dim {shape.head_dim}; times are medians of {on_gpu.REPEATS} launches.\n"
            "Relative L2 errors of the first and the last head against float64; in brackets the worst ratio "
            "of an error to what honest rounding allows (1 or less passes)"
        )
        _print([_error_row(result) for result in results])
        click.echo()
        _print([_time_row(result) for result in results])
    return {
        "gpu": asdict(gpu),
        "shape": asdict(options.shape),
        "results": [asdict(result) for result in results],
        "not_run": "",
        "passed": all(result.passed for result in results),
    }


def _on_host(options: Options) -> dict[str, Any]:
    """Check the reference, and say in one line what did not run."""
    checks = [check for mask in options.selection.masks for check in on_host.check(mask)]
    not_run = "No GPU here: the kernels above were not run and nothing was timed; only the float64 reference was."
    if not options.as_json:
        click.echo("\nfloat64 reference in NumPy:")
        _print(
            [
                {
                    "mask": check.mask,
                    "law": check.law,
                    "error": f"{check.error:.1e}",
                    "limit": f"{check.limit:.0e}",
                    "": _state(check.passed),
                }
                for check in checks
            ]
        )
        click.echo(f"\n{not_run}")
    return {
        "gpu": None,
        "checks": [{**asdict(check), "passed": check.passed} for check in checks],
        "not_run": not_run,
        "passed": all(check.passed for check in checks),
    }


def _error_row(result: Any) -> dict[str, str]:
    """Relative L2 error and, behind it, the worst ratio of an error to what the rules allow."""
    ratios = judge.worst(result.verdicts)
    cells = {"dtype": SHORT_NAMES[result.dtype], "mask": result.mask}
    for name, error in result.errors.items():
        cells[name] = f"{error:.1e} ({ratios[name]:.2f})"
    return {**cells, "logsumexp": f"({ratios['logsumexp']:.2f})", "": _state(result.passed)}


def _time_row(result: Any) -> dict[str, str]:
    cells = {"dtype": SHORT_NAMES[result.dtype], "mask": result.mask}
    for timing in result.timings:
        cells[f"{timing.direction} ms"] = f"{timing.milliseconds:.3f}"
        cells[f"{timing.direction} TFLOP/s"] = f"{timing.tflops:.0f}"
    return cells


def _state(passed: bool) -> str:
    return "[green]ok[/]" if passed else "[red]FAILED[/]"


def _print(rows: list[dict[str, str]]) -> None:
    table = Table(*rows[0], box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row.values())
    kernels.console().print(table)
