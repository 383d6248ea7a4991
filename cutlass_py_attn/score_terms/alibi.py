"""ALiBi: -slope * |i + num_keys - num_queries - j| is added to the score of query i and key j (Press et al. 2022).

The distance counts from the diagonal that ends in the last query and key, to both sides. The slopes are constants: no
gradient reaches them, and the derivative by the score is 1.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.score_terms.term import ScoreTerm, StructFields, VectorOperand

Array = npt.NDArray[Any]

LOG2_E = math.log2(math.e)


class Alibi(ScoreTerm):
    """Attention with linear biases: one slope for each head, or for each batch and head."""

    name = "alibi"
    field = "alibi_slopes"
    vector = VectorOperand(
        "alibi_slopes", (("num_heads",), ("batch", "num_heads")), "slope of each head's linear bias", "alibi_batch"
    )
    struct = StructFields(addresses=("alibi_slopes", "alibi_batch"))
    needs_registers_sm90 = True
    meanings = (("alibi_batch", "elements from one batch of alibi_slopes to the next; 0 where they are the same"),)

    def load_operand(self, load: Any, p: Any, batch: Any, head: Any) -> Any:
        return super().load_operand(load, p, batch, head) * LOG2_E

    def modify_scores(self, row: Any, operand: Any) -> None:
        for column in range(row.num_columns):
            distance = row.absolute(row.float32(row.distance(column)))
            row[column] = row[column] - operand * distance

    def reference_added(self, tile: Any, operand: Any) -> Array:
        distance: Array = np.abs(tile.queries + tile.num_keys - tile.num_queries - tile.keys)
        return distance.astype(tile.dtype) * tile.dtype.type(-operand)
