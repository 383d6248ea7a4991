"""The cases of grouped heads: the sm90 backward computes all of them by query heads."""

from __future__ import annotations

from cutlass_py_attn.plan import planner
from cutlass_py_attn.testing.cases import SM90_ARCH
from tests.cases.grouped_cases import GROUPED


def test_every_case_is_computed_by_query_heads() -> None:
    builds = [planner.builds(case.problem(), SM90_ARCH)[0] for case in GROUPED]
    assert {build.variant for build in builds} == {"query_heads"}
    assert {build.mask for build in builds} == {"causal", "local"}
    assert {build.key_stages for build in builds} == {1, 2}
