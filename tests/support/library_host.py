"""Library host: the C library of an export, compiled as a shared library and called through ctypes."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cutlass_py_attn.bundle import interface, row_rules
from cutlass_py_attn.bundle.files import Bundle, export_library
from cutlass_py_attn.bundle.numbers import MASK_OPERANDS
from cutlass_py_attn.bundle.rules import ALL_DIRECTIONS, AnyProblem
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.variants import STANDARD
from cutlass_py_attn.plan.merge import variant_of
from cutlass_py_attn.problem.append import AppendProblem
from cutlass_py_attn.problem.masks import UNLIMITED
from cutlass_py_attn.problem.merge import MergeProblem
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.quantization import OPERAND_AXES, ROW, SCALES, TILE, granularity
from cutlass_py_attn.problem.tensors import BIASES, BLOCK_AXES, BMHK, KEY_ROPE
from cutlass_py_attn.score_terms import registry
from tests.cases import serving_cases
from tests.cases.serving_cases import RowCase
from tests.support.c_compiler import STRICT, build, compiler
from tests.support.fakes import artifact

KINDS: dict[str, Any] = {
    "u32": ctypes.c_uint32,
    "i32": ctypes.c_int32,
    "u64": ctypes.c_uint64,
    "i64": ctypes.c_int64,
    "f64": ctypes.c_double,
}
PUBLIC = ("abi", "call_init", "choose", "close", "launch", "open", "packed", "target_of")
SPACE = 2**48  # bytes between made-up addresses: no array reaches the next one
STATUS = {word: number for number, (word, _) in enumerate(interface.STATUSES)}
FLAGS = {word: bit for word, bit, _, _ in interface.FLAGS}
FLAG_OF = {feature: bit for _, bit, feature, _ in interface.FLAGS if feature} | {
    feature: interface.feature_bit(feature) for feature in (registry.KV8, registry.KV8_ROW, registry.KV8_TILE)
}
GRADIENT_OF = {name: bit for _, bit, name in interface.GRADIENTS}
DTYPE_OF = {name: number for number, _, name in interface.DTYPES}


def _struct(name: str, fields: tuple[interface.Field, ...]) -> type[ctypes.Structure]:
    members = [(field.name, KINDS[field.kind]) for field in fields]
    return type(name, (ctypes.Structure,), {"_fields_": members})


KINDS |= {"array": _struct("Array", interface.ARRAY), "bias": _struct("Bias", interface.BIAS)}
Call: Any = _struct("Call", interface.CALL)


class Error(ctypes.Structure):
    """<name>_error."""

    _fields_ = (("driver_code", ctypes.c_int32), ("text", ctypes.c_char * (interface.ERROR_BYTES - 4)))


class Target(ctypes.Structure):
    """<name>_target."""

    _fields_ = tuple((name, ctypes.c_int32) for name in ("major", "minor", "num_sms", "shared_memory"))


@dataclass(frozen=True)
class Choice:
    """What attention_choose answers. status: a word of interface.STATUSES."""

    status: str
    symbol: str
    workspace: int
    text: str


def exported(folder: Path, problems: tuple[AnyProblem, ...], arch: str = "sm_90a") -> Bundle:
    """A library whose cubins are for the fake driver."""
    return export_library(folder, problems, arch.split(","), kernels=artifact)


def row_cases(seeds: int) -> list[RowCase]:
    """Random appends and merges of these seeds: those with rows, and with kernels that a library may have."""
    makers = serving_cases.append_case, serving_cases.latent_append_case, serving_cases.merge_case
    drawn = [make(seed) for seed in range(seeds) for make in makers]
    return [case for case in drawn if not case.problem.is_empty and _has_one_dtype(case.problem)]


def _has_one_dtype(problem: AppendProblem | MergeProblem) -> bool:
    return isinstance(problem, AppendProblem) or variant_of(problem) == STANDARD


def compiled(bundle: Bundle, made: Path, *options: str, language: str = "c") -> Path:
    """Returns the library of an export as a shared library."""
    standard = {"c": "-std=c11", "c++": "-std=c++17"}[language]
    kind = ("-x", language)
    source = str(bundle.path / f"{bundle.manifest['name']}.c")
    command = [compiler(language), standard, *STRICT, *options, "-shared", "-fPIC", *kind, source, "-x", "none"]
    build([*command, "-o", str(made), "-ldl", "-lpthread"])
    return made


def target_of(arch: str, num_sms: int | None = None) -> Target:
    """The usual device of a target."""
    limits = architecture(arch)
    major, minor = limits.compute_capability
    return Target(major, minor, num_sms or limits.num_sms, limits.shared_memory_per_block)


class LibraryHost:
    """The functions of a library."""

    def __init__(self, made: Path, name: str = "attention") -> None:
        self._functions = {each: getattr(ctypes.CDLL(str(made)), f"{name}_{each}") for each in PUBLIC}
        self._functions["close"].restype = None
        self._functions["call_init"].restype = None
        self.error = Error()

    def __getattr__(self, name: str) -> Any:
        return self._functions[name]

    @property
    def text(self) -> str:
        """What went wrong last."""
        return self.error.text.decode()

    def new_call(self) -> Any:
        """A call as the library initialises it."""
        call = Call()
        self.call_init(ctypes.byref(call), ctypes.sizeof(call), interface.ABI)
        return call

    def chosen(self, call: Any, target: Target) -> Choice:
        """attention_choose."""
        symbol, workspace = ctypes.c_char_p(), ctypes.c_size_t()
        status = self.choose(
            ctypes.byref(call), ctypes.byref(target), ctypes.byref(symbol), ctypes.byref(workspace), self._error
        )
        word = interface.STATUSES[status][0]
        return Choice(word, (symbol.value or b"").decode(), workspace.value, self.text)

    def opened(self) -> tuple[int, ctypes.c_void_p]:
        """attention_open: (status, device)."""
        found = ctypes.c_void_p()
        return self.open(ctypes.byref(found), None, ctypes.c_size_t(), self._error), found

    def launched(self, device: ctypes.c_void_p, call: Any, workspace: int, size: int, stream: int = 0) -> int:
        """attention_launch."""
        return int(
            self.launch(
                device, ctypes.byref(call), ctypes.c_uint64(workspace), ctypes.c_size_t(size), ctypes.c_void_p(stream),
                self._error,
            )
        )  # fmt: skip

    def pack(self, call: Any) -> int:
        """attention_packed."""
        return int(self.packed(ctypes.byref(call), self._error))

    @functools.cached_property
    def _error(self) -> Any:
        return ctypes.byref(self.error)


def made_up(problem: Problem, first: int) -> dict[str, int]:
    """Returns addresses of the arrays of a problem, one after another, with the alignments of its tensors."""
    tensors = problem.tensors()
    names = [*tensors, "logsumexp", *problem.vectors()]
    odd = {name: tensor.alignment % 16 for name, tensor in tensors.items()}
    found = {name: first + SPACE * number + odd.get(name, 0) for number, name in enumerate(names, 1)}
    return {**found, "value": found["key"]} if problem.value_in_key else found


def filled(call: Any, problem: Problem, *, first_address: int = 0, addresses: Mapping[str, int] | None = None) -> Any:
    """Returns the call of a problem.

    first_address: of made-up addresses of the operands; 0 for none. addresses: of the operands by name
    """
    given = addresses or (made_up(problem, first_address) if first_address else {})
    shape, backward = problem.shape, problem.direction == "backward"
    call.direction = int(backward)
    call.dtype = DTYPE_OF[problem.dtype]
    call.flags = sum(bit for feature, bit in FLAG_OF.items() if feature in problem.features)
    call.flags |= FLAGS["DETERMINISTIC"] if problem.deterministic else 0
    call.flags |= FLAGS["VALUE_IN_KEY"] if problem.value_in_key else 0
    call.gradients = sum(GRADIENT_OF[name] for name in problem.gradients) if backward else 7
    for name in ("batch", "num_queries", "num_keys", "num_heads", "num_heads_key", "head_dim", "head_dim_value"):
        setattr(call, name, getattr(shape, name))
    if shape.tokens is not None:
        call.tokens_q, call.tokens_k = shape.tokens
    if problem.pages is not None:
        call.num_pages, call.page_size = problem.key.shape[:2]
        call.max_pages = problem.pages.max_pages
        call.page_table_row = problem.operands()["page_table"].strides.get("page_table_row", 0)
        call.flags |= FLAGS["INVARIANT"] if problem.pages.invariant else 0
        call.flags |= FLAGS["PAGE_INDPTR"] if problem.pages.page_indptr else 0
        call.tokens_k = 0
    left, right = problem.mask.edges
    call.window_left, call.window_right = (-1 if edge == UNLIMITED else edge for edge in (left, right))
    call.bottom_right = int(problem.mask.bottom_right)
    call.num_splits_key = problem.num_splits_key or 0
    call.scale, call.softcap, call.dropout_p = problem.scale_value, problem.softcap, problem.dropout_p
    for name, tensor in problem.tensors().items():
        array = getattr(call, name)
        batch, *inner, column = tensor.steps if name in BIASES else tensor.strides
        first, second = inner
        array.batch = batch
        array.row, array.head = (second, first) if name in BIASES else (first, second)
        if name in BIASES:
            array.column = column
        elif name == "grad_output":
            call.grad_output_column = tensor.steps[3]
        array.address = given.get("key" if name == "value" and problem.value_in_key else name, 0)
    if problem.grad_bias is not None:
        call.grad_bias_axes = sum(1 << axis for axis, size in enumerate(problem.grad_bias.shape) if size != 1)
    for name, scale in problem.scales.items():
        of_rows = granularity(scale) in (ROW, TILE)
        axes = ("batch", "row", "head") if of_rows else OPERAND_AXES[-len(scale.shape) :]
        array = getattr(call, name)
        array.address = given.get(name, 0)
        for axis, step in zip(axes, scale.steps, strict=False):
            setattr(array, axis, step)
        if granularity(scale) == TILE:
            call.key_scale_tile = scale.steps[3]
    fill_masks(call, problem, given)
    for name in (each for each in ("logsumexp", *problem.vectors()) if each not in (*SCALES, *MASK_OPERANDS)):
        setattr(call, f"{name}_address" if name.startswith("philox") else name, given.get(name, 0))
    if problem.alibi_slopes is not None:
        call.alibi_batch = shape.num_heads if len(problem.alibi_slopes.shape) > 1 else 0
    assert {*BMHK, KEY_ROPE, *BIASES} >= {*problem.tensors()}
    return call


def fill_masks(call: Any, problem: Problem, addresses: Mapping[str, int]) -> None:
    """Sets the flags, arrays and sizes of masks in memory."""
    call.flags |= FLAGS["KEY_RANGES"] if problem.key_start is not None else 0
    call.flags |= FLAGS["VISIBLE_BLOCKS"] if problem.visible_blocks is not None else 0
    for name in MASK_OPERANDS:
        tensor = getattr(problem, name)
        if tensor is not None:
            array = getattr(call, name)
            array.address = addresses.get(name, 0)
            for axis, step in zip(BLOCK_AXES, tensor.steps, strict=False):
                setattr(array, axis, step)
    call.mask_block_rows, call.mask_block_columns = problem.block_size
    blocks = problem.visible_blocks
    if blocks is not None and blocks.shape[1] == problem.shape.num_heads_key > 1:
        call.mask_block_heads = problem.shape.group


def filled_rows(
    call: Any,
    problem: AppendProblem | MergeProblem,
    *,
    first_address: int = 0,
    addresses: Mapping[str, int] | None = None,
) -> Any:
    """Returns the call of an append or a merge; addresses as for `filled`, those of merges with the logsumexp."""
    tensors = problem.tensors()
    names = (*tensors, *(("logsumexp",) if isinstance(problem, MergeProblem) else ()))
    made = {name: first_address + SPACE * number for number, name in enumerate(names, 1)} if first_address else {}
    given = addresses or made
    call.direction = ALL_DIRECTIONS.index(problem.direction)
    call.dtype = DTYPE_OF[problem.dtype]
    call.flags = sum(FLAG_OF[feature] for feature in problem.features)
    for name, value in problem.sizes.items():
        setattr(call, name, value)
    columns = problem.key if isinstance(problem, AppendProblem) else problem.output
    call.head_dim = columns.shape[-1]
    call.head_dim_value = problem.value.shape[-1] if isinstance(problem, AppendProblem) else columns.shape[-1]
    for stride, value in row_rules.inputs(problem).items():
        name, _, axis = stride.rpartition("_")
        if axis == "tile":
            setattr(call, stride, value.value)
        elif name in problem.operands():
            setattr(getattr(call, name), "batch" if axis == "page" else axis, value.value)
    for name in names:
        array = getattr(call, name)
        if isinstance(array, int):
            setattr(call, name, given.get(name, 0))
        else:
            array.address = given.get(name, 0)
    return call


def without_device_seed(problem: Problem) -> Problem:
    """The problem as an export of a library plans it."""
    return replace(problem, philox_on_device=False)
