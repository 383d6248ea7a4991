"""Tests of entry points: which launches wait for the one ahead themselves, and which kernel clears the sums of dQ."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cutlass_py_attn.launch import entry_points
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem import spec

PER_HEAD, QUERY_HEADS, TWO_CTA = "64x128x16:3,2+per_head", "64x128x16:3,2+query_heads", "64x64x16:2,2+2cta"
GROUPED = "bf16_d128_s512_b1_h8k2_causal"
# case, direction, target, tile ("" for that of the planner): is_dependent of each launch
DEPENDENT: dict[tuple[str, str, str, str], list[bool]] = {
    ("bf16_d128_s512_b1_h4_full", "forward", "sm_90a", ""): [False],
    ("bf16_d128_s512_b1_h4_full", "backward", "sm_90a", "64x128x16:3,2"): [False, True, True],
    ("bf16_d128_s512_b1_h4_full", "backward", "sm_90a", PER_HEAD): [False, True],
    ("bf16_d256_s512_b1_h4_full", "backward", "sm_90a", TWO_CTA): [False, True, True],
    (GROUPED, "backward", "sm_90a", QUERY_HEADS): [False, True, True, True],
    ("bf16_d128_s512_b1_h4_full_sinks", "backward", "sm_90a", "64x128x16:3,2"): [False, True, True, False],
    ("bf16_d128_s512_b1_h4_full", "backward", "sm_90", ""): [False, False, False],
    ("bf16_d128_q1_s8192_b1_h8_full", "forward", "sm_90", ""): [False, False],
}


def planned(case: str, direction: str, arch: str, tile: str) -> Plan:
    problem = spec.parse(case).problem(direction)
    if not tile:
        return planner.plan(problem, arch)
    return planner.plan_with_tile(problem, arch, TileConfig.parse(tile), family="sm90")


@pytest.mark.parametrize(("given", "expected"), DEPENDENT.items(), ids=["-".join(key) for key in DEPENDENT])
def test_kernels_that_wait_themselves_are_dependent_launches(
    given: tuple[str, str, str, str], expected: list[bool]
) -> None:
    plan = planned(*given)
    assert [launch.is_dependent for launch in plan.launches] == expected
    assert not plan.launches[0].is_dependent, "nothing else makes a call wait for the work before it"


@pytest.mark.parametrize(
    ("case", "arch", "tile", "clears"),
    [
        ("bf16_d128_s512_b1_h4_full", "sm_90a", "64x128x16:3,2", True),
        ("bf16_d128_s512_b1_h4_full_deterministic", "sm_90a", "64x128x16:3,2", True),
        ("bf16_d256_s512_b1_h4_full", "sm_90a", TWO_CTA, True),
        ("bf16_d128_s512_b1_h4_full", "sm_90a", PER_HEAD, False),
        (GROUPED, "sm_90a", QUERY_HEADS, False),
        ("bf16_d128_s512_b1_h4_full", "sm_90", "", False),
    ],
)
def test_either_the_delta_kernel_or_a_memset_clears_what_is_added_to(
    case: str, arch: str, tile: str, clears: bool
) -> None:
    plan = planned(case, "backward", arch, tile)
    assert entry_points.delta_clears_sums(plan.build) is clears
    has_memset = plan.workspace.zero_bytes > 0
    adds_to_global_sums = plan.build.variant != "per_head"
    assert adds_to_global_sums is (clears or has_memset)
    assert not (clears and has_memset)


KERNELS = Path(entry_points.__file__).parents[1] / "kernels"
WAITS = ("kernels/backward_parts/chain.py", "kernels/sm90_backward/backward.py", "kernels/sm90_backward/main_kernel.py")


def test_every_dependent_entry_waits() -> None:
    """A dependent launch whose kernel does not wait would read what is not written yet."""
    text = {path: (KERNELS.parent / path).read_text() for path in WAITS}
    waiting = {role for source in text.values() for role in re.findall(r'wait_for_previous\(\S+, "(\w+)"\)', source)}
    roles = ("main", "delta", "finish", "finish_kv", "bias", "sinks", "combine")
    plans = [planned(*key) for key in DEPENDENT]
    dependent = {role for plan in plans for role in roles if entry_points.is_dependent_launch(plan.build, role)}
    assert dependent == waiting == {"main", "finish", "finish_kv"}
