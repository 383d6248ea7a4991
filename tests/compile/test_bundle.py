"""Tests of bundles of compiled kernels: the manifest agrees with the cubins."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("click")

from click.testing import CliRunner

from cutlass_py_attn import load_bundle
from cutlass_py_attn.cli.group import group

CASE = "bf16_d64_s200_b2_h3_causal"


def test_compiled_kernels_are_exported(tmp_path: Path) -> None:
    """The manifest has the parameters and registers of the cubin, and the struct that the PTX reads."""
    options = ["--problem", CASE, "--direction", "forward", "--arch", "sm_90a", "-o", str(tmp_path / "bundle")]
    done = CliRunner().invoke(group, ["export", *options])
    assert done.exit_code == 0, done.output
    bundle = load_bundle(tmp_path / "bundle")
    (target,) = bundle.manifest["problems"][0]["targets"]
    (launch,) = target["launches"]
    (artifact,) = bundle.artifacts
    assert [(item["offset"], item["bytes"]) for item in launch["parameters"]] == [
        (item.offset, item.size) for item in artifact.parameters
    ]
    assert [item["meaning"] for item in launch["parameters"]] == [
        "CUtensorMap of query", "CUtensorMap of key", "CUtensorMap of value", "the struct",
    ]  # fmt: skip
    assert launch["parameters"][-1]["bytes"] == target["struct"]["bytes"]
    assert launch["registers"] == artifact.registers > 0
    assert f".entry {launch['symbol']}" in (bundle.path / target["ptx"]).read_text()
