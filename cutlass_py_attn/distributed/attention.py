"""Attention whose rows are split over the ranks of a group, forward and backward.

output, logsumexp = attention_forward(query, key, value, group=group, context_strategy="ring", load_balance="zigzag",
                                      mask=Causal())
gradients = attention_backward(grad_output, query, key, value, output, logsumexp, group=group, ...)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, TypedDict, Unpack

import numpy as np

from cutlass_py_attn.api.attention import problem_of
from cutlass_py_attn.api.calls import check_is_numpy
from cutlass_py_attn.api.lru_cache import LruCache
from cutlass_py_attn.api.options import Options, ScoreOptions, VariableLength, check_options, takes_options
from cutlass_py_attn.api.results import Gradients
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.distributed import gathered, heads, ring
from cutlass_py_attn.distributed.gpu import CapturedStream, on_gpu
from cutlass_py_attn.distributed.group import Group
from cutlass_py_attn.distributed.host import Host
from cutlass_py_attn.distributed.machine import Arrays, Machine
from cutlass_py_attn.distributed.split import OF_KEY, OF_LOGSUMEXP, OF_QUERY, Split
from cutlass_py_attn.errors import AttentionError, NotSupported
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.split_rows import (
    ALL_GATHER,
    RING,
    ULYSSES,
    ZIGZAG,
    SplitCall,
    array_mask_refusals,
    order_refusals,
    strategy_refusals,
)
from cutlass_py_attn.problem.tensors import E4M3, OPERANDS, Tensor
from cutlass_py_attn.refusals import Refusal, refuse
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.arrays import Array
from cutlass_py_attn.score_terms.dropout import Dropout

_COMPUTE: Final[dict[str, Any]] = {ALL_GATHER: gathered, ULYSSES: heads, RING: ring}
_CONTEXT: Final[dict[str, Any]] = {"context_strategy": ALL_GATHER, "load_balance": None}  # defaults of its options
_MESSAGE_BYTES: Final = 1024  # about a call, which all ranks compare
_CALL, _REFUSAL = b"c", b"r"  # first byte of a message


class CallsDiffer(NotSupported):
    """The ranks of a group make different calls. Every rank raises it before it exchanges an array."""


class _OfGroup(TypedDict):
    """What every call names. group: the ranks, from `connect` or `Group`."""

    group: Group


class ContextOptions(_OfGroup, ScoreOptions, total=False):
    """Options of a forward whose rows are split: group, those of `AttentionOptions` but score_terms, and these.

    group: the ranks, from `connect` or `Group`.
    context_strategy: "all_gather" gathers keys and values; "ulysses" exchanges rows for heads; "ring" passes keys and
        values from rank to rank.
    load_balance: "zigzag" if the rows are in the order of `rows_of_rank`; None for the natural order.
    sequences: VariableLength(...) with NumPy arrays, which count the rows of all ranks; None if there is no packing.
    """

    dropout: Dropout | None
    stream: object
    backend: str
    kernels: Callable[[Build], Artifact] | None
    context_strategy: str
    load_balance: str | None
    sequences: VariableLength | None


class ContextBackwardOptions(ContextOptions, total=False):
    """Options of a backward whose rows are split.

    grad_logsumexp, gradients, deterministic: as in `cutlass_py_attn.attention_backward`.
    """

    grad_logsumexp: Any
    gradients: tuple[str, ...]
    deterministic: bool


@takes_options(ContextOptions, **_CONTEXT)
def attention_forward(query: Any, key: Any, value: Any, **options: Unpack[ContextOptions]) -> tuple[Any, Any]:
    """Computes a rank's rows of attention over the rows of all ranks.

    query, key, value: the rank's rows (batch, rows, heads, head_dim); every rank has as many. They are as in
        `cutlass_py_attn.attention_forward`: CUDA arrays on the group's GPU, NumPy arrays, which are copied there, or
        with backend="reference" NumPy arrays in a group of the host.
    The options are keywords: `ContextOptions`, and those of `cutlass_py_attn.attention_forward` but score_terms. A bias
    has the rank's rows, and the keys of all ranks in natural order; an axis of size 1 broadcasts.

    Returns output and logsumexp of the rank's rows, in the library of query. With `sequences` the logsumexp is of no
    use but for `attention_backward`. The function returns when all exchanges are complete; results are ready in the
    order of `stream`.

    NotSupported lists every reason before anything is exchanged, and the ranks that made another call. PeerLost: a
    rank did not come within the group's time limit, and the group is aborted.
    """
    results = _call("forward", {"query": query, "key": key, "value": value}, options)
    return results["output"], results["logsumexp"]


@takes_options(ContextBackwardOptions, **_CONTEXT)
def attention_backward(
    grad_output: Any,
    query: Any,
    key: Any,
    value: Any,
    output: Any,
    logsumexp: Any,
    **options: Unpack[ContextBackwardOptions],
) -> Gradients:
    """Computes the gradients of a rank's operands, of the loss of all ranks.

    The options are those of `attention_forward`, which must be the same, and those of `ContextBackwardOptions`. The
    gradients of sinks, and of a bias without rows, which every rank has whole, are summed over all ranks. Sums of
    several parts are added in float32 in a fixed order: deterministic=True gives the same bits in every run with as
    many ranks. The errors are those of `attention_forward`.
    """
    operands = {
        "grad_output": grad_output,
        "query": query,
        "key": key,
        "value": value,
        "output": output,
        "logsumexp": logsumexp,
    }
    found = _call("backward", operands, options)
    return Gradients(**{name.removeprefix("grad_"): array for name, array in found.items()})


def _call(direction: str, operands: dict[str, Any], options: Mapping[str, Any]) -> Arrays:
    """Returns the results by name."""
    rest = dict(options)
    stream = rest.pop("stream", None)
    context = {name: rest.pop(name, default) for name, default in {"group": None, **_CONTEXT}.items()}
    group = context["group"]
    if isinstance(group, Group):
        group.expect_open()
    is_agreed = False  # whether all ranks have agreed on this call

    def compute(machine: Machine, arrays: Arrays) -> Arrays:
        nonlocal is_agreed
        split = Split(machine, context["context_strategy"], context["load_balance"] == ZIGZAG, checked)
        message = _supported_call(split, direction, arrays)
        module = _COMPUTE[split.strategy]
        is_agreed = True
        with _abort_on_error(group):
            if group.check_calls and group.size > 1:
                machine.agree = _agreement(machine, message)
            given = {**arrays, **_lengths(machine, checked)} if split.strategy == ULYSSES else arrays
            if direction == "forward":
                found: Arrays = module.forward(split, given)
            else:
                gradients = module.backward(split, given, tuple(checked.gradients))
                found = {f"grad_{name}": array for name, array in gradients.items()}
            machine.agree()
            group.finish()
        return found

    try:
        checked = _checked(direction, context, rest)
        if checked.grad_logsumexp is not None:
            operands["grad_logsumexp"] = checked.grad_logsumexp
        operands |= {
            name: array for name in ("bias", "alibi_slopes", "sinks") if (array := getattr(checked, name)) is not None
        }
        if checked.backend == "reference":
            driver.stream_handle(stream)  # refused if it is no stream, as on the GPU
            return _on_host(group, operands, compute)
        return on_gpu(group, operands, checked, stream, compute)
    except CapturedStream:  # to tell the others would end the capture
        raise
    except Exception as error:
        if not is_agreed and isinstance(group, Group):
            _tell_others(group, error)
        raise


def _checked(direction: str, context: Mapping[str, Any], rest: Mapping[str, Any]) -> Options:
    """Returns the options of the call on all rows; NotSupported lists every reason."""
    reasons = [*_context_refusals(context)]
    try:
        checked = check_options(rest, _ALLOWED[direction], "score_terms")  # refused below, with what to do
    except NotSupported as error:
        raise NotSupported([*reasons, *error.refusals]) from error
    if reasons := [*reasons, *_refusals(checked)]:
        raise NotSupported(reasons)
    return checked


@contextmanager
def _abort_on_error(group: Group) -> Iterator[None]:
    """Aborts the group if this rank fails in the middle of a call, for the others wait for what it does not send."""
    try:
        yield
    except CallsDiffer:
        raise
    except BaseException:
        group.abort()
        raise


_ALLOWED: Final[dict[str, type]] = {"forward": ContextOptions, "backward": ContextBackwardOptions}


def _context_refusals(context: Mapping[str, Any]) -> list[Refusal]:
    """Returns why group, strategy or order are refused."""
    found = []
    if not isinstance(context["group"], Group):
        found.append(refuse("group", context["group"], "must be a Group", "pass one that connect returns"))
    return [*found, *strategy_refusals(context["context_strategy"]), *order_refusals(context["load_balance"])]


def _refusals(options: Options) -> list[Refusal]:
    """Returns why options are refused that one device takes."""
    found = array_mask_refusals(options.key_start, options.visible_blocks, options.mask_program)
    if options.score_terms:
        rule = "must be empty, for a term counts the positions of a rank's own rows"
        found.append(refuse("score_terms", options.score_terms, rule, "add it as a bias"))
    if options.dropout is not None and options.philox_on_device:
        rule = "must be an int, for ranks add to the offset, not in device memory"
        found.append(refuse("philox_seed", options.dropout.philox_seed, rule, "pass ints"))
    if isinstance(options.sequences, VariableLength):
        arrays = {name: getattr(options.sequences, name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")}
        rule = "must be a NumPy array, for its values decide what a rank computes"
        found += [
            refuse(name, array, rule, "copy it to the host")
            for name, array in arrays.items()
            if array is not None and not isinstance(array, np.ndarray)
        ]
        if not found and options.dropout_p and arrays["cu_seqlens_q"].size > 2:
            rule = (
                f"must be 0 with {arrays['cu_seqlens_q'].size - 1} sequences, for random numbers of some heads of "
                "several sequences are not supported"
            )
            found.append(refuse("dropout_p", options.dropout_p, rule, "pass one sequence a call"))
    if options.sequences is not None and options.grad_logsumexp is not None:
        rule = (
            "must be None with sequences, for the logsumexp of split sequences is of no use but for attention_backward"
        )
        found.append(refuse("grad_logsumexp", options.grad_logsumexp, rule, "leave it out"))
    return found


def _lengths(machine: Machine, options: Options) -> Arrays:
    """Returns the lengths of packed sequences in the machine's memory."""
    if options.sequences is None:
        return {}
    return {name: machine.constant(array) for name, array in options.sequences.arrays().items()}


def _supported_call(split: Split, direction: str, arrays: Arrays) -> bytes:
    """Returns the message about a call that all ranks compare.

    NotSupported lists every reason why the rows of this call cannot be split. A call like an earlier one is not looked
    at again, but for lengths of sequences and seeds of dropout, whose values count.
    """
    layouts = tuple((name, tuple(array.shape), str(array.dtype)) for name, array in arrays.items())
    key = direction, split.strategy, split.zigzag, split.size, layouts, split.options.key
    is_cached = split.options.sequences is None and split.options.dropout is None
    try:
        if is_cached and (found := _supported.get(key)):
            return found
    except TypeError:  # an option without a hash
        is_cached = False
    _expect_supported(split, direction, arrays)
    message = _message(_CALL, _describe(split, direction, arrays))
    if is_cached:
        _supported.put(key, message)
    return message


_supported: LruCache[bytes] = LruCache(256)  # messages about calls


def _expect_supported(split: Split, direction: str, arrays: Arrays) -> None:
    coded = [name for name in OPERANDS if str(arrays[name].dtype) in E4M3]
    if coded:
        raise NotSupported(
            f"{', '.join(coded)} of e4m3 with a group: must have 16 or 32 bits, because rows that are split over ranks "
            "have no scales; dequantise, each code times its scale"
        )
    flat = [name for name in (*OF_QUERY, *OF_KEY) if name in arrays and len(arrays[name].shape) != 4]
    if flat:
        raise NotSupported(
            f"{name} has shape {tuple(arrays[name].shape)}: must be (batch, rows, heads, head_dim), a rank's rows; "
            "reshape it"
            for name in flat
        )
    options, differ = split.options, False
    if isinstance(options.sequences, VariableLength):
        starts = options.sequences.cu_seqlens_q, options.sequences.cu_seqlens_k
        differ = options.sequences.seqused_k is not None or not np.array_equal(*starts)
    call = SplitCall(
        strategy=split.strategy,
        zigzag=split.zigzag,
        size=split.size,
        where=f"{split.size} ranks",
        mask=options.mask,
        query=tuple(arrays["query"].shape),
        key=tuple(arrays["key"].shape),
        bias=tuple(arrays["bias"].shape) if "bias" in arrays else None,
        has_alibi="alibi_slopes" in arrays,
        dropout_p=options.dropout_p,
        terms=(),
        has_sequences=options.sequences is not None,
        differ=differ,
    )
    reasons = [*_refusals_of_all_rows(split, direction, arrays), *call.refusals()]
    if reasons := reasons or [*_logsumexp_refusals(split, arrays)]:
        raise NotSupported(reasons)


def _refusals_of_all_rows(split: Split, direction: str, arrays: Arrays) -> list[Refusal]:
    """Returns why one device would refuse the call on the rows of all ranks."""
    inputs = {}
    lengths = {} if split.options.sequences is None else split.options.sequences.arrays()
    for name, array in {**arrays, **lengths}.items():
        shape = list(array.shape)
        if name in (*OF_QUERY, *OF_KEY):
            shape[1] *= split.size
        elif name == "bias" and len(shape) == 4 and shape[2] > 1:
            shape[2] *= split.size
        tensor = Tensor.contiguous(tuple(shape), str(array.dtype))
        if name not in OF_LOGSUMEXP:
            inputs[name] = Array(0, tensor.shape, tensor.strides, tensor.dtype, None, "other", None)
    try:
        problem_of(direction, inputs, split.options)
    except NotSupported as error:
        where = f"on the rows of {split.size} ranks: " if split.size > 1 else ""
        return [replace(refusal, field=f"{where}{refusal.field}") for refusal in error.refusals]
    return []


def _logsumexp_refusals(split: Split, arrays: Arrays) -> Iterator[Refusal]:
    """Yields why logsumexp or its gradient is none that the forward of this call returns."""
    expected = split.logsumexp_shape(arrays)
    for name in OF_LOGSUMEXP:
        if name in arrays and (tuple(arrays[name].shape), str(arrays[name].dtype)) != (expected, "float32"):
            remedy = "pass that array of attention_forward" if name == "logsumexp" else "pad it like logsumexp"
            yield refuse(name, arrays[name], f"must be {expected} float32", remedy)


def _describe(split: Split, direction: str, arrays: Arrays) -> str:
    """Returns what must be equal on all ranks, in words."""
    options = split.options
    words: dict[str, Any] = {name: f"{array.dtype} {tuple(array.shape)}" for name, array in sorted(arrays.items())}
    words |= {"mask": repr(options.mask), "scale": options.scale, "softcap": options.softcap}
    words |= {"dropout": repr(options.dropout), "deterministic": options.deterministic}
    if isinstance(options.sequences, VariableLength):
        lengths = options.sequences.arrays()
        digest = hashlib.sha256(b"".join(lengths[name].tobytes() for name in sorted(lengths))).hexdigest()[:8]
        words["sequences"] = [*options.sequences.lengths, digest]
    if direction == "backward":
        words["gradients"] = options.gradients
    order = ZIGZAG if split.zigzag else None
    return (
        f"{direction} by {split.strategy}, {split.size} ranks, load_balance {order}, {json.dumps(words, default=str)}"
    )


def _agreement(machine: Machine, message: bytes) -> Callable[[], None]:
    """Starts to compare a call with those of the other ranks. The function that it returns waits for them, once.

    It raises CallsDiffer on every rank if the ranks make different calls, or one refuses its call. What a rank computes
    of its own arrays alone need not wait.
    """
    wait = machine.group.start_sharing(message)

    def agree() -> None:
        machine.agree = lambda: None
        _expect_same_calls(wait())

    return agree


def _expect_same_calls(texts: list[bytes]) -> None:
    """Raises CallsDiffer if the messages of the ranks differ, or one is that of a refusal."""
    refusals = [f"rank {rank} refuses it, {_text(text)}" for rank, text in enumerate(texts) if text[:1] != _CALL]
    if refusals:
        raise CallsDiffer(f"a call that not all ranks make, {'; '.join(refusals)}: must be one for all; correct it")
    others = [rank for rank in range(len(texts)) if texts[rank] != texts[0]]
    if others:
        calls = "; ".join(f"rank {rank}: {_text(texts[rank])}" for rank in (0, others[0]))
        raise CallsDiffer(f"the ranks make different calls, {calls}: must be the same on all ranks; correct one")


def _tell_others(group: Group, error: Exception) -> None:
    """Tells the other ranks, which compare their calls now, that this rank refuses its own."""
    if group.check_calls and group.size > 1 and group.is_open:
        with contextlib.suppress(AttentionError):  # ranks that do not come; this rank's own error is raised
            group.share(_message(_REFUSAL, f"{type(error).__name__}: {error}"))


def _message(kind: bytes, text: str) -> bytes:
    """Returns what ranks compare: the kind, a digest of the text, and as much of the text as fits."""
    content = text.encode()
    return (kind + hashlib.sha256(content).digest() + content)[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")


def _text(message: bytes) -> str:
    return message[1 + hashlib.sha256().digest_size :].rstrip(bytes(1)).decode(errors="replace")


def _on_host(group: Group, operands: dict[str, Any], compute: Any) -> Arrays:
    """Returns the results in NumPy arrays."""
    if group.device is not None:
        raise NotSupported(
            f"backend='reference' in a group of GPU {group.device}: must be a group of host memory; leave it out, or "
            "use cutlass_py_attn.distributed.simulated"
        )
    check_is_numpy(operands)
    found: Arrays = compute(Host(group), operands)
    return found
