"""Score functions: a score term from a Python function of positions, traced into kernels and NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.problem.mask_program import Functions, array_functions
from cutlass_py_attn.problem.mask_tracing import trace_score
from cutlass_py_attn.score_terms.term import ScoreTerm, StructFields, VectorOperand


class ScoreFunction(ScoreTerm):
    """The term that adds function(query, key, num_queries, num_keys, operand) to each score.

    name: of the term: lower-case letters, digits and underscores; the key of its operand in `score_terms`
    function: takes four integers, the positions of the query and the key in their sequences and the sequences' lengths,
        and a float32, and returns a number. It is called once, here, with symbols, and what it does becomes a part of
        kernels: operators, numpy.where, minimum, maximum, exp, exp2, log, log2, tanh, sqrt and absolute. What it reads
        from elsewhere is constant
    meaning: what the operand is, in a few words, for the C header of a bundle

    The operand is float32 (num_heads,) or (batch, num_heads), one number of each query head; it has no gradient. Pass
    the term to `score_terms.register` before kernels with it are planned. Kernels compute float32 with the fast
    functions of the GPU, and the NumPy reference computes float64.

    Raises NotSupported for what kernels cannot do, with the line of the function.
    """

    def __init__(self, name: str, function: Callable[..., Any], meaning: str = "number of each head") -> None:
        batch_field = f"{name}_batch"
        of_term: Any = self  # the attributes of this term alone
        of_term.name = name
        of_term.vector = VectorOperand(name, (("num_heads",), ("batch", "num_heads")), meaning, batch_field)
        of_term.struct = StructFields(addresses=(name, batch_field))
        self.program = trace_score(function)

    def modify_scores(self, row: Any, operand: Any) -> None:
        """Adds the function's result to each score of a row."""
        functions = _device_functions(row)
        for column in range(row.num_columns):
            positions = row.query, row.key(column), row.num_queries, row.num_keys
            row.add(column, self.program.compute(_integers(positions), (operand,), functions))

    def reference_added(self, tile: Any, operand: float) -> npt.NDArray[Any]:
        """Returns the function's results for a tile, in float64."""
        lengths = (np.asarray(length, np.int32) for length in (tile.num_queries, tile.num_keys))
        positions = tile.queries.astype(np.int32), tile.keys.astype(np.int32), *lengths
        with np.errstate(all="ignore"):
            added = self.program.compute(positions, (np.float64(operand),), _NUMPY)
        shape = len(tile.queries), tile.keys.shape[1]
        return np.broadcast_to(added, shape).astype(tile.dtype)


def _numpy_functions() -> Functions:
    """Returns the functions of NumPy, with float64 in place of float32."""
    shared = array_functions(np, ())
    more = {
        "quotient": np.divide,
        **{name: getattr(np, name) for name in ("exp", "exp2", "log", "log2", "tanh", "sqrt")},
        "float": lambda value: np.asarray(value).astype(np.float64),
    }
    return Functions(np.asarray, shared.load, {**shared.operations, **more})


_NUMPY = _numpy_functions()


def _integers(positions: tuple[Any, ...]) -> list[Any]:
    """Returns traced positions whose division rounds down; that of a layout's coordinate rounds towards 0."""
    from cutlass import Int32, Int64

    return [Int32(Int64(position)) for position in positions]


def _device_functions(row: Any) -> Functions:
    """Returns the functions of a kernel, those of float32 with the fast instructions for 16-bit operands."""
    from cutlass import Float32, cute

    from cutlass_py_attn.kernels.common.mask_function import CONSTANTS, OPERATIONS

    def of_math(function: Any, factor: float = 1.0) -> Callable[[Any], Any]:
        return lambda value: Float32(function(Float32(value), fastmath=True)) * factor

    more = {
        "quotient": lambda left, right: left * cute.arch.rcp_approx(right),
        "exp": lambda value: cute.math.exp2(value * math.log2(math.e), fastmath=True),
        "exp2": of_math(cute.math.exp2),
        "log": of_math(cute.math.log2, math.log(2)),
        "log2": of_math(cute.math.log2),
        "tanh": row.tanh,
        "sqrt": of_math(cute.math.sqrt),
    }
    return Functions(lambda value: CONSTANTS[type(value)](value), _no_array, {**OPERATIONS, **more})


def _no_array(number: int, index: list[Any]) -> Any:
    raise AssertionError("a score function has no arrays")
