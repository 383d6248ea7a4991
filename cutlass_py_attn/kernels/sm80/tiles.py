"""Tile table of the sm80 family: tiles by dtype and head dim, the fastest first.

The planner chooses the first tile that fits the target's shared memory. The later tiles are for GPUs with 99 KiB of
shared memory per block, and for features that leave the first tile too few registers.
"""

from __future__ import annotations

from cutlass_py_attn.kernels.problem_kind import ProblemKind
from cutlass_py_attn.launch.tile_config import BLACKWELL, TileConfig, Tiles
from cutlass_py_attn.launch.variants import SPLIT_D
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.score_terms import registry

_FORWARD_16: Tiles = {
    64: (TileConfig(128, 128, 4, not_on=BLACKWELL), TileConfig(128, 64, 4)),
    128: (TileConfig(128, 64, 4, not_on=BLACKWELL), TileConfig(64, 64, 4)),
    256: (TileConfig(64, 64, 4), TileConfig(64, 32, 4)),
}
# With score terms or dropout a thread needs registers for these, so tiles are narrower.
_FORWARD_16_SCORE_MOD: Tiles = {
    64: (TileConfig(128, 64, 4), TileConfig(64, 64, 4)),
    128: (TileConfig(128, 32, 4), TileConfig(64, 64, 4), TileConfig(64, 32, 4)),
    256: (TileConfig(64, 64, 4), TileConfig(64, 32, 4)),
}
_FORWARD_32: Tiles = {
    64: (TileConfig(128, 64, 4, not_on=BLACKWELL), TileConfig(64, 64, 4, 1, 0, 3), TileConfig(64, 32, 4, 1, 0, 3)),
    128: (
        TileConfig(128, 32, 4, not_on=BLACKWELL),
        TileConfig(64, 64, 4, 1, 0, 3, BLACKWELL),
        TileConfig(64, 32, 4, 1, 0, 3),
    ),
}
_FORWARD_32_SCORE_MOD: Tiles = {
    64: (TileConfig(128, 32, 4), TileConfig(64, 64, 4), TileConfig(64, 32, 4, 1, 0, 3)),
    128: (TileConfig(128, 32, 4), TileConfig(64, 32, 4, 1, 0, 3)),
}
# With a tile of the bias in shared memory, only one wide block fits on an SM.
_FORWARD_32_BIAS: Tiles = {64: _FORWARD_32_SCORE_MOD[64], 128: (TileConfig(64, 32, 4, 1, 0, 3),)}
_BACKWARD_16: Tiles = {
    32: (TileConfig(64, 128, 4, 2, 2), TileConfig(64, 64, 4, 2, 2)),
    64: (TileConfig(128, 128, 8, 2, 2), TileConfig(64, 64, 4, 2, 2)),
    96: (TileConfig(64, 64, 4, 1, 1), TileConfig(64, 64, 8, 1, 1)),
    128: (TileConfig(64, 128, 8, 2, 2), TileConfig(64, 64, 8, 1, 1)),
    160: (
        TileConfig(64, 96, 8, 1, 1),
        TileConfig(64, 64, 8, 2, 2),
        TileConfig(64, 64, 8, 1, 1),
        TileConfig(32, 64, 8, 1, 1),
    ),
    256: (TileConfig(64, 64, 8, 2, 2), TileConfig(64, 64, 8, 1, 1), TileConfig(32, 64, 8, 1, 1)),
}
_BACKWARD_16_SCORE_MOD: Tiles = {
    **_BACKWARD_16,
    96: (TileConfig(64, 64, 4, 1, 1), TileConfig(64, 128, 8, 2, 2), TileConfig(64, 64, 8, 1, 1)),
    128: (
        TileConfig(64, 128, 8, 2, 2),
        TileConfig(64, 64, 4, 1, 1),
        TileConfig(64, 64, 8, 1, 1),
        TileConfig(32, 64, 8, 1, 1),
    ),
}
# The slope of softcap stays in registers from S to dS.
_BACKWARD_16_SOFTCAP: Tiles = {
    64: (TileConfig(64, 64, 4, 2, 2), TileConfig(64, 64, 8, 1, 1)),
    96: (TileConfig(64, 64, 4, 1, 1), TileConfig(64, 64, 8, 1, 1)),
    128: (
        TileConfig(64, 96, 8, 2, 2),
        TileConfig(64, 64, 8, 2, 2),
        TileConfig(64, 64, 8, 1, 1),
        TileConfig(32, 64, 8, 1, 1),
    ),
    160: (TileConfig(64, 96, 8, 1, 1), TileConfig(64, 64, 8, 2, 2), TileConfig(32, 64, 8, 1, 1)),
    256: (TileConfig(64, 64, 8, 2, 2), TileConfig(32, 64, 8, 1, 1)),
}
_BACKWARD_32: Tiles = {
    64: (TileConfig(64, 64, 4, 1, 1), TileConfig(32, 64, 4, 1, 1)),
    128: (TileConfig(64, 64, 8, 1, 1), TileConfig(32, 32, 8, 1, 1)),
}
_BACKWARD_32_SCORE_MOD: Tiles = {
    64: (TileConfig(32, 64, 4, 1, 1), TileConfig(32, 64, 8, 1, 1)),
    128: (TileConfig(64, 64, 8, 1, 1), TileConfig(32, 64, 8, 1, 1, 3), TileConfig(32, 32, 8, 1, 1)),
}
_BACKWARD_32_SOFTCAP: Tiles = {
    64: (TileConfig(64, 64, 4, 1, 1), TileConfig(32, 64, 4, 1, 1), TileConfig(32, 64, 8, 1, 1)),
    128: _BACKWARD_32_SCORE_MOD[128],
}
# By direction, whether float32, and the feature that needs more registers or shared memory.
_TABLES: dict[tuple[str, bool], dict[str, Tiles]] = {
    ("forward", False): {"": _FORWARD_16, "score_mod": _FORWARD_16_SCORE_MOD},
    ("forward", True): {"": _FORWARD_32, "score_mod": _FORWARD_32_SCORE_MOD, "bias": _FORWARD_32_BIAS},
    ("backward", False): {"": _BACKWARD_16, "score_mod": _BACKWARD_16_SCORE_MOD, "softcap": _BACKWARD_16_SOFTCAP},
    ("backward", True): {"": _BACKWARD_32, "score_mod": _BACKWARD_32_SCORE_MOD, "softcap": _BACKWARD_32_SOFTCAP},
}
# For head dims beyond the tables above, or that do not fit: the head dim split over thread blocks (split-D).
_SPLIT_D: dict[tuple[str, bool], tuple[TileConfig, ...]] = {
    ("forward", False): (
        TileConfig(64, 128, 8, 4, head_dim_split=512, variant=SPLIT_D),
        TileConfig(64, 64, 8, 4, head_dim_split=512, variant=SPLIT_D),
        TileConfig(64, 64, 8, 2, head_dim_split=512, variant=SPLIT_D),
        TileConfig(64, 64, 8, 2, head_dim_split=256, variant=SPLIT_D),
    ),
    ("forward", True): (
        TileConfig(64, 128, 8, 3, head_dim_split=256, variant=SPLIT_D),
        TileConfig(64, 64, 8, 4, head_dim_split=256, variant=SPLIT_D),
        TileConfig(64, 64, 8, 2, head_dim_split=256, variant=SPLIT_D),
    ),
    ("backward", False): (
        TileConfig(64, 64, 8, 5, 5, head_dim_split=512, variant=SPLIT_D),
        TileConfig(64, 64, 8, 3, 3, head_dim_split=512, variant=SPLIT_D),
        TileConfig(64, 64, 8, 3, 3, head_dim_split=256, variant=SPLIT_D),
        TileConfig(64, 64, 8, 3, 3, head_dim_split=128, variant=SPLIT_D),
        TileConfig(64, 64, 8, 2, 2, head_dim_split=128, variant=SPLIT_D),
    ),
    ("backward", True): (
        TileConfig(64, 64, 8, 4, 4, head_dim_split=256, variant=SPLIT_D),
        TileConfig(64, 64, 8, 2, 2, head_dim_split=256, variant=SPLIT_D),
        TileConfig(32, 64, 8, 2, 2, head_dim_split=128, variant=SPLIT_D),
    ),
}


def sm80_tiles(problem: Problem) -> tuple[TileConfig, ...]:
    """Returns the tiles of the sm80 family for this problem, the fastest first."""
    shape, wide = problem.shape, problem.dtype == "float32"
    tables = _TABLES[problem.direction, wide]
    table = tables[registry.tile_table(_register_features(problem), tables)]
    widest = max(shape.head_dim, shape.head_dim_value)
    if widest > max(table):
        return _SPLIT_D[problem.direction, wide]
    return (
        *table[min(size for size in table if size >= ProblemKind.of(problem).accumulator_head_dim)],
        *_SPLIT_D[problem.direction, wide],
    )


def _register_features(problem: Problem) -> set[str]:
    """Returns the features for which the kernel needs more registers than for masked attention."""
    present = set(problem.features)
    wide = problem.shape.head_dim_value > 64
    if problem.direction == "forward" and problem.dtype != "float32" and wide and "varlen" not in present:
        # A 16-bit forward generates dropout bits before the scores exist, so they need no registers of their own.
        present.discard("dropout")
    return present
