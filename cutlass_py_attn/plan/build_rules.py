"""Build rules: which tile, warps, stages and variant a kernel body can be built with.

`refusals` reads the fields of a Build that come from a TileConfig and from the Problem. It needs neither the warps of
each product nor the shared-memory map, so the planner asks it before it computes those. The `kernel.py` of a body has
its own rules; resources.py adds what the target limits: shared memory, registers and threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cutlass_py_attn.kernels.catalogue import KERNELS, kernel_of
from cutlass_py_attn.kernels.kernel import FusedKernel, Kernel, listed, refuse
from cutlass_py_attn.kernels.sm90_family import tile_options
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.variants import SPLIT_D
from cutlass_py_attn.refusals import Refusal

REGISTER_USAGE_LEVELS: Final = range(11)  # that ptxas has


def refusals(build: Build) -> list[Refusal]:
    """Returns every reason why no kernel body can be built like this."""
    found = [*_body(build)] or [*_positive(build)]
    if found:
        return found
    kernel = kernel_of(build)
    if not isinstance(kernel, FusedKernel):
        return []
    return [*_features(build, kernel), *_unused(build, kernel), *tile_options.refusals(build), *kernel.refusals(build)]


def _body(build: Build) -> Iterator[Refusal]:
    """Kind, family and variant name a kernel body, and the variant alone decides whether the head dim is split."""
    families = [family for kind, family, _ in KERNELS if kind == build.kind]
    names = [name for kind, family, name in KERNELS if (kind, family) == (build.kind, build.family)]
    if not families:
        kinds = tuple(dict.fromkeys(kind for kind, _, _ in KERNELS))
        yield refuse(build, "kind", "no kernel has this kind", f"use {listed(kinds)}")
    elif not names:
        yield refuse(build, "family", f"has no {build.kind} kernel", f"use {listed(tuple(dict.fromkeys(families)))}")
    elif build.variant not in names:
        allowed = listed(tuple(repr(name) for name in names))
        yield refuse(build, "variant", f"the {build.family} {build.kind} has no such variant", f"use {allowed}")
    elif build.variant == SPLIT_D and build.head_dim_split == 0:
        yield refuse(build, "head_dim_split", "variant split_d splits the head dims", "set the columns of one block")
    elif build.variant != SPLIT_D and build.head_dim_split != 0:
        yield refuse(build, "head_dim_split", "only variant split_d splits the head dims", "use 0, or that variant")


def _positive(build: Build) -> Iterator[Refusal]:
    for field in ("tile_m", "tile_n", "warps", "query_stages", "key_stages"):
        if getattr(build, field) < 1:
            yield refuse(build, field, "must be at least 1", "increase it")
    least = 1 if build.kind == "backward" else 0
    if build.grad_output_stages < least:
        yield refuse(build, "grad_output_stages", f"must be at least {least}", "increase it")
    if build.score_rows < 0:
        yield refuse(build, "score_rows", "must be at least 0, which means all rows of the tile", "increase it")
    if build.register_usage_level not in REGISTER_USAGE_LEVELS:
        yield refuse(build, "register_usage_level", "ptxas has levels 0 to 10", "use one of them")


def _features(build: Build, kernel: Kernel) -> Iterator[Refusal]:
    missing = kernel.lacks(build)
    if missing:
        name = f"variant {build.variant}" if build.variant else "standard variant"
        yield refuse(
            build,
            "features",
            f"the {name} of the {build.family} {build.kind} has no {', '.join(missing)}",
            "use another",
        )


def _unused(build: Build, kernel: FusedKernel) -> Iterator[Refusal]:
    """Fields that this body ignores must have the value that stands for none."""
    if build.kind == "forward" and build.grad_output_stages:
        yield refuse(build, "grad_output_stages", "a forward reads no grad_output", "use 0")
    if not kernel.has_key_stages and build.key_stages != 1:
        yield refuse(build, "key_stages", "only the sm90 backward has stages of the key tile", "use 1")
    if not kernel.has_key_stages and build.score_rows:
        yield refuse(build, "score_rows", "only the sm90 backward splits the rows of a score product", "use 0")
