"""Wide heads of the sm90 backward: its three gradients, the chunks that each streams, and shared memory.

One kernel computes dQ, dK and dV in blocks of their own, each of 64 rows of its gradient:

    gradient      resident    scores                              streamed             result
    grad_query    Q, dO       S = Q K^T,     dP = dO V^T          K, V, then K         dQ += dS K
    grad_key      K, V        S^T = K Q^T,   dP^T = V dO^T        Q, dO, then Q        dK += dS^T Q
    grad_value    K           S^T = K Q^T                         Q, then dO           dV += P^T dO

What is streamed passes through a ring of chunks, as in the forward (layout.py), here in tiles of 64 keys (dQ) or
64 queries (dK, dV). The scores of a streamed tile are computed by one warpgroup, alternately, from all chunks of the
operands of its products; a chunk of the result's operand is read by the warpgroup with its columns of the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.kernels.sm90_wide.layout import WARPGROUPS, Chunk, chunk_columns, chunks_of
from cutlass_py_attn.launch.build import WIDE_COLUMN_MULTIPLE, Buffer, Build
from cutlass_py_attn.launch.smem import BARRIER_BYTES, first_that_fits, stack, tile_bytes
from cutlass_py_attn.problem.tensors import F32_BYTES

STATISTICS: Final = 2  # of a query: logsumexp and delta; one of each for each warpgroup


@dataclass(frozen=True, slots=True)
class Gradient:
    """One of the three gradients.

    name: its tensor
    products: (resident operand, streamed operand) of each product of scores: S, then dP if there is one
    streamed: operand of the result's product, which is streamed too
    """

    name: str
    products: tuple[tuple[str, str], ...]
    streamed: str

    @property
    def is_transposed(self) -> bool:
        """Whether the rows of the scores are keys."""
        return self.name != "grad_query"

    @property
    def has_ds(self) -> bool:
        """Whether the result is a product of dS, and not of P."""
        return len(self.products) > 1


GRAD_QUERY: Final = Gradient("grad_query", (("query", "key"), ("grad_output", "value")), "key")
GRAD_KEY: Final = Gradient("grad_key", (("key", "query"), ("value", "grad_output")), "query")
GRAD_VALUE: Final = Gradient("grad_value", (("key", "query"),), "grad_output")
# Resident operands: the buffer of each.
RESIDENT: Final = {"query": "resident", "key": "resident", "grad_output": "resident_value", "value": "resident_value"}


def columns_of(build: Build, operand: str) -> int:
    """Returns the columns of an operand inside its tile."""
    return build.columns if operand in ("query", "key") else build.columns_value


def score_chunks(build: Build, gradient: Gradient) -> tuple[tuple[Chunk, ...], ...]:
    """Returns the chunks of the streamed operand of each product of scores."""
    width = chunk_columns(build)
    return tuple(chunks_of(0, columns_of(build, operand), width) for operand, _ in gradient.products)


def result_columns(build: Build, gradient: Gradient) -> tuple[int, int]:
    """Returns the columns of the result that each warpgroup computes: half of the strips, or the first one more."""
    columns = columns_of(build, gradient.streamed)
    first = ceil_div(columns // WIDE_COLUMN_MULTIPLE, WARPGROUPS) * WIDE_COLUMN_MULTIPLE
    return first, columns - first


def result_chunks(build: Build, gradient: Gradient) -> tuple[tuple[Chunk, ...], tuple[Chunk, ...]]:
    """Returns the chunks of the result's streamed operand for each warpgroup."""
    first, second = result_columns(build, gradient)
    width = chunk_columns(build)
    return chunks_of(0, first, width), chunks_of(first, second, width)


def num_score_chunks(build: Build, gradient: Gradient) -> int:
    """Returns the chunks of a streamed tile from which its scores are computed."""
    return sum(map(len, score_chunks(build, gradient)))


def first_score_chunk(build: Build, gradient: Gradient, tile: Any) -> Any:
    """Returns the number of the first chunk of the scores of streamed tile `tile` > 0, counted from the first of all.

    Before it are the scores of the tiles before, and the results of all of these but the last. That of tile 0 is 0.
    """
    scores = num_score_chunks(build, gradient)
    return scores + (tile - 1) * (scores + sum(map(len, result_chunks(build, gradient))))


def first_result_chunk(build: Build, gradient: Gradient, tile: Any, warpgroup: int, *, is_last: bool) -> Any:
    """Returns the number of the first chunk of the result of a streamed tile that a warpgroup reads.

    is_last: whether no tile follows; else the scores of the next one come before it
    """
    before = sum(len(chunks) for chunks in result_chunks(build, gradient)[:warpgroup])
    scores = 0 if is_last else num_score_chunks(build, gradient)
    return first_score_chunk(build, gradient, tile + 1) + scores + before


def ring_buffer(build: Build, gradient: Gradient) -> tuple[int, int]:
    """Returns where the ring of a gradient starts in shared memory (bytes), and its stages.

    dV has no second resident tile: its ring begins there.
    """
    ring = build.buffer("ring")
    start = ring.offset if gradient.has_ds else build.buffer("resident_value").offset
    return start, (ring.offset + ring.bytes - start) // _stage_bytes(build)


def _stage_bytes(build: Build) -> int:
    return tile_bytes(build.dtype, build.tile_n, chunk_columns(build))


def backward_map(build: Build) -> tuple[Buffer, ...]:
    """Returns the map of variant wide, with chunks of up to `query_stages` streamed tiles if so many fit."""
    most = build.query_stages * (num_score_chunks(build, GRAD_KEY) + sum(map(len, result_chunks(build, GRAD_KEY))))
    maps = {stages: _backward_with(build, stages) for stages in range(most, 0, -1)}
    return maps[first_that_fits(build, maps.items())]


def _backward_with(build: Build, stages: int) -> tuple[Buffer, ...]:
    """Places the resident tiles, the ring, P or dS of two streamed tiles, the row statistics, and the barriers.

    Barriers: an empty one and a full one of each warpgroup for each stage of the ring of dV, which has the most, and
    one for the resident tiles.
    """
    dtype, tile_m, tile_n, stage_bytes = build.dtype, build.tile_m, build.tile_n, _stage_bytes(build)
    resident_value = tile_bytes(dtype, tile_m, build.columns_value)
    barriers = stages + resident_value // stage_bytes  # of the ring of dV
    return stack(
        ("resident", tile_bytes(dtype, tile_m, build.columns), 0, 3),
        ("resident_value", resident_value, 0, 3),
        ("ring", stages * stage_bytes, 0, 7),
        ("p_ds", WARPGROUPS * tile_bytes(dtype, tile_m, tile_n), 2, 7),
        ("row_statistics", STATISTICS * WARPGROUPS * tile_m * F32_BYTES, 0, 4),
        ("barriers", BARRIER_BYTES * ((WARPGROUPS + 1) * barriers + 1), 0, 8),
    )
