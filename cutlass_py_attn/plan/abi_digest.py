"""ABI digest: one text for everything that a launch and a kernel must agree on about the kernel's parameters."""

from __future__ import annotations

import hashlib
import json

from cutlass_py_attn.launch import abi, entry_points
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan import entry_parameters


def abi_digest(build: Build) -> str:
    """Returns the sha256 of the parameters of a build's kernels, as this version launches them.

    It covers name and size of every parameter of every entry, tensor maps included, and name, kind, offset and size of
    every field of the struct. A kernel with another digest reads other values than the launch writes, even if the
    sizes agree.
    """
    fields = abi.fields_of(build)
    struct = [(*field, *place) for field, (_, *place) in zip(fields, abi.layout(fields), strict=True)]
    entries = [(role, entry_parameters.parameters(build, role)) for role in entry_points.entries(build)]
    return hashlib.sha256(json.dumps([entries, struct]).encode()).hexdigest()
