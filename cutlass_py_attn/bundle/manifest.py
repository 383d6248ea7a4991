"""Manifest: everything a host must know to launch the kernels of a bundle, as one JSON object.

What the exported plan holds is written as it stands; beside it stands the rule for other sizes, which must give that
very number for the exported problem, or nothing is written. docs/bundles.md is the schema.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cutlass_py_attn import __version__, abi, kernels, planner
from cutlass_py_attn.artifact import Artifact, Kernel
from cutlass_py_attn.bundle import rules
from cutlass_py_attn.bundle.conditions import conditions, mapped
from cutlass_py_attn.bundle.numbers import inputs, meaning, pointers
from cutlass_py_attn.bundle.problems import to_json
from cutlass_py_attn.errors import NotSupported, Stale
from cutlass_py_attn.plan import Launch, Plan, TensorMap
from cutlass_py_attn.problem import ITEM_BYTES, Problem

Json = dict[str, Any]

FORMAT: Final = "cutlass_py_attn bundle 1"
SEAL: Final = "sha256_of_the_rest"
_MANY_SMS: Final = 2**40
_ON_DEVICE: Final = {f"{name}_address": name for name in abi.SEED}


@dataclass(frozen=True, slots=True)
class Target:
    """The kernels of one problem for one architecture; num_sms is what the plan's numbers are for."""

    problem: Problem
    plan: Plan
    artifact: Artifact
    num_sms: int


def manifest(name: str, targets: Sequence[Target], files: Mapping[str, bytes]) -> Json:
    """The sealed manifest of these targets, of one problem for each direction; `files` are the bundle's others.

    NotSupported: a problem that a bundle cannot serve. Stale: a rule that does not give the plan's number.
    """
    passes: dict[str, Json] = {}
    for target in targets:
        problem, build = target.problem, target.plan.build
        found = passes.setdefault(problem.direction, {
            "problem": to_json(problem),
            "dtype": problem.dtype,
            "head_dim": build.head_dim,
            "head_dim_value": build.head_dim_value,
            "mask": build.mask,
            "features": list(problem.features),
            "inputs": {key: dataclasses.asdict(item) for key, item in inputs(problem, build).items()},
            "pointers": {key: dataclasses.asdict(item) for key, item in pointers(problem).items()},
            "targets": [],
        })  # fmt: skip
        found["targets"].append(_target(target))
    toolchains = sorted({target.artifact.toolchain for target in targets})
    return sealed({
        "format": FORMAT,
        "made_by": f"cutlass_py_attn {__version__}, {'; '.join(toolchains)}",
        "name": name,
        "passes": passes,
        "files": {path: {"bytes": len(data), "sha256": sha256(data)} for path, data in sorted(files.items())},
    })  # fmt: skip


def sealed(data: Json) -> Json:
    """The object with the sha256 of its own JSON text at the end."""
    rest = {key: value for key, value in data.items() if key != SEAL}
    return {**rest, SEAL: sha256(json.dumps(rest, sort_keys=True).encode())}


def sha256(data: bytes) -> str:
    """In hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def names_of(problem: Problem, plan: Plan, num_sms: int) -> dict[str, float]:
    """What every name in the plan's rules stands for: inputs, num_sms and the definitions."""
    found: dict[str, float] = {name: item.value for name, item in inputs(problem, plan.build).items()}
    found["num_sms"] = num_sms
    for name, rule in rules.definitions(problem, plan.build).items():
        found[name] = rules.evaluate(rule, found)
    return found


def _target(target: Target) -> Json:
    problem, plan, build = target.problem, target.plan, target.plan.build
    names = names_of(problem, plan, target.num_sms)
    asked = conditions(problem, build)
    broken = [f"{problem.direction}: {says}" for rule, says in asked if not rules.evaluate(rule, names)]
    if broken:
        raise NotSupported(broken)
    defined = rules.definitions(problem, build)
    planned = dict(plan.sizes)
    for name in defined:
        _agree(defined[name], names[name], planned[name])
    limits = plan.architecture
    stem = f"{build.arch}/{build.symbol}"
    return {
        "arch": build.arch,
        "compute_capability": list(limits.compute_capability),
        "later_minors": limits.is_portable,
        "symbol": build.symbol,
        "family": build.family,
        "why": plan.why,
        "cubin": f"{stem}.cubin",
        "ptx": f"{stem}.ptx",
        "num_sms": target.num_sms,
        "definitions": [{"name": name, "rule": rule, "value": names[name]} for name, rule in defined.items()],
        "conditions": [{"rule": rule, "says": says} for rule, says in asked],
        "struct": _struct(problem, plan, names),
        "workspace": _workspace(plan, names),
        "launches": list(_launches(target, names)),
        "plan": json.loads(plan.to_json()),
    }


def _struct(problem: Problem, plan: Plan, names: Mapping[str, float]) -> Json:
    """The kernels' struct parameter, every field with where its value comes from."""
    build = plan.build
    fields = abi.fields_of(build.kind, build.family)
    numbers = rules.fields(problem, build, inputs(problem, build))
    arrays = pointers(problem)
    scratch = rules.workspace(build)
    rows = []
    for (name, kind), (_, offset, size) in zip(fields, abi.layout(fields), strict=True):
        array = _ON_DEVICE.get(name, "" if name in abi.SEED else name)
        source: Json = {"rule": numbers.get(name, "0")}
        if array in arrays:
            source = {"pointer": array}
        elif name in scratch:
            source = {"workspace": name}
        else:
            source["value"] = rules.evaluate(source["rule"], names)
        rows.append({"name": name, "type": kind, "offset": offset, "bytes": size, "meaning": meaning(name), **source})
    return {"bytes": abi.numpy_struct(fields).itemsize, "fields": rows}


def _workspace(plan: Plan, names: Mapping[str, float]) -> Json:
    """The parts behind each other, each at the next multiple of the alignment."""
    space = plan.workspace
    planned = {part.name: part for part in space.parts}
    parts = []
    for name, rule in rules.workspace(plan.build).items():
        when = rules.when(plan.build, name)
        is_there = bool(rules.evaluate(when, names))
        part = planned.get(name)
        _agree(rule, rules.evaluate(rule, names) if is_there else None, part.bytes if part else None)
        is_zeroed = name not in ("delta", "logsumexp_log2", "partial_output", "partial_logsumexp")
        if part is not None:
            _agree(f"zeroing of {name}", is_zeroed, part.offset < space.zero_bytes)
        parts.append({
            "name": name,
            "meaning": meaning(name),
            "when": when,
            "bytes": part.bytes if part else 0,
            "bytes_rule": rule,
            "offset": part.offset if part else 0,
            "zeroed": is_zeroed,
        })  # fmt: skip
    return {
        "bytes": space.bytes,
        "zero_bytes": space.zero_bytes,
        "alignment": planner.WORKSPACE_ALIGNMENT,
        "parts": parts,
    }


def _launches(target: Target, names: Mapping[str, float]) -> Iterator[Json]:
    problem, plan, build = target.problem, target.plan, target.plan.build
    planned = {launch.symbol: launch for launch in plan.launches}
    grids = rules.grids(problem, build)
    for role, symbol in kernels.entries(build).items():
        when, grid_rules = rules.when(build, role), grids[role]
        launch = planned.get(symbol) or _not_launched(target, role, symbol)
        if symbol in planned:
            _agree(", ".join(grid_rules), tuple(rules.evaluate(rule, names) for rule in grid_rules), launch.grid)
        _agree(when, bool(rules.evaluate(when, names)), symbol in planned)
        kernel = target.artifact.kernel(symbol)
        yield {
            "role": role,
            "symbol": symbol,
            "when": when,
            "grid": list(launch.grid),
            "grid_rules": list(grid_rules),
            "block": list(launch.block),
            "cluster": [launch.cluster, 1, 1],
            "shared_memory_bytes": launch.shared_memory_bytes,
            "static_shared_memory_bytes": _static_bytes(plan, kernel),
            "registers": kernel.registers,
            "parameters": list(_parameters(kernel, mapped(build) if launch.tensor_maps else ())),
            "tensor_maps": [_tensor_map(problem, recipe, names) for recipe in launch.tensor_maps],
        }


def _not_launched(target: Target, role: str, symbol: str) -> Launch:
    """The entry that the exported problem does without: its plan for a huge device has it."""
    build = target.plan.build
    plans = planner.plans(target.problem, build.arch, _MANY_SMS)
    found = [launch for plan in plans if plan.build == build for launch in plan.launches if launch.symbol == symbol]
    if not found:
        raise Stale(f"{symbol}: no plan launches the entry {role}; the rules of bundles are behind the planner")
    return dataclasses.replace(found[0], grid=(0, 0, 0))


def _static_bytes(plan: Plan, kernel: Kernel) -> int:
    return max(kernel.static_shared_memory_bytes - plan.architecture.reserved_shared_memory, 0)


def _parameters(kernel: Kernel, maps: tuple[str, ...]) -> Iterator[Json]:
    """Offsets and sizes as the cubin states them; the maps come first, the struct last."""
    meanings = *(f"CUtensorMap of {name}" for name in maps), "the struct"
    for parameter, words in zip(kernel.parameters, meanings, strict=True):
        yield {"name": parameter.name, "offset": parameter.offset, "bytes": parameter.size, "meaning": words}


def _tensor_map(problem: Problem, recipe: TensorMap, names: Mapping[str, float]) -> Json:
    """What cuTensorMapEncodeTiled takes, innermost axis first; strides in elements, the innermost one left out."""
    sizes, strides = rules.tensor_map(problem, recipe)
    for rule, planned in zip((*sizes, *strides), (*recipe.sizes, *recipe.strides), strict=True):
        _agree(rule, rules.evaluate(rule, names), planned)
    return {
        "pointer": recipe.field,
        "dtype": problem.dtype,
        "item_bytes": ITEM_BYTES[problem.dtype],
        "sizes": list(recipe.sizes),
        "size_rules": list(sizes),
        "strides": list(recipe.strides),
        "stride_rules": list(strides),
        "box": list(recipe.box),
        "element_strides": [1] * len(recipe.sizes),
        "interleave": "NONE",
        "swizzle": f"{recipe.swizzle_bytes}B" if recipe.swizzle_bytes else "NONE",
        "l2_promotion": "128B",
        "oob_fill": "NONE",
    }


def _agree(rule: str, found: object, planned: object) -> None:
    """A rule that does not give the plan's number is no rule."""
    if found != planned:
        raise Stale(f"rule {rule!r} gives {found}, the plan has {planned}: the rules of bundles are behind the planner")
