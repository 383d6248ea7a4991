"""Cubin: what ptxas wrote on each kernel (registers, stack, shared memory, parameters), in pure Python."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_EM_CUDA: Final = 190
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_SHT_NOBITS: Final = 8
_SYMBOL_BYTES: Final = 24

# .nv.info is a list of attributes: a format byte, a code byte, and two bytes of value or of length.
_LONG_FORMAT: Final = 4  # the two bytes are the length of the value that follows
_KPARAM_INFO: Final = 0x17
_REQNTID: Final = 0x10
_MAXNTID: Final = 0x05
_PER_FUNCTION: Final = {0x2F: "registers", 0x11: "frame_bytes", 0x12: "min_stack_bytes"}

Block = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class CubinParameter:
    """One kernel parameter. With a 64-aligned tensor map in front, the first offset is 48, not 0."""

    ordinal: int
    offset: int
    size: int


@dataclass(slots=True)
class CubinKernel:
    """One entry. Frame and stack in bytes a thread, shared memory in bytes a block.

    From sm_90 on the shared memory includes the driver's 1024 bytes.
    """

    symbol: str
    registers: int = 0
    frame_bytes: int = 0
    min_stack_bytes: int = 0
    static_shared_memory_bytes: int = 0
    reqntid: Block | None = None
    maxntid: Block | None = None
    parameters: tuple[CubinParameter, ...] = ()


@dataclass(frozen=True, slots=True)
class Cubin:
    """Target (90 for sm_90 and sm_90a) and entries of one cubin."""

    sm: int
    kernels: dict[str, CubinKernel]


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    size: int
    data: bytes  # empty for shared memory, which has a size but no contents


def read(cubin: bytes) -> Cubin:
    """Target and entries of `cubin`; ValueError when the bytes are not a whole cubin."""
    if cubin[:4] != b"\x7fELF" or len(cubin) < 64 or cubin[4] != 2:
        raise ValueError(f"not a cubin: {len(cubin)} bytes that do not start with a 64-bit ELF header")
    if struct.unpack_from("<H", cubin, 18)[0] != _EM_CUDA:
        raise ValueError("not a cubin: an ELF file for another machine than a CUDA GPU")
    try:
        sections = list(_sections(cubin))
        return Cubin(_target(cubin), _kernels(sections))
    except (struct.error, IndexError, KeyError, OverflowError, ValueError) as error:
        raise ValueError(f"damaged cubin: its {len(cubin)} bytes do not hold what its tables say ({error})") from error


def code(cubin: bytes) -> dict[str, bytes]:
    """The machine code of each entry, whatever else the file holds; ValueError when the bytes are not a cubin."""
    read(cubin)
    return {section.name[6:]: section.data for section in _sections(cubin) if section.name.startswith(".text.")}


def _target(cubin: bytes) -> int:
    """The SM number in e_flags: the lowest byte up to ELF ABI 7, the second byte from ABI 8 on."""
    flags = int(struct.unpack_from("<I", cubin, 48)[0])
    return flags >> 8 & 0xFF if cubin[8] >= 8 else flags & 0xFF


def _text(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def _sections(cubin: bytes) -> Iterator[_Section]:
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", cubin, 58)
    headers = [_SECTION.unpack_from(cubin, table + index * entry_bytes) for index in range(count)]
    names = cubin[headers[names_index][4] :]
    for name, kind, _, _, offset, size, *_ in headers:
        held = 0 if kind == _SHT_NOBITS else size
        if offset + held > len(cubin):
            raise ValueError(f"a section ends at {offset + held}")
        yield _Section(_text(names, name), size, cubin[offset : offset + held])


def _kernels(sections: list[_Section]) -> dict[str, CubinKernel]:
    found = {s.name[6:]: CubinKernel(s.name[6:]) for s in sections if s.name.startswith(".text.")}
    by_name = {section.name: section.data for section in sections}
    sizes = {section.name: section.size for section in sections}
    symbols = [_text(by_name[".strtab"], offset) for offset in _symbol_names(by_name[".symtab"])]
    for code, value in _attributes(by_name[".nv.info"]):
        if code not in _PER_FUNCTION:
            continue
        index, number = struct.unpack("<II", value)
        if symbols[index] in found:
            setattr(found[symbols[index]], _PER_FUNCTION[code], number)
    for kernel in found.values():
        kernel.static_shared_memory_bytes = sizes.get(f".nv.shared.{kernel.symbol}", 0)
        _read_launch_facts(kernel, by_name[f".nv.info.{kernel.symbol}"])
    return found


def _symbol_names(table: bytes) -> Iterator[int]:
    for offset in range(0, len(table), _SYMBOL_BYTES):
        yield struct.unpack_from("<I", table, offset)[0]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(code, value) of each attribute with a value of its own; unknown codes are the caller's to skip."""
    offset = 0
    while offset < len(data):
        form, code, length = struct.unpack_from("<BBH", data, offset)
        offset += 4
        if form == _LONG_FORMAT:
            yield code, data[offset : offset + length]
            offset += length


def _read_launch_facts(kernel: CubinKernel, data: bytes) -> None:
    parameters = []
    for code, value in _attributes(data):
        if code == _KPARAM_INFO:
            _, ordinal, offset, word = struct.unpack("<IHHI", value)
            parameters.append(CubinParameter(ordinal, offset, word >> 18))
        elif code == _REQNTID:
            kernel.reqntid = struct.unpack("<III", value)
        elif code == _MAXNTID:
            kernel.maxntid = struct.unpack("<III", value)
    kernel.parameters = tuple(sorted(parameters, key=lambda parameter: parameter.ordinal))
