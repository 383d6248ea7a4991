"""Simulated kernels: the NumPy reference in float64 on the memory and the struct of a launch, rounded to its dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.integers import round_up
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.masks import UNLIMITED, Causal, Full, Mask, Window
from cutlass_py_attn.problem.tensors import LSE_PADDING
from cutlass_py_attn.reference import numpy_reference, paged, serving
from cutlass_py_attn.reference.numpy_reference import CuSeqlens, ReferenceScoreMod
from cutlass_py_attn.score_terms.dropout import Dropout, keep_scale, keeper, threshold

Array = npt.NDArray[Any]
View = Callable[[str, int, Sequence[int], Sequence[int], str], Array]

MASK64: Final = 2**64 - 1
BIAS_AXES: Final = ("batch", "head", "row", "column")


def run(build: Build, struct: Mapping[str, Any], view: View) -> None:
    """Computes what all kernels of a plan compute."""
    launch = _Launch(build, struct, view)
    {"forward": launch.forward, "backward": launch.backward, "append": launch.append, "merge": launch.merge}[
        build.kind
    ]()


@dataclass(frozen=True, slots=True)
class _Launch:
    build: Build
    struct: Mapping[str, Any]
    view: View

    def __getitem__(self, name: str) -> int:
        return int(self.struct.get(name, 0))

    def rows(self, name: str, shape: tuple[int, int, int, int], outer: str = "batch") -> Array:
        """Returns a tensor (batch or pages, rows, heads, columns)."""
        strides = *(self[f"{name}_{axis}"] for axis in (outer, "row", "head")), 1
        return self.view(name, self[name], shape, strides, self.build.dtype)

    def vector(self, name: str, size: int, dtype: str) -> Array:
        """Returns a dense vector."""
        return self.view(name, self[name], (size,), (1,), dtype)

    @property
    def is_packed(self) -> bool:
        """Whether sequences of various lengths follow each other."""
        return self.build.has("varlen") and self["cu_seqlens_q"] != 0

    @property
    def query_shape(self) -> tuple[int, int, int]:
        """Batch, rows and heads of the queries."""
        if self.is_packed:
            return 1, self["tokens_q"], self["num_heads"]
        return self["batch"], self["num_queries"], self["num_heads"]

    @property
    def key_shape(self) -> tuple[int, int, int]:
        """Batch, rows and heads of the keys; pages and their rows for a paged cache."""
        heads = self["num_heads"] // self["group"]
        if self.build.has("paged"):
            return self["num_pages"], self["page_size"], heads
        return (1, self["tokens_k"], heads) if self.is_packed else (self["batch"], self["num_keys"], heads)

    @property
    def mask(self) -> Mask:
        """The mask."""
        left, right = (None if self[f"window_{side}"] >= UNLIMITED else self[f"window_{side}"] for side in _SIDES)
        if self.build.mask == "full":
            return Full()
        if self["bottom_right"]:
            return Window(left if self.build.mask == "local" else None, right)
        if right != 0:
            raise ValueError(f"window_right {right} beside a top-left diagonal")
        return Causal(None if self.build.mask == "causal" or left is None else left + 1)

    @property
    def lengths(self) -> CuSeqlens | None:
        """The sequences of packed tensors."""
        if not self.is_packed or self.build.has("paged"):
            return None
        starts = {name: self.vector(name, self["batch"] + 1, "int32").copy() for name in _STARTS}
        used = self.vector("seqused_k", self["batch"], "int32").copy() if self["seqused_k"] else None
        return CuSeqlens(**starts, max_seqlen_q=self["num_queries"], max_seqlen_k=self["num_keys"], seqused_k=used)

    @property
    def score_mod(self) -> ReferenceScoreMod:
        """The score terms, the dropout and the sequences."""
        batch, heads, queries, keys = (self[name] for name in ("batch", "num_heads", "num_queries", "num_keys"))
        terms: dict[str, Any] = {}
        if self["bias"]:
            strides = [self[f"bias_{axis}"] for axis in BIAS_AXES]
            terms["bias"] = self.view("bias", self["bias"], (batch, heads, queries, keys), strides, self.build.dtype)
        if self["alibi_slopes"]:
            strides = self["alibi_batch"], 1
            terms["alibi_slopes"] = self.view("alibi_slopes", self["alibi_slopes"], (batch, heads), strides, "float32")
        if self["sinks"]:
            terms["sinks"] = self.vector("sinks", heads, "float32")
        if self.build.has("softcap"):
            terms["softcap"] = float(self.struct["softcap"])
        if self.build.has("dropout"):
            p = _probability(self["dropout_threshold"] % 2**32, float(self.struct["keep_scale"]))
            seed, offset = (self[name] & MASK64 for name in _PHILOX)
            if self["philox_seed_address"]:
                seed = int(self.vector("philox_seed_address", 1, "int64")[0]) & MASK64
            if self["philox_offset_address"]:
                offset += int(self.vector("philox_offset_address", 1, "int64")[0])
            terms |= {"dropout_p": p, "keep": keeper(Dropout(p, seed, offset), heads, queries, keys)}
        return ReferenceScoreMod(**terms, cu_seqlens=self.lengths)

    @property
    def operands(self) -> tuple[Array, Array, Array]:
        """query, key and value."""
        outer = "page" if self.build.has("paged") else "batch"
        return (
            self.rows("query", (*self.query_shape, self.build.head_dim)),
            self.rows("key", (*self.key_shape, self.build.head_dim), outer),
            self.rows("value", (*self.key_shape, self.build.head_dim_value), outer),
        )

    def logsumexp(self, name: str = "logsumexp") -> Array:
        """Returns a logsumexp."""
        shape = self["batch"], self["num_heads"], round_up(self["num_queries"], LSE_PADDING)
        return self.view(name, self[name], shape, (shape[1] * shape[2], shape[2], 1), "float32")

    def store(self, target: Array, found: Array, starts: Array | None) -> None:
        """Stores rows, those of sequences alone."""
        end = target.shape[1] if starts is None else int(starts[-1])
        target[:, :end] = found[:, :end].astype(target.dtype)

    def forward(self) -> None:
        query, key, value = self.operands
        options: dict[str, Any] = {"mask": self.mask, "scale": float(self.struct["scale"])}
        starts = self.vector("cu_seqlens_q", self["batch"] + 1, "int32").copy() if self.is_packed else None
        if self.build.has("paged"):
            pages = self["max_pages"]
            table = self.view(
                "page_table", self["page_table"], (self["batch"], pages), (self["page_table_row"], 1), "int32"
            )
            used = self.vector("seqused_k", self["batch"], "int32")
            layout = paged.PageTable(
                page_table=table, seqused_k=used, cu_seqlens_q=starts, max_seqlen_q=self["num_queries"]
            )
            output, logsumexp = paged.forward(query, key, value, layout, score_mod=self.score_mod, **options)
        else:
            output, logsumexp = numpy_reference.forward(query, key, value, score_mod=self.score_mod, **options)
        self.store(self.rows("output", (*self.query_shape, self.build.head_dim_value)), output, starts)
        target = self.logsumexp()
        for number in range(self["batch"]):
            rows = target.shape[2] if starts is None else int(starts[number + 1] - starts[number])
            end = round_up(rows, LSE_PADDING)
            target[number, :, :end] = logsumexp[number, :, :end]

    def backward(self) -> None:
        query, key, value = self.operands
        grad_output, output = (
            self.view(
                name,
                self[name],
                (*self.query_shape, self.build.head_dim_value),
                (*(self[f"{name}_{axis}"] for axis in ("batch", "row", "head")), step),
                self.build.dtype,
            )
            for name, step in (("grad_output", self["grad_output_column"]), ("output", 1))
        )
        gradients = numpy_reference.backward(
            grad_output,
            query,
            key,
            value,
            output,
            self.logsumexp(),
            mask=self.mask,
            scale=float(self.struct["scale"]),
            score_mod=self.score_mod,
            grad_logsumexp=self.logsumexp("grad_logsumexp") if self["grad_logsumexp"] else None,
        )
        lengths = self.lengths
        for name, operand in (("query", query), ("key", key), ("value", value)):
            if name in self.build.gradients:
                side = "q" if name == "query" else "k"
                starts = None if lengths is None else getattr(lengths, f"cu_seqlens_{side}")
                self.store(self.rows(f"grad_{name}", operand.shape), getattr(gradients, name), starts)  # type: ignore[arg-type]
        if "sinks" in self.build.gradients:
            self.vector("grad_sinks", self["num_heads"], "float32")[...] = gradients.sinks

    def append(self) -> None:
        heads = self["num_heads_key"]
        tokens, pages = self["num_rows"] // heads, self["num_slots"] // self["page_size"]
        slots = self.vector("slots", tokens, "int64").copy()
        for name, columns in (("key", self.build.head_dim), ("value", self.build.head_dim_value)):
            strides = self[f"{name}_row"], self[f"{name}_head"], 1
            rows = self.view(name, self[name], (tokens, heads, columns), strides, self.build.dtype)
            cache = self.rows(f"{name}_cache", (pages, self["page_size"], heads, columns), "page")
            serving.append(rows, cache, slots, None)

    def merge(self) -> None:
        heads, queries = self["num_heads"], self["num_queries"]
        batch = self["num_rows"] // (heads * queries)
        parts = []
        for part in "ab":
            parts.append(self.rows(f"output_{part}", (batch, queries, heads, self.build.head_dim)))
            parts.append(self._of_merge(f"logsumexp_{part}", batch))
        output, logsumexp = serving.merge(*parts)
        target = self.rows("output", (batch, queries, heads, self.build.head_dim))
        target[...] = output.astype(target.dtype)
        self._of_merge("logsumexp", batch)[...] = logsumexp

    def _of_merge(self, name: str, batch: int) -> Array:
        shape = batch, self["num_heads"], round_up(self["num_queries"], LSE_PADDING)
        return self.view(name, self[name], shape, (shape[1] * shape[2], shape[2], 1), "float32")


_SIDES: Final = ("left", "right")
_STARTS: Final = ("cu_seqlens_q", "cu_seqlens_k")
_PHILOX: Final = ("philox_seed", "philox_offset")


@functools.cache
def _probability(word: int, factor: float) -> float:
    """Returns the probability with this threshold and keep_scale; ValueError if there is none."""
    near = np.float32(word / 2**32)
    for candidate in (near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(1))):
        if threshold(float(candidate)) == word and keep_scale(float(candidate)) == factor:
            return float(candidate)
    raise ValueError(f"dropout_threshold {word} and keep_scale {factor} are of two probabilities")
