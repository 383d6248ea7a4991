"""Test cases: a problem spec with a direction, memory layouts and seeded inputs, as one line of text.

    backward bf16_d128_q203_s257_b3_h6_causal_scale0.1 inputs=needle layout=packed seed=5

The line holds the direction, the name of the spec (grammar in problem/spec.py), and the fields of `Case` that differ
from their defaults as name=value. `python -m tests.gpu.run --case "LINE"` and `tools/release/fuzz.py --case "LINE"` run
one case again.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem import spec as specs
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.mask_function import ArrayMask, mask_of
from cutlass_py_attn.problem.masks import Mask
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.spec import ProblemSpec, SequenceLengths
from cutlass_py_attn.problem.tensors import DIRECTIONS, FLOAT8, Shape
from cutlass_py_attn.reference import numpy_reference
from cutlass_py_attn.reference.score_mod import SeqlenInfo
from cutlass_py_attn.score_terms.dropout import Dropout, keeper
from cutlass_py_attn.testing import e4m3_inputs, inputs, layouts, paged_inputs

Array = npt.NDArray[Any]

ARCH: Final = "sm_90"
SM90_ARCH: Final = "sm_90a"
PTX_ARCH: Final = "sm_80"  # the driver compiles its PTX for the GPU that is present
# Rows of (query, key) behind the last variable-length sequence: no kernel may write them.
UNUSED_TOKENS: Final = (3, 2)

_SPEC_FIELDS: Final = {field.name for field in dataclasses.fields(ProblemSpec)}
_PARSERS: Final = {"str": str, "int": int}


@dataclass(frozen=True, slots=True)
class Case:
    """One direction of a problem, with its inputs.

    layout: a name of layouts.LAYOUTS, for query, key, value, output and their gradients.
    bias_layout: "dense", "padded", "transposed" or "shifted" (layouts.bias_tensor).
    range_layout: a name of layouts.RANGE_LAYOUTS, for ranges of keys and other arrays of the mask.
    inputs: a family of inputs.FAMILIES. bias_inputs: a family of inputs.BIAS_FAMILIES. seed: of the inputs.
    philox_seed, philox_offset: of dropout.
    table: "rows" or "csr", the form of the table of a case with pages. invariant: 1 for the same bits in any batch.
    """

    direction: str
    spec: ProblemSpec
    inputs: str = "gaussian"
    bias_inputs: str = "gaussian"
    layout: str = "dense"
    bias_layout: str = "dense"
    range_layout: str = "dense"
    philox_seed: int = 0
    philox_offset: int = 0
    seed: int = 0
    table: str = "rows"
    invariant: int = 0

    @property
    def line(self) -> str:
        """The case as text; `parse` gives an equal case."""
        fields = dataclasses.fields(self)[2:]
        values = ((field, getattr(self, field.name)) for field in fields)
        words = (f"{field.name}={value}" for field, value in values if value != field.default)
        return " ".join([self.direction, self.spec.name, *words])

    @classmethod
    def parse(cls, line: str) -> Self:
        """The case of a line; ValueError says which word is wrong, and names the nearest valid ones."""
        direction, _, rest = line.strip().partition(" ")
        name, _, options = rest.partition(" ")
        if direction not in DIRECTIONS or not name:
            raise ValueError(
                f"case {line!r}: must be like 'backward {specs.EXAMPLE} inputs=needle seed=5', with a direction of "
                f"{', '.join(DIRECTIONS)} and the name of a problem; correct it"
            )
        fields = {field.name: str(field.type) for field in dataclasses.fields(cls)[2:]}
        values: dict[str, Any] = {}
        for word in options.split():
            field, _, text = word.partition("=")
            if field not in fields:
                nearest = difflib.get_close_matches(field, fields, n=1) or list(fields)
                raise ValueError(f"case {line!r}: {field!r} is no field; write {' or '.join(nearest)}")
            values[field] = _PARSERS[fields[field]](text)
        return cls(direction, specs.parse(name), **values)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields of the case or of its spec changed."""
        of_spec = {name: changes.pop(name) for name in list(changes) if name in _SPEC_FIELDS}
        spec = self.spec.replace(**of_spec) if of_spec else changes.pop("spec", self.spec)
        return dataclasses.replace(self, spec=spec, **changes)

    @property
    def shape(self) -> Shape:
        """The sizes, with UNUSED_TOKENS in the variable-length layout."""
        if self.spec.page_size:
            return self.problem().shape
        found = self.spec.shape
        if found.tokens is None:
            return found
        queries, keys = (count + unused for count, unused in zip(found.tokens, UNUSED_TOKENS, strict=True))
        return dataclasses.replace(found, tokens=(queries, keys))

    def problem(self) -> Problem:
        """The problem, with layouts. Broadcast axes of the bias have size 1, or stride 0 if its gradient is in full."""
        unused = UNUSED_TOKENS if self.spec.has_ragged_queries else (0, 0)
        problem = self.spec.problem(self.direction, unused_tokens=unused)
        place = layouts.LAYOUTS[self.layout]
        names = (name for name in problem.tensors() if name not in ("bias", "grad_bias"))
        changes: dict[str, Any] = {name: place(getattr(problem, name)) for name in names}
        changes |= layouts.range_edges(problem, self.range_layout) | layouts.mask_arrays(problem, self.range_layout)
        if problem.bias is not None:
            bias = layouts.bias_tensor(self.spec, self.bias_layout)
            if problem.grad_bias is None:
                changes["bias"] = bias
            elif problem.grad_bias.shape == bias.shape:
                changes |= {"bias": bias, "grad_bias": bias}
        if problem.pages is not None:
            pages = dataclasses.replace(problem.pages, invariant=bool(self.invariant))
            if self.table == "csr":
                pages = dataclasses.replace(pages, page_table=paged_inputs.csr_table(self.spec), page_indptr=True)
            changes["pages"] = pages
        placed = problem.replace(**changes)
        return placed.with_value_in_key() if self.spec.value_in_key else placed

    @property
    def needs_kernels(self) -> bool:
        """Whether the problem is neither refused nor empty."""
        problem = self.problem()
        return not problem.reasons() and not problem.is_empty

    def arrays(self) -> dict[str, Array]:
        """Every input by name. output and logsumexp of a backward are not among them: the reference computes them."""
        rng = np.random.default_rng(self.seed)
        problem = self.problem()
        if problem.pages is not None:
            found = self._paged_arrays(problem, rng)
        else:
            operands = inputs.draw(self.inputs, problem.shape, self.spec.dtype, self.drawn_mask, rng, self.sequences)
            found = dict(zip(inputs.NAMES, operands, strict=True))
        found = self._with_value(found)
        found |= self.feature_arrays(problem, rng)
        return found | e4m3_inputs.codes(problem, found)

    @property
    def drawn_mask(self) -> Mask | ArrayMask:
        """The mask, with the arrays of the seed."""
        return self.spec.drawn_mask(self.seed)

    def mask_of(self, arrays: Mapping[str, Array]) -> Mask | ArrayMask:
        """Returns the mask, with its arrays that are among these."""
        return mask_of(self.problem(), arrays) if self.spec.has_array_mask else self.spec.mask

    def visible(self, mask: ArrayMask) -> Array:
        """Returns which keys each query of each head sees, bool (batch, heads, queries, keys)."""
        sizes = self.spec.shape.bias
        seen = mask.materialise(sizes[3]) if isinstance(mask, KeyRanges) else mask.materialise(*sizes)
        return np.broadcast_to(seen, sizes)

    def _with_value(self, arrays: dict[str, Array]) -> dict[str, Array]:
        """Returns the arrays with value from key, if it is the first columns of key."""
        if not self.spec.value_in_key:
            return arrays
        return arrays | {"value": arrays["key"][..., : self.spec.head_dim_value]}

    def _paged_arrays(self, problem: Problem, rng: np.random.Generator) -> dict[str, Array]:
        """Queries, pools and tables: the inputs of packed sequences, with their keys and values put into pages."""
        spec, sequences = self.spec, paged_inputs.packed_sequences(self.spec)
        tokens = math.prod(problem.query.shape[:2]), sequences[-1].keys.stop if sequences else 0
        packed = dataclasses.replace(spec.shape, tokens=tokens)
        operands = inputs.draw(self.inputs, packed, spec.dtype, spec.mask, rng, sequences)
        found = paged_inputs.paged(spec, problem.key.shape[0], operands[1], operands[2], rng)
        found = paged_inputs.as_csr(spec, found) if self.table == "csr" else found
        return {"query": operands[0].reshape(problem.query.shape), **found}

    @property
    def philox(self) -> dict[str, int]:
        """The numbers philox_seed and philox_offset; none without dropout, or if they are in device memory."""
        if not self.spec.dropout_p or self.spec.philox_on_device:
            return {}
        return {"philox_seed": self.philox_seed, "philox_offset": self.philox_offset}

    @property
    def sequences(self) -> list[SeqlenInfo]:
        """The rows of each sequence, and of each batch element of dense tensors."""
        spec = self.spec
        if not spec.sequences:
            rows, keys = slice(0, spec.num_queries), slice(0, spec.num_keys)
            return [SeqlenInfo(number, number, rows, keys) for number in range(spec.batch)]
        queries = _starts(each.num_queries for each in spec.sequences).tolist()
        keys = _starts(each.num_keys for each in spec.sequences).tolist()
        ends = (start + _used_keys(each) for start, each in zip(keys[:-1], spec.sequences, strict=True))
        places = zip(itertools.pairwise(queries), keys[:-1], ends, strict=True)
        return [
            SeqlenInfo(number, 0, slice(first, last), slice(key, end))
            for number, ((first, last), key, end) in enumerate(places)
        ]

    def feature_arrays(self, problem: Problem, rng: np.random.Generator) -> dict[str, Array]:
        """The inputs by name beside query, key, value and grad_output."""
        spec, found = self.spec, dict[str, Array]()
        drawn = self.drawn_mask
        if isinstance(drawn, ArrayMask):
            arrays = drawn.arrays().items()
            found |= {name: np.broadcast_to(array, getattr(problem, name).shape) for name, array in arrays}
        if problem.bias is not None:
            axes = zip(problem.bias.shape, problem.bias.strides, strict=True)
            size = [size if step else 1 for size, step in axes]
            bias = inputs.draw_bias(
                self.bias_inputs, size, spec.dtype, self.drawn_mask, rng, self.sequences, spec.num_heads
            )
            found["bias"] = np.broadcast_to(bias, problem.bias.shape)
        if problem.alibi_slopes is not None:
            found["alibi_slopes"] = rng.random(problem.alibi_slopes.shape, dtype=np.float32) * 0.1
        if problem.sinks is not None:
            found["sinks"] = rng.standard_normal(problem.sinks.shape, dtype=np.float32)
        if problem.grad_logsumexp is not None:  # the padding, which no kernel reads, too
            found["grad_logsumexp"] = rng.standard_normal(problem.grad_logsumexp.shape, dtype=np.float32)
        if spec.has_ragged_queries:
            found["cu_seqlens_q"] = _starts(each.num_queries for each in spec.sequences)
        if spec.sequences and not spec.page_size:
            found["cu_seqlens_k"] = _starts(each.num_keys for each in spec.sequences)
            if spec.has_used_keys:
                found["seqused_k"] = np.array([each.used_keys for each in spec.sequences], np.int32)
        if problem.philox_on_device:
            found["philox_seed"] = np.array([self.philox_seed], np.int64)
            found["philox_offset"] = np.array([self.philox_offset], np.int64)
        return found

    def score_mod(self, arrays: dict[str, Array]) -> numpy_reference.ReferenceScoreMod:
        """Returns the score modification of the reference."""
        spec, shape = self.spec, self.spec.shape
        lengths = None
        if spec.sequences and not spec.page_size:
            lengths = numpy_reference.CuSeqlens(
                cu_seqlens_q=arrays["cu_seqlens_q"],
                cu_seqlens_k=arrays["cu_seqlens_k"],
                max_seqlen_q=shape.num_queries,
                max_seqlen_k=shape.num_keys,
                seqused_k=arrays.get("seqused_k"),
            )
        dropout = Dropout(spec.dropout_p, self.philox_seed, self.philox_offset)
        keep = keeper(dropout, shape.num_heads, shape.num_queries, shape.num_keys)
        return numpy_reference.ReferenceScoreMod(
            bias=arrays.get("bias"),
            alibi_slopes=arrays.get("alibi_slopes"),
            sinks=arrays.get("sinks"),
            softcap=spec.softcap,
            keep=keep if spec.dropout_p else None,
            dropout_p=spec.dropout_p,
            cu_seqlens=lengths,
        )


def builds_of(cases: Iterable[Case], arch: str = ARCH) -> list[tuple[Build, ...]]:
    """Every kernel that the cases need, once; each with the kernels to fall back to if ptxas spills.

    No kernel of a target without wgmma multiplies e4m3 operands, or reads a latent cache of e4m3 codes or a mask in
    memory.
    """
    has_wgmma = architecture(arch).has_wgmma
    found = (
        each
        for each in cases
        if has_wgmma or not (each.spec.dtype == FLOAT8 or each.spec.has_rope or each.spec.has_array_mask)
    )
    return list(dict.fromkeys(planner.builds(each.problem(), arch) for each in found))


def _used_keys(lengths: SequenceLengths) -> int:
    return lengths.num_keys if lengths.used_keys is None else lengths.used_keys


def _starts(lengths: Iterable[int]) -> Array:
    """int32 (count + 1): where each sequence starts, and where the last one ends."""
    return np.cumsum([0, *lengths]).astype(np.int32)
