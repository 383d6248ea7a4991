"""Terms: what is added to the scaled scores or done to them before the mask: softcap, ALiBi, bias.

A kernel without terms keeps its scores as raw products and scales them inside the exponent. With terms they become
numbers in base 2 right after the product: log2(e) times what the formula of Problem says. The functions take the
rows x columns view of an accumulator, of mma.sync and wgmma alike.
"""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutlass_py_attn.masks import Band
from cutlass_py_attn.parts import params
from cutlass_py_attn.parts.lengths import Sequence
from cutlass_py_attn.parts.moves import Source
from cutlass_py_attn.plan import Build

LOG2_E = math.log2(math.e)
KINDS = ("alibi", "bias", "softcap")


class Terms:
    """The score terms of one Build."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.present = any(build.has(kind) for kind in KINDS)

    def slope(self, p: Any, batch: Int32, head: Int32) -> Float32:
        """ALiBi's slope of this head in base 2; 0 without it."""
        if not self.build.has("alibi"):
            return Float32(0.0)
        return params.scalar(p.alibi_slopes, Float32, batch * p.alibi_batch + head) * LOG2_E

    def apply(
        self, p: Any, scores: cute.Tensor, where: cute.Tensor, corner: tuple, band: Band, given: tuple
    ) -> cute.Tensor | None:
        """Raw products become scores in base 2; the derivative of the softcap if there is one.

        given: (slope, bias): what `slope` gave, and this thread's part of the bias tile in shared memory or None.
        """
        slope, bias = given
        derivative = cute.make_rmem_tensor_like(scores) if self.build.has("softcap") else None
        for row in range(cute.size(scores, mode=[0])):
            values = scores[row, None].load()
            if self.build.has("softcap"):
                capped = self._tanh(values * (p.scale / p.softcap))
                derivative[row, None].store(1.0 - capped * capped)
                values = capped * (p.softcap * LOG2_E)
            else:
                values = values * p.scale_log2
            if bias is not None:
                values = values + self._bias_row(scores, bias, row) * LOG2_E
            scores[row, None].store(values)
            if self.build.has("alibi"):
                self._add_alibi(scores, where, corner, band, slope, row)
        return derivative

    def _bias_row(self, scores: cute.Tensor, part: cute.Tensor, row: int) -> Any:
        """The bias of one row, read when it is needed: a whole tile of it would be too many registers."""
        values = cute.make_rmem_tensor(scores[row, None].layout.shape, params.DTYPES[self.build.dtype])
        source = part[(None, row % 2), row // 2, None]
        cute.autovec_copy(source, cute.make_tensor(values.iterator, cute.make_layout(source.shape)))
        return values.load().to(Float32)

    def _tanh(self, values: Any) -> Any:
        """tanh: the hardware's for 16-bit operands, 2 / (1 + exp(-2 x)) - 1 where float32 asks for more."""
        if self.build.item_bytes == 2:
            return cute.math.tanh(values, fastmath=True)
        return cute.math.tanh(values, fastmath=False)

    def _add_alibi(
        self, scores: cute.Tensor, where: cute.Tensor, corner: tuple, band: Band, slope: Float32, row: int
    ) -> None:
        """-slope |i + num_keys - num_queries - j|."""
        query0, key0 = corner
        diagonal = query0 + where[row, 0][0] + band.num_keys - band.num_queries - key0
        for column in range(cute.size(scores, mode=[1])):
            distance = Float32(diagonal - where[0, column][1])
            magnitude = cute.arch.fmax(distance, -distance)
            scores[row, column] = scores[row, column] - slope * magnitude


def bias_source(build: Build, p: Any, name: str, at: tuple[Any, Any, Any, Any], sizes: tuple[Any, Any]) -> Source:
    """A tile of `bias` or `grad_bias`, whose first (batch, head, query, key) is `at`, of `sizes` queries and keys."""
    batch, head, query, key = at
    access = build.bias_access_bytes if name == "bias" else build.grad_bias_access_bytes
    row, column = params.stride(p, name, "row"), params.stride(p, name, "column")
    by_element = access == build.item_bytes
    offset = cutlass.Int64(key) * column if by_element else cutlass.Int64(key)
    for index, axis in ((batch, "batch"), (head, "head"), (query, "row")):
        offset = offset + cutlass.Int64(index) * params.stride(p, name, axis)
    start = params.pointer(getattr(p, name), params.DTYPES[build.dtype], access)
    start = start + params.multiple(offset, access // build.item_bytes)
    left = sizes[0] - query, sizes[1] - key
    return Source(start, row, *left, access, column if by_element else 1)


def bias_of(build: Build, p: Any, name: str, of: Sequence, head: Int32, corner: tuple[Any, Any]) -> Source:
    """The tile at `corner` of a sequence and query head. grad_bias has keys that are there but not used, too."""
    keys = of.stored_keys if name == "grad_bias" else of.num_keys
    return bias_source(build, p, name, (of.index, head, *corner), (of.num_queries, keys))
