"""Tile copies between global memory (gmem), shared memory (smem) and registers, up to 16 bytes at a time."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import LoadCacheMode, cpasync, warp

from cutlass_py_attn.kernels.common import params
from cutlass_py_attn.kernels.common.layout import has_fixed_smem_base
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.build import F32_ROW_PADDING, Build
from cutlass_py_attn.launch.smem import threads_of_row

VECTOR_BYTES = 16
ELEMENT_UNROLL = 8  # loads in flight where a thread copies single elements
ONE = 1  # the layout of a single element


def smem_symbol() -> cute.Pointer:
    """Returns a pointer to the block's dynamic shared memory, whose address is that of a symbol.

    For kernels before and after a main kernel, and for the tiles of variant mla; all else is for `smem_base`.
    """
    return cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)


def smem_base(build: Build) -> cute.Pointer:
    """Returns a pointer to a main kernel's dynamic shared memory; its address is a number if `has_fixed_smem_base`."""
    if not has_fixed_smem_base(build):
        return smem_symbol()
    word, text = ir.IntegerType.get_signless(32), f"mov.u32 $0, {architecture(build.arch).reserved_shared_memory};"
    address = Int32(llvm.inline_asm(word, [], text, "=r", has_side_effects=False, asm_dialect=0))
    return cute.make_ptr(cutlass.Int8, address, cutlass.AddressSpace.smem, assumed_align=1024)


def smem_pointer(build: Build, name: str, dtype) -> cute.Pointer:
    """Returns a pointer to the plan's buffer `name` in the block's shared memory."""
    base = smem_base(build) + build.buffer(name).offset
    return cute.recast_ptr(base.align(128), dtype=dtype)


def smem_tile(base: cute.Pointer, offset: int, dtype, rows: int, columns: int, stages: int = 1) -> cute.Tensor:
    """Returns a (rows, columns) tile, or (rows, columns, stages), at `offset` bytes of the block's shared memory.

    16-bit rows are swizzled in chunks of 128 bytes, or 64 bytes if `columns` is an odd multiple of 32, so that eight
    rows of a column are in different banks. float32 rows are padded instead.
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


def cp_async_atom(dtype, vector_bytes: int) -> cute.CopyAtom:
    """Returns the copy of one vector from global to shared memory."""
    # cp.async can bypass L1 (.cg) only with 16-byte vectors.
    cache_mode = LoadCacheMode.GLOBAL if vector_bytes == VECTOR_BYTES else LoadCacheMode.ALWAYS
    return cute.make_copy_atom(cpasync.CopyG2SOp(cache_mode=cache_mode), dtype, num_bits_per_copy=vector_bytes * 8)


def tiled_copy(atom: cute.CopyAtom, threads: int, columns: int, dtype, vector_bytes: int) -> cute.TiledCopy:
    """Returns the copy of a tile by `threads` threads; neighbouring threads copy neighbouring vectors of a row."""
    vector = vector_bytes * 8 // dtype.width
    chunk = threads_of_row(columns * dtype.width // 8, vector_bytes)
    thread_layout = cute.make_layout((threads // chunk, chunk), stride=(chunk, 1))
    return cute.make_tiled_copy_tv(atom, thread_layout, cute.make_layout((1, vector)))


@dataclass(frozen=True)
class GmemTile:
    """A tile in global memory, with its bounds.

    start: pointer to the first element.
    row_stride, column_stride: elements from one row, or column, to the next.
    rows, columns: how many exist from `start` on; the tile may end before or after them.
    vector_bytes: alignment of the rows; `columns` is a multiple of so many bytes.
    """

    start: cute.Pointer
    row_stride: Any
    rows: Any
    columns: Any
    vector_bytes: int
    column_stride: Any = 1


def gmem_tile(
    build: Build, p, name: str, coordinates: params.RowCoordinates, rows: Int32, columns: int, dtype: Any = None
) -> GmemTile:
    """Returns tensor `name` from row `coordinates` on, of which `rows` rows and `columns` columns exist.

    dtype: of its elements, None for that of the build.
    """
    column_stride = params.stride(p, name, "column") if name == "grad_output" and copies_elements(build) else 1
    row_stride = params.stride(p, name, "row")
    start = params.row_pointer(build, p, name, coordinates, dtype)
    return GmemTile(start, row_stride, rows, columns, build.vector_bytes, column_stride)


def copies_elements(build: Build) -> bool:
    """Whether rows are read one element at a time; grad_output may then have any column stride."""
    return build.vector_bytes == build.item_bytes


def copy_g2s(thread: Int32, threads: int, source: GmemTile, tile: cute.Tensor) -> None:
    """Starts copying a tile from global to shared memory, without commit. Elements outside the source become zero."""
    valid = source.rows, source.columns
    if source.vector_bytes * 8 < 32:
        _load_elements(thread, threads, source.start, (source.row_stride, source.column_stride), valid, tile)
        return
    vector = source.vector_bytes * 8 // tile.element_type.width
    strides = params.assume_multiple(source.row_stride, vector), source.column_stride
    _load_vectors(thread, threads, source.start, strides, valid, source.vector_bytes, tile)


@cute.jit
def _load_vectors(
    thread: Int32,
    threads: cutlass.Constexpr,
    start: cute.Pointer,
    strides: tuple,
    valid: tuple,
    vector_bytes: cutlass.Constexpr,
    tile: cute.Tensor,
):
    """Loads with cp.async, `vector_bytes` at a time."""
    dtype = tile.element_type
    rows, columns = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    atom = cp_async_atom(dtype, vector_bytes)
    copy = tiled_copy(atom, threads, columns, dtype, vector_bytes).get_slice(thread)
    values = cute.make_tensor(start, cute.make_layout((rows, columns), stride=strides))
    source_part, tile_part = copy.partition_S(values), copy.partition_D(tile)
    coordinates = copy.partition_S(cute.make_identity_tensor((rows, columns)))
    row_steps, column_steps = cute.size(tile_part, mode=[1]), cute.size(tile_part, mode=[2])
    in_bounds = cute.make_rmem_tensor(cute.make_layout((1, row_steps, column_steps)), Boolean)
    for i in cutlass.range_constexpr(row_steps):
        row_in_bounds = coordinates[(0, 0), i, 0][0] < valid[0]
        for j in cutlass.range_constexpr(column_steps):
            if cutlass.const_expr(isinstance(valid[1], int) and valid[1] >= columns):
                in_bounds[0, i, j] = row_in_bounds
            else:
                in_bounds[0, i, j] = row_in_bounds & (coordinates[(0, 0), i, j][1] < valid[1])
    cute.copy(atom, source_part, tile_part, pred=in_bounds)


@cute.jit
def _load_elements(
    thread: Int32, threads: cutlass.Constexpr, start: cute.Pointer, strides: tuple, valid: tuple, tile: cute.Tensor
):
    """Loads through registers, one element at a time, because cp.async copies at least four bytes."""
    rows, columns = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    for step in cutlass.range(rows * columns // threads, unroll=ELEMENT_UNROLL):
        index = step * threads + thread
        row, column = index // columns, index % columns
        value = tile.element_type(0.0)
        if (row < valid[0]) & (column < valid[1]):
            value = cute.make_tensor(start + (row * Int64(strides[0]) + column * Int64(strides[1])), ONE)[0]
        tile[row, column] = value


def copy_s2g(thread: Int32, threads: int, tile: cute.Tensor, target: GmemTile) -> None:
    """Copies a tile from shared to global memory, except what is outside the target's rows and columns."""
    strides, valid = (target.row_stride, target.column_stride), (target.rows, target.columns)
    if target.vector_bytes * 8 == tile.element_type.width:
        _store_elements(thread, threads, tile, target.start, strides, valid)
        return
    vector = target.vector_bytes * 8 // tile.element_type.width
    strides = params.assume_multiple(target.row_stride, vector), target.column_stride
    _store_vectors(thread, threads, tile, target.start, strides, valid, target.vector_bytes)


@cute.jit
def _store_vectors(
    thread: Int32,
    threads: cutlass.Constexpr,
    tile: cute.Tensor,
    start: cute.Pointer,
    strides: tuple,
    valid: tuple,
    vector_bytes: cutlass.Constexpr,
):
    """Stores `vector_bytes` at a time."""
    dtype = tile.element_type
    rows, columns = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=vector_bytes * 8)
    copy = tiled_copy(atom, threads, columns, dtype, vector_bytes).get_slice(thread)
    values = cute.make_tensor(start, cute.make_layout((rows, columns), stride=strides))
    tile_part, target_part = copy.partition_S(tile), copy.partition_D(values)
    coordinates = copy.partition_S(cute.make_identity_tensor((rows, columns)))
    registers = cute.make_rmem_tensor_like(tile_part)
    cute.autovec_copy(tile_part, registers)
    for i in cutlass.range_constexpr(cute.size(tile_part, mode=[1])):
        for j in cutlass.range_constexpr(cute.size(tile_part, mode=[2])):
            row, column = coordinates[(0, 0), i, j]
            if (row < valid[0]) & (column < valid[1]):
                cute.copy(atom, registers[None, i, j], target_part[None, i, j])


@cute.jit
def _store_elements(
    thread: Int32, threads: cutlass.Constexpr, tile: cute.Tensor, start: cute.Pointer, strides: tuple, valid: tuple
):
    """Stores one element at a time."""
    rows, columns = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    for step in cutlass.range(rows * columns // threads, unroll=ELEMENT_UNROLL):
        index = step * threads + thread
        row, column = index // columns, index % columns
        if (row < valid[0]) & (column < valid[1]):
            offset = row * Int64(strides[0]) + column * Int64(strides[1])
            cute.make_tensor(start + offset, ONE)[0] = tile[row, column]


def clear_gmem(thread: Int32, threads: int, shape: tuple[int, int], dtype, target: GmemTile) -> None:
    """Sets a tile of `shape` in global memory to zero, except what is outside the target."""
    strides, valid = (target.row_stride, target.column_stride), (target.rows, target.columns)
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
    """Stores zeros one element at a time."""
    rows, columns = shape
    for step in cutlass.range(rows * columns // threads, unroll=ELEMENT_UNROLL):
        index = step * threads + thread
        row, column = index // columns, index % columns
        if (row < valid[0]) & (column < valid[1]):
            offset = row * Int64(strides[0]) + column * Int64(strides[1])
            cute.make_tensor(start + offset, ONE)[0] = dtype(0.0)


@cute.jit
def store_predicated(target: cute.Tensor, index: Any, value: Any, predicate: Boolean):
    """Stores one element if `predicate` holds."""
    if predicate:
        target[index] = value


@cute.jit
def copy_vector_g2s(thread: Int32, source: cute.Pointer, target: cute.Tensor):
    """Starts copying a 16-byte aligned float32 vector; each of the first threads copies 16 bytes with cp.async."""
    count = cute.size(target) // 4
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL), Float32, num_bits_per_copy=128)
    if thread < count:
        four, first = cute.make_layout(4), thread * 4
        part = cute.make_tensor((source + first).align(VECTOR_BYTES), four)
        cute.copy(atom, part, cute.make_tensor((target.iterator + first).align(VECTOR_BYTES), four))


@cute.jit
def store_pair(
    values: cute.Tensor, start: cute.Pointer, column: Int32, columns: cutlass.Constexpr, as_vector: cutlass.Constexpr
):
    """Stores two elements of the row at `start` from an even column on, except those past `columns`.

    as_vector: whether both elements are stored at once.
    """
    if cutlass.const_expr(as_vector):
        if column < columns:
            target = cute.make_tensor(start + cute.assume(column, divby=2), cute.make_layout(2))
            cute.autovec_copy(values, target)
    else:
        for i in cutlass.range_constexpr(2):
            if column + i < columns:
                cute.make_tensor(start + (column + i), ONE)[0] = values[i]


def has_stmatrix(build: Build) -> bool:
    """Whether a 16-bit accumulator can be stored with stmatrix (sm_90 and later)."""
    return build.item_bytes == 2 and architecture(build.arch).compute_capability >= (9, 0)


def converted(values: cute.Tensor, dtype) -> cute.Tensor:
    """Returns float32 registers converted to `dtype`; the same registers if `dtype` is float32."""
    if dtype is Float32:
        return values
    result = cute.make_rmem_tensor_like(values, dtype)
    convert(values, result)
    return result


def convert(values: cute.Tensor, result: cute.Tensor) -> None:
    """Converts float32 registers into 16-bit registers of the same layout."""
    # The packed instruction is named explicitly. The compiler converts one number at a time where the result is also
    # converted back to float32, and for bfloat16 that uses a slow unit.
    kind, count = "bf16x2" if result.element_type is BFloat16 else "f16x2", cute.size(values)
    source = cute.make_tensor(values.iterator, cute.make_layout(count))
    words = cute.make_tensor(cute.recast_ptr(result.iterator, dtype=Uint32), cute.make_layout(count // 2))
    text = f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};"
    for i in range(count // 2):
        pair = [source[2 * i + 1], source[2 * i]]
        words[i] = cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=pair)


def unpack_float32(word: Uint32, dtype) -> tuple[Float32, Float32]:
    """Returns the two 16-bit numbers of a word as float32, the lower first.

    The input is a word, because a product that also reads the word then needs no unpacking and packing.
    """
    if dtype is BFloat16:
        text = "shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xffff0000;"
    else:
        text = "{ .reg .f16 l, h; mov.b32 {l, h}, {$r0}; cvt.f32.f16 {$w0}, l; cvt.f32.f16 {$w1}, h; }"
    return cute.arch.inline_ptx(text, write_only_types=[Float32, Float32], read_only_args=[word])


def copy_r2s(thread: Int32, mma: cute.TiledMma, values: cute.Tensor, tile: cute.Tensor, use_stmatrix: bool) -> None:
    """Copies an accumulator of `mma`, in the tile's type, to shared memory."""
    op = warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4) if use_stmatrix else cute.nvgpu.CopyUniversalOp()
    copy = cute.make_tiled_copy_C(cute.make_copy_atom(op, tile.element_type), mma).get_slice(thread)
    cute.copy(copy, copy.retile(values), copy.partition_D(tile))
