"""sm90 backward of wide heads, head dims 257 to 512: blocks of dQ, of dK and of dV, each of 64 rows of its gradient.

dK and dV of 64 keys would take all registers of an SM, so one block cannot compute both. Each block computes one
gradient (gradient.py), and the scores for it again: 8 products in place of 5, no sum in memory, and the same bits
in every run. The two blocks of a cluster have neighbouring tiles of a head and visit the same tiles: those of both.
The grid has, for each key head, a cluster for each pair of key tiles for dK, the same for dV, and a cluster for each
pair of query tiles of each of its query heads for dQ; under a mask the longest come first.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as tensor_maps
from cutlass import GridConstant, Int32

from cutlass_py_attn.integers import ceil_div, larger
from cutlass_py_attn.kernels.backward_parts import chain as backward_chain
from cutlass_py_attn.kernels.common import dependent_launch, params, seqlen_info, tma
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.kernels.sm90_common.cluster import Cluster
from cutlass_py_attn.kernels.sm90_common.layout import tma_tiles
from cutlass_py_attn.kernels.sm90_common.tile_scheduler import WorkTile
from cutlass_py_attn.kernels.sm90_wide.backward_layout import GRAD_KEY, GRAD_QUERY, GRAD_VALUE
from cutlass_py_attn.kernels.sm90_wide.gradient import WideGradient
from cutlass_py_attn.kernels.sm90_wide.layout import registers
from cutlass_py_attn.launch import tile_order
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_THREADS
from cutlass_py_attn.launch.variants import CLUSTER


class WideBackwardSm90:
    """The main kernel of one Build of variant wide; `backward_chain.MainKernel`."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.dtype = DTYPES[build.dtype]
        self.cluster = Cluster(build)
        self.query, self.key, self.value = (
            WideGradient(build, gradient) for gradient in (GRAD_QUERY, GRAD_KEY, GRAD_VALUE)
        )
        self.ring = self.value.ring  # with the most stages; all rings have the same barriers
        self.registers = registers(build)

    @cute.jit
    def launch(self, values: tuple, grid: tuple):
        """Names and launches the kernel."""
        params.set_entry_name(self.build, self.kernel)
        p = params.from_values(self.build, values)
        tiles = tma_tiles(self.build).items()
        maps = tuple(tma.placeholder_map(p, getattr(p, name), self.dtype, *tile) for name, tile in tiles)
        block, cluster_shape = (self.build.threads, 1, 1), (CLUSTER, 1, 1)
        self.kernel(*maps, p).launch(grid=grid, block=block, cluster=cluster_shape, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        map_q: GridConstant[tensor_maps.TensorMap],
        map_do: GridConstant[tensor_maps.TensorMap],
        map_k: GridConstant[tensor_maps.TensorMap],
        map_v: GridConstant[tensor_maps.TensorMap],
        p: Any,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                self.ring.create()
                cute.arch.mbarrier_init(self.ring.next_barrier(), 1)
        self.cluster.sync_barrier_init()
        dependent_launch.wait_for_previous(self.build, "main")
        warpgroup = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        if warpgroup == 0:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 0:
                self.load(p, {"query": map_q, "grad_output": map_do, "key": map_k, "value": map_v})
        else:
            cute.arch.setmaxregister_increase(self.registers[-1])
            if warpgroup == 1:
                self.mma(p, 0, thread - WARPGROUP_THREADS)
            else:
                self.mma(p, 1, thread - 2 * WARPGROUP_THREADS)
        self.cluster.sync_exit()

    def load(self, p: Any, maps: dict[str, Any]) -> None:
        """Producer warp: loads the tiles of this block's gradient."""
        self.of_gradient(p, lambda gradient, work: gradient.load(p, work, maps))

    def mma(self, p: Any, warpgroup: int, thread: Int32) -> None:
        """One of both warpgroups: its columns of this block's gradient."""
        self.of_gradient(p, lambda gradient, work: gradient.mma(p, work, warpgroup, thread))

    @cute.jit
    def of_gradient(self, p: Any, run: cutlass.Constexpr[Callable]):
        """Calls `run` with this block's gradient and work tile, if the sequence has the tile."""
        block, key_head, batch = cute.arch.block_idx()
        cluster, key_pairs = block // CLUSTER, ceil_div(p.num_keys, CLUSTER * self.build.tile_n)
        seqlen = seqlen_info.create(self.build, p, batch + p.first_batch)
        band = seqlen_info.band(self.build, p, seqlen)
        key_head = key_head + p.first_head
        if cluster < key_pairs:
            self.of_keys(self.key, run, seqlen, band, key_head, cluster)
        elif cluster < 2 * key_pairs:
            self.of_keys(self.value, run, seqlen, band, key_head, cluster - key_pairs)
        else:
            self.of_queries(p, run, seqlen, band, key_head, cluster - 2 * key_pairs)

    @cute.jit
    def of_keys(
        self,
        gradient: cutlass.Constexpr,
        run: cutlass.Constexpr,
        seqlen: Any,
        band: Any,
        head: Int32,
        pair: Int32,
    ):
        """Calls `run` for dK or dV of this block's key tile, and the query tiles that both blocks visit."""
        build = self.build
        if pair * CLUSTER * build.tile_n < seqlen.stored_keys:
            first, end = tile_order.nonempty_query_tiles(band, pair, build.tile_m, CLUSTER * build.tile_n)
            run(gradient, WorkTile(seqlen, band, head, CLUSTER * pair + self.cluster.rank(), first, end))

    @cute.jit
    def of_queries(self, p: Any, run: cutlass.Constexpr, seqlen: Any, band: Any, key_head: Int32, number: Int32):
        """Calls `run` for dQ of this block's query tile, and the key tiles that both blocks visit."""
        build = self.build
        pairs = ceil_div(p.num_queries, CLUSTER * build.tile_m)
        pair, head = number % pairs, key_head
        if cutlass.const_expr(build.has("grouped")):
            head = key_head * p.group + number // pairs
        if cutlass.const_expr(not build.form.sees_all):
            pair = pairs - 1 - pair
        if pair * CLUSTER * build.tile_m < seqlen.num_queries:
            shape = band, pair, CLUSTER * build.tile_m, build.tile_n
            first = tile_order.key_tile_start(*shape)
            end = larger(tile_order.key_tile_end(*shape), first + 1)
            run(self.query, WorkTile(seqlen, band, head, CLUSTER * pair + self.cluster.rank(), first, end))


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """Returns the host function that launches this build's kernels, and arguments to compile it with."""
    return backward_chain.trace(build, WideBackwardSm90(build), None)
