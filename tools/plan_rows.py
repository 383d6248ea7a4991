"""Plan rows: the Hopper rows of the plan table, and whether each stands on a measurement that was kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from cutlass_py_attn import bench_cases, plan_table
from cutlass_py_attn.plan_table import Tile
from tools import plan_space, record

LOG: Final = "tools/bench/results/plans.jsonl"
# Cases that between them are served by every row.
CASES: Final[dict[str, tuple[str, ...]]] = {
    "forward": (
        "bf16_d64_s8192_b4_h32_causal",
        "bf16_d96_s8192_b4_h16_causal",
        "bf16_d128_s8192_b4_h16_causal",
        "bf16_d256_s8192_b4_h8_causal",
        "bf16_d64_s4096_b4_h32_full_alibi",
        "bf16_d64_s16384_b2_h32_causal_window1024",
    ),
    "backward": (
        "bf16_d64_s8192_b4_h32_full",
        "bf16_d64_s8192_b4_h32_causal",
        "bf16_d64_s512_b64_h16_full",
        "bf16_d64_s512_b64_h16_causal",
        "bf16_d96_s8192_b4_h16_full",
        "bf16_d96_s512_b64_h16_causal",
        "bf16_d128_s512_b64_h16_causal",
        "bf16_d128_s512_b64_h16_causal_dropout0.1",
        "bf16_d128_s8192_b4_h16_causal",
        "bf16_d192v128_s8192_b4_h10_causal",
        "bf16_d256_s8192_b4_h8_causal",
    ),
}
REMEDY: Final = "run tools.search_plans on a GPU, with --record"

Place = tuple[str, int]


def rows() -> Iterator[tuple[Place, Tile]]:
    """Every row of the Hopper family: the name of its table and the widest head dim it serves, and its tile. Rows that
    one table has from another count once."""
    seen: set[int] = set()
    for name, table in plan_table.HOPPER.items():
        for head_dim, tiles in table.items():
            if id(tiles) not in seen:
                seen.add(id(tiles))
                yield from (((name, head_dim), tile) for tile in tiles)


def name_of(place: Place, tile: Tile) -> str:
    """A row as it is printed."""
    name, head_dim = place
    return f"plan table, hopper {name} to head dim {head_dim}, {plan_space.text_of(tile)}"


def states(lines: Iterable[record.Json], sources: str) -> dict[str, str]:
    """State of each row by name: measured, else a word in capitals and what to do. sources: the digest of today's.

    A row is measured by a line of a case that the row serves, with numbers, in a run that timed another tile too.
    """
    kept = [line for line in lines if line["family"] == "hopper" and line["median_ms"] is not None]
    runs: dict[tuple[str, str, str], int] = {}
    for line in kept:
        runs[_run(line)] = runs.get(_run(line), 0) + 1
    compared: dict[tuple[int, str], record.Json] = {}
    for line in kept:
        if runs[_run(line)] > 1:
            place = plan_table.hopper_place(bench_cases.parse(line["case"]).problem(line["direction"]))
            compared[_identity(place), line["tile"]] = line
    found = {}
    for place, tile in rows():
        last = compared.get((_identity(place), plan_space.text_of(tile)))
        if last is None:
            found[name_of(place, tile)] = f"UNMEASURED: no line in {LOG} holds it against another tile; {REMEDY}"
        elif last["sources"] != sources:
            found[name_of(place, tile)] = (
                f"OUTDATED: measured with other kernel sources ({last['commit'][:12]}); {REMEDY}"
            )
        else:
            rate, clock = f"{last['tflops']} TFLOP/s", f"{last['sm_clock_mhz']} MHz"
            found[name_of(place, tile)] = (
                f"measured: {rate} in {last['case']}, {last['gpu']} at {clock}, {last['date']}"
            )
    return found


def _run(line: record.Json) -> tuple[str, str, str]:
    return line["date"], line["case"], line["direction"]


def _identity(place: Place) -> int:
    """The same for all places whose rows are one tuple."""
    name, head_dim = place
    return id(plan_table.HOPPER[name][head_dim])
