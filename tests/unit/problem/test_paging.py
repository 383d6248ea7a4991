"""Tests of caches in pages: every refusal, what problems derive, and the reference against plain loops."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api.attention import attention_forward
from cutlass_py_attn.api.paged import Paged
from cutlass_py_attn.problem.masks import CausalBottomRight, Full, Mask, Window
from cutlass_py_attn.problem.serialize import from_json, to_json
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.tensors import Shape, Tensor
from cutlass_py_attn.reference import paged
from tests.support import refused_pages
from tests.support.refusals import expect_all_of_module, expect_raised
from tests.support.refused_pages import BATCH, MAX_PAGES, PAGE_SIZE, POOL, paged_problem
from tests.support.requests import called


@pytest.mark.parametrize(("ask", "expected"), refused_pages.ALL.values(), ids=refused_pages.ALL)
def test_refusals(ask: Callable[[], Any], expected: list[str]) -> None:
    expect_raised(ask, expected)


@pytest.mark.parametrize("module", ["problem/paging.py", "api/paged.py"])
def test_no_refusal_is_left_out(module: str) -> None:
    expect_all_of_module(module, [ask for ask, _ in refused_pages.ALL.values()])


def test_what_a_problem_derives() -> None:
    problem = paged_problem()
    assert problem.reasons() == []
    assert problem.shape == Shape(BATCH, 2, MAX_PAGES * PAGE_SIZE, 4, 32, 32, 2, pool=(POOL, PAGE_SIZE))
    assert problem.features == ("grouped", "paged")
    assert not problem.is_empty
    assert not problem.has_ragged_rows
    assert {name: tensor.shape for name, tensor in problem.vectors().items()} == {
        "page_table": (BATCH, MAX_PAGES), "seqused_k": (BATCH,),
    }  # fmt: skip


def test_pools_without_pages() -> None:
    """No sequence has keys, whatever the table's shape: output 0, logsumexp -inf, or the sink."""
    empty = Tensor.contiguous((0, PAGE_SIZE, 2, 32), "float16")
    problem = paged_problem(key=empty, value=empty)
    assert problem.reasons() == []
    assert problem.shape.num_keys == 0
    assert not problem.is_empty
    pool = np.ones(empty.shape, np.float16)
    sequences = Paged(np.zeros((BATCH, MAX_PAGES), np.int32), np.zeros(BATCH, np.int32))
    query = np.ones((BATCH, 2, 4, 32), np.float16)
    output, logsumexp = attention_forward(query, pool, pool, sequences=sequences, backend="reference")
    assert not output.any()
    assert (logsumexp[:, :, :2] == -np.inf).all()
    assert (logsumexp[:, :, 2:] == np.inf).all()


@pytest.mark.parametrize(
    "name",
    [
        "bf16_d128_q1_s8192_b64_h32k8_full_paged16",
        "bf16_d128_n1x300u30,4x200u0_h4k2_causal_br_paged8",
        "f16_d64_n4x300u30,4x200u0_h4k2_full_softcap2_alibi_sinks_paged1",
    ],
)
def test_a_spec_names_pages(name: str) -> None:
    spec = parse(name)
    assert spec.name == name
    problem = spec.problem("forward")
    assert problem.reasons() == []
    assert problem.pages is not None
    assert problem.key.shape[1] == spec.page_size
    assert problem.pages.cu_seqlens_q == ("n1x300" in name)  # other counts for each sequence
    assert from_json(json.loads(json.dumps(to_json(problem)))) == problem


@pytest.mark.parametrize("size", [3, 12])
def test_a_page_size_is_a_power_of_two(size: int) -> None:
    problem = parse(f"bf16_d128_q1_s64_b2_h4_full_paged{size}").problem("forward")
    expect_raised(problem.check, ["page_size: must be a power of two"])


MASKS = (Full(), CausalBottomRight(), Window(5, 0))


def plain(query: np.ndarray, keys: list[np.ndarray], values: list[np.ndarray], mask: Mask) -> tuple[Any, Any]:
    """Output and logsumexp of one sequence and head by loops; keys and values: one row each."""
    count, total = query.shape[0], len(keys)
    output, logsumexp = np.zeros((count, values[0].size if values else query.shape[1])), np.full(count, -np.inf)
    for i in range(count):
        seen = [j for j in range(total) if mask.sees(i, j, count, total)]
        scores = np.array([float(query[i] @ keys[j]) / np.sqrt(query.shape[1]) for j in seen])
        if not seen:
            continue
        weights = np.exp(scores - scores.max())
        output[i] = sum(w * values[j] for w, j in zip(weights, seen, strict=True)) / weights.sum()
        logsumexp[i] = scores.max() + np.log(weights.sum())
    return output, logsumexp


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("page_size", [1, 4])
def test_reference_against_plain_loops(page_size: int, mask: Mask) -> None:
    rng = np.random.default_rng(page_size)
    lengths, queries, heads, group = np.array([9, 0, 4]), 3, 4, 2
    counts = -(-lengths // page_size)
    pages = int(counts.sum()) + 2
    key, value = (np.full((pages, page_size, heads // group, 8), np.nan) for _ in range(2))
    order, table = rng.permutation(pages), np.full((3, int(counts.max()) + 1), 1 << 30)
    for number, count in enumerate(counts):
        table[number, :count], order = order[:count], order[count:]
        for row in range(lengths[number]):
            for pool in (key, value):
                pool[table[number, row // page_size], row % page_size] = rng.standard_normal((heads // group, 8))
    query = rng.standard_normal((3, queries, heads, 8))
    dense = paged.PageTable(page_table=table, seqused_k=lengths)
    output, logsumexp = paged.forward(query, key, value, dense, mask=mask)
    assert (logsumexp[:, :, queries:] == np.inf).all()
    for number in range(3):
        for head in range(heads):
            places = [(table[number, j // page_size], j % page_size, head // group) for j in range(lengths[number])]
            found = plain(query[number, :, head], [key[at] for at in places], [value[at] for at in places], mask)
            np.testing.assert_allclose(output[number, :, head], found[0], rtol=0, atol=1e-12)
            np.testing.assert_allclose(logsumexp[number, head, :queries], found[1], rtol=0, atol=1e-12)
    starts = np.arange(4) * queries
    flat = np.concatenate([table[number, :count] for number, count in enumerate(counts)])
    packed = paged.PageTable(
        page_table=flat, seqused_k=lengths, cu_seqlens_q=starts, max_seqlen_q=queries,
        page_indptr=np.cumsum([0, *counts]),
    )  # fmt: skip
    again = paged.forward(query.reshape(1, -1, heads, 8), key, value, packed, mask=mask)
    np.testing.assert_array_equal(again[0].reshape(output.shape), output)
    np.testing.assert_array_equal(again[1], logsumexp)


def test_the_reference_is_a_backend() -> None:
    rng = np.random.default_rng(1)
    query = rng.standard_normal((2, 1, 2, 8)).astype(np.float32)
    key, value = (rng.standard_normal((5, 4, 2, 8)).astype(np.float32) for _ in range(2))
    table, lengths = np.array([[4, 1], [0, 2]]), np.array([6, 0])
    output, logsumexp = attention_forward(
        query, key, value, sequences=Paged(table, lengths), backend="reference", sinks=np.zeros(2, np.float32)
    )
    gathered = [pool[table[0]].reshape(1, 8, 2, 8)[:, :6] for pool in (key, value)]
    one = attention_forward(query[:1], *gathered, backend="reference", sinks=np.zeros(2, np.float32))
    np.testing.assert_allclose(output[:1], one[0], rtol=1e-6)
    np.testing.assert_allclose(logsumexp[:1, :, :1], one[1][:, :, :1], rtol=1e-6)
    assert (output[1] == 0).all()
    assert (logsumexp[1, :, 0] == 0).all()  # the sink alone


def test_one_length_may_have_any_stride() -> None:
    lengths = Tensor((1,), (7,), "int32")
    shapes = {"query": (1, 2, 4, 32), "key": (POOL, PAGE_SIZE, 2, 32), "value": (POOL, PAGE_SIZE, 2, 32)}
    given = {name: Tensor.contiguous(shape, "float16") for name, shape in shapes.items()}
    assert called(given=given, sequences=Paged(Tensor.contiguous((1, MAX_PAGES), "int32"), lengths)).reasons() == []
