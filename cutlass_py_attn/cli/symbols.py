"""Symbols: from a kernel's name, or that of an entry of its cubin, to the plan that has it."""

from __future__ import annotations

import re
from typing import Any

from cutlass_py_attn import masks
from cutlass_py_attn.cli.selection import DTYPES
from cutlass_py_attn.decode import MAX_QUERIES, MIN_KEYS
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.gemm import ROOMS
from cutlass_py_attn.gemm.plans import plan_room
from cutlass_py_attn.hopper import MULTICAST_LENGTH
from cutlass_py_attn.parts.integers import ceil_div
from cutlass_py_attn.plan import Plan
from cutlass_py_attn.planner import plans
from cutlass_py_attn.problem import ROW_ALIGNMENT_BYTES, Problem, Sequences, Shape, Tensor

FEATURES = ("alibi", "bias", "dropout", "grouped", "seqused", "sinks", "softcap", "varlen")
GRADIENTS = {"q": "query", "k": "key", "v": "value", "b": "bias", "s": "sinks"}
MASKS = {"full": masks.Full(), "causal": masks.Causal(), "local": masks.Causal(window_size=1)}

# Sizes and numbers that decide no machine code, but a Problem has them; gradients are summed over axes of several.
_BATCH, _HEADS, _GROUP, _LENGTH = 2, 2, 2, 128
_DROPOUT_P, _SOFTCAP = 0.5, 1.0

_FAMILY_DTYPE = rf"(?P<family>[a-z]+)_(?P<dtype>{'|'.join(DTYPES)})"
_DIMS = r"d(?P<dim>\d+)(?:v(?P<dim_value>\d+))?"
_FUSED = re.compile(
    rf"(?P<kind>fwd|bwd)_{_FAMILY_DTYPE}_{_DIMS}_(?P<mask>{'|'.join(MASKS)})(?P<features>(?:_(?:{'|'.join(FEATURES)}))*)"
    r"(?:_m(?P<rows>16|32|64))?"
    r"(?:_to_(?P<gradients>[qkvbs]+))?(?:_a(?P<access>\d+))?(?:_ba(?P<bias>\d+))?(?:_ga(?P<grad_bias>\d+))?"
    r"(?:_sum_(?P<summed>none|[bhqk]+))?(?P<heads>_heads)?(?P<multicast>_multicast)?(?P<det>_det)?"
)
_ROOM = re.compile(rf"(?P<room>{'|'.join(ROOMS)})_{_FAMILY_DTYPE}_{_DIMS}")
# The main entry is number 0 where there is one; the entries of the gradients of bias and sinks come behind others.
_ENTRY = re.compile(r"(?:_delta_\d+|_finish_\d+|_combine_1|_(?:bias|sinks)_[1-9]\d*|_0)$")


def parse_symbol(symbol: str, arch: str) -> Plan:
    """The plan that `symbol`, or an entry of its cubin, names on `arch`; NotSupported says what is wrong."""
    stem = _ENTRY.sub("", symbol)
    plan = _room_of(stem, arch) or _fused_of(stem, arch)
    if plan is None:
        raise NotSupported(
            f"symbol {symbol!r}: must be like fwd_generic_bf16_d128_causal, bwd_generic_f16_d64v32_full_det "
            "or matmul_qk_generic_bf16_d128; `cutlass-py-attn run` lists the names"
        )
    if plan.symbol != stem:
        raise NotSupported(f"symbol {symbol!r}: the planner takes {plan.symbol} on {arch}; ask for that one")
    return plan


def _room_of(stem: str, arch: str) -> Plan | None:
    found = _ROOM.fullmatch(stem)
    if found is None:
        return None
    return plan_room(found["room"], found["family"], DTYPES[found["dtype"]], int(found["dim"]), arch)


def _fused_of(stem: str, arch: str) -> Plan | None:
    found = _FUSED.fullmatch(stem)
    if found is None:
        return None
    if found["kind"] == "fwd":
        return _of_family(_problem(found, "forward"), arch, found)
    wanted = [GRADIENTS[letter] for letter in found["gradients"] or "qkv"]
    problem = _problem(found, "backward")
    lacking = [name for name in ("bias", "sinks") if name in wanted and getattr(problem, name) is None]
    if lacking:
        raise NotSupported(f"symbol {stem!r}: has a gradient of {', '.join(lacking)}, but no such feature; name both")
    changes: dict[str, Any] = {f"grad_{name}": None for name in ("query", "key", "value") if name not in wanted} | {
        "grad_sinks": problem.sinks if "sinks" in wanted else None
    }
    if "bias" in wanted:
        axes = zip("bhqk", problem.shape.bias, strict=True)
        summed = tuple(1 if letter in (found["summed"] or "").replace("none", "") else size for letter, size in axes)
        changes["grad_bias"] = _aligned(summed, problem.dtype, found["grad_bias"])
    return _of_family(problem.replace(**changes, deterministic=found["det"] is not None), arch, found)


def _of_family(problem: Problem, arch: str, found: re.Match[str]) -> Plan:
    """The best plan of the symbol's family that divides the work as the symbol says, else the best of all."""
    wanted = found["family"], found["heads"] is not None, found["multicast"] is not None
    made = plans(problem, arch)
    for plan in made:
        if (plan.build.family, plan.build.whole_heads, plan.build.multicast) == wanted:
            return plan
    return made[0]


def _problem(found: re.Match[str], direction: str) -> Problem:
    """A problem with the dtype, head dims, mask and features of a symbol."""
    has = set(found["features"].split("_")).__contains__
    dims = int(found["dim"]), int(found["dim_value"] or found["dim"])
    rows = int(found["rows"] or 0)  # of few queries, with the heads of a group
    group = max(_GROUP, ceil_div(rows, MAX_QUERIES)) if has("grouped") else 1
    length = MULTICAST_LENGTH if found["multicast"] else _LENGTH
    queries, keys = (rows // group, MIN_KEYS) if rows else (length, length)
    tokens = (_BATCH * queries, _BATCH * keys) if has("varlen") else None
    heads = _HEADS * group
    shape = Shape(_BATCH, queries, keys, heads, *dims, _HEADS, tokens)
    problem = Problem.dense(direction, shape, DTYPES[found["dtype"]], MASKS[found["mask"]])
    changes: dict[str, Any] = {
        "query": _aligned(shape.of("query"), problem.dtype, found["access"]),
        "dropout_p": _DROPOUT_P if has("dropout") else 0.0,
        "softcap": _SOFTCAP if has("softcap") else 0.0,
    }
    changes |= {
        name: Tensor.contiguous((heads,), "float32")
        for feature, name in (("alibi", "alibi_slopes"), ("sinks", "sinks"))
        if has(feature)
    }
    if has("bias"):
        changes["bias"] = _aligned(shape.bias, problem.dtype, found["bias"])
    if has("varlen"):
        changes["sequences"] = Sequences(_BATCH, queries, keys, has("seqused"))
    return problem.replace(**changes)


def _aligned(shape: tuple[int, ...], dtype: str, access: str | None) -> Tensor:
    """A contiguous tensor at an address that allows this access and no wider one."""
    dense = Tensor.contiguous(shape, dtype)
    return Tensor(dense.shape, dense.strides, dtype, int(access or ROW_ALIGNMENT_BYTES))
