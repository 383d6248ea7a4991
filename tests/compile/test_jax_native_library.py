"""The library of the handler in C: which handler is chosen, the library's cache, and programs that are refused."""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

from cutlass_py_attn.compilation import private_folder  # noqa: E402
from cutlass_py_attn.errors import NotSupported  # noqa: E402
from cutlass_py_attn.jax import native_library, native_program  # noqa: E402
from cutlass_py_attn.plan import planner  # noqa: E402
from cutlass_py_attn.problem import spec  # noqa: E402
from tests.support import native_frames  # noqa: E402
from tests.support.c_compiler import STRICT, build, compiler  # noqa: E402
from tests.support.fake_driver import FakeDriver  # noqa: E402

SUPPORT = Path(native_frames.__file__).parent
VARIABLE = native_library.VARIABLE


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, `auto`, a machine with a driver and a C compiler; returns the folder of the libraries."""
    compiler("c")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "auto")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(native_library, "_has_driver", lambda: True)
    return tmp_path / native_library.FOLDER


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The library."""
    compiler("c")
    return native_library._compile(native_library._command(), tmp_path_factory.mktemp("library")).read_bytes()


@pytest.fixture
def compilations(compiled: bytes, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Gets the folder of every compilation, which is made once."""
    found: list[Path] = []

    def copied(command: list[str], folder: Path) -> Path:
        found.append(folder)
        (folder / "handler.so").write_bytes(compiled)
        return folder / "handler.so"

    monkeypatch.setattr(native_library, "_compile", copied)
    return found


def chosen() -> native_library.Choice:
    """The choice of a new process."""
    return native_library.choice.__wrapped__()


# The choice


def test_a_machine_with_driver_and_compiler_has_the_native_handler(cached: Path, compilations: list[Path]) -> None:
    found = chosen()
    (file,) = cached.iterdir()
    assert (found.name, found.reason) == ("native", str(file))
    assert found.library is not None
    assert found.library.cutlass_py_attn_execute
    assert stat.S_IMODE(cached.stat().st_mode) == 0o700
    assert chosen().reason == str(file)
    assert len(compilations) == 1
    assert cached not in compilations[0].parents
    assert not compilations[0].exists()


def test_python_is_chosen(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "_has_driver", lambda: False)
    assert chosen() == native_library.Choice("python", "there is no NVIDIA driver (libcuda) on this machine")
    monkeypatch.delenv(VARIABLE)
    assert chosen() == native_library.Choice("python", "there is no NVIDIA driver (libcuda) on this machine")
    monkeypatch.setenv(VARIABLE, "python")
    assert chosen() == native_library.Choice("python", f"{VARIABLE} demands it")
    assert not cached.exists()


@pytest.mark.parametrize(("given", "remedy"), [("nativ", r"did you mean native\?"), ("1", "unset it")])
def test_other_values_are_refused(cached: Path, monkeypatch: pytest.MonkeyPatch, given: str, remedy: str) -> None:
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(NotSupported, match=f"^{VARIABLE} = '{given}': must be one of auto, native, python; {remedy}$"):
        chosen()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", r"there is no C compiler on the PATH \(cc, gcc, clang\)"),
        ("no-such-compiler -m64", r"there is no C compiler on the PATH \(CC = 'no-such-compiler'\)"),
        ('gcc "x', r"CC = 'gcc \"x': must be a command \(No closing quotation\)"),
        ("gcc\\", r"CC = .*: must be a command \(No escaped character\)"),
        (" ", r"there is no C compiler on the PATH \(cc, gcc, clang\)"),
        (shutil.which("false"), "/false .*: exit code 1"),
        (f"{shutil.which('gcc')} -DXLA_FFI_API_C_API_H_", "error: .*XLA_FFI"),
    ],
)
def test_without_a_compiler(cached: Path, monkeypatch: pytest.MonkeyPatch, given: str, words: str) -> None:
    """Python launches, unless the native handler is demanded: then one error says why there is none."""
    monkeypatch.setenv("CC", given)
    if "no C compiler" in words:
        monkeypatch.setenv("PATH", str(cached))
    found = chosen()
    assert (found.name, found.library) == ("python", None)
    assert found.reason.startswith("the native handler cannot be compiled: ")
    monkeypatch.setenv(VARIABLE, "native")
    remedy = f"; install a C compiler, or set {VARIABLE}=python"
    with pytest.raises(NotSupported, match=rf"(?s)^{VARIABLE} = 'native': .* cannot be compiled: .*{words}.*{remedy}$"):
        chosen()


@pytest.mark.parametrize("name", ["two words", "it's", 'a "quote"', "dollar$HOME"])
def test_a_compiler_with_arguments_and_odd_folders(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Folders of the compiler, of temporary files and of the cache need no quoting but that of CC."""
    folder = tmp_path / name
    folder.mkdir(mode=0o700)
    (folder / "cc").symlink_to(compiler("c"))
    monkeypatch.setenv("CC", shlex.join([str(folder / "cc"), "-DAN_ARGUMENT=1", "-O0"]))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    found = chosen()
    assert (found.name, Path(found.reason).parent) == ("native", folder / native_library.FOLDER), found.reason


# The cache


@pytest.mark.parametrize("damage", ["empty", "shorter", "other"])
def test_a_damaged_library_is_compiled_again(cached: Path, compilations: list[Path], damage: str) -> None:
    """Loading it could end the process."""
    native_library.load()
    (file,) = cached.iterdir()
    whole = file.read_bytes()
    changed = {"empty": b"", "shorter": whole[:-100], "other": whole[:5000] + b"?" + whole[5001:]}[damage]
    file.unlink()
    file.write_bytes(changed)
    native_library.load()
    assert len(compilations) == 2
    assert file.read_bytes() == whole


def test_a_library_of_another_machine_is_compiled_again(
    cached: Path, compilations: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, but the loader refuses it."""
    native_library.load()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    file = tmp_path / "shared" / native_library.FOLDER / next(cached.iterdir()).name
    file.parent.mkdir(mode=0o700, parents=True)
    file.write_bytes(b"foreign" + native_library._digest(b"foreign"))
    assert native_library.load()[0].cutlass_py_attn_add
    assert len(compilations) == 2


@pytest.mark.parametrize("kind", ["mode", "file"])
def test_a_folder_that_cannot_be_a_cache(cached: Path, compilations: list[Path], kind: str) -> None:
    """The library is compiled in each process, and never loaded from there."""
    if kind == "file":
        cached.write_text("")
    else:
        cached.mkdir()
        cached.chmod(0o777)
    for count in (1, 2):
        found = chosen()
        assert found.name == "native"
        assert found.reason.startswith(f"compiled in each process, as {cached} cannot be its cache: ")
        assert len(compilations) == count
        assert cached not in compilations[-1].parents
    assert kind == "file" or list(cached.iterdir()) == []


def test_full_disks(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of the cache, then that of temporary files too."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(native_library.tempfile, "mkstemp", full)
    found = chosen()
    assert found.name == "native"
    assert found.reason.endswith(f"as {cached} cannot be its cache: No space left on device")
    monkeypatch.setattr(native_library.tempfile, "TemporaryDirectory", full)
    assert chosen().reason.startswith("the native handler cannot be compiled: ")
    assert chosen().reason.endswith(": No space left on device")


def test_a_compiler_without_room_for_its_files_gets_another_folder(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's folder for temporary files, then the cache's; the compiler's own files are there too."""
    script = tmp_path / "cc"
    script.write_text(
        f"#!/bin/sh\ncase $TMPDIR in {tmp_path}/small/*) echo No space left on device >&2; exit 1;; esac\n"
        f'exec {compiler("c")} "$@"\n'
    )
    script.chmod(0o755)
    (tmp_path / "small").mkdir()
    monkeypatch.setenv("CC", str(script))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "small"))
    found = chosen()
    assert (found.name, Path(found.reason).parent) == ("native", cached), found.reason
    assert list((tmp_path / "small").iterdir()) == []
    monkeypatch.setenv("XDG_CACHE_HOME", str(script))
    assert "No space left on device" in chosen().reason


@pytest.mark.parametrize("where", ["memory", "files", "cache"])
def test_a_library_is_loaded_where_it_may_be_executed(
    cached: Path, compilations: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """From memory, then from the system's folder for temporary files, then from the cache's file system."""
    load, loaded = ctypes.CDLL, []

    def refuse(name: str) -> ctypes.CDLL:
        loaded.append(name)
        is_refused = name.startswith("/proc/") if where != "memory" else False
        if is_refused or (where == "cache" and name.startswith(str(tmp_path / "temporary"))):
            raise OSError(f"{name}: failed to map segment from shared object")
        return load(name)

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(native_library.ctypes, "CDLL", refuse)
    for _ in range(2):  # compiled, then from the cache
        loaded.clear()
        library, place = native_library.load()
        assert library.cutlass_py_attn_add
        assert Path(place).parent == cached
        starts = ["/proc/self/fd/", str(tmp_path / "temporary"), str(cached)][: len(loaded)]
        assert [name[: len(start)] for name, start in zip(loaded, starts, strict=True)] == starts
        assert len(loaded) == ["memory", "files", "cache"].index(where) + 1
    assert len(compilations) == 1
    assert [path.suffix for path in cached.iterdir()] == [".so"]
    assert list((tmp_path / "temporary").iterdir()) == []


def test_what_was_checked_is_loaded(cached: Path, compilations: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever puts another file into its place after the check has no code run."""
    native_library.load()
    (file,) = cached.iterdir()
    read = private_folder.read_private

    def exchanged(path: Path) -> bytes | None:
        data = read(path)
        path.write_bytes(b"foreign")
        return data

    monkeypatch.setattr(private_folder, "read_private", exchanged)
    library, place = native_library.load()
    assert library.cutlass_py_attn_add
    assert (place, file.read_bytes(), len(compilations)) == (str(file), b"foreign", 1)


@pytest.mark.parametrize("kind", ["link", "mode", "pipe"])
def test_a_file_that_others_could_have_written_is_not_loaded(
    cached: Path, compilations: list[Path], tmp_path: Path, kind: str
) -> None:
    native_library.load()
    (file,) = cached.iterdir()
    if kind == "mode":
        file.chmod(0o666)
    else:
        file.rename(tmp_path / "elsewhere.so")
        file.symlink_to(tmp_path / "elsewhere.so") if kind == "link" else os.mkfifo(file)
    native_library.load()
    assert len(compilations) == 2
    assert stat.S_ISREG(file.lstat().st_mode)
    assert stat.S_IMODE(file.lstat().st_mode) == 0o600


def test_leftovers_of_killed_processes_are_swept(cached: Path, compilations: list[Path]) -> None:
    """After an hour: a younger file may be of a process that still writes it."""
    (cached / "part_folder").mkdir(parents=True, mode=0o700)
    cached.chmod(0o700)
    (cached / "part_folder" / "handler.so").write_bytes(b"half")
    for name in ("part_old", "part_young"):
        (cached / name).write_bytes(b"half")
    for name in ("part_old", "part_folder"):
        os.utime(cached / name, (0, 0))
    native_library.load()
    assert sorted(path.name for path in cached.iterdir() if path.suffix != ".so") == ["part_young"]


def test_the_key_has_all_that_decides_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler("c")
    command = native_library._command()
    before = native_library._inputs(command)
    assert native_library._inputs(command) == before
    other = shutil.copy(command[0], tmp_path / "cc")
    assert native_library._inputs([other, *command[1:]]) != before
    assert native_library._inputs([*command, "-m64"]) != before
    (tmp_path / "source.c").write_bytes(native_library.SOURCE.read_bytes() + b"\n")
    monkeypatch.setattr(native_library, "SOURCE", tmp_path / "source.c")
    changed = native_library._inputs(command)
    assert changed != before
    header = tmp_path / native_library._HEADER
    header.parent.mkdir(parents=True)
    header.write_text("")
    monkeypatch.setattr(native_library.jax.ffi, "include_dir", lambda: str(tmp_path))
    assert native_library._inputs(command) != changed


# Programs, under the sanitizers

CASES = ("bf16_d128_s512_b2_h4_causal", "f32_d64_s700_t5000_h2_full_deterministic", "f32_d8_s3_b70000_h1_full")
VALUES = (0, 1, 2, 255, 2**12, 2**20, 2**31, 2**32, 2**63, 2**64 - 1)


@pytest.fixture
def programs(driver_log: FakeDriver) -> list[list[int]]:
    """The words of a few programs."""
    found = []
    for case in CASES:
        for direction in ("forward", "backward"):
            problem = spec.parse(case).problem(direction)
            call = native_frames.call_of(problem, planner.plans_on(problem, (9, 0), 132)[0])
            program = native_program.program_of(call.bound, call.addresses(1))
            assert program is not None
            found.append(program.tolist())
    return found


def damaged(words: list[int]) -> Iterator[list[int]]:
    """Programs with one other word, fewer words or more."""
    for place, word in enumerate(words):
        for value in {*VALUES, word + 1, word - 1, word ^ 0x80} - {word}:
            if 0 <= value < 2**64:
                yield [*words[:place], value, *words[place + 1 :]]
        yield words[:place]
    yield [*words, 0]


def at_the_ends(words: list[int]) -> list[list[int]]:
    """Programs whose first address lies at the end of the struct, then one byte beyond, and the same for its buffer."""
    size, addresses = words[3], 4 + -(-words[3] // 8) + 1
    changes = ((addresses + 2, size - 8), (addresses + 2, size - 7), (addresses, words[2] - 1), (addresses, words[2]))
    return [[*words[:place], value, *words[place + 1 :]] for place, value in changes]


def fuzz(made: Path, names: str, programs: list[list[int]], *arguments: str) -> list[str]:
    """Returns what native_fuzz.c prints, compiled with sanitizers."""
    if not has_sanitizer(names):
        pytest.skip("the C compiler has no sanitizers")
    sources = SUPPORT / "native_fuzz.c", SUPPORT / "native_frames.c", native_library.SOURCE
    options = ("-std=c11", "-g", f"-fsanitize={names}", "-fno-sanitize-recover=all", *STRICT, *native_frames.HEADERS)
    build([compiler("c"), *options, *map(str, sources), "-o", str(made), "-lpthread"])
    given = b"".join(struct.pack("<Q", len(words)) + np.array(words, np.uint64).tobytes() for words in programs)
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([str(made), *arguments], input=given, env=environment, capture_output=True, check=False)
    assert (done.stderr.decode(), done.returncode) == ("", 0)
    return done.stdout.decode().splitlines()


@functools.cache
def has_sanitizer(names: str) -> bool:
    command = [compiler("c"), f"-fsanitize={names}", "-x", "c", "-", "-o", os.devnull]
    return (
        subprocess.run(command, input=b"int main(void) { return 0; }", capture_output=True, check=False).returncode == 0
    )


def test_malformed_programs_are_refused(programs: list[list[int]], tmp_path: Path) -> None:
    """No word of a program leads outside of it, nor outside of the kernel parameters that a call copies."""
    ends = [each for words in programs for each in at_the_ends(words)]
    given = [*programs, *ends, *(each for words in programs for each in list(damaged(words))[::11])]
    lines = fuzz(tmp_path / "fuzz", "undefined,address", given)
    assert len(lines) == len(given)
    assert lines[: len(programs)] == ["1 "] * len(programs)
    found = [line.split(" at word ")[0] for line in lines[len(programs) :][: len(ends)]]
    assert found == ["1 ", "0 offset in the struct", "1 ", "0 buffer"] * len(programs)
    refused = {line[2:].split(" at word ")[0] for line in lines if line.startswith("0 ")}
    assert refused >= {
        "format",
        "struct",
        "buffer",
        "offset in the struct",
        "number of steps",
        "number of words",
        "grid",
    }
    assert sum(line.startswith("0 ") for line in lines) > len(lines) // 5
    assert any("must be a device address" in line for line in lines), "an accepted alignment that no buffer has"


def test_threads_call_while_programs_are_added(programs: list[list[int]], tmp_path: Path) -> None:
    assert fuzz(tmp_path / "threads", "thread", programs * 5, "threads") == []


def test_the_functions_in_python_live_as_long_as_the_process() -> None:
    """XLA keeps the C function alone, which calls the object's functions in Python at the first launch of a call."""
    program = """
import gc
import cutlass_py_attn.jax
from cutlass_py_attn.jax.native import NativeHandler
gc.collect()
print(sum(isinstance(each, NativeHandler) for each in gc.get_objects()))
"""
    environment = {**os.environ, VARIABLE: native_library.NATIVE}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"]
