"""Context model: the time of causal attention whose rows are split over GPUs, from one GPU's time and bytes that move.

    time = one GPU's time / GPUs  +  bytes that a GPU receives / bandwidth  +  merges of the ring

Nothing is taken to run beside anything else, launches take no time, and all GPUs are equally busy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

FORWARD, BOTH = "forward", "both"  # the forward; forward and backward
ALL_GATHER, ULYSSES, RING = "all_gather", "ulysses", "ring"
STRATEGIES: Final = (ALL_GATHER, ULYSSES, RING)
JAX, NCCL = "jax", "nccl"  # the entries: cutlass_py_attn.jax and cutlass_py_attn.distributed
_ITEM_BYTES: Final = 2  # bfloat16
_F32_BYTES: Final = 4
_PASSES_OF_A_MERGE: Final = 3  # over a float32 output: two reads and a write


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes and speeds.

    heads, heads_key, head_dim: of the whole call; the batch is 1
    one_gpu: milliseconds of one GPU by (FORWARD or BOTH, tokens); another number of tokens takes its square's share of
        the largest
    host, network: bytes in a second that a GPU receives while it sends as many, within a host and between hosts
    gpus_of_host: GPUs that one host has
    memory: bytes in a second of device memory
    """

    heads: int
    heads_key: int
    head_dim: int
    one_gpu: Mapping[tuple[str, int], float]
    host: float
    network: float
    gpus_of_host: int
    memory: float

    def is_possible(self, strategy: str, gpus: int) -> bool:
        """Returns whether a strategy splits these heads over so many GPUs."""
        return strategy != ULYSSES or self.heads % math.lcm(self.heads_key, gpus) == 0

    def alone(self, part: str, tokens: int) -> float:
        """Returns one GPU's milliseconds."""
        if (part, tokens) in self.one_gpu:
            return self.one_gpu[part, tokens]
        longest = max(count for name, count in self.one_gpu if name == part)
        return self.one_gpu[part, longest] * (tokens / longest) ** 2

    def received(self, strategy: str, part: str, tokens: int, gpus: int, entry: str) -> float:
        """Returns the bytes that a GPU receives."""
        rows = tokens / gpus
        keys = 2 * _ITEM_BYTES * self.heads_key * self.head_dim  # of key and value in a row
        queries = 2 * _ITEM_BYTES * self.heads * self.head_dim  # of query and output in a row
        if strategy == ULYSSES:
            keys *= math.lcm(self.heads_key, gpus) // self.heads_key  # key heads that are repeated
            moved = (gpus - 1) / gpus * rows
            # JAX keeps the exchanged operands for the backward; without it they are exchanged again.
            backward = queries + keys if entry == JAX else 2 * (queries + keys)
            return moved * (queries + keys) + (moved * backward if part == BOTH else 0)
        moved = (gpus - 1) * rows * keys
        sums = moved * _F32_BYTES / _ITEM_BYTES  # the gradients of keys and values
        return moved + (moved + sums if part == BOTH else 0)

    def milliseconds(self, strategy: str, part: str, tokens: int, gpus: int, entry: str) -> float:
        """Returns the time of a call."""
        bandwidth = self.host if gpus <= self.gpus_of_host else self.network
        seconds = self.received(strategy, part, tokens, gpus, entry) / bandwidth
        if strategy == RING:
            output = _F32_BYTES * tokens / gpus * self.heads * self.head_dim
            seconds += (gpus - 1) * _PASSES_OF_A_MERGE * output / self.memory
        return self.alone(part, tokens) / gpus + seconds * 1e3

    def share(self, strategy: str, part: str, tokens: int, gpus: int, entry: str) -> float:
        """Returns the share of a perfect split: one GPU's time / GPUs / time."""
        return self.alone(part, tokens) / gpus / self.milliseconds(strategy, part, tokens, gpus, entry)
