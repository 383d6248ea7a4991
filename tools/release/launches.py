"""Launches: what the driver gets to launch a problem on the GPU of the records, found without a GPU.

The driver is the fake one of the tests, whose first device has compute capability 9.0 and 132 multiprocessors, as an
H100 and an H200 have. What it gets are the fills of workspaces and results, and of each kernel the symbol, the grid,
the block, the cluster, the shared memory, and the bytes of its parameters: the struct, and each tensor map with all
that it encodes. An operand's address is made of its name, and is aligned as the operand.
"""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.errors import AttentionError, CompileError, Stale
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.build import ROW_KINDS, Build
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import ROW_ALIGNMENT_BYTES
from cutlass_py_attn.runtime import driver, fill, params
from cutlass_py_attn.runtime.binding import Bound, bind, bind_problem
from cutlass_py_attn.testing import component_gemms
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Kernels
from tests.cases import decode_cases, serving_cases
from tests.support import fakes
from tests.support.fake_driver import FakeDriver
from tools.release import verify_gpu
from tools.release.fuzz_run import Attempt, attempts

_LAUNCHING: Final = ("cuMem", "cuLaunchKernel", "cuKernelSetAttribute")  # how the names of the calls start
_FIRST_ADDRESS: Final = 0x7F00_0000_0000
_PAGE_BITS: Final = 8  # of an address, which a name's hash does not decide


class Launcher:
    """Launches problems on the fake driver, one at a time, and returns what the driver got.

    A process has one fake driver, which must be loaded before cuda-python looks for another.
    """

    def __init__(self) -> None:
        self._fake = FakeDriver()

    def of_problem(self, problem: Problem, kernels: Kernels, numbers: Mapping[str, int]) -> tuple[Build, bytes]:
        """Returns the kernel that a problem launches among those that `kernels` returns, and what the driver got.

        numbers: philox_seed and philox_offset, if they are no arrays
        """
        with self._watched():
            bound = bind_problem(problem, kernels)
            self._launch(bound, params.alignments(problem, problem.operands()), numbers)
            return bound.plan.build, self._given()

    def of_plan(self, plan: Plan, artifact: Artifact, clear: Callable[[int], None] | None = None) -> bytes:
        """Returns what the driver got for a plan that alone says how it is launched.

        clear: clears the output at an address, before the launch
        """
        alignments = abi.address_alignments(plan.build)
        with self._watched():
            if clear is not None:
                clear(_address("output", alignments["output"]))
            self._launch(bind(artifact, plan), alignments, {})
            return self._given()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Makes the device current, with an empty log and without memory, for addresses that are names."""
        self._fake.clear()
        self._fake.without_memory(True)
        try:
            with driver.device(0).current():
                yield
        finally:
            self._fake.without_memory(False)

    def _launch(self, bound: Bound, alignments: Mapping[str, int], numbers: Mapping[str, int]) -> None:
        addresses = {name: _address(name, alignments[name]) for name in bound.tensor_names}
        assert len(set(addresses.values())) == len(addresses), "two names have one address"
        workspace = _address("workspace", ROW_ALIGNMENT_BYTES) if bound.workspace_bytes else None
        bound({**addresses, **numbers}, 0, workspace=workspace)

    def _given(self) -> bytes:
        given = (call for call in self._fake.calls if call.name.startswith(_LAUNCHING))
        return b"".join(
            repr((call.name, call.text, call.numbers)).encode() + call.parameters.hex().encode() for call in given
        )


@functools.cache
def launcher() -> Launcher:
    """Returns the launcher of this process."""
    return Launcher()


def _address(name: str, alignment: int) -> int:
    """Returns a device address for an operand, of no larger alignment than the operand's."""
    offset = alignment if alignment < ROW_ALIGNMENT_BYTES else 0
    return _FIRST_ADDRESS + (zlib.crc32(name.encode()) << _PAGE_BITS) + offset


class Drawn:
    """The launches of a group of random cases.

    sha256: hash of what the driver got for each case
    attempts: each launch with its case
    problems: how many cases are neither refused nor empty
    """

    def __init__(self, cases: Iterable[Case], kernels: Kernels) -> None:
        self.attempts: list[tuple[Case, Attempt]] = []
        self.problems = 0
        given = hashlib.sha256()
        for case in cases:
            found = _launches_of(case, kernels) if case.needs_kernels else []
            self.problems += bool(found)
            self.attempts += ((case, attempt) for attempt, _ in found)
            given.update(b"".join(text for _, text in found) + b"\n")
        self.sha256 = given.hexdigest()


def _launches_of(case: Case, kernels: Kernels) -> list[tuple[Attempt, bytes]]:
    """Returns each launch of a random case, as fuzz_run makes them, with what the driver got."""
    given: list[bytes] = []

    def launch(chosen: Kernels) -> Attempt:
        try:
            build, text = launcher().of_problem(case.problem(), chosen, case.philox)
        except AttentionError as error:
            given.append(str(error).encode())
            return Attempt(None, error=str(error), is_absent=isinstance(error, CompileError | Stale))
        given.append(text)
        return Attempt(build)

    return list(zip(attempts(case, kernels, launch), given, strict=False))  # a launch may be absent


def available(builds: Iterable[Build]) -> Kernels:
    """Returns the function that gives these kernels, for the fake driver, and refuses every other one."""
    made = {build: fakes.artifact(build) for build in builds}

    def kernels(build: Build) -> Artifact:
        if build not in made:
            raise Stale(f"{build.symbol}: not at hand")
        return made[build]

    return kernels


def of_verification(build: Build) -> str:
    """Returns the hash of the launches with which verify_gpu verifies a kernel."""
    given = hashlib.sha256()
    for text in _verifying(build):
        given.update(text + b"\n")
    return given.hexdigest()


def _verifying(build: Build) -> Iterator[bytes]:
    artifact = fakes.artifact(build)
    if build.kind == "component_gemm":
        gemm = component_gemms.ComponentGemm(build.component_gemm, build.family, build.dtype, build.head_dim)
        for tiles in verify_gpu.COMPONENT_GEMM_TILES:
            yield launcher().of_plan(gemm.plan(tiles, build.arch), artifact)
    elif build.kind in ROW_KINDS:
        for case in serving_cases.of_build(build):
            yield launcher().of_plan(case.plan(build.arch), artifact, _clearing(case))
    else:
        kernels = verify_gpu.only(build, available([build]))
        for each in _cases(build):
            yield launcher().of_problem(each.problem(), kernels, each.philox)[1]


def _cases(build: Build) -> list[Case]:
    if build.family == "decode":
        return decode_cases.of_build(build)
    found = verify_gpu.fused_cases(build)
    return [*found, verify_gpu.repeated_case(found[0], build)]


def _clearing(case: serving_cases.RowCase) -> Callable[[int], None] | None:
    """Returns what clears the output before a launch; None for a case whose output is not cleared."""
    if not (isinstance(case, serving_cases.MergeCase) and case.problem.is_packed):
        return None
    return functools.partial(fill.clear, case.problem.output, stream=0)
