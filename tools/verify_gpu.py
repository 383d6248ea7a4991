"""Verify GPU: runs every committed kernel on this machine's GPU and records those that pass; needs no compiler."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cutlass_py_attn import driver, judge, planner
from cutlass_py_attn.artifact import Artifact, Folder
from cutlass_py_attn.errors import AttentionError, Stale
from cutlass_py_attn.hopper import MULTICAST_LENGTH
from cutlass_py_attn.plan import Build, build_from
from tests.gpu import cases, check, decodes, drawn_check, memory, rooms
from tools import record

ROOT = Path(__file__).resolve().parent.parent
REPEATS = 20
REPEAT_SIZES = (2, 3, 515, 640)
LONG_SIZES = (1, 3, MULTICAST_LENGTH, MULTICAST_LENGTH)
HASH_SEEDS = (1, 2)
ROOM_TILES = (1, 2, 40)

Results = dict[str, Any]


def verify(artifact: Artifact, kernels: check.Kernels) -> Results:
    """cases, worst, repeats and outputs_sha256 of one kernel; AssertionError says what failed."""
    if artifact.build.family == "decode":
        return _decode(artifact.build, kernels)
    return _room(artifact.build, kernels) if artifact.build.kind == "room" else _fused(artifact.build, kernels)


def _fused(build: Build, kernels: check.Kernels) -> Results:
    variant = cases.Variant(build.dtype, build.head_dim, build.head_dim_value, build.mask, build.deterministic)
    kernels = _only(build, kernels)
    suite = cases.FORWARD if build.kind == "forward" else cases.BACKWARD
    of_variant = (case for case in suite if case.variant == variant)
    chosen = [case for case in of_variant if build in planner.builds(case.problem(), build.arch)]
    assert chosen, f"{build.symbol}: the suite has no case of it"
    verdicts: list[judge.Verdict] = []
    for case in chosen:
        found = check.run(case, kernels)
        check.expect(case, found)
        verdicts += found
    repeated = cases.Case(build.kind, variant, *_repeat_sizes(build), "gaussian", 1)
    return {
        "cases": len(chosen),
        "worst": _rounded(judge.worst(verdicts)),
        "repeats": REPEATS,
        "outputs_sha256": _hashes(lambda seed: _placed(replace(repeated, seed=seed), kernels), unordered(build)),
    }


def _decode(build: Build, kernels: check.Kernels) -> Results:
    chosen = decodes.of_build(build)
    assert chosen, f"{build.symbol}: the suite has no problem of it"
    worst: dict[str, float] = {}
    for one in chosen:
        for name, error in drawn_check.expect_decode(one, kernels).items():
            worst[name] = max(worst.get(name, 0.0), error)

    def placed_with(seed: int) -> memory.Placed:
        one = replace(chosen[0], seed=seed)
        return memory.placed(one.problem(), one.arrays(), kernels)

    hashes = _hashes(placed_with, set())
    return {"cases": len(chosen), "worst": _rounded(worst), "repeats": REPEATS, "outputs_sha256": hashes}


def _repeat_sizes(build: Build) -> tuple[int, int, int, int]:
    """(batch, heads, queries, keys) of a problem that the kernel takes."""
    if build.whole_heads:
        return cases.MANY_HEADS
    return LONG_SIZES if build.multicast else REPEAT_SIZES


def _only(build: Build, kernels: check.Kernels) -> check.Kernels:
    """The kernels without those of the same direction that stand before or behind this one."""

    def given(wanted: Build) -> Artifact:
        if wanted.kind == build.kind and wanted != build:
            raise Stale(f"{wanted.symbol}: not the kernel that is verified")
        return kernels(wanted)

    return given


def unordered(build: Build) -> set[str]:
    """Outputs that may differ from run to run: sums whose order the scheduler chooses."""
    is_ordered = build.kind == "forward" or build.deterministic or build.whole_heads
    return set() if is_ordered else {"grad_query"}


def _placed(case: cases.Case, kernels: check.Kernels) -> memory.Placed:
    """The kernel in guarded buffers. What the backward reads of a forward is made up here: no other kernel
    and no NumPy sum decides the bits of its results."""
    arrays = check.make(case)
    shape = case.shape
    logsumexp = np.full(shape.logsumexp, np.log(max(shape.num_keys, 1)) + 2, np.float32)
    operands = {**arrays, "output": arrays["grad_output"][:, ::-1], "logsumexp": logsumexp}
    return memory.placed(case.problem(), operands, kernels)


def _room(build: Build, kernels: check.Kernels) -> Results:
    room = cases.Room(build.room, build.family, build.dtype, build.head_dim)
    worst = 0.0
    for tiles in ROOM_TILES:
        plan = room.plan(tiles, build.arch)
        for family in ("integers", "gaussian"):
            given = rooms.operands(plan, family, tiles)
            with memory.placed_room(plan, given, kernels) as placed:
                error = rooms.relative_error(placed.run()["c"], rooms.product(plan, given))
            allowed = 0.0 if family == "integers" else rooms.ALLOWED[build.dtype]
            assert error <= allowed, f"{build.symbol} {family} {tiles} tiles: relative error {error:.2e}"
            worst = max(worst, error / rooms.ALLOWED[build.dtype])
    many = room.plan(ROOM_TILES[-1], build.arch)

    def placed_with(seed: int) -> memory.Placed:
        return memory.placed_room(many, rooms.operands(many, "gaussian", seed), kernels)

    return {
        "cases": 2 * len(ROOM_TILES),
        "worst": _rounded({"c": worst}),
        "repeats": REPEATS,
        "outputs_sha256": _hashes(placed_with, set()),
    }


def _hashes(placed_with: Callable[[int], memory.Placed], free: set[str]) -> dict[str, str]:
    """Hash of all repeatable outputs for each seed; REPEATS launches of the first must agree in every bit."""
    found = {}
    for seed in HASH_SEEDS:
        with placed_with(seed) as placed:
            first = _repeatable(placed.run(), free)
            repeats = REPEATS if seed == HASH_SEEDS[0] else 0
            for number in range(repeats):
                assert _repeatable(placed.run(), free) == first, f"launch {number + 2} gave other bits"
        found[f"seed{seed}"] = record.sha256(b"".join(first[name] for name in sorted(first)))
    return found


def _repeatable(outputs: dict[str, check.Array], free: set[str]) -> dict[str, bytes]:
    for name, array in outputs.items():
        assert not np.isnan(array).any(), f"{name} has elements that were never written"
    return {name: array.tobytes() for name, array in outputs.items() if name not in free}


def _rounded(worst: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in worst.items()}


def about_this_run(sanitizer: Path | None) -> Results:
    """The fields that all lines of a run share."""
    found = {
        "suite_sha256": record.suite_sha256(ROOT),
        "loaded_as": "cubin",
        **record.about_run(),
        "commit": _commit(),
    }
    return found | ({"sanitizer": json.loads(sanitizer.read_text())} if sanitizer else {})


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return "unknown" if done.returncode else done.stdout.strip()


def main() -> int:
    """Verify every kernel of the manifest; a line for each that passed; exit code 1 when one did not."""
    parser = argparse.ArgumentParser(prog="verify_gpu", description=__doc__)
    parser.add_argument("--kernels", type=Path, required=True, help="folder of cubins (build_ptx.py -o FOLDER)")
    parser.add_argument("--output", type=Path, default=ROOT / record.LOG, help="the log to append to")
    parser.add_argument("--sanitizer", type=Path, help='JSON of compute-sanitizer errors: {"memcheck": 0, ...}')
    parser.add_argument("--only", default="", metavar="TEXT", help="kernels whose name contains TEXT")
    given = parser.parse_args()
    manifest = record.read_manifest(ROOT)
    if not record.is_sealed(manifest) or not manifest["kernels"]:
        print(f"{record.MANIFEST}: missing, or its seal does not fit; run tools/build_ptx.py")
        return 1
    kernels = Folder(given.kernels)
    shared = about_this_run(given.sanitizer)
    names = [name for name in manifest["kernels"] if given.only in name]
    failed = 0
    with driver.device(0).current(), given.output.open("a") as log:
        for name in names:
            message, line = _line(name, manifest["kernels"][name], kernels)
            print(f"{name}: {message}", flush=True)
            failed += line is None
            log.write(json.dumps({**line, **shared}, sort_keys=True) + "\n" if line else "")
    print(f"verify_gpu: {len(names) - failed} of {len(names)} kernels passed")
    return 1 if failed else 0


def _line(name: str, entry: record.Json, kernels: Folder) -> tuple[str, Results | None]:
    """What to print of one kernel, and its own fields of the log when it passed."""
    try:
        artifact = kernels(build_from(entry["plan"]))
        found = record.sha256(artifact.cubin)
        if found != entry["cubin_sha256"]:
            return (
                f"FAILED: the folder holds cubin {found[:12]}, the manifest {entry['cubin_sha256'][:12]}",
                None,
            )
        results = verify(artifact, kernels)
    except (AssertionError, AttentionError) as error:
        return f"FAILED: {error}", None
    arch, _, symbol = name.partition("/")
    worst = ", ".join(f"{tensor} {value:.2f}" for tensor, value in results["worst"].items())
    own = {"cubin_sha256": entry["cubin_sha256"], "symbol": symbol, "arch": arch, **results}
    return f"passed {results['cases']} cases, worst {worst}", own


if __name__ == "__main__":
    sys.exit(main())
