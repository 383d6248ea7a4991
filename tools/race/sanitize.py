"""Sanitize: launches small cases of every shown kernel, and of kernels of wide heads, e4m3 codes and caches, in one
process, to be run under compute-sanitizer.

compute-sanitizer --tool memcheck python -m tools.race.sanitize --kernels FOLDER
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.sm90 import MULTICAST_LENGTH
from cutlass_py_attn.plan.tile_time import LONG_LENGTH
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.binding import portable_arch
from cutlass_py_attn.testing import check, component_gemms, covering_cases, decode_cases, device_memory, serving_cases
from cutlass_py_attn.testing.cases import Case

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

# Long enough for the tile that sm90 forwards of narrow heads have for long sequences.
NARROW = tuple(spec for spec in covering_cases.SHOWN if spec.head_dim == 64 and spec.dtype != "float32")
NARROW_SIZES = {"num_heads": 1, "num_queries": LONG_LENGTH - 24, "num_keys": LONG_LENGTH - 24}

# Wide heads: forwards with chunks of two and of three strips, and backwards.
WIDE = (*covering_cases.WIDE[:2], *covering_cases.WIDE_BACKWARD[:2])

# e4m3 codes, latent caches, and caches of codes.
CODES_AND_CACHES = tuple(
    map(
        Case.parse,
        (
            "forward e4m3_d128_q130_s200_b2_h1_causal_descalehead seed=1",
            "forward e4m3_d256_q130_s200_b2_h1_full seed=2",
            "forward bf16_d576v512_q1_s200_b3_h128k1_full_paged64_mla seed=3",
            "forward bf16_d576v512_q2_s200_b3_h64k1_causal_br_paged64_mla_kv8_descaletile seed=4",
            "forward bf16_d128_q130_s200_b2_h4k1_causal_br_paged64_kv8_descalehead seed=5",
            "forward bf16_d128_q1_s200_b3_h32k8_full_paged16_kv8 seed=6",
        ),
    )
)

# Long enough for multicast.
LONG = Case("forward", parse(f"bf16_d128_s{MULTICAST_LENGTH}_b1_h1_causal"), seed=1)


def cases() -> list[Case]:
    """Returns cases of shown, deterministic, wide and some 2-CTA kernels, and of narrow and many heads."""
    found = [LONG, *WIDE]
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


def launches(kernels: check.Kernels) -> Iterator[tuple[str, device_memory.GuardedLaunch | serving_cases.RowLaunch]]:
    """Yields a name and the bound kernels of each case in every family of this GPU, of decode, of codes, of caches, of
    each shown component GEMM, and of each shown append and merge."""
    for case in cases():
        arrays = case.arrays()
        logsumexp = np.zeros(case.shape.logsumexp, np.float32) + 9
        operands = {**arrays, "output": arrays["grad_output"], "logsumexp": logsumexp}
        for family in check.families(case):
            of_family = check.only_family(kernels, family, case.direction)
            yield f"{case.line} {family}", device_memory.guarded_launch(case.problem(), operands, of_family)
    decode = (case for case in decode_cases.SHOWN if case.spec.batch == 1)
    targets = planner.targets_of(driver.device(0).compute_capability)
    for case in (*decode, *(CODES_AND_CACHES if "sm_90a" in targets else ())):
        yield case.line, device_memory.guarded_launch(case.problem(), case.arrays(), kernels)
    for component_gemm in component_gemms.SHOWN_COMPONENT_GEMMS:
        if component_gemm.arch in targets:
            plan = component_gemm.plan(COMPONENT_GEMM_TILES)
            operands = component_gemms.operands(plan, "gaussian", 1)
            yield str(component_gemm), device_memory.guarded_component_gemm(plan, operands, kernels)
    arch = portable_arch(driver.device(0).compute_capability)
    for plan in serving_cases.shown_plans(arch):
        for row_case in serving_cases.of_build(plan.build)[:ROW_CASES]:
            yield plan.symbol, row_case.launch(kernels, arch)


def main() -> int:
    """Launches each case once through Bound; exit code 1 if an output has NaN."""
    parser = argparse.ArgumentParser(prog="sanitize", description=__doc__)
    parser.add_argument("--kernels", type=Path, help="folder of prebuilt kernels; without it they are compiled")
    kernels = check.kernels_from(parser.parse_args().kernels)
    launched, wrong = 0, []
    with driver.device(0).current():
        for name, guarded in launches(kernels):
            with guarded:
                guarded.reset()
                # The workspace comes from the pool, so that initcheck sees one that was never written.
                guarded.bound(guarded.pointers)
                driver.synchronise(0)
                found = guarded.read()
            launched += 1
            if any(np.isnan(array).any() for array in found.values()):
                wrong.append(name)
    print("\n".join([*wrong, f"sanitize: {launched} cases, {len(wrong)} with unwritten outputs"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
