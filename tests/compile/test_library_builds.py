"""Tests of what is built from a C library's two files: by compilers, CMake, pkg-config and Cargo; with sanitizers."""

from __future__ import annotations

import ctypes
import functools
import os
import random
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.bundle import interface, row_spec
from cutlass_py_attn.bundle.files import Bundle, export_library
from cutlass_py_attn.bundle.rules import AnyProblem
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan import entry_parameters
from cutlass_py_attn.problem import spec
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import DIRECTIONS
from cutlass_py_attn.runtime.driver import device
from tests.support import fake_driver
from tests.support.bundle_hosts import ROOT, cuda_headers
from tests.support.c_compiler import STRICT, build, compiler
from tests.support.fakes import artifact
from tests.support.library_host import PUBLIC, Call, LibraryHost, compiled, exported, filled, filled_rows
from tests.support.listed_plans import with_blocks

MANY = "bf16_d128_s1000_b2_h4k2_causal_window64_biassum_dropout0.1_softcap30_alibi_sinks"
CASES = (
    ("bf16_d128_s512_b2_h4k2_causal", ("forward", "backward")),
    ("bf16_d128_q1_s512_b2_h4k2_full", ("forward",)),
    (MANY, ("forward", "backward")),
    ("f32_d64_s700_t5000_h2_full_deterministic", ("forward", "backward")),
)
# What the examples of serving export.
PAGED = (
    "bf16_d128_n512x512,256_h32k8_causal_br_paged16",
    "bf16_d128_q1_s8192_b8_h32k8_full_paged16",
    "bf16_d128_q4_s8192_b8_h32k8_causal_br_paged16",
)
CODES = (
    "bf16_d128_q1_s8192_b8_h32k8_full_paged16_kv8_descalerow",
    "bf16_d576v512_q1_s64_b2_h16k1_full_mla",
)
LATENT_CODES = "bf16_d576v512_q1_s64_b2_h16k1_full_paged16_mla_kv8_descaletile"  # for sm_90a alone
RANGES = "bf16_d128_s512_b2_h4k2_causal_rangesbh"  # as this
ROWS = ("append_bf16_d128", "merge_bf16_d128")
MORE_ROWS = ("append_bf16_d128_e4m3_row", "append_bf16_d512v64_e4m3_tile", "merge_bf16_d128_varlen")
COMPILERS = tuple(name for name in ("gcc", "clang") if shutil.which(name))
INT64 = range(-(2**63), 2**63)
POWERS = (0, 4, 16, 29, 31, 32, 33, 40, 47, 61, 62, 63)
EXTREMES = [n for bits in POWERS for off in (-1, 0, 1) for n in (2**bits + off, -(2**bits) + off) if n in INT64]
FACTORS = (0.0, -0.0, 1.0, -1.0, 1e-320, 1e38, 2.0**127, 3e38, 1e300, float("inf"), float("-inf"), float("nan"))
FORMATS = {"u32": "<I", "i32": "<i", "u64": "<Q", "i64": "<q", "f64": "<d"}

# Reads calls as bytes; prints status and workspace of the choice, the status of a launch, and of a choice of packed
# strides.
PROGRAM = r"""
#include "attention.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int main(int argc, char **argv) {
    const attention_target target = {9, 0, 132, 232448};
    attention_device *device = NULL;
    attention_error error;
    const char *symbol = "";
    size_t size = (size_t)atoi(argv[1]);
    unsigned char *bytes = (unsigned char *)malloc(size); /* exactly a call: a read behind it is found */
    if (argc != 2 || !bytes || size != sizeof(attention_call)) return 2;
    if (attention_open(&device, NULL, 0, &error)) return puts(error.text), 3;
    while (fread(bytes, 1, size, stdin) == size) {
        attention_call *call = (attention_call *)bytes;
        size_t workspace = 7, other = 7;
        int chosen = attention_choose(call, &target, &symbol, &workspace, &error);
        int launched = attention_launch(device, call, 4096, (size_t)1 << 62, NULL, &error);
        int packed = attention_packed(call, NULL);
        int again = attention_choose(call, &target, NULL, &other, &error);
        printf("%d %zu %d %d %d %zu\n", chosen, workspace, launched, packed, again, strlen(error.text));
    }
    attention_close(device);
    free(bytes);
    return 0;
}
"""
DECLARED = (
    "int cuDevicePrimaryCtxRetain(void **, int); int cuCtxSetCurrent(void *); void fake_driver_without_memory(int);"
)
THREADS = r"""
#include "attention.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuCtxSetCurrent(void *context);
void fake_driver_without_memory(int without);
static attention_call calls[2];
static const attention_device *shared;
static size_t needs[2];
static void *work(void *given) {
    int number = *(int *)given;
    void *context;
    attention_device *own = NULL;
    attention_error error;
    if (number % 2 == 0) cuDevicePrimaryCtxRetain(&context, number % 4 / 2), cuCtxSetCurrent(context);
    for (int i = 0; i < 200; i++) {
        attention_call *call = &calls[(i + number) % 2];
        attention_target target;
        size_t bytes = 0;
        attention_call mine = *call;
        if (attention_target_of(shared, &target, &error)) return (void *)"target";
        if (attention_choose(call, &target, NULL, &bytes, &error)) return (void *)"choose";
        if (bytes != needs[(i + number) % 2]) return (void *)"another workspace";
        if (attention_launch(shared, i % 3 ? call : &mine, 4096, bytes, NULL, &error))
            return puts(error.text), (void *)"launch";
        mine.num_heads = 3;
        if (attention_launch(shared, &mine, 4096, bytes, NULL, &error) != ATTENTION_INVALID) return (void *)"taken";
        if (strcmp(error.text, "forward: num_heads must be a multiple of num_heads_key")) return (void *)"another text";
        if (number % 4 == 0 && i % 50 == 0) {
            if (attention_open(&own, NULL, 0, &error)) { puts(error.text); return (void *)"open"; }
            attention_close(own);
        }
    }
    return NULL;
}
int main(void) {
    pthread_t threads[8];
    int numbers[8], bad = 0;
    void *context, *says;
    attention_device *device;
    attention_error error;
    attention_target target;
    fake_driver_without_memory(1);
    if (cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) return 2;
    if (fread(calls, sizeof *calls, 2, stdin) != 2) return 2;
    if (attention_open(&device, NULL, 0, &error)) return puts(error.text), 3;
    shared = device;
    if (attention_target_of(device, &target, &error)) return 4;
    for (int i = 0; i < 2; i++)
        if (attention_choose(&calls[i], &target, NULL, &needs[i], &error)) return puts(error.text), 5;
    for (int i = 0; i < 8; i++) numbers[i] = i, pthread_create(&threads[i], NULL, work, &numbers[i]);
    for (int i = 0; i < 8; i++) {
        pthread_join(threads[i], &says);
        if (says) bad++, puts((const char *)says);
    }
    attention_close(device);
    return bad;
}
"""
OPENS = r"""
#include "attention.h"
#include <stdio.h>
int main(void) {
    attention_device *device = (attention_device *)&device;
    attention_error error;
    int status = attention_open(&device, NULL, 0, &error);
    printf("%d %d %d %s\n", status, device == NULL, (int)error.driver_code, error.text);
    return 0;
}
"""
CONSUMER = r"""
#include <attention.h>
#include <stdio.h>
int main(void) {
    attention_target target = {9, 0, 132, 232448};
    attention_call call;
    attention_error error;
    const char *symbol = "";
    size_t bytes = 0;
    ATTENTION_CALL_INIT(&call);
    call.dtype = ATTENTION_BF16;
    call.head_dim = call.head_dim_value = 128;
    call.batch = 64, call.num_heads = 32, call.num_heads_key = 8, call.num_queries = 1, call.num_keys = 8192;
    call.scale = 0.088;
    if (attention_packed(&call, &error)) return puts(error.text), 1;
    if (attention_choose(&call, &target, &symbol, &bytes, &error)) return puts(error.text), 1;
    printf("%s\n", symbol);
    return 0;
}
"""
CHOSEN = "fwd_decode_bf16_d128_full_grouped_16x128"


def problems() -> tuple[AnyProblem, ...]:
    cases = (*CASES, *((case, ("forward",)) for case in (*PAGED, *CODES)))
    found = (spec.parse(case).problem(direction) for case, directions in cases for direction in directions)
    return *found, *map(row_spec.parse, (*ROWS, *MORE_ROWS))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    fake_driver.need_compiler("the library")
    return exported(tmp_path_factory.mktemp("builds") / "made", problems(), "sm_86,sm_90a")


@pytest.fixture(scope="module")
def compiled_object(bundle: Bundle) -> Path:
    """attention.o, for programs that are linked with it."""
    made = bundle.path.parent / "attention.o"
    build([compiler("c"), "-std=c11", "-fPIC", "-c", str(bundle.path / "attention.c"), "-o", str(made)])
    return made


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, capture_output=True, check=False, **options)


def with_driver(folder: Path | None = None) -> dict[str, str]:
    """The environment in which libcuda.so.1 is the fake driver, or a file of another folder."""
    place = str(folder or fake_driver.library().parent)
    return {**os.environ, "LD_LIBRARY_PATH": place, "ASAN_OPTIONS": "detect_leaks=0"}


@functools.cache
def has_sanitizer(names: str) -> bool:
    command = [compiler("c"), f"-fsanitize={names}", "-x", "c", "-", "-o", os.devnull]
    return run(command, input=b"int main(void) { return 0; }").returncode == 0


def program(bundle: Bundle, text: str, made: Path, *options: str, name: str = "gcc") -> Path:
    """Compiles the library with a program."""
    made.with_suffix(".c").write_text(text)
    files = (str(made.with_suffix(".c")), str(bundle.path / "attention.c"))
    build([name, "-std=c11", *options, "-I", str(bundle.path), *files, "-o", str(made), "-ldl", "-lpthread"])
    return made


# Compilers


@pytest.mark.parametrize("standard", ["c11", "c17", "c++11", "c++17", "c++20"])
@pytest.mark.parametrize("name", COMPILERS)
def test_compiles_without_a_warning(bundle: Bundle, name: str, standard: str) -> None:
    """With no CUDA header."""
    language = "c++" if "+" in standard else "c"
    driver = {"gcc": "g++", "clang": "clang++"}[name] if language == "c++" else name
    build([driver, f"-std={standard}", *STRICT, "-fsyntax-only", "-x", language, str(bundle.path / "attention.c")])


@pytest.mark.parametrize("word", ROWS)
def test_a_library_without_most_rules_compiles_without_a_warning(tmp_path: Path, word: str) -> None:
    """Its functions may be unused. -Dinline= makes any compiler warn of them as clang does."""
    made = export_library(tmp_path / "made", [row_spec.parse(word)], ["sm_90"], kernels=artifact)
    for options in ((), ("-Dinline=",)):
        build([compiler("c"), "-std=c11", *STRICT, *options, "-c", str(made.path / "attention.c"), "-o", os.devnull])


@pytest.mark.parametrize("standard", ["c11", "c++17"])
@pytest.mark.parametrize("name", COMPILERS)
def test_shows_the_public_names(bundle: Bundle, tmp_path: Path, name: str, standard: str) -> None:
    """As C with the warnings of an optimiser; the names are the same whether or not the compiler hides names."""
    language = "c++" if "+" in standard else "c"
    driver = {"gcc": "g++", "clang": "clang++"}[name] if language == "c++" else name
    made = tmp_path / "libattention.so"
    source = str(bundle.path / "attention.c")
    optimised = ["-O1"] if language == "c" else []
    command = [driver, f"-std={standard}", *STRICT, *optimised, "-fPIC", "-shared", "-x", language, source]
    build([*command, "-x", "none", "-o", str(made), "-ldl", "-lpthread"])
    listed = run(["nm", "-D", "--defined-only", str(made)]).stdout.decode().split("\n")
    assert sorted(line.split()[-1] for line in listed if line) == sorted(f"attention_{each}" for each in PUBLIC)
    needed = run(["readelf", "-d", str(made)]).stdout.decode()
    assert "libcuda" not in needed


@pytest.mark.parametrize("language", ["c", "c++"])
def test_the_header_stands_alone(bundle: Bundle, tmp_path: Path, language: str) -> None:
    """Included twice, with the warnings of a strict program, and with hidden names if the program wants that."""
    source = tmp_path / "includes.c"
    source.write_text('#define ATTENTION_API\n#include "attention.h"\n#include "attention.h"\nint unused;\n')
    standard = {"c": "-std=c11", "c++": "-std=c++11"}[language]
    build([compiler(language), standard, *STRICT, "-fsyntax-only", "-I", str(bundle.path), "-x", language, str(source)])


def test_a_name_of_one_s_own(tmp_path: Path) -> None:
    """Two libraries of different names in one program."""
    made = []
    for name in ("prefill", "decode_step"):
        case = {"prefill": CASES[0][0], "decode_step": CASES[1][0]}[name]
        folder = tmp_path / name
        found = export_library(folder, [spec.parse(case).problem("forward")], ["sm_90a"], name=name, kernels=artifact)
        text = (found.path / f"{name}.c").read_text() + (found.path / f"{name}.h").read_text()
        assert "attention_" not in text.replace(name, "")
        made.append(str(found.path / f"{name}.c"))
    source = tmp_path / "main.c"
    source.write_text('#include "prefill/prefill.h"\n#include "decode_step/decode_step.h"\nint main(void) { return '
                      "(int)(prefill_abi() + decode_step_abi()); }\n")  # fmt: skip
    build([compiler("c"), "-std=c11", *STRICT, str(source), *made, "-o", str(tmp_path / "main"), "-ldl", "-lpthread"])
    assert run([str(tmp_path / "main")]).returncode == 2


# Sanitizers


def fuzzed(problems: tuple[AnyProblem, ...]) -> list[bytes]:
    """Calls: those of the problems; each field with every extreme value; several fields; and any bytes."""
    draw = random.Random(0)
    found = []
    places = [(field.name, 0, FORMATS[field.kind]) for field in interface.CALL if field.kind in FORMATS]
    for field in interface.CALL:
        inner = {"array": interface.ARRAY, "bias": interface.BIAS}.get(field.kind, ())
        offset = 0
        for part in inner:
            places.append((field.name, offset, FORMATS[part.kind]))
            offset += 8
    positions = [
        (getattr(Call, name).offset + offset, kind) for name, offset, kind in places if name not in ("bytes", "abi")
    ]

    def value_of(kind: str) -> bytes:
        if kind == "<d":
            return struct.pack(kind, draw.choice(FACTORS))
        number = draw.choice((draw.choice(EXTREMES), draw.randint(0, 40), draw.randint(0, 4)))
        size = struct.calcsize(kind)
        return (number % 2 ** (8 * size)).to_bytes(size, "little")

    for problem in problems:
        call = Call(
            bytes=ctypes.sizeof(Call), abi=1, bottom_right=1, grad_output_column=1, window_right=-1, grad_bias_axes=15
        )
        fill = filled if isinstance(problem, Problem) else filled_rows
        exact = bytes(fill(call, problem, first_address=0x1000))  # type: ignore[arg-type]  # each its own problems
        found.append(exact)
        for position, kind in positions:
            for _ in range(3):
                changed = value_of(kind)
                found.append(exact[:position] + changed + exact[position + len(changed) :])
        for _ in range(150):
            several = bytearray(exact)
            for position, kind in draw.sample(positions, draw.randint(2, 12)):
                changed = value_of(kind)
                several[position : position + len(changed)] = changed
            found.append(bytes(several))
    found += [found[0][:8] + draw.randbytes(len(found[0]) - 8) for _ in range(200)]
    return found


@pytest.mark.slow
def test_any_call_is_refused_or_launched(tmp_path: Path) -> None:
    """With the sanitizers of undefined behaviour and of addresses: no arithmetic overflows, no read is outside."""
    names = "undefined,float-cast-overflow,address"
    if not has_sanitizer(names):
        pytest.skip("the C compiler has no sanitizers")
    masked = (with_blocks(spec.parse(RANGES).problem(direction)) for direction in DIRECTIONS)
    known = (*problems(), spec.parse(LATENT_CODES).problem("forward"), *masked)
    bundle = exported(tmp_path / "made", known, "sm_90a")
    text = PROGRAM.replace("int main(", f"{DECLARED}\nint main(").replace(
        "    if (attention_open",
        "    void *context; fake_driver_without_memory(1);\n"
        "    if (cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) return 4;\n    if (attention_open",
    )
    source = tmp_path / "program.c"
    source.write_text(text)
    options = ("-std=c11", f"-fsanitize={names}", "-fno-sanitize-recover=all", *STRICT, "-I", str(bundle.path))
    files = (str(source), str(bundle.path / "attention.c"), str(fake_driver.library()))
    made = tmp_path / "program"
    build([compiler("c"), *options, *files, "-o", str(made), "-ldl", "-lpthread"])
    calls = fuzzed(known)
    done = run([str(made), str(ctypes.sizeof(Call))], input=b"".join(calls), env=with_driver())
    assert (done.stderr.decode(), done.returncode) == ("", 0), done.stdout[-300:]
    rows = [tuple(map(int, line.split())) for line in done.stdout.decode().splitlines()]
    assert len(rows) == len(calls)
    words = [word for word, _ in interface.STATUSES]
    for call, (chosen, workspace, launched, _, again, _) in zip(calls, rows, strict=True):
        if words[chosen] == "OK":
            assert workspace < 2**52, call
            assert words[launched] in ("OK", "INVALID"), "INVALID: an address is 0"
        else:
            assert workspace == 7, "a refused choice leaves it"
            assert launched == chosen
        assert words[again] in ("OK", "INVALID", "NO_KERNEL", "WRONG_ABI")
    count = {word: sum(words[row[0]] == word for row in rows) for word in words}
    assert count["OK"] > len(rows) // 20
    assert count["INVALID"] > len(rows) // 5
    assert count["NO_KERNEL"] > 20
    assert sum(row[2] == 0 for row in rows) > len(rows) // 30


def test_threads_share_a_device(bundle: Bundle, tmp_path: Path) -> None:
    """Eight threads, half of them without a context or with that of the other device, under the thread sanitizer."""
    options = ("-fsanitize=thread",) if has_sanitizer("thread") else ()
    made = program(bundle, THREADS, tmp_path / "threads", *options, str(fake_driver.library()))
    call = Call(bytes=ctypes.sizeof(Call), abi=1)
    found = []
    for case in (CASES[0][0], CASES[1][0]):
        memory = Call.from_buffer_copy(call)
        found.append(bytes(filled(memory, spec.parse(case).problem("forward"), first_address=0x1000)))
    done = run([str(made)], input=b"".join(found), env=with_driver())
    assert (done.stdout.decode(), done.stderr.decode(), done.returncode) == ("", "", 0)


# Drivers


@pytest.fixture(scope="module")
def opens(bundle: Bundle, compiled_object: Path) -> Path:
    """A program that opens the library."""
    made = bundle.path.parent / "opens"
    made.with_suffix(".c").write_text(OPENS)
    files = (str(made.with_suffix(".c")), str(compiled_object))
    build([compiler("c"), "-std=c11", "-I", str(bundle.path), *files, "-o", str(made), "-ldl", "-lpthread"])
    return made


def opened(opens: Path, environment: dict[str, str]) -> list[str]:
    """What the program prints: status, whether the device is NULL, CUresult, text."""
    done = run([str(opens)], env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().strip().split(" ", 3)


NO_DRIVER = str([word for word, _ in interface.STATUSES].index("NO_DRIVER"))


def test_without_a_driver_there_is_a_status(opens: Path, tmp_path: Path) -> None:
    """A file of the driver's name that is none stands for a machine without one, also where there is a driver."""
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "libcuda.so.1").write_text("no library")
    status, is_null, code, text = opened(opens, with_driver(tmp_path / "none"))
    assert (status, is_null, code) == (NO_DRIVER, "1", "0")
    assert text.startswith("no NVIDIA driver: ")
    assert "libcuda.so.1" in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("int nothing;", "the driver is older than CUDA 12.4; update it"),
        (
            "int cuGetProcAddress_v2(const char *n, void **f, int v, unsigned long long g, int *s) "
            "{ (void)n, (void)v, (void)g; *f = 0; *s = 1; return 500; }",
            "the driver has no cuGetErrorName of CUDA 12.4; update it",
        ),
    ],
)
def test_an_old_driver_is_as_none(opens: Path, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old.c").write_text(text)
    made = str(tmp_path / "old" / "libcuda.so.1")
    build([compiler("c"), "-shared", "-fPIC", str(tmp_path / "old.c"), "-o", made, "-Wl,-soname,libcuda.so.1"])
    status, is_null, _, found = opened(opens, with_driver(tmp_path / "old"))
    assert (status, is_null, found) == (NO_DRIVER, "1", f"no NVIDIA driver: {words}")


def test_without_a_context_the_text_says_what_to_call(opens: Path) -> None:
    status, is_null, _, text = opened(opens, with_driver())
    assert (status, is_null) == ("1", "1")
    assert text.startswith("no context is current in this thread; call cuInit")


# Machine code from memory


def test_images_from_memory(
    driver_log: fake_driver.FakeDriver, bundle: Bundle, compiled_object: Path, tmp_path: Path
) -> None:
    """A library that was compiled without machine code loads that of the file beside it, and no other."""
    made = compiled(bundle, tmp_path / "attention.so", "-DATTENTION_WITHOUT_IMAGES")
    images = (bundle.path / "attention.images").read_bytes()
    assert len(images) == sum(-(-len(each.cubin) // 64) * 64 for each in bundle.artifacts)
    assert images[:200] in compiled_object.read_bytes()
    assert images[:200] not in made.read_bytes()
    host = LibraryHost(made)
    aligned = ctypes.create_string_buffer(images + b"\0" * 8, len(images) + 8)
    found, error = ctypes.c_void_p(), ctypes.byref(host.error)
    with device(0).current():
        for pointer, size, words in (
            (None, 0, "images is NULL, and this library was compiled without machine code; pass the contents of "
                      "attention.images"),
            (ctypes.addressof(aligned) + 1, len(images), "images: must be 8-byte aligned; copy them"),
            (ctypes.addressof(aligned), len(images) - 64, "bytes that are not the contents of attention.images"),
            (ctypes.addressof(aligned) + 8, len(images), "bytes that are not the contents of attention.images"),
        ):  # fmt: skip
            assert host.open(ctypes.byref(found), ctypes.c_void_p(pointer), ctypes.c_size_t(size), error) == 1
            assert words in host.text
            assert found.value is None
        assert driver_log.of("cuLibraryLoadData") == []
        assert host.open(ctypes.byref(found), aligned, ctypes.c_size_t(len(images)), error) == 0, host.text
        loaded = driver_log.of("cuLibraryLoadData")
        host.close(found)
    assert 0 < len(loaded) < len(bundle.artifacts), "those of the device"
    assert len(driver_log.of("cuLibraryUnload")) == len(loaded)


def test_cubins_with_other_parameters_are_refused(driver_log: fake_driver.FakeDriver, tmp_path: Path) -> None:
    """As the driver reads them: what is loaded is unloaded, and nothing may be launched."""

    def foreign(build: Build) -> Artifact:
        sizes = tuple(size for _, size in entry_parameters.parameters(build, "main"))
        return artifact(build, driver_sizes=(*sizes[:-1], sizes[-1] + 8))

    made = export_library(tmp_path / "made", [row_spec.parse(ROWS[0])], ["sm_90"], kernels=foreign)
    host = LibraryHost(compiled(made, tmp_path / "attention.so"))
    with device(0).current():
        status, opened = host.opened()
    assert (status, opened.value) == (1, None)
    assert host.text == "a kernel's parameters are not those of this header; copy the whole folder of the export"
    assert len(driver_log.of("cuLibraryUnload")) == len(driver_log.of("cuLibraryLoadData")) == 1


# CMake, pkg-config, Cargo


def expect_chosen(made: Path, **options: Any) -> None:
    done = run([str(made)], **options)
    assert (done.stdout.decode().strip(), done.returncode) == (CHOSEN, 0), done.stderr


@pytest.mark.parametrize("shared", ["OFF", "ON"])
def test_cmake_package_and_pkg_config(bundle: Bundle, tmp_path: Path, shared: str) -> None:
    """Built, and installed where only the last command says; a project finds the package, a compiler the library."""
    for tool in ("cmake", "pkg-config", "make"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool}")
    installed = tmp_path / "installed"
    build(["cmake", "-S", str(bundle.path), "-B", str(tmp_path / "build"), f"-DBUILD_SHARED_LIBS={shared}",
           "-DCMAKE_INSTALL_LIBDIR=lib"])  # fmt: skip
    build(["cmake", "--build", str(tmp_path / "build")])
    build(["cmake", "--install", str(tmp_path / "build"), "--prefix", str(installed)])
    user = tmp_path / "user"
    user.mkdir()
    (user / "main.cpp").write_text(CONSUMER)
    (user / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\nproject(user LANGUAGES C CXX)\n"
        "find_package(attention 0.1 REQUIRED)\nadd_executable(user main.cpp)\n"
        "target_link_libraries(user PRIVATE attention::attention)\n"
    )
    build(["cmake", "-S", str(user), "-B", str(user / "build"), f"-DCMAKE_PREFIX_PATH={installed}"])
    build(["cmake", "--build", str(user / "build")])
    expect_chosen(user / "build" / "user")
    environment = {**os.environ, "PKG_CONFIG_PATH": str(installed / "lib" / "pkgconfig")}
    kind = ["--static"] if shared == "OFF" else []
    flags = run(["pkg-config", *kind, "--cflags", "--libs", "attention"], env=environment).stdout.decode().split()
    (tmp_path / "main.c").write_text(CONSUMER)
    build([compiler("c"), "-std=c11", str(tmp_path / "main.c"), *flags, "-o", str(tmp_path / "main")])
    expect_chosen(tmp_path / "main", env={**os.environ, "LD_LIBRARY_PATH": str(installed / "lib")})


RUST = r"""
use attention_sys::*;
use std::ffi::CStr;
fn main() {
    let mut call = Call { dtype: BF16, head_dim: 128, head_dim_value: 128, batch: 64, num_heads: 32, num_heads_key: 8,
                          num_queries: 1, num_keys: 8192, scale: 0.088, ..Call::default() };
    let target = Target { major: 9, minor: 0, num_sms: 132, shared_memory: 232448 };
    let (mut error, mut symbol, mut bytes) = (Error::default(), std::ptr::null(), 0usize);
    unsafe {
        assert_eq!(attention_abi(), ABI);
        assert_eq!(attention_packed(&mut call, &mut error), OK, "{}", error.text());
        assert_eq!(attention_choose(&call, &target, &mut symbol, &mut bytes, &mut error), OK, "{}", error.text());
        println!("{}", CStr::from_ptr(symbol).to_str().unwrap());
        call.num_heads = 5;
        assert_eq!(attention_choose(&call, &target, &mut symbol, &mut bytes, &mut error), INVALID);
        assert_eq!(error.text(), "forward: num_heads must be a multiple of num_heads_key");
    }
    assert_eq!(std::mem::size_of::<Call>(), BYTES);
    error.text.fill(b'x' as _); // without an end, as the library never writes it
    assert_eq!(error.text().len(), error.text.len());
}
"""


def test_rust_crate_builds_the_same_files(bundle: Bundle, tmp_path: Path) -> None:
    """A program in Rust that depends on the crate, without network and without other crates."""
    if shutil.which("cargo") is None:
        pytest.skip("no cargo")
    (tmp_path / "src").mkdir()
    crate = bundle.path / "rust"
    (tmp_path / "Cargo.toml").write_text(
        '[package]\nname = "user"\nversion = "0.1.0"\nedition = "2021"\n[dependencies]\n'
        f'attention-sys = {{ path = "{crate}" }}\n'
    )
    (tmp_path / "src" / "main.rs").write_text(RUST.replace("BYTES", str(ctypes.sizeof(Call))))
    environment = {**os.environ, "CARGO_TARGET_DIR": str(tmp_path / "target"), "RUSTFLAGS": "-D warnings"}
    environment["CC"] = "env cc -O0"  # several words, as of a compiler cache
    done = run(["cargo", "build", "--offline", "--quiet"], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr.decode()
    expect_chosen(tmp_path / "target" / "debug" / "user")


# The example


def test_the_example_finds_out_kernels_that_do_nothing(bundle: Bundle, compiled_object: Path, tmp_path: Path) -> None:
    """It builds as its page says, launches by graph and from threads, and sees that nothing is computed."""
    source = str(ROOT / "examples" / "c_library" / "main.c")
    files = (source, str(compiled_object), str(fake_driver.library()))
    made = tmp_path / "c_library"
    folders = ("-I", str(bundle.path), "-isystem", cuda_headers())
    build([compiler("c"), "-std=c11", *STRICT[:4], *folders, *files, "-ldl", "-lpthread", "-lm", "-o", str(made)])
    done = run([str(made), "1", "70", "300", "4", "2"], env=with_driver())
    assert done.returncode == 1, done.stderr
    lines = done.stdout.decode().splitlines()
    assert [line.split()[1].rstrip(",") for line in lines[:3]] == [
        "fwd_sm90_bf16_d128_causal_grouped_128x128", "bwd_sm90_bf16_d128_causal_grouped_query_heads_64x128",
        "fwd_decode_bf16_d128_full_grouped_16x128",
    ]  # fmt: skip
    assert [line.rpartition(" ")[2] for line in lines[3:-1]] == ["WRONG"] * 7
    assert lines[-1] == "FAILED"
    assert run([str(made), "1"], env=with_driver()).stderr.startswith(b"usage: c_library")


assert sys.byteorder == "little", "calls are written as bytes of this machine"


def test_the_call_that_the_page_shows_compiles(bundle: Bundle, tmp_path: Path) -> None:
    """Inside a function that has what the pages say a caller has; and the exports of the pages have its problems."""
    page = "".join((ROOT / "docs" / name).read_text() for name in ("c_library.md", "c_library_calls.md"))
    block = "".join(re.findall(r"```c\n(.*?)```", page, re.DOTALL))
    names = (
        *("query", "key", "value", "output", "logsumexp", "workspace", "page_table", "seqused_k"),
        *("key_pool", "value_pool", "slots", "key_scale", "value_scale", "cache", "codes", "scales", "rope"),
        *("output_of_prefix", "logsumexp_of_prefix", "output_of_rest", "logsumexp_of_rest"),
        *("key_start", "key_end"),
    )
    addresses = ", ".join(f"uint64_t {name}" for name in names)
    source = tmp_path / "call.c"
    source.write_text(
        '#include "attention.h"\n#include <stdio.h>\n#include <stdlib.h>\n'
        f"void a_call(void *stream, {addresses}) {{\n{block}}}\n"
    )
    options = ("-std=c11", *STRICT[:4], "-fsyntax-only", "-I", str(bundle.path))
    build([compiler("c"), *options, str(source)])
    for word, _ in interface.STATUSES:
        assert f"`ATTENTION_{word}`" in page
    comment = (ROOT / "examples" / "c_library" / "main.c").read_text().split("#define")[0]
    for words in (CASES[0][0], CASES[1][0], "-l:libcuda.so.1 -ldl -lpthread -lm -o c_library", "./c_library"):
        assert words in page
        assert words in comment
