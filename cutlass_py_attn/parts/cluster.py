"""Cluster: two blocks that run together and load what both need, every second strip of a tile each."""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.primitives as prim
from cutlass import Int16, Int32

from cutlass_py_attn.gemm.plans import swizzle_bytes
from cutlass_py_attn.hopper import CLUSTER, loaded_tiles
from cutlass_py_attn.parts.integers import ceil_div
from cutlass_py_attn.parts.pipes import arrive
from cutlass_py_attn.plan import Build

BOTH = (1 << CLUSTER) - 1  # blocks that a copy goes to, a bit for each


class Cluster:
    """The two blocks of one Build. A pipe of what both load is empty when the readers of both have given a slot back;
    each block's own barrier says when a tile is full."""

    def __init__(self, build: Build) -> None:
        self.build = build

    def rank(self) -> Int32:
        """This block's place in its cluster."""
        return cute.arch.block_idx_in_cluster()

    def meet(self) -> None:
        """Both blocks see the barriers."""
        cute.arch.mbarrier_init_fence()
        self.part()

    def part(self) -> None:
        """Neither block ends while the other may write to its shared memory."""
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def fetch(self, pipe: Any, state: Any, name: cutlass.Constexpr, source: Any, at: tuple):
        """Wait for a slot in both blocks and ask for this one's strips of a tile, for both; a warp calls this."""
        build, rank = self.build, self.rank()
        pipe.producer_acquire(state)
        barrier = pipe.producer_get_barrier(state)
        rows, columns = loaded_tiles(build)[name]
        width = swizzle_bytes(columns)
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        start = build.buffer(name).offset + state.index * (rows * columns * build.item_bytes)
        strips = columns * build.item_bytes // width
        with cute.arch.elect_one():
            for pair in cutlass.range_constexpr(ceil_div(strips, CLUSTER)):
                strip = CLUSTER * pair + rank
                if strip < strips:
                    place = base + cute.assume(start + strip * (rows * width), divby=1024)
                    corner = [strip * (width // build.item_bytes), at[0], at[1], at[2]]
                    prim.cp_async_bulk_tensor_shared_cluster_global(
                        place, source.get_ptr(), corner, barrier, [], multicast_mask=Int16(BOTH)
                    )

    def release(self, pipe: Any, slot: Int32) -> None:
        """A warp gives a slot back in both blocks."""
        self.release_there(pipe, slot)
        arrive(pipe.sync_object_empty, slot)

    def release_there(self, pipe: Any, slot: Int32) -> None:
        """A warp gives a slot back in the other block."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(pipe.sync_object_empty.get_barrier(slot), self.rank() ^ 1)
