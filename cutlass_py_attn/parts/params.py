"""Params: the kernels' one struct parameter, made from the same field list that the launch packs."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm

from cutlass_py_attn.abi import Fields
from cutlass_py_attn.plan import Build

DTYPES = {"float16": Float16, "bfloat16": BFloat16, "float32": Float32}
KINDS = {"i64": Int64, "i32": Int32, "f32": Float32}


def struct(name: str, fields: Fields) -> Any:
    """The struct as a DSL type: one by-value parameter with C layout."""
    return cute.make_native_struct(name, **{field: KINDS[kind] for field, kind in fields})


def representative(fields: Fields) -> tuple[Any, ...]:
    """One value of each field's type: what the compiler needs to trace a host function."""
    return tuple(KINDS[kind](1) for _, kind in fields)


def filled(kind: Any, fields: Fields, values: tuple[Any, ...]) -> Any:
    """The struct with `values` in the order of `fields`."""
    return kind(**{field: value for (field, _), value in zip(fields, values, strict=True)})


def pointer(address: Int64, dtype: Any, alignment: int = 16) -> cute.Pointer:
    """A global-memory pointer from an address field; `alignment` in bytes is what the problem guarantees."""
    return cute.make_ptr(dtype, address, cutlass.AddressSpace.gmem, assumed_align=alignment)


def stride(p: Any, name: str, axis: str) -> Int64:
    """Elements from one index of tensor `name` to the next along `axis`: batch, row, head, column."""
    return getattr(p, f"{name}_{axis}")


def rows(build: Build, p: Any, name: str, at: tuple[Any, Any, Any]) -> cute.Pointer:
    """Pointer to the row of tensor `name` at (batch, head, row); every product is 64 bits wide.

    Rows are aligned to the build's access_bytes.
    """
    offset = Int64(0)
    for index, axis in zip(at, ("batch", "head", "row"), strict=True):
        if not (isinstance(index, int) and index == 0):
            offset = offset + Int64(index) * stride(p, name, axis)
    first = pointer(getattr(p, name), DTYPES[build.dtype], build.access_bytes)
    return first + multiple(offset, build.access_bytes // build.item_bytes)


def multiple(offset: Int64, elements: int) -> Int64:
    """`offset`, known to the compiler as a multiple of `elements`."""
    return cute.assume(offset, divby=elements) if elements > 1 else offset


def scalar(address: Int64, dtype: Any, index: Any = 0) -> Any:
    """One element of an array in global memory."""
    size = dtype.width // 8
    return cute.make_tensor(pointer(address, dtype, size) + Int64(index), cute.make_layout(1))[0]


def promise(build: Build) -> dict[str, int]:
    """Launch arguments that tell ptxas how many blocks an SM must hold; it reads one as leave to use every register."""
    return {"min_blocks_per_mp": build.min_blocks_per_sm} if build.min_blocks_per_sm else {}


def name_entry(build: Build, kernel: Any, suffix: str = "") -> None:
    """Name a kernel's entry in the cubin by its build; the compiler adds its number."""
    kernel.set_name_prefix(build.symbol + suffix, remove_cutlass_symbol=True, keep_mangled_name=False)


def fresh(register: str) -> Int32:
    """A special register (tid.x, ctaid.y ...) read where this stands.

    What is derived from it is then not kept in registers across a loop: addresses of swizzled tiles are many and
    cheap to form again, registers are not.
    """
    # inline_ptx cannot name a special register: it reads the per cent sign as its own.
    text = f"mov.u32 $0, %{register};"
    value = llvm.inline_asm(ir.IntegerType.get_signless(32), [], text, "=r", has_side_effects=True, asm_dialect=0)
    return Int32(value)


def again(value: Int32) -> Int32:
    """A value that the compiler does not recognise: what is derived from it is formed again, not kept in registers."""
    word, text = ir.IntegerType.get_signless(32), "mov.u32 $0, $1;"
    found = llvm.inline_asm(word, [Int32(value).ir_value()], text, "=r,r", has_side_effects=True, asm_dialect=0)
    return Int32(found)
