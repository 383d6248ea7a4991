"""Explain: a Plan as text: tiles, warps, launches, registers, memory, and why this kernel was chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from cutlass_py_attn.kernels.catalogue import fused_kernel_of
from cutlass_py_attn.kernels.sm80_split_d.layout import blocks_per_tile
from cutlass_py_attn.kernels.sm90_e4m3.layout import part_columns
from cutlass_py_attn.launch.arch import Architecture
from cutlass_py_attn.launch.build import ROW_KINDS, STEPS, Buffer, Build
from cutlass_py_attn.launch.variants import E4M3, SHARED_END
from cutlass_py_attn.plan import performance
from cutlass_py_attn.plan.tile_shares import tile_shares
from cutlass_py_attn.problem.quantization import SCALE_COLUMNS
from cutlass_py_attn.score_terms import registry

if TYPE_CHECKING:
    from cutlass_py_attn.plan.plan import Launch, Plan, Workspace
    from cutlass_py_attn.problem.mask_function import ArrayMask
    from cutlass_py_attn.problem.masks import Mask

_BIAS_AXES: Final = {"b": "batch", "h": "heads", "q": "queries", "k": "keys"}


def explain(plan: Plan, mask: Mask | ArrayMask | None = None) -> str:
    """Returns every number of `plan` with its unit, why this kernel was chosen, and what would make it much faster.

    mask: of the call, for the share of tiles that it leaves
    """
    build, limits = plan.build, plan.architecture
    if build.kind in ROW_KINDS:
        return _explain_rows(plan)
    rows = [*_build_rows(build), *_resource_rows(build, limits)]
    if mask is not None:
        rows.append(("mask", f"of the first sequence and head: {tile_shares(plan, mask)}"))
    lines = [f"{build.kind} {plan.symbol}", "", *_table(rows), "", *_launch_lines(plan)]
    lines += ["", *_shared_memory_lines(build, limits), "", *_workspace_lines(plan.workspace)]
    slow = performance.advice(plan)
    return "\n".join([*lines, "", f"reason: {plan.reason}", *([slow] if slow else []), ""])


def _explain_rows(plan: Plan) -> str:
    """Returns the text of an append or a merge, which has neither tiles nor shared memory."""
    build = plan.build
    rows = [
        ("target", build.arch),
        ("variant", build.variant or "standard"),
        ("dtype", build.dtype),
        ("head_dim", str(build.head_dim)),
        ("head_dim_value", str(build.head_dim_value)),
        ("rows", f"{build.tile_m} a block, {build.tile_n} threads each"),
        ("warps", f"{build.warps} ({build.threads} threads)"),
        ("features", ", ".join(build.features) or "none"),
        ("access", f"rows by {build.vector_bytes} bytes"),
    ]
    lines = [f"{build.kind} {plan.symbol}", "", *_table(rows), "", *_launch_lines(plan)]
    return "\n".join([*lines, "", f"reason: {plan.reason}", ""])


def _code_rows(build: Build) -> Iterator[tuple[str, str]]:
    """Yields what a kernel does with e4m3 codes."""
    grain = "the operand, each key head, or each key head of a sequence; 1 without any"
    if build.has(registry.KV8):
        grain = "each row" if build.has(registry.KV8_ROW) else grain
        grain = f"each {SCALE_COLUMNS} columns of a row" if build.has(registry.KV8_TILE) else grain
        dtype = "float16" if build.family == "decode" else build.dtype
        yield "key and value", f"e4m3 codes, converted to {dtype}; scales of {grain}"
    if build.kind == "forward" and build.variant == E4M3:
        yield "operands", f"e4m3 codes; scales of {grain}"
        yield "output", "float16" if build.has(registry.FLOAT16_OUTPUT) else "bfloat16"
        columns = f"{part_columns(build)} of {build.columns_value} columns at a time"
        yield "sums of O", f"each key tile apart, {columns}, added in float32"


def _build_rows(build: Build) -> Iterator[tuple[str, str]]:
    yield "target", build.arch
    yield "family", build.family
    yield "variant", build.variant or "standard"
    if build.options:
        yield "options", ", ".join(build.options)
    yield "dtype, mask", f"{build.dtype}, {build.mask}"
    yield from _code_rows(build)
    yield "head_dim", f"{build.head_dim} (padded to {build.columns})"
    yield "head_dim_value", f"{build.head_dim_value} (padded to {build.columns_value})"
    rows = "rows of queries and heads" if build.family == "decode" else "queries"
    yield "tile", f"{build.tile_m} {rows} x {build.tile_n} keys"
    yield "warps", f"{build.warps} ({build.threads} threads)"
    for name in ("scores", "grad_v", "grad_k", "grad_q"):
        rows, columns = getattr(build, f"warps_{name}")
        if rows:
            yield f"warps of {name}", f"{rows} x {columns} (rows x columns)"
    grad_output = f", grad_output {build.grad_output_stages}" if build.grad_output_stages else ""
    yield "stages", f"query {build.query_stages}{grad_output}"
    if build.score_rows:
        yield "rows of a score product", f"{build.score_rows} queries of a tile"
    if build.key_stages > 1:
        yield "key tiles in flight", str(build.key_stages)
    if build.kind in ("forward", "backward") and (steps := fused_kernel_of(build).steps(build)):
        yield "steps", ", ".join(step.replace("_", " ") for step in steps)
    yield "columns", _columns(build)
    yield "features", ", ".join(build.features) or "none"
    yield "access", _access(build)
    if build.kind == "backward":
        yield "gradients", ", ".join(build.gradients)
    if build.grad_bias_mode:
        yield "gradient of bias", _bias_gradient(build.grad_bias_mode)
    yield "deterministic", "yes" if build.deterministic else "no"


def _columns(build: Build) -> str:
    """Returns how the columns of the head dims are divided among blocks."""
    if not build.head_dim_split:
        return "all in one block"
    return f"{blocks_per_tile(build)} blocks of {build.head_dim_split} columns"


def _access(build: Build) -> str:
    """Returns the bytes of one load or store of each kind of tensor."""
    kinds = ("rows", build.vector_bytes), ("bias", build.bias_vector_bytes), ("grad_bias", build.grad_bias_vector_bytes)
    return ", ".join(f"{name} by {size} bytes" for name, size in kinds if size)


def _bias_gradient(mode: str) -> str:
    if mode == "main":
        return "written by the main kernel"
    summed = [name for letter, name in _BIAS_AXES.items() if letter in mode and mode != "none"]
    return f"written by a separate kernel, summed over {' and '.join(summed) or 'nothing'}"


def _resource_rows(build: Build, limits: Architecture) -> Iterator[tuple[str, str]]:
    if build.kind == "component_gemm":  # its reason has the registers of its accumulator
        yield "registers", f"{limits.register_limit(build.threads)} a thread allowed"
        return
    kernel = fused_kernel_of(build)
    needed, allowed = kernel.accumulators(build), kernel.accumulator_limit(build, limits)
    yield "registers", f"{allowed} a thread allowed, {needed} of them for accumulators"


def _launch_lines(plan: Plan) -> Iterator[str]:
    yield f"launches: {len(plan.launches) or 'none, the problem is empty'}"
    for launch in plan.launches:
        yield (
            f"  {launch.symbol}: grid {_by(launch.grid)}{_start(launch)}, block {_by(launch.block)}, "
            f"cluster {launch.cluster} x 1 x 1, {launch.shared_memory_bytes} bytes of shared memory, "
            f"{len(launch.tensor_maps)} tensor maps"
        )
    yield from _sharing_lines(plan)


def _sharing_lines(plan: Plan) -> Iterator[str]:
    """Yields how blocks share keys, and where these are."""
    if plan.build.kind in ROW_KINDS:
        return
    found = dict(plan.params)
    if "page_size" in found:
        yield (
            f"pages: {found['num_pages']} of {found['page_size']} rows, at most {found['max_pages']} of a sequence; "
            "table and lengths are read on the device"
        )
    if "ranges_batch" in found:
        makers = (
            "four kernels, one of which computes the mask function," if plan.build.form.program else "three kernels"
        )
        yield (
            f"ranges of keys, or visible blocks of {found['mask_block_rows']} x {found['mask_block_columns']}: of "
            f"{found['ranges_batch']} sequences and {found['ranges_heads']} query heads, read on the device; {makers} "
            "write the tile lists of the main one, whose tiles divide the blocks"
        )
    if "num_teams" not in found:
        last = "the last query tiles" if SHARED_END in plan.build.options else "the query tiles"
        shared = f"each of {last}" if plan.build.shares_query_tiles else "one (batch, head)"
        yield f"num_splits_key: {plan.num_splits_key} blocks share {shared}"
        if "num_splits_query" in found:
            splits, tiles = found["num_splits_query"], found["shared_key_tiles"]
            yield f"num_splits_query: {splits} blocks share the queries of each of the last {tiles} key tiles"
        return
    chunk = found["chunk_tiles"] * plan.build.tile_n
    partial = "each with partial results of its own" if found["fixed_chunks"] else "as equal shares"
    yield (
        f"teams: {found['num_teams']} of {found['team_rows']} blocks, one a row, share the chunks of {chunk} keys of "
        f"all sequences, {partial}"
    )


def _start(launch: Launch) -> str:
    """Returns the first head and batch of a launch, if the grid is cut into several launches."""
    sizes = dict(launch.param_overrides)
    return f", from head {sizes['first_head']} and batch {sizes['first_batch']}" if sizes else ""


def _shared_memory_lines(build: Build, limits: Architecture) -> Iterator[str]:
    total, allowed = build.shared_memory_bytes, limits.shared_memory_per_block
    yield f"shared memory: {total} of {allowed} bytes a block ({100 * total / allowed:.0f} %)"
    rows = [("buffer", "offset", "bytes", "in use")]
    rows += [
        (buffer.name, str(buffer.offset), str(buffer.bytes), _used_in(build, buffer)) for buffer in build.shared_memory
    ]
    rows.append(("total", "", str(total), f"{_padding(build.shared_memory)} of them padding"))
    yield from _table(rows, numbers=(1, 2))


def _used_in(build: Build, buffer: Buffer) -> str:
    steps = STEPS[build.kind]
    names = [steps[step] if step < len(steps) else str(step) for step in (buffer.first, buffer.last)]
    return f"steps {buffer.first} to {buffer.last} ({' to '.join(names)})"


def _padding(buffers: Sequence[Buffer]) -> int:
    """Returns the bytes between the buffers, which keep each buffer aligned."""
    placed = sorted(buffers, key=lambda buffer: buffer.offset)
    return sum(after.offset - before.offset - before.bytes for before, after in pairwise(placed))


def _workspace_lines(space: Workspace) -> Iterator[str]:
    yield f"workspace: {space.bytes} bytes on the device, the first {space.zero_bytes} zeroed for each call"
    rows = [("part", "offset", "bytes", "zeroed")]
    rows += [
        (part.name, str(part.offset), str(part.bytes), "yes" if part.offset < space.zero_bytes else "no")
        for part in space.buffers
    ]
    if space.buffers:
        yield from _table(rows, numbers=(1, 2))


def _table(rows: Sequence[tuple[str, ...]], numbers: tuple[int, ...] = ()) -> Iterator[str]:
    """Yields the rows in aligned columns, indented; `numbers` are the columns that are right-aligned."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if index in numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"  {'  '.join(cells)}".rstrip()


def _by(sizes: tuple[int, int, int]) -> str:
    return " x ".join(str(size) for size in sizes)
