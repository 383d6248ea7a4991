"""Fakes: artifacts whose cubin is for the fake driver, and CUDA arrays in host memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.artifact import Artifact, Kernel, Parameter
from cutlass_py_attn.kernels.sm90_family import choice as sm90_choice
from cutlass_py_attn.launch import abi, entry_points
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan import entry_parameters, planner
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.masks import Mask
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape

SHAPE = Shape(batch=2, num_queries=200, num_keys=300, num_heads=3, head_dim=64, head_dim_value=32)


def artifact(build: Build, sizes: tuple[int, ...] | None = None, *, driver_sizes: Any = None) -> Artifact:
    """Returns an artifact of `build` for the fake driver.

    sizes: parameter sizes (bytes) that the artifact states; None for those of the ABI.
    driver_sizes: parameter sizes that the fake driver reads; None for those that the artifact states.
    """
    lines, entries = [], []
    for role, symbol in entry_points.entries(build).items():
        described = sizes or tuple(size for _, size in entry_parameters.parameters(build, role))
        lines.append(" ".join([symbol, *map(str, driver_sizes or described)]))
        parameters = tuple(Parameter(f"p{i}", 0, size) for i, size in enumerate(described))
        entries.append(Kernel(symbol, 128, 0, 0, 0, build.threads, parameters))
    return Artifact(build, "", "\n".join([*lines, ""]).encode(), tuple(entries), "fake", "as planned")


def plan_of(direction: str, arch: str = "sm_90", dtype: str = "bfloat16", mask: Mask | None = None,
            shape: Shape = SHAPE, **changes: object) -> tuple[Problem, Plan]:  # fmt: skip
    """Returns a dense problem and its plan."""
    problem = Problem.dense(direction, shape, dtype, mask).replace(**changes)
    make = planner.plan_forward if direction == "forward" else planner.plan_backward
    return problem, make(problem, arch)


def expect_taken(problem: Problem, lacking: tuple[str, ...]) -> None:
    """Checks that sm90 kernels support the problem, or which features they lack; sm80 kernels come last."""
    assert sm90_choice.unsupported_features(problem) == lacking
    families = [plan.build.family for plan in planner.plans(problem, "sm_90a")]
    assert families[-1] == "sm80"
    assert ("sm90" in families) == (not lacking)
    assert all(name in planner.plan(problem, "sm_90").reason for name in lacking)


def decode(build: Build, parameters: bytes) -> dict[str, float]:
    """Returns the struct at the end of a launch's parameter bytes."""
    dtype = abi.numpy_struct(abi.fields_of(build))
    record = np.frombuffer(parameters[-dtype.itemsize :], dtype)[0]
    return {name: record[name].item() for name in dtype.names or ()}


def addresses(names: tuple[str, ...]) -> dict[str, int]:
    """Returns a made-up 16-byte aligned address for each name."""
    return {name: 0x7F0000000000 + 0x1000 * i for i, name in enumerate(names, 1)}


class InterfaceArray:
    """A host array with __cuda_array_interface__, as if in CUDA memory. stream: its producer's; None for none."""

    def __init__(self, array: npt.NDArray[Any], stream: int | None = None) -> None:
        self.array = array
        self.dtype = array.dtype
        self.stream = stream

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.array.shape,
            "typestr": self.array.dtype.str,
            "data": (self.array.ctypes.data, False),
            "strides": self.array.strides,
            "stream": self.stream,
            "version": 3,
        }


@dataclass
class DLPackArray:
    """An array that forwards DLPack export to `source` and records the consumer's stream in `asked`."""

    source: Any
    device: tuple[int, int] = (2, 0)
    asked: int | None = None

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        self.asked = stream
        return self.source.__dlpack__(stream=stream)


def aligned(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> npt.NDArray[Any]:
    """Returns random values in host memory that is 256-byte aligned, as device memory is."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 256, np.uint8)
    start = -raw.ctypes.data % 256
    array = raw[start : start + size].view(dtype).reshape(shape)
    array[...] = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
    return array


class CtypesStream:
    """A stream object with the attributes of Numba's."""

    def __init__(self, handle: int) -> None:
        self.handle = ctypes.c_void_p(handle)
