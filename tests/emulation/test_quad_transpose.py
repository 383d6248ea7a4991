"""Quad transpose, and the emulated exp2 of the softmax, executed by NumPy for all threads at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.kernels.common import quad_transpose
from cutlass_py_attn.kernels.sm90_forward import softmax_poly_exp2

LANES = np.arange(4)


def lanes_of(words: list[Any]) -> Any:
    """Returns what `transpose_quad` returns, (lane, word); each of `words` is an array over the lanes."""
    return np.stack(quad_transpose.transpose_quad(words, LANES), axis=1)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _on_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quad_transpose, "_select", np.where)
    monkeypatch.setattr(quad_transpose.cute.arch, "shuffle_sync_bfly", lambda value, offset: value[LANES ^ offset])


def test_lane_i_gets_word_i_of_every_lane() -> None:
    """Word w of lane q is 10 q + w; afterwards lane q has word q of lanes 0 to 3."""
    words = [10 * LANES + word for word in range(4)]
    assert lanes_of(words).tolist() == [[10 * other + lane for other in range(4)] for lane in range(4)]


def test_the_transpose_is_its_own_inverse() -> None:
    words = [10 * LANES + word for word in range(4)]
    once = lanes_of(words)
    assert lanes_of([once[:, word] for word in range(4)]).tolist() == np.stack(words, axis=1).tolist()


def test_the_polynomial_of_the_emulated_exp2() -> None:
    """Computed in float32 as in the kernel: the relative error is below 1.1e-4, and minus infinity gives 0."""
    f32 = np.float32
    x = np.maximum(np.append(np.linspace(-126, 8, 100_001), -np.inf).astype(f32), f32(softmax_poly_exp2.LOWEST))
    shifted = x + f32(softmax_poly_exp2.ROUNDER)
    fraction = x - (shifted - f32(softmax_poly_exp2.ROUNDER))
    assert np.abs(fraction).max() <= 0.5
    power = np.full_like(x, softmax_poly_exp2.COEFFICIENTS[-1])
    for coefficient in (*softmax_poly_exp2.COEFFICIENTS[-2::-1], 1.0):
        power = power * fraction + f32(coefficient)
    bits = power.view(np.int32) + (shifted.view(np.int32) << softmax_poly_exp2.EXPONENT_BIT)
    found = bits.view(f32)
    assert found[-1] == 0.0
    assert np.abs(found[:-1] / np.exp2(x[:-1].astype(np.float64)) - 1).max() < 1.1e-4
