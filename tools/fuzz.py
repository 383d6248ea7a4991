"""Fuzz: random problems over all features on this machine's GPU, against the reference in float64.

python tools/fuzz.py --variants 300 --runs 7 [--kernels FOLDER] [--first 0]
python tools/fuzz.py --case "direction=backward dtype=bfloat16 ..."    one problem again, with every figure
python tools/fuzz.py --build FOLDER --variants 300 --runs 7            the kernels, on a machine without a GPU
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from cutlass_py_attn import driver
from cutlass_py_attn.errors import AttentionError
from cutlass_py_attn.plan import Build
from cutlass_py_attn.planner import plan
from tests.gpu import drawn_check, features
from tests.gpu.cases import ARCH
from tests.gpu.check import Kernels, kernels_from
from tests.gpu.drawn import Drawn, builds, parse, problems
from tools.record import sources_digest

Agreed = tuple[Drawn, Build, float]


def main() -> int:
    """Exit code 1 when a problem fails."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--variants", type=int, default=50, help="kernels to draw")
    parser.add_argument("--runs", type=int, default=7, help="problems for each")
    parser.add_argument("--first", type=int, default=0, help="number of the first variant")
    parser.add_argument(
        "--also", type=int, nargs="*", default=[], metavar="NUMBER", help="single variants beside those"
    )
    parser.add_argument("--kernels", type=Path, help="folder of prebuilt kernels; without it they are compiled")
    parser.add_argument("--case", help="one problem's line")
    parser.add_argument("--record", type=Path, help="write what ran, by feature, dtype and direction, to this file")
    parser.add_argument("--commit", default="unknown", help="for the record")
    parser.add_argument("--build", type=Path, help="only build the kernels, into this folder")
    parser.add_argument(
        "--family",
        choices=("generic", "hopper"),
        default="generic",
        help="of the kernels to build; a folder may hold both",
    )
    arguments = parser.parse_args()
    variants = [*range(arguments.first, arguments.first + arguments.variants), *arguments.also]
    if arguments.build:
        from tools.build_ptx import build_into, of_family

        return build_into(
            arguments.build, of_family(arguments.family, lambda arch: builds(variants, arguments.runs, arch))
        )
    drawn = [parse(arguments.case)] if arguments.case else list(problems(variants, arguments.runs))
    agreed = _run(drawn, kernels_from(arguments.kernels), arguments.case is not None)
    if agreed is None:
        return 1
    if arguments.record:
        arguments.record.write_text(json.dumps(_record(agreed, arguments.commit), indent=1) + "\n")
    return 0


def _record(agreed: list[Agreed], commit: str) -> dict[str, object]:
    gpu = driver.device(0)
    return {
        "gpu": gpu.name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit,
        "sources": sources_digest(Path(__file__).parents[1]),
        "problems": len(agreed),
        "kernels": len({build for _, build, _ in agreed}),
        "rows": features.tally(agreed),
    }


def _run(drawn: list[Drawn], kernels: Kernels, is_loud: bool) -> list[Agreed] | None:
    """What agreed; None when a problem failed."""
    agreed: list[Agreed] = []
    counts = {"agree": 0, "refused": 0, "failed": 0}
    worst: dict[str, float] = {}
    start = time.perf_counter()
    with ProcessPoolExecutor() as pool:
        for one, expected in zip(drawn, pool.map(_expected, drawn, chunksize=4), strict=True):
            if expected is None:
                counts["refused"] += 1
                continue
            try:
                found = drawn_check.findings(one, expected, drawn_check.launch(one, expected, kernels))
            except (AttentionError, AssertionError) as error:
                print(f"{type(error).__name__}: {str(error).splitlines()[0]}")
                found = {"launch": float("inf")}
            if "launch" not in found:
                agreed.append((one, plan(one.problem(), ARCH).build, max(found.values())))
            good = all(ratio <= 1 for ratio in found.values())
            counts["agree" if good else "failed"] += 1
            for name, ratio in found.items():
                worst[name] = max(worst.get(name, 0.0), ratio)
            if is_loud or not good:
                figures = " ".join(f"{name} {ratio:.2f}" for name, ratio in found.items())
                print(f'{figures}: python tools/fuzz.py --case "{one.line}"', flush=True)
    shown = ", ".join(f"{count} {what}" for what, count in counts.items())
    ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in worst.items())
    print(f"{len(drawn)} problems in {time.perf_counter() - start:.0f} s: {shown}; worst error / allowed: {ratios}")
    return None if counts["failed"] else agreed


def _expected(drawn: Drawn) -> drawn_check.Expected | None:
    """None for a problem that is refused or empty."""
    return drawn_check.expect(drawn) if drawn.needs_kernels else None


if __name__ == "__main__":
    sys.exit(main())
