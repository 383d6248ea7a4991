"""Run: runs one case of the GPU suite again, from its line: python -m tests.gpu.run --case "LINE"."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cutlass_py_attn.testing import accuracy, check
from cutlass_py_attn.testing.cases import Case


def main() -> int:
    """Runs the case and prints every accuracy check; exit code 1 if one is above 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.run", description=__doc__)
    parser.add_argument("--case", required=True, help="the line that a failing test prints")
    parser.add_argument("--kernels", type=Path, help="folder of prebuilt kernels; without it they are compiled")
    given = parser.parse_args()
    case = Case.parse(given.case)
    found = check.run(case, check.kernels_from(given.kernels))
    passed = accuracy.passed(found)
    lines = [*map(str, found), f"{'passed' if passed else 'FAILED'}: {case.line}"]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
