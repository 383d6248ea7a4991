"""wgmma: the loop over k of the sm90 family's GEMMs, for 16-bit and e4m3 operands on sm_90a.

One instruction of a warpgroup computes 64 rows of C and all of its columns; several warpgroups divide the rows.
Descriptors name the operands in shared memory, so that no thread loads them. The same 16-bit tile in shared memory is
K-major as it is and MN-major as views.transposed; operands of e4m3 must be K-major.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from cutlass_py_attn.kernels.common.mma_sync import Operands, RegisterOperand
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_THREADS, GemmSpec
from cutlass_py_attn.launch.smem import swizzle_bytes

ATOM_BYTES = 1024  # tiles start at a multiple of it, because the swizzle is a function of the address
ROWS = 64  # m of one instruction
DEPTH_BYTES = 32  # bytes of k of one instruction

_SWIZZLES = {
    128: warpgroup.SmemLayoutAtomKind.K_SW128,
    64: warpgroup.SmemLayoutAtomKind.K_SW64,
    32: warpgroup.SmemLayoutAtomKind.K_SW32,
}


def smem_layout(
    rows: int, columns: int, dtype: type[cutlass.Numeric], stages: int | None = None, width: int = 0
) -> cute.ComposedLayout:
    """Returns the layout of (rows, columns[, stages]) as strips of columns, each stored with all rows.

    width: bytes of a strip and of its swizzle; 0 for `swizzle_bytes` of the columns.
    The inner part of the layout is the swizzle in bytes, which belongs in the pointer. The outer part is affine.
    """
    atom = warpgroup.make_smem_layout_atom(_SWIZZLES[width or swizzle_bytes(columns, dtype.width // 8)], dtype)
    if stages is None:
        return cute.tile_to_shape(atom, (rows, columns), (0, 1))
    return cute.tile_to_shape(atom, (rows, columns, stages), (0, 1, 2))


def smem_tile_at(
    base: cute.Pointer,
    offset: int,
    dtype: type[cutlass.Numeric],
    shape: tuple[int, int],
    stages: int | None = None,
    width: int = 0,
) -> cute.Tensor:
    """Returns the (rows, columns[, stages]) tile at `offset` bytes from `base`, which TMA writes and wgmma reads."""
    layout = smem_layout(*shape, dtype, stages, width)
    return cute.make_tensor(cute.recast_ptr((base + offset).align(ATOM_BYTES), layout.inner, dtype=dtype), layout.outer)


def smem_column_slice(tiles: cute.Tensor, first: int, count: int) -> cute.Tensor:
    """Returns `count` columns of (rows, columns, stages) from column `first` on; both are multiples of a strip."""
    rows, (strip, _), stages = tiles.layout.shape
    row_stride, (column_stride, strip_stride), stage_stride = tiles.layout.stride
    shape, stride = (rows, (strip, count // strip), stages), (row_stride, (column_stride, strip_stride), stage_stride)
    return cute.make_tensor(tiles.iterator + first // strip * strip_stride, cute.make_layout(shape, stride=stride))


class Wgmma:
    """One GemmSpec on wgmma. `operands` partitions the tiles, `issue` starts the loop over k, `wait` waits for it."""

    def __init__(self, spec: GemmSpec, dtype: str) -> None:
        assert not spec.objections(), spec.objections()
        assert spec.item_bytes in (1, 2), f"dtype = {dtype}: wgmma supports e4m3 and 16-bit operands here"
        assert spec.item_bytes == 2 or not (spec.a_transposed or spec.b_transposed), "8-bit operands are K-major"
        self.spec = spec
        self.dtype = DTYPES[dtype]
        self.warpgroups = spec.threads // WARPGROUP_THREADS

    @property
    def mma(self) -> cute.TiledMma:
        """The tiled MMA with both operands in shared memory, created anew at each use while a kernel is traced."""
        return self._tiled_mma()

    def accumulator(self, thread: Int32) -> cute.Tensor:
        """Returns an uninitialised float32 register tensor for this thread's partition of C."""
        shape = self.mma.get_slice(thread).partition_shape_C((self.spec.m, self.spec.n))
        return cute.make_rmem_tensor(shape, Float32)

    def coordinates(self, thread: Int32) -> cute.Tensor:
        """Returns (row, column) of each element of this thread's accumulator."""
        return self.mma.get_slice(thread).partition_C(cute.make_identity_tensor((self.spec.m, self.spec.n)))

    def operands(self, a: cute.Tensor, b: cute.Tensor, thread: Int32) -> Operands:
        """Returns this warpgroup's rows of A (m, k) and all of B (n, k); a third mode holds stages."""
        return Operands(self.a_operand(a, thread), self.b_operand(b))

    def a_operand(self, tile: cute.Tensor, thread: Int32) -> "DescriptorOperand":
        """Returns A in shared memory as an operand."""
        part = self._warpgroup_slice(thread)
        return DescriptorOperand(part.make_fragment_A(part.partition_A(tile)))

    def a_registers(self, thread: Int32) -> cute.Tensor:
        """Returns uninitialised registers for this thread's rows of A; `load_a` fills them."""
        return cute.make_rmem_tensor(
            self._tiled_mma(True).get_slice(thread).partition_shape_A((self.spec.m, self.spec.k)), self.dtype
        )

    def load_a(self, tile: cute.Tensor, registers: cute.Tensor, thread: Int32) -> None:
        """Loads this thread's rows of A (m, k) from shared memory by ldmatrix. All threads of a warp call this."""
        op = warp.LdMatrix8x8x16bOp(transpose=self.spec.a_transposed, num_matrices=4)
        copy = cute.make_tiled_copy_A(cute.make_copy_atom(op, self.dtype), self._tiled_mma(True)).get_slice(thread)
        cute.copy(copy, copy.partition_S(tile), copy.retile(registers))

    def b_operand(self, tile: cute.Tensor) -> "DescriptorOperand":
        """Returns B in shared memory as an operand, the same for every warpgroup."""
        part = self.mma.get_slice(0)
        return DescriptorOperand(part.make_fragment_B(part.partition_B(tile)))

    def from_registers(self, values: cute.Tensor) -> RegisterOperand:
        """Returns registers of the operands' dtype as the A operand; they must not change before `wait`.

        Their layout is that of the accumulator of another GEMM, whose n is this GEMM's k. 8-bit registers are in the
        operand's own order.
        """
        if self.spec.item_bytes == 1:
            return RegisterOperand(values)
        return RegisterOperand(cute.make_tensor(values.iterator, as_a_operand(values.layout)))

    def register_operands(self, values: cute.Tensor, b: "DescriptorOperand") -> Operands:
        """Returns A from registers, as `from_registers` takes them, and B."""
        return Operands(self.from_registers(values), b)

    def issue(self, accumulator: cute.Tensor, operands: Operands) -> None:
        """Starts C = A B, or C += A B if the spec accumulates, as one wgmma group.

        The accumulator must not be read or written before `wait`.
        """
        in_registers = isinstance(operands.a, RegisterOperand)
        accumulating = self._tiled_mma(in_registers, True)
        first = accumulating if self.spec.accumulate else self._tiled_mma(in_registers, False)
        warpgroup.fence()
        for k in range(self.spec.k * self.spec.item_bytes // DEPTH_BYTES):
            mma = accumulating if k else first
            cute.gemm(mma, accumulator, operands.a.fragment(k), operands.b.fragment(k), accumulator)
        warpgroup.commit_group()

    @staticmethod
    def wait(pending: int = 0) -> None:
        """Waits until at most `pending` of the wgmma groups issued so far are in flight."""
        warpgroup.wait_group(pending)

    def _tiled_mma(self, in_registers: bool = False, accumulate: bool = True) -> cute.TiledMma:
        # The accumulate flag is a traced value of the object. Setting it inside a run-time loop on an object created
        # outside of the loop does not compile, so each use creates its own; this adds no instruction.
        source = warpgroup.OperandSource.RMEM if in_registers else warpgroup.OperandSource.SMEM
        shape = (ROWS, self.spec.n, DEPTH_BYTES // self.spec.item_bytes)
        majors = (_major(self.spec.a_transposed), _major(self.spec.b_transposed))
        if self.spec.item_bytes == 1:
            op = warpgroup.MmaF8Op(self.dtype, self.dtype, Float32, shape, source, *majors)
        else:
            op = warpgroup.MmaF16BF16Op(self.dtype, Float32, shape, source, *majors)
        mma = cute.make_tiled_mma(cute.make_mma_atom(op), (self.warpgroups, 1, 1))
        mma.set(warpgroup.Field.ACCUMULATE, accumulate)
        return mma

    def _warpgroup_slice(self, thread: Int32) -> cute.ThrMma:
        """Returns the slice of this warpgroup's first thread: its descriptors are those of all threads."""
        if self.warpgroups == 1:
            return self.mma.get_slice(0)
        index = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        return self.mma.get_slice(index * WARPGROUP_THREADS)


@dataclass(frozen=True)
class DescriptorOperand:
    """A tile in shared memory as descriptors, one for each k-step."""

    descriptors: cute.Tensor

    def stage(self, index: Int32) -> "DescriptorOperand":
        """Returns stage `index`."""
        return DescriptorOperand(self.descriptors[None, None, None, index])

    def fragment(self, k: int) -> cute.Tensor:
        """Returns the descriptors of k-step `k`."""
        return self.descriptors[None, None, k]


def _major(is_transposed: bool) -> OperandMajorMode:
    return OperandMajorMode.MN if is_transposed else OperandMajorMode.K


def as_a_operand(layout: cute.Layout) -> cute.Layout:
    """Returns an accumulator's layout as the layout of a k16 A operand in the same registers."""
    # ((2, 2, N / 8), M, 1) -> ((2, 2, 2), M, N / 16)
    (pair, rows, eights), m, n = layout.shape
    (pair_stride, row_stride, eight_stride), m_stride, _ = layout.stride
    assert n == 1, "one instruction spans the width of C"
    return cute.make_layout(
        ((pair, rows, 2), m, eights // 2),
        stride=((pair_stride, row_stride, eight_stride), m_stride, 2 * eight_stride),
    )


def row_view(accumulator: cute.Tensor) -> cute.Tensor:
    """Returns an accumulator ((2, 2, N / 8), M, 1), or its coordinates, as (rows, columns): ((2, M), (2, N / 8))."""
    layout = accumulator.layout
    (pair, rows, eights), m, _ = layout.shape
    (pair_stride, row_stride, eight_stride), m_stride, _ = layout.stride
    shape, stride = ((rows, m), (pair, eights)), ((row_stride, m_stride), (pair_stride, eight_stride))
    return cute.make_tensor(accumulator.iterator, cute.make_layout(shape, stride=stride))
