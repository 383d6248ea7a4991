"""Tile time: which tile of a short forward of the sm90 family is estimated to be the fastest.

A short sequence fills few tiles, so that much of their work is padding, and the blocks share few work tiles. The
estimate, in nanoseconds on an H200, counts both:

    work tile   start + edge, if the mask is causal, + key_tile for each key tile that it visits
    problem     LAUNCH + the work tiles in turn on all blocks, but no less than the longest of them

Work tiles that are fewer than the SMs can be in parts, each with some of the key tiles (`shared_tiles.py`):

    problem     LAUNCH + JOIN + the time for what parts store + a part of the longest work tile

What decides between few whole work tiles and their parts is an expression, which a bundle prints as a rule too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from cutlass_py_attn import integers
from cutlass_py_attn.launch import tile_order
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.expressions import ONE, Expr, Name, Number, ceil_div, inline, maximum, minimum
from cutlass_py_attn.launch.names import NUM_KEYS, NUM_QUERIES, NUM_SPLITS_KEY, WORK_TILES
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.launch.variants import SPLIT_KV
from cutlass_py_attn.plan import shared_tiles
from cutlass_py_attn.problem.masks import Form
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import F32_BYTES, Shape

LEAST_GAIN: Final = 5  # percent of the estimated time that another tile must save, as the estimates are not exact
LAUNCH: Final = 7100  # nanoseconds of a launch beside its work tiles
GRAPH_LAUNCH: Final = 3200  # the same in a CUDA graph, where a part of a short time that is saved is larger
JOIN: Final = 2000  # nanoseconds of the kernel that joins parts
JOIN_BYTES: Final = 2000  # bytes of partial outputs that are stored and loaded in a nanosecond
EDGE, EDGE_ROWS = 420, 128  # nanoseconds for so many rows of a work tile on the diagonal of a causal mask


@dataclass(frozen=True, slots=True)
class TileSpeed:
    """How fast a tile is computed, in nanoseconds.

    start: of a work tile, beside its key tiles: the first load, the last product, the store
    key_tile: of a key tile
    is_single: whether the tile is for keys of one tile alone, with neither a loop nor a rescaling
    """

    start: int
    key_tile: int
    is_single: bool = False


@dataclass(frozen=True, slots=True)
class TileSpeeds:
    """The speeds of the tiles of some head dims, by (tile_m, tile_n), and the longest sequence that was measured."""

    longest: int
    tiles: dict[tuple[int, int], TileSpeed]


# By the widest head dim that the numbers hold for: fits of the measurements in kernels/sm90/NOTES-short-forward.md, of
# bf16 on an H200.
# At head dim 96, key tiles of 192x96 and 128x128 are fitted to s 8192 as well.
FORWARD: Final = {
    64: TileSpeeds(
        longest=2048,
        tiles={
            (192, 128): TileSpeed(start=1100, key_tile=1440),
            (192, 64): TileSpeed(start=1760, key_tile=1140),  # with ALiBi; with a bias a key tile takes 2.15 us
            (128, 128): TileSpeed(start=860, key_tile=1120),
            (128, 208): TileSpeed(start=860, key_tile=1910, is_single=True),
            (64, 128): TileSpeed(start=400, key_tile=840),
            (64, 64): TileSpeed(start=300, key_tile=500),
        },
    ),
    96: TileSpeeds(
        longest=2048,
        tiles={
            (192, 112): TileSpeed(start=1380, key_tile=1600),
            (192, 96): TileSpeed(start=1380, key_tile=1400),
            (128, 128): TileSpeed(start=930, key_tile=1350),
            (128, 208): TileSpeed(start=930, key_tile=2310, is_single=True),
            (64, 128): TileSpeed(start=500, key_tile=950),
            (64, 64): TileSpeed(start=350, key_tile=560),
        },
    ),
    128: TileSpeeds(
        longest=2048,
        tiles={
            (128, 128): TileSpeed(start=2000, key_tile=1370),
            (64, 128): TileSpeed(start=1000, key_tile=1070),
            (64, 64): TileSpeed(start=600, key_tile=640),
        },
    ),
    256: TileSpeeds(
        longest=2048,
        tiles={
            (128, 64): TileSpeed(start=2700, key_tile=1120),
            (64, 64): TileSpeed(start=1400, key_tile=900),
        },
    ),
}


# Head dims, more than the first and up to the second, of which tiles were measured that the estimate does not see:
# blocks wait for memory.
MEASURED_DIMS: Final = 96, 128
ONE_TILE_LENGTHS: Final = 64, 128  # queries and keys, likewise
ONE_ROUND_KEYS: Final = 128, 768  # keys, likewise

# Longer than what is compared: for those who ask for the tile of long sequences.
LONG_LENGTH: Final = max(speeds.longest for speeds in FORWARD.values()) + 128


def fastest_first(problem: Problem, tiles: Iterable[TileConfig], num_sms: int) -> list[TileConfig]:
    """Returns the tiles of a table, which has the fastest for long sequences first, in the order to try them.

    A tile that is estimated to save LEAST_GAIN, or was measured to be faster, becomes the first. Tiles for keys of one
    tile alone are left out if the keys need more, or if their speed is not known.
    """
    usable = _usable(problem, tiles)
    if not usable:
        return usable
    first = _measured(problem, usable, num_sms) or _estimated(problem, usable, num_sms)
    return [first, *(tile for tile in usable if tile != first)]


def _usable(problem: Problem, tiles: Iterable[TileConfig]) -> list[TileConfig]:
    speeds = _speeds(problem)
    return [tile for tile in tiles if not is_single(tile) or (speeds and problem.shape.num_keys <= tile.tile_n)]


def _estimated(problem: Problem, usable: list[TileConfig], num_sms: int) -> TileConfig:
    """Returns the tile that is estimated to be the fastest; the first if none saves enough, or its speed is unknown."""
    times = {tile: estimate(problem, tile, num_sms) for tile in usable}
    known = {tile: time for tile, time in times.items() if time is not None}
    usual = usable[0]
    if usual not in known:
        return usual
    best = min(known, key=known.__getitem__)
    return best if _saves_enough(known[best], known[usual]) else usual


def _measured(problem: Problem, usable: list[TileConfig], num_sms: int) -> TileConfig | None:
    """Returns the tile that was measured to be the fastest at d 128; None for what was not measured.

    Up to 128 queries and keys: a block of 128 queries starts with half of the keys. Two of 64 queries are faster while
    each has an SM, and under a causal mask, which hides half of the keys of the first, while each SM has at most two.

    Without a mask, with 129 to 768 keys and at most one tile of 128 queries for each SM: that also starts with half of
    a key tile of 128.
    """
    shape, form = problem.shape, problem.mask.form
    if not _has_measured_dims(shape) or not _speeds(problem):
        return None
    heads, found = shape.batch * shape.num_heads, None
    (least, most), (least_keys, most_keys) = ONE_TILE_LENGTHS, ONE_ROUND_KEYS
    if all(least < length <= most for length in (shape.num_queries, shape.num_keys)):
        found = (64, 64) if 2 * heads <= (2 if form.grows else 1) * num_sms else (128, 64)
    elif form.sees_all and least_keys < shape.num_keys <= most_keys:
        estimated, is_one_round = (
            _estimated(problem, usable, num_sms),
            integers.ceil_div(shape.num_queries, 128) * heads <= num_sms,
        )
        found = (128, 64) if is_one_round and (estimated.tile_m, estimated.tile_n) == (128, 128) else None
    return next((tile for tile in usable if (tile.tile_m, tile.tile_n) == found), None)


def _has_measured_dims(shape: Shape) -> bool:
    least, most = MEASURED_DIMS
    return all(least < dim <= most for dim in (shape.head_dim, shape.head_dim_value))


def _saves_enough(chosen: float, usual: float) -> bool:
    return bool(_SAVES_ENOUGH.evaluate({"chosen": chosen, "usual": usual}))


def _gain_rule(chosen: Expr, usual: Expr) -> Expr:
    """Returns the rule that is 1 if the first estimate is lower by LEAST_GAIN, both in a CUDA graph."""
    in_graph = LAUNCH - GRAPH_LAUNCH
    return 100 * (chosen - in_graph) <= (100 - LEAST_GAIN) * (usual - in_graph)


_SAVES_ENOUGH: Final = _gain_rule(Name("chosen"), Name("usual"))


def is_single(tile: TileConfig) -> bool:
    """Returns whether a tile is for keys of one tile alone."""
    found = (speeds.tiles.get((tile.tile_m, tile.tile_n)) for speeds in FORWARD.values())
    return any(speed is not None and speed.is_single for speed in found)


def reason(problem: Problem, tile: TileConfig, tiles: Iterable[TileConfig], num_sms: int) -> str:
    """Returns why this tile comes before the first of its table; "" if the estimate does not put it there."""
    table = list(tiles)
    first = table[0]
    if tile.variant == SPLIT_KV:
        return ""
    measured = _measured(problem, _usable(problem, table), num_sms)
    if measured and (tile.tile_m, tile.tile_n) == (measured.tile_m, measured.tile_n) and tile != first:
        return f"; tile {tile.tile_m}x{tile.tile_n} because it was measured to be faster for such short sequences"
    chosen, usual = (estimate(problem, it, num_sms) for it in (tile, first))
    if chosen is None or usual is None or not _saves_enough(chosen, usual):
        return ""
    return (
        f"; tile {tile.tile_m}x{tile.tile_n} because the estimated time of these short sequences is "
        f"{chosen / usual:.0%} of that with {first.tile_m}x{first.tile_n}, which is faster for long ones"
    )


def estimate(problem: Problem, tile: TileConfig, num_sms: int) -> float | None:
    """Returns the estimated nanoseconds of a short problem with a tile; None if the speed is not known."""
    speed = _speeds(problem).get((tile.tile_m, tile.tile_n))
    return None if speed is None else _estimate(problem, tile, speed, _sizes(problem, num_sms))


def _estimate(problem: Problem, tile: TileConfig, speed: TileSpeed, sizes: Mapping[str, int]) -> float:
    form, num_sms = problem.mask.form, sizes["num_sms"]
    work_tiles = _work_tiles(problem, tile).evaluate(sizes)
    longest = _longest(tile, speed, form).evaluate(sizes)
    if not form.grows or work_tiles <= num_sms:
        return LAUNCH + integers.ceil_div(work_tiles, num_sms) * longest
    # Of a causal mask the longest work tiles come first, so that the blocks end at about the same time.
    heads, visited = sizes["batch"] * sizes["num_heads"], _visited(problem, tile)
    total = heads * (len(visited) * _start(tile, speed, form) + sum(visited) * speed.key_tile)
    return LAUNCH + max(total / num_sms, longest)


def _sizes(problem: Problem, num_sms: int) -> dict[str, int]:
    """Returns the values of the names in the expressions of this module and of `shared_tiles.few_query_tiles`."""
    shape, mask = problem.shape, problem.mask
    names = "batch", "num_heads", "num_queries", "num_keys"
    found = {name: getattr(shape, name) for name in names} | {"num_sms": num_sms}
    found |= {"window_right": mask.edges[1], "bottom_right": int(mask.bottom_right)}
    return found if shape.tokens is None else found | {"tokens_q": shape.tokens[0]}


def _work_tiles(problem: Problem, tile: TileConfig) -> Expr:
    return shared_tiles.num_work_tiles(tile.tile_m, is_varlen=problem.shape.tokens is not None)


def _visited(problem: Problem, tile: TileConfig) -> list[int]:
    """Returns the key tiles that each query tile of a head visits."""
    shape, tile_m, tile_n = problem.shape, tile.tile_m, tile.tile_n
    band = problem.mask.band(shape.num_queries, shape.num_keys)
    firsts_and_ends = (
        (tile_order.key_tile_start(band, i, tile_m, tile_n), tile_order.key_tile_end(band, i, tile_m, tile_n))
        for i in range(integers.ceil_div(shape.num_queries, tile_m))
    )
    return [max(end - first, 1) for first, end in firsts_and_ends]


def _longest(tile: TileConfig | Build, speed: TileSpeed, form: Form, splits: Expr = ONE) -> Expr:
    """Returns the time of the longest work tile, which has the last query, or of the longest of its parts.

    form: of the mask, without a window. splits: the parts of a work tile
    """
    seen: Expr = NUM_KEYS
    if form.grows:
        shift = Name("bottom_right") * (NUM_KEYS - NUM_QUERIES)
        seen = minimum(NUM_KEYS, NUM_QUERIES + Name("window_right") + shift)
    visited = maximum(ceil_div(seen, tile.tile_n), 1)
    visited = visited if splits == ONE else ceil_div(visited, splits)
    return _start(tile, speed, form) + visited * speed.key_tile


def _start(tile: TileConfig | Build, speed: TileSpeed, form: Form) -> int:
    return speed.start + form.grows * EDGE * tile.tile_m // EDGE_ROWS


def faster_in_parts(
    problem: Problem, tiles: Iterable[TileConfig], usual: list[TileConfig], num_sms: int
) -> list[TileConfig]:
    """Returns the tiles whose few query tiles are estimated to be faster in parts than `usual`, the fastest first.

    usual: the tiles that the planner has without parts, the fastest first. None in parts is faster if it saves less
    than LEAST_GAIN, or if the speed of the first is not known; in place of one that was measured, the second counts.
    Sequences of several lengths count as the longest.
    """
    speeds = _speeds_of(problem.shape)
    if problem.is_empty or speeds is None:
        return []
    compared = usual[: 2 if _has_measured_dims(problem.shape) else 1]
    whole_tile = next((tile for tile in compared if (tile.tile_m, tile.tile_n) in speeds.tiles), None)
    if whole_tile is None:
        return []
    sizes = _sizes(problem, num_sms)
    known = ((tile, speeds.tiles.get((tile.tile_m, tile.tile_n))) for tile in tiles)
    times = {
        tile: time
        for tile, speed in known
        if speed is not None and not speed.is_single and _work_tiles(problem, tile).evaluate(sizes) < num_sms
        if (time := _time_in_parts(problem, tile, speed, sizes)) is not None
    }
    if not times:
        return []
    whole = _estimate(problem, whole_tile, speeds.tiles[whole_tile.tile_m, whole_tile.tile_n], sizes)
    return [tile for tile in sorted(times, key=times.__getitem__) if _saves_enough(times[tile], whole)]


def _time_in_parts(problem: Problem, tile: TileConfig, speed: TileSpeed, sizes: Mapping[str, int]) -> int | None:
    """Returns the estimated nanoseconds of few query tiles in parts; None if the kernel has no parts."""
    values = dict(sizes)
    rules = shared_tiles.few_query_tiles(tile.tile_m, tile.tile_n, is_varlen=problem.shape.tokens is not None)
    for name, rule in rules.items():
        values[name] = rule.evaluate(values)
    if values["num_splits_key"] == 1:
        return None
    time: int = _in_parts(tile, speed, problem.mask.form, problem.shape.head_dim_value).evaluate(values)
    return time


def _in_parts(tile: TileConfig | Build, speed: TileSpeed, form: Form, head_dim_value: int) -> Expr:
    """Returns the estimated time of few query tiles in parts, over the names of `shared_tiles.few_query_tiles`."""
    stored = WORK_TILES * NUM_SPLITS_KEY * (tile.tile_m * head_dim_value * F32_BYTES)
    return LAUNCH + JOIN + stored // JOIN_BYTES + _longest(tile, speed, form, NUM_SPLITS_KEY)


def preferred_in_parts(build: Build, usual: TileConfig, others: Iterable[Build] = ()) -> Expr:
    """Returns the rule that is 1 if a kernel of variant split_kv is estimated to be the fastest; 0 for never.

    usual: a tile without parts, of at least as many query rows, so that its work tiles are fewer than the SMs too
    others: kernels of variant split_kv with other tiles; of the fastest ones each has 1
    """
    speeds = _speeds_of(build)
    known = {} if speeds is None else speeds.tiles
    speed, usual_speed = (known.get((it.tile_m, it.tile_n)) for it in (build, usual))
    if speed is None or usual_speed is None or speed.is_single:
        return Number(0)
    chosen = _in_parts(build, speed, build.form, build.head_dim_value)
    whole = LAUNCH + _longest(usual, usual_speed, build.form)
    rule = (NUM_SPLITS_KEY > 1) * _gain_rule(chosen, whole)
    for other in others:
        if other_speed := known.get((other.tile_m, other.tile_n)):
            rules = shared_tiles.query_tiles(other)
            time = inline(_in_parts(other, other_speed, other.form, other.head_dim_value), rules)
            rule *= inline(NUM_SPLITS_KEY, rules).equals(1) + (chosen <= time) > 0
    return rule


def _speeds(problem: Problem) -> dict[tuple[int, int], TileSpeed]:
    """Returns the speeds of tiles for this problem; none for what nobody measured.

    That is longer sequences, windows and score terms. Variable lengths were measured, and gain nothing.
    """
    shape = problem.shape
    has_features = problem.mask.form.has_left or not {*problem.features} <= {"grouped"}
    is_plain = not has_features and problem.dtype in ("float16", "bfloat16")
    if problem.direction != "forward" or not is_plain or problem.is_empty:
        return {}
    speeds = _speeds_of(shape)
    return speeds.tiles if speeds and max(shape.num_queries, shape.num_keys) <= speeds.longest else {}


def _speeds_of(dims: Shape | Build) -> TileSpeeds | None:
    """Returns the speeds of tiles for these head dims; None if nobody measured any."""
    widest = max(dims.head_dim, dims.head_dim_value)
    return next((speeds for most, speeds in FORWARD.items() if widest <= most), None)
