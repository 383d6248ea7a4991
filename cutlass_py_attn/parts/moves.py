"""Moves: tiles between global memory, shared memory and registers, sixteen bytes at a time."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import LoadCacheMode, cpasync, warp

from cutlass_py_attn.device import architecture
from cutlass_py_attn.plan import F32_ROW_PADDING, Build

VECTOR_BYTES = 16


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


def _tiled_copy(atom: cute.CopyAtom, threads: int, columns: int, dtype) -> cute.TiledCopy:
    vector = VECTOR_BYTES * 8 // dtype.width
    chunk = 128 // VECTOR_BYTES if columns * dtype.width // 8 % 128 == 0 else 64 // VECTOR_BYTES
    lanes = cute.make_layout((threads // chunk, chunk), stride=(chunk, 1))
    return cute.make_tiled_copy_tv(atom, lanes, cute.make_layout((1, vector)))


@cute.jit
def load_tile(
    thread: Int32,
    threads: cutlass.Constexpr,
    source: cute.Pointer,
    row_stride: Int64,
    rows_valid: Int32,
    columns_valid: cutlass.Constexpr,
    tile: cute.Tensor,
):
    """Start copying a tile from global memory, rows `row_stride` elements apart; commits nothing.

    Rows from rows_valid on and columns from columns_valid on become zero and are not read.
    """
    dtype = tile.element_type
    rows, columns = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    vector = VECTOR_BYTES * 8 // dtype.width
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL), dtype, num_bits_per_copy=128)
    copy = _tiled_copy(atom, threads, columns, dtype).get_slice(thread)
    stride = cute.assume(row_stride, divby=vector)
    values = cute.make_tensor(source, cute.make_layout((rows, columns), stride=(stride, 1)))
    source_part, tile_part = copy.partition_S(values), copy.partition_D(tile)
    where = copy.partition_S(cute.make_identity_tensor((rows, columns)))
    row_steps, column_steps = cute.size(tile_part, mode=[1]), cute.size(tile_part, mode=[2])
    inside = cute.make_rmem_tensor(cute.make_layout((1, row_steps, column_steps)), Boolean)
    for i in cutlass.range_constexpr(row_steps):
        row_inside = where[(0, 0), i, 0][0] < rows_valid
        for j in cutlass.range_constexpr(column_steps):
            if cutlass.const_expr(columns_valid < columns):
                inside[0, i, j] = row_inside & (where[(0, 0), i, j][1] < columns_valid)
            else:
                inside[0, i, j] = row_inside
    cute.copy(atom, source_part, tile_part, pred=inside)


@cute.jit
def store_tile(
    thread: Int32,
    threads: cutlass.Constexpr,
    tile: cute.Tensor,
    target: cute.Pointer,
    row_stride: Int64,
    rows_valid: Int32,
    columns_valid: cutlass.Constexpr,
):
    """Copy a tile from shared to global memory; rows from rows_valid and columns from columns_valid on stay."""
    dtype = tile.element_type
    rows, columns = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    vector = VECTOR_BYTES * 8 // dtype.width
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=128)
    copy = _tiled_copy(atom, threads, columns, dtype).get_slice(thread)
    stride = cute.assume(row_stride, divby=vector)
    values = cute.make_tensor(target, cute.make_layout((rows, columns), stride=(stride, 1)))
    tile_part, target_part = copy.partition_S(tile), copy.partition_D(values)
    where = copy.partition_S(cute.make_identity_tensor((rows, columns)))
    registers = cute.make_rmem_tensor_like(tile_part)
    cute.autovec_copy(tile_part, registers)
    for i in cutlass.range_constexpr(cute.size(tile_part, mode=[1])):
        for j in cutlass.range_constexpr(cute.size(tile_part, mode=[2])):
            row, column = where[(0, 0), i, j]
            if (row < rows_valid) & (column < columns_valid):
                cute.copy(atom, registers[None, i, j], target_part[None, i, j])


@cute.jit
def load_rows(thread: Int32, source: cute.Pointer, target: cute.Tensor):
    """Start copying a float32 row vector, 16-byte aligned, with one 16-byte copy for each of the first threads."""
    count = cute.size(target) // 4
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL), Float32, num_bits_per_copy=128)
    if thread < count:
        four, first = cute.make_layout(4), thread * 4
        here = cute.make_tensor((source + first).align(VECTOR_BYTES), four)
        cute.copy(atom, here, cute.make_tensor((target.iterator + first).align(VECTOR_BYTES), four))


def has_stmatrix(build: Build) -> bool:
    """Whether a 16-bit accumulator can be stored with stmatrix."""
    return build.item_bytes == 2 and architecture(build.arch).compute_capability >= (9, 0)


def converted(values: cute.Tensor, dtype) -> cute.Tensor:
    """A copy of float32 registers in another type; float32 registers themselves when that is the type."""
    if dtype is Float32:
        return values
    result = cute.make_rmem_tensor_like(values, dtype)
    result.store(values.load().to(dtype))
    return result


def registers_to_tile(thread: Int32, mma: cute.TiledMma, values: cute.Tensor, tile: cute.Tensor, packed: bool) -> None:
    """Write an accumulator of the tile's type into shared memory; `packed` uses stmatrix (sm_90 on)."""
    op = warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4) if packed else cute.nvgpu.CopyUniversalOp()
    copy = cute.make_tiled_copy_C(cute.make_copy_atom(op, tile.element_type), mma).get_slice(thread)
    cute.copy(copy, copy.retile(values), copy.partition_D(tile))
