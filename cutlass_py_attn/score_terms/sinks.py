"""Sinks: one more logit in the softmax of every row of a head, without a value (Xiao et al. 2024, StreamingLLM).

    logsumexp_i = log(exp(sink) + sum_j exp(S_ij)),   dsink = -sum_i exp(sink - logsumexp_i) delta_i

A sink changes no score: the forward adds it to the sum of each row when all keys are seen, and
kernels/backward_parts/grad_sinks.py computes its gradient from the row statistics of the backward.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cutlass_py_attn.score_terms.term import ScoreTerm, StructFields, VectorOperand

LOG2_E = math.log2(math.e)


class Sinks(ScoreTerm):
    """Attention sinks as learned logits, float32 (num_heads,); they have a gradient."""

    name = "sinks"
    field = "sinks"
    gradient = "sinks"
    needs_registers_sm90 = False
    vector = VectorOperand("sinks", (("num_heads",),), "logit of each head that joins the softmax's denominator")
    struct = StructFields(addresses=("sinks",))
    tile_tables = ()
    modifies_scores = False

    def weight(self, exponential: Any, sink: Any, maximum: Any) -> Any:
        """Returns exp(sink - maximum), in the base of `exponential`.

        The forward adds it to the sum of a row whose scores are relative to `maximum`. With the logsumexp as `maximum`
        it is the softmax weight of the sink, which -delta multiplies in the gradient.
        """
        return exponential(sink - maximum)

    def reference_weight(self, sink: float, maximum: Any, dtype: np.dtype[Any]) -> Any:
        """Returns `weight` in NumPy."""
        return self.weight(np.exp, dtype.type(sink), maximum)


SINKS = Sinks()
