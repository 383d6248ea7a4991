"""Bench cases: the problems that the benchmark measures, as names, and the kernels that they need.

    {dtype}_d{head_dim}[v{head_dim_value}][_q{queries}]_s{seqlen}_{b{batch}|t{tokens}}_h{heads}[k{heads_key}]_{full|causal}

With q{queries} the forward alone is measured, of so many queries against seqlen keys and the mask full.

Behind it, in this order and each where the case has it: _window{size}, _bias, _biasgrad or _biassum,
_dropout{p}, _softcap{bound}, _alibi, _sinks, _deterministic. With t{tokens} sequences of mixed lengths from 1 to
seqlen have that many tokens together. A bias is shared by the batch; the backward writes its gradient for _biasgrad in
full, for _biassum summed over the batch. The gradient of sinks is always written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import numpy as np

from cutlass_py_attn import planner
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.masks import Causal, Full, Mask
from cutlass_py_attn.plan import Build
from cutlass_py_attn.problem import DIRECTIONS, ITEM_BYTES, SHORT_NAMES, Problem, Shape, Tensor

_DTYPES: Final = {short: name for name, short in SHORT_NAMES.items()}
_NAME: Final = re.compile(
    r"(?P<dtype>\w+?)_d(?P<dim>\d+)(?:v(?P<dim_value>\d+))?(?:_q(?P<queries>\d+))?_s(?P<seqlen>\d+)_(?P<counted>[bt])(?P<count>\d+)"
    r"_h(?P<heads>\d+)(?:k(?P<heads_key>\d+))?_(?:(?P<full>full)|causal(?:_window(?P<window>\d+))?)"
    r"(?:_(?P<bias>bias(?:grad|sum)?))?(?:_dropout(?P<dropout>0\.\d+))?(?:_softcap(?P<softcap>\d+))?"
    r"(?P<alibi>_alibi)?(?P<sinks>_sinks)?(?P<deterministic>_deterministic)?"
)


@dataclass(frozen=True, slots=True)
class Case:
    """One problem to measure. bias: "", bias, biasgrad or biassum; lengths: of each sequence where they differ."""

    name: str
    dtype: str
    shape: Shape
    mask: Mask
    bias: str = ""
    dropout_p: float = 0.0
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    deterministic: bool = False
    lengths: tuple[int, ...] = ()
    directions: tuple[str, ...] = DIRECTIONS

    def problem(self, direction: str) -> Problem:
        """The problem of one direction: contiguous tensors, and a bias with stride 0 along the batch."""
        backward = direction == "backward"
        changes: dict[str, Any] = {"softcap": self.softcap, "dropout_p": self.dropout_p}
        changes["deterministic"] = self.deterministic and backward
        if self.bias:
            whole = Tensor.contiguous(self.shape.bias, self.dtype)
            changes["bias"] = Tensor(whole.shape, (0, *whole.strides[1:]), self.dtype)
            summed = Tensor.contiguous((1, *self.shape.bias[1:]), self.dtype)
            changes["grad_bias"] = {"biasgrad": whole, "biassum": summed}.get(self.bias) if backward else None
        by_head = Tensor.contiguous((self.shape.num_heads,), "float32")
        if self.alibi:
            changes["alibi_slopes"] = by_head
        if self.sinks:
            changes |= {"sinks": by_head, "grad_sinks": by_head if backward else None}
        return Problem.dense(direction, self.shape, self.dtype, self.mask).replace(**changes)

    @property
    def bytes_read_once(self) -> int:
        """Query, key, value and output of a forward of few queries, which its time goes by; 0 for any other case."""
        if self.directions == DIRECTIONS:
            return 0
        names = ("query", "key", "value", "output")
        return sum(math.prod(self.shape.of(name)) for name in names) * ITEM_BYTES[self.dtype]

    def flops(self, direction: str) -> int:
        """Problem.flops; where lengths differ the sum over the sequences, each as a problem of its own."""
        if not self.lengths:
            return self.problem(direction).flops
        s = self.shape
        shapes = (Shape(1, m, m, s.num_heads, s.head_dim, s.head_dim_value, s.num_heads_key) for m in self.lengths)
        return sum(Problem.dense(direction, shape, self.dtype, self.mask).flops for shape in shapes)


def parse(name: str) -> Case:
    """The case of that name; NotSupported shows the form."""
    found = _NAME.fullmatch(name)
    if found is None or found["dtype"] not in _DTYPES:
        raise NotSupported(
            f"case {name!r}: must be like bf16_d128_s8192_b4_h16_causal or "
            "f16_d64v32_s2048_t16384_h32k4_causal_window512_dropout0.1_deterministic (full list of words: "
            f"cutlass_py_attn/bench_cases.py), dtype one of {', '.join(_DTYPES)}"
        )
    longest, count = int(found["seqlen"]), int(found["count"])
    lengths = mixed_lengths(longest, count) if found["counted"] == "t" else ()
    batch, seqlen = (len(lengths), max(lengths, default=0)) if found["counted"] == "t" else (count, longest)
    head_dim = int(found["dim"])
    if found["queries"] and (lengths or not found["full"]):
        raise NotSupported(f"case {name!r}: with q{found['queries']} it must have b{{batch}} and full; correct it")
    shape = Shape(
        batch,
        int(found["queries"] or seqlen),
        seqlen,
        int(found["heads"]),
        head_dim,
        int(found["dim_value"] or head_dim),
        int(found["heads_key"] or 0),
        (count, count) if lengths else None,
    )
    window = None if found["window"] is None else int(found["window"])
    return Case(
        name,
        _DTYPES[found["dtype"]],
        shape,
        Full() if found["full"] else Causal(window),
        bias=found["bias"] or "",
        dropout_p=float(found["dropout"] or 0),
        softcap=float(found["softcap"] or 0),
        alibi=found["alibi"] is not None,
        sinks=found["sinks"] is not None,
        deterministic=found["deterministic"] is not None,
        lengths=lengths,
        directions=("forward",) if found["queries"] else DIRECTIONS,
    )


def mixed_lengths(longest: int, tokens: int) -> tuple[int, ...]:
    """The same lengths in every run: the longest, then drawn from 1 to it, the last one cut so that all fit."""
    rng = np.random.default_rng(1)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        drawn = int(rng.integers(1, longest + 1)) if lengths else longest
        lengths.append(min(drawn, left))
    return tuple(lengths)


def plain_cases() -> tuple[str, ...]:
    """Masked attention alone: 32768 rows in all, a quarter of that in float32."""
    names = []
    sizes = (("d64", 32), ("d128", 16))
    for dtype, (dim, heads), (seqlen, batch) in product(("bf16", "f16", "f32"), sizes, ((2048, 16), (8192, 4))):
        batches = batch // 4 if dtype == "f32" else batch
        names += [f"{dtype}_{dim}_s{seqlen}_b{batches}_h{heads}_{mask}" for mask in ("full", "causal")]
    return tuple(names)


_CAUSAL: Final = "bf16_d128_s8192_b4_h16_causal"
_FULL_4096: Final = "bf16_d128_s4096_b4_h16_full"
# Everything else, each with the case whose rate in the same run it is held against; "" where there is none.
FEATURE_CASES: Final[dict[str, str]] = {
    "bf16_d256_s8192_b4_h8_full": "",
    "bf16_d256_s8192_b4_h8_causal": "",
    "bf16_d512_s4096_b2_h8_full": "",
    "f32_d256_s2048_b4_h8_full": "",
    "bf16_d32_s8192_b4_h32_causal": "",
    "bf16_d96_s8192_b4_h16_full": "",
    "bf16_d96_s8192_b4_h16_causal": "",
    "bf16_d192_s8192_b4_h10_full": "",
    "bf16_d192v128_s8192_b4_h10_causal": "",
    "bf16_d192v128_s8192_b4_h16_causal": "",
    "bf16_d64_s16384_b2_h32_causal": "",
    "bf16_d128_s512_b64_h16_full": "",
    "bf16_d128_s512_b64_h16_causal": "",
    _FULL_4096: "",
    f"{_FULL_4096}_bias": _FULL_4096,
    f"{_FULL_4096}_biasgrad": _FULL_4096,
    f"{_FULL_4096}_biassum": _FULL_4096,
    f"{_FULL_4096}_softcap30": _FULL_4096,
    f"{_FULL_4096}_alibi": _FULL_4096,
    f"{_FULL_4096}_sinks": _FULL_4096,
    "bf16_d128_s2048_b16_h16_full_dropout0.1": "bf16_d128_s2048_b16_h16_full",
    "bf16_d128_s16384_b2_h16_full": "",
    "bf16_d128_s16384_b2_h16_causal": "",
    "bf16_d128_s16384_b2_h16_causal_window1024": "bf16_d128_s16384_b2_h16_causal",
    "bf16_d128_s8192_t65536_h16_causal": _CAUSAL,
    "bf16_d128_s8192_b2_h32k4_causal": _CAUSAL,
    "bf16_d128_s8192_b4_h16_full_deterministic": "bf16_d128_s8192_b4_h16_full",
    f"{_CAUSAL}_deterministic": _CAUSAL,
    "bf16_d64_s8192_b4_h32_causal_deterministic": "bf16_d64_s8192_b4_h32_causal",
    "bf16_d128_q1_s8192_b64_h32k8_full": "",
    "bf16_d128_q1_s8192_b8_h32k8_full": "",
    "bf16_d128_q1_s8192_b1_h32k8_full": "",
    "bf16_d128_q1_s131072_b1_h32k8_full": "",
    "bf16_d128_q1_s8192_b16_h32_full": "",
    "bf16_d128_q16_s8192_b64_h32k8_full": "",
    "bf16_d64_q1_s8192_b64_h32k8_full": "",
    "bf16_d256_q1_s8192_b32_h32k8_full": "",
    "f32_d128_q1_s8192_b16_h32k8_full": "",
}


def default_cases() -> tuple[str, ...]:
    """The published set."""
    return (*plain_cases(), *FEATURE_CASES)


def chosen(names: Iterable[str], only: str) -> tuple[str, ...]:
    """The names (the published set where there are none) in which the regular expression is found."""
    try:
        pattern = re.compile(only)
    except re.error as error:
        raise NotSupported(f"only = {only!r}: must be a regular expression ({error}); correct it") from error
    listed = tuple(names) or default_cases()
    found = tuple(name for name in listed if pattern.search(name))
    if not found:
        raise NotSupported(f"only = {only!r}: is found in none of {', '.join(listed)}; use a part of a name")
    return found


def builds(cases: Iterable[Case], compute_capability: tuple[int, int]) -> list[tuple[Build, ...]]:
    """Every kernel that these cases need on that device, once, and what stands in for it where ptxas spills.

    NotSupported where one cannot be planned.
    """
    problems = (case.problem(direction) for case in cases for direction in case.directions)
    return list(dict.fromkeys(planner.builds_on(problem, compute_capability) for problem in problems))
