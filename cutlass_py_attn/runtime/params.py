"""Kernel parameters of a plan: one struct and one slot per tensor map, into which launches write addresses."""

from __future__ import annotations

import ctypes
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cutlass_py_attn.launch import abi
from cutlass_py_attn.plan.plan import Plan, TensorMap
from cutlass_py_attn.problem.operands import Operand
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import ROW_ALIGNMENT_BYTES
from cutlass_py_attn.runtime import tensor_maps
from cutlass_py_attn.score_terms import registry

LOG2_E: Final = math.log2(math.e)
_SLOT_ALIGNMENT: Final = abi.TENSOR_MAP_BYTES  # of every parameter; a multiple of the alignment that cuda.h requires
_INVALID_BITS: Final = -(1 << 64) | (ROW_ALIGNMENT_BYTES - 1)  # bits that are 0 in every aligned 64-bit address

_uint64_at: Final = ctypes.c_uint64.from_address
_int32_at: Final = ctypes.c_int32.from_address


@dataclass(frozen=True, slots=True)
class _EncodedMap:
    """A tensor map. slot: address of its 128 bytes; index: position of its array among the plan's addresses."""

    slot: int
    spec: TensorMap
    index: int


class KernelParams:
    """The kernel parameters of one plan, in host memory that the driver reads at each launch.

    alignments: name of each address to its alignment (bytes); 0 for a value that is not an address or never read.
    pointer_names: names of the addresses that `write` gets, in order; the array of a tensor map occurs again at the
        end.
    write_addresses: writes addresses when all else is unchanged; returns whether they are valid and `write` is not
        needed.
    parameters: for each launch, the address of the array of pointers to its tensor maps and to the struct.
    """

    def __init__(self, plan: Plan, problem: Problem | None) -> None:
        fields = abi.fields_of(plan.build)
        alignments, struct = _initial_struct(plan, problem, fields)
        # Aligned addresses come first.
        self.alignments = dict(sorted(alignments.items(), key=lambda item: not item[1]))
        names = tuple(self.alignments)
        self._dtype = plan.build.dtype
        specs = [spec for launch in plan.launches for spec in launch.tensor_maps]
        self._memory, start = _aligned_memory(len(specs) * abi.TENSOR_MAP_BYTES + len(struct))
        slots = [start + number * abi.TENSOR_MAP_BYTES for number in range(len(specs) + 1)]
        struct_address = slots.pop()
        self._memory[-len(struct) :] = struct
        self._tensor_maps = [
            _EncodedMap(slot, spec, names.index(spec.field)) for slot, spec in zip(slots, specs, strict=True)
        ]
        remaining_slots = iter(slots)
        self._pointers = [
            np.array([*itertools.islice(remaining_slots, len(launch.tensor_maps)), struct_address], np.uint64)
            for launch in plan.launches
        ]
        self.parameters = tuple(array.ctypes.data for array in self._pointers)

        self._field_addresses = {name: struct_address + offset for name, offset, _ in abi.layout(fields)}
        philox_on_device = problem is not None and problem.philox_on_device
        renamed = {name: f"{name}_address" for name in abi.SEED} if philox_on_device else {}
        self.pointer_names = (*names, *(spec.field for spec in specs))
        targets = [*(self._field_addresses[renamed.get(name, name)] for name in names), *slots]
        self._write_all = _address_writer(targets, len(names))
        self.write_addresses: Callable[[tuple[int, ...]], object] = self._write_all if not specs else _refuse
        self._workspace_fields = tuple(
            (_uint64_at(self._field_addresses[buffer.name]), buffer.offset) for buffer in plan.workspace.buffers
        )
        self._workspace = 0
        self._are_encoded = not specs
        self._reencoded_maps: list[_EncodedMap] = []  # tensor maps whose address cannot be overwritten in place

    def write(self, addresses: tuple[int, ...], workspace: int) -> bool:
        """Writes the addresses, and those of the workspace's buffers; returns False if one of them is invalid."""
        try:
            addresses = tuple(map(operator.index, addresses))
        except TypeError:
            return False
        if not self._write_all(addresses) and not self._are_valid(addresses):
            return False
        if workspace != self._workspace and (not 0 <= workspace < 1 << 64 or workspace % ROW_ALIGNMENT_BYTES):
            return False
        if not self._are_encoded or self._reencoded_maps:
            self._encode(addresses)
        if workspace != self._workspace:
            for field, offset in self._workspace_fields:
                field.value = workspace + offset
            self._workspace = workspace
        return True

    def _are_valid(self, addresses: tuple[int, ...]) -> bool:
        required = zip(addresses, self.alignments.values(), strict=False)  # without the repeated addresses
        return all(
            0 <= address < 1 << 64 and (not alignment or (address and not address % alignment))
            for address, alignment in required
        )

    def _encode(self, addresses: tuple[int, ...]) -> None:
        """Encodes tensor maps: all of them once, later only those whose address cannot be overwritten in place."""
        for each in self._reencoded_maps if self._are_encoded else self._tensor_maps:
            tensor_maps.encode(each.slot, addresses[each.index], each.spec, self._dtype)
        if not self._are_encoded:
            self._reencoded_maps = [
                each
                for each in self._tensor_maps
                if not tensor_maps.starts_with_address(each.slot, addresses[each.index], each.spec, self._dtype)
            ]
            self._are_encoded = True
            if not self._reencoded_maps:
                self.write_addresses = self._write_all

    def write_overrides(self, overrides: Iterable[tuple[str, int]]) -> None:
        """Writes values that differ between launches to their 32-bit fields."""
        for name, value in overrides:
            _int32_at(self._field_addresses[name]).value = value


def _refuse(addresses: tuple[int, ...]) -> bool:
    """Takes the place of the address writer until the tensor maps are encoded."""
    return False


def _address_writer(targets: Sequence[int], num_names: int) -> Callable[[tuple[int, ...]], object]:
    """Returns a function that writes one address to each target and returns whether all are aligned and not 0.

    The function is generated with one line per address, because a loop takes twice as long and every launch runs it.

    targets: host address of each 64-bit field.
    num_names: number of distinct addresses; those that follow are repeated and not checked again.
    """
    count = range(len(targets))
    names = [f"a{i}" for i in range(num_names)]
    lines = (
        f"def write(addresses, {', '.join(f'w{i}=w{i}' for i in count)}):",
        f"    {''.join(f'a{i}, ' for i in count)} = addresses",
        "    try:",
        *(f"        w{i}.value = a{i}" for i in count),
        f"        return {' and '.join(names)} and not ({' | '.join(names)}) & {_INVALID_BITS}",
        "    except (TypeError, OverflowError):",  # NumPy's integers, for example
        "        return False",
    )
    namespace: dict[str, Any] = {f"w{i}": _uint64_at(target) for i, target in enumerate(targets)}
    exec("\n".join(lines), namespace)
    write: Callable[[tuple[int, ...]], object] = namespace["write"]
    return write


def _initial_struct(plan: Plan, problem: Problem | None, fields: abi.Fields) -> tuple[dict[str, int], bytes]:
    """Returns the alignments by name, and the struct with every value that is the same in all calls."""
    struct = np.zeros((), abi.numpy_struct(fields))
    if problem is None:
        required = abi.address_alignments(plan.build)
    else:
        operands = problem.operands()
        required = alignments(problem, operands)
        for name, value in numbers(problem, operands).items():
            struct[name] = value
    for name, value in plan.params:
        struct[name] = value
    return required, struct.tobytes()


def _aligned_memory(size: int) -> tuple[memoryview, int]:
    """Returns zeroed memory of `size` bytes and its address, which is aligned for tensor maps."""
    memory = np.zeros(size + _SLOT_ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _SLOT_ALIGNMENT
    return memory.data[start : start + size], memory.ctypes.data + start


def alignments(problem: Problem, operands: Mapping[str, Operand]) -> dict[str, int]:
    """Returns the alignment (bytes) of each operand's address; 0 for a value that is not an address or never read."""
    arrays = {name: operand.tensor for name, operand in operands.items()}
    required = {name: 0 if 0 in tensor.shape else tensor.alignment for name, tensor in arrays.items()}
    for term in registry.present(problem):
        required |= dict.fromkeys(term.immediate_numbers(problem), 0)
    return required


def numbers(problem: Problem, operands: Mapping[str, Operand]) -> dict[str, float]:
    """Returns strides (elements) and scale factors by the name of their struct field."""
    strides = {field: step for operand in operands.values() for field, step in operand.strides.items()}
    scale = problem.scale_value
    values = {**strides, "scale": scale, "scale_log2": scale * LOG2_E}
    for term in registry.in_struct(problem.features):
        values |= term.numbers(problem)
    return values
