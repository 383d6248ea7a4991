"""Problems: a Problem as a JSON object and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from cutlass_py_attn import masks
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem import Problem, Sequences, Tensor

_TENSORS: Final = tuple(item.name for item in dataclasses.fields(Problem) if item.type in ("Tensor", "Tensor | None"))
_REMEDY: Final = "write it with bundle.problems.to_json"


def to_json(problem: Problem) -> dict[str, Any]:
    """Every field that is not None, as a JSON object; `from_json` gives an equal problem back."""
    found = dataclasses.asdict(problem)
    found["mask"] = {"name": problem.mask.name, **dataclasses.asdict(problem.mask)}
    return {name: value for name, value in found.items() if value is not None}


def from_json(data: Mapping[str, Any]) -> Problem:
    """The problem of a `to_json` object; NotSupported says what is missing, unknown or of the wrong form."""
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
                item = found[name]
                found[name] = Tensor(tuple(item["shape"]), tuple(item["strides"]), item["dtype"], item["alignment"])
        if "mask" in found:
            numbers = dict(found["mask"])
            found["mask"] = masks.ALL[numbers.pop("name")](**numbers)
        if "sequences" in found:
            found["sequences"] = Sequences(**found["sequences"])
    except (KeyError, TypeError) as error:
        raise NotSupported(f"problem: a tensor, the mask or sequences has another form ({error}); {_REMEDY}") from error
    return Problem(**found)
