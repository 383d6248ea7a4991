"""kernels/decode/e4m3_cache.py: the order of codes, queries and outputs, by NumPy in place of the lanes of a warp."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cutlass_py_attn.kernels.decode import e4m3_cache
from cutlass_py_attn.kernels.decode.e4m3_cache import E4m3Cache
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem.spec import parse

Array = npt.NDArray[Any]
LANES = np.arange(32)
COLUMNS = (32, 64, 96, 128, 160, 192, 224, 256)


def cache_of(columns: int) -> E4m3Cache:
    """The codes of a team of 32 keys with these head dims."""
    name = f"bf16_d{columns}_q1_s512_b1_h8k2_full_paged16_kv8"
    return E4m3Cache(planner.plan(parse(name).problem("forward"), "sm_90").build, 32, 32)


def stored(cache: E4m3Cache, name: str, rows: Array) -> Array:
    """A tile in shared memory, one number in place of each byte."""
    found = np.full(rows.size, -1.0)
    row, byte = np.indices(rows.shape)
    found[cache.byte_of(name, row, byte)] = rows
    return found


@pytest.mark.parametrize("columns", COLUMNS)
def test_a_tile_has_a_place_for_every_code(columns: int) -> None:
    cache = cache_of(columns)
    for name in e4m3_cache.NAMES:
        rows = np.arange(32.0 * columns).reshape(32, columns)
        assert sorted(stored(cache, name, rows)) == sorted(rows.reshape(-1))


@pytest.mark.parametrize("columns", COLUMNS)
def test_scores_are_the_products_of_query_and_key(columns: int) -> None:
    """B of m16n8k16: lane l has k of 2 (l % 4) and the next, and those 8 behind, of column l // 4."""
    rng = np.random.default_rng(columns)
    cache, keys, query = cache_of(columns), rng.integers(-8, 9, (32, columns)), rng.integers(-8, 9, columns)
    memory = stored(cache, "key", keys)
    in_order = np.zeros(columns)
    in_order[e4m3_cache.query_column(columns, np.arange(columns))] = query
    lane_bytes = 16 if columns % 64 == 0 else 8
    found = np.zeros(32)
    for step in range(columns // 16):
        block, word = divmod(step, lane_bytes // 4)
        for tile in range(4):
            row = tile * 8 + LANES // 4
            first = block * 4 * lane_bytes + LANES % 4 * lane_bytes
            place = cache.byte_of("key", row, first)
            for code in range(4):
                depth = code % 2 + code // 2 * 8 + 2 * (LANES % 4)
                np.add.at(found, row, memory[place + 4 * word + code] * in_order[step * 16 + depth])
    np.testing.assert_array_equal(found, keys @ query)


@pytest.mark.parametrize("columns", COLUMNS)
def test_outputs_are_found_where_the_products_left_them(columns: int) -> None:
    """A transposed matrix gives lane l the pairs of columns l // 4 of rows 2 (l % 4) and the next."""
    rng = np.random.default_rng(columns)
    cache, values, weights = cache_of(columns), rng.integers(-8, 9, (32, columns)), rng.integers(-8, 9, 32)
    memory = stored(cache, "value", values)
    output = np.zeros(columns)
    for step in range(2):
        for pair in range(columns // 32):
            for matrix in range(4):  # addresses of lanes 8 matrix to 8 matrix + 7
                chunk, half = divmod(matrix, 2)
                for parity in range(2):
                    column = (pair * 4 + chunk * 2 + parity) * 8 + LANES // 4
                    for odd in range(2):
                        row = 2 * (LANES % 4) + odd
                        lane = matrix * 8 + row
                        address = cache.byte_of("value", step * 16 + lane % 16, (pair * 2 + lane // 16) * 16)
                        code = memory[address + 2 * (LANES // 4) + parity]
                        np.add.at(output, column, code * weights[step * 16 + half * 8 + row])
    pairs = np.arange(0, columns, 2)
    found = np.stack([output[e4m3_cache.output_column(pairs, odd)] for odd in range(2)], axis=1).reshape(-1)
    np.testing.assert_array_equal(found, weights @ values)


@pytest.mark.parametrize("columns", COLUMNS)
def test_no_banks_collide(columns: int) -> None:
    """Lanes that shared memory serves at once read 128 different bytes modulo 128."""
    cache, lane_bytes = cache_of(columns), 16 if columns % 64 == 0 else 8
    at_once = 128 // lane_bytes
    for first in range(0, 32, at_once):
        lanes = LANES[first : first + at_once]
        places = cache.byte_of("key", lanes // 4, lanes % 4 * lane_bytes)
        assert len(set((places % 128 // lane_bytes).tolist())) == at_once
    for matrix in range(4):
        lanes = np.arange(matrix * 8, matrix * 8 + 8)
        places = cache.byte_of("value", lanes % 16, lanes // 16 * 16)
        assert len(set((places % 128 // 16).tolist())) == 8
