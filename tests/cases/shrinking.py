"""Shrinking: reduces a case that fails to a smaller one that fails too.

A step drops a feature, takes simpler inputs or a simpler layout, or reduces a size. Steps that keep the kernel come
first, because a machine without the compiler has no other kernels; `shrink` never asks which kernels there are: a case
whose kernel is absent does not fail in the way that is looked for.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final

from cutlass_py_attn.problem.masks import Full
from cutlass_py_attn.problem.spec import ProblemSpec, SequenceLengths
from cutlass_py_attn.testing.cases import Case

MAX_TRIES: Final = 400
SMALL_DIM: Final = 64
SIMPLE_RANGES: Final = ("all", "causal", "runs")  # families of ranges of keys, the simplest first


def shrink(case: Case, fails: Callable[[Case], bool], tries: int = MAX_TRIES) -> Case:
    """Returns the smallest case that was found to fail; `case` itself if no smaller one does.

    fails: runs a case, and returns whether it fails as `case` does
    tries: cases to run at most

    A smaller case that fails is taken at once, and the steps start again from it, until none of its steps fails.
    """
    tried = {case}
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in smaller(case):
            if candidate in tried or len(tried) > tries or not _is_problem(candidate):
                continue
            tried.add(candidate)
            if fails(candidate):
                case, is_smaller = candidate, True
                break
    return case


def smaller(case: Case) -> Iterator[Case]:
    """Yields cases that are one step smaller or simpler, the largest steps first."""
    yield from _smaller_sizes(case)
    yield from _simpler_numbers(case)
    yield from _simpler_inputs(case)
    yield from _without_features(case)


def _is_problem(case: Case) -> bool:
    """Whether the case is valid, and launches kernels."""
    try:
        return case.needs_kernels
    except ValueError:
        return False


def _smaller_sizes(case: Case) -> Iterator[Case]:
    spec = case.spec
    if spec.sequences:
        for number in range(len(spec.sequences)):
            rest = (*spec.sequences[:number], *spec.sequences[number + 1 :])
            if rest:
                yield case.replace(sequences=rest)
        for number, each in enumerate(spec.sequences):
            for lengths in _smaller_lengths(each):
                changed = (*spec.sequences[:number], lengths, *spec.sequences[number + 1 :])
                yield case.replace(sequences=changed)
    else:
        yield from (case.replace(batch=size) for size in _smaller_numbers(spec.batch))
        yield from (case.replace(num_queries=size) for size in _smaller_numbers(spec.num_queries))
        yield from (case.replace(num_keys=size) for size in _smaller_numbers(spec.num_keys))
    group = spec.num_heads // spec.num_heads_key
    for heads in _smaller_numbers(spec.num_heads_key):
        yield case.replace(num_heads=heads * group, num_heads_key=heads)
    for size in _smaller_numbers(group):
        if size > 1:  # a group of one is another kernel
            yield case.replace(num_heads=spec.num_heads_key * size, num_heads_key=spec.num_heads_key)


def _smaller_numbers(number: int) -> Iterator[int]:
    """Yields 1, the half and one less, without repeats."""
    yield from dict.fromkeys(size for size in (1, number // 2, number - 1) if 0 < size < number)


def _smaller_lengths(lengths: SequenceLengths) -> Iterator[SequenceLengths]:
    used = lengths.used_keys
    yield from (dataclasses.replace(lengths, num_queries=size) for size in _smaller_numbers(lengths.num_queries))
    for size in _smaller_numbers(lengths.num_keys):
        yield SequenceLengths(lengths.num_queries, size, None if used is None else min(used, size))
    if used is not None:
        yield from (dataclasses.replace(lengths, used_keys=size) for size in _smaller_numbers(used))


def _simpler_numbers(case: Case) -> Iterator[Case]:
    """Yields cases with usual numbers, which do not decide the machine code."""
    spec, mask = case.spec, case.spec.mask
    if case.philox_seed or case.philox_offset:
        yield case.replace(philox_seed=0, philox_offset=0)
    for name in ("scale", "num_splits_key"):
        if getattr(spec, name) is not None:
            yield case.replace(**{name: None})
    if spec.philox_on_device:
        yield case.replace(philox_on_device=False)
    if case.seed:
        yield case.replace(seed=0)
    for name in ("window_size", "window_left", "window_right"):
        for size in _smaller_numbers(getattr(mask, name, None) or 0):
            yield case.replace(mask=dataclasses.replace(mask, **{name: size}))
    if spec.block_share is not None:
        yield case.replace(block_axes="")
        yield case.replace(block_share=100)
    if spec.ranges:
        yield case.replace(ranges="11")
        simple = itertools.takewhile(lambda family: family != spec.range_family, SIMPLE_RANGES)
        yield from (case.replace(range_family=family) for family in simple)


def _simpler_inputs(case: Case) -> Iterator[Case]:
    defaults = {field.name: field.default for field in dataclasses.fields(case)}
    for name in ("inputs", "bias_inputs", "layout", "bias_layout", "range_layout", "table", "invariant"):
        if getattr(case, name) != defaults[name]:
            yield case.replace(**{name: defaults[name]})


def _without_features(case: Case) -> Iterator[Case]:
    """Yields cases without one of the features; most of them have another kernel."""
    spec = case.spec
    if spec.bias:
        without = {"bias": "", "bias_gradient": "", "gradients": _gradients(spec, "b")}
        yield _replaced(case, **without, bias_inputs="gaussian", bias_layout="dense")
    if spec.ranges:
        yield _replaced(case, ranges="", range_family="").replace(range_layout="dense")
    if spec.block_share is not None:
        yield _replaced(case, block_share=None, block_axes="", block_size=128)
    if spec.mask_function:
        yield _replaced(case, mask_function="")
    if spec.sinks:
        yield _replaced(case, sinks=False, gradients=_gradients(spec, "s"))
    if spec.dropout_p:
        yield case.replace(dropout_p=0.0, philox_on_device=False, philox_seed=0, philox_offset=0)
    changes: list[dict[str, Any]] = [{"softcap": 0.0}, {"alibi": ""}, {"deterministic": False}, {"mask": Full()}]
    if spec.has_used_keys:
        kept = (dataclasses.replace(each, used_keys=None) for each in spec.sequences)
        changes.append({"sequences": tuple(kept)})
    if spec.sequences:
        changes.append({"sequences": (), "batch": 1})
    if spec.num_heads_key != spec.num_heads:
        changes.append({"num_heads_key": spec.num_heads})
    if spec.head_dim_value != spec.head_dim:
        changes.append({"head_dim_value": spec.head_dim})
    changes += [{"head_dim": dim, "head_dim_value": dim} for dim in (SMALL_DIM,) if dim < spec.head_dim]
    for change in changes:
        if any(getattr(spec, name) != value for name, value in change.items()):
            yield _replaced(case, **change)


def _gradients(spec: ProblemSpec, letter: str) -> str:
    return spec.gradients.replace(letter, "") or "q"


def _replaced(case: Case, **changes: Any) -> Case:
    """Returns the case with fields changed; gradients stay as they are unless they are among the changes."""
    changes.setdefault("gradients", case.spec.gradients)
    return case.replace(**changes)
