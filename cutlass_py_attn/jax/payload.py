"""Payload of an XLA custom call: problem, plan and kernels as bytes in the compiled program."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
import zlib
from dataclasses import dataclass
from typing import Final

from cutlass_py_attn.artifact import Artifact, artifact_from
from cutlass_py_attn.errors import Stale
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem import serialize
from cutlass_py_attn.problem.problem import Problem

FORMAT: Final = b"cutlass_py_attn call 2\n"
_LENGTH: Final = struct.Struct("<Q")  # bytes of the JSON text; the cubin follows it


@dataclass(frozen=True, slots=True)
class Payload:
    """A problem, its plan and its kernels. operands, results: names of the call's buffers, in order."""

    problem: Problem
    plan: Plan
    artifact: Artifact
    operands: tuple[str, ...]
    results: tuple[str, ...]

    def pack(self) -> bytes:
        """Returns a format line, then compressed: a length, JSON, cubin. Equal payloads have equal bytes."""
        description = {
            "problem": serialize.to_json(self.problem),
            "plan": dataclasses.asdict(self.plan),
            "artifact": self.artifact.describe(),
            "operands": self.operands,
            "results": self.results,
        }
        text = json.dumps(description, sort_keys=True).encode()
        return FORMAT + zlib.compress(_LENGTH.pack(len(text)) + text + self.artifact.cubin)


def key_of(data: bytes) -> int:
    """Returns a hash of packed bytes as an int of 63 bits, which identifies the payload within a process."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 1


def unpack(data: bytes) -> Payload:
    """Returns the payload of `pack`'s bytes; Stale if they are damaged or of another version."""
    if not data.startswith(FORMAT):
        raise Stale(
            f"the program has a call that starts with {data[: len(FORMAT)]!r}: must be {FORMAT!r}; export the "
            "program again with this version"
        )
    try:
        body = zlib.decompress(data[len(FORMAT) :])
        (length,) = _LENGTH.unpack_from(body)
        text, cubin = body[_LENGTH.size : _LENGTH.size + length], body[_LENGTH.size + length :]
        description = json.loads(text)
        return Payload(
            serialize.from_json(description["problem"]),
            Plan.from_json(json.dumps(description["plan"])),
            artifact_from(description["artifact"], "", cubin),
            tuple(description["operands"]),
            tuple(description["results"]),
        )
    except (zlib.error, struct.error, ValueError, KeyError, TypeError) as error:
        raise Stale(
            f"the program has a call of another version ({error}): export the program again with this one"
        ) from error
