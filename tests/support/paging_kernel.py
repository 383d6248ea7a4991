"""Paging kernel: stores where the keys of a build's sequences lie in the pools, one thread for each key."""

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from cutlass_py_attn.kernels.common import paged_tile_copy, params, seqlen_info
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.build import Build

SYMBOL = "paged_rows"
FIELDS = ("num_keys", "key", "value")
FIRST_ROW = 7  # of the tile


class PagedRows:
    """Block b has sequence b, and thread t the row FIRST_ROW + t of it. output: int64 (sequences, threads, FIELDS)."""

    def __init__(self, build: Build) -> None:
        self.build = build

    @cute.jit
    def __call__(self, *values):
        p = params.from_values(self.build, values)
        self.kernel.set_name_prefix(SYMBOL, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(p).launch(grid=(p.batch, 1, 1), block=(self.build.threads, 1, 1))

    @cute.kernel
    def kernel(self, p: Any):
        build = self.build
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        seqlen = seqlen_info.create(build, p, block)
        found = [Int64(seqlen.num_keys)]
        for name in ("key", "value"):
            tile = paged_tile_copy.paged_tile(build, p, name, seqlen, Int32(1), Int32(FIRST_ROW), build.head_dim)
            head = params.stride(p, name, "head")
            found.append(paged_tile_copy.row_offset(p, tile, thread) + head)
        target = params.pointer(p.output, Int64, 8) + Int64(block * build.threads + thread) * len(FIELDS)
        for place, value in enumerate(found):
            cute.make_tensor(target + place, cute.make_layout(1))[0] = value


def trace(build: Build) -> tuple[Callable[..., Any], tuple[object, ...]]:
    """Replaces compilation.registry.trace."""
    return PagedRows(build), params.example_arguments(abi.fields_of(build))
