"""A toy inference engine without a framework: continuous batching on a paged cache, decode in a captured CUDA graph.

python examples/serving_numpy.py            on a GPU
python examples/serving_numpy.py --small    a few conversations, by the reference on the CPU

The engine continues 64 conversations. A step computes one token of each conversation whose prompt is in the cache, and
chunks of the prompts that are not. A step without prompts launches a CUDA graph, captured once: an append and a decode.
The pools are too small for all conversations at once, so that they wait for pages that others free. All of them begin
with the same tokens, whose pages they share.

The model has one attention layer with random weights. Its projections are tables in host memory, so that NumPy and
cuda-python are enough. Every output is compared with float64 attention of the same conversation without pages.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from cutlass_py_attn import (
    AppendProblem,
    CausalBottomRight,
    Full,
    Mask,
    Paged,
    Pages,
    Problem,
    Tensor,
    append_to_cache,
    artifact_for,
    attention_forward,
    bind,
    plan_append,
    plan_forward,
)

DTYPE = np.dtype(ml_dtypes.bfloat16)


@dataclass
class Sizes:
    """Sizes of the model and of the engine.

    batch: conversations in one step. tokens: most tokens of a step with prompts. max_pages: of one conversation.
    prefix: tokens that all conversations begin with, a multiple of page_size.
    """

    num_heads: int = 32
    num_heads_key: int = 8
    head_dim: int = 128
    vocabulary: int = 512
    batch: int = 64
    tokens: int = 512
    num_pages: int = 1536
    page_size: int = 16
    max_pages: int = 80
    prefix: int = 64


SIZES = Sizes()
SMALL: dict[str, Any] = {  # for main, with backend="reference"
    "conversations": 10, "prompt": 24, "wanted": 6,
    "sizes": Sizes(4, 2, 16, 64, batch=5, tokens=16, num_pages=24, page_size=4, max_pages=9, prefix=8),
}  # fmt: skip


@dataclass
class Conversation:
    """tokens: the prompt and what was generated. wanted: tokens to generate still. stored: tokens in the cache."""

    tokens: list[int]
    wanted: int
    stored: int = 0
    pages: list[int] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)  # of attention, one for each generated token


class Model:
    """One attention layer: query, key and value of a token are a row of its token and one of its position."""

    def __init__(self, sizes: Sizes) -> None:
        rng = np.random.default_rng(0)
        tables = sizes.vocabulary, sizes.max_pages * sizes.page_size  # of tokens, and of positions
        heads = {"query": sizes.num_heads, "key": sizes.num_heads_key, "value": sizes.num_heads_key}
        self._tables = {
            name: [rng.standard_normal((rows, count, sizes.head_dim), np.float32) for rows in tables]
            for name, count in heads.items()
        }
        width = sizes.num_heads * sizes.head_dim
        self._logits = rng.standard_normal((width, sizes.vocabulary)) / width**0.5

    def rows(self, name: str, tokens: Any, positions: Any) -> Any:
        """Returns query, key or value of tokens at these positions: (tokens, heads, head_dim) bfloat16."""
        of_token, of_position = self._tables[name]
        return (of_token[tokens] + of_position[positions]).astype(DTYPE)

    def logits(self, output: Any) -> Any:
        """Returns the logits (tokens, vocabulary) of attention's output (tokens, num_heads, head_dim)."""
        return output.reshape(len(output), -1).astype(np.float64) @ self._logits


class PagePool:
    """Free pages, and how many conversations use each of the others."""

    def __init__(self, count: int) -> None:
        self.free = list(range(count))
        self.users = [0] * count

    def take(self, count: int) -> list[int]:
        """Returns free pages for one user."""
        return self.share([self.free.pop() for _ in range(count)])

    def share(self, pages: list[int]) -> list[int]:
        """Adds a user of these pages and returns them."""
        for page in pages:
            self.users[page] += 1
        return list(pages)

    def release(self, pages: list[int]) -> None:
        """Drops a user of these pages; those without users are free."""
        for page in pages:
            self.users[page] -= 1
            if not self.users[page]:
                self.free.append(page)


class Host:
    """Arrays of NumPy, for backend="reference"."""

    @staticmethod
    def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
        """Returns an array of zeros."""
        return np.zeros(shape, dtype)

    @staticmethod
    def write(array: Any, values: Any) -> None:
        """Replaces the values of an array."""
        array[...] = values

    @staticmethod
    def read(array: Any) -> Any:
        """Returns the values of an array."""
        return array.copy()

    @staticmethod
    def replay_us() -> float:
        """Returns NaN: there is no graph."""
        return float("nan")


class DeviceArray:
    """A dense array in device memory, which is never freed."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.nbytes = int(np.prod(shape)) * self.dtype.itemsize
        self.pointer = int(cuda_call("cuMemAlloc", self.nbytes))
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": self.dtype.str, "data": (self.pointer, False), "strides": None, "version": 3,
        }  # fmt: skip


class Device:
    """Arrays in the memory of the first GPU, written and read in the order of `stream`, and graphs of it."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        cuda_call("cuInit", 0)
        device = cuda_call("cuDeviceGet", 0)
        cuda_call("cuCtxSetCurrent", cuda_call("cuDevicePrimaryCtxRetain", device))
        parts = (
            driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
        self.arch = "sm_" + "".join(str(cuda_call("cuDeviceGetAttribute", part, device)) for part in parts)
        self.stream = int(cuda_call("cuStreamCreate", int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))
        self._before, self._after = cuda_call("cuEventCreate", 0), cuda_call("cuEventCreate", 0)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        """Returns an array of zeros."""
        array = DeviceArray(shape, dtype)
        cuda_call("cuMemsetD8Async", array.pointer, 0, array.nbytes, self.stream)
        return array

    def write(self, array: DeviceArray, values: Any) -> None:
        """Replaces the values of an array."""
        values = np.ascontiguousarray(np.broadcast_to(values, array.shape), array.dtype)
        cuda_call("cuMemcpyHtoDAsync", array.pointer, values.ctypes.data, array.nbytes, self.stream)

    def read(self, array: DeviceArray) -> Any:
        """Returns the values of an array, when all work before is complete."""
        values = np.empty(array.shape, array.dtype)
        cuda_call("cuMemcpyDtoHAsync", values.ctypes.data, array.pointer, array.nbytes, self.stream)
        cuda_call("cuStreamSynchronize", self.stream)
        return values

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Returns a function that launches a CUDA graph of what `launch` launches on the stream."""
        from cuda.bindings.driver import CUstreamCaptureMode

        launch()  # loads the kernels
        cuda_call("cuStreamSynchronize", self.stream)
        cuda_call("cuStreamBeginCapture", self.stream, CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        launch()
        graph = cuda_call("cuGraphInstantiate", cuda_call("cuStreamEndCapture", self.stream), 0)

        def replay() -> None:
            cuda_call("cuEventRecord", self._before, self.stream)
            cuda_call("cuGraphLaunch", graph, self.stream)
            cuda_call("cuEventRecord", self._after, self.stream)

        return replay

    def replay_us(self) -> float:
        """Returns the microseconds of the last launch of a graph; it is complete."""
        return 1000 * float(cuda_call("cuEventElapsedTime", self._before, self._after))


def cuda_call(name: str, *arguments: Any) -> Any:
    """Calls a function of the CUDA driver; returns its result, or raises RuntimeError."""
    from cuda.bindings import driver

    code, *results = getattr(driver, name)(*arguments)
    if int(code):
        raise RuntimeError(f"{name}: {driver.cuGetErrorString(code)[1].decode()}")
    return results[0] if results else None


class Engine:
    """Continues conversations step by step.

    options: of the attention functions; backend="reference" computes on the host, without a GPU.
    """

    def __init__(self, model: Model, sizes: Sizes, **options: Any) -> None:
        self.model, self.sizes, self._options = model, sizes, options
        self.waiting: list[Conversation] = []
        self.running: list[Conversation] = []
        self.pool = PagePool(sizes.num_pages)
        self.memory: Any = Host() if options.get("backend") == "reference" else Device()
        if isinstance(self.memory, Device):
            self._options["stream"] = self.memory.stream
        zeros, heads = self.memory.zeros, (sizes.num_heads_key, sizes.head_dim)
        self._pools = {
            name: zeros((sizes.num_pages, sizes.page_size, *heads), DTYPE) for name in ("key_cache", "value_cache")
        }
        self._table = zeros((sizes.batch, sizes.max_pages), np.int32)
        self._lengths = zeros((sizes.batch,), np.int32)
        self._starts = zeros((sizes.batch + 1,), np.int32)
        # Operands of a step with prompts, which is packed, and of a decode step, which has a row for each conversation.
        self._packed = self._operands(sizes.tokens, (1, sizes.tokens))
        self._single = self._operands(sizes.batch, (sizes.batch, 1))
        self._decode = self._launch_decode
        if isinstance(self.memory, Device):
            self._decode = self.memory.capture(self._bound_decode())
        self.prefix: list[int] = []

    def _operands(self, tokens: int, axes: tuple[int, int]) -> dict[str, Any]:
        sizes, zeros = self.sizes, self.memory.zeros
        rows = {name: zeros((tokens, sizes.num_heads_key, sizes.head_dim), DTYPE) for name in ("key", "value")}
        outer = {name: zeros((*axes, sizes.num_heads, sizes.head_dim), DTYPE) for name in ("query", "output")}
        slots = zeros((tokens,), np.int64)
        self.memory.write(slots, -1)
        return {**rows, **outer, "slots": slots}

    def add(self, conversation: Conversation) -> None:
        """Lets a conversation wait for its first step. ValueError: the cache is too small for it."""
        needed, most = self._pages_of(conversation), min(self.sizes.max_pages, self.sizes.num_pages)
        if needed > most:
            raise ValueError(
                f"a conversation of {needed} pages: must be at most {most}; shorten it, or raise num_pages"
            )
        self.waiting.append(conversation)

    def share(self, prefix: list[int]) -> None:
        """Stores the tokens that all later conversations begin with; their number is a multiple of page_size."""
        conversation = Conversation(prefix, wanted=0)
        self.add(conversation)
        self._admit()
        self.prefix = self.pool.share(conversation.pages)
        while self.running:
            self.step()

    def step(self) -> bool:
        """Computes one step; returns whether it was a decode step, of one token of each conversation."""
        self._admit()
        chunks = self._chunks()
        is_decode = max(chunks) == 1
        rows, operands = self._write(chunks, self._single if is_decode else self._packed)
        (self._decode if is_decode else self._launch_packed)()
        output = self.memory.read(operands["output"]).reshape(-1, self.sizes.num_heads, self.sizes.head_dim)[rows]
        tokens = self.model.logits(output).argmax(axis=1).tolist()
        for conversation, chunk, token, row in zip(list(self.running), chunks, tokens, output, strict=True):
            conversation.stored += chunk
            if conversation.stored < len(conversation.tokens):
                continue
            if conversation.wanted:
                conversation.tokens.append(token)
                conversation.outputs.append(row)
                conversation.wanted -= 1
            if not conversation.wanted:
                self.running.remove(conversation)
                self.pool.release(conversation.pages)
        return is_decode

    def _admit(self) -> None:
        """Starts conversations while there are rows of the batch and pages for all of their tokens."""
        while self.waiting and len(self.running) < self.sizes.batch:
            conversation = self.waiting[0]
            needed = self._pages_of(conversation) - len(self.prefix)
            if needed > len(self.pool.free):
                return
            conversation.pages = self.pool.share(self.prefix) + self.pool.take(needed)
            conversation.stored = len(self.prefix) * self.sizes.page_size
            self.running.append(self.waiting.pop(0))

    def _pages_of(self, conversation: Conversation) -> int:
        """Returns the pages of all tokens that a conversation will have."""
        return -(-(len(conversation.tokens) + conversation.wanted) // self.sizes.page_size)

    def _chunks(self) -> list[int]:
        """Returns how many tokens of each conversation the step computes: one, or what the others leave of a prompt."""
        left, chunks = self.sizes.tokens - len(self.running), []
        for conversation in self.running:
            more = min(len(conversation.tokens) - conversation.stored - 1, left)
            left -= more
            chunks.append(1 + more)
        return chunks

    def _write(self, chunks: list[int], operands: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Writes the operands of a step; returns the row of each conversation's last token, and the operands."""
        sizes, write = self.sizes, self.memory.write
        count = len(self.running)
        table, lengths = np.zeros((sizes.batch, sizes.max_pages), np.int32), np.zeros(sizes.batch, np.int32)
        starts = np.full(sizes.batch + 1, sum(chunks), np.int32)
        starts[: count + 1] = np.cumsum([0, *chunks])
        slots = np.full(operands["slots"].shape, -1, np.int64)
        tokens, positions = np.zeros_like(slots), np.zeros_like(slots)
        for number, (conversation, chunk) in enumerate(zip(self.running, chunks, strict=True)):
            first, last = conversation.stored, conversation.stored + chunk
            table[number, : len(conversation.pages)] = conversation.pages
            lengths[number] = last
            rows, places = slice(starts[number], starts[number + 1]), np.arange(first, last)
            tokens[rows], positions[rows] = conversation.tokens[first:last], places
            slots[rows] = table[number, places // sizes.page_size] * sizes.page_size + places % sizes.page_size
        for array, values in ((self._table, table), (self._lengths, lengths), (self._starts, starts)):
            write(array, values)
        write(operands["slots"], slots)
        for name in ("query", "key", "value"):
            write(operands[name], self.model.rows(name, tokens, positions).reshape(operands[name].shape))
        return starts[1 : count + 1] - 1, operands

    def _launch_packed(self) -> None:
        """Stores the new rows and attends, with the queries of all conversations one after another."""
        sequences = Paged(self._table, self._lengths, self._starts, max_seqlen_q=self.sizes.tokens)
        self._launch(self._packed, CausalBottomRight(), sequences)

    def _launch_decode(self) -> None:
        """Stores the new rows and attends, with one query of each conversation."""
        self._launch(self._single, Full(), Paged(self._table, self._lengths))  # one query sees all keys

    def _launch(self, operands: dict[str, Any], mask: Mask, sequences: Paged) -> None:
        query, key, value, output, slots = (operands[name] for name in ("query", "key", "value", "output", "slots"))
        append_to_cache(key, value, *self._pools.values(), slots, **self._options)
        attention_forward(query, *self._pools.values(), mask=mask, sequences=sequences, out=output, **self._options)

    def _bound_decode(self) -> Callable[[], None]:
        """Returns a function that launches the kernels of a decode step, with nothing but addresses prepared."""
        sizes, memory, pools = self.sizes, self.memory, self._pools
        kernels = self._options.get("kernels") or artifact_for
        dtype, heads, blocks = DTYPE.name, (sizes.num_heads_key, sizes.head_dim), (sizes.num_pages, sizes.page_size)
        new_rows = AppendProblem.dense((sizes.batch, *heads), blocks, dtype)
        append_plan = plan_append(new_rows, memory.arch)
        append = bind(kernels(append_plan.build), append_plan)
        query, pool = (Tensor.contiguous(shape, dtype) for shape in (self._single["query"].shape, (*blocks, *heads)))
        pages = Pages(Tensor.contiguous(self._table.shape, "int32"), sizes.batch)
        problem = Problem("forward", query, pool, pool, output=query, pages=pages)
        plan = plan_forward(problem, memory.arch)
        attend = bind(kernels(plan.build), plan, problem)
        new = {name: self._single[name].pointer for name in ("key", "value", "slots")}
        appended = new | {name: array.pointer for name, array in pools.items()}
        attended = {
            "query": self._single["query"].pointer,
            "key": pools["key_cache"].pointer,
            "value": pools["value_cache"].pointer,
            "page_table": self._table.pointer,
            "seqused_k": self._lengths.pointer,
            "output": self._single["output"].pointer,
            "logsumexp": memory.zeros(problem.shape.logsumexp, np.float32).pointer,
        }
        workspace = memory.zeros((attend.workspace_bytes,), np.uint8).pointer

        def launch() -> None:
            append(appended, memory.stream)
            attend(attended, memory.stream, workspace=workspace)

        return launch


@dataclass(frozen=True)
class Result:
    """What a run found.

    steps, decode_steps: number of all steps, and of decode steps. most_running: conversations after a step, at most.
    tokens: generated. others: of these, tokens that float64 would not choose.
    output_error, logit_error: largest differences from float64. behind: by how much a chosen token's logit is behind
        the best one in float64, at most; smaller than twice logit_error.
    step_us, replay_us: median of a decode step, and of its graph on the GPU.
    """

    steps: int
    decode_steps: int
    most_running: int
    tokens: int
    others: int
    output_error: float
    logit_error: float
    behind: float
    step_us: float
    replay_us: float


def compare(model: Model, conversation: Conversation) -> tuple[float, float, Any]:
    """Compares a conversation with float64 attention without pages.

    Returns the largest difference of an output and of a logit, and by how much the logit of each generated token is
    behind the best.
    """
    tokens, found = np.array(conversation.tokens), np.array(conversation.outputs, np.float64)
    rows = {name: model.rows(name, tokens[:-1], np.arange(len(tokens) - 1)) for name in ("query", "key", "value")}
    rows["query"] = rows["query"][-len(found) :]
    operands = (array[None].astype(np.float32) for array in rows.values())  # whose result is not rounded to bfloat16
    expected = attention_forward(*operands, mask=CausalBottomRight(), backend="reference")[0][0]
    logits = model.logits(expected)
    chosen = np.take_along_axis(logits, tokens[-len(found) :, None], axis=1)[:, 0]
    return (
        float(np.abs(found - expected).max()),
        float(np.abs(model.logits(found) - logits).max()),
        logits.max(axis=1) - chosen,
    )


def main(conversations: int = 64, prompt: int = 900, wanted: int = 96, sizes: Sizes = SIZES, **options: Any) -> Result:
    """Continues conversations with prompts of up to `prompt` tokens by up to `wanted` tokens, and compares them.

    options: of the attention functions, such as kernels or backend.
    """
    model, rng = Model(sizes), np.random.default_rng(1)
    engine = Engine(model, sizes, **options)
    prefix = rng.integers(0, sizes.vocabulary, sizes.prefix).tolist()
    engine.share(prefix)
    for _ in range(conversations):
        own = rng.integers(0, sizes.vocabulary, rng.integers(1, prompt - sizes.prefix)).tolist()
        engine.add(Conversation(prefix + own, wanted=int(rng.integers(1, wanted + 1))))
    every, running, decode_us = list(engine.waiting), [], []
    while engine.waiting or engine.running:
        start = time.perf_counter()
        if engine.step():
            decode_us.append((1e6 * (time.perf_counter() - start), engine.memory.replay_us()))
        running.append(len(engine.running))
    free = len(engine.pool.free)
    if free + len(engine.prefix) != sizes.num_pages:
        raise RuntimeError(f"{free} pages are free at the end, of {sizes.num_pages} with {len(engine.prefix)} shared")
    output_errors, logit_errors, behind = zip(*(compare(model, each) for each in every), strict=True)
    margins = np.concatenate(behind)
    return Result(
        steps=len(running),
        decode_steps=len(decode_us),
        most_running=max(running),
        tokens=margins.size,
        others=int((margins > 0).sum()),
        output_error=max(output_errors),
        logit_error=max(logit_errors),
        behind=float(margins.max()),
        step_us=statistics.median(step for step, _ in decode_us),
        replay_us=statistics.median(replay for _, replay in decode_us),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="a toy inference engine on a paged cache; needs a GPU without --small")
    parser.add_argument("--small", action="store_true", help="a few conversations, by the reference on the CPU")
    found = main(**SMALL, backend="reference") if parser.parse_args().small else main()
    for name, value in vars(found).items():
        sys.stdout.write(f"{name:14} {value:.4g}\n")
