"""Stress: what is compared, checked and recorded, on the fake driver with emulated kernels."""

from __future__ import annotations

import ctypes
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cutlass_py_attn.artifact import Artifact, Folder, Kernel
from cutlass_py_attn.errors import Stale
from cutlass_py_attn.launch import entry_points
from cutlass_py_attn.launch.build import Build, build_from
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.component_gemms import plan_component_gemm
from cutlass_py_attn.plan.plan import Launch
from cutlass_py_attn.runtime import binding, driver, kernel_launch
from cutlass_py_attn.testing import component_gemms, e4m3_inputs, guarded_check
from cutlass_py_attn.testing.cases import Case
from tests.support import fakes
from tests.support.fake_driver import FakeDriver
from tests.support.ptx_threads import Array, Threads
from tools.lab.race import stress, stress_kernels, stress_run
from tools.release import check_verified, record

ROOT = Path(__file__).resolve().parents[2]

H200 = driver.Device(0, "H200", (9, 0), 132, 232448, 0, 0)
DISTURBERS = "".join(
    f"{name}{' 8' * count}\n"
    for name, count in (
        *((f"compare_{dtype}", 4) for dtype in ("float32", "float16", "bfloat16")), ("copy_late", 4), ("noise", 3),
    )
)  # fmt: skip
BACKWARD = Case.parse("backward f16_d16_q40_s50_b1_h2_causal seed=3")
REPEATABLE = BACKWARD.replace(deterministic=True)

Results = dict[str, Array]


class Gpu:
    """Plays the kernels on the fake driver's memory, which is the host's: ours write `results`, changed by `fault`."""

    def __init__(self, build: Build, results: Results) -> None:
        self.build, self.results = build, results
        self.names: list[str] = []
        self.launched = 0
        self.fault: Callable[[int, Results], None] = lambda launch, results: None

    def starter(self, kernel: int, launch: Launch, parameters: int) -> Callable[[int], None]:
        """In place of kernel_launch.KernelLaunch."""
        return lambda stream: self.start(launch.symbol, parameters)

    def start(self, symbol: str, parameters: int) -> None:
        self.names.append(symbol)
        count = stress_count(symbol)
        addresses = (ctypes.c_uint64 * (count or 1)).from_address(parameters)
        if count:
            self.disturb(symbol, [ctypes.c_uint64.from_address(address).value for address in addresses])
        elif symbol == f"{self.build.symbol}_0":
            self.launched += 1
            results = {name: array.copy() for name, array in self.results.items()}
            self.fault(self.launched, results)
            struct = fakes.decode(self.build, ctypes.string_at(addresses[0], self.struct_bytes))
            for name, array in results.items():
                ctypes.memmove(int(struct[name]), np.ascontiguousarray(array).ctypes.data, array.nbytes)

    @property
    def struct_bytes(self) -> int:
        return fakes.artifact(self.build).kernels[-1].parameters[-1].size

    def disturb(self, name: str, values: list[int]) -> None:
        if name == "noise":
            return
        to, other, words, last = values
        if name == "copy_late":
            assert ctypes.string_at(to, 4 * words) == b"\xff" * 4 * words, "who reads too early must find NaN"
            ctypes.memmove(to, other, 4 * words)
            return
        kind = {"bfloat16": ml_dtypes.bfloat16}.get(name.removeprefix("compare_"), name.removeprefix("compare_"))
        left, right = (np.frombuffer(ctypes.string_at(address, 4 * words), np.uint32) for address in (to, other))
        differ = left != right
        numbers, others = (words[differ].view(kind).astype(np.float32) for words in (left, right))
        with np.errstate(invalid="ignore"):
            largest = np.abs(numbers - others).max(initial=0)
        result = (ctypes.c_uint32 * 2).from_address(last)
        result[0] += int(differ.sum())
        result[1] = max(result[1], int(np.float32(largest).view(np.uint32)))


def stress_count(name: str) -> int:
    """Parameters of a kernel that disturbs or compares; 0 for any other."""
    return next((len(line.split()) - 1 for line in DISTURBERS.splitlines() if line.split()[0] == name), 0)


@pytest.fixture
def played(driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Callable[[Build, Results], Gpu]:
    """A GPU that plays a build, given what its kernel writes."""

    def play(build: Build, results: Results) -> Gpu:
        gpu = Gpu(build, results)
        monkeypatch.setattr(kernel_launch, "KernelLaunch", gpu.starter)
        monkeypatch.setattr(
            binding.Bound, "_create_launcher", lambda *_: None
        )  # a launcher would launch the real kernels
        return gpu

    return play


def prepared(case: Case) -> tuple[dict[str, Artifact], stress_run.Workload, Results]:
    """A kernel with two other builds, its problem, and what an honest kernel would write."""
    build = next(plan.build for plan in planner.plans_on(case.problem(), (9, 0), 132) if plan.build.family == "sm80")
    plain = fakes.artifact(build)
    builds = {name: replace(plain, cubin=plain.cubin + name.encode()) for name in ("plain", "O1", "delay_first_warp")}
    expected = stress_run.expect(case, 1)
    results = {name: truth.astype(np.float16) for name, truth in expected.truth.items()}
    return builds, stress_run.fused(case, 1), results


def run(case: Case, played: Callable[[Build, Results], Gpu], fault: Callable[[int, Results], None]) -> Any:
    """Findings of three repeats of the plain kernel and two of each other build, and the GPU."""
    builds, workload, results = prepared(case)
    gpu = played(builds["plain"].build, results)
    gpu.fault = fault
    device = driver.device(0)
    with device.current():
        tools = stress_kernels.Kernels(device, DISTURBERS)
        return stress_run.stress(builds, [workload], tools, 3, 2), gpu


def nothing(launch: int, results: Results) -> None:
    """No fault."""


def test_an_honest_kernel_passes_every_way(played: Any, driver_log: FakeDriver) -> None:
    findings, gpu = run(REPEATABLE, played, nothing)
    assert findings.launches == {"alone": 3, "noise": 3, "producer": 3, "O1": 2, "delay_first_warp": 2}
    assert gpu.launched == 1 + 9 + 1 + 2 + 2, "one launch of the plain and of the O1 kernel is checked"
    assert set(findings.worst) == {"grad_query", "grad_key", "grad_value"}
    assert max(findings.worst.values()) < 1
    assert findings.problems == [REPEATABLE.line]
    assert gpu.names.count("noise") == 3
    operands = 6  # query, key, value, grad_output, output, logsumexp
    assert gpu.names.count("copy_late") == 3 * operands
    streams = {int(call.numbers[5]) for call in driver_log.of("cuMemsetD2D32Async")}
    assert len(streams) == 1, "all is on one stream, so that nothing waits by chance"
    assert 0 not in streams


# The first launch is checked; 3 alone, 3 beside noise and 3 after a producer follow, then O1 and the delay build.
@pytest.mark.parametrize(
    ("launch", "said"),
    [
        (4, "plain, alone, launch 3 of 3"),
        (6, "plain, noise, launch 2 of 3"),
        (8, "plain, producer, launch 1 of 3"),
        (13, "O1, alone, launch 2 of 2"),
        (14, "delay_first_warp, alone, launch 1 of 2"),
    ],
)
@pytest.mark.parametrize("name", ["grad_key", "grad_query"])
def test_one_wrong_word_of_one_launch_is_told(played: Any, launch: int, said: str, name: str) -> None:
    def flip(number: int, results: Results) -> None:
        if number == launch:
            results[name].reshape(-1)[5:6].view(np.uint16)[0] ^= 1

    with pytest.raises(AssertionError, match=rf"{re.escape(said)}: backward f16.*: {name} differs in 1 words"):
        run(REPEATABLE, played, flip)


def test_a_sum_in_any_order_may_move_but_is_checked(played: Any) -> None:
    def move(number: int, results: Results) -> None:
        results["grad_query"].reshape(-1)[:8].view(np.uint16)[...] ^= np.uint16(number % 2)

    findings, _ = run(BACKWARD, played, move)
    assert 0 < findings.spread["grad_query"] < 0.01

    def lose(number: int, results: Results) -> None:
        move(number, results)
        if number == 7:
            results["grad_query"][:, 16:32] = 0

    with pytest.raises(
        AssertionError, match=r"plain, noise, launch 3 of 3.*grad_query differs by .* from the first.*all"
    ):
        run(BACKWARD, played, lose)


def test_what_is_never_written_is_told(played: Any) -> None:
    def forget(number: int, results: Results) -> None:
        if number > 2:
            del results["grad_value"]

    with pytest.raises(AssertionError, match=r"launch 2 of 3.*grad_value differs in \d+ words, by nan"):
        run(REPEATABLE, played, forget)


def test_rows_of_no_sequence_are_written_by_nobody(played: Any) -> None:
    case = Case.parse("forward f16_d16_n20x24,9x30_h2_full seed=5")
    builds, workload, _ = prepared(case)
    truth = stress_run.expect(case, 1).truth
    rows = truth["output"][:, :29].astype(np.float16)
    gpu = played(builds["plain"].build, {"output": rows, "logsumexp": truth["logsumexp"].astype(np.float32)})
    device = driver.device(0)
    with device.current():
        tools = stress_kernels.Kernels(device, DISTURBERS)
        findings = stress_run.stress(builds, [workload], tools, 2, 1)
    assert truth["output"].shape[1] > 29
    assert gpu.launched == 1 + 6 + 1 + 1 + 1
    assert findings.worst["output"] < 1


def test_values_inside_keys_come_late_without_what_lies_between_them(played: Any) -> None:
    """Rows of a latent cache have 192 columns, of which the first 128 are the values."""
    case = Case.parse("forward f16_d192v128_q2_s24_b3_h4k1_causal_br_paged16_mla seed=12")
    builds, workload, results = prepared(case)
    pages, page_size, _, columns = case.problem().key.shape
    assert workload.extents == {"value": columns * (pages * page_size - 1) + 128}
    logsumexp = stress_run.expect(case, 1).truth["logsumexp"].astype(np.float32)
    played(builds["plain"].build, {**results, "logsumexp": logsumexp})
    device = driver.device(0)
    with device.current():
        tools = stress_kernels.Kernels(device, DISTURBERS)
        findings = stress_run.stress(builds, [workload], tools, 3, 2)
    assert findings.launches["producer"] == 3


def test_wrong_from_the_start_is_noticed(played: Any) -> None:
    def scale(number: int, results: Results) -> None:
        results["grad_key"] *= np.float16(1.2)

    with pytest.raises(AssertionError, match=r"plain: backward f16.*error / allowed grad_key"):
        run(REPEATABLE, played, scale)


@pytest.mark.parametrize(
    "line",
    [
        "backward bf16_d16_q20_s24_b2_h1_causal seed=1",
        "backward f16_d16_q20_s24_b1_h4k1_causal_br_window9 seed=2",
        "backward f16_d16_q20_s24_b2_h1_causal_softcap4_alibi_sinks_gradsqkv seed=5",
        "backward f16_d16_q20_s24_b2_h4k1_full_softcap4_alibi_sinks seed=14",
        "backward f16_d16_q20_s24_b2_h2_causal_biasbhqkgrad seed=15",
        "backward bf16_d16_n20x24,0x3,9x5_h1_causal seed=6",
        "forward f16_d16_q20_s24_b2_h1_full_biasbhqk_softcap4_alibi_sinks seed=3",
        "forward f16_d16_n20x24,3x0_h1_full_dropout0.3 philox_seed=7 seed=4",
        "forward e4m3_d16_q20_s24_b2_h1_causal_descalehead seed=7",
        "forward e4m3_d16_q20_s24_b2_h4k2_full_descalebatch_f16out seed=8",
        "forward e4m3_d16_q20_s24_b2_h2_full_descaletensor seed=9",
        "forward bf16_d16_q20_s24_b2_h4k2_causal_br_paged16_kv8_descalehead seed=10",
        "forward bf16_d16_q2_s24_b3_h8k2_full_paged16_kv8_descalerow seed=11",
        "forward f16_d192v128_q2_s24_b3_h4k1_causal_br_paged16_mla seed=12",
        "forward f16_d192v128_q2_s24_b3_h4k1_causal_br_paged16_mla_kv8_descaletile seed=13",
    ],
)
def test_more_heads_have_the_results_of_the_reference(line: str) -> None:
    base = Case.parse(line)
    case, expected = stress_run.with_heads(base, 5), stress_run.expect(base, 5)
    assert {name: array.shape for name, array in case.arrays().items()} == {
        name: array.shape for name, array in expected.arrays.items() if name in case.arrays()
    }
    whole = guarded_check.by_reference(case, expected.arrays, "float64")
    for name, truth in expected.truth.items():
        np.testing.assert_allclose(truth, whole[name], rtol=1e-4, atol=1e-5)
    if base.spec.value_in_key:
        key, value = (expected.arrays[name].astype(np.float32) for name in ("key", "value"))
        np.testing.assert_array_equal(value, key[..., : value.shape[3]])
    if not base.spec.dropout_p:
        query = e4m3_inputs.dequantised(case.problem(), expected.arrays)["query"].astype(np.float32)
        heads = query.reshape(*query.shape[:2], 5, -1)
        assert all((heads[:, :, i] != heads[:, :, i + 1]).mean() > 0.9 for i in range(4)), "equal heads hide faults"


SHOWN = record.read_manifest(ROOT)["kernels"]


def shown(stem: str) -> str:
    """The name of the shown kernel with this target and symbol, without the symbol's tile."""
    (found,) = (name for name in SHOWN if name.rpartition("_")[0] == stem)
    return found


@pytest.mark.parametrize(
    "stem",
    [
        "sm_90a/bwd_sm90_bf16_d128_causal_ds_registers", "sm_90a/fwd_sm90_f16_d64_full", "sm_90/bwd_sm80_f32_d64_full",
        "sm_90/bwd_sm80_bf16_d128_causal_det", "sm_90/fwd_decode_bf16_d128_full_grouped",
        "sm_90a/bwd_sm90_bf16_d128_full_per_head",
    ],
)  # fmt: skip
def test_problems_fill_every_sm_twice(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = shown(stem)
    monkeypatch.setattr(stress_run, "expect", lambda base, times: None)
    entries = SHOWN[name]["kernels"]
    kernels = tuple(
        Kernel(k["symbol"], k["registers"], 0, 0, k["static_shared_memory_bytes"], k["threads"], ()) for k in entries
    )
    artifact = Artifact(build_from(SHOWN[name]["plan"]), "", b"", kernels, "", "")
    lines = [workload.line for workload in stress_run.workloads(artifact, H200)]
    assert len(lines) == (2 if artifact.build.family == "decode" else 1)
    case = Case.parse(lines[-1])
    plan = stress_run.plan_of(case, artifact.build, H200)
    assert stress_run.blocks_of(plan, case) >= 2 * 132
    with pytest.raises(Stale, match="has no such plan"):
        stress_run.plan_of(case.replace(head_dim=24), artifact.build, H200)


@pytest.mark.parametrize(
    "build", [build for build in stress_run.feature_builds() if build.shares_chunks], ids=lambda build: build.symbol
)
def test_problems_of_kernels_that_share_chunks_have_two_tiles_for_each_sm(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stress_run, "expect", lambda base, times: None)
    kernel = Kernel(entry_points.entries(build)["main"], 168, 0, 0, 0, build.threads, ())
    case = Case.parse(stress_run.workloads(Artifact(build, "", b"", (kernel,), "", ""), H200)[-1].line)
    shape = case.shape
    rows = shape.num_queries * shape.num_heads // shape.num_heads_key
    assert math.ceil(rows / build.tile_m) * shape.num_heads_key * shape.batch >= 2 * 132


def test_the_other_features_are_kernels_of_their_own() -> None:
    builds = stress_run.feature_builds()
    assert len(builds) == len(stress_run.FEATURES) + len(stress_run.IN_PARTS)
    results = {name for case in stress_run.FEATURES for name in guarded_check.results_of(case)}
    assert results <= set(stress_run.HEAD_AXES)
    assert {build.family for build in builds} == {"sm90", "decode"}
    assert not {record.name_of(build) for build in builds} & set(SHOWN)


class Words(Threads):
    """Threads that also compare: reductions, sleeps and the few float instructions of the comparison."""

    def execute(self, op: str, operands: list[str], active: Array) -> None:
        if op.startswith("red.global"):
            places, values = self.address(operands[0]), self.value(operands[1])
            for place, value in zip(places[active], values[active], strict=True):
                word = self.memory[place : place + 4].view(np.uint32)
                word[0] = word[0] + value if ".add." in op else max(int(word[0]), int(value))
        elif op.startswith(("sub.f32", "abs.f32", "cvt.f32.f16")):
            bits = np.uint16 if op.endswith("f16") else np.uint32
            kind = np.float16 if op.endswith("f16") else np.float32
            numbers = [self.value(name).astype(bits).view(kind).astype(np.float32) for name in operands[1:]]
            with np.errstate(invalid="ignore"):
                result = numbers[0] - numbers[1] if op == "sub.f32" else numbers[0]
            result = np.abs(result) if op == "abs.f32" else result
            self.write(operands[0], result.view(np.uint32), 32, active)
        elif op != "nanosleep.u32":
            super().execute(op, operands, active)


def executed(name: str, values: list[int], memory: Array) -> None:
    """A kernel of stress_kernels.PTX on 2 blocks, with these parameters."""
    text = next(part for part in stress_kernels.PTX.split(".visible .entry ") if part.startswith(f"{name}("))
    ptx = re.sub(rf"\[{name}_(\d)\]", lambda found: f"[p+{8 * int(found[1])}]", ".entry " + text)
    ptx = re.sub(r"^\s*\.reqntid.*$", "", ptx, flags=re.MULTILINE).replace("\n}\n", "\n")
    Words(ptx, (2, 1), stress_kernels.THREADS, memory, np.array(values, np.uint64)).run()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("words", [0, 1, 700])
def test_comparison_counts_words_and_finds_the_largest_distance(dtype: str, words: int) -> None:
    kind = {"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype)
    size = 4 * words
    memory = np.zeros(2 * 4096 + 64, np.uint8)
    left, right, result = memory[64 : 64 + size], memory[4160 : 4160 + size], memory[:8].view(np.uint32)
    values = np.random.default_rng(words).standard_normal(size // np.dtype(kind).itemsize).astype(kind)
    left[...] = right[...] = values.view(np.uint8)
    executed(f"compare_{dtype}", [64, 4160, words, 0], memory)
    assert tuple(result) == (0, 0)
    if words > 1:
        changed = values.copy()
        changed[[3, 250, -1]] = [-7.5, 0.25, 2.0]
        left[...] = changed.view(np.uint8)
        executed(f"compare_{dtype}", [64, 4160, words, 0], memory)
        expected = np.abs(changed.astype(np.float32) - values.astype(np.float32)).max()
        assert (result[0], result[1:].view(np.float32)[0]) == (3, expected)
        changed[9] = np.nan
        left[...] = changed.view(np.uint8)
        executed(f"compare_{dtype}", [64, 4160, words, 0], memory)
        assert np.isnan(result[1:].view(np.float32)[0])


def test_late_copy_copies_all() -> None:
    memory = np.zeros(2 * 4096, np.uint8)
    memory[4096 : 4096 + 2804] = np.arange(2804) % 251
    executed("copy_late", [64, 4096, 701, 1000], memory)
    np.testing.assert_array_equal(memory[64 : 64 + 2804], memory[4096 : 4096 + 2804])
    assert not memory[64 + 2804 : 4096].any()


def test_an_odd_size_is_refused(driver_log: FakeDriver) -> None:
    tools = stress_kernels.Kernels(driver.device(0), DISTURBERS)
    with driver.device(0).current(), pytest.raises(ValueError, match="size = 6 bytes: must be a multiple of 4"):
        tools.difference("float16", 4096, 8192, 6, 0)
    tools.close()
    assert len(driver_log.of("cuMemFree")) == 2


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Build, Results]:
    """Three builds of a component GEMM in a folder, and what the component GEMM gives."""
    monkeypatch.setattr(stress_run, "resident", lambda plan, artifact: 1)  # more would only take longer
    monkeypatch.setattr(stress_run, "WAVES", 1)
    plan = plan_component_gemm("matmul_qk", "sm80", "float16", 32, "sm_90")
    plain = fakes.artifact(plan.build)
    for name in ("plain", "O1", "delay_last_warp"):
        made = plain if name == "plain" else replace(plain, cubin=plain.cubin + name.encode())
        Folder(tmp_path / name).put(made)
    tiles = stress_run.WAVES * 132 * stress_run.resident(plan, plain)
    many = plan_component_gemm("matmul_qk", "sm80", "float16", 32, "sm_90", tiles)
    c = component_gemms.product(many, component_gemms.operands(many, "gaussian", 1)).astype(np.float32)
    return tmp_path, plan.build, {"c": c}


def command(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    """Exit code of tools/lab/race/stress.py."""
    monkeypatch.setattr(stress_kernels, "PTX", DISTURBERS)
    monkeypatch.setattr(sys, "argv", ["stress", *options])
    return stress.main()


def test_command_records_what_passed(
    folder: tuple[Path, Build, Results],
    played: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, build, results = folder
    gpu = played(build, results)
    log = path / "log.jsonl"
    options = ("--kernels", str(path), "--repeats", "2", "--delayed", "1", "--record", str(log))
    assert command(monkeypatch, *options) == 0
    (line,) = record.read_log(log)
    plain = Folder(path / "plain")(build)
    assert line["cubin_sha256"] == record.sha256(plain.cubin)
    assert (line["symbol"], line["arch"], line["gpu"]) == (build.symbol, "sm_90", "fake GPU 0")
    assert line["launches"] == {"alone": 2, "noise": 2, "producer": 2, "O1": 1, "delay_last_warp": 1}
    assert set(line["builds"]) == {"plain", "O1", "delay_last_warp"}
    assert 0 < line["worst"]["c"] < 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == "stress: 1 of 1 kernels passed"
    assert re.fullmatch(rf"sm_90/{build.symbol} +2 2 2 +O1 last_warp +c 0\.\d\d", shown[-2])

    gpu.fault = lambda number, results: results["c"].reshape(-1)[:1].fill(number)
    assert command(monkeypatch, *options) == 1
    assert len(record.read_log(log)) == 1
    assert re.search(r"FAILED .*error / allowed c", capsys.readouterr().out)
    assert command(monkeypatch, *options, "--only", "no such kernel") == 1


def test_a_folder_of_other_machine_code_is_told() -> None:
    name = shown("sm_90a/matmul_qk_sm90_bf16_d64")
    artifact = fakes.artifact(build_from(SHOWN[name]["plan"]))
    manifest: record.Json = {"kernels": SHOWN}
    assert re.match("the folder holds cubin .*, the manifest", stress.outdated(artifact, manifest))
    same = {"kernels": {name: {"cubin_sha256": record.sha256(artifact.cubin)}}}
    assert stress.outdated(artifact, same) == stress.outdated(artifact, {"kernels": {}}) == ""


@pytest.mark.parametrize("option", ["--repeats", "--delayed", "--seconds"])
def test_no_launches_are_no_test(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command(monkeypatch, "--kernels", "kernels", option, "0")
    assert f"{option} = 0: must be 1 or more" in capsys.readouterr().err


def test_strict_says_which_kernels_have_a_line(tmp_path: Path) -> None:
    manifest: record.Json = {"kernels": {name: {"cubin_sha256": name * 2} for name in ("a", "b")}}
    assert check_verified.stress_line(manifest, []).endswith("0 of 2 kernels passed tools/lab/race/stress.py")
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"cubin_sha256": sha}) + "\n" for sha in ("bb", "cc")))
    assert check_verified.stress_line(manifest, record.read_log(log)).endswith(
        "1 of 2 kernels passed tools/lab/race/stress.py, not a"
    )
    assert record.stressed(manifest, record.read_log(log)) == ["b"]
