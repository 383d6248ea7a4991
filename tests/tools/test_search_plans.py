"""Tests of the search for tiles where there is no GPU: what is tried, kept, timed, compared and recorded."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.errors import CompileError, DriverError, NotSupported, Stale
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem import spec
from cutlass_py_attn.runtime import arrays, driver
from tests.support import fakes
from tests.support.fake_driver import FakeDriver
from tools.release import build_ptx, check_verified, record
from tools.tuning import plan_rows, plan_space, plan_timing, search_plans

ROOT = Path(__file__).resolve().parents[2]
SMALL, WIDER = "bf16_d96v64_s200_b75_h2_causal", "bf16_d128_s64_b2_h2_causal"
TAKEN, OTHER = "64x128x16:3,2@5-plain", "64x128x16:2,2@5-plain"
SPILLED, UNFIT = "64x128x16:2,1@5-plain", "128x128x16:2,1@5-plain"


def problem_of(name: str, direction: str = "backward", family: str = "sm90") -> Any:
    return plan_space.searched(spec.parse(name), direction, family)


# Tiles


@pytest.mark.parametrize(
    ("name", "direction", "family", "said"),
    [
        ("bf16_d520_s64_b1_h2_full", "backward", "sm90", "takes no head dims beyond 512"),
        ("bf16_d64_q1_s8192_b64_h32k8_full", "backward", "sm80", "has no backward; search its forward"),
        ("bf16_d64_q1_s8192_b64_h32k8_full", "forward", "sm80", "decode kernels compute it"),
    ],
)
def test_what_cannot_be_searched_is_refused(name: str, direction: str, family: str, said: str) -> None:
    with pytest.raises(NotSupported, match=said):
        problem_of(name, direction, family)


@pytest.mark.parametrize(
    ("name", "direction", "family"),
    [
        (SMALL, "forward", "sm90"),
        (SMALL, "backward", "sm90"),
        ("bf16_d96_s64_b1_h2_causal_dropout0.1", "forward", "sm90"),
        ("f32_d64_s64_b1_h2_full", "forward", "sm80"),
        ("bf16_d128_s64_b1_h2_full_bias", "backward", "sm80"),
        ("bf16_d512_s64_b1_h2_full", "forward", "sm80"),
        ("bf16_d512_s64_b1_h2_full", "forward", "sm90"),
        ("bf16_d512_s64_b1_h2_full", "backward", "sm80"),
    ],
)
def test_the_grid_holds_tiles_that_fit_and_names_what_rules_out_the_others(
    name: str, direction: str, family: str
) -> None:
    pytest.importorskip("cutlass")
    problem, arch = problem_of(name, direction, family), plan_space.ARCHS[family]
    found = plan_space.candidates(problem, family, arch)
    rows = [one for one in found if one.is_row]
    planned = [one for one in planner.builds(problem, arch) if one.family == family]
    assert [one.build for one in rows] == list(dict.fromkeys(planned))
    assert found[: len(rows)] == rows
    fitting = [one for one in found if not one.objections]
    assert len(fitting) > len(rows), "the search has something to try beside the table"
    assert len(fitting) < len(found) or problem.shape.head_dim == 512
    assert len({one.build for one in found}) == len({one.name for one in found}) == len(found)
    limit = architecture(arch).shared_memory_per_block
    assert all(one.build.shared_memory_bytes <= limit for one in fitting)


@pytest.mark.parametrize(
    ("direction", "tile", "said"),
    [
        ("backward", UNFIT, "accumulators = 256 (int): 208 registers"),
        ("backward", "64x64x16:2,2", "tile_n = 64 (int): each warpgroup owns 64 keys; use 128"),
        ("backward", "64x128x16:3,2+per_head", "variant = 'per_head' (str): the standard variant is faster"),
        ("forward", "192x128x12:2", "tile_m = 192 (int): each warpgroup owns 64 rows"),
    ],
)
def test_a_tile_that_cannot_run_is_never_compiled(direction: str, tile: str, said: str) -> None:
    problem = problem_of("bf16_d128_s8192_b1_h2_causal", direction)
    found = plan_space.candidates(problem, "sm90", "sm_90a", [TileConfig.parse(tile)])
    assert any(said in objection for objection in found[-1].objections), found[-1].objections


# Building


def artifact(build: Build, code: str = "") -> Artifact:
    """An artifact for the fake driver whose machine code is its tile's own."""
    made = fakes.artifact(build)
    return replace(made, cubin=made.cubin + f"{code or str(TileConfig.of(build))} 8\n".encode(), ptx="ptx")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What --build leaves of four tiles, one of which ptxas cannot make and one of which does not fit."""
    pytest.importorskip("cutlass")

    def compiled(builds: list[Build]) -> list[Artifact | str]:
        return [f"{SPILLED} spills" if str(TileConfig.of(one)) == SPILLED else artifact(one) for one in builds]

    def compile_all(needed: list[Any], *, fresh: bool) -> list[Artifact]:
        return [fakes.artifact(first) for first, *_ in needed]

    monkeypatch.setattr(search_plans, "_compiled", compiled)
    monkeypatch.setattr(build_ptx, "compile_all", compile_all)
    assert run(monkeypatch, "--build", str(tmp_path), "--case", SMALL, "--tiles", OTHER, SPILLED, UNFIT) == 0
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["search_plans", *options])
    return search_plans.main()


def test_build_keeps_every_tile_beside_the_others(folder: Path) -> None:
    listing = json.loads((folder / search_plans.LISTING).read_text())
    (search,) = listing["searches"]
    assert listing["sources"] == record.sources_digest(ROOT)
    assert [(entry["tile"], entry["is_row"], entry["is_fitting"]) for entry in search["candidates"]] == [
        (TAKEN, True, True),
        (OTHER, False, True),
        (SPILLED, False, True),
        (UNFIT, False, False),
    ]
    made = {tile: search_plans.folder_of(folder, tile).all() for tile in (TAKEN, OTHER)}
    assert [one.build.query_stages for (one,) in made.values()] == [3, 2]
    assert {one.build.symbol for (one,) in made.values()} == {"bwd_sm90_bf16_d96v64_causal_64x128"}
    assert all(one.ptx == "" for (one,) in made.values()), "nobody runs it"
    assert not search_plans.folder_of(folder, SPILLED).all()
    assert list((folder / "forward" / "sm_90a").glob("fwd_sm90_bf16_d96v64_causal_*.cubin"))
    shown = search_plans.built(search).splitlines()
    assert shown[3:] == [f"  {SPILLED}    {SPILLED} spills", "  tiles that do not fit: 1; search.json says why"]


def test_what_ptxas_objects_to_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from cutlass_py_attn.compilation import compiler

    def refuse(build: Build) -> Artifact:
        remark = "ptxas remark, none allowed: - Remark: 'ptxas info    : (C7512) wgmma is serialized"
        spills = f"{build.symbol}_0: spills = 8 bytes a thread: 0 allowed"
        raise CompileError(f"{build.symbol} for sm_90a breaks its plan:\n{spills}\n{remark}")

    monkeypatch.setattr(compiler, "artifact_for", refuse)
    build = planner.builds(problem_of(SMALL), "sm_90a")[0]
    assert search_plans._attempt(build) == "spills = 8 bytes a thread: 0 allowed; (C7512) wgmma is serialized"


def test_the_same_machine_code_is_timed_once() -> None:
    found = plan_space.candidates(
        problem_of(SMALL), "sm80", "sm_90", [TileConfig(64, 64, 4, 1, 1), TileConfig(64, 64, 4, 1, 1, 3)]
    )
    found = [one for one in found if one.build.symbol == found[-1].build.symbol]
    assert len(found) > 1
    made = {one.build: artifact(one.build, "same") for one in found if not one.objections}
    listed = list(search_plans._listed(found, made))
    assert listed[0]["objection"] == ""
    assert {entry["objection"] for entry in listed[1:]} == {f"the machine code of {found[0].name}"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--build", "x", "--family", "sm80"), "--family sm80 needs --case"),
        (("--build", "x", "--case", SMALL, "--rounds", "3"), "--rounds cannot be given here"),
        (("--kernels", "x", "--direction", "forward"), "--direction cannot be given here"),
        (("--case", SMALL), "one of the arguments --build --kernels is required"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    options: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, *options)
    assert said in capsys.readouterr().err


# Measuring


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the kernels write, which here do nothing: a factor on the right result for each candidate in turn."""
    values = np.random.default_rng(1).standard_normal((2, 200, 2, 96)).astype(np.float32)
    factors = [1.0, 1.0]
    reads: list[int] = []

    def read(array: Any, stream: int) -> Any:
        reads.append(1)
        return values * np.float32(factors[(len(reads) - 1) // 3])

    monkeypatch.setattr(plan_timing, "read", read)
    return factors


def test_measure_prints_a_table_and_keeps_lines(
    graphs: FakeDriver,
    folder: Path,
    results: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    capsys.readouterr()
    log = folder / "results" / "plans.jsonl"
    assert run(monkeypatch, "--kernels", str(folder), "--record", str(log), "--rounds", "3") == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith(f"{SMALL} backward, sm90 for sm_90a, on ")
    rate = spec.parse(SMALL).flops("backward") / 1.25e9
    assert [row.split()[:4] for row in rows[:2]] == [
        ["*", TAKEN, f"{rate:.1f}", "1.2500"],
        [OTHER, f"{rate:.1f}", "1.2500", "0.0%"],
    ]
    assert rows[2].split() == [SPILLED, SPILLED, "spills"]
    lines = record.read_log(log)
    assert [(line["tile"], line["median_ms"], line["is_taken"]) for line in lines] == [
        (TAKEN, 1.25, True),
        (OTHER, 1.25, False),
        (SPILLED, None, False),
    ]
    first = lines[0]
    assert (first["case"], first["direction"], first["family"], first["rounds"]) == (SMALL, "backward", "sm90", 3)
    assert {"gpu", "driver", "date", "commit", "sources", "sm_clock_mhz"} <= first.keys()
    assert [command.split()[3] for command in first["commands"]] == ["--build", "--kernels"]
    assert (first["error"], first["spread"]) == (0.0, 0.0)


def test_a_wrong_result_is_listed_and_not_timed(
    graphs: FakeDriver,
    folder: Path,
    results: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    results[1] = 1.05
    assert run(monkeypatch, "--kernels", str(folder)) == 1
    assert f"  {OTHER}    wrong: grad_query is " in capsys.readouterr().out


def test_what_is_never_written_is_wrong(
    graphs: FakeDriver, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fake driver's kernels write nothing, so that NaN is found where it was put."""
    assert run(monkeypatch, "--kernels", str(folder)) == 1
    said = "wrong: grad_query, grad_key, grad_value has elements that are no numbers"
    assert capsys.readouterr().out.count(said) == 2


def test_a_fault_names_the_candidate(
    graphs: FakeDriver,
    folder: Path,
    results: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Faulty:
        workspace_bytes, tensor_names = 0, ()

        def __call__(self, *arguments: Any, **options: Any) -> None:
            raise DriverError("an illegal instruction")

    real = plan_timing.bind

    def bind(made: Artifact, *arguments: Any) -> Any:
        return Faulty() if made.build.query_stages == 2 else real(made, *arguments)

    monkeypatch.setattr(plan_timing, "bind", bind)
    assert run(monkeypatch, "--kernels", str(folder)) == 1
    assert capsys.readouterr().err == f"candidate {OTHER}: an illegal instruction; leave it out with --tiles\n"


@pytest.mark.parametrize("tile", [SPILLED, SPILLED.removesuffix("-plain")], ids=["no options", "any options"])
def test_tiles_chooses_what_is_timed_beside_the_row(
    tile: str,
    graphs: FakeDriver,
    folder: Path,
    results: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, "--kernels", str(folder), "--tiles", tile) == 0
    assert f"  {OTHER}    not asked for" in capsys.readouterr().out


def test_kernels_of_other_sources_are_refused(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = folder / search_plans.LISTING
    path.write_text(path.read_text().replace(record.sources_digest(ROOT), "other"))
    with pytest.raises(Stale, match="built from other sources"):
        search_plans.measure(folder, 3, None, ())
    with pytest.raises(Stale, match="missing; fill the folder with"):
        search_plans.measure(tmp_path_factory.mktemp("empty"), 3, None, ())


def test_two_heads_are_read(driver_log: FakeDriver) -> None:
    every, one, third = slice(None), slice(0, 1), slice(2, 3)
    for shape, first, last in (
        ((2, 5, 3, 4), (0, every, one), (1, every, third)),
        ((2, 3, 32), (0, one), (1, third)),
        ((1, 5, 1, 4), (0, every, one), (0, every, one)),
    ):
        array = arrays.DeviceArray(shape, "float32", 0, 0)
        values = np.arange(array.nbytes // 4, dtype=np.float32).reshape(shape)
        driver.copy_to_device(array.pointer, values.ctypes.data, array.nbytes, 0)
        expected = np.stack([values[first], values[last]])
        found = plan_timing.read(array, 0)
        assert found.shape == expected.shape
        assert (found == expected).all()


def test_rounds_are_interleaved(driver_log: FakeDriver) -> None:
    ran: list[str] = []
    replays = {name: (lambda name=name: ran.append(name)) for name in "abc"}
    found = plan_timing.in_rounds(replays, 0, 2)
    assert ran == ["a", "b", "c"] * 4, "two rounds warm up"
    assert [timing.median_ms for timing in found.values()] == [1.25] * 3


def test_disagreement_allows_rounding_alone() -> None:
    first = np.random.default_rng(2).standard_normal((2, 128, 2, 64)).astype(np.float32)
    low = first.astype(arrays.numpy_dtype("bfloat16"))
    other = (first * np.float32(1 + 2**-12)).astype(low.dtype)
    assert (other != low).any()
    assert plan_timing.disagreement({"output": low}, {"output": low}) == 0.0
    near = plan_timing.disagreement({"output": other}, {"output": low})
    assert isinstance(near, float)
    assert 0 < near <= 1
    tile = low.copy()
    tile[1, 64:, 1] = tile[1, 64:, 1] * arrays.numpy_dtype("bfloat16").type(1.03)
    assert str(plan_timing.disagreement({"output": tile}, {"output": low})).startswith("wrong: output is ")
    sums = np.zeros((2, 2, 32), np.float32)
    assert plan_timing.disagreement({"logsumexp": sums + np.float32(2e-5)}, {"logsumexp": sums}) == pytest.approx(0.2)


# Rows of the plan table


def line_of(tile: str, **changes: Any) -> dict[str, Any]:
    return {
        "case": "bf16_d128_s8192_b4_h16_causal", "direction": "backward", "family": "sm90", "tile": tile,
        "median_ms": 1.0, "tflops": 5.0, "sm_clock_mhz": 1700, "gpu": "H200", "date": "d",
        "commit": "c", "sources": "s", **changes,
    }  # fmt: skip


def test_a_row_is_measured_by_a_run_that_compared_it() -> None:
    row = f"tile table, sm90 backward to head dim 128, {TAKEN.removesuffix('-plain')}"

    def state(*lines: dict[str, Any]) -> str:
        found = plan_rows.states(lines, "s")
        others = {name: text for name, text in found.items() if name != row}
        assert all(text.startswith("UNMEASURED") for text in others.values())
        return found[row].split(":")[0]

    assert state() == "UNMEASURED"
    assert state(line_of(TAKEN)) == "UNMEASURED", "alone it says nothing"
    assert state(line_of(TAKEN), line_of(OTHER, date="e")) == "UNMEASURED", "in another run"
    assert state(line_of(TAKEN), line_of(OTHER, median_ms=None)) == "UNMEASURED", "nothing was timed beside it"
    assert state(line_of(TAKEN), line_of(OTHER)) == "measured"
    assert state(line_of(TAKEN, sources="t"), line_of(OTHER)) == "OUTDATED"
    elsewhere = {"case": "bf16_d64_s8192_b4_h32_causal"}
    assert state(line_of(TAKEN, **elsewhere), line_of(OTHER, **elsewhere)) == "UNMEASURED", "a case of another row"


def test_a_search_without_cases_measures_every_hopper_row() -> None:
    names = [plan_rows.name_of(*row) for row in plan_rows.rows()]
    assert len(names) == len(set(names))
    lines = []
    for direction, searched in plan_rows.CASES.items():
        for case in searched:
            for build in planner.builds(problem_of(case, direction), "sm_90a"):
                tile = str(TileConfig.of(build))
                lines += [line_of(tile, case=case, direction=direction, family=build.family)]
            lines.append(line_of("another", case=case, direction=direction))
    found = plan_rows.states(lines, "s")
    assert list(found) == names
    assert [state for state in found.values() if not state.startswith("measured")] == []


def test_check_verified_says_which_rows_have_no_measurement(tmp_path: Path) -> None:
    shown = check_verified.rows_without_measurement(tmp_path)
    assert len(shown) == len(list(plan_rows.rows()))
    assert all("UNMEASURED" in line for line in shown)
    (tmp_path / "cutlass_py_attn").symlink_to(ROOT / "cutlass_py_attn")
    sources = record.sources_digest(ROOT)
    record.append(tmp_path / plan_rows.LOG, [line_of(TAKEN, sources=sources), line_of(OTHER, sources=sources)])
    assert len(check_verified.rows_without_measurement(tmp_path)) == len(shown) - 1
