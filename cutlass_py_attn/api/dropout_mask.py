"""The public function `dropout_mask`, which checks its arguments."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from cutlass_py_attn.api.options import dropout_refusals, option_value
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.scalars import integer_of
from cutlass_py_attn.problem.validation import MAX_LENGTH
from cutlass_py_attn.refusals import Refusal, refuse
from cutlass_py_attn.score_terms import dropout as score_term
from cutlass_py_attn.score_terms.dropout import Dropout


def dropout_mask(dropout: Dropout, batch: int, num_heads: int, num_queries: int, num_keys: int) -> npt.NDArray[Any]:
    """Returns the mask of dense tensors, (batch, num_heads, num_queries, num_keys) bool, True where kept.

    dropout: its seed and offset are ints.

    NotSupported lists every wrong argument.
    """
    sizes = {"batch": batch, "num_heads": num_heads, "num_queries": num_queries, "num_keys": num_keys}
    numbers = {name: integer_of(size) for name, size in sizes.items()}
    given = option_value("dropout", dropout)
    refusals = _refusals(given) + [
        refuse(name, sizes[name], f"must be an int from 0 to {MAX_LENGTH}", "correct it")
        for name, number in numbers.items()
        if number is None or not 0 <= number <= MAX_LENGTH
    ]
    if refusals:
        raise NotSupported(refusals)
    return score_term.dropout_mask(given, *(number or 0 for number in numbers.values()))


def _refusals(dropout: Any) -> list[Refusal]:
    if not isinstance(dropout, Dropout):
        return [refuse("dropout", dropout, "must be a Dropout object", "create one")]
    found = dropout_refusals(dropout)
    if type(dropout.dropout_p) is float and not 0 <= dropout.dropout_p <= 1:
        found.append(refuse("dropout_p", dropout.dropout_p, "must be a probability from 0 to 1", "correct it"))
    if not found and type(dropout.philox_seed) is not int:
        found.append(refuse("philox_seed", dropout.philox_seed, "must be an int here", "copy it to the host"))
    return found
