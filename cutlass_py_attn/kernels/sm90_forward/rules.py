"""Rules of the sm90 forward: with which tile, warps and stages it can be built, beside those of build_rules.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cutlass_py_attn.kernels.kernel import Refusals, refuse
from cutlass_py_attn.kernels.sm90_common.layout import LOAD_WARPGROUPS
from cutlass_py_attn.kernels.sm90_common.rules import WGMMA_DEPTH, consumers, sm90_standard
from cutlass_py_attn.kernels.sm90_forward.layout import FORWARD_REGISTERS
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_ROWS, WARPGROUP_WARPS
from cutlass_py_attn.launch.variants import MULTICAST, SPLIT_KV

SM90_TILE_N: Final = (64, 256)  # least and most keys of the forward; wgmma has up to 256 columns


def forward_rows(build: Build, row_choices: Iterable[int]) -> Refusals:
    """Yields the rules of every forward whose warpgroups have query rows each, of so many in all."""
    yield from sm90_standard(build)
    wrong_warps = [*consumers(build, LOAD_WARPGROUPS, tuple(rows // WARPGROUP_ROWS for rows in row_choices))]
    yield from wrong_warps
    rows = (build.warps // WARPGROUP_WARPS - LOAD_WARPGROUPS) * WARPGROUP_ROWS
    if not wrong_warps and build.tile_m != rows:
        yield refuse(build, "tile_m", f"each warpgroup owns {WARPGROUP_ROWS} rows", f"use {rows}, or other warps")


def forward_keys(build: Build) -> Refusals:
    """Yields the rules of the keys of a tile of a forward of 16-bit operands."""
    least, most = SM90_TILE_N
    if build.tile_n % WGMMA_DEPTH or not least <= build.tile_n <= most:
        rule = f"wgmma sums over {WGMMA_DEPTH} keys at once"
        yield refuse(build, "tile_n", rule, f"use a multiple of that from {least} to {most}")
    if build.has("dropout") and build.tile_n % WARPGROUP_ROWS:
        rule = "each thread has whole words of dropout bits"
        yield refuse(build, "tile_n", rule, f"use a multiple of {WARPGROUP_ROWS}")


def two_key_tiles(build: Build) -> Refusals:
    """Yields the rule that a forward has two key tiles in flight."""
    if build.query_stages < 2:
        yield refuse(build, "query_stages", "the next key tile is loaded while this one is multiplied", "use 2 or more")


def sm90_forward(build: Build) -> Refusals:
    """Yields the rules of the forwards of 16-bit operands of narrower heads."""
    yield from forward_rows(build, FORWARD_REGISTERS)
    yield from forward_keys(build)
    yield from two_key_tiles(build)
    if build.variant == MULTICAST and not build.form.grows:
        yield refuse(build, "mask", "variant multicast is built for causal masks", "use the standard variant")
    if build.variant == SPLIT_KV and build.form.has_left:
        yield refuse(build, "mask", "windows have few key tiles to share", "use the standard variant")
    if build.variant == MULTICAST and build.tile_m != 2 * WARPGROUP_ROWS:
        yield refuse(build, "tile_m", "variant multicast has two warpgroups that compute", f"use {2 * WARPGROUP_ROWS}")
