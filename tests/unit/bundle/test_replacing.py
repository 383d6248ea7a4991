"""Tests of replacing a bundle: the folder is the old one or the new one, and no file of the user is lost."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cutlass_py_attn import export_library, load_bundle
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.bundle import replacing
from cutlass_py_attn.bundle.manifest import SEAL, sealed, sha256
from cutlass_py_attn.bundle.reading import MANIFEST
from cutlass_py_attn.errors import NotSupported, Stale
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.tensors import DIRECTIONS
from tests.support import fakes
from tests.support.bundles import CASE, export, problem_of, snapshot


def without_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that cannot exchange two folders in one step."""
    monkeypatch.setattr(replacing, "_renameat2", lambda one, other: errno.EINVAL)


@pytest.mark.parametrize("in_one_step", [True, False])
def test_bundle_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_one_step: bool
) -> None:
    folder = tmp_path / "bundle"
    before = snapshot(export(folder, "forward").path)
    if not in_one_step:
        without_exchange(monkeypatch)
    write, rename = Path.write_bytes, Path.rename
    written: list[Path] = []

    def full_disk(path: Path, data: bytes) -> int:
        written.append(path)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        return write(path, data)

    def no_second_rename(path: Path, target: Path) -> Path:
        if path.name == "new" and not target.exists():
            raise OSError(5, "Input/output error")
        return rename(path, target)

    def failing(one: Path, other: Path) -> int:
        return errno.EIO

    faults = [(Path, "write_bytes", full_disk, "No space left")]
    if in_one_step:
        faults.append((replacing, "_renameat2", failing, "Input/output error"))
    else:
        faults.append((Path, "rename", no_second_rename, "Input/output error"))
    for where, function, fault, words in faults:
        with monkeypatch.context() as patched:
            patched.setattr(where, function, fault)
            with pytest.raises(OSError, match=words):
                export(folder)
        assert snapshot(folder) == before, "what was there is there"
        assert list(tmp_path.iterdir()) == [folder]
    assert export(folder).directions == DIRECTIONS
    assert list(tmp_path.iterdir()) == [folder]
    after = snapshot(export(tmp_path / "another").path)
    assert snapshot(folder) == after, "nothing of the older bundle stays"


def test_a_reader_never_sees_half_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every call that changes the folder's name, there is one whole bundle under it."""
    folder = tmp_path / "bundle"
    seen = []
    for case in (CASE, "f16_d64_s200_b2_h3_full"):
        real = replacing._renameat2

        def watched(one: Path, other: Path, real: Any = real) -> int:
            seen.append(load_bundle(folder).problem("forward").dtype)
            code: int = real(one, other)
            seen.append(load_bundle(folder).problem("forward").dtype)
            return code

        export(folder, "forward")
        with monkeypatch.context() as patched:
            patched.setattr(replacing, "_renameat2", watched)
            export(folder, "forward", case=case)
    if replacing._renameat2(folder, folder) != errno.EINVAL:  # a folder is exchanged with itself where that works
        assert seen == ["bfloat16", "bfloat16", "bfloat16", "float16"]


OWN_FILES = ("notes.txt", "sm_90a/notes.txt", "sm_90a/mine/deep.txt", "results/empty/")


@pytest.mark.parametrize("name", OWN_FILES)
def test_an_export_never_deletes_files_of_the_user(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "bundle"
    export(folder, "forward")
    own = folder / name
    (own if name.endswith("/") else own.parent).mkdir(parents=True, exist_ok=True)
    if not name.endswith("/"):
        own.write_text("mine")
    before = snapshot(folder)
    with pytest.raises(NotSupported) as caught:
        export(folder, kernels=lambda build: pytest.fail("nothing compiles before the refusal"))
    assert name.split("/")[-1 if "notes" in name else 0] in str(caught.value)
    assert str(caught.value).endswith(
        "which no export wrote, or which changed since; move that away, or name a new folder"
    )
    assert snapshot(folder) == before
    assert own.exists()


@pytest.mark.parametrize(("count", "end"), [(3, "2.txt,"), (4, "2.txt and 1 more,"), (9, "2.txt and 6 more,")])
def test_many_files_of_the_user_are_counted(tmp_path: Path, count: int, end: str) -> None:
    for number in range(count):
        (tmp_path / f"{number}.txt").write_text("mine")
    with pytest.raises(NotSupported, match=f"holds 0.txt, 1.txt, {end} which no export wrote"):
        export(tmp_path, "forward")


def test_a_folder_keeps_its_permissions(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    export(folder, "forward")
    for mode in (0o750, 0o2775):
        folder.chmod(mode)
        export(folder, "forward")
        assert stat.S_IMODE(folder.stat().st_mode) == mode


def test_without_exchange_the_old_folder_is_set_aside_in_the_hidden_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bundle"
    export(folder, "forward")
    without_exchange(monkeypatch)
    rename, moves = Path.rename, []

    def noted(path: Path, target: Path) -> Path:
        result = rename(path, target)
        moves.append((path, target))
        return result

    monkeypatch.setattr(Path, "rename", noted)
    export(folder, "forward")
    hidden = moves[0][1].parent
    assert (hidden.parent, hidden.name[:8]) == (tmp_path, ".bundle.")
    assert moves == [(folder, hidden / "aside"), (hidden / "new", folder), (hidden / "aside", hidden / "new")]


@pytest.mark.parametrize("in_one_step", [True, False])
def test_a_file_that_comes_while_kernels_compile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_one_step: bool
) -> None:
    folder = tmp_path / "bundle"
    before = snapshot(export(folder, "forward").path)
    if not in_one_step:
        without_exchange(monkeypatch)

    def kernels(build: Build) -> Artifact:
        (folder / "notes.txt").write_text("mine")
        return fakes.artifact(build)

    with pytest.raises(NotSupported, match=rf"folder = '{folder}': holds notes.txt, which no export wrote"):
        export(folder, kernels=kernels)
    assert snapshot(folder) == {**before, "notes.txt": b"mine"}
    assert list(tmp_path.iterdir()) == [folder]


def test_two_exports_at_once_leave_one_of_them(tmp_path: Path) -> None:
    """The second ends while the first compiles, with other files."""
    folder = tmp_path / "bundle"

    def kernels(build: Build) -> Artifact:
        if not folder.exists():
            export(folder, "forward", name="ours", case="f16_d64_s200_b2_h3_full")
        return fakes.artifact(build)

    assert export(folder, "backward", kernels=kernels).directions == ("backward",)
    assert snapshot(folder) == snapshot(export(tmp_path / "another", "backward").path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "bundle"]


@pytest.mark.parametrize("text", ['{"format": "cutlass_py_attn bundle of mine"}', "no JSON", "[]"])
def test_a_manifest_that_lists_nothing_protects_nothing(tmp_path: Path, text: str) -> None:
    """Whatever its first words are."""
    for name in (MANIFEST, "thesis.tex"):
        (tmp_path / name).write_text(text)
    with pytest.raises(NotSupported, match=r"holds (manifest\.json, )?thesis\.tex, which no export wrote"):
        export(tmp_path)
    assert snapshot(tmp_path) == {MANIFEST: text.encode(), "thesis.tex": text.encode()}


def test_a_bundle_of_an_older_format_is_replaced(tmp_path: Path) -> None:
    folder = export(tmp_path / "bundle", "forward").path
    found = json.loads((folder / MANIFEST).read_text())
    older = {"format": "cutlass_py_attn bundle 1", "files": found["files"]}
    (folder / MANIFEST).write_text(json.dumps(sealed(older)))
    (folder / "attention.h").unlink()
    assert export(folder, "backward").directions == ("backward",)
    assert snapshot(folder).keys() == snapshot(export(tmp_path / "another", "backward").path).keys()


def test_links_lead_to_nothing_that_an_export_deletes(tmp_path: Path) -> None:
    """Neither the folder of a bundle as a link, nor a link in it."""
    folder = export(tmp_path / "bundle", "forward").path
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert export(link, "backward").directions == load_bundle(folder).directions == ("backward",)
    assert link.is_symlink()
    kept = tmp_path / "elsewhere"
    (folder / "sm_90a").rename(kept)
    before = snapshot(kept)
    (folder / "sm_90a").symlink_to(kept)
    with pytest.raises(NotSupported, match="holds sm_90a, which no export wrote"):
        export(folder)
    assert snapshot(kept) == before


OUTSIDE = ("sub/thesis.tex", "sub", "../home/thesis.tex", "{home}/thesis.tex", "sub/../../home/thesis.tex")


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("write", [export, export_library])
def test_a_manifest_from_elsewhere_deletes_nothing_outside_of_its_folder(
    tmp_path: Path, name: str, write: Callable[..., object]
) -> None:
    """Its seal is right and so is the digest, as whoever wrote it may know the file."""
    home, folder = tmp_path / "home", tmp_path / "downloaded"
    home.mkdir()
    folder.mkdir()
    (home / "thesis.tex").write_text("a year of work")
    (folder / "sub").symlink_to(home)
    facts = {"bytes": 14, "sha256": sha256(b"a year of work")}
    listed = dict.fromkeys(("sub", name.format(home=home)), facts)
    (folder / MANIFEST).write_text(json.dumps(sealed({"format": "cutlass_py_attn bundle 5", "files": listed})))
    arguments = ([problem_of("forward")], ["sm_80"]) if write is export_library else ("forward",)
    with pytest.raises(NotSupported, match=r"holds (manifest\.json, )?sub, which no export wrote"):
        write(folder, *arguments, kernels=fakes.artifact)
    assert snapshot(home) == {"thesis.tex": b"a year of work"}
    assert sorted(os.listdir(folder)) == [MANIFEST, "sub"]


def _identity(path: Path) -> tuple[int, ...]:
    """Returns what a change of a file changes: which file it is, and when it was written. Reading changes none."""
    status = path.lstat()
    return status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns


@pytest.mark.parametrize("change", ["digest", "seal", "no seal", "link", "pipe"])
def test_a_changed_file_is_not_deleted(tmp_path: Path, change: str) -> None:
    """Of the user, under a name that the manifest lists, or lists since somebody edited it."""
    folder = export(tmp_path / "bundle", "forward").path
    own, manifest = folder / "attention.h", json.loads((folder / MANIFEST).read_text())
    if change == "digest":
        own.write_text("a week of work")
    elif change == "link":
        own.rename(tmp_path / "attention.h")
        own.symlink_to(tmp_path / "attention.h")
    elif change == "pipe":
        own.unlink()
        os.mkfifo(own)
    else:
        own = folder / "main.c"
        own.write_text("a week of work")
        manifest["files"]["main.c"] = {"bytes": 14, "sha256": sha256(b"a week of work")}
        if change == "no seal":
            del manifest[SEAL]
        (folder / MANIFEST).write_text(json.dumps(manifest))
    before = sorted(os.listdir(folder)), _identity(own)
    with pytest.raises(NotSupported, match=rf"holds .*{own.name}.*, or which changed since; move that away"):
        export(folder, kernels=lambda build: pytest.fail("nothing compiles before the refusal"))
    assert (sorted(os.listdir(folder)), _identity(own)) == before


def test_a_file_that_changes_while_kernels_compile_is_kept(tmp_path: Path) -> None:
    folder = export(tmp_path / "bundle", "forward").path

    def kernels(build: Build) -> Artifact:
        (folder / "attention.h").write_text("a week of work")
        return fakes.artifact(build)

    with pytest.raises(NotSupported, match=r"holds attention\.h, which no export wrote, or which changed since"):
        export(folder, kernels=kernels)
    assert (folder / "attention.h").read_text() == "a week of work"
    assert list(tmp_path.iterdir()) == [folder]


def test_a_link_that_comes_before_the_old_files_are_removed_is_not_followed(tmp_path: Path) -> None:
    kept, folder = tmp_path / "elsewhere", tmp_path / "old"
    for above in (kept, folder):
        above.mkdir()
    (kept / "file").write_text("mine")
    (folder / "sub").symlink_to(kept)
    replacing._remove(folder, {"sub/file", "sub"})
    assert snapshot(kept) == {"file": b"mine"}


@pytest.mark.parametrize("name", [MANIFEST, "attention.h"])
def test_a_pipe_in_a_bundle_is_no_wait_for_a_writer(tmp_path: Path, name: str) -> None:
    folder = export(tmp_path / "bundle", "forward").path
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(Stale, match=rf"{name}.* cannot be read"):
        load_bundle(folder)


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "bundle").write_text("mine")
    with pytest.raises(NotSupported, match=r"bundle': must not be a file; name a new folder"):
        export(tmp_path / "bundle")


def test_files_have_the_permissions_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        folder = export(tmp_path / "bundle", "forward").path
    finally:
        os.umask(before)
    found = {stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
    assert found == {0o750, 0o640}
    folder.chmod(0o755)
    export(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755, "a folder keeps its permissions"
