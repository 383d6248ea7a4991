"""Arguments of an export: why they are of the wrong type; their values are checked where they are used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cutlass_py_attn.api.options import kernels_refusals
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem.append import AppendProblem
from cutlass_py_attn.problem.merge import MergeProblem
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.scalars import path_refusals
from cutlass_py_attn.refusals import Refusal, refuse


def listed(items: Any) -> tuple[Any, ...]:
    """Returns the items of an iterable; what is no list of items as it is, for `export_refusals` to refuse."""
    is_list = isinstance(items, Iterable) and not isinstance(items, (str, bytes, Mapping))
    try:
        return tuple(items) if is_list else items
    except TypeError:  # an array without axes
        return items


def export_refusals(folder: object, problems: object, archs: object, name: object, kernels: object) -> list[Refusal]:
    """Returns why arguments of `export_bundle` are of the wrong type."""
    found = path_refusals("folder", folder)
    if not isinstance(problems, tuple):
        found.append(refuse("problems", problems, "must be a list of Problems, one for each direction", "pass a list"))
    else:
        found += [reason for each in problems if not isinstance(each, (Problem, AppendProblem, MergeProblem))
                  for reason in planner.problem_refusals(each)]  # fmt: skip
    if not isinstance(archs, tuple):
        found.append(refuse("archs", archs, 'must be a list of targets, such as ["sm_80"]', "pass a list"))
    else:
        found += [reason for each in archs if not isinstance(each, str) for reason in planner.arch_refusals(each)]
    if not isinstance(name, str):
        found.append(refuse("name", name, "must be a str, the prefix of C functions", "pass one"))
    return [*found, *kernels_refusals(kernels)]
