"""Tests of launch/arch.py: what targets can do."""

from __future__ import annotations

from cutlass_py_attn.launch.arch import ARCHITECTURES


def test_vectors_are_added_from_compute_capability_9_0_on() -> None:
    """PTX: red.global with .v2 and .v4 requires sm_90."""
    for arch in ARCHITECTURES.values():
        assert arch.vector_red == (arch.compute_capability >= (9, 0)), arch.name
