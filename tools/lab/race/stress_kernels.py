"""Stress kernels: PTX that disturbs the kernels under test and compares their results on the device.

The driver compiles the PTX for the GPU that is present, so no compiler is needed. All parameters are 64 bits wide:
addresses, and counts of 32-bit words.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.plan.plan import Launch
from cutlass_py_attn.runtime import driver, kernel_launch

Array = npt.NDArray[Any]

THREADS: Final = 256
_HEADER: Final = ".version 7.0\n.target sm_80\n.address_size 64\n"

# Every thread of the grid processes words %i, %i + THREADS * gridDim.x, ... up to %words.
_BEGIN: Final = """
.visible .entry {name}({parameters})
.reqntid 256, 1, 1
{{
	.reg .pred %p, %q;
	.reg .b16 %h<4>;
	.reg .b32 %t, %b, %n, %x, %y, %z, %count, %most;
	.reg .f32 %f<4>;
	.reg .b64 %i, %step, %words, %a, %c, %at, %from, %result, %length, %start, %now;
	mov.u32 %t, %tid.x;
	mov.u32 %b, %ctaid.x;
	mov.u32 %n, %nctaid.x;
	mul.wide.u32 %i, %b, 256;
	cvt.u64.u32 %at, %t;
	add.u64 %i, %i, %at;
	mul.wide.u32 %step, %n, 256;
"""

# Counts the words that differ, and keeps the largest distance of two numbers. The bits of non-negative floats are
# ordered as the floats are, with NaN above all.
_COMPARE: Final = """
	ld.param.u64 %a, [{name}_0];
	ld.param.u64 %c, [{name}_1];
	ld.param.u64 %words, [{name}_2];
	ld.param.u64 %result, [{name}_3];
	mov.u32 %count, 0;
	mov.u32 %most, 0;
$NEXT:
	setp.ge.u64 %p, %i, %words;
	@%p bra $DONE;
	shl.b64 %at, %i, 2;
	add.u64 %from, %c, %at;
	add.u64 %at, %a, %at;
	ld.global.u32 %x, [%at];
	ld.global.u32 %y, [%from];
	add.u64 %i, %i, %step;
	setp.eq.u32 %p, %x, %y;
	@%p bra $NEXT;
	add.u32 %count, %count, 1;
{distance}	bra $NEXT;
$DONE:
	setp.eq.u32 %p, %count, 0;
	@%p bra $END;
	red.global.add.u32 [%result], %count;
	red.global.max.u32 [%result+4], %most;
$END:
	ret;
}}
"""
_FURTHER: Final = """	sub.f32 %f0, %f0, %f1;
	abs.f32 %f0, %f0;
	mov.b32 %z, %f0;
	max.u32 %most, %most, %z;
"""
_DISTANCES: Final = {
    "float32": "\tmov.b32 %f0, %x;\n\tmov.b32 %f1, %y;\n" + _FURTHER,
    "float16": "\tmov.b32 {%h0, %h2}, %x;\n\tmov.b32 {%h1, %h3}, %y;\n"
    + "".join(f"\tcvt.f32.f16 %f0, %h{i};\n\tcvt.f32.f16 %f1, %h{i + 1};\n{_FURTHER}" for i in (0, 2)),
    "bfloat16": "".join(
        f"\t{operation} %z, %x, {number};\n\tmov.b32 %f0, %z;\n\t{operation} %z, %y, {number};\n\tmov.b32 %f1, %z;\n"
        + _FURTHER
        for operation, number in (("shl.b32", 16), ("and.b32", 0xFFFF0000))
    ),
}

# Each thread sleeps, then copies its words: a kernel that reads them too early finds the old values.
_COPY_LATE: Final = """
	ld.param.u64 %a, [copy_late_0];
	ld.param.u64 %c, [copy_late_1];
	ld.param.u64 %words, [copy_late_2];
	ld.param.u64 %length, [copy_late_3];
	cvt.u32.u64 %z, %length;
	nanosleep.u32 %z;
$NEXT:
	setp.ge.u64 %p, %i, %words;
	@%p bra $END;
	shl.b64 %at, %i, 2;
	add.u64 %from, %c, %at;
	add.u64 %at, %a, %at;
	ld.global.u32 %x, [%from];
	st.global.u32 [%at], %x;
	add.u64 %i, %i, %step;
	bra $NEXT;
$END:
	ret;
}}
"""

# Each block adds to its own words for a time that its index and the seed decide, so that SMs become free in any order.
_NOISE: Final = """
	ld.param.u64 %a, [noise_0];
	ld.param.u64 %c, [noise_1];
	ld.param.u64 %length, [noise_2];
	cvt.u32.u64 %x, %c;
	add.u32 %x, %x, %b;
	mul.lo.u32 %x, %x, 2654435761;
	cvt.u32.u64 %y, %length;
	mul.hi.u32 %y, %x, %y;
	cvt.u64.u32 %length, %y;
	shl.b64 %at, %i, 2;
	add.u64 %at, %a, %at;
	mov.u64 %start, %globaltimer;
$NEXT:
	ld.volatile.global.u32 %x, [%at];
	add.u32 %x, %x, 1;
	st.volatile.global.u32 [%at], %x;
	mov.u64 %now, %globaltimer;
	sub.u64 %now, %now, %start;
	setp.lt.u64 %p, %now, %length;
	@%p bra $NEXT;
	ret;
}}
"""


def _entry(name: str, count: int, body: str, **inserted: str) -> str:
    parameters = ", ".join(f".param .u64 {name}_{number}" for number in range(count))
    return (_BEGIN + body).format(name=name, parameters=parameters, **inserted)


PTX: Final = "".join(
    [
        _HEADER,
        *(_entry(f"compare_{dtype}", 4, _COMPARE, distance=text) for dtype, text in _DISTANCES.items()),
        _entry("copy_late", 4, _COPY_LATE),
        _entry("noise", 3, _NOISE),
    ]
)


@dataclass(frozen=True, slots=True)
class Difference:
    """32-bit words that differ, and the largest |a - b|: NaN where either is NaN."""

    words: int
    distance: float


class Kernels:
    """The kernels loaded on a GPU, with device memory for results and noise; `close` frees it."""

    def __init__(self, gpu: driver.Device, ptx: str | None = None) -> None:
        library = driver.load_library((PTX if ptx is None else ptx).encode() + b"\0")
        names = (*(f"compare_{dtype}" for dtype in _DISTANCES), "copy_late", "noise")
        self._handles = {name: driver.get_kernel(library, name) for name in names}
        self._blocks = gpu.num_sms
        self._noise = driver.allocate_now(4 * THREADS * self._blocks, "the noise's words")
        self._result = driver.allocate_now(8, "a comparison's result")
        self._host = np.zeros(2, np.uint32)

    def close(self) -> None:
        """Frees the memory."""
        driver.free_now(self._noise)
        driver.free_now(self._result)

    def difference(self, dtype: str, address: int, other: int, size: int, stream: int) -> Difference:
        """Returns how two arrays of `size` bytes (a multiple of 4) differ; waits for the stream."""
        driver.memset_zero(self._result, 8, stream)
        self._launch(f"compare_{dtype}", stream, address, other, _words(size), self._result)
        driver.copy_to_host(self._host.ctypes.data, self._result, 8, stream)
        driver.synchronise(stream)
        (distance,) = struct.unpack("<f", self._host[1:].tobytes())
        return Difference(int(self._host[0]), distance)

    def copy_late(self, to: int, source: int, size: int, nanoseconds: int, stream: int) -> None:
        """Copies `size` bytes (a multiple of 4), `nanoseconds` to twice as long after the kernel has started."""
        self._launch("copy_late", stream, to, source, _words(size), nanoseconds)

    def noise(self, seed: int, nanoseconds: int, stream: int) -> None:
        """Launches a block for each SM; each block runs for some time up to `nanoseconds`."""
        self._launch("noise", stream, self._noise, seed % 2**32, nanoseconds)

    def _launch(self, name: str, stream: int, *values: int) -> None:
        storage = (ctypes.c_uint64 * len(values))(*values)
        width = ctypes.sizeof(ctypes.c_uint64)
        pointers = (ctypes.c_uint64 * len(values))(*(ctypes.addressof(storage) + width * i for i in range(len(values))))
        launch = Launch(name, (self._blocks, 1, 1), (THREADS, 1, 1), 0)
        kernel_launch.KernelLaunch(self._handles[name], launch, ctypes.addressof(pointers))(stream)


def _words(size: int) -> int:
    if size % 4:
        raise ValueError(f"size = {size} bytes: must be a multiple of 4; use an even number of 16-bit elements")
    return size // 4
