"""Payload: all that one custom call launches, as bytes inside the compiled program; to run it needs no compiler."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from cutlass_py_attn.artifact import Artifact, artifact_from
from cutlass_py_attn.errors import Stale
from cutlass_py_attn.masks import Causal, CausalBottomRight, Full, Mask, Window
from cutlass_py_attn.plan import Plan
from cutlass_py_attn.problem import Problem, Sequences, Tensor

FORMAT: Final = b"cutlass_py_attn call 1\n"
_LENGTH: Final = struct.Struct("<Q")  # of the JSON text; the cubin takes the rest
_MASKS: Final[dict[str, Callable[..., Mask]]] = {
    kind.__name__: kind for kind in (Full, Causal, CausalBottomRight, Window)
}


@dataclass(frozen=True, slots=True)
class Payload:
    """A problem, its plan and its kernels; the names of the call's operands and results, in order."""

    problem: Problem
    plan: Plan
    artifact: Artifact
    operands: tuple[str, ...]
    results: tuple[str, ...]

    def pack(self) -> bytes:
        """Format line, then compressed: a length, JSON, cubin. Equal payloads give equal bytes."""
        description = {
            "problem": _problem_to(self.problem),
            "plan": dataclasses.asdict(self.plan),
            "artifact": self.artifact.describe(),
            "operands": self.operands,
            "results": self.results,
        }
        text = json.dumps(description, sort_keys=True).encode()
        return FORMAT + zlib.compress(_LENGTH.pack(len(text)) + text + self.artifact.cubin)


def key_of(data: bytes) -> int:
    """A number of 63 bits that stands for packed bytes within one process."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 1


def unpack(data: bytes) -> Payload:
    """The payload of `pack`'s bytes; Stale when they are damaged or another version's."""
    if not data.startswith(FORMAT):
        raise Stale(
            f"the program holds a call that starts with {data[: len(FORMAT)]!r}: must be {FORMAT!r}; export the "
            "program again with this version"
        )
    try:
        body = zlib.decompress(data[len(FORMAT) :])
        (length,) = _LENGTH.unpack_from(body)
        text, cubin = body[_LENGTH.size : _LENGTH.size + length], body[_LENGTH.size + length :]
        found = json.loads(text)
        return Payload(
            _problem_from(found["problem"]),
            Plan.from_json(json.dumps(found["plan"])),
            artifact_from(found["artifact"], "", cubin),
            tuple(found["operands"]),
            tuple(found["results"]),
        )
    except (zlib.error, struct.error, ValueError, KeyError, TypeError) as error:
        raise Stale(
            f"the program holds a call of another version ({error}): export the program again with this one"
        ) from error


def _problem_to(problem: Problem) -> dict[str, Any]:
    mask = {"kind": type(problem.mask).__name__, **dataclasses.asdict(problem.mask)}
    return {**dataclasses.asdict(problem), "mask": mask}


def _problem_from(data: Mapping[str, Any]) -> Problem:
    fields = {name: _field_from(name, value) for name, value in data.items() if value is not None}
    return Problem(**fields)


def _field_from(name: str, value: Any) -> Any:
    if name == "mask":
        return _mask_from(value)
    if name == "sequences":
        return Sequences(**value)
    if isinstance(value, dict):
        return Tensor(**{**value, "shape": tuple(value["shape"]), "strides": tuple(value["strides"])})
    return value


def _mask_from(data: Mapping[str, Any]) -> Mask:
    numbers = dict(data)
    return _MASKS[numbers.pop("kind")](**numbers)
