"""Tile time: which tile of a short forward of the sm90 family is estimated, or was measured, to be the fastest.

A short sequence fills few tiles, so that much of their work is padding, and the blocks share few work tiles. The
estimate, in nanoseconds on an H200, counts both with the speeds that the rows of the tile tables have:

    work tile   start + edge, if the mask is causal, + key_tile for each key tile that it visits
    problem     LAUNCH + the work tiles in turn on all blocks, but no less than the longest of them

Work tiles that are fewer than the SMs can be in parts, each with some of the key tiles (sm90_common/shared_tiles.py):

    problem     LAUNCH + JOIN + the time for what parts store + a part of the longest work tile

All of it is expressions: the planner evaluates them, and a C library has them as rules. Times of whole work tiles are
in nanoseconds times the number of SMs, which is a whole number.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from cutlass_py_attn.kernels.problem_kind import ProblemKind, sizes
from cutlass_py_attn.kernels.sm90_common import shared_tiles
from cutlass_py_attn.kernels.sm90_family.row import NEVER, Row, Speed
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.expressions import ONE, Expr, Name, Number, call, ceil_div, inline, maximum, minimum
from cutlass_py_attn.launch.names import BATCH, NUM_HEADS, NUM_KEYS, NUM_QUERIES, NUM_SMS, NUM_SPLITS_KEY, WORK_TILES
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.launch.variants import SPLIT_KV, STANDARD
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import F32_BYTES

Rows = tuple[Row, ...]

LEAST_GAIN: Final = 5  # percent of the estimated time that another tile must save, as the estimates are not exact
LAUNCH: Final = 7100  # nanoseconds of a launch beside its work tiles
GRAPH_LAUNCH: Final = 3200  # the same in a CUDA graph, where a part of a short time that is saved is larger
JOIN: Final = 2000  # nanoseconds of the kernel that joins parts
JOIN_BYTES: Final = 2000  # bytes of partial outputs that are stored and loaded in a nanosecond
EDGE, EDGE_ROWS = 420, 128  # nanoseconds for so many rows of a work tile on the diagonal of a causal mask
LONGEST: Final = 2048  # queries and keys of the longest sequences that were measured
LONG_LENGTH: Final = LONGEST + 128  # for those who ask for the tile of long sequences
SPEED_DIMS: Final = 64, 96, 128, 256  # the widest head dims that the speeds of rows hold for
MULTICAST_LENGTH: Final = 4096  # queries and keys from which on variant multicast is faster
# Head dims, more than the first and up to the second, of which tiles were measured that the estimate does not see:
# blocks wait for memory.
MEASURED_DIMS: Final = 96, 128
ONE_TILE_LENGTHS: Final = 64, 128  # queries and keys, likewise
ONE_ROUND_KEYS: Final = 128, 768  # keys, likewise
ESTIMATED: Final = Name("estimated")  # whether another tile than the first is estimated to be the fastest
_IS_ONE_TILE: Final = (minimum(NUM_QUERIES, NUM_KEYS) > ONE_TILE_LENGTHS[0]) * (
    maximum(NUM_QUERIES, NUM_KEYS) <= ONE_TILE_LENGTHS[1]
)


# Rules of rows: the sizes for which they are tried.


def long_sequences(kind: ProblemKind, tile: TileConfig) -> Expr:
    """The first block of a cluster waits for the other's last key tile, which costs little in long rows alone."""
    return minimum(NUM_QUERIES, NUM_KEYS) >= MULTICAST_LENGTH


def long_if_causal(kind: ProblemKind, tile: TileConfig) -> Expr:
    """A causal mask hides much of the key tiles on the diagonal: 2 % faster at s 8192, 2 % slower at s 2048."""
    return long_sequences(kind, tile) if kind.form.grows else ONE


def one_key_tile(kind: ProblemKind, tile: TileConfig) -> Expr:
    """The kernel of a tile for all keys has neither a loop nor a rescaling."""
    return is_short(kind) * (tile.tile_n >= NUM_KEYS)


# Rules of rows: the sizes for which they were measured to be the fastest.


def half_query_tiles(kind: ProblemKind, tile: TileConfig) -> Expr:
    """Of up to 128 queries and keys, two blocks of 64 queries are faster than one of 128 while each has an SM.

    Under a causal mask, which hides half of the keys of the first block, while each SM has at most two.
    """
    if not _has_measured_dims(kind):
        return NEVER
    blocks = BATCH * NUM_HEADS if kind.form.grows else 2 * BATCH * NUM_HEADS
    return _IS_ONE_TILE * (blocks <= NUM_SMS)


def half_key_tiles(kind: ProblemKind, tile: TileConfig) -> Expr:
    """A block of 128 queries starts with half of the keys: of up to 128, where two blocks of 64 queries are slower.

    Without a mask also of 129 to 768 keys, with at most one tile of 128 queries for each SM.
    """
    if not _has_measured_dims(kind):
        return NEVER
    is_one_tile = _IS_ONE_TILE * (1 - half_query_tiles(kind, tile))
    if not kind.form.sees_all:
        return is_one_tile
    least, most = ONE_ROUND_KEYS
    is_one_round = ceil_div(NUM_QUERIES, 128) * BATCH * NUM_HEADS <= NUM_SMS
    return is_one_tile + (least < NUM_KEYS) * (most >= NUM_KEYS) * is_one_round * (1 - ESTIMATED)


def _has_measured_dims(kind: ProblemKind) -> bool:
    least, most = MEASURED_DIMS
    return all(least < dim <= most for dim in kind.dims)


# The choice among the rows of a table.


def is_short(kind: ProblemKind) -> Expr:
    """Returns the rule that is 1 for sequences of which tiles were measured; 0 for never.

    Longer sequences, windows and score terms were not. Variable lengths were measured, and gain nothing.
    """
    is_plain = not kind.form.has_left and kind.has_no_more_than("grouped") and kind.dtype in ("float16", "bfloat16")
    if kind.direction != "forward" or not is_plain:
        return NEVER
    has_work = BATCH * NUM_HEADS * minimum(NUM_QUERIES, NUM_KEYS) > 0
    return (maximum(NUM_QUERIES, NUM_KEYS) <= LONGEST) * has_work


def speed_of(kind: ProblemKind, row: Row) -> Speed | None:
    """Returns the speed of a row's tile; None if it is not known with these head dims."""
    if isinstance(row.speed, str):
        return None
    widest = max(kind.dims)
    return next((row.speed.get(most) for most in SPEED_DIMS if widest <= most), None)


def fastest_first(kind: ProblemKind, table: Rows, tried: Sequence[Row], sizes: Mapping[str, int]) -> list[Row]:
    """Returns the rows that are tried for these sizes in the order to try them.

    table: all rows, of which the first is the fastest for long sequences
    tried: those of them whose rules are 1

    A tile that is estimated to save LEAST_GAIN, or was measured to be faster, becomes the first.
    """
    if not tried or not is_short(kind).evaluate(sizes):
        return [*tried]
    values = _values(kind, table, sizes)
    first = next((row for row in tried if values.get(_name("first", table, row))), tried[0])
    return [first, *(row for row in tried if row is not first)]


def is_first(kind: ProblemKind, table: Rows, row: Row) -> Expr:
    """Returns the rule that is 1 for sizes for which the row becomes the first; 0 for a row that never does."""
    name, rules = _name("first", table, row), _choice(kind, table)
    return is_short(kind) * inline(rules[name], rules) if name in rules else NEVER


@functools.lru_cache(maxsize=256)
def _choice(kind: ProblemKind, table: Rows) -> dict[str, Expr]:
    """Returns what decides among the rows of a table for short sequences, each in terms of those before it.

    time: the estimated time, of rows with a known speed
    is_fastest: whether it is the shortest, and shorter by LEAST_GAIN than that of the usual row, the first that is for
        any sizes; of each other row
    measured: whether the row was measured to be the fastest
    first: whether it becomes the first
    """
    speeds = {row: speed for row in table if (speed := speed_of(kind, row)) is not None}
    usual = next((row for row in speeds if row.when_for(kind) == ONE), None)
    if usual is None or is_short(kind) == NEVER:
        return {}
    rules = {_name("time", table, row): whole_time(kind, row.tile, speed) for row, speed in speeds.items()}
    others = [row for row in speeds if table.index(row) > table.index(usual)]  # before it are those for long sequences
    for row in others:
        rivals = (_is_faster(kind, table, row, other) for other in others if other is not row)
        time, usual_time = (Name(_name("time", table, one)) for one in (row, usual))
        gains = _saves_enough(time, usual_time, NUM_SMS)
        rules[_name("is_fastest", table, row)] = _product(row.when_for(kind), gains, *rivals)
    rules[ESTIMATED.name] = _sum(Name(_name("is_fastest", table, row)) for row in others)
    measured = {row: rule for row in table if (rule := row.measured(kind, row.tile)) != NEVER}
    for row, rule in measured.items():
        rules[_name("measured", table, row)] = rule
    is_estimated = 1 - _sum(Name(_name("measured", table, row)) for row in measured) if measured else ONE
    for row in {**dict.fromkeys(others), **measured}:
        own: list[Expr] = [Name(_name("measured", table, row))] if row in measured else []
        if row in others:
            own.append(_product(is_estimated, Name(_name("is_fastest", table, row))))
        rules[_name("first", table, row)] = _sum(own)
    return rules


def _is_faster(kind: ProblemKind, table: Rows, row: Row, other: Row) -> Expr:
    """Returns the rule that is 1 if a row is estimated to be faster than another, or as fast and before it."""
    own, others = (Name(_name("time", table, one)) for one in (row, other))
    is_faster = own <= others if table.index(row) < table.index(other) else others > own
    when = other.when_for(kind)
    return is_faster if when == ONE else (1 - when) + is_faster > 0


def _name(what: str, table: Rows, row: Row) -> str:
    return f"{what}_{table.index(row)}"


def _values(kind: ProblemKind, table: Rows, sizes: Mapping[str, int]) -> dict[str, int]:
    values = dict(sizes)
    for name, rule in _choice(kind, table).items():
        values[name] = rule.evaluate(values)
    return values


def _product(*rules: Expr) -> Expr:
    return functools.reduce(operator.mul, [rule for rule in rules if rule != ONE] or [ONE])


def _sum(rules: Iterable[Expr]) -> Expr:
    return functools.reduce(operator.add, [*rules] or [NEVER])


def _saves_enough(chosen: Expr, usual: Expr, unit: Expr = ONE) -> Expr:
    """Returns the rule that is 1 if the first estimate is lower by LEAST_GAIN, both in a CUDA graph.

    unit: that of the estimates, in nanoseconds
    """
    in_graph = _product(unit, Number(LAUNCH - GRAPH_LAUNCH))
    return 100 * (chosen - in_graph) <= (100 - LEAST_GAIN) * (usual - in_graph)


def reason(problem: Problem, build: Build, table: Rows, num_sms: int) -> str:
    """Returns why the tile of a build comes before the first of its table; "" if nothing puts it there."""
    kind, found = ProblemKind.of(problem), sizes(problem, num_sms)
    row = next((row for row in table if _has_tile(row, build)), None)
    if row is None or row is table[0] or not is_short(kind).evaluate(found):
        return ""
    first, values, tile = table[0], _values(kind, table, found), f"; tile {build.tile_m}x{build.tile_n}"
    if values.get(_name("measured", table, row)):
        return f"{tile} because it was measured to be faster for such short sequences"
    chosen, usual = (values.get(_name("time", table, one)) for one in (row, first))
    if chosen is None or usual is None or not _saves_enough(Number(chosen), Number(usual), NUM_SMS).evaluate(found):
        return ""
    return (
        f"{tile} because the estimated time of these short sequences is {chosen / usual:.0%} of that with "
        f"{first.tile.tile_m}x{first.tile.tile_n}, which is faster for long ones"
    )


# Estimates.


def whole_time(kind: ProblemKind, tile: TileConfig, speed: Speed) -> Expr:
    """Returns the estimated time of a problem of up to LONGEST queries and keys, times the number of SMs."""
    queries, heads = minimum(NUM_QUERIES, LONGEST), BATCH * NUM_HEADS
    longest = _longest(kind, tile, speed).substitute({NUM_KEYS.name: minimum(NUM_KEYS, LONGEST)})
    work_tiles = ceil_div(queries, tile.tile_m)
    if not kind.form.grows:
        return NUM_SMS * (LAUNCH + ceil_div(work_tiles * heads, NUM_SMS) * longest)
    # Of a causal mask the longest work tiles come first, so that the blocks end at about the same time.
    visited = call("causal_key_tiles", queries, NUM_KEYS, _shift(), tile.tile_m, tile.tile_n)
    total = heads * (work_tiles * _start(kind, tile, speed) + visited * speed.key_tile)
    return NUM_SMS * LAUNCH + maximum(total, NUM_SMS * longest)


def _longest(kind: ProblemKind, tile: TileConfig | Build, speed: Speed, splits: Expr = ONE) -> Expr:
    """Returns the time of the longest work tile, which has the last query, or of the longest of its parts.

    kind: of problems without a window. splits: the parts of a work tile
    """
    seen = minimum(NUM_KEYS, NUM_QUERIES + _shift()) if kind.form.grows else NUM_KEYS
    visited = maximum(ceil_div(seen, tile.tile_n), 1)
    visited = visited if splits == ONE else ceil_div(visited, splits)
    return _start(kind, tile, speed) + visited * speed.key_tile


def _shift() -> Expr:
    """Returns how many keys a causal mask shows beyond those up to each query."""
    return Name("window_right") + Name("bottom_right") * (NUM_KEYS - NUM_QUERIES)


def _start(kind: ProblemKind, tile: TileConfig | Build, speed: Speed) -> int:
    return speed.start + kind.form.grows * EDGE * tile.tile_m // EDGE_ROWS


def _in_parts(kind: ProblemKind, tile: TileConfig | Build, speed: Speed) -> Expr:
    """Returns the estimated time of few query tiles in parts, over the names of `shared_tiles.few_query_tiles`."""
    stored = WORK_TILES * NUM_SPLITS_KEY * (tile.tile_m * kind.head_dim_value * F32_BYTES)
    return LAUNCH + JOIN + stored // JOIN_BYTES + _longest(kind, tile, speed, NUM_SPLITS_KEY)


def faster_in_parts(
    kind: ProblemKind, tried: Sequence[Row], usual: Sequence[Row], values: Mapping[str, int]
) -> list[Row]:
    """Returns the rows whose few query tiles are estimated to be faster in parts than `usual`, the fastest first.

    tried: the rows that are tried for these sizes, in the order of their table
    usual: the same, the fastest first, of which the first with a known speed is compared

    None in parts is faster if it saves less than LEAST_GAIN. Sequences of several lengths count as the longest.
    """
    speeds = {row: speed for row in usual if (speed := speed_of(kind, row)) is not None}
    times = {
        row: time
        for row in tried
        if row in speeds and row.tile.variant == STANDARD
        if (time := _time_in_parts(kind, row.tile, speeds[row], values)) is not None
    }
    if not times:
        return []
    (compared, speed), *_ = speeds.items()
    is_moved = compared is usual[0] is not tried[0]  # by its estimate for short sequences, or by what was measured
    rule = whole_time(kind, compared.tile, speed) if is_moved else NUM_SMS * _few_time(kind, compared.tile, speed)
    whole = rule.evaluate(values)
    return [
        row
        for row in sorted(times, key=times.__getitem__)
        if _SAVES_ENOUGH.evaluate({**values, "chosen": times[row] * values["num_sms"], "usual": whole})
    ]


def _time_in_parts(kind: ProblemKind, tile: TileConfig, speed: Speed, sizes: Mapping[str, int]) -> int | None:
    """Returns the estimated nanoseconds of few query tiles in parts; None if the kernel has no parts."""
    values = dict(sizes)
    for name, rule in shared_tiles.few_query_tiles(
        tile.tile_m, tile.tile_n, is_varlen="varlen" in kind.features
    ).items():
        values[name] = rule.evaluate(values)
        if values.get(WORK_TILES.name, 0) >= values["num_sms"]:
            return None
    if values[NUM_SPLITS_KEY.name] == 1:
        return None
    time: int = _in_parts(kind, tile, speed).evaluate(values)
    return time


def preferred_in_parts(table: Rows, build: Build, others: Sequence[Build]) -> Expr:
    """Returns the rule that is 1 if a kernel of variant split_kv is estimated to be the fastest; 0 for never.

    others: the kernels of a library for the same calls; of the fastest ones in parts each has 1
    """
    kind = ProblemKind.of(build)
    known = {row: speed for row in table if (speed := speed_of(kind, row)) is not None}
    own, usual = _whole_row(known, build), _few_time_of_first(kind, known)
    if own is None or usual is None:
        return NEVER
    chosen = _in_parts(kind, build, known[own])
    saves_enough = _saves_enough(chosen, usual)
    moved = {row: is_first(kind, table, row) for row in known if any(_has_tile(row, other) for other in others)}
    moved = {row: rule for row, rule in moved.items() if rule != NEVER}
    if moved:
        whole = _sum(rule * whole_time(kind, row.tile, known[row]) for row, rule in moved.items())
        whole += (1 - _sum(moved.values())) * (NUM_SMS * usual)
        saves_enough = _saves_enough(NUM_SMS * chosen, whole, NUM_SMS)
    rule = _product(own.when_for(kind), NUM_SPLITS_KEY > 1, saves_enough)
    for other in others:
        row = _whole_row(known, other)
        if other.variant == SPLIT_KV and other != build and row is not None:
            rules = shared_tiles.query_tiles(other)
            time = inline(_in_parts(kind, other, known[row]), rules)
            has_none = inline(NUM_SPLITS_KEY, rules).equals(1)
            has_none = has_none if row.when_for(kind) == ONE else has_none + (1 - row.when_for(kind))
            rule *= has_none + (chosen <= time) > 0
    return rule


def _few_time(kind: ProblemKind, tile: TileConfig, speed: Speed) -> Expr:
    """Returns the estimated time of work tiles that are fewer than the SMs."""
    return LAUNCH + _longest(kind, tile, speed)


def _few_time_of_first(kind: ProblemKind, speeds: Mapping[Row, Speed]) -> Expr | None:
    """Returns `_few_time` of the first row that is tried; None if its speed is not known for all sizes."""
    time: Expr | None = None
    for row, speed in reversed([*speeds.items()]):
        when, own = row.when_for(kind), _few_time(kind, row.tile, speed)
        if when == ONE:
            time = own
        elif time is not None and time != own:
            time = when * own + (1 - when) * time
    return time


def _whole_row(rows: Iterable[Row], build: Build) -> Row | None:
    """Returns the row with the tile that a kernel has in parts."""
    return next((row for row in rows if row.tile.variant == STANDARD and _same_size(row, build)), None)


def _has_tile(row: Row, build: Build) -> bool:
    return row.tile.variant == build.variant and _same_size(row, build)


def _same_size(row: Row, build: Build) -> bool:
    return (row.tile.tile_m, row.tile.tile_n) == (build.tile_m, build.tile_n)


_SAVES_ENOUGH: Final = _saves_enough(Name("chosen"), Name("usual"), NUM_SMS)
