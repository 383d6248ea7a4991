"""Machines: what the strategies of split rows need of a device, on the GPU (gpu.py) and in NumPy (host.py).

Arrays are Views on the GPU and NumPy arrays on the host. Both have shape and dtype, and are cut by slices of step 1.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cutlass_py_attn.api.options import Options
from cutlass_py_attn.distributed.communicator import Message
from cutlass_py_attn.distributed.group import Group
from cutlass_py_attn.distributed.views import is_dense
from cutlass_py_attn.integers import round_up
from cutlass_py_attn.problem.tensors import LSE_PADDING
from cutlass_py_attn.score_terms import registry

Arrays = dict[str, Any]


class Machine(ABC):
    """Computes one rank's part of a call, and exchanges arrays with the other ranks of its group."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.agree: Callable[[], None] = lambda: None  # waits until all ranks are known to make this call

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Returns a new dense array."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Returns a new dense array of zeros."""

    @abstractmethod
    def constant(self, values: np.ndarray[Any, Any]) -> Any:
        """Returns a copy of a host array."""

    @abstractmethod
    def result(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        """Returns a new dense array that the caller gets."""

    @abstractmethod
    def copy(self, target: Any, source: Any) -> None:
        """Copies an array to another of the same shape and dtype."""

    @abstractmethod
    def fill_infinite(self, logsumexp: Any) -> None:
        """Sets every element of a dense float32 array to +inf."""

    @abstractmethod
    def forward(self, options: Options, operands: Arrays, output: Any = None) -> Arrays:
        """Returns output and logsumexp of one call of this device. output: array for it; None for a new one."""

    @abstractmethod
    def backward(self, options: Options, operands: Arrays, gradients: tuple[str, ...]) -> Arrays:
        """Returns the gradients by the names of their operands."""

    @abstractmethod
    def merge(self, total: Any, logsumexp: Any, part: Any, logsumexp_part: Any) -> Any:
        """Merges a part into a total, in place, and returns the logsumexp of both.

        total: float32, or of the part's dtype
        """

    @abstractmethod
    def add(self, total: Any, part: Any, target: Any = None) -> None:
        """Adds a part to a float32 total. target: array for the sum, float32 or of the part's dtype; None for total."""

    @abstractmethod
    def start(self, sends: list[Message], receives: list[Message]) -> Callable[[], None]:
        """Starts an exchange of dense arrays behind the work so far; the function makes later work wait for it."""

    def dense(self, array: Any) -> Any:
        """Returns the array, copied if its elements do not follow each other."""
        if is_dense(array):
            return array
        copy = self.empty(tuple(array.shape), str(array.dtype))
        self.copy(copy, array)
        return copy

    def exchange(self, sends: list[Message], receives: list[Message]) -> Callable[[], None]:
        """Starts an exchange of arrays with any strides; the function that it returns ends the exchange.

        A message of a rank to itself is copied at once. An array that several ranks get is made dense once. The
        function keeps what is sent and received alive until later work waits for the exchange: memory that is freed
        earlier may be another array's while it is still read.
        """
        rank = self.group.rank
        pairs: list[tuple[Any, Any]] = []  # arrays, and the dense buffers for them
        own = [array for target, array in sends if target == rank]
        for array, target in zip(own, (array for source, array in receives if source == rank), strict=True):
            self.copy(target, array)
        others = [(target, array) for target, array in sends if target != rank and 0 not in array.shape]
        dense = {number: self.dense(array) for number, array in {id(array): array for _, array in others}.items()}
        outgoing = [(target, dense[id(array)]) for target, array in others]
        incoming: list[Message] = []
        for source, array in receives:
            if source != rank and 0 not in array.shape:
                buffer = array if is_dense(array) else self.empty(tuple(array.shape), str(array.dtype))
                incoming.append((source, buffer))
                pairs += [] if buffer is array else [(array, buffer)]
        self.agree()
        wait = self.start(outgoing, incoming) if outgoing or incoming else lambda: None

        def finish() -> None:
            wait()
            dense.clear()
            outgoing.clear()
            incoming.clear()
            for target, buffer in pairs:
                self.copy(target, buffer)
            pairs.clear()

        return finish

    def round_to(self, total: Any, target: Any) -> None:
        """Rounds a float32 total to the dtype of another array."""
        if str(target.dtype) == "float32":
            self.copy(target, total)
        else:
            self.add(total, self.zeros(tuple(target.shape), str(target.dtype)), target)

    def widened(self, part: Any) -> Any:
        """Returns a copy in float32."""
        total = self.zeros(tuple(part.shape), "float32")
        self.add(total, part)
        return total

    def rows_of_logsumexp(self, logsumexp: Any, first: int, count: int, rows: int) -> Any:
        """Returns some rows of a logsumexp (batch, heads, ceil32(rows)), padded with +inf to a multiple of LSE_PADDING.

        rows: that the logsumexp has without its padding
        """
        if first == 0 and count == rows:
            return self.dense(logsumexp)
        batch, heads, _ = logsumexp.shape
        found = self.empty((batch, heads, round_up(count, LSE_PADDING)), "float32")
        self.fill_infinite(found)
        self.put_rows(found, 0, logsumexp, first, count)
        return found

    def put_rows(self, target: Any, at: int, logsumexp: Any, first: int, count: int) -> None:
        """Copies some rows of a logsumexp to rows of another."""
        everything = slice(None)
        source = logsumexp[everything, everything, first : first + count]
        self.copy(target[everything, everything, at : at + count], source)

    def add_all(self, pieces: list[Any], target: Any) -> None:
        """Stores the sum of arrays of one dtype, added in float32 in their order, in an array of any dtype.

        The first array is changed.
        """
        total = pieces[0] if str(pieces[0].dtype) == "float32" else self.widened(pieces[0])
        for piece in pieces[1:]:
            self.add(total, piece)
        self.round_to(total, target)

    def sum_over_ranks(self, part: Any, target: Any) -> None:
        """Stores the sum of all ranks' parts on every rank, added in float32 in the order of the ranks."""
        ranks, part = range(self.group.size), self.dense(part)
        pieces = [self.empty(tuple(part.shape), str(part.dtype)) for _ in ranks]
        self.exchange([(rank, part) for rank in ranks], [*zip(ranks, pieces, strict=True)])()
        self.add_all(pieces, target)


def along(axis: int, first: int, last: int) -> tuple[slice, ...]:
    """Returns the index of a range along an axis."""
    return (*[slice(None)] * axis, slice(first, last))


def as_options(options: Options, operands: Mapping[str, Any], **changes: Any) -> Options:
    """Returns options with the arrays that are among the operands, and changes."""
    found: dict[str, Any] = {name: operands.get(name) for name in registry.array_options()} | changes
    found = {name: value for name, value in found.items() if value is not getattr(options, name)}
    return dataclasses.replace(options, **found) if found else options
