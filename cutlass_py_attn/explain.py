"""Explain: a Plan as text a person can check by hand: tiles, warps, launches, registers, memory, reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from cutlass_py_attn import budget
from cutlass_py_attn.device import Architecture
from cutlass_py_attn.plan import Buffer, Build, Plan, Workspace
from cutlass_py_attn.shared_memory import STEPS


def explain(plan: Plan) -> str:
    """Every number of `plan` with its unit, and why this kernel was taken."""
    build, limits = plan.build, plan.architecture
    rows = [*_build_rows(build), *_resource_rows(build, limits)]
    lines = [f"{build.kind} {plan.symbol}", "", *_table(rows), "", *_launch_lines(plan)]
    lines += ["", *_shared_memory_lines(build, limits), "", *_workspace_lines(plan.workspace)]
    return "\n".join([*lines, "", f"why: {plan.why}", ""])


def _build_rows(build: Build) -> Iterator[tuple[str, str]]:
    yield "target", build.arch
    yield "family", build.family
    yield "dtype, mask", f"{build.dtype}, {build.mask}"
    yield "head_dim", f"{build.head_dim} (held as {build.columns})"
    yield "head_dim_value", f"{build.head_dim_value} (held as {build.columns_value})"
    yield "tile", f"{build.tile_m} queries x {build.tile_n} keys"
    yield "warps", f"{build.warps} ({build.threads} threads)"
    for name in ("scores", "grad_v", "grad_k", "grad_q"):
        rows, columns = getattr(build, name)
        if rows:
            yield f"warps of {name}", f"{rows} x {columns} (rows x columns)"
    ring = f", grad_output {build.grad_output_stages}" if build.grad_output_stages else ""
    yield "stages", f"query {build.query_stages}{ring}"
    yield "deterministic", "yes" if build.deterministic else "no"


def _resource_rows(build: Build, limits: Architecture) -> Iterator[tuple[str, str]]:
    needed, allowed = budget.accumulator_registers(build), budget.register_limit(build, limits)
    yield "registers", f"{allowed} a thread allowed, {needed} of them float32 accumulators"


def _launch_lines(plan: Plan) -> Iterator[str]:
    yield f"launches: {len(plan.launches) or 'none, the problem is empty'}"
    for launch in plan.launches:
        yield (
            f"  {launch.symbol}: grid {_by(launch.grid)}, block {_by(launch.block)}, cluster 1 x 1 x 1, "
            f"{launch.shared_memory_bytes} bytes of shared memory, {len(launch.tensor_maps)} tensor maps"
        )
    yield f"num_splits_key: {plan.num_splits_key} blocks share one (batch, head)"


def _shared_memory_lines(build: Build, limits: Architecture) -> Iterator[str]:
    total, allowed = build.shared_memory_bytes, limits.shared_memory_per_block
    yield f"shared memory: {total} of {allowed} bytes a block ({100 * total / allowed:.0f} %)"
    rows = [("buffer", "offset", "bytes", "alive")]
    rows += [
        (buffer.name, str(buffer.offset), str(buffer.bytes), _alive(build, buffer)) for buffer in build.shared_memory
    ]
    rows.append(("total", "", str(total), f"{_padding(build.shared_memory)} of them padding"))
    yield from _table(rows, numbers=(1, 2))


def _alive(build: Build, buffer: Buffer) -> str:
    steps = STEPS[build.kind]
    names = [steps[step] if step < len(steps) else str(step) for step in (buffer.first, buffer.last)]
    return f"steps {buffer.first} to {buffer.last} ({' to '.join(names)})"


def _padding(buffers: Sequence[Buffer]) -> int:
    """Bytes between the buffers, which keep each of them aligned."""
    placed = sorted(buffers, key=lambda buffer: buffer.offset)
    return sum(after.offset - before.offset - before.bytes for before, after in pairwise(placed))


def _workspace_lines(space: Workspace) -> Iterator[str]:
    yield f"workspace: {space.bytes} bytes on the device, the first {space.zero_bytes} zeroed for each call"
    rows = [("part", "offset", "bytes", "zeroed")]
    rows += [
        (part.name, str(part.offset), str(part.bytes), "yes" if part.offset < space.zero_bytes else "no")
        for part in space.parts
    ]
    if space.parts:
        yield from _table(rows, numbers=(1, 2))


def _table(rows: Sequence[tuple[str, ...]], numbers: tuple[int, ...] = ()) -> Iterator[str]:
    """The rows in aligned columns, indented; `numbers` are the columns set flush right."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if index in numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"  {'  '.join(cells)}".rstrip()


def _by(sizes: tuple[int, int, int]) -> str:
    return " x ".join(str(size) for size in sizes)
