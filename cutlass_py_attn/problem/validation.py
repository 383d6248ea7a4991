"""Validation: every reason to refuse a problem.

The conditions of a score term are in its own file, score_terms/<term>.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from cutlass_py_attn.problem import masks, paging, quantization
from cutlass_py_attn.problem.block_sparse import block_size_refusals
from cutlass_py_attn.problem.mask_program import ARRAY_KINDS, MaskProgram
from cutlass_py_attn.problem.operands import of_tensor
from cutlass_py_attn.problem.overlap import overlaps_itself
from cutlass_py_attn.problem.scalars import MIN_SCALE, SCALARS, SCALE, SPLITS, digits, python_value
from cutlass_py_attn.problem.tensors import (
    BIASES,
    BLOCK_AXES,
    BMHK,
    DIRECTIONS,
    F32_BYTES,
    FLOAT8,
    ITEM_BYTES,
    KEY_ROPE,
    MASK_ARRAY_AXES,
    MASK_ARRAYS,
    OPERAND_BYTES,
    OPERANDS,
    RANGE_AXES,
    RANGE_EDGES,
    ROW_ALIGNMENT_BYTES,
    VISIBLE_BLOCKS,
    Sequences,
    Shape,
    Tensor,
)
from cutlass_py_attn.refusals import CHOOSE_FLAG, IS_FLAG, Refusal, alignment_refusal, one_of, refuse
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
TENSORS: Final = (
    *BMHK,
    "grad_logsumexp",
    *_OF_TERMS,
    *quantization.SCALES,
    KEY_ROPE,
    *RANGE_EDGES,
    VISIBLE_BLOCKS,
    *MASK_ARRAYS,
)
_REQUIRED: Final = (*OPERANDS, "output")
_NO_OVERLAP: Final = "an output must not overlap itself"
_IN_FULL: Final = "allocate it in full"
# Bytes of an element of any array.
ARRAY_BYTES: Final = {**OPERAND_BYTES, "int32": 4, "int64": 8}


def refusals(problem: Problem) -> list[Refusal]:
    """Returns every reason to refuse the problem.

    Every other check needs tensors of four axes: a wrong type or rank among the tensors is returned without the
    others' refusals. A wrong scalar or mask is returned together with them.
    """
    wrong = [*_kinds(problem), *_ranks(problem)]
    scalars = {name: scalar.refusals(name, getattr(problem, name)) for name, scalar in SCALARS.items()}
    kinds = [*(refusal for some in scalars.values() for refusal in some), *masks.refusals(problem.mask)]
    if wrong:
        return [*wrong, *kinds]
    defaults = {name: SCALARS[name].default for name, some in scalars.items() if some}
    sound = problem.replace(**defaults) if defaults else problem
    return [
        *_sizes(sound),
        *_score_terms(sound),
        *_tensors(sound),
        *quantization.refusals(sound),
        *kinds,
        *_key_ranges(sound),
        *_visible_blocks(sound),
        *_mask_function(sound),
        *_beside_arrays(sound),
        *_options(sound),
        *_gradients(sound),
    ]


def shape_refusals(shape: object) -> list[Refusal]:
    """Returns why this is no Shape of integers."""
    if not isinstance(shape, Shape):
        return [refuse("shape", shape, "must be a Shape", "create one")]
    sizes = {field.name: getattr(shape, field.name) for field in fields(Shape)}
    tokens, pool = sizes.pop("tokens"), sizes.pop("pool")
    found = [
        refuse(f"shape.{name}", size, "must be an int of at least 0", "correct it")
        for name, size in sizes.items()
        if type(python_value(size)) is not int
    ]
    if tokens is not None and not _are_ints(python_value(tokens), 2):
        found.append(refuse("shape.tokens", tokens, "must be two ints, of queries and keys, or None", "correct it"))
    if pool is not None:
        found.append(refuse("shape.pool", pool, "must be None here", "make a dense Problem and set its pages"))
    return found


def score_terms_refusals(terms: object) -> Iterator[Refusal]:
    """Yields why these are no named arrays of score terms."""
    pairs = terms if isinstance(terms, tuple) else (terms,)
    if not all(isinstance(pair, tuple) and [*map(type, pair)] == [str, Tensor] for pair in pairs):
        yield refuse("score_terms", terms, "must be a tuple of (name, Tensor)", "correct it")


def _are_ints(values: object, count: int | None = None) -> bool:
    is_tuple = isinstance(values, tuple) and (count is None or len(values) == count)
    return is_tuple and all(type(value) is int for value in values)  # type: ignore[attr-defined]


def tensor_refusals(name: str, tensor: object, *, is_required: bool) -> Iterator[Refusal]:
    """Yields why this is no Tensor of integers with the name of a dtype; None is one that is not required."""
    if not isinstance(tensor, Tensor):
        if tensor is not None or is_required:
            rule = "must be a Tensor" if is_required else "must be a Tensor, or None"
            yield refuse(name, tensor, rule, "create one with Tensor.contiguous")
        return
    if not _are_ints(tensor.shape) or min(tensor.shape, default=0) < 0:
        yield refuse(f"{name}.shape", tensor.shape, "must be a tuple of ints of at least 0", "correct it")
    if not _are_ints(tensor.strides):
        yield refuse(f"{name}.strides", tensor.strides, "must be a tuple of ints", "correct it")
    if type(tensor.dtype) is not str:
        yield refuse(f"{name}.dtype", tensor.dtype, one_of(ITEM_BYTES), "correct it")
    if type(tensor.alignment) is not int:
        yield refuse(f"{name}.alignment", tensor.alignment, "must be an int of bytes", "correct it")


def _kinds(problem: Problem) -> Iterator[Refusal]:
    """Yields what is no Tensor, no integer and no name among the tensors and the sequences."""
    for name in TENSORS:
        yield from tensor_refusals(name, getattr(problem, name), is_required=name in _REQUIRED)
    yield from score_terms_refusals(problem.score_terms)
    if problem.pages is not None:
        yield from paging.kind_refusals(problem.pages)
    sequences = problem.sequences
    if sequences is None:
        return
    if not isinstance(sequences, Sequences):
        yield refuse("sequences", sequences, "must be a Sequences object, or None", "create one")
        return
    for field in ("count", "max_seqlen_q", "max_seqlen_k"):
        if type(getattr(sequences, field)) is not int:
            yield refuse(f"sequences.{field}", getattr(sequences, field), "must be an int", "convert it")
    if type(sequences.seqused_k) is not bool:
        yield refuse("sequences.seqused_k", sequences.seqused_k, IS_FLAG, CHOOSE_FLAG)


def _ranks(problem: Problem) -> Iterator[Refusal]:
    direction = problem.direction if isinstance(problem.direction, str) else ""
    if direction not in DIRECTIONS:
        yield refuse("direction", problem.direction, one_of(DIRECTIONS), "choose one")
    if direction == "backward" and problem.grad_output is None:
        yield refuse("grad_output", None, "must be a tensor in the shape of output for a backward", "pass it")
    for name in (*BMHK, KEY_ROPE, *BIASES):
        axes = "[batch, heads, queries, keys]" if name in BIASES else "[batch, seqlen, heads, head_dim]"
        tensor = getattr(problem, name)
        if isinstance(tensor, Tensor):
            yield from rank_refusals(name, tensor, 4, f"must be 4-D {axes}", "add the missing axes with size 1")
    yield from stride_refusals({name: getattr(problem, name) for name in (*RANGE_EDGES, VISIBLE_BLOCKS, *MASK_ARRAYS)})
    for term in registry.terms():
        yield from stride_refusals(term.vectors(problem))


def rank_refusals(name: str, tensor: Tensor, rank: int, rule: str, remedy: str) -> Iterator[Refusal]:
    """Yields the shape of a Tensor with another number of axes, or the strides of one with another number of these."""
    for field in ("shape", "strides"):
        numbers = getattr(tensor, field)
        if isinstance(numbers, tuple) and len(numbers) != rank:
            yield refuse(f"{name}.{field}", numbers, rule, remedy)
            return


def stride_refusals(tensors: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yields which of these tensors have another number of strides than of axes; None stands for no tensor."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and len(tensor.shape) != len(tensor.strides):
            rule = f"must have a stride for each axis of {tensor.shape}"
            yield refuse(f"{name}.strides", tensor.strides, rule, "add the missing strides, or leave some out")


def shape_refusal(name: str, given: tuple[int, ...], wanted: object, problem: Problem) -> Refusal:
    """Returns the refusal of a shape that does not match query, key and value."""
    query, key, value = problem.query.shape, problem.key.shape, problem.value.shape
    rule = f"must be {wanted} to match query {query}, key {key} and value {value}"
    return refuse(f"{name}.shape", given, rule, "reshape it")


def _sizes(problem: Problem) -> Iterator[Refusal]:
    shape = problem.shape
    if shape.num_heads_key and shape.num_heads % shape.num_heads_key:
        rule = f"must be a multiple of the {digits(shape.num_heads_key)} heads of key"
        yield refuse("num_heads", shape.num_heads, rule, "repeat or drop heads")
    for name, tensor in problem.tensors().items():
        if name not in BMHK:
            continue
        wanted = (problem.query.shape[0], *shape.of(name)[1:])
        if problem.pages is not None and name in ("key", "value"):
            wanted = shape.of(name)
        if problem.key_rope is not None and name == "key":  # whose last columns are those of key_rope
            wanted = (*wanted[:3], max(wanted[3] - problem.key_rope.shape[3], 0))
        if tensor.shape != wanted:
            yield shape_refusal(name, tensor.shape, wanted, problem)
    for label, size in (("head_dim", shape.head_dim), ("head_dim_value", shape.head_dim_value)):
        if not 1 <= size <= MAX_HEAD_DIM:
            remedy = "split the head" if size > MAX_HEAD_DIM else "give every row at least one element"
            yield refuse(label, size, f"must be from 1 to {MAX_HEAD_DIM}", remedy)
    for label in ("num_queries", "num_keys", "batch", "num_heads"):
        if getattr(shape, label) > MAX_LENGTH:
            yield refuse(label, getattr(shape, label), f"must be at most {MAX_LENGTH}", "call once per slice")
    yield from _sequences(problem)
    yield from paging.refusals(problem)
    yield from _value_in_key(problem)


def _value_in_key(problem: Problem) -> Iterator[Refusal]:
    if not problem.value_in_key:
        return
    key, value = problem.key, problem.value
    if problem.direction == "backward":
        rule = "must be False with direction 'backward', because gradients are separate"
        yield refuse("value_in_key", True, rule, "leave it out")
    if value.shape[3] > key.shape[3]:
        rule = f"must be at most the {key.shape[3]} columns of key with value_in_key"
        yield refuse("head_dim_value", value.shape[3], rule, "lower it")
    if value.strides != key.strides:
        rule = f"must be those of key, {key.strides}, whose first columns are value with value_in_key"
        yield refuse("value.strides", value.strides, rule, "pass a view of key")


def _sequences(problem: Problem) -> Iterator[Refusal]:
    given, shape = problem.sequences, problem.shape
    if given is None or shape.tokens is None:
        return
    if given.count < 0:
        yield refuse("sequences.count", given.count, "cu_seqlens must have at least one entry", "pass [0] for none")
    for label, longest, tokens in (
        ("max_seqlen_q", given.max_seqlen_q, shape.tokens[0]),
        ("max_seqlen_k", given.max_seqlen_k, shape.tokens[1]),
    ):
        if not 0 <= longest <= tokens:
            yield refuse(label, longest, f"must be from 0 to the {tokens} tokens", "pass the longest sequence's length")
    for name, tokens in zip(("query", "key"), shape.tokens, strict=True):
        if tokens > MAX_LENGTH:
            rule = f"must be at most {MAX_LENGTH}, because cu_seqlens are 32-bit"
            yield refuse(f"tokens of {name}", tokens, rule, "call once per group of sequences")
    if problem.query.shape[0] != 1:
        remedy = "concatenate the sequences in [1, tokens, heads, head_dim]"
        yield refuse("batch of query", problem.query.shape[0], "must be 1 with cu_seqlens", remedy)


def _score_terms(problem: Problem) -> Iterator[Refusal]:
    """Yields what the terms refuse, and names of terms that nothing registered."""
    for term in registry.terms():
        yield from term.refusals(problem)
    yield from registry.unknown(name for name, _ in problem.score_terms)


def _tensors(problem: Problem) -> Iterator[Refusal]:
    coded = OPERANDS if quantization.has_codes(problem) else ()  # whose dtypes quantization.py checks
    for name, tensor in problem.tensors().items():
        if tensor.dtype not in (OPERAND_BYTES if name in coded else ITEM_BYTES):
            if name not in coded:
                yield refuse(f"{name}.dtype", tensor.dtype, one_of(ITEM_BYTES), "cast it")
            continue
        has_own_dtype = name in coded or (name == "output" and problem.dtype == FLOAT8)
        if tensor.dtype != problem.dtype and not has_own_dtype:
            yield refuse(f"{name}.dtype", tensor.dtype, f"must be {problem.dtype} as query", "cast one of them")
        operand = of_tensor(problem, name)
        axes = tuple(field.removeprefix(f"{name}_") for field in operand.strides)
        yield from memory_refusals(name, tensor, axes, is_written=operand.is_written)


def memory_refusals(name: str, tensor: Tensor, axes: tuple[str, ...], *, is_written: bool) -> Iterator[Refusal]:
    """Yields what kernels do not take of an array's strides and address.

    axes: names of the leading axes, which have strides; the others are contiguous
    """
    item, shape = ARRAY_BYTES.get(tensor.dtype, 1), digits(tensor.shape)
    if not axes and not tensor.is_contiguous:
        yield refuse(f"{name}.strides", tensor.strides, f"must be contiguous for shape {shape}", "copy it")
    if 0 < len(axes) < len(tensor.shape) and tensor.shape[-1] > 1 and tensor.strides[-1] != 1:
        yield refuse(f"{name}.strides", tensor.strides, "the last must be 1", "make the head dimension contiguous")
    if tensor.alignment < min(item, ROW_ALIGNMENT_BYTES):
        yield alignment_refusal(name, tensor.alignment, item)
    reach = sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    if reach * item >= MAX_BYTES:
        rule = f"must reach fewer than 2**63 bytes with shape {shape}"
        yield refuse(f"{name}.strides", tensor.strides, rule, "use smaller strides")
    if not is_written:
        return
    layout = zip((*axes, "last"), tensor.shape, tensor.strides, strict=False)
    repeated = [axis for axis, size, stride in layout if size > 1 and stride == 0]
    for axis in repeated:
        yield refuse(f"{axis} stride of {name}", 0, _NO_OVERLAP, _IN_FULL)
    if not repeated and overlaps_itself(tensor.shape, tensor.strides):
        yield refuse(f"{name}.strides", tensor.strides, f"{_NO_OVERLAP} with shape {shape}", _IN_FULL)


def _key_ranges(problem: Problem) -> Iterator[Refusal]:
    edges = {name: getattr(problem, name) for name in RANGE_EDGES}
    missing = [name for name, edge in edges.items() if edge is None]
    if len(missing) == len(edges):
        return
    for name in missing:
        yield refuse(name, None, f"must come with {' and '.join({*edges} - {name})}", "pass both, or none")
    full = problem.shape.range_edges
    for name, edge in edges.items():
        if edge is None:
            continue
        broadcasts = len(edge.shape) == len(full) and edge.shape[2] == full[2]
        if not broadcasts or any(size not in (1, most) for size, most in zip(edge.shape[:2], full[:2], strict=True)):
            yield refuse(f"{name}.shape", edge.shape, f"must be {full}; the first two sizes may be 1", "reshape it")
        elif edge.dtype != "int32":
            yield refuse(f"{name}.dtype", edge.dtype, "must be int32", "convert it")
        else:
            yield from memory_refusals(name, edge, RANGE_AXES, is_written=False)
    shapes = {edge.shape for edge in edges.values() if edge is not None}
    if len(shapes) > 1:
        rule = f"must be that of key_start, {edges['key_start'].shape}"
        yield refuse("key_end.shape", edges["key_end"].shape, rule, "broadcast it")


def _visible_blocks(problem: Problem) -> Iterator[Refusal]:
    sizes, blocks = problem.block_size, problem.visible_blocks
    wrong = [*block_size_refusals(sizes)]
    yield from wrong
    if wrong or blocks is None:
        return
    shape = problem.shape
    full = shape.visible_blocks(sizes)
    heads = (shape.num_heads_key,) if problem.direction == "backward" else (shape.num_heads_key, shape.num_heads)
    is_wrong = len(blocks.shape) != len(full) or blocks.shape[2:] != full[2:]
    if is_wrong or blocks.shape[0] not in (1, full[0]) or blocks.shape[1] not in (1, *heads):
        counted = " or ".join(map(str, dict.fromkeys((1, *heads))))
        rule = f"must be (1 or {full[0]}, {counted}, {full[2]}, {full[3]}) with block_size {sizes}"
        remedy = "reshape it, or repeat key and value if the query heads of a group differ"
        yield refuse(f"{VISIBLE_BLOCKS}.shape", blocks.shape, rule, remedy)
    elif blocks.dtype not in ("bool", "uint8"):
        yield refuse(f"{VISIBLE_BLOCKS}.dtype", blocks.dtype, "must be bool or uint8", "convert it")
    else:
        yield from memory_refusals(VISIBLE_BLOCKS, blocks, BLOCK_AXES, is_written=False)


def _mask_function(problem: Problem) -> Iterator[Refusal]:
    """Yields what is wrong with the program of a mask function, and with what it takes."""
    arrays = {name: array for name in MASK_ARRAYS if (array := getattr(problem, name)) is not None}
    if problem.mask_program is None:
        for name in ("mask_scalars", *arrays):
            if (value := getattr(problem, name)) is not None:
                yield refuse(name, value, "must be None without mask_program", "leave it None")
        return
    try:
        program = MaskProgram.parse(problem.mask_program)
    except ValueError as error:
        yield refuse("mask_program", problem.mask_program, f"must be the text of a MaskProgram ({error})", "trace one")
        return
    scalars = problem.mask_scalars or ()
    if not _are_ints(scalars, program.scalars) or any(not -(2**31) <= number < 2**31 for number in scalars):
        yield refuse("mask_scalars", scalars, f"must be {program.scalars} int32", "pass what the function takes")
    if [*arrays] != [*MASK_ARRAYS[: len(program.arrays)]]:
        rule = f"must be {len(program.arrays)}, the first ones"
        yield refuse("mask arrays", ", ".join(arrays), rule, "pass what the function takes")
        return
    for (name, array), (kind, rank) in zip(arrays.items(), program.arrays, strict=True):
        if len(array.shape) != rank or 0 in array.shape:
            yield refuse(f"{name}.shape", array.shape, f"must be of {rank} axes, none of them 0", "reshape it")
        elif ARRAY_KINDS.get(array.dtype) != kind:
            dtypes = " or ".join(dtype for dtype, own in ARRAY_KINDS.items() if own == kind)
            yield refuse(f"{name}.dtype", array.dtype, f"must be {dtypes}", "convert it")
        else:
            yield from memory_refusals(name, array, MASK_ARRAY_AXES[:rank], is_written=False)


def _beside_arrays(problem: Problem) -> Iterator[Refusal]:
    if all(getattr(problem, name) is None for name in ("key_start", VISIBLE_BLOCKS, "mask_program")):
        return
    for name in ("sequences", "pages"):
        given = getattr(problem, name)
        if given is not None:
            yield refuse(name, given, "must be None with a mask in memory", "leave it None")


def _options(problem: Problem) -> Iterator[Refusal]:
    scale, softcap = problem.scale, problem.softcap
    if scale is not None and not (scale == 0 or MIN_SCALE <= abs(scale) <= MAX_SCALE):  # NaN is in no range
        yield SCALE.refusal("scale", scale)
    elif softcap and not any(SOFTCAP.refusals(problem)):
        yield from _softcap(problem)
    yield from _splits(problem)


def _softcap(problem: Problem) -> Iterator[Refusal]:
    """Yields why the kernels cannot compute an allowed softcap in float32."""
    softcap, scale, most = problem.softcap, problem.scale_value, LARGEST_SOFTCAP.get(problem.dtype, MAX_RATIO)
    if softcap > most:
        rule = f"must be at most {most:g} for {problem.dtype} operands, because the kernels compute tanh in float32"
        yield refuse("softcap", softcap, rule, "lower it, or pass 0 for none")
    elif scale and not 1 / MAX_RATIO <= abs(scale) / softcap <= MAX_RATIO:
        rule = (
            f"scale / softcap, of scale {scale:g}, must be 0 or have a magnitude from 2**-126 to 2**126, because the "
            "kernels compute in float32"
        )
        yield refuse("softcap", softcap, rule, "change one of them")


def _splits(problem: Problem) -> Iterator[Refusal]:
    splits = problem.num_splits_key
    if splits is None:
        return
    if problem.direction == "forward":
        yield refuse("num_splits_key", splits, "must be None, because only the backward splits keys", "leave it None")
    elif splits < 1:
        yield SPLITS.refusal("num_splits_key", splits)
    elif splits > 1 and problem.deterministic:
        rule = (
            "must be 1 with deterministic, or None for one block a key tile: with another number a block would wait "
            "for one that starts after it"
        )
        yield refuse("num_splits_key", splits, rule, "change it")


def logsumexp_refusals(name: str, given: Tensor, shape: Shape) -> Iterator[Refusal]:
    """Yields why logsumexp or its gradient does not have the shape, dtype and layout of the forward's result."""
    expected = Tensor.contiguous(shape.logsumexp, "float32")
    if given.shape != expected.shape or given.dtype != expected.dtype:
        remedy = "pass that array of the forward" if name == "logsumexp" else "pad it like logsumexp"
        yield refuse(name, given, f"must be {expected.shape} float32", remedy)
    elif 0 not in given.shape and given.steps != expected.steps:
        yield refuse(f"{name}.strides", given.strides, "must be contiguous", "copy it")
    elif 0 not in given.shape and given.alignment < F32_BYTES:
        yield alignment_refusal(name, given.alignment, F32_BYTES)


def _gradients(problem: Problem) -> Iterator[Refusal]:
    names = [f"grad_{name}" for name in (*OPERANDS, *registry.gradients())]
    if problem.direction == "forward":
        for name in ("grad_output", "grad_logsumexp", *names):
            if (given := getattr(problem, name)) is not None:
                yield refuse(name, given, "must be None, because the forward writes no gradients", "leave it None")
        return
    if problem.grad_logsumexp is not None:
        yield from logsumexp_refusals("grad_logsumexp", problem.grad_logsumexp, problem.shape)
        if problem.grad_sinks is not None and not problem.shape.num_keys:
            rule = "must have a key with sinks, for nothing is launched without one"
            remedy = "the gradient of each sink is the sum of its head's grad_logsumexp"
            yield refuse("grad_logsumexp", problem.grad_logsumexp, rule, remedy)
    if not problem.gradients:
        yield refuse("gradients", (), f"must be at least one of {', '.join(names)}", "pass a tensor for it")
    for name in registry.gradients():
        given = getattr(problem, f"grad_{name}")
        if given is not None and getattr(problem, name) is None:
            yield refuse(f"grad_{name}", given, f"must come with {name}", f"pass {name} or leave grad_{name} None")
