"""Record: the sealed manifest of the committed kernels, the log of GPU verifications, and each kernel's state."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.compilation import registry
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.runtime import driver
from tools.release import digests

MANIFEST = "ptx/manifest.json"
LOG = "ptx/verified.jsonl"
STRESS_LOG = "ptx/stressed.jsonl"
SEAL = "sha256_of_the_rest"
# Every file that decides whether verify_gpu passes a kernel: the reference, the cases with their inputs, the accuracy
# rules, the checks and the verifier. An edit of the code of any of them makes the verifications STALE.
SUITE = (
    "cutlass_py_attn/problem/masks.py",
    "cutlass_py_attn/problem/spec.py",
    "cutlass_py_attn/reference/numpy_reference.py",
    "cutlass_py_attn/reference/paged.py",
    "cutlass_py_attn/reference/quantization.py",
    "cutlass_py_attn/reference/score_mod.py",
    "cutlass_py_attn/reference/serving.py",
    *(f"cutlass_py_attn/score_terms/{name}.py" for name in ("alibi", "bias", "dropout", "philox", "registry", "sinks")),
    *(f"cutlass_py_attn/score_terms/{name}.py" for name in ("softcap", "term")),
    "cutlass_py_attn/testing/accuracy.py",
    "cutlass_py_attn/testing/cases.py",
    "cutlass_py_attn/testing/check.py",
    "cutlass_py_attn/testing/component_gemms.py",
    "tests/cases/covering_cases.py",
    "tests/cases/decode_cases.py",
    "cutlass_py_attn/testing/device_memory.py",
    "cutlass_py_attn/testing/e4m3_inputs.py",
    "cutlass_py_attn/testing/guarded_check.py",
    "cutlass_py_attn/testing/inputs.py",
    "cutlass_py_attn/testing/layouts.py",
    "cutlass_py_attn/testing/paged_inputs.py",
    "tests/cases/serving_cases.py",
    "tools/release/verify_gpu.py",
)

Json = dict[str, Any]


def sha256(data: bytes | str) -> str:
    """Returns the SHA-256 of bytes, or of a text in UTF-8, in hexadecimal."""
    return hashlib.sha256(data if isinstance(data, bytes) else data.encode()).hexdigest()


def name_of(build: Build) -> str:
    """Returns a kernel's name in the manifest and in the log: its target and its symbol."""
    return f"{build.arch}/{build.symbol}"


def body(ptx: str) -> str:
    """Returns the PTX without comments and empty lines, as ptxas reads it."""
    lines = (re.sub(r"\s*//.*", "", line) for line in ptx.splitlines())
    return "\n".join(line for line in lines if line.strip())


def plan_entry(build: Build) -> Json:
    """Returns the fields of a build, as the manifest has them."""
    found: Json = json.loads(json.dumps(dataclasses.asdict(build)))
    return found


def sources_sha256(build: Build) -> str:
    """Returns the hash of the code that decides a build's machine code beside its fields, in the package that runs."""
    package = Path(registry.__file__).parents[1]
    return digests.files_sha256(package, registry.sources_of(build))


def is_current(committed: Json, build: Build, toolchain: str) -> bool:
    """Whether an entry of the manifest is of this build, of today's sources and of this compiler.

    Compiling again then gives the same machine code.
    """
    today = {"plan": plan_entry(build), "sources_sha256": sources_sha256(build), "toolchain": toolchain}
    return today.items() <= committed.items()


def entry(plan: Plan, artifact: Artifact) -> Json:
    """Returns the manifest's entry of one kernel."""
    kernels = []
    for launch, kernel in zip(plan.launches, artifact.kernels, strict=True):
        text = next(p for p in artifact.ptx.split(".entry ")[1:] if p.startswith(f"{kernel.symbol}("))
        facts = dataclasses.asdict(kernel)
        facts["parameters"] = [[p.name, p.offset, p.size] for p in kernel.parameters]
        facts["shared_memory_bytes"] = launch.shared_memory_bytes
        kernels.append({**facts, "mma": text.count("mma.sync."), "wgmma": text.count("wgmma.mma_async.")})
    return {
        "plan": plan_entry(plan.build),
        "sources_sha256": sources_sha256(plan.build),
        "ptx_sha256": sha256(artifact.ptx),
        "ptx_body_sha256": sha256(body(artifact.ptx)),
        "cubin_sha256": sha256(artifact.cubin),
        "kernels": kernels,
        "allocation": artifact.allocation,
        "toolchain": artifact.toolchain,
    }


def sealed(entries: Mapping[str, Json]) -> Json:
    """Returns the manifest of these entries, with its seal."""
    return {"kernels": dict(sorted(entries.items())), SEAL: _seal(entries)}


def is_sealed(manifest: Json) -> bool:
    """Whether the seal is the hash of the entries."""
    return set(manifest) == {"kernels", SEAL} and manifest[SEAL] == _seal(manifest["kernels"])


def _seal(entries: Mapping[str, Json]) -> str:
    return sha256(json.dumps(dict(entries), sort_keys=True))


def text_of(manifest: Json) -> str:
    """Returns the text of the manifest's file."""
    return json.dumps(manifest, indent=1, sort_keys=True) + "\n"


def read_manifest(root: Path) -> Json:
    """Returns the committed manifest; an empty one if there is none."""
    path = root / MANIFEST
    return json.loads(path.read_text()) if path.is_file() else sealed({})


def read_log(path: Path) -> list[Json]:
    """Returns the lines of a log; none if there is no file."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.strip()]


def append(path: Path, lines: Iterable[Json]) -> None:
    """Appends lines to a log; creates its folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as log:
        log.writelines(json.dumps(line, sort_keys=True) + "\n" for line in lines)


def write_log(path: Path, lines: Iterable[Json]) -> None:
    """Writes a log anew."""
    path.write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in lines))


def about_run() -> Json:
    """Returns gpu, driver and date of a measurement on this machine's first GPU."""
    version = driver.driver_version()
    return {
        "gpu": driver.device(0).name,
        "driver": f"CUDA {version[0]}.{version[1]}",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def put_part(path: Path, name: str, part: Json) -> None:
    """Writes one part of a record that several benchmarks write; the other parts stay as they are."""
    found = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**found, name: part}, indent=1) + "\n")


def stressed(manifest: Json, log: Iterable[Json]) -> list[str]:
    """Returns the shown kernels whose cubin has a line in the log of tools/lab/race/stress.py."""
    passed = {line["cubin_sha256"] for line in log}
    return [name for name, kernel in manifest["kernels"].items() if kernel["cubin_sha256"] in passed]


def suite_sha256(root: Path) -> str:
    """Returns the hash of the code that decides whether a kernel passes."""
    return digests.files_sha256(root, SUITE)


def launch_sha256(root: Path) -> str:
    """Returns the hash of the code that launches kernels."""
    return digests.files_sha256(root, digests.launch_files(root))


def sources_digest(root: Path) -> str:
    """Returns the hash of the code that decides the kernels' machine code, for measurements of them."""
    return digests.files_sha256(root, digests.kernel_files())


def difference(committed: Json, today: Json) -> str:
    """Says how a kernel that was compiled today differs from the manifest; empty if the manifest holds."""
    if changed := plan_difference(committed["plan"], today["plan"]):
        return changed
    if committed["ptx_body_sha256"] != today["ptx_body_sha256"]:
        return f"source and committed PTX differ{_numbers(committed, today)}"
    if committed["ptx_sha256"] != today["ptx_sha256"]:
        return "only comments of the PTX differ"
    if committed["cubin_sha256"] != today["cubin_sha256"]:
        return f"same PTX, other machine code: {committed['toolchain']} then, {today['toolchain']} now"
    if committed.get("sources_sha256") != today["sources_sha256"]:
        return "same machine code, but the manifest is of other sources"
    return ""


def is_same_machine_code(committed: Json, today: Json) -> bool:
    """Whether an entry differs from the manifest's in its sources and in comments of its PTX alone."""
    decided = ("plan", "ptx_body_sha256", "cubin_sha256", "kernels", "allocation", "toolchain")
    return all(committed[name] == today[name] for name in decided)


def plan_difference(committed: Json, today: Json) -> str:
    """Says in which fields a plan differs from the manifest's; empty if it is the same."""
    if committed == today:
        return ""
    fields = [key for key in today if key not in committed or committed[key] != today[key]]
    return f"the plan differs in {', '.join(fields) or 'its fields'}"


def _numbers(committed: Json, today: Json) -> str:
    """Returns the resources that changed, as ": symbol registers 128 -> 136"."""
    found = []
    for before, after in zip(committed["kernels"], today["kernels"], strict=True):
        for key, value in after.items():
            if before.get(key) != value:
                found.append(f"{after['symbol']} {key} {before.get(key)} -> {value}")
    return f": {', '.join(found)}" if found else ""


def states(
    root: Path,
    manifest: Json,
    log: Iterable[Json],
    planned: Mapping[str, Build] | None,
    rebuilt: Mapping[str, Json],
) -> dict[str, str]:
    """Returns the state of each kernel; its first word is in capitals unless the kernel is verified.

    planned: today's builds by name; None compares no plans. rebuilt: entries of kernels that were compiled today.
    """
    if not is_sealed(manifest):
        return {MANIFEST: "TAMPERED: its seal is not the hash of its entries; run tools/release/build_ptx.py"}
    lines = list(log)
    today = {"suite_sha256": suite_sha256(root), "launch_sha256": launch_sha256(root)}
    entries = manifest["kernels"]
    found = {}
    for name, kernel in entries.items():
        passed = [line for line in lines if line["cubin_sha256"] == kernel["cubin_sha256"]]
        drifted = "" if planned is None else _drifted(kernel, planned.get(name), rebuilt.get(name))
        found[name] = _tampered(root, name, kernel) or drifted or _verified(passed, today)
    for name in planned or ():
        if name not in entries:
            found[name] = "UNLISTED: it has no committed PTX; run tools/release/build_ptx.py"
    return found


def _tampered(root: Path, name: str, kernel: Json) -> str:
    path = root / "ptx" / f"{name}.ptx"
    if not path.is_file():
        return "TAMPERED: its PTX file is missing; run tools/release/build_ptx.py"
    if sha256(path.read_bytes()) != kernel["ptx_sha256"]:
        return "TAMPERED: its PTX file differs from the manifest; run tools/release/build_ptx.py"
    return ""


def _drifted(kernel: Json, planned: Build | None, rebuilt: Json | None) -> str:
    if planned is None:
        return "DRIFTED: no plan selects this kernel any more; run tools/release/build_ptx.py"
    changed = plan_difference(kernel["plan"], plan_entry(planned))
    changed = changed or (difference(kernel, rebuilt) if rebuilt is not None else "")
    return f"DRIFTED: {changed}; run tools/release/build_ptx.py" if changed else ""


def _verified(passed: list[Json], today: Mapping[str, str]) -> str:
    if not passed:
        return "UNVERIFIED: no GPU verified this machine code; run tools/release/verify_gpu.py"
    if not any(today.items() <= line.items() for line in passed):
        gpu = passed[-1]["gpu"]
        return f"STALE: verified on {gpu}, but with other checks or launches; run tools/release/verify_gpu.py"
    return f"verified on {passed[-1]['gpu']}"
