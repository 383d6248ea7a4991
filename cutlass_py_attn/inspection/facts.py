"""Facts: everything about one compiled kernel but its texts, as one JSON object."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cutlass_py_attn import abi, hopper, kernels
from cutlass_py_attn.artifact import Artifact, Kernel
from cutlass_py_attn.errors import AttentionError
from cutlass_py_attn.grids import grid_rule
from cutlass_py_attn.inspection import listing, sass
from cutlass_py_attn.inspection.line_info import Lined, lined
from cutlass_py_attn.inspection.occupancy import occupancy
from cutlass_py_attn.plan import Build, Plan
from cutlass_py_attn.shared_memory import STEPS

Json = dict[str, Any]

# Fields of Build that are the kernel's identity, in the order in which they are shown.
IDENTITY = (
    *("kind", "room", "family", "dtype", "head_dim", "head_dim_value", "mask", "features", "gradients"),
    *("tile_m", "tile_n", "warps", "query_stages", "grad_output_stages", "deterministic", "column_block"),
    *("query_block", "key_stages", "whole_heads", "multicast"),
)


@dataclass(frozen=True, slots=True)
class Subject:
    """One kernel to look at: its plan, its artifact, and the same with line info where that could be had.

    unmarked: why steps are not marked; empty where they are.
    """

    plan: Plan
    artifact: Artifact
    lined: Lined | None
    unmarked: str

    @property
    def name(self) -> str:
        """Target and symbol."""
        return f"{self.artifact.build.arch}/{self.artifact.build.symbol}"

    def marked_ptx(self) -> list[str]:
        """The lines of the PTX, with a comment before each step."""
        return list(listing.marked(listing.ptx_lines(self.artifact, self.lined)))

    def sass(self) -> dict[str, list[listing.Stepped]]:
        """Every machine instruction and its step by entry; empty without nvdisasm."""
        return listing.sass_lines(self.artifact, self.lined) if sass.tool() else {}


def subject(plan: Plan, artifact: Artifact, *, with_steps: bool = True) -> Subject:
    """The kernel with its steps, where they are wanted and this machine can find them."""
    if not with_steps:
        return Subject(plan, artifact, None, "not asked for")
    try:
        return Subject(plan, artifact, lined(artifact), "")
    except AttentionError as error:
        return Subject(plan, artifact, None, str(error))


def facts(found: Subject) -> Json:
    """Identity, resources, launches, parameters, struct fields, shared memory, and instructions by entry and step.

    Without nvdisasm there are no instructions; `unmarked` says why there are no steps.
    """
    artifact, build = found.artifact, found.artifact.build
    machine = found.sass()
    identity = asdict(build)
    return {
        "symbol": build.symbol,
        "arch": build.arch,
        "identity": {name: identity[name] for name in IDENTITY},
        "toolchain": artifact.toolchain,
        "allocation": artifact.allocation,
        "unmarked": found.unmarked,
        "resources": [_resources(found, kernel) for kernel in artifact.kernels],
        "launches": [_launch(found, kernel) for kernel in artifact.kernels],
        "parameters": [asdict(parameter) for parameter in artifact.parameters],
        "fields": [
            {"name": name, "offset": offset, "bytes": size}
            for name, offset, size in abi.layout(abi.fields_of(build.kind, build.family))
        ],
        "shared_memory": shared_memory_rows(build),
        "instructions": {symbol: sass.histogram(item for item, _ in items) for symbol, items in machine.items()},
        "groups": {symbol: sass.groups(item for item, _ in items) for symbol, items in machine.items()},
        "steps": {symbol: listing.steps_table(items) for symbol, items in machine.items()} if found.lined else {},
    }


def _resources(found: Subject, kernel: Kernel) -> Json:
    """What one block of an entry takes of a multiprocessor, and how many such blocks it holds."""
    body = listing.entry_text(found.artifact.ptx, kernel.symbol)
    memory = _dynamic_bytes(found.plan, kernel.symbol)
    held = occupancy(
        found.artifact.build.arch, kernel.threads, kernel.registers, memory, kernel.static_shared_memory_bytes
    )
    return {
        "kernel": kernel.symbol.rpartition("_")[0],
        "registers": kernel.registers,
        "frame_bytes": kernel.frame_bytes,
        "spill_bytes": kernel.spill_bytes,
        "threads": kernel.threads,
        "shared_memory_bytes": memory,
        "blocks_per_sm": held.blocks,
        "warps_per_sm": held.warps,
        "occupancy": round(held.warps / held.warps_allowed, 3),
        "limited_by": ", ".join(held.limited_by),
        "mma": body.count("mma.sync."),
        "wgmma": body.count("wgmma.mma_async."),
    }


def _launch(found: Subject, kernel: Kernel) -> Json:
    build = found.artifact.build
    together = hopper.cluster(build) if kernel.symbol == kernels.entries(build).get("main") else 1
    grid = list(grid_rule(build, kernel.symbol))
    return {"kernel": kernel.symbol, "block": [kernel.threads, 1, 1], "cluster": [together, 1, 1], "grid": grid}


def _dynamic_bytes(plan: Plan, symbol: str) -> int:
    return next((launch.shared_memory_bytes for launch in plan.launches if launch.symbol == symbol), 0)


def shared_memory_rows(build: Build) -> list[Json]:
    """Each buffer of the main kernel, and the names of the steps between which it is alive."""
    names = STEPS[build.kind]
    rows = []
    for buffer in build.shared_memory:
        alive = [names[step] if step < len(names) else str(step) for step in (buffer.first, buffer.last)]
        rows.append({**asdict(buffer), "alive": " to ".join(alive)})
    return rows
