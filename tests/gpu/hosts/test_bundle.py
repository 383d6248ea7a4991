"""Bundles on the GPU: exported kernels compute the same bits, bound and launched from the manifest alone."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.bundle.files import export_bundle
from cutlass_py_attn.bundle.numbers import inputs
from cutlass_py_attn.errors import Stale
from cutlass_py_attn.launch.arch import targets
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.testing import device_memory
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Kernels
from tests.gpu.test_laws import differing, operands_of

pytest.importorskip("jinja2", reason="an export writes a header with it")
host = pytest.importorskip("host", reason="examples/manifest_host is not on this machine")

# With one block for each head the backward sums in one order.
EXPORTED = {
    "forward": Case.parse("forward bf16_d128_q515_s640_b2_h3_causal seed=5"),
    "backward": Case.parse("backward bf16_d128_q515_s640_b2_h3_causal_splits1 seed=5"),
}
# Other sizes that the exported kernel serves.
OTHER = {"batch": 1, "num_heads": 3, "num_queries": 333, "num_keys": 457, "seed": 6}


def only(chosen: Build, kernels: Kernels) -> Kernels:
    """Returns kernels of one build; Stale for the others, so that a plan of this build is bound."""

    def choose(build: Build) -> Artifact:
        if build != chosen:
            raise Stale(f"{build.symbol}: the bundle has {chosen.symbol}")
        return kernels(build)

    return choose


@pytest.mark.parametrize("is_exported", [True, False], ids=["exported sizes", "other sizes"])
@pytest.mark.parametrize("direction", EXPORTED)
def test_bundle(direction: str, is_exported: bool, kernels: Kernels, gpu: driver.Device, tmp_path: Path) -> None:
    """Launched by the bundle, by the original kernels and by a reader of its manifest, each into outputs of NaN.

    The plan of a bundle does not depend on the number of multiprocessors, so that the planner may choose another tile.
    """
    exported = EXPORTED[direction]
    archs = targets(gpu.compute_capability)[:1]
    bundle = export_bundle(tmp_path / "bundle", (exported.problem(),), archs, kernels=kernels)
    case = exported if is_exported else exported.replace(**OTHER)
    problem = case.problem()
    operands = operands_of(case, case.arrays())
    with device_memory.guarded_launch(problem, operands, bundle) as guarded:
        expected, build = guarded.run(), guarded.bound.plan.build
        with device_memory.guarded_launch(problem, operands, only(build, kernels)) as original:
            assert differing(expected, original.run()) == []
        reader = host.Host(bundle.path, direction, ctypes.CDLL("libcuda.so.1"))
        numbers = {name: item.value for name, item in inputs(problem, guarded.bound.plan.build).items()}
        assert reader.workspace(reader.numbers(numbers))[0] == guarded.bound.workspace_bytes
        guarded.reset()
        reader.launch(numbers, guarded.pointers, guarded.workspace or 0, 0)
        driver.synchronise(0)
        assert differing(expected, guarded.read()) == []
