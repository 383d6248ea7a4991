"""Shared-memory maps: where each tile is stored in a block's shared memory and during which steps it is in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cutlass_py_attn.plan import (
    decode_smem,
    sm80_smem,
    sm90_e4m3,
    sm90_mla,
    sm90_smem,
    sm90_wide,
    sm90_wide_backward,
    split_d,
)
from cutlass_py_attn.plan.build import Buffer, Build
from cutlass_py_attn.plan.variants import (
    DS_REGISTERS,
    E4M3,
    E4M3_CACHE,
    KEY_REGISTERS,
    MLA,
    MULTICAST,
    PER_HEAD,
    PERSISTENT,
    QUERY_HEADS,
    SPLIT_D,
    SPLIT_KV,
    STANDARD,
    TWO_CTA,
    WIDE,
)

# The numbered steps of the fused kernels: a buffer's first and last step count in these.
STEPS: Final = {
    "forward": ("load", "S", "softmax", "O", "store"),
    "backward": ("load", "S", "P", "dP", "dS", "dV", "dK", "dQ", "store"),
    "component_gemm": (),
    "append": (),
    "merge": (),
}
_MAPS: Final[dict[tuple[str, str, str], Callable[[Build], tuple[Buffer, ...]]]] = {
    ("forward", "sm80", STANDARD): sm80_smem.forward_map,
    ("backward", "sm80", STANDARD): sm80_smem.backward_map,
    ("forward", "sm80", SPLIT_D): split_d.split_d_map,
    ("backward", "sm80", SPLIT_D): split_d.split_d_map,
    ("forward", "sm90", STANDARD): sm90_smem.forward_map,
    ("forward", "sm90", MULTICAST): sm90_smem.forward_map,
    ("forward", "sm90", SPLIT_KV): sm90_smem.forward_map,
    ("forward", "sm90", WIDE): sm90_wide.forward_map,
    ("forward", "sm90", E4M3): sm90_e4m3.forward_map,
    ("forward", "sm90", E4M3_CACHE): sm90_smem.forward_map,
    ("forward", "sm90", MLA): sm90_mla.forward_map,
    ("backward", "sm90", STANDARD): sm90_smem.backward_map,
    ("backward", "sm90", PER_HEAD): sm90_smem.backward_map,
    ("backward", "sm90", QUERY_HEADS): sm90_smem.backward_map,
    ("backward", "sm90", DS_REGISTERS): sm90_smem.backward_map,
    ("backward", "sm90", KEY_REGISTERS): sm90_smem.backward_map,
    ("backward", "sm90", TWO_CTA): sm90_smem.backward_2cta_map,
    ("backward", "sm90", WIDE): sm90_wide_backward.backward_map,
    ("forward", "decode", STANDARD): decode_smem.decode_map,
    ("forward", "decode", PERSISTENT): decode_smem.persistent_map,
}


def shared_memory_map(build: Build) -> tuple[Buffer, ...]:
    """Returns the shared-memory map of the main kernel of `build`."""
    return _MAPS[build.kind, build.family, build.variant](build)
