"""Key gradient sums: dK and dV to which several blocks add, in float32 in global memory, and their conversion.

If work tiles are those of query heads, the query heads of a group add to the same dK and dV, and a kernel converts the
sums. With option shared_end the blocks that share the queries of a key tile do, and the last of them converts the sums.
A warpgroup adds its dK and dV from registers, so that the next tiles are loaded meanwhile.

A sum is that of the 64 keys of a warpgroup. It is stored in the order of the registers of the warpgroup's accumulator.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.kernels.backward_parts.grad_query_accum import SumOrder
from cutlass_py_attn.kernels.backward_parts.layout import shared_tile_layout
from cutlass_py_attn.kernels.common import params, seqlen_info, tile_copy
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.kernels.component_gemms.products import grad_k, grad_v
from cutlass_py_attn.kernels.sm90_backward.grad_query import warpgroup_gemm
from cutlass_py_attn.kernels.sm90_backward.layout import CONSUMER_WARPGROUPS
from cutlass_py_attn.kernels.sm90_backward.main_kernel import key_gradient_tile, store_key_gradient
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS, WARPGROUP_ROWS, WARPGROUP_THREADS


@dataclass(frozen=True)
class SumIndex:
    """The sums of 64 keys: key tile, counted over all heads and sequences, and warpgroup of the consumers."""

    tile: Int64
    warpgroup: Int32


class KeyGradientSums(SumOrder):
    """The sums of dK and dV of one Build, and the additions to them."""

    def __init__(self, build: Build) -> None:
        super().__init__(build, WARPGROUP_THREADS)

    def index(self, p: Any, of: seqlen_info.SeqlenInfo, key_head: Int32, tile: Int32, warpgroup: Int32) -> SumIndex:
        """Returns the sums of a warpgroup's keys of a key tile; with variable lengths each sequence has whole tiles."""
        build = self.build
        if build.has("varlen"):
            first = of.key_start // build.tile_n + of.index
        else:
            first = of.index * ceil_div(p.num_keys, build.tile_n)
        return SumIndex(Int64(key_head) * p.total_key_tiles + first + tile, warpgroup)

    def pointer(self, address: Int64, index: SumIndex, columns: int) -> cute.Pointer:
        """Returns where a sum starts. address: of the sums of dK or dV; columns: of a sum."""
        number = index.tile * CONSUMER_WARPGROUPS + index.warpgroup
        return params.pointer(address, Float32) + number * (WARPGROUP_ROWS * columns)


class SharedTileSums(SumOrder):
    """The sums of the key tiles whose queries several blocks share: of each tile dK, dV and the counts of its parts.

    A thread adds to what the threads of its place in other blocks add to, so that warps count parts by themselves. In
    every function, `tile` is the number of a shared tile, and `thread` one of the consumers.
    """

    def __init__(self, build: Build) -> None:
        super().__init__(build, WARPGROUP_THREADS)
        self.layout = shared_tile_layout(build)

    def add_part(self, p: Any, tile: Int32, thread: Int32, r_dk: cute.Tensor, r_dv: cute.Tensor) -> None:
        """Adds dK and dV of a part."""
        of_key, of_value = self._sums(p, tile, thread)
        self.add(of_value, r_dv, thread % WARPGROUP_THREADS)
        self.add(of_key, r_dk, thread % WARPGROUP_THREADS)

    def load_parts(self, p: Any, tile: Int32, thread: Int32, r_dk: cute.Tensor, r_dv: cute.Tensor) -> None:
        """Loads the sums of all parts."""
        of_key, of_value = self._sums(p, tile, thread)
        self.load(of_value, r_dv, thread % WARPGROUP_THREADS)
        self.load(of_key, r_dk, thread % WARPGROUP_THREADS)

    @cute.jit
    def count_part(self, p: Any, tile: Int32, thread: Int32):
        """Counts a part that this warp has added; returns how many have been, whose sums it then can load."""
        cute.arch.fence_acq_rel_gpu()
        cute.arch.sync_warp()
        counted = Int32(0)
        if cute.arch.lane_idx() == 0:
            counter = self._counters(p, tile) + thread // WARP_THREADS
            counted = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu") + 1
        counted = cute.arch.shuffle_sync(counted, 0)
        cute.arch.fence_acq_rel_gpu()
        return counted

    def _sums(self, p: Any, tile: Int32, thread: Int32) -> tuple[cute.Pointer, cute.Pointer]:
        """Returns where the sums of dK and dV of a warpgroup's keys start."""
        build, row = self.build, thread // WARPGROUP_THREADS * WARPGROUP_ROWS
        start = params.pointer(p.shared_sums, Float32) + Int64(tile) * self.layout.total
        of_key, of_value = start + self.layout.key, start + self.layout.value
        return of_key + row * build.columns, of_value + row * build.columns_value

    def _counters(self, p: Any, tile: Int32) -> cute.Pointer:
        """Returns where the counts of a tile start, one for each warp."""
        return params.pointer(p.shared_sums, Int32, 4) + (Int64(tile) * self.layout.total + self.layout.counts)


class KeyGradientPostprocess:
    """The conversion of the sums of one Build to dK and dV; a block converts those of 64 keys."""

    def __init__(self, build: Build, sums: KeyGradientSums) -> None:
        self.build, self.sums = build, sums
        self.threads = sums.threads

    @cute.jit
    def run(self, p: Any):
        """Converts dK and dV of 64 keys."""
        build = self.build
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        tile, warpgroup = block // CONSUMER_WARPGROUPS, block % CONSUMER_WARPGROUPS
        head, batch = head + p.first_head, batch + p.first_batch
        of = seqlen_info.create(build, p, batch)
        if tile * build.tile_n + warpgroup * WARPGROUP_ROWS < of.stored_keys:
            index = self.sums.index(p, of, head, tile, warpgroup)
            self.convert(p, "grad_key", index, head, of, tile, thread)
            self.convert(p, "grad_value", index, head, of, tile, thread)

    def convert(
        self, p: Any, name: str, index: SumIndex, head: Int32, of: seqlen_info.SeqlenInfo, tile: Int32, thread: Int32
    ) -> None:
        """Loads a sum, scales and converts it, and writes it to the gradient `name`."""
        build = self.build
        spec = replace((grad_k if name == "grad_key" else grad_v).spec(build), m=WARPGROUP_ROWS)
        gemm = warpgroup_gemm(spec, build.dtype)
        values = gemm.accumulator(thread)
        self.sums.load(self.sums.pointer(getattr(p, f"{name}_accum"), index, spec.n), values, thread)
        if name == "grad_key":
            values.store(values.load() * p.scale)
        elif build.has("dropout"):
            values.store(values.load() * p.keep_scale)
        key0 = tile * build.tile_n + index.warpgroup * WARPGROUP_ROWS
        target = key_gradient_tile(build, p, name, head, of, key0)
        store_key_gradient(tile_copy.converted(values, DTYPES[build.dtype]), gemm, target, thread)
