"""Problem specs: an attention problem as one line of words, such as `bf16_d128_s8192_b4_h16_causal`.

Benchmark cases, GPU test cases, random problems and the command line share this grammar: the words of GRAMMAR, joined
by `_`, in any order. `ProblemSpec.name` writes them in the order of GRAMMAR.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem import drawn_functions, drawn_ranges, masks
from cutlass_py_attn.problem.block_sparse import BlockSparse
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.mask_function import ArrayMask
from cutlass_py_attn.problem.masks import Full, Mask
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
    shapes,
)
from cutlass_py_attn.problem.tensors import FLOAT8, OPERAND_NAMES, RANGE_EDGES, VISIBLE_BLOCKS, Sequences, Shape, Tensor
from cutlass_py_attn.suggestions import did_you_mean

EXAMPLE: Final = "bf16_d128_s8192_b4_h16_causal"
GRAINS: Final = {"tensor": TENSOR, "head": HEAD, "batch": BATCH_HEAD, "row": ROW, "tile": TILE}  # of descale
GRADIENTS: Final = {"q": "query", "k": "key", "v": "value", "b": "bias", "s": "sinks"}  # letters of grads
BIAS_AXES: Final = "bhqk"
BATCH_BROADCAST: Final = "1hqk"  # the axes of `bias` without axes
# A word a line. {FIELD} is the value of a field of ProblemSpec or of its mask, {FIELD=a|b} one of these texts. What is
# in brackets may be absent. A word "with" others needs one of them.
GRAMMAR: Final = """
{dtype=f16|bf16|f32|e4m3}               dtype of the operands; e4m3 forward only
d{head_dim}[v{head_dim_value}]          columns of query and key; columns of value if they differ
[q{num_queries}]                        queries of each batch element; as many as keys if absent
[s{num_keys}]                           keys of each batch element
[b{batch}]                              batch size
[t{tokens}]                             in place of b: variable length, the tokens of all sequences; the longest has s
[n{sequences}]                          in place of q, s and b: variable length; for each sequence 70x200, 70 queries
                                        and 200 keys, or 70x200u30, of which 30 are used, or 70, queries and keys
h{num_heads}[k{num_heads_key}]          heads of query; heads of key and value if there are fewer (GQA, MQA)
{mask=full|causal|window}               no mask; a diagonal from the top-left corner; a band about a bottom-right one
[{bottom_right=br}]                     with causal: the diagonal ends in the bottom-right corner
[window{window_size}]                   with causal: only so many last keys
[left{window_left}]                     with window: keys before the diagonal; no limit if absent
[right{window_right}]                   with window: keys after the diagonal; no limit if absent
[ranges{ranges}[{range_family}]]        beside the mask, ranges of keys by query, in arrays of axes bh, with 1 for a
                                        broadcast axis. What is in them: random ranges if nothing follows, or runs, all,
                                        lengths, causal, documents, prefix or window; the last three may have a size, as
                                        in documents4096
[blocks{block_share}[{block_axes=bh|b|h}][x{block_size}]]  beside the mask, visible blocks: so many in a hundred, by
                                        sequence (b) and key head (h), of 128 x 128 or so many queries and keys
[function{mask_function}]               beside the mask, a mask function with drawn arrays: stripes, documents, marked,
                                        weights, tree, dilated, images or prefix
[bias{bias}[{bias_gradient=grad|sum}]]  additive bias of axes bhqk, with 1 for a broadcast axis; 1hqk if absent. grad:
                                        its gradient in full; sum: its gradient summed over the broadcast axes
[dropout{dropout_p}]                    probability of a dropped weight
[softcap{softcap}]                      bound of the scores
[{alibi=alibi|alibib}]                  ALiBi slopes by head; by batch and head
[{sinks=sinks}]                         attention sinks
[{deterministic=deterministic}]         bitwise repeatable query gradient
[scale{scale}]                          factor of Q K^T; 1 / sqrt(head_dim) if absent
[{philox_on_device=deviceseed}]         Philox seed and offset in device memory
[{grad_logsumexp=gradlse}]              logsumexp has a gradient too
[grads{gradients}]                      gradients that the backward writes, of q, k, v, b (bias) and s (sinks), in this
                                        order; all if absent
[splits{num_splits_key}]                blocks that share one (batch, head) in the backward; the plan chooses if absent
[paged{page_size}]                      key and value in pages of so many rows, a power of two; forward only. With n,
                                        the pages of a sequence hold all its keys, used or not, and query is (batch,
                                        queries, heads, head_dim) if all have as many; without n, each has s keys
[{value_in_key=mla}]                    value is the first head_dim_value columns of key, in the same memory: a latent
                                        cache; forward only
[{e4m3_cache=kv8}]                      with f16|bf16|f32: key and value of e4m3 beside a query of 16 bits; forward only
[descale{descale}]                      with e4m3|kv8: scales of the codes, none if absent, by what has one: tensor,
                                        head (each key head), batch (each key head of a sequence); of kv8 also row; of
                                        mla with kv8 tile, each 128 columns of a row, of which those behind value have
                                        16 bits
[{float16_output=f16out}]               with e4m3: the output is f16, not bf16
"""

_ALIBI: Final = {"h": "alibi", "bh": "alibib"}
_DTYPES: Final = {short: name for name, short in OPERAND_NAMES.items()}
_NUMBER: Final = r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_LENGTHS: Final = r"\d+(?:x\d+(?:u\d+)?)?"
_POSITIVE: Final = r"0*[1-9]\d*"
_PATTERNS: Final = {  # of the values of fields; other fields are integers
    "tokens": _POSITIVE,
    "sequences": f"{_LENGTHS}(?:,{_LENGTHS})*",
    "bias": "(?:[b1][h1][q1][k1])?",
    **dict.fromkeys(("dropout_p", "softcap", "scale"), _NUMBER),
    "gradients": f"[{''.join(GRADIENTS)}]+",
    "page_size": _POSITIVE,
    "ranges": "[b1][h1]",
    "range_family": drawn_ranges.PATTERN,
    "block_size": _POSITIVE,
    "mask_function": "|".join(drawn_functions.FUNCTIONS),
    "descale": "|".join(GRAINS),
}
_FIELD: Final = re.compile(r"{(\w+)(?:=([^}]*))?}")


class Word:
    """A word of GRAMMAR.

    is_required: whether every problem has it
    needs: words of which a problem with this one has one too
    fields: whose values it says; a problem with a value of the first one has the word
    shown: its form, with the texts of a field in place of the field
    """

    def __init__(self, form: str, meaning: str) -> None:
        self.is_required, self.meaning = not form.startswith("["), meaning
        self._body = form if self.is_required else form[1:-1]
        self.needs = meaning.partition(":")[0].removeprefix("with ").split("|") if meaning.startswith("with ") else []
        self.fields = [field for field, _ in _FIELD.findall(form)]
        self.shown = _FIELD.sub(lambda field: field[2] or field[0], form)
        optional = self._body.replace("[", "(?:").replace("]", ")?")
        self._pattern = re.compile(
            _FIELD.sub(lambda field: f"(?P<{field[1]}>{field[2] or _PATTERNS.get(field[1], '[0-9]+')})", optional)
        )

    @property
    def starts(self) -> list[str]:
        """The word as far as its first value, or each of its texts."""
        return re.split("[{[]", self.shown.strip("[]"))[0].split("|")

    def read(self, text: str) -> dict[str, str] | None:
        """The values by field; None if the text is another word."""
        match = self._pattern.fullmatch(text)
        return match and {field: value for field, value in match.groupdict().items() if value is not None}

    def write(self, values: Mapping[str, str]) -> str:
        """The word with these values by field."""
        body = re.sub(r"\[(.*?)\]", lambda part: part[1] if _FIELD.findall(part[1])[0][0] in values else "", self._body)
        return _FIELD.sub(lambda field: field[2] if (field[2] or "").isalnum() else values[field[1]], body)


WORDS: Final = tuple(Word(*line) for line in re.findall(r"^(\S+) +(.*(?:\n .*)*)", GRAMMAR, re.MULTILINE))
_MASK_FIELDS: Final = ("mask", "bottom_right", "window_size", "window_left", "window_right")
_MASK_WORDS: Final = tuple(word for word in WORDS if word.fields[0] in _MASK_FIELDS)
_LAYOUTS: Final = ({"num_keys", "batch"}, {"num_queries", "num_keys", "batch"}, {"num_keys", "tokens"}, {"sequences"})
_LENGTH_FIELDS: Final = frozenset().union(*_LAYOUTS)
_READERS: Final = {"int": int, "int | None": int, "float": float, "float | None": float, "bool": bool, "str": str}


@dataclass(frozen=True, slots=True)
class SequenceLengths:
    """Lengths of one variable-length sequence. used_keys: keys that are used (seqused_k); None for all."""

    num_queries: int
    num_keys: int
    used_keys: int | None = None

    def with_used_keys(self) -> SequenceLengths:
        """The lengths with the number of used keys written out."""
        return self if self.used_keys is not None else dataclasses.replace(self, used_keys=self.num_keys)

    def __str__(self) -> str:
        """The lengths as text: `70x200u30`, or `130` for 130 queries and 130 keys."""
        if self.used_keys is None and self.num_queries == self.num_keys:
            return str(self.num_keys)
        return f"{self.num_queries}x{self.num_keys}" + (f"u{self.used_keys}" if self.used_keys is not None else "")


@dataclass(frozen=True, slots=True)
class ProblemSpec:
    """What to compute, without a direction and without addresses; `problem` gives the Problem of a direction.

    The fields are those of GRAMMAR; `mask` has those of its own. "", 0, False and None stand for an absent word.
    sequences: lengths in the variable-length layout, which decide batch, num_queries and num_keys; () for none.
    ranges: axes of key_start and key_end, 1 for a broadcast axis; "" for none. range_family: of drawn_ranges.
    block_share: in a hundred; None for no blocks. block_axes: of visible_blocks. mask_function: of drawn_functions.
    bias: its axes, 1 for a broadcast axis. alibi: "h" (slopes by head) or "bh" (by batch and head).
    deterministic, grad_logsumexp, gradients and num_splits_key concern the backward alone.
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
    ranges: str = ""
    range_family: str = ""
    block_share: int | None = None
    block_axes: str = ""
    block_size: int = 128
    mask_function: str = ""
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
            "gradients": self.gradients or self.all_gradients,
        }
        if self.bias_gradient and self.bias == BIAS_AXES:
            changes["bias_gradient"] = "grad"  # there is no axis to sum over
        if self.sequences:
            if self.has_used_keys:
                changes["sequences"] = tuple(lengths.with_used_keys() for lengths in self.sequences)
            changes["batch"] = len(self.sequences)
            changes["num_queries"] = max(lengths.num_queries for lengths in self.sequences)
            changes["num_keys"] = max(lengths.num_keys for lengths in self.sequences)
        for name, value in changes.items():
            object.__setattr__(self, name, value)

    @property
    def all_gradients(self) -> str:
        """Letters of the gradients that the features have."""
        return "qkv" + ("b" if self.bias_gradient else "") + ("s" if self.sinks else "")

    def __str__(self) -> str:
        return self.name

    def replace(self, **changes: Any) -> ProblemSpec:
        """A copy with some fields changed; gradients and heads of key that followed from others follow again."""
        if self.num_heads_key == self.num_heads:
            changes.setdefault("num_heads_key", 0)
        if self.head_dim_value == self.head_dim:
            changes.setdefault("head_dim_value", 0)
        if self.gradients == self.all_gradients:
            changes.setdefault("gradients", "")
        return dataclasses.replace(self, **changes)

    @property
    def name(self) -> str:
        """The spec as text; `parse` gives an equal spec."""
        values = self._values()
        return "_".join(word.write(values) for word in WORDS if word.fields[0] in values)

    def _values(self) -> dict[str, str]:
        """The values of its words by field."""
        implied = {"head_dim_value": self.head_dim, "num_heads_key": self.num_heads, "gradients": self.all_gradients}
        values: dict[str, Any] = {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != implied.get(field.name, field.default)
            and field.name not in _LENGTH_FIELDS
        }
        kind, _, corner = self.mask.name.partition("_")
        values |= {"mask": kind, "bottom_right": corner or None, **dataclasses.asdict(self.mask)}
        values |= {"dtype": OPERAND_NAMES[self.dtype], "num_heads": self.num_heads, **self._lengths()}
        if self.bias:
            values["bias"] = self.bias.replace(BATCH_BROADCAST, "")
        if self.alibi:
            values["alibi"] = _ALIBI[self.alibi]
        return {field: _text(value) for field, value in values.items() if value is not None}

    def _lengths(self) -> dict[str, Any]:
        if not self.sequences:
            queries = self.num_queries if self.num_queries != self.num_keys else None
            return {"num_queries": queries, "num_keys": self.num_keys, "batch": self.batch}
        longest, tokens = self.num_keys, self.num_tokens[1]
        if self.sequences[0].num_keys == longest and self.sequences == mixed_lengths(longest, tokens):
            return {"num_keys": longest, "tokens": tokens}
        return {"sequences": ",".join(map(str, self.sequences))}

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
        return any(lengths.used_keys is not None for lengths in self.sequences)

    @property
    def num_tokens(self) -> tuple[int, int]:
        """(queries, keys) of all variable-length sequences together."""
        return sum(lengths.num_queries for lengths in self.sequences), sum(
            lengths.num_keys for lengths in self.sequences
        )

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
        changes: dict[str, Any] = {
            "scale": self.scale,
            "softcap": self.softcap,
            "dropout_p": self.dropout_p,
            "philox_on_device": self.philox_on_device,
        }
        if self.ranges:
            changes |= dict.fromkeys(RANGE_EDGES, Tensor.contiguous((*self._lists(), self.num_queries), "int32"))
        if self.block_share is not None:
            blocks = Tensor.contiguous(self._block_counts(), "bool")
            changes |= {VISIBLE_BLOCKS: blocks, "block_size": (self.block_size, self.block_size)}
        if self.mask_function:
            changes |= drawn_functions.fields(self.mask_function, self.shape.bias)
        if self.bias:
            changes["bias"] = self._bias_tensor()
        if self.alibi:
            sizes = (self.num_heads,) if self.alibi == "h" else (self.batch, self.num_heads)
            changes["alibi_slopes"] = Tensor.contiguous(sizes, "float32")
        if self.sinks:
            changes["sinks"] = Tensor.contiguous((self.num_heads,), "float32")
        if direction == "backward":
            changes |= self._backward_fields(changes.get("sinks"))
        dense = self._paged(direction, unused_tokens) if self.page_size else self._unpaged(direction, unused_tokens)
        if self.float16_output:
            changes["output"] = Tensor.contiguous(dense.output.shape, "float16")
        problem = self._with_codes(dense).replace(**changes)
        return problem.with_value_in_key() if self.value_in_key else problem

    def _unpaged(self, direction: str, unused_tokens: tuple[int, int]) -> Problem:
        if not self.sequences:
            return Problem.dense(direction, self.shape, self.dtype, self.mask)
        queries, keys = (count + unused for count, unused in zip(self.num_tokens, unused_tokens, strict=True))
        shape = dataclasses.replace(self.shape, tokens=(queries, keys))
        sequences = Sequences(self.batch, self.num_queries, self.num_keys, self.has_used_keys)
        return Problem.dense(direction, shape, self.dtype, self.mask).replace(sequences=sequences)

    def _paged(self, direction: str, unused_tokens: tuple[int, int]) -> Problem:
        """The problem with a page for each page_size keys of every sequence, and one more."""
        is_ragged, pool = self.has_ragged_queries, (self.batch * self.max_pages + 1, self.page_size, self.num_heads_key)
        tokens = (self.num_tokens[0] + unused_tokens[0], 0) if is_ragged else None
        dense = Problem.dense(direction, dataclasses.replace(self.shape, tokens=tokens), self.dtype, self.mask)
        table = Tensor.contiguous((self.batch, self.max_pages), "int32")
        return dense.replace(
            key=Tensor.contiguous((*pool, self.head_dim), self.dtype),
            value=Tensor.contiguous((*pool, self.head_dim_value), self.dtype),
            sequences=None,
            pages=Pages(table, self.batch, self.num_queries if is_ragged else 0, cu_seqlens_q=is_ragged),
        )

    def _backward_fields(self, sinks: Tensor | None) -> dict[str, Any]:
        fields: dict[str, Any] = {"deterministic": self.deterministic, "num_splits_key": self.num_splits_key}
        fields |= {f"grad_{name}": None for letter, name in GRADIENTS.items() if letter not in self.gradients}
        if "b" in self.gradients:
            sizes = self.shape.bias if self.bias_gradient == "grad" else self._bias_sizes()
            fields["grad_bias"] = Tensor.contiguous(sizes, self.dtype)
        if "s" in self.gradients:
            fields["grad_sinks"] = sinks
        if self.grad_logsumexp:
            fields["grad_logsumexp"] = Tensor.contiguous(self.shape.logsumexp, "float32")
        return fields

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
        counts = {lengths.num_queries for lengths in self.sequences}
        return bool(self.sequences) and not (self.page_size and len(counts) == 1)

    @property
    def max_pages(self) -> int:
        """Pages of a sequence with num_keys keys."""
        return -(-self.num_keys // max(self.page_size, 1))

    def _lists(self) -> tuple[int, int]:
        """The number of lists of ranges of keys along batch and heads."""
        batch, heads, _ = self.shape.range_edges
        return batch if "b" in self.ranges else 1, heads if "h" in self.ranges else 1

    def key_ranges(self, seed: int = 0) -> KeyRanges:
        """Returns the ranges of keys of a spec that has them, with the mask as their band."""
        edges = drawn_ranges.draw(self.range_family, self._lists(), self.num_queries, self.num_keys, seed)
        return KeyRanges(*edges, self.mask)

    @property
    def has_array_mask(self) -> bool:
        """Whether arrays say which keys each query sees: ranges, blocks or a mask function."""
        return bool(self.ranges or self.block_share is not None or self.mask_function)

    def drawn_mask(self, seed: int = 0) -> Mask | ArrayMask:
        """Returns the mask, with drawn arrays."""
        mask = self.key_ranges(seed) if self.ranges else self.mask
        within: Mask | KeyRanges | BlockSparse = mask
        if self.block_share is not None:
            draws = np.random.default_rng((seed, 2)).random(self._block_counts())
            within = BlockSparse(draws < self.block_share / 100, (self.block_size, self.block_size), mask)
        if not self.mask_function:
            return within
        return drawn_functions.mask(self.mask_function, self.shape.bias, seed, within)

    def _block_counts(self) -> tuple[int, ...]:
        """The sizes of visible_blocks."""
        _, _, *blocks = self.shape.visible_blocks((self.block_size, self.block_size))
        return self.batch if "b" in self.block_axes else 1, self.num_heads_key if "h" in self.block_axes else 1, *blocks

    def _bias_sizes(self) -> tuple[int, ...]:
        axes = zip(self.bias, self.shape.bias, strict=True)
        return tuple(size if letter != "1" else 1 for letter, size in axes)

    def _bias_tensor(self) -> Tensor:
        strides = Tensor.contiguous(self._bias_sizes(), self.dtype).strides
        steps = tuple(step if letter != "1" else 0 for letter, step in zip(self.bias, strides, strict=True))
        return Tensor(self.shape.bias, steps, self.dtype)

    def _visible_pairs(self) -> int:
        mask = self.drawn_mask()
        if not isinstance(mask, KeyRanges):
            assert not isinstance(mask, Mask)
            return int(mask.materialise(*self.shape.bias).sum())
        ranges, (batch, heads) = mask.within(self.num_keys), self._lists()
        visible = int((ranges.key_end - ranges.key_start).sum(dtype=np.int64))
        return visible * (self.batch // max(batch, 1)) * (self.num_heads // max(heads, 1))

    def flops(self, direction: str) -> int:
        """`Problem.flops`; in the variable-length layout the sum over the sequences, each as a problem of its own.

        With a mask in memory the pairs count that are visible with that of seed 0.
        """
        if self.has_array_mask:
            no_arrays: dict[str, Any] = {"ranges": "", "range_family": "", "block_share": None, "mask_function": ""}
            whole = dataclasses.replace(self, **no_arrays, mask=Full())
            pairs = self.batch * self.num_heads * self.num_queries * self.num_keys
            return whole.flops(direction) * self._visible_pairs() // max(pairs, 1)
        if not self.sequences:
            return self.problem(direction).flops
        alone = dataclasses.replace(self, sequences=(), bias="", bias_gradient="", gradients="", alibi="", sinks=False)
        return sum(
            dataclasses.replace(alone, batch=1, num_queries=lengths.num_queries, num_keys=lengths.num_keys).flops(
                direction
            )
            for lengths in self.sequences
        )


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
    """The spec of a name; NotSupported lists every wrong, repeated, missing or contradictory word.

    Numbers out of range are refused by `Problem.check`.
    """
    values, reasons = _read(name, WORDS, "the grammar", EXAMPLE)
    if reasons := reasons or list(_contradictions(values)):
        raise NotSupported([f"problem {name!r}: {reason}" for reason in reasons])
    return _spec_of(values)


def parse_mask(text: str) -> Mask:
    """The mask of its words, such as `causal_br_window64` or `window_left100_right30`; NotSupported as `parse`."""
    values, reasons = _read(text, _MASK_WORDS, "a mask", "causal_br_window64")
    if reasons:
        raise NotSupported([f"mask {text!r}: {reason}" for reason in reasons])
    return _mask_of(values)


def _read(name: str, words: tuple[Word, ...], owner: str, example: str) -> tuple[dict[str, str], list[str]]:
    """Values by field; and a reason for each unknown or repeated word or, without these, for each missing one."""
    texts, values, wrong, lacking = name.split("_"), dict[str, str](), list[str](), list[str]()
    for text in texts:
        word, fields = next(((word, fields) for word in words if (fields := word.read(text)) is not None), (None, {}))
        if word is None:
            wrong.append(_unknown(text, words, owner, example))
            continue
        if repeated := fields.keys() & values.keys():
            wrong.append(f"{text!r} gives {', '.join(sorted(repeated))} a second time; leave one out")
        if word.needs and not set(word.needs) & set(texts):
            needed = " or ".join(word.needs)
            lacking.append(f"{text!r} belongs to {needed}; write {needed} or leave it out")
        values |= fields
    missing = (word for word in words if word.is_required and word.fields[0] not in values)
    lacking += [f"{word.fields[0]} is missing; add {word.shown}, as in {example}" for word in missing]
    return values, wrong or lacking


def _unknown(text: str, words: tuple[Word, ...], owner: str, example: str) -> str:
    start = re.split("[^a-z]", text)[0]
    for word in words:
        if start in word.starts:
            return f"the value of {text!r} has another form; write {word.shown}: {' '.join(word.meaning.split())}"
    known = (known for word in words for known in word.starts)
    return f"{text!r} is no word of {owner}; {did_you_mean(start, known, f'write it like {example}')}"


def _contradictions(values: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with words each of which is right."""
    lengths = values.keys() & _LENGTH_FIELDS
    if lengths not in _LAYOUTS:
        words = ", ".join(word.write(values) for word in WORDS if word.fields[0] in lengths)
        yield (
            f"the lengths are {words or 'missing'}: must be s with b, q with s and b, s with t, or n alone; add or "
            f"leave out a word, as in {EXAMPLE}"
        )
    elif "tokens" in values and int(values["num_keys"]) < 1:
        yield "t... needs s... of at least one; raise it"
    if int(values.get("block_share", 0)) > 100:
        yield f"blocks{values['block_share']}: must be from 0 to 100 in a hundred; reduce it"
    letters = values.get("gradients", "")
    if letters != "".join(letter for letter in GRADIENTS if letter in letters):
        yield f"grads{letters}: letters must be in the order {''.join(GRADIENTS)}, each once; reorder them"
    if letters and ("b" in letters) != ("bias_gradient" in values):
        yield f"grads{letters}: must have b if the bias has grad or sum, and only then; correct one of both"
    if "s" in letters and "sinks" not in values:
        yield f"grads{letters} has s, but there is no sinks; add it or leave s out"
    if values.get("descale") == "row" and "e4m3_cache" not in values:
        yield "descalerow belongs to kv8; write kv8 beside a dtype of 16 bits, or descalebatch"
    is_narrow = 0 < int(values.get("head_dim_value", 0)) < int(values["head_dim"])
    if values.get("descale") == "tile" and not (is_narrow and {"e4m3_cache", "value_in_key"} <= values.keys()):
        yield "descaletile belongs to mla with kv8 and a narrower value, d{D}v{V}; write them, or another descale"


def _spec_of(values: Mapping[str, str]) -> ProblemSpec:
    """The spec of values without contradictions."""
    fields: dict[str, Any] = {
        field.name: _READERS[field.type](values[field.name])
        for field in dataclasses.fields(ProblemSpec)
        if field.name in values and field.type in _READERS
    }
    fields |= {"dtype": _DTYPES[values["dtype"]], "mask": _mask_of(values)}
    if "bias" in values:
        fields["bias"] = values["bias"] or BATCH_BROADCAST
    if "alibi" in values:
        fields["alibi"] = "bh" if values["alibi"] == _ALIBI["bh"] else "h"
    if "sequences" in values:
        fields["sequences"] = tuple(map(_lengths_of, values["sequences"].split(",")))
    elif "tokens" in values:
        fields["sequences"] = mixed_lengths(fields["num_keys"], int(values["tokens"]))
    else:
        fields.setdefault("num_queries", fields["num_keys"])
    return ProblemSpec(**fields)


def _lengths_of(text: str) -> SequenceLengths:
    queries, _, rest = text.partition("x")
    keys, _, used = rest.partition("u")
    return SequenceLengths(int(queries), int(keys or queries), int(used) if used else None)


def _mask_of(values: Mapping[str, str]) -> Mask:
    kind = masks.ALL["_".join(values[field] for field in _MASK_FIELDS[:2] if field in values)]
    return kind(**{field.name: int(values[field.name]) for field in dataclasses.fields(kind) if field.name in values})


def _text(value: object) -> str:
    """The shortest text that float() reads back, without a fraction of zero: 30, 0.1, 1e-06."""
    return repr(float(value)).removesuffix(".0") if isinstance(value, float) else str(value)
