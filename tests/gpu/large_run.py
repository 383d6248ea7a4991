"""Large run: forward and backward of a problem too large for the host, and its sampled rows against float64.

Inputs are copied to the device from the host, or repeat a block of a prime number of rows: an address that wraps at a
power of two then reads other values. Outputs are filled with NaN, as is the memory behind them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import OPERANDS, Tensor
from cutlass_py_attn.reference.numpy_reference import DTYPES
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.arrays import numpy_dtype
from cutlass_py_attn.runtime.binding import bind_problem
from cutlass_py_attn.testing import check
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Array, Kernels
from cutlass_py_attn.testing.device_memory import ALL_ONES
from tests.gpu import sampled

PERIOD: Final = 4099  # rows of a repeated block
GUARD_BYTES: Final = 4096  # behind every output
SINGLE_COPIES: Final = 2048  # up to so many rows of one head are copied one by one, more with those of all heads


class Source(Protocol):
    """The values of an input, whose rows are numbered over all tokens and heads."""

    def rows(self, numbers: Array) -> Array:
        """Returns these rows."""

    def write(self, address: int, size: int) -> None:
        """Writes all rows, `size` bytes, to device memory."""


@dataclass(frozen=True)
class Host:
    """An array on the host: (rows, channels)."""

    array: Array

    def rows(self, numbers: Array) -> Array:
        return self.array[numbers]

    def write(self, address: int, size: int) -> None:
        assert self.array.nbytes == size
        driver.copy_to_device(address, self.array.ctypes.data, size, 0)
        driver.synchronise(0)


@dataclass(frozen=True)
class Repeated:
    """A block of PERIOD rows, (PERIOD, channels), again and again."""

    block: Array

    def rows(self, numbers: Array) -> Array:
        return self.block[numbers % PERIOD]

    def write(self, address: int, size: int) -> None:
        written = min(self.block.nbytes, size)
        driver.copy_to_device(address, self.block.ctypes.data, written, 0)
        while written < size:
            more = min(written, size - written)
            driver.call("cuMemcpyDtoDAsync", address + written, address, more, 0)
            written += more
        driver.synchronise(0)


def repeated(case: Case) -> dict[str, Source]:
    """Returns inputs of a case that repeat blocks of normal numbers."""
    rng, shape = np.random.default_rng(case.seed), case.shape
    names = (*OPERANDS, "grad_output") if case.direction == "backward" else OPERANDS
    blocks = {name: rng.standard_normal((PERIOD, shape.of(name)[3]), np.float32) for name in names}
    return {name: Repeated(block.astype(DTYPES[case.spec.dtype])) for name, block in blocks.items()}


@dataclass(frozen=True, slots=True)
class Sample:
    """Tokens of one head of a sequence or batch element: the queries and keys of these numbers."""

    batch: int
    head: int
    tokens: tuple[int, ...]


@dataclass
class LargeRun:
    """A case in device memory. `launch` runs its kernels, `check` compares samples; use `large_run` to create one."""

    case: Case
    sources: Mapping[str, Source]
    addresses: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def launch(self, kernels: Kernels, family: str) -> None:
        """Runs the forward, and for a backward case the backward, with kernels of this family alone."""
        directions = ("forward", "backward") if self.case.direction == "backward" else ("forward",)
        for direction in directions:
            case = self.case.replace(direction=direction)
            bound = bind_problem(case.problem(), check.only_family(kernels, family, direction))
            assert bound.plan.build.family == family
            bound({name: self.addresses[name] for name in bound.tensor_names})
            driver.synchronise(0)

    def check(self, samples: Iterable[Sample]) -> None:
        """Compares the results of every sample with float64; AssertionError for one that is too far away."""
        for sample in samples:
            self._check(sample, "forward")
            if self.case.direction == "backward":
                self._check(sample, "grad_query")
                self._check(sample, "grad_key_value")

    def expect_guards(self) -> None:
        """AssertionError if the memory behind an output changed."""
        for name, tensor in self.tensors.items():
            if name not in self.sources:
                found = np.zeros(GUARD_BYTES, np.uint8)
                _read(found, self.addresses[name] + _bytes_of(tensor))
                assert (found == 0xFF).all(), f"memory behind {name} changed"

    def expect_written(self, names: Iterable[str]) -> None:
        """AssertionError if an element of these outputs is NaN; reads them in full."""
        for name in names:
            tensor = self.tensors[name]
            found = np.empty(math.prod(tensor.shape), numpy_dtype(tensor.dtype))
            _read(found, self.addresses[name])
            missing = np.flatnonzero(np.isnan(found))
            assert not missing.size, f"{name}: {missing.size} elements are NaN, the first is element {missing[0]}"

    def _check(self, sample: Sample, kind: str) -> None:
        of_keys = kind == "grad_key_value"
        rows = self._rows(sample, of_keys)
        truth, low = (getattr(sampled, kind)(rows, low=is_low) for is_low in (False, True))
        found = {name: self._found(name, sample) for name in truth}
        sampled.check(found, truth, low, f"{self.case.line}, {kind}, {sample}")

    def _rows(self, sample: Sample, of_keys: bool) -> sampled.Rows:
        """Returns the sampled tokens with every token that they see, or that sees them if they are keys."""
        queries, keys = self._lengths(sample.batch)
        chosen, mask = np.array(sample.tokens), self.case.spec.mask
        if of_keys:
            visible = mask.sees(np.arange(queries)[:, None], chosen[None, :], queries, keys)
            others = _range(visible.any(axis=1))
            visible, rows, columns = visible[others], others, chosen
        else:
            visible = mask.sees(chosen[:, None], np.arange(keys)[None, :], queries, keys)
            others = _range(visible.any(axis=0))
            visible, rows, columns = visible[:, others], chosen, others
        group = self.case.spec.num_heads // self.case.spec.num_heads_key
        given = {name: self._input(name, sample, rows, 1) for name in ("query", "grad_output") if name in self.sources}
        given |= {name: self._input(name, sample, columns, group) for name in ("key", "value")}
        if self.case.direction == "backward":
            given["output"] = self._device_rows("output", sample, rows)
            given["logsumexp"] = self._logsumexp(sample)[rows]
        wide = {name: np.asarray(array, np.float64) for name, array in given.items()}  # once, not for truth and low
        spec = self.case.spec
        return sampled.Rows(**wide, visible=visible, scale=self.case.problem().scale_value, dtype=DTYPES[spec.dtype])

    def _found(self, name: str, sample: Sample) -> Array:
        tokens = np.array(sample.tokens)
        return self._logsumexp(sample)[tokens] if name == "logsumexp" else self._device_rows(name, sample, tokens)

    def _lengths(self, batch: int) -> tuple[int, int]:
        spec = self.case.spec
        if not spec.sequences:
            return spec.num_queries, spec.num_keys
        return spec.sequences[batch].num_queries, spec.sequences[batch].num_keys

    def _first(self, name: str, batch: int) -> int:
        """Returns the number of the first token of a sequence or batch element in a tensor."""
        of_queries = name in ("query", "output", "grad_output", "grad_query")
        which = 0 if of_queries else 1
        if not self.case.spec.sequences:
            return batch * self._lengths(0)[which]
        return sum(self._lengths(before)[which] for before in range(batch))

    def _input(self, name: str, sample: Sample, tokens: Array, group: int) -> Array:
        heads = self.tensors[name].shape[2]
        return self.sources[name].rows((self._first(name, sample.batch) + tokens) * heads + sample.head // group)

    def _device_rows(self, name: str, sample: Sample, tokens: Array) -> Array:
        tensor, first = self.tensors[name], self._first(name, sample.batch)
        _, _, heads, channels = tensor.shape
        dtype = numpy_dtype(tensor.dtype)
        row = channels * dtype.itemsize
        if len(tokens) > SINGLE_COPIES:
            whole = np.empty((len(tokens), heads, channels), dtype)
            assert tokens[-1] - tokens[0] == len(tokens) - 1, "a range"
            _read(whole, self.addresses[name] + (first + int(tokens[0])) * heads * row)
            return np.ascontiguousarray(whole[:, sample.head])
        found = np.empty((len(tokens), channels), dtype)
        for index, token in enumerate(tokens):
            place = (first + int(token)) * heads + sample.head
            driver.copy_to_host(found[index].ctypes.data, self.addresses[name] + place * row, row, 0)
        driver.synchronise(0)
        return found

    def _logsumexp(self, sample: Sample) -> Array:
        _, heads, rows = self.tensors["logsumexp"].shape
        found = np.empty(rows, np.float32)
        _read(found, self.addresses["logsumexp"] + (sample.batch * heads + sample.head) * found.nbytes)
        return found


def _range(seen: Array) -> Array:
    """Returns the numbers from the first to the last element that is true; none if all are false."""
    places = np.flatnonzero(seen)
    return np.arange(places[0], places[-1] + 1) if places.size else places


def _read(array: Array, address: int) -> None:
    driver.copy_to_host(array.ctypes.data, address, array.nbytes, 0)
    driver.synchronise(0)


def _bytes_of(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * numpy_dtype(tensor.dtype).itemsize


def _tensors(problem: Problem) -> dict[str, Tensor]:
    """Returns every tensor of forward and backward but the vectors."""
    return {**problem.tensors(), "logsumexp": Tensor.contiguous(problem.shape.logsumexp, "float32")}


@contextmanager
def large_run(case: Case, sources: Mapping[str, Source]) -> Iterator[LargeRun]:
    """Context manager with the tensors of a case in device memory, the inputs written; frees them at the end."""
    run = LargeRun(case, sources)
    with ExitStack() as stack:
        run.tensors = _tensors(case.problem())
        for name, tensor in run.tensors.items():
            size = _bytes_of(tensor)
            address = run.addresses[name] = driver.allocate_now(size + GUARD_BYTES, f"{name} of a large problem")
            stack.callback(driver.free_now, address)
            if name in sources:
                sources[name].write(address, size)
            else:
                driver.call("cuMemsetD32Async", address, ALL_ONES, (size + GUARD_BYTES) // 4, 0)
        for name, values in case.feature_arrays(case.problem(), np.random.default_rng(0)).items():
            address = run.addresses[name] = driver.allocate_now(values.nbytes, name)
            stack.callback(driver.free_now, address)
            Host(values).write(address, values.nbytes)
        driver.synchronise(0)
        stack.callback(driver.call, "cuCtxSynchronize")
        yield run


def samples_at(case: Case, elements: Sequence[int], *, width: int = 3) -> list[Sample]:
    """Returns samples of `width` tokens around the query rows that hold these elements of the query tensor."""
    shape, spec = case.shape, case.spec
    _, _, heads, channels = shape.of("query")
    found = []
    for element in elements:
        token, head = divmod(element // channels, heads)
        batch = 0
        while spec.sequences and token >= spec.sequences[batch].num_queries:
            token -= spec.sequences[batch].num_queries
            batch += 1
        if not spec.sequences:
            batch, token = divmod(token, spec.num_queries)
        length = spec.sequences[batch].num_queries if spec.sequences else spec.num_queries
        first = max(0, min(token - width // 2, length - width))
        found.append(Sample(batch, head, tuple(range(first, min(first + width, length)))))
    return found
