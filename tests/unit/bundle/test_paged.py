"""Tests of bundles of caches in pages: their inputs and arrays, and the rules of other sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cutlass_py_attn.launch import expressions
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem.spec import parse
from tests.support import bundles

CASE = "bf16_d128_q1_s1000_b65_h32k8_full_paged8"
PREFILL = "bf16_d128_n500x900,300x400_h8k2_causal_br_paged16"
RAGGED = "bf16_d128_n5x900,3x20_h8k2_causal_br_sinks_paged16"


def target_of(tmp_path: Path, case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the forward of a bundle, and its target."""
    bundle = bundles.export(tmp_path / "bundle", "forward", archs=("sm_90",), case=case)
    forward: dict[str, Any] = bundle.manifest["problems"][0]
    (target,) = forward["targets"]
    return forward, target


def test_pools_and_table_are_named(tmp_path: Path) -> None:
    forward, target = target_of(tmp_path, CASE)
    arrays = forward["pointers"]
    assert arrays["key"]["shape"] == ["num_pages", "page_size", "num_heads_key", "128"]
    assert arrays["key"]["strides"] == ["key_page", "key_row", "key_head", "1"]
    assert arrays["page_table"]["shape"] == ["batch", "max_pages"]
    assert arrays["page_table"]["strides"] == ["page_table_row", "1"]
    assert arrays["seqused_k"]["shape"] == ["batch"]
    sources = {field["name"]: field for field in target["struct"]["fields"]}
    assert sources["page_table"]["pointer"] == "page_table"
    assert sources["page_size"]["rule"] == "page_size"
    assert sources["num_teams"]["value"] == target["plan"]["launches"][0]["grid"][0] // 8


@pytest.mark.parametrize(
    ("grain", "shape", "strides"),
    [
        ("tensor", ["1"], ["1"]),
        ("head", ["num_heads_key"], ["key_scale_head"]),
        ("batch", ["batch", "num_heads_key"], ["key_scale_batch", "key_scale_head"]),
        (
            "row",
            ["num_pages", "page_size", "num_heads_key"],
            ["key_scale_page", "key_scale_row", "key_scale_head"],
        ),
    ],
)
def test_scales_of_e4m3_codes_are_arrays(tmp_path: Path, grain: str, shape: list[str], strides: list[str]) -> None:
    forward, target = target_of(tmp_path, f"{CASE}_kv8_descale{grain}")
    found = forward["pointers"]["key_scale"]
    assert (found["dtype"], found["shape"], found["strides"]) == ("float32", shape, strides)
    assert forward["pointers"]["key"]["dtype"] == "float8_e4m3fn"
    sources = {field["name"]: field for field in target["struct"]["fields"]}
    assert sources["value_scale"]["pointer"] == "value_scale"
    given = {name: sources[name]["rule"] for name in sources if name.startswith("key_scale_")}
    assert given == {name: name if name in strides else "0" for name in given}
    conditions = {condition["rule"] for condition in target["conditions"]}
    assert "mod(step(num_pages, key_page, 0), 16) == 0" in conditions  # codes of one copy


def test_packed_queries_have_bounds(tmp_path: Path) -> None:
    forward, _ = target_of(tmp_path, RAGGED)
    assert forward["pointers"]["cu_seqlens_q"]["shape"] == ["batch + 1"]
    assert forward["pointers"]["query"]["shape"] == ["1", "tokens_q", "num_heads", "128"]
    assert "tokens_k" not in forward["inputs"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"page_size": 12}, "page_size must be a power of two"),
        ({"num_keys": 992}, "num_keys must be max_pages * page_size"),
        ({"table_entries": 3}, "table_entries must be batch * max_pages"),
        ({"num_pages": 0}, "num_pages must be at least 1"),
        ({"num_queries": 64}, "num_queries * group must be at most 128"),
        ({"key_page": 8193}, "key_page must be a multiple of 8 elements"),
    ],
)
def test_rules_refuse_other_sizes(tmp_path: Path, changes: dict[str, int], says: str) -> None:
    forward, target = target_of(tmp_path, CASE)
    names = {name: item["value"] for name, item in forward["inputs"].items()} | {"num_sms": 132} | changes
    for item in target["definitions"]:
        names[item["name"]] = expressions.parse(item["rule"]).evaluate(names)
    rules = (*target["conditions"], *target["limits"])
    assert says in [item["says"] for item in rules if not expressions.parse(item["rule"]).evaluate(names)]


def test_rules_give_the_plans_of_other_sizes(tmp_path: Path) -> None:
    forward, target = target_of(tmp_path, CASE)
    other = parse("bf16_d128_q4_s131072_b64_h32k8_full_paged64").problem("forward")
    plan = planner.plan(other, "sm_90")
    names = {name: item["value"] for name, item in forward["inputs"].items()} | {"num_sms": 132}
    names |= {"batch": 64, "num_queries": 4, "num_keys": 131072, "page_size": 64, "max_pages": 2048}
    for item in target["definitions"]:
        names[item["name"]] = expressions.parse(item["rule"]).evaluate(names)
    grids = [
        [expressions.parse(rule).evaluate(names) for rule in launch["grid_rules"]] for launch in target["launches"]
    ]
    assert grids == [list(launch.grid) for launch in plan.launches]
    sizes = [expressions.parse(part["bytes_rule"]).evaluate(names) for part in target["workspace"]["buffers"]]
    assert sizes == [buffer.bytes for buffer in plan.workspace.buffers]


def test_a_problem_that_needs_no_combine_kernel_is_exported(tmp_path: Path) -> None:
    """Its launches are those of a problem that does, but for the grids: calls of other sizes need the kernel."""
    small, large = (
        target_of(tmp_path / case, case)[1]
        for case in (CASE.replace("s1000_b65", sizes) for sizes in ("s8_b1", "s9000_b1"))
    )
    assert [launch["grid"] != [0, 0, 0] for launch in small["launches"]] == [True, False]
    for launch, wanted in zip(small["launches"], large["launches"], strict=True):
        assert {**launch, "grid": 0} == {**wanted, "grid": 0}


def test_no_number_of_a_launch_is_narrowed(tmp_path: Path) -> None:
    """Entries of a table are counted in 32 bits; the map of packed rows steps around the address space."""
    forward, target = target_of(tmp_path / "dense", CASE)
    names = {name: item["value"] for name, item in forward["inputs"].items()}
    names |= {
        "batch": 65535,
        "max_pages": 2**16,
        "num_keys": 2**16 * names["page_size"],
        "table_entries": 65535 * 2**16,
    }
    failing = [item["says"] for item in target["conditions"] if not expressions.parse(item["rule"]).evaluate(names)]
    assert failing == ["table_entries must be at most 2147483647; call once for each slice"]
    bundle = bundles.export(tmp_path / "packed", "forward", archs=("sm_90a",), case=PREFILL)
    forward = bundle.manifest["problems"][0]
    (target,) = forward["targets"]
    names = {name: item["value"] for name, item in forward["inputs"].items()}
    (last,) = [map_["stride_rules"][-1] for map_ in target["launches"][0]["tensor_maps"] if map_["pointer"] == "query"]
    for row, says in ((2**33 - 8, []), (2**33, ["query_row must be less than 8589934592 elements: a tensor map has "
                                                "2^30 such rows"])):  # fmt: skip
        names["query_row"] = row
        assert (expressions.parse(last).evaluate(names) > 0) == (says == [])
        assert [it["says"] for it in target["conditions"] if not expressions.parse(it["rule"]).evaluate(names)] == says
