"""Thread blocks of a cluster: how one block, or two that share their loads, synchronise, load and release tiles."""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.primitives as prim
from cutlass import Int16, Int32

from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.kernels.common import tile_copy, tma
from cutlass_py_attn.kernels.sm90_common import pipelines
from cutlass_py_attn.kernels.sm90_common.layout import tma_tiles
from cutlass_py_attn.kernels.sm90_common.pipelines import arrive
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.variants import CLUSTER

ALL_BLOCKS = (1 << CLUSTER) - 1  # multicast mask: one bit for each block of the cluster


class SingleCta:
    """One block that shares no loads: the counterpart of Cluster."""

    def __init__(self, build: Build) -> None:
        self.build = build

    def sync_barrier_init(self) -> None:
        """Makes the initialised mbarriers visible to all threads of the block."""
        pipelines.sync_barrier_init()

    def sync_exit(self) -> None:
        """Does nothing: no other block writes to this block's shared memory."""

    def load(self, pipe: Any, state: Any, name: str, source: Any, coordinates: tuple) -> None:
        """Waits for an empty stage and issues the copies of a tile. One warp calls this."""
        pipelines.load(self.build, pipe, state, name, source, coordinates)

    def release(self, pipe: Any, state: Any) -> None:
        """Releases a stage. One warp calls this."""
        pipe.consumer_release(state)

    def skip(self, pipe: Any, state: Any, count: int) -> Any:
        """Returns `state`: a block loads no tile that it does not read."""
        return state


class Cluster:
    """Two blocks that run at the same time and load tiles for both: of each tile, every second strip of columns each.

    A pipeline of shared tiles is empty when the consumers of both blocks have released a stage. Each block has its own
    full barrier.
    """

    def __init__(self, build: Build) -> None:
        self.build = build

    def rank(self) -> Int32:
        """Returns the rank of this block in its cluster."""
        return cute.arch.block_idx_in_cluster()

    def sync_barrier_init(self) -> None:
        """Makes the initialised mbarriers visible to both blocks."""
        cute.arch.mbarrier_init_fence()
        self.sync()

    def sync(self) -> None:
        """Waits until all threads of both blocks arrive."""
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    def sync_exit(self) -> None:
        """Waits for the other block, which may write to this block's shared memory until then."""
        self.sync()

    @cute.jit
    def load(self, pipe: Any, state: Any, name: cutlass.Constexpr, source: Any, coordinates: tuple):
        """Waits for a stage that is empty in both blocks and issues this block's strips of a tile, for both.

        One warp calls this.
        """
        build, rank = self.build, self.rank()
        pipe.producer_acquire(state)
        barrier = pipe.producer_get_barrier(state)
        base = tile_copy.smem_base(build)
        strips = tma.Strips.create(build, name, tma_tiles(build)[name], state.index)
        with cute.arch.elect_one():
            for pair in cutlass.range_constexpr(ceil_div(strips.count, CLUSTER)):
                strip = CLUSTER * pair + rank
                if strip < strips.count:
                    prim.cp_async_bulk_tensor_shared_cluster_global(
                        base + strips.smem_offset(strip),
                        source.get_ptr(),
                        [strips.column(strip), coordinates[0], coordinates[1], coordinates[2]],
                        barrier,
                        [],
                        multicast_mask=Int16(ALL_BLOCKS),
                    )

    def release(self, pipe: Any, state: Any) -> None:
        """Releases the stage of `state` in both blocks. One warp calls this."""
        self.release_stage(pipe, state.index)

    def release_stage(self, pipe: Any, stage: Int32) -> None:
        """Releases a stage in both blocks. One warp calls this."""
        self.release_remote(pipe, stage)
        arrive(pipe.sync_object_empty, stage)

    def release_remote(self, pipe: Any, stage: Int32) -> None:
        """Releases a stage in the other block. One warp calls this."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(pipe.sync_object_empty.get_barrier(stage), self.rank() ^ 1)

    @cute.jit
    def skip(self, pipe: Any, state: Any, count: Any):
        """Releases `count` tiles, which only the other block reads, as they arrive; returns the state after them."""
        for _ in cutlass.range(count, unroll=1):
            pipe.consumer_wait(state)
            self.release(pipe, state)
            state.advance()
        return state
