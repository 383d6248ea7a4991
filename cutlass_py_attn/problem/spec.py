"""Problem specs: an attention problem as one line of words, such as `bf16_d128_s8192_b4_h16_causal`.

Benchmark cases, GPU test cases, random problems and the command line share this grammar. Words are joined by `_` and
may come in any order; `ProblemSpec.name` writes them in the order below. Words in brackets are optional.

    bf16 | f16 | f32 | e4m3      dtype of the operands; e4m3 forward only
    d{D}[v{DV}]                  head_dim of query and key; head_dim_value if it differs
    [q{M}]                       queries of each batch element; as many as keys if absent
    s{N}                         keys of each batch element
    b{B}                         batch size
    t{T}                         in place of b: variable length, T tokens in all, the longest sequence has s tokens
    n{M}x{N}[u{U}],{L},...       in place of q, s and b: variable length; M queries and N keys of which U are used,
                                 or L queries and keys
    [paged{P}]                   key and value in pages of P rows, P a power of two; forward only. With n, the pages of
                                 a sequence hold N keys, of which it has U, and query is (batch, M, heads, head_dim)
                                 if M is the same for all; without n, every sequence has s keys
    h{H}[k{HK}]                  heads of query; heads of key and value if there are fewer (GQA, MQA)
    full                         no mask
    causal[_br][_window{W}]      diagonal from the top-left corner, or to the bottom-right one; the last W keys only
    window[_left{L}][_right{R}]  L keys before and R keys after the bottom-right diagonal; no limit if absent
    [bias[AXES][grad|sum]]       additive bias; AXES is bhqk with 1 for a broadcast axis, 1hqk if absent. grad: its
                                 gradient in full; sum: its gradient summed over the broadcast axes
    [dropout{P}]                 probability of a dropped weight
    [softcap{X}]                 bound of the scores
    [alibi[b]]                   ALiBi slopes by head; alibib: by batch and head
    [sinks]                      attention sinks
    [deterministic]              bitwise repeatable query gradient
    [scale{X}]                   factor of Q K^T; 1 / sqrt(head_dim) if absent
    [deviceseed]                 Philox seed and offset in device memory
    [gradlse]                    logsumexp has a gradient too
    [grads{LETTERS}]             gradients that the backward writes, of q, k, v, b (bias) and s (sinks); all if absent
    [mla]                        value is the first head_dim_value columns of key, in the same memory: a latent cache;
                                 forward only
    [kv8]                        key and value of e4m3 beside a query of 16 bits; forward only
    [descale{GRAIN}]             e4m3, kv8: scales of the codes; GRAIN is what has one, tensor, head (each key head),
                                 batch (each key head of a sequence) or, of kv8, row; of mla with kv8, tile (each 128
                                 columns of a row: those of value are codes, the others have 16 bits). No scales if
                                 absent
    [f16out]                     e4m3: the output is f16, not bf16
    [splits{N}]                  blocks that share one (batch, head) in the backward; the plan chooses if absent

Examples: `bf16_d128_q1_s8192_b64_h32k8_full` (few-query decode),
`f16_d64_n70x200u30,130_h4k2_causal_br_window64_dropout0.1_sinks`.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Mask, Window
from cutlass_py_attn.problem.paging import Pages
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.quantization import (
    BATCH_HEAD,
    CACHE_SCALES,
    HEAD,
    ROW,
    SCALES,
    TENSOR,
    TILE,
    output_dtype,
    shapes,
)
from cutlass_py_attn.problem.tensors import FLOAT8, OPERAND_NAMES, Sequences, Shape, Tensor

GRAMMAR: Final = (__doc__ or "").partition("\n\n")[2]
EXAMPLE: Final = "bf16_d128_s8192_b4_h16_causal"
GRAINS: Final = {"tensor": TENSOR, "head": HEAD, "batch": BATCH_HEAD, "row": ROW, "tile": TILE}  # of descale{GRAIN}
GRADIENTS: Final = {"q": "query", "k": "key", "v": "value", "b": "bias", "s": "sinks"}  # letters of grads{LETTERS}
BIAS_AXES: Final = "bhqk"
BATCH_BROADCAST: Final = "1hqk"  # the axes of `bias` without AXES

_DTYPES: Final = {short: name for name, short in OPERAND_NAMES.items()}
_NUMBER: Final = r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_LENGTHS: Final = r"\d+(?:x\d+(?:u\d+)?)?"
# No two patterns match the same word. A named group is the value of a field, or part of it.
_WORDS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        rf"(?P<dtype>{'|'.join(_DTYPES)})",
        r"d(?P<head_dim>\d+)(?:v(?P<head_dim_value>\d+))?",
        r"q(?P<num_queries>\d+)",
        r"s(?P<num_keys>\d+)",
        r"b(?P<batch>\d+)",
        r"t(?P<tokens>\d+)",
        rf"n(?P<sequences>{_LENGTHS}(?:,{_LENGTHS})*)",
        r"h(?P<num_heads>\d+)(?:k(?P<num_heads_key>\d+))?",
        r"(?P<mask>full|causal|window)",
        r"(?P<bottom_right>br)",
        r"window(?P<window_size>\d+)",
        r"left(?P<window_left>\d+)",
        r"right(?P<window_right>\d+)",
        r"(?P<bias>bias)(?P<bias_axes>[b1][h1][q1][k1])?(?P<bias_gradient>grad|sum)?",
        rf"dropout(?P<dropout_p>{_NUMBER})",
        rf"softcap(?P<softcap>{_NUMBER})",
        r"(?P<alibi>alibib?)",
        r"(?P<sinks>sinks)",
        r"(?P<deterministic>deterministic)",
        rf"scale(?P<scale>{_NUMBER})",
        r"(?P<philox_on_device>deviceseed)",
        r"(?P<grad_logsumexp>gradlse)",
        rf"grads(?P<gradients>[{''.join(GRADIENTS)}]+)",
        r"splits(?P<num_splits_key>\d+)",
        r"paged(?P<page_size>\d+)",
        r"(?P<value_in_key>mla)",
        r"(?P<e4m3_cache>kv8)",
        rf"descale(?P<descale>{'|'.join(GRAINS)})",
        r"(?P<float16_output>f16out)",
    )
)
_KNOWN: Final = (
    *_DTYPES, "d", "q", "s", "b", "t", "n", "h", "full", "causal", "br", "window", "left", "right", "bias", "biasgrad",
    "biassum", "dropout", "softcap", "alibi", "alibib", "sinks", "deterministic", "scale", "deviceseed", "gradlse",
    "grads", "splits", "paged", "mla", "kv", *(f"descale{grain}" for grain in GRAINS),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SequenceLengths:
    """Lengths of one variable-length sequence. used_keys: keys that are used (seqused_k); None for all."""

    num_queries: int
    num_keys: int
    used_keys: int | None = None

    @property
    def word(self) -> str:
        """The lengths as text: `70x200u30`, or `130` for 130 queries and 130 keys."""
        if self.used_keys is None and self.num_queries == self.num_keys:
            return str(self.num_keys)
        return f"{self.num_queries}x{self.num_keys}" + (f"u{self.used_keys}" if self.used_keys is not None else "")


@dataclass(frozen=True, slots=True)
class ProblemSpec:
    """What to compute, without a direction and without addresses; `problem` gives the Problem of a direction.

    head_dim_value: 0 for head_dim. num_heads_key: 0 for num_heads.
    sequences: lengths in the variable-length layout, which decide batch, num_queries and num_keys; () for none.
    bias: the axes b, h, q and k, 1 for a broadcast axis; "" for no bias. bias_gradient: "grad", "sum" or "" for none.
    gradients: letters of GRADIENTS; "" for all that the features have.
    alibi: "h" (slopes by head), "bh" (by batch and head) or "" for none. scale: None for 1 / sqrt(head_dim).
    deterministic, grad_logsumexp, gradients and num_splits_key concern the backward alone.
    page_size: rows of a page of key and value; 0 for no pages.
    value_in_key: whether value is the first head_dim_value columns of key.
    e4m3_cache: whether key and value are e4m3 codes beside a query of 16 bits.
    descale: what has a scale, a member of GRAINS; "" for codes without scales.
    float16_output: whether the output of e4m3 operands is float16.
    """

    dtype: str
    head_dim: int
    num_queries: int = 1
    num_keys: int = 1
    batch: int = 1
    num_heads: int = 1
    head_dim_value: int = 0
    num_heads_key: int = 0
    mask: Mask = dataclasses.field(default_factory=Full)
    sequences: tuple[SequenceLengths, ...] = ()
    bias: str = ""
    bias_gradient: str = ""
    gradients: str = ""
    dropout_p: float = 0.0
    philox_on_device: bool = False
    softcap: float = 0.0
    scale: float | None = None
    alibi: str = ""
    sinks: bool = False
    deterministic: bool = False
    grad_logsumexp: bool = False
    num_splits_key: int | None = None
    page_size: int = 0
    value_in_key: bool = False
    e4m3_cache: bool = False
    descale: str = ""
    float16_output: bool = False

    def __post_init__(self) -> None:
        """Writes every default out, so that equal problems are equal specs."""
        changes: dict[str, Any] = {
            "head_dim_value": self.head_dim_value or self.head_dim,
            "num_heads_key": self.num_heads_key or self.num_heads,
            "gradients": self.gradients or self._all_gradients,
        }
        if self.bias_gradient and self.bias == BIAS_AXES:
            changes["bias_gradient"] = "grad"  # there is no axis to sum over
        if self.sequences:
            if any(each.used_keys is not None for each in self.sequences):
                changes["sequences"] = tuple(
                    each if each.used_keys is not None else dataclasses.replace(each, used_keys=each.num_keys)
                    for each in self.sequences
                )
            changes["batch"] = len(self.sequences)
            changes["num_queries"] = max(each.num_queries for each in self.sequences)
            changes["num_keys"] = max(each.num_keys for each in self.sequences)
        for name, value in changes.items():
            object.__setattr__(self, name, value)

    @property
    def _all_gradients(self) -> str:
        return "qkv" + ("b" if self.bias_gradient else "") + ("s" if self.sinks else "")

    def __str__(self) -> str:
        return self.name

    def replace(self, **changes: Any) -> ProblemSpec:
        """A copy with some fields changed; gradients and heads of key that followed from others follow again."""
        if self.num_heads_key == self.num_heads:
            changes.setdefault("num_heads_key", 0)
        if self.head_dim_value == self.head_dim:
            changes.setdefault("head_dim_value", 0)
        if self.gradients == self._all_gradients:
            changes.setdefault("gradients", "")
        return dataclasses.replace(self, **changes)

    @property
    def name(self) -> str:
        """The spec as text; `parse` gives an equal spec."""
        return "_".join(self._words())

    def _words(self) -> Iterator[str]:
        yield OPERAND_NAMES[self.dtype]
        yield f"d{self.head_dim}" + (f"v{self.head_dim_value}" if self.head_dim_value != self.head_dim else "")
        yield from self._size_words()
        yield f"h{self.num_heads}" + (f"k{self.num_heads_key}" if self.num_heads_key != self.num_heads else "")
        yield from _mask_words(self.mask)
        if self.bias:
            yield "bias" + (self.bias if self.bias != BATCH_BROADCAST else "") + self.bias_gradient
        for word, value in (("dropout", self.dropout_p), ("softcap", self.softcap)):
            if value:
                yield f"{word}{_number_text(value)}"
        if self.alibi:
            yield "alibi" + ("b" if self.alibi == "bh" else "")
        for word in ("sinks", "deterministic"):
            if getattr(self, word):
                yield word
        if self.scale is not None:
            yield f"scale{_number_text(self.scale)}"
        if self.philox_on_device:
            yield "deviceseed"
        if self.grad_logsumexp:
            yield "gradlse"
        if self.gradients != self._all_gradients:
            yield f"grads{self.gradients}"
        if self.num_splits_key is not None:
            yield f"splits{self.num_splits_key}"
        if self.page_size:
            yield f"paged{self.page_size}"
        if self.value_in_key:
            yield "mla"
        if self.e4m3_cache:
            yield "kv8"
        if self.descale:
            yield f"descale{self.descale}"
        if self.float16_output:
            yield "f16out"

    def _size_words(self) -> Iterator[str]:
        if not self.sequences:
            if self.num_queries != self.num_keys:
                yield f"q{self.num_queries}"
            yield f"s{self.num_keys}"
            yield f"b{self.batch}"
            return
        longest, tokens = self.sequences[0].num_keys, self.num_tokens[1]
        if longest == self.num_keys and self.sequences == mixed_lengths(longest, tokens):
            yield f"s{longest}"
            yield f"t{tokens}"
        else:
            yield "n" + ",".join(each.word for each in self.sequences)

    @property
    def has_codes(self) -> bool:
        """Whether key and value are e4m3 codes, and query too unless they are a cache."""
        return self.e4m3_cache or self.dtype == FLOAT8

    @property
    def has_rope(self) -> bool:
        """Whether the columns of a latent cache that are no value have 16 bits beside codes: key_rope."""
        return self.e4m3_cache and GRAINS.get(self.descale) == TILE

    @property
    def has_used_keys(self) -> bool:
        """Whether seqused_k says how many keys each sequence uses."""
        return bool(self.sequences) and self.sequences[0].used_keys is not None

    @property
    def num_tokens(self) -> tuple[int, int]:
        """(queries, keys) of all variable-length sequences together."""
        return sum(each.num_queries for each in self.sequences), sum(each.num_keys for each in self.sequences)

    @property
    def shape(self) -> Shape:
        """The sizes; with `tokens` in the variable-length layout."""
        return Shape(
            self.batch,
            self.num_queries,
            self.num_keys,
            self.num_heads,
            self.head_dim,
            self.head_dim_value,
            self.num_heads_key,
            self.num_tokens if self.sequences else None,
        )

    def problem(self, direction: str, *, unused_tokens: tuple[int, int] = (0, 0)) -> Problem:
        """The problem of one direction with contiguous tensors; broadcast axes of the bias have stride 0.

        unused_tokens: rows of (query, key) behind the last variable-length sequence.
        """
        shape, backward = self.shape, direction == "backward"
        if shape.tokens is not None:
            queries, keys = (count + more for count, more in zip(shape.tokens, unused_tokens, strict=True))
            shape = dataclasses.replace(shape, tokens=(queries, keys))
        changes: dict[str, Any] = {
            "scale": self.scale,
            "softcap": self.softcap,
            "dropout_p": self.dropout_p,
            "philox_on_device": self.philox_on_device,
        }
        if self.sequences and not self.page_size:
            changes["sequences"] = Sequences(self.batch, self.num_queries, self.num_keys, self.has_used_keys)
        if self.bias:
            changes["bias"] = self._bias_tensor()
        if self.alibi:
            sizes = (self.num_heads,) if self.alibi == "h" else (self.batch, self.num_heads)
            changes["alibi_slopes"] = Tensor.contiguous(sizes, "float32")
        if self.sinks:
            changes["sinks"] = Tensor.contiguous((self.num_heads,), "float32")
        if backward:
            changes |= {"deterministic": self.deterministic, "num_splits_key": self.num_splits_key}
            changes |= self._gradient_tensors(shape, changes.get("sinks"))
        if backward and self.grad_logsumexp:
            changes["grad_logsumexp"] = Tensor.contiguous(shape.logsumexp, "float32")
        if self.page_size:
            found = self._paged(shape, unused_tokens[0], direction)
        else:
            found = Problem.dense(direction, shape, self.dtype, self.mask)
        if self.float16_output:
            changes["output"] = Tensor.contiguous(found.output.shape, "float16")
        found = self._with_codes(found).replace(**changes)
        return found.with_value_in_key() if self.value_in_key else found

    def _with_codes(self, problem: Problem) -> Problem:
        """The problem with the e4m3 cache and the scales that the spec has."""
        names = SCALES
        if self.has_rope:
            names, rows = CACHE_SCALES[:1], problem.key.shape[:3]
            rope = Tensor.contiguous((*rows, self.head_dim - self.head_dim_value), self.dtype)
            codes = Tensor.contiguous((*rows, self.head_dim_value), FLOAT8)
            problem = problem.replace(key=codes, value=codes, key_rope=rope)
        elif self.e4m3_cache:
            names = CACHE_SCALES
            key, value = (Tensor.contiguous(tensor.shape, FLOAT8) for tensor in (problem.key, problem.value))
            problem = problem.replace(key=key, value=value)
        if not self.descale:
            return problem
        scales = {name: shapes(problem, name)[GRAINS[self.descale]] or (1,) for name in names}
        return problem.replace(**{name: Tensor.contiguous(shape, "float32") for name, shape in scales.items()})

    @property
    def has_ragged_queries(self) -> bool:
        """Whether the queries are one sequence behind the other: not so with pages and the same count for all."""
        counts = {each.num_queries for each in self.sequences}
        return bool(self.sequences) and not (self.page_size and len(counts) == 1)

    @property
    def max_pages(self) -> int:
        """Pages of a sequence with num_keys keys."""
        return -(-self.num_keys // max(self.page_size, 1))

    def _paged(self, shape: Shape, unused_queries: int, direction: str) -> Problem:
        """The problem with a page for each page_size keys of every sequence, and one more."""
        count = self.batch * self.max_pages + 1
        dims = self.head_dim, self.head_dim_value
        pool = Shape(count, self.page_size, self.page_size, self.num_heads, *dims, self.num_heads_key)
        tokens = (self.num_tokens[0] + unused_queries, 0) if self.has_ragged_queries else None
        rows = dataclasses.replace(shape, tokens=tokens)
        query = Tensor.contiguous(rows.of("query"), self.dtype)
        output = Tensor.contiguous(rows.of("output"), output_dtype(self.dtype))
        key, value = (Tensor.contiguous(pool.of(name), self.dtype) for name in ("key", "value"))
        table = Tensor.contiguous((self.batch, self.max_pages), "int32")
        is_ragged = self.has_ragged_queries
        pages = Pages(table, self.batch, self.num_queries if is_ragged else 0, cu_seqlens_q=is_ragged)
        return Problem(direction, query, key, value, output, mask=self.mask, pages=pages)

    def _bias_sizes(self) -> tuple[int, ...]:
        axes = zip(self.bias, self.shape.bias, strict=True)
        return tuple(size if letter != "1" else 1 for letter, size in axes)

    def _bias_tensor(self) -> Tensor:
        strides = Tensor.contiguous(self._bias_sizes(), self.dtype).strides
        steps = tuple(step if letter != "1" else 0 for letter, step in zip(self.bias, strides, strict=True))
        return Tensor(self.shape.bias, steps, self.dtype)

    def _gradient_tensors(self, shape: Shape, sinks: Tensor | None) -> dict[str, Tensor | None]:
        found: dict[str, Tensor | None] = {f"grad_{name}": None for name in GRADIENTS.values()}
        for letter in self.gradients:
            name = GRADIENTS[letter]
            if letter == "b":
                sizes = self.shape.bias if self.bias_gradient == "grad" else self._bias_sizes()
                found["grad_bias"] = Tensor.contiguous(sizes, self.dtype)
            elif letter == "s":
                found["grad_sinks"] = sinks
            else:
                found[f"grad_{name}"] = Tensor.contiguous(shape.of(name), self.dtype)
        return found

    def flops(self, direction: str) -> int:
        """`Problem.flops`; in the variable-length layout the sum over the sequences, each as a problem of its own."""
        if not self.sequences:
            return self.problem(direction).flops
        alone = dataclasses.replace(self, sequences=(), bias="", bias_gradient="", gradients="", alibi="", sinks=False)
        each = (
            dataclasses.replace(alone, batch=1, num_queries=one.num_queries, num_keys=one.num_keys)
            for one in self.sequences
        )
        return sum(spec.problem(direction).flops for spec in each)


def mixed_lengths(longest: int, tokens: int) -> tuple[SequenceLengths, ...]:
    """Lengths of the word t{tokens}: the longest, then random ones from 1 to it; the last one is cut so that all fit.

    The same arguments give the same lengths in every run.
    """
    rng = np.random.default_rng(1)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        length = int(rng.integers(1, longest + 1)) if lengths else longest
        lengths.append(min(length, left))
    return tuple(SequenceLengths(length, length) for length in lengths)


def parse(name: str) -> ProblemSpec:
    """The spec of a name; NotSupported lists every wrong, repeated, missing or contradictory word."""
    found, reasons = _read(name)
    if not reasons:
        reasons = list(_contradictions(found))
    if not reasons:
        try:
            return _spec_of(found)
        except NotSupported as error:
            reasons = list(error.reasons)
    raise NotSupported([f"problem {name!r}: {reason}" for reason in reasons])


def parse_mask(text: str) -> Mask:
    """The mask of its words, such as `causal_br_window64` or `window_left100_right30`; NotSupported as `parse`."""
    found, reasons = _read(text)
    strangers = found.keys() - {"mask", "bottom_right", "window_size", "window_left", "window_right"}
    reasons += [f"{found[name]!r} is no word of a mask; leave it out" for name in sorted(strangers)]
    reasons = reasons or list(_mask_contradictions(found))
    if reasons:
        raise NotSupported([f"mask {text!r}: {reason}" for reason in reasons])
    return _mask_of(found)


def _read(name: str) -> tuple[dict[str, str], list[str]]:
    """Values by field name, and an objection for each unknown or repeated word."""
    found: dict[str, str] = {}
    reasons = []
    for word in name.split("_"):
        matches = [match for pattern in _WORDS if (match := pattern.fullmatch(word))]
        if not matches:
            reasons.append(_unknown(word))
            continue
        values = {key: value for key, value in matches[0].groupdict().items() if value is not None}
        if repeated := values.keys() & found.keys():
            reasons.append(f"{word!r} gives {', '.join(sorted(repeated))} a second time; leave one out")
        found |= values
    return found, reasons


def _unknown(word: str) -> str:
    letters = re.match("[a-z]*", word)
    prefix = letters[0] if letters else ""
    if prefix in _KNOWN:
        return f"the value of {word!r} has another form; write it as in {EXAMPLE} or as the grammar says"
    nearest = difflib.get_close_matches(prefix, _KNOWN, n=3)
    if nearest:
        return f"{word!r} is no word of the grammar; did you mean {' or '.join(nearest)}?"
    return f"{word!r} is no word of the grammar; write the problem like {EXAMPLE}"


def _contradictions(found: Mapping[str, str]) -> Iterator[str]:
    needed = {
        "dtype": "bf16, f16, f32 or e4m3",
        "head_dim": "d{D}",
        "num_heads": "h{H}",
        "mask": "full, causal or window",
    }
    if "sequences" in found:
        for other in ("num_queries", "num_keys", "batch", "tokens"):
            if other in found:
                yield f"n... gives the lengths already, so {other} must be absent; leave one of both out"
    else:
        needed["num_keys"] = "s{N}"
        if "tokens" not in found:
            needed["batch"] = "b{B} or t{T}"
        elif "batch" in found or "num_queries" in found:
            yield "t... gives batch and lengths, so b and q must be absent; leave one of both out"
        elif int(found["tokens"]) < 1 or int(found.get("num_keys", 1)) < 1:
            yield "t... needs at least one token and s... at least one; raise them"
    for field, form in needed.items():
        if field not in found:
            yield f"{field} is missing; add {form}, as in {EXAMPLE}"
    if "mask" in found:
        yield from _mask_contradictions(found)
    letters = found.get("gradients", "")
    for letter, word, present in (("b", "biasgrad or biassum", "bias_gradient"), ("s", "sinks", "sinks")):
        if letter in letters and present not in found:
            yield f"grads{letters} has {letter}, but there is no {word}; add it or leave {letter} out"
    if letters and "b" not in letters and "bias_gradient" in found:
        yield f"grads{letters} lacks b, but the bias has a gradient; add b or write bias without grad or sum"
    if letters and letters != "".join(sorted(set(letters), key=list(GRADIENTS).index)):
        yield f"grads{letters}: letters must be in the order {''.join(GRADIENTS)}, each once; reorder them"
    yield from _code_contradictions(found)
    page_size = int(found.get("page_size", 1))
    if page_size < 1 or page_size & (page_size - 1):
        yield f"paged{page_size}: the page size must be a power of two; correct it"
    if float(found.get("dropout_p", 0)) < 0 or float(found.get("dropout_p", 0)) > 1:
        yield f"dropout{found['dropout_p']}: must be from 0 to 1; correct it"


def _code_contradictions(found: Mapping[str, str]) -> Iterator[str]:
    dtype, e4m3, is_cache = found.get("dtype"), OPERAND_NAMES[FLOAT8], "e4m3_cache" in found
    if is_cache and dtype == e4m3:
        yield f"kv8 is key and value of e4m3 beside a query of 16 bits, but the dtype is {e4m3}; leave one of both out"
    if "float16_output" in found and dtype != e4m3:
        yield f"f16out belongs to e4m3, but the dtype is {dtype}; write e4m3 or leave it out"
    if "descale" in found and dtype != e4m3 and not is_cache:
        yield f"descale{found['descale']} belongs to e4m3 or kv8, but the dtype is {dtype}; write one or leave it out"
    is_latent = is_cache and "value_in_key" in found
    columns, of_value = (int(found.get(name, 0)) for name in ("head_dim", "head_dim_value"))
    if found.get("descale") == "tile" and not (is_latent and 0 < of_value < columns):
        yield "descaletile belongs to mla with kv8 and a narrower value, d{D}v{V}; write them, or another descale"
    if found.get("descale") == "row" and not is_cache:
        yield "descalerow belongs to kv8; write kv8 beside a dtype of 16 bits, or descalebatch"


def _mask_contradictions(found: Mapping[str, str]) -> Iterator[str]:
    mask = found.get("mask", "no mask")
    for field, word, needed in (
        ("bottom_right", "br", "causal"),
        ("window_size", "window{W}", "causal"),
        ("window_left", "left{L}", "window"),
        ("window_right", "right{R}", "window"),
    ):
        if field in found and mask != needed:
            yield f"{word} belongs to {needed}, but the mask is {mask}; write {needed} or leave it out"
    if "mask" not in found:
        yield "the mask is missing; add full, causal or window"


def _spec_of(found: Mapping[str, str]) -> ProblemSpec:
    """The spec of values without contradictions."""
    values: dict[str, Any] = {"dtype": _DTYPES[found["dtype"]], "mask": _mask_of(found)}
    for field in ("head_dim", "head_dim_value", "num_heads", "num_heads_key", "num_splits_key", "page_size"):
        if field in found:
            values[field] = int(found[field])
    for field in ("dropout_p", "softcap", "scale"):
        if field in found:
            values[field] = float(found[field])
    for field in (
        "sinks", "deterministic", "philox_on_device", "grad_logsumexp", "value_in_key", "e4m3_cache", "float16_output",
    ):  # fmt: skip
        values[field] = field in found
    for field in ("bias_gradient", "gradients", "descale"):
        values[field] = found.get(field, "")
    if "bias" in found:
        values["bias"] = found.get("bias_axes", BATCH_BROADCAST)
    if "alibi" in found:
        values["alibi"] = "bh" if found["alibi"] == "alibib" else "h"
    if "sequences" in found:
        values["sequences"] = tuple(map(_lengths_of, found["sequences"].split(",")))
    elif "tokens" in found:
        values["sequences"] = mixed_lengths(int(found["num_keys"]), int(found["tokens"]))
    else:
        keys = int(found["num_keys"])
        values |= {"num_queries": int(found.get("num_queries", keys)), "num_keys": keys, "batch": int(found["batch"])}
    return ProblemSpec(**values)


def _lengths_of(word: str) -> SequenceLengths:
    queries, _, rest = word.partition("x")
    keys, _, used = rest.partition("u")
    return SequenceLengths(int(queries), int(keys or queries), int(used) if used else None)


def _mask_of(found: Mapping[str, str]) -> Mask:
    def number(field: str) -> int | None:
        return int(found[field]) if field in found else None

    if found["mask"] == "full":
        return Full()
    if found["mask"] == "window":
        return Window(number("window_left"), number("window_right"))
    return (CausalBottomRight if "bottom_right" in found else Causal)(number("window_size"))


def _mask_words(mask: Mask) -> Iterator[str]:
    if isinstance(mask, Window):
        yield "window"
        for word, edge in (("left", mask.left), ("right", mask.right)):
            if edge is not None:
                yield f"{word}{edge}"
        return
    yield "full" if isinstance(mask, Full) else "causal"
    if isinstance(mask, CausalBottomRight):
        yield "br"
    if isinstance(mask, Causal) and mask.window_size is not None:
        yield f"window{mask.window_size}"


def _number_text(value: float) -> str:
    """The shortest text that float() reads back, without a fraction of zero: 30, 0.1, 1e-06."""
    return repr(float(value)).removesuffix(".0")
