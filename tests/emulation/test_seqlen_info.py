"""kernels/common/seqlen_info.py: its machine code, executed on wrong lengths, stays inside of the tensors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cutlass_py_attn.launch import abi
from cutlass_py_attn.plan import launch_rules, planner
from cutlass_py_attn.problem import spec
from tests.support.ptx_threads import Array, Threads
from tests.support.traced import compile_traced

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
TOKENS, LONGEST = (1700, 3000), (900, 1300)  # queries, keys
OUTPUT = 256
BLOCKS = 8


def wrong_bounds(rng: np.random.Generator, tokens: int, longest: int, count: int) -> Array:
    """Bounds in which every two of many values follow each other."""
    edges = [0, 1, 63, 64, longest, tokens]
    near = [edge + more for edge, more in itertools.product(edges, (-1, 0, 1))]
    values = np.array([*near, INT_MIN, INT_MIN + 1, INT_MAX, INT_MAX - 1, -tokens, 2**30, -(2**30)])
    return rng.choice(values, count).astype(np.int32)


@pytest.mark.parametrize("name", ["bf16_d64_n900x1300u9_h1_full", "bf16_d128_n900x1300_h1_causal"])
def test_rows_are_inside(name: str) -> None:
    seqlen_kernel = pytest.importorskip("tests.support.seqlen_kernel")
    problem = spec.parse(name).problem("backward", unused_tokens=(TOKENS[0] - LONGEST[0], TOKENS[1] - LONGEST[1]))
    build = planner.plan(problem, "sm_90").build
    ptx = compile_traced(build, seqlen_kernel.trace).ptx
    rng, count = np.random.default_rng(4), BLOCKS * build.threads
    bounds = [wrong_bounds(rng, *sizes, count + 1) for sizes in zip(TOKENS, LONGEST, strict=True)]
    used = wrong_bounds(rng, TOKENS[1], LONGEST[1], count)
    infos = np.zeros((count, len(seqlen_kernel.FIELDS)), np.int32)
    named = {"output": infos, "cu_seqlens_q": bounds[0], "cu_seqlens_k": bounds[1], "seqused_k": used}
    starts = dict(zip(named, OUTPUT + np.cumsum([0, *(array.nbytes for array in named.values())]), strict=False))
    parts = (np.zeros(OUTPUT, np.uint8), *(array.reshape(-1).view(np.uint8) for array in named.values()))
    memory = np.concatenate(parts)
    struct = np.zeros(1, abi.numpy_struct(abi.fields_of(build)))
    for field, value in {**dict(launch_rules.params(problem, build)), **starts}.items():
        struct[field] = value
    Threads(ptx, (BLOCKS, 1), build.threads, memory, struct).run()
    found = memory[OUTPUT : OUTPUT + infos.nbytes].view(np.int32).reshape(infos.shape).astype(np.int64)
    query_start, num_queries, key_start, stored, num_keys, first_tile = found.T
    sides = (query_start, num_queries), (key_start, stored)
    for (start, size), given, tokens, longest in zip(sides, bounds, TOKENS, LONGEST, strict=True):
        first, last = given[:-1].astype(np.int64).clip(0, tokens), given[1:].astype(np.int64).clip(0, tokens)
        np.testing.assert_array_equal(start, first)
        np.testing.assert_array_equal(size, (last - first).clip(0, longest))
    expected = stored if "seqused" not in build.features else np.minimum(np.maximum(used, 0), stored)
    np.testing.assert_array_equal(num_keys, expected)
    np.testing.assert_array_equal(first_tile, query_start // build.tile_m + np.arange(count))
    # Every tile is one of the workspace, the only one of a sequence without queries too.
    tiles = np.maximum(-(-num_queries // build.tile_m), 1)
    assert (first_tile + tiles <= TOKENS[0] // build.tile_m + np.arange(count) + 1).all()
