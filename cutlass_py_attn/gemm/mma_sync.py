"""mma.sync: the k loop that the generic family's rooms share, from sm_80 on, for 16-bit and float32 operands.

16-bit operands come by ldmatrix (transposed where the tile is stored across k) and feed m16n8k16.
float32 operands are split into two TF32 numbers, x = high + low, and each product is the sum of three
m16n8k8 instructions, low*high + high*low + high*high: the dropped low*low is 2^-22 of the product.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, TFloat32
from cutlass.cute.nvgpu import warp

from cutlass_py_attn.gemm.gemm import Gemm
from cutlass_py_attn.parts.integers import largest_part
from cutlass_py_attn.parts.params import DTYPES

# Round to TF32's 10 mantissa bits: add half of the last kept bit, then clear the 13 bits below it. Integer
# arithmetic, because the hardware truncates and the convert instruction is slower.
TF32_HALF = 0x1000
TF32_KEEP = -0x2000

ACCUMULATORS = 128  # registers of a thread for a float32 accumulator and for what is summed apart from it ...
LEAST_APART = 16  # ... but so many for the latter


class MmaSync:
    """One Gemm on mma.sync. `operands` binds tiles to a thread, `issue` runs the k loop."""

    def __init__(self, spec: Gemm, dtype: str) -> None:
        assert not spec.objections(), spec.objections()
        self.spec = spec
        self.dtype = DTYPES[dtype]
        rows, columns = spec.warps
        if spec.item_bytes == 4:
            # Across k, slots t and t + 4 hold elements 2t and 2t + 1: the accumulator's own order, so that a
            # product can take its A from an accumulator, and the rows read by a quad fall in different banks.
            depth = cute.make_layout((4, 2), stride=(2, 1)) if spec.b_transposed else 8
            atom = warp.MmaTF32Op((16, 8, 8))
            self.mma = cute.make_tiled_mma(atom, (rows, columns, 1), permutation_mnk=(rows * 16, columns * 8, depth))
        else:
            atom = warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16))
            # 16 columns a warp, so that one ldmatrix.x4 feeds two n8 instructions.
            self.mma = cute.make_tiled_mma(atom, (rows, columns, 1), permutation_mnk=(rows * 16, columns * 16, 16))

    def accumulator(self, thread: Int32) -> cute.Tensor:
        """A float32 register tensor for this thread's part of C, not yet set."""
        shape = self.mma.get_slice(thread).partition_shape_C((self.spec.m, self.spec.n))
        return cute.make_rmem_tensor(shape, Float32)

    def coordinates(self, thread: Int32) -> cute.Tensor:
        """(row, column) of each accumulator element."""
        return self.mma.get_slice(thread).partition_C(cute.make_identity_tensor((self.spec.m, self.spec.n)))

    def operands(self, a: cute.Tensor, b: cute.Tensor, thread: Int32) -> "Operands":
        """This thread's part of A (m, k) and B (n, k); a ring of tiles has a third mode."""
        return Operands(self.a_operand(a, thread), self.b_operand(b, thread))

    def a_operand(self, tile: cute.Tensor, thread: Int32) -> "Operand":
        """A from shared memory."""
        if self.spec.item_bytes == 4:
            return Float32Operand(self.mma.get_slice(thread).partition_A(tile))
        copy = cute.make_tiled_copy_A(self._ldmatrix(self.spec.a_transposed), self.mma)
        part = self.mma.get_slice(thread)
        return LdMatrixOperand(
            copy, copy.get_slice(thread), tile, lambda one: part.make_fragment_A(part.partition_A(one))
        )

    def b_operand(self, tile: cute.Tensor, thread: Int32) -> "Operand":
        """B from shared memory."""
        if self.spec.item_bytes == 4:
            return Float32Operand(self.mma.get_slice(thread).partition_B(tile))
        copy = cute.make_tiled_copy_B(self._ldmatrix(self.spec.b_transposed), self.mma)
        part = self.mma.get_slice(thread)
        return LdMatrixOperand(
            copy, copy.get_slice(thread), tile, lambda one: part.make_fragment_B(part.partition_B(one))
        )

    def from_accumulator(self, values: cute.Tensor) -> "RegisterOperand":
        """A from an accumulator of the product before it, whose n is this product's k; no data moves."""
        if self.spec.item_bytes == 4:
            return RegisterOperand(cute.make_tensor(values.iterator, _as_tf32_operand(values.layout)))
        packed = cute.make_rmem_tensor_like(values, self.dtype)
        packed.store(values.load().to(self.dtype))
        return RegisterOperand(cute.make_tensor(packed.iterator, _as_16_bit_operand(packed.layout)))

    def issue(self, accumulator: cute.Tensor, parts: "Operands") -> None:
        """C = or += A B over all of k.

        The tensor cores round their float32 sums towards zero, an error that grows with every addition. A float32
        product that accumulates therefore sums one tile from zero and adds it to C with a rounding addition, some
        columns at a time.
        """
        steps = self.spec.k // self.spec.instruction[2]
        if not self.spec.accumulate or self.spec.item_bytes != 4:
            if not self.spec.accumulate:
                accumulator.fill(0.0)
            for k in range(steps):
                self._multiply(accumulator, parts.a.fetch(k), parts.b.fetch(k))
            return
        rows, columns = (cute.size(accumulator, mode=[mode]) for mode in (1, 2))
        few = max(ACCUMULATORS - cute.size(accumulator), LEAST_APART)
        # What a piece would read again from shared memory the compiler keeps instead, for all of k.
        is_kept = isinstance(parts.a, RegisterOperand)
        width = largest_part(columns, max(few // (4 * rows), 1)) if is_kept else columns
        for piece in range(columns // width):
            part = cute.logical_divide(accumulator, (None, None, width))[None, None, (None, piece)]
            target = cute.make_rmem_tensor(part.shape, Float32)
            target.fill(0.0)
            for k in range(steps):
                columns_of_b = cute.logical_divide(parts.b.fetch(k), (None, width))[None, (None, piece)]
                self._multiply(target, parts.a.fetch(k), _gathered(columns_of_b))
            part.store(part.load() + target.load())

    def _multiply(self, accumulator: cute.Tensor, a: cute.Tensor, b: cute.Tensor) -> None:
        if self.spec.item_bytes != 4:
            cute.gemm(self.mma, accumulator, a, b, accumulator)
            return
        a_high, a_low = split_tf32(a)
        b_high, b_low = split_tf32(b)
        for left, right in ((a_low, b_high), (a_high, b_low), (a_high, b_high)):
            cute.gemm(self.mma, accumulator, left, right, accumulator)

    def _ldmatrix(self, transpose: bool) -> cute.CopyAtom:
        return cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=transpose, num_matrices=4), self.dtype)


class Operands:
    """A and B of one issue; `stage` picks a slot where they are rings."""

    def __init__(self, a: "Operand", b: "Operand") -> None:
        self.a, self.b = a, b

    def stage(self, a: Int32 | None = None, b: Int32 | None = None) -> "Operands":
        """The operands with slot `a` of A and slot `b` of B; None leaves that side as it is."""
        left = self.a if a is None else self.a.stage(a)
        right = self.b if b is None else self.b.stage(b)
        return Operands(left, right)


class LdMatrixOperand:
    """16-bit tile in shared memory, fetched by ldmatrix."""

    def __init__(self, copy, thread_copy, tile, make_fragment, source=None) -> None:
        self._copy, self._thread_copy, self._tile, self._make = copy, thread_copy, tile, make_fragment
        self._source = thread_copy.partition_S(tile) if source is None else source
        one = tile if cute.rank(tile.layout) == 2 else tile[None, None, 0]
        self._fragment = make_fragment(one)
        self._retiled = thread_copy.retile(self._fragment)

    def stage(self, index: Int32) -> "LdMatrixOperand":
        """Slot `index` of a ring."""
        source = self._source[None, None, None, index]
        return LdMatrixOperand(self._copy, self._thread_copy, self._tile[None, None, 0], self._make, source)

    def fetch(self, k: int) -> cute.Tensor:
        """Registers of k step `k`."""
        cute.copy(self._copy, self._source[None, None, k], self._retiled[None, None, k])
        return self._fragment[None, None, k]


class Float32Operand:
    """float32 tile in shared memory, fetched by plain loads."""

    def __init__(self, part: cute.Tensor) -> None:
        self._part = part

    def stage(self, index: Int32) -> "Float32Operand":
        """Slot `index` of a ring."""
        return Float32Operand(self._part[None, None, None, index])

    def fetch(self, k: int) -> cute.Tensor:
        """Registers of k step `k`."""
        source = self._part[None, None, k]
        registers = cute.make_rmem_tensor(source.shape, Float32)
        cute.autovec_copy(source, registers)
        return registers


class RegisterOperand:
    """A that already lies in registers."""

    def __init__(self, fragment: cute.Tensor) -> None:
        self._fragment = fragment

    def fetch(self, k: int) -> cute.Tensor:
        """Registers of k step `k`; float32 ones are gathered, since their split wants them without gaps."""
        part = self._fragment[None, None, k]
        if part.element_type is not Float32:
            return part
        return _gathered(part)


Operand = LdMatrixOperand | Float32Operand | RegisterOperand


def _gathered(values: cute.Tensor) -> cute.Tensor:
    """A copy of float32 registers without gaps."""
    result = cute.make_rmem_tensor(values.shape, Float32)
    result.store(values.load())
    return result


def split_tf32(values: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    """float32 registers, without gaps, as two TF32 register tensors whose sum is the value to 2^-23."""
    layout, flat = cute.make_layout(values.shape), cute.make_layout(cute.size(values))  # bit casts give a flat vector
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
    """((2, 2), M, N) -> ((2, M), (2, N)): rows x columns of an accumulator, or of its coordinates."""
    layout = accumulator.layout
    (columns, rows), m, n = layout.shape
    (column, row), m_stride, n_stride = layout.stride
    shape, stride = ((rows, m), (columns, n)), ((row, m_stride), (column, n_stride))
    return cute.make_tensor(accumulator.iterator, cute.make_layout(shape, stride=stride))
