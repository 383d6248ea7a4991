"""Params: the one struct parameter of a kernel, built from the same field list that the launch packs."""

import functools
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32, Int64, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm

from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.abi import Fields
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.tensors import FLOAT8

DTYPES = {"float16": Float16, "bfloat16": BFloat16, "float32": Float32, FLOAT8: Float8E4M3FN}
KINDS = {"i64": Int64, "i32": Int32, "f32": Float32}


class RowCoordinates(NamedTuple):
    """A row of query, key, value or a gradient: indices along the axes batch, head and row of its tensor."""

    batch: Any
    head: Any
    row: Any


def struct_type(name: str, fields: Fields) -> Any:
    """Returns the struct as a DSL type: one by-value parameter with C layout."""
    return cute.make_native_struct(name, **{field: KINDS[kind] for field, kind in fields})


def from_values(build: Build, values: tuple[Any, ...]) -> Any:
    """Returns the struct of a build's kernels with these values, in the order of its fields."""
    return build_struct(_struct_of(build.kind, abi.fields_of(build)), abi.fields_of(build), values)


@functools.cache
def _struct_of(kind: str, fields: Fields) -> Any:
    return struct_type(f"{kind.capitalize()}Params", fields)


def example_arguments(fields: Fields) -> tuple[Any, ...]:
    """Returns one value of each field's type: what the compiler needs to trace a host function."""
    return tuple(KINDS[kind](1) for _, kind in fields)


def build_struct(kind: Any, fields: Fields, values: tuple[Any, ...]) -> Any:
    """Returns a struct of type `kind` with `values` in the order of `fields`."""
    return kind(**{field: value for (field, _), value in zip(fields, values, strict=True)})


def pointer(address: Int64, dtype: Any, alignment: int = 16) -> cute.Pointer:
    """Returns a global-memory pointer to an address field.

    alignment: what the problem guarantees (bytes).
    """
    return cute.make_ptr(dtype, address, cutlass.AddressSpace.gmem, assumed_align=alignment)


def stride(p: Any, name: str, axis: str) -> Int64:
    """Returns the stride of tensor `name` along `axis` (elements); axis: batch, head, row or column."""
    return getattr(p, f"{name}_{axis}")


def row_pointer(
    build: Build, p: Any, name: str, coordinates: RowCoordinates, dtype: Any = None, alignment: int = 0
) -> cute.Pointer:
    """Returns the pointer to a row of tensor `name`.

    dtype: of its elements; None for that of the build.
    alignment: of its rows (bytes); 0 for the build's `vector_bytes`.

    Every product of an index and a stride is 64 bits wide.
    """
    offset = Int64(0)
    for index, axis in zip(coordinates, ("batch", "head", "row"), strict=True):
        if not (isinstance(index, int) and index == 0):
            offset = offset + Int64(index) * stride(p, name, axis)
    dtype, alignment = DTYPES[build.dtype] if dtype is None else dtype, alignment or build.vector_bytes
    base = pointer(getattr(p, name), dtype, alignment)
    return base + assume_multiple(offset, alignment * 8 // dtype.width)


def assume_multiple(offset: Int64, elements: int) -> Int64:
    """Returns `offset` with the assumption that it is a multiple of `elements`."""
    return cute.assume(offset, divby=elements) if elements > 1 else offset


def load_scalar(address: Int64, dtype: Any, index: Any = 0) -> Any:
    """Loads element `index` of an array in global memory."""
    size = dtype.width // 8
    return cute.make_tensor(pointer(address, dtype, size) + Int64(index), cute.make_layout(1))[0]


def store_scalar(address: Int64, dtype: Any, index: Any, value: Any) -> None:
    """Stores element `index` of an array in global memory."""
    size = dtype.width // 8
    cute.make_tensor(pointer(address, dtype, size) + Int64(index), cute.make_layout(1))[0] = value


def load_words(address: Int64, is_valid: Any, count: int, *, has_zeros: bool = True) -> list[Uint32]:
    """Starts loading one word, or a vector of four words, from global memory, if `is_valid`.

    has_zeros: whether words that are not loaded are zeros; else they may be anything
    """
    places = [f"{{$w{index}}}" for index in range(count)]
    vector, target = (".v4", "{" + ", ".join(places) + "}") if count > 1 else ("", places[0])
    zeros = " ".join(f"@!valid mov.b32 {place}, 0;" for place in places if has_zeros)
    text = (
        f"{{ .reg .pred valid; setp.ne.s32 valid, {{$r1}}, 0; @valid ld.global{vector}.b32 {target}, [{{$r0}}]; "
        f"{zeros} }}"
    )
    flag = Int32(cutlass.select_(is_valid, Int32(1), Int32(0)))
    found: Any = cute.arch.inline_ptx(text, write_only_types=[Uint32] * count, read_only_args=[Int64(address), flag])
    return [Uint32(word) for word in (found if count > 1 else (found,))]


def launch_bounds(build: Build) -> dict[str, int]:
    """Returns the launch argument that tells ptxas how many blocks an SM must hold.

    With one block an SM, ptxas may use all registers.
    """
    return {"min_blocks_per_mp": build.min_blocks_per_sm} if build.min_blocks_per_sm else {}


def set_entry_name(build: Build, kernel: Any, suffix: str = "") -> None:
    """Names a kernel's entry in the cubin by its build; the compiler appends its number."""
    kernel.set_name_prefix(build.symbol + suffix, remove_cutlass_symbol=True, keep_mangled_name=False)


def read_register(register: str) -> Int32:
    """Reads a special register (tid.x, ctaid.y ...) at this point of the program.

    The compiler does not keep values derived from it in registers across a loop. It computes them again: addresses of
    swizzled tiles are many and cheap to compute, registers are scarce.
    """
    # inline_ptx cannot name a special register: it parses the per cent sign as its own.
    text = f"mov.u32 $0, %{register};"
    value = llvm.inline_asm(ir.IntegerType.get_signless(32), [], text, "=r", has_side_effects=True, asm_dialect=0)
    return Int32(value)


def opaque(value: Int32) -> Int32:
    """Returns `value` as a new value to the compiler, which then computes again what is derived from it."""
    word, text = ir.IntegerType.get_signless(32), "mov.u32 $0, $1;"
    found = llvm.inline_asm(word, [Int32(value).ir_value()], text, "=r,r", has_side_effects=True, asm_dialect=0)
    return Int32(found)
