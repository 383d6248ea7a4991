"""Serialization: a Problem as a JSON object and back. A ProblemSpec is serialized as its name (problem/spec.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem import masks, typed_json
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Tensor

_REMEDY: Final = "write it with cutlass_py_attn.problem.serialize.to_json"


def to_json(problem: Problem) -> dict[str, Any]:
    """Returns every field that is not None as a JSON object; `from_json` gives an equal problem."""
    found = dataclasses.asdict(problem)
    found["mask"] = {"name": problem.mask.name, **dataclasses.asdict(problem.mask)}
    found["score_terms"] = {name: dataclasses.asdict(tensor) for name, tensor in problem.score_terms} or None
    return {name: value for name, value in found.items() if value is not None}


def from_json(data: Mapping[str, Any]) -> Problem:
    """Returns the problem of a `to_json` object; NotSupported says what is missing, unknown or of the wrong form."""
    known = {item.name for item in dataclasses.fields(Problem)}
    needed = {"direction", "query", "key", "value", "output"}
    if not isinstance(data, Mapping) or data.keys() - known or needed - data.keys():
        given = sorted(data) if isinstance(data, Mapping) else type(data).__name__
        raise NotSupported(f"problem with {given}: must have {', '.join(sorted(needed))}, and may have "
                           f"{', '.join(sorted(known - needed))}; {_REMEDY}")  # fmt: skip
    try:
        return Problem(**{name: _field_from(name, value) for name, value in data.items()})
    except ValueError as error:
        raise NotSupported(f"problem: a field has another form ({error}); {_REMEDY}") from error


def _field_from(name: str, value: object) -> Any:
    """Returns the value of a field of Problem; ValueError if it has another form."""
    if name == "mask":
        return _mask_from(value)
    if name == "score_terms":
        terms = typed_json.as_object(value, name).items()
        return tuple((term, typed_json.read(Tensor, tensor, f"{name}.{term}")) for term, tensor in terms)
    return typed_json.convert(value, typed_json.field_types(Problem)[name], name)


def _mask_from(value: object) -> masks.Mask:
    numbers = dict(typed_json.as_object(value, "mask"))
    name = numbers.pop("name", None)
    if not isinstance(name, str) or name not in masks.ALL:
        raise ValueError(f"mask.name = {name!r}: must be one of {', '.join(masks.ALL)}")
    return typed_json.read(masks.ALL[name], numbers, f"mask {name}")
