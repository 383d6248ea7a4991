"""Verify GPU: runs every committed kernel on this machine's GPU and records those that pass; needs no compiler."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cutlass_py_attn.artifact import Artifact, Folder
from cutlass_py_attn.bench.harness import commit
from cutlass_py_attn.errors import AttentionError, Stale
from cutlass_py_attn.kernels.catalogue import kernel_of
from cutlass_py_attn.kernels.sm90_family.tile_time import MULTICAST_LENGTH
from cutlass_py_attn.launch.build import ROW_KINDS, Build, build_from
from cutlass_py_attn.launch.variants import PER_HEAD, QUERY_HEADS, WIDE
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.testing import accuracy, check, component_gemms, device_memory, guarded_check
from cutlass_py_attn.testing.cases import Case
from tests.cases import covering_cases, decode_cases, serving_cases
from tools.release import record

ROOT = Path(__file__).resolve().parents[2]
REPEATS = 20
REPEAT_SIZES = {"batch": 2, "num_heads": 3, "num_queries": 515, "num_keys": 640}
LONG_SIZES = {"batch": 1, "num_heads": 3, "num_queries": MULTICAST_LENGTH, "num_keys": MULTICAST_LENGTH}
HASH_SEEDS = (1, 2)
COMPONENT_GEMM_TILES = (1, 2, 40)

Results = dict[str, Any]
Launch = device_memory.GuardedLaunch | serving_cases.RowLaunch


def verify(artifact: Artifact, kernels: check.Kernels) -> Results:
    """Returns cases, worst, repeats and outputs_sha256 of one kernel; AssertionError says what failed."""
    build = artifact.build
    if build.kind == "component_gemm":
        return _component_gemm(build, kernels)
    if build.kind in ROW_KINDS:
        return _rows(build, kernels)
    return _decode(build, kernels) if build.family == "decode" else _fused(build, kernels)


def _fused(build: Build, kernels: check.Kernels) -> Results:
    kernels = only(build, kernels)
    chosen = fused_cases(build)
    assert chosen, f"{build.symbol}: the suite has no case for it"
    checked: list[accuracy.CheckResult] = []
    for case in chosen:
        found = check.run(case, kernels)
        check.assert_accurate(case, found)
        checked += found
    repeated = repeated_case(chosen[0], build)

    def launch_with(seed: int) -> device_memory.GuardedLaunch:
        return _synthetic_launch(repeated.replace(seed=seed), kernels)

    return {
        "cases": len(chosen),
        "worst": _rounded(accuracy.worst(checked)),
        "repeats": REPEATS,
        "outputs_sha256": _hashes(launch_with),
    }


def fused_cases(build: Build) -> list[Case]:
    """Returns the cases of the suite for which the planner selects a forward or backward kernel."""
    suite = covering_cases.FORWARD if build.kind == "forward" else covering_cases.BACKWARD
    return [case for case in suite if _is_case_of(case, build)]


def repeated_case(first: Case, build: Build) -> Case:
    """Returns a kernel's first case with the sizes with which its launches are repeated."""
    return first.replace(**_repeat_sizes(build), scale=None, num_splits_key=None, inputs="gaussian")


def _is_case_of(case: Case, build: Build) -> bool:
    """Whether the planner selects this kernel for the case, first or as a fallback."""
    spec = case.spec
    of_case = spec.dtype, spec.head_dim, spec.head_dim_value, spec.mask.name, spec.deterministic
    of_build = build.dtype, build.head_dim, build.head_dim_value, build.mask, build.deterministic
    return of_case == of_build and build in planner.builds(case.problem(), build.arch)


def _decode(build: Build, kernels: check.Kernels) -> Results:
    chosen = decode_cases.of_build(build)
    assert chosen, f"{build.symbol}: the suite has no case for it"
    worst: dict[str, float] = {}
    for case in chosen:
        for name, ratio in guarded_check.check_decode(case, kernels).items():
            worst[name] = max(worst.get(name, 0.0), ratio)

    def launch_with(seed: int) -> device_memory.GuardedLaunch:
        case = chosen[0].replace(seed=seed)
        return device_memory.guarded_launch(case.problem(), case.arrays(), kernels)

    hashes = _hashes(launch_with)
    return {"cases": len(chosen), "worst": _rounded(worst), "repeats": REPEATS, "outputs_sha256": hashes}


def _rows(build: Build, kernels: check.Kernels) -> Results:
    """Verifies an append or a merge: every byte of an append, and a merge within one unit in the last place."""
    chosen = serving_cases.of_build(build)
    assert chosen, f"{build.symbol}: the suite has no case for it"
    worst: dict[str, float] = {}
    for case in chosen:
        ratios, wrong = case.check(kernels, build.arch)
        assert not wrong, "; ".join(wrong)
        worst = {name: max(worst.get(name, 0.0), ratio) for name, ratio in ratios.items()}
    first = {seed: chosen[number % len(chosen)] for number, seed in enumerate(HASH_SEEDS)}
    hashes = _hashes(lambda seed: first[seed].launch(kernels, build.arch))
    return {"cases": len(chosen), "worst": _rounded(worst), "repeats": REPEATS, "outputs_sha256": hashes}


def _repeat_sizes(build: Build) -> dict[str, int]:
    """Returns sizes of a problem for which the planner selects the kernel."""
    if build.variant == PER_HEAD:
        return covering_cases.MANY_HEADS
    return LONG_SIZES if kernel_of(build).lengths == "long" else REPEAT_SIZES


def only(build: Build, kernels: check.Kernels) -> check.Kernels:
    """Returns `kernels` with only this one of its direction, so that no better or fallback kernel replaces it."""

    def select(wanted: Build) -> Artifact:
        if wanted.kind == build.kind and wanted != build:
            raise Stale(f"{wanted.symbol}: not the kernel under test")
        return kernels(wanted)

    return select


def unordered(plan: Plan) -> set[str]:
    """Returns the outputs that may differ from launch to launch: sums whose order the scheduler decides."""
    build = plan.build
    if build.kind != "backward" or build.deterministic or build.variant in (PER_HEAD, WIDE):
        return set()
    adds_key_gradients = build.variant == QUERY_HEADS or dict(plan.params).get("shared_key_tiles", 0) > 0
    return {"grad_query", "grad_key", "grad_value"} if adds_key_gradients else {"grad_query"}


def _synthetic_launch(case: Case, kernels: check.Kernels) -> device_memory.GuardedLaunch:
    """Returns the kernel in guarded buffers. The backward gets a synthetic output and logsumexp, so that no other
    kernel and no NumPy sum decides the bits of its results."""
    arrays, shape = case.arrays(), case.shape
    logsumexp = np.full(shape.logsumexp, np.log(max(shape.num_keys, 1)) + 2, np.float32)
    operands = {**arrays, "output": arrays["grad_output"][:, ::-1], "logsumexp": logsumexp}
    return device_memory.guarded_launch(case.problem(), operands, kernels)


def _component_gemm(build: Build, kernels: check.Kernels) -> Results:
    component_gemm = component_gemms.ComponentGemm(build.component_gemm, build.family, build.dtype, build.head_dim)
    worst = 0.0
    for tiles in COMPONENT_GEMM_TILES:
        plan = component_gemm.plan(tiles, build.arch)
        for family in ("integers", "gaussian"):
            given = component_gemms.operands(plan, family, tiles)
            with device_memory.guarded_component_gemm(plan, given, kernels) as guarded:
                error = component_gemms.relative_error(guarded.run()["c"], component_gemms.product(plan, given))
            allowed = 0.0 if family == "integers" else component_gemms.ALLOWED[build.dtype]
            assert error <= allowed, f"{build.symbol} {family} {tiles} tiles: relative error {error:.2e}"
            worst = max(worst, error / component_gemms.ALLOWED[build.dtype])
    many = component_gemm.plan(COMPONENT_GEMM_TILES[-1], build.arch)

    def launch_with(seed: int) -> device_memory.GuardedLaunch:
        return device_memory.guarded_component_gemm(many, component_gemms.operands(many, "gaussian", seed), kernels)

    return {
        "cases": 2 * len(COMPONENT_GEMM_TILES),
        "worst": _rounded({"c": worst}),
        "repeats": REPEATS,
        "outputs_sha256": _hashes(launch_with),
    }


def _hashes(launch_with: Callable[[int], Launch]) -> dict[str, str]:
    """Returns a hash of all repeatable outputs for each seed; REPEATS launches of the first must agree in every bit."""
    found = {}
    for seed in HASH_SEEDS:
        with launch_with(seed) as guarded:
            free = unordered(guarded.bound.plan)
            first = _repeatable(guarded.run(), free)
            repeats = REPEATS if seed == HASH_SEEDS[0] else 0
            for number in range(repeats):
                assert _repeatable(guarded.run(), free) == first, f"launch {number + 2} gave other bits"
        found[f"seed{seed}"] = record.sha256(b"".join(first[name] for name in sorted(first)))
    return found


def _repeatable(outputs: dict[str, check.Array], free: set[str]) -> dict[str, bytes]:
    for name, array in outputs.items():
        assert not np.isnan(array).any(), f"{name} has elements that no kernel wrote"
    return {name: array.tobytes() for name, array in outputs.items() if name not in free}


def _rounded(worst: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in worst.items()}


def about_this_run(sanitizer: Path | None) -> Results:
    """Returns the fields that all log lines of a run share."""
    found = {
        "suite_sha256": record.suite_sha256(ROOT),
        "launch_sha256": record.launch_sha256(ROOT),
        **record.about_run(),
        "commit": commit(),
    }
    return found | ({"sanitizer": json.loads(sanitizer.read_text())} if sanitizer else {})


def main() -> int:
    """Verifies every kernel of the manifest and logs those that passed; exit code 1 if one did not."""
    parser = argparse.ArgumentParser(prog="verify_gpu", description=__doc__)
    parser.add_argument("--kernels", type=Path, required=True, help="folder of cubins (build_ptx.py -o FOLDER)")
    parser.add_argument("--output", type=Path, default=ROOT / record.LOG, help="the log to append to")
    parser.add_argument("--sanitizer", type=Path, help='JSON of compute-sanitizer errors: {"memcheck": 0, ...}')
    parser.add_argument("--only", default="", metavar="TEXT", help="kernels whose name contains TEXT")
    parser.add_argument("--changed", action="store_true", help="kernels that the log does not have as verified")
    given = parser.parse_args()
    manifest = record.read_manifest(ROOT)
    if not record.is_sealed(manifest) or not manifest["kernels"]:
        print(f"{record.MANIFEST}: missing, or its seal is not the hash of its entries; run tools/release/build_ptx.py")
        return 1
    kernels = Folder(given.kernels)
    shared = about_this_run(given.sanitizer)
    names = [name for name in manifest["kernels"] if given.only in name]
    if given.changed:
        states = record.states(ROOT, manifest, record.read_log(ROOT / record.LOG), None, {})
        names = [name for name in names if not states[name].startswith("verified")]
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
    """Returns the message about one kernel, and its own fields of the log if it passed."""
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
