"""Selection: maps the options of a command to problems and plans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final

from cutlass_py_attn.bundle import row_rules, row_spec
from cutlass_py_attn.bundle.rules import AnyProblem
from cutlass_py_attn.cli.choices import Choices
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.integers import round_up
from cutlass_py_attn.kernels.component_gemms import COMPONENT_GEMMS
from cutlass_py_attn.kernels.decode.layout import MAX_QUERIES
from cutlass_py_attn.kernels.sm90_family.tile_time import LONG_LENGTH
from cutlass_py_attn.launch.arch import ARCHITECTURES, architecture
from cutlass_py_attn.launch.build import COLUMN_MULTIPLE, Build
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.component_gemms import MAX_HEAD_DIM, families_of, plan_component_gemm
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem import masks, typed_json
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.serialize import from_json
from cutlass_py_attn.problem.spec import ProblemSpec, parse, parse_mask
from cutlass_py_attn.problem.tensors import DIRECTIONS, SHORT_NAMES

DTYPES = {short: name for name, short in SHORT_NAMES.items()}
ARCHS = tuple(ARCHITECTURES)
MASKS = masks.PLAIN
Sizes = tuple[int, int, int]  # queries, keys, heads
KINDS = ("component-gemm", "forward", "backward")

# (length, heads) of a few problems. Kernels with wgmma are for short heads and for few: a backward that runs one
# block per head, forwards with other tiles, one of them for keys of a single tile, tiles with fewer rows, and parts of
# few query tiles.
SIZES = (LONG_LENGTH, 512), (208, 512), (128, 512), (512, 8), (64, 1), (LONG_LENGTH, 1)
SHOWN_SIZES = tuple((length, length, heads) for length, heads in SIZES)  # of problems whose kernels `run` shows
# (queries, keys, heads): for some of them the planner chooses each kernel of a target. They are the fewest of a grid of
# 530 that give each kernel of eight head dims and every mask twice, where the grid does, on the SMs of an H200.
ANY_SIZE: Final[tuple[Sizes, ...]] = (
    *((1, 1, 16), (1, 65, 128), (1, 256, 4), (1, 256, 512), (64, 64, 4096), (64, LONG_LENGTH, 64)),
    *((64, LONG_LENGTH, 128), (65, 65, 4096), (100, 100, 256), (100, 1800, 12), (130, 130, 512), (200, 200, 64)),
    *((208, 208, 64), (384, 384, 24), (384, 384, 512), (512, LONG_LENGTH, 1), (512, 8192, 1), (512, 8192, 3)),
    *((768, 768, 1), (768, 768, 4), (1024, 1024, 256), (1300, 1300, 2), (1300, 1300, 6), (1300, 1300, 24)),
    *((2048, 2100, 3), (2048, 2100, 6), (2048, LONG_LENGTH, 2), (2048, LONG_LENGTH, 6), (4096, 4096, 1)),
    *((4096, 4096, 3), (4096, 4096, 16), (4096, 4096, 4096), (140, 4768, 32)),
)
DEVICE_SMS = 132, 114, 78  # of an H100 SXM and H200, an H100 PCIe, and an H20
# Without wgmma the sizes decide alone whether a decode kernel takes the problem.
ANY_SIZE_WITHOUT_WGMMA: Final[tuple[Sizes, ...]] = (LONG_LENGTH, LONG_LENGTH, 1), (1, LONG_LENGTH, 1)


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

    def plans(self, arch: str, sizes: Iterable[Sizes] = ()) -> Iterator[Plan]:
        """Yields the plans of component GEMMs, then of forward and backward.

        sizes: (queries, keys, heads) of the problems whose kernels are yielded; () for the kernels that calls of any
            size take

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
        limits = architecture(arch)
        counts = DEVICE_SMS if limits.has_wgmma and not sizes else (limits.num_sms,)
        chosen: Iterable[Sizes] = tuple(sizes) or (ANY_SIZE if limits.has_wgmma else ANY_SIZE_WITHOUT_WGMMA)
        for direction, dtype, head_dim, mask in product(directions, self.dtypes, self.head_dims, self.masks):
            made = (self._spec(dtype, head_dim, mask, *size).problem(direction) for size in chosen)
            for build, problem in builds_among(made, arch, counts).items():
                yield planner.plan_of_build(problem, build, limits.num_sms)

    def _spec(self, dtype: str, head_dim: int, mask: str, queries: int, keys: int, heads: int) -> ProblemSpec:
        return ProblemSpec(
            dtype,
            head_dim,
            num_queries=queries,
            num_keys=keys,
            num_heads=heads,
            mask=parse_mask(mask),
            deterministic=self.deterministic,
        )


def component_gemms(dtype: str, head_dim: int, arch: str) -> Iterator[Plan]:
    """Yields the five component GEMMs of every family that supports `dtype` on `arch`."""
    for family, name in product(families_of(dtype, arch), COMPONENT_GEMMS):
        yield plan_component_gemm(name, family, dtype, head_dim, arch)


def builds_among(given: Iterable[Problem], arch: str, counts: Sequence[int | None] = (None,)) -> dict[Build, Problem]:
    """Returns the builds that the planner chooses for problems that differ in sizes alone, each with its first one.

    counts: multiprocessors of the devices; None for the usual part of the target
    """
    found: dict[Build, Problem] = {}
    choices: Choices | None = None
    for problem in given:
        choices = choices or Choices(problem, arch)
        for count in counts:
            found.setdefault(choices.best(problem, count), problem)
    return found


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
