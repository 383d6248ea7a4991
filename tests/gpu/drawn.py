"""Drawn: random problems over everything the kernels do, each a line of text that gives it back.

    direction=backward dtype=bfloat16 batch=2 heads=4 heads_key=2 queries=33 keys=70 mask=causal:5 bias=1hqk ...

A `Variant` number decides what chooses the machine code, a run number the rest, so that a few hundred kernels serve
thousands of problems.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn import masks, planner, reference
from cutlass_py_attn.philox import Dropout, keeper
from cutlass_py_attn.plan import Build
from cutlass_py_attn.problem import Problem, Sequences, Shape, Tensor
from tests.gpu import layouts
from tests.gpu.cases import ARCH
from tests.gpu.layouts import shifted

Array = npt.NDArray[Any]

NAMES: Final = {"q": "query", "k": "key", "v": "value", "b": "bias", "s": "sinks"}
RESIDENT_DIMS: Final = (8, 16, 24, 32, 40, 64, 72, 80, 96, 128, 128, 160, 192, 256, 1, 3, 17, 33, 36, 38, 100)
STREAMED_DIMS: Final = (257, 288, 320, 512, 520, 1024)
MASKS: Final = ("full", "causal", "causal_br", "local")
SUMMED: Final = ("1hqk", "11qk", "b1qk", "bh1k", "bhq1", "1h1k", "bh11", "1111")
LAYOUTS: Final = ("dense", "dense", "padded", "heads_first", "packed", "shifted")


@dataclass(frozen=True, slots=True)
class Drawn:
    """One problem. `dim_value` 0 is dim, `heads_key` 0 is heads; lengths vary where `sequences` is not empty.

    mask: name, name:window, or window:left:right with - for no limit. bias: letters of the axes that it has, of
    b, h, q, k, with 1 where it broadcasts, and how it lies; grads: letters of NAMES. dropout_p 0 is none.
    sequences: lengths as queries/keys/used, joined by commas.
    """

    direction: str
    dtype: str
    batch: int
    heads: int
    queries: int
    keys: int
    dim: int
    dim_value: int = 0
    heads_key: int = 0
    mask: str = "full"
    layout: str = "dense"
    scale: float = 0.0
    bias: str = ""
    bias_layout: str = "dense"
    grads: str = "qkv"
    dropout_p: float = 0.0
    philox_seed: int = 0
    philox_offset: int = 0
    on_device: bool = False
    softcap: float = 0.0
    alibi: str = ""
    sinks: bool = False
    sequences: str = ""
    seqused: bool = False
    deterministic: bool = False
    splits: int = 0
    seed: int = 0

    @property
    def line(self) -> str:
        """The problem as text; `parse` gives an equal one back."""
        items = ((field, getattr(self, field.name)) for field in dataclasses.fields(self))
        return " ".join(f"{field.name}={value}" for field, value in items if value != field.default)

    @property
    def lengths(self) -> list[tuple[int, int, int]]:
        """(queries, keys, used keys) of each sequence."""
        texts = self.sequences.split(",") if self.sequences else []
        return [tuple(int(number) for number in text.split("/")) for text in texts]  # type: ignore[misc]

    @property
    def shape(self) -> Shape:
        """The sizes."""
        dims = self.dim, self.dim_value or self.dim
        if not self.lengths:
            return Shape(self.batch, self.queries, self.keys, self.heads, *dims, self.heads_key)
        queries, keys, _ = zip(*self.lengths, strict=True)
        longest = max(queries), max(keys)
        tokens = sum(queries) + 3, sum(keys) + 2  # a few tokens belong to no sequence
        return Shape(len(queries), *longest, self.heads, *dims, self.heads_key, tokens)

    @property
    def mask_object(self) -> masks.Mask:
        """The mask."""
        name, *edges = self.mask.split(":")
        numbers = [None if edge == "-" else int(edge) for edge in edges]
        return masks.ALL[name](*numbers)

    def problem(self) -> Problem:
        """The problem, with layouts."""
        shape, given = self.shape, self.lengths
        problem = Problem.dense(self.direction, shape, self.dtype, self.mask_object)
        place = shifted if self.layout == "shifted" else layouts.LAYOUTS[self.layout]
        changes: dict[str, Any] = {name: place(tensor) for name, tensor in problem.tensors().items()}
        if given:
            changes["sequences"] = Sequences(shape.batch, shape.num_queries, shape.num_keys, self.seqused)
        if self.bias:
            whole = tuple(size if letter != "1" else 1 for letter, size in zip(self.bias, shape.bias, strict=True))
            changes["bias"] = bias_laid_out(Tensor.contiguous(whole, self.dtype), self.bias_layout)
        if self.alibi:
            changes["alibi_slopes"] = Tensor.contiguous(
                (self.heads,) if self.alibi == "h" else (shape.batch, self.heads), "float32"
            )
        if self.sinks:
            changes["sinks"] = Tensor.contiguous((self.heads,), "float32")
        if self.direction == "backward":
            for letter, name in NAMES.items():
                if letter not in self.grads:
                    changes[f"grad_{name}"] = None
                elif letter in "bs":
                    changes[f"grad_{name}"] = changes[name]
            changes |= {"deterministic": self.deterministic, "num_splits_key": self.splits or None}
        return problem.replace(
            **changes,
            scale=self.scale or None,
            softcap=self.softcap,
            dropout_p=self.dropout_p,
            philox_on_device=self.on_device and self.dropout_p > 0,
        )

    @property
    def needs_kernels(self) -> bool:
        """Whether it is neither refused nor empty."""
        problem = self.problem()
        return not problem.reasons() and not problem.is_empty

    def arrays(self) -> dict[str, Array]:
        """Every input by name; output and logsumexp of a backward come from the reference."""
        rng = np.random.default_rng(self.seed)
        problem = self.problem()
        kind = reference.DTYPES[self.dtype]
        found: dict[str, Array] = {}
        for name in ("query", "key", "value", "grad_output"):
            found[name] = rng.standard_normal(problem.shape.of(name), dtype=np.float32).astype(kind)
        if problem.bias is not None:
            bias = rng.standard_normal(problem.bias.shape, dtype=np.float32)
            bias[rng.random(bias.shape) < 0.1] = -np.inf
            found["bias"] = bias.astype(kind)
        if problem.alibi_slopes is not None:
            found["alibi_slopes"] = rng.random(problem.alibi_slopes.shape, dtype=np.float32) * 0.1
        if problem.sinks is not None:
            found["sinks"] = rng.standard_normal(problem.sinks.shape, dtype=np.float32)
        if self.lengths:
            queries, keys, used = (np.array(column, np.int32) for column in zip(*self.lengths, strict=True))
            found["cu_seqlens_q"] = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
            found["cu_seqlens_k"] = np.concatenate([[0], np.cumsum(keys)]).astype(np.int32)
            if self.seqused:
                found["seqused_k"] = used
        if problem.philox_on_device:
            found["philox_seed"] = np.array([self.philox_seed], np.int64)
            found["philox_offset"] = np.array([self.philox_offset], np.int64)
        return found

    def terms(self, arrays: dict[str, Array]) -> reference.Terms:
        """The reference's terms."""
        shape = self.shape
        lengths = None
        if self.lengths:
            lengths = reference.Lengths(
                cu_seqlens_q=arrays["cu_seqlens_q"],
                cu_seqlens_k=arrays["cu_seqlens_k"],
                max_seqlen_q=shape.num_queries,
                max_seqlen_k=shape.num_keys,
                seqused_k=arrays.get("seqused_k"),
            )
        dropout = Dropout(self.dropout_p, self.philox_seed, self.philox_offset)
        keep = keeper(dropout, shape.num_heads, shape.num_queries, shape.num_keys)
        optional = {name: arrays.get(name) for name in ("bias", "alibi_slopes", "sinks")}
        return reference.Terms(
            **optional,
            softcap=self.softcap,
            keep=keep if self.dropout_p else None,
            dropout_p=self.dropout_p,
            lengths=lengths,
        )


def bias_laid_out(tensor: Tensor, layout: str) -> Tensor:
    """A bias: dense, in padded rows, with queries innermost, or starting at an odd element."""
    _, heads, queries, keys = tensor.shape
    if layout == "padded":
        row = -(-keys // 8) * 8 + 8
        return Tensor(tensor.shape, (heads * queries * row, queries * row, row, 1), tensor.dtype)
    if layout == "transposed":
        return Tensor(tensor.shape, (heads * keys * queries, keys * queries, 1, queries), tensor.dtype)
    return shifted(tensor) if layout == "shifted" else tensor


def parse(line: str) -> Drawn:
    """The problem of a line; ValueError names an unknown word."""
    kinds = {field.name: field.type for field in dataclasses.fields(Drawn)}
    values: dict[str, Any] = {}
    for word in line.split():
        name, _, text = word.partition("=")
        if name not in kinds:
            raise ValueError(f"{word!r}: must be one of {', '.join(kinds)} with its value")
        kind = kinds[name]
        values[name] = text == "True" if kind == "bool" else {"int": int, "float": float, "str": str}[kind](text)
    return Drawn(**values)


def draw(variant: int, run: int) -> Drawn:
    """Problem `run` of the kernels `variant`."""
    code, free = np.random.default_rng(variant), np.random.default_rng((variant, run))
    base = _code(code)
    return _sizes(base, free)


def _pick(rng: np.random.Generator, values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def _code(rng: np.random.Generator) -> Drawn:
    """What decides the machine code."""

    def chance(share: float) -> bool:
        return bool(rng.random() < share)

    dims = STREAMED_DIMS if chance(0.15) else RESIDENT_DIMS
    dim = _pick(rng, dims)
    direction = "forward" if chance(0.35) else "backward"
    bias, sinks = chance(0.4), chance(0.15)
    grads = "qkv" if chance(0.6) else "".join(letter for letter in "qkv" if chance(0.5))
    grads += "b" if bias and chance(0.6) else ""
    grads += "s" if sinks and chance(0.7) else ""
    return Drawn(
        direction,
        _pick(rng, ("float16", "bfloat16", "float32")),
        1,
        1,
        1,
        1,
        dim,
        dim_value=_pick(rng, (*RESIDENT_DIMS, *dims)) if chance(0.3) else 0,
        heads_key=-1 if chance(0.3) else 0,
        mask=_pick(rng, MASKS),
        layout=_pick(rng, LAYOUTS),
        bias=(_pick(rng, SUMMED) if "b" in grads and chance(0.6) else "bhqk") if bias else "",
        bias_layout=_pick(rng, ("dense", "dense", "padded", "transposed", "shifted")) if bias else "dense",
        grads=(grads or "q") if direction == "backward" else "qkv",
        dropout_p=0.3 if chance(0.3) else 0.0,
        softcap=4.0 if chance(0.15) else 0.0,
        alibi="h" if chance(0.2) else "",
        sinks=sinks,
        sequences="1/1/1" if chance(0.3) else "",
        seqused=chance(0.4),
        deterministic=direction == "backward" and "q" in grads and chance(0.25),
    )


def _sizes(base: Drawn, rng: np.random.Generator) -> Drawn:
    """What does not: sizes, edges, numbers."""

    def chance(share: float) -> bool:
        return bool(rng.random() < share)

    def length() -> int:
        return int(_pick(rng, (1, 2, 15, 31, 32, 63, 64, 65, 100, 127, 128, 129, 190, 257)))

    group = int(_pick(rng, (2, 3, 4))) if base.heads_key else 1
    heads = group * int(_pick(rng, (1, 2)))
    keys = length()
    if base.bias and base.bias_layout == "dense":
        keys = -(-keys // 8) * 8  # so that all problems of this code read their bias 16 bytes at a time
    if base.bias and base.bias_layout == "padded":
        keys = keys | 1
    sequences = ""
    if base.sequences:
        lengths = [(_some(rng), _some(rng)) for _ in range(int(rng.integers(1, 5)))]
        lengths.append((length(), keys))  # the longest decides how a bias is read
        lengths = [(queries, min(rows, keys)) for queries, rows in lengths]
        sequences = ",".join(
            f"{queries}/{rows}/{int(rng.integers(0, rows + 1)) if base.seqused else rows}" for queries, rows in lengths
        )
    bias = base.bias
    if bias:
        bias = "".join(letter if letter == "k" or chance(0.7) else "1" for letter in bias)
        if "b" in base.grads or base.bias_layout == "transposed":
            bias = base.bias  # the summed axes are part of the code
    batch = int(_pick(rng, (1, 2, 3)))
    window = int(_pick(rng, (1, 2, 17, 64, 200)))
    mask = base.mask
    if mask == "local":
        left, right = window, int(_pick(rng, (0, 1, 40)))
        mask = _pick(rng, (f"causal:{window}", f"causal_br:{window}", f"window:{left}:{right}", f"window:{left}:-"))
    return dataclasses.replace(
        base,
        batch=batch,
        heads=heads,
        heads_key=heads // group if base.heads_key else 0,
        queries=length(),
        keys=keys,
        mask=mask,
        scale=float(_pick(rng, (0.0, 0.0, 0.1, -0.05))),
        bias=bias,
        dropout_p=float(_pick(rng, (0.1, 0.3, 0.9, 1e-6, 1.0))) if base.dropout_p else 0.0,
        philox_seed=int(rng.integers(0, 2**62)),
        philox_offset=int(_pick(rng, (0, 4, 5, 2**34 + 3, 2**40))),
        on_device=chance(0.3),
        softcap=float(_pick(rng, (1.0, 4.0, 30.0))) if base.softcap else 0.0,
        alibi=_pick(rng, ("h", "bh")) if base.alibi else "",
        sequences=sequences,
        seqused=base.seqused and bool(sequences),
        splits=0 if base.deterministic or base.direction == "forward" else int(_pick(rng, (0, 0, 1, 2, 3))),
        seed=int(rng.integers(0, 2**31)),
    )


def _some(rng: np.random.Generator) -> int:
    """The length of a sequence, sometimes none."""
    return 0 if rng.random() < 0.15 else int(rng.integers(1, 140))


def problems(variants: Iterable[int], runs: int) -> Iterator[Drawn]:
    """All problems of these variants."""
    for variant in variants:
        for run in range(runs):
            yield draw(variant, run)


def builds(variants: Iterable[int], runs: int, arch: str = ARCH) -> list[tuple[Build, ...]]:
    """Every kernel that those problems need, once, and what may stand in for it; refused problems need none."""
    return builds_of((one for one in problems(variants, runs) if one.needs_kernels), arch)


def builds_of(given: Iterable[Drawn], arch: str = ARCH) -> list[tuple[Build, ...]]:
    """Every kernel that the problems need, once, and what may stand in for it where ptxas spills."""
    return list(dict.fromkeys(planner.builds(one.problem(), arch) for one in given))
