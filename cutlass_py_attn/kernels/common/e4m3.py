"""e4m3: float32 numbers rounded to 8-bit floats with 4 bits of exponent and 3 of mantissa (float8_e4m3fn).

The rule, on every target: round to nearest, ties to even; magnitudes beyond 448, infinities too, become 448 with their
sign; every NaN becomes 0x7F. From sm_89 on, an instruction does this. Earlier targets compute it on the bits.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.primitives as prim
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int8, Int32, Int64, Uint8, Uint32

from cutlass_py_attn.kernels.common import params, tile_copy
from cutlass_py_attn.kernels.common.softmax import TINY
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.problem.tensors import F32_BYTES

MAX_E4M3 = 448.0
INSTRUCTION_SINCE = (8, 9)  # compute capability with cvt.rn.satfinite.e4m3x2.f32
NAN_CODE = 0x7F
VECTOR_BYTES = 16  # of the widest cp.async
LARGEST_BITS = 0x43E00000  # 448 in float32
INFINITY_BITS = 0x7F800000
LEAST_NORMAL_BITS = 0x3C800000  # 2**-6, the least normal e4m3 number, in float32
# One unit in the last place of 2**14 in float32 is 2**-9, the distance of subnormal e4m3 numbers.
ROUNDER, ROUNDER_BITS = 16384.0, 0x46800000
MANTISSA_SHIFT = 20  # float32 has 20 bits of mantissa more
EXPONENT_SHIFT = (127 - 7) << 3  # difference of the exponents' biases, at e4m3's exponent


def has_instruction(arch: str) -> bool:
    """Returns whether the target converts to e4m3 by an instruction."""
    return architecture(arch).compute_capability >= INSTRUCTION_SINCE


def to_f16(arch: str, word: Uint32) -> tuple[Uint32, Uint32]:
    """Returns four codes of a word as two words of float16 pairs, the codes of the low half first. Every code is exact.

    Earlier targets than sm_89 move the bits to where float16 has them and multiply by 256, the ratio of the exponents'
    biases; NaN becomes 480 there.
    """
    if has_instruction(arch):
        text = (
            "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, low; "
            "cvt.rn.f16x2.e4m3x2 {$w1}, high; }"
        )
    else:
        text = (
            "{ .reg .b32 low, high, sign, factor; mov.b32 factor, 0x5c005c00; "
            "prmt.b32 low, {$r0}, 0, 0x1404; prmt.b32 high, {$r0}, 0, 0x3424; "
            "and.b32 sign, low, 0x80008000; and.b32 low, low, 0x7f007f00; shr.u32 low, low, 1; or.b32 low, low, sign; "
            "and.b32 sign, high, 0x80008000; and.b32 high, high, 0x7f007f00; shr.u32 high, high, 1; "
            "or.b32 high, high, sign; mul.rn.f16x2 {$w0}, low, factor; mul.rn.f16x2 {$w1}, high, factor; }"
        )
    low, high = cute.arch.inline_ptx(text, write_only_types=[Uint32, Uint32], read_only_args=[word])
    return Uint32(low), Uint32(high)


def rounded(pair: Uint32, dtype: type[cutlass.Numeric], scale: Any = None) -> Uint32:
    """Returns two float16 numbers, times a scale if there is one, as two numbers of a 16-bit dtype."""
    if dtype is Float16 and scale is None:
        return pair
    low, high = tile_copy.unpack_float32(pair, Float16)
    if scale is not None:
        low, high = low * scale, high * scale
    kind = "bf16x2" if dtype is BFloat16 else "f16x2"
    text = f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};"
    return Uint32(cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[high, low]))


def exponent_scale(scale_log2: Float32) -> Float32:
    """Returns a factor of the scores in the exponent that has scales of codes: never zero, see `softmax.TINY`.

    One below 0 becomes NaN.
    """
    positive = cute.arch.fmax(scale_log2, Float32(TINY), nan=True)
    return Float32(cutlass.select_(scale_log2 < 0.0, Float32(float("nan")), positive))


def scale_offset(p: Any, name: str, sequence: Int32, key_head: Int32) -> Int64:
    """Returns the offset (elements) of an operand's scale of a sequence and a key head, without its row."""
    batch, head = (getattr(p, f"{name}_scale_{axis}") for axis in ("batch", "head"))
    return Int64(sequence) * batch + Int64(key_head) * head


def scale(p: Any, name: str, sequence: Int32, key_head: Int32) -> Float32:
    """Returns an operand's scale of a sequence and a key head; 1 without scales."""
    return _load_scale(getattr(p, f"{name}_scale"), scale_offset(p, name, sequence, key_head))


@cute.jit
def _load_scale(address: Int64, offset: Int64):
    """Loads a scale, or returns 1 if the address is 0."""
    found = Float32(1.0)
    if address != 0:
        found = params.load_scalar(address, Float32, offset)
    return found


@cute.jit
def copy_scale(address: Int64, offset: Int64, target: Any, in_bounds: Any):
    """Starts copying a scale to shared memory, 0 if out of bounds; stores 1 if the address is 0."""
    if address != 0:
        copy_async(address + offset * F32_BYTES, target, in_bounds, F32_BYTES)
    else:
        cute.make_tensor(cute.recast_ptr(target.align(F32_BYTES), dtype=Float32), cute.make_layout(1))[0] = Float32(1.0)


def copy_async(address: Any, target: Any, in_bounds: Any, num_bytes: int) -> None:
    """Starts copying 4, 8 or 16 bytes from global to shared memory; zeros if out of bounds."""
    source = cute.make_ptr(Int8, address, cutlass.AddressSpace.gmem, assumed_align=num_bytes)
    mode = prim.LoadCacheModifier.CG if num_bytes == VECTOR_BYTES else prim.LoadCacheModifier.CA
    size = cutlass.select_(in_bounds, Int32(num_bytes), Int32(0))
    prim.cp_async_shared_global(target.align(num_bytes), source, num_bytes, mode, cp_size=size)


def codes(arch: str, values: cute.Tensor) -> cute.Tensor:
    """Returns the e4m3 bytes of a register tensor of float32, as a register tensor of Uint8."""
    count = cute.size(values)
    if has_instruction(arch) and count > 1:
        rounded = cute.make_rmem_tensor(count, Float8E4M3FN)
        rounded.store(values.load().to(Float8E4M3FN))
        return cute.recast_tensor(rounded, Uint8)
    found = cute.make_rmem_tensor(count, Uint8)
    for i in range(count):
        found[i] = Uint8(code_of_bits(values[i].bitcast(Uint32), _select, _bits_of_sum))
    return found


def code_of_bits(bits: Any, select: Any, bits_of_sum: Any) -> Any:
    """Returns the e4m3 code of a float32 number, given as its bits in 32 unsigned bits.

    select: function of a condition and two values. bits_of_sum: function that returns the bits of (the float32 number
    of these bits) + ROUNDER, rounded to nearest even.
    """
    sign, magnitude = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    limited = select(magnitude > LARGEST_BITS, magnitude * 0 + LARGEST_BITS, magnitude)
    half_ulp = (1 << (MANTISSA_SHIFT - 1)) - 1
    normal = ((limited + half_ulp + ((limited >> MANTISSA_SHIFT) & 1)) >> MANTISSA_SHIFT) - EXPONENT_SHIFT
    subnormal = bits_of_sum(limited) - ROUNDER_BITS
    code = select(limited < LEAST_NORMAL_BITS, subnormal, normal) | sign
    return select(magnitude > INFINITY_BITS, code * 0 + NAN_CODE, code)


def _select(condition: Any, first: Any, second: Any) -> Any:
    return Uint32(cutlass.select_(condition, first, second))


def _bits_of_sum(magnitude: Uint32) -> Uint32:
    return (magnitude.bitcast(Float32) + ROUNDER).bitcast(Uint32)
