"""Build: what decides the machine code of a kernel; the plan's part of the cache key."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cutlass_py_attn.integers import round_up
from cutlass_py_attn.launch.variants import CLUSTER, CLUSTERED, E4M3_CACHE, MLA, PERSISTENT, SHARED_END, SPLIT_KV, WIDE
from cutlass_py_attn.problem.mask_program import MaskProgram
from cutlass_py_attn.problem.masks import Form
from cutlass_py_attn.problem.tensors import FLOAT8, OPERAND_BYTES, OPERAND_NAMES, OPERANDS, ROW_ALIGNMENT_BYTES

COLUMN_MULTIPLE = 32  # head dims are padded to this inside the tile, never in global memory
WIDE_COLUMN_MULTIPLE = 64  # the same in variant wide, whose tiles are strips of 128 bytes
FLOAT8_COLUMN_MULTIPLE = 64  # the same of 8-bit operands, whose tiles are strips of 64 bytes at least
F32_ROW_PADDING = 4  # elements added to a shared-memory row of float32, so that rows of a column use other banks
ROW_KINDS = ("append", "merge")  # kernels that compute row by row, without a product
# The numbered steps of the fused kernels: a buffer's first and last step count in these.
STEPS = {
    "forward": ("load", "S", "softmax", "O", "store"),
    "backward": ("load", "S", "P", "dP", "dS", "dV", "dK", "dQ", "store"),
    "component_gemm": (),
    "append": (),
    "merge": (),
}

Warps = tuple[int, int]
WARPS = ("warps_scores", "warps_grad_v", "warps_grad_k", "warps_grad_q")


@dataclass(frozen=True, slots=True)
class Buffer:
    """One buffer of shared memory: `offset` and `bytes`; in use from step `first` to step `last` of the kernel."""

    name: str
    offset: int
    bytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Build:
    """Everything that decides the machine code of a kernel; the plan's part of the cache key.

    kind: "forward", "backward", "component_gemm", "append" or "merge"
    family: "sm80" (mma.sync, cp.async), "sm90" (wgmma, TMA) or "decode" (split-KV, mma.sync)
    variant: kernel body within the family, a name of variants.py; "" for the standard one
    arch: target of the compiler, such as "sm_90a"
    mask: form of the mask, a masks.Form
    tile_m, tile_n: query rows and key rows of a tile; in an append or a merge, rows of a block and threads of a row
    warps: warps of a thread block
    query_stages, grad_output_stages: pipeline stages of query (in a forward: of key and value) and grad_output
    warps_scores, warps_grad_v, warps_grad_k, warps_grad_q: warps over (rows, columns) of each product; (0, 0) for no
        such product. S and dP share warps_scores. Forwards of variant split_d and wide compute O += P V with
        warps_grad_q.
    deterministic: whether gradients have the same bits in every run
    register_usage_level: ptxas --register-usage-level; below 5, ptxas hoists less and spills less
    min_blocks_per_sm: launch bound given to ptxas; 0 for none
    component_gemm: name of the component GEMM when kind is "component_gemm", else ""
    shared_memory: shared-memory map of one thread block
    features: sorted features of the Problem
    gradients: gradients that the backward writes
    vector_bytes: bytes of one load or store of a row of query, key, value, output and their gradients
    bias_vector_bytes, grad_bias_vector_bytes: bytes of one load or store of a row of bias and grad_bias; 0 for none
    grad_bias_mode: "main" when the main kernel writes grad_bias; else the axes of "bhqk" that a separate kernel sums
        over, "none" for no axis; "" for no grad_bias
    head_dim_split: head-dim columns of one thread block in a split-D kernel; 0 for all columns
    score_rows: query rows of one score product in the sm90 backward when a tile has too many; 0 for all rows
    key_stages: key tiles in flight per thread block of the sm90 backward. With two, the first scores of the next key
        tile are computed before the gradients of this one are stored.
    options: how the body computes, names of `variants.OPTIONS` in their order; () for the standard way. No part of the
        symbol: `tile_options` decides them by what the symbol names.
    """

    kind: str
    family: str
    variant: str
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
    warps_scores: Warps
    warps_grad_v: Warps
    warps_grad_k: Warps
    warps_grad_q: Warps
    deterministic: bool
    register_usage_level: int
    min_blocks_per_sm: int
    component_gemm: str
    shared_memory: tuple[Buffer, ...]
    features: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    vector_bytes: int = ROW_ALIGNMENT_BYTES
    bias_vector_bytes: int = 0
    grad_bias_vector_bytes: int = 0
    grad_bias_mode: str = ""
    head_dim_split: int = 0
    score_rows: int = 0
    key_stages: int = 1
    options: tuple[str, ...] = ()

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return self.warps * 32

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return OPERAND_BYTES[self.dtype]

    @property
    def columns(self) -> int:
        """head_dim padded inside the tile."""
        if self.variant == WIDE and self.kind == "backward":  # two warpgroups have columns of dQ and of dK each
            return max(round_up(self.head_dim, WIDE_COLUMN_MULTIPLE), 2 * WIDE_COLUMN_MULTIPLE)
        return round_up(self.head_dim, self.column_multiple)

    @property
    def column_multiple(self) -> int:
        """What head dims are padded to inside the tile."""
        if self.variant == WIDE:
            return WIDE_COLUMN_MULTIPLE
        return FLOAT8_COLUMN_MULTIPLE if self.dtype == FLOAT8 else COLUMN_MULTIPLE

    @property
    def columns_value(self) -> int:
        """head_dim_value padded inside the tile; in variant wide to columns for each of two warpgroups at least."""
        if self.variant == WIDE:
            return max(round_up(self.head_dim_value, WIDE_COLUMN_MULTIPLE), 2 * WIDE_COLUMN_MULTIPLE)
        return round_up(self.head_dim_value, self.column_multiple)

    @property
    def block_columns(self) -> int:
        """Columns of Q and K that one block accumulates gradients of."""
        return min(self.columns, self.head_dim_split or self.columns)

    @property
    def block_columns_value(self) -> int:
        """Columns of V and O that one block accumulates."""
        return min(self.columns_value, self.head_dim_split or self.columns_value)

    @property
    def block_queries(self) -> int:
        """Query rows of one product of scores."""
        return min(self.tile_m, self.score_rows or self.tile_m)

    @property
    def shared_memory_bytes(self) -> int:
        """Dynamic shared memory of one block."""
        return max((buffer.offset + buffer.bytes for buffer in self.shared_memory), default=0)

    @property
    def has_main(self) -> bool:
        """Whether the build has a main kernel: a backward for grad_bias or grad_sinks alone has none."""
        return self.kind != "backward" or self.grad_bias_mode == "main" or not set(self.gradients).isdisjoint(OPERANDS)

    @property
    def shares_chunks(self) -> bool:
        """Whether blocks share chunks of the keys of all sequences, kernels/decode/chunk_schedule.py."""
        return self.variant in (PERSISTENT, MLA)

    @property
    def has_combine(self) -> bool:
        """Whether a second kernel joins the results of blocks that split the keys of a row."""
        return self.shares_query_tiles or (self.kind == "forward" and (self.family == "decode" or self.variant == MLA))

    @property
    def shares_query_tiles(self) -> bool:
        """Whether blocks of the sm90 forward may share the keys of query tiles, kernels/sm90_common/shared_tiles.py."""
        return self.kind == "forward" and (self.variant == SPLIT_KV or SHARED_END in self.options)

    @property
    def reads_value_in_key(self) -> bool:
        """Whether the kernels read value as the first columns of key, and not through its own address and strides."""
        return self.variant == MLA

    @property
    def maps_value(self) -> bool:
        """Whether the kernels of the sm90 family read value through a tensor map of its own."""
        return self.family == "sm90" and self.variant not in (MLA, E4M3_CACHE)

    @property
    def maps_grad_bias(self) -> bool:
        """Whether the main kernel of the sm90 family writes grad_bias, through a tensor map."""
        return self.family == "sm90" and self.grad_bias_mode == "main"

    def has(self, feature: str) -> bool:
        """Returns whether the kernels have this feature."""
        return feature in self.features

    @property
    def form(self) -> Form:
        """Which edges the band of the mask has."""
        return Form(self.mask)

    @property
    def cluster(self) -> int:
        """Thread blocks of a cluster of the main kernel."""
        return CLUSTER if self.variant in CLUSTERED else 1

    @property
    def symbol(self) -> str:
        """Short name of the kernel: `stem`, then the tile as {tile_m}x{tile_n}.

        The compiler appends `_0`. Lower-case "cutlass" never occurs in a symbol: ptxas emits other machine code for
        such names.
        """
        return f"{self.stem}_{self.tile_m}x{self.tile_n}"

    @property
    def stem(self) -> str:
        """The symbol without its tile: what the kernel computes, and the variant."""
        dims = f"d{self.head_dim}" + (f"v{self.head_dim_value}" if self.head_dim_value != self.head_dim else "")
        if self.kind == "component_gemm":
            return "_".join([self.component_gemm, self.family, OPERAND_NAMES[self.dtype], dims])
        direction = {"forward": "fwd", "backward": "bwd"}.get(self.kind, self.kind)
        mask = [] if self.kind in ROW_KINDS else _mask_words(self.form)
        words = [direction, self.family, OPERAND_NAMES[self.dtype], dims, *mask, *self.features]
        if self.kind == "backward" and self.gradients != OPERANDS:
            words.append("to_" + "".join(name[0] for name in self.gradients))  # s: sinks
        if self.vector_bytes < ROW_ALIGNMENT_BYTES:
            words.append(f"a{self.vector_bytes}")
        for letters, vector_bytes in (("ba", self.bias_vector_bytes), ("ga", self.grad_bias_vector_bytes)):
            words += [f"{letters}{vector_bytes}"] if vector_bytes not in (0, ROW_ALIGNMENT_BYTES) else []
        words += [f"sum_{self.grad_bias_mode}"] if self.grad_bias_mode not in ("", "main") else []
        words += ["det"] if self.deterministic else []
        return "_".join([*words, self.variant] if self.variant else words)

    @property
    def digest(self) -> str:
        """sha256 of every field: the plan's share of the cache key."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()

    def buffer(self, name: str) -> Buffer:
        """Returns the shared-memory buffer of that name."""
        return next(buffer for buffer in self.shared_memory if buffer.name == name)


def _mask_words(form: Form) -> list[str]:
    """Returns the words of a symbol that name a form, with a digest of the program of a mask function."""
    return [form.name, MaskProgram.parse(form.program).digest] if form.program else [str(form)]


def build_from(data: Mapping[str, Any]) -> Build:
    """Returns the Build of a JSON object; ValueError names missing or unknown fields."""
    same_fields("build", data, Build)
    pairs = {name: tuple(data[name]) for name in (*WARPS, "features", "gradients", "options")}
    buffers = tuple(Buffer(**item) for item in data["shared_memory"])
    return Build(**{**data, **pairs, "shared_memory": buffers})


def same_fields(what: str, data: Mapping[str, Any], cls: type) -> None:
    """Raises ValueError if `data` has other fields than the dataclass `cls`."""
    known = {item.name for item in dataclasses.fields(cls)}
    missing, unknown = sorted(known - data.keys()), sorted(data.keys() - known)
    if missing or unknown:
        raise ValueError(f"{what}: missing fields {missing}, unknown fields {unknown}; written by another version")
