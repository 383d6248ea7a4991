"""Tests of benchmark cases with pages: the forward alone, and kernels by their symbols."""

from __future__ import annotations

import pytest

from cutlass_py_attn.bench import cases
from cutlass_py_attn.cli.selection import directions_of
from cutlass_py_attn.cli.symbols import parse_symbol
from cutlass_py_attn.problem.spec import parse

CASE = parse("bf16_d128_q1_s8192_b64_h32k8_full_paged16")


def test_only_the_forward_is_measured() -> None:
    for spec in (CASE, parse("bf16_d128_s256_b2_h4_full_paged16")):  # as many queries as keys
        assert cases.directions(spec) == ("forward",)
        assert directions_of(spec) == ("forward",)
    for case in ("e4m3_d128_s512_b2_h4_causal", "bf16_d128_s512_b2_h4_causal_kv8"):
        assert directions_of(parse(case)) == ("forward",)


def test_bytes_are_those_of_the_dense_case() -> None:
    assert cases.bytes_read_once(CASE) == cases.bytes_read_once(CASE.replace(page_size=0))


@pytest.mark.parametrize(
    "symbol",
    [
        "fwd_decode_bf16_d128_full_grouped_paged_persistent_16x64",
        "fwd_decode_bf16_d128_full_grouped_paged_persistent_16x128",
        "fwd_decode_bf16_d128_causal_grouped_paged_sinks_varlen_persistent_32x64",
        "fwd_decode_f32_d64_local_alibi_paged_softcap_persistent_16x128",
    ],
)
def test_symbols_of_kernels_with_pages(symbol: str) -> None:
    assert parse_symbol(symbol, "sm_90").symbol == symbol
