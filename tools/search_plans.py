"""Search plans: tiles for cases of the benchmark, compiled on any machine, timed beside each other on a GPU.

python -m tools.search_plans --build FOLDER [--case NAME...] [--direction backward] [--family hopper] [--tiles TILE...]
python -m tools.search_plans --kernels FOLDER [--record FILE] [--rounds 7]

Without --case it takes the cases of plan_rows.py: between them every Hopper row of the plan table serves one. Without
--tiles a grid is tried, from which goes what does not fit before it is compiled; tools/plan_space.py says how a tile is
written. The rows of the plan table are always among the candidates, the first one first: with its result those of the
others are compared.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from cutlass_py_attn import bench, bench_cases, planner
from cutlass_py_attn.artifact import Artifact, Folder
from cutlass_py_attn.bench_timing import SAMPLES
from cutlass_py_attn.device import architecture
from cutlass_py_attn.errors import AttentionError, CompileError, Stale
from cutlass_py_attn.plan import Build
from cutlass_py_attn.plan_table import Tile
from cutlass_py_attn.problem import DIRECTIONS
from tools import build_ptx, plan_rows, plan_space, plan_timing, record

ROOT = Path(__file__).resolve().parent.parent
LISTING = "search.json"  # in the folder: every candidate, and what became of it
FORWARD = "forward"  # folder of the kernels whose results a backward reads
BUILD = "python -m tools.search_plans --build"
REMARK = re.compile(r"ptxas remark, none allowed: .*?(\(C75\d\d\))")  # what stands before a remark's number
WIDTH = 100  # of an objection in a table; the listing has all of it
NOTE = (
    "  * the plan table's row. spread: (slowest - fastest) / median; of table: rate / that row's rate in this run;\n"
    "  error: distance from the first row's result, of what the judge allows"
)
Made = Artifact | str

Json = dict[str, Any]


def build(folder: Path, cases: Sequence[str], direction: str, family: str, arch: str, tiles: Sequence[Tile]) -> Json:
    """Compile the candidates of every case into `folder`, each tile in a folder of its own; the listing."""
    searches = {}
    for name in cases:
        case = bench_cases.parse(name)
        problem = plan_space.searched(case, direction, family)
        searches[name] = plan_space.candidates(problem, family, arch, tiles)
    builds = [one.build for found in searches.values() for one in found if not one.why_not]
    made = dict(zip(dict.fromkeys(builds), _compiled(list(dict.fromkeys(builds))), strict=True))
    for each, artifact in made.items():
        if isinstance(artifact, Artifact):
            folder_of(folder, plan_space.name_of(each)).put(replace(artifact, ptx=""))
    if direction == "backward":
        capability = architecture(arch).compute_capability
        forwards = [planner.builds_on(bench_cases.parse(name).problem("forward"), capability) for name in cases]
        build_ptx.build_into(folder / FORWARD, list(dict.fromkeys(forwards)))
    listing = {
        "commit": bench.commit(),
        "sources": record.sources_digest(ROOT),
        "command": _command(),
        "searches": [
            {
                "case": name,
                "direction": direction,
                "family": family,
                "arch": arch,
                "candidates": list(_listed(found, made)),
            }
            for name, found in searches.items()
        ],
    }
    (folder / LISTING).write_text(json.dumps(listing, indent=1) + "\n")
    return listing


def _compiled(builds: Sequence[Build]) -> Iterator[Made]:
    """An artifact for each build, or why there is none, by processes of their own."""
    with ProcessPoolExecutor(build_ptx.PROCESSES, mp_context=get_context("spawn")) as pool:
        for number, made in enumerate(pool.map(_attempt, builds), 1):
            name = plan_space.name_of(builds[number - 1])
            why = made if isinstance(made, str) else f"{made.registers} registers"
            print(f"{number:3}/{len(builds)} {builds[number - 1].symbol} {name}: {why}", file=sys.stderr, flush=True)
            yield made


def _attempt(build: Build) -> Made:
    from cutlass_py_attn.compiler import artifact_for

    try:
        return artifact_for(build)
    except CompileError as error:
        first, *findings = str(error).replace(f"{build.symbol}_0: ", "").splitlines()
        return REMARK.sub(r"\1", "; ".join(findings) or first)


def _listed(found: Sequence[plan_space.Candidate], made: Mapping[Build, Made]) -> Iterator[Json]:
    """What became of each candidate; one whose machine code another has already is not timed again."""
    seen: dict[str, str] = {}
    for one in found:
        entry: Json = {"tile": one.name, "is_row": one.is_row, "is_fitting": not one.why_not}
        entry["objection"] = "; ".join(one.why_not)
        artifact = made.get(one.build)
        if isinstance(artifact, str):
            entry["objection"] = artifact
        elif artifact is not None:
            digest = record.sha256(artifact.cubin)
            if digest in seen:
                entry["objection"] = f"the machine code of {seen[digest]}"
            seen.setdefault(digest, one.name)
            entry |= {
                "registers": artifact.registers,
                "allocation": artifact.allocation,
                "shared_memory_bytes": one.build.shared_memory_bytes,
                "cubin_sha256": digest,
                "symbol": one.build.symbol,
                "build": one.build.digest,
            }
        yield entry


def folder_of(folder: Path, tile: str) -> Folder:
    """Where the artifacts of a tile lie: their symbols do not say the tile."""
    return Folder(folder / tile.replace(":", "_").replace(",", "_").replace("@", "_"))


def measure(folder: Path, rounds: int, log: Path | None, only: Sequence[str]) -> int:
    """Time what the folder holds, print a table for each case and append its lines to the log; how many candidates
    gave a wrong result. Stale where the folder was built from other sources."""
    path = folder / LISTING
    if not path.is_file():
        raise Stale(f"{path}: missing; fill the folder with: {BUILD} {folder} --case NAME")
    listing = json.loads(path.read_text())
    if listing["sources"] != record.sources_digest(ROOT):
        raise Stale(f"{folder}: its kernels were built from other sources ({listing['commit']}); build it again")
    wrong = 0
    for search in listing["searches"]:
        lines = list(_searched(folder, search, rounds, only))
        about = record.about_run()
        print(table(search, lines, about["gpu"]), flush=True)
        wrong += sum(line["objection"].startswith("wrong") for line in lines)
        if log is not None:
            shared = {
                **about,
                **{name: search[name] for name in ("case", "direction", "family", "arch")},
                "commit": listing["commit"],
                "sources": listing["sources"],
                "commands": [listing["command"], _command()],
                "rounds": rounds,
            }
            record.append(log, ({**line, **shared} for line in lines))
    return wrong


def _searched(folder: Path, search: Json, rounds: int, only: Sequence[str]) -> Iterator[Json]:
    """A line for each candidate that fits: its entry in the listing, and what it gave where it ran. only: tiles to time
    beside the table's first row; none names all."""
    case = bench_cases.parse(search["case"])
    entries = [entry for entry in search["candidates"] if entry["is_fitting"]]
    named = {entry["tile"]: entry for entry in entries if not entry["objection"]}
    taken = next((tile for tile, entry in named.items() if entry["is_row"]), None)
    chosen = {tile: entry for tile, entry in named.items() if not only or tile in only or tile == taken}
    found = {tile: _artifact(folder, search, tile, entry) for tile, entry in chosen.items()}
    timings = plan_timing.measure(case, search["direction"], found, Folder(folder / FORWARD), rounds)
    for entry in entries:
        timing = timings.get(entry["tile"], plan_timing.Timing(entry["objection"] or "not asked for"))
        rate = case.flops(search["direction"]) / timing.median_ms / 1e9 if timing.median_ms else None
        yield {
            **entry,
            **asdict(timing),
            "tflops": rate and round(rate, 2),
            "is_taken": entry["tile"] == taken,
        }


def _artifact(folder: Path, search: Json, tile: str, entry: Json) -> Artifact:
    """The artifact of a tile as the listing has it; Stale where the files are others."""
    name = f"{search['arch']}/{entry['symbol']}"
    for artifact in folder_of(folder, tile).all():
        if record.name_of(artifact.build) == name and record.sha256(artifact.cubin) == entry["cubin_sha256"]:
            return artifact
    raise Stale(f"{folder}: has no {name} of tile {tile} as it was listed; build it again")


def table(search: Json, lines: Sequence[Json], gpu: str) -> str:
    """The candidates of one search, the fastest first, a star before the row that the plan table takes; behind them
    those without numbers, and why."""
    measured = sorted((line for line in lines if line["median_ms"] is not None), key=lambda line: line["median_ms"])
    taken = next((line for line in measured if line["is_taken"]), None)
    shown = [
        f"{search['case']} {search['direction']}, {search['family']} for {search['arch']}, on {gpu}",
        f"  {'tile':<24} {'TFLOP/s':>8} {'ms':>9} {'spread':>7} {'MHz':>5} {'regs':>4} {'KiB':>4} of table  error",
    ]
    for line in measured:
        ratio = f"{taken['median_ms'] / line['median_ms']:8.3f}" if taken else f"{'-':>8}"
        shown.append(
            f"{'*' if line['is_taken'] else ' '} {line['tile']:<24} {line['tflops']:8.1f} {line['median_ms']:9.4f} "
            f"{line['spread']:6.1%} {line['sm_clock_mhz'] or '-':>5} {line['registers']:4} "
            f"{line['shared_memory_bytes'] // 1024:4} {ratio} {line['error']:6.2f}"
        )
    shown += [f"  {line['tile']:<24} {line['objection'][:WIDTH]}" for line in lines if line["median_ms"] is None]
    pruned = sum(not entry["is_fitting"] for entry in search["candidates"])
    return "\n".join([*shown, f"  {pruned} more tiles do not fit; {LISTING} says why", NOTE])


def _command() -> str:
    return shlex.join(["python", "-m", "tools.search_plans", *sys.argv[1:]])


def main() -> int:
    """Build or measure; exit code 1 where a candidate gave a wrong result."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.search_plans", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--build", type=Path, metavar="FOLDER", help="compile the candidates into FOLDER")
    what.add_argument("--kernels", type=Path, metavar="FOLDER", help="time what --build has put there")
    parser.add_argument("--case", nargs="+", default=[], metavar="NAME", help="cases of the benchmark, for --build")
    parser.add_argument("--direction", choices=DIRECTIONS, help="for --build; backward without it")
    parser.add_argument("--family", choices=plan_space.FAMILIES, help="for --build; hopper without it")
    parser.add_argument("--arch", help="target, for --build; the family's on an H200 without it")
    parser.add_argument(
        "--tiles", nargs="+", default=[], metavar="TILE", help="instead of the grid; of --kernels' table"
    )
    parser.add_argument(
        "--rounds", type=int, help=f"timed launches of each candidate, for --kernels; {SAMPLES} without it"
    )
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="append a JSON line for each candidate, for --kernels"
    )
    given = parser.parse_args()
    others = ("case", "direction", "family", "arch") if given.kernels else ("rounds", "record")
    if idle := [f"--{name}" for name in others if getattr(given, name)]:
        parser.error(
            f"{', '.join(idle)} cannot be given here: --build decides what is timed, --kernels how; leave it out"
        )
    if given.family == "generic" and not given.case:
        parser.error("--family generic needs --case NAME")
    try:
        tiles = [plan_space.parse_tile(text) for text in given.tiles]
        if given.kernels:
            names = [plan_space.text_of(tile) for tile in tiles]
            return 1 if measure(given.kernels, given.rounds or SAMPLES, given.record, names) else 0
        family, direction = given.family or "hopper", given.direction or "backward"
        arch, cases = given.arch or plan_space.ARCHS[family], given.case or plan_rows.CASES[direction]
        for search in build(given.build, cases, direction, family, arch, tiles)["searches"]:
            print(built(search))
    except AttentionError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def built(search: Json) -> str:
    """What became of the candidates of one search: a line for each that fits, a count of the others."""
    lines = [f"{search['case']} {search['direction']}, {search['family']} for {search['arch']}"]
    for entry in search["candidates"]:
        if entry["is_fitting"]:
            said = entry["objection"] or f"{entry['registers']} registers, {entry['shared_memory_bytes'] // 1024} KiB"
            lines.append(f"  {entry['tile']:<24} {said[:WIDTH]}")
    pruned = sum(not entry["is_fitting"] for entry in search["candidates"])
    return "\n".join([*lines, f"  {pruned} more tiles do not fit; {LISTING} says why"])


if __name__ == "__main__":
    sys.exit(main())
