"""Shared memory of the sm90 backward: the tiles that TMA loads, dS, and the row statistics."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.kernels.backward_parts.grad_query_accum import GradQueryAccum
from cutlass_py_attn.kernels.common import params, tile_copy, tma
from cutlass_py_attn.kernels.common.masking import COLUMNS, QUAD_COLUMNS
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.kernels.common.wgmma import smem_tile_at
from cutlass_py_attn.kernels.sm90_backward.query_tile_order import QueryBlock
from cutlass_py_attn.kernels.sm90_common.layout import tma_tiles
from cutlass_py_attn.kernels.sm90_common.swap_ab import column_pairs, pair_coordinates
from cutlass_py_attn.launch.build import Build


class BackwardSmem:
    """The tiles of one Build in shared memory."""

    def __init__(self, build: Build) -> None:
        self.build, self.dtype = build, DTYPES[build.dtype]
        # Query blocks of a query tile. A stage of query and grad_output is a block, a stage of dS a tile.
        self.blocks = build.tile_m // build.block_queries
        self.ds_stages = build.grad_output_stages // self.blocks

    def tiles(self, name: str) -> cute.Tensor:
        """Returns all stages of an operand as wgmma reads them: (rows, columns, stages).

        V, and K with one stage, are (rows, columns).
        """
        build = self.build
        shape = (build.tile_m, build.tile_n) if name == "ds" else tma_tiles(build)[name]
        stages = {
            "query": build.query_stages,
            "grad_output": build.grad_output_stages,
            "ds": self.ds_stages,
            "key": build.key_stages if build.key_stages > 1 else None,
            "value": None,
        }[name]
        base = tile_copy.smem_base(build)
        return smem_tile_at(base, build.buffer(name).offset, self.dtype, shape, stages)

    def ds_blocks(self) -> cute.Tensor:
        """Returns dS by query blocks: (query, key, block)."""
        tiles = self.tiles("ds")
        if self.blocks == 1:
            return tiles
        divided = cute.logical_divide(tiles, (self.build.block_queries, None, None))
        ((query, block), key, stage), (steps, key_step, stage_step) = divided.layout.shape, divided.layout.stride
        shape, stride = (query, key, (block, stage)), (steps[0], key_step, (steps[1], stage_step))
        return cute.make_tensor(tiles.iterator, cute.make_layout(shape, stride=stride))

    def key_stage(self, at_k: Any) -> Int32 | None:
        """Returns the stage of the key tile; None if the key has one stage."""
        return at_k.index if self.build.key_stages > 1 else None

    def key_tile(self, at_k: Any) -> cute.Tensor:
        """Returns the key tile of a PipelineState."""
        tiles = self.tiles("key")
        return tiles[None, None, at_k.index] if self.build.key_stages > 1 else tiles


class RowStatistics:
    """logsumexp and delta of the query rows, which are loaded with the tiles of query and grad_output."""

    def __init__(self, build: Build, accum: GradQueryAccum) -> None:
        self.build, self.accum = build, accum
        self.blocks = build.tile_m // build.block_queries

    def row(self, p: Any, first_tile: Int32, block: QueryBlock) -> Int64:
        """Returns the workspace row at which the statistics of a query block start.

        first_tile: first query tile of the sequence, counted over all sequences of a head
        """
        tile, part = first_tile + block.index // self.blocks, block.index % self.blocks
        return self.accum.tile_index(p, block.head, tile) * self.build.tile_m + part * self.build.block_queries

    def load(self, pipe: Any, name: str, address: Int64, row: Int64, state: Any) -> None:
        """Issues the load of the statistics of a query block to a stage that the producer has acquired."""
        rows = self.build.block_queries
        source = params.pointer(address, Float32) + cute.assume(row, divby=16)
        target = self._stages(name).iterator + state.index * rows
        tma.load_rows(source, target, rows, pipe.producer_get_barrier(state))

    def registers(self) -> cute.Tensor:
        """Returns registers for the statistics of the columns of a thread's accumulator of transposed scores."""
        return cute.make_rmem_tensor(cute.make_layout((QUAD_COLUMNS, self.build.block_queries // COLUMNS)), Float32)

    def read(self, name: str, stage: Int32, thread: Int32, values: cute.Tensor) -> None:
        """Reads the statistics of a stage into `registers`, in pairs."""
        rows = self.build.block_queries
        first = self._stages(name).iterator + (stage * rows + thread % (COLUMNS // QUAD_COLUMNS) * QUAD_COLUMNS)
        pairs = cute.make_layout((QUAD_COLUMNS, rows // COLUMNS), stride=(1, COLUMNS))
        cute.autovec_copy(cute.make_tensor(first.align(8), pairs), values)

    def start(self, name: str, stage: Int32, thread: Int32, accumulator: cute.Tensor) -> None:
        """Sets each column of a thread's accumulator of transposed scores to the statistic of its query."""
        pairs = column_pairs(accumulator)
        first = cute.make_tensor(pairs.iterator, cute.make_layout((2, cute.size(pairs, mode=[2])), stride=(1, 4)))
        self.read(name, stage, thread, first)
        for at in pair_coordinates(pairs):
            if at.row:
                pairs[at.element, at.row, at.pair] = pairs[at.element, 0, at.pair]

    def _stages(self, name: str) -> cute.Tensor:
        """Returns all stages of one statistic: (row, stage)."""
        stages = self.build.query_stages if name == "logsumexp" else self.build.grad_output_stages
        layout = cute.make_layout((self.build.block_queries, stages))
        return cute.make_tensor(tile_copy.smem_pointer(self.build, name, Float32), layout)
