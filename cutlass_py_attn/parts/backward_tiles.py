"""Backward tiles: where the tiles and row statistics of a block of the Hopper backward lie in shared memory."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutlass_py_attn.gemm.wgmma import tile_at
from cutlass_py_attn.hopper import loaded_tiles
from cutlass_py_attn.parts import moves
from cutlass_py_attn.parts.params import DTYPES
from cutlass_py_attn.plan import Build


class BackwardTiles:
    """The tiles of one Build."""

    def __init__(self, build: Build) -> None:
        self.build, self.dtype = build, DTYPES[build.dtype]
        self.blocks = build.tile_m // build.block_queries  # of a query tile; the rings but that of dS are of blocks
        self.ds_slots = build.grad_output_stages // self.blocks

    def ring(self, name: str) -> cute.Tensor:
        """A ring of tiles as wgmma reads them; one key tile has none."""
        build = self.build
        shape = (build.tile_m, build.tile_n) if name == "ds" else loaded_tiles(build)[name]
        rings = {"query": build.query_stages, "grad_output": build.grad_output_stages}
        keys = build.key_stages if build.key_stages > 1 else None
        slots = {**rings, "ds": self.ds_slots, "key": keys}[name]
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        return tile_at(base, build.buffer(name).offset, self.dtype, shape, slots)

    def ds_blocks(self) -> cute.Tensor:
        """The ring of dS by query blocks: (query, key, slot)."""
        ring = self.ring("ds")
        if self.blocks == 1:
            return ring
        cut = cute.logical_divide(ring, (self.build.block_queries, None, None))
        ((query, block), key, slot), (steps, key_step, slot_step) = cut.layout.shape, cut.layout.stride
        shape, stride = (query, key, (block, slot)), (steps[0], key_step, (steps[1], slot_step))
        return cute.make_tensor(ring.iterator, cute.make_layout(shape, stride=stride))

    def vector(self, name: str) -> cute.Tensor:
        """A ring of row statistics."""
        slots = self.build.query_stages if name == "logsumexp" else self.build.grad_output_stages
        layout = cute.make_layout((self.build.block_queries, slots))
        return cute.make_tensor(moves.shared_pointer(self.build, name, Float32), layout)

    def key_slot(self, at_k: Any) -> Int32 | None:
        """Which of the key's slots; none where there is one."""
        return at_k.index if self.build.key_stages > 1 else None

    def key(self, at_k: Any) -> cute.Tensor:
        """The key tile there."""
        ring = self.ring("key")
        return ring[None, None, at_k.index] if self.build.key_stages > 1 else ring
