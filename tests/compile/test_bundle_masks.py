"""Tests of masks in memory in bundles: every host launches visible blocks, and ranges beside them, as `bind` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cutlass_py_attn.bundle.files import Bundle, export_bundle, export_library
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem import spec
from cutlass_py_attn.problem.mask_function import MaskFunction
from cutlass_py_attn.problem.masks import Window
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import DIRECTIONS, Tensor
from cutlass_py_attn.runtime.driver import device
from tests.support import fake_driver
from tests.support.bundle_hosts import (
    HeaderHost,
    RustHost,
    bound_calls,
    exported,
    header_calls,
    manifest_calls,
    numbers_of,
    rust_calls,
)
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import artifact
from tests.support.listed_plans import with_blocks, with_ranges

EXPORTED, OTHER = "bf16_d128_s512_b2_h4k2_causal", "bf16_d128_q300_s1000_b3_h12k3_full"
AXES = ((True, True), (False, True), (True, False), (False, False))


@pytest.fixture
def log(driver_log: FakeDriver) -> FakeDriver:
    fake_driver.need_compiler("the header")
    return driver_log


@pytest.fixture(scope="module")
def rust(tmp_path_factory: pytest.TempPathFactory) -> RustHost:
    return RustHost(tmp_path_factory.mktemp("rust"))


def problems_of(direction: str, axes: tuple[bool, bool], has_ranges: bool) -> tuple[Problem, Problem]:
    """The exported problem, and one of other sizes, blocks, strides and band with the same axes."""
    first, second = (spec.parse(case).problem(direction) for case in (EXPORTED, OTHER))
    first, second = with_blocks(first, axes=axes), with_blocks(second, (256, 384), axes).replace(mask=Window(70, 3))
    blocks = second.visible_blocks
    assert blocks is not None
    apart = Tensor(blocks.shape, tuple(2 * step for step in blocks.strides), "uint8")
    second = second.replace(visible_blocks=apart)
    return (with_ranges(first, (1, 1)), with_ranges(second, (1, 1))) if has_ranges else (first, second)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_every_host_launches_visible_blocks(
    log: FakeDriver, rust: RustHost, tmp_path: Path, axes: tuple[bool, bool], direction: str
) -> None:
    problems = problems_of(direction, axes, has_ranges=axes[0])
    bundle = exported(tmp_path / "bundle", problems[:1])
    assert bundle.problem(direction) == problems[0]
    host = HeaderHost(tmp_path, bundle, direction, "c")
    for problem in problems:
        wanted = bound_calls(log, bundle, problem)
        roles = [launch.symbol.split("_")[-2] for launch in bundle.plans(direction)[0].launches]
        assert roles[:3] == ["ranges", "lists", "order"]
        assert header_calls(log, host, bundle, problem) == wanted
        assert manifest_calls(log, bundle, problem) == wanted
        assert rust_calls(log, rust, bundle, problem) == wanted


def test_blocks_of_every_query_head(log: FakeDriver, tmp_path: Path) -> None:
    """In a forward."""
    first, second = (spec.parse(case).problem("forward") for case in (EXPORTED, OTHER))
    first, second = (with_blocks(each, heads=each.shape.num_heads) for each in (first, second))
    bundle = exported(tmp_path / "bundle", (first,))
    host = HeaderHost(tmp_path, bundle, "forward")
    for problem in (first, second):
        assert header_calls(log, host, bundle, problem) == bound_calls(log, bundle, problem)


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_strides_of_contiguous_arrays(log: FakeDriver, tmp_path: Path, axes: tuple[bool, bool]) -> None:
    """Of sizes that were set; 0 along the axes that the exported arrays do not have."""
    lists = 2 if axes[0] else 1, 4 if axes[1] else 1
    others = 3 if axes[0] else 1, 12 if axes[1] else 1
    first, second = (spec.parse(case).problem("backward") for case in (EXPORTED, OTHER))
    first, second = (
        with_ranges(with_blocks(first, axes=axes), lists),
        with_ranges(with_blocks(second, axes=axes), others),
    )
    bundle = exported(tmp_path / "bundle", (first,))
    host = HeaderHost(tmp_path, bundle, "backward")
    wanted = numbers_of(bundle, second).inputs
    host.set({name: wanted[name] for name in ("batch", "num_queries", "num_keys", "num_heads", "num_heads_key")})
    host.set({name: wanted[name] for name in ("window_left", "window_right", "bottom_right")})
    host.contiguous()
    assert {name: host.values()[name] for name in wanted} == wanted


LONG = {"num_queries": 2**25, "num_keys": 2**25}
WRONG = {
    "mask_block_rows": (0, "mask_block_rows must be at least 1"),
    "mask_block_columns": (
        192, "mask_block_columns must be a multiple of 128, of which a tile is; export a problem with such a block_size"
    ),
    "window_left": (-1, "window_left must be at least 0"),
    "bottom_right": (2, "bottom_right must be 0 or 1"),
    "key_start": (0x7F0000000002, "key_start must be a device address, 4-byte aligned"),
    "key_end": (0, "key_end must be a device address, 4-byte aligned"),
    "visible_blocks": (0, "visible_blocks must be a device address, 1-byte aligned"),
}  # fmt: skip


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, HeaderHost, Problem]:
    fake_driver.need_compiler("the header")
    FakeDriver()  # loads the library in which the header's functions are found
    folder = tmp_path_factory.mktemp("forward")
    problem, _ = problems_of("forward", (True, True), has_ranges=True)
    bundle = exported(folder / "bundle", (problem,))
    return bundle, HeaderHost(folder, bundle, "forward"), problem


@pytest.mark.parametrize("name", WRONG)
def test_header_refuses(log: FakeDriver, opened: tuple[Bundle, HeaderHost, Problem], name: str) -> None:
    bundle, host, problem = opened
    given = numbers_of(bundle, problem)
    value, words = WRONG[name]
    with device(0).current():
        assert host.open(bundle.path) == 0
        host.set({**given.inputs, **given.addresses, name: value})
        log.clear()
        assert host.launch() == -1
        assert log.calls == []
    assert host.error == f"forward: {words}"


def test_header_refuses_lists_that_a_launch_cannot_count(
    log: FakeDriver, opened: tuple[Bundle, HeaderHost, Problem]
) -> None:
    bundle, host, problem = opened
    given = numbers_of(bundle, problem)
    says = "forward: tile_entries would have more than 2147483647 numbers; call once for each slice"
    with device(0).current():
        assert host.open(bundle.path) == 0
        host.set({**given.inputs, **given.addresses, **LONG})
        host.contiguous()
        assert (host.workspace_bytes(), host.error) == (-1, says)


@pytest.mark.parametrize("export", [export_bundle, export_library])
def test_mask_functions_are_refused(tmp_path: Path, export: Any) -> None:
    mask = MaskFunction(lambda batch, head, query, key: (query + key) % 2 == 0)
    problem = spec.parse(EXPORTED).problem("forward").replace(**mask.numbers())
    says = "must be None, for the structs of exported calls have no fields for the arrays of mask functions"
    with pytest.raises(NotSupported, match=says):
        export(tmp_path / "made", [problem], ["sm_90a"], kernels=artifact)
    assert not [*tmp_path.iterdir()]
