"""Kernel faults: single faults of kernel code that a check on the GPU must catch, each with a case that shows it.

python -m tools.lab.mutation.kernel_faults --build FOLDER                  compiles the faulty kernels; needs no GPU
python -m tools.lab.mutation.kernel_faults --kernels FOLDER --record FILE  launches them; needs no compiler

--build applies one fault at a time to a copy of the tree, where its old text must occur exactly once. FOLDER gets one
folder for each fault, and one with the kernels of the unchanged tree, because a faulty kernel has the same symbol. Each
case is checked twice as tools/release/fuzz.py checks it: the kernel of the tree must pass, and the faulty one must not.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from cutlass_py_attn.artifact import Artifact, Folder
from cutlass_py_attn.bench.harness import commit
from cutlass_py_attn.errors import DriverError, Stale
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan.planner import builds
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.testing import guarded_check
from cutlass_py_attn.testing.cases import ARCH, SM90_ARCH, Case
from tools.lab.mutation.tree import copy_tree

Json = dict[str, Any]

KERNELS: Final = "cutlass_py_attn/kernels"
TERMS: Final = "cutlass_py_attn/score_terms"
UNCHANGED: Final = "unchanged"
# Kernels and the case that they run. A case has several features, so that few kernels of the unchanged tree are needed.
FORWARD_SM80: Final = "sm80", "forward f16_d32_q200_s200_b2_h4k2_causal_softcap4_alibi_dropout0.3"
FORWARD_SM80_BIAS: Final = "sm80", "forward f16_d32_q200_s200_b2_h2_full_biasbhqk"
FORWARD_SM80_SEQUENCES: Final = "sm80", "forward f16_d32_n70x200u190,130x190u150_h2_window_left40_right20"
BACKWARD_SM80: Final = "sm80", "backward f16_d32_q200_s200_b2_h2_causal_softcap4_sinks_dropout0.3"
FORWARD_SM90: Final = "sm90", "forward f16_d64_q200_s200_b2_h4k2_causal_sinks"
FORWARD_WIDE: Final = "sm90", "forward bf16_d320_q200_s300_b2_h2_causal"
# Rows of two keys with large scores: the maxima grow by more than a lazy softmax leaves alone.
FORWARD_WIDE_NEEDLE: Final = "sm90", f"{FORWARD_WIDE[1]} inputs=gaussian_x3"
BACKWARD_WIDE: Final = "sm90", "backward bf16_d320_q200_s300_b1_h2_causal"
BACKWARD_WIDE_GROUPED: Final = "sm90", "backward bf16_d320_q200_s300_b1_h4k2_full"
BACKWARD_SM90: Final = "sm90", "backward f16_d64_q150_s200_b2_h2_window_left40_right20_softcap4_alibi"
# Every score is at the softcap: an error of it changes all weights by the same factor, which bfloat16 does not hide.
BACKWARD_SM90_SOFTCAP: Final = "sm90", "backward bf16_d64_q150_s200_b2_h2_causal_softcap30 inputs=saturated"
# The rows' parts of the gradient of a sink do not cancel.
BACKWARD_SM90_SINKS: Final = "sm90", "backward bf16_d64_q200_s200_b2_h4k2_causal_sinks inputs=one_sign"
BACKWARD_SM90_DROPOUT: Final = "sm90", "backward f16_d64_q200_s200_b2_h2_causal_dropout0.3"
DECODE: Final = "decode", "forward f16_d64_q2_s600_b2_h8k2_causal_br"


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one file, and the case that shows it.

    before, after: text of the file, and what replaces it; `before` occurs exactly once
    shown_by: the kernels that are compiled, sm80, sm90 or decode, and the line of their case
    """

    name: str
    file: str
    before: str
    after: str
    shown_by: tuple[str, str]

    @property
    def folder(self) -> str:
        """The folder of its kernel."""
        words = self.name.replace("+", "plus").replace("-", "minus").replace("'", "")
        return re.sub(r"\W+", "_", words)

    @property
    def case(self) -> Case:
        """The case that shows it."""
        return Case.parse(self.shown_by[1])

    @property
    def build(self) -> Build:
        """The kernel of the case."""
        family, _ = self.shown_by
        arch = SM90_ARCH if family == "sm90" else ARCH
        return next(each for each in builds(self.case.problem(), arch) if each.family == family)

    def apply(self, root: Path) -> None:
        """Changes the file in the tree at `root`; ValueError unless the old text is there exactly once."""
        path = root / self.file
        text = path.read_text()
        if text.count(self.before) != 1:
            found = text.count(self.before)
            raise ValueError(
                f"{self.name}: {self.file} has {self.before!r} {found} times: must be once; correct the fault"
            )
        path.write_text(text.replace(self.before, self.after))


FAULTS: Final = (
    Fault(
        "sign of ALiBi",
        f"{TERMS}/alibi.py",
        "row[column] = row[column] - operand * distance",
        "row[column] = row[column] + operand * distance",
        FORWARD_SM80,
    ),
    Fault(
        "ALiBi's distance from the other diagonal",
        f"{KERNELS}/common/score_mod.py",
        "self._diagonal = self.query + self.num_keys - self.num_queries - self._key0",
        "self._diagonal = self.query - self._key0",
        BACKWARD_SM90,
    ),
    Fault(
        "sign of the sinks' gradient",
        f"{KERNELS}/backward_parts/grad_sinks.py",
        "[0] = total if has_minus_delta else -total",
        "[0] = -total if has_minus_delta else total",
        BACKWARD_SM80,
    ),
    Fault(
        "sink counted twice",
        f"{TERMS}/sinks.py",
        "return exponential(sink - maximum)",
        "return 2 * exponential(sink - maximum)",
        FORWARD_SM90,
    ),
    Fault(
        "seqused_k + 1",
        f"{KERNELS}/common/seqlen_info.py",
        "params.load_scalar(p.seqused_k, Int32, index)",
        "(params.load_scalar(p.seqused_k, Int32, index) + 1)",
        FORWARD_SM80_SEQUENCES,
    ),
    Fault(
        "halved keep_scale",
        f"{KERNELS}/sm80/forward.py",
        "r_o.store(r_o.load() * p.keep_scale)",
        "r_o.store(r_o.load() * p.keep_scale * 0.5)",
        FORWARD_SM80,
    ),
    Fault(
        "dropped keep_scale",
        f"{KERNELS}/sm90_backward/transposed_scores.py",
        "cutlass.select_(is_kept, grad, Float32(0.0)) * p.keep_scale",
        "cutlass.select_(is_kept, grad, Float32(0.0))",
        BACKWARD_SM90_DROPOUT,
    ),
    Fault(
        "philox_offset + 1",
        f"{KERNELS}/common/dropout.py",
        "offset = _value_or_at(Int64(0), p.philox_offset_address) + p.philox_offset",
        "offset = _value_or_at(Int64(0), p.philox_offset_address) + p.philox_offset + 1",
        BACKWARD_SM80,
    ),
    Fault(
        "window's left edge + 1",
        f"{KERNELS}/common/masking.py",
        "start = band.key_start(query) - key0",
        "start = band.key_start(query) - key0 + 1",
        FORWARD_SM80_SEQUENCES,
    ),
    Fault(
        "window's left edge - 1",
        f"{KERNELS}/common/masking.py",
        "start = band.key_start(query) - key0",
        "start = band.key_start(query) - key0 - 1",
        BACKWARD_SM90,
    ),
    Fault(
        "causal diagonal + 1",
        f"{KERNELS}/common/masking.py",
        "end = band.key_end(query) - key0",
        "end = band.key_end(query) - key0 + 1",
        FORWARD_SM90,
    ),
    Fault(
        "causal diagonal - 1",
        f"{KERNELS}/common/masking.py",
        "end = band.key_end(query) - key0",
        "end = band.key_end(query) - key0 - 1",
        BACKWARD_SM80,
    ),
    Fault(
        "last key tile without a mask",
        "cutlass_py_attn/launch/tile_order.py",
        "inside = band.num_keys // tile_n",
        "inside = ceil_div(band.num_keys, tile_n)",
        FORWARD_SM80_BIAS,
    ),
    Fault(
        "dropped slope of the softcap, mma.sync",
        f"{KERNELS}/sm80/backward.py",
        "row_view(r_dp).store(row_view(r_dp).load() * r_derivative.load().to(Float32))",
        "row_view(r_dp).store(row_view(r_dp).load())",
        BACKWARD_SM80,
    ),
    Fault(
        "dropped slope of the softcap, wgmma",
        f"{KERNELS}/sm90_backward/transposed_scores.py",
        "product[2 * index + element] = weights[2 * index + element] * derivative",
        "product[2 * index + element] = weights[2 * index + element]",
        BACKWARD_SM90,
    ),
    Fault(
        "softcap times 1.01",
        f"{TERMS}/softcap.py",
        "row.values = tanh * (row.p.softcap * LOG2_E)",
        "row.values = tanh * (row.p.softcap * 1.01 * LOG2_E)",
        FORWARD_SM80,
    ),
    Fault(
        "softcap times 1.01 in a bfloat16 backward",
        f"{TERMS}/softcap.py",
        "row.values = tanh * (row.p.softcap * LOG2_E)",
        "row.values = tanh * (row.p.softcap * 1.01 * LOG2_E)",
        BACKWARD_SM90_SOFTCAP,
    ),
    Fault(
        "sink + 0.02",
        f"{KERNELS}/common/softmax.py",
        "sink = logit * math.log2(math.e)",
        "sink = (logit + 0.02) * math.log2(math.e)",
        FORWARD_SM90,
    ),
    Fault(
        "sink + 0.02 in its bfloat16 gradient",
        f"{KERNELS}/backward_parts/grad_sinks.py",
        "sink = params.load_scalar(p.sinks, Float32, head) * LOG2_E",
        "sink = (params.load_scalar(p.sinks, Float32, head) + 0.02) * LOG2_E",
        BACKWARD_SM90_SINKS,
    ),
    Fault(
        "delta of another row, mma.sync",
        f"{KERNELS}/sm80/backward_scores.py",
        "delta_row = coordinates[row, 0][0]",
        "delta_row = coordinates[0, 0][0]",
        BACKWARD_SM80,
    ),
    Fault(
        "delta of another row, wgmma",
        f"{KERNELS}/sm90_backward/transposed_scores.py",
        "grad = grad - r_delta[element, pair]",
        "grad = grad - r_delta[0, pair]",
        BACKWARD_SM90,
    ),
    Fault(
        "dQ without the scale",
        f"{KERNELS}/backward_parts/postprocess.py",
        "values.store(values.load() * p.scale)",
        "values.store(values.load())",
        BACKWARD_SM90,
    ),
    Fault(
        "key heads interleaved in place of grouped",
        f"{KERNELS}/common/seqlen_info.py",
        "return head // p.group if",
        "return head % (p.num_heads // p.group) if",
        FORWARD_SM90,
    ),
    Fault(
        "bias of the wrong head",
        f"{KERNELS}/common/score_mod.py",
        '((batch, "batch"), (head, "head"), (query, "row"))',
        '((batch, "batch"), (batch, "head"), (query, "row"))',
        FORWARD_SM80_BIAS,
    ),
    Fault(
        "a sequence's keys from the next row on",
        f"{KERNELS}/sm80/forward.py",
        "seqlen_info.key_head(build, p, head), seqlen.key_start + key0)",
        "seqlen_info.key_head(build, p, head), seqlen.key_start + key0 + 1)",
        FORWARD_SM80_SEQUENCES,
    ),
    Fault(
        "P of the other key tile in wide heads",
        f"{KERNELS}/sm90_wide/forward.py",
        "matmul_pv.issue(mma, own.outputs[index], Operands(own.p.stage(owner), own.values[index].stage(stage)))",
        "matmul_pv.issue(mma, own.outputs[index], Operands(own.p.stage(1 - owner), own.values[index].stage(stage)))",
        FORWARD_WIDE,
    ),
    Fault(
        "wide heads joined with the sums of one warpgroup",
        f"{KERNELS}/sm90_wide/alternating_softmax.py",
        "total = self.totals[row, 0] + self.totals[row, 1]",
        "total = self.totals[row, 0]",
        FORWARD_WIDE,
    ),
    Fault(
        "wide heads without a rescaling of the output",
        f"{KERNELS}/sm90_wide/alternating_softmax.py",
        "output[index, None].store(output[index, None].load() * factors[index])",
        "pass",
        FORWARD_WIDE_NEEDLE,
    ),
    Fault(
        "P or dS of the other tile in the backward of wide heads",
        f"{KERNELS}/sm90_wide/gradient.py",
        "Operands(own.p_ds.stage(owner), own.chunks[index].stage(stage))",
        "Operands(own.p_ds.stage(1 - owner), own.chunks[index].stage(stage))",
        BACKWARD_WIDE,
    ),
    Fault(
        "logsumexp of the next queries in the backward of wide heads",
        f"{KERNELS}/sm90_wide/scores.py",
        "first = shared + (start + thread % 4 * PAIR)",
        "first = shared + (start + (thread + 1) % 4 * PAIR)",
        BACKWARD_WIDE,
    ),
    Fault(
        "dK and dV of one query head of a group of wide heads",
        f"{KERNELS}/sm90_wide/gradient.py",
        "work.head * p.group + j // count, work.first + j % count",
        "work.head * p.group, work.first + j % count",
        BACKWARD_WIDE_GROUPED,
    ),
    Fault(
        "splits joined without their weights",
        f"{KERNELS}/common/combine.py",
        "found.store(found.load() + part.load() * weight)",
        "found.store(found.load() + part.load())",
        DECODE,
    ),
    Fault(
        "logsumexp of splits without the logarithm",
        f"{KERNELS}/common/combine.py",
        "found = (self.maximum + cute.math.log2(self.total, fastmath=True)) * math.log(2.0)",
        "found = (self.maximum + self.total) * math.log(2.0)",
        DECODE,
    ),
    Fault(
        "no mask in decode",
        f"{KERNELS}/decode/forward.py",
        "self.mask_scores(p, work, warp, band, r_s, key_tile)",
        "pass",
        DECODE,
    ),
)


def build_all(folder: Path, chosen: Sequence[Fault], processes: int) -> None:
    """Compiles the kernels of the faults, and those of the unchanged tree, into folders of `folder`."""
    unchanged = {fault.shown_by: fault for fault in chosen}.values()
    jobs = [*((fault, fault.folder) for fault in chosen), *((fault, UNCHANGED) for fault in unchanged)]
    with tempfile.TemporaryDirectory() as temporary:

        def compile_one(number: int) -> None:
            fault, name = jobs[number]
            copy = Path(temporary) / str(number)
            copy_tree(copy, "cutlass_py_attn", "tools")
            if name != UNCHANGED:
                fault.apply(copy)
            options = ["--compile", fault.folder, "--build", str(folder / name)]
            command = ["-m", "tools.lab.mutation.kernel_faults", *options]
            environment = os.environ | {"PYTHONPATH": str(copy)}
            subprocess.run([sys.executable, *command], cwd=copy, env=environment, check=True)
            print(f"{number + 1:3}/{len(jobs)} {name}: {' '.join(fault.shown_by)}", flush=True)

        with concurrent.futures.ThreadPoolExecutor(processes) as pool:
            list(pool.map(compile_one, range(len(jobs))))


def compile_into(folder: Path, name: str) -> None:
    """Compiles the kernel that shows a fault, from the tree of this module, without the disk cache."""
    from cutlass_py_attn.compilation.compiler import compile as compile_now

    fault = next(each for each in FAULTS if each.folder == name)
    Folder(folder).put(dataclasses.replace(compile_now(fault.build), ptx=""))


def run_all(folder: Path, chosen: Sequence[Fault]) -> list[Json]:
    """Launches every fault's kernel and the unchanged one; returns a row for each fault."""
    return [_run(folder, fault) for fault in chosen]


def _run(folder: Path, fault: Fault) -> Json:
    expected = guarded_check.expect(fault.case)
    unchanged = ratios_of(fault, expected, Folder(folder / UNCHANGED))
    faulty = ratios_of(fault, expected, Folder(folder / fault.folder))
    row = {name: getattr(fault, name) for name in ("name", "file", "before", "after")}
    row |= {"shown_by": list(fault.shown_by), "unchanged": unchanged, "faulty": faulty}
    row["is_caught"] = passes(unchanged) and not passes(faulty)
    print(
        f"{'caught' if row['is_caught'] else 'NOT CAUGHT':10} {fault.name}: {faulty}; unchanged {unchanged}", flush=True
    )
    return row


def ratios_of(fault: Fault, expected: guarded_check.Expected, kernels: Folder) -> Json:
    """Returns error / allowed by result, infinity as a text, or a fault of the launch as {"launch": ...}.

    A fault is a write outside of the results, or an error of the driver. Stale: the folder does not have the kernel.
    """

    artifact = kernels(fault.build)

    def only(build: Build) -> Artifact:
        if build != artifact.build:
            raise Stale(f"{build.symbol}: not the kernel under test")
        return artifact

    try:
        found = guarded_check.launch(fault.case, expected, only).outputs
    except (DriverError, AssertionError) as error:
        return {"launch": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    ratios = guarded_check.ratios(fault.case, expected, found)
    return {name: "infinity" if ratio == float("inf") else round(ratio, 3) for name, ratio in ratios.items()}


def passes(ratios: Json) -> bool:
    """Whether no result is too far from the reference."""
    return all(not isinstance(ratio, str) and ratio <= 1 for ratio in ratios.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds or runs; exit code 1 if a fault is not caught."""
    parser = argparse.ArgumentParser(
        prog="kernel_faults", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="compile the kernels into this folder")
    parser.add_argument("--processes", type=int, default=2, help="compilers at the same time")
    parser.add_argument("--only", default="", metavar="TEXT", help="only faults whose name contains TEXT")
    parser.add_argument("--compile", metavar="FAULT", help=argparse.SUPPRESS)
    parser.add_argument("--kernels", type=Path, metavar="FOLDER", help="launch the kernels of this folder")
    parser.add_argument("--record", type=Path, help="write the results to this file")
    given = parser.parse_args(arguments)
    if given.compile:
        compile_into(given.build, given.compile)
        return 0
    chosen = [each for each in FAULTS if given.only in each.name]
    if not chosen:
        parser.error(f"--only {given.only}: must be part of the name of a fault")
    if given.build:
        build_all(given.build.resolve(), chosen, given.processes)
        return 0
    if not given.kernels:
        parser.error("--build or --kernels is needed")
    if given.record and given.only:
        parser.error(f"--only {given.only}: must be absent with --record, which has every fault")
    with driver.device(0).current():
        rows = run_all(given.kernels, chosen)
    caught = sum(row["is_caught"] for row in rows)
    print(f"{caught} of {len(rows)} faults caught")
    if given.record:
        found = {
            "commit": commit(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "gpu": driver.device(0).name,
            "faults": rows,
        }
        given.record.parent.mkdir(parents=True, exist_ok=True)
        given.record.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if caught == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
