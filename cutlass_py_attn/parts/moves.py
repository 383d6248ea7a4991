"""Moves: tiles between global memory, shared memory and registers, sixteen bytes at a time."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import LoadCacheMode, cpasync, warp

from cutlass_py_attn.device import architecture
from cutlass_py_attn.parts import params
from cutlass_py_attn.plan import F32_ROW_PADDING, Build
from cutlass_py_attn.shared_memory import threads_of_row

VECTOR_BYTES = 16
ELEMENT_UNROLL = 8  # elements on their way at once where a thread moves single ones
ONE = 1  # the layout of a single element


def shared_pointer(build: Build, name: str, dtype) -> cute.Pointer:
    """Where the plan's buffer of that name starts in the block's shared memory."""
    base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024) + build.buffer(name).offset
    return cute.recast_ptr(base.align(128), dtype=dtype)


def shared_tile(base: cute.Pointer, offset: int, dtype, rows: int, columns: int, stages: int = 1) -> cute.Tensor:
    """A (rows, columns) tile, or a ring (rows, columns, stages), at `offset` bytes of the block's shared memory.

    16-bit rows are swizzled in chunks of 128 bytes (64 bytes when columns is an odd multiple of 32), so that
    eight rows of a column lie in different banks; float32 rows are padded instead.
    """
    pointer = cute.recast_ptr((base + offset).align(128), dtype=dtype)
    shape, order = ((rows, columns), (0, 1)) if stages == 1 else ((rows, columns, stages), (0, 1, 2))
    if dtype is Float32:
        row = columns + F32_ROW_PADDING
        return cute.make_tensor(pointer, cute.make_layout(shape, stride=(row, 1, rows * row)[: len(shape)]))
    wide = columns % 64 == 0
    atom_columns, bits = (64, 3) if wide else (32, 2)
    rows_of_atom = cute.make_layout((8, atom_columns), stride=(atom_columns, 1))
    atom = cute.make_composed_layout(cute.make_swizzle(bits, 3, 3), 0, rows_of_atom)
    return cute.make_tensor(pointer, cute.tile_to_shape(atom, shape, order))


def _tiled_copy(atom: cute.CopyAtom, threads: int, columns: int, dtype, access: int) -> cute.TiledCopy:
    vector = access * 8 // dtype.width
    chunk = threads_of_row(columns * dtype.width // 8, access)
    lanes = cute.make_layout((threads // chunk, chunk), stride=(chunk, 1))
    return cute.make_tiled_copy_tv(atom, lanes, cute.make_layout((1, vector)))


class Source:
    """Rows in global memory: where the first starts, elements from row to row and from column to column (1 unless
    given), and how many rows and columns exist. Rows are aligned to `access` bytes, and as many exist of each row
    as a multiple of that."""

    def __init__(self, start, row, rows: Int32, columns, access: int, column=1) -> None:
        self.start, self.row, self.rows, self.columns = start, row, rows, columns
        self.access, self.column = access, column


def tile_of(build: Build, p, name: str, at: tuple, rows: Int32, columns: int) -> Source:
    """Tensor `name` from (batch, head, row) on, of which `rows` rows and `columns` columns exist."""
    column = params.stride(p, name, "column") if name == "grad_output" and by_element(build) else 1
    row = params.stride(p, name, "row")
    return Source(params.rows(build, p, name, at), row, rows, columns, build.access_bytes, column)


def by_element(build: Build) -> bool:
    """Whether rows are read an element at a time; then the columns of grad_output may lie apart."""
    return build.access_bytes == build.item_bytes


def load_tile(thread: Int32, threads: int, source: Source, tile: cute.Tensor) -> None:
    """Start copying a tile from global memory; commits nothing. What lies past the source becomes zero, unread."""
    if source.access * 8 < 32:
        _load_elements(thread, threads, source.start, (source.row, source.column), (source.rows, source.columns), tile)
        return
    strides = params.multiple(source.row, source.access * 8 // tile.element_type.width), source.column
    _load_vectors(thread, threads, source.start, strides, (source.rows, source.columns), source.access, tile)


@cute.jit
def _load_vectors(
    thread: Int32,
    threads: cutlass.Constexpr,
    start: cute.Pointer,
    strides: tuple,
    valid: tuple,
    access: cutlass.Constexpr,
    tile: cute.Tensor,
):
    """With cp.async, `access` bytes at a time."""
    dtype = tile.element_type
    rows, columns = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    # Only whole 16-byte vectors can pass by the first-level cache.
    cached = LoadCacheMode.GLOBAL if cutlass.const_expr(access == VECTOR_BYTES) else LoadCacheMode.ALWAYS
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(cache_mode=cached), dtype, num_bits_per_copy=access * 8)
    copy = _tiled_copy(atom, threads, columns, dtype, access).get_slice(thread)
    values = cute.make_tensor(start, cute.make_layout((rows, columns), stride=strides))
    source_part, tile_part = copy.partition_S(values), copy.partition_D(tile)
    where = copy.partition_S(cute.make_identity_tensor((rows, columns)))
    row_steps, column_steps = cute.size(tile_part, mode=[1]), cute.size(tile_part, mode=[2])
    inside = cute.make_rmem_tensor(cute.make_layout((1, row_steps, column_steps)), Boolean)
    for i in cutlass.range_constexpr(row_steps):
        row_inside = where[(0, 0), i, 0][0] < valid[0]
        for j in cutlass.range_constexpr(column_steps):
            if cutlass.const_expr(isinstance(valid[1], int) and valid[1] >= columns):
                inside[0, i, j] = row_inside
            else:
                inside[0, i, j] = row_inside & (where[(0, 0), i, j][1] < valid[1])
    cute.copy(atom, source_part, tile_part, pred=inside)


@cute.jit
def _load_elements(
    thread: Int32, threads: cutlass.Constexpr, start: cute.Pointer, strides: tuple, valid: tuple, tile: cute.Tensor
):
    """Through registers, an element at a time: cp.async copies four bytes at least."""
    rows, columns = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    for step in cutlass.range(rows * columns // threads, unroll=ELEMENT_UNROLL):
        index = step * threads + thread
        row, column = index // columns, index % columns
        value = tile.element_type(0.0)
        if (row < valid[0]) & (column < valid[1]):
            value = cute.make_tensor(start + (row * Int64(strides[0]) + column * Int64(strides[1])), ONE)[0]
        tile[row, column] = value


def store_tile(thread: Int32, threads: int, tile: cute.Tensor, target: Source) -> None:
    """Copy a tile from shared to global memory; what lies past the target's rows and columns stays."""
    strides, valid = (target.row, target.column), (target.rows, target.columns)
    if target.access * 8 == tile.element_type.width:
        _store_elements(thread, threads, tile, target.start, strides, valid)
        return
    strides = params.multiple(target.row, target.access * 8 // tile.element_type.width), target.column
    _store_vectors(thread, threads, tile, target.start, strides, valid, target.access)


@cute.jit
def _store_vectors(
    thread: Int32,
    threads: cutlass.Constexpr,
    tile: cute.Tensor,
    start: cute.Pointer,
    strides: tuple,
    valid: tuple,
    access: cutlass.Constexpr,
):
    """`access` bytes at a time."""
    dtype = tile.element_type
    rows, columns = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=access * 8)
    copy = _tiled_copy(atom, threads, columns, dtype, access).get_slice(thread)
    values = cute.make_tensor(start, cute.make_layout((rows, columns), stride=strides))
    tile_part, target_part = copy.partition_S(tile), copy.partition_D(values)
    where = copy.partition_S(cute.make_identity_tensor((rows, columns)))
    registers = cute.make_rmem_tensor_like(tile_part)
    cute.autovec_copy(tile_part, registers)
    for i in cutlass.range_constexpr(cute.size(tile_part, mode=[1])):
        for j in cutlass.range_constexpr(cute.size(tile_part, mode=[2])):
            row, column = where[(0, 0), i, j]
            if (row < valid[0]) & (column < valid[1]):
                cute.copy(atom, registers[None, i, j], target_part[None, i, j])


@cute.jit
def _store_elements(
    thread: Int32, threads: cutlass.Constexpr, tile: cute.Tensor, start: cute.Pointer, strides: tuple, valid: tuple
):
    """An element at a time."""
    rows, columns = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    for step in cutlass.range(rows * columns // threads, unroll=ELEMENT_UNROLL):
        index = step * threads + thread
        row, column = index // columns, index % columns
        if (row < valid[0]) & (column < valid[1]):
            offset = row * Int64(strides[0]) + column * Int64(strides[1])
            cute.make_tensor(start + offset, ONE)[0] = tile[row, column]


def clear_tile(thread: Int32, threads: int, shape: tuple[int, int], dtype, target: Source) -> None:
    """Zeros to the (rows, columns) of a tile in global memory that lie inside the target."""
    strides, valid = (target.row, target.column), (target.rows, target.columns)
    _clear_elements(thread, threads, shape, dtype, target.start, strides, valid)


@cute.jit
def _clear_elements(
    thread: Int32,
    threads: cutlass.Constexpr,
    shape: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    start: cute.Pointer,
    strides: tuple,
    valid: tuple,
):
    """An element at a time."""
    rows, columns = shape
    for step in cutlass.range(rows * columns // threads, unroll=ELEMENT_UNROLL):
        index = step * threads + thread
        row, column = index // columns, index % columns
        if (row < valid[0]) & (column < valid[1]):
            offset = row * Int64(strides[0]) + column * Int64(strides[1])
            cute.make_tensor(start + offset, ONE)[0] = dtype(0.0)


@cute.jit
def put(target: cute.Tensor, at: Any, value: Any, condition: Boolean):
    """Write one element where `condition` holds."""
    if condition:
        target[at] = value


@cute.jit
def load_rows(thread: Int32, source: cute.Pointer, target: cute.Tensor):
    """Start copying a float32 row vector, 16-byte aligned, with one 16-byte copy for each of the first threads."""
    count = cute.size(target) // 4
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL), Float32, num_bits_per_copy=128)
    if thread < count:
        four, first = cute.make_layout(4), thread * 4
        here = cute.make_tensor((source + first).align(VECTOR_BYTES), four)
        cute.copy(atom, here, cute.make_tensor((target.iterator + first).align(VECTOR_BYTES), four))


@cute.jit
def store_pair(
    values: cute.Tensor, start: cute.Pointer, column: Int32, columns: cutlass.Constexpr, at_once: cutlass.Constexpr
):
    """Write two elements of a row that starts at `start`, from an even column on; what lies past the row stays."""
    if cutlass.const_expr(at_once):
        if column < columns:
            target = cute.make_tensor(start + cute.assume(column, divby=2), cute.make_layout(2))
            cute.autovec_copy(values, target)
    else:
        for i in cutlass.range_constexpr(2):
            if column + i < columns:
                cute.make_tensor(start + (column + i), ONE)[0] = values[i]


def has_stmatrix(build: Build) -> bool:
    """Whether a 16-bit accumulator can be stored with stmatrix."""
    return build.item_bytes == 2 and architecture(build.arch).compute_capability >= (9, 0)


def converted(values: cute.Tensor, dtype) -> cute.Tensor:
    """A copy of float32 registers in another type; float32 registers themselves when that is the type."""
    if dtype is Float32:
        return values
    result = cute.make_rmem_tensor_like(values, dtype)
    convert(values, result)
    return result


def convert(values: cute.Tensor, result: cute.Tensor) -> None:
    """Write float32 registers into 16-bit ones of the same layout."""
    # In pairs by name: converted one by one, as the compiler would where the result is also read in float32 again,
    # bfloat16 numbers take a slow unit.
    kind, count = "bf16x2" if result.element_type is BFloat16 else "f16x2", cute.size(values)
    source = cute.make_tensor(values.iterator, cute.make_layout(count))
    words = cute.make_tensor(cute.recast_ptr(result.iterator, dtype=Uint32), cute.make_layout(count // 2))
    text = f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};"
    for i in range(count // 2):
        pair = [source[2 * i + 1], source[2 * i]]
        words[i] = cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=pair)


def in_float32(word: Uint32, dtype) -> tuple[Float32, Float32]:
    """The two 16-bit numbers of a word, the lower first; read as a word, it need not be taken apart and put together
    again for a product that reads it too."""
    if dtype is BFloat16:
        text = "shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xffff0000;"
    else:
        text = "{ .reg .f16 l, h; mov.b32 {l, h}, {$r0}; cvt.f32.f16 {$w0}, l; cvt.f32.f16 {$w1}, h; }"
    return cute.arch.inline_ptx(text, write_only_types=[Float32, Float32], read_only_args=[word])


def registers_to_tile(thread: Int32, mma: cute.TiledMma, values: cute.Tensor, tile: cute.Tensor, packed: bool) -> None:
    """Write an accumulator of the tile's type into shared memory; `packed` uses stmatrix (sm_90 on)."""
    op = warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4) if packed else cute.nvgpu.CopyUniversalOp()
    copy = cute.make_tiled_copy_C(cute.make_copy_atom(op, tile.element_type), mma).get_slice(thread)
    cute.copy(copy, copy.retile(values), copy.partition_D(tile))
