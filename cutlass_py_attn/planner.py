"""Planner: from a Problem and a target to a Plan; the first tile of the table that fits is taken."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from cutlass_py_attn import budget, decode, hopper, kernels
from cutlass_py_attn.device import ARCHITECTURES, architecture, targets
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.gemm.gemm import WARP_THREADS
from cutlass_py_attn.parts.integers import ceil_div, round_up
from cutlass_py_attn.philox import threshold
from cutlass_py_attn.plan import Build, Launch, Part, Plan, Warps, Workspace
from cutlass_py_attn.plan_table import Tile, decode_tiles, hopper_tiles, tiles
from cutlass_py_attn.problem import BIASES, F32_BYTES, OPERANDS, WORD_BYTES, Problem, Shape, Tensor
from cutlass_py_attn.shared_memory import bias_gradient_map, shared_memory_map, tile_bytes
from cutlass_py_attn.streams import blocks_of_tile, gradient_piece, sum_columns, sums_of_tile

DELTA_LANES = 8  # threads that share a row of O and dO
DELTA_ROWS = kernels.ROW_THREADS // DELTA_LANES
SINKS_BYTES = kernels.ROW_THREADS // WARP_THREADS * F32_BYTES  # shared memory: a partial sum of each warp
COMBINE_WARPS = kernels.ROW_THREADS // WARP_THREADS
WORKSPACE_ALIGNMENT = 256
SPLIT_WAVES = 32  # blocks per SM beyond which more splits of the keys no longer shorten the last wave
MAX_GRID_YZ = 65535
COLUMN_BLOCK_MULTIPLE = 64  # so that eight warps divide a column block and its rows are swizzled in full

Grid = tuple[int, int, int]


def plan_forward(problem: Problem, arch: str, num_sms: int | None = None) -> Plan:
    """The forward pass of `problem` on `arch`; NotSupported lists every objection.

    num_sms: multiprocessors of the device, for the blocks of kernels that share them out; None takes the target's
    usual part.
    """
    _expect(problem, "forward")
    return plan(problem, arch, num_sms)


def plan_backward(problem: Problem, arch: str, num_sms: int | None = None) -> Plan:
    """The backward pass of `problem` on `arch`; NotSupported lists every objection.

    num_sms: multiprocessors of the device, for num_splits_key; None takes the target's usual part.
    """
    _expect(problem, "backward")
    return plan(problem, arch, num_sms)


def plan(problem: Problem, arch: str, num_sms: int | None = None) -> Plan:
    """The best plan of a problem of either direction; arguments and error as for `plans`."""
    return plans(problem, arch, num_sms)[0]


def plans(problem: Problem, arch: str, num_sms: int | None = None) -> list[Plan]:
    """A plan for each tile of the table that fits, the best first; NotSupported lists every objection.

    Whether ptxas spills is known only once a kernel is compiled; the plans behind the first are for when it does.
    """
    problem.check()
    count = num_sms or architecture(arch).num_sms
    found = *_decode(problem, arch), *_hopper(problem, arch, count), *_generic(problem, arch)
    return [_plan(problem, build, count) for build in found]


def plans_on(problem: Problem, compute_capability: tuple[int, int], num_sms: int | None = None) -> list[Plan]:
    """The plans for a device: decodes, those of its own target's family, then those of the newest portable target."""
    problem.check()
    *own, portable = targets_of(compute_capability)
    count = num_sms or architecture(portable).num_sms
    found = plans(problem, portable, num_sms)
    decodes = sum(plan.build.family == "decode" for plan in found)  # they come first
    ours = [_plan(problem, build, count) for arch in own for build in _hopper(problem, arch, count)]
    return [*found[:decodes], *ours, *found[decodes:]]


def targets_of(compute_capability: tuple[int, int]) -> tuple[str, ...]:
    """`device.targets`; NotSupported where no target runs on the device."""
    found = targets(compute_capability)
    if not found:
        major, minor = compute_capability
        portable = [arch.name for arch in ARCHITECTURES.values() if arch.is_portable]
        raise NotSupported(
            f"compute capability = {major}.{minor}: no target runs on it; allowed are {', '.join(portable)} and later "
            "minor versions of them; use another GPU"
        )
    return found


def builds_on(problem: Problem, compute_capability: tuple[int, int]) -> tuple[Build, ...]:
    """The builds of `plans_on`, in their order."""
    return tuple(plan.build for plan in plans_on(problem, compute_capability))


def builds(problem: Problem, arch: str) -> tuple[Build, ...]:
    """The builds of `plans`, in their order."""
    return tuple(plan.build for plan in plans(problem, arch))


def _plan(problem: Problem, build: Build, num_sms: int) -> Plan:
    if build.kind == "backward":
        return _backward(problem, build, num_sms)
    if build.family == "decode":
        return _decode_forward(problem, build, num_sms)
    return _hopper_forward(problem, build, num_sms) if build.family == "hopper" else _forward(problem, build)


def _hopper_forward(problem: Problem, build: Build, num_sms: int) -> Plan:
    """A block for each SM, which take query tiles in turn."""
    launches = _launches(problem, build, {"main": hopper.grid(problem.shape, build, num_sms)})
    launches = hopper.with_maps(problem, build, launches)
    return Plan(build, launches, Workspace(), sizes(problem, build), hopper.why(build) + decode.why_not(problem))


def _decode_forward(problem: Problem, build: Build, num_sms: int) -> Plan:
    """Blocks for each key head share its query rows and its keys; a second kernel joins those that share keys."""
    shape = problem.shape
    splits = decode.num_splits(shape, build, num_sms)
    parts, total = _laid_out(() if problem.is_empty else decode.partial_bytes(shape, build, splits))
    launches = _launches(problem, build, decode.grids(shape, build, splits))
    numbers = *sizes(problem, build), ("num_splits_key", splits)
    return Plan(build, launches, Workspace(total, 0, parts), numbers, decode.why(shape, build, splits))


def _forward(problem: Problem, build: Build) -> Plan:
    shape = problem.shape
    blocks = ceil_div(shape.num_queries, build.tile_m) * blocks_of_tile(build)
    grid = {"main": (blocks, shape.num_heads, shape.batch)}
    return Plan(build, _launches(problem, build, grid), Workspace(), sizes(problem, build), _why(problem, build))


def _backward(problem: Problem, build: Build, num_sms: int) -> Plan:
    shape = problem.shape
    query_tiles = ceil_div(shape.num_queries, build.tile_m)
    splits = num_splits_key(problem, build, num_sms)
    by_head = shape.num_heads, shape.batch
    grids = {
        "delta": (ceil_div(query_tiles * build.tile_m, DELTA_ROWS), *by_head),
        "main": (splits * blocks_of_tile(build), shape.num_heads_key, shape.batch),
        "finish": (query_tiles * sums_of_tile(build), *by_head),
        "bias": _bias_grid(problem, build),
        "sinks": (shape.num_heads, 1, 1),
    }
    workspace = backward_workspace(problem, build, num_sms)
    numbers = *sizes(problem, build), ("num_splits_key", splits)
    if build.family == "hopper":
        grids["main"] = hopper.grid(shape, build, num_sms)
        launches = hopper.with_maps(problem, build, _launches(problem, build, grids))
        return Plan(build, launches, workspace, numbers, hopper.why(build))
    return Plan(build, _launches(problem, build, grids), workspace, numbers, _why(problem, build))


def num_splits_key(problem: Problem, build: Build, num_sms: int) -> int:
    """Blocks that share one (batch, head): the caller's number, else enough to fill the device `SPLIT_WAVES` times.

    Never more than there are key tiles. Fewer blocks than key tiles let a block walk several key tiles and
    balance their unequal lengths under a causal mask.
    """
    key_tiles = max(ceil_div(problem.shape.num_keys, build.tile_n), 1)
    asked = problem.num_splits_key
    if asked is not None:
        return min(asked, key_tiles)
    if build.deterministic or build.family == "hopper":
        return key_tiles  # a block waits only for blocks that started before it; a Hopper block takes one at a time
    groups = max(problem.shape.batch * problem.shape.num_heads_key, 1)
    return min(key_tiles, max(ceil_div(SPLIT_WAVES * num_sms, groups), 1))


def total_tiles(problem: Problem, build: Build) -> int:
    """Query tiles of one head over the whole batch; sequences of any length share them without gaps.

    Sequence b starts at tile cu_seqlens_q[b] // tile_m + b, so that every one has room for its last tile.
    """
    shape = problem.shape
    if shape.tokens is not None:
        return shape.tokens[0] // build.tile_m + shape.batch
    return shape.batch * ceil_div(shape.num_queries, build.tile_m)


def backward_workspace(problem: Problem, build: Build, num_sms: int) -> Workspace:
    """float32 query gradient of whole tiles, turn counters when deterministic and what counts the blocks or key tiles
    that have started (zeroed), then row statistics. Where blocks take whole heads, nothing is zeroed: each has the
    query gradient of one head."""
    if problem.is_empty:
        return Workspace()
    heads, batch = problem.shape.num_heads, problem.shape.batch
    tiles_of_all = heads * total_tiles(problem, build)
    rows = tiles_of_all * build.tile_m * F32_BYTES
    statistics = [("delta", rows), ("logsumexp_log2", rows)]
    if build.whole_heads:
        parts, total = _laid_out(
            [("grad_query_accum", hopper.head_sums_bytes(problem.shape, build, num_sms)), *statistics]
        )
        return Workspace(total, 0, parts)
    bytes_of = []
    if "query" in build.gradients:
        sums = tiles_of_all * sums_of_tile(build)
        bytes_of.append(("grad_query_accum", sums * build.tile_m * sum_columns(build) * F32_BYTES))
        if build.deterministic:
            bytes_of.append(("turn", sums * WORD_BYTES))
    if build.family == "hopper":
        bytes_of.append(("started", WORD_BYTES))
    elif build.deterministic:
        started = problem.shape.num_heads_key * batch * blocks_of_tile(build)
        bytes_of.append(("started", started * WORD_BYTES))
    zeroed = len(bytes_of)
    parts, total = _laid_out([*bytes_of, *statistics])
    zero_bytes = parts[zeroed - 1].offset + parts[zeroed - 1].bytes if zeroed else 0
    return Workspace(total, zero_bytes, parts)


def _laid_out(bytes_of: Iterable[tuple[str, int]]) -> tuple[tuple[Part, ...], int]:
    """Parts of the workspace behind each other, and the bytes of all."""
    parts: list[Part] = []
    offset = 0
    for name, size in bytes_of:
        parts.append(Part(name, offset, size))
        offset = round_up(offset + size, WORKSPACE_ALIGNMENT)
    return tuple(parts), offset


def _expect(problem: Problem, direction: str) -> None:
    problem.check()
    if problem.direction != direction:
        raise NotSupported(f"direction = {problem.direction!r}: plan_{direction} plans the {direction}; set it so")


def _launches(problem: Problem, build: Build, grids: dict[str, Grid]) -> tuple[Launch, ...]:
    """Every entry that has a grid, in pieces where batch or heads exceed what a grid holds."""
    if problem.is_empty:
        return ()
    bytes_of = {
        "main": build.shared_memory_bytes,
        "finish": finish_bytes(build),
        "bias": bias_gradient_build(build).shared_memory_bytes,
        "sinks": SINKS_BYTES,
        "combine": decode.combine_bytes(build, COMBINE_WARPS),
    }
    return tuple(
        Launch(symbol, grid, (kernels.entry_threads(build, role), 1, 1), bytes_of.get(role, 0), (), sizes)
        for role, symbol in kernels.entries(build).items()
        if role in grids
        for grid, sizes in _pieces(grids[role])
    )


def _pieces(grid: Grid) -> Iterator[tuple[Grid, tuple[tuple[str, int], ...]]]:
    tiles_x, heads, batch = grid
    starts = (range(0, size, MAX_GRID_YZ) for size in (heads, batch))
    for head, first in itertools.product(*starts):
        piece = tiles_x, min(heads - head, MAX_GRID_YZ), min(batch - first, MAX_GRID_YZ)
        whole = piece == grid
        yield piece, () if whole else (("first_head", head), ("first_batch", first))


def _bias_grid(problem: Problem, build: Build) -> Grid:
    """One block for each tile of grad_bias; along an axis that is summed over there is one."""
    if problem.grad_bias is None:
        return 0, 0, 0
    batch, heads, queries, keys = problem.grad_bias.shape
    return ceil_div(queries, build.tile_m) * ceil_div(keys, build.tile_n), heads, batch


def bias_gradient_build(build: Build) -> Build:
    """The build as the kernel that computes grad_bias alone sees it: with shared memory of its own."""
    return replace(build, shared_memory=bias_gradient_map(build))


def finish_bytes(build: Build) -> int:
    """Shared memory of the finish kernel: one query tile in the output's type."""
    return tile_bytes(build.dtype, build.tile_m, sum_columns(build))


def _generic(problem: Problem, arch: str) -> list[Build]:
    """The builds of the generic family, which takes every problem; NotSupported says why none fits."""
    made = _builds_of(problem, arch, "generic", tiles(problem))
    fitting = _fitting(made)
    if not fitting:
        found = budget.objections(made[-1], architecture(arch)) if made else ["the plan table has no row for it"]
        raise NotSupported(f"no tile fits {arch}: {'; '.join(found)}; use a smaller head_dim")
    return fitting


def _decode(problem: Problem, arch: str) -> list[Build]:
    """The builds of the decode kernels for this problem, none where they are not made for it."""
    return [] if decode.lacking(problem) else _fitting(_builds_of(problem, arch, "decode", decode_tiles(problem)))


def _hopper(problem: Problem, arch: str, num_sms: int) -> list[Build]:
    """The builds of the Hopper family for this problem, none where it is not made for it."""
    if not architecture(arch).has_wgmma or hopper.lacking(problem):
        return []
    return _fitting(_builds_of(problem, arch, "hopper", hopper.suited(problem, hopper_tiles(problem), num_sms)))


def _builds_of(problem: Problem, arch: str, family: str, rows: Iterable[Tile]) -> list[Build]:
    """The build of each row of the plan table that is meant for the target, whether or not it fits."""
    return [_build(problem, arch, row, family) for row in rows if arch not in row.not_on]


def _fitting(made: Iterable[Build]) -> list[Build]:
    """Those of the builds that fit their target."""
    return [build for build in made if not budget.objections(build, architecture(build.arch))]


def _build(problem: Problem, arch: str, tile: Tile, family: str = "generic") -> Build:
    shape = problem.shape
    forward = problem.direction == "forward"
    none = (0, 0)
    plain = Build(
        kind=problem.direction,
        family=family,
        arch=arch,
        dtype=problem.dtype,
        head_dim=shape.head_dim,
        head_dim_value=shape.head_dim_value,
        mask=problem.mask.form,
        tile_m=tile.tile_m,
        tile_n=tile.tile_n,
        warps=tile.warps,
        query_stages=tile.query_stages,
        grad_output_stages=tile.grad_output_stages,
        scores=none,
        grad_v=none,
        grad_k=none,
        grad_q=none,
        deterministic=problem.deterministic and not forward and problem.grad_query is not None,
        register_usage_level=tile.register_usage_level,
        min_blocks_per_sm=0,
        room="",
        shared_memory=(),
        features=problem.features,
        gradients=problem.gradients,
        access_bytes=row_access(problem),
        bias_access_bytes=bias_access(problem.bias),
        grad_bias_access_bytes=bias_access(problem.grad_bias),
        bias_gradient=bias_gradient(problem),
        column_block=_even_column_block(tile, shape, forward),
        query_block=tile.query_block,
        key_stages=tile.key_stages,
        whole_heads=tile.whole_heads,
        multicast=tile.multicast,
    )
    return _with_shared_memory(_with_warps(plain, tile))


def _even_column_block(tile: Tile, shape: Shape, forward: bool) -> int:
    """The tile's column block, or less where as many blocks then share the head more evenly."""
    if not tile.column_block:
        return 0
    widest = shape.head_dim_value if forward else max(shape.head_dim, shape.head_dim_value)
    share = ceil_div(widest, ceil_div(widest, tile.column_block))
    return min(tile.column_block, round_up(share, COLUMN_BLOCK_MULTIPLE))


def _with_warps(build: Build, tile: Tile) -> Build:
    def grid(m: int, n: int) -> Warps:
        return budget.warp_grid(build.warps, m, n, build.item_bytes)

    columns, columns_value = build.block_columns, build.block_columns_value
    if build.family == "hopper":
        return hopper.with_warps(build)
    if build.family == "decode":
        rows = decode.team_warps(tile.tile_m, build.columns_value, build.item_bytes)
        return replace(build, scores=(rows, build.warps // rows))
    if build.kind == "forward":
        # A resident forward keeps the rows of S in one warp, for the softmax reduces along them.
        scores = grid(tile.tile_m, tile.tile_n) if build.column_block else (tile.warps, 1)
        grad_q = grid(tile.tile_m, columns_value) if build.column_block else (0, 0)
        return replace(build, scores=scores, grad_q=grad_q)
    return replace(
        build,
        scores=grid(tile.tile_m, tile.tile_n),
        grad_v=grid(tile.tile_n, gradient_piece(build, columns_value)),
        grad_k=grid(tile.tile_n, gradient_piece(build, columns)),
        grad_q=grid(tile.tile_m, sum_columns(build)),
    )


def _with_shared_memory(build: Build) -> Build:
    return replace(build, shared_memory=shared_memory_map(build))


def row_access(problem: Problem) -> int:
    """Bytes of one load or store of a row of query, key, value and so on: what suits all of them."""
    return min(tensor.access_bytes for name, tensor in problem.tensors().items() if name not in BIASES)


def bias_access(tensor: Tensor | None) -> int:
    """Bytes of one load of a bias's row; 0 without one."""
    return 0 if tensor is None else tensor.access_bytes


def bias_gradient(problem: Problem) -> str:
    """Which kernel writes grad_bias: see Build. The main one has dS at hand, with a softcap only times its slope."""
    if problem.grad_bias is None:
        return ""
    summed = [
        axis
        for axis, size, full in zip("bhqk", problem.grad_bias.shape, problem.shape.bias, strict=True)
        if size == 1 and full > 1
    ]
    has_main = any(getattr(problem, f"grad_{name}") is not None for name in OPERANDS)
    if not summed and has_main and problem.softcap == 0:
        return "main"
    return "".join(summed) or "none"


def sizes(problem: Problem, build: Build) -> tuple[tuple[str, int], ...]:
    """The struct's integer fields that follow from the problem."""
    shape = problem.shape
    left, right = problem.mask.edges
    found = {
        "batch": shape.batch,
        "num_heads": shape.num_heads,
        "num_queries": shape.num_queries,
        "num_keys": shape.num_keys,
        "group": shape.group,
        "window_left": left,
        "window_right": right,
        "bottom_right": int(problem.mask.bottom_right),
        "dropout_threshold": _signed(threshold(problem.dropout_p)),
    }
    if problem.direction == "backward":
        found["total_tiles"] = total_tiles(problem, build)
    return tuple(found.items())


def _signed(word: int) -> int:
    """The int32 with the bits of a 32-bit word."""
    return word - 2**32 if word >= 2**31 else word


def _why(problem: Problem, build: Build) -> str:
    why = f"generic family (mma.sync, cp.async): the first tile of the table that fits {build.arch}'s shared memory"
    why += f"; the Hopper family takes no {', '.join(hopper.lacking(problem))}" if hopper.lacking(problem) else ""
    return why + decode.why_not(problem)
