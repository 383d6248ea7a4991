"""Build PTX: compiles the committed kernels into ptx/ with their sealed manifest, or compares them with it."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

from cutlass_py_attn import bench_cases, masks
from cutlass_py_attn.artifact import Artifact, Folder
from cutlass_py_attn.errors import CompileError
from cutlass_py_attn.gemm import ROOMS
from cutlass_py_attn.gemm.plans import plan_room
from cutlass_py_attn.hopper import MULTICAST_LENGTH
from cutlass_py_attn.plan import Build, Plan
from cutlass_py_attn.planner import plan_backward, plan_forward
from cutlass_py_attn.problem import Problem, Shape
from tests.gpu import decodes
from tools import record

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = 2
ARCH, HOPPER_ARCH = "sm_90", "sm_90a"
HOPPER = (9, 0)  # compute capability
PTX_ARCH = "sm_80"  # the suite has the driver compile its PTX
DTYPES = ("bfloat16", "float16", "float32")
HEAD_DIMS = (64, 128)
MASKS = ("full", "causal")

Choices = tuple[Build, ...]  # builds of one kernel; the first that ptxas can make is taken


def committed_plans() -> list[Plan]:
    """The kernels that are shown and verified. Sizes decide no machine code but how blocks of the Hopper family divide
    the work where heads are short or long; one tile stands for all others."""
    plans = []
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            shape = Shape(1, 128, 128, 1, head_dim, head_dim)
            for mask in map(masks.from_name, MASKS):
                plans.append(plan_forward(Problem.dense("forward", shape, dtype, mask), ARCH))
                plans.append(plan_backward(Problem.dense("backward", shape, dtype, mask), ARCH))
    for dtype, head_dim, mask in product(DTYPES[:2], HEAD_DIMS, MASKS):
        shape = Shape(1, 1024, 1024, 1, head_dim, head_dim)
        plans.append(plan_forward(Problem.dense("forward", shape, dtype, masks.from_name(mask)), HOPPER_ARCH))
        plans.append(plan_backward(Problem.dense("backward", shape, dtype, masks.from_name(mask)), HOPPER_ARCH))
    for head_dim, form in product(HEAD_DIMS, MASKS):
        shape = Shape(64, 256, 256, 16, head_dim, head_dim)
        plans.append(plan_backward(Problem.dense("backward", shape, "bfloat16", masks.from_name(form)), HOPPER_ARCH))
    shape = Shape(1, MULTICAST_LENGTH, MULTICAST_LENGTH, 1, 128, 128)
    plans.append(plan_forward(Problem.dense("forward", shape, "bfloat16", masks.Causal()), HOPPER_ARCH))
    shape = Shape(1, 128, 128, 1, 128, 128)
    repeatable = Problem.dense("backward", shape, "bfloat16", masks.Causal()).replace(deterministic=True)
    plans.append(plan_backward(repeatable, ARCH))
    plans += decodes.shown_plans(ARCH)
    for name in ROOMS:
        plans += [plan_room(name, "generic", dtype, 128, ARCH) for dtype in ("bfloat16", "float32")]
        plans += [plan_room(name, "hopper", "bfloat16", head_dim, HOPPER_ARCH) for head_dim in HEAD_DIMS]
    return plans


def _fresh(choices: Choices) -> Artifact:
    from cutlass_py_attn.compiler import compile as compile_now

    return first_made(choices, compile_now)


def _kept(choices: Choices) -> Artifact:
    from cutlass_py_attn.compiler import artifact_for

    return first_made(choices, artifact_for)


def first_made(choices: Choices, made: Callable[[Build], Artifact]) -> Artifact:
    """Of the first build that ptxas can make; else the first one's CompileError."""
    for build in choices[:-1]:
        with contextlib.suppress(CompileError):
            return made(build)
    return made(choices[-1])


def compile_all(needed: Sequence[Choices], *, fresh: bool) -> Iterator[Artifact]:
    """An artifact for each of the needed kernels in order, by processes of their own; fresh: whatever the cache
    holds."""
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        for number, artifact in enumerate(pool.map(_fresh if fresh else _kept, needed), 1):
            print(f"{number:3}/{len(needed)} {record.name_of(artifact.build)}", file=sys.stderr, flush=True)
            yield artifact


def entries_of(plans: Sequence[Plan], artifacts: Sequence[Artifact]) -> dict[str, record.Json]:
    """Manifest entries by name."""
    pairs = zip(plans, artifacts, strict=True)
    return {record.name_of(plan.build): record.entry(plan, artifact) for plan, artifact in pairs}


def write(root: Path, plans: Sequence[Plan], artifacts: Sequence[Artifact]) -> None:
    """ptx/<arch>/<symbol>.ptx, the manifest last; PTX of kernels that are no longer committed goes."""
    entries = entries_of(plans, artifacts)
    for path in (root / "ptx").glob("*/*.ptx"):
        if path.relative_to(root / "ptx").with_suffix("").as_posix() not in entries:
            path.unlink()
    for artifact in artifacts:
        path = root / "ptx" / f"{record.name_of(artifact.build)}.ptx"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(artifact.ptx.encode())
    (root / record.MANIFEST).write_text(record.text_of(record.sealed(entries)))


def drifted(manifest: record.Json, entries: dict[str, record.Json]) -> list[str]:
    """A line for each kernel that compiling gives otherwise than the manifest says."""
    committed = manifest["kernels"]
    lines = [f"UNLISTED {name}" for name in entries if name not in committed]
    lines += [f"DRIFTED {name}: no plan gives it any more" for name in committed if name not in entries]
    for name in entries.keys() & committed.keys():
        if changed := record.difference(committed[name], entries[name]):
            lines.append(f"DRIFTED {name}: {changed}")
    return sorted(lines)


def main() -> int:
    """Build, check, or build the suite's or the benchmark's kernels; exit code 1 when --check finds a difference."""
    parser = argparse.ArgumentParser(prog="build_ptx", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compile and compare with ptx/; writes nothing there")
    parser.add_argument("--suite", type=Path, metavar="FOLDER", help="compile what tests/gpu needs into FOLDER")
    parser.add_argument(
        "--family", choices=("generic", "hopper"), default="generic", help="of the suite's fused kernels"
    )
    parser.add_argument("--bench", type=Path, metavar="FOLDER", help="compile what the benchmark needs into FOLDER")
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="put the committed cubins into FOLDER")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree whose ptx/ is meant")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="kernels whose name contains TEXT, for -o and --bench"
    )
    given = parser.parse_args()
    if given.only and not (given.output or given.bench):
        parser.error("--only needs -o or --bench: a manifest always holds every kernel")
    if given.suite:
        return build_into(given.suite, suite(given.family))
    if given.bench:
        measured = map(bench_cases.parse, bench_cases.default_cases())
        needed = bench_cases.builds(measured, HOPPER)
        return build_into(given.bench, [choices for choices in needed if given.only in record.name_of(choices[0])])
    plans = [plan for plan in committed_plans() if given.only in record.name_of(plan.build)]
    artifacts = list(compile_all([(plan.build,) for plan in plans], fresh=True))
    if given.output:
        _into_folder(artifacts, given.output)
    if given.only:
        return 0
    if given.check:
        lines = drifted(record.read_manifest(given.root), entries_of(plans, artifacts))
        print("\n".join([*lines, f"build_ptx: {len(lines)} of {len(plans)} kernels differ"]))
        return 1 if lines else 0
    write(given.root, plans, artifacts)
    print(f"{len(plans)} kernels in ptx/")
    return 0


def suite(family: str) -> list[Choices]:
    """What tests/gpu needs of a family."""
    from tests.gpu import cases, matrix, test_conventions, test_many_heads, test_sequences
    from tests.gpu.hosts import test_lane
    from tests.gpu.long import test_dropout

    tests = test_conventions, test_many_heads, test_sequences, test_lane, test_dropout
    suites = cases.builds, matrix.builds, decodes.builds, *(test.builds for test in tests)
    return of_family(family, lambda arch: itertools.chain.from_iterable(builds(arch) for builds in suites))


def of_family(family: str, builds: Callable[[str], Iterable[Choices]]) -> list[Choices]:
    """What `builds` needs for a family's target, each kernel once; of the Hopper family what it has beside the generic
    one."""
    needed = dict.fromkeys(builds(HOPPER_ARCH if family == "hopper" else ARCH))
    return [choices for choices in needed if family == "generic" or choices[0].family == "hopper"]


def build_into(folder: Path, needed: Sequence[Choices]) -> int:
    """The needed kernels into the folder, without their PTX where that is not run itself; exit code 0."""
    artifacts = compile_all(needed, fresh=False)
    return _into_folder((a if a.build.arch == PTX_ARCH else replace(a, ptx="") for a in artifacts), folder)


def _into_folder(artifacts: Iterable[Artifact], folder: Path) -> int:
    count = 0
    for artifact in artifacts:
        Folder(folder).put(artifact)
        count += 1
    print(f"{count} kernels in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
