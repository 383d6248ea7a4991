"""Bench: measures the kernels on the GPU, and compares with an earlier record."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from click.core import ParameterSource

from cutlass_py_attn.bench import cases, compare, timing
from cutlass_py_attn.bench import harness as engine
from cutlass_py_attn.cli.outputs import OutputFile, writing
from cutlass_py_attn.problem import spec

_RECORD = click.Path(exists=True, dir_okay=False, path_type=Path)
_OF_A_RUN = ("folder", "output", "samples", "sustained")  # parameters that only a measurement has
# \b on a line of its own keeps click from wrapping the paragraph.
_WORDS = "A case is named by these words, joined by _ in any order:\n\n\b\n" + "\n".join(
    f"{word.shown:<40}{word.meaning}" for word in spec.WORDS
)


@click.command(epilog=_WORDS)
@click.option(
    "--case", "names", multiple=True, help="Like bf16_d128_s8192_b4_h16_causal (words below); may be repeated."
)
@click.option("--only", default="", metavar="PATTERN", help="Cases whose name matches this regular expression.")
@click.option("--kernels", "folder", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="Use the kernels in this folder of a `build`; nothing is compiled.")  # fmt: skip
@click.option("-o", "--output", type=OutputFile(), help="Write JSON there.")
@click.option("--samples", type=click.IntRange(5), default=timing.SAMPLES, show_default=True)
@click.option("--sustained", is_flag=True, help=f"{engine.SUSTAINED[0].upper()}{engine.SUSTAINED[1:]}.")
@click.option("--compare", "before", type=_RECORD, metavar="FILE",
              help="Compare our rates with this file of an earlier `bench -o`; exit code 1 if a row is missing or "
                   f"more than {compare.TOLERANCE:.0%} slower.")  # fmt: skip
@click.option("--rows", "record", type=_RECORD, metavar="FILE",
              help="Take the rows from this file of an earlier `bench -o`; nothing is measured.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.pass_context
def bench(
    context: click.Context,
    *,
    names: tuple[str, ...],
    only: str,
    folder: Path | None,
    output: Path | None,
    samples: int,
    sustained: bool,
    before: Path | None,
    record: Path | None,
    as_json: bool,
) -> None:
    """Measure forward and backward by CUDA graph replays: TFLOP/s of the median.

    Without --case the published set runs. If a case fails, the others still run, and the exit code is 1.
    `python -m tools.bench.bench_peers` of the repository measures other packages' kernels in the same run.

    To compare two files: --rows NEW --compare OLD.
    """
    earlier = compare.read_rows(before) if before else []
    selected = cases.select(names, only) if names or only else ()
    failures: list[str] = []
    if record:
        _refuse_options_of_a_run(context)
        rows = [row for row in compare.read_rows(record) if not selected or row.case in selected]
    else:
        with writing(output or Path("standard output")):
            rows, failures = engine.run(names, only, folder, output, samples, sustained=sustained)
    if not as_json and not (record and before):
        click.echo(engine.table(rows))
    found = compare.compare(earlier, rows, selected) if before else []
    if as_json:
        listed = [{**asdict(each), "finding": each.finding} for each in found] if before else map(asdict, rows)
        click.echo(json.dumps(list(listed), indent=1))
    elif before:
        click.echo(compare.table(found))
    worse = [f"{each.case} {each.direction}: {each.finding}" for each in found if each.is_worse]
    if failures or worse:
        raise click.ClickException("\n".join([*failures, *worse]))


def _refuse_options_of_a_run(context: click.Context) -> None:
    given = [
        each.opts[-1]
        for each in context.command.params
        if each.name in _OF_A_RUN and context.get_parameter_source(each.name) is not ParameterSource.DEFAULT
    ]
    if given:
        raise click.UsageError(f"--rows takes the rows from a file: {', '.join(given)} must be absent; leave them out")
