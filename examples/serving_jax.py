"""A toy inference engine in JAX: continuous batching on a paged cache, with the whole model inside jax.jit.

python examples/serving_jax.py            on a GPU
python examples/serving_jax.py --small    a few conversations, by the reference on the CPU

The engine continues 64 conversations by a model of two attention layers with random weights. It has two programs, which
both donate their pools. One computes chunks of prompts, and one token of each conversation whose prompt is in the
cache. The other computes one token of each conversation; its tokens and lengths stay on the device, so that the host
starts several such steps before it reads a token. The pools are too small for all conversations at once, so that they
wait for pages that others free. Every logit is compared with float64 of the same conversation without pages.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cutlass_py_attn import CausalBottomRight, Full, Paged, attention_forward
from cutlass_py_attn.jax import append_to_cache, attention

LAYERS = 2


class Sizes(NamedTuple):
    """Sizes of the model and of the engine.

    batch: conversations in one step. tokens: most tokens of a step with prompts. max_pages: of one conversation.
    """

    num_heads: int = 32
    num_heads_key: int = 8
    head_dim: int = 128
    width: int = 512
    vocabulary: int = 512
    batch: int = 64
    tokens: int = 512
    num_pages: int = 640
    page_size: int = 16
    max_pages: int = 24


SIZES = Sizes()
SMALL: dict[str, Any] = {  # for main, with backend="reference"
    "conversations": 9, "prompt": 16, "wanted": 6,
    "sizes": Sizes(4, 2, 16, 32, 64, batch=4, tokens=12, num_pages=20, page_size=4, max_pages=6),
}  # fmt: skip


@dataclass
class Conversation:
    """tokens: the prompt and what was generated. wanted: tokens to generate still. stored: tokens in the cache."""

    tokens: list[int]
    wanted: int
    stored: int = 0
    pages: list[int] = field(default_factory=list)
    logits: list[Any] = field(default_factory=list)  # one row for each generated token


def parameters(seed: int, sizes: Sizes) -> dict[str, Any]:
    """Returns random embeddings of tokens and positions, four projections of each layer, and that to logits."""
    width, heads, heads_key = sizes.width, sizes.num_heads * sizes.head_dim, sizes.num_heads_key * sizes.head_dim
    shapes = {
        "token": (sizes.vocabulary, width), "position": (sizes.max_pages * sizes.page_size, width),
        "query": (LAYERS, width, heads), "key": (LAYERS, width, heads_key), "value": (LAYERS, width, heads_key),
        "output": (LAYERS, heads, width), "logits": (width, sizes.vocabulary),
    }  # fmt: skip
    rng, embeddings = np.random.default_rng(seed), ("token", "position")
    return {
        name: rng.standard_normal(shape, np.float32) / (1 if name in embeddings else np.float32(shape[-2] ** 0.5))
        for name, shape in shapes.items()
    }


def hidden(sizes: Sizes, options: Any, p: Any, pools: Any, batch: Any, sequences: Paged) -> tuple[Any, Any]:
    """Returns the pools with the rows of new tokens, and the last hidden states (tokens, width).

    batch: (tokens, positions, slots), of each new token. sequences: with cu_seqlens_q the queries are packed, else
        there is one of each sequence.
    """
    tokens, positions, slots = batch
    product = functools.partial(jnp.matmul, precision="highest")
    x = p["token"][tokens] + p["position"][positions]
    is_packed = sequences.cu_seqlens_q is not None
    outer, mask = ((1, -1), CausalBottomRight()) if is_packed else ((-1, 1), Full())  # one query sees all keys
    written = []
    for layer, pool in enumerate(pools):
        rows = {name: product(x, p[name][layer]).astype(jnp.bfloat16) for name in ("query", "key", "value")}
        key, value = (rows[name].reshape(-1, sizes.num_heads_key, sizes.head_dim) for name in ("key", "value"))
        query = rows["query"].reshape(*outer, sizes.num_heads, sizes.head_dim)
        pool = append_to_cache(key, value, *pool, slots, **dict(options))
        output = attention(query, *pool, mask=mask, sequences=sequences, **dict(options))
        x = x + product(output.reshape(len(x), -1).astype(jnp.float32), p["output"][layer])
        written.append(pool)
    return written, x


def predict(p: Any, x: Any) -> tuple[Any, Any]:
    """Returns the best next token of each hidden state, and the logits."""
    logits = jnp.matmul(x, p["logits"], precision="highest")
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), logits


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def chunked_step(
    sizes: Sizes, options: Any, p: Any, pools: Any, batch: Any, table: Any, lengths: Any, starts: Any
) -> tuple[Any, Any, Any]:
    """Computes packed tokens: chunks of prompts, and single tokens.

    lengths: keys of each sequence, with the new ones. starts: of each sequence's tokens, and the end of the last.
    Returns pools, the token after each sequence's last one, and its logits.
    """
    sequences = Paged(table, lengths, starts, max_seqlen_q=sizes.tokens)
    pools, x = hidden(sizes, options, p, pools, batch, sequences)
    return pools, *predict(p, x[starts[1:] - 1])


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def decode_step(
    sizes: Sizes, options: Any, p: Any, pools: Any, table: Any, lengths: Any, tokens: Any
) -> tuple[Any, Any, Any, Any]:
    """Computes one token of each sequence.

    lengths: keys that each sequence has, without this token's; 0 for padding, which stores nothing.
    Returns pools, lengths and tokens of the next step, and the logits.
    """
    page = jnp.take_along_axis(table, lengths[:, None] // sizes.page_size, axis=1)[:, 0]
    slots = jnp.where(lengths > 0, page * sizes.page_size + lengths % sizes.page_size, -1)
    longer = jnp.where(lengths > 0, lengths + 1, 0)
    pools, x = hidden(sizes, options, p, pools, (tokens, lengths, slots), Paged(table, longer))
    tokens, logits = predict(p, x)
    return pools, longer, tokens, logits


class Engine:
    """Continues conversations step by step.

    options: of `attention` and `append_to_cache`; backend="reference" computes on the host, without a GPU.
    """

    def __init__(self, p: Any, sizes: Sizes, **options: Any) -> None:
        self.sizes, self._p, self._options = sizes, p, tuple(options.items())
        self.waiting: list[Conversation] = []
        self.running: list[Conversation] = []
        self.free = list(range(sizes.num_pages))
        shape = sizes.num_pages, sizes.page_size, sizes.num_heads_key, sizes.head_dim
        self._pools = [tuple(jnp.zeros(shape, jnp.bfloat16) for _ in range(2)) for _ in range(LAYERS)]

    def add(self, conversation: Conversation) -> None:
        """Lets a conversation wait for its first step. ValueError: the cache is too small for it."""
        needed, most = self._pages_of(conversation), min(self.sizes.max_pages, self.sizes.num_pages)
        if needed > most:
            raise ValueError(
                f"a conversation of {needed} pages: must be at most {most}; shorten it, or raise num_pages"
            )
        self.waiting.append(conversation)

    def step(self) -> int:
        """Computes a step with prompts, or decode steps until a conversation ends; returns how many of the latter."""
        self._admit()
        table = np.zeros((self.sizes.batch, self.sizes.max_pages), np.int32)
        lengths = np.zeros(self.sizes.batch, np.int32)
        for number, conversation in enumerate(self.running):
            table[number, : len(conversation.pages)] = conversation.pages
            lengths[number] = conversation.stored
        if all(0 < conversation.stored == len(conversation.tokens) - 1 for conversation in self.running):
            return self._decode(table, lengths)
        chunks = self._chunks()
        lengths[: len(chunks)] += chunks
        batch, starts = self._packed(chunks, table)
        self._pools, tokens, logits = chunked_step(
            self.sizes, self._options, self._p, self._pools, batch, table, lengths, starts
        )
        self._end(chunks, [tokens], [logits])
        return 0

    def _decode(self, table: Any, lengths: Any) -> int:
        """Starts as many steps as the conversation has that ends first, then reads their tokens."""
        last = np.zeros(self.sizes.batch, np.int32)
        last[: len(self.running)] = [conversation.tokens[-1] for conversation in self.running]
        steps = min(conversation.wanted for conversation in self.running)
        tokens, logits = [last], []
        table = jnp.asarray(table)
        for _ in range(steps):
            self._pools, lengths, following, row = decode_step(
                self.sizes, self._options, self._p, self._pools, table, lengths, tokens[-1]
            )
            tokens.append(following)
            logits.append(row)
        self._end([1] * len(self.running), tokens[1:], logits)
        return steps

    def _end(self, chunks: list[int], tokens: list[Any], logits: list[Any]) -> None:
        """Reads the tokens of steps, and frees the pages of the conversations that end."""
        read = [np.asarray(array) for array in tokens]
        rows = [np.asarray(array) for array in logits]
        for number, (conversation, chunk) in enumerate(zip(list(self.running), chunks, strict=True)):
            for following, row in zip(read, rows, strict=True):
                conversation.stored += chunk
                if conversation.stored == len(conversation.tokens):
                    conversation.tokens.append(int(following[number]))
                    conversation.logits.append(row[number])
                    conversation.wanted -= 1
            if not conversation.wanted:
                self.running.remove(conversation)
                self.free += conversation.pages

    def _admit(self) -> None:
        """Starts conversations while there are rows of the batch and pages for all of their tokens."""
        while self.waiting and len(self.running) < self.sizes.batch:
            conversation = self.waiting[0]
            needed = self._pages_of(conversation)
            if needed > len(self.free):
                return
            conversation.pages = [self.free.pop() for _ in range(needed)]
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

    def _packed(self, chunks: list[int], table: Any) -> tuple[tuple[Any, Any, Any], Any]:
        """Returns tokens, positions and slots of a step with prompts, and where each sequence's tokens start."""
        page_size = self.sizes.page_size
        starts = np.full(self.sizes.batch + 1, sum(chunks), np.int32)
        starts[: len(chunks) + 1] = np.cumsum([0, *chunks])
        tokens, positions, slots = (np.full(self.sizes.tokens, filler, np.int32) for filler in (0, 0, -1))
        for number, (conversation, chunk) in enumerate(zip(self.running, chunks, strict=True)):
            rows, places = slice(starts[number], starts[number + 1]), conversation.stored + np.arange(chunk)
            tokens[rows] = conversation.tokens[places[0] : places[-1] + 1]
            positions[rows] = places
            slots[rows] = table[number, places // page_size] * page_size + places % page_size
        return (tokens, positions, slots), starts


def reference(p: dict[str, Any], tokens: Any, sizes: Sizes) -> Any:
    """Returns the logits (tokens, vocabulary) of a whole conversation in float64, without pages.

    Only the operands of attention are rounded, to float32.
    """
    x = p["token"][tokens] + p["position"][: len(tokens)]
    for layer in range(LAYERS):
        rows = {
            name: (x @ p[name][layer]).reshape(1, len(x), -1, sizes.head_dim).astype(np.float32)
            for name in ("query", "key", "value")
        }
        output, _ = attention_forward(*rows.values(), mask=CausalBottomRight(), backend="reference")
        x = x + output.reshape(len(x), -1) @ p["output"][layer]
    return x @ p["logits"]


class Result(NamedTuple):
    """What a run found.

    steps, decode_steps: number of all steps, and of decode steps. tokens: generated. others: of these, tokens that
        float64 would not choose.
    logit_error: largest difference from float64. behind: by how much a chosen token's logit is behind the best one in
        float64, at most; smaller than twice logit_error.
    step_us: median of a decode step, of steps that were started together.
    """

    steps: int
    decode_steps: int
    tokens: int
    others: int
    logit_error: float
    behind: float
    step_us: float


def main(conversations: int = 64, prompt: int = 300, wanted: int = 64, sizes: Sizes = SIZES, **options: Any) -> Result:
    """Continues conversations with prompts of up to `prompt` tokens by up to `wanted` tokens, and compares them.

    options: of `attention` and `append_to_cache`, such as kernels or backend.
    """
    rng = np.random.default_rng(1)
    p = parameters(0, sizes)
    engine = Engine(jax.device_put(p), sizes, **options)
    for _ in range(conversations):
        own = rng.integers(0, sizes.vocabulary, rng.integers(1, prompt + 1)).tolist()
        engine.add(Conversation(own, wanted=int(rng.integers(1, wanted + 1))))
    every, steps, decode_us = list(engine.waiting), 0, []
    while engine.waiting or engine.running:
        start = time.perf_counter()
        count = engine.step()
        if count:
            decode_us += [1e6 * (time.perf_counter() - start) / count] * count
        steps += max(count, 1)
    if len(engine.free) != sizes.num_pages:
        raise RuntimeError(f"{len(engine.free)} pages are free at the end, of {sizes.num_pages}")
    host = {name: array.astype(np.float64) for name, array in p.items()}
    error, margins = 0.0, []
    for each in every:
        count = len(each.logits)
        logits = reference(host, np.array(each.tokens[:-1]), sizes)[-count:]
        error = max(error, float(np.abs(np.array(each.logits) - logits).max()))
        margins += (logits.max(axis=1) - logits[np.arange(count), each.tokens[-count:]]).tolist()
    return Result(
        steps=steps,
        decode_steps=len(decode_us),
        tokens=len(margins),
        others=sum(margin > 0 for margin in margins),
        logit_error=error,
        behind=max(margins),
        step_us=float(np.median(decode_us)),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="a toy inference engine on a paged cache; needs a GPU without --small")
    parser.add_argument("--small", action="store_true", help="a few conversations, by the reference on the CPU")
    found = main(**SMALL, backend="reference") if parser.parse_args().small else main()
    for name, value in found._asdict().items():
        sys.stdout.write(f"{name:14} {value:.4g}\n")
