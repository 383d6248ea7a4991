"""Arguments of jax.nn.dot_product_attention, translated to those of `attention`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.jax import partition, sizes
from cutlass_py_attn.problem.masks import Causal, Full, Mask, Window
from cutlass_py_attn.problem.scalars import FLAG
from cutlass_py_attn.refusals import Refusal, refuse

KEYWORDS: Final = (  # of dot_product_attention, besides the options of `attention`
    *("bias", "mask", "scale", "is_causal", "query_seq_lengths", "key_value_seq_lengths", "local_window_size"),
    "return_residual",
)


@dataclass(frozen=True)
class Translated:
    """A call of `attention`, and how its results become those of jax.nn.dot_product_attention.

    shape: of the output
    queries: query_seq_lengths (batch,); None for all rows
    """

    operands: dict[str, Any]
    options: dict[str, Any]
    shape: tuple[int, ...]
    queries: Any

    def output(self, output: Any) -> Any:
        """Returns the output, 0 in rows beyond query_seq_lengths."""
        if self.queries is not None:
            output = jnp.where(self._used_rows()[..., None], output.reshape(-1, *self.shape[-3:]), 0)
        return output.reshape(self.shape)

    def residual(self, logsumexp: Any) -> Any:
        """Returns logsumexp (batch, num_queries, num_heads) in the dtype of query; -inf in rows that see no key."""
        rows = jnp.swapaxes(logsumexp[:, :, : self.shape[-3]], 1, 2).reshape(-1, *self.shape[-3:-1])
        if self.queries is not None:
            rows = jnp.where(self._used_rows(), rows, -jnp.inf)
        return rows.reshape(self.shape[:-1]).astype(self.operands["query"].dtype)

    def _used_rows(self) -> Any:
        """Returns whether a row is before query_seq_lengths, (batch, num_queries, 1)."""
        return jnp.arange(self.shape[-3])[None, :, None] < self.queries[:, None, None]


@dataclass(frozen=True)
class Arguments:
    """Arguments of jax.nn.dot_product_attention, under their names there."""

    query: Any
    key: Any
    value: Any
    bias: Any
    mask: Any
    is_causal: Any
    query_seq_lengths: Any
    key_value_seq_lengths: Any
    local_window_size: Any

    def translate(self, others: list[Refusal]) -> Translated:
        """Returns the call; NotSupported lists every wrong argument. others: why other arguments are refused."""
        arguments = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if symbolic := [*sizes.refusals(arguments)]:
            raise NotSupported([*others, *symbolic])
        checks = self._wrong_arrays, self._wrong_lengths, self._wrong_window
        if refusals := [*others, *(refusal for check in checks for refusal in check())]:
            raise NotSupported(refusals)
        arrays = {name: _four_axes(getattr(self, name)) for name in ("query", "key", "value", "bias", "mask")}
        query, key, value = (arrays[name] for name in ("query", "key", "value"))
        lengths = None if self.key_value_seq_lengths is None else jnp.asarray(self.key_value_seq_lengths)
        mask = self._band(query.shape[1], key.shape[1])
        options = {"mask": mask}
        visible = arrays["mask"]
        if lengths is not None:
            has_scores = visible is not None or arrays["bias"] is not None
            if not has_scores and not isinstance(mask, Window) and not partition.splits_axis(query, 0):
                return self._packed(query, key, value, lengths, options)
            used = jnp.arange(key.shape[1])[None, None, None, :] < lengths[:, None, None, None]
            visible = used if visible is None else visible & used
        if (bias := _bias(arrays["bias"], visible, query.dtype)) is not None:
            options["bias"] = bias
        operands = {"query": query, "key": key, "value": value}
        return Translated(operands, options, self._shape(), self._queries())

    def _packed(self, query: Any, key: Any, value: Any, lengths: Any, options: dict[str, Any]) -> Translated:
        """Returns a call with variable lengths: the padded sequences follow one another as they are stored."""
        batch, rows, keys = query.shape[0], query.shape[1], key.shape[1]
        starts = np.arange(batch + 1, dtype=np.int32)
        used = jnp.clip(lengths, 0, keys).astype(jnp.int32)
        options = {**options, "sequences": VariableLength(starts * rows, starts * keys, rows, keys, used)}
        arrays = {"query": query, "key": key, "value": value}
        operands = {name: array.reshape(1, -1, *array.shape[2:]) for name, array in arrays.items()}
        return Translated(operands, options, self._shape(), self._queries())

    def _shape(self) -> tuple[int, ...]:
        return (*jnp.shape(self.query)[:-1], jnp.shape(self.value)[-1])

    def _queries(self) -> Any:
        return None if self.query_seq_lengths is None else jnp.asarray(self.query_seq_lengths)

    def _band(self, rows: int, keys: int) -> Mask:
        """Returns the mask of is_causal and local_window_size, which count from the first query and the first key."""
        if self.local_window_size is None:
            return Causal() if self.is_causal else Full()
        left, right = self._window()
        if self.is_causal:
            return Causal(left + 1)
        shift = keys - rows  # Window counts from the last query and the last key
        if left + shift < 0 or right - shift < 0:
            raise NotSupported(
                f"local_window_size = {self.local_window_size} with {rows} queries and {keys} keys: must reach the "
                "diagonal that ends in the last query and key; pass as many keys as queries, or is_causal=True"
            )
        return Window(left + shift, right - shift)

    def _window(self) -> tuple[int, int]:
        given = self.local_window_size
        left, right = given if isinstance(given, tuple) else (given, given)
        return int(left), int(right)

    def _wrong_arrays(self) -> Iterator[Refusal]:
        for name in ("query", "key", "value"):
            given = getattr(self, name)
            if (rank := _rank(given)) not in (3, 4):
                axes = "no" if rank is None else rank
                rule = f"must be an array (batch, length, heads, head_dim), or without the batch; it has {axes} axes"
                yield refuse(name, given, rule, "reshape it")
        for name in ("bias", "mask"):
            given = getattr(self, name)
            if given is not None and ((rank := _rank(given)) is None or rank > 4):
                yield refuse(name, given, "must be an array of at most 4 axes, or None", "reshape it")
        if _rank(self.bias) is not None and jnp.asarray(self.bias).dtype == bool:
            rule = "must be of floating point, for a bias is added, and True would add 1"
            yield refuse("bias", self.bias, rule, "pass it as mask, True where a key is visible")
        yield from self._wrong_broadcasts()
        if _rank(self.mask) is not None and jnp.asarray(self.mask).dtype != bool:
            remedy = "pass mask.astype(bool) of ones and zeros, or as bias what is to be added to the scores"
            yield refuse("mask", self.mask, "must be bool, True where a key is visible", remedy)
        if not isinstance(self.is_causal, bool):
            yield FLAG.refusal("is_causal", self.is_causal)

    def _wrong_broadcasts(self) -> Iterator[Refusal]:
        if any(_rank(array) not in (3, 4) for array in (self.query, self.key)):
            return
        (batch, rows, heads, _), (_, keys, _, _) = (_four_axes(array).shape for array in (self.query, self.key))
        scores = batch, heads, rows, keys
        for name in ("bias", "mask"):
            rank = _rank(given := getattr(self, name))
            if rank is None or rank > 4:
                continue
            shape = _four_axes(given).shape
            if any(size not in (1, whole) for size, whole in zip(shape, scores, strict=True)):
                rule = f"must broadcast to {scores}, (batch, num_heads, num_queries, num_keys)"
                yield refuse(f"{name}.shape", jnp.shape(given), rule, "reshape it")

    def _wrong_lengths(self) -> Iterator[Refusal]:
        rank = _rank(self.query)
        batch = jnp.shape(self.query)[0] if rank == 4 else 1
        for name in ("query_seq_lengths", "key_value_seq_lengths"):
            given = getattr(self, name)
            if given is None:
                continue
            if _rank(given) != 1 or not _is_integer(given) or (rank in (3, 4) and jnp.shape(given) != (batch,)):
                yield refuse(name, given, f"must be an integer array of shape ({batch},)", "convert it")

    def _wrong_window(self) -> Iterator[Refusal]:
        given = self.local_window_size
        edges = given if isinstance(given, tuple) and len(given) == 2 else (given,)
        if given is not None and not all(_is_size(edge) for edge in edges):
            rule = "must be an int of at least 0, or (left, right) of two, or None"
            yield refuse("local_window_size", given, rule, "correct it")


def _rank(array: Any) -> int | None:
    """Returns the number of axes; None for what is no array."""
    try:
        return None if array is None else jnp.asarray(array).ndim
    except Exception:  # the library of an array decides its type
        return None


def _is_integer(array: Any) -> bool:
    return bool(jnp.issubdtype(jnp.asarray(array).dtype, jnp.integer))


def _is_size(number: Any) -> bool:
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool) and int(number) >= 0


def _four_axes(array: Any) -> Any:
    """Returns the array with axes of size 1 in front; None for None."""
    if array is None:
        return None
    array = jnp.asarray(array)
    return array.reshape(*(1,) * (4 - array.ndim), *array.shape)


def _bias(bias: Any, visible: Any, dtype: Any) -> Any:
    """Returns the bias of a call, -inf where `visible` is False: such a key has a weight of exactly 0."""
    bias = None if bias is None else bias.astype(dtype)
    if visible is None:
        return bias
    return jnp.where(visible, jnp.zeros((), dtype) if bias is None else bias, jnp.asarray(-jnp.inf, dtype))
