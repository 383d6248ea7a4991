"""Hopper: which problems the Hopper family takes, its warps, grids and tensor maps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from cutlass_py_attn import kernels
from cutlass_py_attn.gemm.gemm import WARPGROUP_WARPS
from cutlass_py_attn.gemm.plans import MAX_HEAD_DIM, swizzle_bytes
from cutlass_py_attn.parts import schedule
from cutlass_py_attn.parts.integers import ceil_div, round_up
from cutlass_py_attn.plan import Build, Launch, TensorMap
from cutlass_py_attn.plan_table import NARROW, Tile, kept_in_blocks
from cutlass_py_attn.problem import BIASES, F32_BYTES, ITEM_BYTES, OPERANDS, ROW_ALIGNMENT_BYTES, Problem, Shape, Tensor
from cutlass_py_attn.shared_memory import is_wide_backward

# Those that its kernels have.
FEATURES = {
    "forward": ("alibi", "bias", "dropout", "grouped", "seqused", "sinks", "softcap", "varlen"),
    "backward": ("alibi", "dropout", "grouped", "seqused", "sinks", "softcap", "varlen"),
    "backward in blocks": ("alibi", "grouped", "seqused", "sinks", "softcap", "varlen"),
    "wide backward": ("grouped",),
}
# See `_ragged_map`: rows of a tensor map over sequences of several lengths, and bytes of the whole address space.
RAGGED_ROWS, RAGGED_BYTES = 1 << 30, 1 << 64
KEYS_OF_WARPGROUP = 64  # of the backward's key tile
# Of blocks that take whole heads: bytes of Q, dO and sums of dQ that they work on at a time, which the L2 cache should
# hold, and how many times as many key tiles as when blocks share them the busiest may have.
HEADS_BYTES, HEADS_LOSS = 36 << 20, 1.15
CLUSTER = 2  # blocks of a cluster, where there are clusters
MULTICAST_LENGTH = 4096  # queries and keys from which on keys and values are loaded for a cluster
DQ_WARPGROUPS, LOADERS, CONSUMERS = 1, 1, 2  # of the backward's warpgroups: multiply dQ, load, have the keys


def lacking(problem: Problem) -> tuple[str, ...]:
    """What this problem has that the family does not; empty where it takes the problem."""
    shape = problem.shape
    backward = problem.direction == "backward"
    form = _backward_form(shape) if backward else "forward"
    found = [name for name in problem.features if name not in FEATURES[form]]
    present = {
        "num_splits_key": backward and problem.num_splits_key is not None,
        "choice of gradients": backward and not {*OPERANDS} <= {*problem.gradients},
        "a scale below 0": not backward and problem.scale_value < 0,
        "float32": problem.dtype == "float32",
        f"head dims beyond {MAX_HEAD_DIM}": max(shape.head_dim, shape.head_dim_value) > MAX_HEAD_DIM,
        "deterministic gradients with these head dims": form == "wide backward" and problem.deterministic,
        "rows aligned to less than 16 bytes": any(
            tensor.access_bytes < ROW_ALIGNMENT_BYTES
            for name, tensor in problem.tensors().items()
            if name not in BIASES
        ),
        "axes without an index": any(0 in getattr(problem, name).shape for name in _read(problem)),
        "strides of 0 or less": any(step <= 0 for name in _read(problem) for step in _strides(getattr(problem, name))),
    }
    return (*found, *(name for name, is_present in present.items() if is_present))


def _backward_form(shape: Shape) -> str:
    """Which of the backward kernels these head dims have."""
    if kept_in_blocks(shape):
        return "backward in blocks"
    return "backward" if max(shape.head_dim, shape.head_dim_value) <= NARROW else "wide backward"


def _read(problem: Problem) -> tuple[str, ...]:
    """The tensors that TMA reads."""
    return OPERANDS if problem.direction == "forward" else (*OPERANDS, "grad_output")


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of every axis that has more than one index: a tensor map steps forward along it."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.strides, strict=True) if size > 1)


def loaded_tiles(build: Build) -> dict[str, tuple[int, int]]:
    """(rows, columns) of the tiles that TMA brings, by operand, in the order of the kernel's tensor maps."""
    if build.kind == "backward":
        return {
            "query": (build.block_queries, build.columns),
            "grad_output": (build.block_queries, build.columns_value),
            "key": (build.tile_n, build.columns),
            "value": (build.tile_n, build.columns_value),
        }
    return {
        "query": (build.tile_m, build.columns),
        "key": (build.tile_n, build.columns),
        "value": (build.tile_n, build.columns_value),
    }


def slot_bytes(build: Build, name: str) -> int:
    """Bytes of one slot of the ring of query, key or value."""
    rows, columns = loaded_tiles(build)[name]
    return rows * columns * build.item_bytes


def slots(build: Build) -> dict[str, int]:
    """Slots of the rings of query, key and value."""
    return {name: build.buffer(name).bytes // slot_bytes(build, name) for name in loaded_tiles(build)}


def with_warps(build: Build) -> Build:
    """Warpgroups share the rows of every product: of S in the forward, of S^T, dV and dK in the backward."""
    if build.kind == "forward":
        return replace(build, scores=(build.warps - LOADERS * WARPGROUP_WARPS, 1))
    keys = build.tile_n // KEYS_OF_WARPGROUP * WARPGROUP_WARPS, 1
    return replace(build, scores=keys, grad_v=keys, grad_k=keys, grad_q=(DQ_WARPGROUPS * WARPGROUP_WARPS, 1))


def grid(shape: Shape, build: Build, num_sms: int) -> tuple[int, int, int]:
    """A block for each SM, which take query tiles in turn, in the backward key tiles; the blocks of a cluster take
    neighbouring ones."""
    rows, tile = (shape.num_queries, build.tile_m) if build.kind == "forward" else (shape.num_keys, build.tile_n)
    heads = shape.num_heads if build.kind == "forward" else shape.num_heads_key
    if build.whole_heads:
        return _blocks_of_heads(shape, num_sms), 1, 1
    together = cluster(build)
    tiles = ceil_div(rows, tile * together) * heads * shape.batch
    return max(min(num_sms // together, tiles), 1) * together, 1, 1


def suited(problem: Problem, rows: Iterable[Tile], num_sms: int) -> Iterator[Tile]:
    """Those of the rows whose division of the work is for such a problem."""
    for row in rows:
        if row.whole_heads and not suits_heads(problem, row, num_sms):
            continue
        if not row.multicast or suits_multicast(problem):
            yield row


def suits_heads(problem: Problem, tile: Tile, num_sms: int) -> bool:
    """Whether blocks that take all key tiles of a head are as busy as blocks that share them out, and what they work on
    stays in the L2 cache; every query tile must see a key, for nothing else writes its gradient."""
    shape = problem.shape
    if problem.sequences is not None or problem.is_empty:
        return False
    heads, key_tiles = shape.batch * shape.num_heads_key, ceil_div(shape.num_keys, tile.tile_n)
    busiest, shared = ceil_div(heads, num_sms) * key_tiles, ceil_div(heads * key_tiles, num_sms)
    width = shape.head_dim * F32_BYTES + (shape.head_dim + shape.head_dim_value) * ITEM_BYTES[problem.dtype]
    rows = _blocks_of_heads(shape, num_sms) * shape.num_queries * shape.group
    # Under a causal mask a key tile is done with the queries before it.
    live = rows * width // (1 if problem.mask.form == "full" else 2)
    if busiest > HEADS_LOSS * shared or live > HEADS_BYTES:
        return False
    band, tiles = problem.mask.band(shape.num_queries, shape.num_keys), (tile.tile_m, tile.tile_n)
    return all(
        schedule.key_tile_start(band, query_tile, *tiles) < schedule.key_tile_end(band, query_tile, *tiles)
        for query_tile in range(ceil_div(shape.num_queries, tile.tile_m))
    )


def suits_multicast(problem: Problem) -> bool:
    """Whether two blocks that take neighbouring query tiles gain by loading keys and values for both: the first of them
    waits for the other's last key tile, which only long rows make little of."""
    shape = problem.shape
    is_plain = not {*problem.features} - {"grouped"} and problem.mask.form == "causal"
    return is_plain and min(shape.num_queries, shape.num_keys) >= MULTICAST_LENGTH


def head_sums_bytes(shape: Shape, build: Build, num_sms: int) -> int:
    """Bytes of the sums of dQ of blocks that take whole heads."""
    rows = round_up(shape.num_queries, build.tile_m) * shape.group
    return _blocks_of_heads(shape, num_sms) * rows * build.columns * F32_BYTES


def _blocks_of_heads(shape: Shape, num_sms: int) -> int:
    return max(min(num_sms, shape.batch * shape.num_heads_key), 1)


def cluster(build: Build) -> int:
    """Blocks of the main kernel that run together."""
    return CLUSTER if build.multicast or is_wide_backward(build) else 1


def why(build: Build) -> str:
    """What the warpgroups of a block do."""
    keepers = build.scores[0] // WARPGROUP_WARPS
    if build.kind == "forward":
        takes = "two blocks of a cluster load keys and values for both: " if build.multicast else ""
        roles = f"{takes}{keepers} warpgroups multiply, one warp loads"
    elif cluster(build) == 1:
        takes = "a block takes whole heads: " if build.whole_heads else ""
        roles = f"{takes}{keepers} warpgroups multiply, one multiplies dQ, one warp loads"
    else:
        roles = "one warpgroup has P and dV, one dS and dK, one dQ of both blocks of a cluster, one warp loads"
    return f"Hopper family (wgmma, TMA): {roles}"


def with_maps(problem: Problem, build: Build, launches: tuple[Launch, ...]) -> tuple[Launch, ...]:
    """The launches, the main kernel's with its tensor maps."""
    main = kernels.entries(build)["main"]
    maps = tensor_maps(problem, build)
    together = cluster(build)
    return tuple(
        replace(launch, tensor_maps=maps, cluster=together) if launch.symbol == main else launch for launch in launches
    )


def tensor_maps(problem: Problem, build: Build) -> tuple[TensorMap, ...]:
    """The maps of what TMA brings: [batch, heads, rows, columns], a strip of a tile at a time."""
    made = _ragged_map if build.has("varlen") else _tensor_map
    return tuple(made(name, getattr(problem, name), *tile) for name, tile in loaded_tiles(build).items())


def _tensor_map(name: str, tensor: Tensor, rows: int, columns: int) -> TensorMap:
    batch, length, heads, dim = tensor.shape
    # Nothing steps along an axis of size 1, but a map's stride is never 0.
    batch_step, row_step, head_step, _ = (step or dim for step in tensor.steps)
    swizzle = swizzle_bytes(columns)
    box = swizzle // 2, rows, 1, 1
    return TensorMap(name, (dim, length, heads, batch), (row_step, head_step, batch_step), box, swizzle)


def _ragged_map(name: str, tensor: Tensor, rows: int, columns: int) -> TensorMap:
    """[1, rows, heads, columns] in which a copy ends with its sequence, though others lie behind.

    Row r of the sequence that ends before row e and has n rows is asked for as row RAGGED_ROWS - n + r, so that the map
    itself ends with it, plus e rows, minus RAGGED_ROWS rows. An axis of its own adds each; the last one's one step goes
    around the whole address space.
    """
    _, length, heads, dim = tensor.shape
    _, row_step, head_step, _ = (step or dim for step in tensor.steps)
    swizzle = swizzle_bytes(columns)
    around = RAGGED_BYTES // RAGGED_ROWS // ITEM_BYTES[tensor.dtype] - row_step
    sizes = dim, RAGGED_ROWS, heads, length + 1, RAGGED_ROWS + 1
    box = swizzle // 2, rows, 1, 1, 1
    return TensorMap(name, sizes, (row_step, head_step, row_step, around), box, swizzle)
