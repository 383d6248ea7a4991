"""Launch chain of the backward, shared by every kernel body: preprocess, main kernel, postprocess, bias, sinks.

    entry       computes                                               launched when
    main        dQ sums or dQ, dK, dV, grad_bias: the body's kernel    the build has one
    delta       row statistics: delta and the logsumexp in base 2      always
    finish      dQ from its float32 sums                               the body leaves sums
    finish_kv   dK and dV from their float32 sums                      the body leaves sums of these
    bias        grad_bias summed over axes of the bias                 the main kernel does not write it
    sinks       the gradient of the sinks                              it is wanted

The plan launches delta before main; this module only compiles them, in the order in which launch/entry_points.py
numbers the entries.
"""

from typing import Any, Protocol

import cutlass
import cutlass.cute as cute

from cutlass_py_attn.kernels.backward_parts.grad_bias import GradBias
from cutlass_py_attn.kernels.backward_parts.grad_sinks import GradSinks
from cutlass_py_attn.kernels.backward_parts.preprocess import BackwardPreprocess
from cutlass_py_attn.kernels.common import dependent_launch, params
from cutlass_py_attn.kernels.tile_lists.chain import TileLists
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.entry_points import ROW_THREADS, entries


class MainKernel(Protocol):
    """The body of a backward."""

    def launch(self, values: tuple, grid: tuple) -> None:
        """Names and launches the main kernel; called while the host function is traced."""


class GradBiasKernel(Protocol):
    """A kernel for grad_bias that is launched with tensor maps."""

    def launch(self, values: tuple, grid: tuple) -> None:
        """Names and launches the kernel; called while the host function is traced."""


class Postprocess(Protocol):
    """The conversion of sums that a body leaves. threads: of a block."""

    threads: int

    def run(self, p: Any) -> None:
        """Converts the sums of a block; called while the kernel is traced."""


class BackwardChain:
    """The host function of one backward Build.

    main: the body that computes the gradients of query, key and value
    postprocess: the conversion of the dQ sums that `main` leaves; None or unused when the build has no such entry
    postprocess_kv: the conversion of the sums of dK and dV; None when the build has no such entry
    grad_bias: the kernel for grad_bias; None for the one of mma.sync
    """

    def __init__(
        self,
        build: Build,
        main: MainKernel,
        postprocess: Postprocess | None,
        postprocess_kv: Postprocess | None,
        grad_bias: GradBiasKernel | None,
    ) -> None:
        self.build, self.main, self.postprocess, self.postprocess_kv = build, main, postprocess, postprocess_kv
        self.preprocess = BackwardPreprocess(build)
        self.grad_bias_kernel = grad_bias
        self.grad_bias = GradBias(build) if grad_bias is None and "bias" in entries(build) else None
        self.grad_sinks = GradSinks(build)

    @cute.jit
    def __call__(self, *values):
        build, present = self.build, entries(self.build)
        grid = params.from_values(self.build, values).num_queries, 1, 1
        # Each launch gets a struct of its own: the DSL keeps the fields that it has read of a struct with that launch.
        if cutlass.const_expr(build.has_main):
            self.main.launch(values, grid)
        params.set_entry_name(build, self.preprocess_kernel, "_delta")
        preprocess = self.preprocess_kernel(params.from_values(self.build, values))
        preprocess.launch(grid=grid, block=(ROW_THREADS, 1, 1))
        if cutlass.const_expr("finish" in present):
            params.set_entry_name(build, self.postprocess_kernel, "_finish")
            postprocess = self.postprocess_kernel(params.from_values(self.build, values))
            postprocess.launch(grid=grid, block=(self.postprocess.threads, 1, 1))
        if cutlass.const_expr(self.postprocess_kv is not None):
            params.set_entry_name(build, self.postprocess_kv_kernel, "_finish_kv")
            postprocess_kv = self.postprocess_kv_kernel(params.from_values(self.build, values))
            postprocess_kv.launch(grid=grid, block=(self.postprocess_kv.threads, 1, 1))
        if cutlass.const_expr(self.grad_bias_kernel is not None):
            self.grad_bias_kernel.launch(values, grid)
        if cutlass.const_expr(self.grad_bias is not None):
            params.set_entry_name(build, self.bias_kernel, "_bias")
            bias = self.bias_kernel(params.from_values(self.build, values))
            bias.launch(grid=grid, block=(self.grad_bias.build.threads, 1, 1), **self.grad_bias.launch_bounds)
        if cutlass.const_expr("sinks" in present):
            params.set_entry_name(build, self.sinks_kernel, "_sinks")
            sinks = self.sinks_kernel(params.from_values(self.build, values))
            sinks.launch(grid=grid, block=(ROW_THREADS, 1, 1))
        if cutlass.const_expr(build.form.has_ranges):
            TileLists(build).launch(values, grid)

    @cute.kernel
    def preprocess_kernel(self, p: Any):
        dependent_launch.start_next(self.build, "delta")
        self.preprocess.run(p)

    @cute.kernel
    def postprocess_kernel(self, p: Any):
        dependent_launch.start_next(self.build, "finish")
        dependent_launch.wait_for_previous(self.build, "finish")
        self.postprocess.run(p)

    @cute.kernel
    def postprocess_kv_kernel(self, p: Any):
        dependent_launch.wait_for_previous(self.build, "finish_kv")
        self.postprocess_kv.run(p)

    @cute.kernel
    def bias_kernel(self, p: Any):
        self.grad_bias.run(p)

    @cute.kernel
    def sinks_kernel(self, p: Any):
        self.grad_sinks.run(p)


def trace(
    build: Build,
    main: MainKernel,
    postprocess: Postprocess | None,
    postprocess_kv: Postprocess | None = None,
    grad_bias: GradBiasKernel | None = None,
) -> tuple[Any, tuple[Any, ...]]:
    """Returns the host function that launches this build's kernels, and arguments to compile it with."""
    return BackwardChain(build, main, postprocess, postprocess_kv, grad_bias), params.example_arguments(
        abi.fields_of(build)
    )
