"""Cache: shows and clears the disk cache of compiled kernels."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from rich.table import Table

from cutlass_py_attn.cli.artifacts import print_table
from cutlass_py_attn.cli.outputs import counted, writing
from cutlass_py_attn.compilation import cache_folder
from cutlass_py_attn.compilation.cache import MAX_BYTES

KIB, MIB = 1 << 10, 1 << 20


@click.group()
def cache() -> None:
    """Show or clear the disk cache of compiled kernels."""


@cache.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def show(*, as_json: bool) -> None:
    """List the cached kernels, with their sizes and the compiler that made them."""
    folder = cache_folder.user_folder()
    entries = sorted(cache_folder.entries(folder), key=lambda entry: (entry.symbol, entry.arch, entry.toolchain))
    total = sum(entry.bytes for entry in entries)
    kernels = [entry for entry in entries if entry.symbol]
    if as_json:
        listed = [asdict(entry) for entry in kernels]
        report = {"folder": str(folder), "bytes": total, "max_bytes": MAX_BYTES, "kernels": listed}
        click.echo(json.dumps(report, indent=1))
        return
    if kernels:
        table = Table("kernel", "target", "compiler", box=None, pad_edge=False)
        table.add_column("KiB", justify="right")
        for entry in kernels:
            table.add_row(entry.symbol, entry.arch, entry.toolchain, f"{entry.bytes / KIB:.0f}")
        print_table(table)
    click.echo(
        f"{counted(len(kernels), 'kernel')}, {total / MIB:.1f} of at most {MAX_BYTES / MIB:.0f} MiB, in {folder}"
    )


@cache.command()
def clear() -> None:
    """Delete every entry: the next use of a kernel compiles it again."""
    folder = cache_folder.user_folder()
    deleted = 0
    if folder.exists():
        with writing(folder):
            deleted = cache_folder.clear(folder)
    click.echo(f"{counted(deleted, 'entry', 'entries')} deleted from {folder}")
