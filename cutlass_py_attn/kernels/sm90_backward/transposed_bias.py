"""Transposed bias: the bias tiles of transposed scores, which each consumer warp copies to shared memory ahead of time.

A warp has 16 keys of a tile, and copies the bias of these alone, so that only its own threads wait. ldmatrix transposes
the tile on its way to the registers, where each element is that of the same score. The next tile is copied while the
products of this one run.
"""

from dataclasses import replace
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import warp as warp_ops

from cutlass_py_attn.kernels.common import params, tile_copy
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.kernels.common.score_mod import ScoreMod, bias_of
from cutlass_py_attn.kernels.common.views import transposed
from cutlass_py_attn.kernels.common.wgmma import Wgmma, smem_tile_at
from cutlass_py_attn.kernels.sm90_common.score_tile import ScoreTile
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import MMA_ROWS, WARP_THREADS

LOADED_ROWS = 4  # queries of a thread in one ldmatrix


class TransposedBias:
    """The bias of one Build in shared memory: of one query block, in strips of the keys of a warp."""

    def __init__(self, build: Build) -> None:
        self.build, self.dtype = build, DTYPES[build.dtype]

    def tile(self) -> cute.Tensor:
        """Returns the tile of a query block, (queries, keys): strips of 16 keys with all queries."""
        build = self.build
        offset, shape = build.buffer("bias").offset, (build.block_queries, build.tile_n)
        return smem_tile_at(tile_copy.smem_base(build), offset, self.dtype, shape, width=MMA_ROWS * build.item_bytes)

    def load(self, p: Any, tile: ScoreTile, before: int) -> None:
        """Starts copying the bias of a warp's keys; zeros past the last query or key. All threads of a warp call this.

        before: threads of the block ahead of the consumer warps
        """
        thread = params.read_register("tid.x") - before
        lane, warp = thread % WARP_THREADS, thread // WARP_THREADS
        query0, key0 = tile.origin(self.build)
        seqlen = replace(tile.seqlen, index=params.opaque(tile.seqlen.index))
        source = bias_of(self.build, p, "bias", seqlen, tile.head, (query0, key0 + warp * MMA_ROWS))
        strip = cute.local_tile(self.tile(), (self.build.block_queries, MMA_ROWS), (0, warp))
        cute.arch.sync_warp()  # every thread has read the tile before
        tile_copy.copy_g2s(lane, WARP_THREADS, source, strip)
        cute.arch.cp_async_commit_group()

    def wait(self) -> None:
        """Waits for the copy."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()

    def partition(self, mma_qk: Wgmma, thread: Int32) -> "BiasPartition":
        """Returns a thread's part of the tile, in the layout of its scores."""
        op = warp_ops.LdMatrix8x8x16bOp(transpose=True, num_matrices=4)
        copy = cute.make_tiled_copy_C(cute.make_copy_atom(op, self.dtype), mma_qk.mma).get_slice(thread)
        values = cute.make_rmem_tensor(mma_qk.accumulator(thread).layout, self.dtype)
        return BiasPartition(values, copy, copy.partition_S(transposed(self.tile())))


class BiasPartition:
    """A thread's part of a bias tile."""

    def __init__(self, values: cute.Tensor, copy: Any, source: cute.Tensor) -> None:
        self.values, self.copy, self.source = values, copy, source
        words = cute.recast_ptr(values.iterator, dtype=Uint32)
        self.words = cute.make_tensor(words, cute.make_layout((2, cute.size(values) // 4)))
        self.pair: list[tuple[Any, Any]] = []

    def row(self, number: int, shape: Any) -> Any:
        """Returns the bias of one query, for `number` from 0 on; ldmatrix loads four queries of a thread at once."""
        if number % LOADED_ROWS == 0:
            at = number // LOADED_ROWS
            cute.copy(self.copy, self.source[None, 0, at], self.copy.retile(self.values)[None, 0, at])
        if number % 2 == 0:
            self.pair = [
                tile_copy.unpack_float32(self.words[i, number // 2], self.values.element_type) for i in range(2)
            ]
        found = cute.make_rmem_tensor(shape, Float32)
        for i in range(2):
            found[i] = self.pair[i][number % 2]
        return found.load()


class TransposedScoreMod(ScoreMod):
    """The score terms of one Build; `apply` receives a `BiasPartition`."""

    def bias_row(self, scores: cute.Tensor, part: BiasPartition, row: int) -> Any:
        return part.row(row, scores[row, None].layout.shape)
