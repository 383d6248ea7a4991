"""Tests of `cutlass-py-attn inspect`: what it prints, writes, compares and refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from click.testing import CliRunner, Result

from cutlass_py_attn.artifact import Artifact, Folder
from cutlass_py_attn.cli.group import group
from cutlass_py_attn.cli.symbols import parse_symbol
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.inspection import sass
from cutlass_py_attn.inspection.listing import entry_text
from tests.support import fakes

COMPONENT_GEMM = "matmul_qk_sm80_bf16_d64"


def invoke(*arguments: str) -> Result:
    """Runs `cutlass-py-attn` with these arguments."""
    return CliRunner().invoke(group, arguments)


def test_inspect_refuses_in_one_sentence(tmp_path: Path) -> None:
    done = invoke("inspect", "nonsense")
    assert (done.exit_code, done.output.count("\n")) == (1, 1)
    assert done.output.startswith("Error: symbol 'nonsense': must be like")
    done = invoke("inspect", COMPONENT_GEMM, "--arch", "sm_90", "--kernels", str(tmp_path))
    assert done.exit_code == 1
    assert "build it with: cutlass-py-attn build --arch sm_90" in done.output
    assert invoke("inspect", COMPONENT_GEMM, "--kernels", str(tmp_path / "nowhere")).exit_code == 2


def test_inspect_compiles_an_sm90_kernel_for_sm_90a(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutlass_py_attn.cli.inspect.default_arch", lambda: "sm_90")
    done = invoke("inspect", "fwd_sm90_bf16_d64_full", "--kernels", str(tmp_path))
    assert done.exit_code == 1
    assert "build it with: cutlass-py-attn build --arch sm_90a" in done.output


def test_inspect_reads_a_folder(tmp_path: Path) -> None:
    plan = parse_symbol(COMPONENT_GEMM, "sm_80")
    made = fakes.artifact(plan.build)
    Folder(tmp_path).put(Artifact(made.build, ".visible .entry x()", made.cubin, made.kernels, "toy", "as planned"))
    done = invoke("inspect", COMPONENT_GEMM, "--arch", "sm_80", "--kernels", str(tmp_path), "--ptx", "--no-steps")
    assert (done.exit_code, done.output) == (0, ".visible .entry x()\n")


def test_inspect_of_a_backward_without_a_main_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sass, "tool", lambda: None)
    build = parse_symbol("bwd_sm80_bf16_d64_full_bias_sinks_to_bs_sum_hq", "sm_80").build
    symbol = build.symbol
    Folder(tmp_path).put(fakes.artifact(build))
    for name in (symbol, f"{symbol}_delta_0", f"{symbol}_bias_1", f"{symbol}_sinks_2"):
        done = invoke("inspect", name, "--arch", "sm_80", "--kernels", str(tmp_path), "--json", "--no-steps")
        assert done.exit_code == 0, done.output
        found = json.loads(done.output)
        rows = [row["kernel"].removeprefix(found["symbol"]) for row in found["resources"]]
        assert rows == ["_delta", "_bias", "_sinks"]


def test_inspect_compares_two_versions_of_a_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sass, "tool", lambda: None)
    made = fakes.artifact(parse_symbol(COMPONENT_GEMM, "sm_80").build)
    old, new = tmp_path / "old", tmp_path / "new"
    Folder(old).put(replace(made, ptx="add.s32 %r1, %r2;"))
    Folder(new).put(
        replace(made, ptx="sub.s32 %r1, %r2;", toolchain="newer", kernels=(replace(made.main, registers=99),))
    )
    options = ("inspect", COMPONENT_GEMM, "--arch", "sm_80", "--no-steps", "--kernels", str(old), "--diff")
    found = json.loads(invoke(*options, str(new), "--json").output)["differences"]
    assert {row["what"] for row in found["identity"]} == {"toolchain"}
    assert {"what": "main: registers", "left": 128, "right": 99} in found["resources"]
    assert "-29" in invoke(*options, str(new)).output
    assert "-add.s32 %r, %r;\n+sub.s32 %r, %r;" in invoke(*options, str(new), "--ptx").output
    assert invoke(*options, str(old)).output.endswith(": no difference\n")
    assert invoke(*options, COMPONENT_GEMM).output.endswith(": no difference\n")


def test_inspect_shows_lifetimes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sass, "tool", lambda: None)
    plan = parse_symbol("bwd_sm80_bf16_d64_full", "sm_90")
    Folder(tmp_path).put(fakes.artifact(plan.build))
    options = ("--arch", "sm_90", "--no-steps", "--kernels", str(tmp_path))
    lines = invoke("inspect", plan.symbol, *options).output.splitlines()
    ds = plan.build.buffer("ds")
    assert f"ds {ds.offset} {ds.bytes} ....4567. dS to dQ" in [" ".join(line.split()) for line in lines]


def test_inspect_writes_a_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    monkeypatch.setattr(sass, "tool", lambda: None)
    Folder(tmp_path).put(fakes.artifact(parse_symbol(COMPONENT_GEMM, "sm_80").build))
    options = ("inspect", COMPONENT_GEMM, "--arch", "sm_80", "--no-steps", "--kernels", str(tmp_path))
    target = tmp_path / "page.html"
    assert invoke(*options, "--html", str(target)).exit_code == 0
    assert f"<h1>{COMPONENT_GEMM}_128x128</h1>" in target.read_text()
    assert invoke(*options, "--html", str(target), "--json").exit_code == 2


def test_sass_without_nvdisasm_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "tool", lambda: None)
    with pytest.raises(NotSupported, match=r"pip install .nvidia-cuda-nvdisasm"):
        sass.disassemble(b"")


def test_histogram_counts_opcodes_without_modifiers() -> None:
    listing = [sass.Instruction(opcode) for opcode in ("LDG.E", "BAR", "LDG.E.128", "ADD")]
    assert list(sass.histogram(listing).items()) == [("LDG", 2), ("ADD", 1), ("BAR", 1)]


def test_entry_text_is_one_entry() -> None:
    ptx = ".visible .entry a_0(\nmma.sync.x\n}\n.visible .entry a_0b(\n}\n"
    assert entry_text(ptx, "a_0").count("mma.sync.") == 1
    assert entry_text(ptx, "a_0b").count("mma.sync.") == 0
