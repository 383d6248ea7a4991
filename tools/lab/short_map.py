"""Short map: our time beside the best peer's for short sequences, by length, batch and heads; needs a GPU.

python -m tools.lab.short_map --build FOLDER                        compile the kernels; needs no GPU
python -m tools.lab.short_map --kernels FOLDER [--record FILE] [--only PATTERN]

A CUDA graph holds CALLS calls, so that a time is that of the kernels and not of a launch by the host. Nothing pauses
between the measurements: problems of this size do not reach the power limit. `--record
tools/bench/results/short_map.json` writes the points; `python -m tools.docs.generate` draws them.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Final

from cutlass_py_attn.api.calls import default_kernels
from cutlass_py_attn.artifact import Folder
from cutlass_py_attn.bench import cases as bench_cases
from cutlass_py_attn.bench import harness, timing
from cutlass_py_attn.errors import AttentionError
from cutlass_py_attn.problem.spec import ProblemSpec, parse
from cutlass_py_attn.runtime import driver
from tools.bench import peers
from tools.release import build_ptx, record

RESULTS: Final = "tools/bench/results/short_map.json"
LENGTHS: Final = (64, 128, 197, 256, 384, 512, 768, 1024)
BATCHES: Final = (1, 8, 64)
HEADS: Final = (4, 16)
HEAD_DIMS: Final = (64, 128)
MASKS: Final = ("full", "causal")
CALLS: Final = 10  # in a CUDA graph
SAMPLES: Final = 5


def names() -> tuple[str, ...]:
    """Returns the cases of the map."""
    listed = product(HEAD_DIMS, MASKS, LENGTHS, BATCHES, HEADS)
    return tuple(f"bf16_d{dim}_s{length}_b{batch}_h{heads}_{mask}" for dim, mask, length, batch, heads in listed)


def point(rows: Sequence[harness.Row]) -> record.Json:
    """Returns the point of a case and direction: times in microseconds; peers that refused are absent."""
    first, case = rows[0], parse(rows[0].case)
    return {
        "head_dim": case.head_dim,
        "mask": case.mask.name,
        "direction": first.direction,
        "seqlen": case.num_keys,
        "batch": case.batch,
        "heads": case.num_heads,
        "ours_us": round(first.ours_ms * 1e3, 2),
        "peers_us": {row.peer: round(row.peer_ms * 1e3, 2) for row in rows if row.peer_ms is not None},
    }


def measure(specs: Sequence[ProblemSpec], kernels: harness.Kernels) -> Iterator[Sequence[harness.Row]]:
    """Yields the rows of each case and direction; a case that fails is printed to stderr and left out."""
    gpu = driver.device(0)
    peers.compile_ahead([(case, bench_cases.directions(case)) for case in specs], gpu.compute_capability, gpu.num_sms)
    timed = functools.partial(timing.unpaused, samples=SAMPLES)
    for case in specs:
        try:
            rows = list(harness.measure_with(timed, case, kernels, CALLS, peers.measure))
        except AttentionError as error:
            print(f"{case.name}: {error}", file=sys.stderr)
            continue
        for _, of_direction in groupby(rows, lambda row: row.direction):
            yield list(of_direction)


def record_of(measured: Iterable[Sequence[harness.Row]], output: Path | None) -> record.Json:
    """Returns the machine, the peers' versions and the points; writes them after every point, if there is an output."""
    points: list[record.Json] = []
    versions: dict[str, str] = {}
    found = {**record.about_run(), "commit": harness.commit(), "peers": versions, "points": points}
    for rows in measured:
        points.append(point(rows))
        versions.update({row.peer: row.peer_version for row in rows if row.peer})
        if output:
            output.write_text(json.dumps(found, indent=1) + "\n")
    return found


def valleys(points: Iterable[record.Json], count: int = 20) -> str:
    """Returns the points where we are furthest behind the best peer, as text."""
    found = [(min(each["peers_us"].values()) / each["ours_us"], each) for each in points if each["peers_us"]]
    lines = ["best peer's time / ours, the smallest first:"]
    for ratio, each in sorted(found, key=lambda item: item[0])[:count]:
        best = min(each["peers_us"], key=each["peers_us"].__getitem__)
        sizes = f"d{each['head_dim']} s{each['seqlen']} b{each['batch']} h{each['heads']} {each['mask']}"
        lines.append(
            f"{ratio:5.2f}  {sizes:<28} {each['direction']:<8} {each['ours_us']:8.1f} us, "
            f"{best} {each['peers_us'][best]:.1f} us"
        )
    return "\n".join(lines)


def build(specs: Iterable[ProblemSpec], folder: Path) -> int:
    """Compiles the kernels of the cases into the folder; returns an exit code."""
    return build_ptx.build_into(folder, bench_cases.builds(specs, build_ptx.HOPPER))


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds the kernels, or measures the map; returns 1 if a point is missing."""
    parser = argparse.ArgumentParser(
        prog="short_map", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="compile the kernels into FOLDER, for --kernels")
    parser.add_argument("--kernels", type=Path, metavar="FOLDER", help="use what --build wrote; without it, compile")
    parser.add_argument("--record", type=Path, metavar="FILE", help=f"write the points to FILE, such as {RESULTS}")
    parser.add_argument("--only", default="", metavar="PATTERN", help="cases whose name matches this expression")
    given = parser.parse_args(arguments)
    specs = [parse(name) for name in bench_cases.select(names(), given.only)]
    if given.build:
        return build(specs, given.build)
    kernels: harness.Kernels = Folder(given.kernels) if given.kernels else default_kernels()
    found = record_of(measure(specs, kernels), given.record)
    print(valleys(found["points"]))
    return 0 if len(found["points"]) == len(specs) * 2 else 1


if __name__ == "__main__":
    sys.exit(main())
