"""ScoreTerm: what one score term tells validation, planner, kernels and reference; a term is a subclass and one file.

The methods receive a Problem, a row of scores on the device (kernels/common/score_mod.py) or a tile of the NumPy
reference (reference/score_mod.py); nothing here imports them, nor the DSL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.refusals import Refusal, alignment_refusal, refuse

if TYPE_CHECKING:
    from cutlass_py_attn.problem.problem import Problem
    from cutlass_py_attn.problem.tensors import Shape, Tensor

Array = npt.NDArray[Any]

# The tile tables that terms may ask for, the table that wins first. "score_mod": tiles that leave registers for terms.
TILE_TABLES = ("softcap", "bias", "score_mod")


@dataclass(frozen=True, slots=True)
class StructFields:
    """Fields of a term in the kernels' parameter struct.

    addresses: 64-bit fields, that is device addresses, strides in elements and 64-bit numbers
    sizes: int32 fields
    factors: float32 fields
    """

    addresses: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    factors: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[tuple[str, str], ...]:
        """(name, kind) of every field, in the order addresses, sizes, factors."""
        groups = (("i64", self.addresses), ("i32", self.sizes), ("f32", self.factors))
        return tuple((name, kind) for kind, names in groups for name in names)


@dataclass(frozen=True, slots=True)
class VectorOperand:
    """A small contiguous float32 array of a term.

    name: name of the operand, of its struct field and, with "grad_" before it, of its gradient
    axes: the shapes that are allowed, each as attributes of Shape, such as (("num_heads",), ("batch", "num_heads"))
    meaning: what the array holds, in a few words, for the C header of a bundle
    batch_field: struct field of the elements from one batch to the next, 0 when the array has no batch axis; "" when
        no allowed shape has one
    """

    name: str
    axes: tuple[tuple[str, ...], ...]
    meaning: str
    batch_field: str = ""

    def shapes(self, shape: Shape) -> tuple[tuple[int, ...], ...]:
        """Returns the allowed shapes of a problem of these sizes."""
        return tuple(tuple(getattr(shape, axis) for axis in axes) for axes in self.axes)

    def axes_of(self, rank: int) -> tuple[str, ...]:
        """Returns the names of the axes of an array of this rank."""
        return next(axes for axes in self.axes if len(axes) == rank)

    def refusals(self, name: str, tensor: Tensor, shape: Shape) -> Iterator[Refusal]:
        """Yields what is wrong with the operand, or with its gradient under that name."""
        allowed = self.shapes(shape)
        if tensor.shape not in allowed or tensor.dtype != "float32":
            shapes = " or ".join(str(list(sizes)) for sizes in allowed)
            yield refuse(name, tensor, f"must be float32 {shapes}", "convert it")
        elif not tensor.is_contiguous:
            yield refuse(f"{name}.strides", tensor.strides, "must be contiguous", "copy it")
        elif tensor.alignment < np.dtype(np.float32).itemsize:
            yield alignment_refusal(name, tensor.alignment, np.dtype(np.float32).itemsize)


class ScoreTerm:
    """A score term. Subclasses set the attributes, and override the methods of what they do.

    Required for a term of your own: name, vector, struct, modify_scores and reference_added.

    name: word of the term in Problem.features and in symbols: lower-case letters, digits and underscores
    field: field of Problem that holds the term; "" for a registered term, which Problem.score_terms holds
    vector: its float32 array; None when the term has none
    gradient: operand that the backward writes a gradient of, as "bias" of grad_bias; "" for none
    struct: its fields in the kernels' parameter struct
    tile_tables: the tile tables that leave it registers or shared memory, out of TILE_TABLES; () for any tile
    needs_registers_sm90: whether three consumer warpgroups of the sm90 forward lack registers for a wide tile with it
    modifies_scores: whether `modify_scores` changes a tile of scores between S = Q K^T and the mask
    scales_products: whether `modify_scores` receives raw products and multiplies them by the scale itself
    has_derivative: whether d(score)/d(scale Q K^T) is not 1; the backward then multiplies dS by `row.derivative`
    meanings: (struct field, what it is in a few words) of the fields that a host sets, for the C header of a bundle
    """

    name: ClassVar[str] = ""
    field: ClassVar[str] = ""
    vector: ClassVar[VectorOperand | None] = None
    gradient: ClassVar[str] = ""
    struct: ClassVar[StructFields] = StructFields()
    tile_tables: ClassVar[tuple[str, ...]] = ("score_mod",)
    needs_registers_sm90: ClassVar[bool] = True
    modifies_scores: ClassVar[bool] = True
    scales_products: ClassVar[bool] = False
    has_derivative: ClassVar[bool] = False
    meanings: ClassVar[tuple[tuple[str, str], ...]] = ()

    # Problem and validation

    def operand(self, problem: Problem) -> Tensor | None:
        """Returns the array of this term in `problem`; None without it."""
        found: Tensor | None = getattr(problem, self.field) if self.field else dict(problem.score_terms).get(self.name)
        return found

    def is_present(self, problem: Problem) -> bool:
        """Returns whether `problem` has this term."""
        return self.operand(problem) is not None

    def vectors(self, problem: Problem) -> dict[str, Tensor]:
        """Returns the float32 arrays of this term by name: its operand, and the operand's gradient if it is written."""
        if self.vector is None:
            return {}
        given = {self.vector.name: self.operand(problem)}
        if self.gradient:
            given[f"grad_{self.gradient}"] = getattr(problem, f"grad_{self.gradient}")
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    def device_scalars(self, problem: Problem) -> tuple[str, ...]:
        """Returns the names of the int64 scalars that kernels read from device memory."""
        return ()

    def refusals(self, problem: Problem) -> Iterator[Refusal]:
        """Yields every reason to refuse the term: what was given, what is allowed, what to do."""
        if self.vector is not None:
            for name, tensor in self.vectors(problem).items():
                yield from self.vector.refusals(name, tensor, problem.shape)

    # Planner and launch

    def sizes(self, problem: Problem) -> dict[str, int]:
        """Returns the values of the struct's int32 fields."""
        return {}

    def numbers(self, problem: Problem) -> dict[str, float]:
        """Returns the values of the struct's other fields that are no address."""
        operand = self.operand(problem) if self.vector is not None else None
        if operand is None or self.vector is None or not self.vector.batch_field:
            return {}
        return {self.vector.batch_field: problem.shape.num_heads if len(operand.shape) > 1 else 0}

    def immediate_numbers(self, problem: Problem) -> tuple[str, ...]:
        """Returns the 64-bit struct fields that a host writes at each launch as numbers, not as addresses."""
        return ()

    def example(self, shape: Shape) -> dict[str, Any]:
        """Returns changes to a Problem of these sizes that add the term: arrays as their shapes, scalars as values."""
        if self.vector is None:
            raise NotImplementedError(f"score term {self.name}: has no vector, and must say an example itself")
        return {self.field or self.name: self.vector.shapes(shape)[0]}

    # Device. `row` is a kernels.common.score_mod.ScoreRow, `load(address, index)` reads a float32.

    def load_operand(self, load: Any, p: Any, batch: Any, head: Any) -> Any:
        """Returns the operand of one (batch, query head) as the kernel keeps it in a register; None for none."""
        if self.vector is None:
            return None
        address = getattr(p, self.vector.name)  # read before the batch stride: the order of the reads is in the PTX
        index = batch * getattr(p, self.vector.batch_field) + head if self.vector.batch_field else head
        return load(address, index)

    def modify_scores(self, row: Any, operand: Any) -> None:
        """Changes one row of a thread's scores, which are in base 2: log2(e) times the scores of the formula."""
        raise NotImplementedError(f"score term {self.name}: must define modify_scores")

    # NumPy reference. `tile` is a reference.score_mod.ScoreTile.

    def reference_operand(self, given: Array, sequence: int, head: int) -> Any:
        """Returns the operand of one (sequence, query head), from the whole array."""
        return float(given[head] if given.ndim == 1 else given[sequence if given.shape[0] > 1 else 0, head])

    def reference_added(self, tile: Any, operand: Any) -> Array:
        """Returns what the term adds to the scores of a tile, (queries, keys) in the dtype of the tile."""
        raise NotImplementedError(f"score term {self.name}: must define reference_added")
