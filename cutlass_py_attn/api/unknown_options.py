"""Options that a function does not have: misspelt ones, and those of FlashAttention, PyTorch, JAX and Flax."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, ParamSpec, TypeVar, cast

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.refusals import Refusal, one_of, refuse
from cutlass_py_attn.suggestions import did_you_mean, nearest

P = ParamSpec("P")
R = TypeVar("R")

_CAUSAL: Final = (("is_causal", "pass is_causal=True"), ("mask", "pass mask=Causal()"))
_WINDOW: Final = (
    ("local_window_size", "pass local_window_size=(left, right)"),
    ("mask", "pass mask=Causal(window_size=...) or mask=Window(left, right)"),
)
_SCALE: Final = (("scale", "pass scale="),)
_MASK: Final = (("is_causal", "pass mask=, or bias="), ("bias", "pass mask=, or bias="))
_LENGTHS: Final = (
    ("key_value_seq_lengths", "pass query_seq_lengths= and key_value_seq_lengths="),
    ("sequences", "pass sequences=VariableLength(...)"),
)
_PAGES: Final = (("sequences", "pass sequences=Paged(...)"),)
_DROPOUT: Final = (
    ("dropout_p", "pass dropout_p= and dropout_key="),
    ("dropout", "pass dropout=Dropout(dropout_p, philox_seed, philox_offset)"),
)
_LOGSUMEXP: Final = (
    ("return_residual", "pass return_residual=True"),
    ("return_logsumexp", "pass return_logsumexp=True"),
)
# What an argument of another function is here: the first remedy whose option the function has.
_ELSEWHERE: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    **dict.fromkeys(("causal", "is_causal"), _CAUSAL),
    **dict.fromkeys(("window_size", "local_window_size"), _WINDOW),
    **dict.fromkeys(("softmax_scale", "sm_scale"), _SCALE),
    **dict.fromkeys(("attn_mask", "attn_bias"), _MASK),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "query_seq_lengths", "key_value_seq_lengths"), _LENGTHS),
    "segment_ids": (
        ("is_causal", "call attention with sequences=packed_sequences(segment_ids, ...)"),
        ("dropout_key", "pass sequences=packed_sequences(segment_ids, ...)"),
        _LENGTHS[1],
    ),
    **dict.fromkeys(("page_table", "block_table"), _PAGES),
    **dict.fromkeys(("dropout", "dropout_p", "dropout_rate"), _DROPOUT),
    **dict.fromkeys(("dropout_rng", "dropout_key"), (("dropout_key", "pass dropout_key="), _DROPOUT[1])),
    **dict.fromkeys(("return_residual", "return_logsumexp", "return_lse", "return_softmax_lse"), _LOGSUMEXP),
    "implementation": (("backend", "pass backend=, or leave it out to compute on the GPU"),),
}


def refusals(given: Iterable[str], known: Collection[str]) -> list[Refusal]:
    """Returns why names of options are refused: those that a function, whose options are `known`, does not have."""
    return [refuse("option", name, one_of(known), _remedy(name, known)) for name in given if name not in known]


def refuses_unknown_options(*more: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function with keywords: NotSupported in place of TypeError for one that it does not have.

    more: names among its `**options`
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        declared = inspect.signature(function).parameters.values()
        own = (parameter.name for parameter in declared if parameter.kind is not inspect.Parameter.VAR_KEYWORD)
        known = dict.fromkeys((*own, *more))

        @functools.wraps(function)
        def checked(*arguments: Any, **options: Any) -> Any:
            if not options.keys() <= known.keys():
                raise NotSupported(refusals(options, known))
            return cast("Any", function)(*arguments, **options)

        return cast("Callable[P, R]", checked)

    return decorate


def _remedy(name: str, known: Collection[str]) -> str:
    elsewhere = {
        other: remedy
        for other, remedies in _ELSEWHERE.items()
        for remedy in [next((text for option, text in remedies if option in known), None)]
        if other not in known and remedy is not None
    }
    closest = next(iter(nearest(name, (*known, *elsewhere))), None)
    return elsewhere.get(closest or "") or did_you_mean(name, known, "check the spelling, or leave it out")
