"""Sanitize: launches small cases of every shown kernel, and of kernels with features, under compute-sanitizer.

compute-sanitizer --tool memcheck python -m tools.lab.race.sanitize --kernels FOLDER
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.errors import DriverError
from cutlass_py_attn.kernels.sm90_family.tile_time import LONG_LENGTH, MULTICAST_LENGTH
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.binding import portable_arch
from cutlass_py_attn.testing import check, component_gemms, device_memory, guarded_check
from cutlass_py_attn.testing.cases import Case
from tests.cases import covering_cases, decode_cases, serving_cases, suite
from tools.lab.race import stress_run

Results = dict[str, npt.NDArray[Any]]

NUM_QUERIES = 130
# Keys of each direction, around the tiles. With one key tile the sm90 backward runs one block per head.
KEYS = {"forward": (65, 128, 200), "backward": (129, 200, 256)}
COMPONENT_GEMM_TILES = 2
ROW_CASES = 3  # random problems of each kernel of append_to_cache and merge_states
# The sm90 backward on two CTAs, of which ptx/ shows no kernel.
TWO_CTA = tuple(map(parse, ("bf16_d256_s1_b1_h1_causal", "bf16_d192v128_s1_b1_h1_full")))

# Kernels that run one block per head, with several key tiles, if there are this many heads.
ONE_BLOCK_PER_HEAD = tuple(spec for spec in covering_cases.SHOWN if spec.dtype == "bfloat16")
MANY_HEADS = {"batch": 5, "num_heads": 14, "num_queries": NUM_QUERIES, "num_keys": 200}
# Blocks process several key tiles of several heads, so that the shared memory of a work tile is reused. These heads are
# no multiple of the multiprocessors, so no kernel runs one block per head.
SEVERAL_TILES = {"batch": 2, "num_heads": 137, "num_queries": NUM_QUERIES, "num_keys": 200}

HALF_PRECISION = tuple(spec for spec in covering_cases.SHOWN if spec.dtype != "float32")
# Two whole rounds of query tiles of 128 rows: fewer work tiles have fewer rows.
SEVERAL_QUERY_TILES = {"batch": 2, "num_heads": 66, "num_queries": 250, "num_keys": 200}

# Long enough for the tile that sm90 forwards of narrow heads have for long sequences, and too many tiles for parts.
NARROW = tuple(spec for spec in covering_cases.SHOWN if spec.head_dim == 64 and spec.dtype != "float32")
NARROW_SIZES = {"num_heads": 8, "num_queries": LONG_LENGTH - 24, "num_keys": LONG_LENGTH - 24}

# Wide heads: forwards with chunks of two and of three strips, and backwards.
WIDE = (*covering_cases.WIDE[:2], *covering_cases.WIDE_BACKWARD[:2])

# Blocks share the last query tiles of a forward, few query tiles of others, and key tiles of backwards.
SHARED_TILES = (
    *(suite.SHARED_END[0], suite.SHARED_QUERIES[0], suite.SHARED_QUERIES[4]),
    *(suite.FEW_QUERY_TILES[0], suite.FEW_QUERY_TILES[7], suite.FEW_KEY_TILES[1]),
)

# Long enough for multicast.
LONG = Case("forward", parse(f"bf16_d128_s{MULTICAST_LENGTH}_b1_h3_causal"), seed=1)


def cases() -> list[Case]:
    """Returns cases of shown, deterministic, wide and some 2-CTA kernels, of narrow and many heads, and of parts."""
    found = [LONG, *WIDE, *SHARED_TILES]
    for number, spec in enumerate((*covering_cases.SHOWN, *covering_cases.DETERMINISTIC, *TWO_CTA)):
        for direction, lengths in KEYS.items():
            sizes = {"num_heads": 2, "num_queries": NUM_QUERIES, "num_keys": lengths[number % len(lengths)]}
            if direction == "backward" or not spec.deterministic:
                found.append(Case(direction, spec.replace(**sizes), seed=number))
    found += [Case("forward", spec.replace(**NARROW_SIZES), seed=number) for number, spec in enumerate(NARROW)]
    found += [
        Case(direction, spec.replace(**sizes), seed=number)
        for direction, sizes in (("forward", SEVERAL_QUERY_TILES), ("backward", SEVERAL_TILES))
        for number, spec in enumerate(HALF_PRECISION)
    ]
    found += [
        Case("backward", spec.replace(**MANY_HEADS), seed=number) for number, spec in enumerate(ONE_BLOCK_PER_HEAD)
    ]
    return found


@dataclass(frozen=True, slots=True)
class Launch:
    """A named case. launch: binds its kernels to guarded buffers; wrong: names of the results that are wrong."""

    name: str
    launch: Callable[[], device_memory.GuardedLaunch | serving_cases.RowLaunch]
    wrong: Callable[[Results], list[str]]


def unwritten(found: Results) -> list[str]:
    """Returns the results that have NaN, of cases whose kernels write every element."""
    return [name for name, array in found.items() if np.isnan(array).any()]


def with_features(case: Case, kernels: check.Kernels) -> Launch:
    """Returns a case whose results are compared with float64: rows of no sequence stay NaN."""
    expected = functools.cache(lambda: guarded_check.expect(case))

    def wrong(found: Results) -> list[str]:
        ratios = guarded_check.ratios(case, expected(), found)
        return [name for name, ratio in ratios.items() if not ratio <= 1]

    return Launch(case.line, lambda: guarded_check.guarded_case(case, expected(), kernels), wrong)


def launches(kernels: check.Kernels) -> Iterator[Launch]:
    """Yields each case in every family of this GPU, each decode case, the features of stress_run.py, each shown
    component GEMM, and each shown append and merge."""
    for case in cases():
        for family in check.families(case):
            of_family = check.only_family(kernels, family, case.direction)
            yield Launch(f"{case.line} {family}", functools.partial(_synthetic, case, of_family), unwritten)
    for case in decode_cases.SHOWN:
        if case.spec.batch == 1:
            yield Launch(case.line, functools.partial(_synthetic, case, kernels), unwritten)
    for case in (*stress_run.FEATURES, *stress_run.IN_PARTS):
        yield with_features(case, kernels)
    for component_gemm in component_gemms.SHOWN_COMPONENT_GEMMS:
        if component_gemm.arch in planner.targets_of(driver.device(0).compute_capability):
            plan = component_gemm.plan(COMPONENT_GEMM_TILES)
            operands = component_gemms.operands(plan, "gaussian", 1)
            bind = functools.partial(device_memory.guarded_component_gemm, plan, operands, kernels)
            yield Launch(str(component_gemm), bind, unwritten)
    arch = portable_arch(driver.device(0).compute_capability)
    for plan in serving_cases.shown_plans(arch):
        for row_case in serving_cases.of_build(plan.build)[:ROW_CASES]:
            yield Launch(plan.symbol, functools.partial(row_case.launch, kernels, arch), unwritten)


def _synthetic(case: Case, kernels: check.Kernels) -> device_memory.GuardedLaunch:
    """Returns the kernels of a case; a backward gets a synthetic output and logsumexp."""
    arrays = case.arrays()
    if case.direction == "backward":
        arrays |= {"output": arrays["grad_output"], "logsumexp": np.zeros(case.shape.logsumexp, np.float32) + 9}
    return device_memory.guarded_launch(case.problem(), arrays, kernels)


def wrong_results(case: Launch) -> list[str]:
    """Launches a case once through Bound, and returns the names of the results that are wrong."""
    with case.launch() as guarded:
        guarded.reset()
        # The workspace comes from the pool, so that initcheck sees one that was never written.
        guarded.bound(guarded.pointers)
        driver.synchronise(0)
        return case.wrong(guarded.read())


def main() -> int:
    """Launches the cases; exit code 1 if a result is wrong, an error ended the run, or no case ran."""
    parser = argparse.ArgumentParser(prog="sanitize", description=__doc__)
    parser.add_argument("--kernels", type=Path, help="folder of prebuilt kernels; without it they are compiled")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose line contains TEXT")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="skip cases 1 to N, after case N ended a run")
    given = parser.parse_args()
    kernels = check.kernels_from(given.kernels)
    launched, wrong, end = 0, [], ""
    with driver.device(0).current():
        for number, case in enumerate(launches(kernels), 1):
            if number <= given.skip or given.only not in case.name:
                continue
            print(f"{number} {case.name}", flush=True)
            try:
                names = wrong_results(case)
            except AssertionError as error:  # of a guard
                names = [str(error)]
            except DriverError as error:  # after which every call of the driver fails
                first = error.__context__ if isinstance(error.__context__, DriverError) else error
                end = f"; case {number} ended the run ({first}); the cases after it run with --skip {number}"
                break
            launched += 1
            wrong += [f"wrong: {case.name}: {', '.join(names)}"] if names else []
    print("\n".join([*wrong, f"sanitize: {launched} cases, {len(wrong)} wrong{end}"]))
    return 1 if wrong or end or not launched else 0


if __name__ == "__main__":
    sys.exit(main())
