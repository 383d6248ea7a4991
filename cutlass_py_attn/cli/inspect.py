"""Inspect: PTX, SASS, steps, resources, memory map and instruction counts of a kernel, or a comparison of two."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.syntax import Syntax
from rich.table import Table

from cutlass_py_attn import extras
from cutlass_py_attn.artifact import Artifact, Folder, first_available
from cutlass_py_attn.cli import artifacts
from cutlass_py_attn.cli.outputs import OutputFile, show_slow_roads, write_text
from cutlass_py_attn.cli.parameters import Choice
from cutlass_py_attn.cli.selection import ARCHS, problems
from cutlass_py_attn.cli.symbols import parse_symbol
from cutlass_py_attn.cli.target import default_arch, plans_for, plans_here, wgmma_arch
from cutlass_py_attn.inspection import listing, sass
from cutlass_py_attn.inspection.difference import difference, text_difference
from cutlass_py_attn.inspection.facts import InspectedKernel, Json, facts, inspect_kernel
from cutlass_py_attn.inspection.page import page
from cutlass_py_attn.kernels.families import FAMILIES
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.tensors import DIRECTIONS

NO_SASS = f"No instruction counts: they need nvdisasm, {extras.remedy('inspect')}"


@dataclass(frozen=True, slots=True)
class _Options:
    """The options that concern a kernel. steps: mark the numbered steps; view: "ptx", "sass", "json" or ""."""

    arch: str | None
    folder: Path | None
    steps: bool
    view: str


@click.command()
@click.argument("symbol", required=False)
@click.option("--problem", metavar="NAME|FILE.json",
              help="The kernel of a problem (words: bench --help; append_... and merge_...: export --help), in place "
              "of SYMBOL.")  # fmt: skip
@click.option("--direction", type=Choice(DIRECTIONS), help="Of --problem.  [default: forward, or that of the file]")
@click.option(
    "--arch",
    type=Choice(ARCHS),
    help="Compile target.  [default: the GPU's, else sm_90; sm_90a for the sm90 family]",
)
@click.option("--kernels", "folder", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="Take the kernel from this folder of a `build` instead of compiling it.")  # fmt: skip
@click.option("--ptx", "view", flag_value="ptx", help="Print the PTX and nothing else.")
@click.option("--sass", "view", flag_value="sass", help="Print the SASS and nothing else.")
@click.option("--json", "view", flag_value="json", help="Print JSON instead of tables.")
@click.option(
    "--steps/--no-steps",
    default=True,
    show_default=True,
    help="Mark the numbered steps of the kernel's source, which compiles it once more with line info.",
)
@click.option("--html", type=OutputFile(), help="Write a page about the kernel to this file.")
@click.option(
    "--diff",
    "other",
    metavar="OTHER",
    help="Compare with the kernel of this name, or with the one of the same name in this folder of a `build`.",
)
def inspect(
    *,
    symbol: str | None,
    problem: str | None,
    direction: str | None,
    arch: str | None,
    folder: Path | None,
    view: str | None,
    steps: bool,
    html: Path | None,
    other: str | None,
) -> None:
    """Show the compiled code and the resources of kernel SYMBOL; no GPU is needed.

    SYMBOL is a name that `list` shows, such as bwd_sm80_bf16_d128_causal; --problem finds the kernel of a problem. In
    the PTX and SASS a comment precedes the instructions of each step.
    """
    if (symbol is None) == (problem is None):
        raise click.UsageError("name one kernel: by SYMBOL, as `list` shows it, or by --problem")
    if direction and not problem:
        raise click.UsageError("--direction belongs to --problem: a symbol has its direction, fwd or bwd")
    if html and (view or other):
        raise click.UsageError("--html writes a page of one kernel: leave out --ptx, --sass, --json and --diff")
    options = _Options(arch, folder, steps, view or "")
    plan, artifact = _of_problem(problem, direction, options) if problem else _of_symbol(str(symbol), options, folder)
    found = inspect_kernel(plan, artifact, with_steps=steps)
    if html:
        write_text(html, page(found))
        click.echo(f"{html}: {found.name}")
    elif other is None:
        _show(found, options.view)
        show_slow_roads([plan] if problem and not options.view else ())
    else:
        is_folder = Path(other).is_dir()
        compared = (plan, Folder(other)(plan.build)) if is_folder else _of_symbol(other, options, folder)
        _show_difference(found, inspect_kernel(*compared, with_steps=steps), options.view)


def _of_symbol(symbol: str, options: _Options, folder: Path | None) -> tuple[Plan, Artifact]:
    """Returns the kernel of that name, from a folder or compiled."""
    usual = default_arch()
    needs_wgmma = any(name in symbol.split("_") for name, family in FAMILIES.items() if family.needs_wgmma)
    plan = parse_symbol(symbol, options.arch or (wgmma_arch(usual) if needs_wgmma else None) or usual)
    return plan, _source(folder)(plan.build)


def _of_problem(name: str, direction: str | None, options: _Options) -> tuple[Plan, Artifact]:
    """Returns the kernel that a call with this problem launches: that of the first plan that compiles, or is there."""
    is_file = name.endswith(".json")
    given = problems([name], (direction,) if direction else () if is_file else ("forward",))[0]
    found = plans_for(given, options.arch) if options.arch else plans_here(given)
    return first_available(found, _source(options.folder))


def _source(folder: Path | None) -> Callable[[Build], Artifact]:
    source = artifacts.prebuilt(folder) if folder else artifacts.compiler()
    return lambda build: source(build)[0]


def _show(found: InspectedKernel, view: str) -> None:
    if view == "ptx":
        _print_ptx("\n".join(found.marked_ptx()))
    elif view == "sass":
        click.echo("\n".join(_sass(found)))
    elif view == "json":
        click.echo(json.dumps(facts(found), indent=1))
    else:
        _print_tables(facts(found))


def _show_difference(left: InspectedKernel, right: InspectedKernel, view: str) -> None:
    names = left.name, right.name
    if view in ("ptx", "sass"):
        before, after = (item.marked_ptx() if view == "ptx" else _sass(item) for item in (left, right))
        for line in text_difference(before, after, names):
            click.echo(line)
        return
    found = difference(facts(left), facts(right))
    if view == "json":
        click.echo(json.dumps({"left": names[0], "right": names[1], "differences": found}, indent=1))
        return
    console = artifacts.console()
    console.print(f"[bold]{names[0]}[/] and [bold]{names[1]}[/]" + ("" if found else ": no difference"))
    for title, rows in found.items():
        _print_rows(title.replace("_", " "), [{**row, "change": _change(row)} for row in rows])


def _change(row: Json) -> str:
    """Returns the difference of two numbers; "" for anything else."""
    both = row["left"], row["right"]
    return f"{both[1] - both[0]:+g}" if all(isinstance(value, int | float) for value in both) else ""


def _print_ptx(ptx: str) -> None:
    """Prints the PTX in colour on a terminal, and as plain text elsewhere."""
    console = artifacts.console()
    if console.is_terminal:
        console.print(Syntax(ptx, "ptx", background_color="default"))
    else:
        click.echo(ptx)


def _sass(found: InspectedKernel) -> Iterable[str]:
    """Yields the listing of every entry, with marked steps."""
    for name, items in listing.sass_lines(found.artifact, found.line_info).items():
        yield f"{name}:"
        lines = (listing.Line(f"  {number:5d}  {item}", step) for number, (item, step) in enumerate(items))
        yield from listing.marked(lines, "//")


def _print_tables(found: dict[str, Any]) -> None:
    console = artifacts.console()
    console.print(f"[bold]{found['symbol']}[/] for {found['arch']}, {found['toolchain']}")
    for title in ("resources", "launches", "parameters", "fields"):
        _print_rows(title, found[title])
    _print_rows("shared memory", [_lifetime_row(row, found["shared_memory"]) for row in found["shared_memory"]])
    for name, rows in found["steps"].items():
        _print_rows(f"steps of {name}", [_step_row(row) for row in rows])
    for name, counts in found["instructions"].items():
        rows = [{"opcode": opcode, "count": count} for opcode, count in counts.items()]
        _print_rows(f"instructions of {name}", rows)
    if not sass.tool():
        click.echo(NO_SASS)
    if found["unmarked"]:
        click.echo(f"Steps are not marked: {found['unmarked']}")


def _lifetime_row(row: Json, rows: list[Json]) -> Json:
    """Returns a buffer's row, with the steps in which it is alive as a string of digits."""
    last = max(item["last"] for item in rows)
    alive = "".join(str(step) if row["first"] <= step <= row["last"] else "." for step in range(last + 1))
    return {"name": row["name"], "offset": row["offset"], "bytes": row["bytes"], "steps": alive, "alive": row["alive"]}


def _step_row(row: Json) -> Json:
    groups = ", ".join(f"{group} {count}" for group, count in row["groups"].items())
    return {"step": row["step"], "what": row["title"], "instructions": row["instructions"], "of them": groups}


def _print_rows(title: str, rows: Iterable[dict[str, Any]]) -> None:
    rows = list(rows)
    if not rows:
        return
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name, value in rows[0].items():
        table.add_column(name.replace("_", " "), justify="right" if isinstance(value, int | float) else "left")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    artifacts.print_table(table)


def _cell(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " x ".join(str(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return "" if value is None else str(value)
