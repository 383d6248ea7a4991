"""Bench: measures the kernels on the GPU, and torch's kernels if torch is installed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from cutlass_py_attn.bench import harness as engine
from cutlass_py_attn.bench import timing
from cutlass_py_attn.cli.outputs import OutputFile, writing
from cutlass_py_attn.problem import spec

# \b on a line of its own keeps click from wrapping the paragraph.
_WORDS = "A case is named by these words, joined by _ in any order:\n\n\b\n" + spec.GRAMMAR.partition("\n\n")[2]


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
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def bench(
    *,
    names: tuple[str, ...],
    only: str,
    folder: Path | None,
    output: Path | None,
    samples: int,
    sustained: bool,
    as_json: bool,
) -> None:
    """Measure forward and backward by CUDA graph replays: TFLOP/s of the median, ours and peers'.

    Without --case the published set runs, in less than four minutes. Peers are torch's attention kernels; they
    read the same memory, and are skipped if torch is not installed. If a case fails, the others still run, and the
    exit code is 1.
    """
    with writing(output or Path("standard output")):
        rows, failures = engine.run(names, only, folder, output, samples, sustained=sustained)
    click.echo(json.dumps([asdict(row) for row in rows], indent=1) if as_json else engine.table(rows))
    if failures:
        raise click.ClickException("\n".join(failures))
