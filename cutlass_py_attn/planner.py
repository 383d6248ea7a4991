"""Planner: from a Problem and a target to a Plan; the first tile of the table that fits is taken."""

from __future__ import annotations

from cutlass_py_attn import budget
from cutlass_py_attn.device import architecture
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.kernels import entry_symbols
from cutlass_py_attn.parts.integers import ceil_div, round_up
from cutlass_py_attn.plan import Build, Launch, Part, Plan, Warps, Workspace
from cutlass_py_attn.plan_table import Tile, backward_tiles, forward_tiles, padded
from cutlass_py_attn.problem import ITEM_BYTES, Problem
from cutlass_py_attn.shared_memory import F32_BYTES, backward_map, forward_map

DELTA_THREADS = 128
DELTA_LANES = 8  # threads that share a row of O and dO: 128 bytes at a time
DELTA_ROWS = DELTA_THREADS // DELTA_LANES
INT32_BYTES = 4
WORKSPACE_ALIGNMENT = 256
SPLIT_WAVES = 32  # blocks per SM beyond which more splits of the keys no longer shorten the last wave


def plan_forward(problem: Problem, arch: str) -> Plan:
    """The forward pass of `problem` on `arch`; NotSupported lists every objection."""
    _check(problem, "forward")
    build = _choose(problem, arch)
    shape = problem.shape
    query_tiles = ceil_div(shape.num_queries, build.tile_m)
    grid = (query_tiles, shape.num_heads, shape.batch)
    (symbol,) = entry_symbols(build)
    launch = Launch(symbol, grid, (build.threads, 1, 1), build.shared_memory_bytes)
    launches = () if problem.is_empty else (launch,)
    return Plan(build, launches, Workspace(), _sizes(problem), _why(build))


def plan_backward(problem: Problem, arch: str, num_sms: int | None = None) -> Plan:
    """The backward pass of `problem` on `arch`; NotSupported lists every objection.

    num_sms: multiprocessors of the device, for num_splits_key; None takes the target's usual part.
    """
    _check(problem, "backward")
    build = _choose(problem, arch)
    shape = problem.shape
    query_tiles = ceil_div(shape.num_queries, build.tile_m)
    splits = num_splits_key(problem, build, num_sms or architecture(arch).num_sms)
    tiles = (query_tiles, shape.num_heads, shape.batch)
    block, delta = (build.threads, 1, 1), (DELTA_THREADS, 1, 1)
    delta_symbol, symbol, finish_symbol = entry_symbols(build)
    launches = (
        Launch(delta_symbol, (ceil_div(query_tiles * build.tile_m, DELTA_ROWS), *tiles[1:]), delta, 0),
        Launch(symbol, (splits, shape.num_heads, shape.batch), block, build.shared_memory_bytes),
        Launch(finish_symbol, tiles, block, finish_bytes(build)),
    )
    workspace = backward_workspace(problem, build)
    sizes = (*_sizes(problem), ("num_splits_key", splits), ("query_tiles", query_tiles))
    return Plan(build, () if problem.is_empty else launches, workspace, sizes, _why(build))


def num_splits_key(problem: Problem, build: Build, num_sms: int) -> int:
    """Blocks that share one (batch, head): the caller's number, else enough to fill the device `SPLIT_WAVES` times.

    Never more than there are key tiles. Fewer blocks than key tiles let a block walk several key tiles and
    balance their unequal lengths under a causal mask.
    """
    key_tiles = max(ceil_div(problem.shape.num_keys, build.tile_n), 1)
    asked = problem.num_splits_key
    if asked is not None:
        return min(asked, key_tiles)
    if build.deterministic:
        return key_tiles  # a block waits only for blocks that started before it
    groups = max(problem.shape.batch * problem.shape.num_heads, 1)
    return min(key_tiles, max(ceil_div(SPLIT_WAVES * num_sms, groups), 1))


def finish_bytes(build: Build) -> int:
    """Shared memory of the finish kernel: one query tile in the output's type."""
    return build.buffer("query").bytes // build.query_stages


def backward_workspace(problem: Problem, build: Build) -> Workspace:
    """float32 query gradient of whole tiles and turn counters when deterministic (zeroed), then row statistics."""
    if problem.is_empty:
        return Workspace()
    groups = problem.shape.batch * problem.shape.num_heads
    query_tiles = ceil_div(problem.shape.num_queries, build.tile_m)
    sizes = [("grad_query_accum", groups * query_tiles * build.tile_m * build.columns * F32_BYTES)]
    if build.deterministic:
        sizes.append(("turn", groups * (query_tiles + 1) * INT32_BYTES))
    zeroed = len(sizes)
    rows = groups * query_tiles * build.tile_m * F32_BYTES
    sizes += [("delta", rows), ("logsumexp_log2", rows)]
    parts: list[Part] = []
    offset = 0
    for name, size in sizes:
        parts.append(Part(name, offset, size))
        offset = round_up(offset + size, WORKSPACE_ALIGNMENT)
    zero_bytes = parts[zeroed - 1].offset + parts[zeroed - 1].bytes
    return Workspace(offset, zero_bytes, tuple(parts))


def _check(problem: Problem, direction: str) -> None:
    problem.check()
    if problem.direction != direction:
        raise NotSupported(f"direction = {problem.direction!r}: plan_{direction} plans the {direction}; set it so")


def _choose(problem: Problem, arch: str) -> Build:
    """The first tile of the table whose build fits the target."""
    limits = architecture(arch)
    table = forward_tiles if problem.direction == "forward" else backward_tiles
    rows = [tile for tile in table(problem.dtype, problem.shape) if arch not in tile.not_on]
    builds = [_build(problem, arch, tile) for tile in rows]
    for build in builds:
        if not budget.objections(build, limits):
            return build
    raise NotSupported(
        f"no tile fits {arch}: {'; '.join(budget.objections(builds[-1], limits))}; use a smaller head_dim"
    )


def _build(problem: Problem, arch: str, tile: Tile) -> Build:
    shape = problem.shape
    forward = problem.direction == "forward"
    make_map = forward_map if forward else backward_map
    columns, columns_value = padded(shape.head_dim), padded(shape.head_dim_value)
    none = (0, 0)

    def grid(m: int, n: int) -> Warps:
        return budget.warp_grid(tile.warps, m, n, ITEM_BYTES[problem.dtype])

    # The forward keeps the rows of S in one warp: the softmax reduces along them.
    scores = (tile.warps, 1) if forward else grid(tile.tile_m, tile.tile_n)
    grad_v = none if forward else grid(tile.tile_n, columns_value)
    grad_k = none if forward else grid(tile.tile_n, columns)
    grad_q = none if forward else grid(tile.tile_m, columns)
    return Build(
        kind=problem.direction,
        family="generic",
        arch=arch,
        dtype=problem.dtype,
        head_dim=shape.head_dim,
        head_dim_value=shape.head_dim_value,
        mask=problem.mask.name,
        tile_m=tile.tile_m,
        tile_n=tile.tile_n,
        warps=tile.warps,
        query_stages=tile.query_stages,
        grad_output_stages=tile.grad_output_stages,
        scores=scores,
        grad_v=grad_v,
        grad_k=grad_k,
        grad_q=grad_q,
        deterministic=problem.deterministic and problem.direction == "backward",
        register_usage_level=tile.register_usage_level,
        min_blocks_per_sm=0,
        room="",
        shared_memory=make_map(problem.dtype, shape, tile),
    )


def _sizes(problem: Problem) -> tuple[tuple[str, int], ...]:
    shape = problem.shape
    return (
        ("batch", shape.batch),
        ("num_heads", shape.num_heads),
        ("num_queries", shape.num_queries),
        ("num_keys", shape.num_keys),
    )


def _why(build: Build) -> str:
    return (
        f"generic family (mma.sync, cp.async): the first tile of the table that fits {build.arch}'s "
        "shared memory; the Hopper family has no fused kernel yet"
    )
