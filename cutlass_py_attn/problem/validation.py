"""Validation: every reason to refuse a problem; each says what was given, what is allowed and what to do.

The conditions of a score term are in its own file, score_terms/<term>.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from cutlass_py_attn.problem import masks, paging, quantization
from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.problem.operands import of_tensor
from cutlass_py_attn.problem.overlap import overlaps_itself
from cutlass_py_attn.problem.scalars import MIN_SCALE, SCALARS, SCALE, SPLITS, digits, python_value, shown
from cutlass_py_attn.problem.tensors import (
    BIASES,
    BMHK,
    DIRECTIONS,
    F32_BYTES,
    FLOAT8,
    ITEM_BYTES,
    KEY_ROPE,
    OPERAND_BYTES,
    OPERANDS,
    ROW_ALIGNMENT_BYTES,
    Sequences,
    Shape,
    Tensor,
)
from cutlass_py_attn.score_terms import registry
from cutlass_py_attn.score_terms.softcap import SOFTCAP

if TYPE_CHECKING:
    from cutlass_py_attn.problem.problem import Problem

MAX_LENGTH = 2**29  # the sum of a query index, a key index and a window edge stays in 32 bits
MAX_HEAD_DIM = 65536
MAX_SCALE = 2.0**127  # times log2(e) it still is a float32
MAX_BYTES = 2**63  # that the strides of a tensor reach: offsets are 64-bit integers
# Scores are softcap * tanh(score / softcap). The kernels of float32 operands compute tanh to 2**-23, those of 16-bit
# operands to a part of its value, so that only the range of float32 limits their softcap.
LARGEST_SOFTCAP = {"float16": 2.0**100, "bfloat16": 2.0**100, "float32": 2.0**13}
MAX_RATIO = 2.0**126  # of scale and softcap, and of softcap and scale: a normal float32
_OF_TERMS: Final = (*registry.array_options(), *(f"grad_{name}" for name in registry.gradients()))
TENSORS: Final = (*BMHK, "grad_logsumexp", *_OF_TERMS, *quantization.SCALES, KEY_ROPE)
_REQUIRED: Final = (*OPERANDS, "output")
_EDGES: Final = {"window_left": "mask left", "window_right": "mask right"}  # what Mask.objections calls them
# Bytes of an element of any array.
ARRAY_BYTES: Final = {**OPERAND_BYTES, "int32": 4, "int64": 8}


def objections(problem: Problem) -> list[str]:
    """Returns every reason to refuse the problem.

    Every other check needs tensors of four axes: a wrong type or rank among the tensors is returned without the
    others' reasons. A wrong scalar or mask is returned together with them.
    """
    wrong = [*_kind_objections(problem), *_rank_objections(problem)]
    scalars = {name: scalar.objections(name, getattr(problem, name)) for name, scalar in SCALARS.items()}
    kinds = [*(text for texts in scalars.values() for text in texts), *_mask_objections(problem.mask)]
    if wrong:
        return [*wrong, *kinds]
    defaults = {name: SCALARS[name].default for name, texts in scalars.items() if texts}
    sound = problem.replace(**defaults) if defaults else problem
    return [
        *_size_objections(sound),
        *_score_term_objections(sound),
        *_tensor_objections(sound),
        *quantization.objections(sound),
        *kinds,
        *_option_objections(sound),
        *_gradient_objections(sound),
    ]


def shape_objections(shape: object) -> list[str]:
    """Returns why this is no Shape of integers."""
    if not isinstance(shape, Shape):
        return [f"shape = {shown(shape)}: must be a Shape; create one"]
    sizes = {field.name: getattr(shape, field.name) for field in fields(Shape)}
    tokens, pool = sizes.pop("tokens"), sizes.pop("pool")
    found = [
        f"shape.{name} = {shown(size)}: must be an int of at least 0; correct it"
        for name, size in sizes.items()
        if type(python_value(size)) is not int
    ]
    if tokens is not None and not _are_ints(python_value(tokens), 2):
        found.append(f"shape.tokens = {shown(tokens)}: must be two ints, of queries and keys, or None; correct it")
    if pool is not None:
        found.append(f"shape.pool = {shown(pool)}: must be None here; make a dense Problem and set its pages")
    return found


def score_terms_objections(terms: object) -> Iterator[str]:
    """Yields why these are no named arrays of score terms."""
    pairs = terms if isinstance(terms, tuple) else (terms,)
    if not all(isinstance(pair, tuple) and [*map(type, pair)] == [str, Tensor] for pair in pairs):
        yield f"score_terms = {shown(terms)}: must be a tuple of (name, Tensor); correct it"


def _are_ints(values: object, count: int | None = None) -> bool:
    is_tuple = isinstance(values, tuple) and (count is None or len(values) == count)
    return is_tuple and all(type(value) is int for value in values)  # type: ignore[attr-defined]


def tensor_objections(name: str, given: Any, *, is_required: bool) -> Iterator[str]:
    """Yields why this is no Tensor of integers with the name of a dtype; None is one that is not required."""
    if not isinstance(given, Tensor):
        if given is not None or is_required:
            optional = "" if is_required else ", or None"
            yield f"{name} = {shown(given)}: must be a Tensor{optional}; create one with Tensor.contiguous"
        return
    for field in ("shape", "strides"):
        numbers = getattr(given, field)
        if not _are_ints(numbers) or (field == "shape" and min(numbers, default=0) < 0):
            least = " of at least 0" if field == "shape" else ""
            yield f"{name}.{field} = {shown(numbers)}: must be a tuple of ints{least}; correct it"
    for field, kind, allowed in (
        ("dtype", str, f"one of {', '.join(ITEM_BYTES)}"),
        ("alignment", int, "an int of bytes"),
    ):
        if type(getattr(given, field)) is not kind:
            yield f"{name}.{field} = {shown(getattr(given, field))}: must be {allowed}; correct it"


def _kind_objections(problem: Problem) -> Iterator[str]:
    """Yields what is no Tensor, no integer and no name among the tensors and the sequences."""
    for name in TENSORS:
        yield from tensor_objections(name, getattr(problem, name), is_required=name in _REQUIRED)
    yield from score_terms_objections(problem.score_terms)
    if problem.pages is not None:
        yield from paging.kind_objections(problem.pages)
    sequences = problem.sequences
    if sequences is None:
        return
    if not isinstance(sequences, Sequences):
        yield f"sequences = {shown(sequences)}: must be a Sequences object, or None; create one"
        return
    for field in ("count", "max_seqlen_q", "max_seqlen_k"):
        if type(getattr(sequences, field)) is not int:
            yield f"sequences.{field} = {shown(getattr(sequences, field))}: must be an int; convert it"
    if type(sequences.seqused_k) is not bool:
        yield f"sequences.seqused_k = {shown(sequences.seqused_k)}: must be True or False; pass one of them"


def _rank_objections(problem: Problem) -> Iterator[str]:
    direction = problem.direction if isinstance(problem.direction, str) else ""
    if direction not in DIRECTIONS:
        yield f"direction = {shown(problem.direction)}: must be one of {', '.join(DIRECTIONS)}; choose one"
    if direction == "backward" and problem.grad_output is None:
        yield "grad_output is missing: the backward needs it; pass a tensor of the matching BMHK shape"
    for name in (*BMHK, KEY_ROPE, *BIASES):
        tensor = getattr(problem, name)
        if isinstance(tensor, Tensor) and any(
            isinstance(sizes, tuple) and len(sizes) != 4 for sizes in (tensor.shape, tensor.strides)
        ):
            axes = "[batch, heads, queries, keys]" if name in BIASES else "[batch, seqlen, heads, head_dim]"
            yield (
                f"{name} has shape {tensor.shape} and strides {tensor.strides}: must be 4-D "
                f"{axes}; add the missing axes with size 1"
            )
    for term in registry.terms():
        yield from stride_objections(term.vectors(problem))


def stride_objections(tensors: Mapping[str, Any]) -> Iterator[str]:
    """Yields which of these tensors have another number of strides than of axes; None stands for no tensor."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and len(tensor.shape) != len(tensor.strides):
            given = f"{name} has shape {tensor.shape} and strides {tensor.strides}"
            yield f"{given}: must have a stride for each axis; add the missing strides, or leave some out"


def mask_kind_objections(mask: Any) -> list[str]:
    """Returns why this is no mask, or every wrong number of a mask with a number that is no integer."""
    if type(mask) not in masks.ALL.values():
        return [f"mask = {shown(mask)}: must be a mask object such as Full() or Causal(); make one"]
    numbers = {field.name: getattr(mask, field.name) for field in fields(mask)}
    if all(number is None or type(number) is int for number in numbers.values()):
        return []
    least, none = (1, "no window") if isinstance(mask, Causal) else (0, "no limit")
    return [
        f"{_EDGES.get(name, name)} = {shown(number)}: must be an int of at least {least}, or None for {none}; "
        "correct it"
        for name, number in numbers.items()
        if number is not None and (type(number) is not int or number < least)
    ]


def _mask_objections(mask: Any) -> list[str]:
    return mask_kind_objections(mask) or list(mask.objections())


def _size_objections(problem: Problem) -> Iterator[str]:
    shape = problem.shape
    if shape.num_heads_key and shape.num_heads % shape.num_heads_key:
        yield (
            f"query has {digits(shape.num_heads)} heads and key {digits(shape.num_heads_key)}: query's must be a "
            "multiple of key's; repeat or drop heads"
        )
    for name, tensor in problem.tensors().items():
        if name not in BMHK:
            continue
        wanted = (problem.query.shape[0], *shape.of(name)[1:])
        if problem.pages is not None and name in ("key", "value"):
            wanted = shape.of(name)
        if problem.key_rope is not None and name == "key":  # whose last columns are those of key_rope
            wanted = (*wanted[:3], max(wanted[3] - problem.key_rope.shape[3], 0))
        if tensor.shape != wanted:
            yield (
                f"{name} has shape {tensor.shape}: must be {wanted} to match query {problem.query.shape}, "
                f"key {problem.key.shape} and value {problem.value.shape}; reshape it"
            )
    for label, size in (("head_dim", shape.head_dim), ("head_dim_value", shape.head_dim_value)):
        if not 1 <= size <= MAX_HEAD_DIM:
            remedy = "split the head" if size > MAX_HEAD_DIM else "give every row at least one element"
            yield f"{label} = {digits(size)}: must be from 1 to {MAX_HEAD_DIM}; {remedy}"
    for label in ("num_queries", "num_keys", "batch", "num_heads"):
        size = getattr(shape, label)
        if size > MAX_LENGTH:
            yield f"{label} = {digits(size)}: must be at most {MAX_LENGTH}; call once per slice"
    yield from _sequence_objections(problem)
    yield from paging.objections(problem)
    yield from _value_in_key_objections(problem)


def _value_in_key_objections(problem: Problem) -> Iterator[str]:
    if not problem.value_in_key:
        return
    key, value = problem.key, problem.value
    if problem.direction == "backward":
        yield "value_in_key with direction 'backward': must be False, because gradients are separate; leave it out"
    if value.shape[3] > key.shape[3]:
        yield (
            f"head_dim_value = {digits(value.shape[3])} with value_in_key: must be at most the {key.shape[3]} columns "
            "of key; lower it"
        )
    if value.strides != key.strides:
        yield (
            f"value_in_key with value {value.shape} of strides {value.strides} and key {key.shape} of strides "
            f"{key.strides}: value must be the first columns of key; pass a view of key"
        )


def _sequence_objections(problem: Problem) -> Iterator[str]:
    given, shape = problem.sequences, problem.shape
    if given is None or shape.tokens is None:
        return
    if given.count < 0:
        yield f"number of sequences = {given.count}: cu_seqlens must have at least one entry; pass [0] for none"
    for label, longest, tokens in (
        ("max_seqlen_q", given.max_seqlen_q, shape.tokens[0]),
        ("max_seqlen_k", given.max_seqlen_k, shape.tokens[1]),
    ):
        if not 0 <= longest <= tokens:
            given_length = digits(longest)
            yield f"{label} = {given_length}: must be from 0 to the {tokens} tokens; pass the longest sequence's length"
    for name, tokens in zip(("query", "key"), shape.tokens, strict=True):
        if tokens > MAX_LENGTH:
            yield (
                f"{name} has {tokens} tokens: must be at most {MAX_LENGTH}, because cu_seqlens are 32-bit; "
                "call once per group of sequences"
            )
    if problem.query.shape[0] != 1:
        yield (
            f"query has batch {problem.query.shape[0]} with cu_seqlens: must be 1; concatenate the sequences "
            "in [1, tokens, heads, head_dim]"
        )


def _score_term_objections(problem: Problem) -> Iterator[str]:
    """Yields what the terms refuse, and names of terms that nothing registered."""
    for term in registry.terms():
        yield from term.objections(problem)
    known = registry.registered()
    for name, _ in problem.score_terms:
        if name not in known:
            yield (
                f"score_terms has {name!r}: must be registered terms, {', '.join(known) or 'of which there is none'}; "
                "call score_terms.register first"
            )


def _tensor_objections(problem: Problem) -> Iterator[str]:
    coded = OPERANDS if quantization.has_codes(problem) else ()  # whose dtypes quantization.py checks
    for name, tensor in problem.tensors().items():
        if tensor.dtype not in (OPERAND_BYTES if name in coded else ITEM_BYTES):
            if name not in coded:
                yield f"{name} has dtype {tensor.dtype}: must be one of {', '.join(ITEM_BYTES)}; cast it"
            continue
        has_own_dtype = name in coded or (name == "output" and problem.dtype == FLOAT8)
        if tensor.dtype != problem.dtype and not has_own_dtype:
            yield f"{name} has dtype {tensor.dtype} but query has {problem.dtype}: all must agree; cast one of them"
        operand = of_tensor(problem, name)
        axes = tuple(field.removeprefix(f"{name}_") for field in operand.strides)
        yield from memory_objections(name, tensor, axes, is_written=operand.is_written)


def memory_objections(name: str, tensor: Tensor, axes: tuple[str, ...], *, is_written: bool) -> Iterator[str]:
    """Yields what kernels do not take of an array's strides and address.

    axes: names of the leading axes, which have strides; the others are contiguous
    """
    item = ARRAY_BYTES.get(tensor.dtype, 1)
    shown_layout = f"{name} has shape {digits(tensor.shape)} and strides {digits(tensor.strides)}"
    if not axes and not tensor.is_contiguous:
        yield f"{shown_layout}: must be contiguous; copy it"
    if 0 < len(axes) < len(tensor.shape) and tensor.shape[-1] > 1 and tensor.strides[-1] != 1:
        yield f"{name} has last stride {tensor.strides[-1]}: must be 1; make the head dimension contiguous"
    if tensor.alignment < min(item, ROW_ALIGNMENT_BYTES):
        fastest = " (16 bytes is fastest)" if axes and name not in quantization.SCALES else ""
        yield (
            f"{name} starts at an address that is only {tensor.alignment}-byte aligned: must be aligned to its "
            f"{item}-byte elements{fastest}; copy it"
        )
    reach = sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    if reach * item >= MAX_BYTES:
        yield f"{shown_layout}: must reach fewer than 2**63 bytes; use smaller strides"
    if not is_written:
        return
    layout = zip((*axes, "last"), tensor.shape, tensor.strides, strict=False)
    repeated = [axis for axis, size, stride in layout if size > 1 and stride == 0]
    for axis in repeated:
        yield f"{name} has {axis} stride 0: an output must not overlap itself; allocate it in full"
    if not repeated and overlaps_itself(tensor.shape, tensor.strides):
        yield f"{shown_layout}: an output must not overlap itself; allocate it in full"


def _option_objections(problem: Problem) -> Iterator[str]:
    scale, softcap = problem.scale, problem.softcap
    if scale is not None and not (scale == 0 or MIN_SCALE <= abs(scale) <= MAX_SCALE):  # NaN is in no range
        yield f"scale = {shown(scale)}: {SCALE}"
    elif softcap and not any(SOFTCAP.objections(problem)):
        yield from _softcap_objections(problem)
    yield from _split_objections(problem)


def _softcap_objections(problem: Problem) -> Iterator[str]:
    """Yields why the kernels cannot compute an allowed softcap in float32."""
    softcap, scale, most = problem.softcap, abs(problem.scale_value), LARGEST_SOFTCAP.get(problem.dtype, MAX_RATIO)
    if softcap > most:
        yield (
            f"softcap = {shown(softcap)}: must be at most {most:g} for {problem.dtype} operands, because the kernels "
            "compute tanh in float32; lower it, or pass 0 for none"
        )
    elif scale and not 1 / MAX_RATIO <= scale / softcap <= MAX_RATIO:
        yield (
            f"softcap = {shown(softcap)} with scale {problem.scale_value:g}: scale / softcap must be 0 or have a "
            "magnitude from 2**-126 to 2**126, because the kernels compute in float32; change one of them"
        )


def _split_objections(problem: Problem) -> Iterator[str]:
    splits = problem.num_splits_key
    if splits is None:
        return
    if problem.direction == "forward":
        yield f"num_splits_key = {shown(splits)}: must be None, because only the backward splits keys; leave it None"
    elif splits < 1:
        yield f"num_splits_key = {shown(splits)}: {SPLITS}"
    elif splits > 1 and problem.deterministic:
        yield (
            f"num_splits_key = {splits} with deterministic: must be 1, or None for one block a key tile: with "
            "another number a block would wait for one that starts after it; change it"
        )


def logsumexp_objections(name: str, found: Tensor, shape: Shape) -> list[str]:
    """Returns why logsumexp or its gradient does not have the shape, dtype and layout of the forward's result."""
    expected = Tensor.contiguous(shape.logsumexp, "float32")
    if found.shape != expected.shape or found.dtype != expected.dtype:
        source = "as the forward returns it; pass that array" if name == "logsumexp" else "like logsumexp; pad it"
        return [f"{name} has shape {found.shape} and dtype {found.dtype}: must be {expected.shape} float32, {source}"]
    if 0 not in found.shape and (found.steps != expected.steps or found.alignment < F32_BYTES):
        return [f"{name} is strided or misaligned: must be contiguous and 4-byte aligned; copy it"]
    return []


def _gradient_objections(problem: Problem) -> Iterator[str]:
    names = [f"grad_{name}" for name in (*OPERANDS, *registry.gradients())]
    if problem.direction == "forward":
        for name in ("grad_output", "grad_logsumexp", *names):
            if getattr(problem, name) is not None:
                yield f"{name} is given: the forward writes no gradients; leave it None"
        return
    if problem.grad_logsumexp is not None:
        yield from logsumexp_objections("grad_logsumexp", problem.grad_logsumexp, problem.shape)
        if problem.grad_sinks is not None and not problem.shape.num_keys:
            yield (
                "grad_logsumexp is given with sinks and no keys: must have a key, for nothing is launched without one; "
                "the gradient of each sink is the sum of its head's grad_logsumexp"
            )
    if not problem.gradients:
        yield f"no gradient is asked for: must be at least one of {', '.join(names)}; pass a tensor for it"
    for name in registry.gradients():
        if getattr(problem, f"grad_{name}") is not None and getattr(problem, name) is None:
            yield f"grad_{name} is given without {name}: must come together; pass {name} or leave grad_{name} None"
