"""Native program: what the handler in C does for one call, as the words that native_handler.c describes.

The steps are those of the handler in Python: memsets of rows outside of every sequence, the memset of the workspace,
then the kernels. Only the addresses of the call's buffers are missing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.jax import handler
from cutlass_py_attn.launch import abi
from cutlass_py_attn.plan.plan import Launch, Plan, TensorMap
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import F32_BYTES, ITEM_BYTES, ROW_ALIGNMENT_BYTES
from cutlass_py_attn.runtime import tensor_maps
from cutlass_py_attn.runtime.params import KernelParams

Words = Iterator[int]

FORMAT: Final = int.from_bytes(b"cpaprog1", "little")
CLEAR, FILL, LAUNCH = range(3)
MAX_MAPS: Final = 256  # of all launches of a call

_INFINITY: Final = int(np.float32(np.inf).view(np.uint32))


def program_of(call: handler.BoundPayload, addresses: Sequence[int]) -> npt.NDArray[np.uint64] | None:
    """Returns the program of a call that was launched with these addresses; None if the handler in Python is needed.

    That is so if an address in one of the tensor maps cannot be overwritten, or if there are more than MAX_MAPS.
    """
    plan, names = call.bound.plan, call.names
    places = {name: place for place, name in enumerate(names)}  # results follow operands
    specs = [spec for launch in plan.launches for spec in launch.tensor_maps]
    maps = [_template(spec, addresses[places[spec.field]], plan.build.dtype) for spec in specs]
    if not plan.launches or len(maps) > MAX_MAPS or None in maps:
        return None
    params = KernelParams(plan, call.problem)
    offsets = {name: offset for name, offset, _ in abi.layout(abi.fields_of(plan.build))}
    fields = list(_addresses(call, params, places, offsets))
    clears = list(_clears(call.problem, plan, places))
    launches = list(_launches(call, offsets))
    words = [FORMAT, call.bound.device.context, len(names), *_struct(plan, params)]
    words += [len(fields), *(word for each in fields for word in each), len(specs)]
    for spec, template in zip(specs, maps, strict=True):
        words += [places[spec.field], *_packed(template or b"")]
    words += [len(clears) + len(launches), *(word for each in (*clears, *launches) for word in each)]
    return np.array(words, np.uint64)


def _template(spec: TensorMap, address: int, dtype: str) -> bytes | None:
    """Returns the tensor map of an address; None if another address cannot be written over its first 8 bytes."""
    memory = ctypes.create_string_buffer(2 * abi.TENSOR_MAP_BYTES)
    slot = -(-ctypes.addressof(memory) // abi.TENSOR_MAP_BYTES) * abi.TENSOR_MAP_BYTES
    tensor_maps.encode(slot, address, spec, dtype)
    if not tensor_maps.starts_with_address(slot, address, spec, dtype):
        return None
    return ctypes.string_at(slot, abi.TENSOR_MAP_BYTES)


def _struct(plan: Plan, params: KernelParams) -> Words:
    """Yields the size of the struct, then its words, in which every address is 0."""
    pointers = params.parameters[0] + ctypes.sizeof(ctypes.c_uint64) * len(plan.launches[0].tensor_maps)
    size = abi.numpy_struct(abi.fields_of(plan.build)).itemsize
    yield size
    yield from _packed(ctypes.string_at(ctypes.c_uint64.from_address(pointers).value, size))


def _addresses(
    call: handler.BoundPayload, params: KernelParams, places: dict[str, int], offsets: dict[str, int]
) -> Iterator[tuple[int, int, int, int]]:
    """Yields (buffer, bytes from its start, offset in the struct, alignment) of every address in the struct."""
    for name, alignment in params.alignments.items():
        if name in abi.SEED:  # the call has both in one buffer
            yield places[handler.PHILOX], 8 * abi.SEED.index(name), offsets[f"{name}_address"], alignment
        else:
            yield places[name], 0, offsets[name], alignment
    for buffer in call.bound.plan.workspace.buffers:
        yield places[handler.WORKSPACE], buffer.offset, offsets[buffer.name], ROW_ALIGNMENT_BYTES


def _clears(problem: Problem | None, plan: Plan, places: dict[str, int]) -> Iterator[tuple[int, ...]]:
    """Yields the memsets: what `fill.fill` sets in dense results, and the workspace."""
    if problem is not None and problem.has_ragged_rows:
        is_forward = problem.direction == "forward"
        results = ("output",) if is_forward else tuple(f"grad_{name}" for name in problem.gradients)
        for name, tensor in (problem.tensors() | problem.vectors()).items():
            if name in results and 0 not in tensor.shape:
                yield CLEAR, places[name], 0, prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        batch, num_heads, padded = problem.shape.logsumexp
        if is_forward and batch * num_heads * padded:
            yield FILL, places["logsumexp"], 0, padded * F32_BYTES, _INFINITY, padded, batch * num_heads
    if plan.workspace.zero_bytes:
        yield CLEAR, places[handler.WORKSPACE], 0, plan.workspace.zero_bytes


def _launches(call: handler.BoundPayload, offsets: dict[str, int]) -> Iterator[list[int]]:
    """Yields the words of every launch."""
    plan = call.bound.plan
    first_map = 0
    shared = dict(plan.params)
    overridden = dict.fromkeys(name for launch in plan.launches for name, _ in launch.param_overrides)
    for launch, function in zip(plan.launches, call.bound.kernels, strict=True):
        values = {name: shared.get(name, 0) for name in overridden} | dict(launch.param_overrides)
        yield [
            *(LAUNCH, function, *launch.grid, *launch.block, launch.shared_memory_bytes),
            *(launch.cluster, int(launch.is_dependent), first_map, len(launch.tensor_maps)),
            *(len(values), *(word for name, value in values.items() for word in (offsets[name], value & 0xFFFFFFFF))),
            *_symbol(launch),
        ]
        first_map += len(launch.tensor_maps)


def _symbol(launch: Launch) -> Words:
    symbol = launch.symbol.encode()
    yield len(symbol)
    yield from _packed(symbol)


def _packed(data: bytes) -> list[int]:
    """Returns bytes as whole words, with zeros at the end."""
    found: list[int] = np.frombuffer(data + bytes(-len(data) % 8), np.uint64).tolist()
    return found
