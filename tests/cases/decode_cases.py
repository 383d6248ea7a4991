"""Decode cases: problems of few queries and many keys, and the kernels that they need."""

from __future__ import annotations

from itertools import product
from typing import Final

from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.spec import ProblemSpec, parse, parse_mask
from cutlass_py_attn.testing.cases import ARCH, Case, builds_of

# (queries, heads, heads of key, batch): 1 to 64 query rows of a key head, in one tile or several.
ROWS: Final = (
    (1, 2, 2, 3), (1, 8, 2, 2), (1, 16, 1, 1), (1, 33, 1, 1), (2, 6, 2, 2), (3, 12, 2, 2), (5, 2, 2, 3), (16, 2, 2, 2),
    (16, 8, 2, 1), (7, 9, 1, 1),
)  # fmt: skip
MASKS: Final = tuple(
    map(
        parse_mask,
        (
            "full", "causal", "causal_br", "causal_br_window100", "causal_window3", "window_left300_right2",
            "window_left7", "window_right5",
        ),
    )
)  # fmt: skip
KEYS: Final = (256, 257, 319, 511, 640, 1025)
DIMS: Final = {
    "float16": ((64, 64), (128, 128), (40, 96), (256, 256), (8, 8), (36, 36)),
    "bfloat16": ((128, 128), (64, 64), (192, 128), (80, 40), (256, 64), (2, 6)),
    "float32": ((64, 64), (128, 128), (32, 32), (96, 40), (1, 3), (100, 128)),
}
LAYOUTS: Final = ("dense", "padded", "heads_first", "packed", "shifted")
SCALES: Final = (None, None, 0.1, -0.05)
# Sequences without queries or keys, with more queries than keys, and with more keys than are used.
SEQUENCES: Final = (
    "n1x400,1x0,1x3,0x50,1x257",
    "n3x300,0,16x5,2x700,1x64",
    "n4x512u300,1x256u0,2x90u90,4x1u1",
)


def _dense() -> list[Case]:
    """Every dtype with every count of rows and every head dim; masks and layouts in turn."""
    found = []
    for number, ((dtype, dims), (step, rows)) in enumerate(product(DIMS.items(), enumerate(ROWS))):
        queries, heads, heads_key, batch = rows
        dim, dim_value = dims[(step + number) % len(dims)]
        layout = LAYOUTS[number % len(LAYOUTS)]
        if layout == "shifted" and dtype != "float32":  # decode kernels do not support rows aligned to 2 bytes
            layout = "dense"
        if layout == "packed" and (heads != heads_key or dim != dim_value):
            layout = "padded"
        spec = ProblemSpec(
            dtype,
            dim,
            num_queries=queries,
            num_keys=KEYS[number % len(KEYS)],
            batch=batch,
            num_heads=heads,
            head_dim_value=dim_value,
            num_heads_key=heads_key,
            mask=MASKS[(step + number // len(ROWS)) % len(MASKS)],
            scale=SCALES[number % len(SCALES)],
        )
        found.append(Case("forward", spec, layout=layout, seed=number))
    return found


def _variable_length() -> list[Case]:
    """Several sequences, of which one has no queries or no keys."""
    masks = "full", "causal_br", "window_left90_right0"
    return [
        Case("forward", parse(f"{dtype}_d64_{lengths}_h4k{heads_key}_{masks[(number + place) % 3]}"), seed=number)
        for place, (dtype, heads_key) in enumerate((("f16", 2), ("bf16", 4), ("f32", 1)))
        for number, lengths in enumerate(SEQUENCES)
    ]


def _shown() -> list[Case]:
    """Many problems for each of the kernels that ptx/ shows."""
    sizes = ((1, 1), (3, 4), (140, 2))  # (batch, queries)
    found = []
    for masks in (("full",), ("causal_br", "causal")):
        for number, (mask, (batch, queries), keys) in enumerate(product(masks, sizes, (256, 383, 640, 1023))):
            spec = parse(f"bf16_d128_q{queries}_s{keys}_b{batch}_h8k2_{mask}").replace(scale=SCALES[number % 4])
            found.append(Case("forward", spec, layout=LAYOUTS[number % 3], seed=100 + number))
    return found


# So many heads that no GPU splits the keys. Some have more rows than a tile needs.
UNSPLIT: Final = tuple(
    map(
        Case.parse,
        (
            "forward bf16_d64_q1_s300_b90_h16k4_causal_br seed=1",
            "forward f16_d128_q5_s270_b90_h4_window_left100_right1 layout=heads_first seed=2",
            "forward f32_d64_q2_s300_b90_h8k4_full seed=3",
            "forward bf16_d64_q2_s300_b90_h20k4_causal_window2 seed=4",
        ),
    )
)
# Enough rows for several warps along the queries; the last warp has some rows that no query needs.
SEVERAL_WARPS: Final = tuple(
    map(
        Case.parse,
        (
            "forward bf16_d128_q16_s700_b2_h8k2_causal_br seed=5",
            "forward f16_d64_q11_s513_b1_h12k3_window_left200_right3 layout=padded seed=6",
            "forward bf16_d128_n16x700,3x300,0x20,9x4_h8k2_causal_br seed=7",
            "forward f16_d96_q16_s300_b80_h8k2_full seed=8",
        ),
    )
)
SHOWN: Final = tuple(_shown())
ALL: Final = (*_dense(), *_variable_length(), *UNSPLIT, *SEVERAL_WARPS, *SHOWN)


def shown_plans(arch: str = ARCH) -> list[Plan]:
    """A plan of each kernel that ptx/ shows, with all of its entries launched."""
    unbatched = (case for case in SHOWN if case.spec.batch == 1)
    plans = (planner.plan(case.problem(), arch) for case in unbatched)
    return list({plan.build: plan for plan in plans}.values())


def of_build(build: Build) -> list[Case]:
    """The cases that this kernel is the best for."""
    return [case for case in ALL if planner.builds(case.problem(), build.arch)[0] == build]


def builds(arch: str = ARCH) -> list[tuple[Build, ...]]:
    """Every kernel that these cases need, once; each with its fallbacks if ptxas spills."""
    return builds_of(ALL, arch)
