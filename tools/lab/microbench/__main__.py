"""Compiles the microbenchmarks on any machine, runs them on a Hopper GPU, and prints one table.

python -m tools.lab.microbench --build FOLDER
python -m tools.lab.microbench --kernels FOLDER [--record FILE] [--only TEXT]
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from cutlass_py_attn.bench import harness
from cutlass_py_attn.bench.timing import SAMPLES, WARM_UPS, milliseconds
from cutlass_py_attn.errors import AttentionError, Stale
from cutlass_py_attn.launch import abi
from cutlass_py_attn.plan import plan
from cutlass_py_attn.runtime import driver, kernel_launch
from tools.lab.microbench import cases
from tools.lab.microbench.cases import Micro
from tools.release import record

MANIFEST = "microbench.json"
OUT_BYTES = 4096
CLOCKS, NANOSECONDS, READ_ROUNDS = range(3)  # indices of the int64 words at `out`
RANDOM_BYTES = 256 * 1024  # of MMA operands; more than the shared memory of an SM
UNITS = {"flop": ("TFLOP/s", 1e9), "B": ("GB/s", 1e6), "op": ("Gop/s", 1e6)}  # rate unit, divisor of work per ms
NOTE = "per clock: work of one SM per clock (flop, bytes, results); MHz: SM clocks per time within the kernel"


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement.

    - rate: work of all thread blocks per time of the median launch (rate_unit)
    - per_clock: work of one block per clock
    - beside_per_clock: bytes of shared memory that another warpgroup read per clock; None if there is none
    """

    name: str
    blocks: int
    median_ms: float
    spread: float
    rate: float
    rate_unit: str
    per_clock: float
    mhz: int
    beside_per_clock: float | None = None


def build(folder: Path) -> int:
    """Compiles every kernel into the folder; returns their number."""
    from tools.lab.microbench.compiling import compiled

    folder.mkdir(parents=True, exist_ok=True)
    found = {micro.symbol: micro for micro in cases.all_cases()}
    for symbol, micro in found.items():
        (folder / f"{symbol}.cubin").write_bytes(compiled(micro).cubin)
    listing = {"commit": harness.commit(), "sources": sources(), "kernels": list(found)}
    (folder / MANIFEST).write_text(json.dumps(listing, indent=1) + "\n")
    return len(found)


def sources() -> str:
    """Returns a hash of the files of this package."""
    here = Path(__file__).parent
    return record.sha256("\n".join(record.sha256(path.read_bytes()) for path in sorted(here.glob("*.py"))))


def measure(folder: Path, only: str, samples: int) -> Iterator[Row]:
    """Yields a row for each case whose name contains `only`. Raises Stale if the folder is of other sources."""
    path = folder / MANIFEST
    if not path.is_file() or json.loads(path.read_text())["sources"] != sources():
        raise Stale(
            f"{folder}: holds no kernels of these sources; fill it with: "
            f"python -m tools.lab.microbench --build {folder}"
        )
    gpu = driver.device(0)
    if gpu.compute_capability != (9, 0):
        raise Stale(f"{gpu.name}: the kernels are for compute capability 9.0, an H100 or H200; use one of those")
    with gpu.current(), ExitStack() as stack:
        stream = driver.create_stream()
        stack.callback(driver.destroy_stream, stream)
        out, data = (driver.allocate_now(size, "a microbenchmark") for size in (OUT_BYTES, cases.DATA_BYTES))
        stack.callback(driver.free_now, data)
        stack.callback(driver.free_now, out)
        stack.callback(driver.synchronise, stream)
        for micro in cases.all_cases():
            if only in micro.name:
                print(micro.name, file=sys.stderr, flush=True)  # if a kernel hangs, its name is the last line
                launch = Launch(micro, (folder / f"{micro.symbol}.cubin").read_bytes(), gpu, (out, data))
                fill(data, stream, micro.zeros)
                driver.memset_zero(out, OUT_BYTES, stream)
                times = [milliseconds(functools.partial(launch, stream), stream) for _ in range(WARM_UPS + samples)]
                yield row_of(micro, launch.blocks, times[WARM_UPS:], words_at(out, stream))


class Launch:
    """One case with packed parameters; a call launches it on a stream."""

    def __init__(self, micro: Micro, cubin: bytes, gpu: driver.Device, addresses: tuple[int, int]) -> None:
        self.blocks = micro.blocks or gpu.num_sms // micro.cluster * micro.cluster
        symbol = f"{micro.symbol}_0"
        kernel = driver.get_kernel(driver.load_library(cubin), symbol)
        driver.allow_shared_memory(kernel, gpu, micro.shared_memory_bytes, 0)
        self._struct = np.zeros((), abi.numpy_struct(cases.FIELDS))
        for (name, _), value in zip(cases.FIELDS, (*addresses, micro.rounds, self.blocks), strict=True):
            self._struct[name] = value
        self._pointers = np.array([self._struct.ctypes.data], np.uint64)
        grid, block = (self.blocks, 1, 1), (micro.threads, 1, 1)
        launch = plan.Launch(symbol, grid, block, micro.shared_memory_bytes, cluster=micro.cluster)
        self._start = kernel_launch.KernelLaunch(kernel, launch, self._pointers.ctypes.data)

    def __call__(self, stream: int) -> None:
        self._start(stream)


def fill(data: int, stream: int, zeros: bool) -> None:
    """Fills `data` with zeros, and the MMA operands with normal random bfloat16 numbers unless `zeros`."""
    driver.memset_zero(data, cases.DATA_BYTES, stream)
    if not zeros:
        numbers = np.random.default_rng(1).standard_normal(RANDOM_BYTES // cases.ITEM_BYTES).astype(np.float32)
        halves = (numbers.view(np.uint32) >> 16).astype(np.uint16)
        driver.copy_to_device(data, halves.ctypes.data, halves.nbytes, stream)
    driver.synchronise(stream)


def words_at(out: int, stream: int) -> list[int]:
    """Returns what block 0 wrote: clocks, nanoseconds, rounds of the reading warpgroup."""
    found = np.zeros(3, np.int64)
    driver.copy_to_host(found.ctypes.data, out, found.nbytes, stream)
    driver.synchronise(stream)
    return [int(word) for word in found]


def row_of(micro: Micro, blocks: int, times: list[float], words: list[int]) -> Row:
    """Returns the row of these launches. words: `words_at` of the last launch; Stale if block 0 wrote none."""
    clocks, nanoseconds = words[CLOCKS], words[NANOSECONDS]
    if clocks <= 0 or nanoseconds <= 0:
        raise Stale(f"{micro.symbol}: counted {clocks} clocks in {nanoseconds} ns; build the folder again")
    median = statistics.median(times)
    unit, divisor = UNITS[micro.unit]
    read = words[READ_ROUNDS] * cases.READ_ROUND_BYTES / clocks if micro.beside else None
    return Row(
        micro.name,
        blocks,
        round(median, 4),
        round((max(times) - min(times)) / median, 4),
        round(micro.work * micro.rounds * blocks / median / divisor, 2),
        unit,
        round(micro.work * micro.rounds / clocks, 2),
        round(clocks / nanoseconds * 1000),
        None if read is None else round(read, 2),
    )


def table(rows: list[Row], gpu: str) -> str:
    """Returns the rows as an aligned table."""
    lines = [
        f"{gpu}",
        f"{'case':<36} {'blocks':>6} {'ms':>9} {'spread':>7} {'rate':>18} {'per clock':>10} {'MHz':>5}  beside",
    ]
    for row in rows:
        beside = f"{row.beside_per_clock:.1f} B of shared memory a clock" if row.beside_per_clock is not None else ""
        rate = f"{row.rate:.1f} {row.rate_unit}"
        line = f"{row.name:<36} {row.blocks:6} {row.median_ms:9.4f} {row.spread:6.1%} {rate:>18}"
        lines.append(f"{line} {row.per_clock:10.2f} {row.mhz:5}  {beside}".rstrip())
    return "\n".join([*lines, NOTE])


def main() -> int:
    """Builds the kernels, or measures them and prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.lab.microbench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--build", type=Path, metavar="FOLDER", help="compile the kernels into FOLDER")
    what.add_argument("--kernels", type=Path, metavar="FOLDER", help="run the kernels that --build wrote to FOLDER")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains TEXT, for --kernels")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append a JSON line for each case, for --kernels")
    given = parser.parse_args()
    if given.build and (given.only or given.record):
        parser.error("--only and --record are for --kernels: --build makes every kernel")
    try:
        if given.build:
            print(f"{build(given.build)} kernels in {given.build}")
            return 0
        rows = list(measure(given.kernels, given.only, SAMPLES))
        about = record.about_run()
    except AttentionError as error:
        print(error, file=sys.stderr)
        return 1
    print(table(rows, about["gpu"]))
    if given.record:
        listing = json.loads((given.kernels / MANIFEST).read_text())
        command = shlex.join(["python", "-m", "tools.lab.microbench", *sys.argv[1:]])
        shared = {**about, "commit": listing["commit"], "sources": listing["sources"], "command": command}
        record.append(given.record, ({**asdict(row), **shared} for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
