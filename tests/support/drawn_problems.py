"""Drawn problems: attention, appends and merges of every layout, dtype, alignment and size that decides a plan."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from cutlass_py_attn.bundle.rules import AnyProblem
from cutlass_py_attn.problem import masks
from cutlass_py_attn.problem.append import GIVEN_SCALES, NO_SCALES, ROW_SCALES, TILE_SCALES, AppendProblem
from cutlass_py_attn.problem.merge import MergeProblem
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.spec import GRAINS, ProblemSpec, SequenceLengths
from cutlass_py_attn.problem.tensors import (
    BIASES,
    DIRECTIONS,
    FLOAT8,
    OPERANDS,
    ROW_ALIGNMENT_BYTES,
    SHORT_NAMES,
    Tensor,
)

TARGETS: Final = (  # with the SMs of some devices; None for the usual part
    *(("sm_90a", count) for count in (None, None, None, 132, 114, 78, 60, 16)),
    *(("sm_80", None), ("sm_80", 108), ("sm_86", 84), ("sm_87", 16), ("sm_89", 58), ("sm_90", 132)),
    *(("sm_100", 148), ("sm_120", 188)),
)
HEAD_DIMS: Final = (16, 32, 40, 64, 64, 64, 72, 80, 96, 96, 128, 128, 128, 128, 160, 192, 256, 264, 320, 512, 1024, 33)
VALUE_DIMS: Final = ((192, 128), (128, 64), (64, 128), (160, 96), (256, 128), (96, 32), (512, 64), (40, 264))
LATENT_DIMS: Final = 576, 512
LENGTHS: Final = (1, 17, 48, 64, 100, 128, 130, 200, 256, 384, 512, 700, 1024, 2048, 2300, 4096, 8192)
MASKS: Final = (
    *(masks.Full(), masks.Full(), masks.Causal(), masks.Causal(), masks.CausalBottomRight()),
    *(masks.Causal(window_size=64), masks.Window(window_left=100, window_right=3)),
)
HEADS: Final = (1, 1, 2, 4, 8, 16, 64, 256)
ALIGNMENTS: Final = (16, 16, 16, 16, 16, 16, 8, 4, 2)


def drawn(seed: int, count: int) -> Iterator[tuple[AnyProblem, str, int | None]]:
    """Yields supported problems, each with a target and the multiprocessors of a device."""
    rng = random.Random(seed)
    supported = (problem for problem in map(_any, itertools.repeat(rng)) if not problem.reasons())
    for problem in itertools.islice(supported, count):
        yield problem, *rng.choice(TARGETS)


def _any(rng: random.Random) -> AnyProblem:
    kind = rng.random()
    if kind < 0.04:
        return _append(rng)
    if kind < 0.08:
        return _merge(rng)
    if kind < 0.14:
        return _latent(rng)
    return _serving(rng) if kind < 0.34 else _dense(rng)


def _append(rng: random.Random) -> AppendProblem:
    scales = rng.choice((NO_SCALES, GIVEN_SCALES, ROW_SCALES, TILE_SCALES))
    dtype, dim = rng.choice([*SHORT_NAMES]), rng.choice(HEAD_DIMS)
    dims = LATENT_DIMS[1], LATENT_DIMS[0] - LATENT_DIMS[1]
    if scales == TILE_SCALES:
        return AppendProblem.dense((9, 1, dims[0]), (4, 16), dtype, head_dim_value=dims[1], scales=scales)
    found = AppendProblem.dense((9, rng.choice(HEADS), dim), (4, 16), dtype, scales=scales)
    return replace(found, key=replace(found.key, alignment=rng.choice(ALIGNMENTS)))


def _merge(rng: random.Random) -> MergeProblem:
    dtype, shape = rng.choice([*SHORT_NAMES]), (rng.choice(LENGTHS), rng.choice(HEADS), rng.choice(HEAD_DIMS))
    form = rng.choice(("packed", "dense", "total"))
    if form == "packed":
        return MergeProblem.packed(3, shape[0], shape, dtype)
    if form == "dense":
        return MergeProblem.dense((2, *shape), dtype)
    return MergeProblem.into_total((2, *shape), dtype, rng.random() < 0.5, rng.random() < 0.5)


def _latent(rng: random.Random) -> Problem:
    """A latent cache, in pages or dense."""
    batch, heads, queries = rng.choice((1, 2, 64)), rng.choice((1, 3, 16, 64, 128)), rng.choice((1, 1, 2, 5))
    has_codes, page_size = rng.random() < 0.4, rng.choice((0, 1, 8, 16, 64))
    spec = ProblemSpec(
        rng.choice(("bfloat16", "float16")), LATENT_DIMS[0], queries, rng.choice((64, 1000, 8192)), batch, heads,
        LATENT_DIMS[1], 1, rng.choice((masks.Full(), masks.CausalBottomRight())), page_size=page_size,
        value_in_key=True, e4m3_cache=has_codes, descale="tile" if has_codes else "",
    )  # fmt: skip
    return spec.problem("forward")


def _serving(rng: random.Random) -> Problem:
    """A forward of few queries, of a cache in pages or of e4m3 codes."""
    heads_key, queries = rng.choice((1, 2, 8, 64)), rng.choice((1, 1, 2, 7, 16, 64, 129, 300))
    lengths = [SequenceLengths(queries, rng.choice(LENGTHS)) for _ in range(rng.choice((1, 2, 3)))]
    if rng.random() < 0.3:
        lengths.append(SequenceLengths(max(queries - 1, 1), 300))
    has_pages, codes = rng.random() < 0.7, rng.choice(("", "", "cache", "operands"))
    dim, value_dim = rng.choice(VALUE_DIMS) if rng.random() < 0.2 else (rng.choice(HEAD_DIMS), 0)
    grains = tuple(GRAINS) if codes == "cache" else ("tensor", "head", "batch")
    spec = ProblemSpec(
        FLOAT8 if codes == "operands" else rng.choice(list(SHORT_NAMES)),
        dim,
        queries,
        rng.choice(LENGTHS),
        rng.choice((1, 4, 96)),
        heads_key * rng.choice((1, 1, 2, 4, 8, 16)),
        value_dim,
        heads_key,
        rng.choice(MASKS),
        tuple(lengths) if rng.random() < 0.4 else (),
        softcap=30.0 if rng.random() < 0.15 else 0.0,
        alibi="h" if rng.random() < 0.15 else "",
        sinks=rng.random() < 0.15,
        page_size=rng.choice((1, 8, 16, 64, 256)) if has_pages else 0,
        e4m3_cache=codes == "cache",
        descale=rng.choice(("", *grains)) if codes else "",
        float16_output=codes == "operands" and rng.random() < 0.3,
    )
    return _with_alignment(rng, spec.problem("forward"))


def _dense(rng: random.Random) -> Problem:
    heads_key, length = rng.choice(HEADS), rng.choice(LENGTHS)
    keys = length if rng.random() < 0.7 else rng.choice(LENGTHS)
    direction = rng.choice(DIRECTIONS)
    dim, value_dim = rng.choice(VALUE_DIMS) if rng.random() < 0.15 else (rng.choice(HEAD_DIMS), 0)
    lengths = tuple(SequenceLengths(length, keys, keys if rng.random() < 0.3 else None) for _ in range(2))
    bias = rng.choice(("bhqk", "1hqk", "b1qk", "bh1k", "11qk")) if rng.random() < 0.25 else ""
    features: dict[str, Any] = {
        "bias": bias,
        "bias_gradient": rng.choice(("", "grad", "sum")) if bias and direction == "backward" else "",
        "dropout_p": 0.1 if rng.random() < 0.15 else 0.0,
        "softcap": 30.0 if rng.random() < 0.12 else 0.0,
        "alibi": rng.choice(("h", "bh")) if rng.random() < 0.12 else "",
        "sinks": rng.random() < 0.12,
        "scale": rng.choice((0.0, -1.0, 0.3)) if rng.random() < 0.05 else None,
        "deterministic": direction == "backward" and rng.random() < 0.2,
        "gradients": rng.choice(("q", "k", "v", "kv", "qk")) if rng.random() < 0.08 else "",
        "num_splits_key": rng.choice((1, 4)) if direction == "backward" and rng.random() < 0.04 else None,
    }
    plain = rng.random() < 0.4
    spec = ProblemSpec(
        rng.choice(("bfloat16", "bfloat16", "float16", "float32")),
        dim,
        length,
        keys,
        rng.choice((1, 1, 2, 16)),
        heads_key * rng.choice((1, 1, 1, 2, 4)),
        value_dim,
        heads_key,
        rng.choice(MASKS),
        lengths if rng.random() < 0.15 else (),
        **({} if plain else features),
    )
    return _with_alignment(rng, spec.problem(direction))


def _with_alignment(rng: random.Random, problem: Problem) -> Problem:
    """Returns the problem with some addresses aligned to fewer than 16 bytes."""
    for names in (OPERANDS[:1], BIASES):
        alignment = rng.choice(ALIGNMENTS)
        given = {name: tensor for name in names if (tensor := getattr(problem, name)) is not None}
        if alignment < ROW_ALIGNMENT_BYTES:
            problem = problem.replace(**{name: _aligned_to(tensor, alignment) for name, tensor in given.items()})
    return problem


def _aligned_to(tensor: Tensor, alignment: int) -> Tensor:
    return replace(tensor, alignment=max(alignment, 4 if tensor.dtype == "float32" else 2))
