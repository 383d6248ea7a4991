"""JAX table: the measurements of tools/bench/bench_jax.py as Markdown, for its output and for docs/data/jax.md."""

from __future__ import annotations

from typing import Final

from tools.release import record

RESULTS: Final = "tools/bench/results/jax.json"
HEADINGS: Final = (
    "| case, times in ms | forward, ours | forward, cuDNN | forward + backward, ours | forward + backward, cuDNN |",
    "| --- | --- | --- | --- | --- |",
)
NUMBERS: Final = ("ours_ms", "cudnn_ms", "ours_both_ms", "cudnn_both_ms")


def row(found: record.Json) -> str:
    """Returns the row of one case."""
    mask = "causal" if found["is_causal"] else "full"
    sizes = f"batch {found['batch']}, {found['tokens']} tokens, {found['heads']} heads of {found['head_dim']}"
    numbers = ("refused" if found[name] is None else f"{found[name]:.3f}" for name in NUMBERS)
    return f"| {found['dtype']}, {mask}, {sizes} | {' | '.join(numbers)} |"


def host_headings(handler: str) -> tuple[str, str]:
    """Returns the headings of the table of small programs. handler: of our calls."""
    return f"| small program, times in ms | ours ({handler} handler) | cuDNN |", "| --- | --- | --- |"


def program(found: record.Json) -> str:
    """Returns the name of one small program, with its GPUs and what runs beside it."""
    place = "" if found["gpus"] == 1 else f", {found['gpus']} GPUs"
    beside = ", beside a busy thread" if found["busy_threads"] else ""
    return f"{found['program']}{place}{beside}"


def host_row(found: record.Json) -> str:
    """Returns the row of one small program."""
    numbers = ("refused" if found[name] is None else f"{found[name]:.3f}" for name in ("ours_ms", "cudnn_ms"))
    return f"| {program(found)} | {' | '.join(numbers)} |"


def table(run: record.Json) -> str:
    """Returns the tables of a run, headed by the machine, versions, date and commit. Earlier runs have one table."""
    place = f"{run['gpu']} ({run['driver']}), JAX {run['jax']}, {run['date'][:10]}, commit {run['commit'][:12]}"
    lines = [f"{place}:", "", *HEADINGS, *map(row, run["rows"])]
    if "host" in run:
        lines += ["", *host_headings(run["handler"]), *map(host_row, run["host"])]
    return "\n".join(lines)
