"""Tests of plan/explain.py: a plan's text holds every number and choice that decides."""

from __future__ import annotations

from typing import Any

import pytest

from cutlass_py_attn.kernels.catalogue import fused_kernel_of
from cutlass_py_attn.launch.build import Buffer
from cutlass_py_attn.plan import explain
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.plan.planner import plan_backward, plan_forward
from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape, Tensor
from tests.support.requests import dense, with_terms

BACKWARD = Problem.dense("backward", Shape(2, 300, 500, 3, 72, 64), "bfloat16", Causal()).replace(deterministic=True)


def plan_of(problem: Problem) -> Plan:
    return (plan_forward if problem.direction == "forward" else plan_backward)(problem, "sm_80")


def test_explain_says_what_decides() -> None:
    plan = plan_of(BACKWARD)
    text, build = plan.explain(), plan.build
    said = [
        "sm_80",
        f"{build.tile_m} queries x {build.tile_n} keys",
        f"{build.warps} ({build.threads} threads)",
        f"warps of scores  {build.warps_scores[0]} x {build.warps_scores[1]}",
        f"query {build.query_stages}, grad_output {build.grad_output_stages}",
        f"{fused_kernel_of(build).accumulators(build)} of them for accumulators",
        "block 128 x 1 x 1, cluster 1 x 1 x 1",
        f"num_splits_key: {plan.num_splits_key}",
        f"shared memory: {build.shared_memory_bytes} of 166912 bytes",
        f"reason: {plan.reason}",
        *(f"{launch.symbol}: grid" for launch in plan.launches),
        *(part.name for part in plan.workspace.buffers),
    ]
    for words in said:
        assert words in text
    assert all(f"{buffer.name} " in text and f" {buffer.bytes} " in text for buffer in build.shared_memory)


def test_padding_is_what_no_buffer_covers() -> None:
    """float32 keys of 128 columns leave a gap before the next buffer."""
    buffers = (Buffer("key", 0, 100, 0, 1), Buffer("sums", 896, 64, 0, 3), Buffer("value", 128, 512, 1, 2))
    assert explain._padding(buffers) == (128 - 100) + (896 - 128 - 512)
    shape = Shape(batch=1, num_queries=256, num_keys=256, num_heads=1, head_dim=128, head_dim_value=128)
    plan = plan_of(Problem.dense("forward", shape, "float32"))
    gap = plan.build.shared_memory_bytes - sum(buffer.bytes for buffer in plan.build.shared_memory)
    assert gap > 0
    assert f"{gap} of them padding" in plan.explain()


def row_of(problem: Problem, title: str) -> str:
    """What the table says behind a title."""
    lines = [line.strip() for line in plan_of(problem).explain().splitlines()]
    (found,) = (line for line in lines if line.startswith(f"{title}  "))
    return found.removeprefix(title).strip()


BIAS = Tensor((1, 3, 1, 50), (0, 64, 0, 1), "float16")
WHOLE_BIAS = (2, 3, 40, 50)


@pytest.mark.parametrize(
    ("problem", "title", "said"),
    [
        (dense(), "features", "none"),
        (dense().replace(softcap=3.0, dropout_p=0.5, bias=BIAS), "features", "bias, dropout, softcap"),
        (dense(), "access", "rows by 16 bytes"),
        (dense(head_dim=7), "access", "rows by 2 bytes"),
        (dense().replace(bias=BIAS), "access", "rows by 16 bytes, bias by 4 bytes"),
        (
            with_terms("backward", bias=WHOLE_BIAS, grad_bias=(2, 3, 40, 1)),
            "access",
            "rows by 16 bytes, bias by 4 bytes, grad_bias by 2 bytes",
        ),
        (dense("backward"), "gradients", "query, key, value"),
        (dense("backward").replace(grad_query=None), "gradients", "key, value"),
        (
            with_terms("backward", bias=WHOLE_BIAS, grad_bias=WHOLE_BIAS),
            "gradient of bias",
            "written by the main kernel",
        ),
        (
            with_terms("backward", bias=WHOLE_BIAS, grad_bias=(1, 3, 1, 50)),
            "gradient of bias",
            "written by a separate kernel, summed over batch and queries",
        ),
        (
            with_terms("backward", bias=WHOLE_BIAS, grad_bias=WHOLE_BIAS, softcap=2.0),
            "gradient of bias",
            "written by a separate kernel, summed over nothing",
        ),
        (dense(), "columns", "all in one block"),
        (dense(head_dim_value=1100), "columns", "3 blocks of 384 columns"),
    ],
)
def test_features_access_gradients_and_columns(problem: Problem, title: str, said: str) -> None:
    assert row_of(problem, title) == said


def test_launches_in_pieces() -> None:
    text = plan_of(dense(batch=65537, num_heads=2)).explain()
    assert "launches: 2" in text
    assert "grid 1 x 2 x 65535, from head 0 and batch 0," in text
    assert "grid 1 x 2 x 2, from head 0 and batch 65535," in text
    assert "from head" not in plan_of(dense()).explain()


def test_explain_of_a_forward_and_of_an_empty_problem() -> None:
    text = plan_of(Problem.dense("forward", Shape(0, 300, 500, 3, 64, 64), "float16")).explain()
    assert "none, the problem is empty" in text
    assert "grad" not in text


def test_a_backward_without_a_main_kernel() -> None:
    alone: dict[str, Any] = dict.fromkeys(("grad_query", "grad_key", "grad_value"), None)
    text = plan_of(with_terms("backward", bias=WHOLE_BIAS, grad_bias=WHOLE_BIAS, **alone)).explain()
    assert "gradient of bias  written by a separate kernel" in text
    assert "launches: 2" in text
