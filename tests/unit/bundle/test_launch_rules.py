"""Tests of bundles' rules: they give what the planner gives, for the exported problem and for every other one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cutlass_py_attn.bundle.manifest import Target, manifest, names_of
from cutlass_py_attn.bundle.numbers import inputs
from cutlass_py_attn.bundle.rules import rules_of, tensor_map_box
from cutlass_py_attn.errors import NotSupported, Stale
from cutlass_py_attn.kernels.catalogue import fused_kernel_of, kernel_of
from cutlass_py_attn.kernels.decode import kernel as decode
from cutlass_py_attn.launch import entry_points
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.plan import entry_parameters, launch_rules, planner
from cutlass_py_attn.plan.plan import Launch, Plan
from cutlass_py_attn.plan.preconditions import conditions, limits, mapped
from cutlass_py_attn.problem import spec
from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.serialize import from_json, to_json
from cutlass_py_attn.problem.tensors import BIASES, BMHK, Sequences, Shape, Tensor
from cutlass_py_attn.runtime import binding
from tests.cases.paged_forward_cases import PagedCase
from tests.support import crafted_json
from tests.support.any_problem import ARCHS, problems
from tests.support.fakes import artifact

SMS = st.sampled_from([1, 16, 108, 132, 148])


@st.composite
def resized(draw: st.DrawFn, problem: Problem) -> Problem:
    """The problem with other batch, heads, lengths and strides."""
    old = problem.shape
    heads_key = draw(st.integers(1, 9))
    group = draw(st.integers(2, 5)) if old.group > 1 else 1
    batch, queries, keys = draw(st.integers(1, 300)), draw(st.integers(1, 3000)), draw(st.integers(1, 3000))
    tokens = None if old.tokens is None else (queries + draw(st.integers(0, 99)), keys + draw(st.integers(0, 99)))
    shape = Shape(batch, queries, keys, heads_key * group, old.head_dim, old.head_dim_value, heads_key, tokens)
    changes: dict[str, Any] = {}
    for name, tensor in problem.tensors().items():
        wanted = shape.of(name) if name in BMHK else shape.bias
        if name in BIASES:
            wanted = tuple(1 if size == 1 else full for size, full in zip(tensor.shape, wanted, strict=True))
        strides = Tensor.contiguous(wanted, tensor.dtype).strides
        factor = draw(st.sampled_from([1, 1, 3]))
        strides = (*(step * factor for step in strides[:3]), strides[3])
        changes[name] = replace(tensor, shape=wanted, strides=strides)
    for name, tensor in problem.vectors().items():
        if name in ("alibi_slopes", "sinks", "grad_sinks"):
            changes[name] = Tensor.contiguous((batch, shape.num_heads)[-len(tensor.shape) :], "float32")
    if problem.grad_logsumexp is not None:
        changes["grad_logsumexp"] = Tensor.contiguous(shape.logsumexp, "float32")
    if problem.sequences is not None:
        changes["sequences"] = Sequences(batch, queries, keys, problem.sequences.seqused_k)
    return problem.replace(**changes)


def numbers(plan: Plan) -> dict[str, Any]:
    """What of a plan follows from sizes."""
    return {
        "sizes": {
            name: dict(plan.params)[name] for name in ("num_splits_key", "total_tiles") if name in dict(plan.params)
        },
        "launches": {launch.symbol: launch.grid for launch in plan.launches},
        "maps": [(m.sizes, m.strides) for launch in plan.launches for m in launch.tensor_maps],
        "parts": {part.name: part.bytes for part in plan.workspace.buffers},
    }


def by_rule(exported: Problem, plan: Plan, other: Problem, num_sms: int) -> dict[str, Any]:
    """The same by the rules of the exported problem's bundle, for another problem."""
    build = plan.build
    names = {name: item.value for name, item in inputs(other, build).items()} | {"num_sms": num_sms}
    for name, rule in launch_rules.definitions(exported, build).items():
        names[name] = rule.evaluate(names)

    def holds(role: str) -> bool:
        return bool(launch_rules.launch_condition(build, role).evaluate(names))

    grids_of = launch_rules.grids_of(exported, build)
    has_maps = any(launch.tensor_maps for launch in plan.launches)
    with_maps = [
        role for role in entry_points.entries(build) if has_maps and entry_parameters.has_tensor_maps(build, role)
    ]
    maps = [launch_rules.tensor_map(exported, it) for _ in with_maps for it in kernel_of(build).tensor_maps(build)]
    return {
        "sizes": {name: names[name] for name in ("num_splits_key", "total_tiles") if name in names},
        "launches": {
            symbol: tuple(rule.evaluate(names) for rule in grids_of[role])
            for role, symbol in entry_points.entries(build).items()
            if holds(role)
        },
        "maps": [tuple(tuple(rule.evaluate(names) for rule in side) for side in both) for both in maps],
        "parts": {
            rule.name: rule.bytes.evaluate(names)
            for rule in fused_kernel_of(build).workspace(build)
            if rule.condition.evaluate(names)
        },
    }


def allowed(exported: Problem, plan: Plan, other: Problem, num_sms: int) -> list[str]:
    """The conditions of the exported problem's bundle that the other problem breaks."""
    names = names_of(rules_of(other, plan.build), num_sms)
    required = *conditions(exported, plan.build), *limits(exported, plan.build)
    return [says for rule, says in required if not rule.evaluate(names)]


@settings(max_examples=100, deadline=None)
@given(problems(), ARCHS, SMS, st.data())
def test_rules_are_the_planner(problem: Problem, arch: str, num_sms: int, data: st.DataObject) -> None:
    """Of every plan, for a problem of other sizes that the bundle's conditions allow: the package would launch these
    kernels for it, and what it counts is what the rules give."""
    assume(not problem.reasons() and not problem.is_empty)
    other = data.draw(resized(problem))
    assume(not other.reasons())
    for plan in planner.plans(problem, arch, num_sms):
        if allowed(problem, plan, problem, num_sms) or allowed(problem, plan, other, num_sms):
            continue
        same = planner.plan_of_build(other, plan.build, num_sms)
        found = [text.split()[0] for text in binding._problem_mismatches(same, other)]
        # A sum over an axis with one index is planned as none, and is a sum all the same.
        assert found in ([], ["problem.grad_bias_mode"])
        assert plan.build.family != "decode" or not decode.unsupported_features(other)
        assert by_rule(problem, plan, other, num_sms) == numbers(same)


def paged(page_size: int, num_pages: int, pool: str = "nhd", queries: int = 300) -> Problem:
    """A problem of three sequences in pages, for the sm90 forward."""
    case = PagedCase("bf16_d128_h4k2_causal_br", page_size, ((queries, 400),) * 3, pool=pool)
    problem = case.problem()
    pools = {name: getattr(problem, name) for name in ("key", "value")}
    changes = {name: replace(it, shape=(num_pages, *it.shape[1:])) for name, it in pools.items()}
    return problem.replace(**changes)


def sm90_plan(problem: Problem, num_sms: int = 132) -> Plan:
    """The sm90 plan of a problem, for calls of any length."""
    plans = planner.plans(problem, "sm_90a", num_sms, any_length=True)
    return next(plan for plan in plans if plan.build.family == "sm90")


@pytest.mark.parametrize(
    ("exported", "other"),
    [
        (paged(16, 100), paged(16, 3, "hnd", 1000)),
        (paged(16, 100), paged(512, 7)),
        (paged(128, 20), paged(32, 90, "hnd")),
        (paged(64, 30, "combined"), paged(64, 1, "interleaved")),
        (paged(128, 20), paged(1024, 9)),
    ],
)
def test_rules_of_pages_are_the_planner(exported: Problem, other: Problem) -> None:
    plan, same = sm90_plan(exported), sm90_plan(other)
    assert plan.build == same.build
    assert not allowed(exported, plan, exported, 132)
    assert not allowed(exported, plan, other, 132)
    assert by_rule(exported, plan, other, 132) == numbers(same)
    sizes = {name: item.value for name, item in inputs(other, plan.build).items()}
    recipes = zip(plan.launches[0].tensor_maps, same.launches[0].tensor_maps, mapped(plan.build), strict=True)
    for ours, theirs, name in recipes:
        box = tensor_map_box(exported, plan.build, name, ours.box)
        assert tuple(rule.evaluate(sizes) for rule in box) == theirs.box
    fields = launch_rules.fields(exported, plan.build, inputs(exported, plan.build))
    assert fields["value_page_rows"].evaluate(sizes) == dict(same.params)["value_page_rows"]


def test_manifest_has_both_maps_of_value() -> None:
    problem = paged(16, 100, "combined")
    plan = sm90_plan(problem)
    made = manifest("paged", [Target(problem, plan, artifact(plan.build), 132)], {})
    (launched,) = made["problems"][0]["targets"][0]["launches"]
    assert [it["meaning"] for it in launched["parameters"]] == [
        *(f"CUtensorMap of {name}" for name in ("query", "key", "value", "value_last")),
        "the struct",
    ]
    maps = launched["tensor_maps"]
    assert [(it["pointer"], len(it["sizes"]), it["box"][1]) for it in maps] == [
        ("query", 5, 128),
        ("key", 4, 16),
        ("value", 4, 16),
        ("value", 5, 16),
    ]


@pytest.mark.parametrize(
    ("exported", "other", "says"),
    [
        (paged(16, 100), paged(8, 100), "page_size must be at least 16: smaller pages need an sm80 kernel"),
        (paged(128, 10), paged(1, 10), "page_size must be at least 16: smaller pages need an sm80 kernel"),
        (
            paged(16, 100),
            paged(16, 100, "uneven"),
            "value_page must be a multiple of value_row: a page starts at a whole number of rows",
        ),
        (
            paged(16, 100),
            paged(16, 2**27),
            "the pages of value must have fewer than 2^30 rows; use smaller pools",
        ),
    ],
)
def test_hosts_refuse_pages_that_tensor_maps_do_not_describe(exported: Problem, other: Problem, says: str) -> None:
    assert allowed(exported, sm90_plan(exported), other, 132) == [says]


FACTORS = [
    *((0.1, 30.0), (0.0, 30.0), (-1.0, 8192.0), (1e-30, 1.0), (-1e-30, 2.0**-20), (100.0, 1e-36)),
    *((1e-34, 30.0), (-9.9e-31, 30.0), (2.0**128, 2.0**100), (100.0, 1e-37), (-100.0, 1e-37), (1e-30, 1e20)),
    *((1.0, 2.0**-127), (1.0, 8192.5), (1.0, 2.0**99), (1.0, 2.0**101), (0.0, 1e-37)),
]


@pytest.mark.parametrize(("scale", "softcap"), FACTORS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_hosts_refuse_the_factors_that_the_package_refuses(
    direction: str, dtype: str, scale: float, softcap: float
) -> None:
    exported = Problem.dense(direction, Shape(1, 64, 64, 2, 64, 64), dtype).replace(softcap=30.0)
    plan = planner.plan(exported, "sm_80")
    other = exported.replace(scale=scale, softcap=softcap)
    assert bool(allowed(exported, plan, other, 132)) == bool(other.reasons())
    assert allowed(exported, plan, exported, 132) == []
    assert allowed(exported, plan, exported.replace(scale=float("nan")), 132)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_rules_of_maps_that_end_with_a_sequence(direction: str, deterministic: bool) -> None:
    """On Hopper, for other lengths, heads and tokens; the counter of key tiles is one number whatever the sizes."""
    shapes = Shape(3, 400, 300, 4, 128, 128, tokens=(1000, 900)), Shape(7, 500, 600, 8, 128, 128, tokens=(1234, 2222))
    one, other = (
        Problem.dense(direction, shape, "bfloat16", Causal()).replace(deterministic=deterministic) for shape in shapes
    )
    plan = planner.plan(one, "sm_90a", 132)
    assert plan.build.family == "sm90"
    assert by_rule(one, plan, other, 132) == numbers(planner.plan_of_build(other, plan.build, 132))


@settings(max_examples=70, deadline=None)
@given(problems(), ARCHS, st.data())
def test_what_the_same_kernels_serve_is_allowed(problem: Problem, arch: str, data: st.DataObject) -> None:
    """Conditions refuse nothing that is planned with the same kernels, but grids in pieces and sums of one index."""
    assume(not problem.reasons() and not problem.is_empty)
    other = data.draw(resized(problem))
    assume(not other.reasons())
    plan = planner.plan(problem, arch)
    assume(not allowed(problem, plan, problem, 132))
    assume(any(found.build == plan.build for found in planner.plans(other, arch)))
    assert allowed(problem, plan, other, 132) == []


@settings(max_examples=70, deadline=None)
@given(problems(), ARCHS)
def test_every_problem_has_a_manifest_or_is_refused(problem: Problem, arch: str) -> None:
    """The manifest's numbers are the plan's, field by field."""
    assume(not problem.reasons())
    plan = planner.plan(problem, arch)
    target = Target(problem, plan, artifact(plan.build), architecture(arch).num_sms)
    if problem.is_empty or 0 in (problem.shape.num_keys, problem.shape.num_queries):
        with pytest.raises(NotSupported, match="must be at least 1"):
            manifest("attention", (target,), {})
        return
    (found,) = manifest("attention", (target,), {})["problems"][0]["targets"]
    assert Plan.from_json(plan.to_json()) == plan
    values = {item["name"]: item.get("value", 0) for item in found["struct"]["fields"]}
    assert {name: values[name] for name, _ in plan.params} == dict(plan.params)
    launches = {launch.symbol: launch for launch in plan.launches}
    for item in found["launches"]:
        launch = launches.get(item["symbol"], Launch(item["symbol"], (0, 0, 0), tuple(item["block"]), 0))
        assert tuple(item["grid"]) == launch.grid or item["when"] != "1"
        assert tuple(item["block"]) == launch.block
    parts = {part["name"]: (part["offset"], part["bytes"]) for part in found["workspace"]["buffers"] if part["bytes"]}
    assert parts == {part.name: (part.offset, part.bytes) for part in plan.workspace.buffers}


@settings(max_examples=70, deadline=None)
@given(problems())
def test_problems_survive_json(problem: Problem) -> None:
    assert from_json(to_json(problem)) == problem


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.pop("query"), "must have direction, key, output, query, value"),
        (lambda data: data.update(dtype="float16"), "dtype"),
        (
            lambda data: data["mask"].update(name="blocky"),
            "has another form (mask.name = 'blocky': must be one of full, causal",
        ),
        (lambda data: data["mask"].update(window=3), "has another form"),
        (lambda data: data.update(key=[1, 2]), "has another form"),
    ],
)
def test_damaged_problems_are_named(change: Any, words: str) -> None:
    data = to_json(spec.parse("bf16_d64_s64_b1_h1_causal").problem("forward"))
    change(data)
    with pytest.raises(NotSupported, match=re.escape(words)):
        from_json(data)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_crafted_problems_are_refused_or_planned(direction: str) -> None:
    """A node of the JSON object is something else: the errors are those of this package."""
    case = "bf16_d128_s1000_b2_h4k2_causal_window64_biassum_dropout0.1_softcap30_alibi_sinks"
    data = json.loads(json.dumps(to_json(spec.parse(case).problem(direction))))
    data["alibi_slopes"]["strides"] = []
    with pytest.raises(NotSupported, match=r"alibi_slopes.strides = .* must have a stride for each axis"):
        from_json(data).check()
    data["alibi_slopes"]["strides"] = [1]
    refused = 0
    for _, changed in crafted_json.each(data, every=5):
        try:
            problem = from_json(changed)
            problem.check()
        except NotSupported:
            refused += 1
            continue
        assert planner.plan(problem, "sm_80").launches is not None
    assert refused > 100


def test_a_plan_for_another_device_stops_the_export() -> None:
    problem = spec.parse("bf16_d64_s1024_b4_h8_causal").problem("forward")
    plan = planner.plan(problem, "sm_90a", num_sms=16)
    assert kernel_of(plan.build).lengths == "any"
    with pytest.raises(Stale, match="update the rules of bundles to the planner"):
        manifest("attention", (Target(problem, plan, artifact(plan.build), 132),), {})
