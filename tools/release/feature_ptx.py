"""Feature PTX: hashes of the PTX of kernels that together have every feature, variant and direction.

The committed kernels of ptx/manifest.json have few features. These kernels have the others; of them only hashes are
committed. A kernel whose hash changed is no longer what the random cases of tools/release/fuzz.py ran.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from cutlass_py_attn.compilation import compiler
from cutlass_py_attn.compilation.cache import Cache
from cutlass_py_attn.errors import BreaksPlan, CompileError
from cutlass_py_attn.kernels.catalogue import KERNELS, kernel_of
from cutlass_py_attn.kernels.kernel import FusedKernel, Kernel
from cutlass_py_attn.kernels.sm80 import kernel as sm80
from cutlass_py_attn.kernels.sm90_backward import kernel as sm90_backward
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.variants import SPLIT_D, STANDARD
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.plan.planner import plan
from cutlass_py_attn.problem.masks import FORMS
from cutlass_py_attn.problem.tensors import OPERANDS, ROW_ALIGNMENT_BYTES
from cutlass_py_attn.score_terms import registry
from cutlass_py_attn.testing.cases import ARCH, SM90_ARCH, Case
from tools.release import features, record

PATH: Final = "ptx/feature_ptx.json"
WRITE: Final = "python -m tools.release.build_ptx --features"

_SIZES: Final = "q200_s200_b2"
_PAGED: Final = "n150x200u190,130x190u150"  # too many queries for the decode kernel
_USED: Final = "n70x200u190,130x190u150"
_TERMS: Final = "softcap4_bias_alibi_sinks_dropout0.3"
_TERMS_NO_DROPOUT: Final = "softcap4_bias_alibi_sinks"
_TERMS_OF_PAGES: Final = "softcap4_alibi_sinks"
_TERMS_NO_BIAS: Final = "softcap4_alibi_sinks_dropout0.3"

# A case has as many features as one kernel can have. Other cases have what these exclude, or other code of a body.
_SM80_FORWARD: Final = (
    f"bf16_d32_{_USED}_h4k2_causal_br_window50_{_TERMS}",
    f"f32_d32_{_SIZES}_h2_causal_{_TERMS}",
    f"bf16_d33v17_{_SIZES}_h2_full_bias",
    f"f16_d32_{_SIZES}_h2_causal layout=shifted",
    f"f16_d32_{_PAGED}_h4k2_causal_br_{_TERMS_OF_PAGES}_paged8",
    f"bf16_d32_{_SIZES}_h4k2_full_kv8_descalehead",
    f"f16_d32_{_PAGED}_h4k2_full_paged16_kv8_descalerow",
)
_SM80_BACKWARD: Final = (
    f"f16_d32_{_SIZES}_h2_full_biasbhqkgrad_gradsb",
    f"f16_d32_{_USED}_h4k2_causal_br_window50_softcap4_biassum_alibi_sinks_dropout0.3",
    f"f16_d32_{_SIZES}_h2_full_bias11q1sum",
    f"bf16_d32_{_USED}_h4k2_causal_br_{_TERMS}_deterministic",
    f"f32_d32_{_SIZES}_h2_causal_{_TERMS_NO_BIAS}_biasgrad",
    f"bf16_d33v17_{_SIZES}_h2_full_biasgrad",
    f"f16_d32_{_SIZES}_h2_causal_gradsq",
    f"f16_d32_{_SIZES}_h2_causal layout=shifted",
)
_SPLIT_D: Final = f"f16_d288_{_USED}_h4k2_causal_br_window50_{_TERMS}"
_SPLIT_D_PAGED: Final = f"f16_d288_{_PAGED}_h4k2_causal_br_{_TERMS_OF_PAGES}_paged16"
_SPLIT_D_DETERMINISTIC: Final = f"f16_d288_{_SIZES}_h2_full_biasgrad_deterministic"
_SM90_FORWARD: Final = (
    f"f16_d64_{_SIZES}_h4k2_full",
    f"f16_d64_{_SIZES}_h2_window_left40_right20_softcap4",
    f"bf16_d64_{_USED}_h4k2_full_{_TERMS}",
    "bf16_d128_s4096_b1_h6k3_causal",  # long enough for multicast
    "bf16_d64_n40x1500u1200,30x700_h4k2_causal_br",  # few queries and many keys
    "bf16_d128_q300_s1504_b1_h4_causal_br_bias_softcap4_alibi_sinks",
    "f16_d64_q300_s2300_b1_h2_causal_br_paged16",
    f"bf16_d512_{_SIZES}_h2_causal",
    f"f16_d320_{_SIZES}_h2_window_left40_right20",
    f"bf16_d264v448_{_USED}_h4k2_full_{_TERMS_NO_DROPOUT}",
    f"f16_d64_{_SIZES}_h2_causal_br_paged16",
    f"bf16_d64_{_PAGED}_h4k2_full_{_TERMS_OF_PAGES}_paged64",
    f"f16_d576v512_{_PAGED}_h4k1_causal_br_paged16_mla",
    f"bf16_d576v512_{_PAGED}_h4k1_full_paged16_mla_kv8_descaletile",
    f"e4m3_d64_{_SIZES}_h2_causal",
    f"e4m3_d64_{_USED}_h4k2_full_descalebatch_f16out",
    f"f16_d64_{_SIZES}_h2_causal_br_paged16_kv8_descalehead",
    f"f16_d64_{_PAGED}_h2_window_left40_right20_paged16_kv8_descalerow",
    f"bf16_d64_{_USED}_h4k2_full_{_TERMS}_kv8_descalerow",
)
_SM90_BACKWARD: Final = (
    f"f16_d96v64_{_USED}_h2_causal_br_{_TERMS_OF_PAGES}",
    f"f16_d96v64_{_SIZES}_h2_window_left40_right20",
    f"f16_d64_{_SIZES}_h2_causal_dropout0.3",
    f"f16_d64_{_SIZES}_h4k2_full_deterministic",
    f"f16_d64_{_SIZES}_h2_full_sinks",  # two key tiles in flight, keys in registers
    f"bf16_d128_{_SIZES}_h2_causal_sinks_deterministic",  # dS in registers
    f"bf16_d128_{_USED}_h1340k670_causal",  # the same: so many heads need no sums of query heads
    f"bf16_d64_{_USED}_h1340k670_window_left40_right20",  # the same with keys in registers
    f"bf16_d64_{_USED}_h4k2_causal_{_TERMS}",  # by query heads
    f"f16_d64_q200_s300_b8_h32k16_causal_{_TERMS_NO_BIAS}",  # so many heads run one block per head
    "f16_d128_q200_s304_b8_h32k16_causal_bias",
    f"f16_d128_{_SIZES}_h2_full_bias",
    f"f16_d64_{_SIZES}_h2_causal_biasgrad",
    f"bf16_d128_{_SIZES}_h2_full_biasgrad",
    f"bf16_d96_{_SIZES}_h4k2_causal_biasgrad",  # by query heads
    "f16_d128_q200_s304_b8_h32k16_causal_biasgrad",  # one block per head
    f"bf16_d192v64_{_SIZES}_h2_window_left40_right20_biasgrad",  # scores of a part of a query tile
    f"bf16_d64_{_SIZES}_h2_window_left40_right20_{_TERMS}_deterministic",
    f"bf16_d192v64_{_USED}_h4k2_causal_bias_deterministic",
    "bf16_d192_q515_s64_b1_h4k2_causal",
    "bf16_d64_q200_s304_b8_h4k2_causal_biassum",  # a kernel of wgmma for the gradient of the bias
    "f16_d128_q200_s304_b2_h2_full_bias11qksum",
    f"bf16_d128_{_SIZES}_h2_full_biassum",  # one of mma.sync
    f"bf16_d192v64_{_USED}_h4k2_causal_softcap4_alibi_sinks_deterministic",  # scores of a part of a query tile
    f"bf16_d192v128_{_SIZES}_h4k2_causal",  # the same, by query heads
    "f16_d8v264_q70_s200_b1_h2k1_causal",
    f"f16_d264v8_{_USED}_h4k2_window_left40_right20_{_TERMS_OF_PAGES}",
)
_DECODE: Final = (
    "f16_d64_q1_s600_b2_h4_full",
    "f16_d64_q2_s600_b2_h8k2_causal_br",
    "bf16_d64_n1x400u300,1x300u256_h4k2_window_left90_right0",
    f"bf16_d64_n2x400u300,1x300u256_h4k2_causal_br_{_TERMS_OF_PAGES}_paged1",
    "bf16_d64_q1_s600_b2_h4_full_paged16_kv8_descalehead",
    "f16_d64_n1x400u300,2x300u256_h4k2_full_kv8_descalerow",
)
_CASES: Final = (
    *((ARCH, f"forward {name}") for name in (*_SM80_FORWARD, _SPLIT_D, _SPLIT_D_PAGED, *_DECODE)),
    *((ARCH, f"backward {name}") for name in (*_SM80_BACKWARD, _SPLIT_D, _SPLIT_D_DETERMINISTIC)),
    *((SM90_ARCH, f"forward {name}") for name in _SM90_FORWARD),
    *((SM90_ARCH, f"backward {name}") for name in _SM90_BACKWARD),
)


@functools.cache
def plans() -> Mapping[str, Plan]:
    """Returns the plans of the cases, each by its target and the case's line."""
    return {f"{arch} {line}": plan(Case.parse(line).problem(), arch) for arch, line in _CASES}


def builds() -> dict[str, Build]:
    """Returns the kernels, each by its target and the line of its case."""
    return {key: each.build for key, each in plans().items()}


def missing(found: Iterable[Build]) -> list[str]:
    """Returns a line for each part of a kernel body that none of the builds has."""
    has: dict[str, set[str]] = {}
    for build in found:
        has.setdefault(_kernel_name(kernel_of(build), build.score_rows > 0), set()).update(_parts(build))
        if build.grad_bias_mode not in ("", "main"):
            has.setdefault("separate grad_bias", set()).update(build.features)
    fused = (kernel for kernel in KERNELS.values() if isinstance(kernel, FusedKernel))
    needed = {_kernel_name(kernel): _parts_of_kernel(kernel) for kernel in fused}
    needed[_kernel_name(sm90_backward.SCORE_ROWS_BACKWARD, True)] = set(sm90_backward.SCORE_ROWS_BACKWARD.features)
    needed["separate grad_bias"] = set(sm80.BACKWARD.features)
    return [
        f"{name}: no case has {part}" for name, parts in needed.items() for part in sorted(parts - has.get(name, set()))
    ]


def _kernel_name(kernel: Kernel, has_score_rows: bool = False) -> str:
    return " ".join(filter(None, (kernel.family, kernel.kind, kernel.variant, "score_rows" if has_score_rows else "")))


def _parts(build: Build) -> set[str]:
    """Returns what selects code of the kernel's body: features, mask, gradients, and so on."""
    found = {*build.features, f"{build.mask} mask", *(f"gradient of {name}" for name in build.gradients)}
    mode = build.grad_bias_mode if build.grad_bias_mode in ("", "main", "none") else "sum"
    found |= {f"grad_bias_mode {mode}"} if mode else set()
    found |= {"deterministic"} if build.deterministic else set()
    found |= {"rows aligned to less than 16 bytes"} if build.vector_bytes < ROW_ALIGNMENT_BYTES else set()
    return found | ({"float32"} if build.dtype == "float32" else set())


def _parts_of_kernel(kernel: Kernel) -> set[str]:
    """Returns what a kernel's cases must have together."""
    found = set(kernel.features)
    if kernel.variant == STANDARD:
        found |= {f"{form} mask" for form in FORMS}
    if kernel.kind == "backward":
        gradients = (*OPERANDS, *registry.gradients())
        found |= {f"gradient of {name}" for name in gradients if name in OPERANDS or name in kernel.features}
        found |= {"deterministic"} if kernel.variant in (STANDARD, SPLIT_D) else set()
    if (kernel.family, kernel.variant) == ("sm80", STANDARD):
        found |= {"float32", "rows aligned to less than 16 bytes"}
        if kernel.kind == "backward":
            found |= {f"grad_bias_mode {mode}" for mode in ("main", "none", "sum")}
    return found


def compiled(needed: Mapping[str, Build], processes: int) -> dict[str, record.Json]:
    """Compiles the kernels in that many processes; returns name and PTX hash of each, by the same keys."""
    found = {}
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        made = zip(needed, pool.map(compiled_entry, needed.values()), strict=True)
        for number, (key, value) in enumerate(made, 1):
            print(f"{number:3}/{len(needed)} {value['kernel']}", file=sys.stderr, flush=True)
            found[key] = value
    return found


def entry(build: Build, ptx: str) -> record.Json:
    """Returns the committed entry of one kernel."""
    return {"kernel": record.name_of(build), "ptx_body_sha256": record.sha256(record.body(ptx))}


def compiled_entry(build: Build) -> record.Json:
    """Returns the entry of today's kernel, with `error` in place of a hash if it does not compile.

    The PTX is that of the first register allocation: whether ptxas spills does not matter for a hash.
    """
    try:
        output = compiler.compile_unchecked(build)
    except CompileError as error:
        return {"kernel": record.name_of(build), "error": str(error).splitlines()[0]}
    keep(build, output)
    return entry(build, output.ptx)


def keep(build: Build, output: compiler.CompilerOutput) -> None:
    """Caches a kernel, as tests need some of them. Not one with findings: `compile` tries other allocations then."""
    with suppress(BreaksPlan):
        Cache().put(compiler.checked_artifact(build, build, output))


def read(root: Path) -> record.Json | None:
    """Returns the committed hashes; None if there are none."""
    path = root / PATH
    return json.loads(path.read_text()) if path.is_file() else None


def write(root: Path, entries: Mapping[str, record.Json]) -> list[str]:
    """Writes the hashes with the compiler and the hash of the random cases' record; or returns why it writes nothing.

    Changed hashes need a record that is newer than the committed hashes: the random cases must run the new kernels.
    """
    if objections := features.objections(root):
        return objections
    if failed := [f"{key}: {value['error']}; correct the kernel" for key, value in entries.items() if "error" in value]:
        return failed
    committed, fuzzed = read(root), features.sha256(root)
    if committed and committed["fuzz_sha256"] == fuzzed:
        changed = [key for key, value in entries.items() if committed["kernels"].get(key, value) != value]
        if changed:
            changes = "".join(f"\n  {key}" for key in changed)
            return [
                f"{PATH}: no random case ran these kernels as they are today; {features.REMEDY}, then again:{changes}"
            ]
    content = {"fuzz_sha256": fuzzed, "toolchain": compiler.toolchain(), "kernels": dict(entries)}
    (root / PATH).write_text(json.dumps(content, indent=1) + "\n")
    return []


def is_current(root: Path) -> bool:
    """Whether the hashes were written of today's sources and compiler, so that compiling again gives the same PTX.

    `write` takes hashes only while the sources are those of the random cases' record.
    """
    committed = read(root)
    is_of_compiler = committed is not None and committed.get("toolchain") == compiler.toolchain()
    return is_of_compiler and not (features.objections(root) or objections(root, None))


def objections(root: Path, entries: Mapping[str, record.Json] | None) -> list[str]:
    """Returns a line for each difference between the committed hashes and today.

    entries: kernels that were compiled today; None if none were, which leaves the record and the list to compare.
    """
    committed = read(root)
    if committed is None:
        return [f"{PATH}: MISSING; run {WRITE}"]
    found = []
    if committed["fuzz_sha256"] != features.sha256(root):
        found.append(f"{PATH}: STALE: written for another {features.PATH}; run {WRITE}")
    kernels, planned = committed["kernels"], builds()
    found += [f"{PATH}: UNLISTED: {key}; run {WRITE}" for key in planned if key not in kernels]
    found += [f"{PATH}: DRIFTED: {key}: is no case any more; run {WRITE}" for key in kernels if key not in planned]
    shared = {key: build for key, build in planned.items() if key in kernels}
    return [*found, *_drifts(kernels, shared, entries or {})]


def _drifts(
    kernels: Mapping[str, record.Json], planned: Mapping[str, Build], entries: Mapping[str, record.Json]
) -> Iterator[str]:
    for key, build in planned.items():
        before, now = kernels[key], entries.get(key)
        what = ""
        if before["kernel"] != record.name_of(build):
            what = f"{before['kernel']}: the plan now selects {record.name_of(build)}"
        elif now is not None and "error" in now:
            yield f"{PATH}: DRIFTED: {key}: does not compile: {now['error']}; correct the kernel"
        elif now is not None and now["ptx_body_sha256"] != before["ptx_body_sha256"]:
            what = f"{before['kernel']}: its PTX changed"
        if what:
            yield f"{PATH}: DRIFTED: {key}: {what}; {features.REMEDY}, then {WRITE}"
