"""Tests of the cubin reader: resources and parameters, and an error for bytes that are not a cubin."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutlass_py_attn.compilation.cubin import CubinParameter, read

SYMBOL = "k_0"


def attribute(code: int, value: bytes) -> bytes:
    return struct.pack("<BBH", 4, code, len(value)) + value


def parameter(ordinal: int, offset: int, size: int) -> bytes:
    return attribute(0x17, struct.pack("<IHHI", 0, ordinal, offset, size << 18 | 0x1F000))


def make_cubin(abi: int, flags: int) -> bytes:
    """Returns a cubin of one kernel, assembled after the ELF64 tables."""
    facts = [attribute(code, struct.pack("<II", 1, number)) for code, number in ((0x2F, 90), (0x11, 16), (0x12, 24))]
    own = parameter(1, 176, 40) + parameter(0, 48, 128) + attribute(0x10, struct.pack("<III", 256, 1, 1))
    inline = struct.pack("<BBH", 3, 0x1B, 255)  # an attribute whose value is in its head
    unknown = attribute(0x6D, b"\1\2\3")
    contents = [
        ("", b"", 0, 0),
        (
            ".symtab",
            struct.pack("<IBBHQQ", 0, 0, 0, 0, 0, 0) + struct.pack("<IBBHQQ", 1, 18, 0, 0, 0, 0),
            0,
            2,
        ),
        (".strtab", b"\0" + SYMBOL.encode() + b"\0", 0, 3),
        (".nv.info", inline + b"".join(facts), 0, 1),
        (f".nv.info.{SYMBOL}", own + inline + unknown, 0, 1),
        (f".text.{SYMBOL}", b"\0" * 64, 0, 1),
        (f".nv.shared.{SYMBOL}", b"", 1024, 8),
    ]
    names = b""
    body, headers = b"", []
    for name, data, size, kind in contents:
        headers.append((len(names), kind, 64 + len(body), size or len(data)))
        names += name.encode() + b"\0"
        body += data
    headers.append((len(names), 3, 64 + len(body), len(names) + len(".shstrtab") + 1))
    body += names + b".shstrtab\0"
    identity = b"\x7fELF" + bytes([2, 1, 1, 0x41, abi]) + b"\0" * 7
    head = identity + struct.pack("<HHIQQQI", 2, 190, 1, 0, 0, 64 + len(body), flags)
    head += struct.pack("<HHHHHH", 64, 0, 0, 64, len(headers), len(headers) - 1)
    table = b"".join(struct.pack("<IIQQQQIIQQ", n, k, 0, 0, o, s, 0, 0, 1, 0) for n, k, o, s in headers)
    return head + body + table


CUBIN = make_cubin(7, 0x5A0D5A)


@pytest.mark.parametrize(("abi", "flags", "sm"), [(7, 0x5A0D5A, 90), (7, 0x500550, 80), (8, 0x6005A04, 90)])
def test_target_by_elf_abi(abi: int, flags: int, sm: int) -> None:
    assert read(make_cubin(abi, flags)).sm == sm


def test_facts_of_a_kernel() -> None:
    kernel = read(CUBIN).kernels[SYMBOL]
    assert (kernel.registers, kernel.frame_bytes) == (90, 16)
    assert kernel.static_shared_memory_bytes == 1024
    assert kernel.reqntid == (256, 1, 1)
    assert kernel.parameters == (CubinParameter(0, 48, 128), CubinParameter(1, 176, 40))


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"garbage" * 40, b"\x7fELF\2" + b"\0" * 100])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a cubin"):
        read(data)


@pytest.mark.parametrize("kept", range(64, len(CUBIN), 37))
def test_a_truncated_cubin_is_refused(kept: int) -> None:
    with pytest.raises(ValueError, match="damaged cubin"):
        read(CUBIN[:kept])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damage_is_never_another_error(data: st.DataObject) -> None:
    damaged = bytearray(CUBIN)
    places = st.tuples(st.integers(0, len(CUBIN) - 1), st.integers(0, 255))
    for place, value in data.draw(st.lists(places, min_size=1, max_size=8)):
        damaged[place] = value
    with contextlib.suppress(ValueError):
        read(bytes(damaged))


def test_sections_that_overlap_are_refused() -> None:
    """A table whose entries are all the same section would make a copy of the section for each of them."""
    (table,) = struct.unpack_from("<Q", CUBIN, 40)
    text_section = struct.pack("<Q", table + 5 * 64)
    every_entry = struct.pack("<HHH", 0, 65535, 0)  # bytes from one entry to the next, entries, the one with the names
    with pytest.raises(ValueError, match="bytes are in sections"):
        read(CUBIN[:40] + text_section + CUBIN[48:58] + every_entry + CUBIN[64:])
