"""Options: what attention_forward and attention_backward take beside their operands, with defaults and checks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import Any, Final, TypedDict

import numpy as np

from cutlass_py_attn import masks
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.masks import Full, Mask
from cutlass_py_attn.philox import Dropout
from cutlass_py_attn.plan import Build
from cutlass_py_attn.problem import OPERANDS, Sequences

BACKENDS: Final = ("auto", "gpu", "reference")
GRADIENTS: Final = (*OPERANDS, "bias", "sinks")
# Options that are looked at once: values that compare, and decide by themselves.
PLAIN: Final = frozenset(
    ("mask", "scale", "softcap", "backend", "kernels", "gradients", "packed", "deterministic", "num_splits_key")
)


@dataclass(frozen=True, slots=True, eq=False)
class VariableLength:
    """Sequences of different lengths behind each other in tensors of shape [1, tokens, heads, head_dim].

    cu_seqlens_q, cu_seqlens_k: int32 [count + 1], ascending from 0: where each sequence starts and the last ends.
    max_seqlen_q, max_seqlen_k: at least the longest sequence. seqused_k: int32 [count], how many of its keys
    each sequence uses; None: all. The arrays lie where the operands do; NumPy ones may have any integer type
    and their values are checked.
    """

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_k: Any = None

    def arrays(self) -> dict[str, Any]:
        """The arrays by name, NumPy ones as int32."""
        given = {"cu_seqlens_q": self.cu_seqlens_q, "cu_seqlens_k": self.cu_seqlens_k, "seqused_k": self.seqused_k}
        return {
            name: array.astype(np.int32) if isinstance(array, np.ndarray) and array.dtype.kind in "iu" else array
            for name, array in given.items()
            if array is not None
        }

    def sequences(self, count: int) -> Sequences:
        """The same without the arrays, for a Problem."""
        return Sequences(count, int(self.max_seqlen_q), int(self.max_seqlen_k), self.seqused_k is not None)

    def lacking(self) -> list[str]:
        """What must be there before anything else can be said."""
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

    def objections(self, tokens: tuple[int, int]) -> list[str]:
        """What NumPy arrays show to be wrong; arrays on a device are taken at their word."""
        found: list[str] = []
        sides = (
            ("q", self.cu_seqlens_q, self.max_seqlen_q, tokens[0]),
            ("k", self.cu_seqlens_k, self.max_seqlen_k, tokens[1]),
        )
        for side, bounds, longest, total in sides:
            if not isinstance(bounds, np.ndarray) or bounds.ndim != 1 or not bounds.size:
                continue
            lengths = np.diff(bounds.astype(np.int64))
            if bounds[0] != 0 or (lengths < 0).any() or bounds[-1] > total:
                found.append(
                    f"cu_seqlens_{side} = {bounds.tolist()}: must start with 0, never fall and end at most at the "
                    f"{total} tokens; correct it"
                )
            elif lengths.size and lengths.max() > longest:
                found.append(f"max_seqlen_{side} = {longest}: must be at least the longest sequence, {lengths.max()}")
        used, bounds = self.seqused_k, self.cu_seqlens_k
        known = isinstance(used, np.ndarray) and isinstance(bounds, np.ndarray) and used.shape == (bounds.size - 1,)
        if known and ((used < 0) | (used > np.diff(bounds.astype(np.int64)))).any():
            found.append(f"seqused_k = {used.tolist()}: must be from 0 to the keys of each sequence; correct it")
        return found


class AttentionOptions(TypedDict, total=False):
    """Options of both directions. Scores are softcap * tanh(scale Q K^T / softcap) - alibi_slopes *
    |i + Mk - Mq - j| + bias, then masked; without softcap scale Q K^T takes the place of the first term.

    mask: who sees whom; Full() when left out.
    scale: factor of Q K^T; None for 1 / sqrt(head_dim).
    bias: [B, H, Mq, Mk] of the operands' dtype; an axis of size 1 or stride 0 broadcasts; any strides.
    softcap: bound of the scores; 0 for none.
    alibi_slopes: float32 [H] or [B, H].
    sinks: float32 [H], a logit for each head that joins the denominator of every row and has no value.
    dropout: Dropout(dropout_p, philox_seed, philox_offset); the backward needs the forward's.
    sequences: VariableLength(...); None: all sequences are as long as the tensors.
    stream: None is the legacy default stream; else a CUstream handle as int, or a stream object of CuPy,
        torch, Numba or cuda.core.
    backend: "auto" and "gpu" compute on the GPU; "reference" in NumPy float64 on the CPU, slowly. Neither
        ever stands in for the other.
    kernels: gives the Artifact of a Build, such as artifact.Folder(path); None compiles, and keeps on disk.
    """

    mask: Mask
    scale: float | None
    bias: Any
    softcap: float
    alibi_slopes: Any
    sinks: Any
    dropout: Dropout | None
    sequences: VariableLength | None
    stream: object
    backend: str
    kernels: Callable[[Build], Artifact] | None


class ForwardOptions(AttentionOptions, total=False):
    """Options of `attention_forward`.

    out: where to write the output, an array like the result with any strides; None makes one.
    """

    out: Any


class BackwardOptions(AttentionOptions, total=False):
    """Options of `attention_backward`.

    gradients: which to compute, of "query", "key", "value", "bias", "sinks"; those of the operands when left out,
        and those of bias and sinks only when named.
    out: Gradients with arrays to write to, of any strides, for those that are computed; None, or None in a field,
        makes them. packed: query's, key's and value's gradients are slices [:, :, 0], [:, :, 1], [:, :, 2] of one
        new [B, M, 3, H, D] array.
    deterministic: the query gradient is the same in every bit from run to run; slower.
    num_splits_key: blocks that share one (batch, head); None lets the plan choose.
    """

    gradients: tuple[str, ...]
    out: Any
    packed: bool
    deterministic: bool
    num_splits_key: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Settings:
    """All options with their defaults."""

    mask: Mask = field(default_factory=Full)
    scale: float | None = None
    bias: Any = None
    softcap: float = 0.0
    alibi_slopes: Any = None
    sinks: Any = None
    dropout: Dropout | None = None
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
        """0 without dropout."""
        return 0.0 if self.dropout is None else self.dropout.dropout_p

    @property
    def key(self) -> tuple[object, ...]:
        """What decides the kernels and their numbers, beside the arrays; hashable."""
        lengths = None if self.sequences is None else (self.sequences.max_seqlen_q, self.sequences.max_seqlen_k)
        numbers = self.scale, self.softcap, self.dropout_p, self.philox_on_device, lengths, self.num_splits_key
        return self.mask, numbers, tuple(self.gradients), self.packed, self.deterministic, self.kernels

    def arrays(self) -> dict[str, Any]:
        """The arrays among the options, by the names that a Problem gives them."""
        found = {
            name: value for name in ("bias", "alibi_slopes", "sinks") if (value := getattr(self, name)) is not None
        }
        if self.sequences is not None:
            found |= self.sequences.arrays()
        if self.philox_on_device:
            assert self.dropout is not None
            found |= {"philox_seed": self.dropout.philox_seed, "philox_offset": self.dropout.philox_offset}
        return found

    @property
    def philox_on_device(self) -> bool:
        """Whether dropout's seed and offset are arrays."""
        drawn = self.dropout
        return drawn is not None and drawn.is_active and not isinstance(drawn.philox_seed, int)


def settings(options: Mapping[str, Any], allowed: type) -> Settings:
    """The options with defaults; NotSupported lists every unknown name and wrong value.

    stream is not among them: it is no part of what is computed.
    """
    if options.keys() <= PLAIN:
        try:
            return _plain_settings(tuple(options.items()), allowed)
        except TypeError:  # a list where a tuple should be, or another value that cannot be looked up
            pass
    return _judged(options, allowed)


@functools.lru_cache(maxsize=256)
def _plain_settings(options: tuple[tuple[str, Any], ...], allowed: type) -> Settings:
    return _judged(dict(options), allowed)


def _judged(options: Mapping[str, Any], allowed: type) -> Settings:
    names = _names(allowed)
    reasons = [
        f"option {name!r} is unknown: must be one of {', '.join((*names, 'stream'))}; check the spelling"
        for name in options
        if name not in names
    ]
    if not isinstance(options.get("mask", Full()), Mask):  # the numbers of a mask are the problem's to judge
        reasons += masks.objections(options["mask"])
    backend = options.get("backend", "auto")
    if backend not in BACKENDS:
        reasons.append(f"backend = {backend!r}: must be one of {', '.join(BACKENDS)}")
    for name, kind in (("dropout", Dropout), ("sequences", VariableLength)):
        value = options.get(name)
        if value is not None and not isinstance(value, kind):
            reasons.append(f"{name} = {value!r}: must be a {kind.__name__} object, or None; make one")
    if isinstance(options.get("sequences"), VariableLength):
        reasons += options["sequences"].lacking()
    reasons += _philox_objections(options.get("dropout"))
    reasons += _gradient_objections(options) if "gradients" in names else []
    if reasons:
        raise NotSupported(reasons)
    return Settings(**options)


@functools.cache
def _names(allowed: type) -> tuple[str, ...]:
    """The options that a TypedDict allows, in the order of Settings."""
    kinds = (*allowed.__mro__, allowed)
    names = {name for kind in kinds for name in getattr(kind, "__annotations__", {})}
    return tuple(item.name for item in fields(Settings) if item.name in names)


def _gradient_objections(options: Mapping[str, Any]) -> list[str]:
    """What is wrong with gradients, out and packed of the backward."""
    chosen, out = options.get("gradients", OPERANDS), options.get("out")
    is_names = isinstance(chosen, (tuple, list)) and set(chosen) <= set(GRADIENTS)
    if not is_names or not chosen:
        return [f"gradients = {chosen!r}: must be some of {', '.join(GRADIENTS)} in a tuple; name at least one"]
    found = [
        f"gradients names {name}, but there is no option {name}: must come together; pass {name} or do not name it"
        for name in ("bias", "sinks")
        if name in chosen and options.get(name) is None
    ]
    if options.get("packed") and not set(OPERANDS) <= set(chosen):
        found.append(f"packed with gradients = {chosen!r}: must name {', '.join(OPERANDS)}; leave packed False")
    if out is None:
        return found
    if not all(hasattr(out, name) for name in GRADIENTS):
        return [*found, f"out = {out!r}: must be a Gradients object with arrays to write to, or None; make one"]
    found += [
        f"out has an array for {name}, which gradients does not name: must come together; name it or leave it None"
        for name in GRADIENTS
        if name not in chosen and getattr(out, name) is not None
    ]
    return found


def _philox_objections(dropout: object) -> list[str]:
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
