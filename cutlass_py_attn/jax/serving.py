"""append_to_cache and merge_states in JAX: each is one XLA custom call, planned and compiled when it is lowered.

An append returns its caches. They are the operands' memory if the caller donates them, as in

    step = jax.jit(append_to_cache, donate_argnames=("key_cache", "value_cache"))

and copies of the whole caches if not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla

from cutlass_py_attn.api.calls import default_kernels
from cutlass_py_attn.api.options import backend_refusals
from cutlass_py_attn.api.unknown_options import refuses_unknown_options
from cutlass_py_attn.artifact import Artifact, first_available
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.jax import calls, host_threads, primitive
from cutlass_py_attn.jax.handler import KEY, PAYLOAD, TARGET
from cutlass_py_attn.jax.payload import Payload, key_of
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.append import plan_append
from cutlass_py_attn.plan.merge import plan_merge
from cutlass_py_attn.problem.append import AppendProblem
from cutlass_py_attn.problem.merge import LOGSUMEXPS, MergeProblem
from cutlass_py_attn.problem.scalars import integer_of
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.reference import serving as reference
from cutlass_py_attn.refusals import Refusal, refuse

Arrays = dict[str, Any]
Kernels = Callable[[Build], Artifact]


@refuses_unknown_options()
def append_to_cache(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slots: Any,
    *,
    key_scale: Any = None,
    value_scale: Any = None,
    kernels: Kernels | None = None,
    arch: str | None = None,
    backend: str = "auto",
) -> tuple[Any, ...]:
    """Returns the caches with the key and value rows of new tokens, in the memory of the caches that are donated.

    key: (tokens, num_heads_key, head_dim) float16, bfloat16 or float32.
    value: (tokens, num_heads_key, head_dim_value), of the same dtype.
    key_cache, value_cache: (num_pages, page_size, num_heads_key, columns) in the dtype of key, float8_e4m3fn or uint8.
        value_cache of a latent cache has the dtype of value.
    slots: (tokens,) int32 or int64; a token whose slot is negative, or beyond the cache, is skipped.
    key_scale, value_scale: as in `cutlass_py_attn.append_to_cache`.
    kernels, arch, backend: as in `attention`.

    Returns (key_cache, value_cache); with a scale for each row, (key_cache, value_cache, key_scale, value_scale); of a
    latent cache (key_cache, value_cache, key_scale).
    `cutlass_py_attn.append_to_cache` says what is stored. On several devices, call it inside jax.shard_map. It has no
    derivative.

    NotSupported lists every reason when the call is traced; the other errors are those of `attention`.
    """
    given = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache, "slots": slots}
    scales = {"key_scale": key_scale, "value_scale": value_scale}
    given |= {name: scale for name, scale in scales.items() if scale is not None}
    arrays, refusals = _read(given, kernels, arch, backend)
    described = {name: _described(array) for name, array in arrays.items()}
    if "slots" in described and described["slots"].dtype == "int32":
        described["slots"] = Tensor.contiguous(described["slots"].shape, "int64")
    if len(described) < len(given):
        raise NotSupported(refusals)
    problem = AppendProblem(**described)
    _expect_none([*refusals, *problem.refusals()])
    if problem.is_empty:
        return tuple(arrays[name] for name in problem.outputs)
    call = _Call(problem, kernels, arch, backend == "reference")
    found = _traced(call, arrays)
    return tuple(found[name] for name in problem.outputs)


@refuses_unknown_options()
def merge_states(
    output_a: Any,
    logsumexp_a: Any,
    output_b: Any,
    logsumexp_b: Any,
    *,
    cu_seqlens_q: Any = None,
    max_seqlen_q: int | None = None,
    kernels: Kernels | None = None,
    arch: str | None = None,
    backend: str = "auto",
) -> tuple[Any, Any]:
    """Returns output and logsumexp of two partial results, as `cutlass_py_attn.merge_states` does.

    output_a, output_b: (batch, num_queries, num_heads, head_dim_value) float16, bfloat16 or float32, of one dtype.
        output_a may also be float32 beside an output_b of 16 bits: a running total of many parts, as the output is.
    logsumexp_a, logsumexp_b: (batch, num_heads, num_queries) float32, as `attention` returns them; or with the padding
        of its rows, (batch, num_heads, ceil32(num_queries)), as `attention_forward` does.
    cu_seqlens_q, max_seqlen_q: of packed outputs (1, tokens, num_heads, head_dim_value), whose logsumexps are (count,
        num_heads, max_seqlen_q); max_seqlen_q is a number that is known at trace time.
    kernels, arch, backend: as in `attention`.

    The logsumexp that it returns has the shape of logsumexp_a. On several devices, call it inside jax.shard_map. It has
    no derivative.

    NotSupported lists every reason when the call is traced; the other errors are those of `attention`.
    """
    given = {"output_a": output_a, "logsumexp_a": logsumexp_a, "output_b": output_b, "logsumexp_b": logsumexp_b}
    given |= {} if cu_seqlens_q is None else {"cu_seqlens_q": cu_seqlens_q}
    arrays, refusals = _read(given, kernels, arch, backend)
    if len(arrays) < len(given):
        raise NotSupported(refusals)
    described = {name: _described(array) for name, array in arrays.items()}
    number = None if max_seqlen_q is None else integer_of(max_seqlen_q)
    problem = MergeProblem(
        **described, output=described["output_a"], max_seqlen_q=max_seqlen_q if number is None else number
    )
    problem, wrong_logsumexps = _with_padded_logsumexps(problem)
    _expect_none([*refusals, *problem.refusals(), *wrong_logsumexps])
    if problem.is_packed:
        arrays["output"] = jnp.zeros(problem.output.shape, problem.output.dtype)  # rows that belong to no sequence
    if problem.is_empty:
        return jnp.zeros_like(arrays["output_a"]), jnp.full_like(arrays["logsumexp_a"], jnp.inf)
    given_width = arrays["logsumexp_a"].shape[2]
    arrays |= {name: _padded(arrays[name], problem.logsumexp_shape[2]) for name in LOGSUMEXPS}
    found = _traced(_Call(problem, kernels, arch, backend == "reference"), arrays)
    return found["output"], found["logsumexp"][:, :, :given_width]


def _with_padded_logsumexps(problem: MergeProblem) -> tuple[MergeProblem, list[Refusal]]:
    """Returns the problem with the padding of logsumexp's rows, and why the given ones have another shape."""
    bounds, rows = problem.cu_seqlens_q, problem.max_seqlen_q
    if bounds is None or rows is None:
        is_readable = bounds is None and rows is None
    else:
        is_readable = isinstance(rows, int) and rows >= 0 and len(bounds.shape) == 1 and bounds.shape[0] > 0
    if not is_readable or len(problem.output_a.shape) != 4:
        return problem, []  # which `problem.refusals` refuses
    padded = problem.logsumexp_shape
    bare = (*padded[:2], problem.num_queries)
    given = {name: getattr(problem, name) for name in LOGSUMEXPS}
    rule = f"must be {bare} as `attention` returns it, or {padded} as attention_forward does"
    remedy = (
        "pass that, and of the residual of dot_product_attention jax.numpy.swapaxes(residual, 1, 2).astype('float32')"
    )
    wrong = [
        refuse(f"{name}.shape", tensor.shape, rule, remedy)
        for name, tensor in given.items()
        if tensor.shape not in (bare, padded)
    ]
    with_padding: dict[str, Any] = {name: Tensor.contiguous(padded, each.dtype) for name, each in given.items()}
    return replace(problem, **with_padding), wrong


def _padded(logsumexp: Any, rows: int) -> Any:
    """Returns a logsumexp with `rows` rows; those of the padding are +inf."""
    padding = [(0, 0, 0), (0, 0, 0), (0, rows - logsumexp.shape[2], 0)]
    return jax.lax.pad(logsumexp, jnp.asarray(jnp.inf, logsumexp.dtype), padding)


def _read(
    given: Mapping[str, Any], kernels: object, arch: object, backend: object
) -> tuple[dict[str, Any], list[Refusal]]:
    """Returns the arrays, and why arrays or options are refused."""
    arrays, refusals = {}, []
    for name, value in given.items():
        try:
            if value is None:
                raise TypeError("None has no elements")
            arrays[name] = jnp.asarray(value)
        except Exception as error:  # the library of an array decides its type
            refusals.append(refuse(name, value, f"must be an array that JAX takes ({error})", "convert it"))
    refusals += backend_refusals(backend)
    if kernels is not None and not (callable(kernels) and isinstance(kernels, Hashable)):
        rule = "must be a hashable function that returns the Artifact of a Build, such as Folder(path), or None"
        refusals.append(refuse("kernels", kernels, rule, "pass one"))
    refusals += () if arch is None else planner.arch_refusals(arch)
    refusals += [
        refuse(name, array, "must be whole on a device, and an Explicit mesh splits it", "call it inside jax.shard_map")
        for name, array in arrays.items()
        if _is_split(array)
    ]
    return arrays, refusals


def _is_split(array: Any) -> bool:
    """Returns whether the type of an array says that an Explicit mesh splits it."""
    return any(entry is not None for entry in jax.typeof(array).sharding.spec)


def _expect_none(refusals: list[Refusal]) -> None:
    if refusals:
        raise NotSupported(refusals)


def _described(array: Any) -> Tensor:
    return Tensor.contiguous(tuple(array.shape), str(array.dtype))


@dataclass(frozen=True, slots=True, weakref_slot=True)  # JAX keeps weak references to the parameters of a primitive
class _Call:
    """The static arguments of a call. on_host: whether the reference computes it."""

    problem: AppendProblem | MergeProblem
    kernels: Kernels | None
    arch: str | None
    on_host: bool

    @property
    def results(self) -> dict[str, Tensor]:
        """Layouts of the results by name."""
        problem = self.problem
        if isinstance(problem, AppendProblem):
            return {name: getattr(problem, name) for name in problem.outputs}
        return {"output": problem.output, "logsumexp": Tensor.contiguous(problem.logsumexp_shape, "float32")}

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands, in order."""
        names = self.problem.tensors()
        if isinstance(self.problem, MergeProblem) and not self.problem.is_packed:
            names.pop("output")
        return tuple(names)


@functools.partial(jax.jit, static_argnums=0)
def _traced(call: _Call, operands: Arrays) -> Arrays:
    """Adds the call to the traced program. Under vmap, one call for each element. JAX traces equal calls once."""
    run = jax.custom_batching.sequential_vmap(functools.partial(_run, call))
    once = jax.custom_jvp(run)
    once.defjvp(_refuse_derivative)
    return calls.as_varying(once(operands), operands)


def _refuse_derivative(*_: Any) -> NoReturn:
    raise NotSupported(
        "append_to_cache or merge_states is differentiated: must not be, for it has no derivative; pass "
        "jax.lax.stop_gradient(...) of its operands"
    )


def _run(call: _Call, operands: Arrays) -> Arrays:
    """Adds the kernel, or the host callback of the reference."""
    if call.on_host:
        host_threads.expect_enough(operands)
        shapes = {name: jax.ShapeDtypeStruct(it.shape, jnp.dtype(it.dtype)) for name, it in call.results.items()}
        host = functools.partial(_on_host, call)
        computed: Arrays = jax.pure_callback(host, shapes, operands, vmap_method="sequential")
        return computed
    if "slots" in operands:
        operands = {**operands, "slots": _words(operands["slots"])}
    found = _launch.bind(*(operands[name] for name in call.operands), call=call)
    return dict(zip(call.results, found, strict=True))


def _words(slots: Any) -> Any:
    """Returns int32 slots as the two words of int64 numbers, which JAX has only with jax_enable_x64."""
    return slots if slots.dtype == jnp.int64 else jnp.stack([slots, slots >> 31], axis=-1)


def _on_host(call: _Call, operands: Arrays) -> Arrays:
    """Computes the results by the NumPy reference."""
    arrays = {name: np.asarray(array) for name, array in operands.items()}
    if isinstance(call.problem, MergeProblem):
        arrays.pop("output", None)
        output, logsumexp = reference.merge(**arrays)
        return {"output": output.astype(arrays["output_a"].dtype), "logsumexp": logsumexp.astype(np.float32)}
    arrays |= {name: arrays[name].copy() for name in call.problem.outputs}
    for name in ("key", "value"):
        slots = arrays["slots"].astype(np.int64)
        reference.append(arrays[name], arrays[f"{name}_cache"], slots, arrays.get(f"{name}_scale"))
    return {name: arrays[name] for name in call.problem.outputs}


@functools.lru_cache(maxsize=primitive.MAX_PAYLOADS)
def payload_of(call: _Call) -> bytes:
    """Returns the packed payload of the call's kernel."""
    arch = planner.targets_of(primitive.target_of(call.arch)[0])[-1]
    problem = call.problem
    plan = plan_append(problem, arch) if isinstance(problem, AppendProblem) else plan_merge(problem, arch)
    _, artifact = first_available([plan], call.kernels or default_kernels())
    return Payload(None, plan, artifact, call.operands, tuple(call.results)).pack()


def _abstract_results(*_: Any, call: _Call) -> list[jax.core.ShapedArray]:
    """Returns the results' types. They are sharded over no axis of the mesh, as those of every custom call."""
    sharding = jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), jax.sharding.PartitionSpec())
    return [jax.core.ShapedArray(it.shape, jnp.dtype(it.dtype), sharding=sharding) for it in call.results.values()]


def _lower(context: Any, *operands: Any, call: _Call) -> Any:
    """Lowers the primitive to an XLA custom call, whose results have the memory of the operands of their names."""
    data = payload_of(call)
    outputs = [jax.ShapeDtypeStruct(it.shape, jnp.dtype(it.dtype)) for it in call.results.values()]
    attributes = {KEY: np.int64(key_of(data)), PAYLOAD: np.frombuffer(data, np.uint8)}
    places = {name: number for number, name in enumerate(call.operands)}
    aliases = {places[name]: number for number, name in enumerate(call.results) if name in places}

    def custom_call(*arrays: Any) -> Any:
        return jax.ffi.ffi_call(TARGET, outputs, input_output_aliases=aliases)(*arrays, **attributes)

    return mlir.lower_fun(custom_call, multiple_results=True)(context, *operands)


_launch: Final = Primitive("cutlass_py_attn_serving")
_launch.multiple_results = True
_launch.def_abstract_eval(_abstract_results)
_launch.def_impl(functools.partial(xla.apply_primitive, _launch))
mlir.register_lowering(_launch, _lower)
