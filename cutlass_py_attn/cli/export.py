"""Export: compiles a problem's kernels into a bundle that programs without Python launch from."""

from __future__ import annotations

import json
from pathlib import Path

import click

from cutlass_py_attn import bench_cases
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.bundle.files import Bundle, export_bundle
from cutlass_py_attn.bundle.problems import from_json
from cutlass_py_attn.cli import kernels
from cutlass_py_attn.device import ARCHITECTURES
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.plan import Build
from cutlass_py_attn.problem import DIRECTIONS, Problem


@click.command()
@click.option("--problem", "names", multiple=True, required=True, metavar="CASE|FILE.json",
              help="A case, as bf16_d128_s4096_b2_h16_causal, or a Problem as JSON; one a direction.")  # fmt: skip
@click.option("--direction", "directions", type=click.Choice(DIRECTIONS), multiple=True, help="Default: both.")
@click.option("--arch", "archs", multiple=True, required=True, metavar="ARCH[,ARCH...]",
              help=f"Compile targets, of {', '.join(ARCHITECTURES)}.")  # fmt: skip
@click.option(
    "--name", default="attention", show_default=True, help="Of the C header, and what its functions begin with."
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
    """Write a bundle: cubins, PTX, manifest.json and a C header that launches them through the driver API.

    The kernels serve any batch, lengths, heads and strides that the manifest's conditions allow, not only those of the
    problem. No GPU is needed.
    """
    source = kernels.prebuilt(folder) if folder else kernels.compiler()

    def artifact(build: Build) -> Artifact:
        return source(build)[0]

    problems = [problem for text in names for problem in _problems(text, directions or DIRECTIONS)]
    targets = [arch for text in archs for arch in text.split(",")]
    made = export_bundle(output, problems, targets, name=name, kernels=artifact)
    _show(made)


def _problems(text: str, directions: tuple[str, ...]) -> list[Problem]:
    """The problems of a case's name, or the one of a JSON file."""
    if not text.endswith(".json"):
        case = bench_cases.parse(text)
        return [case.problem(direction) for direction in case.directions if direction in directions]
    try:
        data = json.loads(Path(text).read_text())
    except (OSError, ValueError) as error:
        raise NotSupported(f"problem {text}: cannot be read ({error}); name a JSON file of a Problem") from error
    found = from_json(data)
    return [found] if found.direction in directions else []


def _show(made: Bundle) -> None:
    for direction, item in made.manifest["passes"].items():
        for target in item["targets"]:
            click.echo(f"{direction} for {target['arch']}: {target['symbol']}; {target['why']}")
    total = sum(facts["bytes"] for facts in made.manifest["files"].values())
    click.echo(f"{len(made.manifest['files']) + 1} files, {total / 2**10:.0f} KiB, in {made.path}")
