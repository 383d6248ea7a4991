"""Tile tables: the tiles of the fused kernels by dtype and head dim, the fastest first.

The planner chooses the first tile that fits the target's shared memory. The later tiles are for GPUs with 99 KiB of
shared memory per block, and for features that leave the first tile too few registers. The notes beside the kernels
say what each tile was measured against. For the sm90 family, tools/bench/results/plans.jsonl keeps the measurements
with GPU, clock, commit and command: tools/tuning/search_plans.py writes them, and tools/release/check_verified.py lists
the tiles that have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.kernels.sm90.rules import NARROW_HEAD_DIM, SCORE_ROWS_HEAD_DIMS, SM90_MAX_HEAD_DIM
from cutlass_py_attn.kernels.sm90_mla.layout import HEAD_DIMS as MLA_HEAD_DIMS
from cutlass_py_attn.kernels.sm90_wide.kernel import WIDE_MAX_HEAD_DIM
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.launch.variants import (
    DS_REGISTERS,
    E4M3,
    E4M3_CACHE,
    KEY_REGISTERS,
    MLA,
    MULTICAST,
    PER_HEAD,
    PERSISTENT,
    QUERY_HEADS,
    SPLIT_D,
    TWO_CTA,
    WIDE,
)
from cutlass_py_attn.plan.tile_options import with_options
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import FLOAT8, Shape
from cutlass_py_attn.score_terms import registry

_Table = Mapping[int, tuple[TileConfig, ...]]  # by the widest head dim that the tiles serve

_BLACKWELL = ("sm_100", "sm_120")
_FORWARD_16: _Table = {
    64: (TileConfig(128, 128, 4, not_on=_BLACKWELL), TileConfig(128, 64, 4)),
    128: (TileConfig(128, 64, 4, not_on=_BLACKWELL), TileConfig(64, 64, 4)),
    256: (TileConfig(64, 64, 4), TileConfig(64, 32, 4)),
}
# With score terms or dropout a thread needs registers for these, so tiles are narrower.
_FORWARD_16_SCORE_MOD: _Table = {
    64: (TileConfig(128, 64, 4), TileConfig(64, 64, 4)),
    128: (TileConfig(128, 32, 4), TileConfig(64, 64, 4), TileConfig(64, 32, 4)),
    256: (TileConfig(64, 64, 4), TileConfig(64, 32, 4)),
}
_FORWARD_32: _Table = {
    64: (TileConfig(128, 64, 4, not_on=_BLACKWELL), TileConfig(64, 64, 4, 1, 0, 3), TileConfig(64, 32, 4, 1, 0, 3)),
    128: (
        TileConfig(128, 32, 4, not_on=_BLACKWELL),
        TileConfig(64, 64, 4, 1, 0, 3, _BLACKWELL),
        TileConfig(64, 32, 4, 1, 0, 3),
    ),
}
_FORWARD_32_SCORE_MOD: _Table = {
    64: (TileConfig(128, 32, 4), TileConfig(64, 64, 4), TileConfig(64, 32, 4, 1, 0, 3)),
    128: (TileConfig(128, 32, 4), TileConfig(64, 32, 4, 1, 0, 3)),
}
# With a tile of the bias in shared memory, only one wide block fits on an SM.
_FORWARD_32_BIAS: _Table = {64: _FORWARD_32_SCORE_MOD[64], 128: (TileConfig(64, 32, 4, 1, 0, 3),)}
_BACKWARD_16: _Table = {
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
_BACKWARD_16_SCORE_MOD: _Table = {
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
_BACKWARD_16_SOFTCAP: _Table = {
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
_BACKWARD_32: _Table = {
    64: (TileConfig(64, 64, 4, 1, 1), TileConfig(32, 64, 4, 1, 1)),
    128: (TileConfig(64, 64, 8, 1, 1), TileConfig(32, 32, 8, 1, 1)),
}
_BACKWARD_32_SCORE_MOD: _Table = {
    64: (TileConfig(32, 64, 4, 1, 1), TileConfig(32, 64, 8, 1, 1)),
    128: (TileConfig(64, 64, 8, 1, 1), TileConfig(32, 64, 8, 1, 1, 3), TileConfig(32, 32, 8, 1, 1)),
}
_BACKWARD_32_SOFTCAP: _Table = {
    64: (TileConfig(64, 64, 4, 1, 1), TileConfig(32, 64, 4, 1, 1), TileConfig(32, 64, 8, 1, 1)),
    128: _BACKWARD_32_SCORE_MOD[128],
}
# By direction, whether float32, and the feature that needs more registers or shared memory.
_TABLES: dict[tuple[str, bool], dict[str, _Table]] = {
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
# By head_dim_value. One of the warpgroups loads. tile_time.py says when a short problem has another than the first.
_SM90_FORWARD: _Table = {
    64: (
        TileConfig(192, 128, 16, 2),
        TileConfig(128, 128, 12, 2),
        TileConfig(128, 208, 12, 2),
        TileConfig(64, 128, 8, 2),
        TileConfig(64, 64, 8, 2),
    ),
    96: (
        TileConfig(192, 112, 16, 2),
        TileConfig(192, 96, 16, 2),
        TileConfig(128, 128, 12, 2),
        TileConfig(128, 64, 12, 2),
        TileConfig(128, 208, 12, 2),
        TileConfig(64, 128, 8, 2),
        TileConfig(64, 64, 8, 2),
    ),
    128: (
        TileConfig(128, 128, 12, 2, variant=MULTICAST),
        TileConfig(128, 128, 12, 2),
        TileConfig(128, 64, 12, 2),
        TileConfig(64, 128, 8, 2),
        TileConfig(64, 64, 8, 2),
    ),
    256: (TileConfig(128, 64, 12, 2), TileConfig(64, 64, 8, 2)),
}
# With terms that ask for the tile table score_mod, three warpgroups have no registers for a wide tile.
_SM90_FORWARD_SCORE_MOD: _Table = {
    64: (TileConfig(192, 64, 16, 2), TileConfig(128, 128, 12, 2)),
    128: _SM90_FORWARD[128],
    256: _SM90_FORWARD[256],
}
# Nor with two edges of a mask.
_SM90_FORWARD_LOCAL: _Table = {
    **_SM90_FORWARD,
    64: _SM90_FORWARD[64][1:2],
    96: _SM90_FORWARD[96][1:4],
}
# By the wider head dim.
_SM90_FORWARD_WIDE: _Table = {WIDE_MAX_HEAD_DIM: (TileConfig(64, 64, 12, 2, variant=WIDE),)}
_SM90_FORWARD_MLA: _Table = {max(MLA_HEAD_DIMS): (TileConfig(64, 64, 12, 2, variant=MLA),)}
# The later tiles are for features that leave the first too few registers.
_SM90_FORWARD_E4M3: _Table = {
    64: (TileConfig(192, 128, 16, 2, variant=E4M3), TileConfig(128, 128, 12, 2, variant=E4M3)),
    192: (TileConfig(128, 128, 12, 2, variant=E4M3), TileConfig(128, 64, 12, 2, variant=E4M3)),
    256: (TileConfig(128, 64, 12, 2, variant=E4M3), TileConfig(64, 64, 8, 2, variant=E4M3)),
}
_SM90_FORWARD_E4M3_LOCAL: _Table = {
    64: (TileConfig(128, 128, 12, 2, variant=E4M3), TileConfig(128, 64, 12, 2, variant=E4M3)),
    192: (TileConfig(128, 64, 12, 2, variant=E4M3), TileConfig(64, 64, 8, 2, variant=E4M3)),
    256: _SM90_FORWARD_E4M3[256],
}
# By the wider head dim, whose codes of a tile a warpgroup has in registers. Windows and score terms leave the other
# warpgroups registers for fewer keys.
_SM90_FORWARD_E4M3_CACHE: _Table = {
    64: (TileConfig(192, 96, 16, 2, variant=E4M3_CACHE), TileConfig(128, 128, 12, 2, variant=E4M3_CACHE)),
    128: (TileConfig(128, 128, 12, 2, variant=E4M3_CACHE), TileConfig(128, 64, 12, 2, variant=E4M3_CACHE)),
    256: (TileConfig(128, 64, 12, 2, variant=E4M3_CACHE), TileConfig(64, 64, 8, 2, variant=E4M3_CACHE)),
}
_SM90_FORWARD_E4M3_CACHE_TERMS: _Table = {
    64: (TileConfig(128, 128, 12, 2, variant=E4M3_CACHE), TileConfig(128, 64, 12, 2, variant=E4M3_CACHE)),
    128: (TileConfig(128, 64, 12, 2, variant=E4M3_CACHE), TileConfig(64, 64, 8, 2, variant=E4M3_CACHE)),
    256: _SM90_FORWARD_E4M3_CACHE[256],
}
_SM90_BACKWARD: _Table = {
    64: (
        TileConfig(64, 64, 12, 4, 3),
        TileConfig(128, 64, 12, 3, 2),
        TileConfig(64, 128, 16, 4, 3, key_stages=2, variant=PER_HEAD),
        TileConfig(128, 128, 16, 3, 2, key_stages=2, variant=PER_HEAD),
        TileConfig(128, 128, 16, 3, 2, key_stages=2, variant=KEY_REGISTERS),
        TileConfig(128, 128, 16, 3, 2, key_stages=2, variant=DS_REGISTERS),
        TileConfig(128, 128, 16, 3, 2, key_stages=2),
    ),
    96: (
        TileConfig(64, 64, 12, 3, 2),
        TileConfig(64, 128, 16, 3, 2, key_stages=2, variant=PER_HEAD),
        TileConfig(64, 128, 16, 3, 2, variant=QUERY_HEADS),
        TileConfig(64, 128, 16, 3, 2, variant=DS_REGISTERS),
        TileConfig(64, 128, 16, 3, 2),
    ),
    128: (
        TileConfig(64, 64, 12, 3, 2),
        TileConfig(64, 128, 16, 3, 2, key_stages=2, variant=PER_HEAD),
        TileConfig(64, 128, 16, 3, 2, variant=PER_HEAD),
        TileConfig(64, 128, 16, 3, 2, key_stages=2, variant=QUERY_HEADS),
        TileConfig(64, 128, 16, 3, 2, variant=QUERY_HEADS),
        TileConfig(64, 128, 16, 3, 2, key_stages=2, variant=DS_REGISTERS),
        TileConfig(64, 128, 16, 3, 2, key_stages=2),
        TileConfig(64, 128, 16, 3, 2),
    ),
    192: (TileConfig(64, 64, 16, 3, 2, variant=TWO_CTA), TileConfig(64, 64, 16, 2, 2, variant=TWO_CTA)),
    256: (TileConfig(64, 64, 16, 2, 2, variant=TWO_CTA),),
}
# Without a mask one stage of K is 1 to 2 % faster at d 128 from s 4096 on, and as fast at s 2048; under a causal mask
# it loses 1 % at s 2048. At d 64 parts of key tiles are slower with the default usage level.
_SM90_BACKWARD_FULL: _Table = {
    **_SM90_BACKWARD,
    64: tuple(
        replace(tile, register_usage_level=7) if tile.variant == KEY_REGISTERS else tile for tile in _SM90_BACKWARD[64]
    ),
    128: tuple(replace(tile, key_stages=1) if tile.variant == DS_REGISTERS else tile for tile in _SM90_BACKWARD[128]),
}
_SM90_BACKWARD_WIDE: _Table = {WIDE_MAX_HEAD_DIM: (TileConfig(64, 64, 12, 2, 2, variant=WIDE),)}
# Key stages of narrow heads: with a mask, two are 2 to 7 % faster in variant key_registers, and were slower in the
# standard variant, unless the gradients are deterministic; with dropout, two leave little shared memory for its bits.
_SM90_BACKWARD_MASKED: _Table = {
    **_SM90_BACKWARD,
    64: (
        *_SM90_BACKWARD[64][:4],
        TileConfig(128, 128, 16, 3, 2, variant=QUERY_HEADS),
        TileConfig(128, 128, 16, 3, 2, key_stages=2, variant=KEY_REGISTERS),
        TileConfig(128, 128, 16, 3, 2, variant=KEY_REGISTERS),
        TileConfig(128, 128, 16, 3, 2, variant=DS_REGISTERS),
        TileConfig(128, 128, 16, 3, 2),
    ),
}
# A tile of the bias takes the shared memory of the second key stage, and of narrow heads that of 64 queries.
_SM90_BACKWARD_BIAS: _Table = {
    64: (
        TileConfig(64, 128, 16, 4, 3, key_stages=2, variant=PER_HEAD),
        TileConfig(64, 128, 16, 4, 3, variant=QUERY_HEADS),
        TileConfig(64, 128, 16, 4, 3, key_stages=2),
        TileConfig(64, 128, 16, 4, 3),
    ),
    96: (
        TileConfig(64, 128, 16, 3, 2, key_stages=2, variant=PER_HEAD),
        TileConfig(64, 128, 16, 3, 2, variant=QUERY_HEADS),
        TileConfig(64, 128, 16, 3, 2, variant=DS_REGISTERS),
        TileConfig(64, 128, 16, 3, 2),
    ),
    128: (
        TileConfig(64, 128, 16, 3, 2, variant=PER_HEAD),
        TileConfig(64, 128, 16, 3, 2, variant=QUERY_HEADS),
        TileConfig(64, 128, 16, 3, 2, variant=DS_REGISTERS),
        TileConfig(64, 128, 16, 3, 2),
    ),
}
_SM90_BACKWARD_SCORE_ROWS: _Table = {
    192: (  # dK and dV leave few registers
        TileConfig(64, 128, 16, 5, 4, score_rows=32, variant=QUERY_HEADS),
        TileConfig(64, 128, 16, 5, 4, score_rows=32),
    )
}
SM90: dict[str, _Table] = {
    "forward": _SM90_FORWARD,
    "forward score_mod": _SM90_FORWARD_SCORE_MOD,
    "forward local": _SM90_FORWARD_LOCAL,
    "forward wide": _SM90_FORWARD_WIDE,
    "forward mla": _SM90_FORWARD_MLA,
    "forward e4m3": _SM90_FORWARD_E4M3,
    "forward e4m3 cache": _SM90_FORWARD_E4M3_CACHE,
    "forward e4m3 cache terms": _SM90_FORWARD_E4M3_CACHE_TERMS,
    "forward e4m3 local": _SM90_FORWARD_E4M3_LOCAL,
    "backward": _SM90_BACKWARD,
    "backward full": _SM90_BACKWARD_FULL,
    "backward masked": _SM90_BACKWARD_MASKED,
    "backward bias": _SM90_BACKWARD_BIAS,
    "backward score_rows": _SM90_BACKWARD_SCORE_ROWS,
    "backward wide": _SM90_BACKWARD_WIDE,
}
# Decode kernels by the wider of both head dims; tile_m counts rows of queries and heads, stages are those of a team.
_DECODE_16: _Table = {
    64: (TileConfig(16, 128, 4, 3), TileConfig(16, 64, 4, 2)),
    128: (TileConfig(16, 128, 8, 3), TileConfig(16, 64, 4, 3), TileConfig(16, 64, 4, 2)),
    256: (TileConfig(16, 64, 4, 2), TileConfig(16, 32, 2, 2)),
}
_DECODE_32: _Table = {
    64: (TileConfig(16, 128, 8, 3), TileConfig(16, 64, 4, 3), TileConfig(16, 64, 4, 2)),
    128: (TileConfig(16, 64, 4, 3), TileConfig(16, 32, 2, 3), TileConfig(16, 32, 2, 2)),
}
# For more than 16 rows, and for more than 32 rows.
_DECODE_16_ROWS: _Table = {
    64: (TileConfig(32, 128, 4, 3), TileConfig(32, 64, 4, 2)),
    128: (TileConfig(32, 64, 4, 3), TileConfig(32, 64, 4, 2)),
}
_DECODE_32_ROWS: _Table = {64: (TileConfig(32, 64, 4, 3), TileConfig(32, 64, 4, 2))}
_DECODE_16_MORE: _Table = {
    64: (TileConfig(64, 128, 8, 5), TileConfig(64, 128, 8, 3), TileConfig(32, 64, 4, 2)),
    128: (
        TileConfig(64, 128, 8, 2, not_on=_BLACKWELL),
        TileConfig(64, 64, 8, 3),
        TileConfig(32, 64, 4, 3),
        TileConfig(32, 64, 4, 2),
    ),
}
_DECODE: dict[bool, dict[int, _Table]] = {  # by whether float32, and up to how many rows
    False: {16: _DECODE_16, 32: _DECODE_16_ROWS, 64: _DECODE_16_MORE},
    True: {16: _DECODE_32, 32: _DECODE_32_ROWS, 64: _DECODE_32_ROWS},
}
# The persistent kernel for a cache in pages has two blocks on an SM where they fit.
_PERSISTENT_16: _Table = {
    64: (TileConfig(16, 128, 4, 3), TileConfig(16, 64, 4, 2)),
    128: (TileConfig(16, 64, 4, 3), TileConfig(16, 64, 4, 2)),
    256: (TileConfig(16, 64, 4, 2), TileConfig(16, 32, 2, 2)),
}
# With so few rows (sequences times key heads) a block has hardly more than one, and one block on an SM has fewer pieces
# to join: 8 % faster at 1 x 8192 keys and 4 % at 8 x 8192 than two blocks, but 5 % slower at 256 x 1024 (H200).
_FEW_ROWS = 128
_PERSISTENT_16_FEW: _Table = {
    **_PERSISTENT_16,
    128: (TileConfig(16, 128, 8, 3), *_PERSISTENT_16[128]),
}
_PERSISTENT_16_MORE: _Table = {
    **_DECODE_16_MORE,
    128: (TileConfig(64, 128, 8, 3, not_on=_BLACKWELL), *_DECODE_16_MORE[128][1:]),
}
_PERSISTENT: dict[bool, dict[int, _Table]] = {
    False: {16: _PERSISTENT_16, 32: _DECODE_16_ROWS, 64: _PERSISTENT_16_MORE},
    True: {16: _DECODE_32, 32: _DECODE_32_ROWS, 64: _DECODE_32_ROWS},
}
# With an e4m3 cache: a warp has 32 keys, whose conversions hide each other's latency.
_KV8_16: _Table = {
    64: (TileConfig(16, 128, 4, 3), TileConfig(16, 64, 4, 2)),
    128: (TileConfig(16, 128, 4, 3), TileConfig(16, 64, 4, 3)),
    256: (TileConfig(16, 64, 4, 2), TileConfig(16, 32, 2, 2)),
}
_KV8_16_ROWS: _Table = {
    64: (TileConfig(32, 128, 4, 3), TileConfig(32, 64, 4, 2)),
    128: (TileConfig(32, 64, 4, 3), TileConfig(32, 64, 4, 2)),
}
_KV8_16_MORE: _Table = {
    64: (TileConfig(64, 128, 8, 5), TileConfig(64, 128, 8, 3), TileConfig(32, 64, 4, 2)),
    128: (TileConfig(64, 64, 8, 3), TileConfig(32, 64, 4, 3), TileConfig(32, 64, 4, 2)),
}
_KV8: dict[int, _Table] = {16: _KV8_16, 32: _KV8_16_ROWS, 64: _KV8_16_MORE}


def sm80_tiles(problem: Problem) -> tuple[TileConfig, ...]:
    """Returns the tiles of the sm80 family for this problem, the fastest first."""
    shape, wide = problem.shape, problem.dtype == "float32"
    tables = _TABLES[problem.direction, wide]
    table = tables[registry.tile_table(_register_features(problem), tables)]
    widest = max(shape.head_dim, shape.head_dim_value)
    if widest > max(table):
        return _SPLIT_D[problem.direction, wide]
    return (
        *table[min(size for size in table if size >= _accumulator_head_dim(problem))],
        *_SPLIT_D[problem.direction, wide],
    )


def sm90_tiles(problem: Problem) -> tuple[TileConfig, ...]:
    """Returns the tiles of the sm90 family for this problem, the fastest first, with their options."""
    table, head_dim = table_key(problem)
    return tuple(with_options(problem, tile) for tile in SM90[table][head_dim])


def table_key(problem: Problem) -> tuple[str, int]:
    """Returns the key of this problem's tiles in SM90: (name of the table, widest head dim that they serve)."""
    widest = max(problem.shape.head_dim, problem.shape.head_dim_value)
    needs_registers = problem.mask.form.has_left or any(t.needs_registers_sm90 for t in registry.present(problem))
    if is_mla(problem):
        name, served = "forward mla", problem.shape.head_dim
    elif problem.dtype == FLOAT8:
        name = "forward e4m3 local" if problem.mask.form.has_left else "forward e4m3"
        served = problem.shape.head_dim_value
    elif problem.has_e4m3_cache:
        name, served = "forward e4m3 cache terms" if needs_registers else "forward e4m3 cache", widest
    elif widest > SM90_MAX_HEAD_DIM:
        name, served = f"{problem.direction} wide", widest
    elif problem.direction == "backward":
        is_masked = (not problem.mask.form.sees_all and not problem.deterministic) or "dropout" in problem.features
        plain = "backward" if problem.deterministic else "backward full"
        name, served = "backward masked" if is_masked else plain, _accumulator_head_dim(problem)
        name = "backward bias" if "bias" in problem.features and served <= NARROW_HEAD_DIM else name
        name = "backward score_rows" if splits_score_rows(problem.shape) else name
    elif any(term.needs_registers_sm90 for term in registry.present(problem)):
        name, served = "forward score_mod", problem.shape.head_dim_value
    else:
        name = "forward local" if problem.mask.form.has_left else "forward"
        served = problem.shape.head_dim_value
    return name, min(size for size in SM90[name] if size >= served)


def is_mla(problem: Problem) -> bool:
    """Returns whether this is the forward of a latent cache that variant mla serves: value is in key, 576 / 512."""
    dims = problem.shape.head_dim, problem.shape.head_dim_value
    is_forward = problem.direction == "forward" and problem.dtype != FLOAT8
    return is_forward and problem.value_in_key and dims == MLA_HEAD_DIMS


def splits_score_rows(shape: Shape) -> bool:
    """Returns whether these head dims leave the sm90 backward registers for scores of a part of a query tile."""
    dims = shape.head_dim, shape.head_dim_value
    return max(dims) > NARROW_HEAD_DIM and all(
        dim <= most for dim, most in zip(dims, SCORE_ROWS_HEAD_DIMS, strict=True)
    )


def decode_tiles(problem: Problem) -> tuple[TileConfig, ...]:
    """Returns the tiles of the decode kernels for this problem, the fastest first."""
    shape = problem.shape
    widest = max(shape.head_dim, shape.head_dim_value)
    is_persistent = problem.pages is not None or problem.has_e4m3_cache
    tables = (_PERSISTENT if is_persistent else _DECODE)[problem.dtype == "float32"]
    if problem.has_e4m3_cache:
        tables = _KV8
    rows = shape.num_queries * shape.group
    table = next((table for most, table in tables.items() if rows <= most), tables[max(tables)])
    is_invariant = problem.pages is not None and problem.pages.invariant
    if widest > max(table) or is_invariant:  # a tile of its own for each count of rows would change the bits
        table = tables[min(tables)]
    if table is _PERSISTENT_16 and not is_invariant and shape.batch * shape.num_heads_key <= _FEW_ROWS:
        table = _PERSISTENT_16_FEW
    found = table[min(size for size in table if size >= widest)]
    return tuple(replace(tile, variant=PERSISTENT) for tile in found) if is_persistent else found


def _accumulator_head_dim(problem: Problem) -> int:
    """Returns the head dim that decides the tile of this problem's two head dims.

    A 16-bit forward accumulates O alone, a backward dK and dV. Narrow heads have registers for the wider of these.
    """
    dims = problem.shape.head_dim, problem.shape.head_dim_value
    if problem.dtype == "float32":
        return max(dims)
    if problem.direction == "forward":
        return dims[1]
    return max(dims) if max(dims) <= NARROW_HEAD_DIM else max(ceil_div(sum(dims), 2), NARROW_HEAD_DIM + 1)


def _register_features(problem: Problem) -> set[str]:
    """Returns the features for which the kernel needs more registers than for masked attention."""
    present = set(problem.features)
    wide = problem.shape.head_dim_value > 64
    if problem.direction == "forward" and problem.dtype != "float32" and wide and "varlen" not in present:
        # A 16-bit forward generates dropout bits before the scores exist, so they need no registers of their own.
        present.discard("dropout")
    return present
