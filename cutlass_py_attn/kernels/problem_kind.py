"""Problem kind: what a problem and the kernels that compute it have in common, whatever the sizes; and the sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.variants import MLA, MLA_HEAD_DIMS
from cutlass_py_attn.problem.masks import Form
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import FLOAT8

NARROW_HEAD_DIM: Final = 128  # beyond, the backward has no registers for the scores of a whole query tile


@dataclass(frozen=True, slots=True)
class ProblemKind:
    """What decides the rows of a tile table, their options and their rules; the same for a Problem and for its Builds.

    form: of the mask
    is_mla: whether it is the forward of a latent cache that variant mla serves: value is in key, 576 / 512
    """

    direction: str
    dtype: str
    head_dim: int
    head_dim_value: int
    form: Form
    features: tuple[str, ...]
    deterministic: bool
    is_mla: bool

    @staticmethod
    def of(source: Problem | Build) -> ProblemKind:
        """Returns the kind of a problem, or that of the problems that a build computes."""
        if isinstance(source, Build):
            names = source.kind, source.dtype, source.head_dim, source.head_dim_value, source.form
            latent = source.variant == MLA
        else:
            shape = source.shape
            names = source.direction, source.dtype, shape.head_dim, shape.head_dim_value, source.form
            latent = is_mla(source)
        return ProblemKind(*names, source.features, source.deterministic, latent)

    @property
    def dims(self) -> tuple[int, int]:
        """Head dims of key and of value."""
        return self.head_dim, self.head_dim_value

    @property
    def accumulator_head_dim(self) -> int:
        """The head dim that decides the tile of both head dims.

        A 16-bit forward accumulates O alone, a backward dK and dV. Narrow heads have registers for the wider of these.
        """
        widest = max(self.dims)
        if self.dtype == "float32":
            return widest
        if self.direction == "forward":
            return self.head_dim_value
        return widest if widest <= NARROW_HEAD_DIM else max(ceil_div(sum(self.dims), 2), NARROW_HEAD_DIM + 1)

    def has_no_more_than(self, *features: str) -> bool:
        """Returns whether the features are among these."""
        return {*self.features} <= {*features}


def is_mla(problem: Problem) -> bool:
    """Returns `ProblemKind.is_mla` of a problem."""
    dims = problem.shape.head_dim, problem.shape.head_dim_value
    is_forward = problem.direction == "forward" and problem.dtype != FLOAT8
    return is_forward and problem.value_in_key and dims == MLA_HEAD_DIMS


def sizes(problem: Problem, num_sms: int) -> dict[str, int]:
    """Returns the values of the names in the rules of rows."""
    shape, (_, window_right) = problem.shape, problem.mask.edges
    names = "batch", "num_heads", "num_heads_key", "num_queries", "num_keys", "group"
    values = {name: getattr(shape, name) for name in names} | {"num_sms": num_sms, "window_right": window_right}
    values["bottom_right"] = int(problem.mask.bottom_right)
    return values if shape.tokens is None else values | dict(zip(("tokens_q", "tokens_k"), shape.tokens, strict=True))
