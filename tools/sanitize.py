"""Sanitize: small cases of every shown kernel in one process, to be run under compute-sanitizer with any of its tools.

compute-sanitizer --tool memcheck python tools/sanitize.py --kernels FOLDER
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cutlass_py_attn import driver, planner
from cutlass_py_attn.hopper import MULTICAST_LENGTH
from tests.gpu import cases, check, decodes, memory, rooms

NUM_QUERIES = 130
KEYS = {"forward": (65, 128, 200), "backward": (129, 200, 256)}  # of one key tile a Hopper block takes the whole head
ROOM_TILES = 2
# Of the Hopper backward in clusters, which no shown kernel is of.
WIDE = (cases.Variant("bfloat16", 256, 256, "causal"), cases.Variant("bfloat16", 192, 128, "full"))

# Of which a block takes whole heads, of several key tiles, where there are so many.
WHOLE_HEADS = tuple(variant for variant in cases.SHOWN if variant.dtype == "bfloat16")
HEADS = 5, 14, NUM_QUERIES, 200
# Of which a block takes several key tiles of several heads, so that the place of a tile's record is used again: heads
# that are no multiple of the multiprocessors are not taken whole.
SEVERAL_TILES = 2, 137, NUM_QUERIES, 200

# Long enough for blocks of a cluster to share keys and values.
LONG = cases.Case(
    "forward", cases.Variant("bfloat16", 128, 128, "causal"), 1, 1, MULTICAST_LENGTH, MULTICAST_LENGTH, "gaussian", 1
)


def chosen() -> list[cases.Case]:
    """Forward and backward of every shown, every deterministic and some wide kernels, at lengths around the tiles, and
    some of many heads."""
    found = [LONG]
    for number, variant in enumerate((*cases.SHOWN, *cases.DETERMINISTIC, *WIDE)):
        for direction, lengths in KEYS.items():
            keys = lengths[number % len(lengths)]
            if direction == "backward" or not variant.deterministic:
                found.append(cases.Case(direction, variant, 1, 2, NUM_QUERIES, keys, "gaussian", number))
    for sizes in (HEADS, SEVERAL_TILES):
        found += [
            cases.Case("backward", variant, *sizes, "gaussian", number) for number, variant in enumerate(WHOLE_HEADS)
        ]
    return found


def places(kernels: check.Kernels) -> Iterator[tuple[str, memory.Placed]]:
    """A name and the kernels of each case in every family that this GPU has, of the decodes and of the rooms that are
    shown."""
    for case in chosen():
        arrays = check.make(case)
        full = np.zeros(case.shape.logsumexp, np.float32) + 9
        operands = {**arrays, "output": arrays["grad_output"], "logsumexp": full}
        for family in check.families(case):
            of_family = check.of_family(kernels, family, case.direction)
            yield f"{case.line} {family}", memory.placed(case.problem(), operands, of_family)
    for one in decodes.SHOWN:
        if one.batch == 1:
            yield one.line, memory.placed(one.problem(), one.arrays(), kernels)
    for room in cases.SHOWN_ROOMS:
        if room.arch in planner.targets_of(driver.device(0).compute_capability):
            plan = room.plan(ROOM_TILES)
            yield str(room), memory.placed_room(plan, rooms.operands(plan, "gaussian", 1), kernels)


def main() -> int:
    """Launch each case once through Bound; exit code 1 when an output is not finite."""
    parser = argparse.ArgumentParser(prog="sanitize", description=__doc__)
    parser.add_argument("--kernels", type=Path, help="folder of prebuilt kernels; without it they are compiled")
    kernels = check.kernels_from(parser.parse_args().kernels)
    launched, wrong = 0, []
    with driver.device(0).current():
        for name, made in places(kernels):
            with made as placed:
                placed.reset()
                # From the pool, so that initcheck sees a workspace that nobody has written.
                placed.bound(placed.pointers)
                driver.synchronise(0)
                found = placed.read()
            launched += 1
            if any(np.isnan(array).any() for array in found.values()):
                wrong.append(name)
    print("\n".join([*wrong, f"sanitize: {launched} cases, {len(wrong)} with unwritten outputs"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
