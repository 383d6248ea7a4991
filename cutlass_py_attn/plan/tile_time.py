"""Tile time: which tile of a short forward of the sm90 family is estimated to be the fastest.

A short sequence fills few tiles, so that much of their work is padding, and the blocks share few work tiles. The
estimate counts both. It is in units of (queries x keys) / (TFLOP/s) and serves to compare tiles of one problem.

    work tile   tile_m * (keys of the key tiles that it visits + start) / rate
    problem     the work tiles in turn on all blocks, but no less than the longest of them
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.plan import tile_order
from cutlass_py_attn.plan.tile_config import TileConfig
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.score_terms import registry

SHORT_LENGTH: Final = 2048  # queries and keys up to which tiles are compared; longer problems have the first of a table
LEAST_GAIN: Final = 0.1  # part of the estimated time that another tile must save


@dataclass(frozen=True, slots=True)
class TileSpeed:
    """How fast a tile is computed.

    rate: TFLOP/s of its key tiles
    start: what a work tile takes beside its key tiles, in keys: the first load, the last product, the store
    is_single: whether the tile is for keys of one tile alone, with neither a loop nor a rescaling
    """

    rate: int
    start: int
    is_single: bool = False


# By the widest head dim that the numbers hold for, and (tile_m, tile_n). They reproduce measurements on an H200 of bf16
# d 64, full: b 256, h 12, s 197, and b 8, h 12, s 512. docs/performance.md has these.
FORWARD: Final[dict[int, dict[tuple[int, int], TileSpeed]]] = {
    64: {
        (192, 128): TileSpeed(560, 115),
        (128, 128): TileSpeed(365, 32),
        (128, 208): TileSpeed(300, 0, is_single=True),
    },
}


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
    if known[best] > (1 - LEAST_GAIN) * known[usable[0]]:
        return usable
    return [best, *(tile for tile in usable if tile != best)]


def is_single(tile: TileConfig) -> bool:
    """Returns whether a tile is for keys of one tile alone."""
    found = (speeds.get((tile.tile_m, tile.tile_n)) for speeds in FORWARD.values())
    return any(speed is not None and speed.is_single for speed in found)


def reason(problem: Problem, tile: TileConfig, tiles: Iterable[TileConfig], num_sms: int) -> str:
    """Returns why this tile was chosen in place of the first of its table; "" for the first one."""
    first, *_ = tiles
    chosen, usual = (estimate(problem, it, num_sms) for it in (tile, first))
    if tile == first or chosen is None or usual is None:
        return ""
    return (
        f"; tile {tile.tile_m}x{tile.tile_n} because the estimated time of these short sequences is "
        f"{chosen / usual:.0%} of that with {first.tile_m}x{first.tile_n}, which is faster for long ones"
    )


def estimate(problem: Problem, tile: TileConfig, num_sms: int) -> float | None:
    """Returns the estimated time of a short problem with a tile; None if it is not short or the speed is not known.

    With variable lengths, all sequences are taken to be of the mean length, because a plan does not know their lengths.
    """
    speed = _speeds(problem).get((tile.tile_m, tile.tile_n))
    if speed is None or problem.is_empty:
        return None
    queries, keys = _lengths(problem)
    if max(queries, keys) > SHORT_LENGTH:
        return None
    band, shape = problem.mask.band(queries, keys), (tile.tile_m, tile.tile_n)
    times = []
    for query_tile in range(ceil_div(queries, tile.tile_m)):
        first = tile_order.key_tile_start(band, query_tile, *shape)
        visited = max(tile_order.key_tile_end(band, query_tile, *shape) - first, 1)
        times.append(tile.tile_m * (visited * tile.tile_n + speed.start) / speed.rate)
    heads = problem.shape.batch * problem.shape.num_heads
    if problem.mask.form == "full":
        return ceil_div(heads * len(times), num_sms) * times[0]
    return max(heads * sum(times) / num_sms, max(times))


def _speeds(problem: Problem) -> dict[tuple[int, int], TileSpeed]:
    """Returns the speeds of tiles for this problem; none for those with score terms, which nobody measured."""
    widest = max(problem.shape.head_dim, problem.shape.head_dim_value)
    is_plain = problem.direction == "forward" and {*problem.features} <= {*registry.LAYOUTS}
    if not is_plain or problem.dtype == "float32":
        return {}
    return next((speeds for most, speeds in FORWARD.items() if widest <= most), {})


def _lengths(problem: Problem) -> tuple[int, int]:
    """Returns (queries, keys) of a sequence; with variable lengths the means, rounded up."""
    shape = problem.shape
    if shape.tokens is None:
        return shape.num_queries, shape.num_keys
    queries, keys = (ceil_div(tokens, shape.batch) for tokens in shape.tokens)
    return min(queries, shape.num_queries), min(keys, shape.num_keys)
