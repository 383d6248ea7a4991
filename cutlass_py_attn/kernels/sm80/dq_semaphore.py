"""dQ semaphore: blocks add to a query tile's sum in the order of their key tiles, so that the sum is deterministic.

The struct's field `dq_semaphore` is one int32 counter for each sum: how many key tiles have been added.
`tile_count_semaphore` counts the blocks that have started.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cutlass_py_attn.kernels.common import params
from cutlass_py_attn.launch.build import Build


@cute.jit
def start_rank(p: Any, index: Int64, thread: Int32, shared: cute.Tensor):
    """Returns this block's rank, in the order of starting, among the blocks that count at `index`.

    Blocks process their key tiles in this order. Each then waits only for blocks that already run, in whichever order
    the GPU starts them. shared: one int32 of shared memory
    """
    if thread == 0:
        started = params.pointer(p.tile_count_semaphore, Int32, 4) + index
        shared[0] = cute.arch.atomic_add(started, Int32(1), sem="relaxed", scope="gpu")
    cute.arch.sync_threads()
    rank = shared[0]
    cute.arch.sync_threads()
    return rank


@cute.jit
def acquire(build: cutlass.Constexpr, p: Any, index: Int64, num_before: Int32, thread: Int32):
    """Waits until `num_before` key tiles have been added to the sum at `index`."""
    counter = params.pointer(p.dq_semaphore, Int32, 4) + index
    if thread == 0:
        seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
        while _is_too_few(build, seen, num_before):
            seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    cute.arch.sync_threads()


def _is_too_few(build: Build, seen: Int32, num_before: Int32) -> Boolean:
    """Returns whether more key tiles must be added first.

    With variable lengths, sequences with wrong bounds may share a sum, which then counts the key tiles of both.
    """
    return seen < num_before if build.has("varlen") else seen != num_before


@cute.jit
def release(p: Any, index: Int64, thread: Int32):
    """Lets the next key tile add to the sum at `index`."""
    cute.arch.sync_threads()
    if thread == 0:
        counter = params.pointer(p.dq_semaphore, Int32, 4) + index
        cute.arch.red(counter, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
