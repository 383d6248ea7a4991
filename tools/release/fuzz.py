"""Fuzz: random cases over all features on this machine's GPU, compared with the reference in float64.

python -m tools.release.fuzz --variants 300 --runs 7 [--kernels FOLDER] [--first 0]
python -m tools.release.fuzz --case "backward bf16_d64_s128_b1_h2_causal seed=3"    one case again, with every ratio
python -m tools.release.fuzz --build FOLDER --variants 300 --runs 7                 the kernels; needs no GPU
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from cutlass_py_attn.bench.harness import commit
from cutlass_py_attn.errors import AttentionError
from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.plan.planner import plan
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.testing import guarded_check, random_cases
from cutlass_py_attn.testing.cases import ARCH, Case
from cutlass_py_attn.testing.check import Kernels, kernels_from
from tools.release import features
from tools.release.record import sources_digest

Passed = tuple[Case, Build, float]  # case, its kernel, and the worst error / allowed


def main() -> int:
    """Runs or builds; exit code 1 if a case fails."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--variants", type=int, default=50, help="kernel numbers to draw")
    parser.add_argument("--runs", type=int, default=7, help="cases for each kernel number")
    parser.add_argument("--first", type=int, default=0, help="the first kernel number")
    parser.add_argument("--kernels", type=Path, help="folder of prebuilt kernels; without it they are compiled")
    parser.add_argument("--case", help="the line of one case")
    parser.add_argument("--record", type=Path, help="write what passed, by feature, dtype and direction, to this file")
    parser.add_argument("--build", type=Path, help="only build the kernels, into this folder")
    parser.add_argument(
        "--family",
        choices=("sm80", "sm90"),
        default="sm80",
        help="family of the kernels to build; a folder may hold both",
    )
    arguments = parser.parse_args()
    numbers = range(arguments.first, arguments.first + arguments.variants)
    if arguments.build:
        from tools.release.build_ptx import build_into, of_family

        return build_into(
            arguments.build,
            of_family(arguments.family, lambda arch: random_cases.builds(numbers, arguments.runs, arch)),
        )
    cases = [Case.parse(arguments.case)] if arguments.case else list(random_cases.cases(numbers, arguments.runs))
    passed = _run(cases, kernels_from(arguments.kernels), is_verbose=arguments.case is not None)
    if passed is None:
        return 1
    if arguments.record:
        arguments.record.write_text(json.dumps(_record(passed), indent=1) + "\n")
    return 0


def _record(passed: Sequence[Passed]) -> dict[str, object]:
    gpu = driver.device(0)
    return {
        "gpu": gpu.name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "sources": sources_digest(Path(__file__).parents[2]),
        "problems": len(passed),
        "kernels": len({build for _, build, _ in passed}),
        "rows": features.tally(passed),
    }


def _run(cases: Sequence[Case], kernels: Kernels, *, is_verbose: bool) -> list[Passed] | None:
    """Returns what passed; None if a case failed."""
    passed: list[Passed] = []
    counts = {"passed": 0, "refused": 0, "failed": 0}
    worst: dict[str, float] = {}
    start = time.perf_counter()
    with ProcessPoolExecutor() as pool:
        for case, expected in zip(cases, pool.map(_expected, cases, chunksize=4), strict=True):
            if expected is None:
                counts["refused"] += 1
                continue
            try:
                ratios = guarded_check.ratios(case, expected, guarded_check.launch(case, expected, kernels))
            except (AttentionError, AssertionError) as error:
                print(f"{type(error).__name__}: {str(error).splitlines()[0]}")
                ratios = {"launch": float("inf")}
            if "launch" not in ratios:
                passed.append((case, plan(case.problem(), ARCH).build, max(ratios.values())))
            is_good = all(ratio <= 1 for ratio in ratios.values())
            counts["passed" if is_good else "failed"] += 1
            for name, ratio in ratios.items():
                worst[name] = max(worst.get(name, 0.0), ratio)
            if is_verbose or not is_good:
                shown = " ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
                print(f'{shown}: python -m tools.release.fuzz --case "{case.line}"', flush=True)
    shown = ", ".join(f"{count} {what}" for what, count in counts.items())
    ratios_text = ", ".join(f"{name} {ratio:.2f}" for name, ratio in worst.items())
    print(f"{len(cases)} cases in {time.perf_counter() - start:.0f} s: {shown}; worst error / allowed: {ratios_text}")
    return None if counts["failed"] else passed


def _expected(case: Case) -> guarded_check.Expected | None:
    """Returns the reference's results; None for a case that is refused or empty."""
    return guarded_check.expect(case) if case.needs_kernels else None


if __name__ == "__main__":
    sys.exit(main())
