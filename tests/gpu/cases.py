"""Cases: the problems that the GPU suite runs and the kernels it needs for them, as data.

A case is one line of text, which `python -m tests.gpu.run --case "..."` runs again:

    bwd bf16 d128 causal 3x6x203x257 needle seed 5 scale 0.1
    direction, dtype, head dims, mask, batch x heads x queries x keys, input family, seed, options
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from cutlass_py_attn import inputs, masks, planner
from cutlass_py_attn.gemm import ROOMS
from cutlass_py_attn.gemm.plans import FAMILIES as FAMILIES_OF_ROOMS
from cutlass_py_attn.gemm.plans import HEAD_DIMS, plan_room
from cutlass_py_attn.plan import Build, Plan
from cutlass_py_attn.problem import SHORT_NAMES, Problem, Shape

ARCH: Final = "sm_90"
HOPPER_ARCH: Final = "sm_90a"
PTX_ARCH: Final = "sm_80"  # its PTX is compiled by the driver for whatever newer GPU there is

LENGTHS: Final = (1, 2, 3, 15, 63, 64, 65, 113, 127, 128, 129, 203, 255, 257, 799, 1023, 1024)
FEW_LENGTHS: Final = (1, 15, 64, 65, 129, 255, 799)
BATCHES: Final = (1, 3)
HEADS: Final = (1, 6)
SCALES: Final = (None, 0.1, -0.05, 0.0)
SPLITS: Final = (None, 1, 3)
FAMILIES: Final = tuple(inputs.FAMILIES)

_LONG_NAMES: Final = {short: name for name, short in SHORT_NAMES.items()}
_LINE: Final = re.compile(
    r"(?P<direction>fwd|bwd) (?P<dtype>\w+) d(?P<dim>\d+)(?:v(?P<dim_value>\d+))? (?P<mask>\w+) "
    r"(?P<batch>\d+)x(?P<heads>\d+)x(?P<queries>\d+)x(?P<keys>\d+) (?P<family>\w+) seed (?P<seed>\d+)"
    r"(?: scale (?P<scale>\S+))?(?P<deterministic> deterministic)?(?: splits (?P<splits>\d+))?"
)


@dataclass(frozen=True, slots=True)
class Variant:
    """What decides the machine code of a fused kernel, beside its direction."""

    dtype: str
    head_dim: int
    head_dim_value: int
    mask: str
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """One problem with its inputs; `line` names it."""

    direction: str
    variant: Variant
    batch: int
    num_heads: int
    num_queries: int
    num_keys: int
    family: str
    seed: int
    scale: float | None = None
    num_splits_key: int | None = None

    @property
    def line(self) -> str:
        """The case as text; `parse` gives an equal case back."""
        v = self.variant
        dims = f"d{v.head_dim}" + (f"v{v.head_dim_value}" if v.head_dim_value != v.head_dim else "")
        words = [
            "fwd" if self.direction == "forward" else "bwd",
            f"{SHORT_NAMES[v.dtype]} {dims} {v.mask}",
            f"{self.batch}x{self.num_heads}x{self.num_queries}x{self.num_keys}",
            f"{self.family} seed {self.seed}",
        ]
        words += [f"scale {self.scale}"] if self.scale is not None else []
        words += ["deterministic"] if v.deterministic else []
        words += [f"splits {self.num_splits_key}"] if self.num_splits_key is not None else []
        return " ".join(words)

    @property
    def shape(self) -> Shape:
        """The six sizes."""
        v = self.variant
        return Shape(self.batch, self.num_queries, self.num_keys, self.num_heads, v.head_dim, v.head_dim_value)

    @property
    def mask(self) -> masks.Mask:
        """The mask as an object."""
        return masks.from_name(self.variant.mask)

    def problem(self) -> Problem:
        """The dense problem of this case."""
        return Problem.dense(self.direction, self.shape, self.variant.dtype, self.mask).replace(
            scale=self.scale, deterministic=self.variant.deterministic, num_splits_key=self.num_splits_key
        )


def parse(line: str) -> Case:
    """The case of a line; ValueError shows the form."""
    found = _LINE.fullmatch(line.strip())
    if found is None or found["dtype"] not in _LONG_NAMES:
        raise ValueError(
            f"case {line!r}: must be like 'bwd bf16 d80v40 causal 3x6x203x257 needle seed 5 scale 0.1 "
            f"deterministic splits 1', dtype one of {', '.join(_LONG_NAMES)}"
        )
    dims = int(found["dim"]), int(found["dim_value"] or found["dim"])
    variant = Variant(_LONG_NAMES[found["dtype"]], *dims, found["mask"], found["deterministic"] is not None)
    direction = "forward" if found["direction"] == "fwd" else "backward"
    batch, heads, queries, keys = (int(found[name]) for name in ("batch", "heads", "queries", "keys"))
    scale = None if found["scale"] is None else float(found["scale"])
    splits = None if found["splits"] is None else int(found["splits"])
    seed = int(found["seed"])
    return Case(direction, variant, batch, heads, queries, keys, found["family"], seed, scale, splits)


# The twelve kernels that are shown and verified, and five of other dims and masks: 17, as many as LENGTHS.
SHOWN: Final = tuple(
    Variant(dtype, head_dim, head_dim, mask)
    for dtype in ("bfloat16", "float16", "float32")
    for head_dim in (64, 128)
    for mask in ("full", "causal")
)
MAIN: Final = (
    *SHOWN,
    Variant("bfloat16", 128, 128, "causal_br"),
    Variant("float16", 64, 64, "causal_br"),
    Variant("float32", 64, 64, "causal_br"),
    Variant("bfloat16", 80, 40, "causal"),
    Variant("float32", 96, 96, "full"),
)
DETERMINISTIC: Final = (
    Variant("bfloat16", 128, 128, "causal", True),
    Variant("float32", 64, 64, "causal", True),
    Variant("float16", 64, 64, "full", True),
)
# Seven, as many as FEW_LENGTHS. The forward has no deterministic kernel of its own and runs the first four.
OTHERS: Final = (
    Variant("bfloat16", 8, 8, "full"),
    Variant("float16", 40, 40, "causal"),
    Variant("float16", 40, 96, "full"),
    Variant("float32", 8, 8, "causal"),
    *DETERMINISTIC,
)


def _covering(
    direction: str, variants: tuple[Variant, ...], lengths: tuple[int, ...], first_seed: int
) -> Iterator[Case]:
    """Every two values of every two parameters meet in some case.

    With p lengths and p variants, p a prime, the p * p runs with the levels a, b, a + b, a + 2b, ... (mod p)
    are an orthogonal array: any two of these columns hold each pair of levels exactly once.
    """
    p = len(lengths)
    for run in range(p * p):
        a, b = divmod(run, p)
        levels = [(a + step * b) % p for step in range(1, 7)]
        variant = variants[levels[0]]
        splits = SPLITS[levels[5] % len(SPLITS)] if direction == "backward" else None
        if variant.deterministic and splits != 1:
            splits = None
        yield Case(
            direction,
            variant,
            BATCHES[levels[1] % len(BATCHES)],
            HEADS[levels[2] % len(HEADS)],
            lengths[a],
            lengths[b],
            FAMILIES[levels[3] % len(FAMILIES)],
            first_seed + run,
            SCALES[levels[4] % len(SCALES)],
            splits,
        )


def _all(direction: str) -> tuple[Case, ...]:
    main = list(_covering(direction, MAIN, LENGTHS, 0))
    others = list(_covering(direction, OTHERS, FEW_LENGTHS, len(main)))
    if direction == "forward":
        others = [case for case in others if not case.variant.deterministic]
    return (*main, *others)


PTX_VARIANTS: Final = (
    Variant("bfloat16", 128, 128, "causal"),
    Variant("float16", 64, 64, "full"),
    Variant("float32", 64, 64, "causal_br"),
)
PTX_CASES: Final = tuple(
    Case(direction, variant, 2, 3, 203, 257, "gaussian", seed)
    for seed, variant in enumerate(PTX_VARIANTS)
    for direction in ("forward", "backward")
)

# (batch, heads, queries, keys) at which blocks take whole heads, of three key tiles: nearly every multiprocessor one.
MANY_HEADS: Final = (8, 16, 200, 300)
# As many heads as an H200 has multiprocessors, less four, and more than twice as many: a block takes one, or several.
WHOLE_HEADS: Final = tuple(
    Case("backward", Variant(dtype, dim, dim_value, mask, deterministic), batch, 16, queries, keys, "gaussian", seed)
    for seed, (dtype, dim, dim_value, mask, deterministic, batch, queries, keys) in enumerate(
        (
            ("bfloat16", 128, 128, "causal", False, 8, 300, 300),
            ("bfloat16", 128, 128, "causal", True, 8, 300, 300),
            ("bfloat16", 128, 128, "full", False, 24, 65, 257),
            ("float16", 64, 64, "causal_br", False, 8, 255, 400),
            ("float16", 64, 64, "full", False, 24, 200, 130),
            ("float16", 128, 128, "causal_br", False, 24, 129, 203),
            ("bfloat16", 80, 40, "causal", False, 8, 400, 255),
            ("bfloat16", 8, 8, "full", False, 24, 129, 129),
        )
    )
)
# Long enough for blocks of a cluster to share keys and values: tiles even and odd in number, cut off, and a diagonal
# that ends between two tiles.
MULTICAST: Final = tuple(
    Case("forward", Variant(dtype, dim, dim_value, mask), batch, heads, queries, keys, "gaussian", seed)
    for seed, (dtype, dim, dim_value, mask, batch, heads, queries, keys) in enumerate(
        (
            ("bfloat16", 128, 128, "causal", 1, 2, 4096, 4096),
            ("bfloat16", 128, 128, "causal", 1, 1, 4500, 4200),
            ("bfloat16", 128, 128, "causal_br", 2, 1, 4353, 4500),
            ("float16", 128, 128, "causal", 1, 1, 4224, 4100),
            ("bfloat16", 192, 128, "causal", 1, 2, 4100, 4096),
            ("float16", 112, 104, "causal_br", 1, 1, 4600, 4100),
        )
    )
)
FORWARD: Final = (*_all("forward"), *MULTICAST)
BACKWARD: Final = (*_all("backward"), *WHOLE_HEADS)


@dataclass(frozen=True, slots=True)
class Room:
    """One room alone."""

    name: str
    family: str
    dtype: str
    head_dim: int

    @property
    def arch(self) -> str:
        """The target of its family."""
        return HOPPER_ARCH if self.family == "hopper" else ARCH

    def plan(self, tiles: int, arch: str | None = None) -> Plan:
        """Its plan for that many tiles."""
        return plan_room(self.name, self.family, self.dtype, self.head_dim, arch or self.arch, tiles)


_SHOWN_KINDS: Final = (
    ("generic", "bfloat16", 128),
    ("generic", "float32", 128),
    ("hopper", "bfloat16", 64),
    ("hopper", "bfloat16", 128),
)
SHOWN_ROOMS: Final = tuple(Room(name, *kind) for kind in _SHOWN_KINDS for name in ROOMS)
ALL_ROOMS: Final = tuple(
    Room(name, family, dtype, head_dim)
    for family, dtypes in FAMILIES_OF_ROOMS.items()
    for dtype in dtypes
    for head_dim in HEAD_DIMS
    for name in ROOMS
)


def builds(arch: str = ARCH) -> list[tuple[Build, ...]]:
    """Every kernel that the suite runs on an H100 or H200, once, and what stands in for it where ptxas spills."""
    found: dict[tuple[Build, ...], None] = {}
    for case in (*FORWARD, *BACKWARD):  # few queries and many keys have kernels of their own
        for direction in ("forward", "backward"):
            changed = replace(case, direction=direction, num_splits_key=None)
            found[planner.builds(changed.problem(), arch)] = None
    for room in ALL_ROOMS:
        found[(room.plan(1).build,)] = None
    for case in PTX_CASES:
        found[planner.builds(case.problem(), PTX_ARCH)] = None
    return list(found)
