"""Tests of inspection on compiled kernels: steps in PTX and SASS, resources, struct fields."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("click")
pytest.importorskip("rich")

from click.testing import CliRunner, Result

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.cli.group import group
from cutlass_py_attn.cli.symbols import parse_symbol
from cutlass_py_attn.compilation import cubin
from cutlass_py_attn.compilation.compiler import artifact_for
from cutlass_py_attn.errors import Stale
from cutlass_py_attn.inspection import facts, line_info, page, sass
from cutlass_py_attn.launch import abi
from tests.support.html_tags import unbalanced

NEEDS_NVDISASM = pytest.mark.skipif(sass.tool() is None, reason="nvdisasm is not installed")
COMPONENT_GEMM = "matmul_qk_sm80_bf16_d64"


def inspect(*options: str) -> Result:
    """Runs `cutlass-py-attn inspect` of the component GEMM."""
    return CliRunner().invoke(group, ["inspect", COMPONENT_GEMM, "--arch", "sm_90", *options])


def compiled(symbol: str, arch: str) -> tuple[facts.InspectedKernel, Artifact]:
    """The inspected kernel and its artifact."""
    plan = parse_symbol(symbol, arch)
    artifact = artifact_for(plan.build)
    return facts.inspect_kernel(plan, artifact), artifact


# MMA instructions of each step: rows x columns x depth of the product, divided by those of one instruction.
PRODUCTS = {
    ("fwd_sm80_f16_d64_full", "sm_90"): {"1": "mma", "3": "mma"},
    ("bwd_sm90_bf16_d64_causal", "sm_90a"): {"1": 8, "3": 4, "5": 8, "6": 8, "7": 8},
}


@NEEDS_NVDISASM
@pytest.mark.parametrize(("symbol", "arch"), PRODUCTS)
def test_steps_of_a_compiled_kernel(symbol: str, arch: str) -> None:
    found, artifact = compiled(symbol, arch)
    assert found.unmarked == ""
    assert found.line_info is not None
    # Line info adds nothing but the marks; the machine code is byte-identical.
    unmarked = [line for line in found.marked_ptx() if not line.startswith("// ---- ")]
    assert unmarked == artifact.ptx.splitlines()
    assert cubin.code(found.line_info.cubin) == cubin.code(artifact.cubin)
    rows = {row["step"]: row for row in facts.facts(found)["steps"][f"{artifact.build.symbol}_0"]}
    products = {step: row["groups"]["products"] for step, row in rows.items() if row["groups"].get("products")}
    in_ptx = Counter(
        step.name
        for text, step in found.line_info.labels()
        if step and re.match(r"\s*(wgmma\.mma_async|mma\.sync)", text)
    )
    assert products == in_ptx
    assert set(products) == set(PRODUCTS[symbol, arch])
    numbers = {step: count for step, count in PRODUCTS[symbol, arch].items() if isinstance(count, int)}
    assert {step: products[step] for step in numbers} == numbers
    assert rows["2"]["groups"]["MUFU"] >= 64  # the exponentials
    text = page.page(found)
    assert unbalanced(text) == []
    assert text.count('class="mark">step 2  ') >= 2  # in the PTX and in the SASS


def test_other_source_is_not_marked() -> None:
    _, artifact = compiled("matmul_qk_sm80_bf16_d64", "sm_90")
    other = dataclasses.replace(artifact, ptx=artifact.ptx.replace("add.", "sub.", 1))
    with pytest.raises(Stale, match="produce other PTX than the artifact has"):
        line_info.compile_with_line_info(other)


@NEEDS_NVDISASM
def test_inspect_shows_a_compiled_component_gemm() -> None:
    done = inspect("--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert [tuple(field.values()) for field in found["fields"]] == list(abi.layout(abi.COMPONENT_GEMM))
    (row,) = found["resources"]
    assert row["mma"] == found["instructions"][f"{found['symbol']}_0"]["HMMA"] > 0
    assert row["shared_memory_bytes"] == max(item["offset"] + item["bytes"] for item in found["shared_memory"])
    listing = inspect("--sass", "--no-steps").output.splitlines()
    assert listing[0] == f"{found['symbol']}_0:"
    assert len(listing) - 1 == sum(found["instructions"][f"{found['symbol']}_0"].values())
    assert "shared memory" in inspect().output
