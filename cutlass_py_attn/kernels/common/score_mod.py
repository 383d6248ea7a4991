"""Score modification: the score terms between S = Q K^T and the mask, on a thread's scores.

A kernel without such terms keeps its scores as raw products and scales them inside the exponent. With terms the scores
become numbers in base 2 right after the product: log2(e) times the scores of Problem's formula. What each term does is
in its file, score_terms/<term>.py. The functions take the rows x columns view of an accumulator, of mma.sync and wgmma
alike.
"""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutlass_py_attn.kernels.common import params
from cutlass_py_attn.kernels.common.seqlen_info import SeqlenInfo
from cutlass_py_attn.kernels.common.tile_copy import GmemTile
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.masks import Band
from cutlass_py_attn.score_terms import registry

LOG2_E = math.log2(math.e)


class ScoreMod:
    """The score terms of one Build that change scores.

    present: whether there is any
    has_derivative: whether `apply` returns a derivative, which dS must be multiplied by
    """

    def __init__(self, build: Build) -> None:
        self.build = build
        self.terms = tuple(term for term in registry.of_features(build.features) if term.modifies_scores)
        self.present = bool(self.terms)
        self.has_derivative = any(term.has_derivative for term in self.terms)

    def load_operands(self, p: Any, batch: Int32, head: Int32) -> tuple[Float32, ...]:
        """Returns the operands of one (batch, query head) that stay in registers, such as ALiBi's slope in base 2."""
        return tuple(term.load_operand(_load, p, batch, head) for term in self.terms if term.vector is not None)

    def apply(
        self, p: Any, scores: cute.Tensor, coordinates: cute.Tensor, tile_origin: tuple, band: Band, given: tuple
    ) -> cute.Tensor | None:
        """Turns raw products into scores in base 2. Returns d(score)/d(scale Q K^T); None for a derivative of 1.

        coordinates: (row, column) of each element in the tile
        tile_origin: first query and first key of the tile
        given: (operands, bias): the result of `load_operands`, and this thread's part of the bias tile; None without
        """
        operands, bias = given
        derivative = cute.make_rmem_tensor_like(scores) if self.has_derivative else None
        for number in range(cute.size(scores, mode=[0])):
            row = ScoreRow(self, p, scores, number, coordinates, tile_origin, band, bias, derivative)
            if not any(term.scales_products for term in self.terms):
                row.values = row.values * p.scale_log2
            in_registers = iter(operands)
            for term in self.terms:
                term.modify_scores(row, next(in_registers) if term.vector is not None else None)
            row.store()
        return derivative

    def bias_row(self, scores: cute.Tensor, part: cute.Tensor, row: int) -> Any:
        """Returns the bias of one row in float32, loaded only now: a whole tile would take too many registers."""
        values = cute.make_rmem_tensor(scores[row, None].layout.shape, params.DTYPES[self.build.dtype])
        source = part[(None, row % 2), row // 2, None]
        cute.autovec_copy(source, cute.make_tensor(values.iterator, cute.make_layout(source.shape)))
        return values.load().to(Float32)


class ScoreRow:
    """One row of a thread's scores, as score terms see it: all of it has one query.

    p: the kernel's parameters
    values: the scores as a vector in base 2; raw products for the term that scales them
    row[column]: one score in base 2
    """

    def __init__(
        self,
        score_mod: ScoreMod,
        p: Any,
        scores: cute.Tensor,
        number: int,
        coordinates: cute.Tensor,
        tile_origin: tuple,
        band: Band,
        bias: cute.Tensor | None,
        derivative: cute.Tensor | None,
    ) -> None:
        self.p = p
        self._score_mod, self._scores, self._number, self._coordinates = score_mod, scores, number, coordinates
        self._query0, self._key0 = tile_origin
        self._band, self._bias, self._derivative = band, bias, derivative
        self._vector: Any = scores[number, None].load()
        self._diagonal: Any = None

    @property
    def num_columns(self) -> int:
        """Scores of this row."""
        return cute.size(self._scores, mode=[1])

    @property
    def values(self) -> Any:
        """The row as a vector."""
        return self._scores[self._number, None].load() if self._vector is None else self._vector

    @values.setter
    def values(self, vector: Any) -> None:
        self._vector = vector

    def store(self) -> None:
        """Writes `values` to the accumulator, unless the terms have written single scores since."""
        if self._vector is not None:
            self._scores[self._number, None].store(self._vector)
            self._vector = None

    def __getitem__(self, column: int) -> Float32:
        self.store()
        return self._scores[self._number, column]

    def __setitem__(self, column: int, score: Float32) -> None:
        self.store()
        self._scores[self._number, column] = score

    def add(self, column: int, value: Float32) -> None:
        """Adds a value of Problem's formula, in natural units, to one score."""
        self[column] = self[column] + value * LOG2_E

    def set_derivative(self, values: Any) -> None:
        """Keeps d(score)/d(scale Q K^T) of this row, a vector."""
        self._derivative[self._number, None].store(values)

    @property
    def query(self) -> Int32:
        """Index of the query inside its sequence."""
        return self._query0 + self._coordinates[self._number, 0][0]

    def key(self, column: int) -> Int32:
        """Returns the index of a column's key inside its sequence."""
        return self._key0 + self._coordinates[0, column][1]

    @property
    def num_queries(self) -> Int32:
        """Queries of the sequence."""
        return self._band.num_queries

    @property
    def num_keys(self) -> Int32:
        """Keys of the sequence."""
        return self._band.num_keys

    def distance(self, column: int) -> Int32:
        """Returns i + num_keys - num_queries - j: how far the key is before the bottom-right diagonal."""
        if self._diagonal is None:  # relative to the tile's first key, once for all columns
            self._diagonal = self.query + self.num_keys - self.num_queries - self._key0
        return self._diagonal - self._coordinates[0, column][1]

    def bias(self) -> Any:
        """Returns the bias of this row as a float32 vector."""
        return self._score_mod.bias_row(self._scores, self._bias, self._number)

    def tanh(self, values: Any) -> Any:
        """Returns tanh: the hardware's for 16-bit operands, 2 / (1 + exp(-2 x)) - 1 for the precision of float32."""
        return cute.math.tanh(values, fastmath=self._score_mod.build.item_bytes == 2)

    def float32(self, value: Int32) -> Float32:
        """Returns an integer as float32."""
        return Float32(value)

    def absolute(self, value: Float32) -> Float32:
        """Returns |value|."""
        return cute.arch.fmax(value, -value)


def _load(address: Any, index: Any) -> Float32:
    return params.load_scalar(address, Float32, index)


def bias_source(build: Build, p: Any, name: str, at: tuple[Any, Any, Any, Any], sizes: tuple[Any, Any]) -> GmemTile:
    """Returns the tile of `bias` or `grad_bias` that starts at (batch, head, query, key) `at`.

    sizes: queries and keys of the sequence
    """
    batch, head, query, key = at
    access = build.bias_vector_bytes if name == "bias" else build.grad_bias_vector_bytes
    row, column = params.stride(p, name, "row"), params.stride(p, name, "column")
    by_element = access == build.item_bytes
    offset = cutlass.Int64(key) * column if by_element else cutlass.Int64(key)
    for index, axis in ((batch, "batch"), (head, "head"), (query, "row")):
        offset = offset + cutlass.Int64(index) * params.stride(p, name, axis)
    start = params.pointer(getattr(p, name), params.DTYPES[build.dtype], access)
    start = start + params.assume_multiple(offset, access // build.item_bytes)
    left = sizes[0] - query, sizes[1] - key
    return GmemTile(start, row, *left, access, column if by_element else 1)


def bias_of(build: Build, p: Any, name: str, of: SeqlenInfo, head: Int32, tile_origin: tuple[Any, Any]) -> GmemTile:
    """Returns the tile at `tile_origin` of a sequence and query head; grad_bias also has the keys that are not used."""
    keys = of.stored_keys if name == "grad_bias" else of.num_keys
    return bias_source(build, p, name, (of.index, head, *tile_origin), (of.num_queries, keys))
