"""Threads and parameters of the entries of a Build's cubin: tensor maps before the struct."""

from __future__ import annotations

from cutlass_py_attn.kernels.backward_parts.grad_bias_layout import grad_bias_build
from cutlass_py_attn.kernels.catalogue import kernel_of
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.entry_points import LIST_ROLES, PAIR_THREADS, ROW_THREADS
from cutlass_py_attn.launch.grad_bias import uses_wgmma


def parameters(build: Build, role: str = "main") -> tuple[tuple[str, int], ...]:
    """Returns (name, bytes) of each parameter of the entry with this role: its tensor maps before the struct."""
    maps = kernel_of(build).tensor_maps(build) if has_tensor_maps(build, role) else {}
    struct = abi.numpy_struct(abi.fields_of(build))
    return (*((f"map_{field}", abi.TENSOR_MAP_BYTES) for field in maps), ("params", struct.itemsize))


def entry_threads(build: Build, role: str) -> int:
    """Returns the threads of a block of the entry with this role."""
    if role == "pairs":
        return PAIR_THREADS
    if role in ("delta", "sinks", "combine", *LIST_ROLES):
        return ROW_THREADS
    if role in ("finish", "finish_kv") and build.family == "sm90":
        return ROW_THREADS  # as many as the warpgroup that computed the sum
    return (grad_bias_build(build) if role == "bias" else build).threads


def has_tensor_maps(build: Build, role: str) -> bool:
    """Returns whether the entry with this role has the tensor maps of `tensor_maps`, if the build has any."""
    return role == "main" or (role == "bias" and uses_wgmma(build))
