"""Tests of bundles from elsewhere: only what the manifest lists is read, and only if it is what it should be."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cutlass_py_attn import load_bundle
from cutlass_py_attn.artifact import Artifact, NoPermission
from cutlass_py_attn.bundle import header
from cutlass_py_attn.bundle.manifest import Target, manifest, sealed, sha256
from cutlass_py_attn.bundle.reading import MANIFEST
from cutlass_py_attn.errors import NotSupported, Stale
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan import planner
from tests.support import crafted_json, fakes
from tests.support.bundles import export, problem_of
from tests.support.fake_driver import FakeDriver
from tests.support.permissions import unreadable


def reseal(folder: Path, change: Any) -> None:
    """Changes the manifest as somebody does who knows what the seal is."""
    path = folder / MANIFEST
    found = json.loads(path.read_text())
    path.write_text(json.dumps(sealed(change(found) or found)))


def test_an_unlisted_artifact_is_not_read(tmp_path: Path) -> None:
    """In a folder that sorts before the listed one: it would be found first."""
    bundle = export(tmp_path / "bundle", "forward")
    (listed,) = bundle.artifacts
    other = dataclasses.replace(listed, cubin=b"another program")
    for kind, data in zip(("ptx", "cubin", "json"), other.files().values(), strict=True):
        (bundle.path / "a").mkdir(exist_ok=True)
        (bundle.path / "a" / f"{listed.build.symbol}.{kind}").write_bytes(data)
    (bundle.path / "a" / "broken.json").write_text("{")
    found = load_bundle(bundle.path)
    assert found.artifacts == (listed,)
    assert found(listed.build).cubin == listed.cubin


OUTSIDE = ("../secret", "/etc/hostname", "sm_90a/../../secret", ".hidden", "a//b", "a\\b", "", "..", MANIFEST)


def test_a_manifest_names_no_path_outside(tmp_path: Path) -> None:
    folder = export(tmp_path / "bundle", "forward").path
    (tmp_path / "secret").write_text("secret")
    facts = {"bytes": 6, "sha256": sha256(b"secret")}
    written = (folder / MANIFEST).read_text()
    for name in OUTSIDE:
        (folder / MANIFEST).write_text(written)
        reseal(folder, lambda found, name=name: found["files"].update({name: facts}))
        with pytest.raises(Stale, match="must be another file below the folder"):
            load_bundle(folder)
        with pytest.raises(NotSupported, match="which no export wrote"):
            export(folder)
    assert (tmp_path / "secret").read_text() == "secret"


def test_an_artifact_must_be_listed_and_of_the_plan(tmp_path: Path) -> None:
    folder = export(tmp_path / "bundle", "forward").path
    name = "sm_90a/fwd_sm90_bf16_d64_causal_192x128.cubin"
    reseal(folder, lambda found: found["files"].pop(name) and None)
    with pytest.raises(Stale, match=rf"does not list {name}; export it again"):
        load_bundle(folder)
    folder = export(tmp_path / "other", "forward").path
    change = {"register_usage_level": 9}
    reseal(
        folder,
        lambda found: found["problems"][0]["targets"][0]["plan"]["build"].update(change),
    )
    with pytest.raises(Stale, match="is of another build than the plan"):
        load_bundle(folder)


def test_kernels_of_another_version_are_not_bound(driver_log: FakeDriver, tmp_path: Path) -> None:
    folder = export(tmp_path / "bundle", "forward").path
    build = load_bundle(folder).artifacts[0].build
    other = dataclasses.replace(fakes.artifact(build), abi="0" * 64)
    for name, data in other.files().items():
        (folder / name).write_bytes(data)
        facts = {"bytes": len(data), "sha256": sha256(data)}
        reseal(folder, lambda found, name=name, facts=facts: found["files"].update({name: facts}))
    bundle = load_bundle(folder)
    words = "compiled by a version with other kernel parameters .*; export it again"
    for use in (lambda: bundle.bind("forward"), lambda: bundle(build)):
        with pytest.raises(Stale, match=words):
            use()
    with pytest.raises(Stale, match=r"other kernel parameters .*; compile the plan again"):
        export(tmp_path / "again", "forward", kernels=lambda build: other)
    assert driver_log.of("cuLibraryLoadData") == []


PARTS: tuple[tuple[tuple[str | int, ...], int], ...] = (
    (("files",), 3),
    (("problems", 0, "problem"), 17),
    (("problems", 0, "targets", 0, "plan"), 37),
    ((), 211),
)


@pytest.mark.parametrize(("part", "every"), PARTS, ids=lambda value: str(value))
def test_crafted_manifests_are_stale_or_of_no_effect(tmp_path: Path, part: tuple[str | int, ...], every: int) -> None:
    """A node of the manifest is something else, and the seal is right."""
    bundle = export(tmp_path / "bundle", "forward")
    build, artifacts = bundle.plans("forward")[0].build, bundle.artifacts
    path = bundle.path / MANIFEST
    written = json.loads(path.read_text())
    inner = written
    for key in part:
        inner = inner[key]
    stale = 0
    for what, changed in crafted_json.each(inner, every):
        path.write_text(json.dumps(sealed(crafted_json.crafted(written, part, changed) if part else changed)))
        try:
            found = load_bundle(bundle.path)
        except Stale as error:
            stale += 1
            expect_remedy(error, what)
            continue
        assert (found.artifacts, found.plans("forward")[0].build) == (artifacts, build), what
    assert stale > 5


def expect_remedy(error: Stale, what: str) -> None:
    assert "export it again" in str(error), what


@pytest.mark.parametrize("name", ["", MANIFEST, "attention.h", "sm_90a"])
def test_a_permission_error_says_permission(tmp_path: Path, name: str) -> None:
    bundle = export(tmp_path / "bundle", "forward")
    before = bundle.manifest
    with unreadable(bundle.path / name):
        with pytest.raises(NoPermission, match=r"this user may not read it \(permission denied\); let its owner"):
            load_bundle(bundle.path)
        if name != "attention.h":  # an export replaces the files that are listed, whatever they hold
            with pytest.raises(NoPermission, match="this user may not read it"):
                export(bundle.path)
    assert load_bundle(bundle.path).manifest == before


def test_a_bundle_below_a_folder_that_may_not_be_entered(tmp_path: Path) -> None:
    path = export(tmp_path / "own" / "bundle", "forward").path
    for use in (load_bundle, export):
        with unreadable(path.parent), pytest.raises(NoPermission, match="this user may not read it"):
            use(path)


def test_a_deep_manifest_is_stale(tmp_path: Path) -> None:
    folder = export(tmp_path / "bundle", "forward").path
    (folder / MANIFEST).write_text(crafted_json.DEEP)
    with pytest.raises(Stale, match=r"no bundle, its manifest\.json cannot be read .*nested"):
        load_bundle(folder)


HOSTILE = '*/\n#error "from elsewhere"\n/* \\ ??/ " \u2028 \u202e'


def test_texts_of_an_artifact_cannot_leave_comments() -> None:
    """Compilers read such a header in tests/compile/test_bundle_hosts.py."""
    text = header.render(manifest_of(lambda build: dataclasses.replace(fakes.artifact(build), toolchain=HOSTILE)))
    assert [line for line in text.splitlines() if "from elsewhere" in line and "Written by" not in line] == []
    assert text.isascii()
    assert text.index("*/") > text.index("A bundle belongs to one context")


def manifest_of(kernels: Callable[[Build], Artifact]) -> dict[str, Any]:
    """The manifest of a target with these kernels, before it is written."""
    problem = problem_of("forward")
    plan = planner.plan(problem, "sm_80")
    made = kernels(plan.build)
    return manifest("attention", (Target(problem, plan, made, 132),), made.files())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"size": "1 } }; #error"}, "parameters have"),
        ({"size": 8}, "parameters have"),
    ],
)
def test_parameters_of_an_artifact_are_those_of_the_plan(change: Any, words: str) -> None:
    def other(build: Build) -> Artifact:
        made = fakes.artifact(build)
        (kernel,) = made.kernels
        changed = tuple(dataclasses.replace(parameter, **change) for parameter in kernel.parameters)
        return dataclasses.replace(made, kernels=(dataclasses.replace(kernel, parameters=changed),))

    with pytest.raises(Stale, match=words):
        manifest_of(other)
