"""Tests of block-sparse masks: what they show, their constructors, calls of the reference, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.errors import DoesNotFit
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem.block_sparse import BlockSparse, undivided
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Mask
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape, Tensor
from cutlass_py_attn.runtime.binding import _problem_mismatches
from tests.support.refusals import expect_raised

BATCH, QUERIES, KEYS, HEADS, HEADS_KEY, HEAD_DIM = 2, 70, 100, 4, 2, 8
BLOCK = 64, 32
RANDOM = np.random.default_rng(3)
QUERY = RANDOM.normal(size=(BATCH, QUERIES, HEADS, HEAD_DIM)).astype(np.float32)
KEY, VALUE = RANDOM.normal(size=(2, BATCH, KEYS, HEADS_KEY, HEAD_DIM)).astype(np.float32)
RANGES = KeyRanges.documents([0, 20, QUERIES], QUERIES, Causal())
WITHIN: dict[str, Mask | KeyRanges] = {
    "full": Full(), "causal": Causal(), "causal_br": CausalBottomRight(30), "ranges": RANGES,
}  # fmt: skip
IN_MEMORY = "ranges of keys, visible blocks or a mask function"
COUNTS, INDICES = np.array([[[1, 2]]]), np.array([[[[2, 0], [1, 0]]]])


def pairs_of(blocks: np.ndarray[Any, Any], within: Mask | KeyRanges) -> np.ndarray[Any, Any]:
    """Returns (batch, num_heads, queries, keys): the blocks as pairs, and what they are within."""
    of_heads = np.repeat(blocks, HEADS // blocks.shape[1], axis=1)
    pairs = np.kron(of_heads, np.ones(BLOCK, bool))[:, :, :QUERIES, :KEYS]
    band = within.materialise(KEYS) if isinstance(within, KeyRanges) else within.materialise(QUERIES, KEYS)
    visible: np.ndarray[Any, Any] = np.broadcast_to(pairs & band, (BATCH, HEADS, QUERIES, KEYS))
    return visible


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64])
@pytest.mark.parametrize("axes", [(1, 1), (BATCH, 1), (1, HEADS_KEY), (BATCH, HEADS_KEY)])
@pytest.mark.parametrize("name", WITHIN)
def test_a_call_is_that_of_a_bias(name: str, axes: tuple[int, int], dtype: Any) -> None:
    within = WITHIN[name]
    blocks = np.random.default_rng(5).random((*axes, 2, 4)) < 0.5
    mask, visible = BlockSparse(blocks.astype(dtype), BLOCK, within), pairs_of(blocks, within)
    assert (mask.materialise(BATCH, HEADS, QUERIES, KEYS) == visible).all()
    bias = np.where(visible, 0, -np.inf).astype(np.float32)
    results = []
    for options in ({"mask": mask}, {"bias": bias}):
        forward = attention_forward(QUERY, KEY, VALUE, backend="reference", **options)
        gradients = attention_backward(forward[0], QUERY, KEY, VALUE, *forward, backend="reference", **options)
        results.append([*forward, gradients.query, gradients.key, gradients.value])
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_a_forward_takes_blocks_of_every_query_head() -> None:
    blocks = np.random.default_rng(7).random((1, HEADS, 2, 4)) < 0.5
    bias = np.where(pairs_of(blocks, Full()), 0, -np.inf).astype(np.float32)
    mask = BlockSparse(blocks, BLOCK)
    output, logsumexp = attention_forward(QUERY, KEY, VALUE, mask=mask, backend="reference")
    expected, _ = attention_forward(QUERY, KEY, VALUE, bias=bias, backend="reference")
    np.testing.assert_allclose(output, expected, atol=1e-5)
    arguments = output, QUERY, KEY, VALUE, output, logsumexp
    expect_raised(
        lambda: attention_backward(*arguments, mask=mask, backend="reference"),
        ["visible_blocks.shape: (1 or 2, 1 or 2, 2, 4)"],
    )


def test_lists() -> None:
    blocks = np.random.default_rng(9).random((BATCH, HEADS_KEY, 3, 5)) < 0.4
    indices = np.argsort(~blocks, axis=-1, kind="stable")
    indices[np.arange(5) >= blocks.sum(-1)[..., None]] = 99  # unused entries may be anything
    assert (BlockSparse.lists(blocks.sum(-1), indices, 5).visible_blocks == blocks).all()
    assert BlockSparse.lists(COUNTS * 0, INDICES, 3).visible_blocks.sum() == 0


def test_csr() -> None:
    blocks = np.random.default_rng(11).random((4, 6)) < 0.4
    indptr, indices = np.concatenate([[0], blocks.sum(1).cumsum()]), np.nonzero(blocks)[1]
    assert (BlockSparse.csr(indptr, indices, 6).visible_blocks == blocks[None, None]).all()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: BlockSparse.lists(COUNTS * 1.5, INDICES, 3), ["counts.dtype: integers"]),
        (lambda: BlockSparse.lists(COUNTS[0], INDICES, 3), ["counts.shape: (batch, num_heads, blocks of queries)"]),
        (lambda: BlockSparse.lists(COUNTS[:, :, :1], INDICES, 3), ["counts.shape: without the last"]),
        (lambda: BlockSparse.lists(COUNTS, INDICES, -1), ["num_key_blocks: at least 0"]),
        (lambda: BlockSparse.lists(COUNTS, INDICES, 2), ["indices: from 0 to 1"]),
        (lambda: BlockSparse.lists(None, INDICES, 2), ["counts: integers"]),
        (lambda: BlockSparse.csr(np.array([0.0, 1]), np.array([0]), 2), ["indptr.dtype: integers"]),
        (lambda: BlockSparse.csr(np.array([0, 2]), np.array([0]), 2), ["indptr: ascend from 0 to the 1 entries"]),
        (lambda: BlockSparse.csr(np.array([0, 2, 1]), np.array([0, 1]), 2), ["indptr: ascend from 0"]),
        (lambda: BlockSparse.csr(np.array([0, 1]), np.array([3]), 2), ["indices: from 0 to 1"]),
    ],
)
def test_refused_constructors(make: Any, expected: list[str]) -> None:
    expect_raised(make, expected)


@pytest.mark.parametrize("block_size", [[64, 32], (np.int64(64), np.int32(32))])
def test_block_sizes_of_other_kinds(block_size: Any) -> None:
    blocks = np.ones((1, 1, 2, 4), bool)
    results = [
        attention_forward(QUERY, KEY, VALUE, mask=BlockSparse(blocks, size), backend="reference")[0]
        for size in (BLOCK, block_size)
    ]
    assert (results[0] == results[1]).all()


def problem_of(head_dim: int = 64, block_size: tuple[int, int] = (128, 128), direction: str = "forward") -> Problem:
    """Returns a problem with visible blocks."""
    shape = Shape(2, 1024, 1024, 4, head_dim, head_dim, 2)
    sizes = 1, 1, *shape.visible_blocks(block_size)[2:]
    problem = Problem.dense(direction, shape, "bfloat16")
    return problem.replace(visible_blocks=Tensor.contiguous(sizes, "bool"), block_size=block_size)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"block_size": (100, 128)}, ["block_size: multiples of 64"]),
        ({"dropout_p": 0.5}, [f"visible_blocks: dropout together with {IN_MEMORY}"]),
        (
            {"arch": "sm_80"},
            [f"visible_blocks: no kernel of sm_80 takes {IN_MEMORY}"],
        ),
    ],
)
def test_what_no_kernel_takes(changes: dict[str, Any], expected: list[str]) -> None:
    block_size = changes.pop("block_size", (128, 128))
    arch = changes.pop("arch", "sm_90a")
    problem = problem_of(block_size=block_size).replace(**changes)
    assert not problem.refusals()
    expect_raised(lambda: planner.plan(problem, arch), expected)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("block_size", [(64, 64), (64, 128), (128, 64), (128, 128), (192, 256), (320, 64)])
def test_tiles_divide_blocks(block_size: tuple[int, int], head_dim: int, direction: str) -> None:
    for plan in planner.plans(problem_of(head_dim, block_size, direction), "sm_90a"):
        assert not [*undivided(block_size, plan.build.tile_m, plan.build.tile_n)]


def test_a_tile_of_the_caller_divides_blocks() -> None:
    tile = TileConfig.parse("192x128x16:2-speculative")
    with pytest.raises(DoesNotFit, match="tile_m = 192"):
        planner.plan_with_tile(problem_of(), "sm_90a", tile)


def test_plans_of_other_blocks_and_ranges_are_not_bound() -> None:
    edge = Tensor.contiguous((1, 1, 1024), "int32")
    dense = Problem.dense("forward", problem_of().shape, "bfloat16")
    wide = planner.plan(dense.replace(key_start=edge, key_end=edge), "sm_90a")
    assert wide.build.tile_m == 192
    assert any("must divide the 128 of block_size" in text for text in _problem_mismatches(wide, problem_of()))
    several = Tensor.contiguous((2, 4, 1024), "int32")
    mismatches = [*_problem_mismatches(wide, dense.replace(key_start=several, key_end=several))]
    assert [text.partition(" = ")[0] for text in mismatches] == ["problem.ranges_batch", "problem.ranges_heads"]
