"""Run: one case of the GPU suite again, from its line: python -m tests.gpu.run --case "..." ."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cutlass_py_attn import judge
from tests.gpu import cases, check


def main() -> int:
    """Run the case, print every verdict; exit code 1 when one is above 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.run", description=__doc__)
    parser.add_argument("--case", required=True, help="the line that a failing test prints")
    parser.add_argument("--kernels", type=Path, help="folder of prebuilt kernels; without it they are compiled")
    given = parser.parse_args()
    case = cases.parse(given.case)
    found = check.run(case, check.kernels_from(given.kernels))
    passed = judge.passed(found)
    lines = [*map(check.shown, found), f"{'passed' if passed else 'FAILED'}: {case.line}"]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
