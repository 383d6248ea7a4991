"""Covering cases: the dense cases of the GPU suite, in which every two values of every two parameters meet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem.spec import ProblemSpec, parse
from cutlass_py_attn.testing import inputs
from cutlass_py_attn.testing.cases import ARCH, PTX_ARCH, Case
from cutlass_py_attn.testing.component_gemms import ALL_COMPONENT_GEMMS

LENGTHS: Final = (1, 2, 3, 15, 63, 64, 65, 113, 127, 128, 129, 203, 255, 257, 799, 1023, 1024)
FEW_LENGTHS: Final = (1, 15, 64, 65, 129, 255, 799)
BATCHES: Final = (1, 3)
HEADS: Final = (1, 6)
SCALES: Final = (None, 0.1, -0.05, 0.0)
SPLITS: Final = (None, 1, 3)
FAMILIES: Final = tuple(inputs.MAGNITUDE)


def _variant(dtype: str, head_dims: str, mask: str) -> ProblemSpec:
    """What decides the machine code of a dense kernel; a covering case replaces the sizes."""
    return parse(f"{dtype}_{head_dims}_s1_b1_h1_{mask}")


# The twelve kernels that ptx/ shows, and five of other head dims and masks: 17, as many as LENGTHS.
SHOWN: Final = tuple(
    _variant(dtype, head_dim, mask)
    for dtype in ("bf16", "f16", "f32")
    for head_dim in ("d64", "d128")
    for mask in ("full", "causal")
)
MAIN: Final = (
    *SHOWN,
    _variant("bf16", "d128", "causal_br"),
    _variant("f16", "d64", "causal_br"),
    _variant("f32", "d64", "causal_br"),
    _variant("bf16", "d80v40", "causal"),
    _variant("f32", "d96", "full"),
)
DETERMINISTIC: Final = (
    _variant("bf16", "d128", "causal_deterministic"),
    _variant("f32", "d64", "causal_deterministic"),
    _variant("f16", "d64", "full_deterministic"),
)
# Seven, as many as FEW_LENGTHS. The forward has no deterministic kernel of its own and runs the first four.
OTHERS: Final = (
    _variant("bf16", "d8", "full"),
    _variant("f16", "d40", "causal"),
    _variant("f16", "d40v96", "full"),
    _variant("f32", "d8", "causal"),
    *DETERMINISTIC,
)


def _covering(
    direction: str, variants: tuple[ProblemSpec, ...], lengths: tuple[int, ...], first_seed: int
) -> Iterator[Case]:
    """Yields cases in which every two values of every two parameters meet.

    With p lengths and p variants, p a prime, the p * p runs with the levels a, b, a + b, a + 2b, ... (mod p)
    are an orthogonal array: any two of these columns hold each pair of levels exactly once.
    """
    p = len(lengths)
    for run in range(p * p):
        a, b = divmod(run, p)
        levels = [(a + step * b) % p for step in range(1, 7)]
        variant = variants[levels[0]]
        splits = SPLITS[levels[5] % len(SPLITS)] if direction == "backward" else None
        if variant.deterministic and splits != 1:
            splits = None
        spec = variant.replace(
            batch=BATCHES[levels[1] % len(BATCHES)],
            num_heads=HEADS[levels[2] % len(HEADS)],
            num_queries=lengths[a],
            num_keys=lengths[b],
            scale=SCALES[levels[4] % len(SCALES)],
            num_splits_key=splits,
        )
        yield Case(direction, spec, inputs=FAMILIES[levels[3] % len(FAMILIES)], seed=first_seed + run)


def _all(direction: str) -> tuple[Case, ...]:
    main = list(_covering(direction, MAIN, LENGTHS, 0))
    others = list(_covering(direction, OTHERS, FEW_LENGTHS, len(main)))
    if direction == "forward":
        others = [case for case in others if not case.spec.deterministic]
    return (*main, *others)


def _numbered(direction: str, *names: str) -> tuple[Case, ...]:
    """One case for each name; its seed is its place."""
    return tuple(Case(direction, parse(name), seed=seed) for seed, name in enumerate(names))


PTX_CASES: Final = tuple(
    Case(direction, parse(name), seed=seed)
    for seed, name in enumerate(
        (
            "bf16_d128_q203_s257_b2_h3_causal",
            "f16_d64_q203_s257_b2_h3_full",
            "f32_d64_q203_s257_b2_h3_causal_br",
        )
    )
    for direction in ("forward", "backward")
)
# Sizes at which the sm90 backward runs one block per head, with three key tiles a head. The blocks occupy nearly every
# multiprocessor of an H200.
MANY_HEADS: Final = {"batch": 8, "num_heads": 16, "num_queries": 200, "num_keys": 300}
# One block per head: heads that are four fewer than the multiprocessors of an H200 (a block processes one head), and
# more than twice as many (a block processes several).
ONE_BLOCK_PER_HEAD: Final = _numbered(
    "backward",
    "bf16_d128_s300_b8_h16_causal",
    "bf16_d128_s300_b8_h16_causal_deterministic",
    "bf16_d128_q65_s257_b24_h16_full",
    "f16_d64_q255_s400_b8_h16_causal_br",
    "f16_d64_q200_s130_b24_h16_full",
    "f16_d128_q129_s203_b24_h16_causal_br",
    "bf16_d80v40_q400_s255_b8_h16_causal",
    "bf16_d8_s129_b24_h16_full",
)
# Long enough for multicast, where the blocks of a cluster share keys and values: even and odd numbers of tiles, partial
# tiles, and a diagonal that ends between two tiles.
MULTICAST: Final = _numbered(
    "forward",
    "bf16_d128_s4096_b1_h3_causal",
    "bf16_d128_q4500_s4200_b1_h3_causal",
    "bf16_d128_q4353_s4500_b2_h2_causal_br",
    "f16_d128_q4224_s4100_b1_h3_causal",
    "bf16_d192v128_q4100_s4096_b1_h2_causal",
    "f16_d112v104_q4600_s4100_b1_h3_causal_br",
)
# Head dims beyond 256: chunks of two or three strips, one to sixteen key tiles, clusters with one query tile, padded
# head dims, and one head dim that is narrow.
WIDE: Final = _numbered(
    "forward",
    "bf16_d512_q203_s257_b2_h3_causal",
    "f16_d320_q130_s200_b1_h2_full",
    "bf16_d512_q1_s65_b2_h2_full",
    "f16_d512_q129_s1000_b1_h2_causal_br",
    "bf16_d384_q64_s64_b1_h3_full",
    "f16_d448_q200_s799_b1_h2_causal_window50",
    "bf16_d264v392_q300_s350_b2_h1_window_left20_right10",
    "f16_d40v264_q257_s129_b1_h2_causal_br",
    "bf16_d512v64_q65_s128_b1_h2_causal",
)
# The same of the backward: one to fourteen query and key tiles, clusters with one tile of keys, of queries, or of both.
WIDE_BACKWARD: Final = _numbered(
    "backward",
    "bf16_d512_q203_s257_b2_h3_causal",
    "f16_d320_q130_s200_b1_h2_full",
    "bf16_d512_q1_s65_b2_h2_full",
    "f16_d512_q129_s900_b1_h2_causal_br",
    "bf16_d384_q64_s64_b1_h3_full",
    "bf16_d384_q64_s129_b1_h3_full_deterministic",
    "f16_d448_q799_s200_b1_h2_causal_window50",
    "bf16_d264v392_q300_s350_b2_h1_window_left20_right10",
    "f16_d40v264_q257_s129_b1_h2_causal_br",
    "bf16_d512v64_q65_s128_b1_h2_causal",
)
FORWARD: Final = (*_all("forward"), *MULTICAST, *WIDE)
BACKWARD: Final = (*_all("backward"), *ONE_BLOCK_PER_HEAD, *WIDE_BACKWARD)


def builds(arch: str = ARCH) -> list[tuple[Build, ...]]:
    """Every kernel that these cases need on an H100 or H200, once; each with its fallbacks if ptxas spills."""
    found: dict[tuple[Build, ...], None] = {}
    for case in (*FORWARD, *BACKWARD):  # few queries and many keys have kernels of their own
        for direction in ("forward", "backward"):
            changed = case.replace(direction=direction, num_splits_key=None)
            found[planner.builds(changed.problem(), arch)] = None
    for component_gemm in ALL_COMPONENT_GEMMS:
        found[(component_gemm.plan(1).build,)] = None
    for case in PTX_CASES:
        found[planner.builds(case.problem(), PTX_ARCH)] = None
    return list(found)
