"""Manifest: everything that a host needs to launch the kernels of a bundle, as one JSON object.

The numbers of the exported plan are written with the rules that give them for other sizes. A rule must give the plan's
number for the exported problem, or the export fails. docs/bundles.md has the schema.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cutlass_py_attn import __version__
from cutlass_py_attn.artifact import Artifact, Kernel
from cutlass_py_attn.bundle.dispatch import Facts, facts_of, preferred_when
from cutlass_py_attn.bundle.inputs import Pointer
from cutlass_py_attn.bundle.numbers import meaning
from cutlass_py_attn.bundle.rules import AnyProblem, Rules, rules_of, tensor_map_box, to_json
from cutlass_py_attn.errors import NotSupported, Stale
from cutlass_py_attn.kernels.decode.layout import combine_bytes
from cutlass_py_attn.launch import abi, entry_points
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.expressions import Expr, Number
from cutlass_py_attn.plan import entry_parameters, launch_rules, planner
from cutlass_py_attn.plan.plan import Launch, Plan, TensorMap
from cutlass_py_attn.plan.preconditions import Condition, mapped
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import FLOAT8, OPERAND_BYTES

Json = dict[str, Any]

FORMAT: Final = "cutlass_py_attn bundle 5"
SEAL: Final = "sha256_of_the_rest"
_INT64: Final = range(-(2**63), 2**63)
_ON_DEVICE: Final = {f"{name}_address": name for name in abi.SEED}


@dataclass(frozen=True, slots=True)
class Target:
    """The kernels of one problem for one architecture. num_sms: multiprocessors for which the plan was made."""

    problem: AnyProblem
    plan: Plan
    artifact: Artifact
    num_sms: int


def manifest(name: str, targets: Sequence[Target], files: Mapping[str, bytes]) -> Json:
    """Returns the sealed manifest of these targets, in their order; targets of one problem are listed together.

    files: the other files of the bundle. NotSupported: a problem that a bundle cannot serve. Stale: a rule that does
    not give the plan's number.
    """
    problems: dict[AnyProblem, Json] = {}
    of_facts: dict[Facts, dict[Build, None]] = {}
    for target in targets:
        of_facts.setdefault(facts_of(target.problem, target.plan.build), {})[target.plan.build] = None
    for target in targets:
        problem, build = target.problem, target.plan.build
        rules = rules_of(problem, build)
        found = problems.setdefault(problem, {
            "direction": problem.direction,
            "problem": to_json(problem),
            "dtype": problem.dtype,
            "head_dim": build.head_dim,
            "head_dim_value": build.head_dim_value,
            "mask": build.mask,
            "features": list(problem.features),
            "inputs": {key: dataclasses.asdict(item) for key, item in rules.inputs.items()},
            "pointers": {key: _pointer(item) for key, item in rules.pointers.items()},
            "targets": [],
        })  # fmt: skip
        found["targets"].append(_target(target, rules, [*of_facts[facts_of(problem, build)]]))
    toolchains = sorted({target.artifact.toolchain for target in targets})
    return sealed({
        "format": FORMAT,
        "made_by": f"cutlass_py_attn {__version__}, {'; '.join(toolchains)}",
        "name": name,
        "problems": list(problems.values()),
        "files": {path: {"bytes": len(data), "sha256": sha256(data)} for path, data in sorted(files.items())},
    })  # fmt: skip


def sealed(data: Json) -> Json:
    """Returns the object with the sha256 of its own JSON text as the last item."""
    rest = {key: value for key, value in data.items() if key != SEAL}
    return {**rest, SEAL: sha256(json.dumps(rest, sort_keys=True).encode())}


def sha256(data: bytes) -> str:
    """Returns the SHA-256 of the data in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def names_of(rules: Rules, num_sms: int) -> dict[str, float]:
    """Returns the value of every name in the rules: inputs, num_sms and the definitions."""
    found: dict[str, float] = {name: item.value for name, item in rules.inputs.items()}
    found["num_sms"] = num_sms
    for name, rule in rules.definitions.items():
        found[name] = rule.evaluate(found)
    return found


def _target(target: Target, rules: Rules, with_its_facts: Sequence[Build]) -> Json:
    problem, plan, build = target.problem, target.plan, target.plan.build
    _expect_kernels(target)
    given = rules.inputs
    unfit = [name for name, item in given.items() if item.type == "i64" and item.value not in _INT64]
    if unfit:
        raise NotSupported([f"{name} = {given[name].value}: must fit in 64 bits" for name in unfit])
    _expect(problem, rules.conditions, {name: item.value for name, item in given.items()})
    names = names_of(rules, target.num_sms)
    _expect(problem, rules.limits, names)
    planned = dict(plan.params)
    for name, rule in rules.definitions.items():
        if name in planned:
            _agree(rule, names[name], planned[name])
    hardware = plan.architecture
    stem = f"{build.arch}/{build.symbol}"
    return {
        "arch": build.arch,
        "compute_capability": list(hardware.compute_capability),
        "later_minors": hardware.is_portable,
        "symbol": build.symbol,
        "family": build.family,
        "reason": plan.reason,
        "cubin": f"{stem}.cubin",
        "ptx": f"{stem}.ptx",
        "abi": target.artifact.abi,
        "num_sms": target.num_sms,
        "conditions": [{"rule": str(rule), "says": says} for rule, says in rules.conditions],
        "definitions": [
            {"name": name, "rule": str(rule), "value": names[name]} for name, rule in rules.definitions.items()
        ],
        "limits": [{"rule": str(rule), "says": says} for rule, says in rules.limits],
        "preferred_when": str(preferred_when(build, with_its_facts)),
        "struct": _struct(plan, rules, names),
        "workspace": _workspace(plan, rules, names),
        "launches": list(_launches(target, rules, names)),
        "plan": json.loads(plan.to_json()),
    }


def _expect_kernels(target: Target) -> None:
    """Raises Stale if the artifact is not of the plan."""
    plan, artifact = target.plan, target.artifact
    if artifact.build != plan.build:
        raise Stale(f"{plan.symbol}: the artifact is of {artifact.build.symbol}; compile the plan again")
    artifact.expect_abi("compile the plan again")
    for role, symbol in entry_points.entries(plan.build).items():
        expected = [size for _, size in entry_parameters.parameters(plan.build, role)]
        found = [parameter.size for parameter in artifact.kernel(symbol).parameters]
        if found != expected:
            raise Stale(f"{symbol}: its parameters have {found} bytes, the plan has {expected}; compile the plan again")


def _expect(problem: AnyProblem, required: Sequence[Condition], names: Mapping[str, float]) -> None:
    """Raises NotSupported with every condition that does not hold."""
    broken = [f"{problem.direction}: {says}" for rule, says in required if not rule.evaluate(names)]
    if broken:
        raise NotSupported(list(dict.fromkeys(broken)))


def _struct(plan: Plan, rules: Rules, names: Mapping[str, float]) -> Json:
    """Describes the kernels' struct parameter: every field with the source of its value."""
    build = plan.build
    fields = abi.fields_of(build)
    scratch = {rule.name for rule in rules.workspace}
    rows = []
    for (name, kind), (_, offset, size) in zip(fields, abi.layout(fields), strict=True):
        array = _ON_DEVICE.get(name, "" if name in abi.SEED else name)
        if array in rules.pointers:
            source: Json = {"pointer": array}
        elif name in scratch:
            source = {"workspace": name}
        else:
            rule = rules.fields.get(name, Number(0))
            source = {"rule": str(rule), "value": rule.evaluate(names)}
        rows.append({"name": name, "type": kind, "offset": offset, "bytes": size, "meaning": meaning(name), **source})
    return {"bytes": abi.numpy_struct(fields).itemsize, "fields": rows}


def _workspace(plan: Plan, rules: Rules, names: Mapping[str, float]) -> Json:
    """Describes the buffers of the workspace in order; each starts at the next multiple of the alignment."""
    space = plan.workspace
    planned = {part.name: part for part in space.buffers}
    parts = []
    for rule in rules.workspace:
        is_there = bool(rule.condition.evaluate(names))
        part = planned.get(rule.name)
        _agree(rule.bytes, rule.bytes.evaluate(names) if is_there else None, part.bytes if part else None)
        if part is not None:
            _agree(f"zeroing of {rule.name}", rule.is_zeroed, part.offset < space.zero_bytes)
        parts.append({
            "name": rule.name,
            "meaning": meaning(rule.name),
            "when": str(rule.condition),
            "bytes": part.bytes if part else 0,
            "bytes_rule": str(rule.bytes),
            "offset": part.offset if part else 0,
            "zeroed": rule.is_zeroed,
        })  # fmt: skip
    return {
        "bytes": space.bytes,
        "zero_bytes": space.zero_bytes,
        "alignment": planner.WORKSPACE_ALIGNMENT,
        "buffers": parts,
    }


def _launches(target: Target, rules: Rules, names: Mapping[str, float]) -> Iterator[Json]:
    problem, plan, build = target.problem, target.plan, target.plan.build
    planned = {launch.symbol: launch for launch in plan.launches}
    for role, symbol in entry_points.entries(build).items():
        when, grid_rules = launch_rules.launch_condition(build, role), rules.grids[role]
        launch = planned.get(symbol) or _not_launched(build, role, symbol)
        if symbol in planned:
            _agree(", ".join(map(str, grid_rules)), tuple(rule.evaluate(names) for rule in grid_rules), launch.grid)
        _agree(when, bool(when.evaluate(names)), symbol in planned)
        kernel = target.artifact.kernel(symbol)
        yield {
            "role": role,
            "symbol": symbol,
            "when": str(when),
            "grid": list(launch.grid),
            "grid_rules": _texts(grid_rules),
            "block": list(launch.block),
            "cluster": [launch.cluster, 1, 1],
            "dependent": launch.is_dependent,
            "shared_memory_bytes": launch.shared_memory_bytes,
            "static_shared_memory_bytes": _static_bytes(plan, kernel),
            "registers": kernel.registers,
            "parameters": list(_parameters(kernel, mapped(build) if launch.tensor_maps else ())),
            "tensor_maps": [
                _tensor_map(problem, build, name, recipe, names)
                for name, recipe in zip(mapped(build), launch.tensor_maps, strict=False)
            ],
        }


def _not_launched(build: Build, role: str, symbol: str) -> Launch:
    """Returns the launch of an entry that the exported problem does not need, with a grid of no blocks.

    Of all entries, calls without partial results need no combine kernel alone.
    """
    if role != "combine":
        raise Stale(f"{symbol}: no plan launches the entry {role}; update the rules of bundles to the planner")
    return Launch(
        symbol,
        (0, 0, 0),
        (entry_parameters.entry_threads(build, role), 1, 1),
        combine_bytes(build, entry_points.COMBINE_WARPS),
        is_dependent=entry_points.is_dependent_launch(build, role),
    )


def _static_bytes(plan: Plan, kernel: Kernel) -> int:
    return max(kernel.static_shared_memory_bytes - plan.architecture.reserved_shared_memory, 0)


def _parameters(kernel: Kernel, maps: tuple[str, ...]) -> Iterator[Json]:
    """Yields offsets and sizes from the cubin: the tensor maps first, the struct last."""
    meanings = *(f"CUtensorMap of {name}" for name in maps), "the struct"
    for parameter, words in zip(kernel.parameters, meanings, strict=True):
        yield {"name": parameter.name, "offset": parameter.offset, "bytes": parameter.size, "meaning": words}


def _tensor_map(problem: AnyProblem, build: Build, name: str, recipe: TensorMap, names: Mapping[str, float]) -> Json:
    """Returns cuTensorMapEncodeTiled's arguments, innermost axis first; strides in elements, without the innermost."""
    assert isinstance(problem, Problem), "no kernel that computes row by row has tensor maps"
    sizes, strides = launch_rules.tensor_map(problem, name)
    box = tensor_map_box(problem, build, name, recipe.box)
    planned_numbers = *recipe.sizes, *recipe.strides, *recipe.box
    for rule, planned in zip((*sizes, *strides, *box), planned_numbers, strict=True):
        _agree(rule, rule.evaluate(names), planned)
    return {
        "pointer": recipe.field,
        "dtype": "uint8" if problem.dtype == FLOAT8 else problem.dtype,
        "item_bytes": OPERAND_BYTES[problem.dtype],
        "sizes": list(recipe.sizes),
        "size_rules": _texts(sizes),
        "strides": list(recipe.strides),
        "stride_rules": _texts(strides),
        "box": list(recipe.box),
        "box_rules": _texts(box),
        "element_strides": [1] * len(recipe.sizes),
        "interleave": "NONE",
        "swizzle": f"{recipe.swizzle_bytes}B" if recipe.swizzle_bytes else "NONE",
        "l2_promotion": "128B",
        "oob_fill": "NONE",
    }


def _pointer(pointer: Pointer) -> Json:
    fields = {item.name: getattr(pointer, item.name) for item in dataclasses.fields(pointer)}
    return {**fields, "shape": _texts(pointer.shape), "strides": _texts(pointer.strides)}


def _texts(rules: Iterable[Expr]) -> list[str]:
    return list(map(str, rules))


def _agree(rule: Expr | str, found: object, planned: object) -> None:
    """Raises Stale if a rule does not give the plan's number."""
    if found != planned:
        raise Stale(
            f"rule {str(rule)!r} gives {found}, the plan has {planned}: update the rules of bundles to the planner"
        )
