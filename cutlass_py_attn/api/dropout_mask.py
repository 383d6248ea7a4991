"""The public function `dropout_mask`, which checks its arguments."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from cutlass_py_attn.api.options import dropout_reasons, option_value
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.scalars import integer_of, shown
from cutlass_py_attn.problem.validation import MAX_LENGTH
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
    reasons = _reasons(given) + [
        f"{name} = {shown(sizes[name])}: must be an int from 0 to {MAX_LENGTH}; correct it"
        for name, number in numbers.items()
        if number is None or not 0 <= number <= MAX_LENGTH
    ]
    if reasons:
        raise NotSupported(reasons)
    return score_term.dropout_mask(given, *(number or 0 for number in numbers.values()))


def _reasons(dropout: Any) -> list[str]:
    if not isinstance(dropout, Dropout):
        return [f"dropout = {shown(dropout)}: must be a Dropout object; create one"]
    found = dropout_reasons(dropout)
    if type(dropout.dropout_p) is float and not 0 <= dropout.dropout_p <= 1:
        found.append(f"dropout_p = {shown(dropout.dropout_p)}: must be a probability from 0 to 1; correct it")
    if not found and type(dropout.philox_seed) is not int:
        found.append(f"philox_seed = {shown(dropout.philox_seed)}: must be an int here; copy it to the host")
    return found
