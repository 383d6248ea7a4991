"""Library launches: what a C library must choose and launch for a problem: what the planner plans, byte by byte."""

from __future__ import annotations

import ctypes
import functools
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from cutlass_py_attn.bundle.dispatch import facts_of, order_key, preferred_when
from cutlass_py_attn.bundle.files import Bundle
from cutlass_py_attn.bundle.manifest import names_of
from cutlass_py_attn.bundle.rules import rules_of
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.launch.arch import architecture, runs_on
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.variants import SPLIT_KV
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import FLOAT8, Tensor
from cutlass_py_attn.runtime import binding
from cutlass_py_attn.runtime.driver import device
from tests.support import fake_driver, front_ends
from tests.support.bundle_hosts import ADDRESSES, STREAM, WORKSPACE, compared
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import artifact
from tests.support.library_host import LibraryHost, compiled, exported, filled, made_up, target_of

SEEDS = 2**40, 2**40 + 1  # key and offset of dropout
FREE = 2**45  # a made-up workspace, of any size, in front of the operands
ANY_ARCH = "sm_80,sm_86,sm_90a"
_folder = tempfile.TemporaryDirectory(prefix="library_launches_")


def expected_plan(bundle: Bundle, problem: Problem, arch: str, num_sms: int) -> Plan | None:
    """The first plan for the device of which the library has the kernels; None if it has none of them."""
    exports = {(facts_of(it.problem, plan.build), plan.build) for it in bundle._exported for plan in it.plans}
    builds = {build for facts, build in exports if facts_of(problem, build) == facts}
    limits = architecture(arch)
    try:
        plans = planner.plans_on(problem, limits.compute_capability, num_sms)
    except NotSupported:  # a cache in pages with more query rows than any kernel takes
        return None
    for plan in plans:
        target = plan.architecture
        newest = [
            build.arch for build in builds
            if runs_on(architecture(build.arch), limits.compute_capability) and architecture(build.arch).is_portable
        ]  # fmt: skip
        known = [replace(plan.build, arch=arch) for arch in {plan.build.arch, *newest}]
        if target.is_portable:  # sm_86's kernels run on sm_89
            found = sorted((build for build in known if build in builds), key=order_key)
            if found:
                return planner.plan_of_build(problem, found[0], num_sms)
        elif plan.build in builds:
            same = [build for build in builds if facts_of(problem, build) == facts_of(problem, plan.build)]
            return plan if plan == plans[0] else _in_parts(same, problem, num_sms) or plan
    return None


def _in_parts(builds: list[Build], problem: Problem, num_sms: int) -> Plan | None:
    """The plan of variant split_kv that a library without the planner's tile for short sequences prefers to its own.

    builds: those with the facts of the problem
    """
    for build in sorted((build for build in builds if build.variant == SPLIT_KV), key=order_key):
        if preferred_when(build, builds).evaluate(names_of(rules_of(problem, build), num_sms)):
            return planner.plan_of_build(problem, build, num_sms)
    return None


def asked(log: FakeDriver) -> tuple[list[Any], list[Any]]:
    """What a launch puts on the stream, in order, with every byte of the parameters; and its tensor maps."""
    found = []
    for call in log.calls:
        if call.name == "cuLaunchKernelEx":
            found.append((call.text, *call.numbers, call.parameters))
        elif call.name == "cuMemsetD8Async":
            found.append((call.name, *call.numbers))
    return found, [each for each in compared(log) if each[0] == "cuTensorMapEncodeTiled"]


def by_library(log: FakeDriver, host: LibraryHost, opened: ctypes.c_void_p, call: Any, size: int) -> Any:
    """What a launch of the library asks of the driver."""
    log.clear()
    assert host.launched(opened, call, FREE, size, STREAM) == 0, host.text
    return asked(log)


def by_package(log: FakeDriver, plan: Plan, problem: Problem, ordinal: int) -> Any:
    """What the plan's own launch asks of the driver."""
    bound = binding.bind(artifact(plan.build), plan, problem, ordinal)
    given = {name: address for name, address in made_up(problem, ADDRESSES).items() if name in bound.tensor_names}
    seeds = dict(zip(("philox_seed", "philox_offset"), SEEDS, strict=True))
    log.clear()
    bound(given | {name: seed for name, seed in seeds.items() if name in bound.tensor_names}, STREAM, workspace=FREE)
    return asked(log)


def other_plan(builds: set[Build], problem: Problem, symbol: str, arch: str, num_sms: int) -> Plan:
    """The plan of the problem for the kernel of this name, which must be able to compute it."""
    capability = architecture(arch).compute_capability
    build, *_ = (
        each for each in sorted(builds, key=order_key)
        if each.symbol == symbol and runs_on(architecture(each.arch), capability)
    )  # fmt: skip
    same = planner.plan_of_build(problem, build, num_sms)
    mismatches = {text.split()[0] for text in binding._problem_mismatches(same, problem)}
    assert mismatches <= {"problem.features", "problem.vector_bytes", "problem.grad_bias_mode"}, mismatches
    assert {*build.features} - {*problem.features} <= {"grouped"}
    return same


def library_calls(log: FakeDriver, problem: Problem) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """What a launch of the library asks of the driver, and what the plan does with the same addresses."""
    bundle, host = library(archs_of(problem))
    call = filled(host.new_call(), problem, first_address=ADDRESSES)
    seeds = dict(zip(("philox_seed", "philox_offset"), SEEDS, strict=True))
    if "dropout" in problem.features and not problem.philox_on_device:
        call.philox_seed, call.philox_offset = SEEDS
    choice = host.chosen(call, target_of("sm_90a"))
    builds = {plan.build for plan in bundle.plans(problem.direction)}
    plan = expected_plan(bundle, problem, "sm_90a", 132)
    plan = plan or other_plan(builds, problem, choice.symbol, "sm_90a", 132)
    assert (choice.symbol, choice.workspace) == (plan.symbol, plan.workspace.bytes)
    with device(0).current():
        status, opened = host.opened()
        assert status == 0, host.text
        log.clear()
        assert host.launched(opened, call, WORKSPACE, choice.workspace, STREAM) == 0, host.text
        found = compared(log)
        host.close(opened)
    return found, front_ends.plan_calls(log, plan, problem, seeds | made_up(problem, ADDRESSES))


@functools.cache
def library(archs: str = ANY_ARCH) -> tuple[Bundle, LibraryHost]:
    """The library of the problems of calls.txt whose kernels are for these targets.

    Compiled with the sanitizers of undefined arithmetic alone, which compile fast; test_library_builds has all.
    """
    fake_driver.need_compiler("the library")
    calls = ((row, direction) for row in front_ends.rows() for direction in row.directions)
    found = [row.problems(direction)[0] for row, direction in calls if not row.has_split_grids(direction)]
    problems = tuple(each for problem in found if archs_of(problem) == archs for each in with_tables(problem))
    folder = Path(_folder.name, archs)
    bundle = exported(folder / "made", problems, archs)
    names = "signed-integer-overflow,integer-divide-by-zero,shift,float-cast-overflow"
    options = f"-fsanitize={names}", "-fno-sanitize-recover=all"
    return bundle, LibraryHost(compiled(bundle, folder / "attention.so", *options))


def archs_of(problem: Problem) -> str:
    """The targets that have kernels for the problem: sm_90a alone has some for e4m3 operands, latent codes, ranges."""
    is_of_one = problem.dtype == FLOAT8 or problem.key_rope is not None or problem.form.has_ranges
    return "sm_90a" if is_of_one else ANY_ARCH


def with_tables(problem: Problem) -> Iterator[Problem]:
    """The problem; of pages also with a list of them, and with results that no other sequence changes."""
    yield problem
    if problem.pages is not None and not problem.pages.cu_seqlens_q:
        yield problem.replace(pages=replace(problem.pages, invariant=True))
        yield listed(problem)


def listed(problem: Problem) -> Problem:
    """The problem with the pages of all sequences in one list."""
    assert problem.pages is not None
    table = Tensor.contiguous((problem.pages.table_entries,), "int32")
    return problem.replace(pages=replace(problem.pages, page_table=table, page_indptr=True))
