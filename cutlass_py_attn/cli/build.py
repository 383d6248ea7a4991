"""Build: compiles kernels into a folder that machines without the compiler launch from."""

from __future__ import annotations

from pathlib import Path

import click

from cutlass_py_attn.artifact import Folder
from cutlass_py_attn.cli import kernels
from cutlass_py_attn.cli.selection import ARCHS, DTYPES, KINDS, MASKS, Selection
from cutlass_py_attn.errors import CompileError


@click.command()
@click.option("--arch", "archs", type=click.Choice(ARCHS), multiple=True, required=True, help="Compile target.")
@click.option("--kind", type=click.Choice([*KINDS, "all"]), default="all", show_default=True)
@click.option("--dtype", "dtypes", type=click.Choice(list(DTYPES)), multiple=True, help="Default: all.")
@click.option("--head-dim", "head_dims", type=int, multiple=True, default=(128,), show_default=True)
@click.option("--mask", "masks", type=click.Choice(MASKS), multiple=True, help="Default: all.")
@click.option("--deterministic", is_flag=True, help="Backward kernels whose query gradient is repeatable.")
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), required=True)
def build(
    *,
    archs: tuple[str, ...],
    kind: str,
    dtypes: tuple[str, ...],
    head_dims: tuple[int, ...],
    masks: tuple[str, ...],
    deterministic: bool,
    output: Path,
) -> None:
    """Compile kernels into a folder: <arch>/<symbol>.ptx, .cubin and .json.

    Options that take a name may be given several times; every combination is built. No GPU is needed.
    """
    selection = Selection(
        kinds=KINDS if kind == "all" else (kind,),
        dtypes=tuple(DTYPES[short] for short in dtypes or DTYPES),
        head_dims=head_dims,
        masks=masks or MASKS,
        deterministic=deterministic,
    )
    folder = Folder(output)
    plans = [plan for arch in archs for plan in selection.plans(arch)]
    made, failures = kernels.obtain(plans, kernels.compiler())
    for item in made:
        folder.put(item.artifact)
    kernels.show(made)
    click.echo(f"{len(made)} kernels in {output}")
    if failures:
        raise CompileError("\n".join(failures))
