"""Calls whose rows are split over ranks: what one device computes, and what the ranks compute together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.distributed import attention, rows_of_rank, simulated
from cutlass_py_attn.distributed.group import Group
from cutlass_py_attn.problem.masks import Causal, Mask

Array = npt.NDArray[Any]
Results = dict[str, Array]

BATCH, ROWS, HEADS, HEAD_DIM = 2, 32, 8, 8


def cut(array: Array, axis: int, ranges: tuple[slice, ...]) -> Array:
    """Returns the concatenation of ranges along an axis."""
    index = (slice(None),) * axis
    return np.ascontiguousarray(np.concatenate([array[(*index, part)] for part in ranges], axis))


@dataclass(frozen=True)
class Case:
    """One call on all rows. options: of one device, arrays too; those of `terms` are drawn, by shape."""

    mask: Mask = field(default_factory=Causal)
    terms: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    heads_key: int = 4
    keys: int = ROWS
    batch: int = BATCH
    seed: int = 0

    def arrays(self) -> Results:
        """Returns every array of the call on all rows."""
        rng = np.random.default_rng(self.seed)
        shapes = {"query": (self.batch, ROWS, HEADS, HEAD_DIM), "grad_output": (self.batch, ROWS, HEADS, HEAD_DIM)}
        shapes |= dict.fromkeys(("key", "value"), (self.batch, self.keys, self.heads_key, HEAD_DIM))
        return {name: rng.standard_normal(shape, np.float32) for name, shape in {**shapes, **self.terms}.items()}

    @property
    def fixed(self) -> dict[str, Any]:
        """The options without arrays that have rows."""
        return {"mask": self.mask, "backend": "reference", **self.options}

    @property
    def gradients(self) -> tuple[str, ...]:
        """Names of the gradients."""
        return ("query", "key", "value", *self.terms)

    @functools.cached_property
    def one_device(self) -> Results:
        """Returns output, logsumexp and the gradients of all rows."""
        given = self.arrays()
        terms = {name: given[name] for name in self.terms}
        operands = [given[name] for name in ("query", "key", "value")]
        output, logsumexp = attention_forward(*operands, **terms, **self.fixed)
        found = attention_backward(
            given["grad_output"], *operands, output, logsumexp, gradients=self.gradients, **terms, **self.fixed
        )
        return {"output": output, "logsumexp": logsumexp, **{name: getattr(found, name) for name in self.gradients}}

    def backward_of(self, given: Mapping[str, Array]) -> Results:
        """Returns the gradients of all rows, of a call whose backward has other options than its forward."""
        operands = [given[name] for name in ("query", "key", "value")]
        results = attention_forward(*operands, mask=self.mask, backend="reference")
        found = attention_backward(given["grad_output"], *operands, *results, **self.fixed)
        return {name: getattr(found, name) for name in self.gradients}

    def of_rank(self, name: str, array: Array, rank: int, size: int, order: str | None) -> Array:
        """Returns a rank's part of an operand or a result."""
        axis = {"bias": 2, "logsumexp": 2}.get(name, 1)
        if name == "sinks" or (name == "bias" and array.shape[2] == 1):
            return array
        count = self.keys if name in ("key", "value") else ROWS
        return cut(array, axis, rows_of_rank(rank, size, count, order))

    def split(self, strategy: str, order: str | None, size: int, **others: Any) -> list[Results]:
        """Returns output, logsumexp and gradients of each rank. others: options of the group's run."""
        return simulated.run(size, lambda group: self.rank(group, strategy, order), **{"timeout": 30.0, **others})

    def rank(
        self,
        group: Group,
        strategy: str,
        order: str | None,
        convert: Callable[[Array], Any] = lambda array: array,
        backend: str = "reference",
    ) -> Results:
        """Returns the results of one rank. convert: makes the library's arrays."""
        whole = self.arrays()
        given = {
            name: convert(self.of_rank(name, array, group.rank, group.size, order)) for name, array in whole.items()
        }
        terms = {name: given[name] for name in self.terms}
        operands = [given[name] for name in ("query", "key", "value")]
        context = {**self.fixed, "group": group, "context_strategy": strategy, "load_balance": order}
        context["backend"] = backend
        output, logsumexp = attention.attention_forward(*operands, **context, **terms)
        found = attention.attention_backward(
            given["grad_output"],
            *operands,
            output,
            logsumexp,
            gradients=self.gradients,
            **context,
            **terms,
        )
        return {"output": output, "logsumexp": logsumexp, **{name: getattr(found, name) for name in self.gradients}}

    def expect(self, found: list[Results], order: str | None, atol: float = 2e-5) -> None:
        """Checks that every rank has its rows of one device's results."""
        expected, size = self.one_device, len(found)
        for rank, results in enumerate(found):
            for name, array in results.items():
                whole = expected[name]
                if name == "logsumexp":
                    if self.options.get("sequences") is not None:
                        continue  # of the ranks' own layout
                    whole, array = whole[..., :ROWS], array[..., : ROWS // size]
                part = self.of_rank(name, whole, rank, size, order)
                assert array.shape == part.shape, name
                np.testing.assert_allclose(array, part, rtol=2e-5, atol=atol, err_msg=f"{name} of rank {rank}")
