"""Bundles on the GPU: kernels that were exported compute the same bits, bound and from the manifest alone."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cutlass_py_attn import driver
from cutlass_py_attn.bundle.files import export_bundle
from cutlass_py_attn.bundle.numbers import inputs
from cutlass_py_attn.device import targets
from tests.gpu import check, memory
from tests.gpu.cases import Case, Variant
from tests.gpu.check import Kernels
from tests.gpu.test_laws import differing, operands_of

pytest.importorskip("jinja2", reason="an export writes a header with it")
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "manifest_host"))
host = pytest.importorskip("host", reason="examples/manifest_host is not on this machine")

VARIANT = Variant("bfloat16", 128, 128, "causal")
# With one block for each head a backward's sums have one order.
EXPORTED = {
    "forward": Case("forward", VARIANT, 2, 3, 515, 640, "gaussian", 5),
    "backward": Case("backward", VARIANT, 2, 3, 515, 640, "gaussian", 5, num_splits_key=1),
}
OTHER = {"batch": 1, "num_heads": 5, "num_queries": 333, "num_keys": 257, "seed": 6}


@pytest.mark.parametrize("is_exported", [True, False], ids=["exported sizes", "other sizes"])
@pytest.mark.parametrize("direction", EXPORTED)
def test_bundle(direction: str, is_exported: bool, kernels: Kernels, gpu: driver.Device, tmp_path: Path) -> None:
    """Three times from fresh NaN: by the kernels it was made of, by the bundle, and by a reader of its manifest."""
    exported = EXPORTED[direction]
    archs = targets(gpu.compute_capability)[:1]
    bundle = export_bundle(tmp_path / "bundle", (exported.problem(),), archs, kernels=kernels)
    case = exported if is_exported else replace(exported, **OTHER)
    problem = case.problem()
    operands = operands_of(case, check.make(case))
    with memory.placed(problem, operands, kernels) as placed:
        expected = placed.run()
    with memory.placed(problem, operands, bundle) as placed:
        assert differing(expected, placed.run()) == []
        reader = host.Host(bundle.path, direction, ctypes.CDLL("libcuda.so.1"))
        numbers = {name: item.value for name, item in inputs(problem, placed.bound.plan.build).items()}
        assert reader.workspace(reader.numbers(numbers))[0] == placed.bound.workspace_bytes
        placed.reset()
        reader.launch(numbers, placed.pointers, placed.workspace or 0, 0)
        driver.synchronise(0)
        assert differing(expected, placed.read()) == []
