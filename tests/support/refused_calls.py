"""Refused calls: wrong options and arrays of the two functions, with what is refused."""

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

PHILOX = "an int from 0 to 2**64 - 1, or an int64 array on the device"
SEED = Tensor((1,), (1,), "int64", 8)
GRADS = {name: Tensor.contiguous(LENGTHS.of(name), "float16") for name in ("query", "key", "value")}


def call(*expected: str, **arguments: Any) -> Refused:
    """Returns a call and what it refuses."""
    return (lambda: called(**arguments)), list(expected)


def of_sequences(*expected: str, **changes: Any) -> Refused:
    """Returns a forward with wrong sequences and what it refuses."""
    return (lambda: called(base=LENGTHS, sequences=lengths(**changes))), list(expected)


OPTIONS: dict[str, Refused] = {
    "names and kinds": call(
        "option: one of mask, scale, bias", "option: one of mask, scale, bias", "mask: a mask object such as",
        "dropout: a Dropout object, or None", "backend: one of auto, gpu, reference",
        "sequences: a VariableLength or Paged object, or None",
        causal=True, deterministic=True, mask=None, backend="cpu", dropout=0.1, sequences=[0, 40],
    ),
    "a backward's names": call("option: grad_logsumexp, gradients, out", direction="backward", determinstic=True),
    "score terms that are not registered": call(
        "score_terms: registered terms", score_terms={"nothing": Tensor.contiguous((3,), "float32")}
    ),
    "score terms without names": call("score_terms: a dict of registered terms", score_terms=3),
    "seed and offset of two kinds": call(
        "philox_offset: the kind of philox_seed, 5 (int)", dropout=Dropout(0.1, 5, SEED)
    ),
    "seed and offset out of range": call(
        f"philox_seed: {PHILOX}", f"philox_offset: {PHILOX}", dropout=Dropout(0.1, -1, 2**64)
    ),
    "probability, seed and offset of other kinds": call(
        "dropout_p: a probability from 0 to 1", f"philox_seed: {PHILOX}", f"philox_offset: {PHILOX}",
        dropout=Dropout("0.1", 1.5, True),  # type: ignore[arg-type]
    ),
    "packed and kernels of other kinds": call(
        "kernels: a function from a Build to its Artifact", "packed: True or False",
        direction="backward", packed=1, kernels=5,
    ),
    "seed and offset of other arrays": call(
        "philox_seed: one int64", "philox_offset: one int64",
        dropout=Dropout(0.1, Tensor((1,), (1,), "int32"), Tensor((2,), (1,), "int64")),
    ),
    **{
        f"gradients of {names!r}": call(
            "gradients: some of query, key, value, bias, sinks in a tuple", direction="backward", gradients=names
        )
        for names in ((), None, "query", (["query"],), ("query", "output"))
    },
    "gradients named twice": call(
        "gradients: must name each once", direction="backward", gradients=("query", "key", "query")
    ),
    "gradients of what is not there": call(
        "gradients: come with the option bias", "gradients: come with the option sinks",
        direction="backward", gradients=("bias", "sinks"),
    ),
    "packed in part": call(
        "gradients: must name query, key, value with packed", direction="backward", gradients=("key",), packed=True
    ),
    "out of another kind": call("out: a Gradients object", direction="backward", out=5),
    "out that is not asked for": call("out.bias: bias in gradients", direction="backward", out=Gradients(bias=1)),
    "packed into out": call(
        "packed: False with out for grad_query, grad_value", "packed: must have the same shape",
        direction="backward", packed=True, base=LENGTHS, sequences=lengths(),
        given={"grad_query": GRADS["query"], "grad_value": GRADS["value"]},
    ),
}  # fmt: skip

SEQUENCES: dict[str, Refused] = {
    "sequences of one side": of_sequences("cu_seqlens_k: an int32 array", cu_seqlens_k=None),
    "longest sequences unknown": of_sequences(
        "max_seqlen_q: an int", "max_seqlen_k: an int", max_seqlen_q=None, max_seqlen_k=3.0
    ),
    "bounds that start late": of_sequences(
        "cu_seqlens_q: start with 0, never fall and end at most at the 40 tokens", cu_seqlens_q=np.array([1, 15, 40])
    ),
    "bounds that fall": of_sequences("cu_seqlens_k: at most at the 50 tokens", cu_seqlens_k=np.array([0, 50, 30])),
    "bounds behind the tokens, as far as 64 bits go": of_sequences(
        "cu_seqlens_q: at most at the 40 tokens", cu_seqlens_q=np.array([0, 15, 2**32 + 40])
    ),
    "longest sequences too short": of_sequences(
        "max_seqlen_q: at least the longest sequence, 25", "max_seqlen_k: at least the longest sequence, 30",
        max_seqlen_q=24, max_seqlen_k=29,
    ),
    "longest sequences too long": of_sequences("max_seqlen_q: from 0 to the 40 tokens", max_seqlen_q=41),
    "more keys used than there are": of_sequences("seqused_k: from 0 to the keys", seqused_k=np.array([30, 21])),
    "fewer keys used than none": of_sequences("seqused_k: from 0 to the keys", seqused_k=np.array([-1, 20])),
    "arrays of other shapes": of_sequences(
        "cu_seqlens_k: int32 array of shape (3,)", "seqused_k: int32 array of shape (2,)",
        cu_seqlens_k=np.array([0, 30, 50, 50]), seqused_k=np.array([1]),
    ),
    "arrays of other kinds": of_sequences(
        "cu_seqlens_q: int32 array of shape (3,)", "cu_seqlens_k: contiguous int32 array of shape (3,)",
        cu_seqlens_q=Tensor((3,), (1,), "int64"), cu_seqlens_k=Tensor((3,), (2,), "int32"),
    ),
    "bounds of nothing": of_sequences(
        "cu_seqlens_q: int32 array of shape (1,)", cu_seqlens_q=np.array(5), cu_seqlens_k=np.array([0])
    ),
    "batches of sequences": call("batch of query: must be 1 with cu_seqlens", sequences=lengths()),
}  # fmt: skip

KEY = Tensor.contiguous((2, 50, 3, 8), "float16")
ARRAYS: dict[str, Refused] = {
    "shape of logsumexp": call(
        "logsumexp: (2, 3, 64) float32",
        direction="backward", given={"logsumexp": Tensor.contiguous((2, 3, 40), "float32")},
    ),
    "dtype of logsumexp": call(
        "logsumexp: (2, 3, 64) float32",
        direction="backward", given={"logsumexp": Tensor.contiguous((2, 3, 64), "float16")},
    ),
    "logsumexp of sequences": call(
        "logsumexp: (2, 3, 32) float32", direction="backward", base=LENGTHS, sequences=lengths(),
        given={"logsumexp": Tensor.contiguous((1, 3, 40), "float32")},
    ),
    "options of other kinds, and arrays": call(
        "key.shape: (2, 50, 3, 16) to match query", "scale: a number", "deterministic: True or False",
        "window_size: an int of at least 1",
        direction="backward", scale="2", deterministic="no", mask=Causal("3"), given={"key": KEY},  # type: ignore[arg-type]
    ),
    "strides of logsumexp": call(
        "logsumexp.strides: contiguous",
        direction="backward", given={"logsumexp": Tensor((2, 3, 64), (384, 128, 2), "float32")},
    ),
    "address of logsumexp": call(
        "logsumexp.alignment: the 4 bytes",
        direction="backward", given={"logsumexp": Tensor((2, 3, 64), (192, 64, 1), "float32", 2)},
    ),
    "ranks, of what was given alone": call(
        "query.shape: 4-D [batch, seqlen, heads, head_dim]",
        given={"query": Tensor.contiguous((40, 3, 16), "float16")},
    ),
    "an operand, but not the results that follow from it": call(
        "key.shape: (2, 50, 3, 16) to match query", "window_size: at least 1",
        direction="backward", mask=Causal(0), given={"key": KEY},
    ),
    "a result that was given": call(
        "output.shape: (2, 40, 3, 24) to match query", "row stride of output: must not overlap itself",
        given={"output": Tensor((2, 40, 3, 16), (48, 0, 16, 1), "float16")},
    ),
}  # fmt: skip

ALL: dict[str, Refused] = {**OPTIONS, **SEQUENCES, **ARRAYS}
