"""Rules: what a manifest says of the launches of a problem, for attention and for kernels that compute row by row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cutlass_py_attn.bundle import numbers, row_rules
from cutlass_py_attn.bundle.inputs import Input, Pointer
from cutlass_py_attn.kernels.catalogue import fused_kernel_of
from cutlass_py_attn.kernels.common.layout import RAGGED_STRIDE_BYTES, most_box_rows
from cutlass_py_attn.kernels.kernel import BufferRule
from cutlass_py_attn.launch import entry_points
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.expressions import Expr, Grid, Name, Number, minimum
from cutlass_py_attn.launch.names import PAGE_SIZE, TABLE_ENTRIES
from cutlass_py_attn.plan import launch_rules, planner, preconditions
from cutlass_py_attn.plan.append import plan_append
from cutlass_py_attn.plan.launch_rules import MAX_INT32
from cutlass_py_attn.plan.merge import plan_merge
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.plan.preconditions import Condition
from cutlass_py_attn.problem import serialize, typed_json
from cutlass_py_attn.problem.append import AppendProblem
from cutlass_py_attn.problem.merge import MergeProblem
from cutlass_py_attn.problem.operands import of_tensor
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import DIRECTIONS, KEY_ROPE

AnyProblem = Problem | AppendProblem | MergeProblem

ALL_DIRECTIONS: Final = (*DIRECTIONS, *row_rules.DIRECTIONS)


@dataclass(frozen=True, slots=True)
class Rules:
    """Numbers of the launches of one build, as expressions for every problem that the build serves.

    inputs, pointers: what the host passes, by name
    conditions: on the inputs alone; limits: on the definitions too
    definitions: numbers that others name, each in terms of those before it
    fields: struct fields that are numbers
    grids: of each entry by its role
    workspace: its buffers in order
    """

    inputs: dict[str, Input]
    pointers: dict[str, Pointer]
    conditions: list[Condition]
    limits: list[Condition]
    definitions: dict[str, Expr]
    fields: Mapping[str, Expr]
    grids: dict[str, Grid]
    workspace: tuple[BufferRule, ...]


def rules_of(problem: AnyProblem, build: Build) -> Rules:
    """Returns the rules of a problem's build."""
    if isinstance(problem, Problem):
        given = numbers.inputs(problem, build)
        return Rules(
            given,
            numbers.pointers(problem),
            [*preconditions.conditions(problem, build), *_narrow(problem), *_ragged_maps(problem, build)],
            preconditions.limits(problem, build),
            launch_rules.definitions(problem, build),
            launch_rules.fields(problem, build, given),
            launch_rules.grids_of(problem, build),
            fused_kernel_of(build).workspace(build),
        )
    given = row_rules.inputs(problem)
    defined = row_rules.definitions(problem)
    return Rules(
        given,
        row_rules.pointers(problem, build),
        row_rules.conditions(problem, build),
        row_rules.limits(problem),
        defined,
        {name: Name(name) for name in (*given, *defined)},
        launch_rules.grids(build),
        (),
    )


def _narrow(problem: Problem) -> Iterator[Condition]:
    """What the planner refuses because a field of the struct does not hold it."""
    if problem.pages is not None:
        says = f"table_entries must be at most {MAX_INT32}; call once for each slice"
        yield TABLE_ENTRIES <= MAX_INT32, says


def _ragged_maps(problem: Problem, build: Build) -> Iterator[Condition]:
    """The axis of a tensor map that steps around the address space steps forward: rows of 2^34 bytes would undo it."""
    for name in preconditions.mapped(build):
        sizes, strides = launch_rules.tensor_map(problem, name)
        if len(sizes) == 5:
            row = f"{entry_points.mapped_field(name)}_row"
            most = RAGGED_STRIDE_BYTES // build.item_bytes
            yield strides[-1] > 0, f"{row} must be less than {most} elements: a tensor map has 2^30 such rows"


def tensor_map_box(problem: Problem, build: Build, name: str, box: Sequence[int]) -> tuple[Expr, ...]:
    """Returns the box of an operand's tensor map: the plan's, with at most the rows of a page if it maps a pool.

    That of key_rope has as many rows with pages of any size.
    """
    if name == KEY_ROPE or not launch_rules.is_pool(of_tensor(problem, entry_points.mapped_field(name))):
        return tuple(map(Number, box))
    columns, _, *others = box
    return Number(columns), minimum(PAGE_SIZE, most_box_rows(build)), *map(Number, others)


def plans(problem: AnyProblem, arch: str, num_sms: int | None = None) -> list[Plan]:
    """Returns the plans of a problem on a target, the best first. num_sms: as for `planner.plans`."""
    if isinstance(problem, Problem):
        return planner.plans(problem, arch, num_sms)
    return [plan_append(problem, arch) if isinstance(problem, AppendProblem) else plan_merge(problem, arch)]


def exported_plans(problem: AnyProblem, arch: str) -> list[Plan]:
    """Returns the plans whose kernels an export may have, the best first: for every length, on the target's devices.

    For "sm_90a" there are those of sm_90 too, which are the only ones of appends and merges.
    """
    limits = architecture(arch)
    if not isinstance(problem, Problem):
        return plans(problem, arch if limits.is_portable else planner.targets_of(limits.compute_capability)[-1])
    if limits.is_portable:
        return planner.plans(problem, arch, any_length=True)
    return planner.plans_on(problem, limits.compute_capability, any_length=True)


def to_json(problem: AnyProblem) -> dict[str, Any]:
    """Returns every field that is not None as a JSON object; `from_json` gives an equal problem."""
    if isinstance(problem, Problem):
        return serialize.to_json(problem)
    return {name: value for name, value in dataclasses.asdict(problem).items() if value is not None}


def from_json(data: Mapping[str, Any], direction: str) -> AnyProblem:
    """Returns the problem of a `to_json` object; ValueError or NotSupported if it has another form.

    direction: that which the manifest says.
    """
    if direction not in row_rules.DIRECTIONS:
        return serialize.from_json(data)
    kind: type[AppendProblem | MergeProblem] = AppendProblem if direction == "append" else MergeProblem
    return typed_json.read(kind, {**{item.name: None for item in dataclasses.fields(kind)}, **data}, direction)
