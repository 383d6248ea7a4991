"""Conditions: what sizes and strides other than the exported ones must satisfy, as rules with their sentences."""

from __future__ import annotations

from collections.abc import Iterator

from cutlass_py_attn import decode, kernels, planner
from cutlass_py_attn.bundle.rules import WHOLE, bias_axes, shape
from cutlass_py_attn.checks import MAX_LENGTH
from cutlass_py_attn.masks import UNLIMITED
from cutlass_py_attn.plan import Build
from cutlass_py_attn.problem import BIASES, BMHK, Problem

Condition = tuple[str, str]  # (rule, what it asks in words)

EDGES = {"full": (), "causal": ("window_right",), "local": ("window_left", "window_right")}  # that a form reads
_AXES = ("batch", "row", "head")


def conditions(problem: Problem, build: Build) -> list[Condition]:
    """Everything that must hold; each rule is 1 (true) for the exported problem."""
    return [
        *_sizes(problem, build),
        *_edges(build),
        *_strides(problem, build),
        *_biases(problem, build),
        *_factors(build),
        *(_decode() if build.family == "decode" else ()),
    ]


def mapped(build: Build) -> tuple[str, ...]:
    """The tensors that the main kernel reads through a tensor map, in the order of its parameters."""
    names = (name for name, _ in kernels.parameters(build))
    return tuple(name.removeprefix("map_") for name in names if name.startswith("map_"))


def _sizes(problem: Problem, build: Build) -> Iterator[Condition]:
    for name in ("batch", "num_queries", "num_keys", "num_heads_key"):
        yield f"{name} >= 1", f"{name} must be at least 1; with none there is nothing to launch"
    for name, most in (("batch", planner.MAX_GRID_YZ), ("num_heads", planner.MAX_GRID_YZ),
                       ("num_queries", MAX_LENGTH), ("num_keys", MAX_LENGTH)):  # fmt: skip
        yield f"{name} <= {most}", f"{name} must be at most {most}; call once for each slice"
    if build.has("grouped"):
        yield "mod(num_heads, max(num_heads_key, 1)) == 0", "num_heads must be a multiple of num_heads_key"
    else:
        yield "num_heads == num_heads_key", "num_heads must be num_heads_key; export a problem with grouped heads"
    if problem.sequences is not None:
        yield "num_queries <= tokens_q", "num_queries, of the longest sequence, must be at most tokens_q"
        yield "num_keys <= tokens_k", "num_keys, of the longest sequence, must be at most tokens_k"


def _edges(build: Build) -> Iterator[Condition]:
    for name in EDGES[build.mask]:
        yield f"{name} >= 0", f"{name} must be at least 0"
        yield f"{name} <= {UNLIMITED}", f"{name} must be at most {UNLIMITED}, which stands for no limit"
    if EDGES[build.mask]:
        yield "bottom_right * (1 - bottom_right) == 0", "bottom_right must be 0 or 1"


def _strides(problem: Problem, build: Build) -> Iterator[Condition]:
    """Multiples of what one load brings; above 0 where a tensor map steps."""
    unit = build.access_bytes // build.item_bytes
    for name in (name for name in problem.tensors() if name in BMHK):
        for axis, size in zip(_AXES, shape(problem, name), strict=False):
            stride = f"{name}_{axis}"
            if unit > 1:
                yield f"mod(step({size}, {stride}, 0), {unit}) == 0", f"{stride} must be a multiple of {unit} elements"
            if name in mapped(build):
                yield f"step({size}, {stride}, 1) > 0", f"{stride} must be above 0: a tensor map steps forward"
    if unit > 1 and problem.grad_output is not None:
        yield "grad_output_column == 1", "grad_output_column must be 1: rows are read several elements at a time"


def _biases(problem: Problem, build: Build) -> Iterator[Condition]:
    access = {"bias": build.bias_access_bytes, "grad_bias": build.grad_bias_access_bytes}
    for name in (name for name in BIASES if access[name] > build.item_bytes):
        unit = access[name] // build.item_bytes
        for stride in (f"{name}_batch", f"{name}_head", f"{name}_row"):
            yield f"mod({stride}, {unit}) == 0", f"{stride} must be a multiple of {unit} elements"
        yield f"{name}_column == 1", f"{name}_column must be 1: rows are read {unit} elements at a time"
        yield f"mod(num_keys, {unit}) == 0", f"num_keys must be a multiple of {unit}, for {name}"
    if problem.grad_bias is None:
        return
    summed = "" if build.bias_gradient in ("main", "none") else build.bias_gradient
    for letter, size, name in zip("bhqk", bias_axes(problem.grad_bias), WHOLE, strict=True):
        if size == "1" and letter not in summed:
            yield f"{name} == 1", f"{name} must be 1: grad_bias is not summed over it; export a problem with more"


def _factors(build: Build) -> Iterator[Condition]:
    if build.kind == "forward" and build.family == "hopper":
        yield "scale >= 0", "scale must not be below 0; export a problem with such a scale"
    if build.has("softcap"):
        yield "softcap > 0", "softcap must be above 0"


def _decode() -> Iterator[Condition]:
    yield f"num_queries <= {decode.MAX_QUERIES}", f"num_queries must be at most {decode.MAX_QUERIES}"
    yield f"num_queries * group <= {decode.MAX_ROWS}", f"num_queries * group must be at most {decode.MAX_ROWS}"
    yield f"num_keys >= {decode.MIN_KEYS}", f"num_keys must be at least {decode.MIN_KEYS}"
