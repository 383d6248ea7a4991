"""Inspect: one kernel's PTX, SASS, resources, parameters, shared-memory map and instruction counts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from cutlass_py_attn import abi
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.cli import kernels, sass
from cutlass_py_attn.cli.selection import ARCHS
from cutlass_py_attn.cli.symbols import parse_symbol
from cutlass_py_attn.cli.target import default_arch, hopper_arch


@click.command()
@click.argument("symbol")
@click.option(
    "--arch",
    type=click.Choice(ARCHS),
    help="Compile target.  [default: the GPU's, else sm_90; sm_90a for the Hopper family]",
)
@click.option("--kernels", "folder", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="Take the kernel from this folder of a `build` instead of compiling it.")  # fmt: skip
@click.option("--ptx", is_flag=True, help="Print the PTX and nothing else.")
@click.option("--sass", "as_sass", is_flag=True, help="Print the SASS and nothing else.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def inspect(*, symbol: str, arch: str | None, folder: Path | None, ptx: bool, as_sass: bool, as_json: bool) -> None:
    """Show what kernel SYMBOL was compiled to; no GPU is needed.

    SYMBOL is a name that `run` lists, such as bwd_generic_bf16_d128_causal.
    """
    usual = default_arch()
    plan = parse_symbol(symbol, arch or (hopper_arch(usual) if "_hopper_" in symbol else None) or usual)
    source = kernels.prebuilt(folder) if folder else kernels.compiler()
    made = kernels.Made(plan, *source(plan.build))
    artifact = made.artifact
    if ptx:
        _print_ptx(artifact.ptx)
    elif as_sass:
        _print_sass(artifact)
    elif as_json:
        click.echo(json.dumps(facts(artifact, list(made.rows())), indent=1))
    else:
        _print_tables(facts(artifact, list(made.rows())))


def facts(artifact: Artifact, resources: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything but the texts, as a JSON object; no instruction counts without nvdisasm."""
    build = artifact.build
    instructions = sass.disassemble(artifact.cubin) if sass.tool() else {}
    return {
        "symbol": build.symbol,
        "arch": build.arch,
        "toolchain": artifact.toolchain,
        "resources": resources,
        "parameters": [asdict(parameter) for parameter in artifact.parameters],
        "fields": [
            {"name": name, "offset": offset, "bytes": size}
            for name, offset, size in abi.layout(abi.fields_of(build.kind, build.family))
        ],
        "shared_memory": [asdict(buffer) for buffer in build.shared_memory],
        "instructions": {name: sass.histogram(listing) for name, listing in instructions.items()},
    }


def _print_ptx(ptx: str) -> None:
    """Coloured on a terminal, the exact text elsewhere."""
    console = kernels.console()
    if console.is_terminal:
        console.print(Syntax(ptx, "ptx", background_color="default"))
    else:
        click.echo(ptx)


def _print_sass(artifact: Artifact) -> None:
    for name, listing in sass.disassemble(artifact.cubin).items():
        click.echo(f"{name}:")
        for number, (opcode, operands) in enumerate(listing):
            click.echo(f"  {number:5d}  {opcode:28s}{operands}")


def _print_tables(found: dict[str, Any]) -> None:
    console = kernels.console()
    console.print(f"[bold]{found['symbol']}[/] for {found['arch']}, {found['toolchain']}")
    for title in ("resources", "parameters", "fields", "shared_memory"):
        _print_rows(console, title.replace("_", " "), found[title])
    for name, counts in found["instructions"].items():
        rows = [{"opcode": opcode, "count": count} for opcode, count in counts.items()]
        _print_rows(console, f"instructions of {name}", rows)
    if not found["instructions"]:
        click.echo("No instruction counts: they need nvdisasm, pip install 'cutlass-py-attn[inspect]'.")


def _print_rows(console: Console, title: str, rows: Iterable[dict[str, Any]]) -> None:
    rows = list(rows)
    if not rows:
        return
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name, value in rows[0].items():
        table.add_column(name.replace("_", " "), justify="right" if isinstance(value, int) else "left")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console.print(table)
