"""Tests of plan/grad_bias_smem.py: the shared memory of the separate grad_bias kernel holds what it loads."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cutlass_py_attn.plan import grad_bias_smem
from cutlass_py_attn.plan.arch import architecture
from cutlass_py_attn.plan.planner import plan
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.tensors import F32_BYTES


@pytest.mark.parametrize("name", ["f16_d64", "bf16_d33v17", "f32_d128", "f16_d512"])
def test_every_buffer_has_the_bytes_of_its_tile(name: str) -> None:
    build = plan(parse(f"{name}_q200_s300_b2_h4_full_bias11qksum").problem("backward"), "sm_80").build
    assert build.grad_bias_mode not in ("", "main")
    chunk = grad_bias_smem.grad_bias_chunk(build)
    assert chunk * build.item_bytes <= grad_bias_smem.CHUNK_ROW_BYTES[0]
    found = {buffer.name: buffer for buffer in grad_bias_smem.grad_bias_build(build).shared_memory}
    # Rows of float32 are padded.
    scores = build.tile_m * build.tile_n * build.item_bytes
    least = {
        "left": max(2 * build.tile_m * chunk * build.item_bytes, scores),
        "right": 2 * build.tile_n * chunk * build.item_bytes,
        "bias": scores,
        "logsumexp": build.tile_m * F32_BYTES,
        "delta": build.tile_m * F32_BYTES,
    }
    assert found.keys() == least.keys()
    assert all(size <= found[buffer].bytes <= 1.2 * size for buffer, size in least.items())
    placed = sorted(found.values(), key=lambda buffer: buffer.offset)
    # Two buffers at one place are never in use at the same step.
    for one, other in pairwise(placed):
        assert one.offset + one.bytes <= other.offset or one.last < other.first or other.last < one.first
    assert max(buffer.offset + buffer.bytes for buffer in placed) <= architecture("sm_80").shared_memory_per_block
