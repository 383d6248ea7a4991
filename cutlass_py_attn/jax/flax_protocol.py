"""The arguments that Flax's attention modules give their attention_fn, translated to those of dot_product_attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.jax import dot_product
from cutlass_py_attn.problem.scalars import DROPOUT_P, FLAG, flag_of, number_of
from cutlass_py_attn.refusals import Refusal, refuse

# Precisions by the names that JAX gives them; the kernels multiply float32 as three products of TF32.
_PRECISIONS: Final = {
    **dict.fromkeys((None, "default", "fastest", "bfloat16", jax.lax.Precision.DEFAULT), "default"),
    **dict.fromkeys(("high", "tensorfloat32", "bfloat16_3x", jax.lax.Precision.HIGH), "high"),
    **dict.fromkeys(("highest", "float32", jax.lax.Precision.HIGHEST), "highest"),
}
# Arguments that replace a product or read the weights, neither of which exists outside of the kernels.
_OWN_PRODUCTS: Final = "the kernels have products of their own"
_REPLACED: Final = {
    "module": ("its weights would be sown, which no kernel stores", "call the module with sow_weights=False"),
    "einsum_dot_general": (_OWN_PRODUCTS, "leave it out"),
    "qk_attn_weights_einsum": (_OWN_PRODUCTS, "leave qk_attn_weights_einsum_cls out"),
    "attn_weights_value_einsum": (_OWN_PRODUCTS, "leave attn_weights_value_einsum_cls out"),
}


@dataclass(frozen=True)
class Arguments:
    """Arguments of flax.linen.dot_product_attention and flax.nnx.dot_product_attention, under their names there."""

    query: Any
    key: Any
    value: Any
    bias: Any
    mask: Any
    broadcast_dropout: Any
    dropout_rng: Any
    dropout_rate: Any
    deterministic: Any
    dtype: Any
    precision: Any
    module: Any
    force_fp32_for_softmax: Any
    einsum_dot_general: Any
    qk_attn_weights_einsum: Any
    attn_weights_value_einsum: Any
    promote_dtype: Any
    is_causal: Any

    def attend(self, attention: Callable[..., Any], options: Mapping[str, Any]) -> Any:
        """Returns the output of dot_product_attention, `attention`; NotSupported lists every wrong argument."""
        if wrong := [*self._wrong_arrays()]:
            raise NotSupported([*wrong, *self._refusals(None)])
        arrays = self._promoted()
        batch = arrays[0].shape[:-3]
        query, key, value = (array.reshape(-1, *array.shape[-3:]) if len(batch) > 1 else array for array in arrays)
        bias = None if self.bias is None else _with_one_batch_axis(jnp.asarray(self.bias), batch)
        mask = None if self.mask is None else _with_one_batch_axis(jnp.asarray(self.mask).astype(bool), batch)
        if refusals := [*self._refusals(query.dtype)]:
            dot_product.Arguments(query, key, value, bias, mask, self.is_causal, None, None, None).translate(refusals)
        if self._drops:
            options = {**options, "dropout_p": number_of(self.dropout_rate), "dropout_key": self.dropout_rng}
        output = attention(query, key, value, bias, mask, is_causal=self.is_causal, **options)
        return output.reshape(*batch, *output.shape[-3:])

    @property
    def _drops(self) -> bool:
        return not flag_of(self.deterministic) and number_of(self.dropout_rate) != 0

    def _promoted(self) -> tuple[Any, Any, Any]:
        """Returns query, key and value in `dtype`; without it in the dtype to which JAX promotes theirs."""
        arrays = self.query, self.key, self.value
        if self.promote_dtype is not None:
            query, key, value = self.promote_dtype(arrays, dtype=self.dtype)
        else:
            dtype = jnp.result_type(*arrays) if self.dtype is None else self.dtype
            query, key, value = (jnp.asarray(array).astype(dtype) for array in arrays)
        return query, key, value

    def _wrong_arrays(self) -> Iterator[Refusal]:
        for name in ("query", "key", "value"):
            array = getattr(self, name)
            if not hasattr(array, "dtype") or len(getattr(array, "shape", ())) < 3:
                rule = "must be an array (batch..., length, num_heads, head_dim)"
                yield refuse(name, array, rule, "reshape or convert it")
        for name in ("bias", "mask"):
            array = getattr(self, name)
            if array is not None and not hasattr(array, "dtype"):
                yield refuse(name, array, "must be an array, or None", "convert it")
        if _has_other_numbers(self.mask):
            rule = "must be bool, or of ones and zeros as Flax makes masks"
            remedy = "pass mask > 0 if a positive number means visible, or as bias what is to be added to the scores"
            yield refuse("mask", self.mask, rule, remedy)

    def _refusals(self, dtype: Any) -> Iterator[Refusal]:
        """Yields why arguments beside the arrays are refused. dtype: of the operands; None if they are wrong."""
        for name, (reason, remedy) in _REPLACED.items():
            if getattr(self, name) is not None:
                yield refuse(name, getattr(self, name), f"must be None, because {reason}", remedy)
        for name in ("broadcast_dropout", "deterministic", "force_fp32_for_softmax"):
            if flag_of(getattr(self, name)) is None:
                yield FLAG.refusal(name, getattr(self, name))
        rate = number_of(self.dropout_rate)
        if rate is None or not 0 <= rate <= 1:
            yield DROPOUT_P.refusal("dropout_rate", self.dropout_rate)
        elif self._drops:
            if flag_of(self.broadcast_dropout):
                rule = (
                    f"must be False with dropout_rate = {rate}, because the kernels drop weights of each batch and "
                    "head by themselves"
                )
                yield refuse("broadcast_dropout", True, rule, "pass broadcast_dropout=False to the module")
            if self.dropout_rng is None:
                rule = f"must be a key of jax.random with dropout_rate = {rate}"
                yield refuse("dropout_rng", None, rule, "pass one, or deterministic=True for no dropout")
        yield from self._wrong_precision(dtype)

    def _wrong_precision(self, dtype: Any) -> Iterator[Refusal]:
        parts = self.precision if isinstance(self.precision, tuple) else (self.precision,)
        try:
            found = {_PRECISIONS.get(part) for part in parts}
        except TypeError:  # an unhashable value
            found = {None}
        if None in found:
            rule = f"must be None or a jax.lax.Precision, because {_OWN_PRODUCTS}"
            yield refuse("precision", self.precision, rule, "leave it out")
        elif "highest" in found and dtype == jnp.float32:
            rule = (
                "must be None, DEFAULT or HIGH with float32, because the kernels compute a product of float32 by three "
                "of TF32"
            )
            yield refuse("precision", self.precision, rule, "leave it out")


def _has_other_numbers(mask: Any) -> bool:
    """Returns whether a mask whose values can be read has other numbers than ones and zeros, as an additive one has."""
    if not hasattr(mask, "dtype") or mask.dtype == bool or isinstance(mask, jax.core.Tracer):
        return False
    if not getattr(mask, "is_fully_addressable", True):
        return False
    numbers = np.asarray(mask)
    return bool(((numbers != 0) & (numbers != 1)).any())


def _with_one_batch_axis(array: Any, batch: tuple[int, ...]) -> Any:
    """Returns a bias or a mask whose axes before (num_heads, num_queries, num_keys) are one, as those of query are."""
    if len(batch) < 2 or array.ndim < 4:
        return array
    leading, rest = array.shape[:-3], array.shape[-3:]
    if math.prod(leading) == 1:
        return array.reshape(1, *rest)
    if len(leading) > len(batch) or any(
        size not in (1, whole) for size, whole in zip(leading[::-1], batch[::-1], strict=False)
    ):
        raise NotSupported(
            f"bias or mask has shape {array.shape}: must broadcast to {(*batch, *rest)}, (batch..., num_heads, "
            "num_queries, num_keys); reshape it"
        )
    whole = array.reshape(*(1,) * (len(batch) - len(leading)), *array.shape)
    return jnp.broadcast_to(whole, (*batch, *rest)).reshape(-1, *rest)
