"""Sanitize: small fused cases in one process, to be run under compute-sanitizer with any of its tools.

compute-sanitizer --tool memcheck python tools/sanitize.py --kernels FOLDER
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from cutlass_py_attn import driver
from cutlass_py_attn.planner import plans_on
from tests.gpu import cases, check, memory

NUM_QUERIES = 130
KEYS = (65, 128, 200)


def chosen() -> list[cases.Case]:
    """Forward and backward of every shown and every deterministic kernel, at lengths around the tiles."""
    found = []
    for number, variant in enumerate((*cases.SHOWN, *cases.DETERMINISTIC)):
        keys = KEYS[number % len(KEYS)]
        for direction in ("forward", "backward"):
            if direction == "backward" or not variant.deterministic:
                found.append(cases.Case(direction, variant, 1, 2, NUM_QUERIES, keys, "gaussian", number))
    return found


def families(case: cases.Case) -> list[str]:
    """The families that this GPU has kernels of for a case."""
    gpu = driver.device(0)
    return list({plan.build.family: None for plan in plans_on(case.problem(), gpu.compute_capability, gpu.num_sms)})


def main() -> int:
    """Launch each case once through Bound; exit code 1 when an output is not finite."""
    parser = argparse.ArgumentParser(prog="sanitize", description=__doc__)
    parser.add_argument("--kernels", type=Path, help="folder of prebuilt kernels; without it they are compiled")
    kernels = check.kernels_from(parser.parse_args().kernels)
    wrong = []
    with driver.device(0).current():
        launched = [(case, family) for case in chosen() for family in families(case)]
        for case, family in launched:
            arrays = check.make(case)
            full = np.zeros(case.shape.logsumexp, np.float32) + 9
            operands = {**arrays, "output": arrays["grad_output"], "logsumexp": full}
            with memory.placed(case.problem(), operands, check.of_family(kernels, family)) as placed:
                placed.reset()
                # From the pool, so that initcheck sees a workspace that nobody has written.
                placed.bound(placed.pointers)
                driver.synchronise(0)
                found = placed.read()
            if any(np.isnan(array).any() for array in found.values()):
                wrong.append(f"{case.line} {family}")
    print("\n".join([*wrong, f"sanitize: {len(launched)} cases, {len(wrong)} with unwritten outputs"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
