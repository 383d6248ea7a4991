"""Selection: from a command's options to the plans they name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from cutlass_py_attn import masks
from cutlass_py_attn.device import ARCHITECTURES, architecture
from cutlass_py_attn.gemm import ROOMS
from cutlass_py_attn.gemm.plans import FAMILIES, plan_room
from cutlass_py_attn.parts.integers import round_up
from cutlass_py_attn.plan import COLUMN_MULTIPLE, Plan
from cutlass_py_attn.planner import plan
from cutlass_py_attn.problem import SHORT_NAMES, Problem, Shape

DTYPES = {short: name for name, short in SHORT_NAMES.items()}
ARCHS = tuple(ARCHITECTURES)
MASKS = masks.PLAIN
KINDS = ("rooms", "forward", "backward")

# Lengths of one head. They decide no machine code but for the Hopper backward, whose blocks take whole heads where they
# have one key tile.
LENGTHS = 1024, 128


@dataclass(frozen=True, slots=True)
class Selection:
    """Every combination of these is a plan; dtypes by their long names."""

    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...]
    masks: tuple[str, ...]
    deterministic: bool = False

    def plans(self, arch: str) -> Iterator[Plan]:
        """Rooms first, then forward and backward, of short heads too where those have a kernel of their own; a room has
        no mask and whole tiles."""
        if "rooms" in self.kinds:
            for dtype, head_dim in product(self.dtypes, self.head_dims):
                yield from rooms(dtype, round_up(head_dim, COLUMN_MULTIPLE), arch)
        directions = [kind for kind in self.kinds if kind != "rooms"]
        for direction, dtype, head_dim, mask in product(directions, self.dtypes, self.head_dims, self.masks):
            made = (fused(direction, dtype, head_dim, mask, length, arch, self.deterministic) for length in LENGTHS)
            yield from {plan.symbol: plan for plan in made}.values()


def rooms(dtype: str, head_dim: int, arch: str) -> Iterator[Plan]:
    """The five rooms in every family that takes `dtype` on `arch`."""
    for family, dtypes in FAMILIES.items():
        if dtype in dtypes and (family != "hopper" or architecture(arch).has_wgmma):
            yield from (plan_room(name, family, dtype, head_dim, arch) for name in ROOMS)


def fused(direction: str, dtype: str, head_dim: int, mask: str, length: int, arch: str, deterministic: bool) -> Plan:
    """The planner's choice of a fused kernel for one head of that length."""
    shape = Shape(1, length, length, 1, head_dim, head_dim)
    problem = Problem.dense(direction, shape, dtype, masks.from_name(mask))
    return plan(problem.replace(deterministic=deterministic), arch)
