"""Build: compiles kernels into a folder from which machines without the compiler launch them."""

from __future__ import annotations

from pathlib import Path

import click

from cutlass_py_attn.artifact import Folder
from cutlass_py_attn.cli import artifacts, outputs
from cutlass_py_attn.cli.outputs import OutputFolder
from cutlass_py_attn.cli.parameters import ALL, Choice, MaskName, masks_of
from cutlass_py_attn.cli.selection import ARCHS, DTYPES, KINDS, MASKS, Selection, problems
from cutlass_py_attn.cli.symbols import parse_symbol
from cutlass_py_attn.cli.target import plans_for
from cutlass_py_attn.errors import CompileError
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.tensors import DIRECTIONS

DEFAULT_HEAD_DIM = 128
MASK_HELP = "By its words, such as causal_br or window_left100.  [default: all, which is {}]"


@click.command()
@click.option("--arch", "archs", type=Choice(ARCHS), multiple=True, required=True, help="Compile target.")
@click.option("--symbol", "symbols", multiple=True, help="A kernel by its symbol, in place of the options below.")
@click.option("--problem", "names", multiple=True, metavar="NAME|FILE.json",
              help="The kernels of a problem (words: bench --help; append_... and merge_...: export --help), in place "
              "of the options below.")  # fmt: skip
@click.option("--direction", "directions", type=Choice(DIRECTIONS), multiple=True,
              help="Of --problem.  [default: both; the forward alone for few queries]")  # fmt: skip
@click.option("--kind", type=Choice([*KINDS, ALL]), help="Default: all.")
@click.option("--dtype", "dtypes", type=Choice(list(DTYPES)), multiple=True, help="Default: all.")
@click.option("--head-dim", "head_dims", type=click.IntRange(1), multiple=True, help=f"Default: {DEFAULT_HEAD_DIM}.")
@click.option("--mask", "masks", type=MaskName(), multiple=True, help=MASK_HELP.format(", ".join(MASKS)))
@click.option("--deterministic", is_flag=True, help="Backward kernels whose query gradient is repeatable.")
@click.option("-o", "--output", type=OutputFolder(), required=True)
def build(
    *,
    archs: tuple[str, ...],
    symbols: tuple[str, ...],
    names: tuple[str, ...],
    directions: tuple[str, ...],
    kind: str | None,
    dtypes: tuple[str, ...],
    head_dims: tuple[int, ...],
    masks: tuple[str, ...],
    deterministic: bool,
    output: Path,
) -> None:
    """Compile kernels into a folder: <arch>/<symbol>.ptx, .cubin and .json.

    Options may be repeated; every combination is built. No GPU is needed. Kernels with other features (bias, dropout,
    variable length, grouped heads, two head dims) are named by --problem, or by --symbol, which is `plan.symbol` and
    part of the message about a missing kernel. For an H100 or H200 build both sm_90a and sm_90. There are component
    GEMMs of head dims up to 256 alone.
    """
    selection = Selection(
        kinds=KINDS if kind in (None, ALL) else (kind,),
        dtypes=tuple(DTYPES[short] for short in dtypes or DTYPES),
        head_dims=head_dims or (DEFAULT_HEAD_DIM,),
        masks=masks_of(masks) or MASKS,
        deterministic=deterministic,
    )
    if (symbols or names) and (kind or dtypes or head_dims or masks or deterministic):
        raise click.UsageError(
            "--symbol and --problem name whole kernels: --kind, --dtype, --head-dim, --mask and --deterministic cannot "
            "be combined with them; leave them out, or build in two commands"
        )
    if directions and not names:
        raise click.UsageError("--direction belongs to --problem: use --kind, or name a problem")
    of_problems: list[Plan] = []
    if symbols or names:
        plans = [parse_symbol(symbol, arch) for arch in archs for symbol in symbols]
        chosen = problems(names, directions) if names else []
        of_problems = [plans_for(problem, arch)[0] for arch in archs for problem in chosen]
        plans += of_problems
    else:
        plans = [plan for arch in archs for plan in selection.plans(arch)]
    with outputs.writing(output):
        made, failures = artifacts.obtain(plans, artifacts.compiler(), keep=Folder(output).put)
    artifacts.show(made)
    outputs.show_slow_roads(of_problems)
    click.echo(f"{outputs.counted(len(made), 'kernel')} in {output}")
    if failures:
        raise CompileError("\n".join(failures))
