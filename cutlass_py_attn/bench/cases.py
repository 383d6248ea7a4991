"""Benchmark cases: the problems that the benchmark measures, by name, and the kernels that they need.

A name is that of a `ProblemSpec`; problem/spec.py has the grammar. A case whose queries and keys differ in number
(`_q1_s8192_`, few-query decode) is measured forward only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Final

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem.quantization import SCALE_COLUMNS
from cutlass_py_attn.problem.spec import ProblemSpec
from cutlass_py_attn.problem.tensors import DIRECTIONS, F32_BYTES, OPERAND_BYTES
from cutlass_py_attn.suggestions import did_you_mean


def directions(spec: ProblemSpec) -> tuple[str, ...]:
    """The directions that are measured: forward alone for few queries against many keys, caches and e4m3 codes."""
    return ("forward",) if _is_decode(spec) or is_forward_only(spec) else DIRECTIONS


def is_forward_only(spec: ProblemSpec) -> bool:
    """Whether the problem has no backward: key and value are a cache, or operands are e4m3 codes."""
    return spec.page_size > 0 or spec.value_in_key or spec.has_codes


def bytes_read_once(spec: ProblemSpec) -> int:
    """Bytes of query, key, value and output in a forward of few queries, whose time they decide; 0 for other cases."""
    if not _is_decode(spec):
        return 0
    problem = spec.problem("forward")
    if spec.has_rope:  # codes, their scales, and columns of 16 bits
        rows, rope = math.prod(spec.shape.of("key")[:3]), spec.head_dim - spec.head_dim_value
        item = OPERAND_BYTES[spec.dtype]
        of_row = spec.head_dim_value + ceil_div(spec.head_dim_value, SCALE_COLUMNS) * F32_BYTES + rope * item
        return rows * of_row + item * sum(math.prod(spec.shape.of(name)) for name in ("query", "output"))
    names = ("query", "key", "output") if spec.value_in_key else ("query", "key", "value", "output")
    dtypes = {name: getattr(problem, name).dtype for name in names}
    return sum(math.prod(spec.shape.of(name)) * OPERAND_BYTES[dtype] for name, dtype in dtypes.items())


def flops(spec: ProblemSpec, direction: str) -> int:
    """`ProblemSpec.flops` of the keys that each sequence uses: the space behind them takes no work."""
    used = tuple(
        replace(each, num_keys=each.num_keys if each.used_keys is None else each.used_keys, used_keys=None)
        for each in spec.sequences
    )
    return replace(spec, sequences=used).flops(direction)


def _is_decode(spec: ProblemSpec) -> bool:
    return not spec.sequences and spec.num_queries != spec.num_keys


def plain_cases() -> tuple[str, ...]:
    """Names of attention with a mask and nothing else: 32768 rows in all, a quarter of that in float32."""
    names = []
    sizes = (("d64", 32), ("d128", 16))
    for dtype, (dim, heads), (seqlen, batch) in product(("bf16", "f16", "f32"), sizes, ((2048, 16), (8192, 4))):
        batches = batch // 4 if dtype == "f32" else batch
        names += [f"{dtype}_{dim}_s{seqlen}_b{batches}_h{heads}_{mask}" for mask in ("full", "causal")]
    return tuple(names)


_CAUSAL: Final = "bf16_d128_s8192_b4_h16_causal"
_FULL_4096: Final = "bf16_d128_s4096_b4_h16_full"
_DECODE: Final = "bf16_d128_q1_s8192_b64_h32k8_full"
_CHUNK: Final = "bf16_d128_q2048_s16384_b2_h32k8_causal_br"  # of long prompts
_FEW_QUERIES: Final = "bf16_d128_q512_s16384_b1_h8k2_causal_br"  # fewer query tiles than SMs
_LATENT: Final = "bf16_d576v512_q1_s8192_b64_h128k1_full_paged64_mla"
# Every other case, with the baseline whose rate in the same run its rate is divided by; "" for none.
FEATURE_CASES: Final[dict[str, str]] = {
    "bf16_d256_s8192_b4_h8_full": "",
    "bf16_d256_s8192_b4_h8_causal": "",
    "bf16_d320_s8192_b1_h16_full": "",
    "bf16_d384_s8192_b1_h16_full": "",
    "bf16_d512_s4096_b2_h8_full": "",
    "bf16_d512_s8192_b1_h16_full": "",
    "bf16_d512_s8192_b1_h16_causal": "",
    "f32_d256_s2048_b4_h8_full": "",
    "e4m3_d64_s8192_b4_h32_full": "bf16_d64_s8192_b4_h32_full",
    "e4m3_d64_s8192_b4_h32_causal": "bf16_d64_s8192_b4_h32_causal",
    "e4m3_d128_s8192_b4_h16_full": "bf16_d128_s8192_b4_h16_full",
    "e4m3_d128_s8192_b4_h16_causal": _CAUSAL,
    "e4m3_d256_s8192_b4_h8_full": "bf16_d256_s8192_b4_h8_full",
    "e4m3_d256_s8192_b4_h8_causal": "bf16_d256_s8192_b4_h8_causal",
    "bf16_d32_s8192_b4_h32_causal": "",
    "bf16_d96_s8192_b4_h16_full": "",
    "bf16_d96_s8192_b4_h16_causal": "",
    "bf16_d192_s8192_b4_h10_full": "",
    "bf16_d192v128_s8192_b4_h10_causal": "",
    "bf16_d192v128_s8192_b4_h16_causal": "",
    "bf16_d64_s16384_b2_h32_causal": "",
    "bf16_d128_s512_b64_h16_full": "",
    "bf16_d128_s512_b64_h16_causal": "",
    _FULL_4096: "",
    f"{_FULL_4096}_bias": _FULL_4096,
    f"{_FULL_4096}_biasgrad": _FULL_4096,
    f"{_FULL_4096}_biassum": _FULL_4096,
    f"{_FULL_4096}_softcap30": _FULL_4096,
    f"{_FULL_4096}_alibi": _FULL_4096,
    f"{_FULL_4096}_sinks": _FULL_4096,
    "bf16_d128_s2048_b16_h16_full_dropout0.1": "bf16_d128_s2048_b16_h16_full",
    "bf16_d128_s16384_b2_h16_full": "",
    "bf16_d128_s16384_b2_h16_causal": "",
    "bf16_d128_s16384_b2_h16_causal_window1024": "bf16_d128_s16384_b2_h16_causal",
    _FEW_QUERIES: "",
    f"{_FEW_QUERIES}_paged64": _FEW_QUERIES,
    "bf16_d128_q512_s8192_b1_h4_full": "",
    "bf16_d64_q512_s8192_b1_h8_causal_br": "",
    "bf16_d128_s2048_b1_h4_full": "",
    "bf16_d64_s2048_b1_h16k4_full": "",
    "bf16_d128_s4096_b16_h16_causal": "",
    "bf16_d64_s4096_b16_h32_causal": "",
    "bf16_d64_s16384_b2_h32_causal_window1024": "bf16_d64_s16384_b2_h32_causal",
    "bf16_d128_s8192_b4_h16_full_ranges11causal": _CAUSAL,
    "bf16_d128_s8192_b4_h16_full_ranges11prefix1024": _CAUSAL,
    "bf16_d128_s16384_b2_h16_full_ranges11window1024": "bf16_d128_s16384_b2_h16_causal_window1024",
    "bf16_d128_s65536_b1_h16_causal_ranges11documents4096": "bf16_d128_s4096_b16_h16_causal",
    "bf16_d64_s8192_b4_h32_full_ranges11causal": "bf16_d64_s8192_b4_h32_causal",
    "bf16_d64_s8192_b4_h32_full_ranges11prefix1024": "bf16_d64_s8192_b4_h32_causal",
    "bf16_d64_s16384_b2_h32_full_ranges11window1024": "bf16_d64_s16384_b2_h32_causal_window1024",
    "bf16_d64_s65536_b1_h32_causal_ranges11documents4096": "bf16_d64_s4096_b16_h32_causal",
    "bf16_d128_s8192_t65536_h16_causal": _CAUSAL,
    "bf16_d128_s8192_b2_h32k4_causal": _CAUSAL,
    "bf16_d128_s8192_b4_h16_full_deterministic": "bf16_d128_s8192_b4_h16_full",
    f"{_CAUSAL}_deterministic": _CAUSAL,
    "bf16_d64_s8192_b4_h32_causal_deterministic": "bf16_d64_s8192_b4_h32_causal",
    _DECODE: "",
    "bf16_d128_q1_s8192_b8_h32k8_full": "",
    "bf16_d128_q1_s8192_b1_h32k8_full": "",
    "bf16_d128_q1_s131072_b1_h32k8_full": "",
    "bf16_d128_q1_s8192_b16_h32_full": "",
    "bf16_d128_q16_s8192_b64_h32k8_full": "",
    "bf16_d64_q1_s8192_b64_h32k8_full": "",
    "bf16_d256_q1_s8192_b32_h32k8_full": "",
    "f32_d128_q1_s8192_b16_h32k8_full": "",
    f"{_DECODE}_paged16": _DECODE,
    f"{_DECODE}_paged1": f"{_DECODE}_paged16",
    f"{_DECODE}_paged16_kv8": f"{_DECODE}_paged16",
    "bf16_d128_q1_s8192_b8_h32k8_full_paged16": "bf16_d128_q1_s8192_b8_h32k8_full",
    "bf16_d128_q1_s8192_b1_h32k8_full_paged16": "bf16_d128_q1_s8192_b1_h32k8_full",
    f"bf16_d128_n{','.join(['1x131072u8192'] * 8)}_h32k8_full_paged16": "bf16_d128_q1_s8192_b8_h32k8_full_paged16",
    "bf16_d128_q1_s1024_b256_h32k8_full_paged16": "",
    "bf16_d128_q1_s1024_b256_h32k8_full_paged16_kv8": "bf16_d128_q1_s1024_b256_h32k8_full_paged16",
    "bf16_d128_q1_s131072_b1_h32k8_full_paged16": "bf16_d128_q1_s131072_b1_h32k8_full",
    "bf16_d128_q1_s131072_b1_h32k8_full_paged16_kv8": "bf16_d128_q1_s131072_b1_h32k8_full_paged16",
    "bf16_d128_q4_s8192_b64_h32k8_causal_br_paged16": "",
    "bf16_d128_q8_s8192_b64_h32k8_causal_br_paged16": "",
    "bf16_d128_q16_s8192_b64_h32k8_causal_br_paged16": "",
    _CHUNK: "",
    f"{_CHUNK}_paged128": _CHUNK,
    f"{_CHUNK}_paged64": _CHUNK,
    f"{_CHUNK}_paged16": _CHUNK,
    f"{_CHUNK}_paged64_kv8": f"{_CHUNK}_paged64",
    "bf16_d576v512_q1_s8192_b64_h128k1_full_mla": "",
    _LATENT: "",
    f"{_LATENT}_kv8_descaletile": _LATENT,
    "bf16_d576v512_q1_s8192_b64_h16k1_full_mla": "",
    "bf16_d576v512_q1_s4096_b132_h64k1_full_mla": "",
    "bf16_d576v512_q1_s4096_b132_h64k1_full_mla_kv8_descaletile": "bf16_d576v512_q1_s4096_b132_h64k1_full_mla",
}


def default_cases() -> tuple[str, ...]:
    """Names of the published set."""
    return (*plain_cases(), *FEATURE_CASES)


def select(names: Iterable[str], only: str) -> tuple[str, ...]:
    """The names that match the regular expression `only` somewhere; of the published set if there are no names."""
    try:
        pattern = re.compile(only)
    except re.error as error:
        raise NotSupported(f"only = {only!r}: must be a regular expression ({error}); correct it") from error
    listed = tuple(names) or default_cases()
    found = tuple(name for name in listed if pattern.search(name))
    if not found:
        suggestion = did_you_mean(only, _parts(listed), "use a part of a name")
        raise NotSupported(f"only = {only!r}: matches none of {', '.join(listed)}; {suggestion}")
    return found


def _parts(names: Iterable[str]) -> Iterator[str]:
    """Yields the names, and their words."""
    for name in names:
        yield name
        yield from name.split("_")


def builds(specs: Iterable[ProblemSpec], compute_capability: tuple[int, int]) -> list[tuple[Build, ...]]:
    """Every kernel that these cases need on a device, once; each with the kernels to fall back to if ptxas spills.

    NotSupported if a case cannot be planned.
    """
    problems = (spec.problem(direction) for spec in specs for direction in directions(spec))
    return list(dict.fromkeys(planner.builds_on(problem, compute_capability) for problem in problems))
