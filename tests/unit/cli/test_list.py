"""Tests of `list`, `cache` and the options that name a problem: which kernels they show, without compiling."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from click.testing import CliRunner, Result

from cutlass_py_attn.artifact import Folder
from cutlass_py_attn.bench import harness
from cutlass_py_attn.cli import artifacts, catalogue, run_gpu, target
from cutlass_py_attn.cli.group import group
from cutlass_py_attn.cli.selection import problems
from cutlass_py_attn.cli.symbols import parse_symbol
from cutlass_py_attn.cli.target import Gpu
from cutlass_py_attn.compilation.cache import Cache
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.inspection import sass
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem.serialize import to_json
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.testing import guarded_check
from tests.support import fakes

GPU = Gpu("Toy", (9, 0), 4, 1, "sm_90")
PROBLEMS = (
    "bf16_d64_s2048_b2_h4k2_causal_br",
    "f16_d64_s2048_b2_h4_causal_br_window64",
    "bf16_d64_s2048_b2_h4_window_left100_right3",
    "bf16_d64_n70x200u30,130_h4k2_causal_br",
    "bf16_d64_n1x8192u4000,1x300_h8k2_causal_br",
)


def invoke(*arguments: object) -> Result:
    """Runs `cutlass-py-attn`; the result's output holds stderr too."""
    return CliRunner().invoke(group, [str(argument) for argument in arguments])


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, whatever this one has."""
    for module in ("run", "target"):
        monkeypatch.setattr(f"cutlass_py_attn.cli.{module}.first_gpu", lambda: None)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up artifacts in place of compiled ones."""
    monkeypatch.setattr(artifacts, "compiler", lambda: lambda build: (fakes.artifact(build), "0.5 s"))
    monkeypatch.setattr(sass, "tool", lambda: None)


def listed(*patterns: str) -> list[dict[str, str]]:
    """Returns what `list` prints as JSON."""
    done = invoke("list", *patterns, "--json")
    assert done.exit_code == 0, done.output
    found: list[dict[str, str]] = json.loads(done.output)
    return found


# list


@pytest.mark.usefixtures("few_kernels")
def test_every_listed_symbol_names_its_kernel() -> None:
    rows = listed()
    assert len({(row["symbol"], row["arch"]) for row in rows}) == len(rows) > 50
    assert {row["arch"] for row in rows} == {"sm_90a", "sm_90"}
    for row in rows[::7]:
        assert parse_symbol(row["symbol"], row["arch"]).symbol == row["symbol"]


@pytest.mark.usefixtures("few_kernels")
def test_patterns_choose_symbols_and_descriptions() -> None:
    assert {row["symbol"] for row in listed("bwd_sm90_*_full*", "bf16")} == {
        "bwd_sm90_bf16_d128_full_ds_registers_64x128",
        "bwd_sm90_bf16_d128_full_64x64",
        "bwd_sm90_bf16_d128_full_per_head_64x128",
    }
    assert all("window" in row["serves"] and row["symbol"].startswith("fwd") for row in listed("fwd", "window"))
    (short,) = listed("short sequences", "bf16", "causal")
    assert short["serves"] == "backward, bfloat16, head dim 128, causal, short sequences"
    (few,) = listed("few queries and many keys", "bf16", "causal")
    assert few["serves"] == "forward, bfloat16, head dim 128, causal, few queries and many keys"
    assert len(listed("decode", "--arch", "sm_80")) > 5
    table = invoke("list", "fwd_sm80_bf16_d128_causal").output.splitlines()
    assert table[0].split() == ["symbol", "target", "serves"]
    assert table[1].split("  ")[-1].strip() == "forward, bfloat16, head dim 128, causal"
    assert table[2].startswith("1 kernel. These serve common problems.")


def test_both_backwards_of_grouped_heads_are_listed() -> None:
    rows = listed("bwd_sm90_bf16_d128_causal_grouped*", "--arch", "sm_90a")
    found = {row["symbol"]: row["serves"] for row in rows}
    assert found == {
        "bwd_sm90_bf16_d128_causal_grouped_ds_registers_64x128": (
            "backward, bfloat16, head dim 128, causal, grouped heads"
        ),
        "bwd_sm90_bf16_d128_causal_grouped_query_heads_64x128": (
            "backward, bfloat16, head dim 128, causal, grouped heads, few key tiles"
        ),
    }


def test_what_a_kernel_serves() -> None:
    texts = {
        "bf16_d192v128_s1024_b1_h4k2_full_biasgrad_deterministic": (
            "backward, bfloat16, head dim 192, of value 128, no mask, bias, grouped heads, "
            "gradients of query and key and value and bias, deterministic"
        ),
        "f32_d64_n100,50x70u30_h1_causal_alibi": (
            "backward, float32, head dim 64, causal, ALiBi, seqused_k, variable length"
        ),
    }
    for name, text in texts.items():
        assert catalogue.serves(planner.plan(parse(name).problem("backward"), "sm_80").build) == text
    (decode,) = listed("bf16_d64_q1_s8192_b1_h8k2_full")
    assert decode["serves"].endswith("grouped heads, up to 16 queries of 256 keys or more")
    assert catalogue.serves(parse_symbol("grad_v_sm80_f16_d64", "sm_80").build) == (
        "one product of attention alone, float16, head dim 64"
    )


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_name_of_a_problem_lists_its_kernels(name: str) -> None:
    found = problems([name])
    assert [row["symbol"] for row in listed(name)] == [planner.plans_on(problem, (9, 0))[0].symbol for problem in found]
    assert [problem.direction for problem in found] == ["forward", "backward"][: 1 if "n1x8192" in name else 2]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("bf16_d64_s2048_b2_h4_casual", "'casual' is no word of the grammar; did you mean causal?"),
        ("bf16_d64_s2048_b2_h4", "mask"),
        ("bf16_d64_s2048_b2_h4_causal.json", "inspect and build take files"),
        ("append_bf16_dim64", "did you mean append_sm80_bf16_d64"),
    ],
)
@pytest.mark.usefixtures("few_kernels")
def test_a_mistyped_problem_is_answered_as_a_problem(pattern: str, words: str) -> None:
    done = invoke("list", pattern)
    assert done.exit_code == 1
    assert words in done.output


@pytest.mark.usefixtures("no_compiler")
def test_a_narrow_terminal_shows_whole_symbols(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("COLUMNS", "80")
    name = "bf16_d64_n1x8192u4000,1x300_h8k2_causal_br"
    (symbol,) = (row["symbol"] for row in listed(name))
    assert len(symbol) > 50
    for arguments in (
        ("list", name),
        ("inspect", "--problem", name, "--no-steps"),
        ("build", "--problem", name, "--arch", "sm_90", "-o", tmp_path),
    ):
        done = invoke(*arguments)
        assert (done.exit_code, symbol in done.output) == (0, True), done.output


# Problems by name in every command


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    ("name", "symbol"),
    [
        ("append_bf16_d64", "append_sm80_bf16_d64_16x8"),
        ("append_f32_d64_e4m3_row", "append_sm80_f32_d64_e4m3_row_8x16"),
        ("append_bf16_d512v64_e4m3_tile", "append_sm80_bf16_d512v64_e4m3_tile_4x32"),
        ("merge_f16_d64_varlen", "merge_sm80_f16_d64_varlen_16x8"),
    ],
)
def test_commands_take_appends_and_merges(name: str, symbol: str, tmp_path: Path) -> None:
    """Their kernels for sm_90a are those of sm_90, where a launch looks for them; `run` and mistakes are refused."""
    assert [(row["symbol"], row["arch"]) for row in listed(name)] == [(symbol, "sm_90")]
    assert json.loads(invoke("inspect", "--problem", name, "--json").output)["symbol"] == symbol
    for number, options in enumerate((("--problem", name), ("--symbol", symbol))):
        done = invoke("build", *options, "--arch", "sm_90a", "-o", tmp_path / str(number))
        assert done.exit_code == 0, done.output
        assert [path.name for path in (tmp_path / str(number) / "sm_90").glob("*.cubin")] == [f"{symbol}.cubin"]
    wrong = invoke("build", "--problem", f"{name}x", "--arch", "sm_90", "-o", tmp_path / "wrong")
    assert "write it like append_bf16_d128" in wrong.output
    ran = invoke("run", "--problem", name)
    assert (ran.exit_code, "must be a problem of attention" in ran.output) == (1, True)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_command_takes_the_problem(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_ = problems([name])
    symbol = planner.plan(first, "sm_80").symbol
    options = ("--problem", name, "--arch", "sm_80")
    shown = invoke("inspect", *options, "--no-steps", "--json")
    assert json.loads(shown.output)["symbol"] == symbol
    assert invoke("build", *options, "-o", tmp_path / "built").exit_code == 0
    assert Folder(tmp_path / "built")(planner.plan(first, "sm_80").build).build.symbol == symbol
    rows = json.loads(invoke("run", *options, "--json").output)
    assert symbol in {row["kernel"] for row in rows["kernels"]}
    measured: list[str] = []
    monkeypatch.setattr(harness.driver, "device", lambda ordinal: GPU)
    monkeypatch.setattr(harness, "measure", lambda spec, *_, **__: measured.append(spec.name) or ())
    assert invoke("bench", "--case", name).exit_code == 0
    assert measured == [parse(name).name]
    pytest.importorskip("jinja2")
    exported = invoke("export", *options, "--direction", "forward", "-o", tmp_path / "bundle")
    assert (exported.exit_code, symbol in exported.output) == (0, True), exported.output


@pytest.mark.usefixtures("no_compiler")
def test_inspect_takes_a_direction_or_a_file(tmp_path: Path) -> None:
    def symbol(*options: object) -> str:
        done = invoke("inspect", *options, "--no-steps", "--json")
        assert done.exit_code == 0, done.output
        return str(json.loads(done.output)["symbol"])

    name = "bf16_d64_s2048_b2_h4_causal"
    assert symbol("--problem", name).startswith("fwd_sm90_")
    assert symbol("--problem", name, "--direction", "backward").startswith("bwd_sm90_")
    file = tmp_path / "problem.json"
    file.write_text(json.dumps(to_json(parse(name).problem("backward"))))
    assert symbol("--problem", file, "--arch", "sm_80").startswith("bwd_sm80_")
    wrong = invoke("inspect", "--problem", file, "--direction", "forward")
    assert (wrong.exit_code, wrong.output) == (1, f"Error: {file}: has no forward; leave --direction out\n")
    for arguments in (
        (),
        ("fwd_sm80_bf16_d64_full", "--problem", name),
        ("fwd_sm80_f16_d64_full", "--direction", "forward"),
    ):
        assert invoke("inspect", *arguments).exit_code == 2


@pytest.mark.usefixtures("no_compiler")
def test_inspect_of_a_problem_takes_the_first_plan_that_compiles(tmp_path: Path) -> None:
    """As a call does; here the folder holds the second plan alone."""
    problem = parse("bf16_d64_s2048_b2_h4_causal").problem("forward")
    first, second, *_ = planner.plans(problem, "sm_80")
    Folder(tmp_path).put(fakes.artifact(second.build))
    done = invoke(
        "inspect", "--problem", "bf16_d64_s2048_b2_h4_causal", "--arch", "sm_80", "--kernels", tmp_path,
        "--no-steps", "--json",
    )  # fmt: skip
    assert json.loads(done.output)["symbol"] == second.symbol != first.symbol


def test_few_queries_are_a_forward_and_a_direction_overrides_that() -> None:
    few, cross = "bf16_d64_q16_s8192_b1_h1_full", "bf16_d64_q17_s8192_b1_h1_full"
    assert [problem.direction for problem in problems([few, cross])] == ["forward", "forward", "backward"]
    assert [problem.direction for problem in problems([few], ("backward",))] == ["backward"]
    with pytest.raises(NotSupported, match="did you mean"):
        problems(["bf16_d64_q16_s8192_b1_h1_ful"])


# run --problem on a GPU, with the reference in the kernels' place


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_run_checks_and_times_a_problem(
    factor: float, monkeypatch: pytest.MonkeyPatch, no_compiler: None, driver_log: Any
) -> None:
    def launch(case: Any, expected: Any, kernels: Any) -> guarded_check.Launched:
        truth = expected.truth.items()
        found = {name: (value * factor).astype(expected.low[name].dtype) for name, value in truth}
        return guarded_check.Launched(found, planner.plan(case.problem(), "sm_80").build)

    monkeypatch.setattr(guarded_check, "launch", launch)
    monkeypatch.setattr(run_gpu, "CHECKED_LENGTH", 24)
    monkeypatch.setattr("cutlass_py_attn.cli.run.first_gpu", lambda: GPU)
    monkeypatch.setattr("cutlass_py_attn.cli.run.artifact_for", fakes.artifact)
    name = "f32_d16_q70_s90_b3_h4k2_causal_br_sinks"
    done = invoke("run", "--problem", name, "--json")
    found = json.loads(done.output)
    assert [item["timing"]["direction"] for item in found["results"]] == ["forward", "backward"]
    assert set(found["results"][1]["ratios"]) == {"grad_query", "grad_key", "grad_value", "grad_sinks"}
    assert {item["checked"] for item in found["results"]} == {"f32_d16_s24_b1_h2k1_causal_br_sinks"}
    assert (done.exit_code, found["passed"]) == ((0, True) if factor == 1 else (1, False))
    table = invoke("run", "--problem", name).output
    assert ("FAILED" in table) == (factor != 1)
    assert table.count(name) == 2


def test_run_writes_ranges_of_keys_and_times_their_pairs(
    monkeypatch: pytest.MonkeyPatch, no_compiler: None, driver_log: Any
) -> None:
    def launch(case: Any, expected: Any, kernels: Any) -> guarded_check.Launched:
        assert {"key_start", "key_end"} <= set(expected.arrays)
        found = {name: value.astype(expected.low[name].dtype) for name, value in expected.truth.items()}
        return guarded_check.Launched(found, planner.plan(case.problem(), "sm_90a").build)

    monkeypatch.setattr(guarded_check, "launch", launch)
    monkeypatch.setattr(run_gpu, "CHECKED_LENGTH", 24)
    spec = parse("bf16_d64_q70_s90_b3_h4k2_causal_rangesb1runs")
    for result in run_gpu.run_problem(spec, fakes.artifact):
        assert result.passed
        assert result.symbol == planner.plan(spec.problem(result.timing.direction), "sm_90a").symbol
        work = spec.flops(result.timing.direction)
        assert result.timing.tflops == pytest.approx(work / result.timing.milliseconds / 1e9)


def test_reduced_sizes_keep_the_features() -> None:
    name = "bf16_d64_n1x8192u4000,1x300,2x9,3x9,4x9_h8k2_causal_br_biasgrad_alibib_splits1"
    reduced = run_gpu.reduced_sizes(parse(name))
    assert reduced.name == "bf16_d64_n1x1024u1024,1x300u300,2x9u9,3x9u9_h4k1_causal_br_biasgrad_alibib_splits1"
    ranges = run_gpu.reduced_sizes(parse("bf16_d64_s8192_b2_h8k2_causal_rangesbhdocuments100"))
    assert ranges.name == "bf16_d64_s1024_b1_h4k1_causal_rangesbhdocuments100"
    assert run_gpu.reduced_sizes(parse("bf16_d64_q1_s8192_b64_h32k8_full")).name == "bf16_d64_q1_s1024_b1_h4k1_full"


def test_a_write_outside_of_the_tensors_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: Any) -> Any:
        raise AssertionError("a guard changed")

    monkeypatch.setattr(guarded_check, "launch", launch)
    case = run_gpu.Case("forward", parse("f32_d16_s8_b1_h1_full"))
    assert run_gpu._ratios(case, fakes.artifact) == {"output": float("inf"), "logsumexp": float("inf")}


# cache


def test_cache_shows_and_clears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.core.utils")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "cutlass_py_attn"
    assert invoke("cache", "show").output == f"0 kernels, 0.0 of at most 1024 MiB, in {folder}\n"
    assert invoke("cache", "clear").output == f"0 entries deleted from {folder}\n"
    assert not folder.exists()
    plan = parse_symbol("fwd_sm80_f32_d64_full", "sm_80")
    Cache().put(replace(fakes.artifact(plan.build), toolchain="compiler 1"))
    Cache().put_findings(plan.build, "compiler 2", "spills")
    shown = invoke("cache", "show").output.splitlines()
    assert shown[1].split() == [plan.symbol, "sm_80", "compiler", "1", shown[1].split()[-1]]
    assert shown[2].startswith("1 kernel, ")
    report = json.loads(invoke("cache", "show", "--json").output)
    assert [kernel["symbol"] for kernel in report["kernels"]] == [plan.symbol]
    assert report["folder"] == str(folder)
    assert invoke("cache", "clear").output == f"2 entries deleted from {folder}\n"
    assert json.loads(invoke("cache", "show", "--json").output)["kernels"] == []


def test_without_a_home_directory_the_cache_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home directory")))
    for command in ("show", "clear"):
        done = invoke("cache", command)
        assert done.exit_code == 1
        assert done.output.endswith("no home directory; set XDG_CACHE_HOME\n")


def test_a_gpu_that_is_too_old_plans_for_the_default_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_gpu() -> Gpu:
        raise NotSupported("compute capability = 7.0: no target runs on it")

    monkeypatch.setattr(target, "first_gpu", first_gpu)
    assert target.default_arch() == "sm_90"
