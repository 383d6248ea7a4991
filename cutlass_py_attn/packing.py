"""Packing: the parameters of a plan's kernels, one struct and a slot for each tensor map, and the addresses in them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from cutlass_py_attn import abi, driver, tensor_maps
from cutlass_py_attn.philox import keep_scale
from cutlass_py_attn.plan import Launch, Plan, TensorMap
from cutlass_py_attn.problem import BIASES, F32_BYTES, ROW_ALIGNMENT_BYTES, Problem

LOG2_E: Final = math.log2(math.e)
_SLOT_ALIGNMENT: Final = abi.TENSOR_MAP_BYTES  # of every parameter; a multiple of what cuda.h asks for tensor maps
_WORD_BYTES: Final = 8
_HALF_BYTES: Final = 4
_KEPT: Final = 64  # sets of addresses


@dataclass(frozen=True, slots=True)
class _Map:
    """A tensor map: its 128-byte slot, and the place of its array among the plan's addresses."""

    slot: int
    recipe: TensorMap
    position: int
    move: partial[tuple[Any]]  # points the encoded map at another address


class Packing:
    """The packed parameters of one plan. names: what has an address, in the order in which `pack` takes them.

    alignments: bytes to which the address of each name must be aligned; 0 where it is no address or never read.
    packed: the addresses that were packed last; empty before the first time, and after a failure.
    """

    def __init__(self, plan: Plan, problem: Problem | None) -> None:
        fields = abi.fields_of(plan.build.kind, plan.build.family)
        struct = np.zeros((), abi.numpy_struct(fields))
        if problem is None:
            needed = {name: ROW_ALIGNMENT_BYTES for name, kind in fields if kind == "i64"}
        else:
            needed = alignments(problem)
            for name, value in numbers(problem).items():
                struct[name] = value
        for name, size in plan.sizes:
            struct[name] = size
        # What is checked comes first.
        self.alignments = dict(sorted(needed.items(), key=lambda item: not item[1]))
        self.names = tuple(self.alignments)
        self.packed: tuple[int, ...] = ()
        self.struct_bytes = struct.itemsize
        self._workspace = 0
        self._dtype = plan.build.dtype
        self._storage: list[np.ndarray[Any, Any]] = []
        self._maps: list[_Map] = []
        self._seen: dict[tuple[int, ...], tuple[bytes, int]] = {}  # what was packed, and the workspace then
        num_maps = sum(len(launch.tensor_maps) for launch in plan.launches)
        self._memory, self._slots = _aligned(num_maps * abi.TENSOR_MAP_BYTES + self.struct_bytes)
        self._struct = self._slots + num_maps * abi.TENSOR_MAP_BYTES
        own = self._memory[-self.struct_bytes :]
        own[:] = struct.tobytes()
        self._words, self._halves = own.cast("Q"), own.cast("i")
        self._offsets = {name: offset for name, offset, _ in abi.layout(fields)}
        on_device = problem is not None and problem.philox_on_device
        moved = {name: f"{name}_address" for name in abi.SEED} if on_device else {}
        indices = tuple(self._word(moved.get(name, name)) for name in self.names)
        self._low_bits = tuple(alignment - 1 for alignment in self.alignments.values() if alignment)
        self._indices, self._others = indices[: len(self._low_bits)], indices[len(self._low_bits) :]
        self._parts = tuple((self._word(part.name), part.offset) for part in plan.workspace.parts)

    def _word(self, field: str) -> int:
        """Index of a 64-bit field among the struct's words: such fields are aligned."""
        return self._offsets[field] // _WORD_BYTES

    def pack(self, addresses: tuple[int, ...]) -> bool:
        """Put the address of each of `names` into the struct and the tensor maps; False where one is unfit.

        A map is encoded once and only moved thereafter. Programs come back to the same
        addresses: what was packed for them is kept.
        """
        seen = self._seen.get(addresses)
        if seen is not None:
            self._memory[:], self._workspace = seen
            self.packed = addresses
            return True
        before, self.packed = self.packed, ()
        words = self._words
        try:
            for index, low_bits, address in zip(self._indices, self._low_bits, addresses, strict=False):
                if address & low_bits or not address:
                    return False
                words[index] = address
            for index, number in zip(self._others, addresses[len(self._indices) :], strict=True):
                words[index] = number
        except ValueError:  # no number of 64 bits
            return False
        for each in self._maps:
            address = addresses[each.position]
            if not before:
                tensor_maps.encode(each.slot, address, each.recipe, self._dtype)
            elif address != before[each.position]:
                (code,) = each.move(address)
                if code:
                    raise driver.failure("cuTensorMapReplaceAddress", (each.slot, address), int(code), "")
        self.packed = addresses
        if len(self._seen) >= _KEPT:
            del self._seen[next(iter(self._seen))]
        self._seen[addresses] = bytes(self._memory), self._workspace
        return True

    def set_workspace(self, workspace: int) -> None:
        """Put the addresses of the workspace's parts into the struct."""
        if workspace != self._workspace:
            for index, offset in self._parts:
                self._words[index] = workspace + offset
            self._workspace = workspace

    def write_sizes(self, sizes: Iterable[tuple[str, int]]) -> None:
        """Put numbers that differ between the launches into their 32-bit fields."""
        for name, size in sizes:
            self._halves[self._offsets[name] // _HALF_BYTES] = size

    def parameters(self, launch: Launch) -> int:
        """Address of the array of pointers to the parameters of a launch: its tensor maps, then the struct."""
        maps = []
        for recipe in launch.tensor_maps:
            maps.append(self._map(recipe))
            self._maps.append(maps[-1])
        pointers = np.array([*(each.slot for each in maps), self._struct], np.uint64)
        self._storage.append(pointers)
        return pointers.ctypes.data

    def _map(self, recipe: TensorMap) -> _Map:
        slot = self._slots + len(self._maps) * abi.TENSOR_MAP_BYTES
        return _Map(slot, recipe, self.names.index(recipe.field), tensor_maps.mover(slot))


def _aligned(size: int) -> tuple[memoryview, int]:
    """So many bytes, and their address, aligned for tensor maps."""
    memory = np.zeros(size + _SLOT_ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _SLOT_ALIGNMENT
    return memory.data[start : start + size], memory.ctypes.data + start


def alignments(problem: Problem) -> dict[str, int]:
    """Bytes to which the address of each operand must be aligned; 0 where it is not an address or never read."""
    found = {name: tensor.alignment for name, tensor in problem.tensors().items()}
    found["logsumexp"] = F32_BYTES
    found |= {name: tensor.alignment for name, tensor in problem.vectors().items()}
    found |= {name: 0 for name, tensor in problem.tensors().items() if 0 in tensor.shape}
    if problem.dropout_p != 0 and not problem.philox_on_device:
        found |= dict.fromkeys(abi.SEED, 0)
    return found


def numbers(problem: Problem) -> dict[str, float]:
    """Strides and factors by struct field."""
    found: dict[str, float] = {}
    for name, tensor in problem.tensors().items():
        axes = ("batch", "head", "row", "column") if name in BIASES else ("batch", "row", "head")
        steps = tensor.steps if name in BIASES else tensor.strides
        found |= {f"{name}_{axis}": step for axis, step in zip(axes, steps, strict=False)}
    if problem.grad_output is not None:
        found["grad_output_column"] = problem.grad_output.steps[3]
    if problem.alibi_slopes is not None and len(problem.alibi_slopes.shape) == 2:
        found["alibi_batch"] = problem.shape.num_heads
    scale = problem.scale_value
    factors = {"scale": scale, "scale_log2": scale * LOG2_E, "softcap": problem.softcap}
    return found | factors | {"keep_scale": keep_scale(problem.dropout_p)}
