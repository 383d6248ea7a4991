"""Planner: from a Problem and a target to a Plan; the first tile of the tile table that fits is chosen."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from cutlass_py_attn.errors import DoesNotFit, NotSupported
from cutlass_py_attn.integers import round_up
from cutlass_py_attn.kernels.backward_parts.grad_bias_layout import grad_bias_build
from cutlass_py_attn.kernels.backward_parts.layout import dq_piece_columns
from cutlass_py_attn.kernels.catalogue import KERNELS, fused_kernel_of, kernel_of
from cutlass_py_attn.kernels.common.layout import most_box_rows
from cutlass_py_attn.kernels.decode.layout import combine_bytes
from cutlass_py_attn.kernels.families import FAMILIES, Family
from cutlass_py_attn.launch import entry_points
from cutlass_py_attn.launch.arch import ARCHITECTURES, architecture, targets
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.smem import swizzle_bytes, tile_bytes
from cutlass_py_attn.launch.tile_config import TileConfig, tile_refusals
from cutlass_py_attn.launch.variants import STANDARD
from cutlass_py_attn.plan import entry_parameters, launch_rules, resources
from cutlass_py_attn.plan.builder import build_for, builds_for
from cutlass_py_attn.plan.plan import Launch, Plan, TensorMap, Workspace, WorkspaceBuffer
from cutlass_py_attn.problem.operands import of_tensor
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.quantization import has_codes
from cutlass_py_attn.problem.scalars import integer_of
from cutlass_py_attn.problem.tensors import RANGE_EDGES, VISIBLE_BLOCKS, WORD_BYTES
from cutlass_py_attn.refusals import Refusal, one_of, refuse

WORKSPACE_ALIGNMENT: Final = 256  # bytes
BLOCK_MULTIPLE: Final = 64  # of the queries and keys of visible blocks: the smallest tiles
_RANGES: Final = "ranges of keys"  # as the families name what they do not take
_IN_MEMORY: Final = f"{_RANGES}, visible blocks or a mask function"
# Struct fields that the sizes of the device decide.
_PLANNED: Final = (
    *("num_splits_key", "num_splits_query", "shared_key_tiles"),
    *("num_teams", "team_rows", "chunk_tiles", "least_chunks", "fixed_chunks"),
    *("ranges_batch", "ranges_heads", "device_sms"),
)


def plan_forward(problem: Problem, arch: str, num_sms: int | None = None) -> Plan:
    """Returns the plan of the forward pass of `problem` on `arch`.

    problem: what to compute; its direction is "forward"
    arch: target, such as "sm_90a"
    num_sms: multiprocessors of the device, for persistent kernels and decode splits; None for the usual part of the
        target

    NotSupported lists every reason why the problem cannot be computed.
    """
    _check(problem, arch, num_sms, direction="forward")
    return plan(problem, arch, num_sms)


def plan_backward(problem: Problem, arch: str, num_sms: int | None = None) -> Plan:
    """Returns the plan of the backward pass of `problem` on `arch`.

    problem: what to compute; its direction is "backward"
    arch: target, such as "sm_90a"
    num_sms: multiprocessors of the device, for persistent kernels and num_splits_key; None for the usual part of the
        target

    NotSupported lists every reason why the problem cannot be computed.
    """
    _check(problem, arch, num_sms, direction="backward")
    return plan(problem, arch, num_sms)


def plan_with_tile(
    problem: Problem, arch: str, tile: TileConfig, num_sms: int | None = None, *, family: str | None = None
) -> Plan:
    """Returns the plan of `problem` on `arch` with a tile of the caller's choice, to compile, measure or debug it.

    problem: what to compute, in either direction
    arch: target, such as "sm_90a"
    tile: tile, warps, stages and variant of the kernel; `TileConfig.parse` reads a text such as "64x128x16:3,2@5k2".
        Where it leaves the options open, they are those with which the planner has the nearest tile of its tables: the
        same tile, else one of its variant with as many queries and keys, else the variant's first for any lengths
    num_sms: multiprocessors of the device; None for the usual part of the target
    family: one of FAMILIES; None for the family whose variants include the tile's, and if the standard
        variant leaves a choice, for the family that the planner chooses for this problem

    NotSupported lists every reason why the family cannot compute the problem. DoesNotFit lists every reason why the
    tile cannot be built: each names a field, its value, the reason and what to do.
    """
    count = _check(problem, arch, num_sms, [*tile_refusals(tile), *_family_refusals(family)])
    limits = architecture(arch)
    chosen = family or _family_of(problem, arch, tile, count)
    missing = _unsupported(problem, arch, FAMILIES[chosen])
    if missing:
        rule = f"takes no {', '.join(missing)} on {arch}"
        raise NotSupported(refuse("family", chosen, rule, "use family sm80"))
    build, refusals = build_for(problem, arch, FAMILIES[chosen].with_options(problem, tile), chosen)
    refusals = refusals or resources.refusals(build, limits)
    if min(tile.tile_m, tile.tile_n) > 0:  # the rules of a problem count its tiles
        refusals += FAMILIES[chosen].refusals(problem, tile)
    if refusals:
        raise DoesNotFit(refusals)
    return plan_of_build(problem, build, count)


def plan(problem: Problem, arch: str, num_sms: int | None = None) -> Plan:
    """Returns the best plan of a problem of either direction; arguments and errors as for `plan_forward`."""
    return plans(problem, arch, num_sms)[0]


def plans(problem: Problem, arch: str, num_sms: int | None = None, *, any_length: bool = False) -> list[Plan]:
    """Returns a plan for each tile of the tables that fits, the best first; arguments and errors as for `plan_forward`.

    Whether ptxas spills is known only once a kernel is compiled; the later plans are for when the first spills.

    any_length: leave out what is faster for the lengths of this problem alone, because others will be launched too
    """
    count = _check(problem, arch, num_sms)
    found = _plans(problem, ((family, arch) for family in FAMILIES.values()), count, any_length=any_length)
    if not found:
        raise NotSupported(_refusals(problem, arch))
    return found


def _plans(problem: Problem, families: Iterable[tuple[Family, str]], count: int, *, any_length: bool) -> list[Plan]:
    """Returns the plans of families, each on its target, in their order."""
    found = (_builds(problem, arch, family, count, any_length=any_length) for family, arch in families)
    return _plans_of_builds(problem, itertools.chain.from_iterable(found), count)


def _refusals(problem: Problem, arch: str) -> list[Refusal]:
    """Returns why no kernel of the target computes a problem: no tile fits, or none reads its e4m3 codes."""
    if problem.visible_blocks is not None and any(size % BLOCK_MULTIPLE for size in problem.block_size):
        rule = f"must be multiples of {BLOCK_MULTIPLE} for kernels"
        return [refuse("block_size", problem.block_size, rule, "use (128, 128), or a bias of -inf")]
    if problem.form.has_ranges and (rule := _rule_of_ranges(problem, arch)):
        fields = VISIBLE_BLOCKS, RANGE_EDGES[0], "mask_program"
        field = next(name for name in fields if getattr(problem, name) is not None)
        return [refuse(field, getattr(problem, field), rule, "use another mask, or a bias of -inf")]
    has_latent_rows = problem.key_rope is not None
    is_cache = problem.has_e4m3_cache and not has_latent_rows
    has_own_family = has_codes(problem) and not is_cache
    family = next(family for family in reversed(FAMILIES.values()) if family.reads_all_codes or not has_own_family)
    missing = _unsupported(problem, arch, family)
    if not missing:
        tried = _tried(problem, arch, family, architecture(arch).num_sms, any_length=False)
        found = "; ".join(map(str, tried[-1][1])) if tried else "the tile table has no tile for it"
        return [refuse("arch", arch, f"no tile fits: {found}", "use a smaller head_dim")]
    remedy = "dequantise, each code times its scale"
    if has_latent_rows:
        has_small_pages = problem.pages is not None and problem.key.shape[1] < family.least_page_size
        pages = f"pages of at least {family.least_page_size} rows, or " if has_small_pages else ""
        field, taker, remedy = "key", f"the kernel of {arch} takes no", f"use {pages}a cache of 16 bits"
    elif is_cache:
        field, taker = "key", "no kernel takes"
    else:
        field, taker = "query", f"the kernel of {arch} takes no"
    given = getattr(problem, field).dtype
    return [refuse(f"{field}.dtype", given, f"{taker} {name}", remedy) for name in missing]


def _rule_of_ranges(problem: Problem, arch: str) -> str:
    """Returns which problems with a mask in memory the kernels of a target take, if this is none of them."""
    has_wgmma, shape = architecture(arch).has_wgmma, problem.shape
    families = (family for family in FAMILIES.values() if has_wgmma or not family.needs_wgmma)
    found = (family.unsupported_features(problem) for family in families)
    missing = min(found, key=lambda names: (_RANGES in names, len(names)))
    if _RANGES not in missing:
        names = ", ".join(name.removesuffix(f" with {_RANGES}") for name in missing)
        return f"kernels of {arch} do not take {names} together with {_IN_MEMORY}" if names else ""
    dims = f"head dims {shape.head_dim} and {shape.head_dim_value}"
    body = f" in a {problem.direction} with {dims} and keys of {problem.key.dtype}" if has_wgmma else ""
    return f"no kernel of {arch} takes {_IN_MEMORY}{body}"


def plans_on(
    problem: Problem, compute_capability: tuple[int, int], num_sms: int | None = None, *, any_length: bool = False
) -> list[Plan]:
    """Returns the plans for a device: decode kernels, the family of its own target, its newest portable target.

    any_length: as for `plans`
    """
    *own, portable = targets_of(compute_capability)
    count = _check(problem, portable, num_sms)
    families = ((family, arch) for family in FAMILIES.values() for arch in (own if family.needs_wgmma else (portable,)))
    found = _plans(problem, families, count, any_length=any_length)
    if not found:
        raise NotSupported(_refusals(problem, next(iter(own), portable)))
    return found


def targets_of(compute_capability: tuple[int, int]) -> tuple[str, ...]:
    """Returns the targets that run on a device, its own before the newest portable one; NotSupported for none."""
    found = targets(compute_capability)
    if not found:
        major, minor = compute_capability
        portable = [arch.name for arch in ARCHITECTURES.values() if arch.is_portable]
        rule = f"no target runs on it; allowed are {', '.join(portable)} and later minor versions of them"
        raise NotSupported(Refusal("compute capability", f"{major}.{minor}", rule, "use another GPU"))
    return found


def builds_on(problem: Problem, compute_capability: tuple[int, int]) -> tuple[Build, ...]:
    """Returns the builds of `plans_on`, in their order."""
    return tuple(plan.build for plan in plans_on(problem, compute_capability))


@functools.cache
def builds(problem: Problem, arch: str) -> tuple[Build, ...]:
    """Returns the builds of `plans`, in their order; those of each problem are found once."""
    return tuple(plan.build for plan in plans(problem, arch))


def plan_of_build(problem: Problem, build: Build, num_sms: int) -> Plan:
    """Returns the plan that computes `problem` with the kernels of `build`: launches, workspace and parameters.

    NotSupported lists every number that a field or a grid of the kernels does not hold.
    """
    return _plans_of_builds(problem, (build,), num_sms)[0]


def _plans_of_builds(problem: Problem, builds: Iterable[Build], num_sms: int) -> list[Plan]:
    """Returns `plan_of_build` of each build; what the problem alone decides is found once."""
    rejections: dict[str, str] = {}
    return [_plan_of_build(problem, build, num_sms, rejections) for build in builds]


def _plan_of_build(problem: Problem, build: Build, num_sms: int, rejections: dict[str, str]) -> Plan:
    """Returns the plan; rejections: why faster families were not chosen, by the family that was, filled on use."""
    values = launch_rules.values(problem, build, num_sms)
    launches = () if problem.is_empty else tuple(_launches(problem, build, values))
    workspace = Workspace() if problem.is_empty else _workspace(build, values)
    params = launch_rules.params(problem, build)
    params = *params, *((name, values[name]) for name in _PLANNED if name in values)
    counted = [(name, values[name]) for name in ("chunks",) if name in values]
    counted += [
        (f"elements of {buffer.name}", buffer.bytes // WORD_BYTES)
        for buffer in workspace.buffers
        if buffer.name in launch_rules.COUNTED
    ]
    launch_rules.expect_int32(
        (*params, *counted, *((f"blocks of {launch.symbol}", launch.grid[0]) for launch in launches))
    )
    return Plan(build, launches, workspace, params, _reason(problem, build, values, rejections))


def _check(
    problem: object, arch: object, num_sms: object, other: Iterable[Refusal] = (), *, direction: str | None = None
) -> int:
    """Returns the number of multiprocessors to plan for; NotSupported lists every wrong argument.

    other: reasons to refuse other arguments. direction: that of the function; None for both.
    """
    refusals = [*problem_refusals(problem, direction), *arch_refusals(arch), *other]
    count = None if num_sms is None else integer_of(num_sms)
    if num_sms is not None and (count is None or count < 1):
        rule = "must be an int of at least 1, or None for the usual part of the target"
        refusals.append(refuse("num_sms", num_sms, rule, "correct it"))
    if refusals:
        raise NotSupported(refusals)
    return count or architecture(str(arch)).num_sms


def problem_refusals(problem: object, direction: str | None = None) -> list[Refusal]:
    """Returns every reason to refuse a problem; direction: the one that it must have, None for either."""
    if not isinstance(problem, Problem):
        return [refuse("problem", problem, "must be a Problem", "create one, for example with Problem.dense")]
    refusals = problem.refusals()
    if not refusals and direction not in (None, problem.direction):
        rule = f"must be {direction}, which plan_{direction} plans"
        refusals.append(refuse("direction", problem.direction, rule, "set it so"))
    return refusals


def arch_refusals(arch: object) -> tuple[Refusal, ...]:
    """Returns why this is no target to plan for."""
    try:
        architecture(arch)
    except NotSupported as error:
        return error.refusals
    return ()


def _family_refusals(family: object) -> list[Refusal]:
    if family is None or (isinstance(family, str) and family in FAMILIES):
        return []
    return [refuse("family", family, f"{one_of(FAMILIES)}, or None", "choose one")]


def _family_of(problem: Problem, arch: str, tile: TileConfig, num_sms: int) -> str:
    """Returns the family of the tile's variant; for the standard variant that of the best plan."""
    named = [family for kind, family, name in KERNELS if (kind, name) == (problem.direction, tile.variant)]
    if tile.variant != STANDARD and named:
        return named[0]
    return plan(problem, arch, num_sms).build.family


def _unsupported(problem: Problem, arch: str, family: Family) -> tuple[str, ...]:
    """Returns what the problem or the target has that the family does not take."""
    is_missing = family.needs_wgmma and not architecture(arch).has_wgmma
    return *(("targets without wgmma",) if is_missing else ()), *family.unsupported_features(problem)


def _builds(problem: Problem, arch: str, family: Family, num_sms: int, *, any_length: bool) -> list[Build]:
    """Returns the builds of a family that fit the target; none if it does not take the problem."""
    if _unsupported(problem, arch, family):
        return []
    tried = _tried(problem, arch, family, num_sms, any_length=any_length)
    return [build for build, refused in tried if not refused]


def _tried(
    problem: Problem, arch: str, family: Family, num_sms: int, *, any_length: bool
) -> list[tuple[Build, list[Refusal]]]:
    """Returns the build of each tile that is meant for the target, with every reason why it does not fit."""
    limits = architecture(arch)
    tiles = (tile for tile in family.tiles(problem, num_sms, any_length) if arch not in tile.not_on)
    tried = builds_for(problem, arch, tiles, family.name)
    return [(build, found or resources.refusals(build, limits)) for build, found in tried]


def _launches(problem: Problem, build: Build, values: Mapping[str, int]) -> Iterator[Launch]:
    """Yields every launch in order; a grid with more than MAX_GRID_YZ heads or batches is cut into several."""
    shared_memory_bytes = {
        "main": build.shared_memory_bytes,
        "finish": tile_bytes(build.dtype, build.tile_m, dq_piece_columns(build)),  # one query tile of dQ
        "bias": grad_bias_build(build).shared_memory_bytes if build.grad_bias_mode not in ("", "main") else 0,
        "sinks": entry_points.SINKS_BYTES,
        "combine": combine_bytes(build, entry_points.COMBINE_WARPS),
        "ranges": entry_points.ranges_bytes(build),
        "pairs": entry_points.PAIRS_BYTES,
    }
    grids = launch_rules.grids_of(problem, build)
    for role, symbol in entry_points.entries(build).items():
        if not launch_rules.launch_condition(build, role).evaluate(values):
            continue
        x, y, z = (rule.evaluate(values) for rule in grids[role])
        launch = Launch(
            symbol,
            (x, y, z),
            (entry_parameters.entry_threads(build, role), 1, 1),
            shared_memory_bytes.get(role, 0),
            is_dependent=entry_points.is_dependent_launch(build, role),
        )
        if entry_parameters.has_tensor_maps(build, role):
            own = grad_bias_build(build) if role == "bias" else build
            maps = tuple(_tensor_maps(problem, own, values))
            launch = replace(launch, tensor_maps=maps, cluster=own.cluster)
        yield from _pieces(launch)


def _pieces(launch: Launch) -> Iterator[Launch]:
    tiles_x, heads, batch = launch.grid
    starts = (range(0, size, launch_rules.MAX_GRID_YZ) for size in (heads, batch))
    for first_head, first_batch in itertools.product(*starts):
        grid = (
            tiles_x,
            min(heads - first_head, launch_rules.MAX_GRID_YZ),
            min(batch - first_batch, launch_rules.MAX_GRID_YZ),
        )
        if grid == launch.grid:
            yield launch
        else:
            overrides = ("first_head", first_head), ("first_batch", first_batch)
            yield replace(launch, grid=grid, param_overrides=overrides)


def _tensor_maps(problem: Problem, build: Build, values: Mapping[str, int]) -> Iterator[TensorMap]:
    """Yields the tensor maps of what TMA loads and stores, in the order of the kernel's parameters."""
    for name, tile in kernel_of(build).tensor_maps(build).items():
        operand = of_tensor(problem, entry_points.mapped_field(name))
        names = {**values, **operand.strides}
        sizes, strides = (
            tuple(rule.evaluate(names) for rule in side) for side in launch_rules.tensor_map(problem, name)
        )
        box, swizzle = _box(build, operand.name, tile, len(sizes), values.get("page_size"))
        yield TensorMap(operand.name, sizes, strides, box, swizzle)


def _box(
    build: Build, field: str, tile: tuple[int, int], rank: int, page_size: int | None
) -> tuple[tuple[int, ...], int]:
    """Returns (box, swizzle width in bytes) of a tensor map of so many axes: a box is one strip of a tile.

    page_size: rows of a page, which ends the boxes of key and value; None for no pages
    """
    rows, columns = tile
    if page_size is not None and field in ("key", "value"):
        rows = min(page_size, most_box_rows(build))
    swizzle = swizzle_bytes(columns, build.item_bytes)
    return (swizzle // build.item_bytes, rows, *([1] * (rank - 2))), swizzle


def _workspace(build: Build, values: Mapping[str, int]) -> Workspace:
    """Places the workspace buffers one after another; those that are zeroed come first."""
    buffers: list[WorkspaceBuffer] = []
    offset = zero_bytes = 0
    for rule in fused_kernel_of(build).workspace(build):
        if not rule.condition.evaluate(values):
            continue
        size = rule.bytes.evaluate(values)
        buffers.append(WorkspaceBuffer(rule.name, offset, size))
        if rule.is_zeroed:
            zero_bytes = offset + size
        offset = round_up(offset + size, WORKSPACE_ALIGNMENT)
    return Workspace(offset, zero_bytes, tuple(buffers))


def _reason(problem: Problem, build: Build, values: Mapping[str, int], rejections: dict[str, str]) -> str:
    """Returns why this kernel was chosen, and why a faster family was not; rejections: as for `_plan_of_build`."""
    if build.family not in rejections:
        faster = itertools.takewhile(lambda name: name != build.family, FAMILIES)
        rejections[build.family] = "".join(FAMILIES[name].rejection(problem) for name in reversed([*faster]))
    tile = FAMILIES[build.family].preference(problem, build, values["num_sms"])
    return fused_kernel_of(build).reason(problem, build, values) + tile + rejections[build.family]
