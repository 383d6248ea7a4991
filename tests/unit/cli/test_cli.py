"""Tests of the command line: what each command prints, refuses and returns, without a GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

import click
import numpy as np
from click.testing import CliRunner, Result
from hypothesis import given, settings

from cutlass_py_attn import __version__, extras
from cutlass_py_attn.api import attention, results
from cutlass_py_attn.artifact import Artifact, Folder
from cutlass_py_attn.cli import artifacts, doctor, run, run_cpu, run_gpu
from cutlass_py_attn.cli.group import COMMANDS, group
from cutlass_py_attn.cli.selection import KINDS, Selection
from cutlass_py_attn.cli.symbols import parse_symbol
from cutlass_py_attn.cli.target import Gpu, wgmma_arch
from cutlass_py_attn.compilation import cache_folder
from cutlass_py_attn.errors import CompileError, NotSupported, Stale
from cutlass_py_attn.inspection import sass
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.entry_points import entries
from cutlass_py_attn.plan.planner import plan_backward, plan_forward
from cutlass_py_attn.problem import masks
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape
from cutlass_py_attn.reference import numpy_reference
from cutlass_py_attn.runtime import driver
from tests.support import fakes
from tests.support.any_problem import ARCHS, problems

ROOT = Path(__file__).resolve().parents[3]
COMPONENT_GEMM = "matmul_qk_sm80_bf16_d64"
GPU = Gpu("Toy", (9, 0), 4, 1, "sm_90")
TINY = (
    "--dtype",
    "bf16",
    "--mask",
    "full",
    "--head-dim",
    "64",
    "--seqlen",
    "64",
    "--batch",
    "2",
    "--heads",
    "2",
)


def invoke(*arguments: str) -> Result:
    """The command's result; its output holds stderr too."""
    return CliRunner().invoke(group, list(arguments))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, whatever this one has."""
    for module in ("run", "doctor", "target"):
        monkeypatch.setattr(f"cutlass_py_attn.cli.{module}.first_gpu", lambda: None)


@pytest.fixture(autouse=True)
def no_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX is not installed: importing it takes seconds."""
    monkeypatch.setitem(sys.modules, "cutlass_py_attn.jax", None)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Artifacts with made-up numbers instead of compiled ones."""
    monkeypatch.setattr(artifacts, "compiler", lambda: lambda build: (fakes.artifact(build), "0.5 s"))


# Symbols and selections


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a"])
def test_every_symbol_names_its_plan(arch: str) -> None:
    selection = Selection(KINDS, ("float16", "float32"), (63,), ("causal",), deterministic=True)
    plans = list(selection.plans(arch))
    assert len({plan.symbol for plan in plans}) == len(plans)
    for plan in plans:
        assert parse_symbol(plan.symbol, arch).build == plan.build
        assert [parse_symbol(launch.symbol, arch).build for launch in plan.launches] == [plan.build] * len(
            plan.launches
        )


@settings(max_examples=100, deadline=None)
@given(problems(), ARCHS)
def test_every_symbol_of_a_problem_names_its_plan(problem: Problem, arch: str) -> None:
    build = (plan_forward if problem.direction == "forward" else plan_backward)(problem, arch).build
    for symbol in (build.symbol, *entries(build).values()):
        assert parse_symbol(symbol, arch).build == build


def test_the_symbol_of_a_kernel_for_long_problems_names_it() -> None:
    problem = Problem.dense("forward", Shape(1, 4096, 4096, 4, 128, 128), "bfloat16", masks.Causal())
    build = plan_forward(problem, "sm_90a").build
    assert build.variant == "multicast"
    assert parse_symbol(build.symbol, "sm_90a").build == build
    assert parse_symbol(build.stem.removesuffix("_multicast"), "sm_90a").build.variant == ""


def test_symbols_of_tiles_for_short_sequences() -> None:
    """A stem is the tile for long sequences; every tile has a symbol."""
    for stem, longest in (("fwd_sm90_bf16_d64_full", "192x128"), ("fwd_sm90_bf16_d96_causal_grouped", "192x96")):
        assert parse_symbol(stem, "sm_90a").symbol == f"{stem}_{longest}"
        for symbol in (f"{stem}_{longest}", f"{stem}_128x128", f"{stem}_128x208"):
            assert parse_symbol(symbol, "sm_90a").symbol == symbol


def test_masks_of_one_form_share_their_kernels() -> None:
    """The corner and the window are numbers."""
    selection = Selection(("forward",), ("float16",), (64,), ("causal", "causal_br"))
    stems = ["fwd_sm80_f16_d64_causal", "fwd_decode_f16_d64_causal"]
    assert sorted(plan.build.stem for plan in selection.plans("sm_90")) == sorted(stems * 2)


def test_symbol_with_two_head_dims() -> None:
    build = parse_symbol("bwd_sm80_f16_d64v32_causal_det", "sm_90").build
    assert (build.head_dim, build.head_dim_value, build.mask, build.deterministic) == (64, 32, "causal", True)


@pytest.mark.parametrize(
    ("symbol", "words"),
    [
        ("nonsense", "must be like fwd_sm80"),
        ("fwd_sm80_bf16_d64", "must be like"),
        ("fwd_sm80_bf16_d64_causalish", "must be like"),
        ("fwd_sm80_bf16_d64_full_bias_sinkss", "must be like"),
        ("fwd_sm90_bf16_d64_causal", "on sm_90 the planner selects fwd_sm80_bf16_d64_causal"),
        ("fwd_sm80_bf16_d64_causal_det", "on sm_90 the planner selects fwd_sm80_bf16_d64_causal"),
        ("fwd_sm80_bf16_d63_full", "on sm_90 the planner selects fwd_sm80_bf16_d63_full_a2"),
        ("fwd_sm80_bf16_d64_causal_softcap_alibi", "the planner selects fwd_sm80_bf16_d64_causal_alibi_softcap"),
        ("bwd_sm80_bf16_d64_full_to_qkv", "on sm_90 the planner selects bwd_sm80_bf16_d64_full"),
        ("bwd_sm80_bf16_d64_full_sinks_to_bs", "names the gradient of bias, but not the feature"),
        ("matmul_qk_sm80_bf16_d64v32", "on sm_90 the planner selects matmul_qk_sm80_bf16_d64"),
        ("matmul_qk_sm90_bf16_d64", "no wgmma"),
        ("fwd_sm80_bf16_d70000_full", "head_dim = 70000"),
    ],
)
def test_symbols_that_name_nothing(symbol: str, words: str) -> None:
    with pytest.raises(NotSupported, match=words):
        parse_symbol(symbol, "sm_90")


def test_component_gemms_have_no_mask_and_whole_tiles() -> None:
    selection = Selection(("component-gemm",), ("bfloat16",), (72,), ("full", "causal"))
    assert [plan.build.stem for plan in selection.plans("sm_80")] == [
        f"{component_gemm}_sm80_bf16_d96" for component_gemm in ("matmul_qk", "doivj", "grad_v", "grad_k", "grad_q")
    ]
    assert len(list(selection.plans("sm_90a"))) == 10


def test_hopper_arch() -> None:
    assert [wgmma_arch(arch) for arch in ("sm_80", "sm_90", "sm_90a", "sm_100")] == [
        None,
        "sm_90a",
        "sm_90a",
        None,
    ]


# Entry point


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_missing_extra_is_one_sentence(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['', 'run']\n"
    code += "from cutlass_py_attn.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [f"cutlass-py-attn needs {missing} for its commands: {extras.remedy('cli')}"]


def test_other_missing_modules_are_not_hidden() -> None:
    code = "import sys; sys.modules['numpy'] = None; sys.argv = ['', 'list']\n"
    code += "from cutlass_py_attn.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    assert "numpy" in done.stderr.splitlines()[-1]


def test_help_lists_the_commands_without_importing_them() -> None:
    code = "import sys; sys.argv = ['', '--help']; from cutlass_py_attn.cli.main import main\n"
    code += "try: main()\nfinally: print({'numpy', 'rich', 'cuda'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr
    for name, (_, summary) in COMMANDS.items():
        command = group.get_command(click.Context(group), name)
        assert command is not None
        assert summary.split()[:3] == str(command.help).split()[:3]
    output = invoke("--help").output
    assert all(
        f"  {name} " in output for name in ("run", "doctor", "list", "build", "export", "inspect", "bench", "cache")
    )


# doctor


@pytest.mark.usefixtures("no_gpu")
def test_doctor_names_what_is_there_and_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "tool", lambda: None)
    done = invoke("doctor")
    assert done.exit_code == 0
    lines = {line.split()[1]: line for line in done.output.splitlines()[1:]}
    assert lines["Python"].startswith("ok")
    assert lines["numpy"].split() == ["ok", "numpy", np.__version__]
    assert lines["GPU"].startswith("missing")
    assert "launching needs an NVIDIA GPU" in lines["GPU"]
    assert extras.remedy("inspect") in lines["nvdisasm"]


def test_doctor_describes_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "first_gpu", lambda: Gpu("Toy", (8, 6), 84, 2, "sm_86"))
    found = {item["name"]: item["found"] for item in json.loads(invoke("doctor", "--json").output)}
    assert found["GPU"] == "Toy, compute capability 8.6, 84 SMs, the first of 2"
    assert found["compile target"] == "sm_86"


def test_doctor_outlives_a_gpu_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_gpu() -> Gpu:
        raise NotSupported("compute capability = 7.0: no target runs on it")

    monkeypatch.setattr(doctor, "first_gpu", first_gpu)
    found = {item["name"]: item for item in json.loads(invoke("doctor", "--json").output)}
    assert found["GPU"]["remedy"] == "compute capability = 7.0: no target runs on it"
    assert found["compile target"]["found"] == ""


def test_doctor_measures_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cache_folder, "user_folder", lambda: tmp_path)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_bytes(bytes(3 << 19))
    found = {item["name"]: item["found"] for item in json.loads(invoke("doctor", "--json").output)}
    assert found["kernel cache"] == f"{tmp_path} (1.5 MiB)"


def findings() -> dict[str, dict[str, str]]:
    """Returns what `doctor` finds, by name."""
    return {item["name"]: item for item in json.loads(invoke("doctor", "--json").output)}


def test_doctor_does_not_call_a_cache_usable_that_cannot_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = findings()["kernel cache"]
    assert (found["found"], found["problem"]) == ("", "unusable")
    assert f"not cached in {tmp_path}/file/cutlass_py_attn: Not a directory; set XDG_CACHE_HOME" in found["remedy"]
    assert "unusable" in invoke("doctor").output


def test_doctor_states_and_checks_the_minimum_driver(driver_log: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings()["driver"]["found"] == "CUDA 13.0, and at least 12.4 is needed"

    def too_old() -> NoReturn:
        raise driver.OldDriver("this machine's NVIDIA driver is for CUDA 12.3: must be for CUDA 12.4 or later")

    monkeypatch.setattr(driver, "driver_version", too_old)
    found = findings()["driver"]
    assert (found["found"], found["problem"]) == ("", "too old")
    assert found["remedy"].startswith("this machine's NVIDIA driver is for CUDA 12.3: must be for CUDA 12.4")


def test_doctor_names_the_handler_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings()["JAX handler"]["remedy"] == extras.remedy("jax")
    package: Any = ModuleType("cutlass_py_attn.jax")
    choice = SimpleNamespace(name="native", reason="library.so")
    package.native_library = SimpleNamespace(choice=lambda: choice)
    monkeypatch.setitem(sys.modules, "cutlass_py_attn.jax", package)
    assert findings()["JAX handler"]["found"] == "native: library.so"

    def refuse(name: str) -> NoReturn:
        raise NotSupported("the handler = 'fast': must be native")

    del package.native_library
    package.__getattr__ = refuse
    found = findings()["JAX handler"]
    assert (found["found"], found["problem"]) == ("", "unusable")
    assert found["remedy"] == "the handler = 'fast': must be native"


def test_doctor_names_packages_that_pip_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "version", lambda name: "")
    found = findings()
    assert found["cuda-python"]["remedy"] == "pip install 'cuda-python>=13,<14'"
    assert extras.remedy("jax") in found["JAX"]["remedy"]
    assert extras.remedy("nccl") in found["nccl4py"]["remedy"]
    assert found["cutlass-py-attn"]["found"].startswith(f"{__version__} in ")
    assert not any("pip install 'cutlass-py-attn" in item["remedy"] for item in found.values())


# build


@pytest.mark.usefixtures("no_compiler")
def test_build_fills_a_folder(tmp_path: Path) -> None:
    archs, head_dims = ("--arch", "sm_80", "--arch", "sm_90a"), ("--head-dim", "64", "--head-dim", "96")
    options = ("--kind", "forward", "--dtype", "f16", "--mask", "full", "-o", str(tmp_path))
    done = invoke("build", *archs, *head_dims, *options)
    assert done.exit_code == 0, done.output
    found = [artifact.build for artifact in Folder(tmp_path).all()]
    tiles = {  # a decode kernel, and of the sm90 family tiles for short heads and for few, some with keys in parts
        "sm_80": {64: {"decode 16x128", "128x128"}, 96: {"decode 16x128", "128x64"}},
        "sm_90a": {
            64: {
                *("decode 16x128", "192x128", "128x128", "128x208", "64x128", "64x64"),
                *("split_kv 192x128", "split_kv 128x128", "split_kv 64x128", "split_kv 64x64"),
            },
            96: {
                *("decode 16x128", "192x112", "192x96", "128x128", "128x208", "64x128", "64x64"),
                *("split_kv 192x112", "split_kv 192x96", "split_kv 128x128", "split_kv 64x128", "split_kv 64x64"),
            },
        },
    }
    for arch, by_dim in tiles.items():
        for head_dim, expected in by_dim.items():
            of_dim = [build for build in found if (build.arch, build.head_dim) == (arch, head_dim)]
            names = [
                f"{build.variant if build.variant else build.family if build.family == 'decode' else ''} "
                f"{build.tile_m}x{build.tile_n}".strip()
                for build in of_dim
            ]
            assert (sorted(names), {build.mask for build in of_dim}) == (sorted(expected), {"full"})
    assert f"26 kernels in {tmp_path}" in done.output


def test_wide_heads_have_no_component_gemms(tmp_path: Path) -> None:
    """Beyond 256 columns: with forwards and backwards they are left out, and asked for alone they are refused."""
    kinds = {plan.build.kind for plan in Selection(KINDS, ("float16",), (300,), ("full",)).plans("sm_80")}
    assert kinds == {"forward", "backward"}
    options = ("--arch", "sm_80", "--dtype", "f16", "-o", tmp_path)
    alone = invoke("build", *options, "--kind", "component-gemm", "--head-dim", "300")
    assert (alone.exit_code, "head_dim = 300: must be a multiple of 32 up to 256" in alone.output) == (1, True)
    for command in (("build", *options), ("run",)):
        none = invoke(*command, "--head-dim", "-5")
        assert (none.exit_code, "-5 is not in the range x>=1" in none.output) == (2, True)


def test_build_keeps_what_compiles_and_reports_the_rest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def source(build: Build) -> tuple[Artifact, str]:
        if build.component_gemm in ("grad_v", "grad_k"):
            raise CompileError(f"{build.component_gemm} spills")
        return fakes.artifact(build), "0.5 s"

    monkeypatch.setattr(artifacts, "compiler", lambda: source)
    done = invoke("build", "--arch", "sm_90", "--kind", "component-gemm", "--dtype", "f32", "-o", str(tmp_path))
    assert done.exit_code == 1
    assert done.output.endswith("Error: grad_v spills\ngrad_k spills\n")
    assert [artifact.build.component_gemm for artifact in Folder(tmp_path).all()] == ["doivj", "grad_q", "matmul_qk"]


@pytest.mark.usefixtures("no_compiler")
def test_the_remedy_for_a_missing_kernel_builds_it(tmp_path: Path) -> None:
    wanted = parse_symbol("bwd_sm90_bf16_d96_causal_dropout_grouped", "sm_90a").build
    with pytest.raises(Stale) as missing:
        Folder(tmp_path)(wanted)
    program, *arguments = str(missing.value).rpartition("build it with: ")[2].split()
    assert program == "cutlass-py-attn"
    done = invoke(*arguments)
    assert done.exit_code == 0, done.output
    assert Folder(tmp_path)(wanted).build == wanted


def test_build_takes_a_symbol_or_options_and_not_both(tmp_path: Path) -> None:
    for named in (("--symbol", "fwd_sm80_f32_d64_full"), ("--problem", "f32_d64_s128_b1_h1_full")):
        done = invoke("build", "--arch", "sm_90", *named, "--mask", "full", "-o", str(tmp_path))
        assert done.exit_code == 2
        assert "--symbol and --problem name whole kernels" in done.output


@pytest.mark.usefixtures("no_compiler")
def test_build_takes_a_problem_by_name(tmp_path: Path) -> None:
    name = "f16_d64_s128_b2_h4k2_causal_br_biasgrad_dropout0.1"
    done = invoke("build", "--arch", "sm_90", "--problem", name, "-o", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert {artifact.build.stem.rpartition("_d64_")[2] for artifact in Folder(tmp_path).all()} == {
        "causal_bias_dropout_grouped", "causal_bias_dropout_grouped_to_qkvb"
    }  # fmt: skip
    done = invoke("build", "--arch", "sm_90", "--problem", "f16_d64_s128_b2_h4_casual", "-o", str(tmp_path))
    assert "did you mean causal" in done.output


# run


@pytest.mark.usefixtures("no_gpu", "no_compiler")
def test_run_without_gpu_compiles_checks_and_says_so() -> None:
    done = invoke("run", *TINY)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    for name in (r"matmul_qk_sm80_bf16_d64_\d+x\d+", r"matmul_qk_sm90_bf16_d64_\d+x\d+",
                 r"fwd_sm80_bf16_d64_full_\d+x\d+", r"bwd_sm80_bf16_d64_full_\d+x\d+_delta"):  # fmt: skip
        assert sum(re.match(rf"{name}\s", line) is not None for line in lines) == 1
    assert sum("sum(dV) = sum(dO)" in line for line in lines) == 1
    assert lines[-1].startswith("No GPU here: the kernels above were not run")


@pytest.mark.usefixtures("no_gpu", "no_compiler")
def test_run_shows_everything_when_nothing_is_given() -> None:
    found = json.loads(invoke("run", "--json").output)
    names = {row["kernel"].rpartition("_")[0] for row in found["kernels"]}
    assert {f"fwd_sm80_{d}_d128_{m}" for d in ("f16", "bf16", "f32") for m in ("full", "causal")} <= names
    assert sum(row["arch"] == "sm_90a" for row in found["kernels"]) == 10
    assert {check["mask"] for check in found["checks"]} == {"full", "causal"}
    assert found["passed"]


@pytest.mark.usefixtures("no_gpu", "no_compiler")
def test_run_fails_when_a_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_cpu, "check", lambda mask: [run_cpu.Check(mask, "law", float("nan"), 1e-9)])
    done = invoke("run", *TINY)
    assert done.exit_code == 1
    assert "FAILED" in done.output


@pytest.mark.usefixtures("no_gpu")
def test_run_fails_when_a_kernel_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def source(build: Build) -> tuple[Artifact, str]:
        raise CompileError(f"{build.symbol} spills")

    monkeypatch.setattr(artifacts, "compiler", lambda: source)
    done = invoke("run", *TINY)
    assert done.exit_code == 1
    assert re.search(r"Error: matmul_qk_sm80_bf16_d64_\d+x\d+ spills\n", done.output)


@pytest.mark.usefixtures("no_gpu")
def test_run_takes_prebuilt_kernels(tmp_path: Path) -> None:
    lacking = invoke("run", *TINY, "--kernels", str(tmp_path))
    assert lacking.exit_code == 1
    first, second = lacking.output.partition("build them with: ")[2].split(" && ")  # sm90 component GEMMs on sm_90a
    assert (first.split()[:4], second.split()[3]) == (["cutlass-py-attn", "build", "--arch", "sm_90"], "sm_90a")
    assert (first.count("--symbol"), second.count("--symbol")) == (7, 5)
    for plan in Selection(KINDS, ("bfloat16",), (64,), ("full",)).plans("sm_80"):
        Folder(tmp_path).put(fakes.artifact(plan.build))
    done = invoke("run", *TINY, "--kernels", str(tmp_path), "--arch", "sm_80")
    assert done.exit_code == 0, done.output
    assert "prebuilt" in done.output


@pytest.mark.parametrize("mask", ["full", "causal", "causal_br"])
def test_reference_check_passes(mask: str) -> None:
    checks = run_cpu.check(mask)
    assert [check.law for check in checks] == [
        "dQ = finite difference", "dK = finite difference", "dV = finite difference", "sum(dV) = sum(dO)",
    ]  # fmt: skip
    assert all(check.passed for check in checks)


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_reference_check_sees_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    right = numpy_reference.backward

    def backward(*operands: Any, **options: Any) -> tuple[Any, ...]:
        found = list(right(*operands, **options))
        found[wrong] = found[wrong] * 1.001
        return tuple(found)

    monkeypatch.setattr(numpy_reference, "backward", backward)
    failed = [check.law[:2] for check in run_cpu.check("causal") if not check.passed]
    assert failed[0] == ("dQ", "dK", "dV")[wrong]


# The GPU's part of run, with the reference in the kernels' place


def _with_reference(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[results.Gradients], None]) -> None:
    forward, backward = attention.attention_forward, attention.attention_backward

    def fake_forward(*operands: Any, mask: masks.Mask, **_: Any) -> Any:
        return forward(*operands, mask=mask, backend="reference")

    def fake_backward(*operands: Any, mask: masks.Mask, **_: Any) -> Any:
        found = backward(*operands, mask=mask, backend="reference")
        spoil(found)
        return found

    monkeypatch.setattr(attention, "attention_forward", fake_forward)
    monkeypatch.setattr(attention, "attention_backward", fake_backward)
    monkeypatch.setattr(run_gpu, "_timed", lambda problem, *_: run_gpu.Timing(problem.direction, 0.5, 12.0))
    monkeypatch.setattr(run, "first_gpu", lambda: GPU)


@pytest.mark.usefixtures("no_compiler")
def test_run_on_gpu_checks_and_times(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_reference(monkeypatch, lambda gradients: None)
    done = invoke("run", *TINY)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert any(line.startswith("Toy: batch 2, heads 2, seqlen 64, head_dim 64") for line in lines)
    assert lines[-1].split() == ["bf16", "full", "0.500", "12", "0.500", "12"]
    found = json.loads(invoke("run", *TINY, "--json").output)
    assert set(found["results"][0]["errors"]) == {"output", "grad_query", "grad_key", "grad_value"}
    assert all(0 < error < 5e-3 for error in found["results"][0]["errors"].values())


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("place", [(0, 5, 0), (-1, 5, -1)])
def test_run_on_gpu_fails_on_a_wrong_row(monkeypatch: pytest.MonkeyPatch, place: tuple[int, int, int]) -> None:
    def spoil(gradients: results.Gradients) -> None:
        gradients.key[place] = 0

    _with_reference(monkeypatch, spoil)
    done = invoke("run", *TINY)
    assert done.exit_code == 1
    assert "FAILED" in done.output


def test_timing_launches_the_plan(driver_log: Any) -> None:
    shape = Shape(1, 64, 64, 1, 64, 64)
    mask = masks.Full()
    made = run_gpu.inputs.make("gaussian", shape, "float16", mask, 1)
    arrays = dict(zip(("query", "key", "value", "grad_output"), made, strict=True))
    problem = run_gpu.Problem.dense("forward", shape, "float16", mask)
    arrays["logsumexp"] = np.zeros(shape.logsumexp, np.float32)
    timing = run_gpu._timed(problem, arrays, fakes.artifact)
    assert timing.direction == "forward"
    assert timing.milliseconds >= 0
