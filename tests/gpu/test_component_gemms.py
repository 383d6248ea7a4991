"""Standalone component GEMMs on the GPU, in guarded buffers: exact for integers, fp32 sums for other inputs."""

from __future__ import annotations

import numpy as np
import pytest

from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.testing import check, component_gemms, device_memory
from cutlass_py_attn.testing.component_gemms import ComponentGemm

TILES = (1, 2, 40)
MANY_TILES = 1000


@pytest.fixture(params=component_gemms.ALL_COMPONENT_GEMMS, ids=str)
def component_gemm(request: pytest.FixtureRequest, gpu: driver.Device) -> ComponentGemm:
    """Each component GEMM that this GPU runs."""
    found: ComponentGemm = request.param
    if found.family == "sm90" and architecture(found.arch).compute_capability != gpu.compute_capability:
        pytest.skip(f"{found.arch} does not run on {gpu.name}")
    return found


def target(component_gemm: ComponentGemm, arch: str) -> str:
    """The target: sm_90a for the sm90 family, the GPU's own for the sm80 family."""
    return component_gemm.arch if component_gemm.family == "sm90" else arch


@pytest.mark.parametrize("tiles", TILES)
def test_integers_are_exact(component_gemm: ComponentGemm, tiles: int, arch: str, kernels: check.Kernels) -> None:
    plan = component_gemm.plan(tiles, target(component_gemm, arch))
    given = component_gemms.operands(plan, "integers", seed=tiles)
    with device_memory.guarded_component_gemm(plan, given, kernels) as guarded:
        np.testing.assert_array_equal(guarded.run()["c"], component_gemms.product(plan, given))


@pytest.mark.parametrize("tiles", TILES)
def test_sums_are_float32(component_gemm: ComponentGemm, tiles: int, arch: str, kernels: check.Kernels) -> None:
    plan = component_gemm.plan(tiles, target(component_gemm, arch))
    given = component_gemms.operands(plan, "gaussian", seed=tiles)
    with device_memory.guarded_component_gemm(plan, given, kernels) as guarded:
        error = component_gemms.relative_error(guarded.run()["c"], component_gemms.product(plan, given))
    assert error <= component_gemms.ALLOWED[component_gemm.dtype], f"{plan.symbol}: relative error {error:.2e}"


@pytest.mark.parametrize("component_gemm", component_gemms.SHOWN_COMPONENT_GEMMS, ids=str, indirect=True)
def test_every_one_of_many_tiles(component_gemm: ComponentGemm, arch: str, kernels: check.Kernels) -> None:
    """More blocks than the GPU holds at once; each tile's product is that of the tile alone."""
    plan = component_gemm.plan(MANY_TILES, target(component_gemm, arch))
    few = component_gemms.operands(component_gemm.plan(4, target(component_gemm, arch)), "integers", seed=3)
    given = {name: np.tile(array, (MANY_TILES // 4, 1, 1)) for name, array in few.items()}
    expected = component_gemms.product(plan, few)
    with device_memory.guarded_component_gemm(plan, given, kernels) as guarded:
        found = guarded.run()["c"].reshape(-1, *expected.shape)
    assert (found == expected).all()
