"""Plan: every number of one pass, frozen and printable; its build part is the cache key of the kernels.

    Problem --plan--> Plan(build, launches, workspace) --compile--> Artifact --bind--> Bound

`Build` decides the machine code. Problems that differ only in batch, heads, lengths, strides, scale or
pointers have equal builds and share their kernels; `Launch` and `Workspace` carry what differs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cutlass_py_attn.device import Architecture, architecture
from cutlass_py_attn.parts.integers import round_up
from cutlass_py_attn.problem import ITEM_BYTES, OPERANDS, ROW_ALIGNMENT_BYTES, SHORT_NAMES

COLUMN_MULTIPLE = 32  # head dims are padded to this inside the tile, never in global memory
F32_ROW_PADDING = 4  # elements added to a shared-memory row of float32: rows of one column fall in other banks

Warps = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A piece of shared memory: `offset` and `bytes`; alive from step `first` to step `last` of the kernel."""

    name: str
    offset: int
    bytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Build:
    """What decides the machine code. `scores`, `grad_v`, `grad_k`, `grad_q` spread the warps of the mma.sync
    products over (rows, columns); (0, 0) where a kernel has no such product. S and dP share `scores`;
    a forward with a column_block computes O += P V with the warps of grad_q, whose form it has.

    mask is the form of the band (masks.FORMS), features those of Problem, gradients what the backward writes.
    access_bytes: of one load or store of a row of query, key, value and so on; bias_access_bytes and
    grad_bias_access_bytes likewise, 0 where there is none. bias_gradient: "main" where the main kernel writes
    grad_bias, else the letters of the axes of [b, h, q, k] that a kernel of its own sums over, "none" for no axis.
    column_block: head-dim columns of one block where the head is too wide for registers; 0 where one block has all.
    query_block: query rows of one product of scores where a tile's are too many for registers; 0 where one has all.
    key_stages: key tiles of a block of the Hopper backward; with two, the next one's first scores are there before this
    one's gradients are stored. whole_heads: whether such a block takes all key tiles of a head and sums dQ by itself.
    multicast: whether two blocks of the Hopper forward take neighbouring query tiles and each loads half of every key
    and value tile, for both.
    """

    kind: str  # forward, backward, or room
    family: str  # generic (mma.sync, cp.async), decode (the same for few queries) or hopper (wgmma, TMA)
    arch: str
    dtype: str
    head_dim: int
    head_dim_value: int
    mask: str
    tile_m: int
    tile_n: int
    warps: int
    query_stages: int
    grad_output_stages: int
    scores: Warps
    grad_v: Warps
    grad_k: Warps
    grad_q: Warps
    deterministic: bool
    register_usage_level: int  # ptxas's --register-usage-level: below 5 it hoists less and spills less
    min_blocks_per_sm: int  # the kernel's promise to ptxas; 0 makes none
    room: str
    shared_memory: tuple[Buffer, ...]
    features: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    access_bytes: int = ROW_ALIGNMENT_BYTES
    bias_access_bytes: int = 0
    grad_bias_access_bytes: int = 0
    bias_gradient: str = ""
    column_block: int = 0
    query_block: int = 0
    key_stages: int = 1
    whole_heads: bool = False
    multicast: bool = False

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return self.warps * 32

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def columns(self) -> int:
        """head_dim padded inside the tile."""
        return round_up(self.head_dim, COLUMN_MULTIPLE)

    @property
    def columns_value(self) -> int:
        """head_dim_value padded inside the tile."""
        return round_up(self.head_dim_value, COLUMN_MULTIPLE)

    @property
    def block_columns(self) -> int:
        """Columns of Q and K that one block accumulates gradients of."""
        return min(self.columns, self.column_block or self.columns)

    @property
    def block_columns_value(self) -> int:
        """Columns of V and O that one block accumulates."""
        return min(self.columns_value, self.column_block or self.columns_value)

    @property
    def block_queries(self) -> int:
        """Query rows of one product of scores."""
        return min(self.tile_m, self.query_block or self.tile_m)

    @property
    def shared_memory_bytes(self) -> int:
        """Dynamic shared memory of one block."""
        return max((buffer.offset + buffer.bytes for buffer in self.shared_memory), default=0)

    @property
    def has_main(self) -> bool:
        """Whether there is a main kernel: a backward for grad_bias or grad_sinks alone has none."""
        return self.kind != "backward" or self.bias_gradient == "main" or not set(self.gradients).isdisjoint(OPERANDS)

    def has(self, feature: str) -> bool:
        """Whether the kernels have this feature."""
        return feature in self.features

    @property
    def symbol(self) -> str:
        """Short name of the kernel, without the compiler's `_0`; lower-case "cutlass" never occurs in it,
        for ptxas emits other machine code for such names."""
        dims = f"d{self.head_dim}" + (f"v{self.head_dim_value}" if self.head_dim_value != self.head_dim else "")
        if self.kind == "room":
            return "_".join([self.room, self.family, SHORT_NAMES[self.dtype], dims])
        direction = {"forward": "fwd", "backward": "bwd"}[self.kind]
        words = [direction, self.family, SHORT_NAMES[self.dtype], dims, self.mask, *self.features]
        words += [f"m{self.tile_m}"] if self.family == "decode" else []
        if self.kind == "backward" and self.gradients != OPERANDS:
            words.append("to_" + "".join(name[0] for name in self.gradients))  # s: sinks
        if self.access_bytes < ROW_ALIGNMENT_BYTES:
            words.append(f"a{self.access_bytes}")
        for letters, access in (("ba", self.bias_access_bytes), ("ga", self.grad_bias_access_bytes)):
            words += [f"{letters}{access}"] if access not in (0, ROW_ALIGNMENT_BYTES) else []
        words += [f"sum_{self.bias_gradient}"] if self.bias_gradient not in ("", "main") else []
        words += ["heads"] if self.whole_heads else []
        words += ["multicast"] if self.multicast else []
        return "_".join([*words, "det"] if self.deterministic else words)

    @property
    def digest(self) -> str:
        """sha256 of every field: the plan's share of the cache key."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()

    def buffer(self, name: str) -> Buffer:
        """The shared-memory buffer of that name."""
        return next(buffer for buffer in self.shared_memory if buffer.name == name)


@dataclass(frozen=True, slots=True)
class TensorMap:
    """Recipe of one CUtensorMap over the array at struct field `field`, in elements and innermost axis first.

    strides: from one index to the next of every axis but the innermost, which is contiguous. box: what one copy
    brings, of each axis.
    """

    field: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch. `symbol` is the entry in the cubin. Parameters: the tensor maps in order, then the struct,
    with `sizes` in place of the plan's. `cluster` neighbouring blocks of the grid run together."""

    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_memory_bytes: int
    tensor_maps: tuple[TensorMap, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    cluster: int = 1


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of the workspace, in bytes; `name` is the struct field that receives its address."""

    name: str
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Workspace:
    """Device scratch of one call: the first `zero_bytes` are cleared before every launch."""

    bytes: int = 0
    zero_bytes: int = 0
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Every number of one pass. `sizes` are the struct's integer fields; `num_splits_key` is 1 in every forward but a
    decode."""

    build: Build
    launches: tuple[Launch, ...]
    workspace: Workspace
    sizes: tuple[tuple[str, int], ...]
    why: str

    @property
    def symbol(self) -> str:
        """Name of the main kernel."""
        return self.build.symbol

    @property
    def architecture(self) -> Architecture:
        """Limits of the target."""
        return architecture(self.build.arch)

    @property
    def num_splits_key(self) -> int:
        """Blocks that share the keys of one (batch, head) in the backward and in a decode."""
        return dict(self.sizes).get("num_splits_key", 1)

    def to_json(self) -> str:
        """The plan as JSON; `from_json` gives an equal plan back."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan of a `to_json` text; ValueError names missing or unknown fields."""
        return _plan_from(json.loads(text))

    def explain(self) -> str:
        """Tiles, warps, grid, shared-memory map, workspace and why this kernel, as text."""
        from cutlass_py_attn.explain import explain

        return explain(self)


def build_from(data: Mapping[str, Any]) -> Build:
    """A Build from its JSON object; ValueError names missing or unknown fields."""
    _same_fields("build", data, Build)
    pairs = {name: tuple(data[name]) for name in ("scores", "grad_v", "grad_k", "grad_q", "features", "gradients")}
    buffers = tuple(Buffer(**item) for item in data["shared_memory"])
    return Build(**{**data, **pairs, "shared_memory": buffers})


def _plan_from(data: Mapping[str, Any]) -> Plan:
    _same_fields("plan", data, Plan)
    launches = tuple(
        Launch(
            symbol=item["symbol"],
            grid=tuple(item["grid"]),
            block=tuple(item["block"]),
            shared_memory_bytes=item["shared_memory_bytes"],
            tensor_maps=tuple(_tensor_map_from(recipe) for recipe in item["tensor_maps"]),
            sizes=_pairs(item["sizes"]),
            cluster=item["cluster"],
        )
        for item in data["launches"]
    )
    space = data["workspace"]
    workspace = Workspace(space["bytes"], space["zero_bytes"], tuple(Part(**part) for part in space["parts"]))
    return Plan(build_from(data["build"]), launches, workspace, _pairs(data["sizes"]), data["why"])


def _tensor_map_from(data: Mapping[str, Any]) -> TensorMap:
    sizes, strides, box = (tuple(data[name]) for name in ("sizes", "strides", "box"))
    return TensorMap(data["field"], sizes, strides, box, data["swizzle_bytes"])


def _pairs(data: Iterable[Iterable[Any]]) -> tuple[tuple[str, int], ...]:
    return tuple((name, value) for name, value in data)


def _same_fields(what: str, data: Mapping[str, Any], cls: type) -> None:
    known = {item.name for item in dataclasses.fields(cls)}
    missing, unknown = sorted(known - data.keys()), sorted(data.keys() - known)
    if missing or unknown:
        raise ValueError(f"{what}: missing fields {missing}, unknown fields {unknown}; written by another version")
