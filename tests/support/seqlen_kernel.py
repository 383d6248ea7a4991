"""Sequence-length kernel: stores the SeqlenInfo of a build's sequences, one thread each."""

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from cutlass_py_attn.kernels.common import params, seqlen_info
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.build import Build

SYMBOL = "seqlen_infos"
FIELDS = ("query_start", "num_queries", "key_start", "stored_keys", "num_keys", "first_tile")


class SeqlenInfos:
    """Sequence i belongs to thread i of all blocks. output: int32 (sequences, FIELDS)."""

    def __init__(self, build: Build) -> None:
        self.build = build

    @cute.jit
    def __call__(self, *values):
        p = params.from_values(self.build, values)
        self.kernel.set_name_prefix(SYMBOL, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(p).launch(grid=(p.batch, 1, 1), block=(self.build.threads, 1, 1))

    @cute.kernel
    def kernel(self, p: Any):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        index = block * self.build.threads + thread
        of = seqlen_info.create(self.build, p, index)
        target = params.pointer(p.output, Int32, 4) + Int64(index) * len(FIELDS)
        for place, name in enumerate(FIELDS):
            cute.make_tensor(target + place, cute.make_layout(1))[0] = Int32(getattr(of, name))


def trace(build: Build) -> tuple[Callable[..., Any], tuple[object, ...]]:
    """Replaces compilation.registry.trace."""
    return SeqlenInfos(build), params.example_arguments(abi.fields_of(build))
