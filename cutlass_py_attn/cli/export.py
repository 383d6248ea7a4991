"""Export: compiles a problem's kernels into a bundle that programs without Python launch from."""

from __future__ import annotations

from pathlib import Path

import click

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.bundle.files import Bundle, export_bundle
from cutlass_py_attn.cli import artifacts
from cutlass_py_attn.cli.selection import problems
from cutlass_py_attn.plan.arch import ARCHITECTURES
from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.problem.tensors import DIRECTIONS


@click.command()
@click.option("--problem", "names", multiple=True, required=True, metavar="NAME|FILE.json",
              help="A name, like bf16_d128_s4096_b2_h16_causal (words: bench --help), or a JSON file.")  # fmt: skip
@click.option("--direction", "directions", type=click.Choice(DIRECTIONS), multiple=True, help="Default: both.")
@click.option("--arch", "archs", multiple=True, required=True, metavar="ARCH[,ARCH...]",
              help=f"Compile targets, of {', '.join(ARCHITECTURES)}.")  # fmt: skip
@click.option(
    "--name", default="attention", show_default=True, help="Name of the C header, and prefix of its functions."
)
@click.option("--kernels", "folder", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="Take the kernels from this folder of a `build` instead of compiling them.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), required=True)
def export(
    *,
    names: tuple[str, ...],
    directions: tuple[str, ...],
    archs: tuple[str, ...],
    name: str,
    folder: Path | None,
    output: Path,
) -> None:
    """Write a bundle: cubins, PTX, manifest.json and a C header that launches the kernels through the driver API.

    The kernels serve every batch size, length, number of heads and stride that the manifest's conditions allow, not
    only those of the problem. A bundle holds one problem for each direction. No GPU is needed.
    """
    source = artifacts.prebuilt(folder) if folder else artifacts.compiler()

    def artifact(build: Build) -> Artifact:
        return source(build)[0]

    chosen = [problem for text in names for problem in problems(text, directions or DIRECTIONS)]
    targets = [arch for text in archs for arch in text.split(",")]
    made = export_bundle(output, chosen, targets, name=name, kernels=artifact)
    _show(made)


def _show(made: Bundle) -> None:
    for direction, item in made.manifest["passes"].items():
        for target in item["targets"]:
            click.echo(f"{direction} for {target['arch']}: {target['symbol']}; {target['reason']}")
    total = sum(facts["bytes"] for facts in made.manifest["files"].values())
    click.echo(f"{len(made.manifest['files']) + 1} files, {total / 2**10:.0f} KiB, in {made.path}")
