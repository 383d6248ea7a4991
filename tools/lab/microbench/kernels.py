"""Kernels: one class for each kind of microbenchmark. Block 0 writes the clocks and nanoseconds of its rounds."""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.primitives as prim
from cutlass import BFloat16, Float32, Int32, Int64, Uint32

from cutlass_py_attn.kernels.common import params
from cutlass_py_attn.kernels.common.mma_sync import Operands
from cutlass_py_attn.kernels.common.wgmma import Wgmma, smem_tile_at
from cutlass_py_attn.kernels.sm90_forward import softmax_poly_exp2
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_THREADS
from tools.lab.microbench import cases
from tools.lab.microbench.cases import Micro

Params = params.struct_type("MicroParams", cases.FIELDS)
REGISTERS = (216, 72)  # per thread of the MMA warpgroups and of the reading warpgroup
SINK = 1024  # byte offset from `out` of results that keep the compiler from removing work


class Kernel:
    """Base of all kinds: shared memory, clocks around the rounds, and the store of results."""

    def __init__(self, micro: Micro) -> None:
        self.micro = micro

    @cute.jit
    def __call__(self, *values):
        p = params.build_struct(Params, cases.FIELDS, values)
        self.kernel.set_name_prefix(self.micro.symbol, remove_cutlass_symbol=True, keep_mangled_name=False)
        grid, block, together = (p.blocks, 1, 1), (self.micro.threads, 1, 1), (self.micro.cluster, 1, 1)
        self.kernel(p).launch(grid=grid, block=block, cluster=together, min_blocks_per_mp=1)

    def shared(self, name: str) -> cute.Pointer:
        """Returns a pointer into shared memory, in bytes."""
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        return base + self.micro.offsets[name]

    @cute.jit
    def report(self, p: Any, thread: Int32, clocks: Int64, nanoseconds: Int64):
        """Thread 0 of block 0 writes the elapsed clocks and nanoseconds."""
        block, _, _ = cute.arch.block_idx()
        if block == 0 and thread == 0:
            found = cute.make_tensor(params.pointer(p.out, Int64), cute.make_layout(2))
            found[0] = cute.arch.clock64() - clocks
            found[1] = cute.arch.globaltimer() - nanoseconds

    def keep(self, p: Any, thread: Int32, value: Float32) -> None:
        """Stores a value so that the compiler keeps the work that computes it."""
        sink = cute.make_tensor(params.pointer(p.out + SINK, Float32), cute.make_layout(cases.FUNCTION_THREADS))
        sink[thread] = value


class Multiply(Kernel):
    """wgmma on operands in shared memory, two groups in flight."""

    @cute.kernel
    def kernel(self, p: Params):
        thread, _, _ = cute.arch.thread_idx()
        self.fill(p, thread)
        flag = cute.recast_ptr(self.shared("flags").align(16), dtype=Int32)
        if thread == 0:
            cute.arch.store(flag, Int32(0))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        if cutlass.const_expr(self.micro.beside):
            if thread < cases.MMA_WARPGROUPS * WARPGROUP_THREADS:
                cute.arch.setmaxregister_increase(REGISTERS[0])
                self.multiply(p, thread, flag)
            else:
                cute.arch.setmaxregister_decrease(REGISTERS[1])
                self.read(p, thread - cases.MMA_WARPGROUPS * WARPGROUP_THREADS, flag)
        else:
            self.multiply(p, thread, flag)

    @cute.jit
    def fill(self, p: Any, thread: Int32):
        """Copies the operands from `data` to shared memory."""
        words = self.micro.offsets["flags"] // 4
        source = cute.make_tensor(params.pointer(p.data, Uint32), cute.make_layout(words))
        target = cute.make_tensor(cute.recast_ptr(self.shared("a").align(16), dtype=Uint32), cute.make_layout(words))
        for i in cutlass.range(thread, words, self.micro.threads, unroll=1):
            target[i] = source[i]

    @cute.jit
    def multiply(self, p: Any, thread: Int32, flag: cute.Pointer):
        """Issues C += A B in every round."""
        self.bind(p, thread)
        r_c = self.product.accumulator(thread)
        r_c.fill(0.0)
        clocks, nanoseconds = cute.arch.clock64(), cute.arch.globaltimer()
        for _ in cutlass.range(p.rounds, unroll=1):
            self.product.issue(r_c, self.parts)
            self.product.wait(1)
        self.product.wait()
        self.report(p, thread, clocks, nanoseconds)
        cute.arch.store(flag, Int32(1))
        self.keep(p, thread, r_c.load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0))

    def bind(self, p: Any, thread: Int32) -> None:
        """Binds the product and its operands: A in shared memory or registers, B in shared memory."""
        self.product = Wgmma(self.micro.product, "bfloat16")
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        s_a = smem_tile_at(base, self.micro.offsets["a"], BFloat16, (cases.ROWS, cases.DEPTH))
        s_b = smem_tile_at(base, self.micro.offsets["b"], BFloat16, (self.micro.columns, cases.DEPTH))
        left = self.left(p, thread) if self.micro.in_registers else self.product.a_operand(s_a, thread)
        self.parts = Operands(left, self.product.b_operand(s_b))

    def left(self, p: Any, thread: Int32) -> Any:
        """Loads A from `data` to registers, in the accumulator layout of a product with n = this product's k."""
        held = cute.make_rmem_tensor(cute.make_layout(((2, 2, cases.DEPTH // 8), 1, 1)), BFloat16)
        flat = cute.make_layout(cute.size(held))
        source = params.pointer(p.data, BFloat16) + cute.assume(thread * cute.size(held), divby=8)
        cute.autovec_copy(cute.make_tensor(source, flat), cute.make_tensor(held.iterator, flat))
        return self.product.from_registers(held)

    @cute.jit
    def read(self, p: Any, thread: Int32, flag: cute.Pointer):
        """Reads 16-byte vectors at changing offsets until the MMA warpgroups are done.

        Block 0 writes the number of rounds after the clocks.
        """
        loaded = cute.recast_ptr(self.shared("loaded").align(16), dtype=Float32)
        pages = cases.LOADED_BYTES // cases.READ_ROUND_BYTES
        held = cute.make_rmem_tensor((4, cases.LOADS), Float32)
        total = Float32(0.0)
        number = Int32(0)
        seen = cute.arch.load(flag, Int32, sem="relaxed", scope="cta")
        while seen == 0:
            place = (number % pages) * (cases.READ_ROUND_BYTES // 4) + thread * 4
            layout = cute.make_layout((4, cases.LOADS), stride=(1, 4 * WARPGROUP_THREADS))
            cute.autovec_copy(cute.make_tensor(loaded + cute.assume(place, divby=4), layout), held)
            total = total + held.load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            number = number + 1
            seen = cute.arch.load(flag, Int32, sem="relaxed", scope="cta")
        block, _, _ = cute.arch.block_idx()
        if block == 0 and thread == 0:
            cute.make_tensor(params.pointer(p.out, Int64), cute.make_layout(3))[2] = Int64(number)
        self.keep(p, thread, total)


class Reduce(Kernel):
    """float32 reductions to global memory: vectors from registers, or bulk from shared memory."""

    @cute.kernel
    def kernel(self, p: Params):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        clocks, nanoseconds = cute.arch.clock64(), cute.arch.globaltimer()
        if cutlass.const_expr(self.micro.variant == "v4"):
            for i in cutlass.range(p.rounds, unroll=4):
                number = (Int64(i) * p.blocks + block) * self.micro.threads + thread
                self.add_vector(params.pointer(p.data + self.inside(number * cases.VECTOR_BYTES), Float32))
        else:
            if thread == 0:
                staged = cute.recast_ptr(self.shared("a").align(1024), dtype=Float32)
                for i in cutlass.range(p.rounds, unroll=1):
                    number = Int64(i) * p.blocks + block
                    target = params.pointer(p.data + self.inside(number * cases.REDUCED_BYTES), Float32)
                    prim.cp_reduce_async_bulk_global_shared_cta(
                        target, staged, cases.REDUCED_BYTES, type=prim.CpReduceType.F32
                    )
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(cases.IN_FLIGHT, read=True)
                cute.arch.cp_async_bulk_wait_group(0)
        self.report(p, thread, clocks, nanoseconds)

    def inside(self, offset: Int64) -> Int64:
        """Returns the offset modulo the footprint."""
        return offset & Int64(cases.FOOTPRINT - 1)

    def add_vector(self, target: cute.Pointer) -> None:
        """Adds four float32 values."""
        one = Float32(1.0)
        cute.arch.inline_ptx(
            "red.relaxed.gpu.global.add.v4.f32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
            read_only_args=[target, one, one, one, one],
        )


class Exchange(Kernel):
    """Both blocks of a cluster copy shared memory to the other block; a round starts when the last copy has arrived.

    Rounds alternate between two mbarriers: the other block may be one round ahead, and its bytes must not count for
    the present round.
    """

    @cute.kernel
    def kernel(self, p: Params):
        thread, _, _ = cute.arch.thread_idx()
        other = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) ^ 1
        barriers = cute.recast_ptr(self.shared("flags").align(16), dtype=Int64)
        if thread == 0:
            for number in cutlass.range_constexpr(2):
                cute.arch.mbarrier_init(barriers + number, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        clocks, nanoseconds = cute.arch.clock64(), cute.arch.globaltimer()
        if thread == 0:
            for i in cutlass.range(p.rounds, unroll=1):
                barrier = barriers + i % 2
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.micro.work)
                for number in cutlass.range_constexpr(self.micro.copies):
                    self.copy(number * self.micro.copy_bytes, barrier, other)
                cute.arch.mbarrier_wait(barrier, i // 2 % 2)
        self.report(p, thread, clocks, nanoseconds)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    def copy(self, offset: int, barrier: cute.Pointer, other: Int32) -> None:
        """Starts one copy to the other block, whose mbarrier counts the bytes."""
        prim.cp_async_bulk_shared_cluster_shared_cta(
            cute.arch.map_dsmem_ptr((self.shared("b") + offset).align(1024), other),
            (self.shared("a") + offset).align(1024),
            cute.arch.map_dsmem_ptr(barrier, other),
            self.micro.copy_bytes,
        )


class Function(Kernel):
    """Eight dependency chains of one function per thread."""

    @cute.kernel
    def kernel(self, p: Params):
        thread, _, _ = cute.arch.thread_idx()
        source = cute.make_tensor(params.pointer(p.data, Float32), cute.make_layout(cases.CHAINS))
        held = cute.make_rmem_tensor(cases.CHAINS, Float32)
        for number in cutlass.range_constexpr(cases.CHAINS):
            held[number] = source[number]
        clocks, nanoseconds = cute.arch.clock64(), cute.arch.globaltimer()
        for _ in cutlass.range(p.rounds, unroll=1):
            for number in cutlass.range_constexpr(cases.CHAINS):
                held[number] = self.of(held[number], number)
        cute.arch.sync_threads()
        self.report(p, thread, clocks, nanoseconds)
        self.keep(p, thread, held.load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0))

    def of(self, x: Float32, number: int) -> Float32:
        """Returns the function of x: one result, or two in the halves of a word."""
        single = {"ex2": "ex2.approx.ftz.f32", "tanh": "tanh.approx.f32"}
        pairs = {"ex2_f16x2": "ex2.approx.f16x2", "ex2_bf16x2": "ex2.approx.ftz.bf16x2"}
        variant = self.micro.variant
        if self.micro.polynomials:
            variant = "polynomial" if number < self.micro.polynomials else "ex2"
        if variant in single:
            text = f"{single[variant]} {{$w0}}, {{$r0}};"
            return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[x])
        if variant in pairs:
            text = f"{pairs[variant]} {{$w0}}, {{$r0}};"
            word = cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[x.bitcast(Uint32)])
            return word.bitcast(Float32)
        return softmax_poly_exp2.exp2(x)


KINDS = {"wgmma": Multiply, "red": Reduce, "copy": Exchange, "function": Function}


def trace(micro: Micro) -> tuple[Any, tuple[Any, ...]]:
    """Returns the host function that launches this case's kernel, and example arguments to compile it with."""
    return KINDS[micro.kind](micro), params.example_arguments(cases.FIELDS)
