"""Tests of the plans of few queries against a cache in pages: sizes do not decide the kernel, nor keys the grid."""

from __future__ import annotations

import dataclasses

import pytest

from cutlass_py_attn.kernels.decode import kernel as decode
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.variants import PERSISTENT
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.tensors import Tensor

ARCH = "sm_90"
BASE = "bf16_d128_q1_s8192_b64_h32k8_full_paged16"


def plan_of(name: str, arch: str = ARCH, *, invariant: bool = False) -> Plan:
    """Returns the best plan of a spec."""
    problem = parse(name).problem("forward")
    assert problem.pages is not None
    return planner.plan(problem.replace(pages=dataclasses.replace(problem.pages, invariant=invariant)), arch)


@pytest.mark.parametrize(
    "name",
    [
        "bf16_d128_q1_s8192_b64_h32k8_full_paged1",
        "bf16_d128_q1_s131072_b17_h32k8_full_paged256",
        "bf16_d128_q1_s0_b65_h8k2_full_paged8",
        "bf16_d128_q4_s1000_b129_h4k1_full_paged16",
    ],
)
def test_lengths_and_pages_do_not_decide_the_kernel(name: str) -> None:
    found, base = plan_of(name), plan_of(BASE)
    assert found.build == base.build
    assert found.build.variant == PERSISTENT


@pytest.mark.parametrize(("batch", "tile_n"), [(1, 128), (16, 128), (17, 64), (64, 64)])
def test_few_rows_have_a_tile_of_more_keys(batch: int, tile_n: int) -> None:
    name = f"bf16_d128_q1_s8192_b{batch}_h32k8_full_paged16"
    assert plan_of(name).build.tile_n == tile_n
    assert plan_of(name, invariant=True).build.tile_n == 64  # the same in any batch


def test_strides_and_the_form_of_the_table_do_not_decide_the_kernel() -> None:
    problem = parse(BASE).problem("forward")
    pages, heads = problem.key.shape[0], problem.key.shape[2]
    pool = Tensor(problem.key.shape, (2 * heads * 16 * 128, 128, 16 * 128, 1), "bfloat16")  # HND, combined
    csr = dataclasses.replace(problem.pages, page_table=Tensor.contiguous((pages,), "int32"), page_indptr=True)
    assert planner.plan(problem.replace(key=pool, value=pool, pages=csr), ARCH).build == plan_of(BASE).build


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("bf16_d128_q4_s8192_b64_h32k8_causal_br_paged16", 16),
        ("bf16_d128_q8_s8192_b64_h32k8_causal_br_paged16", 32),
        ("bf16_d128_q16_s8192_b64_h32k8_causal_br_paged16", 64),
        ("bf16_d128_q32_s8192_b64_h32k8_causal_br_paged16", 64),
        ("f16_d256_q1_s8192_b64_h8_full_paged1", 16),
        ("f32_d64_q2_s8192_b64_h8_window_left100_right0_paged1", 16),
        ("bf16_d64_n1x40u3,5x90u0_h8k2_full_softcap4_alibi_sinks_paged32", 32),
    ],
)
def test_what_the_kernel_takes(name: str, rows: int) -> None:
    found = plan_of(name)
    assert (found.build.family, found.build.variant, found.build.tile_m) == ("decode", PERSISTENT, rows)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bf16_d128_q33_s64_b2_h32k8_full_paged16", "more than 128 queries of a group of heads"),
        ("f32_d256_q1_s64_b2_h8_full_paged16", "head dims beyond 128"),
        ("bf16_d3_q1_s64_b2_h8_full_paged16", "rows aligned to less than 4 bytes"),
    ],
)
def test_what_the_kernel_does_not_take(name: str, reason: str) -> None:
    assert reason in decode.unsupported_features(parse(name).problem("forward"))


def test_a_problem_without_pages_has_other_kernels() -> None:
    problem = parse(BASE.removesuffix("_paged16")).problem("forward")
    assert PERSISTENT not in {plan.build.variant for plan in planner.plans(problem, ARCH)}


def numbers(found: Plan) -> dict[str, int]:
    """Returns the numbers of the schedule."""
    return {name: dict(found.params)[name] for name in ("num_teams", "team_rows", "chunk_tiles", "least_chunks")}


def test_the_longest_sequence_changes_neither_grid_nor_workspace() -> None:
    short, long = plan_of("bf16_d128_q1_s1024_b256_h32k8_full_paged16"), plan_of(
        "bf16_d128_q1_s131072_b256_h32k8_full_paged16"
    )  # fmt: skip
    assert short.launches == long.launches
    assert short.workspace == long.workspace
    assert short.launches[0].grid == (264, 1, 1)  # two blocks on each of 132 SMs
    assert numbers(short) == {"num_teams": 33, "team_rows": 8, "chunk_tiles": 1, "least_chunks": 4}


@pytest.mark.parametrize(("heads", "team"), [("h8", 8), ("h4", 4), ("h32k1", 1), ("h6", 2), ("h64", 8), ("h5", 1)])
def test_a_team_has_a_block_for_each_row_of_a_group(heads: str, team: int) -> None:
    found = plan_of(f"bf16_d128_q1_s8192_b200_{heads}_full_paged16")
    assert numbers(found)["team_rows"] == team
    assert found.launches[0].grid[0] == numbers(found)["num_teams"] * team


def test_few_keys_need_few_blocks() -> None:
    found = plan_of("bf16_d128_q1_s200_b1_h32k8_full_paged16")
    assert found.launches[0].grid[0] <= 16


def test_fixed_chunks_have_slots_for_every_chunk() -> None:
    found = plan_of(BASE, invariant=True)
    assert dict(found.params)["fixed_chunks"] == 1
    assert dict(found.params)["chunk_tiles"] * found.build.tile_n == decode.FIXED_CHUNK
    slots = 64 * 8 * (8192 // decode.FIXED_CHUNK + 1)
    sizes = {buffer.name: buffer.bytes for buffer in found.workspace.buffers}
    assert sizes == {
        "partial_output": slots * 16 * 128 * 4, "partial_logsumexp": slots * 16 * 4, "schedule": 65 * 4,
    }  # fmt: skip


@pytest.mark.parametrize("queries", [1, 4, 16, 32])
def test_the_count_of_queries_does_not_change_the_tile_of_fixed_chunks(queries: int) -> None:
    found = plan_of(f"bf16_d128_q{queries}_s8192_b64_h32k8_full_paged16", invariant=True)
    assert (found.build.tile_m, found.build.warps) == (16, plan_of(BASE, invariant=True).build.warps)


def test_the_struct_ends_with_the_fields_of_pages() -> None:
    fields = abi.fields_of(plan_of(BASE).build)
    assert fields[-len(abi.PAGED) :] == abi.PAGED
    packed = abi.fields_of(plan_of("bf16_d128_n1x64u3,4x90u3_h32k8_full_paged16").build)
    assert packed[-len(abi.PAGED) :] == abi.PAGED
    assert set(abi.VARLEN) < set(packed)


def test_numbers_come_from_shapes() -> None:
    found = dict(plan_of("bf16_d128_q1_s1000_b3_h32k8_full_paged8").params)
    assert {name: found[name] for name, kind in abi.PAGED if kind == "i32"} == {
        "page_size": 8, "max_pages": 125, "table_entries": 375, "num_pages": 376,
    }  # fmt: skip
    assert found["num_keys"] == 1000


def test_explain_says_what_is_read_on_the_device() -> None:
    text = plan_of(BASE).explain()
    assert "pages: 32769 of 16 rows, at most 512 of a sequence; table and lengths are read on the device" in text
    assert "teams: 33 of 8 blocks, one a row, share the chunks of 64 keys of all sequences, as equal shares" in text
    assert "reason: persistent decode kernel" in text
