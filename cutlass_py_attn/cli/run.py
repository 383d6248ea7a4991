"""Run: compiles the component GEMMs and the fused kernels, shows their resources, runs, checks and times them."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.table import Table

from cutlass_py_attn.artifact import Folder
from cutlass_py_attn.cli import artifacts, run_cpu
from cutlass_py_attn.cli.outputs import show_slow_roads
from cutlass_py_attn.cli.parameters import Choice, MaskName, masks_of
from cutlass_py_attn.cli.selection import ARCHS, DTYPES, KINDS, SHOWN_SIZES, Selection, directions_of, names_rows
from cutlass_py_attn.cli.target import DEFAULT_ARCH, Gpu, best_plans, first_gpu, wgmma_arch
from cutlass_py_attn.compilation.turns import artifact_for
from cutlass_py_attn.errors import CompileError, NotSupported, Stale
from cutlass_py_attn.kernels.families import FAMILIES
from cutlass_py_attn.plan.component_gemms import MAX_HEAD_DIM
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.spec import ProblemSpec, parse, parse_mask
from cutlass_py_attn.problem.tensors import SHORT_NAMES
from cutlass_py_attn.testing import accuracy

DEFAULT_MASKS = ("full", "causal")


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `run`."""

    dtypes: tuple[str, ...]
    head_dim: int
    batch: int
    heads: int
    seqlen: int
    mask: str | None
    names: tuple[str, ...]
    folder: Path | None
    arch: str | None
    as_json: bool

    @property
    def selection(self) -> Selection:
        """Kernels to show: component GEMMs, forward and backward of every dtype and mask."""
        names = masks_of((self.mask,)) if self.mask else DEFAULT_MASKS
        return Selection(KINDS, tuple(DTYPES[short] for short in self.dtypes or DTYPES), (self.head_dim,), names)

    @property
    def problems(self) -> list[ProblemSpec]:
        """The problems of --problem; NotSupported if one is no problem of attention."""
        rows = [name for name in self.names if names_rows(name)]
        if rows:
            raise NotSupported(
                f"problem {', '.join(map(repr, rows))}: must be a problem of attention; `inspect --problem` shows the "
                "kernels of appends and merges, and `build --problem` compiles them"
            )
        return [parse(name) for name in self.names]

    def specs(self) -> Iterator[tuple[ProblemSpec, str]]:
        """The problems that a GPU runs without --problem, with their masks by name: one for each dtype and mask."""
        sizes = self.seqlen, self.seqlen, self.batch, self.heads
        for dtype in self.selection.dtypes:
            for mask in self.selection.masks:
                yield ProblemSpec(dtype, self.head_dim, *sizes, mask=parse_mask(mask)), mask

    def plans(self, gpu: Gpu | None) -> Iterator[Plan]:
        """All plans for one target. Without --arch also the component GEMMs with wgmma, if its GPUs have it.

        With --problem the best plan of each problem and direction.
        """
        if self.names:
            for spec in self.problems:
                for direction in directions_of(spec):
                    yield from best_plans(spec.problem(direction), (self.arch,) if self.arch else ())
            return
        target = self.arch or (gpu.arch if gpu else DEFAULT_ARCH)
        yield from self.selection.plans(target, SHOWN_SIZES)
        featured = wgmma_arch(target)
        if self.arch is None and featured not in (None, target):
            standalone = Selection(("component-gemm",), self.selection.dtypes, (self.head_dim,), ())
            if self.head_dim <= MAX_HEAD_DIM:
                yield from (plan for plan in standalone.plans(str(featured)) if FAMILIES[plan.build.family].needs_wgmma)


@click.command()
@click.option("--dtype", "dtypes", type=Choice(list(DTYPES)), multiple=True,
              help="May be given several times.  [default: all]")  # fmt: skip
@click.option("--head-dim", type=click.IntRange(1), default=128, show_default=True)
@click.option("--batch", type=click.IntRange(1), default=2, show_default=True)
@click.option("--heads", type=click.IntRange(1), default=16, show_default=True)
@click.option("--seqlen", type=click.IntRange(1), default=2048, show_default=True, help="Queries and keys.")
@click.option("--mask", type=MaskName(),
              help="By its words, such as causal_br or window_left100.  [default: full and causal]")  # fmt: skip
@click.option("--problem", "names", multiple=True, metavar="NAME",
              help="A problem with any features (words: bench --help), in place of the options above.")  # fmt: skip
@click.option("--kernels", "folder", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="Use the kernels in this folder of a `build`; nothing is compiled.")  # fmt: skip
@click.option(
    "--arch",
    type=Choice(ARCHS),
    help="Target to show; a GPU runs its own.  [default: the GPU's, else sm_90]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.pass_context
def run(context: click.Context, /, **given: Any) -> None:
    """Compile the kernels, show their resources, run them, check them against float64 and time them.

    --batch, --heads and --seqlen are the sizes of the GPU run. Without a GPU the kernels are only compiled, and the
    float64 reference is checked on a small problem. A --problem is checked with fewer heads and shorter sequences.
    There are component GEMMs of head dims up to 256 alone. The exit code is 1 if a check fails.
    """
    options = Options(**given)
    if options.names:
        _expect_defaults(context, "dtypes", "head_dim", "batch", "heads", "seqlen", "mask")
    gpu = first_gpu()
    source = artifacts.prebuilt(options.folder) if options.folder else artifacts.compiler()
    plans = list(options.plans(gpu))
    if options.folder:
        _expect_kernels(plans, options.folder)
    made, failures = artifacts.obtain(plans, source, quiet=options.as_json)
    if not options.as_json:
        artifacts.show(made)
        show_slow_roads(plans if options.names else ())
    if failures:
        raise CompileError("\n".join(failures))
    on_gpu = _problems_on_gpu if options.names else _on_gpu
    report = on_gpu(options, gpu) if gpu else _on_host(options)
    if options.as_json:
        rows = [row for item in made for row in item.rows()]
        click.echo(json.dumps({"kernels": rows, **report}, indent=1))
    if not report["passed"]:
        sys.exit(1)


def _expect_kernels(plans: Sequence[Plan], folder: Path) -> None:
    """Raises Stale if the folder lacks kernels, or has them of another version; the message has one command for all."""
    kernels, lacking = Folder(folder), dict[str, list[str]]()
    for build in dict.fromkeys(plan.build for plan in plans):
        try:
            kernels(build)
        except Stale:
            lacking.setdefault(build.arch, []).append(build.symbol)
    count = sum(map(len, lacking.values()))
    if count > 1:
        commands = (
            f"cutlass-py-attn build --arch {arch} {' '.join(f'--symbol {symbol}' for symbol in symbols)} "
            f"-o {shlex.quote(str(folder))}"
            for arch, symbols in lacking.items()
        )
        raise Stale(f"{count} kernels are not in {folder}, or stale there; build them with: {' && '.join(commands)}")


def _expect_defaults(context: click.Context, *names: str) -> None:
    """Raises UsageError if an option was given that --problem replaces."""
    given = [name for name in names if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
    flags = [item.opts[0] for item in context.command.params if item.name in given]
    if flags:
        raise click.UsageError(f"--problem names whole problems: leave out {', '.join(flags)}, or use two commands")


def _problems_on_gpu(options: Options, gpu: Gpu) -> dict[str, Any]:
    """Runs every --problem, prints a table unless --json is given, and returns the results as an object."""
    from cutlass_py_attn.cli import run_gpu

    source = Folder(options.folder) if options.folder else artifact_for
    results = [result for spec in options.problems for result in run_gpu.run_problem(spec, source)]
    if not options.as_json:
        click.echo(
            f"\n{gpu.name}: times are medians of {run_gpu.REPEATS} launches. Numbers of results are the worst error / "
            "allowed against float64 (1 or less passes)"
        )
        for result in results:
            click.echo(f"\n{result.timing.direction} of {result.problem}, checked as {result.checked}")
            _print([_problem_row(result)])
    return {
        "gpu": asdict(gpu),
        "results": [{**asdict(result), "passed": result.passed} for result in results],
        "not_run": "",
        "passed": all(result.passed for result in results),
    }


def _on_gpu(options: Options, gpu: Gpu) -> dict[str, Any]:
    """Runs every dtype and mask, prints the tables unless --json is given, and returns the results as an object."""
    from cutlass_py_attn.cli import run_gpu

    source = Folder(options.folder) if options.folder else artifact_for
    specs = list(options.specs())
    results = [run_gpu.run(spec, mask, source) for spec, mask in specs]
    shape = specs[0][0].shape
    if not options.as_json:
        click.echo(
            f"\n{gpu.name}: batch {shape.batch}, heads {shape.num_heads}, seqlen {shape.num_queries}, "
            f"head_dim {shape.head_dim}; times are medians of {run_gpu.REPEATS} launches.\n"
            "Relative L2 errors of the first and the last head against float64; in brackets the worst error / allowed "
            "(1 or less passes)"
        )
        _print([_error_row(result) for result in results])
        click.echo()
        _print([_time_row(result) for result in results])
    return {
        "gpu": asdict(gpu),
        "shape": asdict(shape),
        "results": [asdict(result) for result in results],
        "not_run": "",
        "passed": all(result.passed for result in results),
    }


def _on_host(options: Options) -> dict[str, Any]:
    """Checks the reference, unless problems are named, and prints in one line what did not run."""
    checks = [] if options.names else [check for mask in options.selection.masks for check in run_cpu.check(mask)]
    not_run = "No GPU here: the kernels above were not run and nothing was timed"
    not_run += "." if options.names else "; only the float64 reference was."
    if checks and not options.as_json:
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
    if not options.as_json:
        click.echo(f"\n{not_run}")
    return {
        "gpu": None,
        "checks": [{**asdict(check), "passed": check.passed} for check in checks],
        "not_run": not_run,
        "passed": all(check.passed for check in checks),
    }


def _problem_row(result: Any) -> dict[str, str]:
    """Returns one direction of a problem: its time, and error / allowed of each result."""
    cells = {
        "kernel": result.symbol,
        "ms": f"{result.timing.milliseconds:.3f}",
        "TFLOP/s": f"{result.timing.tflops:.0f}",
    }
    cells |= {name: f"{ratio:.2f}" for name, ratio in result.ratios.items()}
    return {**cells, "": _state(result.passed)}


def _error_row(result: Any) -> dict[str, str]:
    """Returns the relative L2 errors and, in brackets, the worst error / allowed."""
    ratios = accuracy.worst(result.checks)
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
    artifacts.print_table(table)
