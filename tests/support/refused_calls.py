"""Refused calls: wrong options and arrays of the two functions, with the exact error texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cutlass_py_attn.api.results import Gradients
from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.score_terms.dropout import Dropout
from tests.support.requests import LENGTHS, called, lengths

Refused = tuple[Callable[[], Problem], list[str]]

FORWARD_OPTIONS = (
    "mask, scale, bias, softcap, alibi_slopes, sinks, dropout, score_terms, sequences, backend, kernels, out, "
    "query_scale, key_scale, value_scale, stream"
)
ALL_GRADIENTS = "must be some of query, key, value, bias, sinks in a tuple; name at least one"
SPELLING = "must come together; pass {0} or do not name it"
PHILOX = "must be an int from 0 to 2**64 - 1, or an int64 array on the device"
BOUNDS = "must start with 0, never fall and end at most at the {0} tokens; correct it"
INT32 = "must be a contiguous int32 array of shape {0}; convert it"
SEED = Tensor((1,), (1,), "int64", 8)
GRADS = {name: Tensor.contiguous(LENGTHS.of(name), "float16") for name in ("query", "key", "value")}


def call(*reasons: str, **arguments: Any) -> Refused:
    """Returns a call and the reasons that it raises."""
    return (lambda: called(**arguments)), list(reasons)


def of_sequences(*reasons: str, **changes: Any) -> Refused:
    """Returns a forward with wrong sequences and the reasons that it raises."""
    return (lambda: called(base=LENGTHS, sequences=lengths(**changes))), list(reasons)


OPTIONS: dict[str, Refused] = {
    "names and kinds": call(
        f"option 'causal' is unknown: must be one of {FORWARD_OPTIONS}; pass mask=Causal()",
        f"option 'deterministic' is unknown: must be one of {FORWARD_OPTIONS}; check the spelling, or leave it out",
        "mask = None: must be a mask object such as Full() or Causal(); make one",
        "dropout = 0.1 (float): must be a Dropout object, or None; create one",
        "backend = 'cpu' (str): must be one of auto, gpu, reference; choose one",
        "sequences = [0, 40] (list): must be a VariableLength or Paged object, or None; create one",
        causal=True, deterministic=True, mask=None, backend="cpu", dropout=0.1, sequences=[0, 40],
    ),
    "a backward's names": call(
        f"option 'determinstic' is unknown: must be one of {FORWARD_OPTIONS.split(', out')[0]}, grad_logsumexp, "
        "gradients, out, packed, deterministic, num_splits_key, stream; did you mean deterministic?",
        direction="backward", determinstic=True,
    ),
    "score terms that are not registered": call(
        "score_terms has 'nothing': must be registered terms, of which there is none; call "
        "score_terms.register first",
        score_terms={"nothing": Tensor.contiguous((3,), "float32")},
    ),
    "score terms without names": call(
        "score_terms = 3 (int): must be a dict of registered terms, of which there is none, and their arrays; pass a "
        "dict",
        score_terms=3,
    ),
    "seed and offset of two kinds": call(
        "philox_seed = 5 (int) and philox_offset = array of shape (1,) and dtype int64 "
        "(cutlass_py_attn.problem.tensors.Tensor): must both be ints, or both int64 arrays on the device; convert one",
        dropout=Dropout(0.1, 5, SEED),
    ),
    "seed and offset out of range": call(
        f"philox_seed = -1 (int): {PHILOX}; correct it", f"philox_offset = {2**64} (int): {PHILOX}; correct it",
        dropout=Dropout(0.1, -1, 2**64),
    ),
    "probability, seed and offset of other kinds": call(
        "dropout_p = '0.1' (str): must be a probability from 0 to 1; pass a float",
        f"philox_seed = 1.5 (float): {PHILOX}; convert it",
        f"philox_offset = True: {PHILOX}; convert it",
        dropout=Dropout("0.1", 1.5, True),  # type: ignore[arg-type]
    ),
    "packed and kernels of other kinds": call(
        "kernels = 5 (int): must be a function from a Build to its Artifact, such as Folder(path), or None to compile "
        "them; pass one",
        "packed = 1 (int): must be True or False; pass one of them",
        direction="backward", packed=1, kernels=5,
    ),
    "seed and offset of other arrays": call(
        "philox_seed has shape (1,) and dtype int32: must be one int64; convert it",
        "philox_offset has shape (2,) and dtype int64: must be one int64; convert it",
        dropout=Dropout(0.1, Tensor((1,), (1,), "int32"), Tensor((2,), (1,), "int64")),
    ),
    **{
        f"gradients of {names!r}": call(
            f"gradients = {given}: {ALL_GRADIENTS}", direction="backward", gradients=names
        )
        for names, given in (
            ((), "() (tuple)"), (None, "None"), ("query", "'query' (str)"), ((["query"],), "(['query'],) (tuple)"),
            (("query", "output"), "('query', 'output') (tuple)"),
        )
    },
    "gradients named twice": call(
        "gradients names query 2 times: must name each once; leave the others out",
        direction="backward", gradients=("query", "key", "query"),
    ),
    "gradients of what is not there": call(
        f"gradients names bias, but there is no option bias: {SPELLING.format('bias')}",
        f"gradients names sinks, but there is no option sinks: {SPELLING.format('sinks')}",
        direction="backward", gradients=("bias", "sinks"),
    ),
    "packed in part": call(
        "packed with gradients = ('key',): must name query, key, value; leave packed False",
        direction="backward", gradients=("key",), packed=True,
    ),
    "out of another kind": call(
        "out = 5 (int): must be a Gradients object with arrays to write to, or None; create one",
        direction="backward", out=5,
    ),
    "out that is not asked for": call(
        "out has an array for bias, which gradients does not name: must come together; name it or leave it None",
        direction="backward", out=Gradients(bias=1),
    ),
    "packed into out": call(
        "packed with out for grad_query, grad_value: must be one of the two; leave one out",
        "packed with query (1, 40, 3, 16), key (1, 50, 3, 16) and value (1, 50, 3, 24): must have the same shape; "
        "leave packed False",
        direction="backward", packed=True, base=LENGTHS, sequences=lengths(),
        given={"grad_query": GRADS["query"], "grad_value": GRADS["value"]},
    ),
}  # fmt: skip

SEQUENCES: dict[str, Refused] = {
    "sequences of one side": of_sequences("cu_seqlens_k is None: must be an int32 array; pass it", cu_seqlens_k=None),
    "longest sequences unknown": of_sequences(
        "max_seqlen_q = None: must be an int; pass the longest sequence's length",
        "max_seqlen_k = 3.0 (float): must be an int; pass the longest sequence's length",
        max_seqlen_q=None, max_seqlen_k=3.0,
    ),
    "bounds that start late": of_sequences(
        f"cu_seqlens_q = [1, 15, 40]: {BOUNDS.format(40)}", cu_seqlens_q=np.array([1, 15, 40])
    ),
    "bounds that fall": of_sequences(
        f"cu_seqlens_k = [0, 50, 30]: {BOUNDS.format(50)}", cu_seqlens_k=np.array([0, 50, 30])
    ),
    "bounds behind the tokens, as far as 64 bits go": of_sequences(
        f"cu_seqlens_q = [0, 15, {2**32 + 40}]: {BOUNDS.format(40)}", cu_seqlens_q=np.array([0, 15, 2**32 + 40])
    ),
    "longest sequences too short": of_sequences(
        "max_seqlen_q = 24: must be at least the longest sequence, 25; raise it",
        "max_seqlen_k = 29: must be at least the longest sequence, 30; raise it",
        max_seqlen_q=24, max_seqlen_k=29,
    ),
    "longest sequences too long": of_sequences(
        "max_seqlen_q = 41: must be from 0 to the 40 tokens; pass the longest sequence's length",
        max_seqlen_q=41,
    ),
    "more keys used than there are": of_sequences(
        "seqused_k = [30, 21]: must be from 0 to the keys of each sequence; correct it", seqused_k=np.array([30, 21])
    ),
    "fewer keys used than none": of_sequences(
        "seqused_k = [-1, 20]: must be from 0 to the keys of each sequence; correct it", seqused_k=np.array([-1, 20])
    ),
    "arrays of other shapes": of_sequences(
        f"cu_seqlens_k has shape (4,), strides (1,) and dtype int32: {INT32.format((3,))}",
        f"seqused_k has shape (1,), strides (1,) and dtype int32: {INT32.format((2,))}",
        cu_seqlens_k=np.array([0, 30, 50, 50]), seqused_k=np.array([1]),
    ),
    "arrays of other kinds": of_sequences(
        f"cu_seqlens_q has shape (3,), strides (1,) and dtype int64: {INT32.format((3,))}",
        f"cu_seqlens_k has shape (3,), strides (2,) and dtype int32: {INT32.format((3,))}",
        cu_seqlens_q=Tensor((3,), (1,), "int64"), cu_seqlens_k=Tensor((3,), (2,), "int32"),
    ),
    "bounds of nothing": of_sequences(
        f"cu_seqlens_q has shape (), strides () and dtype int32: {INT32.format((1,))}",
        cu_seqlens_q=np.array(5), cu_seqlens_k=np.array([0]),
    ),
    "batches of sequences": call(
        "query has batch 2 with cu_seqlens: must be 1; concatenate the sequences in "
        "[1, tokens, heads, head_dim]",
        sequences=lengths(),
    ),
}  # fmt: skip

LSE = "as the forward returns it; pass that array"
ARRAYS: dict[str, Refused] = {
    "shape of logsumexp": call(
        f"logsumexp has shape (2, 3, 40) and dtype float32: must be (2, 3, 64) float32, {LSE}",
        direction="backward", given={"logsumexp": Tensor.contiguous((2, 3, 40), "float32")},
    ),
    "dtype of logsumexp": call(
        f"logsumexp has shape (2, 3, 64) and dtype float16: must be (2, 3, 64) float32, {LSE}",
        direction="backward", given={"logsumexp": Tensor.contiguous((2, 3, 64), "float16")},
    ),
    "logsumexp of sequences": call(
        f"logsumexp has shape (1, 3, 40) and dtype float32: must be (2, 3, 32) float32, {LSE}",
        direction="backward", base=LENGTHS, sequences=lengths(),
        given={"logsumexp": Tensor.contiguous((1, 3, 40), "float32")},
    ),
    "options of other kinds, and arrays": call(
        "key has shape (2, 50, 3, 8): must be (2, 50, 3, 16) to match query (2, 40, 3, 16), key (2, 50, 3, 8) and "
        "value (2, 50, 3, 24); reshape it",
        "scale = '2' (str): must be 0, a number with a magnitude from 1e-30 to 2**127, or None for 1/sqrt(head_dim), "
        "because the kernels compute in float32; correct it, or multiply query by a part of it",
        "deterministic = 'no' (str): must be True or False; pass one of them",
        "window_size = '3' (str): must be an int of at least 1, or None for no window; correct it",
        direction="backward", scale="2", deterministic="no",
        mask=Causal("3"), given={"key": Tensor.contiguous((2, 50, 3, 8), "float16")},  # type: ignore[arg-type]
    ),
    "strides of logsumexp": call(
        "logsumexp is strided or misaligned: must be contiguous and 4-byte aligned; copy it",
        direction="backward", given={"logsumexp": Tensor((2, 3, 64), (384, 128, 2), "float32")},
    ),
    "address of logsumexp": call(
        "logsumexp is strided or misaligned: must be contiguous and 4-byte aligned; copy it",
        direction="backward", given={"logsumexp": Tensor((2, 3, 64), (192, 64, 1), "float32", 2)},
    ),
    "ranks, of what was given alone": call(
        "query has shape (40, 3, 16) and strides (48, 16, 1): must be 4-D [batch, seqlen, heads, head_dim]; "
        "add the missing axes with size 1",
        given={"query": Tensor.contiguous((40, 3, 16), "float16")},
    ),
    "an operand, but not the results that follow from it": call(
        "key has shape (2, 50, 3, 8): must be (2, 50, 3, 16) to match query (2, 40, 3, 16), key (2, 50, 3, 8) and "
        "value (2, 50, 3, 24); reshape it",
        "window_size = 0: must be an int of at least 1, or None for no window; correct it",
        direction="backward", mask=Causal(0), given={"key": Tensor.contiguous((2, 50, 3, 8), "float16")},
    ),
    "a result that was given": call(
        "output has shape (2, 40, 3, 16): must be (2, 40, 3, 24) to match query (2, 40, 3, 16), "
        "key (2, 50, 3, 16) and value (2, 50, 3, 24); reshape it",
        "output has row stride 0: an output must not overlap itself; allocate it in full",
        given={"output": Tensor((2, 40, 3, 16), (48, 0, 16, 1), "float16")},
    ),
}  # fmt: skip

ALL: dict[str, Refused] = {**OPTIONS, **SEQUENCES, **ARRAYS}
