"""Selection: maps the options of a command to problems and plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from cutlass_py_attn.bundle import row_rules, row_spec
from cutlass_py_attn.bundle.rules import AnyProblem
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.integers import round_up
from cutlass_py_attn.kernels.component_gemms import COMPONENT_GEMMS
from cutlass_py_attn.kernels.component_gemms.planning import FAMILIES, MAX_HEAD_DIM, plan_component_gemm
from cutlass_py_attn.plan.arch import ARCHITECTURES, architecture
from cutlass_py_attn.plan.build import COLUMN_MULTIPLE
from cutlass_py_attn.plan.decode_smem import MAX_QUERIES
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.plan.planner import plan
from cutlass_py_attn.plan.tile_time import LONG_LENGTH
from cutlass_py_attn.problem import masks, typed_json
from cutlass_py_attn.problem.serialize import from_json
from cutlass_py_attn.problem.spec import ProblemSpec, parse, parse_mask
from cutlass_py_attn.problem.tensors import DIRECTIONS, SHORT_NAMES

DTYPES = {short: name for name, short in SHORT_NAMES.items()}
ARCHS = tuple(ARCHITECTURES)
MASKS = masks.PLAIN
KINDS = ("component-gemm", "forward", "backward")

# (length, heads). Other sizes give the same machine code, but the sm90 family has kernels for short heads and for few:
# a backward that runs one block per head, forwards with other tiles, one of them for keys of a single tile, tiles
# with fewer rows, and parts of few query tiles.
SIZES = (LONG_LENGTH, 512), (208, 512), (128, 512), (512, 8), (64, 1), (LONG_LENGTH, 1)


@dataclass(frozen=True, slots=True)
class Selection:
    """Kernels of every combination of these values.

    dtypes: long names. masks: words of problem/spec.py.
    """

    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...]
    masks: tuple[str, ...]
    deterministic: bool = False

    def plans(self, arch: str) -> Iterator[Plan]:
        """Yields the plans of component GEMMs, then of forward and backward, with the kernels for short heads.

        Component GEMMs have no mask and no partial tiles. Beyond MAX_HEAD_DIM there are none: with other kinds they are
        left out, without other kinds they are refused.
        """
        directions = [kind for kind in self.kinds if kind != "component-gemm"]
        if "component-gemm" in self.kinds:
            for dtype, head_dim in product(self.dtypes, self.head_dims):
                if head_dim <= MAX_HEAD_DIM:
                    yield from component_gemms(dtype, round_up(head_dim, COLUMN_MULTIPLE), arch)
                elif not directions:
                    yield from component_gemms(dtype, head_dim, arch)
        for direction, dtype, head_dim, mask in product(directions, self.dtypes, self.head_dims, self.masks):
            made = (fused(direction, dtype, head_dim, mask, *sizes, arch, self.deterministic) for sizes in SIZES)
            yield from {plan.symbol: plan for plan in made}.values()


def component_gemms(dtype: str, head_dim: int, arch: str) -> Iterator[Plan]:
    """Yields the five component GEMMs of every family that supports `dtype` on `arch`."""
    for family, dtypes in FAMILIES.items():
        if dtype in dtypes and (family != "sm90" or architecture(arch).has_wgmma):
            yield from (plan_component_gemm(name, family, dtype, head_dim, arch) for name in COMPONENT_GEMMS)


def fused(
    direction: str, dtype: str, head_dim: int, mask: str, length: int, heads: int, arch: str, deterministic: bool
) -> Plan:
    """Returns the plan of a fused kernel for so many heads of that length."""
    spec = ProblemSpec(
        dtype,
        head_dim,
        num_queries=length,
        num_keys=length,
        num_heads=heads,
        mask=parse_mask(mask),
        deterministic=deterministic,
    )
    return plan(spec.problem(direction), arch)


def problems(names: Sequence[str], directions: tuple[str, ...] = ()) -> list[AnyProblem]:
    """Returns the problems of --problem: of names (problem/spec.py, bundle/row_spec.py) or JSON files (serialize.py).

    directions: of --direction; empty for both, or the forward alone for the few queries of a decode. A file has one
        direction. Appends and merges have none.

    NotSupported: a name is wrong, a file cannot be read, or nothing has one of the directions.
    """
    found = [problem for name in names for problem in _problems_of(name, directions)]
    if not found:
        raise NotSupported(f"{', '.join(names)}: has no {' or '.join(directions)}; leave --direction out")
    return found


def names_rows(text: str) -> bool:
    """Returns whether a problem's name is that of an append or of a merge (bundle/row_spec.py), right or wrong."""
    return text.partition("_")[0] in row_rules.DIRECTIONS and not text.endswith(".json")


def _problems_of(text: str, directions: tuple[str, ...]) -> list[AnyProblem]:
    if names_rows(text):
        return [row_spec.parse(text)]
    if not text.endswith(".json"):
        spec = parse(text)
        return [spec.problem(direction) for direction in directions or directions_of(spec)]
    try:
        data = typed_json.parse(Path(text).read_bytes())
    except (OSError, ValueError) as error:
        raise NotSupported(f"problem {text}: cannot be read ({error}); name a JSON file of a Problem") from error
    found = from_json(data)
    return [found] if found.direction in (directions or DIRECTIONS) else []


def directions_of(spec: ProblemSpec) -> tuple[str, ...]:
    """Returns the directions of a problem: the forward alone for few queries against more keys, and for e4m3 codes."""
    is_decode = spec.num_queries <= MAX_QUERIES and spec.num_queries < spec.num_keys
    return ("forward",) if is_decode or spec.page_size or spec.value_in_key or spec.has_codes else DIRECTIONS
