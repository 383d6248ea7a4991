"""compiler.py: sound toys give artifacts, faulty ones are refused with numbers, nothing outside matters."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cutlass_py_attn import compiler as compiling
from cutlass_py_attn import kernels
from cutlass_py_attn.artifact import Parameter
from cutlass_py_attn.cubin import read
from cutlass_py_attn.errors import CompileError, NotSupported
from cutlass_py_attn.plan import Build, Launch, Plan, Workspace
from cutlass_py_attn.planner import plan_backward
from cutlass_py_attn.problem import Problem, Shape, Tensor

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NONE = (0, 0)
TOY = Build(
    kind="room", family="generic", arch="sm_90a", dtype="bfloat16", head_dim=64, head_dim_value=64,
    mask="full", tile_m=64, tile_n=64, warps=4, query_stages=1, grad_output_stages=0, scores=NONE,
    grad_v=NONE, grad_k=NONE, grad_q=NONE, deterministic=False, register_usage_level=5,
    min_blocks_per_sm=0, room="toy", shared_memory=(),
)  # fmt: skip

# What a subprocess runs: compile or fetch the toy, print its hashes.
PROGRAM = """
import hashlib, json, sys
sys.path[:0] = [{root!r}, {here!r}]
import toy_kernel
from cutlass_py_attn import compiler as compiling, kernels
from cutlass_py_attn.plan import build_from
kernels.trace = toy_kernel.trace
build = build_from(json.loads({build!r}))
made = {call}
print(hashlib.sha256(made.ptx.encode()).hexdigest(), hashlib.sha256(made.cubin).hexdigest(), made.toolchain)
"""


def start(folder: Path, call: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """The program in a process of its own, started in `folder`."""
    build = json.dumps(dataclasses.asdict(TOY))
    program = PROGRAM.format(root=str(ROOT), here=str(HERE), build=build, call=call)
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return output


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    toy_kernel = pytest.importorskip("toy_kernel")
    monkeypatch.setattr(kernels, "trace", toy_kernel.trace)


@pytest.mark.parametrize(("arch", "sm"), [("sm_80", 80), ("sm_89", 89), ("sm_90a", 90), ("sm_120", 120)])
def test_a_sound_kernel_gives_an_artifact(arch: str, sm: int) -> None:
    made = compiling.compile(replace(TOY, arch=arch))
    assert made.build.arch == arch
    assert f".target {arch}\n" in made.ptx
    assert read(made.cubin).sm == sm
    assert made.main.threads == TOY.threads
    assert (made.main.frame_bytes, made.main.spill_bytes) == (0, 0)
    assert 0 < made.registers < 64
    assert made.parameters == (Parameter("params", 0, 32),)
    assert made.toolchain.startswith("nvidia-cutlass-dsl ")


def test_a_plan_compiles_like_its_build() -> None:
    launch = Launch(f"{TOY.symbol}_0", (1, 1, 1), (TOY.threads, 1, 1), 0)
    plan = Plan(TOY, (launch,), Workspace(), (), "a toy")
    assert compiling.compile(plan) == compiling.compile(TOY)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("local_array", "stack frame = 1040 bytes a thread: 0 allowed"),
        ("spills", "bytes a thread: 0 allowed"),
        ("static_memory", "static shared memory = 5120 bytes a block: 1024 allowed"),
        ("other_block", "block = (256, 1, 1): must be fixed to (128, 1, 1)"),
        ("other_symbol", "entries = elsewhere_0: must be other_symbol_generic_bf16_d64_0"),
        ("other_struct", "parameter sizes = [40]: the ABI has [32]"),
        ("raises", "sm_90a: the toy refuses to be traced"),
    ],
)
def test_a_faulty_kernel_is_refused(fault: str, sentence: str) -> None:
    with pytest.raises(CompileError) as caught:
        compiling.compile(replace(TOY, room=fault))
    assert sentence in str(caught.value)
    assert f"{fault}_generic_bf16_d64" in str(caught.value)


def test_every_finding_is_listed() -> None:
    with pytest.raises(CompileError) as caught:
        compiling.compile(replace(TOY, room="spills"))
    assert "stack frame = " in str(caught.value)
    assert "spills = " in str(caught.value)


def test_too_many_registers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.budget, "register_limit", lambda *_: 8)
    with pytest.raises(CompileError, match=r"registers = \d+ a thread: 8 allowed"):
        compiling.compile(TOY)


def test_another_parameter_table_is_found() -> None:
    made = compiling.compile(TOY)
    found = read(made.cubin)
    assert list(compiling.parameter_objections(TOY, made.ptx, found)) == []
    name = f"{TOY.symbol}_0_param_0"
    for text in (
        made.ptx.replace(f"{name}[32]", f"{name}[40]"),
        made.ptx.replace(f"{name}[32]", f"other_{name}[32]"),
    ):
        assert "PTX parameters" in next(iter(compiling.parameter_objections(TOY, text, found)))


def test_ptx_parameters_of_every_kind() -> None:
    ptx = (
        ".visible .entry k_0(\n\t.param .align 64 .b8 k_0_param_0[128],\n"
        "\t.param .u64 .ptr .global .align 16 k_0_param_1,\n\t.param .f32 k_0_param_2\n)\n"
        ".reqntid 128, 1, 1\n{\n}\n"
    )
    table = [("k_0_param_0", 128), ("k_0_param_1", 8), ("k_0_param_2", 4)]
    assert compiling._ptx_parameters(ptx) == {"k_0": table}


def test_a_remark_about_injected_waits_is_a_finding() -> None:
    report = "  - Remark: 'ptxas info : (C7517) Potential Performance Loss: wgmma.mma_async in ''k_0'''\n"
    assert len(compiling.remarks(report)) == 1
    assert "C7517" in compiling.remarks(report)[0]
    assert compiling.remarks("ptxas info : Used 168 registers") == []


def test_entries_and_parameters_of_every_kind() -> None:
    backward = plan_backward(Problem.dense("backward", Shape(1, 64, 64, 1, 64, 64), "bfloat16"), "sm_80")
    assert kernels.entry_symbols(backward.build) == tuple(launch.symbol for launch in backward.launches)
    hopper = replace(TOY, family="hopper")
    assert kernels.parameters(hopper) == (("map_a", 128), ("map_b", 128), ("params", 32))


def test_threads_of_every_entry() -> None:
    sinks, bias = Tensor.contiguous((1,), "float32"), Tensor.contiguous((1, 1, 1, 64), "bfloat16")
    terms = {"sinks": sinks, "grad_sinks": sinks, "bias": bias, "grad_bias": bias}
    problem = Problem.dense("backward", Shape(1, 64, 64, 1, 64, 64), "bfloat16").replace(**terms)
    plan = plan_backward(problem, "sm_80")
    roles = list(kernels.entries(plan.build))
    assert roles == ["delta", "main", "finish", "bias", "sinks"]
    by_rows = {role: kernels.entry_threads(plan.build, role) for role in roles}
    assert by_rows == {role: 128 if role in ("delta", "sinks") else plan.build.threads for role in roles}
    assert [launch.block[0] for launch in plan.launches] == list(by_rows.values())


def test_an_unknown_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(NotSupported, match="backward/decode: has no kernel"):
        kernels.trace(replace(TOY, kind="backward", family="decode"))


def test_sources_cover_the_kernels() -> None:
    names = kernels.source_modules()
    assert {"masks.py", "abi.py", "shared_memory.py", "kernels.py", "parts/schedule.py"} <= set(names)
    assert {"device.py", "problem.py"} <= set(names)  # vector reductions, stmatrix, the logsumexp's padding
    assert {name.split("/")[0] for name in names if "/" in name} == {"gemm", "fused", "parts"}


def test_sources_hold_all_that_kernels_import() -> None:
    """What decides a Build is no source: its digest is in the key beside them."""
    package, names = ROOT / "cutlass_py_attn", set(kernels.source_modules())
    decides_builds = {"gemm/plans.py"}
    for name in sorted(name for name in names - decides_builds if "/" in name):
        for node in ast.walk(ast.parse((package / name).read_text())):
            if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith("cutlass_py_attn"):
                continue
            modules = (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
            files = {str(module).partition(".")[2].replace(".", "/") + ".py" for module in modules}
            assert {file for file in files if (package / file).is_file()} <= names, name


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda _: None)
    compiling.toolchain.cache_clear()
    for call in (lambda: compiling.compile(TOY), compiling.toolchain):
        with pytest.raises(CompileError, match=r'pip install "cutlass-py-attn\[compile\]"'):
            call()


@pytest.mark.parametrize(("driver", "flavour"), [(None, 13), (13000, 13), (12090, 12), (11080, 13)])
def test_the_flavour_is_the_newest_that_the_driver_runs(
    monkeypatch: pytest.MonkeyPatch, driver: int | None, flavour: int
) -> None:
    def library(name: str) -> SimpleNamespace:
        if driver is None:
            raise OSError(f"{name}: no such file")
        return SimpleNamespace(cuDriverGetVersion=lambda version: setattr(version._obj, "value", driver))

    monkeypatch.setattr(compiling.ctypes, "CDLL", library)
    assert compiling._flavour([12, 13]) == flavour


def test_other_processes_give_the_same_bytes_and_leave_no_files(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b" / "c"]
    for folder in folders:
        folder.mkdir(parents=True)
    hostile = {
        "CUTE_DSL_LINEINFO": "1",
        "CUTE_DSL_DRYRUN": "1",
        "CUTE_DSL_KEEP": "ptx",
        "CUTE_DSL_ARCH": "sm_80",
    }
    call = "compiling.compile(build)"
    outputs = [
        finish(start(folders[0], call, PYTHONHASHSEED="1")),
        finish(start(folders[1], call, "-d", "3", PYTHONHASHSEED="2", **hostile)),
    ]
    assert outputs[0] == outputs[1]
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


def test_eight_processes_with_a_cold_cache_agree(tmp_path: Path) -> None:
    call = f"compiling.artifact_for(build, {str(tmp_path / 'cache')!r})"
    processes = [start(tmp_path, call) for _ in range(8)]
    outputs = {finish(process) for process in processes}
    assert len(outputs) == 1
    assert len([path for path in (tmp_path / "cache").rglob("*") if path.is_file()]) == 1


def test_importing_loads_neither_compiler_nor_driver() -> None:
    modules = "cutlass_py_attn, cutlass_py_attn.compiler, cutlass_py_attn.explain"
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {modules}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert {"cutlass", "cuda"}.isdisjoint(loaded.split())
