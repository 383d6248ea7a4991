"""Options of attention_forward and attention_backward: their types, defaults and checks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import Any, Final, TypedDict

import numpy as np

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.problem import masks
from cutlass_py_attn.problem.masks import Full, Mask
from cutlass_py_attn.problem.tensors import OPERANDS, Sequences
from cutlass_py_attn.score_terms import registry
from cutlass_py_attn.score_terms.dropout import Dropout

BACKENDS: Final = ("auto", "gpu", "reference")
GRADIENTS: Final = (*OPERANDS, *registry.gradients())
# Options whose values are hashable. Equal values are checked once, and such a call may be cached.
PLAIN_OPTIONS: Final = frozenset(
    ("mask", "scale", "softcap", "backend", "kernels", "gradients", "packed", "deterministic", "num_splits_key")
)


@dataclass(frozen=True, slots=True, eq=False)
class VariableLength:
    """Sequences of different lengths, concatenated in tensors of shape (1, tokens, num_heads, head_dim).

    cu_seqlens_q, cu_seqlens_k: (count + 1,) int32, ascending from 0: start of each sequence, and the end of the last.
    max_seqlen_q, max_seqlen_k: at least the length of the longest sequence.
    seqused_k: (count,) int32, number of keys that each sequence uses; None for all.

    The arrays are on the operands' device. NumPy arrays may have any integer dtype, and their values are checked. The
    tensors have at most 2**29 tokens.
    """

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_k: Any = None

    def arrays(self) -> dict[str, Any]:
        """Returns the arrays by name; NumPy arrays are converted to int32."""
        arrays = {"cu_seqlens_q": self.cu_seqlens_q, "cu_seqlens_k": self.cu_seqlens_k, "seqused_k": self.seqused_k}
        return {
            name: array.astype(np.int32) if isinstance(array, np.ndarray) and array.dtype.kind in "iu" else array
            for name, array in arrays.items()
            if array is not None
        }

    def sequences(self, count: int) -> Sequences:
        """Returns the Sequences of a Problem, which has no arrays."""
        return Sequences(count, int(self.max_seqlen_q), int(self.max_seqlen_k), self.seqused_k is not None)

    def missing(self) -> list[str]:
        """Returns a reason for each required value that is missing or of the wrong type."""
        bounds = {"cu_seqlens_q": self.cu_seqlens_q, "cu_seqlens_k": self.cu_seqlens_k}
        lengths = {"max_seqlen_q": self.max_seqlen_q, "max_seqlen_k": self.max_seqlen_k}
        return [
            *(f"{name} is None: must be an int32 array; pass it" for name, array in bounds.items() if array is None),
            *(
                f"{name} = {number!r}: must be an int; pass the longest sequence's length"
                for name, number in lengths.items()
                if not isinstance(number, Integral)
            ),
        ]

    def reasons(self, tokens: tuple[int, int]) -> list[str]:
        """Returns why the values of NumPy arrays are wrong; values on a device are not read.

        tokens: number of queries and keys of all sequences.
        """
        found: list[str] = []
        sides = (
            ("q", self.cu_seqlens_q, self.max_seqlen_q, tokens[0]),
            ("k", self.cu_seqlens_k, self.max_seqlen_k, tokens[1]),
        )
        for side, cu_seqlens, longest, total in sides:
            if not isinstance(cu_seqlens, np.ndarray) or cu_seqlens.ndim != 1 or not cu_seqlens.size:
                continue
            lengths = np.diff(cu_seqlens.astype(np.int64))
            if cu_seqlens[0] != 0 or (lengths < 0).any() or cu_seqlens[-1] > total:
                found.append(
                    f"cu_seqlens_{side} = {cu_seqlens.tolist()}: must start with 0, never fall and end at most at the "
                    f"{total} tokens; correct it"
                )
            elif lengths.size and lengths.max() > longest:
                found.append(f"max_seqlen_{side} = {longest}: must be at least the longest sequence, {lengths.max()}")
        used, starts = self.seqused_k, self.cu_seqlens_k
        on_host = isinstance(used, np.ndarray) and isinstance(starts, np.ndarray) and used.shape == (starts.size - 1,)
        if on_host and ((used < 0) | (used > np.diff(starts.astype(np.int64)))).any():
            found.append(f"seqused_k = {used.tolist()}: must be from 0 to the keys of each sequence; correct it")
        return found


class AttentionOptions(TypedDict, total=False):
    """Options of forward and backward.

    The score of query i and key j is softcap * tanh(scale Q K^T / softcap) - alibi_slope * |i + num_keys -
    num_queries - j| + bias, and -inf where the mask excludes the key. Without softcap, the first term is scale Q K^T.

    mask: keys that each query attends to; Full() by default.
    scale: factor of Q K^T; None for 1 / sqrt(head_dim).
    bias: (batch, num_heads, num_queries, num_keys) in the operands' dtype, with any strides; an axis of size 1 or
        stride 0 broadcasts. None for no bias.
    softcap: bound of the scores; 0 for none.
    alibi_slopes: (num_heads,) or (batch, num_heads) float32; None for none.
    sinks: (num_heads,) float32, one logit per head that is added to the denominator of every row and has no value;
        None for none.
    dropout: Dropout(dropout_p, philox_seed, philox_offset); the backward needs the forward's.
    score_terms: {name: array} of terms that `score_terms.register` registered; they add to the scores.
    sequences: VariableLength(...); None if all sequences are as long as the tensors.
    stream: a CUstream handle as int (0 for the legacy default stream), or a stream object of CuPy, torch, Numba or
        cuda.core. None for the current stream of torch or CuPy if query is their array, else for the legacy default
        stream.
    backend: "auto" and "gpu" compute on the GPU; "reference" computes on the CPU in NumPy float64, slowly. There is
        no fallback from one to the other.
    kernels: function that returns the Artifact of a Build, such as artifact.Folder(path); None compiles the kernels
        and caches them on disk.
    """

    mask: Mask
    scale: float | None
    bias: Any
    softcap: float
    alibi_slopes: Any
    sinks: Any
    dropout: Dropout | None
    score_terms: Mapping[str, Any]
    sequences: VariableLength | None
    stream: object
    backend: str
    kernels: Callable[[Build], Artifact] | None


class ForwardOptions(AttentionOptions, total=False):
    """Options of `attention_forward`.

    out: array for the output, with the output's shape and dtype, any strides and memory of its own; None allocates
        one.
    """

    out: Any


class BackwardOptions(AttentionOptions, total=False):
    """Options of `attention_backward`.

    gradients: the gradients to compute, of "query", "key", "value", "bias" and "sinks"; by default the first three.
    out: Gradients with arrays for the results, each with any strides and memory of its own; None, or None in a field,
        allocates them.
    packed: whether the gradients of query, key and value are slices [:, :, 0], [:, :, 1], [:, :, 2] of one new
        (batch, seqlen, 3, num_heads, head_dim) array.
    deterministic: whether the gradient of query is bitwise equal from run to run; slower.
    num_splits_key: number of blocks that share one (batch, head); None lets the plan choose.
    """

    gradients: tuple[str, ...]
    out: Any
    packed: bool
    deterministic: bool
    num_splits_key: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """The options of a call, checked and with defaults."""

    mask: Mask = field(default_factory=Full)
    scale: float | None = None
    bias: Any = None
    softcap: float = 0.0
    alibi_slopes: Any = None
    sinks: Any = None
    dropout: Dropout | None = None
    score_terms: Mapping[str, Any] = field(default_factory=dict)
    sequences: VariableLength | None = None
    backend: str = "auto"
    kernels: Callable[[Build], Artifact] | None = None
    gradients: tuple[str, ...] = OPERANDS
    out: Any = None
    packed: bool = False
    deterministic: bool = False
    num_splits_key: int | None = None

    @property
    def dropout_p(self) -> float:
        """Dropout probability; 0 without dropout."""
        return 0.0 if self.dropout is None else self.dropout.dropout_p

    @property
    def key(self) -> tuple[object, ...]:
        """Hashable key of everything besides the arrays that decides the kernels and their parameters."""
        lengths = None if self.sequences is None else (self.sequences.max_seqlen_q, self.sequences.max_seqlen_k)
        numbers = self.scale, self.softcap, self.dropout_p, self.philox_on_device, lengths, self.num_splits_key
        choices = tuple(self.gradients), self.packed, self.deterministic, self.kernels
        return self.mask, numbers, *choices, registry.registered_among(self.score_terms)

    def arrays(self) -> dict[str, Any]:
        """Returns the arrays among the options by their names in a Problem."""
        found = {name: value for name in registry.array_options() if (value := getattr(self, name)) is not None}
        found |= self.score_terms
        if self.sequences is not None:
            found |= self.sequences.arrays()
        if self.philox_on_device:
            assert self.dropout is not None
            found |= {"philox_seed": self.dropout.philox_seed, "philox_offset": self.dropout.philox_offset}
        return found

    @property
    def philox_on_device(self) -> bool:
        """Whether seed and offset of the dropout are arrays in device memory."""
        dropout = self.dropout
        return dropout is not None and dropout.is_active and not isinstance(dropout.philox_seed, int)


def check_options(options: Mapping[str, Any], allowed: type) -> Options:
    """Returns the options with defaults; NotSupported lists every unknown name and wrong value.

    options: all but the stream, which does not decide what is computed.
    allowed: TypedDict of the allowed names.
    """
    if options.keys() <= PLAIN_OPTIONS:
        try:
            return _check_plain_options(tuple(options.items()), allowed)
        except TypeError:  # an unhashable value, such as a list in place of a tuple
            pass
    return _check(options, allowed)


@functools.lru_cache(maxsize=256)
def _check_plain_options(options: tuple[tuple[str, Any], ...], allowed: type) -> Options:
    return _check(dict(options), allowed)


def _check(options: Mapping[str, Any], allowed: type) -> Options:
    names = _names(allowed)
    reasons = [
        f"option {name!r} is unknown: must be one of {', '.join((*names, 'stream'))}; check the spelling"
        for name in options
        if name not in names
    ]
    if not isinstance(options.get("mask", Full()), Mask):  # `Problem.reasons` checks the numbers of a mask
        reasons += masks.objections(options["mask"])
    backend = options.get("backend", "auto")
    if backend not in BACKENDS:
        reasons.append(f"backend = {backend!r}: must be one of {', '.join(BACKENDS)}")
    for name, kind in (("dropout", Dropout), ("sequences", VariableLength)):
        value = options.get(name)
        if value is not None and not isinstance(value, kind):
            reasons.append(f"{name} = {value!r}: must be a {kind.__name__} object, or None; create one")
    reasons += _score_term_reasons(options.get("score_terms", {}))
    if isinstance(options.get("sequences"), VariableLength):
        reasons += options["sequences"].missing()
    reasons += _philox_reasons(options.get("dropout"))
    reasons += _gradients_reasons(options) if "gradients" in names else []
    if reasons:
        raise NotSupported(reasons)
    return Options(**options)


@functools.cache
def _names(allowed: type) -> tuple[str, ...]:
    """Returns the names that a TypedDict allows, in the order of Options."""
    kinds = (*allowed.__mro__, allowed)
    names = {name for kind in kinds for name in getattr(kind, "__annotations__", {})}
    return tuple(item.name for item in fields(Options) if item.name in names)


def _gradients_reasons(options: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with the options gradients, out and packed."""
    gradients, out = options.get("gradients", OPERANDS), options.get("out")
    is_names = isinstance(gradients, (tuple, list)) and set(gradients) <= set(GRADIENTS)
    if not is_names or not gradients:
        return [f"gradients = {gradients!r}: must be some of {', '.join(GRADIENTS)} in a tuple; name at least one"]
    found = [
        f"gradients names {name}, but there is no option {name}: must come together; pass {name} or do not name it"
        for name in registry.gradients()
        if name in gradients and options.get(name) is None
    ]
    if options.get("packed") and not set(OPERANDS) <= set(gradients):
        found.append(f"packed with gradients = {gradients!r}: must name {', '.join(OPERANDS)}; leave packed False")
    if out is None:
        return found
    if not all(hasattr(out, name) for name in GRADIENTS):
        return [*found, f"out = {out!r}: must be a Gradients object with arrays to write to, or None; create one"]
    found += [
        f"out has an array for {name}, which gradients does not name: must come together; name it or leave it None"
        for name in GRADIENTS
        if name not in gradients and getattr(out, name) is not None
    ]
    return found


def _score_term_reasons(given: object) -> list[str]:
    """Returns what is wrong with the option score_terms."""
    known = ", ".join(registry.registered()) or "of which there is none"
    if not isinstance(given, Mapping):
        return [f"score_terms = {given!r}: must be a dict of registered terms, {known}, and their arrays; pass a dict"]
    return [
        f"score_terms has {name!r}: must be registered terms, {known}; call score_terms.register first"
        for name in given
        if name not in registry.registered()
    ]


def _philox_reasons(dropout: object) -> list[str]:
    """Returns what is wrong with seed and offset of a Dropout."""
    if not isinstance(dropout, Dropout):
        return []
    seed, offset = dropout.philox_seed, dropout.philox_offset
    if isinstance(seed, int) != isinstance(offset, int):
        return ["philox_seed and philox_offset: must both be ints, or both int64 arrays on the device; convert one"]
    if isinstance(seed, int):
        return [
            f"{name} = {value}: must be from 0 to 2**64 - 1; correct it"
            for name, value in (("philox_seed", seed), ("philox_offset", offset))
            if not 0 <= value < 2**64
        ]
    return []
