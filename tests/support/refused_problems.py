"""Refused problems: each with all reasons to refuse it, word for word, by what is wrong with it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Window
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Sequences, Shape, Tensor
from tests.support.requests import LENGTHS, SHAPE, changed, dense, with_terms

Refused = tuple[Problem, list[str]]

FOUR_D = "must be 4-D [batch, seqlen, heads, head_dim]; add the missing axes with size 1"
DTYPES = "must be one of float16, bfloat16, float32; cast it"
WHOLE = "an output must not overlap itself; allocate it in full"
FORWARD = "the forward writes no gradients; leave it None"
EDGE = "must be an int of at least 0, or None for no limit; correct it"
WINDOW = "must be an int of at least 1, or None for no window; correct it"
SCALE = (
    "must be 0, a number with a magnitude from 1e-30 to 2**127, or None for 1/sqrt(head_dim), because the kernels "
    "compute in float32; correct it, or multiply query by a part of it"
)
SOFTCAP = "must be a number above 0 that float32 holds, or 0 to switch it off; correct it"
SPLITS = "must be an int of at least 1, or None to let the plan choose; correct it"
RATIO = (
    "scale / softcap must be 0 or have a magnitude from 2**-126 to 2**126, because the kernels compute in float32; "
    "change one of them"
)
FLAG = "must be True or False; pass one of them"
WHOLE_BIAS = (2, 3, 40, 50)
LONG = 2**29 + 1
BATCHES = "concatenate the sequences in [1, tokens, heads, head_dim]"


def shaped(name: str, shape: tuple[int, ...], wanted: tuple[int, ...], operands: str) -> Refused:
    """Returns a problem with one operand of another shape; operands: the shapes of query, key and value in the text."""
    strides = Tensor.contiguous(shape, "").strides
    problem = changed(name, "backward" if name.startswith("grad") else "forward", shape=shape, strides=strides)
    return problem, [f"{name} has shape {shape}: must be {wanted} to match {operands}; reshape it"]


def without_step(name: str, axis: int, label: str, **terms: Any) -> Refused:
    """Returns a problem whose result `name` has stride 0 along one axis."""
    problem = with_terms("forward" if name == "output" else "backward", **terms)
    old: Tensor = getattr(problem, name)
    strides = tuple(0 if index == axis else stride for index, stride in enumerate(old.strides))
    changed_one = problem.replace(**{name: Tensor(old.shape, strides, old.dtype)})
    return changed_one, [f"{name} has {label} stride 0: {WHOLE}"]


def sized(name: str, size: int) -> Problem:
    """Returns a problem with one size changed."""
    sizes: dict[str, Any] = {name: size}
    return dense(**sizes)


RANKS: dict[str, Refused] = {
    "direction": (
        dense().replace(direction="sideways"),
        ["direction = 'sideways' (str): must be one of forward, backward; choose one"],
    ),
    "no grad_output": (
        dense("backward").replace(grad_output=None),
        ["grad_output is missing: the backward needs it; pass a tensor of the matching BMHK shape"],
    ),
    "rank of the shape": (
        changed("key", shape=(50, 3, 16), strides=(48, 16, 1)),
        [f"key has shape (50, 3, 16) and strides (48, 16, 1): {FOUR_D}"],
    ),
    "rank of the strides": (
        changed("query", strides=(48, 16, 1)),
        [f"query has shape (2, 40, 3, 16) and strides (48, 16, 1): {FOUR_D}"],
    ),
    "rank of the bias": (
        with_terms(bias=(40, 50)),
        [
            "bias has shape (40, 50) and strides (50, 1): must be 4-D [batch, heads, queries, keys]; "
            "add the missing axes with size 1"
        ],
    ),
    "longest sequence unknown": (
        dense(base=LENGTHS).replace(sequences=Sequences(2, None, 30)),  # type: ignore[arg-type]
        ["sequences.max_seqlen_q = None: must be an int; convert it"],
    ),
    "no tensors": (
        dense("backward").replace(query=None, bias=3, score_terms=("slopes",), sequences=5),
        [
            "query = None: must be a Tensor; create one with Tensor.contiguous",
            "bias = 3 (int): must be a Tensor, or None; create one with Tensor.contiguous",
            "score_terms = ('slopes',) (tuple): must be a tuple of (name, Tensor); correct it",
            "sequences = 5 (int): must be a Sequences object, or None; create one",
        ],
    ),
    "no numbers in tensors": (
        dense().replace(
            query=Tensor((2, -40, 3, 16), (1, 2, "3", 4), "float16"),  # type: ignore[arg-type]
            key=Tensor((2, 40, 3, 16), (1, 2, 3, 4), 16, "16"),  # type: ignore[arg-type]
            sequences=Sequences(2, 3, 4, "no"),  # type: ignore[arg-type]
        ),
        [
            "query.shape = (2, -40, 3, 16) (tuple): must be a tuple of ints of at least 0; correct it",
            "query.strides = (1, 2, '3', 4) (tuple): must be a tuple of ints; correct it",
            "key.dtype = 16 (int): must be one of float16, bfloat16, float32; correct it",
            "key.alignment = '16' (str): must be an int of bytes; correct it",
            "sequences.seqused_k = 'no' (str): must be True or False; pass one of them",
        ],
    ),
    "rank of the strides of alibi_slopes": (
        dense().replace(alibi_slopes=Tensor((3,), (), "float32")),
        [
            "alibi_slopes has shape (3,) and strides (): must have a stride for each axis; add the missing strides, or "
            "leave some out"
        ],
    ),
    "all ranks together": (
        changed("key", shape=(50, 3, 16)).replace(direction="?", scale=math.nan, bias=Tensor((4,), (1,), "float16")),
        [
            "direction = '?' (str): must be one of forward, backward; choose one",
            f"key has shape (50, 3, 16) and strides (2400, 48, 16, 1): {FOUR_D}",
            "bias has shape (4,) and strides (1,): must be 4-D [batch, heads, queries, keys]; "
            "add the missing axes with size 1",
        ],
    ),
}

SHAPES: dict[str, tuple[Callable[[], Problem], list[str]]] = {  # which no Problem can be created of
    "another object": (
        lambda: Problem.dense("forward", (2, 40, 50, 3, 16, 24), "float16"),  # type: ignore[arg-type]
        ["shape = (2, 40, 50, 3, 16, 24) (tuple): must be a Shape; create one"],
    ),
    "no integers": (
        lambda: Problem.dense("forward", Shape("2", 40, 50.0, 3, 16, 24, tokens=(40,), pool=(4, 16)), "float16"),  # type: ignore[arg-type]
        [
            "shape.batch = '2' (str): must be an int of at least 0; correct it",
            "shape.num_keys = 50.0 (float): must be an int of at least 0; correct it",
            "shape.tokens = (40,) (tuple): must be two ints, of queries and keys, or None; correct it",
            "shape.pool = (4, 16) (tuple): must be None here; make a dense Problem and set its pages",
        ],
    ),
}

SIZES: dict[str, Refused] = {
    "value that is not in key": (
        dense("backward").replace(value_in_key=True),
        [
            "value_in_key with direction 'backward': must be False, because gradients are separate; leave it out",
            "head_dim_value = 24 with value_in_key: must be at most the 16 columns of key; lower it",
            "value_in_key with value (2, 50, 3, 24) of strides (3600, 72, 24, 1) and key (2, 50, 3, 16) of strides "
            "(2400, 48, 16, 1): value must be the first columns of key; pass a view of key",
        ],
    ),
    "batch of key": shaped(
        "key", (3, 50, 3, 16), (2, 50, 3, 16), "query (2, 40, 3, 16), key (3, 50, 3, 16) and value (2, 50, 3, 24)"
    ),
    "keys of value": shaped(
        "value", (2, 49, 3, 24), (2, 50, 3, 24), "query (2, 40, 3, 16), key (2, 50, 3, 16) and value (2, 49, 3, 24)"
    ),
    "heads of value": shaped(
        "value", (2, 50, 1, 24), (2, 50, 3, 24), "query (2, 40, 3, 16), key (2, 50, 3, 16) and value (2, 50, 1, 24)"
    ),
    "head_dim of key": shaped(
        "key", (2, 50, 3, 8), (2, 50, 3, 16), "query (2, 40, 3, 16), key (2, 50, 3, 8) and value (2, 50, 3, 24)"
    ),
    "no key heads": shaped(
        "key", (2, 50, 0, 16), (2, 50, 3, 16), "query (2, 40, 3, 16), key (2, 50, 0, 16) and value (2, 50, 3, 24)"
    ),
    "queries of output": shaped(
        "output", (2, 50, 3, 24), (2, 40, 3, 24), "query (2, 40, 3, 16), key (2, 50, 3, 16) and value (2, 50, 3, 24)"
    ),
    "head_dim of grad_output": shaped(
        "grad_output", (2, 40, 3, 16), (2, 40, 3, 24),
        "query (2, 40, 3, 16), key (2, 50, 3, 16) and value (2, 50, 3, 24)",
    ),
    "keys of grad_key": shaped(
        "grad_key", (2, 40, 3, 16), (2, 50, 3, 16),
        "query (2, 40, 3, 16), key (2, 50, 3, 16) and value (2, 50, 3, 24)",
    ),
    "heads": (
        dense(num_heads_key=2),
        ["query has 3 heads and key 2: query's must be a multiple of key's; repeat or drop heads"],
    ),
    "head_dim of nothing": (
        dense(head_dim=0),
        ["head_dim = 0: must be from 1 to 65536; give every row at least one element"],
    ),
    "head_dim_value too wide": (
        dense(head_dim_value=65537),
        ["head_dim_value = 65537: must be from 1 to 65536; split the head"],
    ),
    **{
        name: (sized(name, LONG), [f"{name} = 536870913: must be at most 536870912; call once per slice"])
        for name in ("batch", "num_heads", "num_queries", "num_keys")
    },
    **{
        f"tokens of {name}": (
            dense("forward", base=LENGTHS, tokens=(LONG, 50) if name == "query" else (40, LONG)),
            [
                f"{name} has 536870913 tokens: must be at most 536870912, because cu_seqlens are 32-bit; "
                "call once per group of sequences"
            ],
        )
        for name in ("query", "key")
    },
    "no number of sequences": (
        dense(base=LENGTHS).replace(sequences=Sequences(-1, 25, 30)),
        ["number of sequences = -1: cu_seqlens must have at least one entry; pass [0] for none"],
    ),
    "longest of the keys": (
        dense(base=LENGTHS, num_keys=51),
        ["max_seqlen_k = 51: must be from 0 to the 50 tokens; pass the longest sequence's length"],
    ),
    "longest of the queries": (
        dense(base=LENGTHS, num_queries=-1),
        ["max_seqlen_q = -1: must be from 0 to the 40 tokens; pass the longest sequence's length"],
    ),
    "batches of sequences": (
        dense().replace(sequences=Sequences(2, 25, 30)),
        [f"query has batch 2 with cu_seqlens: must be 1; {BATCHES}"],
    ),
}  # fmt: skip

TERMS: dict[str, Refused] = {
    "bias": (
        with_terms(bias=(2, 3, 40, 49)),
        [
            "bias has shape (2, 3, 40, 49): each axis must be 1 or that of [batch, heads, queries, keys] = "
            f"{WHOLE_BIAS}; reshape or expand it"
        ],
    ),
    "bias of sequences": (
        with_terms(bias=(1, 3, 40, 50), base=LENGTHS),
        [
            "bias has shape (1, 3, 40, 50): each axis must be 1 or that of [batch, heads, queries, keys] = "
            "(2, 3, 25, 30); reshape or expand it"
        ],
    ),
    "grad_bias": (
        with_terms("backward", bias=(1, 3, 40, 50), grad_bias=(1, 2, 40, 50)),
        [
            "grad_bias has shape (1, 2, 40, 50): each axis must be 1 (summed over) or that of "
            f"{WHOLE_BIAS}; allocate it like the bias"
        ],
    ),
    "alibi_slopes": (
        with_terms(alibi_slopes=(2,)),
        ["alibi_slopes has shape (2,) and dtype float32: must be float32 [3] or [2, 3]; convert it"],
    ),
    "dtype of alibi_slopes": (
        dense().replace(alibi_slopes=Tensor.contiguous((3,), "float16")),
        ["alibi_slopes has shape (3,) and dtype float16: must be float32 [3] or [2, 3]; convert it"],
    ),
    "strides of alibi_slopes": (
        dense().replace(alibi_slopes=Tensor((2, 3), (6, 2), "float32")),
        ["alibi_slopes has strides (6, 2): must be contiguous; copy it"],
    ),
    "sinks": (
        with_terms(sinks=(2, 3)),
        ["sinks has shape (2, 3) and dtype float32: must be float32 [3]; convert it"],
    ),
    "address of sinks": (
        dense().replace(sinks=Tensor((3,), (1,), "float32", 2)),
        ["sinks starts at an address that is only 2-byte aligned: must be 4; copy it"],
    ),
    "a term that is not registered": (
        dense().replace(score_terms=(("nothing", Tensor.contiguous((3,), "float32")),)),
        [
            "score_terms has 'nothing': must be registered terms, of which there is none; "
            "call score_terms.register first"
        ],
    ),
    "grad_sinks": (
        with_terms("backward", sinks=(3,), grad_sinks=(1,)),
        ["grad_sinks has shape (1,) and dtype float32: must be float32 [3]; convert it"],
    ),
}

TENSORS: dict[str, Refused] = {
    "other dtype": (changed("value", dtype="float64"), [f"value has dtype float64: {DTYPES}"]),
    "two dtypes": (
        changed("value", dtype="bfloat16"),
        ["value has dtype bfloat16 but query has float16: all must agree; cast one of them"],
    ),
    "dtype of the bias": (
        dense(dtype="bfloat16").replace(bias=Tensor.contiguous(WHOLE_BIAS, "float32")),
        ["bias has dtype float32 but query has bfloat16: all must agree; cast one of them"],
    ),
    "last stride": (
        changed("key", strides=(4800, 96, 32, 2)),
        ["key has last stride 2: must be 1; make the head dimension contiguous"],
    ),
    "broadcast columns": (
        changed("output", "backward", strides=(1, 1, 1, 0)),
        ["output has last stride 0: must be 1; make the head dimension contiguous"],
    ),
    "address within an element": (
        changed("query", alignment=1),
        [
            "query starts at an address that is only 1-byte aligned: must be aligned to its 2-byte elements "
            "(16 bytes is fastest); copy it"
        ],
    ),
    "strides beyond 64 bits": (
        changed("key", strides=(2**62, 48, 16, 1)),
        [
            f"key has shape (2, 50, 3, 16) and strides {(2**62, 48, 16, 1)}: must reach fewer than 2**63 bytes; use "
            "smaller strides"
        ],
    ),
    "address of a float32 bias": (
        dense(dtype="float32").replace(bias=Tensor(WHOLE_BIAS, (6000, 2000, 50, 1), "float32", 2)),
        [
            "bias starts at an address that is only 2-byte aligned: must be aligned to its 4-byte elements "
            "(16 bytes is fastest); copy it"
        ],
    ),
    "heads of output that overlap": (
        changed("output", strides=(2880, 72, 23, 1)),
        [f"output has shape (2, 40, 3, 24) and strides (2880, 72, 23, 1): {WHOLE}"],
    ),
    "queries of grad_bias that overlap": (
        with_terms("backward", bias=WHOLE_BIAS).replace(grad_bias=Tensor(WHOLE_BIAS, (6000, 2000, 49, 1), "float16")),
        [f"grad_bias has shape {WHOLE_BIAS} and strides (6000, 2000, 49, 1): {WHOLE}"],
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
}

_WINDOWS: tuple[tuple[type[Causal], Any], ...] = (
    *((Causal, size) for size in (0, True, 2.5)),
    (CausalBottomRight, -1),
)
OPTIONS: dict[str, Refused] = {
    "mask": (
        dense().replace(mask="causal"),
        ["mask = 'causal' (str): must be a mask object such as Full() or Causal(); make one"],
    ),
    **{
        f"window of {size!r}": (
            dense().replace(mask=kind(size)),
            [f"window_size = {size!r}{' (float)' if isinstance(size, float) else ''}: {WINDOW}"],
        )
        for kind, size in _WINDOWS
    },
    "window behind the diagonal": (
        dense().replace(mask=Window(-1, True)),
        [f"mask left = -1 (int): {EDGE}", f"mask right = True: {EDGE}"],
    ),
    "windows of nothing": (
        dense().replace(mask=Window(-1, -2)),
        [f"mask left = -1: {EDGE}", f"mask right = -2: {EDGE}"],
    ),
    **{
        f"scale of {scale!r}": (dense().replace(scale=scale), [f"scale = {scale!r} ({type(scale).__name__}): {SCALE}"])
        for scale in (math.inf, math.nan, "x", -1e39, 1e-34, -9.9e-31)
    },
    **{
        f"softcap of {softcap!r}": (dense().replace(softcap=softcap), [f"softcap = {softcap}: {SOFTCAP}"])
        for softcap in (-1.0, math.nan, math.inf, 1e-39)
    },
    **{
        f"softcap of {softcap!r}": (
            dense().replace(softcap=softcap),
            [f"softcap = {given}: must be a number that float32 holds, or 0 to switch it off; pass a float"],
        )
        for softcap, given in ((None, "None"), (True, "True"), (["2"], "['2'] (list)"))
    },
    "a softcap far below the scale": (
        dense().replace(softcap=1e-37, scale=100),
        [f"softcap = 1e-37 (float) with scale 100: {RATIO}"],
    ),
    "a softcap far above the scale": (
        dense().replace(softcap=1e20, scale=-1e-20),
        [f"softcap = 1e+20 (float) with scale -1e-20: {RATIO}"],
    ),
    "a softcap above the precision of tanh": (
        dense(dtype="float32").replace(softcap=8192.5),
        [
            "softcap = 8192.5 (float): must be at most 8192 for float32 operands, because the kernels compute tanh in "
            "float32; lower it, or pass 0 for none"
        ],
    ),
    **{
        f"dropout_p of {p!r}": (
            dense().replace(dropout_p=p),
            [f"dropout_p = {p}: must be a probability from 0 to 1; correct it"],
        )
        for p in (-0.1, 1.0000001, math.nan)
    },
    "dropout_p of a word": (
        dense().replace(dropout_p="x"),
        ["dropout_p = 'x' (str): must be a probability from 0 to 1; pass a float"],
    ),
    "flags of other kinds": (
        dense("backward").replace(deterministic="no", philox_on_device=1),
        [f"philox_on_device = 1 (int): {FLAG}", f"deterministic = 'no' (str): {FLAG}"],
    ),
    "splits in the forward": (
        dense().replace(num_splits_key=2),
        ["num_splits_key = 2 (int): must be None, because only the backward splits keys; leave it None"],
    ),
    "splits of nothing": (dense("backward").replace(num_splits_key=0), [f"num_splits_key = 0 (int): {SPLITS}"]),
    "splits of a half": (dense("backward").replace(num_splits_key=1.5), [f"num_splits_key = 1.5 (float): {SPLITS}"]),
    "splits that take turns": (
        dense("backward").replace(num_splits_key=2, deterministic=True),
        [
            "num_splits_key = 2 with deterministic: must be 1, or None for one block a key tile: with "
            "another number a block would wait for one that starts after it; change it"
        ],
    ),
}

_TERMS: dict[str, Any] = {"bias": WHOLE_BIAS, "grad_bias": WHOLE_BIAS, "sinks": (3,), "grad_sinks": (3,)}
_RESULTS = ("grad_output", "grad_logsumexp", "grad_query", "grad_key", "grad_value", "grad_bias", "grad_sinks")
_OF_OPERANDS = {name: SHAPE.of(name) for name in ("grad_output", "grad_query", "grad_key", "grad_value")}
GRADIENTS: dict[str, Refused] = {
    "gradients in the forward": (
        with_terms(
            **_TERMS | _OF_OPERANDS, grad_logsumexp=Tensor.contiguous(SHAPE.logsumexp, "float32")
        ),
        [f"{name} is given: {FORWARD}" for name in _RESULTS],
    ),
    "shape of the gradient of logsumexp": (
        dense("backward").replace(grad_logsumexp=Tensor.contiguous((2, 3, 40), "float32")),
        ["grad_logsumexp has shape (2, 3, 40) and dtype float32: must be (2, 3, 64) float32, like logsumexp; pad it"],
    ),
    "strides of the gradient of logsumexp": (
        dense("backward").replace(grad_logsumexp=Tensor((2, 3, 64), (64, 128, 1), "float32")),
        ["grad_logsumexp is strided or misaligned: must be contiguous and 4-byte aligned; copy it"],
    ),
    "gradient of logsumexp without keys": (
        with_terms(
            "backward", base=dataclasses.replace(SHAPE, num_keys=0), sinks=(3,), grad_sinks=(3,),
            grad_logsumexp=Tensor.contiguous(SHAPE.logsumexp, "float32"),
        ),
        [
            "grad_logsumexp is given with sinks and no keys: must have a key, for nothing is launched without one; "
            "the gradient of each sink is the sum of its head's grad_logsumexp"
        ],
    ),
    "no gradient": (
        dense("backward").replace(grad_query=None, grad_key=None, grad_value=None),
        [
            "no gradient is asked for: must be at least one of grad_query, grad_key, grad_value, grad_bias, "
            "grad_sinks; pass a tensor for it"
        ],
    ),
    "gradients of nothing": (
        with_terms("backward", grad_bias=WHOLE_BIAS, grad_sinks=(3,)),
        [
            f"grad_{name} is given without {name}: must come together; pass {name} or leave grad_{name} None"
            for name in ("bias", "sinks")
        ],
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
            f"softcap = -2.0: {SOFTCAP}",
            "bias has shape (1, 1, 7, 50): each axis must be 1 or that of [batch, heads, queries, keys] = "
            f"{WHOLE_BIAS}; reshape or expand it",
            "sinks has shape (4,) and dtype float32: must be float32 [3]; convert it",
            "dropout_p = 2.0: must be a probability from 0 to 1; correct it",
            "query starts at an address that is only 1-byte aligned: must be aligned to its 2-byte elements "
            "(16 bytes is fastest); copy it",
            f"window_size = 0: {WINDOW}",
            f"scale = nan (float): {SCALE}",
            f"num_splits_key = 0 (int): {SPLITS}",
        ],
    ),
}

ALL: dict[str, Refused] = {**RANKS, **SIZES, **TERMS, **TENSORS, **OPTIONS, **GRADIENTS, **TOGETHER}
