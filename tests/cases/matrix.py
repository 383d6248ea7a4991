"""Matrix: the cases that the test suites of xFormers and PyTorch run memory-efficient attention through.

python -m tests.cases.matrix    prints how many cases there are, and how many kernels they need

Head dims, dtypes and features are combined so that about 150 kernels serve all cases. Lengths, batches and heads need
no further kernels and are covered in full.
"""

from __future__ import annotations

import dataclasses
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.spec import ProblemSpec, SequenceLengths, parse, parse_mask
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.reference import numpy_reference
from cutlass_py_attn.testing.cases import ARCH, Case
from cutlass_py_attn.testing.inputs import MOST_NEGATIVE

Array = npt.NDArray[Any]
Sizes = tuple[int, int, int, int, int]  # batch, queries, keys, heads, head dim

DTYPES: Final = ("float16", "bfloat16", "float32")
OPERANDS: Final = ("query", "key", "value", "grad_output")
SMALL_DIM: Final = 32  # xFormers scales narrower heads as if they were this wide
WHOLE_ROWS: Final = 3  # a bias that hides whole rows hides every third
SHARE: Final = 0.3  # of the keys that a bias hides in the other rows


def _gaussian_x3(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    return rng.standard_normal(shape, dtype=np.float32) * (1 if name == "grad_output" else 3)


def _uniform(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    return rng.random(shape, dtype=np.float32)


def _flat(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    return np.full(shape, name in ("value", "grad_output"), np.float32)


# probe: equal scores, and unit vectors as values and gradients, so that the output and the gradient of the values
# are the weights themselves; MatrixCase.arrays writes the unit vectors.
FAMILIES: Final[dict[str, Callable[[np.random.Generator, str, tuple[int, ...]], Array]]] = {
    "gaussian_x3": _gaussian_x3,
    "uniform": _uniform,
    "flat": _flat,
    "probe": lambda rng, name, shape: np.zeros(shape, np.float32),
}


@dataclass(frozen=True, slots=True)
class MatrixCase(Case):
    """A case of the matrix. Direction "backward" stands for a forward and the backward after it.

    inputs: of FAMILIES.
    bias_values: "gaussian"; "corner" (one head sees only its last key, and only its last row sees all keys); "hidden"
    (-inf in a share of each row and in whole rows); "most_negative" (MOST_NEGATIVE in place of -inf); "partly"
    (MOST_NEGATIVE in a share of each row, but in no whole row).
    batch_period, head_period: the inputs repeat after so many batch elements or heads, so that the truth of a few
    serves for all; 0 for never.
    key_layout: "expanded" (all heads share one head of key and value by stride 0) or "".
    grad_layout: "expanded" (one row of ones as grad_output), "scalar" (a single one, by stride 0), "columns_first"
    (columns have the largest stride) or "".
    bias_layout: also "expanded" (one row of keys for all) and "expanded_rows" (one matrix for all), by stride 0.
    """

    inputs: str = "gaussian_x3"
    bias_values: str = "gaussian"
    batch_period: int = 0
    head_period: int = 0
    key_layout: str = ""
    grad_layout: str = ""

    @property
    def core(self) -> MatrixCase:
        """The same case with only the batch elements and heads whose inputs differ."""
        batch = min(self.spec.batch, self.batch_period or self.spec.batch)
        heads = min(self.spec.num_heads, self.head_period or self.spec.num_heads)
        changes: dict[str, Any] = {} if self.spec.sequences else {"batch": batch}
        if heads != self.spec.num_heads:
            changes["num_heads"] = heads
        return self.replace(**changes, batch_period=0, head_period=0)

    @property
    def forward(self) -> MatrixCase:
        """The forward alone."""
        return self.replace(direction="forward", deterministic=False, num_splits_key=None)

    @property
    def is_dense(self) -> bool:
        """Whether every tensor is contiguous, as NumPy arrays are after a copy to the device."""
        names = (self.key_layout or "dense", self.grad_layout or "dense", self.layout, self.bias_layout)
        return set(names) == {"dense"} and not self.spec.philox_on_device

    def problem(self) -> Problem:
        """The problem, with layouts."""
        problem = Case.problem(self)
        changes: dict[str, Tensor] = {}
        if self.key_layout:
            for tensor, name in ((problem.key, "key"), (problem.value, "value")):
                rows, columns = tensor.shape[1], tensor.shape[3]
                changes[name] = Tensor(tensor.shape, (rows * columns, columns, 0, 1), tensor.dtype)
        if self.grad_layout and problem.grad_output is not None:
            _, rows, heads, columns = shape = problem.grad_output.shape
            strides = {
                "expanded": (0, 0, 0, 1),
                "scalar": (0, 0, 0, 0),
                "columns_first": (rows * heads * columns, heads, 1, rows * heads),
            }
            changes["grad_output"] = Tensor(shape, strides[self.grad_layout], problem.dtype)
        if self.bias_layout.startswith("expanded") and problem.bias is not None:
            keys = problem.bias.shape[3]
            row = keys if self.bias_layout == "expanded_rows" else 0
            changes["bias"] = Tensor(problem.bias.shape, (0, 0, row, 1), problem.dtype)
        return problem.replace(**changes)

    def arrays(self) -> dict[str, Array]:
        """Every input by name. Rows outside every sequence, and keys after the used ones, are NaN."""
        rng = np.random.default_rng(self.seed)
        problem = self.problem()
        found = self.feature_arrays(problem, np.random.default_rng(self.seed))
        kind = numpy_reference.DTYPES[self.spec.dtype]
        for name in OPERANDS:
            values = FAMILIES[self.inputs](rng, name, problem.shape.of(name))
            places = self._places(name, values.shape[1])
            if self.inputs == "probe" and name in ("value", "grad_output"):
                values[:] = np.eye(values.shape[1], values.shape[3])[places, None]
            if self.key_layout and name in ("key", "value"):
                values[:] = values[:, :, :1]
            if self.grad_layout in ("expanded", "scalar") and name == "grad_output":
                values[:] = 1
            found[name] = values.astype(kind)
            found[name][:, places < 0] = np.nan
        if problem.bias is not None:
            found["bias"] = self._bias(rng, problem.bias).astype(kind)
        return found

    def _places(self, name: str, rows: int) -> Array:
        """The place of each row in its sequence; -1 outside every sequence."""
        if not self.spec.sequences:
            return np.arange(rows)
        places = np.full(rows, -1)
        start = 0
        for each in self.spec.sequences:
            of_key = name in ("key", "value")
            used = each.num_keys if each.used_keys is None else each.used_keys
            count = used if of_key else each.num_queries
            places[start : start + count] = np.arange(count)
            start += each.num_keys if of_key else each.num_queries
        return places

    def _bias(self, rng: np.random.Generator, tensor: Tensor) -> Array:
        shape = tuple(size if step else 1 for size, step in zip(tensor.shape, tensor.strides, strict=True))
        values = FAMILIES[self.inputs](rng, "bias", shape)
        if self.bias_values == "corner":
            values[0, 0, :-1, :-1] = -np.inf
        elif self.bias_values != "gaussian":
            hidden = rng.random(shape) < SHARE
            hidden[..., 0] = False
            if self.bias_values != "partly":
                hidden[:, :, ::WHOLE_ROWS] = True
            values[hidden] = -np.inf if self.bias_values == "hidden" else MOST_NEGATIVE[self.spec.dtype]
        return np.broadcast_to(values, tensor.shape)


_SPEC_FIELDS: Final = {field.name for field in dataclasses.fields(ProblemSpec)}


def _case(dtype: str, sizes: Sizes, *, mask: str = "full", **fields: Any) -> MatrixCase:
    """Forward and backward of that size. The seed follows from the rest of the case.

    mask: words of problem/spec.py. fields: of ProblemSpec and of MatrixCase.
    """
    batch, queries, keys, heads, dim = sizes
    of_spec = {name: fields.pop(name) for name in list(fields) if name in _SPEC_FIELDS}
    spec = ProblemSpec(dtype, dim, queries, keys, batch, heads, mask=parse_mask(mask), **of_spec)
    unseeded = MatrixCase("backward", spec, **fields)
    return replace(unseeded, seed=zlib.crc32(unseeded.line.encode()))


def xformers(dtype: str, sizes: Sizes, **fields: Any) -> MatrixCase:
    """A case of xFormers: gaussian inputs of deviation 3."""
    return _case(dtype, sizes, **({"scale": SMALL_DIM**-0.5} if sizes[4] < SMALL_DIM else {}) | fields)


def pytorch(dtype: str, sizes: Sizes, **fields: Any) -> MatrixCase:
    """A case of PyTorch: inputs from 0 to 1."""
    return _case(dtype, sizes, **{"inputs": "uniform"} | fields)


def _sequences(word: str) -> tuple[SequenceLengths, ...]:
    """The lengths of a word n... of problem/spec.py."""
    return parse(f"f16_d8_{word}_h1_full").sequences


def _all_used(sequences: tuple[SequenceLengths, ...]) -> tuple[SequenceLengths, ...]:
    """The same lengths without seqused_k."""
    return tuple(replace(each, used_keys=None) for each in sequences)


# ---- xFormers ----
BATCHED: Final = {"batch_period": 7}
LENGTHS: Final = tuple(product((32, 256), (32, 64, 256, 1024)))
ODD_LENGTHS: Final = (2, 3, 15, 31, 32, 34, 68, 72, 90, 132, 136)
# Head dims whose rows are multiples of 16 bytes and others, in one dtype each: every head dim needs two kernels.
HEAD_DIMS: Final = (
    ("float16", 1), ("float32", 2), ("bfloat16", 3), ("float16", 31), ("float32", 34),
    ("float16", 36), ("bfloat16", 38), ("bfloat16", 40), ("bfloat16", 64), ("float32", 80), ("float16", 160),
    ("bfloat16", 258), ("float32", 264), ("float16", 512),
)  # fmt: skip
UNEQUAL_DIMS: Final = (
    ("float16", 32, 36), ("bfloat16", 36, 32), ("float32", 32, 64), ("float16", 64, 32), ("bfloat16", 32, 264),
    ("float32", 264, 32),
)  # fmt: skip
RANDOM_DIMS: Final = (("float16", 8, 248), ("bfloat16", 136, 72), ("float32", 48, 88), ("float32", 40, 176))
RANDOM_CASES: Final = 200


def _shapes() -> Iterator[MatrixCase]:
    for dtype, lengths, dim in product(DTYPES, (*LENGTHS, (16, 1024), (1024, 16)), (32, 128, 256)):
        yield xformers(dtype, (1, *lengths, 1, dim))
    for number, lengths in enumerate(LENGTHS):
        yield xformers(DTYPES[number % 3], (300, *lengths, 1, 32), **BATCHED)
    for dtype, dim in zip(DTYPES, (128, 256, 128), strict=True):
        yield xformers(dtype, (300, 32, 64, 1, dim), **BATCHED)
    for number, length in enumerate(ODD_LENGTHS):
        for lengths in ((length, 128), (256, length)):
            yield from (xformers(dtype, (1, *lengths, 1, 32)) for dtype in DTYPES)
            yield xformers(DTYPES[number % 3], (300, *lengths, 1, 32), **BATCHED)
    for dtype, dim in HEAD_DIMS:
        yield xformers(dtype, (1, 256, 128, 1, dim))
        yield xformers(dtype, (300 if dim <= 40 else 20, 256, 128, 1, dim), **BATCHED)
    for dtype, dim, dim_value in UNEQUAL_DIMS:
        yield xformers(dtype, (1, 256, 128, 1, dim), head_dim_value=dim_value)
        yield xformers(dtype, (20, 256, 128, 1, dim), head_dim_value=dim_value, **BATCHED)
    for dtype, heads in product(DTYPES, (3, 5, 12)):
        yield xformers(dtype, (1, 256, 128, heads, 32))
        yield xformers(dtype, (300 // heads, 256, 128, heads, 32), **BATCHED)


def _random() -> Iterator[MatrixCase]:
    rng = np.random.default_rng(0)
    for number in range(RANDOM_CASES):
        dtype, dim, dim_value = RANDOM_DIMS[number % len(RANDOM_DIMS)]
        heads, queries, keys = (int(rng.integers(low, high)) for low, high in ((2, 11), (1, 501), (1, 501)))
        batch = max(int(rng.integers(1, 401)) // heads, 1)
        sizes = batch, queries, keys, heads, dim
        yield xformers(dtype, sizes, head_dim_value=dim_value, batch_period=2, head_period=3)


SHAPES: Final = tuple(dict.fromkeys(_shapes()))
RANDOM: Final = tuple(_random())
BIG: Final = (
    xformers("float16", (1, 128, 128, 300, 128), head_period=7),
    xformers("bfloat16", (1, 128, 128, 300, 128), head_period=7),
    xformers("float32", (1, 128, 128, 300, 128), head_period=7),
    xformers("float16", (13, 1, 67, 200, 8), batch_period=5, head_period=11),
    xformers("float16", (1, 65537, 4, 1, 8)),
    xformers("float16", (1, 4, 65537, 1, 8)),
    xformers("float16", (65537, 4, 5, 1, 8), batch_period=251),
    xformers("float16", (1, 4, 5, 65537, 8), head_period=251),
)
LAYOUTS: Final = (
    *(xformers(t, (2, 67, 67, 3, 32), layout=name) for t in DTYPES for name in ("padded", "heads_first", "packed")),
    *(
        xformers(t, (2, 65, 129, 3, 32), grad_layout=name)
        for t in DTYPES
        for name in ("expanded", "scalar", "columns_first")
    ),
    xformers("float16", (1, 65, 129, 2, 258), grad_layout="scalar"),
    xformers("bfloat16", (2, 67, 65, 3, 32), grad_layout="columns_first", bias="11qk", bias_gradient="sum"),
    xformers("float16", (2, 67, 65, 3, 31), layout="shifted"),
    xformers("float16", (2, 67, 65, 3, 31), layout="padded"),
    xformers("float16", (2, 67, 65, 3, 36), layout="heads_first"),
)
SCALES: Final = tuple(xformers(dtype, (2, 67, 136, 3, 32), scale=0.1) for dtype in DTYPES)
PACKED: Final = tuple(xformers(dtype, (2, 131, 131, 3, 32)) for dtype in DTYPES)
WITH_BIAS: Final = {"bias": "bhqk", "bias_gradient": "sum"}
BIASES: Final = (
    *(
        xformers(t, (2, 67, 136, 3, 32), bias="bhqk", bias_gradient=gradient, bias_values=values)
        for t, gradient, values in product(DTYPES, ("", "sum"), ("gaussian", "corner", "hidden"))
    ),
    *(
        xformers("float16", (2, 67, 136, 3, 32), mask="causal", **WITH_BIAS, bias_values=v)
        for v in ("gaussian", "hidden")
    ),
    *(xformers("float16", (2, 67, 136, 3, 32), bias=letters) for letters in ("111k", "11qk", "1hqk", "b11k")),
    *(
        xformers("float16", (1, queries, keys, 2, 32), bias_layout=layout, **WITH_BIAS)
        for (queries, keys), layout in product(((7, 5), (67, 133)), ("dense", "padded", "transposed", "shifted"))
    ),
)
# Lengths at which the ranges of visited tiles start and end.
EDGE_LENGTHS: Final = (
    (30, 66), (256, 256), (314, 320), (32, 256), (224, 226), (5, 531), (320, 332),
    *((256, keys) for keys in range(62, 67)),
)  # fmt: skip
EDGE_MASKS: Final = (
    "full",
    *(f"{name}{window}" for name in ("causal", "causal_br") for window in ("", "_window3", "_window128", "_window300")),
)
EDGE_DIMS: Final = (("float16", 32), ("float32", 64), ("bfloat16", 128), ("float16", 256))
MASKS: Final = {
    (dtype, dim, mask): tuple(xformers(dtype, (1, *lengths, 1, dim), mask=mask) for lengths in EDGE_LENGTHS)
    for (dtype, dim), mask in product(EDGE_DIMS, EDGE_MASKS)
}
BLIND: Final = tuple(xformers(t, (2, 203, 65, 2, d), mask="causal_br") for t, d in EDGE_DIMS[:3])
GROUPED: Final = (
    *(xformers("float16", (3, queries, 512, 32, 128), num_heads_key=2) for queries in (1, 512)),
    *(xformers("float16", (2, 129, 200, 2 * group, 128), num_heads_key=2, num_splits_key=4) for group in (3, 4, 5, 8)),
    xformers("float16", (1, 512, 512, 8, 128), key_layout="expanded"),
    xformers("float16", (2, 1, 512, 16, 128), key_layout="expanded"),
)
SEQUENCES: Final = _sequences("n0x5u5,70x66u60,1x33u33,129x7u0,37x0u0,64x136u129")
FEW_SEQUENCES: Final = _sequences("n50x60u0,0x5u5,33x64u64,64x64u17")
PACKED_SEQUENCES: Final = (
    *(
        xformers("float16", (1, 1, 1, 3, 32), mask=mask, sequences=_all_used(sequences))
        for mask, sequences in product(EDGE_MASKS, (SEQUENCES, FEW_SEQUENCES))
    ),
    *(xformers("float16", (1, 1, 1, 3, 32), mask="causal_br", sequences=s) for s in (SEQUENCES, FEW_SEQUENCES)),
)
EMPTY: Final = tuple(
    xformers("float16", sizes) for sizes in ((0, 5, 5, 2, 32), (2, 5, 5, 0, 32), (2, 0, 70, 3, 32), (2, 70, 0, 3, 32))
)
DROPOUT_DIMS: Final = (
    ("float16", 16), ("float32", 16), ("float16", 128), ("bfloat16", 128), ("float32", 128), ("bfloat16", 256),
)  # fmt: skip
KEEPING: Final = {"philox_seed": 42, "philox_offset": 3}
DROPOUT: Final = tuple(
    xformers(dtype, (2, rows, rows, 2, dim), dropout_p=p, **KEEPING)
    for (dtype, dim), rows, p in product(DROPOUT_DIMS, (3, 248, 256), (1e-6, 0.3, 0.7))
)
DROPPED: Final = tuple(
    xformers("float32", (batch, *lengths, 1, 32), dropout_p=p, mask=mask, philox_seed=seed).forward
    for (lengths, p, mask), (batch, seed) in zip(
        product(product((2, 33), (3, 15, 32, 33, 65)), (0.3, 0.7), ("full", "causal")),
        [(1, 42), (2, 124), (2, 1), (1, 2**40)] * 10,
        strict=True,
    )
)
# A thousand draws of every weight, as that many batches.
DRAWS: Final = tuple(
    xformers("float32", (1000, *lengths, 1, 128), dropout_p=p, inputs="probe", philox_seed=seed).forward
    for seed, (lengths, p) in enumerate(product(product((2, 33), (3, 15, 32, 33, 65)), (0.3, 0.7)))
)
DROPPED_SEQUENCES: Final = tuple(
    xformers("float16", (1, 1, 1, 3, 32), sequences=_all_used(sequences), dropout_p=0.3, inputs=family, **KEEPING)
    for sequences, family in (
        (SEQUENCES, "gaussian_x3"),
        (FEW_SEQUENCES, "gaussian_x3"),
        (_sequences("n9x20,32x7,0x3,31x32"), "probe"),
    )
)

# ---- PyTorch ----
LONG: Final = (4, 8, 64, 128, 256, 512, 1024, 2048)
MANY_PAIRS: Final = 256 * 256  # of queries and keys: beyond this a batch of one and two heads are enough
# Head dim, dtype, mask and dropout: every dtype meets every mask, with and without dropout.
VARIANTS: Final = (
    (8, "float16", "full", 0.0), (8, "bfloat16", "causal", 0.22), (16, "float16", "full", 0.22),
    (16, "float32", "full", 0.22), (32, "float32", "full", 0.0), (32, "float16", "causal", 0.0),
    (64, "float16", "full", 0.22), (64, "float32", "causal", 0.0), (72, "bfloat16", "full", 0.0),
    (72, "float32", "causal", 0.22), (96, "float16", "causal", 0.22), (96, "bfloat16", "full", 0.22),
    (128, "bfloat16", "causal", 0.0), (128, "float32", "full", 0.22),
)  # fmt: skip


def _math() -> Iterator[MatrixCase]:
    for number, (dim, dtype, mask, p) in enumerate(VARIANTS):
        for index, queries in enumerate(LONG):
            keys = LONG[(index * 3 + number) % len(LONG)]
            batch, heads = (1, 2) if queries * keys > MANY_PAIRS else ((1, 8)[index % 2], 4)
            scale = (None, 1 / dim)[(index // 2 + number) % 2]
            more = KEEPING if p else {}
            yield pytorch(dtype, (batch, queries, keys, heads, dim), mask=mask, dropout_p=p, scale=scale, **more)


MATH: Final = tuple(_math())
MASK_LENGTHS: Final = ((4, 64), (64, 8), (312, 408), (312, 64), (256, 128), (128, 256))
# One mask [queries, keys] for all batches and heads, with its gradient.
ATTN_MASKS: Final = (
    *(
        pytorch(dtype, (2, *lengths, 4, 32), bias="11qk", bias_gradient="sum", scale=scale)
        for dtype, lengths, scale in product(("float16", "float32"), MASK_LENGTHS, (None, 1 / 32))
    ),
    *(pytorch("float16", (2, queries, 65, 4, 32), bias="11qk", bias_gradient="sum") for queries in (64, 312)),
    *(
        pytorch("bfloat16", (2, *lengths, 4, 64), bias="11qk", bias_gradient="sum", dropout_p=0.22, **KEEPING)
        for lengths in MASK_LENGTHS
    ),
)
GRAPHS: Final = tuple(
    pytorch(
        "float16",
        (1, rows, rows, 2, dim),
        dropout_p=p,
        philox_on_device=p > 0,
        num_splits_key=1,
        **(KEEPING if p else {}),
    )
    for rows, dim, p in product((256, 512, 1024), (32, 64), (0.0, 0.22))
)
SMALL_PACKED: Final = pytorch("float32", (4, 4, 4, 2, 16))
PACKED_FORWARD: Final = pytorch("float16", (32, 64, 64, 16, 64), layout="packed", batch_period=4)
MASK_FORMS: Final = (
    *(pytorch("float16", (2, 67, 136, 4, 32), bias=letters) for letters in ("111k", "11qk", "1hqk", "bhqk")),
    pytorch("float16", (2, 67, 15, 4, 32), **WITH_BIAS),
    pytorch("float16", (2, 67, 136, 4, 32), bias="bhqk", bias_layout="expanded"),
    pytorch("float16", (2, 67, 136, 4, 32), bias="bhqk", bias_layout="expanded_rows", key_layout="expanded"),
)
LARGE_MASKS: Final = tuple(pytorch(t, (1, 8192, 8192, 1, 32), bias="bhqk") for t in ("float32", "float16"))
MANY: Final = pytorch("float16", (65536, 4, 8, 1, 8), batch_period=251)
MANY_DROPPED: Final = xformers("float16", (65537, 4, 16, 1, 16), dropout_p=0.3, inputs="probe", **KEEPING).forward
LEVEL: Final = pytorch("float16", (1, 49999, 49999, 1, 8), inputs="flat")
HIDDEN: Final = tuple(
    pytorch(dtype, (2, 67, 136, 2, 32), bias_values=values, **WITH_BIAS)
    for dtype, values in product(DTYPES, ("hidden", "partly", "most_negative"))
)
BIAS_SEQUENCES: Final = tuple(
    xformers("float16", (1, 1, 1, 3, 32), sequences=_all_used(SEQUENCES), bias_values=values, **WITH_BIAS)
    for values in ("gaussian", "hidden")
)
# The same seed and offset in torch's own kernels.
TORCH_MASKS: Final = tuple(
    pytorch(dtype, (2, 33, keys, 3, 128), dropout_p=p, inputs="probe")
    for dtype, keys, p in (("float16", 64, 0.3), ("bfloat16", 65, 0.7), ("float32", 128, 0.22))
)
TORCH_GRADIENTS: Final = (
    *(pytorch(dtype, (2, 128, 136, 4, 32), **WITH_BIAS) for dtype in ("float16", "float32")),
    pytorch("float16", (2, 312, 408, 4, 32), bias="11qk", bias_gradient="sum"),
    pytorch("bfloat16", (2, 128, 256, 4, 64), bias="11qk", bias_gradient="sum", dropout_p=0.22),
    pytorch("float16", (2, 256, 128, 4, 128), dropout_p=0.22),
)

XFORMERS: Final = (
    *SHAPES, *RANDOM, *BIG, *LAYOUTS, *SCALES, *PACKED, *BIASES, *BLIND, *GROUPED, *PACKED_SEQUENCES, *EMPTY,
    *(case for cases in MASKS.values() for case in cases), *DROPOUT, *DROPPED, *DRAWS, *DROPPED_SEQUENCES,
)  # fmt: skip
PYTORCH: Final = (
    *MATH, *ATTN_MASKS, *GRAPHS, SMALL_PACKED, PACKED_FORWARD, *MASK_FORMS, *LARGE_MASKS, MANY, MANY_DROPPED, LEVEL,
    *HIDDEN, *BIAS_SEQUENCES, *TORCH_MASKS, *TORCH_GRADIENTS,
)  # fmt: skip
ALL: Final = (*XFORMERS, *PYTORCH)


def builds_of(case: MatrixCase, arch: str = ARCH) -> list[tuple[Build, ...]]:
    """The kernels of one case: the forward's, and the backward's if it has one."""
    passes = (case.forward, case) if case.direction == "backward" else (case,)
    problems = [each.problem() for each in passes]
    return [planner.builds(problem, arch) for problem in problems if not problem.is_empty]


def builds(arch: str = ARCH) -> list[tuple[Build, ...]]:
    """Every kernel that the cases need, once; each with its fallbacks if ptxas spills."""
    return list(dict.fromkeys(choices for case in ALL for choices in builds_of(case, arch)))


def main() -> int:
    """Prints the numbers of cases and kernels."""
    sys.stdout.write(f"{len(XFORMERS)} + {len(PYTORCH)} cases, {len(builds())} kernels\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
