"""Inputs of the mma.sync forwards' score modification besides S: a bias tile in shared memory and dropout mask bits."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from cutlass_py_attn.kernels.common import dropout, params, tile_copy
from cutlass_py_attn.kernels.common.mma_sync import MmaSync, row_view
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.kernels.common.score_mod import bias_of
from cutlass_py_attn.kernels.common.seqlen_info import SeqlenInfo
from cutlass_py_attn.launch.build import Build


class ScoreInputs:
    """Bias and dropout mask bits of the tiles of S.

    mma_qk: the GEMM of S.
    bias_buffer: the plan's buffer in shared memory that holds a bias tile.
    """

    def __init__(self, build: Build, mma_qk: MmaSync, bias_buffer: str) -> None:
        self.build, self.mma_qk, self.bias_buffer = build, mma_qk, bias_buffer

    def bias_tile(self) -> cute.Tensor:
        """Returns the bias tile in shared memory."""
        build, base = self.build, tile_copy.smem_base(self.build)
        offset = build.buffer(self.bias_buffer).offset
        return tile_copy.smem_tile(base, offset, DTYPES[build.dtype], build.tile_m, build.tile_n)

    def load_bias(self, p: Any, seqlen: SeqlenInfo, head: Int32, tile_origin: tuple, thread: Int32) -> None:
        """Starts copying the bias tile at `tile_origin`, if there is a bias."""
        if self.build.has("bias"):
            source = bias_of(self.build, p, "bias", seqlen, head, tile_origin)
            tile_copy.copy_g2s(thread, self.build.threads, source, self.bias_tile())

    def bias_partition(self, thread: Int32) -> cute.Tensor | None:
        """Returns this thread's partition of the bias tile; None without a bias."""
        if not self.build.has("bias"):
            return None
        return self.mma_qk.mma.get_slice(thread).partition_C(self.bias_tile())

    def dropout_bits(self, p: Any, seqlen: SeqlenInfo, head: Int32, tile_origin: tuple) -> cute.Tensor | None:
        """Returns the mask bits of this thread's scores; None without dropout."""
        if not self.build.has("dropout"):
            return None
        coordinates = row_view(self.mma_qk.coordinates(params.read_register("tid.x")))
        return dropout.keep_bits_of_tile(self.build, p, coordinates, tile_origin, (seqlen, head))
