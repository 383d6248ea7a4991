"""Chunk ring: columns of key and value tiles in shared memory, each loaded by TMA for both blocks of a cluster.

Chunks are numbered in the order of their use. Chunk number i lies in stage i modulo the stages. Its full barrier counts
its bytes in this block, its empty barrier the warps of both blocks that have read it.

A stage has a full barrier for each warpgroup. A wait tells only whether the number of completed phases is even or odd,
so that a warpgroup must have waited for every earlier phase. It never waits for a chunk that the other reads, and TMA
completes loads in any order.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.primitives as prim
from cutlass import Int16, Int32

from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.kernels.common import tile_copy
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.kernels.common.wgmma import smem_tile_at
from cutlass_py_attn.kernels.sm90_common.cluster import ALL_BLOCKS
from cutlass_py_attn.kernels.sm90_common.pipelines import first_barrier
from cutlass_py_attn.kernels.sm90_wide import layout as sm90_wide
from cutlass_py_attn.launch.build import WIDE_COLUMN_MULTIPLE, Build
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_WARPS
from cutlass_py_attn.launch.variants import CLUSTER


class ChunkRing:
    """The ring of one Build. Its barriers are the first of the plan's: full ones of each warpgroup, then empty ones.

    start: where the stages begin in shared memory (bytes)
    stages: their number
    most_stages: for how many stages there are barriers; 0 for as many as there are stages
    """

    def __init__(self, build: Build, start: int, stages: int, most_stages: int = 0) -> None:
        self.build, self.start, self.stages, self.most_stages = build, start, stages, most_stages or stages
        self.strip_bytes = build.tile_n * WIDE_COLUMN_MULTIPLE * build.item_bytes
        self.stage_bytes = build.tile_n * sm90_wide.chunk_columns(build) * build.item_bytes

    def create(self) -> None:
        """Initialises the barriers. One thread calls this."""
        for stage in range(self.most_stages):
            for warpgroup in range(sm90_wide.WARPGROUPS):
                cute.arch.mbarrier_init(self._full(stage, warpgroup), 1)
            cute.arch.mbarrier_init(self._empty(stage), WARPGROUP_WARPS * CLUSTER)

    def phases(self) -> cute.Tensor:
        """Returns what a warpgroup keeps of its full barriers: a bit for each stage, the parity of the next phase."""
        found = cute.make_rmem_tensor(1, Int32)
        found.fill(0)
        return found

    def tiles(self) -> cute.Tensor:
        """Returns all stages in shared memory, (keys, columns of a chunk, stages)."""
        build, base = self.build, tile_copy.smem_base(self.build)
        shape = build.tile_n, sm90_wide.chunk_columns(build)
        return smem_tile_at(base, self.start, DTYPES[build.dtype], shape, self.stages)

    @cute.jit
    def load(self, source: Any, chunks: cutlass.Constexpr, first: Int32, coordinates: tuple, reader: Int32):
        """Loads the chunks of a tile, which have numbers from `first` on: this block's strips of each, for both blocks.

        coordinates: of the tile, from `tma.tile_coordinates`. reader: the warpgroup that reads them. One warp calls it.
        """
        base = tile_copy.smem_base(self.build)
        for index in cutlass.range_constexpr(len(chunks)):
            number, chunk = first + index, chunks[index]
            stage = number % self.stages
            cute.arch.mbarrier_wait(self._empty(stage), ((number // self.stages) & 1) ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(self._full(stage, reader), chunk.strips * self.strip_bytes)
                # Of an odd number of strips the blocks load the additional one in turns.
                rank = cute.arch.block_idx_in_cluster() ^ (number & 1)
                for pair in cutlass.range_constexpr(ceil_div(chunk.strips, CLUSTER)):
                    strip = CLUSTER * pair + rank
                    if strip < chunk.strips:
                        offset = self.start + stage * self.stage_bytes + strip * self.strip_bytes
                        prim.cp_async_bulk_tensor_shared_cluster_global(
                            base + cute.assume(offset, divby=1024),
                            source.get_ptr(),
                            [Int32(chunk.first + strip * WIDE_COLUMN_MULTIPLE), *map(Int32, coordinates)],
                            self._full(stage, reader),
                            [],
                            multicast_mask=Int16(ALL_BLOCKS),
                        )

    def wait(self, number: Int32, reader: int, phases: cute.Tensor) -> Int32:
        """Waits for a chunk of warpgroup `reader`, which keeps `phases`; returns its stage."""
        stage = number % self.stages
        cute.arch.mbarrier_wait(self._full(stage, reader), (phases[0] >> stage) & 1)
        phases[0] = phases[0] ^ (Int32(1) << stage)
        return stage

    def release(self, number: Int32) -> None:
        """Releases a chunk in both blocks. All threads of a warp call this."""
        empty = self._empty(number % self.stages)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty)
            cute.arch.mbarrier_arrive(empty, cute.arch.block_idx_in_cluster() ^ 1)

    def next_barrier(self) -> cute.Pointer:
        """Returns the first of the plan's barriers behind those of the ring."""
        return first_barrier(self.build) + (sm90_wide.WARPGROUPS + 1) * self.most_stages

    def _full(self, stage: Any, reader: Any) -> cute.Pointer:
        return first_barrier(self.build) + (reader * self.most_stages + stage)

    def _empty(self, stage: Any) -> cute.Pointer:
        return first_barrier(self.build) + (sm90_wide.WARPGROUPS * self.most_stages + stage)
