"""Append: key and value rows of new tokens, stored in the pages of a cache (plan/append.py).

The threads of a row load its key and its value before they read the token's slot, so that many loads are in flight. A
row is stored only if its slot is in the cache: slots are in device memory, where no host checks them.

    variant    stored
    ""         the row's bits
    e4m3       e4m3(row * (1 / scale)), by a scale per head, in float32
    e4m3_row   e4m3(row * (448 / largest)), scale = largest / 448 of each row; largest from LEAST to float32's largest
    e4m3_tile  key: the same of each 128 columns of a row, its tiles; value, the columns of the rotary embedding: bits

`common/e4m3.py` has the rule by which e4m3 rounds and saturates.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8

from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.kernels.common import e4m3, params
from cutlass_py_attn.kernels.common.e4m3 import MAX_E4M3
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.variants import E4M3, E4M3_TILE, STANDARD
from cutlass_py_attn.problem.quantization import SCALE_COLUMNS
from cutlass_py_attn.problem.tensors import F32_BYTES

LEAST = 2.0**-100  # a smaller row has this one's scale: scale and 448 / largest stay normal float32 numbers
FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True)
class CacheRow:
    """A row of the cache: its page, the row in the page, the head; is_stored: whether it is in the cache."""

    page: Any
    row: Any
    head: Any
    is_stored: Any


class Append:
    """The kernel of one Build."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.dtype = DTYPES[build.dtype]
        self.vector = build.vector_bytes // build.item_bytes
        self.columns = {"key": build.head_dim, "value": build.head_dim_value}

    @cute.jit
    def __call__(self, *values):
        p = params.from_values(self.build, values)
        params.set_entry_name(self.build, self.kernel)
        bounds = params.launch_bounds(self.build)
        self.kernel(p).launch(grid=(p.num_rows, 1, 1), block=(self.build.threads, 1, 1), **bounds)

    @cute.kernel
    def kernel(self, p: Any):
        build = self.build
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread % build.tile_n
        number = block * build.tile_m + thread // build.tile_n
        # Threads beyond the last row load it too, because all threads of a warp take part in the maximum of a row.
        row = cutlass.select_(number < p.num_rows, number, p.num_rows - 1)
        token = row // p.num_heads_key
        head = row - token * p.num_heads_key
        r_key = self.load(p, "key", token, head, lane)
        r_value = self.load(p, "value", token, head, lane)
        slot = params.load_scalar(p.slots, Int64, token)
        in_cache = (slot >= Int64(0)) & (slot < Int64(p.num_slots))
        slot = Int32(cutlass.select_(in_cache, slot, Int64(0)))
        page = slot // p.page_size
        target = CacheRow(page, slot - page * p.page_size, head, in_cache & (number < p.num_rows))
        self.store(p, "key", r_key, target, lane)
        self.store(p, "value", r_value, target, lane)

    def steps(self, name: str) -> int:
        """Returns the vectors of a row that each of its threads copies."""
        return ceil_div(self.columns[name], self.vector * self.build.tile_n)

    def in_row(self, name: str, column: Int32) -> Any:
        """Returns whether a row has this column; True if every thread's columns are in the row."""
        if self.columns[name] % (self.vector * self.build.tile_n) == 0:
            return True
        return column < self.columns[name]

    @cute.jit
    def load(self, p: Any, name: cutlass.Constexpr, token: Int32, head: Int32, lane: Int32):
        """Returns this thread's vectors of a row, in registers (steps * vector,); 0 for columns beyond the row."""
        vector, steps = self.vector, self.steps(name)
        values = cute.make_rmem_tensor((vector, steps), self.dtype)
        offset = Int64(token) * getattr(p, f"{name}_row") + Int64(head) * getattr(p, f"{name}_head")
        start = params.pointer(getattr(p, name), self.dtype, self.build.vector_bytes) + params.assume_multiple(
            offset, vector
        )
        for step in cutlass.range_constexpr(steps):
            column = (step * self.build.tile_n + lane) * vector
            if cutlass.const_expr(self.in_row(name, column) is True):
                cute.autovec_copy(self.vector_at(start, column), values[None, step])
            else:
                values[None, step].fill(0.0)
                if column < self.columns[name]:
                    cute.autovec_copy(self.vector_at(start, column), values[None, step])
        return values

    def vector_at(self, start: cute.Pointer, column: Int32) -> cute.Tensor:
        """Returns one vector of a row in global memory."""
        return cute.make_tensor(start + params.assume_multiple(column, self.vector), cute.make_layout(self.vector))

    @cute.jit
    def store(self, p: Any, name: cutlass.Constexpr, values: cute.Tensor, target: CacheRow, lane: Int32):
        """Stores this thread's vectors of a row in the cache, converted as the variant says."""
        build, vector = self.build, self.vector
        offset = (
            Int64(target.page) * getattr(p, f"{name}_cache_page")
            + Int64(target.row) * getattr(p, f"{name}_cache_row")
            + Int64(target.head) * getattr(p, f"{name}_cache_head")
        )
        has_codes = self.has_codes(name)
        dtype = Uint8 if has_codes else self.dtype
        start = params.pointer(getattr(p, f"{name}_cache"), dtype, vector * dtype.width // 8)
        start = start + params.assume_multiple(offset, vector)
        factors = [Float32(1.0)] * self.steps(name)
        if cutlass.const_expr(has_codes):
            factors = self.factors(p, name, values, target, lane)
        for step in cutlass.range_constexpr(self.steps(name)):
            column = (step * build.tile_n + lane) * vector
            stored = cute.make_rmem_tensor(vector, dtype)
            if cutlass.const_expr(has_codes):
                scaled = cute.make_rmem_tensor(vector, Float32)
                scaled.store(values[None, step].load().to(Float32) * factors[step])
                cute.autovec_copy(e4m3.codes(build.arch, scaled), stored)
            else:
                cute.autovec_copy(values[None, step], stored)
            if cutlass.const_expr(self.in_row(name, column) is True):
                if target.is_stored:
                    cute.autovec_copy(stored, self.vector_at(start, column))
            else:
                if target.is_stored & (column < self.columns[name]):
                    cute.autovec_copy(stored, self.vector_at(start, column))

    def has_codes(self, name: str) -> bool:
        """Returns whether the rows are stored as e4m3 codes."""
        return self.build.variant != STANDARD and (self.build.variant, name) != (E4M3_TILE, "value")

    @cute.jit
    def factors(self, p: Any, name: cutlass.Constexpr, values: cute.Tensor, target: CacheRow, lane: Int32):
        """Returns the factor of each vector of a row before it is rounded; stores the scales if they are computed."""
        build, steps = self.build, self.steps(name)
        scale = f"{name}_scale"
        offset = (
            Int64(target.page) * getattr(p, f"{scale}_page")
            + Int64(target.row) * getattr(p, f"{scale}_row")
            + Int64(target.head) * getattr(p, f"{scale}_head")
        )
        if cutlass.const_expr(build.variant == E4M3):
            return [Float32(1.0) / params.load_scalar(getattr(p, scale), Float32, offset)] * steps
        # A scale is that of `threads` neighbours in `together` steps: of the whole row, or of a tile of its columns.
        threads, together = build.tile_n, steps
        if cutlass.const_expr(build.variant == E4M3_TILE):
            vectors = SCALE_COLUMNS // self.vector
            threads, together = min(vectors, build.tile_n), ceil_div(vectors, build.tile_n)
        factors = []
        for first in cutlass.range_constexpr(0, steps, together):
            count = min(together, steps - first)
            largest = self.largest(values, range(first * self.vector, (first + count) * self.vector), threads)
            place, is_first = offset, lane == 0
            if cutlass.const_expr(build.variant == E4M3_TILE):
                column = (first * build.tile_n + lane) * self.vector
                place = offset + Int64(column // SCALE_COLUMNS) * p.key_scale_tile
                is_first = (lane % threads == 0) & self.in_row(name, column)
            if target.is_stored & is_first:
                start = params.pointer(getattr(p, scale), Float32, F32_BYTES) + place
                cute.make_tensor(start, cute.make_layout(1))[0] = largest / Float32(MAX_E4M3)
            factors += [Float32(MAX_E4M3) / largest] * count
        return factors

    def largest(self, values: cute.Tensor, places: range, threads: int) -> Float32:
        """Returns the largest magnitude in these places of neighbouring threads, or LEAST; NaN counts as nothing."""
        found = Float32(LEAST)
        for i in places:
            number = Float32(values[i])
            found = cute.arch.fmax(found, cute.arch.fmax(number, -number))
        found = cute.arch.warp_reduction_max(found, threads_in_group=threads)
        return cute.arch.fmin(found, Float32(FLOAT32_MAX))


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """Returns the host function that launches this build's kernel, and arguments to compile it with."""
    return Append(build), params.example_arguments(abi.fields_of(build))
