"""Hopper: which problems the Hopper family takes, and the tensor maps of its kernels."""

from __future__ import annotations

from cutlass_py_attn.gemm.plans import MAX_HEAD_DIM, swizzle_bytes
from cutlass_py_attn.plan import Build, TensorMap
from cutlass_py_attn.problem import OPERANDS, ROW_ALIGNMENT_BYTES, Problem, Tensor

# Those that its kernels have.
FEATURES = ("alibi", "bias", "dropout", "grouped", "seqused", "sinks", "softcap", "varlen")


def lacking(problem: Problem) -> tuple[str, ...]:
    """What this problem has that the family does not; empty where it takes the problem."""
    shape = problem.shape
    found = [name for name in problem.features if name not in FEATURES]
    present = {
        "backward": problem.direction == "backward",
        "a scale below 0": problem.scale_value < 0,
        "float32": problem.dtype == "float32",
        f"head dims beyond {MAX_HEAD_DIM}": max(shape.head_dim, shape.head_dim_value) > MAX_HEAD_DIM,
        "rows aligned to less than 16 bytes": any(
            getattr(problem, name).access_bytes < ROW_ALIGNMENT_BYTES for name in (*OPERANDS, "output")
        ),
        "axes without an index": any(0 in getattr(problem, name).shape for name in OPERANDS),
        "strides of 0 or less": any(step <= 0 for name in OPERANDS for step in _strides(getattr(problem, name))),
    }
    return (*found, *(name for name, is_present in present.items() if is_present))


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of every axis that has more than one index: a tensor map steps forward along it."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.strides, strict=True) if size > 1)


def loaded_tiles(build: Build) -> dict[str, tuple[int, int]]:
    """(rows, columns) of the tiles that TMA brings, by operand, in the order of the kernel's tensor maps."""
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


def tensor_maps(problem: Problem, build: Build) -> tuple[TensorMap, ...]:
    """The maps of query, key and value: [batch, heads, rows, columns], a strip of a tile at a time."""
    return tuple(_tensor_map(name, getattr(problem, name), *tile) for name, tile in loaded_tiles(build).items())


def _tensor_map(name: str, tensor: Tensor, rows: int, columns: int) -> TensorMap:
    batch, length, heads, dim = tensor.shape
    # Nothing steps along an axis of size 1, but a map's stride is never 0.
    batch_step, row_step, head_step, _ = (step or dim for step in tensor.steps)
    swizzle = swizzle_bytes(columns)
    box = swizzle // 2, rows, 1, 1
    return TensorMap(name, (dim, length, heads, batch), (row_step, head_step, batch_step), box, swizzle)
