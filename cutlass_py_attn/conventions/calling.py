"""Calling: functions whose signature is a foreign schema, run in the caller's library and on the caller's stream."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, ParamSpec, TypeVar

import numpy as np

from cutlass_py_attn import driver
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.guests import CUPY, TORCH
from cutlass_py_attn.philox import Dropout
from cutlass_py_attn.plan import Build
from cutlass_py_attn.problem import BMHK

_NAMESPACES: Final = {"numpy": "numpy", "cupy": "cupy", "torch": "torch", "jax": "jax.numpy", "jaxlib": "jax.numpy"}
_OPTIONAL: Final = ("grad_out", "bias", "attn_bias", "alibi_slopes", "seqlen_k", "seqused_k", "cu_seqlens_q",
                    "cu_seqlens_k", "cum_seq_q", "cum_seq_k")  # fmt: skip
_HOST_KINDS: Final = (1, 3)  # DLPack's device types of plain and of pinned host memory
_CUDA_KINDS: Final = (2, 13)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call(ABC):
    """The arguments of one call: a field for each argument of the schema, in its order.

    A dataclass is the signature of such a function, for schemas have more arguments than a function here may.
    stream, backend, kernels: as `attention_forward` has them. names: what `attention_forward` and
    `attention_backward` call an argument, and what the schema does. heads_first: tensors are [B, H, M, K].
    """

    names: ClassVar[Mapping[str, str]] = {}
    heads_first: ClassVar[bool] = False

    stream: object = None
    backend: str = "auto"
    kernels: Callable[[Build], Artifact] | None = None

    @abstractmethod
    def ranks(self) -> dict[str, tuple[int, ...]]:
        """The arrays by name, and how many axes each may have."""

    @abstractmethod
    def objections(self) -> list[str]:
        """What is wrong with the other arguments, where the arrays have the right ranks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardCall(Call):
    """philox_seed, philox_offset: where dropout's random numbers start, in the forms that `dropout_of` takes."""

    philox_seed: Any = 0
    philox_offset: Any = 0


P = ParamSpec("P")
C = TypeVar("C", bound=Call)
R = TypeVar("R")


def adapter(schema: Callable[P, C]) -> Callable[[Callable[[C], R]], Callable[P, R]]:
    """Makes of a function of one Call a function with the arguments of the schema, a dataclass of that Call.

    The function runs with `stream` as its library's current stream. NotSupported of whatever it calls comes out
    under the schema's names.
    """

    def decorate(body: Callable[[C], R]) -> Callable[P, R]:
        def mirrored(*arguments: P.args, **keywords: P.kwargs) -> R:
            call = schema(*arguments, **keywords)
            reasons = operand_objections(call) or call.objections()
            if reasons:
                raise NotSupported(reasons)
            try:
                with on_stream(getattr(call, "query", None), call.stream):
                    return body(call)
            except NotSupported as error:
                raise NotSupported(_renamed(reason, call) for reason in error.reasons) from error

        functools.update_wrapper(mirrored, body, ("__module__", "__name__", "__qualname__", "__doc__"), ())
        mirrored.__signature__ = inspect.signature(schema)  # type: ignore[attr-defined]
        return mirrored

    return decorate


def _renamed(reason: str, call: Call) -> str:
    """The reason under the schema's names; the order of axes is said where it is not the caller's."""
    turned = call.heads_first and reason.split()[0] in BMHK and " shape " in reason
    if call.names:
        pattern = rf"\b({'|'.join(map(re.escape, call.names))})\b"
        reason = re.sub(pattern, lambda found: call.names[found[1]], reason)
    return f"{reason} (shapes as [batch, seqlen, heads, head_dim])" if turned else reason


def namespace(array: object) -> Any:
    """The module with the functions of the array's library; None for a library that is unknown."""
    return sys.modules.get(_NAMESPACES.get(type(array).__module__.split(".")[0], ""))


@contextlib.contextmanager
def on_stream(query: Any, stream: object) -> Iterator[None]:
    """`stream`, a CUstream in any form, is the current stream of query's library, and waits for the one before.

    What the library computes then is in the order of the kernels, and memory that it takes is given back in it.
    NumPy has no streams. JAX hides its own: launches wait for them, and JAX callers wait for the launches.
    """
    library = type(query).__module__.split(".")[0]
    if library not in ("cupy", "torch") or query.__dlpack_device__()[0] not in _CUDA_KINDS:
        yield
        return
    cuda, ordinal, handle = sys.modules[library].cuda, int(query.__dlpack_device__()[1]), driver.stream_handle(stream)
    if library == "torch":
        ours = TORCH.stream(handle, ordinal)
        ours.wait_stream(cuda.current_stream(ordinal))
        with cuda.stream(ours):
            yield
        return
    with cuda.Device(ordinal):
        ours = CUPY.stream(handle, ordinal)
        ours.wait_event(cuda.get_current_stream().record())
        with ours:
            yield


def operand_objections(call: Call) -> list[str]:
    """Arrays that are no arrays, of several libraries or devices, or with a wrong number of axes."""
    found: list[str] = []
    given = {name: (getattr(call, name), ranks) for name, ranks in call.ranks().items()}
    query = given["query"][0]
    for name, (array, ranks) in given.items():
        if array is None and name in _OPTIONAL:
            continue
        if namespace(array) is None:
            kind = f"{type(array).__module__}.{type(array).__qualname__}"
            found.append(f"{name} is a {kind}: must be a NumPy, CuPy, torch or JAX array; convert it")
        elif namespace(query) is None:
            continue  # said of query; nothing can be compared with it
        elif namespace(query) is not namespace(array):
            libraries = namespace(array).__name__, namespace(query).__name__
            found.append(f"{name} is of {libraries[0]} and query of {libraries[1]}: must be of one; convert it")
        elif array.ndim not in ranks:
            allowed = " or ".join(map(str, ranks))
            found.append(f"{name} has shape {tuple(array.shape)}: must have {allowed} axes; reshape it")
        elif str(getattr(array, "device", "")) != str(getattr(query, "device", "")):
            found.append(f"{name} is on {array.device} and query on {query.device}: must be on one; move it")
    return found


def options_of(call: Any) -> dict[str, Any]:
    """The options that every schema has, as `attention_forward` and `attention_backward` take them."""
    return {
        "scale": call.scale,
        "dropout": dropout_of(call.dropout_p, call.philox_seed, call.philox_offset),
        "stream": call.stream,
        "backend": call.backend,
        "kernels": call.kernels,
    }


def dropout_of(dropout_p: float, philox_seed: Any, philox_offset: Any) -> Dropout | None:
    """Dropout with seed and offset as ints from 0 to 2**64 - 1, or as int64 arrays in device memory.

    An array of one number in host memory, as PyTorch gives them, counts as an int; its sign is the top bit. None
    where nothing is dropped.
    """
    return Dropout(dropout_p, _number(philox_seed), _number(philox_offset)) if dropout_p != 0 else None


def _number(value: Any) -> Any:
    is_on_host = hasattr(value, "__dlpack_device__") and value.__dlpack_device__()[0] in _HOST_KINDS
    if isinstance(value, np.integer) or (is_on_host and value.shape in ((), (1,))):
        return int(value.item()) % 2**64
    return value
