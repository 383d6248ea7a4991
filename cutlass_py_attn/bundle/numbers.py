"""Numbers: what a host passes to a launch beside addresses, and every address, each with its meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cutlass_py_attn import abi, packing, planner
from cutlass_py_attn.bundle import rules
from cutlass_py_attn.bundle.conditions import EDGES
from cutlass_py_attn.plan import Build
from cutlass_py_attn.problem import BIASES, LSE_PADDING, Problem, Tensor

_SIZES: Final = {
    "batch": "batch size",
    "num_queries": "queries of one sequence",
    "num_keys": "keys of one sequence",
    "num_heads": "heads of query",
    "num_heads_key": "heads of key and value, a divisor of num_heads",
}
_LONGEST: Final = {
    "batch": "number of sequences",
    "num_queries": "queries of the longest sequence, or more",
    "num_keys": "keys of the longest sequence, or more",
    "tokens_q": "rows of query: the queries of all sequences together, or more",
    "tokens_k": "rows of key: the keys of all sequences together, or more",
}
_OTHERS: Final = {
    "window_left": "keys seen before the diagonal's own",
    "window_right": "keys seen behind the diagonal's own; 0 is causal",
    "bottom_right": "1: the diagonal ends in the last query and key; 0: it starts in the first",
    "scale": "factor of Q K^T",
    "softcap": "bound of the scores: softcap * tanh(scale Q K^T / softcap)",
    "dropout_threshold": "int32 with the bits of the smallest 32-bit word that keeps a weight",
    "keep_scale": "factor of the weights that are kept: 1 / (1 - dropout_p)",
    "philox_seed": "key of the random numbers, all 64 bits",
    "philox_offset": "index of the first random word, all 64 bits",
    "alibi_batch": "elements from one batch of alibi_slopes to the next; 0 where they are the same",
}
_WORKSPACE: Final = {
    "grad_query_accum": "float32 sum of the query gradient, in the kernel's own order",
    "turn": "int32 turn of each query tile",
    "started": "int32 count of blocks, or of key tiles, that have started",
    "delta": "float32 rowsum(grad_output * output)",
    "logsumexp_log2": "float32 logsumexp in base 2",
    "partial_output": "float32 output of each block that shares keys",
    "partial_logsumexp": "float32 logsumexp of each block that shares keys, in base 2",
}
_DERIVED: Final = {
    "group": "query heads that share a key head",
    "num_splits_key": "blocks that share the keys of one head",
    "total_tiles": "query tiles of one head over the whole batch",
    "first_batch": "batch that grid position 0 stands for",
    "first_head": "head that grid position 0 stands for",
    "scale_log2": "scale * log2(e)",
}
_VECTORS: Final = {
    "alibi_slopes": "slope of each head's linear bias",
    "sinks": "logit of each head that joins the softmax's denominator",
    "grad_sinks": "gradient of sinks",
    "cu_seqlens_q": "where the queries of each sequence start; the last entry is where they end",
    "cu_seqlens_k": "where the keys of each sequence start; the last entry is where they end",
    "seqused_k": "keys that each sequence uses",
    "philox_seed": "key of the random numbers, in device memory",
    "philox_offset": "index of the first random word, in device memory",
}


@dataclass(frozen=True, slots=True)
class Input:
    """A number that the host may change from launch to launch: `value` is the exported problem's, type i64 or f64."""

    type: str
    value: float
    meaning: str


@dataclass(frozen=True, slots=True)
class Pointer:
    """An array in device memory: sizes as rules, strides as the names of inputs or rules, alignment in bytes."""

    dtype: str
    shape: tuple[str, ...]
    strides: tuple[str, ...]
    alignment: int
    access: str  # read or write
    meaning: str


def inputs(problem: Problem, build: Build) -> dict[str, Input]:
    """Sizes, strides (in elements), edges of the mask and factors, by name."""
    given = packing.numbers(problem)
    lengths = _LONGEST if problem.sequences is not None else {}
    found = {name: Input("i64", value, {**_SIZES, **lengths}[name]) for name, value in sizes(problem).items()}
    for name in problem.tensors():
        for axis in _strides(name):
            found[axis] = Input("i64", int(given[axis]), meaning(axis))
    if problem.alibi_slopes is not None:
        found["alibi_batch"] = Input("i64", int(given.get("alibi_batch", 0)), meaning("alibi_batch"))
    planned = dict(planner.sizes(problem, build))
    edges = EDGES[build.mask]
    numbers = [*edges, *(("bottom_right",) if edges else ()), *(("dropout_threshold",) if problem.dropout_p else ())]
    found |= {name: Input("i64", planned[name], meaning(name)) for name in numbers}
    present = {"scale": True, "softcap": problem.softcap, "keep_scale": problem.dropout_p}
    found |= {name: Input("f64", given[name], meaning(name)) for name, is_present in present.items() if is_present}
    if problem.dropout_p and not problem.philox_on_device:
        found |= {name: Input("i64", 0, _OTHERS[name]) for name in abi.SEED}
    return found


def sizes(problem: Problem) -> dict[str, int]:
    """The sizes of the problem by the names that rules use."""
    shape = problem.shape
    found = {name: getattr(shape, name) for name in _SIZES}
    return found | (dict(zip(("tokens_q", "tokens_k"), shape.tokens, strict=True)) if shape.tokens is not None else {})


def pointers(problem: Problem) -> dict[str, Pointer]:
    """Every array of the pass, in the order of `Bound.tensor_names`."""
    found = {}
    needed = packing.alignments(problem)
    for name, tensor in problem.tensors().items():
        strides = tuple(_strides(name)) if name in BIASES else (*_strides(name)[:3], "1")
        if name == "grad_output":
            strides = tuple(_strides(name))
        found[name] = Pointer(
            tensor.dtype, rules.shape(problem, name), strides, tensor.alignment, _access(problem, name), meaning(name)
        )
    rows = f"round_up(num_queries, {LSE_PADDING})"
    steps = f"num_heads * {rows}", rows, "1"
    found["logsumexp"] = Pointer("float32", ("batch", "num_heads", rows), steps, needed["logsumexp"],
                                 _access(problem, "logsumexp"), meaning("logsumexp"))  # fmt: skip
    for name, tensor in problem.vectors().items():
        found[name] = _vector(problem, name, tensor)
    return found


def _vector(problem: Problem, name: str, tensor: Tensor) -> Pointer:
    shapes: dict[str, tuple[str, ...]] = {
        "cu_seqlens_q": ("batch + 1",),
        "cu_seqlens_k": ("batch + 1",),
        "seqused_k": ("batch",),
    }
    shapes |= dict.fromkeys(abi.SEED, ("1",)) | dict.fromkeys(("sinks", "grad_sinks"), ("num_heads",))
    shapes["alibi_slopes"] = ("batch", "num_heads")[-len(tensor.shape) :]
    strides = ("alibi_batch", "1")[-len(tensor.shape) :]
    return Pointer(tensor.dtype, shapes[name], strides, tensor.alignment, _access(problem, name), _VECTORS[name])


def _access(problem: Problem, name: str) -> str:
    written = ("output", "logsumexp") if problem.direction == "forward" else ()
    is_gradient = name.startswith("grad_") and name != "grad_output"
    return "write" if is_gradient or name in written else "read"


def _strides(name: str) -> list[str]:
    """The inputs that are a tensor's strides."""
    axes = ("batch", "head", "row", "column") if name in BIASES else ("batch", "row", "head")
    return [f"{name}_{axis}" for axis in (*axes, "column")[: 4 if name == "grad_output" else len(axes)]]


def meaning(name: str) -> str:
    """What the input or struct field of that name is, in a few words."""
    for table in (_SIZES, _OTHERS, _WORKSPACE, _DERIVED, _VECTORS):
        if name in table:
            return table[name]
    if name.endswith("_address"):
        return f"address of {name.removesuffix('_address')}, where it lies in device memory"
    tensor, _, axis = name.rpartition("_")
    if axis in ("batch", "row", "head", "column"):
        return f"elements from one {axis} of {tensor} to the next"
    gradient = name.removeprefix("grad_")
    return f"gradient of {gradient}" if gradient != name else name
