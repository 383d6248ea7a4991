"""Main kernel of the sm90 backward: its launch with tensor maps, and the role of each warpgroup.

    warpgroup   role                                     registers
    0           warp 0 loads tiles (producer); warps 1   decreased
                and 2 add dQ, if they do it in order;
                warp 3 writes grad_bias, if there is one
    1           dQ = dS K of every query tile            decreased
    2, 3        scores, dK and dV (consumers)            increased

A block with 64 keys has one consumer warpgroup, without the last.

A body (backward.py, sm90_backward_2cta/backward.py) says what each role does.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as tensor_maps
from cutlass import GridConstant, Int32

from cutlass_py_attn.kernels.common import dependent_launch, params, tile_copy, tma
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.kernels.common.quad_transpose import store_rows
from cutlass_py_attn.kernels.common.seqlen_info import SeqlenInfo
from cutlass_py_attn.kernels.common.tile_copy import GmemTile
from cutlass_py_attn.kernels.common.wgmma import row_view
from cutlass_py_attn.kernels.sm90_backward.layout import (
    ADDING_WARPS,
    DQ_WARPGROUPS,
    GRAD_BIAS_WARP,
    adds_in_order,
    registers,
    stored_tiles,
)
from cutlass_py_attn.kernels.sm90_common.layout import LOAD_WARPGROUPS, tma_tiles
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_THREADS, WARPGROUP_WARPS

CONSUMER_START = (LOAD_WARPGROUPS + DQ_WARPGROUPS) * WARPGROUP_THREADS  # first consumer thread of a block


@dataclass(frozen=True)
class Maps:
    """The tensor maps; that of grad_bias if the kernel writes it."""

    q: Any
    do: Any
    k: Any
    v: Any
    grad_bias: Any = None


@dataclass(frozen=True)
class Pipelines:
    """The pipelines of query, grad_output, key and value, which TMA fills, and of dS."""

    q: Any
    do: Any
    k: Any
    v: Any
    ds: Any


class Body(Protocol):
    """What the roles of a main kernel do.

    waits_in_producer: whether `produce` waits for the delta kernel, before it loads anything that this one writes. Then
        no other role touches global memory before the first loads arrive.
    """

    waits_in_producer: bool

    def create_pipelines(self) -> Pipelines:
        """Creates the pipelines and initialises their mbarriers."""

    def sync_barrier_init(self) -> None:
        """Makes the mbarriers visible to the threads that use them."""

    def produce(self, p: Any, pipes: Pipelines, maps: Maps) -> None:
        """Loads tiles; one warp."""

    def add_query_gradient(self, p: Any, pipes: Pipelines, warp: Int32) -> None:
        """Adds dQ of every second query tile, if it is added in order; one warp."""

    def store_grad_bias(self, p: Any, pipes: Pipelines, target: Any) -> None:
        """Writes dS of every query tile to grad_bias, if the build has it; one warp."""

    def multiply_query_gradient(self, p: Any, pipes: Pipelines, thread: Int32) -> None:
        """Computes dQ; one warpgroup."""

    def consume(self, p: Any, pipes: Pipelines, thread: Int32) -> None:
        """Computes scores, dK and dV; the consumer warpgroups."""

    def sync_exit(self) -> None:
        """Waits until no other block accesses this block's shared memory."""


class BackwardKernelSm90:
    """The main kernel of one Build; `backward_chain.MainKernel`."""

    def __init__(self, build: Build, body: Body) -> None:
        self.build, self.body = build, body
        self.dtype = DTYPES[build.dtype]
        self.registers = registers(build)

    @cute.jit
    def launch(self, values: tuple, grid: tuple):
        """Names and launches the kernel."""
        params.set_entry_name(self.build, self.kernel)
        p = params.from_values(self.build, values)
        tiles = (tma_tiles(self.build) | stored_tiles(self.build)).items()
        maps = tuple(tma.placeholder_map(p, getattr(p, name), self.dtype, *tile) for name, tile in tiles)
        block, blocks_of_cluster = (self.build.threads, 1, 1), (self.build.cluster, 1, 1)
        self.kernel(*maps, p).launch(grid=grid, block=block, cluster=blocks_of_cluster, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        map_q: GridConstant[tensor_maps.TensorMap],
        map_do: GridConstant[tensor_maps.TensorMap],
        map_k: GridConstant[tensor_maps.TensorMap],
        map_v: GridConstant[tensor_maps.TensorMap],
        p: Any,
    ):
        self.run(p, Maps(map_q, map_do, map_k, map_v))

    @cute.jit
    def run(self, p: Any, maps: Maps):
        """Executes the role of this warp."""
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        pipes = self.body.create_pipelines()
        self.body.sync_barrier_init()
        if not self.body.waits_in_producer:
            dependent_launch.wait_for_previous(self.build, "main")
        if warp < WARPGROUP_WARPS:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 0:
                self.body.produce(p, pipes, maps)
            if cutlass.const_expr(adds_in_order(self.build)):  # noqa: SIM102 - a constant and a traced condition
                if (warp > 0) & (warp <= ADDING_WARPS):
                    self.body.add_query_gradient(p, pipes, warp - 1)
            if cutlass.const_expr(self.build.maps_grad_bias):  # noqa: SIM102 - as above
                if warp == GRAD_BIAS_WARP:
                    self.body.store_grad_bias(p, pipes, maps.grad_bias)
        elif warp < 2 * WARPGROUP_WARPS:
            cute.arch.setmaxregister_decrease(self.registers[1])
            self.body.multiply_query_gradient(p, pipes, thread - WARPGROUP_THREADS)
        else:
            cute.arch.setmaxregister_increase(self.registers[2])
            self.body.consume(p, pipes, thread - CONSUMER_START)
        self.body.sync_exit()


class BackwardGradBiasKernelSm90(BackwardKernelSm90):
    """The main kernel of a Build that writes grad_bias: only the tensor maps differ."""

    @cute.kernel
    def kernel(
        self,
        map_q: GridConstant[tensor_maps.TensorMap],
        map_do: GridConstant[tensor_maps.TensorMap],
        map_k: GridConstant[tensor_maps.TensorMap],
        map_v: GridConstant[tensor_maps.TensorMap],
        map_grad_bias: GridConstant[tensor_maps.TensorMap],
        p: Any,
    ):
        self.run(p, Maps(map_q, map_do, map_k, map_v, map_grad_bias))


def key_gradient_tile(build: Build, p: Any, name: str, head: Int32, of: SeqlenInfo, key0: Int32) -> GmemTile:
    """Returns the rows of a key tile in global memory.

    name: grad_key or grad_value
    head: of key and value
    key0: first key of the tile
    """
    columns = build.head_dim if name == "grad_key" else build.head_dim_value
    coordinates = of.batch, head, of.key_start + key0
    return tile_copy.gmem_tile(build, p, name, coordinates, of.stored_keys - key0, columns)


def store_key_gradient(values: cute.Tensor, gemm: Any, target: GmemTile, thread: Int32) -> None:
    """Writes a thread's rows of dK or dV, in the operands' type, from registers.

    gemm: gives the coordinates of `values`
    """
    store_rows(row_view(values), row_view(gemm.coordinates(thread)), target)
