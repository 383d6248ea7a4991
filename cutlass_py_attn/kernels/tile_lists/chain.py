"""Chain: the kernels of tile lists as entries of the cubin of a fused kernel, in the order of their launches."""

from typing import Any

import cutlass.cute as cute

from cutlass_py_attn.kernels.common import params
from cutlass_py_attn.kernels.tile_lists.lists import Lists
from cutlass_py_attn.kernels.tile_lists.order import Order
from cutlass_py_attn.kernels.tile_lists.pairs import Pairs
from cutlass_py_attn.kernels.tile_lists.ranges import Ranges
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.entry_points import LIST_ROLES, PAIR_THREADS, ROW_THREADS


class TileLists:
    """The kernels of one Build."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.ranges, self.lists, self.order = Ranges(build), Lists(build), Order(build)
        self.pairs = Pairs(build) if build.form.program else None

    def launch(self, values: tuple[Any, ...], grid: Any) -> None:
        """Launches the kernels when the host function is traced."""
        kernels = self.ranges_kernel, self.pairs_kernel, self.lists_kernel, self.order_kernel
        for role, kernel in zip(LIST_ROLES, kernels, strict=True):
            if role != "pairs" or self.pairs is not None:
                threads = PAIR_THREADS if role == "pairs" else ROW_THREADS
                params.set_entry_name(self.build, kernel, f"_{role}")
                kernel(params.from_values(self.build, values)).launch(grid=grid, block=(threads, 1, 1))

    @cute.kernel
    def ranges_kernel(self, p: Any):
        self.ranges.run(p)

    @cute.kernel
    def pairs_kernel(self, p: Any):
        self.pairs.run(p)

    @cute.kernel
    def lists_kernel(self, p: Any):
        self.lists.run(p)

    @cute.kernel
    def order_kernel(self, p: Any):
        self.order.run(p)
