"""Plan: every number of one pass, frozen and printable; its build part is the cache key of the kernels.

    Problem --plan--> Plan(build, launches, workspace) --compile--> Artifact --bind--> Bound

`Build` decides the machine code. Problems that differ only in batch, heads, lengths, strides, scale or pointers have
equal builds and share their kernels. `Launch` and `Workspace` hold what differs.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.launch.arch import Architecture, architecture
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan.build_json import expect_known
from cutlass_py_attn.plan.explain import explain
from cutlass_py_attn.problem import typed_json
from cutlass_py_attn.problem.mask_function import ArrayMask
from cutlass_py_attn.problem.masks import Mask
from cutlass_py_attn.refusals import refuse


@dataclass(frozen=True, slots=True)
class TensorMap:
    """Arguments of one CUtensorMap, in elements and innermost axis first.

    field: struct field with the address of the array
    sizes: of each axis
    strides: of each axis but the innermost, which is contiguous
    box: elements that one copy loads or stores, of each axis
    swizzle_bytes: width of the shared-memory swizzle (bytes)
    """

    field: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch. Its parameters are the tensor maps in order, then the struct.

    symbol: entry of the cubin
    grid, block: blocks of the grid and threads of a block, along (x, y, z)
    shared_memory_bytes: dynamic shared memory of a block
    tensor_maps: tensor maps of what TMA loads and stores
    param_overrides: struct fields that differ from the plan's params
    cluster: neighbouring blocks along x that form a cluster; 1 for none
    is_dependent: whether the kernel waits for the launch before it itself, so that the driver may start it early
        (attribute programmatic stream serialization); a host that ignores this gets the same results
    """

    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_memory_bytes: int
    tensor_maps: tuple[TensorMap, ...] = ()
    param_overrides: tuple[tuple[str, int], ...] = ()
    cluster: int = 1
    is_dependent: bool = False


@dataclass(frozen=True, slots=True)
class WorkspaceBuffer:
    """One buffer of the workspace, in bytes; `name` is the struct field that receives its address."""

    name: str
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Workspace:
    """Device memory of one call: a memset zeroes the first `zero_bytes` before the first launch of every call."""

    bytes: int = 0
    zero_bytes: int = 0
    buffers: tuple[WorkspaceBuffer, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Every number of one pass.

    build: what decides the machine code
    launches: kernel launches in order; empty if the problem is empty
    workspace: device memory of one call
    params: integer fields of the kernels' struct parameter
    reason: why this kernel was chosen
    """

    build: Build
    launches: tuple[Launch, ...]
    workspace: Workspace
    params: tuple[tuple[str, int], ...]
    reason: str

    @property
    def symbol(self) -> str:
        """Name of the main kernel."""
        return self.build.symbol

    @property
    def architecture(self) -> Architecture:
        """Limits of the target."""
        return architecture(self.build.arch)

    @property
    def num_splits_key(self) -> int:
        """Blocks that share the keys of one (batch, head) in the backward and in a decode; 1 in other forwards."""
        return dict(self.params).get("num_splits_key", 1)

    def to_json(self) -> str:
        """Returns the plan as JSON; `from_json` reads an equal plan."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Returns the plan of a `to_json` text; NotSupported names what is missing, unknown or of another type."""
        try:
            return Plan.from_object(typed_json.parse(text))
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise NotSupported(
                refuse("plan", text, f"must be the text of Plan.to_json ({error})", "write it again with this version")
            ) from error

    @staticmethod
    def from_object(data: object) -> Plan:
        """Returns the plan of a `to_json` text that is parsed already; ValueError if it has another form."""
        plan = typed_json.read(Plan, data, "plan")
        expect_known(plan.build, "plan.build")
        return plan

    def explain(self, mask: Mask | ArrayMask | None = None) -> str:
        """Returns tiles, warps, grid, shared-memory map, workspace and why this kernel was chosen, as text.

        mask: of the call, with arrays that NumPy converts: the text then says which share of the tiles it leaves to the
            first query head of the first sequence
        """
        return explain(self, mask)
