"""Decode: which problems the decode kernels take, what a warp of theirs holds, and how keys are split over blocks.

The rows of a block's tile are the queries of all heads that share a key head: row r is query r // group of head
r % group. Every team of warps walks keys of its own; a team has as many warps as the rows of the tile need.
"""

from __future__ import annotations

from cutlass_py_attn.budget import MMA_ROWS
from cutlass_py_attn.parts.integers import ceil_div, round_up
from cutlass_py_attn.plan import Buffer, Build
from cutlass_py_attn.problem import F32_BYTES, ITEM_BYTES, OPERANDS, Problem, Shape
from cutlass_py_attn.shared_memory import stack, tile_bytes

FEATURES = ("grouped", "seqused", "varlen")  # those that the kernels have
MAX_QUERIES = 16
MAX_ROWS = 64  # queries of all heads of a group
MIN_KEYS = 256
MAX_HEAD_DIM = {2: 256, 4: 128}  # by bytes per element
LEAST_COPY = 4  # bytes: what cp.async copies at least
WARP_OUTPUT = {2: 4096, 4: 2048}  # elements, rows by columns, of the output of one warp; by bytes per element
SLOT_ALIGNMENT = 512
BLOCK_TILES = 1  # key tiles that starting and joining a block take the time of
MAX_SPLITS = 256


def lacking(problem: Problem) -> tuple[str, ...]:
    """What this problem has that the decode kernels do not take; empty where they take it."""
    shape, item_bytes = problem.shape, ITEM_BYTES[problem.dtype]
    widest = MAX_HEAD_DIM[item_bytes]
    tensors = (getattr(problem, name) for name in (*OPERANDS, "output"))
    present = {
        "backward": problem.direction == "backward",
        f"more than {MAX_QUERIES} queries": shape.num_queries > MAX_QUERIES,
        f"fewer than {MIN_KEYS} keys": shape.num_keys < MIN_KEYS,
        f"more than {MAX_ROWS} queries of a group of heads": shape.num_queries * shape.group > MAX_ROWS,
        f"head dims beyond {widest}": max(shape.head_dim, shape.head_dim_value) > widest,
        f"rows aligned to less than {LEAST_COPY} bytes": min(t.access_bytes for t in tensors) < LEAST_COPY,
    }
    found = [name for name in problem.features if name not in FEATURES]
    return (*found, *(name for name, is_present in present.items() if is_present))


def is_shaped_so(problem: Problem) -> bool:
    """Whether the lengths are those of a decode step."""
    shape = problem.shape
    return problem.direction == "forward" and shape.num_queries <= MAX_QUERIES and shape.num_keys >= MIN_KEYS


def why_not(problem: Problem) -> str:
    """The end of a sentence: what keeps a decode step from these kernels; empty for other problems."""
    found = lacking(problem) if is_shaped_so(problem) else ()
    return f"; a decode kernel takes no {', '.join(found)}" if found else ""


def why(shape: Shape, build: Build, splits: int) -> str:
    """What the kernels of this plan do."""
    rows = shape.num_queries * shape.group
    return (
        f"decode kernels (mma.sync, cp.async): {rows} query rows of a key head in tiles of {build.tile_m}, {splits} "
        "blocks share the keys of each"
    )


def row_tiles(shape: Shape, tile_m: int) -> int:
    """Blocks that share the queries of one key head."""
    return max(ceil_div(shape.num_queries * shape.group, tile_m), 1)


def team_warps(tile_m: int, columns_value: int, item_bytes: int) -> int:
    """Warps that share the rows of a tile: each holds 16 of them, or 32 where there is room for their output."""
    wide = 2 * MMA_ROWS * columns_value <= WARP_OUTPUT[item_bytes]
    return max(tile_m // (2 * MMA_ROWS if wide else MMA_ROWS), 1)


def team_keys(build: Build) -> int:
    """Keys of a tile that one team has."""
    return build.tile_n // build.scores[1]


def slot_bytes(build: Build) -> tuple[int, int]:
    """(bytes of a team's keys, bytes of its values) in one slot of its ring."""
    rows = team_keys(build)
    key, value = (
        round_up(tile_bytes(build.dtype, rows, columns), SLOT_ALIGNMENT)
        for columns in (build.columns, build.columns_value)
    )
    return key, value


def joined_bytes(build: Build) -> int:
    """One team's float32 output, where its ring was."""
    return round_up(tile_bytes("float32", build.tile_m, build.columns_value), SLOT_ALIGNMENT)


def decode_map(build: Build) -> tuple[Buffer, ...]:
    """The query tile; the rings of all teams (reused for their outputs); maximum, or factor, and sum of each row."""
    teams = build.scores[1]
    ring = teams * build.query_stages * sum(slot_bytes(build))
    return stack(
        ("query", tile_bytes(build.dtype, build.tile_m, build.columns), 0, 1),
        ("ring", max(ring, teams * joined_bytes(build)), 0, 4),
        ("statistics", 2 * teams * build.tile_m * F32_BYTES, 4, 4),
    )


def combine_bytes(build: Build, warps: int) -> int:
    """Shared memory of the kernel that joins the splits: what each of its warps has of a row."""
    return warps * build.columns_value * F32_BYTES


def num_splits(shape: Shape, build: Build, num_sms: int) -> int:
    """Blocks that share the keys of the same rows."""
    groups = row_tiles(shape, build.tile_m) * shape.num_heads_key * shape.batch
    return fewest_splits(groups, ceil_div(shape.num_keys, build.tile_n), num_sms)


def fewest_splits(groups: int, key_tiles: int, num_sms: int) -> int:
    """Blocks that share the keys of the same rows, where `groups` blocks have different rows or keys.

    The fewest for which the SM with the most blocks has the least to do; a block that is started and joined counts
    BLOCK_TILES tiles more. How many of its blocks an SM runs at a time does not matter: they share its bandwidth.
    """

    def work(splits: int) -> int:
        return ceil_div(max(groups, 1) * splits, num_sms) * (ceil_div(key_tiles, splits) + BLOCK_TILES)

    return min(range(1, max(min(key_tiles, MAX_SPLITS), 1) + 1), key=work)


def grids(shape: Shape, build: Build, splits: int) -> dict[str, tuple[int, int, int]]:
    """The grid of each entry by its role: blocks of a key head, and for several splits one for each query row."""
    found = {"main": (row_tiles(shape, build.tile_m) * splits, shape.num_heads_key, shape.batch)}
    return found | ({"combine": (shape.num_queries, shape.num_heads, shape.batch)} if splits > 1 else {})


def partial_bytes(shape: Shape, build: Build, splits: int) -> tuple[tuple[str, int], ...]:
    """Parts of the workspace, in bytes: float32 output and logsumexp (base 2) of each row and split; none for one."""
    if splits == 1:
        return ()
    rows = shape.batch * shape.num_heads * shape.num_queries * splits
    return ("partial_output", rows * build.columns_value * F32_BYTES), ("partial_logsumexp", rows * F32_BYTES)
