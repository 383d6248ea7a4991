"""Plan table: the tiles of the fused kernels by dtype and head dim, the fastest first.

The planner takes the first row that fits the target's shared memory; the rows behind it serve parts with
99 KiB, and features that leave the first too few registers. What each row was measured against is in
docs/performance.md. Of the Hopper family's rows tools/bench/results/plans.jsonl keeps the measurements themselves with
GPU, clock, commit and command: tools/search_plans.py writes them, tools/check_verified.py says which rows have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cutlass_py_attn.parts.integers import ceil_div
from cutlass_py_attn.problem import Problem, Shape


@dataclass(frozen=True, slots=True)
class Tile:
    """One row: query rows, key rows, warps, stages of query and grad_output (0: the kernel has none), ptxas's
    register usage level (5 is its own choice), and targets for which ptxas spills whatever the level.
    column_block: columns of the head that a block accumulates where it cannot hold all; 0 for all.
    query_block: query rows whose scores a thread of the Hopper backward holds at once; 0 for all of the tile.
    key_stages: key tiles that a block of the Hopper backward holds.
    whole_heads: such a block takes all key tiles of a head; for problems of short heads only (hopper.suits_heads).
    multicast: two blocks of the Hopper forward load keys and values for both; for long causal ones only
    (hopper.suits_multicast)."""

    tile_m: int
    tile_n: int
    warps: int
    query_stages: int = 1
    grad_output_stages: int = 0
    register_usage_level: int = 5
    not_on: tuple[str, ...] = ()
    column_block: int = 0
    query_block: int = 0
    key_stages: int = 1
    whole_heads: bool = False
    multicast: bool = False


_Table = Mapping[int, tuple[Tile, ...]]  # by the widest padded head dim that the rows serve

NARROW = 128  # head dims whose tiles of the 16-bit backward have 128 keys
KEPT_IN_BLOCKS = 192, 128  # wider head_dim and head_dim_value for which the Hopper backward's still do
_BLACKWELL = ("sm_100", "sm_120")
_FORWARD_16: _Table = {
    64: (Tile(128, 128, 4, not_on=_BLACKWELL), Tile(128, 64, 4)),
    128: (Tile(128, 64, 4, not_on=_BLACKWELL), Tile(64, 64, 4)),
    256: (Tile(64, 64, 4), Tile(64, 32, 4)),
}
# With score terms or dropout a thread needs registers for them: tiles are narrower.
_FORWARD_16_TERMS: _Table = {
    64: (Tile(128, 64, 4), Tile(64, 64, 4)),
    128: (Tile(128, 32, 4), Tile(64, 64, 4), Tile(64, 32, 4)),
    256: (Tile(64, 64, 4), Tile(64, 32, 4)),
}
_FORWARD_32: _Table = {
    64: (Tile(128, 64, 4, not_on=_BLACKWELL), Tile(64, 64, 4, 1, 0, 3), Tile(64, 32, 4, 1, 0, 3)),
    128: (Tile(128, 32, 4, not_on=_BLACKWELL), Tile(64, 64, 4, 1, 0, 3, _BLACKWELL), Tile(64, 32, 4, 1, 0, 3)),
}
_FORWARD_32_TERMS: _Table = {
    64: (Tile(128, 32, 4), Tile(64, 64, 4), Tile(64, 32, 4, 1, 0, 3)),
    128: (Tile(128, 32, 4), Tile(64, 32, 4, 1, 0, 3)),
}
# A tile of the bias leaves room for one wide block on an SM only.
_FORWARD_32_BIAS: _Table = {64: _FORWARD_32_TERMS[64], 128: (Tile(64, 32, 4, 1, 0, 3),)}
_BACKWARD_16: _Table = {
    32: (Tile(64, 128, 4, 2, 2), Tile(64, 64, 4, 2, 2)),
    64: (Tile(128, 128, 8, 2, 2), Tile(64, 64, 4, 2, 2)),
    96: (Tile(64, 64, 4, 1, 1), Tile(64, 64, 8, 1, 1)),
    128: (Tile(64, 128, 8, 2, 2), Tile(64, 64, 8, 1, 1)),
    160: (Tile(64, 96, 8, 1, 1), Tile(64, 64, 8, 2, 2), Tile(64, 64, 8, 1, 1), Tile(32, 64, 8, 1, 1)),
    256: (Tile(64, 64, 8, 2, 2), Tile(64, 64, 8, 1, 1), Tile(32, 64, 8, 1, 1)),
}
_BACKWARD_16_TERMS: _Table = {
    **_BACKWARD_16,
    96: (Tile(64, 64, 4, 1, 1), Tile(64, 128, 8, 2, 2), Tile(64, 64, 8, 1, 1)),
    128: (Tile(64, 128, 8, 2, 2), Tile(64, 64, 4, 1, 1), Tile(64, 64, 8, 1, 1), Tile(32, 64, 8, 1, 1)),
}
# A softcap keeps its slope in registers from S to dS.
_BACKWARD_16_SOFTCAP: _Table = {
    64: (Tile(64, 64, 4, 2, 2), Tile(64, 64, 8, 1, 1)),
    96: (Tile(64, 64, 4, 1, 1), Tile(64, 64, 8, 1, 1)),
    128: (Tile(64, 96, 8, 2, 2), Tile(64, 64, 8, 2, 2), Tile(64, 64, 8, 1, 1), Tile(32, 64, 8, 1, 1)),
    160: (Tile(64, 96, 8, 1, 1), Tile(64, 64, 8, 2, 2), Tile(32, 64, 8, 1, 1)),
    256: (Tile(64, 64, 8, 2, 2), Tile(32, 64, 8, 1, 1)),
}
_BACKWARD_32: _Table = {
    64: (Tile(64, 64, 4, 1, 1), Tile(32, 64, 4, 1, 1)),
    128: (Tile(64, 64, 8, 1, 1), Tile(32, 32, 8, 1, 1)),
}
_BACKWARD_32_TERMS: _Table = {
    64: (Tile(32, 64, 4, 1, 1), Tile(32, 64, 8, 1, 1)),
    128: (Tile(64, 64, 8, 1, 1), Tile(32, 64, 8, 1, 1, 3), Tile(32, 32, 8, 1, 1)),
}
_BACKWARD_32_SOFTCAP: _Table = {
    64: (Tile(64, 64, 4, 1, 1), Tile(32, 64, 4, 1, 1), Tile(32, 64, 8, 1, 1)),
    128: _BACKWARD_32_TERMS[128],
}
# By direction, whether float32, and what asks for more registers or shared memory.
_TABLES: dict[tuple[str, bool], dict[str, _Table]] = {
    ("forward", False): {"": _FORWARD_16, "terms": _FORWARD_16_TERMS},
    ("forward", True): {"": _FORWARD_32, "terms": _FORWARD_32_TERMS, "bias": _FORWARD_32_BIAS},
    ("backward", False): {"": _BACKWARD_16, "terms": _BACKWARD_16_TERMS, "softcap": _BACKWARD_16_SOFTCAP},
    ("backward", True): {"": _BACKWARD_32, "terms": _BACKWARD_32_TERMS, "softcap": _BACKWARD_32_SOFTCAP},
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
# By head_dim_value; 128 more threads load.
_HOPPER_FORWARD: _Table = {
    64: (Tile(192, 128, 16, 2), Tile(128, 128, 12, 2)),
    96: (Tile(192, 96, 16, 2), Tile(128, 128, 12, 2), Tile(128, 64, 12, 2)),
    128: (Tile(128, 128, 12, 2, multicast=True), Tile(128, 128, 12, 2), Tile(128, 64, 12, 2)),
    256: (Tile(128, 64, 12, 2),),
}
# Three warpgroups have no registers for a wide tile with these.
_HOPPER_FORWARD_HELD: _Table = {
    64: (Tile(192, 64, 16, 2), Tile(128, 128, 12, 2)),
    128: _HOPPER_FORWARD[128],
    256: _HOPPER_FORWARD[256],
}
_HOPPER_FORWARD_LOCAL: _Table = {**_HOPPER_FORWARD, 64: _HOPPER_FORWARD[64][1:]}  # nor with two edges of a mask
_HELD = {"alibi", "bias", "dropout"}
_HOPPER_BACKWARD: _Table = {
    64: (Tile(128, 128, 16, 3, 2, key_stages=2, whole_heads=True), Tile(128, 128, 16, 3, 2, key_stages=2)),
    96: (Tile(64, 128, 16, 3, 2, key_stages=2, whole_heads=True), Tile(64, 128, 16, 3, 2)),
    128: (
        Tile(64, 128, 16, 3, 2, key_stages=2, whole_heads=True),
        Tile(64, 128, 16, 3, 2, whole_heads=True),
        Tile(64, 128, 16, 3, 2, key_stages=2),
        Tile(64, 128, 16, 3, 2),
    ),
    256: (Tile(64, 64, 16, 2, 2),),
}
# Long rows of narrow heads under a mask are slower with two key tiles; with dropout they leave its bits little room.
_HOPPER_BACKWARD_MASKED: _Table = {
    **_HOPPER_BACKWARD,
    64: (_HOPPER_BACKWARD[64][0], Tile(128, 128, 16, 3, 2)),
}
_HOPPER_BACKWARD_BLOCKS: _Table = {192: (Tile(64, 128, 16, 5, 4, query_block=32),)}  # dK and dV leave few registers
HOPPER: dict[str, _Table] = {
    "forward": _HOPPER_FORWARD,
    "forward held": _HOPPER_FORWARD_HELD,
    "forward local": _HOPPER_FORWARD_LOCAL,
    "backward": _HOPPER_BACKWARD,
    "backward masked": _HOPPER_BACKWARD_MASKED,
    "backward blocks": _HOPPER_BACKWARD_BLOCKS,
}
# Of the decode kernels, by the wider of both head dims; rows of queries and heads, and stages of each warp's ring.
_DECODE_16: _Table = {
    64: (Tile(16, 128, 4, 3), Tile(16, 64, 4, 2)),
    128: (Tile(16, 128, 8, 3), Tile(16, 64, 4, 3), Tile(16, 64, 4, 2)),
    256: (Tile(16, 64, 4, 2), Tile(16, 32, 2, 2)),
}
_DECODE_32: _Table = {
    64: (Tile(16, 128, 8, 3), Tile(16, 64, 4, 3), Tile(16, 64, 4, 2)),
    128: (Tile(16, 64, 4, 3), Tile(16, 32, 2, 3), Tile(16, 32, 2, 2)),
}
# Of more than 16 rows, and of more than 32.
_DECODE_16_ROWS: _Table = {
    64: (Tile(32, 128, 4, 3), Tile(32, 64, 4, 2)),
    128: (Tile(32, 64, 4, 3), Tile(32, 64, 4, 2)),
}
_DECODE_32_ROWS: _Table = {64: (Tile(32, 64, 4, 3), Tile(32, 64, 4, 2))}
_DECODE_16_MORE: _Table = {
    64: (Tile(64, 128, 8, 5), Tile(64, 128, 8, 3), Tile(32, 64, 4, 2)),
    128: (
        Tile(64, 128, 8, 3, not_on=_BLACKWELL),
        Tile(64, 64, 8, 3),
        Tile(32, 64, 4, 3),
        Tile(32, 64, 4, 2),
    ),
}
_DECODE: dict[bool, dict[int, _Table]] = {  # by whether float32, and up to how many rows
    False: {16: _DECODE_16, 32: _DECODE_16_ROWS, 64: _DECODE_16_MORE},
    True: {16: _DECODE_32, 32: _DECODE_32_ROWS, 64: _DECODE_32_ROWS},
}
_TERMS = ("softcap", "bias", "alibi", "dropout")  # the first of these that has a table of its own decides


def tiles(problem: Problem) -> tuple[Tile, ...]:
    """Candidate rows for this problem, widest first."""
    shape, wide = problem.shape, problem.dtype == "float32"
    tables = _TABLES[problem.direction, wide]
    present = [name for name in _TERMS if name in _asking(problem)]
    table = tables[next((name for name in present if name in tables), "terms" if present else "")]
    widest = max(shape.head_dim, shape.head_dim_value)
    if widest > max(table):
        return _STREAMED[problem.direction, wide]
    return (*table[min(size for size in table if size >= _held(problem))], *_STREAMED[problem.direction, wide])


def hopper_tiles(problem: Problem) -> tuple[Tile, ...]:
    """Candidate rows of the Hopper family, the fastest first; its head dims end where the tables do."""
    table, head_dim = hopper_place(problem)
    return HOPPER[table][head_dim]


def hopper_place(problem: Problem) -> tuple[str, int]:
    """Where this problem's rows stand in HOPPER: the name of the table and the widest head dim they serve."""
    if problem.direction == "backward":
        is_masked = problem.mask.form != "full" or "dropout" in problem.features
        name, served = "backward masked" if is_masked else "backward", _held(problem)
        name = "backward blocks" if kept_in_blocks(problem.shape) else name
    elif _HELD & set(problem.features):
        name, served = "forward held", problem.shape.head_dim_value
    else:
        name = "forward local" if problem.mask.form == "local" else "forward"
        served = problem.shape.head_dim_value
    return name, min(size for size in HOPPER[name] if size >= served)


def kept_in_blocks(shape: Shape) -> bool:
    """Whether these head dims leave the Hopper backward registers for a part of a query tile's scores only."""
    dims = shape.head_dim, shape.head_dim_value
    return max(dims) > NARROW and all(dim <= most for dim, most in zip(dims, KEPT_IN_BLOCKS, strict=True))


def decode_tiles(problem: Problem) -> tuple[Tile, ...]:
    """Candidate rows of the decode kernels, the fastest first."""
    shape = problem.shape
    widest = max(shape.head_dim, shape.head_dim_value)
    tables, rows = _DECODE[problem.dtype == "float32"], shape.num_queries * shape.group
    table = next(table for most, table in tables.items() if rows <= most)
    if widest > max(table):
        table = tables[min(tables)]
    return table[min(size for size in table if size >= widest)]


def _held(problem: Problem) -> int:
    """The head dim whose row serves this problem's two: a 16-bit forward holds O alone in registers, its backward both
    of dK and dV, and narrow heads have room for the wider of them."""
    dims = problem.shape.head_dim, problem.shape.head_dim_value
    if problem.dtype == "float32":
        return max(dims)
    if problem.direction == "forward":
        return dims[1]
    return max(dims) if max(dims) <= NARROW else max(ceil_div(sum(dims), 2), NARROW + 1)


def _asking(problem: Problem) -> set[str]:
    """The features that ask for more registers than masked attention."""
    present = set(problem.features)
    wide = problem.shape.head_dim_value > 64
    if problem.direction == "forward" and problem.dtype != "float32" and wide and "varlen" not in present:
        # A 16-bit forward draws its bits before the scores exist, and needs nothing for them but in long company.
        present.discard("dropout")
    return present
