"""Tests of artifacts in a folder: what another user, another version or another hand has made of the files."""

from __future__ import annotations

import errno
import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cutlass_py_attn.artifact import Folder, NoPermission
from cutlass_py_attn.errors import AttentionError, Stale
from cutlass_py_attn.launch import abi
from cutlass_py_attn.plan.abi_digest import abi_digest
from cutlass_py_attn.runtime.binding import bind
from tests.support import crafted_json, fakes
from tests.support.fake_driver import FakeDriver
from tests.support.permissions import unreadable

PROBLEM, PLAN = fakes.plan_of("forward", "sm_80")
ARTIFACT = fakes.artifact(PLAN.build)
DESCRIPTION = Path("sm_80", f"{PLAN.build.symbol}.json")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path / "kernels")
    made.put(ARTIFACT)
    return made


def modes(folder: Folder) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.path.rglob("*") if path.is_file()}


# Permissions


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_have_the_permissions_that_the_umask_leaves(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        made = Folder(tmp_path / "kernels")
        made.put(ARTIFACT)
        made.put(ARTIFACT)
    finally:
        os.umask(before)
    assert modes(made) == {mode}
    assert stat.S_IMODE((made.path / "sm_80").stat().st_mode) == 0o777 & ~umask
    assert len(list((made.path / "sm_80").iterdir())) == 3, "no temporary file stays"


@pytest.mark.parametrize("name", ["", "sm_80", DESCRIPTION, DESCRIPTION.with_suffix(".cubin")])
def test_a_permission_error_says_permission(folder: Folder, name: str) -> None:
    for read in (lambda: folder(PLAN.build), folder.all):
        with unreadable(folder.path / name), pytest.raises(NoPermission, match=r"permission denied\); let its owner"):
            read()
    assert not issubclass(NoPermission, Stale)
    assert folder(PLAN.build) == ARTIFACT


def test_a_permission_error_names_the_file(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin, read = folder.path / DESCRIPTION.with_suffix(".cubin"), Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path == cubin:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(NoPermission) as caught:
        folder(PLAN.build)
    assert str(caught.value).startswith(f"{cubin}: this user may not read it")


def test_a_folder_below_one_that_may_not_be_entered(folder: Folder) -> None:
    """It is not taken for an empty one."""
    for read in (lambda: folder(PLAN.build), folder.all):
        with unreadable(folder.path.parent), pytest.raises(NoPermission, match="this user may not read it"):
            read()


def test_an_unwritable_folder_says_so(folder: Folder) -> None:
    with unreadable(folder.path), pytest.raises(NoPermission, match="may not write there; write to another folder"):
        folder.put(ARTIFACT)


def test_a_failed_write_leaves_the_old_file(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", refuse)
        with pytest.raises(OSError, match="No space left"):
            folder.put(replace(ARTIFACT, ptx="// another"))
    assert folder(PLAN.build) == ARTIFACT
    assert len(list((folder.path / "sm_80").iterdir())) == 3


# Another version


def with_swapped_fields(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns an artifact whose kernels read two fields the other way round: all sizes are the same."""
    fields = list(abi.FORWARD)
    first, second = fields.index(("query_row", "i64")), fields.index(("key_row", "i64"))
    fields[first], fields[second] = fields[second], fields[first]
    with monkeypatch.context() as patched:
        patched.setitem(abi.FIELDS, "forward", tuple(fields))
        made = fakes.artifact(PLAN.build)
    assert [kernel.parameters for kernel in made.kernels] == [kernel.parameters for kernel in ARTIFACT.kernels]
    return made


def test_kernels_with_swapped_fields_are_stale(
    driver_log: FakeDriver, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = with_swapped_fields(monkeypatch)
    with pytest.raises(Stale, match="compiled by a version with other kernel parameters; compile the plan again"):
        bind(other, PLAN, PROBLEM, device=1)
    assert driver_log.calls == []
    folder.put(other)
    with pytest.raises(Stale) as caught:
        folder(PLAN.build)
    assert f"digest {other.abi[:12]}, this version's is {ARTIFACT.abi[:12]}" in str(caught.value)
    assert str(caught.value).endswith(
        f"build it with: cutlass-py-attn build --arch sm_80 --symbol {PLAN.build.symbol} -o {folder.path}"
    )
    assert folder.all() == [other], "a list shows it"
    bind(ARTIFACT, PLAN, PROBLEM, device=1)


@pytest.mark.parametrize(
    "change",
    [("query_row", "i32"), ("query_rows", "i64")],
    ids=["kind", "name"],
)
def test_digest_is_of_names_kinds_and_offsets(monkeypatch: pytest.MonkeyPatch, change: tuple[str, str]) -> None:
    assert abi_digest(PLAN.build) == ARTIFACT.abi
    changed = tuple(change if field == ("query_row", "i64") else field for field in abi.FORWARD)
    monkeypatch.setitem(abi.FIELDS, "forward", changed)
    assert abi_digest(PLAN.build) != ARTIFACT.abi


def test_digest_is_of_the_tensor_maps() -> None:
    _, sm90 = fakes.plan_of("forward", "sm_90a")
    sm80 = replace(sm90.build, family="sm80")
    assert abi.fields_of(sm80) == abi.fields_of(sm90.build)
    assert abi_digest(sm80) != abi_digest(sm90.build)


def test_problems_share_a_digest_if_they_share_a_struct() -> None:
    _, other = fakes.plan_of("forward", "sm_86", "float16")
    assert abi_digest(other.build) == ARTIFACT.abi
    assert abi_digest(fakes.plan_of("backward", "sm_80")[1].build) != ARTIFACT.abi


def rewrite(folder: Folder, change: Any) -> None:
    path = folder.path / DESCRIPTION
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


@pytest.mark.parametrize("name", ["abi", "sha256"])
def test_a_description_without_digest_is_stale(folder: Folder, name: str) -> None:
    """As earlier versions wrote it."""
    rewrite(folder, lambda found: found.pop(name))
    with pytest.raises(
        Stale, match=r"from another version \(.*missing fields .*; build it with: cutlass-py-attn build"
    ):
        folder(PLAN.build)


def test_a_cubin_of_another_export_is_stale(folder: Folder) -> None:
    (folder.path / DESCRIPTION.with_suffix(".cubin")).write_bytes(ARTIFACT.cubin + b" ")
    with pytest.raises(Stale, match="PTX or cubin are not those of the description"):
        folder(PLAN.build)


# Another hand


def test_missing_files_are_named(folder: Folder) -> None:
    (folder.path / DESCRIPTION.with_suffix(".ptx")).unlink()
    with pytest.raises(Stale, match=r"\.ptx is missing\); build it with"):
        folder(PLAN.build)
    (folder.path / DESCRIPTION).unlink()
    with pytest.raises(Stale, match=f"{PLAN.build.symbol} for sm_80: not in .*; build it with"):
        folder(PLAN.build)
    assert Folder(folder.path / "nowhere").all() == []


def test_a_description_is_of_the_kernel_that_its_name_says(folder: Folder) -> None:
    for kind in ("json", "ptx", "cubin"):
        path = folder.path / DESCRIPTION.with_suffix(f".{kind}")
        path.rename(path.with_stem("another"))
    with pytest.raises(Stale, match=rf"another\.json: .*describes {PLAN.build.symbol} for sm_80"):
        folder.all()


@pytest.mark.parametrize("text", ["", "7", "[]", "{", crafted_json.DEEP, "\ud800".encode("utf-8", "surrogatepass")])
def test_other_texts_are_stale(folder: Folder, text: str | bytes) -> None:
    (folder.path / DESCRIPTION).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(Stale, match="damaged or from another version"):
        folder(PLAN.build)


def test_crafted_descriptions_are_stale_or_of_no_effect(folder: Folder) -> None:
    """A node of the description is something else: never another error, another build or another path."""
    path = folder.path / DESCRIPTION
    found = json.loads(path.read_text())
    remedies = []
    for what, changed in crafted_json.each(found, every=5):
        path.write_text(json.dumps(changed))
        try:
            read = folder(PLAN.build)
        except Stale as error:
            remedies.append(str(error).rpartition("; ")[2])
        except AttentionError as error:
            pytest.fail(f"{what}: {type(error).__name__}")
        else:
            assert (read.build, read.abi, read.cubin) == (ARTIFACT.build, ARTIFACT.abi, ARTIFACT.cubin), what
            assert read.toolchain.isprintable()
    assert len(remedies) > 150
    assert {words[:37] for words in remedies} == {"build it with: cutlass-py-attn build "}


@pytest.mark.parametrize("name", ["arch", "kind", "family", "variant", "dtype", "mask", "gradients", "features"])
def test_unknown_names_of_a_build_are_named(folder: Folder, name: str) -> None:
    value: Any = ["../x"] if name in ("gradients", "features") else "../x"
    rewrite(folder, lambda found: found["build"].update({name: value}))
    with pytest.raises(Stale, match=r"\.\./x.*not known to this version"):
        folder.all()


def test_another_build_of_the_symbol_is_stale(folder: Folder) -> None:
    with pytest.raises(Stale, match="holds another build of this symbol; build it with"):
        folder(replace(PLAN.build, register_usage_level=9))
