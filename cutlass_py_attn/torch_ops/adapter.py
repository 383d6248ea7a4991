"""Adapter: functions with the signature of an ATen operator, run in the caller's array library and on its stream."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, ParamSpec, TypeVar

import numpy as np

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.errors import DriverError, NotSupported
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.scalars import FLAG, SCALARS, Scalar, integer_of, number_of
from cutlass_py_attn.problem.tensors import BMHK
from cutlass_py_attn.refusals import Refusal, refuse
from cutlass_py_attn.runtime import driver, lifetimes
from cutlass_py_attn.runtime.frameworks import CUPY, FRAMEWORKS, TORCH
from cutlass_py_attn.score_terms.dropout import Dropout

_NAMESPACES: Final = {"numpy": "numpy", "cupy": "cupy", "torch": "torch", "jax": "jax.numpy", "jaxlib": "jax.numpy"}
_OPTIONAL: Final = ("grad_out", "bias", "attn_bias", "alibi_slopes", "seqlen_k", "seqused_k", "cu_seqlens_q",
                    "cu_seqlens_k", "cum_seq_q", "cum_seq_k", "q_descale", "k_descale", "v_descale")  # fmt: skip
_HOST_DEVICE_TYPES: Final = (1, 3)  # DLPack: kDLCPU, kDLCUDAHost
_CUDA_DEVICE_TYPES: Final = (2, 13)  # DLPack: kDLCUDA, kDLCUDAManaged


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call(ABC):
    """The arguments of one call: one field for each argument of the operator, in the operator's order.

    stream, backend, kernels: as in `attention_forward`. names: argument name of `attention_forward` or
    `attention_backward` -> argument name of the operator, where they differ. heads_first: tensors are (B, H, M, K).
    """

    names: ClassVar[Mapping[str, str]] = {}
    heads_first: ClassVar[bool] = False

    stream: object = None
    backend: str = "auto"
    kernels: Callable[[Build], Artifact] | None = None

    @abstractmethod
    def ranks(self) -> dict[str, tuple[int, ...]]:
        """Returns the allowed ranks (numbers of axes) of each array argument by name."""

    @abstractmethod
    def refusals(self) -> list[Refusal]:
        """Returns why the other arguments are refused. Called only if every array has an allowed rank."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardCall(Call):
    """A call of a forward. philox_seed, philox_offset: seed and offset of dropout, as `dropout_of` accepts them."""

    philox_seed: Any = 0
    philox_offset: Any = 0


P = ParamSpec("P")
C = TypeVar("C", bound=Call)
R = TypeVar("R")


def adapter(schema: Callable[P, C]) -> Callable[[Callable[[C], R]], Callable[P, R]]:
    """Decorates a function of one Call so that it takes the arguments of `schema`, the dataclass of that Call.

    The decorated function runs with `stream` as the current stream of its array library. A NotSupported that it raises
    names the arguments as the operator does.
    """

    def decorate(body: Callable[[C], R]) -> Callable[P, R]:
        def mirrored(*arguments: P.args, **keywords: P.kwargs) -> R:
            call = schema(*arguments, **keywords)
            call, wrong_scalars = _with_python_numbers(call)
            refusals = [*wrong_scalars, *(operand_refusals(call) or call.refusals())]
            if refusals:
                raise NotSupported(refusals)
            try:
                with use_stream(call):
                    return body(call)
            except NotSupported as error:
                raise NotSupported(_renamed(refusal, call) for refusal in error.refusals) from error

        functools.update_wrapper(mirrored, body, ("__module__", "__name__", "__qualname__", "__doc__"), ())
        mirrored.__signature__ = inspect.signature(schema)  # type: ignore[attr-defined]
        return mirrored

    return decorate


CUSTOM_MASK_TYPE: Final = Scalar(integer_of, "must be 0 (none), 1 (top left) or 2 (bottom right)", "choose one", 0)
_WINDOW: Final = Scalar(integer_of, "must be an int, or None for no limit", "correct it", None)
# The arguments that are no arrays, without those that `attention_forward` and `attention_backward` check.
_SCALARS: Final[dict[str, Scalar]] = {
    **dict.fromkeys(("is_causal", "compute_log_sumexp", "bias_requires_grad", "return_debug_mask"), FLAG),
    **dict.fromkeys(("shared_storage_dqdkdv", "deterministic"), FLAG),
    **dict.fromkeys(("window_size", "window_size_left", "window_size_right"), _WINDOW),
    "custom_mask_type": CUSTOM_MASK_TYPE,
    "num_splits_key": SCALARS["num_splits_key"],
}


def _with_python_numbers(call: C) -> tuple[C, list[Refusal]]:
    """Returns the call with Python numbers, and why arguments that are no arrays are refused.

    An argument of the wrong type is replaced by its default, so that the others can be checked.
    """
    changes: dict[str, Any] = {}
    refusals: list[Refusal] = []
    for field in dataclasses.fields(call):
        if scalar := _SCALARS.get(field.name):
            given = getattr(call, field.name)
            found = scalar.refusals(field.name, given)
            changes[field.name] = scalar.default if found else scalar.normalised(given)
            refusals += found
    return dataclasses.replace(call, **changes), refusals


def _renamed(refusal: Refusal, call: Call) -> Refusal:
    """Returns the refusal with the operator's argument names, and with the order of axes if the caller uses another."""
    is_transposed = call.heads_first and refusal.name in BMHK and refusal.field.endswith(".shape")
    if call.names:
        pattern = re.compile(rf"\b({'|'.join(map(re.escape, call.names))})\b")
        refusal = refusal.renamed(lambda text: pattern.sub(lambda match: call.names[match[1]], text))
    remedy = f"{refusal.remedy} (shapes are (batch, seqlen, heads, head_dim))" if is_transposed else refusal.remedy
    return dataclasses.replace(refusal, remedy=remedy)


def namespace(array: object) -> Any:
    """Returns the module that has the array functions of the array's library; None if the library is unknown."""
    return sys.modules.get(_NAMESPACES.get(_library(array), ""))


@contextlib.contextmanager
def use_stream(call: Call) -> Iterator[None]:
    """Makes the call's stream the current stream of query's library; it waits for the previous one.

    Without a stream, the library's current stream stays, and the kernels are launched on it.

    Operations of the library are then ordered with the kernels, and memory that it allocates is freed in stream order.
    The arrays of the call, which were allocated for another stream, live until its work is complete.
    NumPy has no streams. JAX does not expose its streams: launches wait for them, and JAX callers wait for launches.
    """
    query: Any = getattr(call, "query", None)
    library, stream = _library(query), call.stream
    if stream is None or library not in FRAMEWORKS or not _is_cuda_array(query):
        yield
        return
    ordinal, handle = int(query.__dlpack_device__()[1]), driver.stream_handle(stream)
    if FRAMEWORKS[library].current_stream(ordinal) == handle:
        yield
        return
    with _kept_alive(call, library, handle, driver.device(ordinal)):
        if library == "torch":
            torch_stream = TORCH.stream(handle, ordinal)
            torch_stream.wait_stream(sys.modules["torch"].cuda.current_stream(ordinal))
            with sys.modules["torch"].cuda.stream(torch_stream):
                yield
            return
        cuda = sys.modules["cupy"].cuda
        with cuda.Device(ordinal):
            cupy_stream = CUPY.stream(handle, ordinal)
            cupy_stream.wait_event(cuda.get_current_stream().record())
            with cupy_stream:
                yield


@contextlib.contextmanager
def _kept_alive(call: Call, library: str, handle: int, device: driver.Device) -> Iterator[None]:
    """Keeps the call's arrays alive until the work on its stream is complete."""
    values = (getattr(call, each.name) for each in dataclasses.fields(call))
    arrays = [(library, value) for value in values if _library(value) == library and _is_cuda_array(value)]
    try:
        yield
    except BaseException:
        with contextlib.suppress(DriverError), device.current():
            lifetimes.keep(arrays, handle, call.stream, device)
        raise
    with device.current():
        lifetimes.keep(arrays, handle, call.stream, device)


def _library(value: object) -> str:
    """Returns the name of the package that defines the value's class."""
    return type(value).__module__.split(".")[0]


def _is_cuda_array(value: Any) -> bool:
    return hasattr(value, "__dlpack_device__") and value.__dlpack_device__()[0] in _CUDA_DEVICE_TYPES


def operand_refusals(call: Call) -> list[Refusal]:
    """Returns why array arguments are refused: no array, several libraries or devices, or a rank not allowed."""
    refusals: list[Refusal] = []
    given = {name: (getattr(call, name), ranks) for name, ranks in call.ranks().items()}
    query = given["query"][0]
    for name, (array, ranks) in given.items():
        if array is None and name in _OPTIONAL:
            continue
        if namespace(array) is None:
            refusals.append(refuse(name, array, "must be a NumPy, CuPy, torch or JAX array", "convert it"))
        elif namespace(query) is None:
            continue  # reported for query; nothing can be compared with it
        elif namespace(query) is not namespace(array):
            rule = f"must be of {namespace(query).__name__} as query"
            refusals.append(refuse(name, array, rule, "convert it"))
        elif array.ndim not in ranks:
            rule = f"must have {' or '.join(map(str, ranks))} axes"
            refusals.append(refuse(f"{name}.shape", tuple(array.shape), rule, "reshape it"))
        elif str(getattr(array, "device", "")) != str(getattr(query, "device", "")):
            rule = f"must be on {query.device} as query, and is on {array.device}"
            refusals.append(refuse(name, array, rule, "move it"))
    return refusals


def options_of(call: Any) -> dict[str, Any]:
    """Returns the options that every operator has, as `attention_forward` and `attention_backward` take them."""
    return {
        "scale": call.scale,
        "dropout": dropout_of(call.dropout_p, call.philox_seed, call.philox_offset),
        "stream": call.stream,
        "backend": call.backend,
        "kernels": call.kernels,
    }


def dropout_of(dropout_p: float, philox_seed: Any, philox_offset: Any) -> Dropout | None:
    """Returns the Dropout of these arguments, None if dropout_p is 0.

    philox_seed, philox_offset: ints from 0 to 2**64 - 1, or int64 arrays in device memory. An array of one element in
    host memory, as PyTorch returns it, counts as an int; its sign bit is bit 63.
    """
    if number_of(dropout_p) == 0:
        return None
    return Dropout(dropout_p, _as_integer(philox_seed), _as_integer(philox_offset))


def _as_integer(value: Any) -> Any:
    """Returns a host value as an int, a device array as it is."""
    is_on_host = hasattr(value, "__dlpack_device__") and value.__dlpack_device__()[0] in _HOST_DEVICE_TYPES
    if isinstance(value, np.integer) or (is_on_host and value.shape in ((), (1,))):
        return int(value.item()) % 2**64
    return value
