"""Torch ring: causal attention in zigzag order by torch's flash attention operators, whose keys travel over NCCL.

A peer of bench_distributed. Each rank has the same two chunks of rows as there. Keys and values travel while a tile is
computed, and float32 sums of their gradients follow them; outputs are merged in float32 by their logsumexp.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

SECONDS: Final = 60.0  # that an exchange may wait
ALL: Final = slice(None)

# Sends a tensor to the next rank; returns a function that waits, and the tensor of the rank before.
Exchange = Callable[[Any], tuple[Callable[[], None], Any]]


@dataclass(frozen=True, slots=True)
class Tile:
    """The queries of a rank, and the keys that they see of one rank."""

    queries: slice
    keys: slice
    is_causal: bool


def tiles(rank: int, size: int, rows: int) -> Iterator[Tile]:
    """Yields a rank's tile with the keys of each rank, its own first, then those of the rank before it, and so on."""
    yield Tile(ALL, ALL, True)
    for turn in range(1, size):
        is_earlier = turn <= rank
        yield Tile(ALL, slice(rows // 2), False) if is_earlier else Tile(slice(rows // 2, None), ALL, False)


@dataclass(frozen=True, slots=True)
class Flash:
    """Torch's flash attention operators on a GPU. Arrays are [batch, heads, rows, head dim]; key heads may be fewer."""

    torch: Any

    def forward(self, query: Any, key: Any, value: Any, is_causal: bool) -> tuple[Any, Any]:
        """Returns output and logsumexp."""
        attend = self.torch.ops.aten._scaled_dot_product_flash_attention
        output, logsumexp, *_ = attend(query, key, value, 0.0, is_causal)
        return output, logsumexp

    def backward(
        self, grad_output: Any, query: Any, key: Any, value: Any, output: Any, logsumexp: Any, is_causal: bool
    ) -> tuple[Any, ...]:
        """Returns the gradients of query, key and value."""
        attend = self.torch.ops.aten._scaled_dot_product_flash_attention_backward
        lengths = None, None, query.shape[2], key.shape[2]  # of sequences; rows of query and of key
        unused = self.torch.empty(2, dtype=self.torch.uint64, device=query.device)  # state of dropout
        operands = grad_output, query, key, value, output, logsumexp.contiguous()
        found: tuple[Any, ...] = attend(*operands, *lengths, 0.0, is_causal, unused, unused)
        return found


@dataclass(frozen=True, slots=True)
class Ring:
    """One rank. flash: Flash, or what stands for it. Arrays of a call are [batch, rows, heads, head dim]."""

    torch: Any
    rank: int
    size: int
    flash: Any
    exchange: Exchange

    def forward(self, query: Any, key: Any, value: Any) -> tuple[Any, Any]:
        """Returns the output of this rank's rows, and their logsumexp as [batch, heads, rows]."""
        torch, query = self.torch, query.transpose(1, 2)
        pair = torch.stack([key, value])
        total: Any = None
        logsumexp: Any = None
        for turn, tile in enumerate(tiles(self.rank, self.size, query.shape[2])):
            wait, following = self.exchange(pair) if turn < self.size - 1 else (_no_wait, None)
            part, part_logsumexp = self.flash.forward(query[:, :, tile.queries], *_keys(pair, tile), tile.is_causal)
            if total is None:
                total, logsumexp = part.float(), part_logsumexp
            else:
                merge(torch, total[:, :, tile.queries], logsumexp[:, :, tile.queries], part.float(), part_logsumexp)
            wait()
            pair = following
        return total.to(query.dtype).transpose(1, 2), logsumexp

    def backward(
        self, grad_output: Any, query: Any, key: Any, value: Any, output: Any, logsumexp: Any
    ) -> tuple[Any, ...]:
        """Returns the gradients of this rank's rows of query, key and value."""
        torch = self.torch
        query, grad_output, output = (array.transpose(1, 2) for array in (query, grad_output, output))
        pair = torch.stack([key, value])
        grad_query: Any = None
        sums: Any = None
        following_sums: Any = None
        wait_for_sums = _no_wait
        for turn, tile in enumerate(tiles(self.rank, self.size, query.shape[2])):
            wait, following = self.exchange(pair) if turn < self.size - 1 else (_no_wait, None)
            rows = tile.queries
            operands = grad_output[:, :, rows], query[:, :, rows], *_keys(pair, tile), output[:, :, rows]
            of_query, *of_keys = self.flash.backward(*operands, logsumexp[:, :, rows], tile.is_causal)
            of_keys = torch.stack(of_keys).transpose(2, 3).float()
            wait_for_sums()
            if grad_query is None:
                grad_query, sums = of_query.float(), of_keys.contiguous()
            else:
                grad_query[:, :, rows] += of_query
                sums = following_sums
                sums[:, :, tile.keys] += of_keys
            wait_for_sums, following_sums = self.exchange(sums)  # the last one brings them to the rank of the keys
            wait()
            pair = following
        wait_for_sums()
        return grad_query.to(query.dtype).transpose(1, 2), *following_sums.to(query.dtype)


def merge(torch: Any, total: Any, logsumexp: Any, part: Any, part_logsumexp: Any) -> None:
    """Merges the output and logsumexp of further keys into those of the keys before them, in place."""
    total.lerp_(part, torch.sigmoid(part_logsumexp - logsumexp).unsqueeze(-1))
    logsumexp.copy_(torch.logaddexp(logsumexp, part_logsumexp))


def _keys(pair: Any, tile: Tile) -> Iterator[Any]:
    return (array[:, tile.keys].transpose(1, 2) for array in pair)


def _no_wait() -> None:
    """Nothing was sent."""


def connected(torch: Any, rank: int, size: int, address: str, device: int) -> Ring:
    """Returns a rank over NCCL. address: as in bench_distributed; a file beside its file is used."""
    place = f"file://{Path(address).resolve()}.torch" if "/" in address else f"tcp://{address}"
    torch.distributed.init_process_group(
        "nccl",
        init_method=place,
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=SECONDS),
        device_id=torch.device("cuda", device),
    )
    return Ring(torch, rank, size, Flash(torch), exchange_of(torch, rank, size))


def exchange_of(torch: Any, rank: int, size: int) -> Exchange:
    """Returns the exchange by the process group of torch.distributed."""
    distributed = torch.distributed

    def exchange(outgoing: Any) -> tuple[Callable[[], None], Any]:
        incoming = torch.empty_like(outgoing)
        messages = [
            distributed.P2POp(distributed.isend, outgoing, (rank + 1) % size),
            distributed.P2POp(distributed.irecv, incoming, (rank - 1) % size),
        ]
        pending = distributed.batch_isend_irecv(messages)

        def wait() -> None:
            for work in pending:
                work.wait()

        return wait, incoming

    return exchange
