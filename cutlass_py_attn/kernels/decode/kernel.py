"""Decode kernels (split-KV and persistent): which problems they take, their warps, grids and workspace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from cutlass_py_attn.integers import log2
from cutlass_py_attn.kernels.decode.layout import CUT_WORDS, MAX_QUERIES, decode_map, persistent_map, team_warps
from cutlass_py_attn.kernels.kernel import (
    BufferRule,
    FusedKernel,
    Refusals,
    block_registers,
    listed,
    no_products,
    no_tensor_maps,
    refuse,
)
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.expressions import ONE, Expr, Grid, Name, Number, call, ceil_div, maximum, minimum
from cutlass_py_attn.launch.gemm_spec import MMA_ROWS, WARP_THREADS
from cutlass_py_attn.launch.names import (
    BATCH,
    GROUP,
    NUM_HEADS,
    NUM_HEADS_KEY,
    NUM_KEYS,
    NUM_QUERIES,
    NUM_SMS,
    NUM_SPLITS_KEY,
)
from cutlass_py_attn.launch.smem import rows_copied_at_once
from cutlass_py_attn.launch.variants import MLA, PERSISTENT, STANDARD
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import F32_BYTES, FLOAT8, ITEM_BYTES, OPERANDS, WORD_BYTES
from cutlass_py_attn.score_terms import registry

MAX_ROWS: Final = 64  # queries of all heads of a group
MIN_KEYS: Final = 256
# The persistent kernel, for caches in pages: it takes any number of keys, and several tiles of query rows.
PERSISTENT_MAX_ROWS: Final = 128
TEAM_ROWS: Final = (2, 4, 8)  # blocks of a team beside 1: NHD pools have the rows of 8 heads in 2 KiB of memory
LEAST_KEYS: Final = (
    256  # that a block computes, if there are so many: fewer cost more in partial results than they save
)
FIXED_CHUNK: Final = 1024  # keys of a chunk whose partial results no other sequence changes
ALIGNED_TEAMS: Final = 1, 16  # of so many teams of variant mla, how many may idle so that the others have whole groups
THREAD_REGISTERS: Final = 192  # that a thread of the persistent kernel has at most in most builds
TILE_M: Final = (16, 32, 64)
WARPS: Final = (2, 4, 8)  # more would leave threads without an element of the narrowest output
SHARED_ROWS: Final = 32  # of a warp that shares a team: the outputs of 16 rows would not be aligned
MAX_HEAD_DIM: Final = {2: 256, 4: 128}  # by bytes per element
LEAST_COPY: Final = 4  # bytes: the least that cp.async copies
# Numbers of the persistent kernel's schedule that others name.
_ROWS, _TEAM_ROWS, _NUM_TEAMS, _FIXED_CHUNKS = Name("rows"), Name("team_rows"), Name("num_teams"), Name("fixed_chunks")


def _refusals(build: Build) -> Refusals:
    """Yields the rules of the decode kernels."""
    widest = MAX_HEAD_DIM[build.item_bytes]
    for field in ("head_dim", "head_dim_value"):
        if getattr(build, field) > widest:
            yield refuse(build, field, f"the decode kernels of {build.dtype} end at {widest}", "use family sm80")
    if build.vector_bytes < LEAST_COPY:
        yield refuse(build, "vector_bytes", f"cp.async copies at least {LEAST_COPY} bytes", "align rows to that")
        return
    if build.query_stages < 2:
        yield refuse(build, "query_stages", "one key tile is loaded while another is multiplied", "use 2 or more")
    if build.tile_m not in TILE_M:
        yield refuse(build, "tile_m", "query rows of all heads of a group", f"use {listed(TILE_M)}")
        return
    warps_of_team = team_warps(build.tile_m, build.columns_value, build.item_bytes)
    if warps_of_team > 1 and build.tile_m // warps_of_team < SHARED_ROWS:
        yield refuse(build, "tile_m", f"a warp holds {MMA_ROWS} rows of this head_dim_value", f"use {MMA_ROWS}")
        return
    if build.warps not in WARPS or build.warps % warps_of_team or build.warps * WARP_THREADS < build.tile_m:
        allowed = [warps for warps in WARPS if warps % warps_of_team == 0 and warps * WARP_THREADS >= build.tile_m]
        yield refuse(build, "warps", f"{build.tile_m} rows need teams of {warps_of_team}", f"use {listed((*allowed,))}")
        return
    teams = build.warps // warps_of_team
    if build.tile_n % (teams * MMA_ROWS):
        rule = f"each of {teams} teams has multiples of {MMA_ROWS} keys"
        yield refuse(build, "tile_n", rule, f"use a multiple of {teams * MMA_ROWS}")
        return
    if build.variant == PERSISTENT and not (build.has(registry.PAGED) or build.has(registry.KV8)):
        rule = "variant persistent reads caches in pages or of e4m3 codes"
        yield refuse(build, "variant", rule, "use the standard variant")
    if build.has(registry.KV8):
        yield from _kv8(build, build.tile_n // teams)
        return
    for columns in sorted({build.columns, build.columns_value}):
        threads = warps_of_team * WARP_THREADS
        at_once = rows_copied_at_once(threads, columns * build.item_bytes, build.vector_bytes)
        if build.tile_n // teams % at_once:
            rule = f"a team copies {at_once} rows at once"
            yield refuse(build, "tile_n", rule, f"use a multiple of {teams * at_once}")


def _kv8(build: Build, keys: int) -> Refusals:
    """An e4m3 cache; keys: of a team, of which each lane of a warp has the scales of one."""
    if build.variant != PERSISTENT:
        yield refuse(build, "variant", "of the decode kernels, variant persistent alone reads e4m3 codes", "use that")
    if build.item_bytes != 2:
        yield refuse(build, "dtype", "the query of an e4m3 cache has 16 bits", "use float16 or bfloat16")
    if keys > WARP_THREADS:
        yield refuse(build, "tile_n", f"a team has at most {WARP_THREADS} keys", "use fewer keys or more warps")


def unsupported_features(problem: Problem) -> tuple[str, ...]:
    """Returns what the problem has that the decode kernels do not take; empty if they take it."""
    shape, is_float8 = problem.shape, problem.dtype == FLOAT8
    widest = MAX_HEAD_DIM[ITEM_BYTES["float16" if is_float8 else problem.dtype]]
    persistent = is_persistent(problem)
    most_rows = PERSISTENT_MAX_ROWS if persistent else MAX_ROWS
    most_queries = PERSISTENT_MAX_ROWS if persistent else MAX_QUERIES
    tensors = (getattr(problem, name) for name in (*OPERANDS, "output"))
    present = {
        "backward": problem.direction == "backward",
        f"query of {FLOAT8}": is_float8,
        f"more than {most_queries} queries": shape.num_queries > most_queries,
        f"fewer than {MIN_KEYS} keys": shape.num_keys < MIN_KEYS and not persistent,
        f"more than {most_rows} queries of a group of heads": shape.num_queries * shape.group > most_rows,
        f"head dims beyond {widest}": max(shape.head_dim, shape.head_dim_value) > widest,
        f"rows aligned to less than {LEAST_COPY} bytes": min(t.vector_bytes for t in tensors) < LEAST_COPY,
    }
    missing = (PERSISTENT_FORWARD if persistent else FORWARD).lacks(problem)
    return (*missing, *(name for name, is_present in present.items() if is_present))


def is_persistent(problem: Problem) -> bool:
    """Returns whether the persistent kernel is the decode kernel of a problem: caches in pages or of e4m3 codes."""
    return problem.pages is not None or problem.has_e4m3_cache


def is_decode_step(problem: Problem) -> bool:
    """Returns whether the lengths are those of a decode step: few queries and many keys."""
    shape = problem.shape
    return problem.direction == "forward" and shape.num_queries <= MAX_QUERIES and shape.num_keys >= MIN_KEYS


def rejection_reason(problem: Problem) -> str:
    """Returns the end of a sentence: why no decode kernel computes this decode step; empty for other problems."""
    found = unsupported_features(problem) if is_decode_step(problem) else ()
    return f"; a decode kernel takes no {', '.join(found)}" if found else ""


def _with_warps(build: Build) -> Build:
    """Returns the build with its warps over (rows, teams)."""
    rows = team_warps(build.tile_m, build.columns_value, build.item_bytes)
    return replace(build, warps_scores=(rows, build.warps // rows))


def _accumulators(build: Build) -> int:
    """Returns the registers of a warp that has some rows, some keys and all columns of O; 0 without warps."""
    rows, teams = build.warps_scores
    if 0 in (rows, teams):
        return 0
    return build.tile_m // rows * (build.tile_n // teams + build.columns_value) * build.warps // build.threads


def row_tiles(build: Build) -> Expr:
    """Returns the tiles of the query rows of one key head."""
    return ceil_div(NUM_QUERIES * GROUP, build.tile_m)


def num_splits_key(build: Build) -> Expr:
    """Returns the blocks that share the keys of the same query rows, see split_kv.py."""
    row_blocks = row_tiles(build) * NUM_HEADS_KEY * BATCH
    return call("fewest_splits", row_blocks, ceil_div(NUM_KEYS, build.tile_n), NUM_SMS)


def blocks_per_sm(build: Build) -> int:
    """Returns the blocks of the persistent kernel that an SM holds, by shared memory and registers."""
    limits = architecture(build.arch)
    reserved = limits.reserved_shared_memory
    by_memory = (limits.shared_memory_per_block + reserved) // (build.shared_memory_bytes + reserved)
    return max(min(by_memory, limits.registers_per_sm // (build.threads * THREAD_REGISTERS)), 1)


def definitions(problem: Problem, build: Build) -> dict[str, Expr]:
    """Returns how many blocks share the keys of a row, or the schedule of those that share chunks."""
    return _schedule(problem, build) if build.shares_chunks else {"num_splits_key": num_splits_key(build)}


def _schedule(problem: Problem, build: Build) -> dict[str, Expr]:
    """Returns the numbers of the persistent kernel's schedule, kernels/decode/chunk_schedule.py.

    rows: tiles of query rows of all key heads of a sequence. team_rows: the largest power of two up to 8 that divides
    them. chunk_tiles: a power of two. chunks: the most chunks that all groups of rows can have; a sequence without keys
    has one.
    """
    is_fixed = problem.pages is not None and problem.pages.invariant
    chunk_tiles = 1 << log2(max(FIXED_CHUNK // build.tile_n, 1)) if is_fixed else 1
    least = 1 if is_fixed else max(LEAST_KEYS // build.tile_n, 1)
    of_row = ceil_div(NUM_KEYS, chunk_tiles * build.tile_n) + 1
    return {
        "chunk_tiles": Number(chunk_tiles),
        "least_chunks": Number(least),
        "fixed_chunks": Number(int(is_fixed)),
        "rows": row_tiles(build) * NUM_HEADS_KEY,
        "team_rows": sum(((_ROWS % width).equals(0) * (width // 2) for width in TEAM_ROWS), start=ONE),
        "chunks": _ROWS // _TEAM_ROWS * BATCH * of_row,
        **_num_teams(build),
        "num_blocks": _NUM_TEAMS * _TEAM_ROWS,
    }


def _num_teams(build: Build) -> dict[str, Expr]:
    """Returns the number of teams that share the chunks, and in variant mla what it follows from.

    Teams of variant mla are as many as share whole groups of rows, if hardly any block idles then: sequences of one
    length have no partial results, which are 128 KiB for each cut of a tile of rows.
    """
    most = NUM_SMS * blocks_per_sm(build) // _TEAM_ROWS
    least_teams = ceil_div(Name("chunks"), Name("least_chunks"))
    if build.variant != MLA:
        return {"num_teams": maximum(minimum(most, least_teams), 1)}
    idle, every = ALIGNED_TEAMS
    groups, rounds, most_teams = Name("groups"), Name("rounds"), Name("most_teams")
    is_even = (groups % rounds).equals(0) * (every * (groups // rounds) >= (every - idle) * most_teams)
    return {
        "most_teams": maximum(most, 1),
        "groups": _ROWS // _TEAM_ROWS * BATCH,
        "rounds": maximum(ceil_div(groups, most_teams), 1),
        "even_teams": most_teams + is_even * (groups // rounds - most_teams),
        "num_teams": maximum(minimum(Name("even_teams"), least_teams), 1),
    }


def combine_grid(build: Build) -> dict[str, Grid]:
    """Returns the grid of the combine kernel: a block for each row of the output, or for each that a team may cut."""
    if not build.shares_chunks:
        return {"combine": (NUM_QUERIES, NUM_HEADS, BATCH)}
    rows = _by_chunks(NUM_QUERIES, minimum(NUM_QUERIES * GROUP, build.tile_m))
    return {"combine": (rows, _by_chunks(NUM_HEADS, _TEAM_ROWS), _by_chunks(BATCH, _NUM_TEAMS))}


def _by_chunks(fixed: Expr, shared: Expr) -> Expr:
    """Returns the first number with fixed chunks, the second with those that teams share."""
    return _FIXED_CHUNKS * fixed + (1 - _FIXED_CHUNKS) * shared


def main_grid(build: Build) -> Grid:
    """Returns the grid of the main kernel."""
    if build.shares_chunks:
        return Name("num_blocks"), ONE, ONE
    return row_tiles(build) * NUM_SPLITS_KEY, NUM_HEADS_KEY, BATCH


def workspace(build: Build) -> tuple[BufferRule, ...]:
    """Returns the workspace buffers of a plan with several splits.

    partial_output: (splits, columns_value) float32 per query row
    partial_logsumexp: (splits,) float32 per query row, in base 2

    Of the persistent kernel they have rows for the tile of a slot, of which each block has two, or each chunk one.
    schedule: int32, where the start of each team cuts a row; with fixed chunks those before each sequence
    """
    if build.shares_chunks:
        of_teams = (1 - _FIXED_CHUNKS) * 2 * _NUM_TEAMS
        slots = (_FIXED_CHUNKS * Name("chunks") + of_teams) * _TEAM_ROWS * build.tile_m
        cuts = _FIXED_CHUNKS * (BATCH + 1) + (1 - _FIXED_CHUNKS) * _NUM_TEAMS * CUT_WORDS
        return (
            BufferRule("partial_output", slots * (build.columns_value * F32_BYTES)),
            BufferRule("partial_logsumexp", slots * F32_BYTES),
            BufferRule("schedule", cuts * WORD_BYTES),
        )
    rows, shares_keys = BATCH * NUM_HEADS * NUM_QUERIES * NUM_SPLITS_KEY, NUM_SPLITS_KEY > 1
    return (
        BufferRule("partial_output", rows * (build.columns_value * F32_BYTES), condition=shares_keys),
        BufferRule("partial_logsumexp", rows * F32_BYTES, condition=shares_keys),
    )


def _reason(problem: Problem, build: Build, values: Mapping[str, int]) -> str:
    return (
        f"decode kernels (mma.sync, cp.async): {_rows_in_tiles(problem, build)}, {values['num_splits_key']} blocks "
        "share the keys of each"
    )


def _persistent_reason(problem: Problem, build: Build, values: Mapping[str, int]) -> str:
    text = (
        f"persistent decode kernel (mma.sync, cp.async): {_rows_in_tiles(problem, build)}, {values['num_blocks']} "
        "blocks share the keys of all sequences"
    )
    text += ", whose pages and lengths they read on the device" if build.has(registry.PAGED) else ""
    return text + (", and convert e4m3 codes to float16" if build.has(registry.KV8) else "")


def _rows_in_tiles(problem: Problem, build: Build) -> str:
    rows = problem.shape.num_queries * problem.shape.group
    return f"{rows} query rows of a key head in tiles of {build.tile_m}"


FORWARD: Final = FusedKernel(
    kind="forward",
    family="decode",
    variant=STANDARD,
    module="decode.forward",
    summary="split-KV: the keys of a head split over blocks",
    layouts=registry.LAYOUTS,
    refusals=_refusals,
    with_warps=_with_warps,
    shared_memory=decode_map,
    products=no_products,
    accumulators=_accumulators,
    accumulator_limit=block_registers,
    main_grid=main_grid,
    other_grids=combine_grid,
    definitions=definitions,
    num_splits_key=num_splits_key,
    workspace=workspace,
    tensor_maps=no_tensor_maps,
    reason=_reason,
)
PERSISTENT_FORWARD: Final = replace(
    FORWARD,
    variant=PERSISTENT,
    module="decode.persistent",
    summary="persistent blocks over chunks of the keys of all sequences, whose lengths are in device memory",
    layouts=(*registry.LAYOUTS, registry.PAGED, registry.KV8, registry.KV8_ROW),
    terms=("softcap", "alibi", "sinks"),
    shared_memory=persistent_map,
    reason=_persistent_reason,
)
KERNELS: Final = (FORWARD, PERSISTENT_FORWARD)
