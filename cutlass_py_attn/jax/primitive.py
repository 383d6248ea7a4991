"""Primitive: the kernels of one forward or backward in a traced program, planned and compiled when it is lowered.

Tracing needs only the shapes of the results, which follow from the Problem. So `jax.eval_shape` and `jax.jit(f).trace`
need neither a GPU nor the compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla

from cutlass_py_attn.api.calls import default_kernels
from cutlass_py_attn.artifact import Artifact, first_available
from cutlass_py_attn.errors import NoDevice
from cutlass_py_attn.jax.handler import KEY, PAYLOAD, TARGET, WORKSPACE
from cutlass_py_attn.jax.payload import Payload, key_of
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan import performance, planner
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.score_terms.term import ScoreTerm

Arrays = dict[str, Any]

MAX_PAYLOADS: Final = 256


@dataclass(frozen=True, slots=True, weakref_slot=True)  # JAX keeps weak references to the parameters of a primitive
class Kernels:
    """The static parameters of the primitive: everything that decides its payload.

    score_terms: the registered terms of the problem, which a name alone does not identify: it may be registered anew
    arch, kernels: as in `jax.attention`
    operands: names of the operands, in order
    results: names, shapes and dtypes of the results, in order
    """

    problem: Problem
    score_terms: tuple[ScoreTerm, ...]
    arch: str | None
    kernels: Callable[[Build], Artifact] | None
    operands: tuple[str, ...]
    results: tuple[tuple[str, tuple[int, ...], str], ...]

    def __call__(self, operands: Arrays) -> Arrays:
        """Adds the kernels to the traced program, and returns the results by name."""
        found = _launch.bind(*(operands[name] for name in self.operands), kernels=self)
        return dict(zip((name for name, _, _ in self.results), found, strict=True))


def kernels_of(
    problem: Problem,
    score_terms: tuple[ScoreTerm, ...],
    arch: str | None,
    kernels: Callable[[Build], Artifact] | None,
    operands: Sequence[str],
    results: Mapping[str, Tensor],
) -> Kernels:
    """Returns the parameters for these operands and results; the arguments are the fields of `Kernels`."""
    shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in results.items())
    return Kernels(problem, score_terms, arch, kernels, tuple(operands), shapes)


@functools.lru_cache(maxsize=MAX_PAYLOADS)
def payload_of(kernels: Kernels) -> tuple[bytes, int, performance.Notice]:
    """Returns the packed payload of the best plan that has kernels, its workspace size (bytes), and its warning."""
    capability, num_sms = target_of(kernels.arch)
    plan, artifact = first_available(
        planner.plans_on(kernels.problem, capability, num_sms), kernels.kernels or default_kernels()
    )
    names = [name for name, _, _ in kernels.results]
    names += [WORKSPACE] if plan.workspace.bytes else []
    payload = Payload(kernels.problem, plan, artifact, kernels.operands, tuple(names))
    return payload.pack(), plan.workspace.bytes, performance.Notice(plan)


def target_of(arch: str | None) -> tuple[tuple[int, int], int | None]:
    """Returns compute capability and number of SMs to plan for: of `arch`, or of the first GPU.

    The number of SMs is None, for the default of the architecture, if `arch` is given.
    """
    if arch is not None:
        name = architecture(arch).name.removeprefix("sm_").rstrip("a")
        return (int(name[:-1]), int(name[-1])), None
    try:
        gpu = driver.device(0)
    except NoDevice as error:
        raise NoDevice(
            f'{error}; to lower for another machine\'s GPU pass arch="sm_90" or its like; backend="reference" '
            "computes on the CPU"
        ) from error
    return gpu.compute_capability, gpu.num_sms


def _abstract_results(*_: Any, kernels: Kernels) -> list[jax.core.ShapedArray]:
    """Returns the results' types. They are sharded over no axis of the mesh, as those of every custom call."""
    sharding = jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), jax.sharding.PartitionSpec())
    return [jax.core.ShapedArray(shape, jnp.dtype(dtype), sharding=sharding) for _, shape, dtype in kernels.results]


def _lower(context: Any, *operands: Any, kernels: Kernels) -> Any:
    """Lowers the primitive to an XLA custom call, whose last result is the workspace, if there is one."""
    data, workspace_bytes, notice = payload_of(kernels)
    notice.give()
    outputs = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for _, shape, dtype in kernels.results]
    if workspace_bytes:
        outputs.append(jax.ShapeDtypeStruct((workspace_bytes,), jnp.uint8))
    attributes = {KEY: np.int64(key_of(data)), PAYLOAD: np.frombuffer(data, np.uint8)}

    def custom_call(*arrays: Any) -> Any:
        return jax.ffi.ffi_call(TARGET, outputs)(*arrays, **attributes)[: len(kernels.results)]

    return mlir.lower_fun(custom_call, multiple_results=True)(context, *operands)


_launch: Final = Primitive("cutlass_py_attn")
_launch.multiple_results = True
_launch.def_abstract_eval(_abstract_results)
_launch.def_impl(functools.partial(xla.apply_primitive, _launch))
mlir.register_lowering(_launch, _lower)
