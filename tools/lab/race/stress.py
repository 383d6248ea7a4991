"""Stress: launches every shown kernel many times, disturbed, delayed and less optimised, on this machine's GPU.

python -m tools.lab.race.stress --build FOLDER      the kernels and their stress builds, on a machine without a GPU
python -m tools.lab.race.stress --kernels FOLDER    runs them on a GPU, without a compiler, and records what passed
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from cutlass_py_attn.artifact import Artifact, Folder
from cutlass_py_attn.errors import AttentionError
from cutlass_py_attn.launch.build import ROW_KINDS
from cutlass_py_attn.runtime import driver
from tools.lab.race import stress_builds, stress_kernels, stress_run
from tools.release import build_ptx, record
from tools.release.verify_gpu import about_this_run

ROOT = build_ptx.ROOT
REPEATS = 1000
DELAYED = 100
SECONDS = 300
STDERR = 2  # the file descriptor, even if sys.stderr is replaced

Row = tuple[str, str, str, str]


def build(folder: Path, only: str) -> int:
    """Builds the shown kernels and the kernels of stress_run.FEATURES, a folder for each kind of build; exit code 0.

    Appends and merges are not stressed: their threads do not wait for each other.
    """
    shown = [plan.build for plan in build_ptx.committed_plans() if plan.build.kind not in ROW_KINDS]
    needed = [(one,) for one in (*shown, *stress_run.feature_builds()) if only in record.name_of(one)]
    artifacts = list(build_ptx.compile_all(needed, fresh=False))

    def put(artifact: Artifact) -> int:
        count = 0
        for name, made in stress_builds.variants(artifact):
            Folder(folder / name).put(replace(made, ptx=""))
            count += 1
        print(f"{record.name_of(artifact.build)}: {count} builds", file=sys.stderr, flush=True)
        return count

    with ThreadPoolExecutor(build_ptx.PROCESSES) as pool:
        counts = list(pool.map(put, artifacts))
    print(f"{sum(counts)} builds of {len(counts)} kernels in {folder}")
    return 0


def builds_of(folder: Path, plain: Artifact) -> dict[str, Artifact]:
    """Returns every build of a kernel by its name, the plain one first."""
    found = {stress_builds.PLAIN: plain}
    place = Path(plain.build.arch, f"{plain.build.symbol}.json")
    for kind in sorted(path for path in folder.iterdir() if (path / place).is_file()):
        found.setdefault(kind.name, Folder(kind)(plain.build))
    return found


def outdated(plain: Artifact, manifest: record.Json) -> str:
    """Says why a kernel differs from the shown one of its name; empty if it does not, or if none is shown."""
    shown = manifest["kernels"].get(record.name_of(plain.build))
    found = record.sha256(plain.cubin)
    if shown is None or shown["cubin_sha256"] == found:
        return ""
    return f"the folder holds cubin {found[:12]}, the manifest {shown['cubin_sha256'][:12]}"


def run(given: argparse.Namespace) -> int:
    """Logs a line for each kernel that passed; exit code 1 if one did not."""
    manifest, gpu = record.read_manifest(ROOT), driver.device(0)
    plains = Folder(given.kernels / stress_builds.PLAIN).all()
    plains = [plain for plain in plains if given.only in record.name_of(plain.build)]
    shared = about_this_run(None)
    rows, passed = [], 0
    with gpu.current(), given.record.open("a") as log:
        tools = stress_kernels.Kernels(gpu)
        for plain in plains:
            print(f"{record.name_of(plain.build)} ...", flush=True)
            # A kernel that hangs ends the run with its name as the last line.
            faulthandler.dump_traceback_later(given.seconds, exit=True, file=STDERR)
            shown, line = one(plain, given, manifest, tools)
            faulthandler.cancel_dump_traceback_later()
            rows.append(shown)
            passed += line is not None
            log.write(json.dumps({**line, **shared}, sort_keys=True) + "\n" if line else "")
            log.flush()
        print("\n".join([*table(rows), f"stress: {passed} of {len(plains)} kernels passed"]), flush=True)
        tools.close()  # after the table: once a kernel faulted, every driver call fails
    return 0 if plains and passed == len(plains) else 1


def one(
    plain: Artifact, given: argparse.Namespace, manifest: record.Json, tools: stress_kernels.Kernels
) -> tuple[Row, record.Json | None]:
    """Returns a kernel's row of the table, and its own fields of the log if it passed."""
    name = record.name_of(plain.build)
    try:
        if problem := outdated(plain, manifest):
            raise AssertionError(problem)
        builds = builds_of(given.kernels, plain)
        problems = stress_run.workloads(plain, driver.device(0))
        findings = stress_run.stress(builds, problems, tools, given.repeats, given.delayed)
    except (AssertionError, AttentionError) as error:
        return (name, "FAILED", "", str(error)), None
    return row(name, findings), stress_run.line_of(builds, findings)


def row(name: str, findings: stress_run.Findings) -> Row:
    """Returns the row of a kernel that passed."""
    own = (stress_run.ALONE, stress_run.NOISE, stress_run.PRODUCER)
    launches = " ".join(str(findings.launches[mode]) for mode in own)
    others = " ".join(kind.removeprefix(stress_builds.DELAY) for kind in findings.launches if kind not in own)
    return name, launches, others, ", ".join(f"{result} {ratio:.2f}" for result, ratio in findings.worst.items())


def table(rows: Sequence[Row]) -> list[str]:
    """Returns the rows as aligned lines under a header."""
    heads = ("kernel", "alone noise producer", "builds", "worst error / allowed")
    widths = [max(len(cells[column]) for cells in (heads, *rows)) for column in range(3)]
    lines = (
        (*(cell.ljust(width) for cell, width in zip(cells, widths, strict=False)), cells[3]) for cells in (heads, *rows)
    )
    return ["  ".join(cells).rstrip() for cells in lines]


def main() -> int:
    """Builds, or runs; exit code 1 if a kernel failed or there was none."""
    parser = argparse.ArgumentParser(prog="stress", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--build", type=Path, metavar="FOLDER", help="compile the kernels and their stress builds")
    chosen.add_argument("--kernels", type=Path, metavar="FOLDER", help="run the kernels of this folder")
    parser.add_argument("--only", default="", metavar="TEXT", help="kernels whose name contains TEXT")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="launches of a kernel in each of the three modes")
    parser.add_argument("--delayed", type=int, default=DELAYED, help="launches of each of its other builds")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="time limit of one kernel")
    parser.add_argument("--record", type=Path, default=ROOT / record.STRESS_LOG, help="the log to append to")
    given = parser.parse_args()
    for name in ("repeats", "delayed", "seconds"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} = {getattr(given, name)}: must be 1 or more")
    return build(given.build, given.only) if given.build else run(given)


if __name__ == "__main__":
    sys.exit(main())
