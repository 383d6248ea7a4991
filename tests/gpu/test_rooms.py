"""Rooms alone on the GPU: exact where the arithmetic is, fp32 sums else, in guarded buffers."""

from __future__ import annotations

import numpy as np
import pytest

from cutlass_py_attn import driver
from cutlass_py_attn.device import architecture
from tests.gpu import cases, check, memory, rooms

TILES = (1, 2, 40)
MANY_TILES = 1000


def name(room: cases.Room) -> str:
    """Test id of a room."""
    return f"{room.name}_{room.family}_{room.dtype}_{room.head_dim}"


@pytest.fixture(params=cases.ALL_ROOMS, ids=name)
def room(request: pytest.FixtureRequest, gpu: driver.Device) -> cases.Room:
    """Each room that this GPU runs."""
    found: cases.Room = request.param
    if found.family == "hopper" and architecture(found.arch).compute_capability != gpu.compute_capability:
        pytest.skip(f"{found.arch} does not run on {gpu.name}")
    return found


def target(room: cases.Room, arch: str) -> str:
    """The Hopper family has one target; the generic one has the GPU's."""
    return room.arch if room.family == "hopper" else arch


@pytest.mark.parametrize("tiles", TILES)
def test_integers_are_exact(room: cases.Room, tiles: int, arch: str, kernels: check.Kernels) -> None:
    plan = room.plan(tiles, target(room, arch))
    given = rooms.operands(plan, "integers", seed=tiles)
    with memory.placed_room(plan, given, kernels) as placed:
        np.testing.assert_array_equal(placed.run()["c"], rooms.product(plan, given))


@pytest.mark.parametrize("tiles", TILES)
def test_sums_are_float32(room: cases.Room, tiles: int, arch: str, kernels: check.Kernels) -> None:
    plan = room.plan(tiles, target(room, arch))
    given = rooms.operands(plan, "gaussian", seed=tiles)
    with memory.placed_room(plan, given, kernels) as placed:
        error = rooms.relative_error(placed.run()["c"], rooms.product(plan, given))
    assert error <= rooms.ALLOWED[room.dtype], f"{plan.symbol}: relative error {error:.2e}"


@pytest.mark.parametrize("room", cases.SHOWN_ROOMS, ids=name, indirect=True)
def test_every_one_of_many_tiles(room: cases.Room, arch: str, kernels: check.Kernels) -> None:
    """More blocks than the GPU holds at once; each tile's product is that of the tile alone."""
    plan = room.plan(MANY_TILES, target(room, arch))
    few = rooms.operands(room.plan(4, target(room, arch)), "integers", seed=3)
    given = {name: np.tile(array, (MANY_TILES // 4, 1, 1)) for name, array in few.items()}
    expected = rooms.product(plan, few)
    with memory.placed_room(plan, given, kernels) as placed:
        found = placed.run()["c"].reshape(-1, *expected.shape)
    assert (found == expected).all()
