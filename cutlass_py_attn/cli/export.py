"""Export: compiles problems' kernels into a bundle, or a C library, that programs without Python launch from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.bundle.files import Bundle, export_bundle, export_library
from cutlass_py_attn.cli import artifacts
from cutlass_py_attn.cli.outputs import OutputFolder, counted, writing
from cutlass_py_attn.cli.parameters import Archs, Choice
from cutlass_py_attn.cli.selection import problems
from cutlass_py_attn.launch.arch import ARCHITECTURES
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.tensors import DIRECTIONS


@click.command()
@click.option("--problem", "names", multiple=True, required=True, metavar="NAME|FILE.json",
              help="A name, like bf16_d128_s4096_b2_h16_causal (words: bench --help), or a JSON file. Of a library "
              "also append_bf16_d128, append_bf16_d128_e4m3, append_bf16_d128_e4m3_row, append_bf16_d512v64_e4m3_tile, "
              "merge_bf16_d128 and merge_bf16_d128_varlen.")  # fmt: skip
@click.option("--direction", "directions", type=Choice(DIRECTIONS), multiple=True,
              help="Default: both; the forward alone for few queries.")  # fmt: skip
@click.option("--arch", "archs", type=Archs(), multiple=True, required=True, metavar="ARCH[,ARCH...]",
              help=f"Compile targets, of {', '.join(ARCHITECTURES)}.")  # fmt: skip
@click.option(
    "--name", default="attention", show_default=True, help="Name of the C header, and prefix of its functions."
)
@click.option("--kernels", "folder", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="Take the kernels from this folder of a `build` instead of compiling them.")  # fmt: skip
@click.option("--library", "is_library", is_flag=True,
              help="Write a C library of any number of problems, which chooses among their kernels.")  # fmt: skip
@click.option("-o", "--output", type=OutputFolder(), required=True)
def export(
    *,
    names: tuple[str, ...],
    directions: tuple[str, ...],
    archs: tuple[str, ...],
    name: str,
    folder: Path | None,
    is_library: bool,
    output: Path,
) -> None:
    """Write a bundle: cubins, PTX, manifest.json and a C header that launches the kernels through the driver API.

    The kernels serve every batch size, length, number of heads and stride that the manifest's conditions allow, not
    only those of the problem. A bundle holds one problem for each direction. With --library, any number of problems
    become two files, NAME.c and NAME.h, from which any C11 compiler makes a library without other dependencies; a CMake
    package, a pkg-config file and a Rust crate are beside them. No GPU is needed.
    """
    source = artifacts.prebuilt(folder) if folder else artifacts.compiler()

    def artifact(build: Build) -> Artifact:
        return source(build)[0]

    chosen: list[Any] = problems(names, directions)  # export_bundle refuses appends and merges
    targets = [arch for text in archs for arch in text.split(",")]
    write = export_library if is_library else export_bundle
    with writing(output):
        made = write(output, chosen, targets, name=name, kernels=artifact)
    _show(made)


def _show(made: Bundle) -> None:
    for item in made.manifest["problems"]:
        for target in item["targets"]:
            click.echo(f"{item['direction']} for {target['arch']}: {target['symbol']}; {target['reason']}")
    total = sum(facts["bytes"] for facts in made.manifest["files"].values())
    click.echo(f"{counted(len(made.manifest['files']) + 1, 'file')}, {total / 2**10:.0f} KiB, in {made.path}")
