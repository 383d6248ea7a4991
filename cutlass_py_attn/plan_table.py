"""Plan table: the tiles of the fused kernels by dtype and padded head dim, widest first.

The planner takes the first row that fits the target's shared memory; the rows behind it serve parts with
99 KiB. What each row was measured against is in docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cutlass_py_attn.problem import Problem


@dataclass(frozen=True, slots=True)
class Tile:
    """One row: query rows, key rows, warps, stages of query and grad_output (0: the kernel has none), ptxas's
    register usage level (5 is its own choice), and targets for which ptxas spills whatever the level.
    column_block: columns of the head that a block accumulates where it cannot hold all; 0 for all."""

    tile_m: int
    tile_n: int
    warps: int
    query_stages: int = 1
    grad_output_stages: int = 0
    register_usage_level: int = 5
    not_on: tuple[str, ...] = ()
    column_block: int = 0


_Table = Mapping[int, tuple[Tile, ...]]  # by the widest padded head dim that the rows serve

_BLACKWELL = ("sm_100", "sm_120")
_FORWARD_16: _Table = {
    64: (Tile(128, 128, 4, not_on=_BLACKWELL), Tile(128, 64, 4)),
    128: (Tile(128, 64, 4, not_on=_BLACKWELL), Tile(64, 64, 4)),
    256: (Tile(128, 64, 8), Tile(64, 64, 4), Tile(64, 32, 4)),
}
# With score terms or dropout a thread needs registers for them: tiles are narrower.
_FORWARD_16_TERMS: _Table = {
    64: (Tile(128, 64, 4), Tile(64, 64, 4)),
    128: (Tile(128, 32, 4), Tile(64, 64, 4), Tile(64, 32, 4)),
    256: (Tile(128, 64, 8), Tile(64, 32, 4)),
}
_FORWARD_32: _Table = {128: (Tile(64, 64, 4, 1, 0, 3, _BLACKWELL), Tile(64, 32, 4, 1, 0, 3))}
_FORWARD_32_TERMS: _Table = {128: (Tile(64, 32, 4, 1, 0, 3),)}
_BACKWARD_16: _Table = {
    64: (Tile(128, 128, 8, 2, 2), Tile(64, 128, 8, 1, 1)),
    128: (Tile(64, 128, 8, 2, 2), Tile(64, 64, 8, 1, 1)),
    256: (Tile(64, 64, 8, 1, 1), Tile(32, 64, 8, 1, 1)),
}
_BACKWARD_16_TERMS: _Table = {
    64: (Tile(128, 128, 8, 2, 2), Tile(64, 128, 8, 1, 1)),
    128: (Tile(64, 128, 8, 2, 2), Tile(64, 128, 8, 1, 1), Tile(64, 64, 8, 1, 1), Tile(32, 64, 8, 1, 1)),
    256: (Tile(64, 64, 8, 1, 1), Tile(32, 64, 8, 1, 1)),
}
_BACKWARD_32: _Table = {
    64: (Tile(64, 64, 4, 1, 1), Tile(32, 64, 4, 1, 1)),
    128: (Tile(64, 64, 8, 1, 1, 3), Tile(32, 32, 8, 1, 1)),
}
_BACKWARD_32_TERMS: _Table = {
    64: (Tile(64, 64, 8, 1, 1), Tile(32, 64, 4, 1, 1)),
    128: (Tile(32, 64, 8, 1, 1, 3), Tile(32, 32, 8, 1, 1)),
}
# A softcap keeps its slope in registers from S to dS.
_BACKWARD_16_SOFTCAP: _Table = {
    64: (Tile(64, 128, 8, 1, 1), Tile(64, 64, 8, 1, 1)),
    128: (Tile(64, 64, 8, 1, 1), Tile(32, 64, 8, 1, 1)),
    256: (Tile(32, 64, 8, 1, 1),),
}
_BACKWARD_32_SOFTCAP: _Table = {64: (Tile(32, 64, 8, 1, 1),), 128: (Tile(32, 32, 8, 1, 1),)}
# By direction, whether float32, and what asks for more registers: nothing, terms (or dropout), softcap.
_TABLES: dict[tuple[str, bool, str], _Table] = {
    ("forward", False, ""): _FORWARD_16,
    ("forward", False, "terms"): _FORWARD_16_TERMS,
    ("forward", False, "softcap"): _FORWARD_16_TERMS,
    ("forward", True, ""): _FORWARD_32,
    ("forward", True, "terms"): _FORWARD_32_TERMS,
    ("forward", True, "softcap"): _FORWARD_32_TERMS,
    ("backward", False, ""): _BACKWARD_16,
    ("backward", False, "terms"): _BACKWARD_16_TERMS,
    ("backward", False, "softcap"): _BACKWARD_16_SOFTCAP,
    ("backward", True, ""): _BACKWARD_32,
    ("backward", True, "terms"): _BACKWARD_32_TERMS,
    ("backward", True, "softcap"): _BACKWARD_32_SOFTCAP,
}
# What serves a head that no row above does, or has no room for: a block of columns at a time.
_STREAMED: dict[tuple[str, bool], tuple[Tile, ...]] = {
    ("forward", False): (
        Tile(64, 128, 8, 4, column_block=512),
        Tile(64, 64, 8, 4, column_block=512),
        Tile(64, 64, 8, 2, column_block=512),
        Tile(64, 64, 8, 2, column_block=256),
    ),
    ("forward", True): (
        Tile(64, 128, 8, 3, column_block=256),
        Tile(64, 64, 8, 4, column_block=256),
        Tile(64, 64, 8, 2, column_block=256),
    ),
    ("backward", False): (
        Tile(64, 64, 8, 5, 5, column_block=512),
        Tile(64, 64, 8, 3, 3, column_block=512),
        Tile(64, 64, 8, 3, 3, column_block=256),
        Tile(64, 64, 8, 3, 3, column_block=128),
        Tile(64, 64, 8, 2, 2, column_block=128),
    ),
    ("backward", True): (
        Tile(64, 64, 8, 4, 4, column_block=256),
        Tile(64, 64, 8, 2, 2, column_block=256),
        Tile(32, 64, 8, 2, 2, column_block=128),
    ),
}
_TERMS = frozenset({"alibi", "bias", "dropout"})


def tiles(problem: Problem) -> tuple[Tile, ...]:
    """Candidate rows for this problem, widest first."""
    shape, wide = problem.shape, problem.dtype == "float32"
    table = _TABLES[problem.direction, wide, _more_registers(problem)]
    widest = max(shape.head_dim, shape.head_dim_value)
    size = min((size for size in table if size >= widest), default=0)
    return (*table.get(size, ()), *_STREAMED[problem.direction, wide])


def _more_registers(problem: Problem) -> str:
    """What the problem's kernels hold beside the accumulators: nothing, terms or softcap."""
    present = set(problem.features)
    if "softcap" in present:
        return "softcap"
    wide = max(problem.shape.head_dim, problem.shape.head_dim_value) > 64
    if problem.direction == "forward" and problem.dtype != "float32" and wide and "varlen" not in present:
        # A 16-bit forward draws its bits before the scores exist, and needs nothing for them but in long company.
        present.discard("dropout")
    return "terms" if present & _TERMS else ""
