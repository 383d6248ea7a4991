"""Facts: everything about one compiled kernel except its PTX and SASS, as one JSON object."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cutlass_py_attn.artifact import Artifact, Kernel
from cutlass_py_attn.errors import AttentionError
from cutlass_py_attn.inspection import listing, sass
from cutlass_py_attn.inspection.line_info import LineInfo, compile_with_line_info
from cutlass_py_attn.inspection.occupancy import occupancy
from cutlass_py_attn.launch import abi, entry_points
from cutlass_py_attn.launch.build import STEPS, Build
from cutlass_py_attn.plan import launch_rules
from cutlass_py_attn.plan.plan import Plan

Json = dict[str, Any]

# Fields of Build that identify the kernel, in the order of display.
IDENTITY = (
    *("kind", "component_gemm", "family", "dtype", "head_dim", "head_dim_value", "mask", "features", "gradients"),
    *("tile_m", "tile_n", "warps", "query_stages", "grad_output_stages", "deterministic", "head_dim_split"),
    *("score_rows", "key_stages", "variant"),
)


@dataclass(frozen=True, slots=True)
class InspectedKernel:
    """One kernel to inspect.

    - plan, artifact: the kernel's plan, and what it was compiled to
    - line_info: the kernel compiled once more with line info; None if its steps are not marked
    - unmarked: why the steps are not marked; "" if they are
    """

    plan: Plan
    artifact: Artifact
    line_info: LineInfo | None
    unmarked: str

    @property
    def name(self) -> str:
        """GPU target and symbol, such as sm_90a/fwd_sm90_bf16_d128_causal_128x128."""
        return f"{self.artifact.build.arch}/{self.artifact.build.symbol}"

    def marked_ptx(self) -> list[str]:
        """Returns the lines of the PTX with a comment before each step."""
        return list(listing.marked(listing.ptx_lines(self.artifact, self.line_info)))

    def sass(self) -> dict[str, list[listing.Stepped]]:
        """Returns each machine instruction with its step, by entry; empty if nvdisasm is not installed."""
        return listing.sass_lines(self.artifact, self.line_info) if sass.tool() else {}


def inspect_kernel(plan: Plan, artifact: Artifact, *, with_steps: bool = True) -> InspectedKernel:
    """Returns the kernel to inspect, with its steps if `with_steps` and if this machine can compile it."""
    if not with_steps:
        return InspectedKernel(plan, artifact, None, "not requested")
    try:
        return InspectedKernel(plan, artifact, compile_with_line_info(artifact), "")
    except AttentionError as error:
        return InspectedKernel(plan, artifact, None, str(error))


def facts(subject: InspectedKernel) -> Json:
    """Returns identity, resources, launches, parameters, struct fields, shared memory, instructions and steps as JSON.

    Instructions are counted by entry and step, and are empty if nvdisasm is not installed. `unmarked` states why there
    are no steps.
    """
    artifact, build = subject.artifact, subject.artifact.build
    machine = subject.sass()
    identity = asdict(build)
    return {
        "symbol": build.symbol,
        "arch": build.arch,
        "identity": {name: identity[name] for name in IDENTITY},
        "toolchain": artifact.toolchain,
        "allocation": artifact.allocation,
        "unmarked": subject.unmarked,
        "resources": [_resources(subject, entry) for entry in artifact.kernels],
        "launches": [_launch(subject, entry) for entry in artifact.kernels],
        "parameters": [asdict(parameter) for parameter in artifact.parameters],
        "fields": [
            {"name": name, "offset": offset, "bytes": size} for name, offset, size in abi.layout(abi.fields_of(build))
        ],
        "shared_memory": shared_memory_rows(build),
        "instructions": {symbol: sass.histogram(item for item, _ in items) for symbol, items in machine.items()},
        "groups": {symbol: sass.groups(item for item, _ in items) for symbol, items in machine.items()},
        "steps": {symbol: listing.steps_table(items) for symbol, items in machine.items()} if subject.line_info else {},
    }


def _resources(subject: InspectedKernel, entry: Kernel) -> Json:
    """Returns the resources of one thread block of an entry, and the occupancy of a multiprocessor."""
    body = listing.entry_text(subject.artifact.ptx, entry.symbol)
    memory = dynamic_bytes(subject.plan, entry.symbol)
    limits = occupancy(
        subject.artifact.build.arch, entry.threads, entry.registers, memory, entry.static_shared_memory_bytes
    )
    return {
        "kernel": entry.symbol.rpartition("_")[0],
        "registers": entry.registers,
        "frame_bytes": entry.frame_bytes,
        "spill_bytes": entry.spill_bytes,
        "threads": entry.threads,
        "shared_memory_bytes": memory,
        "blocks_per_sm": limits.blocks,
        "warps_per_sm": limits.warps,
        "occupancy": round(limits.warps / limits.max_warps, 3),
        "limited_by": ", ".join(limits.limited_by),
        "mma": body.count("mma.sync."),
        "wgmma": body.count("wgmma.mma_async."),
    }


def _launch(subject: InspectedKernel, entry: Kernel) -> Json:
    build = subject.artifact.build
    cluster_size = build.cluster if entry.symbol == entry_points.entries(build).get("main") else 1
    grid = list(map(str, launch_rules.grid(build, entry.symbol)))
    return {"kernel": entry.symbol, "block": [entry.threads, 1, 1], "cluster": [cluster_size, 1, 1], "grid": grid}


def dynamic_bytes(plan: Plan, symbol: str) -> int:
    """Returns the dynamic shared memory of an entry in each of its launches; 0 for one that this plan never launches.

    A grid with too many heads or batches is cut into several launches of one entry.
    """
    return next((launch.shared_memory_bytes for launch in plan.launches if launch.symbol == symbol), 0)


def shared_memory_rows(build: Build) -> list[Json]:
    """Returns each shared-memory buffer of the main kernel with the names of its first and last step."""
    names = STEPS[build.kind]
    rows = []
    for buffer in build.shared_memory:
        alive = [names[step] if step < len(names) else str(step) for step in (buffer.first, buffer.last)]
        rows.append({**asdict(buffer), "alive": " to ".join(alive)})
    return rows
