"""Parameters of the entries of a Build's cubin: tensor maps before the struct."""

from __future__ import annotations

from cutlass_py_attn.plan import abi
from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.plan.catalogue import kernel_of
from cutlass_py_attn.plan.entry_points import has_tensor_maps


def parameters(build: Build, role: str = "main") -> tuple[tuple[str, int], ...]:
    """Returns (name, bytes) of each parameter of the entry with this role: its tensor maps before the struct."""
    maps = kernel_of(build).tensor_maps(build) if has_tensor_maps(build, role) else ()
    struct = abi.numpy_struct(abi.fields_of(build))
    return (*((f"map_{field}", abi.TENSOR_MAP_BYTES) for field in maps), ("params", struct.itemsize))
