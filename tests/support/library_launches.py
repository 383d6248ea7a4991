"""Library launches: what a C library must choose and launch for a problem: what the planner plans, byte by byte."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

from cutlass_py_attn.bundle.dispatch import facts_of, order_key, preferred_when
from cutlass_py_attn.bundle.files import Bundle
from cutlass_py_attn.bundle.manifest import names_of
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.launch.arch import architecture, runs_on
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.variants import SPLIT_KV
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.runtime import binding
from tests.support.bundle_hosts import ADDRESSES, STREAM, compared
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import artifact
from tests.support.library_host import LibraryHost, made_up

SEEDS = 2**40, 2**40 + 1  # key and offset of dropout
FREE = 2**45  # a made-up workspace, of any size, in front of the operands


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
        plan = planner.plan_of_build(problem, build, num_sms)
        if preferred_when(build, builds).evaluate(names_of(problem, plan, num_sms)):
            return plan
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
