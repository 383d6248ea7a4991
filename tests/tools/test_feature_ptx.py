"""Tests of the PTX hashes of kernels with features: a fault is reported, and no feature is without a kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from cutlass_py_attn.compilation import compiler
from cutlass_py_attn.compilation import registry as compilation_registry
from cutlass_py_attn.compilation.cache import Cache
from cutlass_py_attn.errors import CompileError
from cutlass_py_attn.kernels.catalogue import KERNELS
from cutlass_py_attn.kernels.sm90_forward import kernel as sm90_forward
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.tensors import DIRECTIONS
from cutlass_py_attn.score_terms import registry
from tests.compile.test_compiler import TOY
from tests.tools.test_check_verified import TODAY, run, tree  # noqa: F401
from tools.release import build_ptx, digests, feature_ptx, features, record

BUILDS = feature_ptx.builds()
PTX = {key: f"// header\n.entry {build.symbol}_0(\n)\nmma.sync.a;\n" for key, build in BUILDS.items()}
SINKS = "sm_90a backward f16_d64_q200_s200_b2_h2_full_sinks"
KERNEL = BUILDS[SINKS].symbol


def entries(changes: Mapping[str, str] | None = None) -> dict[str, record.Json]:
    """What compiling gives, with the PTX of some kernels changed."""
    ptx = PTX | dict(changes or {})
    return {key: feature_ptx.entry(build, ptx[key]) for key, build in BUILDS.items()}


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with a record of random cases and the hashes of that record."""
    monkeypatch.setattr(digests, "of", lambda root: TODAY)
    monkeypatch.setattr(feature_ptx, "builds", lambda: BUILDS)
    (tmp_path / "ptx").mkdir()
    fuzz(tmp_path, 1)
    assert feature_ptx.write(tmp_path, entries()) == []
    return tmp_path


def fuzz(root: Path, problems: int, kernels: str = "today") -> None:
    """Record random cases, as a GPU run would."""
    content = {"digests": TODAY | {"kernels": kernels}, "date": str(problems), "groups": {}, "changed": None}
    features.write(root, {"format": features.FORMAT, **content})


def test_every_part_of_every_kernel_body_has_a_case() -> None:
    assert feature_ptx.missing(BUILDS.values()) == []
    assert len(set(BUILDS.values())) == len(BUILDS)


def without(builds: Iterable[Build], feature: str) -> list[Build]:
    return [build for build in builds if not build.has(feature)]


@pytest.mark.parametrize("feature", [*registry.LAYOUTS, *(term.name for term in registry.BUILT_IN)])
def test_a_feature_without_a_case_is_missing_from_each_body_that_has_it(feature: str) -> None:
    """A body without any case lacks its other parts too."""
    bodies = [body for body in KERNELS.values() if feature in body.features and body.kind in DIRECTIONS]
    lines = feature_ptx.missing(without(BUILDS.values(), feature))
    assert bodies
    for body in bodies:
        name = " ".join(filter(None, (body.family, body.kind, body.variant)))
        assert f"{name}: no case has {feature}" in lines


def test_a_new_feature_of_a_body_needs_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the committed features are compared with is what the catalogue says."""
    kernel = dataclasses.replace(sm90_forward.FORWARD, terms=(*sm90_forward.FORWARD.terms, "temperature"))
    monkeypatch.setitem(KERNELS, ("forward", "sm90", ""), kernel)
    assert feature_ptx.missing(BUILDS.values()) == ["sm90 forward: no case has temperature"]


def test_same_kernels_give_no_line(recorded: Path) -> None:
    assert feature_ptx.objections(recorded, entries()) == []
    assert feature_ptx.objections(recorded, entries({SINKS: PTX[SINKS] + "// a comment\n"})) == []


def test_a_changed_kernel_gives_one_line(recorded: Path) -> None:
    made = entries({SINKS: PTX[SINKS].replace("mma.sync.a", "mma.sync.b")})
    (line,) = feature_ptx.objections(recorded, made)
    assert f"DRIFTED: {SINKS}: sm_90a/{KERNEL}: its PTX changed" in line
    assert "fuzz --record ptx/features.json on a GPU" in line
    assert "build_ptx --features" in line
    assert feature_ptx.objections(recorded, None) == [], "seen by compiling alone"


def test_a_kernel_that_does_not_compile_gives_one_line(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(build: Build) -> compiler.CompilerOutput:
        raise CompileError(f"{build.symbol} for {build.arch}: no such type\nand more")

    monkeypatch.setattr(compiler, "compile_unchecked", fails)
    made = entries() | {SINKS: feature_ptx.compiled_entry(BUILDS[SINKS])}
    (line,) = feature_ptx.objections(recorded, made)
    assert f"DRIFTED: {SINKS}: does not compile: {KERNEL} for sm_90a: no such" in line
    before = (recorded / feature_ptx.PATH).read_text()
    fuzz(recorded, 2)
    (line,) = feature_ptx.write(recorded, made)
    assert "no such type; correct the kernel" in line
    assert (recorded / feature_ptx.PATH).read_text() == before


def test_the_hash_is_of_the_compiled_ptx(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = compiler.CompilerOutput(PTX[SINKS], b"", "")
    monkeypatch.setattr(compiler, "compile_unchecked", lambda build: output)
    monkeypatch.setattr(feature_ptx, "keep", lambda build, output: None)
    assert feature_ptx.compiled_entry(BUILDS[SINKS]) == entries()[SINKS]


@pytest.mark.parametrize(("kernel", "is_sound"), [("toy", True), ("local_array", False)])
def test_sound_kernels_are_cached(kernel: str, is_sound: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy_kernel = pytest.importorskip("tests.support.toy_kernel")
    monkeypatch.setattr(compilation_registry, "trace", toy_kernel.trace)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build = replace(TOY, component_gemm=kernel)
    made = feature_ptx.compiled_entry(build)
    kept = Cache().get(build, compiler.toolchain())
    assert (kept is not None) == is_sound
    if kept is not None:
        assert kept == compiler.compile(build)
        assert made == feature_ptx.entry(build, kept.ptx)


def test_another_plan_is_seen_without_compiling(recorded: Path) -> None:
    path = recorded / feature_ptx.PATH
    other = KERNEL.replace("128x128", "64x64")
    path.write_text(path.read_text().replace(KERNEL, other))
    (line,) = feature_ptx.objections(recorded, None)
    assert f"{other}: the plan now selects sm_90a/{KERNEL}" in line


def test_added_and_removed_cases_are_reported(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = {("sm_90 forward new" if key == SINKS else key): build for key, build in BUILDS.items()}
    monkeypatch.setattr(feature_ptx, "builds", lambda: others)
    unlisted, removed = feature_ptx.objections(recorded, None)
    assert "UNLISTED: sm_90 forward new" in unlisted
    assert f"DRIFTED: {SINKS}: is no case any more" in removed


def test_hashes_of_another_record_are_stale(recorded: Path) -> None:
    fuzz(recorded, 2)
    (line,) = feature_ptx.objections(recorded, entries())
    assert "STALE: written for another ptx/features.json" in line
    assert feature_ptx.write(recorded, entries()) == []
    assert feature_ptx.objections(recorded, entries()) == []


def test_missing_hashes_are_reported(recorded: Path) -> None:
    (recorded / feature_ptx.PATH).unlink()
    (line,) = feature_ptx.objections(recorded, None)
    assert "feature_ptx.json: MISSING" in line


def test_changed_hashes_need_a_new_record(recorded: Path) -> None:
    changed = entries({SINKS: PTX[SINKS] + "mma.sync.b;\n"})
    before = (recorded / feature_ptx.PATH).read_text()
    (line,) = feature_ptx.write(recorded, changed)
    assert "no random case ran these kernels" in line
    assert SINKS in line
    assert (recorded / feature_ptx.PATH).read_text() == before
    fuzz(recorded, 2)
    assert feature_ptx.write(recorded, changed) == []
    assert feature_ptx.objections(recorded, changed) == []


@pytest.mark.parametrize("state", ["STALE", "MISSING"])
def test_no_hashes_are_written_without_a_record_of_these_sources(recorded: Path, state: str) -> None:
    if state == "STALE":
        fuzz(recorded, 2, "yesterday")
    else:
        (recorded / features.PATH).unlink()
    (line,) = feature_ptx.write(recorded, entries())
    assert f"ptx/features.json: {state}" in line
    assert features.objections(recorded) == [line]


def test_check_verified_fails_for_a_drifted_kernel(
    tree: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(feature_ptx, "builds", lambda: BUILDS)
    assert feature_ptx.write(tree, entries()) == []
    monkeypatch.setattr(build_ptx, "compile_all", lambda needed, fresh: [])
    monkeypatch.setattr(build_ptx, "entries_of", lambda plans, artifacts: record.read_manifest(tree)["kernels"])
    assert run(tree, monkeypatch, "--write-tables") == 0
    drifted = entries({SINKS: PTX[SINKS] + "mma.sync.b;\n"})
    monkeypatch.setattr(feature_ptx, "compiled", lambda needed, processes: drifted)
    capsys.readouterr()
    assert run(tree, monkeypatch, "--rebuild") == 0
    assert "of today's sources and compiler; its kernels are not compiled again" in capsys.readouterr().out
    monkeypatch.setattr(feature_ptx.compiler, "toolchain", lambda: "another compiler")
    for made, code in ((entries(), 0), (drifted, 1)):
        monkeypatch.setattr(feature_ptx, "compiled", lambda needed, processes, made=made: made)
        capsys.readouterr()
        assert run(tree, monkeypatch, "--rebuild") == code
        assert capsys.readouterr().out.count("DRIFTED") == code


def test_hashes_are_current_for_their_sources_and_compiler_alone(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert feature_ptx.is_current(recorded)
    with monkeypatch.context() as patched:
        patched.setattr(feature_ptx.compiler, "toolchain", lambda: "another compiler")
        assert not feature_ptx.is_current(recorded)
    with monkeypatch.context() as patched:
        patched.setattr(digests, "of", lambda root: TODAY | {"kernels": "edited"})
        assert not feature_ptx.is_current(recorded)
    fuzz(recorded, 2)
    assert not feature_ptx.is_current(recorded), "another record of the same sources"
    (recorded / feature_ptx.PATH).unlink()
    assert not feature_ptx.is_current(recorded)


def test_check_verified_fails_for_a_stale_record(
    tree: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(tree, monkeypatch) == 0
    for name, subject in features.SUBJECTS.items():
        monkeypatch.setattr(digests, "of", lambda root, name=name: TODAY | {name: "edited"})
        assert run(tree, monkeypatch) == 1
        assert f"ptx/features.json: STALE: {subject} changed since" in capsys.readouterr().out
