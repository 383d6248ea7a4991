"""Decodes: problems of few queries and many keys, as lines of drawn.py, and the kernels that they need."""

from __future__ import annotations

from itertools import product
from typing import Final

from cutlass_py_attn import planner
from cutlass_py_attn.plan import Build, Plan
from tests.gpu.cases import ARCH
from tests.gpu.drawn import Drawn, builds_of

# (queries, heads, heads_key, batch): 1 to 64 rows of a key head, in one tile or several.
ROWS: Final = (
    (1, 2, 2, 3), (1, 8, 2, 2), (1, 16, 1, 1), (1, 33, 1, 1), (2, 6, 2, 2), (3, 12, 2, 2), (5, 2, 2, 3), (16, 2, 2, 2),
    (16, 8, 2, 1), (7, 9, 1, 1),
)  # fmt: skip
MASKS: Final = ("full", "causal", "causal_br", "causal_br:100", "causal:3", "window:300:2", "window:7:-", "window:-:5")
KEYS: Final = (256, 257, 319, 511, 640, 1025)
DIMS: Final = {
    "float16": ((64, 64), (128, 128), (40, 96), (256, 256), (8, 8), (36, 36)),
    "bfloat16": ((128, 128), (64, 64), (192, 128), (80, 40), (256, 64), (2, 6)),
    "float32": ((64, 64), (128, 128), (32, 32), (96, 40), (1, 3), (100, 128)),
}
LAYOUTS: Final = ("dense", "padded", "heads_first", "packed", "shifted")
SCALES: Final = (0.0, 0.0, 0.1, -0.05)
# queries/keys/used of each sequence: none of either, more queries than keys, more keys than are used
SEQUENCES: Final = (
    "1/400/400,1/0/0,1/3/3,0/50/50,1/257/257",
    "3/300/300,0/0/0,16/5/5,2/700/700,1/64/64",
    "4/512/300,1/256/0,2/90/90,4/1/1",
)


def _dense() -> list[Drawn]:
    """Every dtype with every count of rows and head dim, masks and layouts in turn."""
    found = []
    for number, ((dtype, dims), (step, rows)) in enumerate(product(DIMS.items(), enumerate(ROWS))):
        queries, heads, heads_key, batch = rows
        dim, dim_value = dims[(step + number) % len(dims)]
        layout = LAYOUTS[number % len(LAYOUTS)]
        if layout == "shifted" and dtype != "float32":  # rows of 2-byte alignment are not for these kernels
            layout = "dense"
        if layout == "packed" and (heads != heads_key or dim != dim_value):
            layout = "padded"
        found.append(
            Drawn(
                "forward", dtype, batch, heads, queries, KEYS[number % len(KEYS)], dim, dim_value, heads_key,
                MASKS[(step + number // len(ROWS)) % len(MASKS)], layout, SCALES[number % len(SCALES)], seed=number,
            )
        )  # fmt: skip
    return found


def _of_lengths() -> list[Drawn]:
    """Several sequences, one of them without queries or keys."""
    masks = "full", "causal_br", "window:90:0"
    return [
        Drawn(
            "forward", dtype, 1, 4, 1, 1, 64, heads_key=heads_key, mask=masks[(number + place) % 3],
            sequences=sequences, seqused="/300," in sequences and "512/" in sequences, seed=number,
        )
        for place, (dtype, heads_key) in enumerate((("float16", 2), ("bfloat16", 4), ("float32", 1)))
        for number, sequences in enumerate(SEQUENCES)
    ]  # fmt: skip


# So many heads that no keys are split on any GPU, with rows to spare and without.
UNSPLIT: Final = (
    Drawn("forward", "bfloat16", 90, 16, 1, 300, 64, heads_key=4, mask="causal_br", seed=1),
    Drawn("forward", "float16", 90, 4, 5, 270, 128, mask="window:100:1", layout="heads_first", seed=2),
    Drawn("forward", "float32", 90, 8, 2, 300, 64, heads_key=4, seed=3),
    Drawn("forward", "bfloat16", 90, 20, 2, 300, 64, heads_key=4, mask="causal:2", seed=4),
)
# Rows for a team of warps, and more than its last warp has any use for.
TEAMS: Final = (
    Drawn("forward", "bfloat16", 2, 8, 16, 700, 128, heads_key=2, mask="causal_br", seed=5),
    Drawn("forward", "float16", 1, 12, 11, 513, 64, heads_key=3, mask="window:200:3", layout="padded", seed=6),
    Drawn(
        "forward", "bfloat16", 1, 8, 1, 1, 128, heads_key=2, mask="causal_br", seed=7,
        sequences="16/700/700,3/300/300,0/20/20,9/4/4",
    ),
    Drawn("forward", "float16", 80, 8, 16, 300, 96, heads_key=2, seed=8),
)  # fmt: skip
# Many problems for each of the kernels that are shown and verified.
SHOWN: Final = tuple(
    Drawn(
        "forward", "bfloat16", batch, 8, queries, keys, 128, heads_key=2, mask=mask, layout=LAYOUTS[number % 3],
        scale=SCALES[number % 4], seed=100 + number,
    )
    for masks in (("full",), ("causal_br", "causal"))
    for number, (mask, (batch, queries), keys) in enumerate(
        product(masks, ((1, 1), (3, 4), (140, 2)), (256, 383, 640, 1023))
    )
)  # fmt: skip
ALL: Final = (*_dense(), *_of_lengths(), *UNSPLIT, *TEAMS, *SHOWN)


def shown_plans(arch: str = ARCH) -> list[Plan]:
    """A plan of each kernel that is shown, with all of its entries launched."""
    few = (one for one in SHOWN if one.batch == 1)
    return list({plan.build: plan for one in few if (plan := planner.plan(one.problem(), arch))}.values())


def of_build(build: Build) -> list[Drawn]:
    """The problems that this kernel is the best for."""
    return [one for one in ALL if planner.builds(one.problem(), build.arch)[0] == build]


def builds(arch: str = ARCH) -> list[tuple[Build, ...]]:
    """Every kernel that these problems need, once, and what stands in for it."""
    return builds_of(ALL, arch)
