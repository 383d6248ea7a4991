"""Score terms: what may change the attention scores or weights, one file for each term.

    bias, softcap, alibi    change the scores S = scale Q K^T before the mask and the softmax
    sinks                   add a logit to the denominator of the softmax
    dropout                 drops weights behind the softmax

A term's file holds everything about it: its name in symbols, its operands, its fields in the kernels' parameter struct,
its conditions, its device code, its NumPy reference and the derivatives of both. `register` adds a term of your own.
"""

from cutlass_py_attn.score_terms.registry import register, unregister
from cutlass_py_attn.score_terms.term import ScoreTerm, StructFields, VectorOperand

__all__ = ["ScoreTerm", "StructFields", "VectorOperand", "register", "unregister"]
