"""Pipelines: multi-stage shared-memory buffers between warps, with a full and an empty mbarrier for each stage."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Int64

from cutlass_py_attn.kernels.common import tile_copy, tma
from cutlass_py_attn.kernels.sm90_common.layout import tma_tiles
from cutlass_py_attn.launch.build import Build


class PipelineSpec(NamedTuple):
    """One pipeline that TMA fills.

    stages: stages of the buffer
    consumer_arrivals: arrivals that make a stage empty
    extra_bytes: bytes that are loaded with each tile
    """

    stages: int
    consumer_arrivals: int
    extra_bytes: int


def first_barrier(build: Build) -> cute.Pointer:
    """Returns where the plan's mbarriers start; a pipeline has two for each stage."""
    base = tile_copy.smem_base(build)
    return cute.recast_ptr((base + build.buffer("barriers").offset).align(8), dtype=Int64)


def tma_pipelines(build: Build, specs: Mapping[str, PipelineSpec]) -> tuple[list[Any], cute.Pointer]:
    """Creates a pipeline for each operand that TMA loads.

    specs: by operand
    Returns the pipelines, and the first mbarrier after theirs.
    """
    barriers, created = first_barrier(build), []
    for name, (stages, consumer_arrivals, extra_bytes) in specs.items():
        rows, columns = tma_tiles(build)[name]
        created.append(
            tma_pipeline(stages, consumer_arrivals, rows * columns * build.item_bytes + extra_bytes, barriers)
        )
        barriers = barriers + 2 * stages
    return created, barriers


def tma_pipeline(stages: int, consumer_arrivals: int, stage_bytes: int, barriers: cute.Pointer) -> Any:
    """Creates a pipeline that TMA fills, with `stage_bytes` a stage."""
    return pipeline.PipelineTmaAsync.create(
        num_stages=stages,
        producer_group=_arrivals(1),
        consumer_group=_arrivals(consumer_arrivals),
        tx_count=stage_bytes,
        barrier_storage=barriers,
        defer_sync=True,
    )


def thread_pipeline(stages: int, producer_arrivals: int, consumer_arrivals: int, barriers: cute.Pointer) -> Any:
    """Creates a pipeline that threads fill by stores to shared memory."""
    return pipeline.PipelineAsync.create(
        num_stages=stages,
        producer_group=_arrivals(producer_arrivals),
        consumer_group=_arrivals(consumer_arrivals),
        barrier_storage=barriers,
        defer_sync=True,
    )


def _arrivals(count: int) -> pipeline.CooperativeGroup:
    return pipeline.CooperativeGroup(pipeline.Agent.Thread, count)


def sync_barrier_init() -> None:
    """Makes the initialised mbarriers visible to all threads of the block."""
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


def states(user: Any, *stages: int) -> tuple[Any, ...]:
    """Returns the first PipelineState of a producer or a consumer, for each number of stages."""
    return tuple(pipeline.make_pipeline_state(user, count) for count in stages)


def load(build: Build, pipe: Any, state: Any, name: str, source: Any, at: tuple) -> None:
    """Waits for an empty stage and issues the TMA load of an operand's tile. All threads of a warp call this.

    at: coordinates of the tile, from `tma.tile_coordinates`
    """
    pipe.producer_acquire(state)
    barrier = pipe.producer_get_barrier(state)
    tma.load_tile(build, source, name, tma_tiles(build)[name], at, state.index, barrier)


def mark_full(pipe: Any, state: Any) -> None:
    """Waits for an empty stage and marks it full without a load. All threads of a warp call this."""
    pipe.sync_object_empty.wait(state.index, state.phase)
    arrive(pipe.sync_object_full, state.index)


def arrive(barriers: Any, stage: Int32) -> None:
    """Arrives at the mbarrier of a stage, once for each warp."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barriers.get_barrier(stage))


def arrive_all(barriers: Any, stage: Int32) -> None:
    """Arrives at the mbarrier of a stage, once for each thread.

    Each thread's own reads of the stage are then ordered before its arrival. compute-sanitizer's racecheck needs this
    form, because it does not follow the other threads of a warp.
    """
    cute.arch.mbarrier_arrive(barriers.get_barrier(stage))


def next_state(state: Any, stages: int) -> Any:
    """Returns the PipelineState after `state`."""
    is_last = state.index == stages - 1
    index = cutlass.select_(is_last, Int32(0), state.index + 1)
    phase = cutlass.select_(is_last, state.phase ^ 1, state.phase)
    return pipeline.PipelineState(stages, state.count + 1, index, phase)


def previous_stage(state: Any, stages: int) -> Int32:
    """Returns the stage before that of `state`."""
    return cutlass.select_(state.index == 0, Int32(stages - 1), state.index - 1)
