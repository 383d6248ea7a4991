"""Calls: one pass of attention as an XLA custom call, planned when it is traced, and folded into one under vmap."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from cutlass_py_attn import attention, driver, launch, on_cpu, planner
from cutlass_py_attn.arrays import Array
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.device import architecture
from cutlass_py_attn.errors import NoDevice
from cutlass_py_attn.jax.handler import KEY, PAYLOAD, PHILOX, TARGET, WORKSPACE
from cutlass_py_attn.jax.payload import Payload, key_of
from cutlass_py_attn.masks import Mask
from cutlass_py_attn.options import Settings, VariableLength
from cutlass_py_attn.philox import Dropout
from cutlass_py_attn.plan import Build
from cutlass_py_attn.problem import BMHK, OPERANDS, Problem, Tensor

Arrays = dict[str, Any]

KEPT_PAYLOADS: Final = 256
_BOUNDS: Final = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")


@dataclass(frozen=True, slots=True)
class Call:
    """What of a call is known when it is traced. longest: max_seqlen_q and max_seqlen_k of the variable-length
    layout."""

    mask: Mask
    scale: float | None
    softcap: float
    dropout_p: float
    longest: tuple[int, int] | None
    deterministic: bool
    kernels: Callable[[Build], Artifact] | None
    arch: str | None
    backend: str

    def problem(self, operands: Mapping[str, Any], gradients: tuple[str, ...]) -> Problem:
        """The checked problem of these operands, dense as XLA's are; forward where no gradient is named."""
        taken = {name: _described(array) for name, array in operands.items() if name != PHILOX}
        dropout = None
        if PHILOX in operands:
            number = Array(0, (), (), "int64", None, "jax", None)
            taken |= {"philox_seed": number, "philox_offset": number}
            dropout = Dropout(self.dropout_p, number, number)
        sequences = None
        if self.longest is not None:
            bounds = [taken.get(name) for name in _BOUNDS]
            sequences = VariableLength(bounds[0], bounds[1], *self.longest, bounds[2])
        chosen = self._settings(dropout, sequences, gradients)
        return attention.problem_of("backward" if gradients else "forward", taken, chosen)[0]

    def settings(self, operands: Mapping[str, Any], gradients: tuple[str, ...]) -> Settings:
        """The options of the NumPy functions for operands in NumPy."""
        dropout = sequences = None
        if PHILOX in operands:
            seed, offset = (int(number) for number in np.asarray(operands[PHILOX]).view(np.uint64))
            dropout = Dropout(self.dropout_p, seed, offset)
        if self.longest is not None:
            bounds = [operands.get(name) for name in _BOUNDS]
            sequences = VariableLength(bounds[0], bounds[1], *self.longest, bounds[2])
        terms = {name: operands.get(name) for name in ("bias", "alibi_slopes", "sinks")}
        return self._settings(dropout, sequences, gradients, **terms)

    def _settings(
        self, dropout: Dropout | None, sequences: VariableLength | None, gradients: tuple[str, ...], **terms: Any
    ) -> Settings:
        return Settings(
            mask=self.mask,
            scale=self.scale,
            softcap=self.softcap,
            dropout=dropout,
            sequences=sequences,
            gradients=gradients or OPERANDS,
            deterministic=self.deterministic and bool(gradients),
            **terms,
        )


def _described(array: Any) -> Array:
    """What is known of a traced array, as of one in host memory: dense, and aligned where XLA puts it."""
    dense = Tensor.contiguous(tuple(array.shape), str(array.dtype))
    return Array(0, dense.shape, dense.strides, dense.dtype, None, "jax", None)


def forward(call: Call, operands: Arrays) -> tuple[Any, Any]:
    """output [B, Mq, H, Dv] and logsumexp float32 [B, H, ceil32(Mq)]."""
    results = _foldable(call, (), operands)
    return results["output"], results["logsumexp"]


def backward(call: Call, operands: Arrays, gradients: tuple[str, ...]) -> Arrays:
    """The gradients by name; operands are the forward's, grad_output, output and logsumexp."""
    results = _foldable(call, gradients, operands)
    return {name: results[f"grad_{name}"] for name in gradients}


def _foldable(call: Call, gradients: tuple[str, ...], operands: Arrays) -> Arrays:
    """The results; under vmap, one call for the whole batch where the kernels can, else one for each item."""

    def rule(size: int, batched: tuple[dict[str, bool]], operands: Arrays) -> tuple[Arrays, dict[str, bool]]:
        flags = batched[0]
        if _folds(call, gradients, flags):
            folded, batch = _folded(size, flags, operands, gradients)
            results = _unfolded(size, batch, run(folded), operands, flags)
        else:
            fixed = {name: array for name, array in operands.items() if not flags[name]}
            moving = {name: array for name, array in operands.items() if flags[name]}
            results = jax.lax.map(lambda item: run({**fixed, **item}), moving)
        return results, dict.fromkeys(results, True)

    run = jax.custom_batching.custom_vmap(functools.partial(_run, call, gradients))
    run.def_vmap(rule)
    return _varied(run(operands), operands)


def _folds(call: Call, gradients: tuple[str, ...], batched: Mapping[str, bool]) -> bool:
    """Whether vmap's axis can join the batch.

    Sequences have none, sinks and seeds belong to all of it, and a backward with dropout must draw as its forward
    did, which was folded exactly if its output is batched.
    """
    if call.longest is not None or batched.get("sinks") or "sinks" in gradients or batched.get(PHILOX):
        return False
    return not (gradients and PHILOX in batched) or batched["output"]


def _folded(size: int, batched: Mapping[str, bool], operands: Arrays, gradients: tuple[str, ...]) -> tuple[Arrays, int]:
    """The operands with vmap's axis as part of the batch, and the batch without it."""
    batch = operands["query"].shape[1 if batched["query"] else 0]

    def fold(name: str, array: Any) -> Any:
        per_batch = name in (*BMHK, "logsumexp") or (name == "bias" and "bias" in gradients)
        rank = {"alibi_slopes": 2, "sinks": 1, PHILOX: 1, "logsumexp": 3}.get(name, 4)
        own = array.shape[1:] if batched[name] else array.shape
        if not batched[name] and not per_batch and (len(own) < rank or own[0] == 1 or rank == 1):
            return array
        if len(own) < rank:  # slopes of heads alone
            own, array = (1, *own), array[..., None, :]
        array = array if batched[name] else array[None]
        whole = jnp.broadcast_to(array, (size, batch, *own[1:]))
        return whole.reshape(size * batch, *own[1:])

    return {name: fold(name, array) for name, array in operands.items()}, batch


def _unfolded(size: int, batch: int, results: Arrays, operands: Arrays, batched: Mapping[str, bool]) -> Arrays:
    """The results with vmap's axis in front; a bias that broadcasts over the batch has a gradient summed over it."""
    apart = {name: array.reshape(size, batch, *array.shape[1:]) for name, array in results.items()}
    if "grad_bias" in apart and operands["bias"].shape[1 if batched["bias"] else 0] == 1:
        apart["grad_bias"] = apart["grad_bias"].sum(axis=1, keepdims=True, dtype=apart["grad_bias"].dtype)
    return apart


def _run(call: Call, gradients: tuple[str, ...], operands: Arrays) -> Arrays:
    problem = call.problem(operands, gradients)
    results = _results(problem, gradients)
    if problem.is_empty:
        return _of_nothing(problem, results)
    shapes = {name: jax.ShapeDtypeStruct(tensor.shape, jnp.dtype(tensor.dtype)) for name, tensor in results.items()}
    if call.backend == "reference":
        host = functools.partial(_on_host, call, gradients)
        found: Arrays = jax.pure_callback(host, shapes, operands, vmap_method="sequential")
        return found
    data, workspace_bytes = _packed(problem, call.arch, call.kernels, tuple(operands), tuple(results))
    outputs = [*shapes.values()]
    if workspace_bytes:
        outputs.append(jax.ShapeDtypeStruct((workspace_bytes,), jnp.uint8))
    launched = jax.ffi.ffi_call(TARGET, outputs)(
        *operands.values(), **{KEY: np.int64(key_of(data)), PAYLOAD: np.frombuffer(data, np.uint8)}
    )
    return dict(zip(shapes, launched, strict=False))  # without the workspace


def _results(problem: Problem, gradients: tuple[str, ...]) -> dict[str, Tensor]:
    if gradients:
        return {f"grad_{name}": getattr(problem, f"grad_{name}") for name in gradients}
    return {"output": problem.output, "logsumexp": Tensor.contiguous(problem.shape.logsumexp, "float32")}


def _of_nothing(problem: Problem, results: Mapping[str, Tensor]) -> Arrays:
    """The results where there is nothing to launch: zeros, and no row has seen a key."""
    made = {name: jnp.zeros(tensor.shape, tensor.dtype) for name, tensor in results.items()}
    if "logsumexp" in made:
        rows = jnp.arange(made["logsumexp"].shape[2])
        infinity = jnp.where(rows < problem.shape.num_queries, -jnp.inf, jnp.inf).astype(jnp.float32)
        made["logsumexp"] = jnp.broadcast_to(infinity, made["logsumexp"].shape)
    return made


def _varied(results: Arrays, operands: Arrays) -> Arrays:
    """The results, which differ over the axes of a shard_map over which any operand does, as arrays that say so:
    neither custom_vmap nor custom calls do."""
    axes = frozenset().union(*(_axes(array) for array in operands.values()))

    def vary(array: Any) -> Any:
        missing = tuple(sorted(axes - _axes(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return {name: vary(array) for name, array in results.items()}


def _axes(array: Any) -> frozenset[str]:
    manual = getattr(jax.typeof(array), "manual_axis_type", None)
    return frozenset() if manual is None else frozenset(manual.varying)


def _on_host(call: Call, gradients: tuple[str, ...], operands: Arrays) -> Arrays:
    """The same by the NumPy reference."""
    arrays = {name: np.asarray(array) for name, array in operands.items()}
    chosen = call.settings(arrays, gradients)
    arrays.pop(PHILOX, None)
    if not gradients:
        output, logsumexp = on_cpu.forward(arrays, chosen)
        return {"output": output, "logsumexp": logsumexp}
    found = on_cpu.backward(arrays, chosen)
    return {f"grad_{name}": getattr(found, name) for name in gradients}


@functools.lru_cache(maxsize=KEPT_PAYLOADS)
def _packed(
    problem: Problem,
    arch: str | None,
    kernels: Callable[[Build], Artifact] | None,
    operands: tuple[str, ...],
    results: tuple[str, ...],
) -> tuple[bytes, int]:
    """The call's payload, and the bytes of its workspace: the best plan that `kernels` has kernels for."""
    capability, num_sms = _target(arch)
    plan, artifact = launch.first_made(
        planner.plans_on(problem, capability, num_sms), kernels or attention.default_kernels()
    )
    names = (*results, WORKSPACE) if plan.workspace.bytes else results
    return Payload(problem, plan, artifact, operands, names).pack(), plan.workspace.bytes


def _target(arch: str | None) -> tuple[tuple[int, int], int | None]:
    """Compute capability and multiprocessors to plan for: those of `arch`, or of the first GPU."""
    if arch is not None:
        name = architecture(arch).name.removeprefix("sm_").rstrip("a")
        return (int(name[:-1]), int(name[-1])), None
    try:
        gpu = driver.device(0)
    except NoDevice as error:
        raise NoDevice(
            f'{error}; to trace for another machine\'s GPU pass arch="sm_90" or its like; backend="reference" '
            "computes on the CPU"
        ) from error
    return gpu.compute_capability, gpu.num_sms
