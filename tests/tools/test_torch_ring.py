"""Tests of the ring of torch's operators, a peer of the benchmark: on the CPU, with ranks that are threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn import distributed
from tools.bench.torch_ring import Exchange, Flash, Ring, tiles

HEADS, HEADS_KEY, HEAD_DIM = 4, 2, 8


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_visible_pair_is_in_one_tile(size: int) -> None:
    rows, whole = 6, 6 * size
    order = [
        np.concatenate([np.arange(whole)[part] for part in distributed.rows_of_rank(rank, size, whole, "zigzag")])
        for rank in range(size)
    ]
    seen = np.zeros((whole, whole), int)
    for rank in range(size):
        for turn, tile in enumerate(tiles(rank, size, rows)):
            queries, keys = order[rank][tile.queries], order[(rank - turn) % size][tile.keys]
            visible = queries[:, None] >= keys[None] if tile.is_causal else np.ones((queries.size, keys.size), bool)
            seen[queries[:, None], keys[None]] += visible
    assert (seen == np.tri(whole)).all()


class Plain:
    """Attention in plain operations of torch, and its gradients from a logsumexp of more keys."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def scores(self, query: Any, key: Any, is_causal: bool) -> Any:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        scores = query @ key.transpose(2, 3) / query.shape[3] ** 0.5
        visible = self.torch.ones(scores.shape[2:], dtype=self.torch.bool).tril()
        return scores.masked_fill(~visible, -np.inf) if is_causal else scores

    def forward(self, query: Any, key: Any, value: Any, is_causal: bool) -> tuple[Any, Any]:
        scores = self.scores(query, key, is_causal)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        return scores.softmax(-1) @ value, scores.logsumexp(-1)

    def backward(
        self, grad_output: Any, query: Any, key: Any, value: Any, output: Any, logsumexp: Any, is_causal: bool
    ) -> tuple[Any, ...]:
        group = query.shape[1] // key.shape[1]
        weights = (self.scores(query, key, is_causal) - logsumexp[..., None]).exp()
        spread = value.repeat_interleave(group, 1)
        delta = (grad_output * output).sum(-1, keepdim=True)
        of_scores = weights * (grad_output @ spread.transpose(2, 3) - delta) / query.shape[3] ** 0.5

        def summed(array: Any) -> Any:
            return array.unflatten(1, (-1, group)).sum(2)

        of_key = summed(of_scores.transpose(2, 3) @ query)
        return of_scores @ key.repeat_interleave(group, 1), of_key, summed(weights.transpose(2, 3) @ grad_output)


def of_threads(size: int, work: Callable[[int, Exchange], Any]) -> list[Any]:
    """Returns what each rank returns; ranks are threads, which send through queues."""
    places: list[queue.Queue[Any]] = [queue.Queue() for _ in range(size)]
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        def exchange(outgoing: Any) -> tuple[Callable[[], None], Any]:
            incoming = outgoing * np.nan
            places[(rank + 1) % size].put(outgoing.clone())
            return lambda: incoming.copy_(places[rank].get(timeout=30)), incoming

        found[rank] = work(rank, exchange)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_have_the_results_of_one(size: int) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    count = 8 * size
    shapes = [(2, count, heads, HEAD_DIM) for heads in (HEADS, HEADS_KEY, HEADS_KEY, HEADS)]
    query, key, value, grad_output = (torch.randn(shape) for shape in shapes)
    plain = Plain(torch)
    one = Ring(torch, 0, 1, plain, lambda outgoing: (lambda: None, outgoing))

    def both(ring: Ring, parts: Any) -> list[Any]:
        drawn = query, key, value, grad_output
        own = [torch.cat([array[:, part] for part in parts], 1) for array in drawn]
        output, logsumexp = ring.forward(own[0], own[1], own[2])
        return [output, *ring.backward(own[3], own[0], own[1], own[2], output, logsumexp)]

    expected = both(one, [slice(None)])
    leaves = [array.clone().requires_grad_() for array in (query, key, value)]
    of_leaves = [leaf.transpose(1, 2) for leaf in leaves]
    given, _ = plain.forward(of_leaves[0], of_leaves[1], of_leaves[2], True)
    given.transpose(1, 2).backward(grad_output)
    for array, leaf in zip(expected[1:], leaves, strict=True):
        torch.testing.assert_close(array, leaf.grad, rtol=1e-5, atol=1e-5)

    def rank_of(rank: int, exchange: Exchange) -> list[Any]:
        return both(Ring(torch, rank, size, plain, exchange), distributed.rows_of_rank(rank, size, count, "zigzag"))

    for rank, found in enumerate(of_threads(size, rank_of)):
        parts = distributed.rows_of_rank(rank, size, count, "zigzag")
        for array, wanted in zip(found, expected, strict=True):
            own = torch.cat([wanted[:, part] for part in parts], 1)
            torch.testing.assert_close(array, own, rtol=1e-5, atol=1e-5)


def test_the_operators_take_what_the_ring_gives() -> None:
    """Shapes alone, on torch's device without memory, by the operators of the GPU."""
    torch = pytest.importorskip("torch")
    query, key = (torch.empty(1, heads, 64, 128, device="meta", dtype=torch.bfloat16) for heads in (32, 8))
    output, logsumexp = Flash(torch).forward(query, key, key, True)
    assert (output.shape, logsumexp.shape) == (query.shape, query.shape[:3])
    found = Flash(torch).backward(output, query, key, key, output, logsumexp, True)
    assert [array.shape for array in found] == [query.shape, key.shape, key.shape]
