"""Key gradient sums: dK and dV of several query heads, added in float32 in global memory, and their conversion.

If work tiles are those of query heads, the query heads of a group add to the same dK and dV. The addition goes through
shared memory, as that of dQ does. A warpgroup copies its dK and dV in pieces to its part of the stages of dS, which it
writes next in any case, and issues a bulk reduction for each piece. So no tile is loaded later for it.

A sum is that of the 64 keys of a warpgroup. It is stored in the order of the registers of the warpgroup's accumulator.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import cutlass.cute as cute
import cutlass.experimental.primitives as prim
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.kernels.common import params, seqlen_info, tile_copy
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.kernels.component_gemms import grad_k, grad_v
from cutlass_py_attn.kernels.sm80.grad_query_accum import SumOrder
from cutlass_py_attn.kernels.sm90.backward_kernel import key_gradient_tile, store_key_gradient
from cutlass_py_attn.kernels.sm90.grad_query import warpgroup_gemm
from cutlass_py_attn.kernels.sm90.named_barriers import BackwardBarrier
from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.plan.gemm_spec import WARP_THREADS, WARPGROUP_THREADS
from cutlass_py_attn.plan.sm90_smem import CONSUMER_WARPGROUPS, WARPGROUP_ROWS
from cutlass_py_attn.problem.tensors import F32_BYTES


@dataclass(frozen=True)
class SumIndex:
    """The sums of 64 keys: key tile, counted over all heads and sequences, and warpgroup of the consumers."""

    tile: Int64
    warpgroup: Int32


@dataclass(frozen=True)
class Piece:
    """Some columns of the accumulator of dK or dV: where they are added, and their registers."""

    target: cute.Pointer
    values: cute.Tensor


class KeyGradientSums(SumOrder):
    """The sums of dK and dV of one Build, and the additions to them."""

    def __init__(self, build: Build) -> None:
        super().__init__(build, WARPGROUP_THREADS)
        self.stage_elements = build.tile_m * build.tile_n * build.item_bytes // F32_BYTES  # float32 of a stage of dS
        self.part_elements = self.stage_elements // CONSUMER_WARPGROUPS  # a warpgroup has a strip of keys of dS

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

    def pieces(self, address: Int64, index: SumIndex, values: cute.Tensor, columns: int) -> Iterator[Piece]:
        """Yields the pieces of an accumulator, each as large as a warpgroup's part of a stage of dS, or smaller."""
        width = math.gcd(self.part_elements // WARPGROUP_ROWS, columns)
        start, count = self.pointer(address, index, columns), WARPGROUP_ROWS * width // self.threads
        for number in range(columns // width):
            registers = cute.make_tensor(values.iterator + number * count, cute.make_layout(count))
            yield Piece(start + number * (count * self.threads), registers)

    def add(
        self,
        pieces: list[Piece],
        num_stages: int,
        acquire: Callable[[int], Int32],
        thread: Int32,
        warpgroup: Int32,
    ) -> None:
        """Adds pieces to their sums, each through the next stage of dS; returns when shared memory has been read.

        acquire: waits for one of the next `num_stages` stages, by its place, and returns its index
        thread: in the warpgroup
        """
        stages = []
        for number, piece in enumerate(pieces):
            if number < num_stages:
                stages.append(acquire(number))
            else:
                self._wait_read(num_stages - 1, warpgroup)
            part = stages[number % num_stages] * self.stage_elements + warpgroup * self.part_elements
            self._send(piece, tile_copy.smem_pointer(self.build, "ds", Float32) + part, thread, warpgroup)
        self._wait_read(0, warpgroup)

    @cute.jit
    def _send(self, piece: Any, stage: cute.Pointer, thread: Int32, warpgroup: Int32):
        """Copies a piece to shared memory and issues the bulk reduction to its sum."""
        self.store_shared(stage, piece.values, thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        self._sync(warpgroup)
        if cute.arch.make_warp_uniform(thread // WARP_THREADS) == 0:
            size = cute.size(piece.values) * self.threads * F32_BYTES
            with cute.arch.elect_one():
                kind = prim.CpReduceType.F32
                prim.cp_reduce_async_bulk_global_shared_cta(piece.target, stage, size, type=kind)
            cute.arch.cp_async_bulk_commit_group()

    def _wait_read(self, pending: int, warpgroup: Int32) -> None:
        """Waits until all but the last `pending` reductions have read shared memory.

        All threads call this although one issues, as for dQ: the wait is outside of any branch.
        """
        cute.arch.cp_async_bulk_wait_group(pending, read=True)
        self._sync(warpgroup)

    def _sync(self, warpgroup: Int32) -> None:
        barrier = int(BackwardBarrier.CONSUMER_0) + warpgroup
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP_THREADS)


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
