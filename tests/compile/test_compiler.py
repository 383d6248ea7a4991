"""Tests of compiler and report: toy kernels compile, faulty ones raise with numbers, the environment has no effect."""

from __future__ import annotations

import ast
import dataclasses
import gc
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cutlass_py_attn import extras
from cutlass_py_attn.artifact import Parameter
from cutlass_py_attn.compilation import compiler as compiling
from cutlass_py_attn.compilation import registry, report
from cutlass_py_attn.compilation.cubin import read
from cutlass_py_attn.errors import CompileError, NotSupported
from cutlass_py_attn.launch import entry_points
from cutlass_py_attn.launch.arch import Architecture
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan import entry_parameters
from cutlass_py_attn.plan.plan import Launch, Plan, Workspace
from cutlass_py_attn.plan.planner import plan_backward
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape, Tensor

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "cutlass_py_attn"
NONE = (0, 0)
TOY = Build(
    kind="component_gemm", family="sm80", variant="", arch="sm_90a", dtype="bfloat16", head_dim=64, head_dim_value=64,
    mask="full", tile_m=64, tile_n=64, warps=4, query_stages=1, grad_output_stages=0, warps_scores=NONE,
    warps_grad_v=NONE, warps_grad_k=NONE, warps_grad_q=NONE, deterministic=False, register_usage_level=5,
    min_blocks_per_sm=0, component_gemm="toy", shared_memory=(),
)  # fmt: skip

# Program of a subprocess: compiles the toy, or reads it from the cache, and prints its hashes.
PROGRAM = """
import hashlib, json
from tests.support import toy_kernel
from cutlass_py_attn.compilation import compiler as compiling
from cutlass_py_attn.launch import entry_points
from cutlass_py_attn.compilation import registry
from cutlass_py_attn.launch.build import build_from
registry.trace = toy_kernel.trace
build = build_from(json.loads({build!r}))
made = {call}
print(hashlib.sha256(made.ptx.encode()).hexdigest(), hashlib.sha256(made.cubin).hexdigest(), made.toolchain)
"""


def start(folder: Path, call: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Starts the program in `folder` as a process of its own."""
    build = json.dumps(dataclasses.asdict(TOY))
    program = PROGRAM.format(build=build, call=call)
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0
    return output


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    toy_kernel = pytest.importorskip("tests.support.toy_kernel")
    monkeypatch.setattr(registry, "trace", toy_kernel.trace)


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
        ("local_array", "stack frame = 1040 bytes per thread: 0 allowed"),
        ("spills", "spills = "),
        ("static_memory", "static shared memory = 5120 bytes per block: 1024 allowed"),
        ("other_block", "block = (256, 1, 1): must be fixed to (128, 1, 1)"),
        ("other_symbol", "entries = elsewhere_0: must be other_symbol_sm80_bf16_d64_64x64_0"),
        ("other_struct", "parameter sizes = [40]: the ABI has [32]"),
        ("raises", "sm_90a: the toy refuses to be traced"),
    ],
)
def test_a_faulty_kernel_is_refused(fault: str, sentence: str) -> None:
    with pytest.raises(CompileError) as caught:
        compiling.compile(replace(TOY, component_gemm=fault))
    assert sentence in str(caught.value)
    assert f"{fault}_sm80_bf16_d64" in str(caught.value)
    if fault == "spills":  # every finding is listed
        assert re.search(r"stack frame = \d+ bytes per thread: 0 allowed", str(caught.value))


def test_source_locations_change_no_byte() -> None:
    def compiled(has_locations: bool) -> compiling.CompilerOutput:
        return compiling._compile_trace("toy", TOY.arch, trace, 5, None, has_locations=has_locations)

    def trace() -> registry.Trace:
        return registry.trace(TOY)

    with_locations, without = compiled(True), compiled(False)
    assert (without.ptx, without.cubin) == (with_locations.ptx, with_locations.cubin)
    assert compiling.compile_trace("toy", TOY.arch, trace).cubin == without.cubin


@pytest.mark.parametrize("is_enabled", [True, False])
def test_no_garbage_is_collected_during_a_trace(is_enabled: bool) -> None:
    states = []

    def trace() -> registry.Trace:
        states.append(gc.isenabled())
        raise ValueError("no kernel")

    (gc.enable if is_enabled else gc.disable)()
    try:
        with pytest.raises(CompileError, match="no kernel"):
            compiling.compile_trace("toy", TOY.arch, trace)
        assert states == [False, False]  # once without locations, once with them
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()


def test_an_error_of_the_assembler_names_the_line() -> None:
    with pytest.raises(CompileError, match=r"toy_kernel\.py:\d+"):
        compiling.compile_unchecked(replace(TOY, register_usage_level="none"))


def test_too_many_registers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Architecture, "register_limit", lambda *_: 8)
    with pytest.raises(CompileError, match=r"registers = \d+ per thread: 8 allowed"):
        compiling.compile(TOY)


def test_another_parameter_table_is_found() -> None:
    made = compiling.compile(TOY)
    found = read(made.cubin)
    assert list(report.parameter_findings(TOY, made.ptx, found)) == []
    name = f"{TOY.symbol}_0_param_0"
    for text in (
        made.ptx.replace(f"{name}[32]", f"{name}[40]"),
        made.ptx.replace(f"{name}[32]", f"other_{name}[32]"),
    ):
        assert "PTX parameters" in next(iter(report.parameter_findings(TOY, text, found)))


def test_ptx_parameters_of_every_kind() -> None:
    ptx = (
        ".visible .entry k_0(\n\t.param .align 64 .b8 k_0_param_0[128],\n"
        "\t.param .u64 .ptr .global .align 16 k_0_param_1,\n\t.param .f32 k_0_param_2\n)\n"
        ".reqntid 128, 1, 1\n{\n}\n"
    )
    table = [("k_0_param_0", 128), ("k_0_param_1", 8), ("k_0_param_2", 4)]
    assert report._ptx_parameters(ptx) == {"k_0": table}


def test_a_remark_about_injected_waits_is_a_finding() -> None:
    text = "  - Remark: 'ptxas info : (C7517) Potential Performance Loss: wgmma.mma_async in ''k_0'''\n"
    assert len(report.remarks(text)) == 1
    assert "C7517" in report.remarks(text)[0]
    assert report.remarks("ptxas info : Used 168 registers") == []


def test_entries_and_parameters_of_every_kind() -> None:
    backward = plan_backward(Problem.dense("backward", Shape(1, 64, 64, 1, 64, 64), "bfloat16"), "sm_80")
    assert entry_points.entry_symbols(backward.build) == tuple(launch.symbol for launch in backward.launches)
    hopper = replace(TOY, family="sm90", component_gemm="matmul_qk")
    assert entry_parameters.parameters(hopper) == (("map_a", 128), ("map_b", 128), ("params", 32))


def test_threads_of_every_entry() -> None:
    sinks, bias = Tensor.contiguous((1,), "float32"), Tensor.contiguous((1, 1, 1, 64), "bfloat16")
    terms = {"sinks": sinks, "grad_sinks": sinks, "bias": bias, "grad_bias": bias}
    problem = Problem.dense("backward", Shape(1, 64, 64, 1, 64, 64), "bfloat16").replace(**terms)
    plan = plan_backward(problem, "sm_80")
    roles = list(entry_points.entries(plan.build))
    assert roles == ["delta", "main", "finish", "bias", "sinks"]
    by_rows = {role: entry_parameters.entry_threads(plan.build, role) for role in roles}
    assert by_rows == {role: 128 if role in ("delta", "sinks") else plan.build.threads for role in roles}
    assert [launch.block[0] for launch in plan.launches] == list(by_rows.values())


def test_an_unknown_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(NotSupported, match="backward/decode: has no kernel"):
        registry.trace(replace(TOY, kind="backward", family="decode"))


def test_sources_cover_the_kernels() -> None:
    names = registry.source_modules()
    assert {
        "problem/masks.py",
        *(f"launch/{name}.py" for name in ("abi", "smem", "entry_points", "tile_order")),
    } <= set(names)
    # Vector reductions and stmatrix; the logsumexp's padding.
    assert {"launch/arch.py", "problem/tensors.py"} <= set(names)
    assert {name.split("/")[0] for name in names if "/" in name} == {
        *("kernels", "launch", "problem", "score_terms", "compilation")
    }
    unused = {path.relative_to(PACKAGE / "kernels") for path in PACKAGE.glob("kernels/*/*.py")}
    unused -= {Path(name).relative_to("kernels") for name in names if name.startswith("kernels/")}
    of_kernels = {path.name for path in unused if path.parent.name != "sm90_family"}
    assert of_kernels == {"__init__.py", "kernel.py", "layout.py", "rules.py", "shared_tiles.py", "tiles.py"}


def is_for_type_checkers(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_sources_hold_all_that_kernels_import_when_they_run() -> None:
    names = set(registry.source_modules())
    for name in sorted(names - {f"compilation/{name}.py" for name in ("compiler", "registry", "report")}):
        module = ast.parse((PACKAGE / name).read_text())
        module.body = [node for node in module.body if not is_for_type_checkers(node)]
        for node in ast.walk(module):
            if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith("cutlass_py_attn"):
                continue
            imported = (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
            files = {each.partition(".")[2].replace(".", "/") + ".py" for each in map(str, imported)}
            assert {file for file in files if (PACKAGE / file).is_file()} <= names, name


def test_what_decides_a_build_is_no_source() -> None:
    """The digest of the Build is in the key beside the sources: an edited planner recompiles nothing."""
    launch = (f"launch/{name}.py" for name in ("expressions", "names", "split_kv", "tile_config"))
    problem = (f"problem/{name}.py" for name in ("spec", "serialize", "problem", "validation"))
    names = {*launch, *problem, "kernels/kernel.py", "kernels/catalogue.py"}
    assert not names & set(registry.source_modules())


@pytest.mark.parametrize(
    ("body", "holds", "lacks"),
    [
        (("forward", "sm80", ""), "kernels/sm80/forward.py", "kernels/sm80/backward.py"),
        (("forward", "sm80", "split_d"), "kernels/sm80_split_d/layout.py", "kernels/sm90_forward/forward.py"),
        (("forward", "sm90", "multicast"), "kernels/sm90_forward/layout.py", "kernels/decode/layout.py"),
        (("backward", "sm90", "2cta"), "kernels/sm90_backward_2cta/grad_query.py", "kernels/decode/forward.py"),
        (("forward", "decode", ""), "kernels/decode/layout.py", "kernels/backward_parts/grad_query_accum.py"),
    ],
)
def test_sources_of_a_kernel_are_its_own(body: tuple[str, str, str], holds: str, lacks: str) -> None:
    kind, family, variant = body
    names = registry.sources_of(replace(TOY, kind=kind, family=family, variant=variant, component_gemm=""))
    assert holds in names
    assert lacks not in names
    assert set(names) < set(registry.source_modules())


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda _: None)
    compiling.toolchain.cache_clear()
    for call in (lambda: compiling.compile(TOY), compiling.toolchain):
        with pytest.raises(CompileError, match=re.escape(extras.remedy("compile"))):
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


def test_processes_with_a_cold_cache_agree(tmp_path: Path) -> None:
    call = f"compiling.artifact_for(build, {str(tmp_path / 'cache')!r})"
    processes = [start(tmp_path, call) for _ in range(4)]
    outputs = {finish(process) for process in processes}
    assert len(outputs) == 1
    assert len([path for path in (tmp_path / "cache").rglob("*") if path.is_file()]) == 1


def test_importing_loads_neither_compiler_nor_driver() -> None:
    modules = "cutlass_py_attn, cutlass_py_attn.compilation.compiler, cutlass_py_attn.plan.explain"
    program = f"import sys, {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = done.stdout
    assert {"cutlass", "cuda"}.isdisjoint(loaded.split())
