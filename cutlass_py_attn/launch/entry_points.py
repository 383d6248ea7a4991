"""Entry points: the kernels of a Build's cubin, their symbols, thread counts and parameters."""

from __future__ import annotations

from typing import Final

from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS
from cutlass_py_attn.launch.variants import PER_HEAD, QUERY_HEADS, WIDE
from cutlass_py_attn.problem.tensors import F32_BYTES, RANGE_BYTES, STATE_BYTES

_SUFFIXES: Final = {
    "main": "",
    "delta": "delta_",
    "finish": "finish_",
    "finish_kv": "finish_kv_",
    "bias": "bias_",
    "sinks": "sinks_",
    "combine": "combine_",
    "ranges": "ranges_",
    "pairs": "pairs_",
    "lists": "lists_",
    "order": "order_",
}
LIST_ROLES: Final = ("ranges", "pairs", "lists", "order")
_LAUNCH_ORDER: Final = (*LIST_ROLES, "delta", "main", "combine", "finish", "finish_kv", "bias", "sinks")
ROW_THREADS: Final = 128  # of a block of the kernels that compute row by row
PAIR_THREADS: Final = 512  # of a block of entry pairs
PAIRS_BYTES: Final = PAIR_THREADS // WARP_THREADS * STATE_BYTES  # shared memory: the states of each warp's tiles
DELTA_LANES: Final = 8  # threads that share a row of O and dO in the delta kernel
DELTA_ROWS: Final = ROW_THREADS // DELTA_LANES
COMBINE_WARPS: Final = ROW_THREADS // WARP_THREADS
SINKS_BYTES: Final = ROW_THREADS // WARP_THREADS * F32_BYTES  # shared memory: a partial sum of each warp

# Of value in pages: the tensor map of the tile with the last key. Its rows behind the last key are read as zeros.
LAST_VALUE: Final = "value_last"


def mapped_field(name: str) -> str:
    """Returns the struct field of the array that the tensor map `name` describes."""
    return "value" if name == LAST_VALUE else name


def entries(build: Build) -> dict[str, str]:
    """Returns the symbol of each entry of the build's cubin by its role, in the order of the plan's launches.

    main: the fused kernel; a backward for grad_bias or grad_sinks alone has none
    ranges, lists, order: make the tile lists of a mask in memory (kernels/tile_lists)
    pairs: between these, computes a mask function
    combine: joins the splits of a decode, or of shared query tiles; a plan with one split does not launch it
    delta: backward preprocess, the row statistics
    finish: backward postprocess, converts the float32 query gradient
    finish_kv: converts the float32 gradients of key and value, if several query heads add to them
    bias: separate grad_bias kernel, if the main kernel does not write grad_bias
    sinks: gradient of the sinks
    """
    backward = build.kind == "backward"
    needed = {
        "main": build.has_main,
        "combine": build.has_combine,
        "delta": backward,
        "finish": backward and "query" in build.gradients and build.variant not in (PER_HEAD, WIDE),
        "finish_kv": build.variant == QUERY_HEADS,
        "bias": "bias" in build.gradients and build.grad_bias_mode != "main",
        "sinks": "sinks" in build.gradients,
        **dict.fromkeys(LIST_ROLES, build.form.has_ranges),
        "pairs": bool(build.form.program),
    }
    # The compiler numbers the entries in the order in which the host function launches them, which is this one.
    present = [role for role, is_needed in needed.items() if is_needed]
    symbols = {role: f"{build.symbol}_{_SUFFIXES[role]}{number}" for number, role in enumerate(present)}
    return {role: symbols[role] for role in _LAUNCH_ORDER if role in symbols}


def is_dependent_launch(build: Build, role: str) -> bool:
    """Returns whether the entry is launched before the entry ahead of it has ended (programmatic dependent launch).

    Its kernel waits for that end itself (kernels/common/dependent_launch.py), before it reads or writes what the entry
    ahead touches. The first entry of a plan is launched like any other kernel, so it waits for whatever the stream did
    before.
    """
    if role in LIST_ROLES[1:] or (role == "main" and build.kind == "forward" and build.form.has_ranges):
        return True
    if build.kind == "forward":
        return build.shares_query_tiles and role == "combine"
    return build.family == "sm90" and build.kind == "backward" and role in ("main", "finish", "finish_kv")


def ranges_bytes(build: Build) -> int:
    """Returns the shared memory of entry ranges: the range of each row, and the first and last key of each warp's."""
    return (build.tile_m + ROW_THREADS // WARP_THREADS) * RANGE_BYTES


def delta_clears_sums(build: Build) -> bool:
    """Returns whether the delta kernel sets the sums of dQ and the counters to zero, so that no memset has to.

    The sums of dK and dV of variant query_heads have other tiles than the delta kernel. Variant wide has no sums.
    """
    return build.family == "sm90" and build.kind == "backward" and build.variant not in (PER_HEAD, QUERY_HEADS, WIDE)


def entry_symbols(build: Build) -> tuple[str, ...]:
    """Returns the entries of the build's cubin, in the order of the plan's launches."""
    return tuple(entries(build).values())
