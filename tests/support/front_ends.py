"""Front ends: ways to make one call of a problem on the fake driver, and what the planner's launch asks of the driver.

A call is everything that decides what happens on the device: launches with every byte of their parameters, memsets, and
encoded tensor maps, at made-up addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutlass_py_attn.api.attention import attention_backward, attention_forward, mla_attention_forward
from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.api.paged import Paged
from cutlass_py_attn.api.results import Gradients
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem import spec
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.mask_function import ArrayMask, MaskFunction
from cutlass_py_attn.problem.mask_program import MaskProgram
from cutlass_py_attn.problem.masks import Mask
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import DIRECTIONS, KEY_ROPE, MASK_ARRAYS, Tensor
from cutlass_py_attn.runtime.arrays import numpy_dtype
from cutlass_py_attn.runtime.binding import bind
from cutlass_py_attn.score_terms.dropout import Dropout
from tests.support.bundle_hosts import ADDRESSES, STREAM, WORKSPACE, compared
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import artifact
from tests.support.library_host import made_up

H200 = (9, 0), 132  # compute capability and SMs of the fake driver's first GPU
SEEDS = {"philox_seed": 2**40, "philox_offset": 2**40 + 1}
CALLS = Path(__file__).parents[1] / "compile" / "calls.txt"
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table", "page_indptr")


@dataclass(frozen=True)
class Placed:
    """An array of another library at a made-up address of CUDA memory."""

    tensor: Tensor
    address: int

    @property
    def dtype(self) -> Any:
        return numpy_dtype(self.tensor.dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.tensor.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": tuple(step * self.dtype.itemsize for step in self.tensor.strides),
            "version": 3,
        }


def planned(problem: Problem) -> Plan:
    """The planner's plan for the fake driver's first GPU."""
    return planner.plans_on(problem, *H200)[0]


def plan_calls(
    log: FakeDriver,
    plan: Plan,
    problem: Problem,
    addresses: Mapping[str, int],
    workspace: int = WORKSPACE,
    stream: int = STREAM,
) -> list[tuple[Any, ...]]:
    """What a launch of the plan asks of the driver."""
    bound = bind(artifact(plan.build), plan, problem)
    given = {name: address for name, address in addresses.items() if name in bound.tensor_names}
    log.clear()
    bound(given, stream, workspace=workspace)
    return compared(log)


def without_cleared_results(log: FakeDriver, problem: Problem, workspace: int) -> list[tuple[Any, ...]]:
    """What was asked of the driver, without the memsets of results, of whose rows some may belong to no sequence."""
    end = workspace + planned(problem).workspace.bytes
    found = compared(log)
    cleared = [call for call in found if call[0] == "cuMemsetD8Async" and not workspace <= call[1][0] < end]
    assert bool(cleared) == problem.has_ragged_rows
    return [call for call in found if call not in cleared]


def by_python(log: FakeDriver, problem: Problem) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """What the public functions ask, and what the plan does with the addresses of the same arrays."""
    addresses = made_up(problem, ADDRESSES)
    arrays = {name: Placed(tensor, addresses[name]) for name, tensor in (problem.tensors() | problem.vectors()).items()}
    if problem.direction == "backward":
        arrays["logsumexp"] = Placed(Tensor.contiguous(problem.shape.logsumexp, "float32"), addresses["logsumexp"])
    log.clear()
    logsumexp = _call(problem, arrays)
    freed = log.of("cuMemFreeAsync")
    workspace = freed[-1].numbers[0] if freed else WORKSPACE
    found = without_cleared_results(log, problem, workspace)
    given = SEEDS | addresses | ({} if logsumexp is None else {"logsumexp": logsumexp.pointer})
    return found, plan_calls(log, planned(problem), problem, given, workspace)


def _call(problem: Problem, arrays: Mapping[str, Any]) -> Any:
    """Makes the call; returns the logsumexp of a forward, for which there is no array."""
    options = options_of(problem, arrays) | {"stream": STREAM, "kernels": artifact}
    if problem.value_in_key:
        codes = {"cache_scale": arrays.get("key_scale"), "cache_rope": arrays.get(KEY_ROPE)}
        columns = problem.shape.head_dim_value
        given = {name: options[name] for name in ("mask", "scale", "sequences", "stream", "kernels")} | codes
        call = mla_attention_forward
        return call(arrays["query"], arrays["key"], head_dim_value=columns, out=arrays["output"], **given)[1]
    operands = [arrays[name] for name in ("query", "key", "value")]
    if problem.direction == "forward":
        scales = {name: arrays.get(name) for name in problem.scales}
        return attention_forward(*operands, out=arrays["output"], **scales, **options)[1]
    attention_backward(
        arrays["grad_output"],
        *operands,
        arrays["output"],
        arrays["logsumexp"],
        grad_logsumexp=arrays.get("grad_logsumexp"),
        gradients=problem.gradients,
        out=Gradients(**{name: arrays[f"grad_{name}"] for name in problem.gradients}),
        deterministic=problem.deterministic,
        num_splits_key=problem.num_splits_key,
        **options,
    )
    return None


def options_of(problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The options of both directions."""
    seeds = arrays if problem.philox_on_device else SEEDS
    return {
        "mask": mask_of(problem, arrays),
        "scale": problem.scale,
        "softcap": problem.softcap,
        "dropout": Dropout(problem.dropout_p, *(seeds[name] for name in SEEDS)) if problem.dropout_p else None,
        "sequences": sequences_of(problem, arrays),
        **{name: arrays.get(name) for name in ("bias", "alibi_slopes", "sinks")},
    }


def mask_of(problem: Problem, arrays: Mapping[str, Any]) -> Mask | ArrayMask:
    """The option `mask`, with its arrays."""
    mask: Mask | KeyRanges = problem.mask
    if problem.key_start is not None:
        mask = KeyRanges(arrays["key_start"], arrays["key_end"], problem.mask)
    if problem.mask_program is None:
        return mask
    values = (*(arrays[name] for name in MASK_ARRAYS if name in arrays), *(problem.mask_scalars or ()))
    arguments = {f"argument_{number}": value for number, value in enumerate(values)}
    return MaskFunction(MaskProgram.parse(problem.mask_program), arguments, mask)


def sequences_of(problem: Problem, arrays: Mapping[str, Any]) -> VariableLength | Paged | None:
    """The option `sequences`, with the arrays of the lengths."""
    given = {name: arrays.get(name) for name in LENGTHS}
    queries, keys, used, table, indptr = given.values()
    if problem.pages is not None:
        longest = problem.pages.max_seqlen_q if queries is not None else None
        return Paged(table, used, queries, longest, indptr, problem.pages.invariant)
    if problem.sequences is None:
        return None
    return VariableLength(queries, keys, problem.shape.num_queries, problem.shape.num_keys, used)


@dataclass(frozen=True)
class Row:
    """A line of calls.txt. exported: the problem of an export; others: problems that its kernels serve."""

    directions: tuple[str, ...]
    exported: str
    others: tuple[str, ...]

    def problems(self, direction: str) -> tuple[Problem, ...]:
        """The exported problem and the others."""
        return tuple(spec.parse(name).problem(direction) for name in (self.exported, *self.others))

    def has_split_grids(self, direction: str) -> bool:
        """Whether a kernel is launched several times, because its grid would be too large."""
        return any(launch.param_overrides for launch in planned(self.problems(direction)[0]).launches)


def rows() -> list[Row]:
    """The lines of calls.txt."""
    words = [line.split() for line in CALLS.read_text().splitlines() if not line.startswith("#")]
    return [Row(DIRECTIONS if first == "both" else (first,), name, tuple(others)) for first, name, *others in words]
