"""Pipes: rings of tiles between warps that run apart, with a full and an empty barrier for every slot."""

from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Int64

from cutlass_py_attn.hopper import loaded_tiles
from cutlass_py_attn.parts import tma
from cutlass_py_attn.plan import Build


def first_barrier(build: Build) -> cute.Pointer:
    """Where the plan's barriers lie; a pipe takes two for each slot."""
    base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
    return cute.recast_ptr((base + build.buffer("barriers").offset).align(8), dtype=Int64)


def loaded(build: Build, users: Mapping[str, tuple[int, int, int]]) -> tuple[list[Any], cute.Pointer]:
    """A pipe for each operand that TMA brings, and the barrier behind theirs.

    users: by operand (slots, arrivals that give a slot back, bytes that come with a tile).
    """
    barriers, made = first_barrier(build), []
    for name, (slots, readers, more) in users.items():
        rows, columns = loaded_tiles(build)[name]
        made.append(
            pipeline.PipelineTmaAsync.create(
                num_stages=slots,
                producer_group=_arrivals(1),
                consumer_group=_arrivals(readers),
                tx_count=rows * columns * build.item_bytes + more,
                barrier_storage=barriers,
                defer_sync=True,
            )
        )
        barriers = barriers + 2 * slots
    return made, barriers


def handed_over(slots: int, writers: int, readers: int, barriers: cute.Pointer) -> Any:
    """A pipe of what threads write: the arrivals that make a slot full and those that give it back."""
    return pipeline.PipelineAsync.create(
        num_stages=slots,
        producer_group=_arrivals(writers),
        consumer_group=_arrivals(readers),
        barrier_storage=barriers,
        defer_sync=True,
    )


def _arrivals(count: int) -> pipeline.CooperativeGroup:
    return pipeline.CooperativeGroup(pipeline.Agent.Thread, count)


def meet() -> None:
    """All threads of the block see the barriers."""
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


def states(user: Any, *slots: int) -> tuple[Any, ...]:
    """Where one user of pipes with so many slots begins."""
    return tuple(pipeline.make_pipeline_state(user, count) for count in slots)


def fetch(build: Build, pipe: Any, state: Any, name: str, source: Any, at: tuple) -> None:
    """Wait for a slot and ask for the tile of an operand at a `tma.place`; a warp calls this."""
    pipe.producer_acquire(state)
    barrier = pipe.producer_get_barrier(state)
    tma.fetch(build, source, name, loaded_tiles(build)[name], at, state.index, barrier)


def fill(pipe: Any, state: Any) -> None:
    """Wait for a slot and make it full, though no tile comes; a warp calls this."""
    pipe.sync_object_empty.wait(state.index, state.phase)
    arrive(pipe.sync_object_full, state.index)


def arrive(barriers: Any, slot: Int32) -> None:
    """One arrival for each warp at a slot's barrier."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barriers.get_barrier(slot))


def arrive_all(barriers: Any, slot: Int32) -> None:
    """One arrival for each thread at a slot's barrier: what each has read of the slot is thereby known to be read, by
    racecheck too, which follows no other thread of its warp."""
    cute.arch.mbarrier_arrive(barriers.get_barrier(slot))


def behind(state: Any, slots: int) -> Any:
    """The state after `state`."""
    is_last = state.index == slots - 1
    index = cutlass.select_(is_last, Int32(0), state.index + 1)
    phase = cutlass.select_(is_last, state.phase ^ 1, state.phase)
    return pipeline.PipelineState(slots, state.count + 1, index, phase)


def before(state: Any, slots: int) -> Int32:
    """The slot before the one that `state` stands at."""
    return cutlass.select_(state.index == 0, Int32(slots - 1), state.index - 1)
