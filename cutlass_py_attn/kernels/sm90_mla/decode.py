"""MLA decode on wgmma: O = softmax(scale Q K^T) V where the first columns of K are V, a latent cache.

The query rows of all heads that share a head of the cache are packed, as in decode/forward.py: row r of a tile is query
r // group of head r % group. A tile has 64 rows. A fixed number of blocks shares the keys of all sequences, whose
lengths are on the device, see decode/chunk_schedule.py; its combine kernel joins the pieces of a row.

O of all 512 columns would take more registers than a warpgroup has, so each of two warpgroups has half of the columns.
Each computes S and P of the latent tiles of one of both slots (layout.py), and hands P and the factors of the
rows to the other through shared memory. A latent tile is loaded once, for S and for both halves of O.

    step    warpgroup 0                                     warpgroup 1
    1                                                       S = Q K^T of slot 1
    2       softmax of slot 0, P to shared memory
    3       O += P V of slot 0, P in registers              O += P V of slot 0
    2                                                       softmax of slot 1, P to shared memory
    3       O += P V of slot 1                              O += P V of slot 1, P in registers
    1       S = Q K^T of slot 0, the next tile

One producer warp loads latent tiles; the warpgroups that compute load the query tile themselves, because its rows may
be anywhere. With an e4m3 cache, all warps of the producer's warpgroup load and convert latent tiles (latent_codes.py).
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as tensor_maps
from cutlass import Float32, GridConstant, Int32, Uint32

from cutlass_py_attn.integers import choose, larger
from cutlass_py_attn.kernels.common import logsumexp, masking, paging, params, seqlen_info, tile_copy, tma
from cutlass_py_attn.kernels.common.mma_sync import Operands
from cutlass_py_attn.kernels.common.params import DTYPES, RowCoordinates
from cutlass_py_attn.kernels.common.quad_transpose import VECTOR_ELEMENTS, load_vector, store_row
from cutlass_py_attn.kernels.common.softmax import QUAD, multiply_rows, safe_scale
from cutlass_py_attn.kernels.common.wgmma import DescriptorOperand, Wgmma, row_view, smem_column_slice, smem_tile_at
from cutlass_py_attn.kernels.component_gemms.products import matmul_pv, matmul_qk
from cutlass_py_attn.kernels.decode.chunk_schedule import ChunkSchedule, Piece, Place
from cutlass_py_attn.kernels.decode.persistent import CombinePieces
from cutlass_py_attn.kernels.sm90_common import pipelines
from cutlass_py_attn.kernels.sm90_common.named_barriers import MlaDecodeBarrier
from cutlass_py_attn.kernels.sm90_mla.latent_codes import LatentCodes
from cutlass_py_attn.kernels.sm90_mla.latent_ring import ROW_BYTES, VECTOR_BYTES, LatentRing, LatentTile
from cutlass_py_attn.kernels.sm90_mla.layout import (
    CHUNKS,
    HALVES,
    ROPE_COLUMNS,
    SLOTS,
    STRIP_COLUMNS,
    VALUE_CHUNKS,
    WARP_ROWS,
    WARPGROUPS,
    registers,
)
from cutlass_py_attn.kernels.sm90_wide.alternating_softmax import AlternatingSoftmax
from cutlass_py_attn.launch import abi, tile_order
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.entry_points import ROW_THREADS
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_THREADS
from cutlass_py_attn.score_terms import registry

QUERY_LOADS = 6  # vectors of the query tile that a thread has in flight


@dataclass(frozen=True)
class Warpgroup:
    """What one of both warpgroups uses for a piece.

    index: its number, which is that of its slot and of its half of the columns of O
    thread: number of this thread in the warpgroup
    coordinates: (row, column) in a tile of each score that the thread holds
    query, key: chunks of the query tile, and of the latent tiles of all slots, as operands of S
    p: P of the other warpgroup in shared memory as the operand of O
    value: this warpgroup's columns of the latent tiles of all slots as the operand of O
    output: accumulator of O
    softmax: the softmax of the warpgroup's latent tiles
    """

    index: int
    thread: Any
    coordinates: cute.Tensor
    query: list[DescriptorOperand]
    key: list[DescriptorOperand]
    p: DescriptorOperand
    value: DescriptorOperand
    output: cute.Tensor
    softmax: AlternatingSoftmax


class MlaDecodeSm90:
    """The MLA decode kernels of one Build."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.dtype = DTYPES[build.dtype]
        scores, output = matmul_qk.spec(build), matmul_pv.spec(build, n=build.columns_value // WARPGROUPS)
        self.mma_qk = [
            Wgmma(replace(scores, k=len(strips) * STRIP_COLUMNS, accumulate=index > 0), build.dtype)
            for index, strips in enumerate(CHUNKS)
        ]
        self.mma_pv = Wgmma(output, build.dtype)
        self.schedule, self.ring, self.pieces = ChunkSchedule(build), LatentRing(build), CombinePieces(build)
        self.codes = LatentCodes(build, self.ring) if build.has(registry.KV8) else None
        self.registers = registers(build)
        # A float16 row that attends mostly to one key is more accurate with that key's weight at exactly 1.
        self.rescales_lazily = build.dtype == "bfloat16"

    @cute.jit
    def __call__(self, *values):
        build = self.build
        p = params.from_values(build, values)
        grid = p.num_queries, 1, 1
        if cutlass.const_expr(self.codes is None):
            latent = tma.placeholder_map(p, p.key, self.dtype, build.tile_n, build.columns)
        else:
            latent = tma.placeholder_map(p, p.key_rope, self.dtype, WARP_ROWS, ROPE_COLUMNS)
        params.set_entry_name(build, self.kernel)
        self.kernel(latent, p).launch(grid=grid, block=(build.threads, 1, 1), min_blocks_per_mp=1)
        params.set_entry_name(build, self.combine_kernel, "_combine")
        # One struct for each launch: the DSL caches the fields that a launch has read in the struct.
        self.combine_kernel(params.from_values(build, values)).launch(grid=grid, block=(ROW_THREADS, 1, 1))

    @cute.kernel
    def combine_kernel(self, p: Any):
        self.pieces.run(p)

    @cute.kernel
    def kernel(self, latent: GridConstant[tensor_maps.TensorMap], p: Any):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                self.ring.create()
        pipelines.sync_barrier_init()
        team, member = self.schedule.place_of(p, block)
        begin, end, batch, start, total = self.schedule.find_share(p, block, team, thread)
        place = Place(begin, end, team, member, self.schedule.groups(p), self.schedule.row_tiles(p))
        if (p.fixed_chunks == 0) & (member == 0) & (thread == 0):
            if begin < end:
                self.schedule.store_cut(p, place, total, self.schedule.piece(p, place, begin, batch, start))
            else:
                self.schedule.store_no_cut(p, team, begin)
        warpgroup = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        if warpgroup == 0:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if cutlass.const_expr(self.codes is not None) or warp == 0:
                self.load_pieces(p, latent, place, batch, start)
        else:
            cute.arch.setmaxregister_increase(self.registers[-1])
            if warpgroup == 1:
                self.compute_pieces(p, place, batch, start, 0, thread - WARPGROUP_THREADS)
            else:
                self.compute_pieces(p, place, batch, start, 1, thread - 2 * WARPGROUP_THREADS)

    def tiles_of(self, p: Any, piece: Piece) -> tuple[Int32, Int32]:
        """Returns the first latent tile of a piece, and how many it has: one if its rows see no key or are none."""
        count = larger(piece.end_tile - piece.start_tile, 1)
        has_rows = piece.row0 < piece.seqlen.num_queries * seqlen_info.group_size(self.build, p)
        return piece.start_tile, choose(has_rows, count, Int32(1))

    @cute.jit
    def load_pieces(self, p: Any, latent: Any, place: Any, batch: Int32, start: Int32):
        """Producer: loads the latent tiles of all pieces of this block. latent: tensor map that it reads through."""
        chunk = place.begin
        uses0, uses1 = Int32(0), Int32(0)  # tiles that each slot has had
        while chunk < place.end:
            piece = self.schedule.piece(p, place, chunk, batch, start)
            first, tiles = self.tiles_of(p, piece)
            if cutlass.const_expr(self.codes is not None):
                self.codes.load(p, latent, piece, first, tiles, uses0, uses1)
            else:
                self.load(p, latent, piece, first, tiles, uses0, uses1)
            uses0, uses1 = uses0 + (tiles + 1) // SLOTS, uses1 + tiles // SLOTS
            chunk = chunk + piece.count
            if chunk >= (start + piece.of_sequence) * place.groups:
                start = start + piece.of_sequence
                batch = batch + 1

    @cute.jit
    def load(self, p: Any, latent: Any, piece: Any, first: Int32, tiles: Int32, uses0: Int32, uses1: Int32):
        """Loads the latent tiles of a piece. Entries of the table are read one round ahead."""
        build, seqlen, head = self.build, piece.seqlen, piece.head_key
        pages, boxes = None, None
        if cutlass.const_expr(self.ring.is_paged):
            pages, boxes = paging.page_row(p, piece.batch), self.ring.paged_loads.boxes(p)
        page0 = self.ring.lane_page(p, pages, seqlen, boxes, first)
        page1 = self.ring.lane_page(p, pages, seqlen, boxes, first + 1)
        for pair in cutlass.range((tiles + 1) // SLOTS, unroll=1):
            tile = first + SLOTS * pair
            next0 = self.ring.lane_page(p, pages, seqlen, boxes, tile + SLOTS)
            next1 = self.ring.lane_page(p, pages, seqlen, boxes, tile + SLOTS + 1)
            row = tile * build.tile_n
            self.ring.load(p, latent, 0, uses0 + pair, LatentTile(head, row, page0), seqlen, boxes)
            if SLOTS * pair + 1 < tiles:
                self.ring.load(p, latent, 1, uses1 + pair, LatentTile(head, row + build.tile_n, page1), seqlen, boxes)
            page0, page1 = next0, next1

    @cute.jit
    def compute_pieces(
        self, p: Any, place: Any, batch: Int32, start: Int32, warpgroup: cutlass.Constexpr, thread: Int32
    ):
        """One of both warpgroups: computes all pieces of this block."""
        chunk = place.begin
        uses0, uses1 = Int32(0), Int32(0)
        while chunk < place.end:
            piece = self.schedule.piece(p, place, chunk, batch, start)
            first, tiles = self.tiles_of(p, piece)
            self.compute(p, piece, warpgroup, thread, first, tiles, uses0, uses1)
            uses0, uses1 = uses0 + (tiles + 1) // SLOTS, uses1 + tiles // SLOTS
            chunk = chunk + piece.count
            if chunk >= (start + piece.of_sequence) * place.groups:
                start = start + piece.of_sequence
                batch = batch + 1

    @cute.jit
    def compute(
        self,
        p: Any,
        piece: Any,
        warpgroup: cutlass.Constexpr,
        thread: Int32,
        first: Int32,
        tiles: Int32,
        uses0: Int32,
        uses1: Int32,
    ):
        """Computes the latent tiles of a piece, and stores its results or partial results.

        uses0, uses1: tiles that each slot has had before
        """
        own = self.create_warpgroup(p, warpgroup, thread)
        # The query tile and the statistics of the last piece are done with.
        self.sync_warpgroups(warpgroup, MlaDecodeBarrier.QUERY_EMPTY_0)
        own.softmax.clear_maximum()
        self.load_queries(p, piece, warpgroup * WARPGROUP_THREADS + thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync_warpgroups(warpgroup, MlaDecodeBarrier.QUERY_FULL_0)
        r_s = self.mma_qk[0].accumulator(thread)
        if cutlass.const_expr(warpgroup == 0):
            for half in cutlass.range_constexpr(WARPGROUPS):
                self.issue_scores(own, r_s, half, uses0)
            self.mma_qk[0].wait()
            # Rounds with a tile in slot 0 behind them.
            for pair in cutlass.range((tiles - 1) // SLOTS, unroll=1):
                self.multiply_own(p, piece, own, r_s, first + SLOTS * pair)
                self.multiply_other(own, uses1 + pair)
                self.issue_scores(own, r_s, 0, uses0 + pair + 1)
                self.mma_pv.wait(len(HALVES[0][0]))
                self.ring.release(1, 0)
                self.issue_scores(own, r_s, 1, uses0 + pair + 1)
                self.mma_qk[0].wait()
            self.multiply_own(p, piece, own, r_s, first + (tiles - 1) // SLOTS * SLOTS)
            if tiles % SLOTS == 0:
                self.multiply_other(own, uses1 + (tiles - 1) // SLOTS)
                self.mma_pv.wait()
                self.ring.release(1, 0)
        else:
            for pair in cutlass.range(tiles // SLOTS, unroll=1):
                for half in cutlass.range_constexpr(WARPGROUPS):
                    self.issue_scores(own, r_s, half, uses1 + pair)
                self.multiply_other(own, uses0 + pair)
                self.mma_qk[0].wait(1)
                r_p = self.compute_weights(p, piece, own, r_s, first + SLOTS * pair + 1)
                self.mma_pv.wait()
                self.ring.release(0, 1)
                self.issue_output(own, self.mma_pv.from_registers(r_p), 1)
                self.mma_pv.wait()
                self.ring.release(1, 1)
            if tiles % SLOTS == 1:
                self.multiply_other(own, uses0 + tiles // SLOTS)
                self.mma_pv.wait()
                self.ring.release(0, 1)
        # 4  normalise, store the logsumexp and the output, or partial results
        self.store(p, piece, own, (tiles - 1) % SLOTS)

    def multiply_own(self, p: Any, piece: Piece, own: Warpgroup, r_s: cute.Tensor, tile: Int32) -> None:
        """Warpgroup 0: turns S of slot 0 into P, adds P V to O, and releases its half of the slot."""
        r_p = self.compute_weights(p, piece, own, r_s, tile)
        self.issue_output(own, self.mma_pv.from_registers(r_p), own.index)
        self.mma_pv.wait()
        self.ring.release(own.index, own.index)

    def multiply_other(self, own: Warpgroup, use: Int32) -> None:
        """Waits for P of the other warpgroup's slot, and issues O += P V. use: number of the tile in its slot."""
        other = 1 - own.index
        self.wait_at(MlaDecodeBarrier.P_FULL_0 + other)
        for chunk in VALUE_CHUNKS[own.index]:
            self.ring.wait(other, chunk, use)
        self.issue_output(own, own.p, other)

    def issue_scores(self, own: Warpgroup, r_s: cute.Tensor, half: int, use: Int32) -> None:
        """Issues S = Q K^T of this warpgroup's slot over the chunks of a half, as a wgmma group for each chunk.

        use: number of the tile in its slot
        """
        for chunk in HALVES[own.index][half]:
            self.ring.wait(own.index, chunk, use)
            operands = Operands(own.query[chunk], own.key[chunk].stage(own.index))
            # 1  S = Q K^T
            matmul_qk.issue(self.mma_qk[chunk], r_s, operands)

    def issue_output(self, own: Warpgroup, p_operand: Any, slot: int) -> None:
        """Rescales O by the factors of a slot's tile, and issues O += P V."""
        own.softmax.rescale([row_view(own.output)], slot)
        # 3  O += P V
        matmul_pv.issue(self.mma_pv, own.output, Operands(p_operand, own.value.stage(slot)))

    def compute_weights(self, p: Any, piece: Piece, own: Warpgroup, r_s: cute.Tensor, tile: Int32) -> cute.Tensor:
        """Turns S of this warpgroup's slot into P; returns it, and stores it for the other warpgroup."""
        scores = row_view(r_s)
        # 2  mask, softmax, P to shared memory
        self.mask_if_needed(p, piece, scores, own.coordinates, tile)
        self.clear_if_needed(piece, own.index, own.thread, tile)
        own.softmax.weights(scores, False)
        r_p = tile_copy.converted(r_s, self.dtype)
        tile_copy.copy_r2s(own.thread, self.mma_qk[0].mma, r_p, self.ring.p_tile(own.index), True)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync_warpgroup(own.index)
        self.arrive_at(MlaDecodeBarrier.P_FULL_0 + own.index)
        return r_p

    @cute.jit
    def mask_if_needed(self, p: Any, piece: Any, scores: cute.Tensor, coordinates: cute.Tensor, tile: Int32):
        """Masks a tile of S that has a masked pair."""
        build, group = self.build, seqlen_info.group_size(self.build, p)
        band = seqlen_info.band(build, p, piece.seqlen)
        if tile_order.needs_mask(band, Int32(0), tile, p.num_queries, build.tile_n):
            rows = range(cute.size(scores, mode=[0]))
            queries = [(piece.row0 + coordinates[row, 0][0]) // group for row in rows]
            masking.mask_packed_scores(band, scores, coordinates, tile * build.tile_n, queries)

    @cute.jit
    def clear_if_needed(self, piece: Any, slot: cutlass.Constexpr, thread: Int32, tile: Int32):
        """Clears the rows of a latent tile in pages that are behind the last key; those of codes are zeros."""
        if cutlass.const_expr(self.build.has("paged") and self.codes is None):
            rows = piece.seqlen.num_keys - tile * self.build.tile_n
            if rows < self.build.tile_n:
                self.ring.clear_rows(slot, larger(rows, 0), thread)

    def sync_warpgroups(self, warpgroup: int, pair: int) -> None:
        """Waits for the other warpgroup; afterwards its writes to shared memory are visible.

        pair: the first of two named barriers. compute-sanitizer takes one barrier, where the code of each warpgroup
        waits, for divergence, and follows what an arrival orders only behind a barrier of the warpgroup's own.
        """
        self.sync_warpgroup(warpgroup)
        self.arrive_at(pair + warpgroup)
        self.wait_at(pair + 1 - warpgroup)

    def sync_warpgroup(self, warpgroup: int) -> None:
        """Waits for the other threads of the warpgroup."""
        barrier = MlaDecodeBarrier.WARPGROUP_0 + warpgroup
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP_THREADS)

    def wait_at(self, barrier: Any) -> None:
        """Waits at a named barrier of both warpgroups."""
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUPS * WARPGROUP_THREADS)

    def arrive_at(self, barrier: Any) -> None:
        """Arrives at a named barrier of both warpgroups without waiting."""
        cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=WARPGROUPS * WARPGROUP_THREADS)

    @cute.jit
    def load_queries(self, p: Any, piece: Any, thread: Int32):
        """Loads the rows of the query tile, zeros past the last. Both warpgroups call this; thread: of both."""
        build, seqlen, group = self.build, piece.seqlen, seqlen_info.group_size(self.build, p)
        base = tile_copy.smem_symbol()
        vectors = build.columns // VECTOR_ELEMENTS  # of a row
        strip_vectors = ROW_BYTES // VECTOR_BYTES
        steps = build.tile_m * vectors // (WARPGROUPS * WARPGROUP_THREADS)
        for step in cutlass.range(steps, unroll=QUERY_LOADS):
            index = step * (WARPGROUPS * WARPGROUP_THREADS) + thread
            row, vector = index // vectors, index % vectors
            packed = piece.row0 + row
            query = packed // group
            words = cute.make_rmem_tensor(QUAD, Uint32)
            words.fill(0)
            if query < seqlen.num_queries:
                head = piece.head_key * group + (packed - query * group)
                start = RowCoordinates(seqlen.batch, head, seqlen.query_start + query)
                source = params.row_pointer(build, p, "query", start) + params.assume_multiple(
                    Int32(vector * VECTOR_ELEMENTS), VECTOR_ELEMENTS
                )
                found = load_vector(source)
                for i in cutlass.range_constexpr(QUAD):
                    words[i] = found[i]
            strip, place = vector // strip_vectors, (vector % strip_vectors) ^ (row % strip_vectors)
            offset = strip * (build.tile_m * ROW_BYTES) + row * ROW_BYTES + place * VECTOR_BYTES
            target = cute.recast_ptr((base + (build.buffer("query").offset + offset)).align(VECTOR_BYTES), dtype=Uint32)
            cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(QUAD)))

    @cute.jit
    def store(self, p: Any, piece: Any, own: Any, last: Int32):
        """Normalises and stores this warpgroup's columns of the rows; the first also stores the logsumexp.

        last: slot of the last latent tile
        """
        build, seqlen, softmax = self.build, piece.seqlen, own.softmax
        group = seqlen_info.group_size(build, p)
        softmax.leave_sums(last)
        self.sync_warpgroups(own.index, MlaDecodeBarrier.SUMS_0)
        factors, logsumexps = softmax.finish(last, None, unit=1.0)
        values = row_view(own.output)
        multiply_rows(values, factors)
        column = own.index * (build.columns_value // WARPGROUPS)
        lane = own.thread % QUAD
        rows = [piece.row0 + row for row in softmax.tile_rows]
        if piece.is_whole:
            converted = row_view(tile_copy.converted(own.output, self.dtype))
            for index in cutlass.range_constexpr(len(rows)):
                query = rows[index] // group
                head = piece.head_key * group + (rows[index] - query * group)
                start = RowCoordinates(seqlen.batch, head, seqlen.query_start + query)
                target = params.row_pointer(build, p, "output", start) + column
                store_row(converted, index, target, (query, seqlen.num_queries), build.columns_value // WARPGROUPS)
                if cutlass.const_expr(own.index == 0):  # noqa: SIM102
                    if (query < seqlen.num_queries) & (lane == 0):
                        logsumexp.store(p, RowCoordinates(piece.batch, head, query), logsumexps[index] * math.log(2.0))
        else:
            for index in cutlass.range_constexpr(len(rows)):
                if rows[index] // group < seqlen.num_queries:
                    number = self.pieces.partial_row(piece.slot, softmax.tile_rows[index])
                    start = self.pieces.slot_output(p, number) + column
                    for pair in cutlass.range_constexpr(cute.size(values, mode=[1]) // 2):
                        two = cute.make_rmem_tensor(2, Float32)
                        for i in cutlass.range_constexpr(2):
                            two[i] = values[index, 2 * pair + i]
                        place = cute.assume(2 * QUAD * pair + 2 * lane, divby=2)
                        cute.autovec_copy(two, cute.make_tensor(start + place, cute.make_layout(2)))
                    if cutlass.const_expr(own.index == 0):  # noqa: SIM102
                        if lane == 0:
                            target = self.pieces.slot_logsumexp(p, number)
                            target[0] = logsumexps[index]
        if cutlass.const_expr(own.index == 0):  # noqa: SIM102
            if piece.is_first & (piece.row0 == 0):
                for i in cutlass.range(group, unroll=1):
                    self.store_padding(p, piece, piece.head_key * group + i, own.thread)

    @cute.jit
    def store_padding(self, p: Any, piece: Any, head: Int32, thread: Int32):
        """Stores +inf in the padding of a head's logsumexp. One warpgroup calls this."""
        num_queries = piece.seqlen.num_queries
        end = seqlen_info.padded_rows(num_queries)
        for query in cutlass.range(num_queries + thread, end, WARPGROUP_THREADS, unroll=1):
            logsumexp.store(p, RowCoordinates(piece.batch, head, query), Float32.inf)

    def create_warpgroup(self, p: Any, index: int, thread: Int32) -> Warpgroup:
        """Returns what a warpgroup uses for a piece."""
        build, base = self.build, tile_copy.smem_symbol()
        mma_qk, mma_pv, tiles = self.mma_qk[0], self.mma_pv, self.ring.tiles()
        columns = build.columns_value // WARPGROUPS
        query = smem_tile_at(base, build.buffer("query").offset, self.dtype, (build.tile_m, build.columns), 1)
        coordinates = row_view(mma_qk.coordinates(thread))
        tile_rows = [coordinates[row, 0][0] for row in range(cute.size(coordinates, mode=[0]))]
        output = mma_pv.accumulator(thread)
        output.fill(0.0)
        slices = [(strips[0] * STRIP_COLUMNS, len(strips) * STRIP_COLUMNS) for strips in CHUNKS]
        return Warpgroup(
            index=index,
            thread=thread,
            coordinates=coordinates,
            query=[mma_qk.a_operand(smem_column_slice(query, *columns_of), thread).stage(0) for columns_of in slices],
            key=[mma_qk.b_operand(smem_column_slice(tiles, *columns_of)) for columns_of in slices],
            p=mma_pv.a_operand(self.ring.p_tile(1 - index), thread),
            value=matmul_pv.b_operand(mma_pv, smem_column_slice(tiles, index * columns, columns)),
            output=output,
            softmax=AlternatingSoftmax(
                index,
                tile_copy.smem_pointer(build, "row_statistics", Float32),
                build.tile_m,
                tile_rows,
                safe_scale(p.scale_log2),
                self.rescales_lazily,
            ),
        )


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """Returns the host function that launches this build's kernels, and arguments to compile it with."""
    return MlaDecodeSm90(build), params.example_arguments(abi.fields_of(build))
