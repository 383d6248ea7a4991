"""Query gradient of whole heads: a block that takes all key tiles of a head sums dQ by itself.

The first key tile that sees a query tile stores its share, those between add theirs, and the last one adds what is
there to its own share, which never leaves the registers, and writes the query gradient. A block's sums are those of one
head, in a place that it uses for every head, so that they stay in the L2 cache: nothing is cleared beforehand and
nothing converted afterwards. Shares of one key tile go to different sums; those of two are kept apart by waiting until
all of the first have arrived. What is there comes through the place of what is sent, asked for before dS is waited for.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.primitives as prim
from cutlass import Boolean, Float32, Int32

from cutlass_py_attn.fused.hopper_grad_query import HopperGradQuery
from cutlass_py_attn.fused.streamed import from_column
from cutlass_py_attn.gemm.gemm import WARP_THREADS, WARPGROUP_THREADS
from cutlass_py_attn.gemm.wgmma import Wgmma, row_view
from cutlass_py_attn.parts import lengths, moves, params, pipes, schedule, tma
from cutlass_py_attn.parts.integers import ceil_div
from cutlass_py_attn.parts.params import DTYPES
from cutlass_py_attn.parts.quads import store_rows
from cutlass_py_attn.problem import F32_BYTES
from cutlass_py_attn.shared_memory import BARRIER_BYTES

KEPT = tma.EVICT_LAST


@dataclass(frozen=True)
class Share:
    """The share of one key tile in a query tile's gradient: (item, query head, query tile), where the sum lies, whether
    this is the first or the last share, and whether what came before a last one is to be added."""

    at: tuple[Any, Int32, Int32]
    sum: cute.Pointer
    is_first: Boolean
    is_last: Boolean
    adds_sum: Boolean


class HeadGradQuery(HopperGradQuery):
    """Where and how one Hopper Build whose blocks take whole heads sums the query gradient."""

    @cute.jit
    def make_barrier(self):
        """The barrier of the pieces that are asked for."""
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(self.barrier(), 1)

    def barrier(self) -> cute.Pointer:
        """Where it lies: behind those of the pipes."""
        return pipes.first_barrier(self.build) + (self.build.buffer("barriers").bytes // BARRIER_BYTES - 1)

    def begin(self) -> Int32:
        """What goes from tile to tile: the phase of the barrier."""
        return Int32(0)

    def share(self, p: Any, at: tuple, thread: Int32, phase: Int32) -> Share:
        """The share of (item, query head, query tile); the sum's first piece is asked for where it is the last one."""
        build, (item, head, query_tile) = self.build, at
        block, _, _ = cute.arch.block_idx()
        within = head - item.head * lengths.group_of(build, p)
        tiles = ceil_div(p.num_queries, build.tile_m)
        number = (block * lengths.group_of(build, p) + within) * tiles + query_tile
        where = item.band, query_tile, build.tile_m, build.tile_n
        first, end = schedule.key_tile_start(*where), schedule.key_tile_end(*where)
        is_first, is_last = item.tile == first, item.tile == end - 1
        share = Share(at, self.tile(p, number), is_first, is_last, is_last & (item.tile != first))
        self.wait()
        self.ask(share, 0, thread)
        return share

    @cute.jit
    def ask(self, share: Share, piece: cutlass.Constexpr, thread: Int32):
        """One thread asks for a piece of the sum that this share is added to."""
        if (cute.arch.make_warp_uniform(thread // WARP_THREADS) == 0) & share.adds_sum:
            rows, columns = self.piece
            size = rows * columns * F32_BYTES
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(self.barrier(), size)
                stage = moves.shared_pointer(self.build, "staging", Float32)
                source = share.sum + rows * columns * piece
                prim.cp_async_bulk_shared_cluster_global(stage, source, self.barrier(), size, l2_cache_hint=KEPT)

    def add_tile(self, p: Any, share: Share, parts: tuple, thread: Int32, release: Any, phase: Int32) -> Int32:
        """7  dQ = dS K of one query tile; `parts`: dS and K. The phase behind it."""
        for piece, product, r_dq in self.multiplied(parts, thread, release):
            self.wait()
            self.give(p, share, (piece, product), r_dq, thread, phase ^ (piece % 2))
        return phase ^ cutlass.select_(share.adds_sum, Int32(len(self.pieces()) % 2), Int32(0))

    @cute.jit
    def give(self, p: Any, share: Share, piece: cutlass.Constexpr, r_dq: cute.Tensor, thread: Int32, phase: Int32):
        """Write (number, product) of a piece to the query gradient, or store it in the sum, or add it to that."""
        if share.is_last:
            if share.adds_sum:
                cute.arch.mbarrier_wait(self.barrier(), phase)
                self.add_held(r_dq, thread)
                self.meet()
                if cutlass.const_expr(piece[0] + 1 < len(self.pieces())):
                    self.ask(share, piece[0] + 1, thread)
            self.store(p, share, piece, r_dq)
        else:
            self.meet()
            self.send(share.sum + cute.size(r_dq) * self.threads * piece[0], r_dq, thread, share.is_first)

    def add_held(self, values: cute.Tensor, thread: Int32) -> None:
        """Add what came to shared memory in the sum's order."""
        held = cute.make_rmem_tensor_like(values)
        self.load(moves.shared_pointer(self.build, "staging", Float32), held, thread)
        for i in range(cute.size(values)):
            values[i] = values[i] + held[i]

    def store(self, p: Any, share: Share, piece: tuple[int, Wgmma], values: cute.Tensor) -> None:
        """Scale a piece, convert it and write it to the query gradient, from registers."""
        build, (item, head, query_tile), (number, product) = self.build, share.at, piece
        (i, j), (rows, columns), of = self.pieces()[number], self.piece, item.of
        values.store(values.load() * p.scale)
        query0 = query_tile * build.tile_m + i * rows
        at = of.batch, head, of.query_start + query0
        target = moves.tile_of(build, p, "grad_query", at, of.num_queries - query0, build.head_dim)
        thread = params.fresh("tid.x") - WARPGROUP_THREADS
        converted = row_view(moves.converted(values, DTYPES[build.dtype]))
        store_rows(converted, row_view(product.coordinates(thread)), from_column(target, j * columns, columns))

    @cute.jit
    def start(self, target: cute.Pointer, stage: cute.Pointer, size: cutlass.Constexpr, is_first: Boolean):
        """One thread starts storing what lies in shared memory in the sum, or adding it."""
        if is_first:
            prim.cp_async_bulk_global_shared_cta(target, stage, size, l2_cache_hint=KEPT)
        else:
            kind = prim.CpReduceType.F32
            prim.cp_reduce_async_bulk_global_shared_cta(target, stage, size, type=kind, l2_cache_hint=KEPT)

    def end(self, p: Any, phase: Int32, thread: Int32) -> Int32:
        """Behind the last tile of a key tile: all shares have arrived before the next key tile's."""
        self.wait_for_arrival()
        return phase
