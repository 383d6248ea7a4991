"""Mask functions: a mask that a user's function of positions and arrays says, traced into kernels, NumPy and JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.block_sparse import BlockSparse
from cutlass_py_attn.problem.key_ranges import FULL, KeyRanges, is_array
from cutlass_py_attn.problem.mask_program import ARRAY_KINDS, MAX_SCALARS, WORD, MaskProgram, array_functions
from cutlass_py_attn.problem.mask_tracing import trace
from cutlass_py_attn.problem.masks import Mask
from cutlass_py_attn.problem.scalars import integer_of
from cutlass_py_attn.problem.tensors import MASK_ARRAY_AXES, MASK_ARRAYS, VISIBLE_BLOCKS
from cutlass_py_attn.refusals import Refusal, refuse

if TYPE_CHECKING:
    from cutlass_py_attn.problem.problem import Problem

Array = npt.NDArray[Any]
_CONVERTED = {"b": np.dtype(bool), "i": np.dtype(np.int32), "u": np.dtype(np.int32), "f": np.dtype(np.float32)}


@dataclass(frozen=True, slots=True, eq=False)
class MaskFunction:
    """The mask with which a query sees a key if function(batch, head, query, key, **arguments) says so.

    function: takes four integers, positions in a sequence and of a query head, and returns a bool. It is called once,
        here, with symbols, and what it does becomes a part of kernels: operators, numpy.where, minimum and maximum, and
        elements of its arrays, as in `ids[batch, query] == ids[batch, key]`. What it reads from elsewhere is constant
    arguments: by name, up to four arrays of bool, int32 or float32 and up to four integers, whose values may change
        without another kernel. A CUDA array is read in place when kernels run. An index behind an axis reads its end
    within: another mask that hides keys as well, such as Causal(). Tiles that it hides are not visited

    Every kernel call finds the tiles in which a query sees a key by computing the function for each pair, of as many
    sequences and heads as it asks for.

    Raises NotSupported for what kernels cannot do, with the line of the function.
    """

    function: Callable[..., Any] | MaskProgram
    arguments: Mapping[str, Any] = field(default_factory=dict)
    within: Mask | KeyRanges | BlockSparse = FULL
    program: MaskProgram = field(init=False)
    array_names: tuple[str, ...] = field(init=False)

    __hash__: ClassVar[None] = None  # type: ignore[assignment]  # calls with other values are other calls

    def __post_init__(self) -> None:
        wrong = [*_argument_refusals(self.arguments)]
        if not isinstance(self.function, MaskProgram) and not callable(self.function):
            wrong.append(refuse("function", self.function, "must be a function", "define one"))
        if not isinstance(self.within, (Mask, KeyRanges, BlockSparse)):
            rule = "must be a Mask, KeyRanges or BlockSparse"
            wrong.append(refuse("within", self.within, rule, "create one, such as Causal()"))
        if wrong:
            raise NotSupported(wrong)
        arguments = {name: _converted(value) for name, value in self.arguments.items()}
        object.__setattr__(self, "arguments", arguments)
        object.__setattr__(self, "array_names", tuple(name for name in arguments if _is_array(arguments[name])))
        program = self.function if isinstance(self.function, MaskProgram) else self._traced(self.function)
        object.__setattr__(self, "program", program)

    def _traced(self, function: Callable[..., Any]) -> MaskProgram:
        arrays = self._kinds()
        return trace(function, arrays, [name for name in self.arguments if name not in arrays])

    def _kinds(self) -> dict[str, tuple[str, int]]:
        """Returns kind and rank of each array by its name."""
        arrays = self._arrays().items()
        return {name: (ARRAY_KINDS[_dtype_of(array)], len(_shape_of(array))) for name, array in arrays}

    def _arrays(self) -> dict[str, Any]:
        return {name: self.arguments[name] for name in self.array_names}

    @property
    def scalars(self) -> tuple[int, ...]:
        """The integers among the arguments."""
        return tuple(value for name, value in self.arguments.items() if name not in self.array_names)

    @property
    def band(self) -> Mask:
        """The mask of numbers alone within which the function hides keys."""
        return self.within if isinstance(self.within, Mask) else self.within.band

    def refusals(self) -> Iterator[Refusal]:
        """Yields what is wrong with `within`; the function and its arguments are checked at its creation."""
        if not isinstance(self.within, Mask):
            yield from self.within.refusals()

    def arrays(self) -> dict[str, Any]:
        """Returns the arrays by their names in a Problem."""
        arrays = self.within.arrays() if isinstance(self.within, (KeyRanges, BlockSparse)) else {}
        return {**arrays, **dict(zip(MASK_ARRAYS, self._arrays().values(), strict=False))}

    def numbers(self) -> dict[str, Any]:
        """Returns the other fields of a Problem that the mask decides."""
        within = {} if isinstance(self.within, Mask) else self.within.numbers()
        return {**within, "mask_program": str(self.program), "mask_scalars": self.scalars}

    def resolved(self, num_heads: int, num_queries: int, num_keys: int) -> MaskFunction:
        """Returns the mask in NumPy, within another without a band."""
        within = self.within if not isinstance(self.within, Mask) else KeyRanges.of(self.within, num_queries, num_keys)
        arguments = {**self.arguments, **{name: np.asarray(array) for name, array in self._arrays().items()}}
        return MaskFunction(self.program, arguments, within.resolved(num_heads, num_queries, num_keys))

    def reach(self, batch: Any, head: Any, query: Any, key: Any) -> Array:
        """Returns whether a query of a head of a sequence sees a key, of index arrays; for a `resolved` mask."""
        coordinates = [np.asarray(each, np.int32) for each in (batch, head, query, key)]
        scalars = [np.asarray(number, np.int32) for number in self.scalars]
        functions = array_functions(np, [*self._arrays().values()])
        with np.errstate(over="ignore"):
            seen = self.program.compute(coordinates, scalars, functions)
        assert not isinstance(self.within, Mask)
        within: Array = self.within.reach(batch, head, query, key)
        return within & seen

    def materialise(self, batch: int, num_heads: int, num_queries: int, num_keys: int) -> Array:
        """Returns the mask as a (batch, num_heads, num_queries, num_keys) bool array; slow, for tests."""
        sizes = batch, num_heads, num_queries, num_keys
        of_batch, head, query, key = np.ogrid[tuple(slice(size) for size in sizes)]
        return self.resolved(num_heads, num_queries, num_keys).reach(of_batch, head, query, key)

    def with_arguments(self, **changes: Any) -> MaskFunction:
        """Returns the mask with other values of arguments, arrays of the same dtypes and ranks."""
        changed = replace(self, function=self.program, arguments={**self.arguments, **changes})
        if changed._kinds() != self._kinds() or {*changes} - {*self.arguments}:
            rule = "must have the names, dtypes and ranks of the mask's"
            raise NotSupported(refuse("arguments", sorted(changes), rule, "make another MaskFunction"))
        return changed


def unchecked(
    program: MaskProgram, arguments: Mapping[str, Any], array_names: tuple[str, ...], within: Any
) -> MaskFunction:
    """Returns a mask in which anything may stand for an array, as in a pytree of JAX."""
    mask = object.__new__(MaskFunction)
    values = {"function": program, "program": program, "arguments": arguments}
    for name, value in {**values, "array_names": array_names, "within": within}.items():
        object.__setattr__(mask, name, value)
    return mask


def _argument_refusals(arguments: object) -> Iterator[Refusal]:
    """Yields why these are no arguments of a mask function."""
    if not isinstance(arguments, Mapping):
        yield refuse("arguments", arguments, "must be a dict of arrays and integers by name", "pass one")
        return
    arrays = {name: value for name, value in arguments.items() if _is_array(value)}
    for name, value in arguments.items():
        if not isinstance(name, str):
            yield refuse("arguments", name, "must have names of parameters", "name them")
        what = f"arguments[{name!r}]"
        if name not in arrays:
            number = integer_of(value)
            if number is None or not WORD.min <= number <= WORD.max:
                yield refuse(what, value, "must be an array, or an int32", "convert it")
            continue
        is_converted = isinstance(value, np.ndarray) and value.dtype.kind in _CONVERTED
        if not is_converted and _dtype_of(value) not in ARRAY_KINDS:
            yield refuse(f"{what}.dtype", _dtype_of(value), "must be bool, uint8, int32 or float32", "convert it")
        if len(_shape_of(value)) > len(MASK_ARRAY_AXES):
            rule = f"must have at most {len(MASK_ARRAY_AXES)} axes"
            yield refuse(f"{what}.shape", _shape_of(value), rule, "join some")
        if 0 in _shape_of(value):
            yield refuse(f"{what}.shape", _shape_of(value), "must have an element", "pass one")
    for what, names, most in (("arrays", [*arrays], len(MASK_ARRAYS)), ("integers", [*arguments], MAX_SCALARS)):
        names = [name for name in names if (name in arrays) == (what == "arrays")]
        if len(names) > most:
            yield refuse("arguments", names, f"may have at most {most} {what}", "join some in one array")


def _is_array(value: object) -> bool:
    """Returns whether this is an array, and no number of NumPy."""
    return is_array(value) and not isinstance(value, np.generic)


def _dtype_of(array: Any) -> str:
    """Returns the name of an array's dtype, as NumPy has it."""
    if hasattr(array, "dtype"):
        return str(getattr(array.dtype, "name", array.dtype)).rpartition(".")[2]
    described = getattr(array, "__cuda_array_interface__", None)
    return "unknown" if described is None else np.dtype(described["typestr"]).name


def _shape_of(array: Any) -> tuple[int, ...]:
    return tuple(array.shape if hasattr(array, "shape") else array.__cuda_array_interface__["shape"])


def _converted(value: Any) -> Any:
    """Returns an array of NumPy with a dtype that kernels read, and other integers as Python's."""
    if not _is_array(value):
        return integer_of(value)
    if not isinstance(value, np.ndarray) or value.dtype.name in ARRAY_KINDS:
        return value
    dtype = _CONVERTED[value.dtype.kind]
    if dtype.kind == "i":
        value = np.clip(value, WORD.min, WORD.max)
    return np.asarray(value, dtype)


ArrayMask = KeyRanges | BlockSparse | MaskFunction


def mask_of(problem: Problem, arrays: Mapping[str, Any]) -> Mask | ArrayMask:
    """Returns the mask of a problem whose arrays are among these, by their names in it."""
    mask: Mask | KeyRanges = problem.mask
    if problem.key_start is not None:
        mask = KeyRanges(arrays["key_start"], arrays["key_end"], problem.mask)
    within: Mask | KeyRanges | BlockSparse = mask
    if problem.visible_blocks is not None:
        within = BlockSparse(arrays[VISIBLE_BLOCKS], problem.block_size, mask)
    if problem.mask_program is None:
        return within
    values = (*(arrays[name] for name in MASK_ARRAYS if name in arrays), *(problem.mask_scalars or ()))
    arguments = {str(number): value for number, value in enumerate(values)}
    return MaskFunction(MaskProgram.parse(problem.mask_program), arguments, within)
