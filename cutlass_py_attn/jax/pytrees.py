"""Pytrees: what JAX takes apart into arrays of an option, its leaves, and what is static."""

from __future__ import annotations

from typing import Any, Final

import jax
import numpy as np

from cutlass_py_attn.api.options import VariableLength, option_value
from cutlass_py_attn.api.paged import Paged
from cutlass_py_attn.problem import mask_function
from cutlass_py_attn.problem.block_sparse import BlockSparse
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.mask_function import MaskFunction
from cutlass_py_attn.problem.masks import Mask
from cutlass_py_attn.problem.scalars import python_value
from cutlass_py_attn.problem.tensors import RANGE_EDGES

_ARRAYS: Final = {
    VariableLength: ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"),
    Paged: ("page_table", "seqused_k", "cu_seqlens_q", "page_indptr"),
    KeyRanges: RANGE_EDGES,
}
_STATIC: Final = {
    VariableLength: ("max_seqlen_q", "max_seqlen_k"),
    Paged: ("max_seqlen_q", "invariant"),
    KeyRanges: ("band",),
}


def register() -> None:
    """Registers VariableLength, Paged and masks in memory with JAX: arrays are leaves, all else is static."""
    for kind in _ARRAYS:
        _register(kind)
    _register_blocks()
    _register_functions()


def _register(kind: type[Any]) -> None:
    arrays, static = _ARRAYS[kind], _STATIC[kind]
    keys = [jax.tree_util.GetAttrKey(name) for name in arrays]

    def flatten(option: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        plain = option_value("", option)
        leaves = (getattr(plain, name) for name in arrays)
        others = tuple(python_value(getattr(plain, name)) for name in static)
        return tuple(np.asarray(leaf) if isinstance(leaf, (list, tuple)) else leaf for leaf in leaves), others

    def flatten_with_keys(option: Any) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        leaves, others = flatten(option)
        return tuple(zip(keys, leaves, strict=True)), others

    def unflatten(others: tuple[Any, ...], leaves: tuple[Any, ...]) -> Any:
        return kind(**dict(zip((*arrays, *static), (*leaves, *others), strict=True)))

    jax.tree_util.register_pytree_with_keys(kind, flatten_with_keys, unflatten, flatten)


def _register_blocks() -> None:
    """Registers BlockSparse, whose mask within the blocks is static, or ranges with leaves of their own."""
    names = "visible_blocks", "within"
    keys = [jax.tree_util.GetAttrKey(name) for name in names]

    def flatten(option: BlockSparse) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        within = option_value("", option.within)
        has_ranges = isinstance(within, KeyRanges)
        ranges, static = (within, None) if has_ranges else (None, within)
        return (option.visible_blocks, ranges), (option.block_size, static)

    def flatten_with_keys(option: BlockSparse) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        children, static = flatten(option)
        return tuple(zip(keys, children, strict=True)), static

    def unflatten(static: tuple[Any, ...], children: tuple[Any, ...]) -> BlockSparse:
        blocks, ranges = children
        block_size, within = static
        return BlockSparse(blocks, block_size, ranges if within is None else within)

    jax.tree_util.register_pytree_with_keys(BlockSparse, flatten_with_keys, unflatten, flatten)


def _register_functions() -> None:
    """Registers MaskFunction, whose arrays are leaves by name; its program and integers are static."""
    keys = [jax.tree_util.GetAttrKey(name) for name in ("arguments", "within")]

    def flatten(option: MaskFunction) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        arrays = {name: option.arguments[name] for name in option.array_names}
        integers = tuple((name, option.arguments[name]) for name in option.arguments if name not in arrays)
        is_static = isinstance(option.within, Mask)
        static, within = (option_value("", option.within), None) if is_static else (None, option.within)
        return (arrays, within), (option.program, option.array_names, integers, static)

    def flatten_with_keys(option: MaskFunction) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        children, static = flatten(option)
        return tuple(zip(keys, children, strict=True)), static

    def unflatten(static: tuple[Any, ...], children: tuple[Any, ...]) -> MaskFunction:
        arrays, within = children
        program, names, integers, mask = static
        arguments = {**{name: arrays[name] for name in names}, **dict(integers)}
        return mask_function.unchecked(program, arguments, names, within if mask is None else mask)

    jax.tree_util.register_pytree_with_keys(MaskFunction, flatten_with_keys, unflatten, flatten)
