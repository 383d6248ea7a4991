"""vmap of one call: its axis joins the batch axis if the kernels can, otherwise the elements run one after another.

`vmap(f)(xs)[i]` is `f(xs[i])` for every call. So a call joins only if each element of the joined batch is computed as
it is alone, in the forward and in the backward.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from cutlass_py_attn.jax import partition
from cutlass_py_attn.jax.calls import Call, varying
from cutlass_py_attn.jax.handler import PHILOX
from cutlass_py_attn.plan import performance
from cutlass_py_attn.problem.mask_program import MAX_SCALARS, MaskProgram
from cutlass_py_attn.problem.quantization import SCALES
from cutlass_py_attn.problem.tensors import MASK_ARRAY_AXES, MASK_ARRAYS, RANGE_EDGES, VISIBLE_BLOCKS
from cutlass_py_attn.score_terms.term import ScoreTerm

Arrays = dict[str, Any]

TANGENT: Final = "tangent of "  # before the name of an operand, for the operand's tangent


@dataclass(frozen=True, slots=True)
class MappedCall:
    """A call under vmap.

    gradients: names of operands whose gradients, or whose tangents, have the mapped axis
    size: of the mapped axis
    mesh_axes: Explicit mesh axes that split the mapped axis; None if none does
    is_mapped: whether an operand, by its name, has the mapped axis
    """

    call: Call
    gradients: tuple[str, ...]
    size: int
    mesh_axes: tuple[str, ...] | None
    is_mapped: Mapping[str, bool]

    def results(self, run: Callable[[Call, Arrays], Arrays], operands: Arrays) -> Arrays:
        """Returns the results by name, the mapped axis first.

        run: computes a call: this one of an element, or the joined one
        operands: by name; the mapped axis is the first
        """
        obstacle = self._obstacle(operands)
        if not obstacle:
            return self._joined(run, operands)
        if self.call.backend != "reference":
            performance.warn_caller(
                f"vmap of attention with {obstacle} launches {self.size} calls one after another, for they are no "
                "call of a larger batch; call attention without vmap, on arrays that have the axis in their batch"
            )
        return self._one_after_another(functools.partial(run, self.call), operands)

    def _obstacle(self, operands: Arrays) -> str:
        """Returns why the mapped axis cannot join the batch axis; "" if it can.

        Variable lengths have no batch axis, and pools of pages none. All batches share sinks, terms without a batch
        axis and scales of e4m3 codes. Random numbers of dropout depend on the place in the batch. A mask function takes
        one integer more, and an array of one more axis, up to the most that kernels read.
        """
        call = self.call
        shared = ("sinks", *SCALES, *(term.name for term in call.score_terms if not _has_batch_form(term)))
        obstacles = {
            "sequences": call.max_seqlens is not None or call.paged is not None,
            "dropout": PHILOX in self.is_mapped,
            "gradients of sinks": "sinks" in self.gradients,
            "a mapped mask array of 4 axes": any(
                operands[name].ndim > len(MASK_ARRAY_AXES) for name in self._mapped_masks
            ),
            "a mask function of 4 integers": self._maps_program and len(call.mask_scalars or ()) == MAX_SCALARS,
            "mapped axis and batch both split": bool(self.mesh_axes) and self._splits_batch(operands),
            **{f"mapped {name}": self.is_mapped.get(name, False) for name in shared},
        }
        return next((name for name, is_present in obstacles.items() if is_present), "")

    @property
    def _mapped_masks(self) -> list[str]:
        """Names of the arrays of a mask function that have the mapped axis."""
        return [name for name in MASK_ARRAYS if self.is_mapped.get(name, False)]

    @property
    def _maps_program(self) -> bool:
        """Whether the mask function is another one in a larger batch."""
        program = self.call.mask_program
        return program is not None and (bool(self._mapped_masks) or "batch" in MaskProgram.parse(program).coordinates)

    def _joined_call(self, batch: int, is_batch_first: bool) -> Call:
        """Returns the call of the joined batch. batch: of an element."""
        if not self._maps_program:
            return self.call
        program, integers = MaskProgram.parse(self.call.mask_program or "").joined(
            self.size if is_batch_first else batch, [*map(MASK_ARRAYS.index, self._mapped_masks)], not is_batch_first
        )
        scalars = *(self.call.mask_scalars or ()), *integers
        return dataclasses.replace(self.call, mask_program=str(program), mask_scalars=scalars)

    def _joined(self, run: Callable[[Call, Arrays], Arrays], operands: Arrays) -> Arrays:
        elements = {
            name: jax.ShapeDtypeStruct(array.shape[1:] if self.is_mapped[name] else array.shape, array.dtype)
            for name, array in operands.items()
        }
        batch = elements["query"].shape[0]
        # The bias of split rows has all keys; it does not say what the axes are.
        of_forward = {name: array for name, array in elements.items() if _is_of_forward(name) and name != "bias"}
        problem = self.call.problem(of_forward, ())

        def join(name: str, array: Any) -> Any:
            role, shape = name.removeprefix(TANGENT), elements[name].shape
            if name in MASK_ARRAYS:
                return array
            has_batch = partition.BATCH in partition.axes_of(role, shape, problem)
            has_own_gradient = role == "bias" and name == role and "bias" in self.gradients
            # The start and the end of ranges have one shape.
            is_joined = name in RANGE_EDGES and any(self.is_mapped[edge] for edge in RANGE_EDGES)
            if not (self.is_mapped[name] or has_batch or has_own_gradient or is_joined):
                return array
            # A mapped vector, such as slopes (num_heads,), gets a batch axis.
            if role not in ("bias", *RANGE_EDGES, VISIBLE_BLOCKS) and not has_batch:
                shape, array = (1, *shape), array[:, None]
            array = array if self.is_mapped[name] else array[None]
            stacked = jnp.broadcast_to(array, (self.size, batch, *shape[1:]))
            stacked = jnp.swapaxes(stacked, 0, 1) if is_batch_first else stacked
            return stacked.reshape(self.size * batch, *shape[1:])

        def split_off(array: Any) -> Any:
            if is_batch_first:
                return jnp.swapaxes(array.reshape(batch, self.size, *array.shape[1:]), 0, 1)
            return array.reshape(self.size, batch, *array.shape[1:])

        # JAX merges axes of an Explicit mesh if the first one is split.
        is_batch_first = self._splits_batch(operands)
        call = self._joined_call(batch, is_batch_first)
        results = run(call, {name: join(name, array) for name, array in operands.items()})
        split = {name: split_off(array) for name, array in results.items()}
        if "grad_bias" in split and elements["bias"].shape[0] == 1:
            split["grad_bias"] = split["grad_bias"].sum(axis=1, keepdims=True, dtype=split["grad_bias"].dtype)
        return split

    def _splits_batch(self, operands: Arrays) -> bool:
        """Returns whether an Explicit mesh splits the first axis of an operand, the batch of most."""
        arrays = {name: array for name, array in operands.items() if name not in MASK_ARRAYS}  # which are whole
        return any(partition.splits_axis(array, int(self.is_mapped[name])) for name, array in arrays.items())

    def _one_after_another(self, run: Callable[[Arrays], Arrays], operands: Arrays) -> Arrays:
        """Maps the elements; each device those that it has, if a mesh splits the mapped axis."""
        shared = {name: array for name, array in operands.items() if not self.is_mapped[name]}
        mapped = {name: array for name, array in operands.items() if self.is_mapped[name]}

        def of_device(shared: Arrays, mapped: Arrays) -> Arrays:
            shared = {name: varying(array, self.mesh_axes or ()) for name, array in shared.items()}

            def element(own: Arrays) -> Arrays:
                return run({name: own[name] if name in own else shared[name] for name in operands})

            results: Arrays = jax.lax.map(element, mapped)
            return results

        if self.mesh_axes is None:
            return of_device(shared, mapped)
        split = PartitionSpec(self.mesh_axes)
        sharded = jax.shard_map(
            of_device, in_specs=(PartitionSpec(), split), out_specs=split, axis_names=set(self.mesh_axes)
        )
        results: Arrays = sharded(shared, mapped)
        return results


def _has_batch_form(term: ScoreTerm) -> bool:
    """Returns whether an array of the term may have a batch axis."""
    return term.vector is not None and any(axes[0] == partition.BATCH for axes in term.vector.axes)


def _is_of_forward(name: str) -> bool:
    return not name.startswith((TANGENT, "grad_")) and name not in ("output", "logsumexp")
