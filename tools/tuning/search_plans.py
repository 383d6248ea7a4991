"""Search plans: compile tiles for cases of the benchmark on any machine, and time them in turn on a GPU.

python -m tools.tuning.search_plans --build FOLDER [--case NAME...] [--direction backward] [--family sm90]
    [--tiles TILE...]
python -m tools.tuning.search_plans --kernels FOLDER [--record FILE] [--rounds 7]

Without --case it searches the cases of plan_rows.py, which use every sm90 tile of the tables. Without --tiles it tries
a grid, without the tiles that the package refuses before they are compiled; TileConfig says how a tile is written. The
tiles of the tables are always candidates. The first of these is the reference for the results of the others.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from cutlass_py_attn.artifact import Artifact, Folder
from cutlass_py_attn.bench import harness
from cutlass_py_attn.bench.timing import SAMPLES
from cutlass_py_attn.errors import AttentionError, CompileError, Stale
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem import spec
from cutlass_py_attn.problem.tensors import DIRECTIONS
from tools.release import build_ptx, record
from tools.tuning import plan_rows, plan_space, plan_timing

ROOT = Path(__file__).resolve().parents[2]
LISTING = "search.json"  # in the folder: every candidate and its outcome
FORWARD = "forward"  # folder of the forward kernels whose results a backward reads
BUILD = "python -m tools.tuning.search_plans --build"
REMARK = re.compile(r"ptxas remark, none allowed: .*?(\(C75\d\d\))")  # the text before a remark's number
WIDTH = 100  # of an objection in a table; the listing has the whole text
NOTE = (
    "  * the tile that the planner chooses. spread: (slowest - fastest) / median; of table: rate / rate of that tile\n"
    "  in this run; error: difference from the result of the first tile, as a fraction of the tolerance"
)
Made = Artifact | str

Json = dict[str, Any]


def build(
    folder: Path, cases: Sequence[str], direction: str, family: str, arch: str, tiles: Sequence[TileConfig]
) -> Json:
    """Compiles the candidates of every case into `folder`, each tile into its own folder; returns the listing."""
    searches = {}
    for name in cases:
        case = spec.parse(name)
        problem = plan_space.searched(case, direction, family)
        searches[name] = plan_space.candidates(problem, family, arch, tiles)
    builds = [one.build for found in searches.values() for one in found if not one.objections]
    made = dict(zip(dict.fromkeys(builds), _compiled(list(dict.fromkeys(builds))), strict=True))
    for each, artifact in made.items():
        if isinstance(artifact, Artifact):
            folder_of(folder, str(TileConfig.of(each))).put(replace(artifact, ptx=""))
    if direction == "backward":
        capability = architecture(arch).compute_capability
        forwards = [planner.builds_on(spec.parse(name).problem("forward"), capability) for name in cases]
        build_ptx.build_into(folder / FORWARD, list(dict.fromkeys(forwards)))
    listing = {
        "commit": harness.commit(),
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
    """Yields an artifact for each build, or why there is none; compiles in separate processes."""
    with ProcessPoolExecutor(build_ptx.PROCESSES, mp_context=get_context("spawn")) as pool:
        for number, made in enumerate(pool.map(_attempt, builds), 1):
            name = str(TileConfig.of(builds[number - 1]))
            outcome = made if isinstance(made, str) else f"{made.registers} registers"
            print(
                f"{number:3}/{len(builds)} {builds[number - 1].symbol} {name}: {outcome}", file=sys.stderr, flush=True
            )
            yield made


def _attempt(build: Build) -> Made:
    from cutlass_py_attn.compilation.compiler import artifact_for

    try:
        return artifact_for(build)
    except CompileError as error:
        first, *findings = str(error).replace(f"{build.symbol}_0: ", "").splitlines()
        return REMARK.sub(r"\1", "; ".join(findings) or first)


def _listed(found: Sequence[plan_space.Candidate], made: Mapping[Build, Made]) -> Iterator[Json]:
    """Yields the outcome of each candidate; one with the machine code of another is not timed again."""
    seen: dict[str, str] = {}
    for one in found:
        entry: Json = {"tile": one.name, "is_row": one.is_row, "is_fitting": not one.objections}
        entry["objection"] = "; ".join(one.objections)
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
    """Returns the folder of a tile's artifacts: their symbols say tile_m and tile_n alone."""
    return Folder(folder / tile.replace(":", "_").replace(",", "_").replace("@", "_"))


def measure(folder: Path, rounds: int, log: Path | None, only: Sequence[TileConfig]) -> int:
    """Times the kernels of a folder, prints a table for each case and appends its lines to the log.

    Returns how many candidates computed a wrong result. Stale if the folder was built from other sources.
    """
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


def _is_among(tile: TileConfig, tiles: Iterable[TileConfig]) -> bool:
    return any(other in (tile, replace(tile, options=None)) for other in tiles)


def _searched(folder: Path, search: Json, rounds: int, only: Sequence[TileConfig]) -> Iterator[Json]:
    """Yields a line for each candidate that fits: its entry in the listing, and its timing if it ran.

    only: tiles to time beside the tile that the planner chooses, with any options if they leave these open; empty for
        all
    """
    case = spec.parse(search["case"])
    entries = [entry for entry in search["candidates"] if entry["is_fitting"]]
    named = {entry["tile"]: entry for entry in entries if not entry["objection"]}
    taken = next((tile for tile, entry in named.items() if entry["is_row"]), None)
    chosen = {
        tile: entry
        for tile, entry in named.items()
        if not only or tile == taken or _is_among(TileConfig.parse(tile), only)
    }
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
    """Returns the artifact of a tile that the listing names; Stale if the files are others."""
    name = f"{search['arch']}/{entry['symbol']}"
    for artifact in folder_of(folder, tile).all():
        if record.name_of(artifact.build) == name and record.sha256(artifact.cubin) == entry["cubin_sha256"]:
            return artifact
    raise Stale(f"{folder}: has no {name} of tile {tile} as it was listed; build it again")


def table(search: Json, lines: Sequence[Json], gpu: str) -> str:
    """Returns the candidates of one search as a table, the fastest first, then those without a timing and why.

    A star marks the tile that the planner chooses.
    """
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
    return "\n".join([*shown, f"  tiles that do not fit: {pruned}; {LISTING} says why", NOTE])


def _command() -> str:
    return shlex.join(["python", "-m", "tools.tuning.search_plans", *sys.argv[1:]])


def main() -> int:
    """Builds or measures; returns exit code 1 if a candidate computed a wrong result."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.tuning.search_plans", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--build", type=Path, metavar="FOLDER", help="compile the candidates into FOLDER")
    what.add_argument("--kernels", type=Path, metavar="FOLDER", help="time what --build compiled there")
    parser.add_argument("--case", nargs="+", default=[], metavar="NAME", help="cases of the benchmark, for --build")
    parser.add_argument("--direction", choices=DIRECTIONS, help="for --build; backward without it")
    parser.add_argument("--family", choices=plan_space.FAMILIES, help="for --build; sm90 without it")
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
    if given.family == "sm80" and not given.case:
        parser.error("--family sm80 needs --case NAME")
    try:
        tiles = [TileConfig.parse(text) for text in given.tiles]
        if given.kernels:
            return 1 if measure(given.kernels, given.rounds or SAMPLES, given.record, tiles) else 0
        family, direction = given.family or "sm90", given.direction or "backward"
        arch, cases = given.arch or plan_space.ARCHS[family], given.case or plan_rows.CASES[direction]
        for search in build(given.build, cases, direction, family, arch, tiles)["searches"]:
            print(built(search))
    except AttentionError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def built(search: Json) -> str:
    """Returns the outcome of one search as text: a line for each candidate that fits, a count of the others."""
    lines = [f"{search['case']} {search['direction']}, {search['family']} for {search['arch']}"]
    for entry in search["candidates"]:
        if entry["is_fitting"]:
            said = entry["objection"] or f"{entry['registers']} registers, {entry['shared_memory_bytes'] // 1024} KiB"
            lines.append(f"  {entry['tile']:<24} {said[:WIDTH]}")
    pruned = sum(not entry["is_fitting"] for entry in search["candidates"])
    return "\n".join([*lines, f"  tiles that do not fit: {pruned}; {LISTING} says why"])


if __name__ == "__main__":
    sys.exit(main())
