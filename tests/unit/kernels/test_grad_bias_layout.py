"""Tests of grad_bias_layout.py: which separate grad_bias kernel a build has, and its tile and shared memory."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cutlass_py_attn.kernels.backward_parts import grad_bias_layout as grad_bias_smem
from cutlass_py_attn.kernels.sm90_common.layout import num_stages, tma_tiles
from cutlass_py_attn.launch import entry_points
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.grad_bias import uses_wgmma
from cutlass_py_attn.plan import entry_parameters
from cutlass_py_attn.plan.plan import Plan
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


def planned(name: str) -> Plan:
    """The plan of a backward on an H100."""
    return plan(parse(name).problem("backward"), "sm_90a", 132)


@pytest.mark.parametrize(
    ("name", "has_wgmma"),
    [
        ("bf16_d128_s512_b2_h4k2_causal_biassum", True),
        ("f16_d64_s512_b2_h4_full_biasb1qksum", True),
        ("bf16_d32_s256_b64_h4_full_biassum", True),
        ("bf16_d96_s512_b2_h4_full_bias11qksum_sinks", True),
        ("bf16_d64_n100x200,300x304_h2_causal_biassum", True),
        ("bf16_d64_s512_b2_h4_causal_br_window100_biassum", True),
        ("bf16_d128_s512_b2_h4_full_biasbh1ksum", False),
        ("bf16_d128_s510_b2_h4_full_biassum", False),
        ("bf16_d128_s512_b2_h4_full_biassum_dropout0.1", False),
        ("bf16_d64_s512_b2_h4_full_biasgrad_softcap4", False),
        ("bf16_d128_s512_b2_h4_full_biassum_alibi", False),
        ("bf16_d192v128_s512_b2_h4_full_biassum", False),
    ],
)
def test_sm90_backwards_have_a_kernel_of_their_own_for_sums(name: str, has_wgmma: bool) -> None:
    found = planned(name)
    assert found.build.family == "sm90"
    assert uses_wgmma(found.build) is has_wgmma
    own = grad_bias_smem.grad_bias_build(found.build)
    launch = next(each for each in found.launches if each.symbol == entry_points.entries(found.build)["bias"])
    assert launch.block == (own.threads, 1, 1)
    assert launch.shared_memory_bytes == own.shared_memory_bytes <= architecture("sm_90a").shared_memory_per_block
    maps = [each.box[1] for each in launch.tensor_maps]
    assert maps == ([rows for rows, _ in tma_tiles(own).values()] if has_wgmma else [])
    parameters = [size for _, size in entry_parameters.parameters(found.build, "bias")]
    assert len(parameters) == len(maps) + 1
    if has_wgmma:
        assert own.family == "sm90"
        assert launch.grid[1:] == (1, 1), "persistent blocks"
        assert num_stages(own)["query"] == num_stages(own)["key"]
    else:
        assert (own.family, own.tile_m) == ("sm80", found.build.tile_m), "rows of which delta has statistics"


@pytest.mark.parametrize("name", ["bf16_d128_s512_b2_h4_full_biassum", "bf16_d64_s512_b2_h4_full_biassum"])
def test_the_wgmma_kernel_has_as_many_stages_as_fit(name: str) -> None:
    stages = num_stages(grad_bias_smem.grad_bias_build(planned(name).build))
    assert (stages["query"], stages["grad_output"]) == ((2, 2) if "d64" in name else (2, 1))


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("bf16_d128_s4096_b4_h16_full_biassum", 132),
        ("bf16_d128_s256_b4_h3_full_biassum", 2 * 2 * 3),
        ("bf16_d64_q100_s304_b4_h3_full_bias11qksum", 3 * 3),
        ("bf16_d64_s256_b128_h8_full_biassum", 32 * 4),
        ("bf16_d64_q100_s304_b4_h3_full_biasb1qksum", 3 * 4),
    ],
)
def test_wgmma_blocks_share_tiles_of_the_gradient_if_these_are_few(name: str, blocks: int) -> None:
    found = planned(name)
    assert found.launches[-1].grid == (blocks, 1, 1)
    sizes = {buffer.name: buffer.bytes for buffer in found.workspace.buffers}
    tiles = {9: 3, 128: 32}.get(blocks, 0)
    assert sizes.get("grad_bias_parts", 0) == (blocks * 128 * 128 * F32_BYTES if tiles else 0)
    assert sizes.get("grad_bias_counts", 0) == tiles * 8 * 4
    assert found.workspace.zero_bytes >= sizes.get("grad_bias_counts", 0)


@pytest.mark.parametrize("name", ["bf16_d128_s512_b2_h4_full_biasbhq1sum", "bf16_d32_s512_b2_h4_full_biassum_alibi"])
def test_the_sm80_family_keeps_a_bias_that_is_loaded_by_elements_and_narrow_heads(name: str) -> None:
    assert planned(name).build.family == "sm80"
