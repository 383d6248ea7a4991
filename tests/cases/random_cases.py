"""Random cases: problems with random features, sizes and inputs.

A kernel number decides what chooses the machine code; a run number decides the rest. So a few hundred kernels serve
thousands of problems.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.drawn_functions import FUNCTIONS
from cutlass_py_attn.problem.masks import Causal, Mask, Window
from cutlass_py_attn.problem.spec import ProblemSpec, SequenceLengths, parse_mask
from cutlass_py_attn.problem.tensors import DIRECTIONS, FLOAT8
from cutlass_py_attn.testing.cases import ARCH, Case, builds_of
from cutlass_py_attn.testing.guarded_check import is_exact
from cutlass_py_attn.testing.layouts import RANGE_LAYOUTS

RESIDENT_DIMS: Final = (8, 16, 24, 32, 40, 64, 72, 80, 96, 128, 128, 160, 192, 256, 1, 3, 17, 33, 36, 38, 100)
SPLIT_DIMS: Final = (257, 288, 320, 512, 520, 1024)  # head dims that sm80 kernels split over blocks
MASKS: Final = ("full", "causal", "causal_br", "local")
SUMMED: Final = ("1hqk", "11qk", "b1qk", "bh1k", "bhq1", "1h1k", "bh11", "1111")
ALIGNED_LAYOUTS: Final = ("dense", "dense", "padded", "heads_first", "packed")
LAYOUTS: Final = (*ALIGNED_LAYOUTS, "shifted")  # a shifted tensor is aligned to one element alone
GROUPS: Final = (2, 3, 4)
LENGTHS: Final = (1, 2, 15, 31, 32, 63, 64, 65, 100, 127, 128, 129, 190, 257)
INPUTS: Final = (
    *("gaussian",) * 6, "gaussian_x3", "gaussian_x3", "integers", "needle", "equal_keys", "one_key", "zero_scores",
    "rising",
)  # fmt: skip
BIAS_INPUTS: Final = ("gaussian", "gaussian", "gaussian", "lowest", "hidden_rows")
SATURATED_SHARE: Final = 0.3  # of the cases with a softcap, see inputs.py
ONE_SIGN_SHARE: Final = 0.3  # of the backwards with sinks, see inputs.py
TINY_DROPOUT: Final = 1e-6
TINY_DROPOUT_SHARE: Final = 0.2  # of the float32 cases with dropout in which the bounds can show its factor
# Problems that sm90 kernels take.
SM90_SHARE: Final = 0.35
SM90_DIMS: Final = (64, 64, 128, 128, 128, 72, 96, 192, 256)
# Of these some are of wide heads, with (head_dim, head_dim_value; 0 for the same).
WIDE_SHARE: Final = 0.3
WIDE_DIMS: Final = ((512, 0), (512, 0), (320, 0), (384, 0), (448, 0), (264, 0), (512, 64), (40, 264), (328, 456))
# Few queries against many keys: head dims and layouts that decode kernels take.
DECODE_SHARE: Final = 0.12
DECODE_DIMS: Final = {"float16": (64, 128, 128, 256, 40), "bfloat16": (64, 128, 128, 192, 80)}
DECODE_DIMS_F32: Final = (64, 128, 32, 100)
DECODE_LAYOUTS: Final = ("dense", "padded", "heads_first", "packed")
DECODE_QUERIES: Final = (1, 1, 1, 1, 2, 3, 5, 16)
DECODE_KEYS: Final = (256, 257, 319, 511, 640, 1025)
DECODE_GROUPS: Final = (2, 4)
# Kernel numbers from here on are those of caches in pages.
PAGED_FROM: Final = 100_000
PAGED_SIZES: Final = (1, 2, 4, 8, 16, 16, 32, 64, 128, 256)
PAGED_KEYS: Final = (0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 250, 256, 300, 513, 1023, 1024, 1500, 2500)
PAGED_ROWS: Final = (16, 16, 16, 32, 128)  # most query rows of a key head, which decide the tile
PAGED_TERMS_SHARE: Final = 0.25  # of softcap, ALiBi and sinks each
PAGED_MANY: Final = 150  # sequences of a large batch
# Kernel numbers from here on are those of keys that contain the values.
MLA_FROM: Final = 200_000
MLA_DIMS: Final = (576, 512)
MLA_HEADS: Final = (1, 2, 3, 16, 16, 20, 40, 64, 96, 128, 128)
MLA_QUERIES: Final = (1, 1, 1, 2, 3, 5, 9)
MLA_PAGES: Final = (16, 16, 32, 64, 64, 128, 256)
MLA_LAYOUTS: Final = ("dense", "padded", "heads_first")
MLA_CODES_SHARE: Final = 0.45  # of latent caches with e4m3 codes
# Kernel numbers from here on are those of e4m3 codes: every second of operands, the others of caches.
E4M3_FROM: Final = 300_000
E4M3_GRAINS: Final = ("", "tensor", "head", "batch", "batch")
E4M3_DIMS: Final = ((64, 0), (64, 0), (128, 0), (128, 0), (128, 0), (256, 0), (256, 0), (96, 0), (192, 128), (80, 48))
E4M3_LENGTHS: Final = (1, 2, 31, 63, 64, 65, 127, 128, 129, 190, 257, 384, 513)
CACHE_ROWS_SHARE: Final = 0.4  # of e4m3 caches with a scale of each row
CACHE_DENSE_SHARE: Final = 0.35  # of those without pages
CACHE_PROMPT_SHARE: Final = 0.3  # of those with more queries than decode kernels take
CACHE_PROMPTS: Final = (129, 150, 200, 257)  # their queries
# Kernel numbers from here on are those of forwards whose last query tiles blocks share: an H200 has 132 SMs.
SHARED_END_FROM: Final = 400_000
SHARED_END_DIMS: Final = ((128, 0), (256, 0), (192, 128), (104, 0))
SHARED_END_BATCH_HEADS: Final = (67, 70, 80, 132, 133, 140)
SHARED_END_QUERIES: Final = (100, 128, 129, 180)
SHARED_END_KEYS: Final = (520, 1537, 1720, 1960)
# Kernel numbers from here on are those of forwards with few query tiles, whose keys blocks share: dtype, head dim,
# mask, lengths of the sequences, and the rows of a page.
FEW_TILES_FROM: Final = 420_000
FEW_TILES: Final[tuple[tuple[str, int, str, str, int, dict[str, Any]], ...]] = (
    ("bfloat16", 128, "causal_br", "one", 0, {}),
    ("float16", 64, "full", "one", 0, {}),
    ("bfloat16", 96, "causal_br", "one", 0, {}),
    ("bfloat16", 64, "causal_br", "several", 0, {}),
    ("float16", 128, "causal_br", "used", 0, {}),
    ("bfloat16", 256, "full", "one", 0, {}),
    ("float16", 256, "causal_br", "one", 0, {}),
    ("bfloat16", 32, "full", "used", 0, {}),
    ("bfloat16", 128, "causal_br", "one", 16, {}),
    ("float16", 64, "causal_br", "several", 64, {}),
    ("bfloat16", 64, "causal_br", "several", 16, {"sinks": True}),
    ("bfloat16", 256, "causal_br", "one", 0, {"softcap": 30.0}),
    ("float16", 128, "full", "used", 0, {"sinks": True, "alibi": "h"}),
    ("bfloat16", 128, "causal_br", "one", 0, {"sinks": True, "bias": "bhqk"}),
)
FEW_TILES_QUERIES: Final = (33, 128, 129, 200, 300)
FEW_TILES_KEYS: Final = (1100, 1537, 2300, 4200)
# Kernel numbers from here on are those of backwards whose last key tiles blocks share.
SHARED_QUERIES_FROM: Final = 450_000
SHARED_QUERIES_DIMS: Final = (128, 128, 64, 64, 64, 96, 128, 104)
SHARED_QUERIES_BATCH_HEADS: Final = (34, 35, 38, 45)
SHARED_QUERIES: Final = (330, 520, 1030)
SHARED_QUERIES_KEYS: Final = (400, 512, 520)
# Kernel numbers from here on are those of backwards with a bias that the sm90 kernels take: dtype, head dim, mask, axes
# of the bias, its gradient, lengths, and what the problem has besides.
BIAS_BACKWARD_FROM: Final = 460_000
BIAS_BACKWARD: Final[tuple[tuple[str, int, str, str, str, str, dict[str, Any]], ...]] = (
    ("bfloat16", 128, "full", "bhqk", "", "one", {}),
    ("float16", 128, "causal_br", "1hqk", "", "several", {}),
    ("bfloat16", 128, "causal", "bhqk", "grad", "one", {}),
    ("float16", 64, "full", "1hqk", "grad", "one", {}),
    ("bfloat16", 64, "local", "b1qk", "grad", "one", {"alibi": "h", "sinks": True}),
    ("bfloat16", 96, "causal_br", "bhqk", "grad", "one", {"deterministic": True}),
    ("float16", 128, "full", "bhqk", "grad", "one", {"dropout_p": 0.1}),
    ("bfloat16", 128, "full", "1hqk", "sum", "one", {}),
    ("float16", 64, "causal", "11qk", "sum", "one", {}),
    ("bfloat16", 96, "local", "b1qk", "sum", "several", {"sinks": True}),
    ("bfloat16", 32, "full", "1hqk", "sum", "one", {}),
    ("float16", 128, "causal_br", "1hqk", "sum", "one", {"deterministic": True}),
    ("bfloat16", 64, "full", "1hqk", "sum", "one", {"softcap": 4.0}),
    ("float16", 128, "causal", "bh1k", "sum", "one", {}),
    ("bfloat16", 128, "full", "1hqk", "sum", "one", {"alibi": "bh"}),
)
BIAS_BACKWARD_QUERIES: Final = (60, 64, 100, 129, 200, 257, 400)
BIAS_BACKWARD_KEYS: Final = (64, 128, 136, 200, 264, 400, 520)
# Kernel numbers from here on are those of e4m3 caches with more queries than decode kernels take.
PROMPTS_FROM: Final = 500_000
# Kernel numbers from here on are those of forwards of wide heads.
WIDE_FROM: Final = 600_000
# Kernel numbers from here on are those of ranges of keys: forwards and backwards in turn, with (head_dim,
# head_dim_value; 0 for the same), grouped heads or not, sinks or not.
RANGES_FROM: Final = 700_000
RANGES_DIMS: Final = {
    "forward": (
        (128, 0), (64, 0), (128, 0), (64, 0), (96, 0), (32, 0), (256, 0), (128, 0), (192, 128), (64, 0), (80, 48),
        (128, 0), (8, 0), (40, 0), (192, 0), (104, 128),
    ),
    "backward": (
        (128, 0), (64, 0), (128, 0), (64, 0), (96, 0), (32, 0), (128, 0), (72, 0), (64, 0), (128, 64), (8, 0), (40, 0),
        (64, 128), (104, 0), (128, 0), (64, 0),
    ),
}  # fmt: skip
RANGES_LENGTHS: Final = (1, 2, 31, 63, 64, 65, 127, 128, 129, 190, 257, 300, 384, 520, 700)
RANGES_MASKS: Final = ("full", "full", "full", "causal", "causal", "causal_br", "local")
RANGE_FAMILIES: Final = (
    "", "", "", "runs", "runs", "runs", "documents", "documents", "documents100", "documents128", "prefix", "prefix90",
    "window", "window", "window17", "window128", "lengths", "lengths", "causal", "all",
)  # fmt: skip
RANGES_SCALES: Final = {"forward": (0.0, 0.0, 0.1), "backward": (0.0, 0.0, 0.1, -0.05)}  # 0 for none
RANGE_AXES: Final = ("11", "11", "b1", "1h", "bh", "bh")
RANGES_MANY_SHARE: Final = 0.05  # of problems with more (sequence, head) pairs than SMs
# Kernel numbers from here on are those of mask functions: forwards and backwards in turn, every function, head dims,
# grouped heads or not, sinks or not; a fourth of them within visible blocks of 64 or 128.
FUNCTIONS_FROM: Final = 800_000
FUNCTIONS_DIMS: Final = {
    "forward": ((128, 0), (64, 0), (96, 0), (128, 0), (32, 0), (64, 0), (256, 0), (128, 64), (192, 128)),
    "backward": ((128, 0), (64, 0), (96, 0), (128, 0), (32, 0), (64, 0), (72, 0), (128, 64), (40, 0)),
}
FUNCTIONS_LENGTHS: Final = (1, 31, 63, 64, 65, 127, 128, 129, 190, 257, 300, 384, 520)
FUNCTIONS_MANY_LENGTHS: Final = (31, 64, 100, 129)
BLOCK_SHARES: Final = (20, 50, 80, 100)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """What decides the machine code. mask "local" stands for any window; bias: axes as in ProblemSpec.

    is_decode: few queries against many keys, without features of the scores.
    """

    direction: str
    dtype: str
    head_dim: int
    head_dim_value: int
    is_grouped: bool
    mask: str
    layout: str
    bias: str
    bias_layout: str
    gradients: str
    has_dropout: bool
    has_softcap: bool
    has_alibi: bool
    sinks: bool
    is_variable_length: bool
    has_used_keys: bool
    deterministic: bool
    is_decode: bool


def draw(kernel: int, run: int) -> Case:
    """Case `run` of the kernel number `kernel`."""
    if kernel >= FUNCTIONS_FROM:
        return _draw_function(kernel - FUNCTIONS_FROM, np.random.default_rng((kernel, run)))
    if kernel >= RANGES_FROM:
        return _draw_ranges(kernel - RANGES_FROM, np.random.default_rng((kernel, run)))
    if kernel >= WIDE_FROM:
        drawn, rng = _draw_wide(np.random.default_rng(kernel)), np.random.default_rng((kernel, run))
        return _with_inputs(_draw_case(drawn, rng), rng)
    if kernel >= PROMPTS_FROM:
        return _draw_e4m3_cache(np.random.default_rng(kernel), np.random.default_rng((kernel, run)), are_prompts=True)
    if kernel >= BIAS_BACKWARD_FROM:
        return _draw_bias_backward(kernel - BIAS_BACKWARD_FROM, np.random.default_rng((kernel, run)))
    if kernel >= SHARED_QUERIES_FROM:
        return _draw_shared_queries(kernel - SHARED_QUERIES_FROM, np.random.default_rng((kernel, run)))
    if kernel >= FEW_TILES_FROM:
        return _draw_few_tiles(kernel - FEW_TILES_FROM, np.random.default_rng((kernel, run)))
    if kernel >= SHARED_END_FROM:
        return _draw_shared_end(kernel - SHARED_END_FROM, np.random.default_rng((kernel, run)))
    if kernel >= E4M3_FROM:
        draw_codes = _draw_e4m3_cache if (kernel - E4M3_FROM) % 2 else _draw_e4m3_operands
        return draw_codes(np.random.default_rng(kernel), np.random.default_rng((kernel, run)))
    if kernel >= MLA_FROM:
        return _draw_mla(np.random.default_rng(kernel), np.random.default_rng((kernel, run)))
    if kernel >= PAGED_FROM:
        return _draw_paged(np.random.default_rng(kernel), np.random.default_rng((kernel, run)))
    drawn, rng = _draw_kernel(np.random.default_rng(kernel)), np.random.default_rng((kernel, run))
    return _with_inputs(_draw_case(drawn, rng), rng)


def _pick(rng: np.random.Generator, values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def _draw_kernel(rng: np.random.Generator) -> _Kernel:
    def chance(share: float) -> bool:
        return bool(rng.random() < share)

    dims = SPLIT_DIMS if chance(0.15) else RESIDENT_DIMS
    dim = _pick(rng, dims)
    direction = "forward" if chance(0.35) else "backward"
    bias, sinks = chance(0.4), chance(0.15)
    gradients = "qkv" if chance(0.6) else "".join(letter for letter in "qkv" if chance(0.5))
    gradients += "b" if bias and chance(0.6) else ""
    gradients += "s" if sinks and chance(0.7) else ""
    kernel = _Kernel(
        direction=direction,
        dtype=_pick(rng, ("float16", "bfloat16", "float32")),
        head_dim=dim,
        head_dim_value=_pick(rng, (*RESIDENT_DIMS, *dims)) if chance(0.3) else 0,
        is_grouped=chance(0.3),
        mask=_pick(rng, MASKS),
        layout=_pick(rng, LAYOUTS),
        bias=(_pick(rng, SUMMED) if "b" in gradients and chance(0.6) else "bhqk") if bias else "",
        bias_layout=_pick(rng, ("dense", "dense", "padded", "transposed", "shifted")) if bias else "dense",
        gradients=(gradients or "q") if direction == "backward" else "qkv",
        has_dropout=chance(0.3),
        has_softcap=chance(0.15),
        has_alibi=chance(0.2),
        sinks=sinks,
        is_variable_length=chance(0.3),
        has_used_keys=chance(0.4),
        deterministic=direction == "backward" and "q" in gradients and chance(0.25),
        is_decode=False,
    )
    if chance(DECODE_SHARE):
        return _decode_kernel(kernel, rng)
    return _sm90_kernel(kernel, rng, is_wide=chance(WIDE_SHARE)) if chance(SM90_SHARE) else kernel


def _draw_wide(rng: np.random.Generator) -> _Kernel:
    """A forward of wide heads, which has no bias."""
    kernel = dataclasses.replace(_draw_kernel(rng), direction="forward", bias="", deterministic=False, is_decode=False)
    return _sm90_kernel(kernel, rng, is_wide=True)


def _sm90_kernel(kernel: _Kernel, rng: np.random.Generator, *, is_wide: bool) -> _Kernel:
    """The kernel number's features, without those that no sm90 kernel of its direction has."""
    has_bias = bool(kernel.bias) and kernel.direction == "forward"
    head_dim, head_dim_value = _pick(rng, WIDE_DIMS) if is_wide else (_pick(rng, SM90_DIMS), 0)
    gradients = kernel.gradients.replace("b", "") or "qkv"
    if is_wide:  # the sm90 kernel of wide heads computes all of them
        gradients = "qkvs" if "s" in gradients else "qkv"
    return dataclasses.replace(
        kernel,
        dtype=kernel.dtype if kernel.dtype != "float32" else "bfloat16",
        head_dim=head_dim,
        head_dim_value=head_dim_value,
        layout=kernel.layout if kernel.layout != "shifted" else "dense",
        bias=kernel.bias if has_bias else "",
        bias_layout=kernel.bias_layout if has_bias else "dense",
        gradients=gradients,
        has_dropout=kernel.has_dropout and not is_wide,
    )


def _decode_kernel(kernel: _Kernel, rng: np.random.Generator) -> _Kernel:
    """The kernel number's dtype, mask, groups and variable lengths, and what else a decode kernel takes."""
    return dataclasses.replace(
        kernel,
        direction="forward",
        head_dim=_pick(rng, DECODE_DIMS.get(kernel.dtype, DECODE_DIMS_F32)),
        head_dim_value=0,
        layout=_pick(rng, DECODE_LAYOUTS),
        bias="",
        bias_layout="dense",
        gradients="qkv",
        has_dropout=False,
        has_softcap=False,
        has_alibi=False,
        sinks=False,
        deterministic=False,
        is_decode=True,
    )


def _draw_case(kernel: _Kernel, rng: np.random.Generator) -> Case:
    """Sizes, edges of the mask and numbers, which do not decide the machine code."""

    def chance(share: float) -> bool:
        return bool(rng.random() < share)

    def length(lengths: Sequence[int]) -> int:
        return int(_pick(rng, lengths))

    groups = DECODE_GROUPS if kernel.is_decode else GROUPS
    query_lengths = DECODE_QUERIES if kernel.is_decode else LENGTHS
    key_lengths = DECODE_KEYS if kernel.is_decode else LENGTHS
    group = int(_pick(rng, groups)) if kernel.is_grouped else 1
    heads = group * int(_pick(rng, (1, 2)))
    keys = length(key_lengths)
    if kernel.bias and kernel.bias_layout == "dense":
        keys = -(-keys // 8) * 8  # so that all cases of this kernel read their bias 16 bytes at a time
    if kernel.bias and kernel.bias_layout == "padded":
        keys = keys | 1
    sequences: tuple[SequenceLengths, ...] = ()
    if kernel.is_variable_length:
        lengths = [(_some_length(rng), _some_length(rng)) for _ in range(int(rng.integers(1, 5)))]
        if kernel.is_decode:
            lengths = [(min(queries, max(query_lengths)), rows) for queries, rows in lengths]
        lengths.append((length(query_lengths), keys))  # the longest decides how a bias is read
        sequences = tuple(
            SequenceLengths(queries, rows, int(rng.integers(0, rows + 1)) if kernel.has_used_keys else None)
            for queries, rows in ((queries, min(rows, keys)) for queries, rows in lengths)
        )
    bias = kernel.bias
    if bias:
        bias = "".join(letter if letter == "k" or chance(0.7) else "1" for letter in bias)
        if "b" in kernel.gradients or kernel.bias_layout == "transposed":
            bias = kernel.bias  # the summed axes decide the machine code
    batch = int(_pick(rng, (1, 2, 3)))
    mask = _draw_mask(kernel, rng)
    queries = length(query_lengths)
    spec = ProblemSpec(
        kernel.dtype,
        kernel.head_dim,
        num_queries=queries,
        num_keys=keys,
        batch=batch,
        num_heads=heads,
        head_dim_value=kernel.head_dim_value,
        num_heads_key=heads // group,
        mask=mask,
        sequences=sequences,
        scale=float(_pick(rng, (0.0, 0.0, 0.1, -0.05))) or None,
        bias=bias,
        bias_gradient="sum" if "b" in kernel.gradients else "",
        dropout_p=float(_pick(rng, (0.1, 0.3, 0.9, TINY_DROPOUT, 1.0))) if kernel.has_dropout else 0.0,
        sinks=kernel.sinks,
        gradients=kernel.gradients if kernel.direction == "backward" else "",
        deterministic=kernel.deterministic,
    )
    philox_seed = int(rng.integers(0, 2**62))
    philox_offset = int(_pick(rng, (0, 4, 5, 2**34 + 3, 2**40)))
    on_device = chance(0.3)
    softcap = float(_pick(rng, (1.0, 4.0, 30.0))) if kernel.has_softcap else 0.0
    alibi = _pick(rng, ("h", "bh")) if kernel.has_alibi else ""
    has_splits = not kernel.deterministic and kernel.direction == "backward"
    splits = int(_pick(rng, (0, 0, 1, 2, 3))) if has_splits else 0
    return Case(
        kernel.direction,
        dataclasses.replace(
            spec,
            philox_on_device=on_device and kernel.has_dropout,
            softcap=softcap,
            alibi=alibi,
            num_splits_key=splits or None,
        ),
        layout=kernel.layout,
        bias_layout=kernel.bias_layout,
        philox_seed=philox_seed if kernel.has_dropout else 0,
        philox_offset=philox_offset if kernel.has_dropout else 0,
        seed=int(rng.integers(0, 2**31)),
    )


def _draw_e4m3_operands(kernel: np.random.Generator, rng: np.random.Generator) -> Case:
    """A forward of e4m3 operands. kernel: random numbers of what decides the machine code."""
    dims, mask = _pick(kernel, E4M3_DIMS), str(_pick(kernel, MASKS))
    is_grouped, is_ragged, has_used_keys = (bool(kernel.random() < share) for share in (0.4, 0.3, 0.4))
    is_float16, layout = bool(kernel.random() < 0.25), str(_pick(kernel, ALIGNED_LAYOUTS))
    group = int(_pick(rng, GROUPS)) if is_grouped else 1
    heads = group * int(_pick(rng, (1, 2)))
    queries, keys = (int(_pick(rng, E4M3_LENGTHS)) for _ in range(2))
    sequences: tuple[SequenceLengths, ...] = ()
    if is_ragged:
        lengths = [(queries, keys), *((_some_length(rng), _some_length(rng)) for _ in range(int(rng.integers(1, 5))))]
        sequences = tuple(
            SequenceLengths(rows, columns, int(rng.integers(0, columns + 1)) if has_used_keys else None)
            for rows, columns in lengths
        )
    spec = ProblemSpec(
        FLOAT8,
        int(dims[0]),
        num_queries=queries,
        num_keys=keys,
        batch=int(_pick(rng, (1, 2, 3))),
        num_heads=heads,
        head_dim_value=int(dims[1]),
        num_heads_key=heads // group,
        mask=_mask_of_form(mask, rng),
        sequences=sequences,
        scale=float(_pick(rng, (0.0, 0.0, 0.1))) or None,
        descale=str(_pick(rng, E4M3_GRAINS)),
        float16_output=is_float16,
    )
    case = Case("forward", spec, layout=layout, seed=int(rng.integers(0, 2**31)))
    return case.replace(inputs=str(_pick(rng, INPUTS)))


def _draw_shared_end(number: int, rng: np.random.Generator) -> Case:
    """A forward without a mask, with about as many query tiles as there are SMs, or more. number: of the kernel."""
    head_dim, head_dim_value = SHARED_END_DIMS[number % len(SHARED_END_DIMS)]
    dtype, is_grouped, layout = ("bfloat16", "float16")[number % 2], number % 4 > 1, LAYOUTS[number % len(LAYOUTS)]
    group = int(_pick(rng, GROUPS)) if is_grouped else 1
    heads = group * int(_pick(rng, (1, 2, 8)))
    return _draw_shared(
        "forward",
        layout,
        rng,
        dtype=dtype,
        head_dim=head_dim,
        num_queries=int(_pick(rng, SHARED_END_QUERIES)),
        num_keys=int(_pick(rng, SHARED_END_KEYS)),
        batch=ceil_div(int(_pick(rng, SHARED_END_BATCH_HEADS)), heads),
        num_heads=heads,
        head_dim_value=head_dim_value,
        num_heads_key=heads // group,
    )


def _draw_few_tiles(number: int, rng: np.random.Generator) -> Case:
    """A forward with few query tiles and many keys. number: of the kernel."""
    dtype, head_dim, mask, lengths, page_size, score_terms = FEW_TILES[number % len(FEW_TILES)]
    group = int(_pick(rng, GROUPS)) if number % 2 else 1
    heads, batch = group * int(_pick(rng, (1, 2))), int(_pick(rng, (1, 1, 2)))
    queries, keys = int(_pick(rng, FEW_TILES_QUERIES)), int(_pick(rng, FEW_TILES_KEYS))
    sequences: tuple[SequenceLengths, ...] = ()
    if lengths != "one":
        rows = [
            (queries, keys),
            *((int(rng.integers(0, queries + 1)), int(rng.integers(1, keys + 1))) for _ in range(2)),
        ]
        used = [int(rng.integers(0, count + 1)) if lengths == "used" else None for _, count in rows]
        sequences = tuple(SequenceLengths(*each, count) for each, count in zip(rows, used, strict=True))
    spec = ProblemSpec(
        dtype,
        head_dim,
        num_queries=queries,
        num_keys=keys,
        batch=len(sequences) or batch,
        num_heads=heads,
        num_heads_key=heads // group,
        mask=_mask_of_form(mask, rng),
        sequences=sequences,
        scale=float(_pick(rng, (0.0, 0.0, 0.1))) or None,
        page_size=page_size,
        **score_terms,
    )
    layout = "dense" if page_size else ALIGNED_LAYOUTS[number % len(ALIGNED_LAYOUTS)]
    return _with_inputs(Case("forward", spec, layout=layout, seed=int(rng.integers(0, 2**31))), rng)


def _draw_shared_queries(number: int, rng: np.random.Generator) -> Case:
    """A backward without a mask, with more key tiles than there are SMs. number: of the kernel."""
    head_dim = SHARED_QUERIES_DIMS[number % len(SHARED_QUERIES_DIMS)]
    dtype, has_sinks = ("bfloat16", "float16")[number % 2], number % 3 == 2
    layout = ALIGNED_LAYOUTS[number % len(ALIGNED_LAYOUTS)]
    group = int(_pick(rng, GROUPS)) if number % 4 > 1 else 1
    key_heads = int(_pick(rng, (1, 2, 5)))
    return _draw_shared(
        "backward",
        layout,
        rng,
        dtype=dtype,
        head_dim=head_dim,
        num_queries=int(_pick(rng, SHARED_QUERIES)) // group,
        num_keys=int(_pick(rng, SHARED_QUERIES_KEYS)),
        batch=ceil_div(int(_pick(rng, SHARED_QUERIES_BATCH_HEADS)), key_heads),
        num_heads=key_heads * group,
        num_heads_key=key_heads,
        sinks=has_sinks,
    )


def _draw_bias_backward(number: int, rng: np.random.Generator) -> Case:
    """A backward with a bias that the sm90 kernels take. number: of the kernel."""
    dtype, head_dim, mask, axes, gradient, lengths, others = BIAS_BACKWARD[number % len(BIAS_BACKWARD)]
    group = int(_pick(rng, GROUPS)) if number % 3 == 2 else 1
    key_heads, batch = int(_pick(rng, (1, 2))), int(_pick(rng, (1, 2, 5)))
    queries, keys = int(_pick(rng, BIAS_BACKWARD_QUERIES)), int(_pick(rng, BIAS_BACKWARD_KEYS))
    sequences: tuple[SequenceLengths, ...] = ()
    if lengths != "one":
        shorter = [(int(rng.integers(0, queries + 1)), int(rng.integers(0, keys + 1))) for _ in range(3)]
        sequences = tuple(SequenceLengths(*each) for each in ((queries, keys), *shorter))
    spec = ProblemSpec(
        dtype,
        head_dim,
        num_queries=queries,
        num_keys=keys,
        batch=len(sequences) or batch,
        num_heads=key_heads * group,
        num_heads_key=key_heads,
        mask=_mask_of_form(mask, rng),
        sequences=sequences,
        scale=float(_pick(rng, (0.0, 0.0, 0.1))) or None,
        bias=axes,
        bias_gradient=gradient,
        **others,
    )
    layout = ALIGNED_LAYOUTS[number % len(ALIGNED_LAYOUTS)]
    philox_seed = int(rng.integers(1, 2**62)) if spec.dropout_p else 0
    case = Case("backward", spec, layout=layout, philox_seed=philox_seed, seed=int(rng.integers(0, 2**31)))
    return _with_inputs(case, rng)


def _draw_ranges(number: int, rng: np.random.Generator) -> Case:
    """A problem with ranges of keys. number: of the kernel."""
    direction, place = DIRECTIONS[number % 2], number // 2
    head_dim, head_dim_value = RANGES_DIMS[direction][place % len(RANGES_DIMS[direction])]
    has_many = rng.random() < RANGES_MANY_SHARE
    group = int(_pick(rng, GROUPS)) if place % 3 == 1 else 1
    heads = group * int(_pick(rng, (1, 2, 3)))
    batch = 150 // heads if has_many else int(_pick(rng, (1, 2, 3)))
    spec = ProblemSpec(
        ("bfloat16", "float16")[place // 2 % 2],
        head_dim,
        num_queries=int(_pick(rng, RANGES_LENGTHS)),
        num_keys=int(_pick(rng, RANGES_LENGTHS)),
        batch=batch,
        num_heads=heads,
        head_dim_value=head_dim_value,
        num_heads_key=heads // group,
        mask=_mask_of_form(str(_pick(rng, RANGES_MASKS)), rng),
        scale=float(_pick(rng, RANGES_SCALES[direction])) or None,
        sinks=place % 5 == 3,
        grad_logsumexp=direction == "backward" and bool(rng.random() < 0.3),
        ranges=str(_pick(rng, RANGE_AXES)),
        range_family=str(_pick(rng, RANGE_FAMILIES)),
    )
    layout, range_layout = str(_pick(rng, ALIGNED_LAYOUTS)), str(_pick(rng, tuple(RANGE_LAYOUTS)))
    case = Case(direction, spec, layout=layout, range_layout=range_layout, seed=int(rng.integers(0, 2**31)))
    return _with_inputs(case, rng)


def _draw_function(number: int, rng: np.random.Generator) -> Case:
    """A problem with a mask function, within a band, ranges of keys or visible blocks. number: of the kernel."""
    direction, place = DIRECTIONS[number % 2], number // 2
    head_dim, head_dim_value = FUNCTIONS_DIMS[direction][place % len(FUNCTIONS_DIMS[direction])]
    has_many, has_blocks, has_ranges = rng.random() < RANGES_MANY_SHARE, place % 4 == 3, rng.random() < 0.3
    group = int(_pick(rng, GROUPS)) if place % 3 == 1 else 1
    heads = group * int(_pick(rng, (1, 2, 3)))
    lengths = FUNCTIONS_MANY_LENGTHS if has_many else FUNCTIONS_LENGTHS
    spec = ProblemSpec(
        ("bfloat16", "float16")[place // 2 % 2],
        head_dim,
        num_queries=int(_pick(rng, lengths)),
        num_keys=int(_pick(rng, lengths)),
        batch=150 // heads if has_many else int(_pick(rng, (1, 2, 3))),
        num_heads=heads,
        head_dim_value=head_dim_value,
        num_heads_key=heads // group,
        mask=_mask_of_form(str(_pick(rng, RANGES_MASKS)), rng),
        scale=float(_pick(rng, RANGES_SCALES[direction])) or None,
        sinks=place % 5 == 3,
        grad_logsumexp=direction == "backward" and bool(rng.random() < 0.3),
        ranges=str(_pick(rng, RANGE_AXES)) if has_ranges else "",
        range_family=str(_pick(rng, RANGE_FAMILIES)) if has_ranges else "",
        block_share=int(_pick(rng, BLOCK_SHARES)) if has_blocks else None,
        block_axes=str(_pick(rng, ("", "b", "h", "bh"))) if has_blocks else "",
        block_size=64 if has_blocks and place % 8 == 7 else 128,
        mask_function=[*FUNCTIONS][place % len(FUNCTIONS)],
    )
    layout, range_layout = str(_pick(rng, ALIGNED_LAYOUTS)), str(_pick(rng, tuple(RANGE_LAYOUTS)))
    case = Case(direction, spec, layout=layout, range_layout=range_layout, seed=int(rng.integers(0, 2**31)))
    return _with_inputs(case, rng)


def _draw_shared(direction: str, layout: str, rng: np.random.Generator, **fields: Any) -> Case:
    """A case without a mask, with these fields of its spec."""
    spec = ProblemSpec(**fields, scale=float(_pick(rng, (0.0, 0.0, 0.1, -0.05))) or None)
    return _with_inputs(Case(direction, spec, layout=layout, seed=int(rng.integers(0, 2**31))), rng)


def _draw_paged(kernel: np.random.Generator, rng: np.random.Generator) -> Case:
    """A forward with key and value in pages. kernel: random numbers of what decides the machine code."""
    dtype = str(_pick(kernel, ("float16", "bfloat16", "bfloat16", "float32")))
    head_dim = int(_pick(kernel, DECODE_DIMS.get(dtype, DECODE_DIMS_F32)))
    is_grouped, is_ragged = bool(kernel.random() < 0.7), bool(kernel.random() < 0.4)
    most_rows, mask = (
        int(_pick(kernel, PAGED_ROWS)),
        str(_pick(kernel, ("full", "full", "causal", "causal_br", "local"))),
    )
    has_softcap, has_alibi, has_sinks = (bool(kernel.random() < PAGED_TERMS_SHARE) for _ in range(3))
    group = int(_pick(rng, DECODE_GROUPS)) if is_grouped else 1
    heads = group * int(_pick(rng, (1, 2, 3)))
    most = max(most_rows // group, 1)
    least = most_rows // 2 // group + 1 if most_rows > min(PAGED_ROWS) else 1  # enough rows for the tile
    longest = int(rng.integers(least, most + 1)) if rng.random() < 0.6 else least
    count = PAGED_MANY if rng.random() < 0.1 else int(rng.integers(1, 6))
    lengths = []
    for number in range(count):
        keys = int(_pick(rng, PAGED_KEYS))
        stored = keys + int(_pick(rng, (0, 0, 1, 40, 700)))
        ragged = int(rng.integers(0, longest + 1)) if is_ragged and number else longest
        lengths.append(SequenceLengths(ragged, stored, keys))
    if is_ragged and all(each.num_queries == longest for each in lengths):
        lengths.append(SequenceLengths(longest - 1, 40, 7))
    spec = ProblemSpec(
        dtype,
        head_dim,
        num_heads=heads,
        num_heads_key=heads // group,
        mask=_mask_of_form(mask, rng),
        sequences=tuple(lengths),
        scale=float(_pick(rng, (0.0, 0.0, 0.1, -0.05))) or None,
        softcap=float(_pick(rng, (1.0, 4.0, 30.0))) if has_softcap else 0.0,
        alibi=str(_pick(rng, ("h", "bh"))) if has_alibi else "",
        sinks=has_sinks,
        page_size=int(_pick(rng, PAGED_SIZES)),
    )
    case = Case(
        "forward",
        spec,
        layout=str(_pick(rng, DECODE_LAYOUTS)),
        seed=int(rng.integers(0, 2**31)),
        table=str(_pick(rng, ("rows", "csr"))),
        invariant=int(most_rows == min(PAGED_ROWS) and rng.random() < 0.2),
    )
    return _with_inputs(case, rng)


def _draw_mla(kernel: np.random.Generator, rng: np.random.Generator) -> Case:
    """A forward of a latent cache, dense or in pages. kernel: random numbers of what decides the machine code."""
    dtype, mask = str(_pick(kernel, ("float16", "bfloat16"))), str(_pick(kernel, MASKS))
    is_paged, is_grouped = bool(kernel.random() < 0.7), bool(kernel.random() < 0.9)
    is_ragged = is_paged and bool(kernel.random() < 0.4)
    heads = int(_pick(rng, [number for number in MLA_HEADS if number > 1])) if is_grouped else 1
    longest, count = int(_pick(rng, MLA_QUERIES)), int(rng.integers(1, 6))
    lengths = []
    for number in range(count):
        keys = int(_pick(rng, PAGED_KEYS))
        ragged = int(rng.integers(0, longest + 1)) if is_ragged and number else longest
        lengths.append(SequenceLengths(ragged, keys + int(_pick(rng, (0, 0, 1, 40, 700))), keys))
    if is_ragged and all(each.num_queries == longest for each in lengths):
        lengths.append(SequenceLengths(longest - 1, 40, 7))
    spec = ProblemSpec(
        dtype,
        MLA_DIMS[0],
        num_queries=longest,
        num_keys=max(int(_pick(rng, PAGED_KEYS)), 1),
        batch=count,
        num_heads=heads,
        head_dim_value=MLA_DIMS[1],
        num_heads_key=1,
        mask=_mask_of_form(mask, rng),
        sequences=tuple(lengths) if is_paged else (),
        scale=float(_pick(rng, (0.0, 0.0, 0.07))) or None,
        page_size=int(_pick(rng, MLA_PAGES)) if is_paged else 0,
        value_in_key=True,
    )
    case = Case(
        "forward",
        spec,
        layout=str(_pick(rng, MLA_LAYOUTS)),
        seed=int(rng.integers(0, 2**31)),
        table=str(_pick(rng, ("rows", "csr"))) if is_paged else "rows",
        invariant=int(is_paged and rng.random() < 0.2),
    )
    case = _with_inputs(case, rng)
    return case.replace(e4m3_cache=True, descale="tile") if kernel.random() < MLA_CODES_SHARE else case


def _draw_e4m3_cache(kernel: np.random.Generator, rng: np.random.Generator, *, are_prompts: bool = False) -> Case:
    """A forward with an e4m3 cache. kernel: random numbers of what decides the machine code.

    are_prompts: with more queries than decode kernels take, always; else in a share of the kernels
    """
    has_row_scales, is_dense = (bool(kernel.random() < share) for share in (CACHE_ROWS_SHARE, CACHE_DENSE_SHARE))
    is_ragged = is_dense and not are_prompts and bool(kernel.random() < 0.5)
    is_prompt = are_prompts or (not is_ragged and bool(kernel.random() < CACHE_PROMPT_SHARE))
    case = _draw_paged(kernel, rng)
    spec = case.spec
    grain = "row" if has_row_scales else str(_pick(rng, E4M3_GRAINS))
    dtype = spec.dtype if spec.dtype != "float32" else "bfloat16"
    changes: dict[str, Any] = {"e4m3_cache": True, "descale": grain, "dtype": dtype}
    queries, sequences = spec.num_queries, spec.sequences
    if is_prompt:
        queries, is_varied = int(_pick(rng, CACHE_PROMPTS)), spec.has_ragged_queries
        counts = [queries - (number % 2 if is_varied else 0) for number in range(min(len(sequences), 5))]
        sequences = tuple(
            dataclasses.replace(each, num_queries=count) for each, count in zip(sequences, counts, strict=False)
        )
        changes |= {"sequences": sequences}
        case = case.replace(invariant=0)
    if is_dense:
        changes |= {"page_size": 0}
        case = case.replace(table="rows", invariant=0)
    if is_dense and not is_ragged:
        changes |= {"sequences": (), "batch": min(spec.batch, 5), "num_queries": queries}
        changes |= {"num_keys": max(spec.num_keys, 1)}
    return case.replace(**changes)


def _with_inputs(case: Case, rng: np.random.Generator) -> Case:
    """Inputs of the case, and sizes at which they show a fault that other inputs hide, see inputs.py."""
    spec, family = case.spec, str(_pick(rng, INPUTS))
    if spec.softcap and rng.random() < SATURATED_SHARE:
        family = "saturated"
    if spec.sinks and case.direction == "backward" and rng.random() < ONE_SIGN_SHARE:
        family = "one_sign"
    if spec.bias:
        case = case.replace(bias_inputs=str(_pick(rng, BIAS_INPUTS)))
    sharp = _with_one_key(case).replace(inputs="zero_scores", dropout_p=TINY_DROPOUT) if spec.dropout_p else case
    shows_factor = spec.dtype == "float32" and any(map(functools.partial(is_exact, sharp), ("output", "grad_value")))
    is_sharp = shows_factor and rng.random() < TINY_DROPOUT_SHARE
    return sharp if is_sharp else case.replace(inputs=family)


def _with_one_key(case: Case) -> Case:
    """The case with windows of one key; with a single key, and in a backward a single query, without a window."""
    spec, mask = case.spec, case.spec.mask
    if isinstance(mask, Window):
        return case.replace(mask=Window(0, 0))
    if isinstance(mask, Causal) and mask.window_size is not None:
        return case.replace(mask=dataclasses.replace(mask, window_size=1))
    is_single = case.direction == "backward"
    sequences = (
        SequenceLengths(
            min(each.num_queries, 1) if is_single else each.num_queries, 1, 1 if spec.has_used_keys else None
        )
        for each in spec.sequences
    )
    queries = 1 if is_single else spec.num_queries
    return case.replace(sequences=tuple(sequences), num_keys=1, num_queries=queries)


def _draw_mask(kernel: _Kernel, rng: np.random.Generator) -> Mask:
    return _mask_of_form(kernel.mask, rng)


def _mask_of_form(form: str, rng: np.random.Generator) -> Mask:
    window = int(_pick(rng, (1, 2, 17, 64, 200)))
    if form != "local":
        return parse_mask(form)
    right = int(_pick(rng, (0, 1, 40)))
    names = f"causal_window{window}", f"causal_br_window{window}", f"window_left{window}_right{right}"
    return parse_mask(_pick(rng, (*names, f"window_left{window}")))


def _some_length(rng: np.random.Generator) -> int:
    """The length of a sequence, sometimes zero."""
    return 0 if rng.random() < 0.15 else int(rng.integers(1, 140))


def cases(kernels: Iterable[int], runs: int) -> Iterator[Case]:
    """All cases of these kernel numbers."""
    for kernel in kernels:
        for run in range(runs):
            yield draw(kernel, run)


def builds(kernels: Iterable[int], runs: int, arch: str = ARCH) -> list[tuple[Build, ...]]:
    """Every kernel that those cases need, once; each with its fallbacks. Refused cases need none."""
    return builds_of((case for case in cases(kernels, runs) if case.needs_kernels), arch)
