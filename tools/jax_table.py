"""JAX table: what tools/bench_jax.py has measured, as it prints it and as docs/jax.md shows it."""

from __future__ import annotations

from typing import Final

from tools import record

RESULTS: Final = "tools/bench/results/jax.json"
HEADINGS: Final = ("| case, in ms | ours | cuDNN | ours, both | cuDNN, both |", "| --- | --- | --- | --- | --- |")
NUMBERS: Final = ("ours_ms", "cudnn_ms", "ours_both_ms", "cudnn_both_ms")


def row(found: record.Json) -> str:
    """One case: the forward, then forward and backward together."""
    mask = "causal" if found["is_causal"] else "full"
    sizes = f"batch {found['batch']}, {found['tokens']} tokens, {found['heads']} heads of {found['head_dim']}"
    numbers = ("refused" if found[name] is None else f"{found[name]:.3f}" for name in NUMBERS)
    return f"| {found['dtype']}, {mask}, {sizes} | {' | '.join(numbers)} |"


def table(run: record.Json) -> str:
    """A run, with what it ran on."""
    place = f"{run['gpu']} ({run['driver']}), JAX {run['jax']}, {run['date'][:10]}, commit {run['commit'][:12]}"
    return "\n".join([f"{place}:", "", *HEADINGS, *map(row, run["rows"])])
