"""Builder: from a Problem, a target and a TileConfig to a Build."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from cutlass_py_attn.kernels.backward_parts.kernel import grad_bias_mode
from cutlass_py_attn.kernels.catalogue import fused_kernel_of
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan import build_rules
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import BIASES, Tensor
from cutlass_py_attn.refusals import Refusal


def build_for(problem: Problem, arch: str, tile: TileConfig, family: str) -> tuple[Build, list[Refusal]]:
    """Returns the Build of a tile, and why no kernel body can be built like this.

    The Build has warps of each product and a shared-memory map only if the list is empty. Whether it then fits the
    target is what `resources.refusals` says.
    """
    return next(builds_for(problem, arch, (tile,), family))


def builds_for(
    problem: Problem, arch: str, tiles: Iterable[TileConfig], family: str
) -> Iterator[tuple[Build, list[Refusal]]]:
    """Yields `build_for` of each tile; what the problem alone decides is computed once."""
    decided = _decided_by(problem)
    for tile in tiles:
        build = Build(
            family=family,
            variant=tile.variant,
            arch=arch,
            tile_m=tile.tile_m,
            tile_n=tile.tile_n,
            warps=tile.warps,
            query_stages=tile.query_stages,
            grad_output_stages=tile.grad_output_stages,
            register_usage_level=tile.register_usage_level,
            head_dim_split=tile.head_dim_split,
            score_rows=tile.score_rows,
            key_stages=tile.key_stages,
            options=tile.options or (),
            **decided,
        )
        yield _finished(build)


def _decided_by(problem: Problem) -> dict[str, Any]:
    """Returns the fields of a Build that do not depend on the tile, and those that `_finished` replaces."""
    shape = problem.shape
    none = (0, 0)
    return {
        "kind": problem.direction,
        "dtype": problem.dtype,
        "head_dim": shape.head_dim,
        "head_dim_value": shape.head_dim_value,
        "mask": str(problem.form),
        "warps_scores": none,
        "warps_grad_v": none,
        "warps_grad_k": none,
        "warps_grad_q": none,
        "deterministic": problem.deterministic and problem.direction != "forward" and problem.grad_query is not None,
        "min_blocks_per_sm": 0,
        "component_gemm": "",
        "shared_memory": (),
        "features": problem.features,
        "gradients": problem.gradients,
        "vector_bytes": row_vector_bytes(problem),
        "bias_vector_bytes": bias_vector_bytes(problem.bias),
        "grad_bias_vector_bytes": bias_vector_bytes(problem.grad_bias),
        "grad_bias_mode": grad_bias_mode(problem),
    }


def _finished(build: Build) -> tuple[Build, list[Refusal]]:
    """Returns the Build with warps of each product and a shared-memory map, or why no kernel body can be built so."""
    refused = build_rules.refusals(build)
    if refused:
        return build, refused
    kernel = fused_kernel_of(build)
    build = kernel.with_warps(build)
    return replace(build, shared_memory=kernel.shared_memory(build)), []


def row_vector_bytes(problem: Problem) -> int:
    """Returns the bytes of one load or store of a row of query, key, value and so on: what suits all of them."""
    return min(tensor.vector_bytes for name, tensor in problem.tensors().items() if name not in BIASES)


def bias_vector_bytes(tensor: Tensor | None) -> int:
    """Returns the bytes of one load of a row of a bias; 0 for no bias."""
    return 0 if tensor is None else tensor.vector_bytes
