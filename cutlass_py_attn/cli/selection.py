"""Selection: from a command's options, or from a kernel's symbol, to the plans they name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from cutlass_py_attn import masks
from cutlass_py_attn.device import ARCHITECTURES, architecture
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.gemm import ROOMS
from cutlass_py_attn.gemm.plans import FAMILIES, plan_room
from cutlass_py_attn.plan import Plan
from cutlass_py_attn.plan_table import padded
from cutlass_py_attn.planner import plan_backward, plan_forward
from cutlass_py_attn.problem import SHORT_NAMES, Problem, Shape

DTYPES = {short: name for name, short in SHORT_NAMES.items()}
ARCHS = tuple(ARCHITECTURES)
MASKS = tuple(masks.ALL)
KINDS = ("rooms", "forward", "backward")
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}

# Sizes that decide no machine code, but a Problem has them.
_BATCH = _HEADS = 1
_LENGTH = 128

_FAMILY_DTYPE = rf"(?P<family>[a-z]+)_(?P<dtype>{'|'.join(DTYPES)})"
_DIMS = r"d(?P<dim>\d+)(?:v(?P<dim_value>\d+))?"
_FUSED = re.compile(rf"(?P<kind>fwd|bwd)_{_FAMILY_DTYPE}_{_DIMS}_(?P<mask>{'|'.join(MASKS)})(?P<det>_det)?")
_ROOM = re.compile(rf"(?P<room>{'|'.join(ROOMS)})_{_FAMILY_DTYPE}_{_DIMS}")
_ENTRY = re.compile(r"(?:_delta|_finish)?_\d+$")


@dataclass(frozen=True, slots=True)
class Selection:
    """Every combination of these is a plan; dtypes by their long names."""

    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...]
    masks: tuple[str, ...]
    deterministic: bool = False

    def plans(self, arch: str) -> Iterator[Plan]:
        """Rooms first, then forward and backward; a room has no mask and whole tiles."""
        if "rooms" in self.kinds:
            for dtype, head_dim in product(self.dtypes, self.head_dims):
                yield from rooms(dtype, padded(head_dim), arch)
        directions = [kind for kind in self.kinds if kind != "rooms"]
        for direction, dtype, head_dim, mask in product(directions, self.dtypes, self.head_dims, self.masks):
            yield fused(direction, dtype, (head_dim, head_dim), mask, arch, self.deterministic)


def rooms(dtype: str, head_dim: int, arch: str) -> Iterator[Plan]:
    """The five rooms in every family that takes `dtype` on `arch`."""
    for family, dtypes in FAMILIES.items():
        if dtype in dtypes and (family != "hopper" or architecture(arch).has_wgmma):
            yield from (plan_room(name, family, dtype, head_dim, arch) for name in ROOMS)


def fused(direction: str, dtype: str, head_dims: tuple[int, int], mask: str, arch: str, deterministic: bool) -> Plan:
    """The planner's choice of a fused kernel; head_dims are those of query and value."""
    shape = Shape(_BATCH, _LENGTH, _LENGTH, _HEADS, *head_dims)
    problem = Problem.dense(direction, shape, dtype, masks.from_name(mask))
    if direction == "forward":
        return plan_forward(problem, arch)
    return plan_backward(problem.replace(deterministic=deterministic), arch)


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
    dims = int(found["dim"]), int(found["dim_value"] or found["dim"])
    direction = DIRECTIONS[found["kind"]]
    return fused(direction, DTYPES[found["dtype"]], dims, found["mask"], arch, found["det"] is not None)
