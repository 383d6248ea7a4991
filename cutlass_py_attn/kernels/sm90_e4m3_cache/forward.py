"""sm90 forward over an e4m3 cache: O = softmax(scale Q K^T) V and the logsumexp, with keys and values of e4m3 codes.

The kernel is the forward of 16-bit operands (forward.py) with the differences below.

    loads     the first warpgroup loads the codes of key and value tiles, converts them to the dtype of query and stores
              them as wgmma reads them (e4m3_tiles.py); one of its warps also loads query tiles by TMA
    scores    the scale of a key head is in the scale of the exponent; with score terms, or scales of rows, scores are
              multiplied before anything else
    output    the scale of a value head joins the normalised output

    step        S(n - 1) = Q K^T, then O += P(n) V             softmax of S(n - 1)
    in flight   codes of key tile n - 3, conversion of n - 2   value tiles likewise
"""

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as tensor_maps
import cutlass.pipeline as pipeline
from cutlass import Float32, GridConstant, Int32

from cutlass_py_attn.integers import larger
from cutlass_py_attn.kernels.common import e4m3, params, seqlen_info, tma
from cutlass_py_attn.kernels.common.wgmma import row_view
from cutlass_py_attn.kernels.sm90_common import pipelines
from cutlass_py_attn.kernels.sm90_common.cluster import SingleCta
from cutlass_py_attn.kernels.sm90_common.layout import num_stages, tma_tiles
from cutlass_py_attn.kernels.sm90_common.tile_scheduler import WorkTile
from cutlass_py_attn.kernels.sm90_e4m3_cache.e4m3_tiles import CodedTile, E4m3CacheTiles
from cutlass_py_attn.kernels.sm90_e4m3_cache.layout import registers
from cutlass_py_attn.kernels.sm90_forward.forward import ConsumerState, ForwardSm90, Pipelines
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS, WARPGROUP_THREADS, WARPGROUP_WARPS


class ConvertingCta(SingleCta):
    """One block whose key and value tiles are stored by threads."""

    def release(self, pipe: Any, state: Any) -> None:
        """Releases a stage. One warp calls this."""
        pipelines.arrive(pipe.sync_object_empty, state.index)


class ForwardE4m3CacheSm90(ForwardSm90):
    """The forward kernel of one Build of variant e4m3_cache."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.registers = registers(build)
        self.cluster = ConvertingCta(build)
        self.tiles = E4m3CacheTiles(build)

    def placeholder_maps(self, p: Any) -> tuple[Any, ...]:
        """Returns the tensor map of query for tracing."""
        return (tma.placeholder_map(p, p.query, self.dtype, *tma_tiles(self.build)["query"]),)

    @cute.kernel
    def kernel(self, map_q: GridConstant[tensor_maps.TensorMap], p: Any):
        self.run(p, (map_q,))

    @cute.jit
    def run(self, p: Any, maps: tuple):
        """Executes the role of this warp."""
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        pipes = self.create_pipelines()
        self.cluster.sync_barrier_init()
        if warp < WARPGROUP_WARPS:
            cute.arch.setmaxregister_decrease(self.registers[0])
            self.load(p, pipes, maps)
        else:
            cute.arch.setmaxregister_increase(self.registers[-1])
            self.mma(p, pipes, thread - WARPGROUP_THREADS)

    def create_pipelines(self) -> Pipelines:
        """Creates the pipelines: threads of the first warpgroup fill those of key and value, consumer warps release."""
        stages, warps = num_stages(self.build), self.consumers // WARP_THREADS
        (query,), barriers = pipelines.tma_pipelines(
            self.build, {"query": pipelines.PipelineSpec(stages["query"], warps, 0)}
        )
        key = pipelines.thread_pipeline(stages["key"], WARPGROUP_THREADS, warps, barriers)
        barriers = barriers + 2 * stages["key"]
        value = pipelines.thread_pipeline(stages["value"], WARPGROUP_THREADS, warps, barriers)
        return Pipelines(query, key, value)

    @cute.jit
    def load(self, p: Any, pipes: Any, maps: tuple):
        """First warpgroup: loads query tiles, and loads and converts key and value tiles, one work tile after another.

        The codes of a tile, and the table's entries of the tile after it, are loaded while the tile before is
        converted.
        """
        build = self.build
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        q_state, k_state, v_state = self.pipeline_states(pipeline.PipelineUserType.Producer)
        held, entries, next_entries = self.tiles.held_codes(), self.tiles.held_entries(), self.tiles.held_entries()
        cursor = self.scheduler.initial_cursor(p)
        for wave in cutlass.range(self.scheduler.num_waves(p), unroll=1):
            work, cursor = self.scheduler.work_tile(p, wave, cursor)
            seqlen, num_keys = work.seqlen, work.seqlen.num_keys
            rows = self.tiles.cached_rows(p, seqlen, seqlen_info.key_head(build, p, work.head))
            last = (work.end - 1) * build.tile_n
            self.tiles.load_entries(p, rows, last, num_keys, entries)
            self.tiles.load(p, rows, CodedTile("key", last, num_keys, entries), held)
            coordinates = tma.tile_coordinates(build, work.tile * build.tile_m, work.head, seqlen, "query")
            if warp == 0:
                pipelines.load(build, pipes.query, q_state, "query", maps[0], coordinates)
            q_state.advance()
            for i in cutlass.range(work.end - work.first, unroll=1):
                key_tile = work.end - 1 - i
                first, before = key_tile * build.tile_n, larger(key_tile - 1, 0) * build.tile_n
                end = Int32(cutlass.select_(key_tile > work.first, num_keys, Int32(0)))  # no tile before the first
                self.tiles.load_entries(p, rows, before, end, next_entries)
                pipes.key.producer_acquire(k_state)
                if cutlass.const_expr(self.tiles.has_row_scales):
                    self.tiles.copy_scales(p, rows, k_state.index, first, entries)
                following = CodedTile("value", first, num_keys, entries)
                self.tiles.convert(p, rows, "key", k_state.index, held, following)
                value_scales = self.arrived_scales(v_state)
                self.publish(pipes.key, k_state)
                k_state.advance()
                pipes.value.producer_acquire(v_state)
                self.tiles.clear_last_rows(first, num_keys, held)
                following = CodedTile("key", before, end, next_entries)
                self.tiles.convert(p, rows, "value", v_state.index, held, following, value_scales)
                self.publish(pipes.value, v_state)
                v_state.advance()
                for row in cutlass.range_constexpr(self.tiles.rows):
                    entries[row] = next_entries[row]

    def arrived_scales(self, v_state: Any) -> cute.Tensor | None:
        """Waits for the scales of rows; returns those of the value tile, which this warp has copied. None without.

        The stages of key and value have the same numbers.
        """
        if not self.tiles.has_row_scales:
            return None
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()
        return self.tiles.scales("value", v_state.index)

    def publish(self, pipe: Any, state: Any) -> None:
        """Makes this thread's stores to a stage visible to wgmma, and marks them as done."""
        cute.arch.fence_proxy("async.shared", space="cta")
        pipelines.arrive_all(pipe.sync_object_full, state.index)

    def with_scales(self, p: Any, work: WorkTile, consumer: ConsumerState) -> ConsumerState:
        """Returns the state with the scales of a work tile's keys and values, unless rows have scales.

        A sequence without keys may have any scale.
        """
        if self.tiles.has_row_scales:
            return consumer
        head, one = seqlen_info.key_head(self.build, p, work.head), Float32(1.0)
        key, value = (
            Float32(cutlass.select_(work.seqlen.num_keys > 0, e4m3.scale(p, name, work.seqlen.index, head), one))
            for name in ("key", "value")
        )
        scale_log2 = consumer.scale_log2 if self.score_mod.present else e4m3.exponent_scale(p.scale_log2 * key)
        return replace(consumer, scale_log2=scale_log2, key_scale=key, value_scale=value)

    def scale_keys(self, r_s: cute.Tensor, consumer: ConsumerState, k_state: Any) -> None:
        """Multiplies S by the scales of the rows of the key tile of `k_state`, before it is released."""
        if not self.tiles.has_row_scales:
            return
        scales, scores, coordinates = self.tiles.scales("key", k_state.index), row_view(r_s), consumer.coordinates
        for column in range(cute.size(scores, mode=[1])):
            scale = scales[coordinates[0, column][1]]
            for row in range(cute.size(scores, mode=[0])):
                scores[row, column] = scores[row, column] * scale

    def modify_scores(
        self,
        p: Any,
        work: WorkTile,
        key_tile: Int32,
        r_s: cute.Tensor,
        consumer: ConsumerState,
        operands: Any,
        bias: Any,
    ) -> None:
        """Applies the score modification to a tile of S."""
        if self.score_mod.present and not self.tiles.has_row_scales:
            r_s.store(r_s.load() * consumer.key_scale)
        super().modify_scores(p, work, key_tile, r_s, consumer, operands, bias)

    def scale_output(self, r_o: cute.Tensor, consumer: ConsumerState) -> None:
        """Multiplies O by the scale of a work tile's values."""
        if not self.tiles.has_row_scales:
            r_o.store(r_o.load() * consumer.value_scale)


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """Returns the host function that launches this build's kernel, and arguments to compile it with."""
    return ForwardE4m3CacheSm90(build), params.example_arguments(abi.fields_of(build))
