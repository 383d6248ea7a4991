"""Bench peers: measures the benchmark as `cutlass-py-attn bench` does, beside the peers that are installed.

python -m tools.bench.bench_peers --output FILE [--kernels FOLDER] [--only PATTERN] [--sustained]

Peers are torch's attention kernels, FlashAttention-4 (the package flash-attn-4) and cuDNN through its Python package.
They read the same memory. A peer that refuses a case has no numbers there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cutlass_py_attn.bench import cases, harness
from cutlass_py_attn.bench.timing import SAMPLES
from cutlass_py_attn.errors import AttentionError
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.runtime import driver
from tools.bench import peers


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a row for each case, direction and peer; returns 1 if a case failed."""
    parser = argparse.ArgumentParser(
        prog="bench_peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", default=[], help="may be given several times")
    parser.add_argument("--only", default="", metavar="PATTERN", help="cases whose name matches this expression")
    parser.add_argument("--kernels", type=Path, help="folder of prebuilt kernels; without it they are compiled")
    parser.add_argument("--output", type=Path, help="write the rows there as JSON")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--sustained", action="store_true", help=harness.SUSTAINED)
    chosen = parser.parse_args(arguments)
    try:
        specs = [parse(name) for name in cases.select(chosen.case, chosen.only)]
        gpu = driver.device(0)
        peers.compile_ahead([(spec, cases.directions(spec)) for spec in specs], gpu.compute_capability, gpu.num_sms)
        rows, failures = harness.run(
            [spec.name for spec in specs],
            "",
            chosen.kernels,
            chosen.output,
            chosen.samples,
            sustained=chosen.sustained,
            peers=peers.measure,
        )
    except AttentionError as error:
        print(error, file=sys.stderr)
        return 1
    print(harness.table(rows))
    sys.stderr.write("".join(f"{failure}\n" for failure in failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
