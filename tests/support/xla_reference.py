"""The NumPy reference in place of the kernels: XLA's CPU client runs it for our custom call, from the call's payload.

So a program with several host devices runs as it does on GPUs: the plan and payload of every device's part, its
buffers, its random numbers. Nothing but the arithmetic is another.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Final

import jax
import numpy as np

from cutlass_py_attn.api import cpu_backend
from cutlass_py_attn.api.attention import AttentionRequest
from cutlass_py_attn.api.options import Options, VariableLength
from cutlass_py_attn.api.paged import Paged
from cutlass_py_attn.jax import handler
from cutlass_py_attn.jax.payload import Payload, unpack
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.quantization import SCALES
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.score_terms.dropout import Dropout

TARGET: Final = f"{handler.TARGET}_reference"
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")

computed: list[Problem] = []  # the problem of every call, in the order in which devices ran them
_lock = threading.Lock()
_word = ctypes.c_uint64.from_address


def register() -> None:
    """Registers TARGET with XLA's CPU client."""
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(_handler), platform="cpu")


def _execute(frame: int) -> int | None:
    """XLA_FFI_Handler: computes one call."""
    words = handler._FRAME_WORDS.from_address(frame)
    if words[1]:
        handler._describe(words[1])
        return None
    try:
        array = dict(handler._attributes(words))[handler.PAYLOAD]
        payload = unpack(ctypes.string_at(_word(array + 16).value, _word(array + 8).value))
        addresses = [_word(_word(words[9] + 8 * i).value + handler._BUFFER_DATA).value for i in range(words[7])]
        results = [_word(_word(words[14] + 8 * i).value + handler._BUFFER_DATA).value for i in range(words[12])]
        with _lock:
            computed.append(payload.problem)
        _compute(payload, addresses, results)
    except Exception as error:  # no exception may reach the C caller
        return handler._error(words[2], f"{type(error).__name__}: {error}")
    return None


_handler: Final = handler._FUNCTION(_execute)


def _compute(payload: Payload, addresses: list[int], results: list[int]) -> None:
    """Reads the operands, and writes the results."""
    problem = payload.problem
    given = {name: _view(at, *_kind(problem, name)) for name, at in zip(payload.operands, addresses, strict=True)}
    options = _options(problem, given)
    given.pop(handler.PHILOX, None)
    found = cpu_backend.compute(AttentionRequest(problem.direction, given, options))
    for name, at in zip(payload.results, results, strict=True):
        if name != handler.WORKSPACE:
            _view(at, found[name].shape, str(found[name].dtype))[...] = found[name]


def _options(problem: Problem, given: dict[str, Any]) -> Options:
    dropout = None
    sequences: VariableLength | Paged | None = None
    if handler.PHILOX in given:
        seed, offset = (int(number) for number in given[handler.PHILOX].view(np.uint64))
        dropout = Dropout(problem.dropout_p, seed, offset)
    if problem.sequences is not None:
        bounds = (given.get(name) for name in _LENGTHS)
        first, second, used = bounds
        sequences = VariableLength(first, second, problem.sequences.max_seqlen_q, problem.sequences.max_seqlen_k, used)
    if problem.pages is not None:
        starts = given.get("cu_seqlens_q")
        longest = None if starts is None else problem.pages.max_seqlen_q
        sequences = Paged(given["page_table"], given["seqused_k"], starts, longest, given.get("page_indptr"))
    return Options(
        mask=problem.mask,
        scale=problem.scale,
        softcap=problem.softcap,
        dropout=dropout,
        sequences=sequences,
        gradients=problem.gradients or ("query", "key", "value"),
        score_terms={name: given[name] for name, _ in problem.score_terms},
        deterministic=problem.deterministic,
        head_dim_value=problem.shape.head_dim_value if problem.value_in_key else None,
        block_size=problem.block_size,
        mask_program=problem.mask_program,
        mask_scalars=problem.mask_scalars,
        **{name: given.get(name) for name in ("bias", "alibi_slopes", "sinks", *SCALES)},
    )


def _kind(problem: Problem, name: str) -> tuple[tuple[int, ...], str]:
    """Returns shape and dtype of an operand."""
    if name == handler.PHILOX:
        return (4,), "uint32"
    if name == "logsumexp":
        return problem.shape.logsumexp, "float32"
    tensor: Tensor = getattr(problem, name, None) or problem.vectors()[name]
    return tensor.shape, tensor.dtype


def _view(address: int, shape: tuple[int, ...], dtype: str) -> Any:
    """Returns the buffer as an array."""
    count = int(np.prod(shape))
    raw = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(address) if count else b""
    return np.frombuffer(raw, dtype, count).reshape(shape)
