"""Refused problems: each with every value that is refused and words of its rule, by what is wrong with it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from cutlass_py_attn.problem.append import AppendProblem
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Window
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import RANGE_EDGES, Sequences, Shape, Tensor
from tests.support.requests import LENGTHS, SHAPE, changed, dense, with_terms

Refused = tuple[Problem, list[str]]  # "field: words of the rule", as for `refusals.expect`

FOUR_D = "4-D [batch, seqlen, heads, head_dim]"
BIAS_AXES = "4-D [batch, heads, queries, keys]"
WHOLE = "must not overlap itself"
EDGE, WINDOW = "int of at least 0, or None for no limit", "int of at least 1, or None for no window"
SCALE = "a number with a magnitude from 1e-30 to 2**127"
SOFTCAP = "a number above 0 that float32 holds"
RATIO = "0 or have a magnitude from 2**-126 to 2**126"
WHOLE_BIAS = (2, 3, 40, 50)
LONG = 2**29 + 1
EDGES = "must be (2, 3, 40); the first two sizes may be 1"


def shaped(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> Refused:
    """Returns a problem with one operand of another shape."""
    strides = Tensor.contiguous(shape, "").strides
    problem = changed(name, "backward" if name.startswith("grad") else "forward", shape=shape, strides=strides)
    query, key, value = problem.query.shape, problem.key.shape, problem.value.shape
    return problem, [f"{name}.shape: must be {wanted} to match query {query}, key {key} and value {value}"]


def without_step(name: str, axis: int, label: str, **terms: Any) -> Refused:
    """Returns a problem whose result `name` has stride 0 along one axis."""
    problem = with_terms("forward" if name == "output" else "backward", **terms)
    old: Tensor = getattr(problem, name)
    strides = tuple(0 if index == axis else stride for index, stride in enumerate(old.strides))
    changed_one = problem.replace(**{name: Tensor(old.shape, strides, old.dtype)})
    return changed_one, [f"{label} stride of {name}: {WHOLE}"]


def sized(name: str, size: int) -> Problem:
    """Returns a problem with one size changed."""
    sizes: dict[str, Any] = {name: size}
    return dense(**sizes)


def ranged(shape: tuple[int, ...] = (2, 3, 40), base: Problem | None = None, **changes: Any) -> Problem:
    """Returns a problem with ranges of keys, of which the starts are changed."""
    edge = Tensor.contiguous(shape, "int32")
    return (base or dense()).replace(key_start=dataclasses.replace(edge, **changes), key_end=edge)


def blocks(shape: tuple[int, ...] = (2, 3, 1, 1), dtype: str = "bool") -> Problem:
    """Returns a problem with visible blocks of 128 x 128."""
    return dense().replace(visible_blocks=Tensor.contiguous(shape, dtype))


IDS = Tensor.contiguous((2, 50), "int32")


def function(base: Problem | None = None, **changes: Any) -> Problem:
    """Returns a problem with a mask function of an array of two axes and an integer, and changes."""
    program = "arrays int32[2]; scalars 1; load 0 0 3; le 5 4"
    problem = (base or dense()).replace(mask_program=program, mask_scalars=(3,), mask_array_0=IDS)
    return problem.replace(**changes)


RANKS: dict[str, Refused] = {
    "direction": (dense().replace(direction="sideways"), ["direction: one of forward, backward"]),
    "no grad_output": (dense("backward").replace(grad_output=None), ["grad_output: a tensor in the shape of output"]),
    "rank of the shape": (changed("key", shape=(50, 3, 16), strides=(48, 16, 1)), [f"key.shape: {FOUR_D}"]),
    "rank of the strides": (changed("query", strides=(48, 16, 1)), [f"query.strides: {FOUR_D}"]),
    "rank of the bias": (with_terms(bias=(40, 50)), [f"bias.shape: {BIAS_AXES}"]),
    "longest sequence unknown": (
        dense(base=LENGTHS).replace(sequences=Sequences(2, None, 30)),  # type: ignore[arg-type]
        ["sequences.max_seqlen_q: an int"],
    ),
    "no tensors": (
        dense("backward").replace(query=None, bias=3, score_terms=("slopes",), sequences=5),
        ["query: a Tensor", "bias: a Tensor, or None", "score_terms: a tuple of (name, Tensor)",
         "sequences: a Sequences object, or None"],
    ),
    "no numbers in tensors": (
        dense().replace(
            query=Tensor((2, -40, 3, 16), (1, 2, "3", 4), "float16"),  # type: ignore[arg-type]
            key=Tensor((2, 40, 3, 16), (1, 2, 3, 4), 16, "16"),  # type: ignore[arg-type]
            sequences=Sequences(2, 3, 4, "no"),  # type: ignore[arg-type]
        ),
        ["query.shape: a tuple of ints of at least 0", "query.strides: a tuple of ints",
         "key.dtype: one of float16, bfloat16, float32", "key.alignment: an int of bytes",
         "sequences.seqused_k: True or False"],
    ),
    "rank of the strides of alibi_slopes": (
        dense().replace(alibi_slopes=Tensor((3,), (), "float32")),
        ["alibi_slopes.strides: a stride for each axis of (3,)"],
    ),
    "all ranks together": (
        changed("key", shape=(50, 3, 16)).replace(direction="?", scale=math.nan, bias=Tensor((4,), (1,), "float16")),
        ["direction: one of forward, backward", f"key.shape: {FOUR_D}", f"bias.shape: {BIAS_AXES}"],
    ),
}  # fmt: skip

SHAPES: dict[str, tuple[Callable[[], Problem], list[str]]] = {  # which no Problem can be created of
    "another object": (
        lambda: Problem.dense("forward", (2, 40, 50, 3, 16, 24), "float16"),  # type: ignore[arg-type]
        ["shape: a Shape"],
    ),
    "no integers": (
        lambda: Problem.dense("forward", Shape("2", 40, 50.0, 3, 16, 24, tokens=(40,), pool=(4, 16)), "float16"),  # type: ignore[arg-type]
        ["shape.batch: an int of at least 0", "shape.num_keys: an int of at least 0",
         "shape.tokens: two ints, of queries and keys, or None", "shape.pool: None here"],
    ),
}  # fmt: skip

SIZES: dict[str, Refused] = {
    "value that is not in key": (
        dense("backward").replace(value_in_key=True),
        ["value_in_key: False with direction 'backward'", "head_dim_value: at most the 16 columns of key",
         "value.strides: those of key, (2400, 48, 16, 1)"],
    ),
    "batch of key": shaped("key", (3, 50, 3, 16), (2, 50, 3, 16)),
    "keys of value": shaped("value", (2, 49, 3, 24), (2, 50, 3, 24)),
    "heads of value": shaped("value", (2, 50, 1, 24), (2, 50, 3, 24)),
    "head_dim of key": shaped("key", (2, 50, 3, 8), (2, 50, 3, 16)),
    "no key heads": shaped("key", (2, 50, 0, 16), (2, 50, 3, 16)),
    "queries of output": shaped("output", (2, 50, 3, 24), (2, 40, 3, 24)),
    "head_dim of grad_output": shaped("grad_output", (2, 40, 3, 16), (2, 40, 3, 24)),
    "keys of grad_key": shaped("grad_key", (2, 40, 3, 16), (2, 50, 3, 16)),
    "heads": (dense(num_heads_key=2), ["num_heads: a multiple of the 2 heads of key"]),
    "head_dim of nothing": (dense(head_dim=0), ["head_dim: from 1 to 65536"]),
    "head_dim_value too wide": (dense(head_dim_value=65537), ["head_dim_value: from 1 to 65536"]),
    **{
        name: (sized(name, LONG), [f"{name}: at most 536870912"])
        for name in ("batch", "num_heads", "num_queries", "num_keys")
    },
    **{
        f"tokens of {name}": (
            dense("forward", base=LENGTHS, tokens=(LONG, 50) if name == "query" else (40, LONG)),
            [f"tokens of {name}: at most 536870912"],
        )
        for name in ("query", "key")
    },
    "no number of sequences": (
        dense(base=LENGTHS).replace(sequences=Sequences(-1, 25, 30)), ["sequences.count: at least one entry"]
    ),
    "longest of the keys": (dense(base=LENGTHS, num_keys=51), ["max_seqlen_k: from 0 to the 50 tokens"]),
    "longest of the queries": (dense(base=LENGTHS, num_queries=-1), ["max_seqlen_q: from 0 to the 40 tokens"]),
    "batches of sequences": (
        dense().replace(sequences=Sequences(2, 25, 30)), ["batch of query: must be 1 with cu_seqlens"]
    ),
}  # fmt: skip

TERMS: dict[str, Refused] = {
    "bias": (with_terms(bias=(2, 3, 40, 49)), [f"bias.shape: 1 or that of {BIAS_AXES[4:]} = {WHOLE_BIAS}"]),
    "bias of sequences": (with_terms(bias=(1, 3, 40, 50), base=LENGTHS), ["bias.shape: keys] = (2, 3, 25, 30)"]),
    "grad_bias": (
        with_terms("backward", bias=(1, 3, 40, 50), grad_bias=(1, 2, 40, 50)),
        [f"grad_bias.shape: 1 (summed over) or that of {WHOLE_BIAS}"],
    ),
    "alibi_slopes": (with_terms(alibi_slopes=(2,)), ["alibi_slopes: float32 [3] or [2, 3]"]),
    "dtype of alibi_slopes": (
        dense().replace(alibi_slopes=Tensor.contiguous((3,), "float16")), ["alibi_slopes: float32 [3] or [2, 3]"]
    ),
    "strides of alibi_slopes": (
        dense().replace(alibi_slopes=Tensor((2, 3), (6, 2), "float32")), ["alibi_slopes.strides: contiguous"]
    ),
    "sinks": (with_terms(sinks=(2, 3)), ["sinks: float32 [3]"]),
    "address of sinks": (dense().replace(sinks=Tensor((3,), (1,), "float32", 2)), ["sinks.alignment: the 4 bytes"]),
    "a term that is not registered": (
        dense().replace(score_terms=(("nothing", Tensor.contiguous((3,), "float32")),)),
        ["score_terms: registered terms"],
    ),
    "grad_sinks": (with_terms("backward", sinks=(3,), grad_sinks=(1,)), ["grad_sinks: float32 [3]"]),
}  # fmt: skip

TENSORS: dict[str, Refused] = {
    "other dtype": (changed("value", dtype="float64"), ["value.dtype: one of float16, bfloat16, float32"]),
    "two dtypes": (changed("value", dtype="bfloat16"), ["value.dtype: float16 as query"]),
    "dtype of the bias": (
        dense(dtype="bfloat16").replace(bias=Tensor.contiguous(WHOLE_BIAS, "float32")),
        ["bias.dtype: bfloat16 as query"],
    ),
    "last stride": (changed("key", strides=(4800, 96, 32, 2)), ["key.strides: the last must be 1"]),
    "broadcast columns": (changed("output", "backward", strides=(1, 1, 1, 0)), ["output.strides: the last must be 1"]),
    "address within an element": (changed("query", alignment=1), ["query.alignment: the 2 bytes"]),
    "strides beyond 64 bits": (changed("key", strides=(2**62, 48, 16, 1)), ["key.strides: fewer than 2**63 bytes"]),
    "address of a float32 bias": (
        dense(dtype="float32").replace(bias=Tensor(WHOLE_BIAS, (6000, 2000, 50, 1), "float32", 2)),
        ["bias.alignment: the 4 bytes"],
    ),
    "heads of output that overlap": (changed("output", strides=(2880, 72, 23, 1)), [f"output.strides: {WHOLE}"]),
    "queries of grad_bias that overlap": (
        with_terms("backward", bias=WHOLE_BIAS).replace(grad_bias=Tensor(WHOLE_BIAS, (6000, 2000, 49, 1), "float16")),
        [f"grad_bias.strides: {WHOLE}"],
    ),
    "output without batches": without_step("output", 0, "batch"),
    "output without rows": without_step("output", 1, "row"),
    "grad_query without heads": without_step("grad_query", 2, "head"),
    "grad_key without batches": without_step("grad_key", 0, "batch"),
    "grad_value without rows": without_step("grad_value", 1, "row"),
    "grad_bias without batches": without_step("grad_bias", 0, "batch", bias=WHOLE_BIAS, grad_bias=WHOLE_BIAS),
    "grad_bias without heads": without_step("grad_bias", 1, "head", bias=WHOLE_BIAS, grad_bias=WHOLE_BIAS),
    "grad_bias without queries": without_step("grad_bias", 2, "row", bias=WHOLE_BIAS, grad_bias=WHOLE_BIAS),
    "grad_bias without keys": without_step("grad_bias", 3, "column", bias=WHOLE_BIAS, grad_bias=WHOLE_BIAS),
}  # fmt: skip

APPENDS: dict[str, tuple[AppendProblem, list[str]]] = {
    "strides of slots": (
        dataclasses.replace(
            AppendProblem.dense((5, 2, 64), (3, 4), "float16"), slots=Tensor((5,), (2,), "int64")
        ),
        ["slots.strides: must be contiguous for shape (5,)"],
    ),
}  # fmt: skip

_WINDOWS: tuple[tuple[type[Causal], Any], ...] = (
    *((Causal, size) for size in (0, True, 2.5)),
    (CausalBottomRight, -1),
)
OPTIONS: dict[str, Refused] = {
    "mask": (dense().replace(mask="causal"), ["mask: a mask object such as Full() or Causal()"]),
    **{
        f"window of {size!r}": (dense().replace(mask=kind(size)), [f"window_size: {WINDOW}"]) for kind, size in _WINDOWS
    },
    "window behind the diagonal": (
        dense().replace(mask=Window(-1, True)), [f"window_left: {EDGE}", f"window_right: {EDGE}"]
    ),
    "windows of nothing": (dense().replace(mask=Window(-1, -2)), [f"window_left: {EDGE}", f"window_right: {EDGE}"]),
    **{
        f"scale of {scale!r}": (dense().replace(scale=scale), [f"scale: {SCALE}"])
        for scale in (math.inf, math.nan, "x", -1e39, 1e-34, -9.9e-31)
    },
    **{
        f"softcap of {softcap!r}": (dense().replace(softcap=softcap), [f"softcap: {SOFTCAP}"])
        for softcap in (-1.0, math.nan, math.inf, 1e-39, None, True, ["2"])
    },
    "a softcap far below the scale": (dense().replace(softcap=1e-37, scale=100), [f"softcap: {RATIO}"]),
    "a softcap far above the scale": (dense().replace(softcap=1e20, scale=-1e-20), [f"softcap: {RATIO}"]),
    "a softcap above the precision of tanh": (
        dense(dtype="float32").replace(softcap=8192.5), ["softcap: at most 8192 for float32 operands"]
    ),
    **{
        f"dropout_p of {p!r}": (dense().replace(dropout_p=p), ["dropout_p: a probability from 0 to 1"])
        for p in (-0.1, 1.0000001, math.nan, "x")
    },
    "flags of other kinds": (
        dense("backward").replace(deterministic="no", philox_on_device=1),
        ["philox_on_device: True or False", "deterministic: True or False"],
    ),
    "splits in the forward": (dense().replace(num_splits_key=2), ["num_splits_key: only the backward splits keys"]),
    **{
        f"splits of {splits}": (
            dense("backward").replace(num_splits_key=splits), ["num_splits_key: an int of at least 1, or None"]
        )
        for splits in (0, 1.5)
    },
    "splits that take turns": (
        dense("backward").replace(num_splits_key=2, deterministic=True), ["num_splits_key: 1 with deterministic"]
    ),
}  # fmt: skip

_TERMS: dict[str, Any] = {"bias": WHOLE_BIAS, "grad_bias": WHOLE_BIAS, "sinks": (3,), "grad_sinks": (3,)}
_RESULTS = ("grad_output", "grad_logsumexp", "grad_query", "grad_key", "grad_value", "grad_bias", "grad_sinks")
_OF_OPERANDS = {name: SHAPE.of(name) for name in ("grad_output", "grad_query", "grad_key", "grad_value")}
GRADIENTS: dict[str, Refused] = {
    "gradients in the forward": (
        with_terms(**_TERMS | _OF_OPERANDS, grad_logsumexp=Tensor.contiguous(SHAPE.logsumexp, "float32")),
        [f"{name}: the forward writes no gradients" for name in _RESULTS],
    ),
    "shape of the gradient of logsumexp": (
        dense("backward").replace(grad_logsumexp=Tensor.contiguous((2, 3, 40), "float32")),
        ["grad_logsumexp: (2, 3, 64) float32"],
    ),
    "strides of the gradient of logsumexp": (
        dense("backward").replace(grad_logsumexp=Tensor((2, 3, 64), (64, 128, 1), "float32")),
        ["grad_logsumexp.strides: contiguous"],
    ),
    "gradient of logsumexp without keys": (
        with_terms(
            "backward", base=dataclasses.replace(SHAPE, num_keys=0), sinks=(3,), grad_sinks=(3,),
            grad_logsumexp=Tensor.contiguous(SHAPE.logsumexp, "float32"),
        ),
        ["grad_logsumexp: must have a key with sinks"],
    ),
    "no gradient": (
        dense("backward").replace(grad_query=None, grad_key=None, grad_value=None),
        ["gradients: at least one of grad_query, grad_key, grad_value, grad_bias, grad_sinks"],
    ),
    "gradients of nothing": (
        with_terms("backward", grad_bias=WHOLE_BIAS, grad_sinks=(3,)),
        ["grad_bias: must come with bias", "grad_sinks: must come with sinks"],
    ),
}  # fmt: skip

TOGETHER: dict[str, Refused] = {
    "everything together": (
        changed("query", "backward", alignment=1).replace(
            grad_key=None,
            bias=Tensor((1, 1, 7, 50), (0, 0, 50, 1), "float16"),
            sinks=Tensor((4,), (1,), "float32"),
            mask=Causal(0),
            scale=math.nan,
            softcap=-2,
            dropout_p=2,
            num_splits_key=0,
            grad_sinks=Tensor((3,), (1,), "float32"),
        ),
        [
            f"softcap: {SOFTCAP}", "bias.shape: each axis", "sinks: float32 [3]", "dropout_p: a probability",
            "query.alignment: the 2 bytes", f"window_size: {WINDOW}", f"scale: {SCALE}", "num_splits_key: at least 1",
        ],
    ),
}  # fmt: skip

RANGES: dict[str, Refused] = {
    "queries of ranges": (ranged((2, 3, 41)), [f"{name}.shape: {EDGES}" for name in RANGE_EDGES]),
    "batch of ranges": (ranged((3, 1, 40)), [f"{name}.shape: {EDGES}" for name in RANGE_EDGES]),
    "axes of ranges": (ranged((3, 40)), [f"{name}.shape: {EDGES}" for name in RANGE_EDGES]),
    "another shape of their ends": (
        ranged().replace(key_end=Tensor.contiguous((1, 3, 40), "int32")),
        ["key_end.shape: must be that of key_start"],
    ),
    "dtype of ranges": (ranged(dtype="int64"), ["key_start.dtype: int32"]),
    "rank of the strides of ranges": (ranged(strides=(120, 40)), ["key_start.strides: a stride for each axis"]),
    "strides of ranges": (ranged(strides=(2**62, 40, 1)), ["key_start.strides: fewer than 2**63 bytes"]),
    "address of ranges": (ranged(alignment=2), ["key_start.alignment: the 4 bytes"]),
    "starts alone": (ranged().replace(key_end=None), ["key_end: must come with key_start"]),
    "ends alone": (ranged().replace(key_start=None), ["key_start: must come with key_end"]),
    "no tensors of ranges": (
        ranged().replace(key_start=3, key_end="4"),
        [f"{name}: a Tensor, or None" for name in RANGE_EDGES],
    ),
    "ranges of packed sequences": (
        ranged((1, 1, 25), dense(base=LENGTHS).replace(sequences=Sequences(2, 25, 30))),
        ["sequences: None with a mask in memory"],
    ),
    "size of blocks": (dense().replace(block_size=(128, 0)), ["block_size: two ints above 0"]),
    "no size of blocks": (dense().replace(block_size="128"), ["block_size: two ints above 0"]),
    "shape of blocks": (blocks((2, 1, 1, 2)), ["visible_blocks.shape: (1 or 2, 1 or 3, 1, 1)"]),
    "batch of blocks": (blocks((3, 1, 1, 1)), ["visible_blocks.shape: (1 or 2, 1 or 3, 1, 1)"]),
    "dtype of blocks": (blocks(dtype="float32"), ["visible_blocks.dtype: bool or uint8"]),
}

FUNCTIONS: dict[str, Refused] = {
    "scalars without a program": (dense().replace(mask_scalars=(1,)), ["mask_scalars: None without mask_program"]),
    "arrays without a program": (
        dense().replace(mask_array_0=IDS, mask_array_1=IDS),
        ["mask_array_0: None without mask_program", "mask_array_1: None without mask_program"],
    ),
    "no text of a program": (dense().replace(mask_program="query >= key"), ["mask_program: the text of a MaskProgram"]),
    "no text": (dense().replace(mask_program=5), ["mask_program: the text of a MaskProgram"]),
    "count of scalars": (function(mask_scalars=(1, 2)), ["mask_scalars: 1 int32"]),
    "no scalars": (function(mask_scalars=None), ["mask_scalars: 1 int32"]),
    "a large scalar": (function(mask_scalars=(2**31,)), ["mask_scalars: 1 int32"]),
    "a scalar that is no int": (function(mask_scalars=(1.0,)), ["mask_scalars: 1 int32"]),
    "scalars that are no tuple": (function(mask_scalars=[1]), ["mask_scalars: 1 int32"]),
    "no array of a program": (function(mask_array_0=None), ["mask arrays: 1, the first ones"]),
    "other arrays of a program": (function(mask_array_0=None, mask_array_1=IDS), ["mask arrays: 1, the first ones"]),
    "axes of a mask array": (
        function(mask_array_0=Tensor.contiguous((40,), "int32")), ["mask_array_0.shape: of 2 axes, none of them 0"],
    ),
    "an empty mask array": (
        function(mask_array_0=Tensor.contiguous((2, 0), "int32")), ["mask_array_0.shape: of 2 axes, none of them 0"],
    ),
    "dtype of a mask array": (
        function(mask_array_0=Tensor.contiguous((2, 50), "float32")), ["mask_array_0.dtype: must be int32"],
    ),
    "address of a mask array": (
        function(mask_array_0=dataclasses.replace(IDS, alignment=2)), ["mask_array_0.alignment: the 4 bytes"],
    ),
    "strides of a mask array": (
        function(mask_array_0=dataclasses.replace(IDS, strides=(2**62, 1))),
        ["mask_array_0.strides: fewer than 2**63 bytes"],
    ),
    "a function of packed sequences": (
        function(dense(base=LENGTHS).replace(sequences=Sequences(2, 25, 30))),
        ["sequences: None with a mask in memory"],
    ),
}  # fmt: skip

ALL: dict[str, Refused] = {
    **RANKS,
    **RANGES,
    **FUNCTIONS,
    **SIZES,
    **TERMS,
    **TENSORS,
    **OPTIONS,
    **GRADIENTS,
    **TOGETHER,
}
