"""Block-sparse masks in JAX programs, by the reference on the host, against jax.numpy with every pair of the mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.block_sparse import BlockSparse
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.masks import Causal, Full, Mask
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape, Tensor

jax = pytest.importorskip("jax")
jnp = jax.numpy

from cutlass_py_attn.jax import attention, context_parallel_attention, partition  # noqa: E402

BATCH, QUERIES, KEYS, HEADS, HEADS_KEY, HEAD_DIM = 2, 70, 100, 4, 2, 8
BLOCK = 64, 32
RANDOM = np.random.default_rng(5)
QUERY = jnp.asarray(RANDOM.normal(size=(BATCH, QUERIES, HEADS, HEAD_DIM)), jnp.float32)
KEY, VALUE = (jnp.asarray(RANDOM.normal(size=(BATCH, KEYS, HEADS_KEY, HEAD_DIM)), jnp.float32) for _ in range(2))
BLOCKS = jnp.asarray(RANDOM.random((BATCH, HEADS_KEY, 2, 4)) < 0.6)
RANGES = KeyRanges.documents([0, 30, QUERIES], QUERIES, Causal())
WITHIN: dict[str, Mask | KeyRanges] = {"full": Full(), "causal": Causal(), "ranges": RANGES}


def ours(query: Any, key: Any, value: Any, mask: Any) -> Any:
    return attention(query, key, value, mask=mask, backend="reference")


def theirs(query: Any, key: Any, value: Any, blocks: Any, within: Mask | KeyRanges) -> Any:
    """Returns the output from the visibility of every pair; rows without keys are 0."""
    pairs = within.materialise(KEYS) if isinstance(within, KeyRanges) else within.materialise(QUERIES, KEYS)
    visible = jnp.repeat(jnp.repeat(blocks, BLOCK[0], 2), BLOCK[1], 3)[:, :, :QUERIES, :KEYS]
    visible = jnp.repeat(jnp.broadcast_to(visible, (BATCH, HEADS_KEY, QUERIES, KEYS)), HEADS // HEADS_KEY, 1) & pairs
    key, value = (jnp.repeat(array, HEADS // HEADS_KEY, 2) for array in (key, value))
    scores = jnp.where(visible, jnp.einsum("bqhd,bkhd->bhqk", query, key) / HEAD_DIM**0.5, -1e30)
    weights = jnp.where(visible.any(-1, keepdims=True), jax.nn.softmax(scores, -1), 0)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def expect_close(found: Any, wanted: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", WITHIN)
def test_output_and_derivatives(name: str) -> None:
    within = WITHIN[name]
    arguments = QUERY, KEY, VALUE
    expect_close(jax.jit(ours)(*arguments, BlockSparse(BLOCKS, BLOCK, within)), theirs(*arguments, BLOCKS, within))

    def ours_loss(*operands: Any) -> Any:
        return (ours(*operands, BlockSparse(BLOCKS, BLOCK, within)) ** 2).sum()

    def their_loss(*operands: Any) -> Any:
        return (theirs(*operands, BLOCKS, within) ** 2).sum()

    expect_close(jax.grad(ours_loss, (0, 1, 2))(*arguments), jax.grad(their_loss, (0, 1, 2))(*arguments))
    expect_close(jax.jvp(ours_loss, arguments, arguments), jax.jvp(their_loss, arguments, arguments))


def test_one_program_computes_with_all_blocks() -> None:
    traced = []

    @jax.jit
    def program(query: Any, mask: BlockSparse) -> Any:
        traced.append(1)
        return ours(query, KEY, VALUE, mask)

    for blocks in (BLOCKS, ~BLOCKS, jnp.zeros_like(BLOCKS)):
        expect_close(program(QUERY, BlockSparse(blocks, BLOCK, RANGES)), theirs(QUERY, KEY, VALUE, blocks, RANGES))
    assert len(traced) == 1


@pytest.mark.parametrize("axes", [(BATCH, HEADS_KEY), (1, HEADS_KEY), (BATCH, 1), (1, 1)])
def test_vmap_over_blocks(axes: tuple[int, int]) -> None:
    several = jnp.asarray(np.random.default_rng(7).random((3, *axes, 2, 4)) < 0.5)
    found = jax.vmap(lambda blocks: ours(QUERY, KEY, VALUE, BlockSparse(blocks, BLOCK)))(several)
    expect_close(found, jnp.stack([theirs(QUERY, KEY, VALUE, blocks, Full()) for blocks in several]))


def test_devices_that_share_a_key_head_have_their_own_blocks() -> None:
    """Sixteen query heads and two key heads over four devices: the blocks of every query head are split with them."""
    shape = Problem.dense("forward", Shape(1, 128, 128, 16, 8, 8, 2), "bfloat16")
    blocks = Tensor.contiguous((1, 16, 2, 4), "bool")
    problem = shape.replace(visible_blocks=blocks, block_size=BLOCK)
    whole, of_device = (partition.axes_of("visible_blocks", (1, heads, 2, 4), problem) for heads in (16, 4))
    assert whole[1] == of_device[1] == "num_heads"
    of_groups = shape.replace(visible_blocks=Tensor.contiguous((1, 2, 2, 4), "bool"), block_size=BLOCK)
    assert partition.axes_of("visible_blocks", (1, 2, 2, 4), of_groups)[1] == "num_heads_key"


def test_lists_and_csr_of_jax_arrays() -> None:
    counts, indices = BLOCKS.sum(-1), jnp.argsort(~BLOCKS, axis=-1, stable=True)
    assert (BlockSparse.lists(counts, indices, 4, BLOCK).visible_blocks == BLOCKS).all()
    rows, columns = np.nonzero(np.asarray(BLOCKS[0, 0]))
    indptr = np.searchsorted(rows, np.arange(3))
    assert (BlockSparse.csr(jnp.asarray(indptr), jnp.asarray(columns), 4, BLOCK).visible_blocks == BLOCKS[0, 0]).all()


def test_split_rows_take_no_blocks() -> None:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(NotSupported, match="must be None where the rows are split over devices"):
        context_parallel_attention(
            QUERY, KEY[:, :QUERIES], VALUE[:, :QUERIES], mesh=mesh, context_axis="x", mask=BlockSparse(BLOCKS, BLOCK)
        )
