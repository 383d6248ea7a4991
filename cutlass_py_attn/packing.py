"""Packing: the parameters of a plan's kernels, one struct and a slot for each tensor map, and the addresses in them."""

from __future__ import annotations

import ctypes
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cutlass_py_attn import abi, tensor_maps
from cutlass_py_attn.philox import keep_scale
from cutlass_py_attn.plan import Plan, TensorMap
from cutlass_py_attn.problem import BIASES, F32_BYTES, ROW_ALIGNMENT_BYTES, Problem

LOG2_E: Final = math.log2(math.e)
_SLOT_ALIGNMENT: Final = abi.TENSOR_MAP_BYTES  # of every parameter; a multiple of what cuda.h asks for tensor maps
_ODD: Final = -(1 << 64) | (ROW_ALIGNMENT_BYTES - 1)  # bits that aligned addresses do not have

_word: Final = ctypes.c_uint64.from_address
_half: Final = ctypes.c_int32.from_address


@dataclass(frozen=True, slots=True)
class _Map:
    """A tensor map: its 128-byte slot, and the place of its array among the plan's addresses."""

    slot: int
    recipe: TensorMap
    position: int


class Packing:
    """The packed parameters of one plan.

    alignments: by name, bytes to which its address must be aligned; 0 where it is no address or never read.
    takes: the names of the addresses that `pack` takes, in order; those of tensor maps come twice.
    write: puts addresses where kernels read them, and gives whether `pack` would do no more.
    parameters: of each launch, the address of the array of pointers to its tensor maps and the struct.
    """

    def __init__(self, plan: Plan, problem: Problem | None) -> None:
        fields = abi.fields_of(plan.build.kind, plan.build.family)
        needed, struct = _struct(plan, problem, fields)
        # What is checked comes first.
        self.alignments = dict(sorted(needed.items(), key=lambda item: not item[1]))
        names = tuple(self.alignments)
        self._dtype = plan.build.dtype
        recipes = [recipe for launch in plan.launches for recipe in launch.tensor_maps]
        self._memory, start = _aligned(len(recipes) * abi.TENSOR_MAP_BYTES + len(struct))
        slots = [start + number * abi.TENSOR_MAP_BYTES for number in range(len(recipes) + 1)]
        own = slots.pop()
        self._memory[-len(struct) :] = struct
        self._maps = [
            _Map(slot, recipe, names.index(recipe.field)) for slot, recipe in zip(slots, recipes, strict=True)
        ]
        following = iter(slots)
        self._pointers = [
            np.array([*itertools.islice(following, len(launch.tensor_maps)), own], np.uint64)
            for launch in plan.launches
        ]
        self.parameters = tuple(array.ctypes.data for array in self._pointers)

        self._places = {name: own + offset for name, offset, _ in abi.layout(fields)}
        on_device = problem is not None and problem.philox_on_device
        moved = {name: f"{name}_address" for name in abi.SEED} if on_device else {}
        self.takes = (*names, *(recipe.field for recipe in recipes))
        self._write = _writer([*(self._places[moved.get(name, name)] for name in names), *slots], len(names))
        self.write: Callable[[tuple[int, ...]], object] = self._write if not recipes else lambda addresses: False
        self._parts = tuple((_word(self._places[part.name]), part.offset) for part in plan.workspace.parts)
        self._workspace = 0
        self._are_encoded = not recipes
        self._encoded_anew: list[_Map] = []  # where an address cannot be written over another

    def pack(self, addresses: tuple[int, ...], workspace: int) -> bool:
        """Put the addresses, and those of the workspace's parts, where kernels read them; False where one is unfit."""
        addresses = tuple(map(operator.index, addresses))
        looks_fit = self._write(addresses)
        if not looks_fit and not self._are_fit(addresses):
            return False
        if workspace != self._workspace and (workspace < 0 or workspace % ROW_ALIGNMENT_BYTES):
            return False
        if not self._are_encoded or self._encoded_anew:
            self._encode(addresses)
        if workspace != self._workspace:
            for word, offset in self._parts:
                word.value = workspace + offset
            self._workspace = workspace
        return True

    def _are_fit(self, addresses: tuple[int, ...]) -> bool:
        found = zip(addresses, self.alignments.values(), strict=False)  # without those that come again
        return all(
            0 <= address < 1 << 64 and (not alignment or (address and not address % alignment))
            for address, alignment in found
        )

    def _encode(self, addresses: tuple[int, ...]) -> None:
        """Make the tensor maps: all of them once, and always those whose address cannot simply be written."""
        for each in self._encoded_anew if self._are_encoded else self._maps:
            tensor_maps.encode(each.slot, addresses[each.position], each.recipe, self._dtype)
        if not self._are_encoded:
            self._encoded_anew = [
                each
                for each in self._maps
                if not tensor_maps.starts_with_address(each.slot, addresses[each.position], each.recipe, self._dtype)
            ]
            self._are_encoded = True
            if not self._encoded_anew:
                self.write = self._write

    def write_sizes(self, sizes: Iterable[tuple[str, int]]) -> None:
        """Put numbers that differ between the launches into their 32-bit fields."""
        for name, size in sizes:
            _half(self._places[name]).value = size


def _writer(places: Sequence[int], num_names: int) -> Callable[[tuple[int, ...]], object]:
    """What writes an address to each of these places in memory; gives whether all are aligned and none is 0.

    num_names: of the addresses; those after them are some of them once more. Written out, a line for each: a loop
    takes twice as long, and this is in the way of every launch.
    """
    count = range(len(places))
    names = [f"a{i}" for i in range(num_names)]
    lines = (
        f"def write(addresses, {', '.join(f'w{i}=w{i}' for i in count)}):",
        f"    {''.join(f'a{i}, ' for i in count)} = addresses",
        "    try:",
        *(f"        w{i}.value = a{i}" for i in count),
        f"        return {' and '.join(names)} and not ({' | '.join(names)}) & {_ODD}",
        "    except (TypeError, OverflowError):",  # NumPy's integers, for example
        "        return False",
    )
    space: dict[str, Any] = {f"w{i}": _word(place) for i, place in enumerate(places)}
    exec("\n".join(lines), space)
    written: Callable[[tuple[int, ...]], object] = space["write"]
    return written


def _struct(plan: Plan, problem: Problem | None, fields: abi.Fields) -> tuple[dict[str, int], bytes]:
    """Alignments by name, and the struct with all that does not change from call to call."""
    made = np.zeros((), abi.numpy_struct(fields))
    if problem is None:
        needed = {name: ROW_ALIGNMENT_BYTES for name, kind in fields if kind == "i64"}
    else:
        needed = alignments(problem)
        for name, value in numbers(problem).items():
            made[name] = value
    for name, size in plan.sizes:
        made[name] = size
    return needed, made.tobytes()


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
