"""Tests of score_terms/philox.py and dropout.py: known words, what is kept, and which word belongs to which element."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cutlass_py_attn.score_terms import dropout as dropout_term
from cutlass_py_attn.score_terms.dropout import Dropout, dropout_mask, keep_mask, keep_scale, threshold
from cutlass_py_attn.score_terms.philox import uniforms, words

WORDS = [0x9CEAF053, 0x77F5493B, 0x12BF50AD, 0x5742B3D7, 0xFCDB2127, 0x53BA6CFD, 0x838F5A6E, 0x744E06FB]
UNIFORMS = [0.61295986, 0.4685865, 0.07323173, 0.34086156, 0.98771864, 0.32706338, 0.5139061, 0.4543156]
PROBABILITIES = [
    *(0.0, 1e-40, 1e-12, 1.1641532e-10, 1.17e-10, 3.4e-10, 1e-9, 1e-6, 0.1, 0.3, 1 / 3, 0.5, 0.5 + 2**-24),
    *(0.7, 0.75, 0.9, 0.999, 1 - 2**-12, 1 - 2**-23, 1 - 2**-24),
]  # fmt: skip
SIZES = st.integers(1, 9)
WORD = st.integers(0, 2**32 - 1)


def block(counter: int, seed: int) -> list[int]:
    """Philox-4x32-10 as its paper writes it, on Python ints."""
    c, k = [counter % 2**32, counter >> 32, 0, 0], [seed % 2**32, seed >> 32]
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(second >> 32) ^ c[1] ^ k[0], second % 2**32, (first >> 32) ^ c[3] ^ k[1], first % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def rule(word: int, dropout_p: float) -> bool:
    """keep, step by step in float32."""
    number = np.float32(np.float32(np.uint32(word)) * np.float32(2.0**-32))
    return bool(np.float32(number + np.float32(2.0**-33)) > np.float32(dropout_p))


def test_known_words() -> None:
    found = words(42, np.arange(8))
    assert found.dtype == np.uint32
    assert found.tolist() == WORDS
    assert words(42, np.arange(8).reshape(2, 2, 2)[::-1]).tolist() == [
        [WORDS[4:6], WORDS[6:]],
        [WORDS[:2], WORDS[2:4]],
    ]
    assert words(42, np.array(5)).shape == ()


def test_known_uniforms() -> None:
    found = uniforms(np.array(WORDS, np.uint32))
    assert found.dtype == np.float32
    assert [round(number, 8) for number in map(float, map(str, found))] == UNIFORMS
    assert uniforms(np.array([0, 2**32 - 1], np.uint32)).tolist() == [2**-33, 1.0]


def test_known_mask() -> None:
    rows = ["11011", "11111", "11111", "11110", "10000", "11011"]
    expected = np.array([[int(digit) for digit in row] for row in rows], bool).reshape(1, 2, 3, 5)
    found = dropout_mask(Dropout(0.3, 42), 1, 2, 3, 5)
    assert found.dtype == np.bool_
    assert (found == expected).all()


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5))
def test_words_of_any_seed_and_index(seed: int, indices: list[int]) -> None:
    expected = [block(index >> 2, seed)[index & 3] for index in indices]
    assert words(seed, np.array(indices, np.uint64)).tolist() == expected


def test_a_negative_seed_is_its_64_bits() -> None:
    index = np.arange(8)
    assert (words(-3, index) == words(2**64 - 3, index)).all()


@pytest.mark.parametrize("dropout_p", PROBABILITIES)
def test_threshold_is_the_first_word_kept(dropout_p: float) -> None:
    first = threshold(dropout_p)
    near = range(max(first - 600, 0), min(first + 600, 2**32))  # some steps of float32, whichever binade
    assert [rule(word, dropout_p) for word in near] == [word >= first for word in near]
    assert rule(2**32 - 1, dropout_p)
    assert first == 0 or not rule(0, dropout_p)


@settings(deadline=None)
@given(st.floats(0, 1), WORD)
def test_threshold_is_the_rule(dropout_p: float, word: int) -> None:
    if np.float32(dropout_p) < 1:
        assert rule(word, dropout_p) == (word >= threshold(dropout_p))


def test_thresholds_at_the_ends() -> None:
    assert threshold(0.0) == threshold(1e-10) == 0
    assert threshold(1e-6) == 4295
    assert threshold(0.5) == 2**31 + 129  # 2**31 + 128 lies halfway to the next float32, and rounds to even
    assert threshold(1 - 2**-24) == 2**32 - 128


@pytest.mark.parametrize("dropout_p", [1.0, 1 - 1e-9])
def test_nothing_is_kept(dropout_p: float) -> None:
    assert threshold(dropout_p) == 2**32 - 1
    assert keep_scale(dropout_p) == 0.0
    assert not rule(2**32 - 1, dropout_p)
    assert not keep_mask(Dropout(dropout_p, 1), 0, 50, 50).any()


def test_scale() -> None:
    assert keep_scale(0.0) == 1.0
    assert keep_scale(0.5) == 2.0
    assert keep_scale(1 - 2**-24) == 2.0**24
    for dropout_p in PROBABILITIES:
        assert keep_scale(dropout_p) == np.float32(1.0 / (1.0 - float(np.float32(dropout_p))))


@pytest.mark.parametrize("dropout_p", [-0.1, 1.1, float("nan"), float("inf")])
def test_no_probability(dropout_p: float) -> None:
    for call in (lambda: threshold(dropout_p), lambda: keep_scale(dropout_p)):
        with pytest.raises(ValueError, match="dropout_p = "):
            call()
    with pytest.raises(ValueError, match="must be from 0 to 1"):
        dropout_mask(Dropout(dropout_p, 1), 1, 1, 2, 2)


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**60), SIZES, SIZES)
@example(2**64 - 18, 2, 9, 9)  # the stream ends and starts again within the matrix
def test_element_takes_its_word(offset: int, base: int, num_queries: int, num_keys: int) -> None:
    """Offsets that are no multiples of four too."""
    dropout = Dropout(0.5, 7, offset)
    first = (offset + base) % 2**64
    index = np.uint64(first) + np.arange(num_queries * num_keys, dtype=np.uint64).reshape(num_queries, num_keys)
    kept = uniforms(words(7, index)) > np.float32(0.5)
    assert (keep_mask(dropout, base, num_queries, num_keys) == kept).all()


def test_masks_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    dropout = Dropout(0.4, 9, 2**34 - 100)
    whole = keep_mask(dropout, 3, 37, 41)
    monkeypatch.setattr(dropout_term, "_BLOCKS_AT_ONCE", 5)
    assert (keep_mask(dropout, 3, 37, 41) == whole).all()


def test_no_elements() -> None:
    assert keep_mask(Dropout(0.4, 9, 3), 0, 0, 5).shape == (0, 5)
    assert dropout_mask(Dropout(0.4, 9, 3), 2, 0, 4, 5).shape == (2, 0, 4, 5)


def test_dense_mask_is_one_run_of_the_stream() -> None:
    dropout = Dropout(0.6, 2**40 + 1, 5)
    kept = words(dropout.philox_seed, 5 + np.arange(2 * 3 * 4 * 7)) >= threshold(0.6)
    assert (dropout_mask(dropout, 2, 3, 4, 7) == kept.reshape(2, 3, 4, 7)).all()


def test_varlen_counts_the_longest_and_walks_its_own() -> None:
    """Sequence 1, head 2 of 3, of lengths up to 6 queries and 10 keys; it has 4 and 7."""
    base = (1 * 3 + 2) * 6 * 10
    index = 8 + base + np.arange(4)[:, None] * 7 + np.arange(7)
    kept = words(1, index) >= threshold(0.2)
    assert (keep_mask(Dropout(0.2, 1, 8), base, 4, 7) == kept).all()


def test_share_of_the_kept() -> None:
    kept = keep_mask(Dropout(0.3, 123), 0, 1000, 1000)
    assert abs(kept.mean() - 0.7) < 5 * np.sqrt(0.3 * 0.7 / kept.size)


def test_offsets_advance_by_whole_blocks() -> None:
    assert [Dropout(0.1, 1, 8).advance(used) for used in (0, 1, 4, 5)] == [8, 12, 12, 16]
    assert Dropout(0.1, 1).advance(2**40 + 1) == 2**40 + 4


def test_activity() -> None:
    assert Dropout(0.1, 1).is_active
    assert Dropout(1.0, 1).is_active
    assert not Dropout(0.0, 1).is_active
