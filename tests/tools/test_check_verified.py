"""Tests of the verification record: every state is recognised on a small tree, and the tables follow the record."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cutlass_py_attn.artifact import Artifact, Kernel, Parameter
from cutlass_py_attn.errors import CompileError
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.plan.planner import plan_forward
from cutlass_py_attn.problem.masks import Causal, Full, Mask
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape
from tools.release import build_ptx, check_verified, digests, feature_ptx, features, gallery, record
from tools.tuning import plan_rows

ROOT = Path(__file__).resolve().parents[2]

PAGES = {
    check_verified.BENCHMARK_PAGE: "# Title\nbetween\n<!-- benchmark:begin -->\n<!-- benchmark:end -->\n",
    check_verified.FEATURES_PAGE: "# Title\n<!-- features:begin -->\n<!-- features:end -->\n",
}
SHAPE = Shape(1, 128, 128, 1, 64, 64)
LAUNCH = "cutlass_py_attn/runtime/binding.py"
TODAY = {"kernels": "today", "launch": "today", "checks": "today"}


def plan_of(mask: Mask) -> Plan:
    return plan_forward(Problem.dense("forward", SHAPE, "bfloat16", mask), "sm_90")


def artifact_of(plan: Plan, *, code: str = "mma.sync.a;", cubin: bytes = b"cubin", registers: int = 200) -> Artifact:
    """What a compiler might have made of the plan."""
    symbol = f"{plan.symbol}_0"
    ptx = f"// header\n.entry {symbol}(\n.param .b8 p[184])\n{code}\n"
    kernel = Kernel(symbol, registers, 0, 0, 0, plan.build.threads, (Parameter("params", 0, 184),))
    return Artifact(plan.build, ptx, cubin + plan.symbol.encode(), (kernel,), COMPILER, "as planned")


PLANS = [plan_of(Full()), plan_of(Causal())]
BUILDS = {record.name_of(plan.build): plan.build for plan in PLANS}
FULL, CAUSAL = NAMES = [*BUILDS]
COMPILER = "compiler 1"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with two committed kernels and nothing verified."""
    (tmp_path / "docs/data").mkdir(parents=True)
    for page, text in PAGES.items():
        (tmp_path / page).write_text(text)
    for name in record.SUITE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "ptx").mkdir()
    build_ptx.write(tmp_path, PLANS, [artifact_of(plan) for plan in PLANS])
    monkeypatch.setattr(record, "sources_digest", lambda root: "today")
    monkeypatch.setattr(digests, "of", lambda root: TODAY)
    monkeypatch.setattr(digests, "launch_files", lambda root: (LAUNCH,))
    (tmp_path / LAUNCH).parent.mkdir(parents=True)
    (tmp_path / LAUNCH).write_text("")
    monkeypatch.setattr(feature_ptx, "builds", dict)
    random_cases = {
        "format": features.FORMAT, "gpu": "H200", "date": "2026-01-02", "commit": "0123", "digests": TODAY,
        "problems": 0, "launches": 0, "kernels": {}, "groups": {}, "changed": None, "reruns": [], "rows": [],
    }  # fmt: skip
    (tmp_path / features.PATH).write_text(json.dumps(random_cases))
    assert feature_ptx.write(tmp_path, {}) == []
    monkeypatch.setattr(build_ptx, "committed_plans", lambda: PLANS)
    monkeypatch.setattr(plan_rows, "rows", lambda: ())
    for page, text in check_verified.generated_tables(tmp_path).items():
        (tmp_path / page).write_text(text)
    (tmp_path / gallery.GALLERY).write_text(gallery.gallery(tmp_path))
    return tmp_path


def verify(tree: Path, *names: str) -> None:
    """Append a line for each of these kernels, as a GPU run would."""
    entries = record.read_manifest(tree)["kernels"]
    with (tree / record.LOG).open("a") as log:
        for name in names:
            line = {
                "cubin_sha256": entries[name]["cubin_sha256"], "suite_sha256": record.suite_sha256(tree),
                "launch_sha256": record.launch_sha256(tree), "gpu": "H200",
                "worst": {"output": 0.5}, "date": "2026-01-02T03:04:05+00:00",
            }  # fmt: skip
            log.write(json.dumps(line) + "\n")


def states(tree: Path, made: list[Artifact] | None = None) -> dict[str, str]:
    """First word of each kernel's state; made: what compiling gives today."""
    rebuilt = {} if made is None else build_ptx.entries_of(PLANS, made)
    log = record.read_log(tree / record.LOG)
    found = record.states(tree, record.read_manifest(tree), log, BUILDS, rebuilt)
    return {name: state.split(":")[0].split()[0] for name, state in found.items()}


def run(tree: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    """Exit code of check_verified on the tree."""
    monkeypatch.setattr(sys, "argv", ["check_verified", "--root", str(tree), *options])
    return check_verified.main()


def test_unverified_then_verified(tree: Path) -> None:
    assert states(tree) == {FULL: "UNVERIFIED", CAUSAL: "UNVERIFIED"}
    verify(tree, FULL)
    assert states(tree) == {FULL: "verified", CAUSAL: "UNVERIFIED"}


def test_stale_when_the_suite_changes(tree: Path) -> None:
    verify(tree, *NAMES)
    (tree / "README.md").write_text("a page decides nothing\n")
    (tree / "tests/cases/suite.py").write_text("# neither do cases that verify_gpu does not run\n")
    assert states(tree) == {FULL: "verified", CAUSAL: "verified"}
    (tree / "cutlass_py_attn/testing/inputs.py").write_text('"""A docstring."""  # and a comment\n')
    assert states(tree) == {FULL: "verified", CAUSAL: "verified"}
    (tree / "cutlass_py_attn/testing/inputs.py").write_text("FAMILIES = ()\n")
    assert states(tree) == {FULL: "STALE", CAUSAL: "STALE"}
    verify(tree, CAUSAL)
    assert states(tree) == {FULL: "STALE", CAUSAL: "verified"}


@pytest.mark.parametrize("name", [LAUNCH, "tools/release/verify_gpu.py"])
def test_stale_when_the_launches_or_the_verifier_change(tree: Path, name: str) -> None:
    verify(tree, *NAMES)
    (tree / name).write_text("CHANGED = True\n")
    assert states(tree) == {FULL: "STALE", CAUSAL: "STALE"}


def test_tampered_manifest(tree: Path) -> None:
    path = tree / record.MANIFEST
    path.write_text(path.read_text().replace('"registers": 200', '"registers": 128', 1))
    assert states(tree) == {record.MANIFEST: "TAMPERED"}


@pytest.mark.parametrize("missing", [False, True])
def test_tampered_ptx(tree: Path, missing: bool) -> None:
    path = tree / "ptx" / f"{FULL}.ptx"
    if missing:
        path.unlink()
    else:
        path.write_text(path.read_text() + "// a word more\n")
    assert states(tree) == {FULL: "TAMPERED", CAUSAL: "UNVERIFIED"}


def test_a_new_cubin_is_unverified_whatever_passed_before(tree: Path) -> None:
    verify(tree, *NAMES)
    build_ptx.write(tree, PLANS, [artifact_of(PLANS[0], cubin=b"other"), artifact_of(PLANS[1])])
    assert states(tree) == {FULL: "UNVERIFIED", CAUSAL: "verified"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"code": "mma.sync.b;", "registers": 208},
            "source and committed PTX differ.*registers 200 -> 208",
        ),
        ({"code": "mma.sync.a; // note"}, "only comments"),
        ({"cubin": b"other"}, "same PTX, other machine code"),
    ],
)
def test_drifted_says_how(tree: Path, changes: dict[str, object], said: str) -> None:
    verify(tree, *NAMES)
    made = [artifact_of(PLANS[0], **changes), artifact_of(PLANS[1])]  # type: ignore[arg-type]
    assert states(tree, made) == {FULL: "DRIFTED", CAUSAL: "verified"}
    assert states(tree) == {FULL: "verified", CAUSAL: "verified"}, "seen by compiling alone"
    lines = build_ptx.drifted(record.read_manifest(tree), build_ptx.entries_of(PLANS, made))
    assert len(lines) == 1
    assert re.search(said, lines[0])


def test_drifted_when_a_plan_changes(tree: Path) -> None:
    changed = replace(PLANS[0], build=replace(PLANS[0].build, warps=8))
    entries = build_ptx.entries_of([changed, PLANS[1]], [artifact_of(changed), artifact_of(PLANS[1])])
    (line,) = build_ptx.drifted(record.read_manifest(tree), entries)
    assert "the plan differs in warps" in line


def test_another_plan_of_the_same_symbol_is_seen_without_compiling(tree: Path) -> None:
    """The number of stages is in no symbol."""
    changed = replace(PLANS[0].build, key_stages=PLANS[0].build.key_stages + 1)
    assert record.name_of(changed) == FULL
    found = record.states(tree, record.read_manifest(tree), [], BUILDS | {FULL: changed}, {})
    assert found[FULL].startswith("DRIFTED: the plan differs in key_stages; run ")
    assert found[CAUSAL].startswith("UNVERIFIED")
    found = record.states(tree, record.read_manifest(tree), [], {FULL: BUILDS[FULL]}, {})
    assert found[CAUSAL].startswith("DRIFTED: no plan selects this kernel any more")


def test_what_is_compiled_again(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of another plan, of other sources or of another compiler, and the first of each family and kind."""

    def compiled_again(plans: list[Plan], toolchain: str = COMPILER) -> list[str]:
        found = build_ptx.uncertain(plans, record.read_manifest(tree), toolchain)
        return [record.name_of(plan.build) for plan in found]

    assert compiled_again(PLANS) == [FULL]
    assert compiled_again(PLANS[::-1]) == [CAUSAL]
    assert compiled_again(PLANS, "compiler 2") == [FULL, CAUSAL]
    changed = replace(PLANS[1], build=replace(PLANS[1].build, key_stages=PLANS[1].build.key_stages + 1))
    assert compiled_again([PLANS[0], changed]) == [FULL, CAUSAL]
    new = plan_forward(Problem.dense("forward", SHAPE, "float16", Causal()), "sm_90")
    assert compiled_again([*PLANS, new]) == [FULL, record.name_of(new.build)]
    monkeypatch.setattr(record, "sources_sha256", lambda build: "edited")
    assert compiled_again(PLANS) == [FULL, CAUSAL]


def test_the_hash_of_the_sources_is_of_the_kernels_own(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edits of other kernels, of the planner or of comments compile nothing again."""
    hashed: list[str] = []

    def files_sha256(root: Path, names: tuple[str, ...]) -> str:
        hashed[:] = [(root / name).relative_to(ROOT).as_posix() for name in names]
        return "hash"

    monkeypatch.setattr(digests, "files_sha256", files_sha256)
    assert record.sources_sha256(BUILDS[FULL]) == "hash"
    assert {"cutlass_py_attn/kernels/sm80/forward.py", "cutlass_py_attn/compilation/compiler.py"} <= {*hashed}
    assert {"cutlass_py_attn/kernels/sm80/backward.py", "cutlass_py_attn/plan/planner.py"}.isdisjoint(hashed)


def test_a_manifest_of_other_sources_is_drifted(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every later check would compile these kernels again."""
    made = [artifact_of(plan) for plan in PLANS]
    assert states(tree, made) == {FULL: "UNVERIFIED", CAUSAL: "UNVERIFIED"}
    monkeypatch.setattr(record, "sources_sha256", lambda build: "edited")
    assert states(tree, made) == {FULL: "DRIFTED", CAUSAL: "DRIFTED"}
    assert states(tree) == {FULL: "UNVERIFIED", CAUSAL: "UNVERIFIED"}, "seen by compiling alone"


@pytest.mark.parametrize("options", [("--rebuild",), ("--rebuild", "--strict")])
def test_a_release_compiles_every_kernel(
    tree: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled: list[Build] = []

    def compile_all(needed: list[build_ptx.Choices], *, fresh: bool) -> list[Artifact]:
        assert fresh
        compiled.extend(build for (build,) in needed)
        return [artifact_of(plan) for plan in PLANS if (plan.build,) in needed]

    monkeypatch.setattr(build_ptx, "compile_all", compile_all)
    monkeypatch.setattr(check_verified.compiler, "toolchain", lambda: COMPILER)
    monkeypatch.setattr(feature_ptx, "compiled", lambda needed, processes: {})
    verify(tree, *NAMES)
    assert run(tree, monkeypatch, "--write-tables") == 0
    capsys.readouterr()
    assert run(tree, monkeypatch, *options) == 0
    is_strict = "--strict" in options
    assert compiled == [*BUILDS.values()][: 2 if is_strict else 1]
    said = "ptx/manifest.json: 1 of 2 kernels are of today's plans, sources and compiler\n"
    assert (said in capsys.readouterr().out) == (not is_strict)


def test_unlisted(tree: Path) -> None:
    build_ptx.write(tree, PLANS[:1], [artifact_of(PLANS[0])])
    assert states(tree) == {FULL: "UNVERIFIED", CAUSAL: "UNLISTED"}
    assert not (tree / "ptx" / f"{CAUSAL}.ptx").exists(), "PTX of a kernel that is not committed goes"


def test_a_tree_without_a_manifest_lists_every_plan(tree: Path) -> None:
    (tree / record.MANIFEST).unlink()
    assert states(tree) == {FULL: "UNLISTED", CAUSAL: "UNLISTED"}


def test_manifest_says_what_the_kernel_costs(tree: Path) -> None:
    entry = record.read_manifest(tree)["kernels"][FULL]
    (kernel,) = entry["kernels"]
    assert (kernel["registers"], kernel["threads"], kernel["mma"], kernel["wgmma"]) == (200, 128, 1, 0)
    assert kernel["shared_memory_bytes"] == PLANS[0].build.shared_memory_bytes
    assert kernel["parameters"] == [["params", 0, 184]]
    assert entry["toolchain"] == COMPILER
    assert entry["sources_sha256"] == record.sources_sha256(PLANS[0].build)


def test_exit_codes(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tree, monkeypatch) == 0, "UNVERIFIED is a note"
    assert run(tree, monkeypatch, "--strict") == 1
    verify(tree, *NAMES)
    assert run(tree, monkeypatch, "--strict") == 1, "the gallery is not up to date"
    assert run(tree, monkeypatch, "--write-tables") == 0
    assert run(tree, monkeypatch, "--strict") == 0
    (tree / "ptx" / f"{FULL}.ptx").unlink()
    assert run(tree, monkeypatch) == 1


def test_a_plan_row_without_a_measurement_fails_a_release_alone(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verify(tree, *NAMES)
    assert run(tree, monkeypatch, "--write-tables") == 0
    monkeypatch.setattr(plan_rows, "rows", lambda: [(("backward", 64), TileConfig(128, 128, 16, 3, 2))])
    capsys.readouterr()
    assert run(tree, monkeypatch) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("tile table, sm90 backward to head dim 64, 128x128x16:3,2@5: UNMEASURED")
    assert shown[1] == "check_verified: 2 verified; tiles without a measurement: 1"
    assert run(tree, monkeypatch, "--strict") == 1


def test_benchmark_table(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {
        "case": "bf16_d64_s8192_b4_h32_full",
        "direction": "forward",
        "ours_tflops": 200.4,
        "gpu": "H200",
        "commit": "c",
    }
    rows = [{**row, "peer": "flash", "peer_tflops": 100.2, "ratio": 2.0}]
    rows.append({**row, "peer": "cudnn", "peer_tflops": 400.0, "ratio": 0.501})
    rows.append({**row, "direction": "backward", "peer": "", "peer_tflops": None, "ratio": None})
    path = tree / check_verified.BENCHMARK
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(rows))
    assert run(tree, monkeypatch) == 1, "the page lacks the table"
    assert run(tree, monkeypatch, "--write-tables") == 0
    text = (tree / check_verified.BENCHMARK_PAGE).read_text()
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert lines == [
        "| case | direction | ours | flash | cudnn |",
        "| --- | --- | --- | --- | --- |",
        "| `bf16_d64_s8192_b4_h32_full` | forward | 200 | 100 (2.00) | 400 (0.50) |",
        "| `bf16_d64_s8192_b4_h32_full` | backward | 200 |  |  |",
    ]
    assert "between\n<!-- benchmark:begin -->" in text


def test_gallery_follows_the_record(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify(tree, CAUSAL)
    assert run(tree, monkeypatch, "--write-tables") == 0
    text = (tree / gallery.GALLERY).read_text()
    rows = {row.split("`")[1]: [cell.strip() for cell in row.split("|")] for row in text.splitlines() if "[`" in row}
    assert list(rows) == [name.partition("/")[2] for name in (CAUSAL, FULL)]
    verified, unverified = rows.values()
    assert verified[2:5] == ["bfloat16, head dim 64, causal", "128 x 128, 4", "200"]
    assert verified[10:12] == ["verified on H200, 2026-01-02", "output 0.50"]
    assert unverified[10].startswith("UNVERIFIED")
    assert unverified[11] == ""
    assert f"]({CAUSAL}.ptx)" in text
    (tree / gallery.GALLERY).write_text(text.replace("0.50", "0.10"))
    assert run(tree, monkeypatch) == 1, "the gallery was edited by hand"


def test_gallery_gives_a_rate_to_the_kernel_that_ran() -> None:
    row = {"direction": "forward", "ours_tflops": 500.0}
    cases = ("bf16_d128_s8192_b4_h16_full", "bf16_d128_s8192_b4_h16_full_deterministic", "f32_d64_s2048_b4_h32_full")
    rows = [{**row, "case": case, "ours_tflops": 500.0 + number} for number, case in enumerate(cases)]
    assert gallery.rates_of(rows) == {
        "sm_90a/fwd_sm90_bf16_d128_full_128x128": (500.0, cases[0]),
        "sm_90/fwd_sm80_f32_d64_full_128x64": (502.0, cases[2]),
    }


def test_a_page_without_its_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks <!-- benchmark:begin -->"):
        check_verified.with_block("# Title\n", "benchmark", "")


def test_the_suite_is_what_verify_gpu_imports() -> None:
    """Every file of reference/ and testing/ that decides whether a kernel passes, and no other."""
    found = digests.imported(ROOT, ["tools/release/verify_gpu.py"], digests.CHECK_FOLDERS)
    assert {name for name in found if not name.endswith("__init__.py")} == {
        name for name in record.SUITE if "/problem/" not in name
    }


def test_committed_plans_are_all_different() -> None:
    pytest.importorskip("cutlass")
    names = [record.name_of(plan.build) for plan in build_ptx.committed_plans()]
    assert len(names) == len(set(names)) == 74


def test_the_first_build_that_compiles_is_taken() -> None:
    """Where ptxas finds too few registers, a folder holds what stands in."""
    first, second = plans = [plan_of(Full()), plan_of(Causal())]
    choices = tuple(plan.build for plan in plans)

    def made(build: Build) -> Artifact:
        if build in refused:
            raise CompileError("spills")
        return artifact_of(first if build == first.build else second)

    refused = {first.build}
    assert build_ptx.first_compiled(choices, made).build == second.build
    refused = set(choices)
    with pytest.raises(CompileError):
        build_ptx.first_compiled(choices, made)
