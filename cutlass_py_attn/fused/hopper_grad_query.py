"""Hopper query gradient: a warpgroup of its own multiplies dQ = dS K and adds it to the sum in global memory.

What it adds goes through shared memory: one bulk reduction for each piece of a tile. Vector reductions from registers
would wait in the queue in which the other warpgroups' shared-memory accesses stand, and hold those up. Where those work
in query blocks, and shared memory itself is what they wait for, registers are faster.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.primitives as prim
from cutlass import Float32, Int32

from cutlass_py_attn.fused.grad_query import GradQuery
from cutlass_py_attn.gemm import grad_q
from cutlass_py_attn.gemm.gemm import WARP_THREADS, WARPGROUP_THREADS, WARPGROUP_WARPS, Gemm
from cutlass_py_attn.gemm.mma_sync import Operands
from cutlass_py_attn.gemm.views import transposed
from cutlass_py_attn.gemm.wgmma import Wgmma
from cutlass_py_attn.parts import moves, params, schedule
from cutlass_py_attn.plan import Build
from cutlass_py_attn.problem import F32_BYTES
from cutlass_py_attn.shared_memory import grad_query_bytes, grad_query_piece

BARRIER = 4  # number of this warpgroup's barrier


class HopperGradQuery(GradQuery):
    """Where and how one Hopper Build sums the query gradient, in the order of one warpgroup's accumulator."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.threads = WARPGROUP_THREADS
        self.piece = grad_query_piece(build)
        self.is_staged = grad_query_bytes(build) > 0

    def product_of(self, spec: Gemm) -> Wgmma:
        """The product of one warpgroup."""
        return Wgmma(replace(spec, warps=(WARPGROUP_WARPS, 1)), self.build.dtype)

    def pieces(self) -> list[tuple[int, int]]:
        """(row of pieces, column of pieces) in the order of the accumulator of a whole tile."""
        build, (rows, columns) = self.build, self.piece
        return [(i, j) for i in range(build.tile_m // rows) for j in range(build.columns // columns)]

    def begin(self) -> Int32:
        """What goes from tile to tile: the number of the tile before, below 0 where its turn need not be passed on."""
        return Int32(-1)

    def share(self, p: Any, at: tuple, thread: Int32, before: Int32) -> tuple[Any, Int32]:
        """Where the share of (item, query head, query tile) in the query gradient goes: number of the sum and turn."""
        item, head, query_tile = at
        number = self.number(p, head, item.of.first_tile + query_tile)
        return number, schedule.turn(item.band, query_tile, item.tile, self.build.tile_m, self.build.tile_n)

    def add_tile(
        self, p: Any, share: tuple, parts: tuple, thread: Int32, release: Callable[[], None], before: Int32
    ) -> Int32:
        """7  dQ = dS K of one query tile, added to its sum; what goes to the next tile. `parts`: dS and K. `release` is
        called once dS has been read."""
        build, (number, turn) = self.build, share
        target = self.tile(p, number)
        for piece, _, r_dq in self.multiplied(parts, thread, release):
            takes_turn = build.deterministic and piece == 0
            if takes_turn:
                self.wait_for_arrival()
                self.take_turns(p, before, (Int32(number), turn), thread)
            self.add_to(target + piece * (cute.size(r_dq) * self.threads), r_dq, thread, takes_turn)
        if not build.deterministic:
            return before
        # A query tile that sees nothing of the key tile has no turn for it, and is given zeros.
        return cutlass.select_(turn >= 0, Int32(number), Int32(-1))

    def end(self, p: Any, before: Int32, thread: Int32) -> Int32:
        """Behind the last tile of a key tile. Its turn is not passed on with the next key tile, whose turn may come
        behind those who wait for this."""
        if not self.build.deterministic:
            return before
        self.wait_for_arrival()
        self.pass_turn(p, before, thread)
        return Int32(-1)

    def multiplied(
        self, parts: tuple[cute.Tensor, cute.Tensor], thread: Int32, release: Callable[[], None]
    ) -> Iterator[tuple[int, Wgmma, cute.Tensor]]:
        """dQ = dS K of one query tile, (number, product, accumulator) of a piece at a time, for which a thread has the
        registers."""
        build, (rows, columns), (s_ds, s_k) = self.build, self.piece, parts
        product = self.product_of(replace(grad_q.spec(build), m=rows, n=columns))
        pieces = self.pieces()
        for number, (i, j) in enumerate(pieces):
            left = cute.local_tile(s_ds, (rows, build.tile_n), (i, 0))
            right = cute.local_tile(s_k, (build.tile_n, columns), (0, j))
            r_dq = product.accumulator(thread)
            product.issue(r_dq, Operands(product.a_operand(left, thread), product.b_operand(transposed(right))))
            product.wait()
            if number == len(pieces) - 1:
                release()
            yield number, product, r_dq

    def add_to(self, target: cute.Pointer, values: cute.Tensor, thread: Int32, has_met: bool) -> None:
        """Add a piece to the sum. has_met: the tile before has arrived, which one warp alone may know."""
        if self.is_staged:
            if not has_met:
                self.wait()
                self.meet()
            self.send(target, values, thread, is_first=False)  # the sums were cleared
            return
        if has_met:
            self.meet()
        self.add(target, values, thread)
        self.meet()  # the compiler would move the additions behind the next product

    @cute.jit
    def send(self, target: cute.Pointer, values: cute.Tensor, thread: Int32, is_first: Any):
        """Bring a piece to its sum, which holds nothing yet if `is_first`; the one before it has left shared memory."""
        stage = moves.shared_pointer(self.build, "staging", Float32)
        warp = cute.arch.make_warp_uniform(thread // WARP_THREADS)
        self.write(stage, values, thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.meet()
        if warp == 0:
            size = cute.size(values) * self.threads * F32_BYTES
            with cute.arch.elect_one():
                self.start(target, stage, size, is_first)
            cute.arch.cp_async_bulk_commit_group()

    def start(self, target: cute.Pointer, stage: cute.Pointer, size: int, is_first: Any) -> None:
        """One thread starts adding what lies in shared memory to the sum."""
        prim.cp_reduce_async_bulk_global_shared_cta(target, stage, size, type=prim.CpReduceType.F32)

    def wait(self) -> None:
        """Until what this thread has started has been read from shared memory. All threads ask, though one starts:
        in a branch, the wait would cost the whole kernel its uniform registers."""
        if self.is_staged:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def wait_for_arrival(self) -> None:
        """Until what was started has arrived in global memory."""
        if self.is_staged:
            cute.arch.cp_async_bulk_wait_group(0, read=False)
        self.meet()

    def meet(self) -> None:
        """The threads of the warpgroup wait for each other."""
        cute.arch.barrier(barrier_id=BARRIER, number_of_threads=WARPGROUP_THREADS)

    def write(self, target: cute.Pointer, values: cute.Tensor, thread: Int32) -> None:
        """An accumulator to shared memory in the sum's order: vectors of neighbouring threads side by side."""
        for i in range(cute.size(values) // self.width):
            vector = cute.make_rmem_tensor(self.width, Float32)
            for j in range(self.width):
                vector[j] = values[i * self.width + j]
            at = (target + (thread + i * self.threads) * self.width).align(16)
            cute.autovec_copy(vector, cute.make_tensor(at, cute.make_layout(self.width)))

    def take_turns(self, p: Any, before: Int32, here: tuple[Int32, Int32], thread: Int32) -> None:
        """Pass the turn of the query tile before on, and wait for this one's: (number, turn)."""
        self.pass_turn(p, before, thread)
        self.wait_turn(p, *here, thread)

    @cute.jit
    def wait_turn(self, p: Any, number: Int32, turn: Int32, thread: Int32):
        """Who starts the reductions waits until the key tiles before this one have added to the query tile."""
        if cute.arch.make_warp_uniform(thread // WARP_THREADS) == 0:
            with cute.arch.elect_one():
                counter = params.pointer(p.turn, Int32, 4) + number
                seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
                while seen < turn:
                    seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
                cute.arch.fence_proxy("async.global")
            cute.arch.sync_warp()

    @cute.jit
    def pass_turn(self, p: Any, number: Int32, thread: Int32):
        """Let the next key tile add to a query tile to which all of this one has been added; to none if below 0. The
        warp that does so is not the one that waits for turns."""
        if (cute.arch.make_warp_uniform(thread // WARP_THREADS) == WARPGROUP_WARPS - 1) & (number >= 0):
            with cute.arch.elect_one():
                counter = params.pointer(p.turn, Int32, 4) + number
                cute.arch.fence_proxy("async.global")
                cute.arch.red(counter, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
