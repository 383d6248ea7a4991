"""Record: the sealed manifest of the committed kernels, the log of GPU verifications, and the states between."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cutlass_py_attn import driver, kernels
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.plan import Build, Plan

MANIFEST = "ptx/manifest.json"
LOG = "ptx/verified.jsonl"
STRESS_LOG = "ptx/stressed.jsonl"
SEAL = "sha256_of_the_rest"
# What decides whether a kernel passes: the GPU suite, the reference, the inputs and the rules.
SUITE = (
    "tests/gpu/*.py",
    *(f"cutlass_py_attn/{name}.py" for name in ("reference", "reference_terms", "philox", "inputs", "judge", "masks")),
)

Json = dict[str, Any]


def sha256(data: bytes | str) -> str:
    """Of bytes, or of a text in UTF-8."""
    return hashlib.sha256(data if isinstance(data, bytes) else data.encode()).hexdigest()


def name_of(build: Build) -> str:
    """A kernel's name in the manifest and in the log: its target and its symbol."""
    return f"{build.arch}/{build.symbol}"


def body(ptx: str) -> str:
    """PTX without comments and empty lines: what ptxas reads."""
    lines = (re.sub(r"\s*//.*", "", line) for line in ptx.splitlines())
    return "\n".join(line for line in lines if line.strip())


def entry(plan: Plan, artifact: Artifact) -> Json:
    """Everything the manifest says of one kernel."""
    kernels = []
    for launch, kernel in zip(plan.launches, artifact.kernels, strict=True):
        text = next(p for p in artifact.ptx.split(".entry ")[1:] if p.startswith(f"{kernel.symbol}("))
        facts = dataclasses.asdict(kernel)
        facts["parameters"] = [[p.name, p.offset, p.size] for p in kernel.parameters]
        facts["shared_memory_bytes"] = launch.shared_memory_bytes
        kernels.append({**facts, "mma": text.count("mma.sync."), "wgmma": text.count("wgmma.mma_async.")})
    return {
        "plan": json.loads(json.dumps(dataclasses.asdict(plan.build))),
        "ptx_sha256": sha256(artifact.ptx),
        "ptx_body_sha256": sha256(body(artifact.ptx)),
        "cubin_sha256": sha256(artifact.cubin),
        "kernels": kernels,
        "allocation": artifact.allocation,
        "toolchain": artifact.toolchain,
    }


def sealed(entries: Mapping[str, Json]) -> Json:
    """The manifest of these entries, with its seal."""
    return {"kernels": dict(sorted(entries.items())), SEAL: _seal(entries)}


def is_sealed(manifest: Json) -> bool:
    """Whether the seal is that of the rest."""
    return set(manifest) == {"kernels", SEAL} and manifest[SEAL] == _seal(manifest["kernels"])


def _seal(entries: Mapping[str, Json]) -> str:
    return sha256(json.dumps(dict(entries), sort_keys=True))


def text_of(manifest: Json) -> str:
    """The manifest as it is written."""
    return json.dumps(manifest, indent=1, sort_keys=True) + "\n"


def read_manifest(root: Path) -> Json:
    """The committed manifest; an empty one where there is none."""
    path = root / MANIFEST
    return json.loads(path.read_text()) if path.is_file() else sealed({})


def read_log(path: Path) -> list[Json]:
    """The lines of a log; none where there is no file."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.strip()]


def append(path: Path, lines: Iterable[Json]) -> None:
    """Put lines behind those of a log; its folder is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as log:
        log.writelines(json.dumps(line, sort_keys=True) + "\n" for line in lines)


def about_run() -> Json:
    """gpu, driver and date of what is measured on this machine's first GPU now."""
    version = driver.driver_version()
    return {
        "gpu": driver.device(0).name,
        "driver": f"CUDA {version[0]}.{version[1]}",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def stressed(manifest: Json, log: Iterable[Json]) -> list[str]:
    """The shown kernels whose very cubin has a line of tools/stress.py."""
    passed = {line["cubin_sha256"] for line in log}
    return [name for name, kernel in manifest["kernels"].items() if kernel["cubin_sha256"] in passed]


def suite_sha256(root: Path) -> str:
    """Hash of every file that decides whether a kernel passes."""
    files = sorted(path for glob in SUITE for path in root.glob(glob))
    return sha256("\n".join(f"{path.relative_to(root).as_posix()} {sha256(path.read_bytes())}" for path in files))


def sources_digest(root: Path) -> str:
    """Hash of every file that decides what the kernels do."""
    package = root / "cutlass_py_attn"
    return sha256("\n".join(f"{name} {sha256((package / name).read_bytes())}" for name in kernels.source_modules()))


def difference(committed: Json, today: Json) -> str:
    """What compiling gives that the manifest does not say; empty when it gives the same machine code."""
    if committed["plan"] != today["plan"]:
        fields = [key for key in today["plan"] if committed["plan"].get(key) != today["plan"][key]]
        return f"the plan differs in {', '.join(fields) or 'its fields'}"
    if committed["ptx_body_sha256"] != today["ptx_body_sha256"]:
        return f"source and committed PTX disagree{_numbers(committed, today)}"
    if committed["ptx_sha256"] != today["ptx_sha256"]:
        return "only comments of the PTX differ"
    if committed["cubin_sha256"] != today["cubin_sha256"]:
        return f"same PTX, other machine code: {committed['toolchain']} then, {today['toolchain']} now"
    return ""


def _numbers(committed: Json, today: Json) -> str:
    """The resources that changed, as ": symbol registers 128 -> 136"."""
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
    planned: Iterable[str],
    rebuilt: Mapping[str, Json] | None,
) -> dict[str, str]:
    """State by kernel, first word in capitals unless it is verified; rebuilt: what compiling gives today."""
    if not is_sealed(manifest):
        return {MANIFEST: "TAMPERED: the seal does not fit the rest; run tools/build_ptx.py"}
    lines = list(log)
    suite = suite_sha256(root)
    entries = manifest["kernels"]
    found = {}
    for name, kernel in entries.items():
        passed = [line for line in lines if line["cubin_sha256"] == kernel["cubin_sha256"]]
        found[name] = _tampered(root, name, kernel) or _drifted(name, kernel, rebuilt) or _verified(name, passed, suite)
    for name in planned:
        if name not in entries:
            found[name] = "UNLISTED: it has no committed PTX; run tools/build_ptx.py"
    return found


def _tampered(root: Path, name: str, kernel: Json) -> str:
    path = root / "ptx" / f"{name}.ptx"
    if not path.is_file():
        return "TAMPERED: its PTX file is missing; run tools/build_ptx.py"
    if sha256(path.read_bytes()) != kernel["ptx_sha256"]:
        return "TAMPERED: its PTX file is not the manifest's; run tools/build_ptx.py"
    return ""


def _drifted(name: str, kernel: Json, rebuilt: Mapping[str, Json] | None) -> str:
    if rebuilt is None:
        return ""
    if name not in rebuilt:
        return "DRIFTED: no plan gives this kernel any more; run tools/build_ptx.py"
    changed = difference(kernel, rebuilt[name])
    return f"DRIFTED: {changed}; run tools/build_ptx.py" if changed else ""


def _verified(name: str, passed: list[Json], suite: str) -> str:
    if not passed:
        return "UNVERIFIED: this machine code never passed on a GPU; run tools/verify_gpu.py"
    if suite not in {line["suite_sha256"] for line in passed}:
        return f"STALE: verified on {passed[-1]['gpu']}, but by an older suite; run tools/verify_gpu.py"
    return f"verified on {passed[-1]['gpu']}"
