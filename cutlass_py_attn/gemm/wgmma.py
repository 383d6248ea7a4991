"""wgmma: the k loop that the Hopper family's rooms share, for 16-bit operands on sm_90a.

One warpgroup multiplies 64 rows by the whole width of C in each instruction; several warpgroups share the
rows. Operands are named by descriptors of shared memory, so no thread loads them. A tile lies in memory once:
read along its rows it is K-major, across them (views.transposed) it is MN-major, the same bytes either way.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cutlass_py_attn.gemm.gemm import WARPGROUP_THREADS, Gemm
from cutlass_py_attn.gemm.mma_sync import Operands, RegisterOperand
from cutlass_py_attn.gemm.plans import swizzle_bytes
from cutlass_py_attn.parts.params import DTYPES

ATOM_BYTES = 1024  # tiles start at a multiple of this: the swizzle is a function of the address
ROWS, DEPTH = 64, 16  # m and k of one instruction

_SWIZZLES = {
    128: warpgroup.SmemLayoutAtomKind.K_SW128,
    64: warpgroup.SmemLayoutAtomKind.K_SW64,
    32: warpgroup.SmemLayoutAtomKind.K_SW32,
}


def shared_layout(
    rows: int, columns: int, dtype: type[cutlass.Numeric], stages: int | None = None, width: int = 0
) -> cute.ComposedLayout:
    """(rows, columns[, stages]) as strips of `width` bytes, else of `swizzle_bytes`, one below the other's last row.

    Its inner part is the swizzle in bytes, which belongs in the pointer; its outer part is affine.
    """
    atom = warpgroup.make_smem_layout_atom(_SWIZZLES[width or swizzle_bytes(columns)], dtype)
    if stages is None:
        return cute.tile_to_shape(atom, (rows, columns), (0, 1))
    return cute.tile_to_shape(atom, (rows, columns, stages), (0, 1, 2))


def tile_at(
    base: cute.Pointer,
    offset: int,
    dtype: type[cutlass.Numeric],
    shape: tuple[int, int],
    stages: int | None = None,
    width: int = 0,
) -> cute.Tensor:
    """The (rows, columns[, stages]) tile at `offset` bytes from `base`: TMA writes it, wgmma reads it."""
    layout = shared_layout(*shape, dtype, stages, width)
    return cute.make_tensor(cute.recast_ptr((base + offset).align(ATOM_BYTES), layout.inner, dtype=dtype), layout.outer)


def columns_of(ring: cute.Tensor, first: int, count: int) -> cute.Tensor:
    """`count` columns of a ring of tiles from the column `first` on, both whole strips."""
    rows, (strip, _), slots = ring.layout.shape
    row_stride, (column_stride, strip_stride), slot_stride = ring.layout.stride
    shape, stride = (rows, (strip, count // strip), slots), (row_stride, (column_stride, strip_stride), slot_stride)
    return cute.make_tensor(ring.iterator + first // strip * strip_stride, cute.make_layout(shape, stride=stride))


class Wgmma:
    """One Gemm on wgmma. `operands` binds tiles to a thread, `issue` starts the k loop, `wait` ends it."""

    def __init__(self, spec: Gemm, dtype: str) -> None:
        assert not spec.objections(), spec.objections()
        assert spec.item_bytes == 2, f"dtype = {dtype}: wgmma takes 16-bit operands here"
        self.spec = spec
        self.dtype = DTYPES[dtype]
        self.warpgroups = spec.threads // WARPGROUP_THREADS
        self.mma = self._tiled_mma()

    def accumulator(self, thread: Int32) -> cute.Tensor:
        """A float32 register tensor for this thread's part of C, not yet set."""
        shape = self.mma.get_slice(thread).partition_shape_C((self.spec.m, self.spec.n))
        return cute.make_rmem_tensor(shape, Float32)

    def coordinates(self, thread: Int32) -> cute.Tensor:
        """(row, column) of each accumulator element."""
        return self.mma.get_slice(thread).partition_C(cute.make_identity_tensor((self.spec.m, self.spec.n)))

    def operands(self, a: cute.Tensor, b: cute.Tensor, thread: Int32) -> Operands:
        """This warpgroup's rows of A (m, k) and all of B (n, k); a ring of tiles has a third mode."""
        return Operands(self.a_operand(a, thread), self.b_operand(b))

    def a_operand(self, tile: cute.Tensor, thread: Int32) -> "DescriptorOperand":
        """A from shared memory."""
        part = self._warpgroup_slice(thread)
        return DescriptorOperand(part.make_fragment_A(part.partition_A(tile)))

    def b_operand(self, tile: cute.Tensor) -> "DescriptorOperand":
        """B from shared memory, the same for every warpgroup."""
        part = self.mma.get_slice(0)
        return DescriptorOperand(part.make_fragment_B(part.partition_B(tile)))

    def from_registers(self, values: cute.Tensor) -> RegisterOperand:
        """A from registers of the operands' type, laid out as an accumulator of the product before it, whose n is this
        product's k. They must stay as they are until `wait`."""
        return RegisterOperand(cute.make_tensor(values.iterator, as_a_operand(values.layout)))

    def issue(self, accumulator: cute.Tensor, parts: Operands) -> None:
        """Start C = or += A B over all of k as one group; nothing may touch `accumulator` before `wait`."""
        in_registers = isinstance(parts.a, RegisterOperand)
        adding = self._tiled_mma(in_registers, True)
        first = adding if self.spec.accumulate else self._tiled_mma(in_registers, False)
        warpgroup.fence()
        for k in range(self.spec.k // DEPTH):
            mma = adding if k else first
            cute.gemm(mma, accumulator, parts.a.fetch(k), parts.b.fetch(k), accumulator)
        warpgroup.commit_group()

    @staticmethod
    def wait(pending: int = 0) -> None:
        """Wait until at most `pending` of the groups issued so far still run."""
        warpgroup.wait_group(pending)

    def _tiled_mma(self, in_registers: bool = False, accumulate: bool = True) -> cute.TiledMma:
        # The accumulate flag is a traced value of the object; setting it inside a run-time loop on an object
        # made outside does not compile. So each use makes its own; that costs nothing in the kernel.
        source = warpgroup.OperandSource.RMEM if in_registers else warpgroup.OperandSource.SMEM
        shape = (ROWS, self.spec.n, DEPTH)
        majors = (_major(self.spec.a_transposed), _major(self.spec.b_transposed))
        op = warpgroup.MmaF16BF16Op(self.dtype, Float32, shape, source, *majors)
        mma = cute.make_tiled_mma(cute.make_mma_atom(op), (self.warpgroups, 1, 1))
        mma.set(warpgroup.Field.ACCUMULATE, accumulate)
        return mma

    def _warpgroup_slice(self, thread: Int32) -> cute.ThrMma:
        """Slice of this warpgroup's first thread: descriptors are the same in all of its threads."""
        if self.warpgroups == 1:
            return self.mma.get_slice(0)
        index = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        return self.mma.get_slice(index * WARPGROUP_THREADS)


class DescriptorOperand:
    """A tile in shared memory, as one descriptor for each step of k."""

    def __init__(self, fragment: cute.Tensor) -> None:
        self._fragment = fragment

    def stage(self, index: Int32) -> "DescriptorOperand":
        """Slot `index` of a ring."""
        return DescriptorOperand(self._fragment[None, None, None, index])

    def fetch(self, k: int) -> cute.Tensor:
        """Descriptors of k step `k`."""
        return self._fragment[None, None, k]


def _major(is_transposed: bool) -> OperandMajorMode:
    return OperandMajorMode.MN if is_transposed else OperandMajorMode.K


def as_a_operand(layout: cute.Layout) -> cute.Layout:
    """Accumulator layout as the layout of a k16 operand in the same registers."""
    # ((2, 2, N / 8), M, 1) -> ((2, 2, 2), M, N / 16)
    (pair, rows, eights), m, n = layout.shape
    (pair_stride, row_stride, eight_stride), m_stride, _ = layout.stride
    assert n == 1, "one instruction spans the width of C"
    return cute.make_layout(
        ((pair, rows, 2), m, eights // 2),
        stride=((pair_stride, row_stride, eight_stride), m_stride, 2 * eight_stride),
    )


def row_view(accumulator: cute.Tensor) -> cute.Tensor:
    """((2, 2, N / 8), M, 1) -> ((2, M), (2, N / 8)): rows x columns of C, or of its coordinates."""
    layout = accumulator.layout
    (pair, rows, eights), m, _ = layout.shape
    (pair_stride, row_stride, eight_stride), m_stride, _ = layout.stride
    shape, stride = ((rows, m), (pair, eights)), ((row_stride, m_stride), (pair_stride, eight_stride))
    return cute.make_tensor(accumulator.iterator, cute.make_layout(shape, stride=stride))
