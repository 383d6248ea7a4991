"""Build PTX: compiles the committed kernels into ptx/ with their sealed manifest, or compares them with it.

--features writes the PTX hashes of kernels with features instead (feature_ptx.py).
--suite and --bench compile the kernels of tests/gpu or of the benchmark into a folder for a machine without a compiler.
Where JAX is installed, --suite also compiles those of its programs on two GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import chain, product
from multiprocessing import get_context
from pathlib import Path

from cutlass_py_attn.artifact import Artifact, Folder
from cutlass_py_attn.bench import cases as bench_cases
from cutlass_py_attn.errors import CompileError
from cutlass_py_attn.kernels.component_gemms import COMPONENT_GEMMS
from cutlass_py_attn.kernels.sm90_family.tile_time import LONG_LENGTH, MULTICAST_LENGTH
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan.component_gemms import plan_component_gemm
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.plan.planner import plan
from cutlass_py_attn.problem import spec
from cutlass_py_attn.testing.cases import ARCH, PTX_ARCH, SM90_ARCH
from tests.cases import decode_cases, distance_squared, nearness, serving_cases, suite
from tools.release import feature_ptx, record

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = 2
HOPPER = (9, 0)  # compute capability
DTYPES = ("bf16", "f16", "f32")
HEAD_DIMS = (64, 128)
MASKS = ("full", "causal")
FAMILIES = ("sm80", "sm90")
# They compile their kernels into a folder, by lowering their programs in a process of its own with two host devices.
TWO_GPU_PROGRAMS = ("tests.gpu.hosts.test_jax_sharding", "tests.gpu.hosts.test_jax_context")

Choices = tuple[Build, ...]  # one kernel and its fallbacks; the first that ptxas compiles without spills is used


def committed_plans() -> list[Plan]:
    """Returns a plan of each kernel that is shown and verified.

    Sizes do not decide the machine code, except that the sm90 family has other kernels for short heads and for few.
    """
    plans = []
    for dtype, head_dim, mask in product(DTYPES, HEAD_DIMS, MASKS):
        plans += _both(f"{dtype}_d{head_dim}_s128_b1_h1_{mask}", ARCH)
    for dtype, head_dim, mask in product(DTYPES[:2], HEAD_DIMS, MASKS):
        plans += _both(f"{dtype}_d{head_dim}_s{LONG_LENGTH}_b1_h8_{mask}", SM90_ARCH)
    for head_dim, mask in product(HEAD_DIMS, MASKS):
        plans.append(_plan(f"bf16_d{head_dim}_s256_b64_h16_{mask}", "backward", SM90_ARCH))
    plans.append(_plan(f"bf16_d128_s{MULTICAST_LENGTH}_b1_h8_causal", "forward", SM90_ARCH))
    plans.append(_plan("bf16_d128_s128_b1_h1_causal_deterministic", "backward", ARCH))
    plans += decode_cases.shown_plans(ARCH)
    plans += serving_cases.shown_plans(ARCH)
    for name in COMPONENT_GEMMS:
        plans += [plan_component_gemm(name, "sm80", dtype, 128, ARCH) for dtype in ("bfloat16", "float32")]
        plans += [plan_component_gemm(name, "sm90", "bfloat16", head_dim, SM90_ARCH) for head_dim in HEAD_DIMS]
    return plans


def uncertain(plans: Sequence[Plan], manifest: record.Json, toolchain: str) -> list[Plan]:
    """Returns the plans whose machine code may differ from the manifest, and a sample of the others.

    The entry of such a plan is of another build, of other sources or of another compiler. The sample is the first
    kernel of each family and kind: it shows that an entry of today's sources is what they compile to.
    """
    committed = manifest["kernels"]
    sample = {(plan.build.family, plan.build.kind): plan for plan in reversed(plans)}
    return [
        plan
        for plan in plans
        if plan is sample[plan.build.family, plan.build.kind]
        or not record.is_current(committed.get(record.name_of(plan.build), {}), plan.build, toolchain)
    ]


def _plan(name: str, direction: str, arch: str) -> Plan:
    return plan(spec.parse(name).problem(direction), arch)


def _both(name: str, arch: str) -> list[Plan]:
    return [_plan(name, direction, arch) for direction in ("forward", "backward")]


def _fresh(choices: Choices) -> Artifact:
    from cutlass_py_attn.compilation.cache import Cache
    from cutlass_py_attn.compilation.compiler import compile as compile_now

    artifact = first_compiled(choices, compile_now)
    Cache().put(artifact)
    return artifact


def _cached(choices: Choices) -> Artifact:
    from cutlass_py_attn.compilation.compiler import artifact_for

    return first_compiled(choices, artifact_for)


def first_compiled(choices: Choices, compiler: Callable[[Build], Artifact]) -> Artifact:
    """Returns the first build that compiles; if none does, raises the last one's CompileError."""
    for build in choices[:-1]:
        with contextlib.suppress(CompileError):
            return compiler(build)
    return compiler(choices[-1])


def compile_all(needed: Sequence[Choices], *, fresh: bool, processes: int = PROCESSES) -> Iterator[Artifact]:
    """Yields an artifact for each of the needed kernels in order, compiled by that many processes.

    fresh: compile even if the cache holds the kernel, and replace it there.
    """
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for number, artifact in enumerate(pool.map(_fresh if fresh else _cached, needed), 1):
            print(f"{number:3}/{len(needed)} {record.name_of(artifact.build)}", file=sys.stderr, flush=True)
            yield artifact


def entries_of(plans: Sequence[Plan], artifacts: Sequence[Artifact]) -> dict[str, record.Json]:
    """Returns manifest entries by name."""
    pairs = zip(plans, artifacts, strict=True)
    return {record.name_of(plan.build): record.entry(plan, artifact) for plan, artifact in pairs}


def write(root: Path, plans: Sequence[Plan], artifacts: Sequence[Artifact]) -> None:
    """Writes ptx/<arch>/<symbol>.ptx, then the manifest; deletes PTX of kernels that are no longer committed."""
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
    """Returns a line for each kernel that differs between the manifest and today's compilation."""
    committed = manifest["kernels"]
    lines = [f"UNLISTED {name}" for name in entries if name not in committed]
    lines += [f"DRIFTED {name}: no plan selects it any more" for name in committed if name not in entries]
    for name in entries.keys() & committed.keys():
        if changed := record.difference(committed[name], entries[name]):
            lines.append(f"DRIFTED {name}: {changed}")
    return sorted(lines)


def main() -> int:
    """Builds, checks, or builds the suite's or the benchmark's kernels; exit code 1 if --check finds a difference."""
    parser = argparse.ArgumentParser(
        prog="build_ptx", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compile and compare with ptx/; writes nothing there")
    parser.add_argument(
        "--features",
        action="store_true",
        help=f"write {feature_ptx.PATH} alone; after fuzz.py --record has run on a GPU",
    )
    parser.add_argument("--suite", type=Path, metavar="FOLDER", help="compile what tests/gpu needs into FOLDER")
    parser.add_argument("--family", choices=FAMILIES, help="family of the --suite kernels; everything without it")
    parser.add_argument("--bench", type=Path, metavar="FOLDER", help="compile what the benchmark needs into FOLDER")
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="also write the committed cubins to FOLDER")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree whose ptx/ is written or checked")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="kernels whose name contains TEXT, for -o, --suite and --bench"
    )
    given = parser.parse_args()
    if given.only and not (given.output or given.suite or given.bench):
        parser.error("--only needs -o, --suite or --bench: a manifest always lists every kernel")
    if given.features:
        return write_features(given.root)
    if given.suite:
        return build_suite(given.suite, given.family, given.only)
    if given.bench:
        measured = map(spec.parse, bench_cases.default_cases())
        needed = bench_cases.builds(measured, HOPPER)
        return build_into(given.bench, named(needed, given.only))
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


def write_features(root: Path) -> int:
    """Writes the PTX hashes of the kernels with features; exit code 1 if the random cases have not run them."""
    entries = feature_ptx.compiled(feature_ptx.builds(), PROCESSES)
    objections = feature_ptx.write(root, entries)
    print("\n".join(objections) or f"{len(entries)} kernels in {feature_ptx.PATH}")
    return 1 if objections else 0


def of_family(family: str, builds: Callable[[str], Iterable[Choices]]) -> list[Choices]:
    """Returns what `builds` needs for a family's target, each kernel once; for sm90 only kernels of that family."""
    needed = dict.fromkeys(builds(SM90_ARCH if family == "sm90" else ARCH))
    return [choices for choices in needed if family == "sm80" or choices[0].family == "sm90"]


def build_into(folder: Path, needed: Sequence[Choices]) -> int:
    """Compiles the needed kernels into the folder, without PTX unless a test loads the PTX; exit code 0."""
    artifacts = compile_all(needed, fresh=False)
    return _into_folder((a if a.build.arch == PTX_ARCH else replace(a, ptx="") for a in artifacts), folder)


def named(needed: Iterable[Choices], text: str) -> list[Choices]:
    """Returns the kernels whose name contains a text, each once."""
    return [choices for choices in dict.fromkeys(needed) if text in record.name_of(choices[0])]


def build_suite(folder: Path, family: str | None, only: str = "") -> int:
    """Compiles what tests/gpu needs of a family, or all of it, into the folder; exit code 0.

    only: the kernels whose name contains this text, without those of a user's score term and of JAX programs
    """
    families = (family,) if family else FAMILIES
    if "sm80" in families and not only:
        build_new_term(folder)
    build_into(folder, named(chain.from_iterable(of_family(each, suite.builds) for each in families), only))
    if family or only:
        return 0
    if importlib.util.find_spec("jax") is None:
        print("JAX is not installed: without the kernels of its programs on two GPUs")
        return 0
    for module in TWO_GPU_PROGRAMS:
        subprocess.run([sys.executable, "-m", module, str(folder.resolve())], cwd=ROOT, check=True)
    return 0


def build_new_term(folder: Path) -> None:
    """Compiles the kernels of users' score terms into the folder, in this process, which has registered the term."""
    for registered in (distance_squared.distance_squared, nearness.nearness):
        with registered() as term:
            for choices in chain.from_iterable(distance_squared.builds(term.name, arch) for arch in (ARCH, SM90_ARCH)):
                Folder(folder).put(replace(_fresh(choices), ptx=""))


def _into_folder(artifacts: Iterable[Artifact], folder: Path) -> int:
    count = 0
    for artifact in artifacts:
        Folder(folder).put(artifact)
        count += 1
    print(f"{count} kernels in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
