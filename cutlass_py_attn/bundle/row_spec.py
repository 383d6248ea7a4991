"""Row specs: the kernels of `append_to_cache` and `merge_states` as one word each, for the command line.

    append_{DTYPE}_d{D}[v{DV}][_e4m3|_e4m3_row]    rows for a cache of that dtype; e4m3 by given scales, or of each row
    append_{DTYPE}_d{D}[v{DV}]_e4m3_tile           rows for a latent cache: D columns of e4m3 codes, DV of that dtype
    merge_{DTYPE}_d{D}[_varlen]                    head_dim_value D; varlen: packed outputs

DTYPE is bf16, f16 or f32. Tokens, heads, pages and strides decide no kernel.
"""

from __future__ import annotations

import re
from typing import Final

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.append import GIVEN_SCALES, NO_SCALES, ROW_SCALES, TILE_SCALES, AppendProblem
from cutlass_py_attn.problem.merge import MergeProblem
from cutlass_py_attn.problem.tensors import SHORT_NAMES

_DTYPES: Final = {short: name for name, short in SHORT_NAMES.items()}
_DTYPE: Final = rf"(?P<dtype>{'|'.join(_DTYPES)})"
_APPEND: Final = re.compile(
    rf"append_{_DTYPE}_d(?P<dim>\d+)(?:v(?P<dim_value>\d+))?(?P<scales>_e4m3_row|_e4m3_tile|_e4m3)?"
)
_MERGE: Final = re.compile(rf"merge_{_DTYPE}_d(?P<dim>\d+)(?P<packed>_varlen)?")
_SCALES: Final = {None: NO_SCALES, "_e4m3": GIVEN_SCALES, "_e4m3_row": ROW_SCALES, "_e4m3_tile": TILE_SCALES}


def parse(text: str) -> AppendProblem | MergeProblem:
    """Returns the problem of a word, with sizes of 1; NotSupported says how a word is written."""
    if found := _APPEND.fullmatch(text):
        dims = int(found["dim"]), int(found["dim_value"] or 0)
        shape = 1, 1, dims[0]
        scales = _SCALES[found["scales"]]
        return AppendProblem.dense(shape, (1, 1), _DTYPES[found["dtype"]], head_dim_value=dims[1], scales=scales)
    if found := _MERGE.fullmatch(text):
        dtype, columns = _DTYPES[found["dtype"]], int(found["dim"])
        packed, dense = MergeProblem.packed(1, 1, (1, 1, columns), dtype), MergeProblem.dense((1, 1, 1, columns), dtype)
        return packed if found["packed"] else dense
    raise NotSupported(
        f"problem {text!r}: must be append_DTYPE_dD[vDV][_e4m3|_e4m3_row|_e4m3_tile] or merge_DTYPE_dD[_varlen], DTYPE "
        f"one of {', '.join(_DTYPES)}; write it like append_bf16_d128 or merge_f16_d64_varlen"
    )
