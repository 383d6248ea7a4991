"""Quads: the exchange that gives each thread of four a vector of neighbouring columns, run on four lanes at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.parts import mixed_softmax, quads

LANES = np.arange(4)


def lanes_of(words: list[Any]) -> Any:
    """What `turned` gives, [lane, word], where a word is an array over the lanes."""
    return np.stack(quads.turned(words, LANES), axis=1)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _on_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quads, "_choice", np.where)
    monkeypatch.setattr(quads.cute.arch, "shuffle_sync_bfly", lambda value, offset: value[LANES ^ offset])


def test_a_lane_gets_its_place_of_every_lane() -> None:
    """Lane q holds word w as 10 q + w; afterwards its words are those at place q, of lanes 0 to 3."""
    words = [10 * LANES + word for word in range(4)]
    assert lanes_of(words).tolist() == [[10 * lane + place for lane in range(4)] for place in range(4)]


def test_turned_twice_is_as_before() -> None:
    words = [10 * LANES + word for word in range(4)]
    turned = lanes_of(words)
    assert lanes_of([turned[:, word] for word in range(4)]).tolist() == np.stack(words, axis=1).tolist()


def test_the_polynomial_of_the_mixed_softmax() -> None:
    """As the kernel computes it, in float32: a hundredth of a per cent off at most, and 0 for minus infinity."""
    f32 = np.float32
    x = np.maximum(np.append(np.linspace(-126, 8, 100_001), -np.inf).astype(f32), f32(mixed_softmax.LOWEST))
    shifted = x + f32(mixed_softmax.ROUNDER)
    fraction = x - (shifted - f32(mixed_softmax.ROUNDER))
    assert np.abs(fraction).max() <= 0.5
    power = np.full_like(x, mixed_softmax.COEFFICIENTS[-1])
    for coefficient in (*mixed_softmax.COEFFICIENTS[-2::-1], 1.0):
        power = power * fraction + f32(coefficient)
    bits = power.view(np.int32) + (shifted.view(np.int32) << mixed_softmax.EXPONENT_BIT)
    found = bits.view(f32)
    assert found[-1] == 0.0
    assert np.abs(found[:-1] / np.exp2(x[:-1].astype(np.float64)) - 1).max() < 1.1e-4
