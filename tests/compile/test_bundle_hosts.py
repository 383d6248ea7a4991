"""Tests of bundles' hosts: the C header and a reader of the manifest ask of the driver what `bind` asks."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from host import Host

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.bundle import header
from cutlass_py_attn.bundle.files import Bundle, export_bundle
from cutlass_py_attn.bundle.manifest import Target, manifest
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem import spec
from cutlass_py_attn.problem.masks import CausalBottomRight, Window
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import DIRECTIONS, Tensor
from cutlass_py_attn.runtime.driver import device
from tests.support import fake_driver, fakes
from tests.support.bundle_hosts import (
    ROOT,
    STREAM,
    WORKSPACE,
    HeaderHost,
    RustHost,
    bound_calls,
    cuda_headers,
    exported,
    header_calls,
    manifest_calls,
    numbers_of,
)
from tests.support.c_compiler import WARNINGS, build, compiler
from tests.support.fake_driver import FakeDriver

MANY = "_causal_window64_biassum_dropout0.1_softcap30_alibi_sinks"
# (exported case, a case of other sizes that the same kernels serve); test_front_ends has launches of more of them
CASES = {
    "Hopper": ("bf16_d128_s512_b2_h4_causal", "bf16_d128_s300_b3_h7_causal"),
    "every feature": (f"bf16_d128_s1000_b2_h4k2{MANY}", f"bf16_d128_s264_b5_h6k3{MANY}"),
    "lengths": ("f32_d64_s700_t5000_h2_full_deterministic", "f32_d64_s700_t1900_h2_full_deterministic"),
}


def pair(name: str, direction: str) -> tuple[Problem, Problem]:
    """The exported problem and the other one."""
    first, second = (spec.parse(case).problem(direction) for case in CASES[name])
    return first, second


def expect_one_launch(
    log: FakeDriver, tmp_path: Path, problems: tuple[Problem, Problem], arch: str = "sm_90a"
) -> Bundle:
    """All hosts do the same, for the exported problem and for the other one; gives the bundle."""
    bundle = exported(tmp_path / "bundle", problems[:1], arch)
    host = HeaderHost(tmp_path, bundle, problems[0].direction)
    for problem in problems:
        wanted = bound_calls(log, bundle, problem)
        assert len(wanted[0]) > 0
        assert header_calls(log, host, bundle, problem) == wanted
        assert manifest_calls(log, bundle, problem) == wanted
    return bundle


def test_strides_edges_and_scale_are_free(driver_log: FakeDriver, tmp_path: Path) -> None:
    first, _ = pair("Hopper", "forward")
    batch, rows, heads, columns = first.query.shape
    heads_first = Tensor(first.query.shape, (heads * rows * columns, columns, rows * columns, 1), first.dtype)
    packed = Tensor(first.key.shape, (3 * rows * heads * columns, 3 * heads * columns, columns, 1), first.dtype)
    second = first.replace(query=heads_first, key=packed, value=packed, mask=CausalBottomRight(), scale=0.3)
    assert batch > 1
    expect_one_launch(driver_log, tmp_path, (first, second.replace(mask=Window(None, 3))))


def test_other_architecture(driver_log: FakeDriver, tmp_path: Path) -> None:
    """The first target that the device runs: neither the one for another GPU nor the one behind it."""
    problems = pair("Hopper", "forward")
    bundle = expect_one_launch(driver_log, tmp_path, problems, "sm_80,sm_90,sm_90a,sm_86")
    archs = [target["arch"] for target in bundle.manifest["problems"][0]["targets"]]
    assert archs == ["sm_90a", "sm_90", "sm_86", "sm_80"]
    host = HeaderHost(tmp_path, bundle, "forward")
    with device(0).current():
        assert host.open(bundle.path) == 0
    assert [call.text for call in driver_log.of("cuLibraryGetKernel")][-1] == "fwd_sm90_bf16_d128_causal_128x128_0"


@pytest.fixture(scope="module")
def rust(tmp_path_factory: pytest.TempPathFactory) -> RustHost:
    return RustHost(tmp_path_factory.mktemp("rust"))


def test_rust_host_refuses_in_the_manifest_s_words(driver_log: FakeDriver, rust: RustHost, tmp_path: Path) -> None:
    problem, _ = pair("Hopper", "backward")
    bundle = exported(tmp_path / "bundle", (problem,))
    given = numbers_of(bundle, problem)
    with device(0).current():
        assert rust.launch(bundle.path, "forward", given, 0)[1] == f"{bundle.path} has no forward"
        driver_log.clear()
        assert rust.launch(bundle.path, "backward", given, 0) == (bundle.plans("backward")[0].workspace.bytes, "")
        given.inputs["num_heads"] = 5
        assert rust.launch(bundle.path, "backward", given, WORKSPACE)[1] == WRONG["num_heads"][1].split(": ")[1]
    assert driver_log.of("cuLaunchKernelEx") == []


def test_rust_host_refuses_what_the_other_example_refuses(
    driver_log: FakeDriver, rust: RustHost, tmp_path: Path
) -> None:
    """Numbers of any size; the library is built with checks of overflow."""
    problem, _ = pair("lengths", "backward")
    bundle = exported(tmp_path / "bundle", (problem,))
    given = numbers_of(bundle, problem)
    answers = {}
    with device(0).current():
        reader = Host(bundle.path, "backward", ctypes.CDLL(str(fake_driver.library())))
        for name in given.inputs:
            for value in (-(2**63), -1, 0, 1, 2**31, 2**62, 2**63 - 1):
                changed = replace(given, inputs={**given.inputs, name: value})
                try:
                    expected = reader.workspace(reader.numbers(changed.inputs))[0]
                except ValueError:
                    expected = None
                size, error = rust.launch(bundle.path, "backward", changed, 0)
                answers[name, value] = (None if error else size, expected)
    assert [key for key, (found, expected) in answers.items() if found != expected] == []
    assert len({expected for _, expected in answers.values()}) >= 3
    assert driver_log.of("cuLaunchKernelEx") == []


def test_header_launches_dependent_kernels_early(driver_log: FakeDriver, tmp_path: Path) -> None:
    """As the plan says; the first kernel waits for the stream."""
    problem, _ = pair("Hopper", "backward")
    bundle = exported(tmp_path / "bundle", (problem,))
    host = HeaderHost(tmp_path, bundle, "backward", "c")
    header_calls(driver_log, host, bundle, problem)
    (plan,) = bundle.plans("backward")
    wanted = [launch.is_dependent for launch in plan.launches]
    assert sorted(set(wanted)) == [False, True]
    assert [call.is_dependent for call in driver_log.of("cuLaunchKernelEx")] == wanted


def test_header_is_c_too(driver_log: FakeDriver, tmp_path: Path) -> None:
    first, _ = pair("every feature", "backward")
    bundle = exported(tmp_path / "bundle", (first,))
    host = HeaderHost(tmp_path, bundle, "backward", "c")
    assert header_calls(driver_log, host, bundle, first) == bound_calls(driver_log, bundle, first)


def test_header_begins_with_the_exported_numbers(driver_log: FakeDriver, tmp_path: Path) -> None:
    first, second = pair("Hopper", "backward")
    bundle = exported(tmp_path / "bundle", (first,))
    host = HeaderHost(tmp_path, bundle, "backward")
    wanted = numbers_of(bundle, first).inputs
    assert {name: host.values()[name] for name in wanted} == wanted
    wanted = numbers_of(bundle, second).inputs
    host.set({name: wanted[name] for name in ("batch", "num_queries", "num_keys", "num_heads", "num_heads_key")})
    host.contiguous()
    assert {name: host.values()[name] for name in wanted} == wanted


WRONG = {
    "batch": (0, "backward: batch must be at least 1; with none there is nothing to launch"),
    "num_heads": (5, "backward: num_heads must be num_heads_key; export a problem with grouped heads"),
    "key_row": (513, "backward: key_row must be a multiple of 8 elements"),
    "query_head": (-128, "backward: query_head must be above 0: a tensor map steps forward"),
    "window_right": (-1, "backward: window_right must be at least 0"),
    "bottom_right": (2, "backward: bottom_right must be 0 or 1"),
    "num_queries": (
        3000,
        "backward: rows of grad_query overlap: its strides must be those of an array of these sizes; set them with the "
        "sizes",
    ),
    "grad_value_row": (
        8,
        "backward: rows of grad_value overlap: its strides must be those of an array of these sizes; set them with the "
        "sizes",
    ),
    "query_row": (
        2**62,
        "backward: query_row must be at most 549755813880, as in any tensor map",
    ),
    "scale": (float("nan"), "backward: scale must be 0 or have a magnitude of at least 1e-30"),
    "value": (0x7F0000000008, "backward: value must be a device address, 16-byte aligned"),
    "grad_key": (0, "backward: grad_key must be a device address, 16-byte aligned"),
}


@pytest.fixture(scope="module")
def backward(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, HeaderHost]:
    fake_driver.need_compiler("the fake driver")
    FakeDriver()  # loads the library in which the header's functions are found
    folder = tmp_path_factory.mktemp("backward")
    bundle = exported(folder / "bundle", pair("Hopper", "backward")[:1], "sm_90a")
    return bundle, HeaderHost(folder, bundle, "backward")


@pytest.mark.parametrize("name", WRONG)
def test_header_refuses(driver_log: FakeDriver, backward: tuple[Bundle, HeaderHost], name: str) -> None:
    bundle, host = backward
    given = numbers_of(bundle, pair("Hopper", "backward")[0])
    value, words = WRONG[name]
    with device(0).current():
        assert host.open(bundle.path) == 0
        host.set({**given.inputs, **given.addresses, name: value})
        driver_log.clear()
        assert host.launch() == -1
        assert driver_log.calls == []
    assert host.error == words


def test_header_names_what_fails(driver_log: FakeDriver, backward: tuple[Bundle, HeaderHost], tmp_path: Path) -> None:
    bundle, host = backward
    given = numbers_of(bundle, pair("Hopper", "backward")[0])
    with device(0).current():
        assert host.open(tmp_path) == -1
        assert re.fullmatch(r".*bwd_sm90_bf16_d128_causal_ds_registers_64x128.cubin: cannot be read as the file of "
                            r"\d+ bytes; copy the whole folder of the export", host.error)  # fmt: skip
        host.set({**given.inputs, **given.addresses})
        host.library.close_bundle(host.bundle)
        assert host.launch() == -1
        assert host.error == "backward: nothing is loaded; call attention_open first"
        assert host.open(bundle.path) == 0
        assert host.launch(workspace=0) == -1
        assert host.error == "backward: workspace must be a device address, 16-byte aligned"
        driver_log.fail("cuTensorMapEncodeTiled", 400)
        assert host.launch() == 400
        assert host.error.startswith("cuTensorMapEncodeTiled of query: CUDA_ERROR_INVALID_HANDLE: ")
        driver_log.fail("cuLaunchKernelEx", 400)
        assert host.launch() == 400
        assert host.error.startswith("cuLaunchKernelEx of bwd_sm90_bf16_d128_causal_ds_registers_64x128_delta_1: ")
        assert len(driver_log.of("cuLaunchKernelEx")) == 1, "nothing follows a launch that failed"


def test_header_refuses_sizes_that_a_launch_cannot_count(
    driver_log: FakeDriver, backward: tuple[Bundle, HeaderHost]
) -> None:
    """Each number alone is allowed: the tiles, blocks and bytes that follow from them are too many."""
    bundle, host = backward
    given = numbers_of(bundle, pair("Hopper", "backward")[0])
    huge = {"batch": 65535, "num_queries": 2**29, "num_heads": 7, "num_heads_key": 7}
    fewer_tiles = {**huge, "batch": 200}
    with device(0).current():
        assert host.open(bundle.path) == 0
        driver_log.clear()
        for sizes, words in (
            (huge, "backward: total_tiles must be at most 2147483647; call once for each slice"),
            (fewer_tiles, "backward: grad_query_accum would have more than 2^48 bytes of the workspace; call once for "
                          "each slice"),
        ):  # fmt: skip
            host.set({**given.inputs, **given.addresses, **sizes})
            host.contiguous()
            assert (host.workspace_bytes(), host.error) == (-1, words)
            assert (host.launch(), host.error) == (-1, words)
        assert driver_log.calls == []


def test_header_refuses_a_handle_that_is_not_open(
    driver_log: FakeDriver, backward: tuple[Bundle, HeaderHost], tmp_path: Path
) -> None:
    """Zeroed, full of anything, after a failed open and after close; for a workspace as for a launch."""
    bundle, host = backward
    given = numbers_of(bundle, pair("Hopper", "backward")[0])
    host.set({**given.inputs, **given.addresses})

    def expect_refusal() -> None:
        driver_log.clear()
        assert (host.workspace_bytes(), host.launch()) == (-1, -1)
        assert host.error == "backward: nothing is loaded; call attention_open first"
        assert driver_log.calls == []

    with device(0).current():
        for byte in (0, 0xA5, 0xFF):
            ctypes.memset(host.bundle, byte, len(host.bundle))
            expect_refusal()
            host.library.close_bundle(host.bundle)
        assert host.open(tmp_path) == -1
        expect_refusal()
        assert host.open(bundle.path) == 0
        assert host.workspace_bytes() > 0
        host.library.close_bundle(host.bundle)
        expect_refusal()


def test_header_loads_and_unloads_while_a_thread_captures(
    driver_log: FakeDriver, backward: tuple[Bundle, HeaderHost]
) -> None:
    """In relaxed mode, as the package: any other call of the kind would end the capture."""
    bundle, host = backward
    library, graph = driver_log._library, ctypes.c_void_p()
    with device(0).current():
        library.cuStreamBeginCapture(ctypes.c_void_p(STREAM), 0)
        assert host.open(bundle.path) == 0, host.error
        host.library.close_bundle(host.bundle)
        assert library.cuStreamEndCapture(ctypes.c_void_p(STREAM), ctypes.byref(graph)) == 0, "still valid"


def test_header_refuses_other_kernels_of_the_same_size(driver_log: FakeDriver, tmp_path: Path) -> None:
    """As a folder has them in which two exports were mixed."""
    bundle = exported(tmp_path / "bundle", pair("Hopper", "backward")[:1])
    host = HeaderHost(tmp_path, bundle, "backward")
    cubin = bundle.path / bundle.manifest["problems"][0]["targets"][0]["cubin"]
    text = cubin.read_bytes()
    cubin.write_bytes(text[:-1] + b" ")
    with device(0).current():
        assert host.open(bundle.path) == -1
        assert f"not the file of {len(text)} bytes; copy the whole folder" in host.error
        assert driver_log.of("cuLibraryLoadData") == []
        cubin.write_bytes(text)
        assert host.open(bundle.path) == 0


HOSTILE = '*/\n#error "from elsewhere"\n/* \\\n ??/ " \u2028 \u202e'


def test_header_of_hostile_texts_compiles(driver_log: FakeDriver, tmp_path: Path) -> None:
    """Of an artifact, whose toolchain is in the header's first comment."""

    def hostile(build: Build) -> Artifact:
        return replace(fakes.artifact(build), toolchain=HOSTILE)

    problem, _ = pair("every feature", "backward")
    plan = planner.plan(problem, "sm_80")
    target = Target(problem, plan, hostile(plan.build), 108)
    files = target.artifact.files()
    text = header.render(manifest("attention", (target,), files))
    assert "from elsewhere" in text
    (tmp_path / "attention.h").write_text(text)
    for language, standard in (("c", "-std=c11"), ("c++", "-std=c++11")):
        source = tmp_path / f"includes.{'c' if language == 'c' else 'cpp'}"
        source.write_text('#include "attention.h"\n')
        folders = "-I", str(tmp_path), "-isystem", cuda_headers()
        build([compiler(language), standard, *WARNINGS, "-trigraphs", "-fsyntax-only", *folders, str(source)])


def test_header_reads_whole_files_only(driver_log: FakeDriver, tmp_path: Path) -> None:
    bundle = exported(tmp_path / "bundle", pair("Hopper", "backward")[:1])
    host = HeaderHost(tmp_path, bundle, "backward")
    cubin = bundle.path / bundle.manifest["problems"][0]["targets"][0]["cubin"]
    for text in (cubin.read_bytes()[:-1], cubin.read_bytes() + b" "):
        cubin.write_bytes(text)
        with device(0).current():
            assert host.open(bundle.path) == -1
        assert "not the file of" in host.error


def test_header_takes_portable_ptx_where_no_cubin_runs(driver_log: FakeDriver, tmp_path: Path) -> None:
    problem, _ = pair("Hopper", "forward")

    def with_ptx(build: Build) -> Artifact:
        made = fakes.artifact(build)
        return replace(made, ptx=made.cubin.decode(), cubin=b"no text\n")

    bundle = export_bundle(tmp_path / "bundle", (problem,), ("sm_80", "sm_86", "sm_100"), kernels=with_ptx)
    host = HeaderHost(tmp_path, bundle, "forward")
    given = numbers_of(bundle, problem)
    with device(0).current():
        assert host.open(bundle.path) == 0, host.error
        host.set({**given.inputs, **given.addresses})
        assert host.launch() == 0, host.error
    (loaded,) = driver_log.of("cuLibraryLoadData")
    assert loaded.text.startswith("fwd_sm80_bf16_d128_causal_128x64_0")
    (launch,) = driver_log.of("cuLaunchKernelEx")
    (plan,) = (plan for plan in bundle.plans("forward") if plan.build.arch == "sm_86")
    assert (launch.grid, launch.shared_memory) == (plan.launches[0].grid, plan.launches[0].shared_memory_bytes)


def test_header_loads_every_pass_or_none(driver_log: FakeDriver, tmp_path: Path) -> None:
    bundle = exported(tmp_path / "bundle", tuple(pair("Hopper", direction)[0] for direction in DIRECTIONS))
    host = HeaderHost(tmp_path, bundle, "backward")
    with device(0).current():
        assert host.open(bundle.path) == 0
        (bundle.path / bundle.manifest["problems"][1]["targets"][0]["cubin"]).unlink()
        driver_log.clear()
        assert host.open(bundle.path) == -1
    assert host.error.startswith(
        f"{bundle.path}/sm_90a/bwd_sm90_bf16_d128_causal_ds_registers_64x128.cubin: cannot be read"
    )
    assert [len(driver_log.of(f"cuLibrary{what}")) for what in ("LoadData", "Unload")] == [1, 1]


def test_header_says_what_it_has_where_nothing_runs(driver_log: FakeDriver, tmp_path: Path) -> None:
    bundle = exported(tmp_path / "bundle", pair("Hopper", "forward")[:1], "sm_100,sm_120")
    host = HeaderHost(tmp_path, bundle, "forward")
    with device(0).current():
        assert host.open(bundle.path) == -1
    assert host.error == (
        "no kernel runs on compute capability 9.0 with 232448 bytes of shared memory a block; export for it; "
        "this bundle has sm_120 sm_100"
    )
    assert driver_log.of("cuLibraryLoadData") == []


def test_the_call_that_the_page_shows_compiles(tmp_path: Path) -> None:
    """Inside a function that has what the page says a caller has."""
    (block,) = re.findall(r"```c\n(.*?)```", (ROOT / "docs" / "bundles.md").read_text(), re.DOTALL)
    addresses = ", ".join(
        f"CUdeviceptr {name}" for name in ("query", "key", "value", "output", "logsumexp", "workspace")
    )
    source = tmp_path / "call.c"
    source.write_text(
        '#include "attention.h"\n#include <stdlib.h>\n'
        f"void a_call(CUdevice device, CUstream stream, {addresses}) {{\n{block}}}\n"
    )
    bundle = exported(tmp_path / "bundle", pair("Hopper", "forward")[:1])
    folders = "-I", str(bundle.path), "-I", cuda_headers()
    build([compiler("c"), "-std=c11", *WARNINGS, "-fsyntax-only", *folders, str(source)])


# The example


def example(tmp_path: Path, bundle: Bundle) -> Path:
    """The C++ host, linked to the fake driver."""
    made = tmp_path / "cpp_host"
    source = ROOT / "examples" / "cpp_host" / "main.cpp"
    folders = "-I", str(bundle.path), "-I", cuda_headers()
    build(
        [
            compiler("c++"),
            "-std=c++17",
            "-O2",
            *WARNINGS,
            *folders,
            str(source),
            str(fake_driver.library()),
            "-o",
            str(made),
        ]
    )
    return made


def test_cpp_host_finds_out_kernels_that_do_nothing(driver_log: FakeDriver, tmp_path: Path) -> None:
    bundle = exported(tmp_path / "bundle", tuple(pair("Hopper", direction)[0] for direction in DIRECTIONS))
    program = example(tmp_path, bundle)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(fake_driver.library().parent)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(program), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    done = run(str(bundle.path), "2", "70", "50", "3")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0] == "batch 2, 70 queries, 50 keys, 3 heads of 128, sm_90a for compute capability 9.0"
    assert [line.split()[0] for line in lines[1:]] == ["output", "grad_query", "grad_key", "grad_value", "FAILED"]
    assert all(line.endswith("WRONG") for line in lines[1:-1])
    assert run().stderr.startswith("usage: cpp_host BUNDLE")
    done = run(str(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "cannot be read as the file" in done.stderr


def test_cpp_host_needs_the_driver_alone(driver_log: FakeDriver, tmp_path: Path) -> None:
    """And no CUDA runtime."""
    bundle = exported(tmp_path / "bundle", tuple(pair("Hopper", direction)[0] for direction in DIRECTIONS))
    program = example(tmp_path, bundle)
    text = program.read_bytes()
    assert b"libcuda.so.1" in text
    assert b"libcudart" not in text
