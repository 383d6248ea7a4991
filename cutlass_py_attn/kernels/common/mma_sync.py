"""mma.sync: the loop over k of the sm80 family's GEMMs, for 16-bit and float32 operands, on sm_80 and later.

16-bit operands are loaded by ldmatrix (transposed if the tile is MN-major) and multiplied by m16n8k16. float32 operands
are split into two TF32 numbers, x = high + low, and each product is the sum of three m16n8k8 instructions,
low*high + high*low + high*high. The omitted low*low is 2^-22 of the product.
"""

from dataclasses import dataclass, replace

import cutlass.cute as cute
from cutlass import Float32, Int32, TFloat32
from cutlass.cute.nvgpu import warp

from cutlass_py_attn.integers import largest_divisor
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.launch.gemm_spec import GemmSpec

# Round to TF32's 10 mantissa bits: add half of the last kept bit, then clear the 13 bits below it. Integer
# arithmetic, because the hardware truncates and the convert instruction is slower.
TF32_HALF = 0x1000
TF32_KEEP = -0x2000

ACCUMULATORS = 128  # registers a thread for a float32 accumulator and the partial sum of a tile together ...
MIN_PARTIAL_SUMS = 16  # ... of which the partial sum has at least this many


class MmaSync:
    """One GemmSpec on mma.sync. `operands` partitions the tiles for a thread, `issue` executes the loop over k."""

    def __init__(self, spec: GemmSpec, dtype: str) -> None:
        assert not spec.objections(), spec.objections()
        self.spec = spec
        self.dtype = DTYPES[dtype]

    @property
    def mma(self) -> cute.TiledMma:
        """The tiled MMA, created anew at each use while a kernel is traced; this adds no instruction."""
        rows, columns = self.spec.warps
        if self.spec.item_bytes == 4:
            # Along k, slots t and t + 4 of the instruction are elements 2t and 2t + 1, as in the accumulator. A GEMM
            # can then read its A operand from an accumulator, and the rows that a quad reads are in different banks.
            depth = cute.make_layout((4, 2), stride=(2, 1)) if self.spec.b_transposed else 8
            atom = warp.MmaTF32Op((16, 8, 8))
            return cute.make_tiled_mma(atom, (rows, columns, 1), permutation_mnk=(rows * 16, columns * 8, depth))
        atom = warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16))
        # 16 columns a warp, so that one ldmatrix.x4 loads the operands of two n8 instructions.
        return cute.make_tiled_mma(atom, (rows, columns, 1), permutation_mnk=(rows * 16, columns * 16, 16))

    def accumulator(self, thread: Int32) -> cute.Tensor:
        """Returns an uninitialised float32 register tensor for this thread's partition of C."""
        shape = self.mma.get_slice(thread).partition_shape_C((self.spec.m, self.spec.n))
        return cute.make_rmem_tensor(shape, Float32)

    def coordinates(self, thread: Int32) -> cute.Tensor:
        """Returns (row, column) of each element of this thread's accumulator."""
        return self.mma.get_slice(thread).partition_C(cute.make_identity_tensor((self.spec.m, self.spec.n)))

    def operands(self, a: cute.Tensor, b: cute.Tensor, thread: Int32) -> "Operands":
        """Returns this thread's partition of A (m, k) and B (n, k) in shared memory; a third mode holds stages."""
        return Operands(self.a_operand(a, thread), self.b_operand(b, thread))

    def a_operand(self, tile: cute.Tensor, thread: Int32) -> "Operand":
        """Returns A in shared memory as an operand."""
        mma = self.mma
        part = mma.get_slice(thread)
        if self.spec.item_bytes == 4:
            return Float32Operand(part.partition_A(tile))
        copy = cute.make_tiled_copy_A(self._ldmatrix(self.spec.a_transposed), mma)
        return LdMatrixOperand.create(copy, thread, tile, part.make_fragment_A(part.partition_A(_first_stage(tile))))

    def b_operand(self, tile: cute.Tensor, thread: Int32) -> "Operand":
        """Returns B in shared memory as an operand."""
        mma = self.mma
        part = mma.get_slice(thread)
        if self.spec.item_bytes == 4:
            return Float32Operand(part.partition_B(tile))
        copy = cute.make_tiled_copy_B(self._ldmatrix(self.spec.b_transposed), mma)
        return LdMatrixOperand.create(copy, thread, tile, part.make_fragment_B(part.partition_B(_first_stage(tile))))

    def from_accumulator(self, values: cute.Tensor) -> "RegisterOperand":
        """Returns the accumulator of another GEMM, whose n is this GEMM's k, as the A operand, without a copy."""
        if self.spec.item_bytes == 4:
            return RegisterOperand(cute.make_tensor(values.iterator, _as_tf32_operand(values.layout)))
        packed = cute.make_rmem_tensor_like(values, self.dtype)
        packed.store(values.load().to(self.dtype))
        return RegisterOperand(cute.make_tensor(packed.iterator, _as_16_bit_operand(packed.layout)))

    def issue(self, accumulator: cute.Tensor, operands: "Operands") -> None:
        """Computes C = A B, or C += A B if the spec accumulates, over all of k.

        The tensor cores round their float32 sums towards zero, an error that grows with every addition. A float32 GEMM
        that accumulates therefore sums one tile from zero and adds the sum to C with a rounding addition, some columns
        at a time.
        """
        if not self.spec.accumulate or self.spec.item_bytes != 4:
            if not self.spec.accumulate:
                accumulator.fill(0.0)
            self._multiply_all(accumulator, operands)
            return
        rows, columns = (cute.size(accumulator, mode=[mode]) for mode in (1, 2))
        partial_sums = max(ACCUMULATORS - cute.size(accumulator), MIN_PARTIAL_SUMS)
        # B in shared memory would be loaded again for each group of columns. The compiler keeps it in registers for all
        # of k instead, which are too many: only with A in registers are columns summed in groups.
        in_groups = isinstance(operands.a, RegisterOperand)
        width = largest_divisor(columns, max(partial_sums // (4 * rows), 1)) if in_groups else columns
        mma = self.mma
        for group in range(columns // width):
            part = cute.logical_divide(accumulator, (None, None, width))[None, None, (None, group)]
            sums = cute.make_rmem_tensor(part.shape, Float32)
            sums.fill(0.0)
            for k in range(self.k_steps):
                columns_of_b = cute.logical_divide(operands.b.fragment(k), (None, width))[None, (None, group)]
                self._multiply(mma, sums, operands.a.fragment(k), _compact(columns_of_b))
            part.store(part.load() + sums.load())

    @property
    def k_steps(self) -> int:
        """Instructions along k."""
        return self.spec.k // self.spec.instruction[2]

    def _multiply_all(self, accumulator: cute.Tensor, operands: "Operands") -> None:
        """Computes C += A B over all of k."""
        mma = self.mma
        for k in range(self.k_steps):
            self._multiply(mma, accumulator, operands.a.fragment(k), operands.b.fragment(k))

    def _multiply(self, mma: cute.TiledMma, accumulator: cute.Tensor, a: cute.Tensor, b: cute.Tensor) -> None:
        """Computes C += A B over one step of k."""
        if self.spec.item_bytes != 4:
            cute.gemm(mma, accumulator, a, b, accumulator)
            return
        a_high, a_low = split_tf32(a)
        b_high, b_low = split_tf32(b)
        for left, right in ((a_low, b_high), (a_high, b_low), (a_high, b_high)):
            cute.gemm(mma, accumulator, left, right, accumulator)

    def _ldmatrix(self, transpose: bool) -> cute.CopyAtom:
        return cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=transpose, num_matrices=4), self.dtype)


@dataclass(frozen=True)
class Operands:
    """A and B of one issue; `stage` selects a stage where they have several."""

    a: "Operand"
    b: "Operand"

    def stage(self, a: Int32 | None = None, b: Int32 | None = None) -> "Operands":
        """Returns stage `a` of A and stage `b` of B; None leaves an operand as it is."""
        left = self.a if a is None else self.a.stage(a)
        right = self.b if b is None else self.b.stage(b)
        return Operands(left, right)


@dataclass(frozen=True)
class LdMatrixOperand:
    """A 16-bit tile in shared memory, loaded by ldmatrix.

    source: this thread's partition of the tile, or of its stages.
    fragment_of_tile, retiled: the registers of one tile, in the layouts of the MMA and of the copy.
    """

    copy: cute.TiledCopy
    source: cute.Tensor
    fragment_of_tile: cute.Tensor
    retiled: cute.Tensor

    @staticmethod
    def create(copy: cute.TiledCopy, thread: Int32, tile: cute.Tensor, fragment: cute.Tensor) -> "LdMatrixOperand":
        """Returns the operand of `thread`, which is loaded into `fragment`."""
        thread_copy = copy.get_slice(thread)
        return LdMatrixOperand(copy, thread_copy.partition_S(tile), fragment, thread_copy.retile(fragment))

    def stage(self, index: Int32) -> "LdMatrixOperand":
        """Returns stage `index`."""
        return replace(self, source=self.source[None, None, None, index])

    def fragment(self, k: int) -> cute.Tensor:
        """Loads k-step `k` and returns its registers."""
        cute.copy(self.copy, self.source[None, None, k], self.retiled[None, None, k])
        return self.fragment_of_tile[None, None, k]


@dataclass(frozen=True)
class Float32Operand:
    """A float32 tile in shared memory, loaded by plain loads; `part` is this thread's partition."""

    part: cute.Tensor

    def stage(self, index: Int32) -> "Float32Operand":
        """Returns stage `index`."""
        return Float32Operand(self.part[None, None, None, index])

    def fragment(self, k: int) -> cute.Tensor:
        """Loads k-step `k` and returns its registers."""
        source = self.part[None, None, k]
        registers = cute.make_rmem_tensor(source.shape, Float32)
        cute.autovec_copy(source, registers)
        return registers


@dataclass(frozen=True)
class RegisterOperand:
    """An A operand that is already in registers."""

    registers: cute.Tensor

    def fragment(self, k: int) -> cute.Tensor:
        """Returns the registers of k-step `k`; float32 ones as a compact copy, which `split_tf32` requires."""
        part = self.registers[None, None, k]
        if part.element_type is not Float32:
            return part
        return _compact(part)


Operand = LdMatrixOperand | Float32Operand | RegisterOperand


def _first_stage(tile: cute.Tensor) -> cute.Tensor:
    """Returns the tile, or its first stage where it has several."""
    return tile if cute.rank(tile.layout) == 2 else tile[None, None, 0]


def _compact(values: cute.Tensor) -> cute.Tensor:
    """Returns a copy of float32 registers with a compact layout."""
    result = cute.make_rmem_tensor(values.shape, Float32)
    result.store(values.load())
    return result


def split_tf32(values: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    """Splits compact float32 registers into two TF32 register tensors, whose sum is the value within 2^-23."""
    layout, flat = cute.make_layout(values.shape), cute.make_layout(cute.size(values))  # bit casts return a flat vector
    bits = cute.make_tensor(values.iterator, flat).load()
    rounded = (bits.bitcast(Int32) + TF32_HALF) & TF32_KEEP
    high, low = cute.make_rmem_tensor(flat, Int32), cute.make_rmem_tensor(flat, Float32)
    high.store(rounded)
    low.store(bits - rounded.bitcast(Float32))
    return tuple(cute.make_tensor(cute.recast_ptr(part.iterator, dtype=TFloat32), layout) for part in (high, low))


def _as_16_bit_operand(layout: cute.Layout) -> cute.Layout:
    # ((2, 2), M, N) -> ((2, 2, 2), M, N / 2): two n8 accumulators are one k16 operand
    pairs = cute.logical_divide(layout, (None, None, 2))
    return cute.make_layout(
        ((*pairs.shape[0], pairs.shape[2][0]), pairs.shape[1], pairs.shape[2][1]),
        stride=((*pairs.stride[0], pairs.stride[2][0]), pairs.stride[1], pairs.stride[2][1]),
    )


def _as_tf32_operand(layout: cute.Layout) -> cute.Layout:
    # ((column, row), M, N) -> ((row, slot), M, N): elements 2t, 2t + 1 of a row are slots t, t + 4 of k8
    (columns, rows), m, n = layout.shape
    (column, row), m_stride, n_stride = layout.stride
    return cute.make_layout(((rows, columns), m, n), stride=((row, column), m_stride, n_stride))


def row_view(accumulator: cute.Tensor) -> cute.Tensor:
    """Returns an accumulator ((2, 2), M, N), or its coordinates, as (rows, columns): ((2, M), (2, N))."""
    layout = accumulator.layout
    (columns, rows), m, n = layout.shape
    (column, row), m_stride, n_stride = layout.stride
    shape, stride = ((rows, m), (columns, n)), ((row, m_stride), (column, n_stride))
    return cute.make_tensor(accumulator.iterator, cute.make_layout(shape, stride=stride))
