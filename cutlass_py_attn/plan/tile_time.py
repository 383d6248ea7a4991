"""Tile time: which tile of a short forward of the sm90 family is estimated to be the fastest.

A short sequence fills few tiles, so that much of their work is padding, and the blocks share few work tiles. The
estimate, in microseconds on an H200, counts both:

    work tile   start + edge, if the mask is causal, + key_tile for each key tile that it visits
    problem     LAUNCH + the work tiles in turn on all blocks, but no less than the longest of them

Work tiles that are fewer than the SMs can be in parts, each with some of the key tiles (`shared_tiles.py`):

    problem     LAUNCH + JOIN + JOIN_BYTES for what parts store + a part of the longest work tile
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.plan import tile_order
from cutlass_py_attn.plan.shared_tiles import parts_of_few
from cutlass_py_attn.plan.tile_config import TileConfig
from cutlass_py_attn.plan.variants import SPLIT_KV
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import F32_BYTES, Shape

LEAST_GAIN: Final = 0.05  # part of the estimated time that another tile must save, because the estimates are not exact
LAUNCH: Final = 7.1  # microseconds of a launch beside its work tiles
GRAPH_LAUNCH: Final = 3.2  # the same in a CUDA graph, where a part of a short time that is saved is larger
JOIN: Final = 2.0  # microseconds of the kernel that joins parts
JOIN_BYTES: Final = 0.5e-6  # microseconds for each byte of partial outputs, which are stored and loaded
EDGE: Final = 0.42 / 128  # microseconds for each row of a work tile with a causal mask: its key tiles on the diagonal


@dataclass(frozen=True, slots=True)
class TileSpeed:
    """How fast a tile is computed, in microseconds.

    start: of a work tile, beside its key tiles: the first load, the last product, the store
    key_tile: of a key tile
    is_single: whether the tile is for keys of one tile alone, with neither a loop nor a rescaling
    """

    start: float
    key_tile: float
    is_single: bool = False


@dataclass(frozen=True, slots=True)
class TileSpeeds:
    """The speeds of the tiles of some head dims, by (tile_m, tile_n), and the longest sequence that was measured."""

    longest: int
    tiles: dict[tuple[int, int], TileSpeed]


# By the widest head dim that the numbers hold for: fits of the measurements in docs/tuning.md, of bf16 on an H200.
# At head dim 96, key tiles of 192x96 and 128x128 are fitted to s 8192 as well.
FORWARD: Final = {
    64: TileSpeeds(
        longest=2048,
        tiles={
            (192, 128): TileSpeed(start=1.1, key_tile=1.44),
            (128, 128): TileSpeed(start=0.86, key_tile=1.12),
            (128, 208): TileSpeed(start=0.86, key_tile=1.91, is_single=True),
            (64, 128): TileSpeed(start=0.4, key_tile=0.84),
            (64, 64): TileSpeed(start=0.3, key_tile=0.5),
        },
    ),
    96: TileSpeeds(
        longest=2048,
        tiles={
            (192, 112): TileSpeed(start=1.38, key_tile=1.6),
            (192, 96): TileSpeed(start=1.38, key_tile=1.4),
            (128, 128): TileSpeed(start=0.93, key_tile=1.35),
            (128, 208): TileSpeed(start=0.93, key_tile=2.31, is_single=True),
            (64, 128): TileSpeed(start=0.5, key_tile=0.95),
            (64, 64): TileSpeed(start=0.35, key_tile=0.56),
        },
    ),
    128: TileSpeeds(
        longest=2048,
        tiles={
            (128, 128): TileSpeed(start=2.0, key_tile=1.37),
            (64, 128): TileSpeed(start=1.0, key_tile=1.07),
            (64, 64): TileSpeed(start=0.6, key_tile=0.64),
        },
    ),
    256: TileSpeeds(
        longest=2048,
        tiles={
            (128, 64): TileSpeed(start=2.7, key_tile=1.12),
            (64, 64): TileSpeed(start=1.4, key_tile=0.9),
        },
    ),
}


# Of these head dims and lengths of queries and keys, blocks wait for memory, which the estimate does not see.
ONE_TILE_DIMS, ONE_TILE_LENGTHS = (96, 128), (64, 128)  # more than the first and up to the second

# Longer than what is compared: for those who ask for the tile of long sequences.
LONG_LENGTH: Final = max(speeds.longest for speeds in FORWARD.values()) + 128


def fastest_first(problem: Problem, tiles: Iterable[TileConfig], num_sms: int) -> list[TileConfig]:
    """Returns the tiles of a table, which has the fastest for long sequences first, in the order to try them.

    A tile that is estimated to save LEAST_GAIN becomes the first. Tiles for keys of one tile alone are left out if the
    keys need more, or if their speed is not known.
    """
    speeds = _speeds(problem)
    usable = [tile for tile in tiles if not is_single(tile) or (speeds and problem.shape.num_keys <= tile.tile_n)]
    times = {tile: estimate(problem, tile, num_sms) for tile in usable}
    known = {tile: time for tile, time in times.items() if time is not None}
    if not usable or usable[0] not in known:
        return usable
    best = min(known, key=known.__getitem__)
    one_tile = _one_tile(problem, num_sms)
    measured = [tile for tile in usable if (tile.tile_m, tile.tile_n) == one_tile]
    if not measured and not _saves_enough(known[best], known[usable[0]]):
        return usable
    first = measured[0] if measured else best
    return [first, *(tile for tile in usable if tile != first)]


def _one_tile(problem: Problem, num_sms: int) -> tuple[int, int] | None:
    """Returns the fastest tile of sequences of up to 128 queries and keys at d 128; None for others.

    A block of 128 queries starts with half of the keys. Two of 64 queries are faster while each has an SM, and under a
    causal mask, which hides half of the keys of the first, while each SM has at most two.
    """
    shape = problem.shape
    (least_dim, most_dim), (least, most) = ONE_TILE_DIMS, ONE_TILE_LENGTHS
    is_here = all(least < length <= most for length in (shape.num_queries, shape.num_keys))
    if not is_here or not all(least_dim < dim <= most_dim for dim in (shape.head_dim, shape.head_dim_value)):
        return None
    blocks = 2 * shape.batch * shape.num_heads
    return (64, 64) if blocks <= (2 if problem.mask.form == "causal" else 1) * num_sms else (128, 64)


def _saves_enough(chosen: float, usual: float) -> bool:
    in_graph = LAUNCH - GRAPH_LAUNCH
    return chosen - in_graph <= (1 - LEAST_GAIN) * (usual - in_graph)


def is_single(tile: TileConfig) -> bool:
    """Returns whether a tile is for keys of one tile alone."""
    found = (speeds.tiles.get((tile.tile_m, tile.tile_n)) for speeds in FORWARD.values())
    return any(speed is not None and speed.is_single for speed in found)


def reason(problem: Problem, tile: TileConfig, tiles: Iterable[TileConfig], num_sms: int) -> str:
    """Returns why this tile comes before the first of its table; "" if the estimate does not put it there."""
    first, *_ = tiles
    if tile.variant == SPLIT_KV:
        return ""
    if (tile.tile_m, tile.tile_n) == _one_tile(problem, num_sms) and _speeds(problem) and tile != first:
        return f"; tile {tile.tile_m}x{tile.tile_n} because it was measured to be faster for sequences of up to 128"
    chosen, usual = (estimate(problem, it, num_sms) for it in (tile, first))
    if chosen is None or usual is None or not _saves_enough(chosen, usual):
        return ""
    return (
        f"; tile {tile.tile_m}x{tile.tile_n} because the estimated time of these short sequences is "
        f"{chosen / usual:.0%} of that with {first.tile_m}x{first.tile_n}, which is faster for long ones"
    )


def estimate(problem: Problem, tile: TileConfig, num_sms: int) -> float | None:
    """Returns the estimated microseconds of a short problem with a tile; None if the speed is not known."""
    speed = _speeds(problem).get((tile.tile_m, tile.tile_n))
    return None if speed is None else _estimate(problem, tile, speed, num_sms)


def _estimate(problem: Problem, tile: TileConfig, speed: TileSpeed, num_sms: int) -> float:
    heads, start = problem.shape.batch * problem.shape.num_heads, _start(problem, tile, speed)
    times = [start + visited * speed.key_tile for visited in _visited(problem, tile)]
    # Of a causal mask the longest work tiles come first, so that the blocks end at about the same time.
    if problem.mask.form == "causal":
        return LAUNCH + max(heads * sum(times) / num_sms, max(times))
    return LAUNCH + ceil_div(heads * len(times), num_sms) * times[0]


def _visited(problem: Problem, tile: TileConfig) -> list[int]:
    """Returns the key tiles that each query tile of a head visits."""
    shape, tile_m, tile_n = problem.shape, tile.tile_m, tile.tile_n
    band = problem.mask.band(shape.num_queries, shape.num_keys)
    firsts_and_ends = (
        (tile_order.key_tile_start(band, i, tile_m, tile_n), tile_order.key_tile_end(band, i, tile_m, tile_n))
        for i in range(ceil_div(shape.num_queries, tile_m))
    )
    return [max(end - first, 1) for first, end in firsts_and_ends]


def faster_in_parts(problem: Problem, tiles: Iterable[TileConfig], usual: TileConfig, num_sms: int) -> list[TileConfig]:
    """Returns the tiles for few query tiles in parts, the fastest first, if it is estimated to be faster than `usual`.

    tiles: of variant split_kv. usual: the tile that the planner has without parts. None is faster if it saves less than
    LEAST_GAIN, or if the speed of `usual` is not known. Sequences of several lengths count as the longest.
    """
    speeds = _speeds_of(problem.shape)
    if problem.is_empty or speeds is None or (usual.tile_m, usual.tile_n) not in speeds.tiles:
        return []
    found = {
        tile: time
        for tile in tiles
        if _num_work_tiles(problem, tile) < num_sms
        if (time := _estimate_in_parts(problem, tile, speeds, num_sms)) is not None
    }
    whole = _estimate(problem, usual, speeds.tiles[usual.tile_m, usual.tile_n], num_sms)
    if not found or not _saves_enough(min(found.values()), whole):
        return []
    return sorted(found, key=found.__getitem__)


def _num_work_tiles(problem: Problem, tile: TileConfig) -> int:
    shape = problem.shape
    return ceil_div(shape.num_queries, tile.tile_m) * shape.batch * shape.num_heads


def _estimate_in_parts(problem: Problem, tile: TileConfig, speeds: TileSpeeds, num_sms: int) -> float | None:
    """Returns the estimated microseconds with parts; None if the kernel then has none, or its speed is not known."""
    speed, work_tiles = speeds.tiles.get((tile.tile_m, tile.tile_n)), _num_work_tiles(problem, tile)
    splits = parts_of_few(work_tiles, ceil_div(problem.shape.num_keys, tile.tile_n), num_sms)
    if speed is None or speed.is_single or splits == 1:
        return None
    stored = work_tiles * splits * tile.tile_m * problem.shape.head_dim_value * F32_BYTES
    visited = ceil_div(max(_visited(problem, tile)), splits)
    return LAUNCH + JOIN + JOIN_BYTES * stored + _start(problem, tile, speed) + visited * speed.key_tile


def _start(problem: Problem, tile: TileConfig, speed: TileSpeed) -> float:
    return speed.start + (problem.mask.form == "causal") * EDGE * tile.tile_m


def _speeds(problem: Problem) -> dict[tuple[int, int], TileSpeed]:
    """Returns the speeds of tiles for this problem; none for what nobody measured.

    That is longer sequences, windows and score terms. Variable lengths were measured, and gain nothing.
    """
    shape = problem.shape
    is_plain = (
        {*problem.features} <= {"grouped"} and problem.mask.form != "local" and problem.dtype in ("float16", "bfloat16")
    )
    if problem.direction != "forward" or not is_plain or problem.is_empty:
        return {}
    speeds = _speeds_of(shape)
    return speeds.tiles if speeds and max(shape.num_queries, shape.num_keys) <= speeds.longest else {}


def _speeds_of(shape: Shape) -> TileSpeeds | None:
    """Returns the speeds of tiles for these head dims; None if nobody measured any."""
    widest = max(shape.head_dim, shape.head_dim_value)
    return next((speeds for most, speeds in FORWARD.items() if widest <= most), None)
