"""Payload of an XLA custom call: problem, plan and kernels as bytes in the compiled program."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
import zlib
from dataclasses import dataclass
from typing import Any, Final

from cutlass_py_attn.artifact import Artifact, artifact_from
from cutlass_py_attn.errors import Stale
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem import serialize, typed_json
from cutlass_py_attn.problem.problem import Problem

Json = dict[str, Any]

FORMAT: Final = b"cutlass_py_attn call 2\n"
_AGAIN: Final = "export the program again with this version"
_LENGTH: Final = struct.Struct("<Q")  # bytes of the JSON text; the cubin follows it


@dataclass(frozen=True, slots=True)
class Payload:
    """A problem, its plan and its kernels.

    problem: None for an append or a merge, whose plan has the strides.
    operands, results: names of the call's buffers, in order. A result of an operand's name has its memory.
    """

    problem: Problem | None
    plan: Plan
    artifact: Artifact
    operands: tuple[str, ...]
    results: tuple[str, ...]

    def pack(self) -> bytes:
        """Returns a format line, then compressed: a length, JSON, cubin. Equal payloads have equal bytes."""
        description = {
            "problem": None if self.problem is None else serialize.to_json(self.problem),
            "plan": dataclasses.asdict(self.plan),
            "artifact": self.artifact.describe(),
            "operands": self.operands,
            "results": self.results,
        }
        text = json.dumps(description, sort_keys=True).encode()
        return FORMAT + zlib.compress(_LENGTH.pack(len(text)) + text + self.artifact.cubin)


@dataclass(frozen=True, slots=True)
class _Description:
    """The JSON object of a payload; problem, plan and artifact are objects of their own readers."""

    problem: Json | None
    plan: Json
    artifact: Json
    operands: tuple[str, ...]
    results: tuple[str, ...]


def key_of(data: bytes) -> int:
    """Returns a hash of packed bytes as an int of 63 bits, which identifies the payload within a process."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 1


def unpack(data: bytes) -> Payload:
    """Returns the payload of `pack`'s bytes; Stale if they are damaged, or if another version compiled the kernels."""
    if not data.startswith(FORMAT):
        raise Stale(f"the program has a call that starts with {data[: len(FORMAT)]!r}: must be {FORMAT!r}; {_AGAIN}")
    try:
        body = zlib.decompress(data[len(FORMAT) :])
        (length,) = _LENGTH.unpack_from(body)
        text, cubin = body[_LENGTH.size : _LENGTH.size + length], body[_LENGTH.size + length :]
        found = typed_json.read(_Description, typed_json.parse(text), "call")
        problem = None if found.problem is None else serialize.from_json(found.problem)
        plan = Plan.from_object(found.plan)
        artifact = artifact_from(found.artifact, "", cubin)
    except (zlib.error, struct.error, ValueError) as error:
        raise Stale(f"the program has a call of another version ({error}): {_AGAIN}") from error
    artifact.expect_abi(_AGAIN)
    return Payload(problem, plan, artifact, found.operands, found.results)
