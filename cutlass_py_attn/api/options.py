"""Options of attention_forward and attention_backward: their types, defaults and checks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, TypedDict, TypeGuard, TypeVar

import numpy as np

from cutlass_py_attn.api import unknown_options
from cutlass_py_attn.api.lru_cache import LruCache
from cutlass_py_attn.api.paged import Paged, starts_refusals
from cutlass_py_attn.api.results import Gradients
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem import masks
from cutlass_py_attn.problem.block_sparse import BlockSparse
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.mask_function import ArrayMask, MaskFunction
from cutlass_py_attn.problem.masks import Full, Mask
from cutlass_py_attn.problem.scalars import DROPOUT_P, FLAG, SCALARS, Scalar, integer_of, with_python_numbers
from cutlass_py_attn.problem.tensors import KEY_ROPE, OPERANDS, VISIBLE_BLOCKS, Sequences
from cutlass_py_attn.refusals import Refusal, is_on_host, one_of, refuse, shown
from cutlass_py_attn.score_terms import registry
from cutlass_py_attn.score_terms.dropout import Dropout

BACKENDS: Final = ("auto", "gpu", "reference")
MLA_HEAD_DIM_VALUE: Final = 512  # of DeepSeek's models
GRADIENTS: Final = (*OPERANDS, *registry.gradients())
F = TypeVar("F", bound=Callable[..., Any])


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

    @property
    def lengths(self) -> tuple[object, ...]:
        """What decides a Problem besides the arrays."""
        return self.max_seqlen_q, self.max_seqlen_k

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

    def missing(self) -> list[Refusal]:
        """Returns a refusal of each required value that is missing or of the wrong type."""
        bounds = {"cu_seqlens_q": self.cu_seqlens_q, "cu_seqlens_k": self.cu_seqlens_k}
        lengths = {"max_seqlen_q": self.max_seqlen_q, "max_seqlen_k": self.max_seqlen_k}
        return [
            *(
                refuse(name, None, "must be an int32 array", "pass it")
                for name, array in bounds.items()
                if array is None
            ),
            *(
                refuse(name, number, "must be an int", "pass the longest sequence's length")
                for name, number in lengths.items()
                if integer_of(number) is None
            ),
        ]

    def refusals(self, tokens: tuple[int, int]) -> list[Refusal]:
        """Returns why the values of NumPy arrays are wrong; values on a device are not read.

        tokens: number of queries and keys of all sequences.
        """
        found: list[Refusal] = []
        sides = (
            ("q", self.cu_seqlens_q, self.max_seqlen_q, tokens[0]),
            ("k", self.cu_seqlens_k, self.max_seqlen_k, tokens[1]),
        )
        for side, cu_seqlens, longest, total in sides:
            if _has_integers(cu_seqlens) and cu_seqlens.ndim == 1:
                found += starts_refusals(f"cu_seqlens_{side}", cu_seqlens, f"{total} tokens", longest)
        used, starts = self.seqused_k, self.cu_seqlens_k
        on_host = _has_integers(used) and _has_integers(starts) and used.shape == (starts.size - 1,)
        if on_host and ((used < 0) | (used > np.diff(starts.astype(np.int64)))).any():
            found.append(
                refuse("seqused_k", used.tolist(), "must be from 0 to the keys of each sequence", "correct it")
            )
        return found


def _has_integers(array: object) -> TypeGuard[np.ndarray[Any, Any]]:
    """Returns whether this is a NumPy array of integers, whose values can be checked."""
    return isinstance(array, np.ndarray) and array.dtype.kind in "iu"


class ScoreOptions(TypedDict, total=False):
    """Options of scores, which every front end has; `AttentionOptions` describes them."""

    mask: Mask | KeyRanges | BlockSparse | MaskFunction
    scale: float | None
    bias: Any
    softcap: float
    alibi_slopes: Any
    sinks: Any


class AttentionOptions(ScoreOptions, total=False):
    """Options of forward and backward.

    The score of query i and key j is softcap * tanh(scale Q K^T / softcap) - alibi_slope * |i + num_keys -
    num_queries - j| + bias, and -inf where the mask excludes the key. Without softcap, the first term is scale Q K^T.

    mask: keys that each query attends to; Full() by default. `KeyRanges` says it for each query in arrays,
        `BlockSparse` for blocks of queries, and `MaskFunction` by a function of positions.
    scale: factor of Q K^T; None for 1 / sqrt(head_dim).
    bias: (batch, num_heads, num_queries, num_keys) in the operands' dtype, with any strides; an axis of size 1 or
        stride 0 broadcasts. None for no bias.
    softcap: bound of the scores; 0 for none.
    alibi_slopes: (num_heads,) or (batch, num_heads) float32; None for none.
    sinks: (num_heads,) float32, one logit per head that is added to the denominator of every row and has no value;
        None for none.
    dropout: Dropout(dropout_p, philox_seed, philox_offset); the backward needs the forward's.
    score_terms: {name: array} of terms that `score_terms.register` registered; they add to the scores.
    stream: a CUstream handle as int (0 for the legacy default stream), or a stream object of CuPy, torch, Numba or
        cuda.core. None for the current stream of torch or CuPy if query is their array, else for the legacy default
        stream.
    backend: "auto" and "gpu" compute on the GPU; "reference" computes on the CPU in NumPy float64, slowly. There is
        no fallback from one to the other.
    kernels: function that returns the Artifact of a Build, such as artifact.Folder(path); None compiles the kernels
        and caches them on disk.
    """

    dropout: Dropout | None
    score_terms: Mapping[str, Any]
    stream: object
    backend: str
    kernels: Callable[[Build], Artifact] | None


class ForwardOptions(AttentionOptions, total=False):
    """Options of `attention_forward`.

    sequences: VariableLength(...); None if all sequences are as long as the tensors. Paged(...) for a cache in pages,
        with pools as key and value.
    out: array for the output, with the output's shape and dtype, any strides and memory of its own; None allocates
        one.
    query_scale, key_scale, value_scale: float32, of e4m3 codes, whose numbers are code times scale: () or (1,) for the
        whole operand, (num_heads_key,) for each key head, or (batch, num_heads_key); for an e4m3 cache also one of each
        row, (pages, page_size, num_heads_key) or (batch, num_keys, num_heads_key). At least 0; None for 1. With
        `sequences`, batch is the number of sequences.
    """

    sequences: VariableLength | Paged | None
    out: Any
    query_scale: Any
    key_scale: Any
    value_scale: Any


class MlaOptions(TypedDict, total=False):
    """Options of `mla_attention_forward`. Those without a description are the options of `attention_forward`.

    head_dim_value: columns of a row of the cache that are its value, from the first on.
    cache_scale: float32 (..., num_heads_key, 4), of a cache of e4m3 codes: a scale of each 128 columns of a row, which
        is what a code of 1 is worth. None for a cache of numbers.
    cache_rope: (..., num_heads_key, 64) in the dtype of query, of a cache of e4m3 codes: the columns of a row behind
        its codes. None for a cache of numbers, which has them itself.
    """

    head_dim_value: int
    cache_scale: Any
    cache_rope: Any
    mask: Mask
    scale: float | None
    sequences: VariableLength | Paged | None
    stream: object
    backend: str
    kernels: Callable[[Build], Artifact] | None
    out: Any


class BackwardOptions(AttentionOptions, total=False):
    """Options of `attention_backward`.

    sequences: VariableLength(...); None if all sequences are as long as the tensors.
    grad_logsumexp: (batch, num_heads, ceil32(num_queries)) float32 like logsumexp, the gradient of logsumexp; its
        padding is not read. None if only the output has a gradient.
    gradients: the gradients to compute, of "query", "key", "value", "bias" and "sinks"; by default the first three.
    out: Gradients with arrays for the results, each with any strides and memory of its own; None, or None in a field,
        allocates them.
    packed: whether the gradients of query, key and value are slices [:, :, 0], [:, :, 1], [:, :, 2] of one new
        (batch, seqlen, 3, num_heads, head_dim) array.
    deterministic: whether all gradients are bitwise equal from run to run; slower. Without it that of query may differ
        in the last bits, and with grouped heads or without a mask those of key and value.
    num_splits_key: number of blocks that share one (batch, head); None lets the plan choose.
    """

    sequences: VariableLength | None
    grad_logsumexp: Any
    gradients: tuple[str, ...]
    out: Gradients | None
    packed: bool
    deterministic: bool
    num_splits_key: int | None


def _mask(mask: object) -> list[Refusal]:
    """Returns why this is no mask; `Problem.refusals` checks the numbers of one."""
    if isinstance(mask, ArrayMask):
        return [*mask.refusals()] or _mask(mask.band)
    return [] if type(mask) in masks.ALL.values() else [*masks.refusals(mask)]


def backend_refusals(backend: object) -> list[Refusal]:
    """Returns why this is no backend."""
    is_backend = isinstance(backend, str) and backend in BACKENDS
    return [] if is_backend else [refuse("backend", backend, one_of(BACKENDS), "choose one")]


def kernels_refusals(kernels: object) -> list[Refusal]:
    """Returns what is wrong with the option kernels."""
    if kernels is None or callable(kernels):
        return []
    rule = "must be a function from a Build to its Artifact, such as Folder(path), or None to compile them"
    return [refuse("kernels", kernels, rule, "pass one")]


def _score_terms(given: object) -> list[Refusal]:
    """Returns what is wrong with the option score_terms."""
    if isinstance(given, Mapping):
        return [*registry.unknown(given)]
    known = ", ".join(registry.registered()) or "of which there is none"
    rule = f"must be a dict of registered terms, {known}, and their arrays"
    return [refuse("score_terms", given, rule, "pass a dict")]


def dropout_refusals(dropout: object) -> list[Refusal]:
    """Returns what is wrong with a dropout; `Problem.refusals` checks its probability."""
    if dropout is None:
        return []
    if not isinstance(dropout, Dropout):
        return [refuse("dropout", dropout, "must be a Dropout object, or None", "create one")]
    found = DROPOUT_P.refusals("dropout_p", dropout.dropout_p)
    numbers = {"philox_seed": dropout.philox_seed, "philox_offset": dropout.philox_offset}
    are_ints = {name: type(number) is int for name, number in numbers.items()}
    wrong = [name for name, number in numbers.items() if not (are_ints[name] or _is_array(number))]
    found += [refuse(name, numbers[name], _PHILOX, "convert it") for name in wrong]
    if not wrong and len({*are_ints.values()}) > 1:
        rule = f"must be of the kind of philox_seed, {shown(dropout.philox_seed)}: both ints, or both int64 arrays"
        found.append(refuse("philox_offset", dropout.philox_offset, rule, "convert one"))
    return found + [
        refuse(name, number, _PHILOX, "correct it")
        for name, number in numbers.items()
        if are_ints[name] and not 0 <= number < 2**64
    ]


_PHILOX: Final = "must be an int from 0 to 2**64 - 1, or an int64 array on the device"


def _is_array(value: object) -> bool:
    try:
        return any(hasattr(value, name) for name in ("dtype", "__dlpack__", "__cuda_array_interface__"))
    except Exception:  # an attribute that raises whatever it likes
        return False


_HEAD_DIM_VALUE: Final = Scalar(
    integer_of, "must be an int, the columns of the cache that are values", "pass it", MLA_HEAD_DIM_VALUE
)


def _plain(scalar: Scalar | None = None, check: Callable[[Any], list[Refusal]] | None = None) -> dict[str, Any]:
    """Returns the metadata of an option whose values are hashable."""
    return {"is_plain": True, "scalar": scalar, "check": check}


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """The options of a call, checked and with defaults: the table of the options of all functions.

    A TypedDict says which of them a function takes, and what they mean. Their metadata:

    is_plain: values are hashable, so that a call with equal ones may be repeated. scalar: kind of a number or bool.
    check: returns why a value is refused, whatever the other options are. array: name of an array in a Problem.

    A caller's mask in memory is here its band, with its arrays and numbers as fields of a Problem.
    """

    mask: Mask = field(default=Full(), metadata=_plain(check=_mask))
    scale: float | None = field(default=None, metadata=_plain(SCALARS["scale"]))
    bias: Any = field(default=None, metadata={"array": "bias"})
    softcap: float = field(default=0.0, metadata=_plain(SCALARS["softcap"]))
    alibi_slopes: Any = field(default=None, metadata={"array": "alibi_slopes"})
    sinks: Any = field(default=None, metadata={"array": "sinks"})
    dropout: Dropout | None = field(default=None, metadata={"check": dropout_refusals})
    score_terms: Mapping[str, Any] = field(default_factory=dict, metadata={"check": _score_terms})
    sequences: VariableLength | Paged | None = None
    backend: str = field(default="auto", metadata=_plain(check=backend_refusals))
    kernels: Callable[[Build], Artifact] | None = field(default=None, metadata=_plain(check=kernels_refusals))
    grad_logsumexp: Any = field(default=None, metadata={"array": "grad_logsumexp"})
    gradients: tuple[str, ...] = field(default=OPERANDS, metadata=_plain())
    out: Any = None
    packed: bool = field(default=False, metadata=_plain(FLAG, functools.partial(FLAG.refusals, "packed")))
    deterministic: bool = field(default=False, metadata=_plain(SCALARS["deterministic"]))
    num_splits_key: int | None = field(default=None, metadata=_plain(SCALARS["num_splits_key"]))
    head_dim_value: int | None = field(
        default=None,
        metadata=_plain(_HEAD_DIM_VALUE, functools.partial(_HEAD_DIM_VALUE.refusals, "head_dim_value")),
    )
    query_scale: Any = field(default=None, metadata={"array": "query_scale"})
    key_scale: Any = field(default=None, metadata={"array": "key_scale"})
    value_scale: Any = field(default=None, metadata={"array": "value_scale"})
    cache_scale: Any = field(default=None, metadata={"array": "key_scale"})
    cache_rope: Any = field(default=None, metadata={"array": KEY_ROPE})
    key_start: Any = field(default=None, metadata={"array": "key_start"})
    key_end: Any = field(default=None, metadata={"array": "key_end"})
    visible_blocks: Any = field(default=None, metadata={"array": "visible_blocks"})
    block_size: tuple[int, int] = field(default=(128, 128), metadata=_plain())
    mask_program: str | None = field(default=None, metadata=_plain())
    mask_scalars: tuple[int, ...] | None = field(default=None, metadata=_plain())
    mask_array_0: Any = field(default=None, metadata={"array": "mask_array_0"})
    mask_array_1: Any = field(default=None, metadata={"array": "mask_array_1"})
    mask_array_2: Any = field(default=None, metadata={"array": "mask_array_2"})
    mask_array_3: Any = field(default=None, metadata={"array": "mask_array_3"})

    @property
    def dropout_p(self) -> float:
        """Dropout probability; 0 without dropout."""
        return 0.0 if self.dropout is None else self.dropout.dropout_p

    @property
    def key(self) -> tuple[object, ...]:
        """Key of everything besides the arrays that decides the kernels and their parameters.

        It is hashable if the mask, its numbers and `kernels` are.
        """
        plain = [tuple(value) if type(value) is list else value for value in map(self.__getattribute__, PLAIN_OPTIONS)]
        types = *_types_of_numbers(self.mask), *map(type, plain)  # `Problem.refusals` refuses those of wrong types
        lengths = None if self.sequences is None else self.sequences.lengths
        dropout = self.dropout_p, type(self.dropout_p), self.philox_on_device
        return *plain, types, dropout, lengths, registry.registered_among(self.score_terms)

    def arrays(self) -> dict[str, Any]:
        """Returns the arrays among the options by their names in a Problem."""
        found = {array: value for name, array in _ARRAYS.items() if (value := getattr(self, name)) is not None}
        found |= self.score_terms
        if self.sequences is not None:
            found |= self.sequences.arrays()
        if self.philox_on_device:
            assert self.dropout is not None
            found |= {"philox_seed": self.dropout.philox_seed, "philox_offset": self.dropout.philox_offset}
        return found

    def outputs(self, direction: str) -> dict[str, Any]:
        """Returns the caller's arrays for results, by their names in a Problem."""
        if direction == "forward":
            return {} if self.out is None else {"output": self.out}
        outputs = {f"grad_{name}": getattr(self.out, name, None) for name in self.gradients}
        return {name: array for name, array in outputs.items() if array is not None}

    @property
    def philox_on_device(self) -> bool:
        """Whether seed and offset of the dropout are arrays in device memory."""
        dropout = self.dropout
        return dropout is not None and dropout.is_active and not isinstance(dropout.philox_seed, int)


_FIELDS: Final = {item.name: item.metadata for item in fields(Options)}
# Calls with the same values of these, of the same types, are checked once and may be repeated.
PLAIN_OPTIONS: Final = {name: None for name, item in _FIELDS.items() if "is_plain" in item}.keys()
_ARRAYS: Final[dict[str, str]] = {name: item["array"] for name, item in _FIELDS.items() if "array" in item}


def check_options(options: Mapping[str, Any], allowed: type, *more: str) -> Options:
    """Returns the options with defaults and Python numbers; NotSupported lists every unknown name and wrong value.

    options: all but the stream, which does not decide what is computed.
    allowed: TypedDict of the allowed names. more: other allowed names.
    """
    if not options.keys() <= PLAIN_OPTIONS:
        return _check(options, allowed, more)
    key = allowed, exact_key(options)
    try:
        checked = _checked.get(key)
    except TypeError:  # an unhashable value, such as a list in place of a tuple
        return _check(options, allowed, more)
    if checked is None:
        checked = _check(options, allowed, more)
        _checked.put(key, checked)
    return checked


def takes_options(declared: type, **more: Any) -> Callable[[F], F]:
    """Decorates a function with `**options`: help() and inspect.signature show each option, its type and its default.

    declared: TypedDict of the options. more: defaults of options that are no fields of Options, or have another.

    The function gets the options that a call gives and no others: a call is repeated by these few alone, and an option
    that does not exist is refused together with everything else that is wrong with the call.
    """
    usual, others = Options(), {"stream": None, **more}

    def declare(function: F) -> F:
        signature = inspect.signature(function)
        arguments = [item for item in signature.parameters.values() if item.kind is not item.VAR_KEYWORD]
        keywords = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=others.get(name, getattr(usual, name, inspect.Parameter.empty)),
                annotation=kind.__forward_arg__,
            )
            for name, kind in declared.__annotations__.items()
        ]
        function.__signature__ = signature.replace(parameters=[*arguments, *keywords])  # type: ignore[attr-defined]
        return function

    return declare


_checked: LruCache[Options] = LruCache(256)


def exact_key(options: Mapping[str, Any]) -> tuple[object, ...]:
    """Returns a key under which values are equal only if their types are too: 7.0 and True are not 7 and 1.

    It is hashable if the options are PLAIN_OPTIONS with hashable values.
    """
    types = tuple(map(type, options.values()))
    if "mask" in options:
        types += tuple(_types_of_numbers(options["mask"]))
    return tuple(options.items()), types


_NUMBERS_OF_MASKS: Final[dict[type, tuple[str, ...]]] = {
    kind: tuple(field.name for field in fields(kind)) for kind in masks.ALL.values()
}


def _types_of_numbers(mask: object) -> list[type]:
    return [type(getattr(mask, name)) for name in _NUMBERS_OF_MASKS.get(type(mask), ())]


def _check(options: Mapping[str, Any], allowed: type, more: tuple[str, ...]) -> Options:
    names = _names(allowed, more)
    given = {name: option_value(name, value) for name, value in options.items()}
    refusals = unknown_options.refusals(given, (*names, "stream"))
    checks = {name: check for name, item in _FIELDS.items() if name in given and (check := item.get("check"))}
    refusals += [refusal for name, check in checks.items() for refusal in check(given[name])]
    refusals += _sequences(given.get("sequences"), allowed)
    refusals += _gradients(given) if "gradients" in names else []
    if refusals:
        raise NotSupported(refusals)
    mask = given.get("mask")
    if isinstance(mask, ArrayMask):
        given |= {"mask": mask.band, **mask.arrays(), **mask.numbers()}
    return Options(**given)


def _sequences(sequences: object, allowed: type) -> list[Refusal]:
    """Returns what is wrong with the option sequences; a backward takes no pages."""
    is_paged = "Paged" in str(allowed.__annotations__.get("sequences", ""))
    if isinstance(sequences, VariableLength) or (is_paged and isinstance(sequences, Paged)):
        return sequences.missing()
    rule = f"must be a {'VariableLength or Paged' if is_paged else 'VariableLength'} object, or None"
    return [] if sequences is None else [refuse("sequences", sequences, rule, "create one")]


def option_value(name: str, value: Any) -> Any:
    """Returns the value of an option with Python numbers in place of those of other libraries."""
    scalar = _FIELDS[name].get("scalar") if name in _FIELDS else SCALARS.get(name)
    if scalar is not None:
        return scalar.normalised(value)
    if type(value) in masks.ALL.values():
        return with_python_numbers(value)
    if isinstance(value, BlockSparse):
        sizes = value.block_size
        counts = [integer_of(size) for size in sizes] if isinstance(sizes, (tuple, list)) else [None]
        whole: Any = sizes if None in counts else tuple(counts)
        blocks, within = value.arrays()[VISIBLE_BLOCKS], option_value(name, value.within)
        return replace(value, visible_blocks=blocks, block_size=whole, within=within)
    if isinstance(value, MaskFunction):
        return replace(value, function=value.program, within=option_value(name, value.within))
    if isinstance(value, KeyRanges):
        return replace(value, band=option_value(name, value.band), **value.arrays())
    if isinstance(value, VariableLength):
        longest = {"max_seqlen_q": value.max_seqlen_q, "max_seqlen_k": value.max_seqlen_k}
        numbers = {each: number for each, given in longest.items() if (number := integer_of(given)) is not None}
        return replace(value, **numbers)
    if isinstance(value, Paged):
        return value.normalised()
    if isinstance(value, Dropout):
        dropout_p = SCALARS["dropout_p"].normalised(value.dropout_p)
        return Dropout(dropout_p, philox_number(value.philox_seed), philox_number(value.philox_offset))
    return value


def philox_number(value: Any) -> Any:
    """Returns a seed or an offset as an int; an int64 array in device memory, which the kernels read, as it is.

    The sign bit of an array's int64 is bit 63 of the number.
    """
    number = integer_of(value)
    if number is None or type(value) is int:
        return value
    if isinstance(value, np.generic) or not hasattr(value, "dtype"):
        return number
    return value if str(value.dtype) == "int64" and not is_on_host(value) else number % 2**64


def known(options: Mapping[str, Any], declared: type) -> dict[str, Any]:
    """Returns those of the options of a front end, which a TypedDict declares, that `check_options` checks."""
    names = _names(declared, ())
    return {name: value for name, value in options.items() if name in names}


@functools.cache
def _names(allowed: type, more: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names that a TypedDict allows and those of `more`, in the order of Options."""
    names = {*allowed.__annotations__, *more}
    return tuple(name for name in _FIELDS if name in names)


def _gradients(options: Mapping[str, Any]) -> list[Refusal]:
    """Returns what is wrong with the options gradients, out and packed."""
    gradients, out = options.get("gradients", OPERANDS), options.get("out")
    is_names = isinstance(gradients, (tuple, list)) and all(isinstance(name, str) for name in gradients)
    if not is_names or not gradients or not set(gradients) <= set(GRADIENTS):
        rule = f"must be some of {', '.join(GRADIENTS)} in a tuple"
        return [refuse("gradients", gradients, rule, "name at least one")]
    found = []
    if len(set(gradients)) < len(gradients):
        found.append(refuse("gradients", gradients, "must name each once", "leave the others out"))
    found += [
        refuse("gradients", gradients, f"must come with the option {name}", f"pass {name} or do not name it")
        for name in registry.gradients()
        if name in gradients and options.get(name) is None
    ]
    if options.get("packed") is True and not set(OPERANDS) <= set(gradients):
        rule = f"must name {', '.join(OPERANDS)} with packed"
        found.append(refuse("gradients", gradients, rule, "leave packed False"))
    if out is None:
        return found
    if not isinstance(out, Gradients):
        rule = "must be a Gradients object with arrays to write to, or None"
        return [*found, refuse("out", out, rule, "create one")]
    found += [
        refuse(f"out.{name}", array, f"must come with {name} in gradients", "name it or leave it None")
        for name in GRADIENTS
        if name not in gradients and (array := getattr(out, name)) is not None
    ]
    return found
