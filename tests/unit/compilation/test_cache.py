"""Tests of the disk cache: hits, misses for damaged and foreign entries, and unusable folders."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import stat
import time
import warnings
from pathlib import Path

import pytest

from cutlass_py_attn.artifact import Artifact, Kernel, Parameter
from cutlass_py_attn.compilation import cache, cache_folder, compiler, private_folder, registry
from cutlass_py_attn.compilation.cache import Cache
from cutlass_py_attn.errors import BreaksPlan
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan.planner import plan_forward
from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape
from tests.support import crafted_json

pytest.importorskip("cuda.core.utils")

BUILD = plan_forward(Problem.dense("forward", Shape(1, 64, 64, 1, 64, 64), "bfloat16", Causal()), "sm_90").build
KERNEL = Kernel(f"{BUILD.symbol}_0", 90, 0, 0, 1024, 128, (Parameter("params", 0, 152),))
ARTIFACT = Artifact(BUILD, "// ptx\n" * 40000, b"\x7fELF\0\1" * 30000, (KERNEL,), "compiler 1", "as planned")


def entries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Cache(tmp_path / "kept").put(ARTIFACT)
    return tmp_path / "kept"


def test_a_stored_artifact_is_a_hit(folder: Path) -> None:
    found = Cache(folder).get(BUILD, "compiler 1")
    assert found == ARTIFACT
    assert found is not ARTIFACT


def test_the_folder_is_the_users_alone(folder: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_no_pickle(folder: Path) -> None:
    (entry,) = entries(folder)
    assert entry.read_bytes().startswith(b"cutlass_py_attn artifact 1\n")


def test_another_build_compiler_or_source_is_a_miss(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Cache(folder).get(dataclasses.replace(BUILD, arch="sm_80"), "compiler 1") is None
    assert Cache(folder).get(BUILD, "compiler 2") is None
    monkeypatch.setattr(cache, "_source_digest", lambda build: b"other sources")
    assert Cache(folder).get(BUILD, "compiler 1") is None


def test_findings_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def spilling(build: Build) -> Artifact:
        nonlocal asked
        asked += 1
        raise BreaksPlan(f"{build.symbol} spills")

    monkeypatch.setattr(compiler, "compile", spilling)
    monkeypatch.setattr(compiler, "_artifacts", {})  # an earlier test may have compiled it
    for _ in range(2):
        with pytest.raises(BreaksPlan, match=f"{BUILD.symbol} spills"):
            compiler.artifact_for(BUILD, tmp_path)
    assert asked == 1
    assert Cache(tmp_path).get_findings(BUILD, "another compiler") is None
    (entry,) = entries(tmp_path)
    entry.write_bytes(entry.read_bytes()[:-1])
    with pytest.raises(BreaksPlan):
        compiler.artifact_for(BUILD, tmp_path)
    assert asked == 2, "a damaged entry is a miss"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: b"garbage",
        lambda data: data[:20],
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[:5000] + b"\xff" + data[5001:],
        lambda data: b"\x80\x04" + data[2:],
    ],
)
def test_a_damaged_entry_is_a_miss_and_is_replaced(folder: Path, damage) -> None:  # type: ignore[no-untyped-def]
    (entry,) = entries(folder)
    entry.write_bytes(damage(entry.read_bytes()))
    kept = Cache(folder)
    assert kept.get(BUILD, "compiler 1") is None
    kept.put(ARTIFACT)
    assert kept.get(BUILD, "compiler 1") == ARTIFACT
    assert len(entries(folder)) == 1


def test_a_sound_entry_of_another_build_is_a_miss(folder: Path) -> None:
    (entry,) = entries(folder)
    entry.write_bytes(cache.pack(dataclasses.replace(ARTIFACT, build=dataclasses.replace(BUILD, arch="sm_80"))))
    assert Cache(folder).get(BUILD, "compiler 1") is None


def test_a_sound_container_of_another_layout_is_a_miss() -> None:
    data = cache.pack(ARTIFACT)
    for old, new in (
        (b'"registers"', b'"registrars"'),
        (b'"kernels"', b'"kernel_s"'),
        (b'"build": {', b'"build": ['),
    ):
        assert cache.unpack(_sealed(data, old, new)) is None


def _sealed(data: bytes, old: bytes, new: bytes) -> bytes:
    """Returns the container with a changed description and the matching hash."""
    body = data[len(cache.FORMAT) + 32 :]
    description_bytes, ptx_bytes = cache._LENGTHS.unpack_from(body)
    rest = body[cache._LENGTHS.size :].replace(old, new)
    lengths = cache._LENGTHS.pack(description_bytes + len(new) - len(old), ptx_bytes)
    return cache.FORMAT + cache.hashlib.sha256(lengths + rest).digest() + lengths + rest


def test_an_entry_of_an_earlier_version_is_a_hit() -> None:
    """It has no digest of the kernel parameters, but the key of the entry covers their sources."""
    data = _sealed(cache.pack(ARTIFACT), f'"abi": "{ARTIFACT.abi}", '.encode(), b"")
    assert cache.unpack(data) == ARTIFACT


def test_a_sound_container_of_crafted_json_is_a_miss_or_of_no_effect() -> None:
    description = ARTIFACT.describe()
    written = json.dumps(description, sort_keys=True).encode()
    texts = [json.dumps(changed).encode() for _, changed in crafted_json.each(json.loads(written), every=17)]
    found = [cache.unpack(_sealed(cache.pack(ARTIFACT), written, text)) for text in texts]
    assert found.count(None) > 30
    assert all(item.cubin == ARTIFACT.cubin and item.abi for item in found if item is not None)
    assert cache.unpack(_sealed(cache.pack(ARTIFACT), written, crafted_json.DEEP.encode())) is None


# Whose folder it is


def refused(path: Path, words: str) -> None:
    """Checks that the folder is no cache, and that a warning says why."""
    with pytest.warns(UserWarning, match=f"kernels are not cached in {path}: .*{words}"):
        kept = Cache(path)
    assert kept.get(BUILD, "compiler 1") is None
    before = sorted(path.rglob("*"))
    kept.put(ARTIFACT)
    kept.put_findings(BUILD, "compiler 1", "spills")
    assert sorted(path.rglob("*")) == before


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_a_folder_that_others_may_write_to_is_no_cache(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    refused(folder, rf"other users may write to it \(mode {mode:04o}\); empty it and run chmod 700")
    folder.chmod(0o755)
    assert Cache(folder).get(BUILD, "compiler 1") == ARTIFACT, "others may read it"


def test_a_folder_of_another_user_is_no_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    refused(folder, r"it belongs to user \d+; set XDG_CACHE_HOME")


def test_a_link_is_no_cache(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    refused(link, "it is a symbolic link; set XDG_CACHE_HOME")
    above = tmp_path / "above"
    above.symlink_to(tmp_path)
    assert Cache(above / "kept").get(BUILD, "compiler 1") == ARTIFACT, "as ~/.cache often is"


def test_a_folder_that_others_may_rename_is_no_cache(tmp_path: Path) -> None:
    shared, link = tmp_path / "shared", tmp_path / "link"
    shared.mkdir()
    Cache(shared / "kept").put(ARTIFACT)
    link.symlink_to(shared)
    shared.chmod(0o777)
    for above in (shared, link):
        refused(above / "kept", r"other users may rename it in .*shared \(mode 0777\); run chmod go-w")
    shared.chmod(0o1777)
    with warnings.catch_warnings(action="error"):
        assert Cache(shared / "kept").get(BUILD, "compiler 1") == ARTIFACT, "as in /tmp"


@pytest.mark.parametrize(
    ("mode", "owner", "words"),
    [
        (0o770, None, r"other users may rename it in .*shared \(mode 0770\); run chmod go-w on that folder"),
        (0o702, None, r"other users may rename it in .*shared \(mode 0702\)"),
        (0o755, 12345, "it lies below .*shared, of user 12345; set XDG_CACHE_HOME to a folder of your own"),
        (0o1777, 12345, "it lies below .*shared, of user 12345"),
        (0o1777, 0, ""),
        (0o1770, None, ""),
        (0o755, 0, ""),
    ],
)
@pytest.mark.parametrize("way", ["below", "far below", "by a link", "by a link of a link"])
def test_who_may_exchange_a_folder_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, owner: int | None, words: str, way: str
) -> None:
    """Root and the user may; nobody else, by name, owner or group."""
    shared, kept = tmp_path / "shared", tmp_path / "shared" / "kept"
    if way == "far below":
        kept = shared / "a" / "b" / "kept"
    Cache(kept).put(ARTIFACT)
    if "link" in way:
        (tmp_path / "link").symlink_to("shared" if way == "by a link" else "second")
        (tmp_path / "second").symlink_to(shared)
        kept = tmp_path / "link" / "kept"
    shared.chmod(mode)
    own_by(monkeypatch, shared, owner)
    if words:
        refused(kept, words)
    else:
        assert private_folder.refusal(kept) == ""


def own_by(monkeypatch: pytest.MonkeyPatch, path: Path, owner: int | None) -> None:
    """Lets a path seem to belong to another user; None for no other."""
    real = Path.lstat

    def lstat(asked: Path) -> os.stat_result:
        found = real(asked)
        if owner is None or not os.path.samestat(found, real(path)):
            return found
        return os.stat_result([*found[:4], owner, *found[5:10]])

    monkeypatch.setattr(Path, "lstat", lstat)


def test_a_link_of_another_user_leads_to_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner may let it lead elsewhere, wherever it lies."""
    (tmp_path / "home").mkdir()
    (tmp_path / "link").symlink_to("home")
    Cache(tmp_path / "home" / "kept").put(ARTIFACT)
    own_by(monkeypatch, tmp_path / "link", 12345)
    refused(tmp_path / "link" / "kept", "it lies below .*link, of user 12345")


def test_links_that_lead_to_each_other(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / name).symlink_to(other)
    with pytest.raises(OSError, match="Too many levels"):
        [*private_folder._folders_above(tmp_path / "a" / "kept")]


def test_entries_that_others_may_write_are_no_cache(folder: Path) -> None:
    """Nobody gets there through a folder that is closed to others, as the umask of some systems makes them."""
    (folder / "entries").chmod(0o775)
    assert Cache(folder).get(BUILD, "compiler 1") == ARTIFACT
    folder.chmod(0o755)
    refused(folder, r"other users may write to it \(mode 0775\)")


@pytest.mark.parametrize("given", ["", "relative/path", ".", "~/cache"])
def test_a_relative_cache_folder_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """As the XDG Base Directory Specification says."""
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.default_folder() == tmp_path / ".cache" / "cutlass_py_attn"


def test_an_unusable_folder_stores_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for useless in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere/below")):
        kept = Cache(useless)
        kept.put(ARTIFACT)
        assert kept.get(BUILD, "compiler 1") is None


def test_a_full_disk_is_an_objection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of no bytes can still be created there."""
    assert cache_folder.objection(tmp_path / "kept") == ""
    monkeypatch.setattr("tempfile.TemporaryFile", lambda dir: open("/dev/full", "wb", buffering=0))  # noqa: SIM115
    assert cache_folder.objection(tmp_path / "kept") == (
        f"kernels are not cached in {tmp_path / 'kept'}: No space left on device; set XDG_CACHE_HOME to a folder that "
        "you may write to"
    )


def test_a_read_only_folder_can_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    kept = Cache(folder)
    kept.put(dataclasses.replace(ARTIFACT, toolchain="compiler 2"))
    assert kept.get(BUILD, "compiler 2") is None
    assert kept.get(BUILD, "compiler 1") == ARTIFACT


def test_the_default_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Cache().put(ARTIFACT)
    assert entries(tmp_path / "cutlass_py_attn")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.default_folder() == tmp_path / "home" / ".cache" / "cutlass_py_attn"


def test_a_stored_artifact_loads_within_50_ms(folder: Path) -> None:
    """Of this thread's own time, at its best: other programs take the rest."""

    def seconds() -> float:
        cache._file_digest.cache_clear()
        registry._closure.cache_clear()
        registry._imports.cache_clear()
        begin = time.thread_time()
        assert Cache(folder).get(BUILD, "compiler 1") is not None
        return time.thread_time() - begin

    assert min(seconds() for _ in range(5)) < 0.05


def test_a_build_is_compiled_once_per_process_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Build] = []

    def fake(build: Build) -> Artifact:
        compiled.append(build)
        return dataclasses.replace(ARTIFACT, build=build, toolchain="compiler 1")

    monkeypatch.setattr(compiler, "compile", fake)
    monkeypatch.setattr(compiler, "toolchain", lambda: "compiler 1")
    monkeypatch.setattr(compiler, "_artifacts", {})
    first = compiler.artifact_for(BUILD, tmp_path)
    assert compiler.artifact_for(BUILD, tmp_path) is first
    monkeypatch.setattr(compiler, "_artifacts", {})  # as in another process
    assert compiler.artifact_for(BUILD, tmp_path) == first
    assert compiled == [BUILD]


# What the user hears of an unusable folder


def test_an_unusable_folder_is_a_warning_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match=rf"not cached in {tmp_path}/file/below: .*; set XDG_CACHE_HOME to a folder"):
        Cache(tmp_path / "file" / "below")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home directory")))
    with pytest.warns(UserWarning, match="not cached on disk: no home directory"):
        Cache()


def test_a_full_disk_is_a_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.mkstemp", full)
    kept = Cache(folder)
    with pytest.warns(UserWarning, match="No space left on device"):
        kept.put(dataclasses.replace(ARTIFACT, toolchain="compiler 2"))
    assert kept.get(BUILD, "compiler 1") == ARTIFACT


def test_contents_and_clearing(folder: Path) -> None:
    Cache(folder).put_findings(BUILD, "compiler 1", "spills")
    found = sorted(cache_folder.entries(folder), key=lambda entry: entry.symbol)
    assert [(entry.symbol, entry.arch) for entry in found] == [("", ""), (BUILD.symbol, BUILD.arch)]
    assert found[1].bytes == len(cache.pack(ARTIFACT))
    assert Cache(folder).clear() == 2
    assert list(cache_folder.entries(folder)) == []
    assert Cache(folder).clear() == 0


def test_entries_are_shown_while_others_are_deleted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another process that stores a kernel, between listing and reading."""
    for number in range(4):
        Cache(folder).put_findings(BUILD, f"compiler {number}", "spills")
    read, names = private_folder.read_private, iter(entries(folder)[:2])

    def evicting(path: Path) -> bytes | None:
        if name := next(names, None):
            name.unlink(missing_ok=True)
        return read(path)

    monkeypatch.setattr(cache_folder, "read_private", evicting)
    assert len([*cache_folder.entries(folder)]) in (3, 4), "of five, of which two are deleted"
    assert len([*cache_folder.entries(folder)]) == 3


def test_clearing_sweeps_what_killed_processes_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an hour; neither other names, nor folders that others could enter, nor what links lead to."""
    folder, temporary, own = tmp_path / "cutlass_py_attn", tmp_path / "temporary", tmp_path / "own"
    Cache(folder).put(ARTIFACT)
    left = [folder / "tmp" / "entry", folder / "locks" / "lock", tmp_path / private_folder.NATIVE_LIBRARIES / "part_x"]
    dead = [temporary / "cutlass_py_attn.0abc_xyz", temporary / "cutlass_py_attn_jax.0abc_xyz"]
    kept = [temporary / "cutlass_py_attn", temporary / "cutlass_py_attn.checkout1", tmp_path / left[2].parent / "a.so"]
    for path in (own, *dead, *kept[:2]):
        path.mkdir(parents=True, mode=0o700)
        (path / "file").write_text("text")
    kept[1].chmod(0o755)
    (temporary / "cutlass_py_attn.0abc_lnk").symlink_to(own)
    for path in (*left, kept[2]):
        path.parent.mkdir(exist_ok=True, mode=0o700)
        path.write_text("half")
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    assert cache_folder.clear(folder) == 1
    assert all(path.exists() for path in (*left, *dead)), "a process may still write them"
    for path in (*left, *dead, *kept):
        os.utime(path, (0, 0))
    os.utime(temporary / "cutlass_py_attn.0abc_lnk", (0, 0), follow_symlinks=False)
    assert cache_folder.clear(folder) == 0
    assert not any(path.exists() for path in (*left, *dead))
    assert all(path.exists() for path in (*kept, own / "file"))


def test_the_objection_to_a_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder.objection(folder) == ""
    assert cache_folder.objection(tmp_path / "new") == ""
    (tmp_path / "file").write_text("in the way")
    assert f"not cached in {tmp_path}/file/below: " in cache_folder.objection(tmp_path / "file" / "below")
    (tmp_path / "link").symlink_to(folder)
    assert "it is a symbolic link" in cache_folder.objection(tmp_path / "link"), "though one can write to it"

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert "Permission denied; set XDG_CACHE_HOME" in cache_folder.objection(folder)
