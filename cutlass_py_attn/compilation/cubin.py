"""Reads a cubin in pure Python: registers, stack, shared memory and parameters of each kernel, as ptxas wrote them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_EM_CUDA: Final = 190
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_SHT_NOBITS: Final = 8
_SYMBOL_BYTES: Final = 24

# .nv.info is a list of attributes: a format byte, a code byte, and two bytes with a value or a length.
_LONG_FORMAT: Final = 4  # the two bytes are the length of a value that follows
_KPARAM_INFO: Final = 0x17
_REQNTID: Final = 0x10
_PER_FUNCTION: Final = {0x2F: "registers", 0x11: "frame_bytes"}

Block = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class CubinParameter:
    """A kernel parameter; offset and size in bytes. The first offset is 48, not 0, for a 64-aligned tensor map."""

    ordinal: int
    offset: int
    size: int


@dataclass(slots=True)
class CubinKernel:
    """An entry of a cubin. Frame in bytes per thread, shared memory in bytes per block.

    From sm_90 on, the shared memory includes the 1024 bytes that the driver reserves.
    """

    symbol: str
    registers: int = 0
    frame_bytes: int = 0
    static_shared_memory_bytes: int = 0
    reqntid: Block | None = None
    parameters: tuple[CubinParameter, ...] = ()


@dataclass(frozen=True, slots=True)
class Cubin:
    """A cubin. sm: target, 90 for sm_90 and sm_90a. kernels: entries by symbol."""

    sm: int
    kernels: dict[str, CubinKernel]


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    size: int
    data: bytes  # empty for a section of shared memory, which has a size alone


def read(cubin: bytes) -> Cubin:
    """Returns target and entries of `cubin`; ValueError if the bytes are not a complete cubin."""
    if cubin[:4] != b"\x7fELF" or len(cubin) < 64 or cubin[4] != 2:
        raise ValueError(f"not a cubin: {len(cubin)} bytes that do not start with a 64-bit ELF header")
    if struct.unpack_from("<H", cubin, 18)[0] != _EM_CUDA:
        raise ValueError("not a cubin: an ELF file for another machine than a CUDA GPU")
    try:
        sections = list(_sections(cubin))
        return Cubin(_target(cubin), _kernels(sections))
    except (struct.error, IndexError, KeyError, OverflowError, ValueError) as error:
        raise ValueError(f"damaged cubin: its {len(cubin)} bytes do not match its tables ({error})") from error


def code(cubin: bytes) -> dict[str, bytes]:
    """Returns the machine code of each entry; ValueError if the bytes are not a cubin."""
    read(cubin)
    return {section.name[6:]: section.data for section in _sections(cubin) if section.name.startswith(".text.")}


def _target(cubin: bytes) -> int:
    """Returns the SM number in e_flags: the lowest byte up to ELF ABI 7, the second byte from ABI 8 on."""
    flags = int(struct.unpack_from("<I", cubin, 48)[0])
    return flags >> 8 & 0xFF if cubin[8] >= 8 else flags & 0xFF


def _text(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def _sections(cubin: bytes) -> Iterator[_Section]:
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", cubin, 58)
    headers = [_SECTION.unpack_from(cubin, table + index * entry_bytes) for index in range(count)]
    names = cubin[headers[names_index][4] :]
    total = 0
    for name, kind, _, _, offset, size, *_ in headers:
        data_bytes = 0 if kind == _SHT_NOBITS else size
        total += data_bytes
        if max(offset + data_bytes, total) > len(cubin):  # sections do not overlap, so that they fit together
            raise ValueError(f"a section ends at {offset + data_bytes}, and {total} bytes are in sections")
        yield _Section(_text(names, name), size, cubin[offset : offset + data_bytes])


def _kernels(sections: list[_Section]) -> dict[str, CubinKernel]:
    kernels = {s.name[6:]: CubinKernel(s.name[6:]) for s in sections if s.name.startswith(".text.")}
    by_name = {section.name: section.data for section in sections}
    sizes = {section.name: section.size for section in sections}
    symbols = [_text(by_name[".strtab"], offset) for offset in _symbol_names(by_name[".symtab"])]
    for code, value in _attributes(by_name[".nv.info"]):
        if code not in _PER_FUNCTION:
            continue
        index, number = struct.unpack("<II", value)
        if symbols[index] in kernels:
            setattr(kernels[symbols[index]], _PER_FUNCTION[code], number)
    for kernel in kernels.values():
        kernel.static_shared_memory_bytes = sizes.get(f".nv.shared.{kernel.symbol}", 0)
        _read_kernel_info(kernel, by_name[f".nv.info.{kernel.symbol}"])
    return kernels


def _symbol_names(table: bytes) -> Iterator[int]:
    for offset in range(0, len(table), _SYMBOL_BYTES):
        yield struct.unpack_from("<I", table, offset)[0]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields (code, value) of each attribute in the long format, unknown codes included."""
    offset = 0
    while offset < len(data):
        form, code, length = struct.unpack_from("<BBH", data, offset)
        offset += 4
        if form == _LONG_FORMAT:
            yield code, data[offset : offset + length]
            offset += length


def _read_kernel_info(kernel: CubinKernel, data: bytes) -> None:
    """Sets parameters and block size from the kernel's .nv.info section."""
    parameters = []
    for code, value in _attributes(data):
        if code == _KPARAM_INFO:
            _, ordinal, offset, word = struct.unpack("<IHHI", value)
            parameters.append(CubinParameter(ordinal, offset, word >> 18))
        elif code == _REQNTID:
            kernel.reqntid = struct.unpack("<III", value)
    kernel.parameters = tuple(sorted(parameters, key=lambda parameter: parameter.ordinal))
