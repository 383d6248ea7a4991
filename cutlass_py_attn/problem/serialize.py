"""Serialization: a Problem as a JSON object and back. A ProblemSpec is serialized as its name (problem/spec.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem import masks
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Sequences, Tensor

_TENSORS: Final = tuple(item.name for item in dataclasses.fields(Problem) if item.type in ("Tensor", "Tensor | None"))
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
    found = dict(data)
    try:
        for name in _TENSORS:
            if name in found:
                found[name] = _tensor_from(found[name])
        if "score_terms" in found:
            found["score_terms"] = tuple((name, _tensor_from(item)) for name, item in found["score_terms"].items())
        if "mask" in found:
            numbers = dict(found["mask"])
            found["mask"] = masks.ALL[numbers.pop("name")](**numbers)
        if "sequences" in found:
            found["sequences"] = Sequences(**found["sequences"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise NotSupported(f"problem: a tensor, the mask or sequences has another form ({error}); {_REMEDY}") from error
    return Problem(**found)


def _tensor_from(item: Mapping[str, Any]) -> Tensor:
    return Tensor(tuple(item["shape"]), tuple(item["strides"]), item["dtype"], item["alignment"])
