"""Plan rows: the sm90 tiles of the tables, and whether the repository has a measurement of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from cutlass_py_attn.kernels.problem_kind import ProblemKind
from cutlass_py_attn.kernels.sm90_family import tiles as tile_tables
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.problem import spec
from tools.release import record

LOG: Final = "tools/bench/results/plans.jsonl"
# Cases that together use every tile of the tables.
CASES: Final[dict[str, tuple[str, ...]]] = {
    "forward": (
        "bf16_d32_s8192_b4_h32_causal",
        "bf16_d32_s197_b256_h12_full",
        "bf16_d64_s8192_b4_h32_causal",
        "bf16_d64_s197_b256_h12_full",
        "bf16_d96_s8192_b4_h16_causal",
        "bf16_d96_s197_b256_h12_full",
        "bf16_d128_s8192_b4_h16_causal",
        "bf16_d256_s8192_b4_h8_causal",
        "bf16_d512_s8192_b1_h16_full",
        "bf16_d576v512_q1_s8192_b64_h128k1_full_mla",
        "bf16_d64_s4096_b4_h32_full_alibi",
        "bf16_d64_s16384_b2_h32_causal_window1024",
        "bf16_d96_s16384_b2_h16_causal_window1024",
        "e4m3_d64_s8192_b4_h32_full",
        "e4m3_d128_s8192_b4_h16_full",
        "e4m3_d256_s8192_b4_h8_full",
        "e4m3_d64_s16384_b2_h32_causal_window1024",
        "e4m3_d128_s16384_b2_h16_causal_window1024",
        "bf16_d64_q2048_s8192_b8_h32k8_causal_br_paged16_kv8_descalehead",
        "bf16_d128_q2048_s8192_b8_h32k8_causal_br_paged16_kv8_descalehead",
        "bf16_d256_q2048_s8192_b4_h16k4_causal_br_paged16_kv8_descalehead",
        "bf16_d64_q2048_s8192_b8_h32k8_causal_br_window1024_paged16_kv8_descalehead",
        "bf16_d128_q2048_s8192_b8_h32k8_causal_br_window1024_paged16_kv8_descalehead",
        "bf16_d64_s8192_b4_h32_full_ranges11causal",
        "bf16_d128_s8192_b4_h16_full_ranges11causal",
        "bf16_d256_s8192_b4_h8_full_ranges11causal",
    ),
    "backward": (
        "bf16_d32_s8192_b4_h32_full",
        "bf16_d32_s8192_b4_h32_causal",
        "bf16_d64_s8192_b4_h32_full",
        "bf16_d64_s8192_b4_h32_causal",
        "bf16_d64_s64_b64_h16_full",
        "bf16_d64_s64_b64_h16_causal",
        "bf16_d64_s256_b1_h16_full",
        "bf16_d64_s256_b1_h16_causal",
        "bf16_d64_s512_b1_h16_full",
        "bf16_d64_s512_b1_h16_causal",
        "bf16_d96_s512_b1_h16_full",
        "bf16_d128_s512_b1_h16_full",
        "bf16_d64_s512_b64_h16_full",
        "bf16_d64_s512_b64_h16_causal",
        "bf16_d64_s8192_b4_h32_full_deterministic",
        "bf16_d64_s64_b64_h16_full_deterministic",
        "bf16_d64_s256_b1_h16_full_deterministic",
        "bf16_d128_s512_b1_h16_full_deterministic",
        "bf16_d128_s128_b64_h16_full",
        "bf16_d128_s128_b4_h16k4_full",
        "bf16_d96_s8192_b4_h16_full",
        "bf16_d96_s512_b64_h16_causal",
        "bf16_d128_s512_b64_h16_causal",
        "bf16_d128_s512_b64_h16_causal_dropout0.1",
        "bf16_d128_s8192_b4_h16_causal",
        "bf16_d192v128_s8192_b4_h10_causal",
        "bf16_d64_s8192_b2_h32k4_causal",
        "bf16_d96_s8192_b2_h32k4_causal",
        "bf16_d128_s8192_b2_h32k4_causal",
        "bf16_d128_s8192_b2_h32k4_causal_dropout0.1",
        "bf16_d192v128_s8192_b2_h32k4_causal",
        "bf16_d192_s8192_b4_h10_full",
        "bf16_d256_s8192_b4_h8_causal",
        "bf16_d512_s8192_b1_h16_full",
        "bf16_d64_s4096_b4_h16_full_bias",
        "bf16_d96_s4096_b4_h16_full_bias",
        "bf16_d128_s4096_b4_h16_full_bias",
        "bf16_d64_s64_b64_h16_full_bias",
        "bf16_d96_s512_b64_h16_causal_bias",
        "bf16_d128_s512_b64_h16_causal_bias",
        "bf16_d64_s4096_b2_h16k4_causal_bias",
        "bf16_d96_s4096_b2_h16k4_causal_bias",
        "bf16_d128_s4096_b2_h16k4_causal_bias",
        "bf16_d64_s8192_b4_h32_full_ranges11causal",
        "bf16_d96_s8192_b4_h16_full_ranges11causal",
        "bf16_d128_s8192_b4_h16_full_ranges11causal",
    ),
}
REMEDY: Final = "run tools.tuning.search_plans on a GPU, with --record"

TableKey = tuple[str, int]


def rows() -> Iterator[tuple[TableKey, TileConfig]]:
    """Yields (table name, widest head dim) and tile of every row of the sm90 tables; shared tables occur once.

    The tiles leave their options open.
    """
    seen: set[int] = set()
    for name, table in tile_tables.SM90.items():
        for head_dim, listed in table.items():
            if id(listed) not in seen:
                seen.add(id(listed))
                tiles = dict.fromkeys(replace(row.tile, options=None) for row in listed)
                yield from (((name, head_dim), tile) for tile in tiles)


def name_of(key: TableKey, tile: TileConfig) -> str:
    """Returns a tile of the tables as it is printed."""
    name, head_dim = key
    return f"tile table, sm90 {name} to head dim {head_dim}, {tile!s}"


def states(lines: Iterable[record.Json], sources: str) -> dict[str, str]:
    """Returns the state of each tile by name: measured, else a word in capitals and what to do.

    lines: lines of the record
    sources: digest of the kernel sources of this checkout

    A tile is measured by a line with a timing, of a case whose table has the tile, in a run that timed another tile.
    Its options may be any.
    """
    kept = [line for line in lines if line["family"] == "sm90" and line["median_ms"] is not None]
    runs: dict[tuple[str, str, str], int] = {}
    for line in kept:
        runs[_run(line)] = runs.get(_run(line), 0) + 1
    compared: dict[tuple[int, str], record.Json] = {}
    for line in kept:
        if runs[_run(line)] > 1:
            kind = ProblemKind.of(spec.parse(line["case"]).problem(line["direction"]))
            tile, _, _ = line["tile"].partition("-")
            compared[_identity(tile_tables.table_key(kind)), tile] = line
    found = {}
    for key, tile in rows():
        last = compared.get((_identity(key), str(tile)))
        if last is None:
            found[name_of(key, tile)] = f"UNMEASURED: no line in {LOG} compares it with another tile; {REMEDY}"
        elif last["sources"] != sources:
            found[name_of(key, tile)] = (
                f"OUTDATED: measured with other kernel sources ({last['commit'][:12]}); {REMEDY}"
            )
        else:
            rate, clock = f"{last['tflops']} TFLOP/s", f"{last['sm_clock_mhz']} MHz"
            found[name_of(key, tile)] = f"measured: {rate} in {last['case']}, {last['gpu']} at {clock}, {last['date']}"
    return found


def _run(line: record.Json) -> tuple[str, str, str]:
    return line["date"], line["case"], line["direction"]


def _identity(key: TableKey) -> int:
    """Returns the same number for all keys whose rows are one tuple."""
    name, head_dim = key
    return id(tile_tables.SM90[name][head_dim])
