"""Tests of the benchmark where there is no GPU: cases, useful work, kernels, rows and what torch is asked for."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.bench import cases, harness
from cutlass_py_attn.bench import peers as bench_peers
from cutlass_py_attn.bench.cases import FEATURE_CASES, default_cases, directions
from cutlass_py_attn.errors import AttentionError, DriverError, NotSupported
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem.masks import Causal, Full
from cutlass_py_attn.problem.spec import ProblemSpec, mixed_lengths, parse
from cutlass_py_attn.problem.tensors import Shape
from cutlass_py_attn.runtime import driver
from tests.support import fakes
from tests.support.fake_driver import FakeDriver
from tools.release import build_ptx, check_verified, record

VARLEN = "bf16_d128_s8192_t65536_h16_causal"
WINDOW = "bf16_d128_s16384_b2_h16_causal_window1024"
SMALL = "bf16_d64_s64_b2_h2_full"

# Cases


def test_every_published_case_is_supported_and_named_once() -> None:
    names = default_cases()
    assert len(set(names)) == len(names)
    for name in names:
        case = parse(name)
        assert case.name == name
        for direction in directions(case):
            assert case.problem(direction).reasons() == [], name


def test_baselines_are_measured_in_the_same_run() -> None:
    assert {baseline for baseline in FEATURE_CASES.values() if baseline} <= set(default_cases())


def test_a_name_says_everything() -> None:
    case = parse("f16_d64v32_s256_b3_h8k2_causal_window17_biasgrad_dropout0.25_softcap30_alibi_sinks_deterministic")
    assert (case.dtype, case.shape, case.mask) == ("float16", Shape(3, 256, 256, 8, 64, 32, 2), Causal(17))
    backward = case.problem("backward")
    assert backward.features == ("alibi", "bias", "dropout", "grouped", "sinks", "softcap")
    assert backward.gradients == ("query", "key", "value", "bias", "sinks")
    assert (backward.dropout_p, backward.softcap, backward.deterministic) == (0.25, 30.0, True)
    assert backward.bias is not None
    assert backward.grad_bias is not None
    assert backward.bias.shape == backward.grad_bias.shape == (3, 8, 256, 256)
    assert (backward.bias.strides[0], backward.grad_bias.strides[0]) == (0, 8 * 256 * 256)
    forward = case.problem("forward")
    assert forward.gradients == ()
    assert not forward.deterministic


def test_a_bias_has_a_gradient_only_where_it_is_asked_for() -> None:
    assert parse(f"{SMALL}_bias").problem("backward").gradients == ("query", "key", "value")
    assert parse(SMALL).problem("backward").bias is None


@pytest.mark.parametrize(
    "name",
    ["", "bf16_d128", "b16_d64_s64_b2_h2_full", f"{SMALL}_window8"],
)
def test_a_wrong_name_is_refused_with_a_remedy(name: str) -> None:
    with pytest.raises(NotSupported, match=r"write|add|leave|correct|did you mean"):
        parse(name)


def test_only_takes_the_cases_in_which_it_is_found() -> None:
    assert cases.select((), "dropout|window") == ("bf16_d128_s2048_b16_h16_full_dropout0.1", WINDOW)
    assert cases.select((SMALL,), "") == (SMALL,)
    with pytest.raises(NotSupported, match="matches none of"):
        cases.select((SMALL,), "causal")
    with pytest.raises(NotSupported, match="must be a regular expression"):
        cases.select((), "(")


# Useful work


def test_work_of_a_plain_case_is_the_problem_s() -> None:
    case = parse("bf16_d64v32_s512_b3_h4_causal")
    assert case.flops("forward") == 2 * 3 * 4 * 512 * 512 * (64 + 32) // 2
    assert case.flops("backward") * 2 == case.flops("forward") * 5


def test_work_of_a_window_counts_visible_pairs() -> None:
    pairs = sum(min(query + 1, 1024) for query in range(16384))
    assert parse(WINDOW).flops("forward") == 4 * 2 * 16 * pairs * 128


def test_work_of_mixed_lengths_is_the_sum_over_the_sequences() -> None:
    case = parse(VARLEN)
    lengths = [each.num_keys for each in case.sequences]
    assert sum(lengths) == 65536
    assert max(lengths) == case.shape.num_queries == 8192
    assert case.shape.tokens == (65536, 65536)
    assert case.shape.batch == len(lengths) > 8
    assert case.flops("forward") == sum(2 * 16 * length * length * 128 for length in lengths)
    assert case.flops("forward") < case.problem("forward").flops / 2, "which takes every sequence as the longest"


def test_mixed_lengths_are_the_same_every_time() -> None:
    assert mixed_lengths(64, 640) == mixed_lengths(64, 640)
    assert all(1 <= each.num_keys == each.num_queries <= 64 for each in mixed_lengths(64, 640))
    assert [each.num_keys for each in mixed_lengths(64, 10)] == [10]
    assert parse("bf16_d64_s64_t10_h1_full").shape.num_keys == 10


# Kernels


def test_builds_are_listed_once_and_have_names_of_their_own() -> None:
    names = [SMALL, "bf16_d64_s64_b1_h4_full", f"{SMALL}_bias", f"{SMALL}_biasgrad", f"{SMALL}_deterministic"]
    found = cases.builds(map(parse, names), (9, 0))
    assert [first.stem for first, *_ in found] == [
        "fwd_sm90_bf16_d64_full",
        "bwd_sm90_bf16_d64_full",
        "fwd_sm90_bf16_d64_full_bias",
        "bwd_sm90_bf16_d64_full_bias_per_head",
        "bwd_sm90_bf16_d64_full_bias_to_qkvb_per_head",
        "bwd_sm90_bf16_d64_full_det",
    ]


def test_published_builds_can_all_be_planned_and_share_a_folder() -> None:
    found = cases.builds(map(parse, default_cases()), (9, 0))
    names = [record.name_of(first) for first in dict.fromkeys(first for first, *_ in found)]
    assert len(set(names)) == len(names), "a folder holds one kernel of a name"


def test_build_ptx_compiles_what_the_benchmark_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def compile_all(needed: list[Any], *, fresh: bool) -> list[Any]:
        assert not fresh
        made.extend(first.symbol for first, *_ in needed)
        return [fakes.artifact(first) for first, *_ in needed]

    monkeypatch.setattr(build_ptx, "compile_all", compile_all)
    monkeypatch.setattr(cases, "default_cases", lambda: (SMALL, f"{SMALL}_bias"))
    monkeypatch.setattr(sys, "argv", ["build_ptx", "--bench", str(tmp_path), "--only", "full_bias"])
    assert build_ptx.main() == 0
    assert [name.rpartition("_")[0] for name in made] == [
        "fwd_sm90_bf16_d64_full_bias",
        "bwd_sm90_bf16_d64_full_bias_per_head",
    ]
    assert sorted(path.stem for path in tmp_path.glob("sm_90*/*.json")) == sorted(made)


# Rows


@pytest.mark.parametrize(
    "name",
    [
        f"{SMALL}_biasgrad_dropout0.1",
        f"{SMALL}_alibi_sinks",
        "bf16_d64_s64_t200_h4k2_causal",
        "f16_d64_s64_b1_h2_causal_window8_deterministic",
    ],
)
def test_a_case_is_launched_with_all_its_operands(graphs: FakeDriver, name: str) -> None:
    case = parse(name)
    rows = list(harness.measure(case, fakes.artifact, 5))
    assert [(row.case, row.direction, row.peer, row.ratio) for row in rows] == [
        (name, "forward", "", None),
        (name, "backward", "", None),
    ]
    # The fake driver's events are 1.25 ms apart.
    assert [row.ours_ms for row in rows] == [1.25, 1.25]
    assert rows[0].ours_tflops == round(case.flops("forward") / 1.25e9, 2)
    launches = graphs.of("cuLaunchKernelEx")
    build = planner.builds_on(case.problem("backward"), (9, 0))[0]
    struct = fakes.decode(build, launches[-1].parameters)
    assert bool(struct["bias"]) == bool(struct["grad_bias"]) == bool(case.bias)
    assert (struct["bias_batch"], struct["philox_seed"]) == (0, 1 if case.dropout_p else 0)
    assert bool(struct["cu_seqlens_q"]) == bool(case.sequences)
    assert bool(struct["alibi_slopes"]) == bool(struct["grad_sinks"]) == bool(case.alibi)


def test_operands_hold_what_the_kernels_read(graphs: FakeDriver) -> None:
    case = parse("bf16_d64_s64_t200_h4k2_causal_alibi")
    operands = harness.Operands(case, 0)

    def read(name: str, dtype: Any) -> Any:
        array = operands.arrays[name]
        found = np.empty(array.shape, dtype)
        driver.copy_to_host(found.ctypes.data, array.pointer, found.nbytes, 0)
        return found

    assert (
        read("cu_seqlens_k", np.int32).tolist() == np.cumsum([0, *(each.num_keys for each in case.sequences)]).tolist()
    )
    assert read("alibi_slopes", np.float32).tolist() == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]
    shared = harness.Operands(parse(f"{SMALL}_bias"), 0)
    assert shared.arrays["bias"].shape == (1, 2, 64, 64)
    assert shared.pointers(["bias", "philox_seed"]) == {"bias": shared.arrays["bias"].pointer, "philox_seed": 1}


def row_of(case: str, rate: float, direction: str = "forward") -> harness.Row:
    return harness.Row(case, direction, "", None, rate, None, None, "H200", "c", 1.0, None)


def test_rows_are_held_against_their_baseline() -> None:
    baseline = FEATURE_CASES[WINDOW]
    rows = [row_of(WINDOW, 90.0), row_of(baseline, 120.0), row_of(WINDOW, 50.0, "backward")]
    found = harness.compared(rows)
    assert [(row.baseline, row.baseline_ratio) for row in found] == [(baseline, 0.75), ("", None), (baseline, None)]
    lines = harness.table(found).splitlines()
    assert lines[1].endswith(f"-              0.75 {baseline}")
    assert lines[2].split() == [baseline, "forward", "120.0", "-"]


def test_readme_table_shows_the_baseline() -> None:
    shared = {"direction": "forward", "peer": "", "peer_tflops": None, "ratio": None, "gpu": "H200"}
    rows = [
        {**shared, "case": "a", "ours_tflops": 100.0, "baseline": "", "baseline_ratio": None},
        {**shared, "case": "b", "ours_tflops": 75.0, "baseline": "a", "baseline_ratio": 0.75},
    ]
    assert check_verified.benchmark_table(rows).splitlines()[2:] == [
        "| case | direction | ours | of baseline |",
        "| --- | --- | --- | --- |",
        "| `a` | forward | 100 |  |",
        "| `b` | forward | 75 | 0.75 of `a` |",
    ]


def test_tables_have_an_empty_cell_for_a_refusal_and_name_the_versions() -> None:
    shared = {"case": "a", "direction": "forward", "gpu": "H200", "ours_tflops": 100.0}
    rows = [
        {**shared, "peer": "cudnn", "peer_tflops": 50.0, "ratio": 2.0, "peer_version": "cuDNN 9.19.0 of torch 2.11.0"},
        {**shared, "peer": "fa4", "peer_tflops": None, "ratio": None, "peer_version": "FlashAttention-4 4.0.0"},
    ]
    first, _, *lines = check_verified.benchmark_table(rows).splitlines()
    assert first.endswith(" Peers: cudnn is cuDNN 9.19.0 of torch 2.11.0, fa4 is FlashAttention-4 4.0.0.")
    assert lines[2] == "| `a` | forward | 100 | 50 (2.00) |  |"


def test_the_table_says_what_was_sustained() -> None:
    shared = {"direction": "forward", "peer": "", "peer_tflops": None, "ratio": None, "gpu": "H200", "ours_tflops": 1.0}
    first = check_verified.benchmark_table([{**shared, "case": "a", "sustained": True}]).splitlines()[0]
    assert first == ("TFLOP/s on H200, medians of CUDA graph replays after 500 ms of load; in brackets ours / peer.")


def test_a_case_that_fails_does_not_end_the_run(
    graphs: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(case: ProblemSpec, kernels: Any, samples: int, *, sustained: bool) -> Iterator[harness.Row]:
        yield row_of(case.name, 10.0)
        if case.name == SMALL:
            raise DriverError("broken")

    monkeypatch.setattr(harness, "measure", measure)
    output = tmp_path / "results" / "rows.json"
    arguments = ["--case", SMALL, "--case", f"{SMALL}_bias", "--kernels", str(tmp_path), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    assert harness.main() == 1
    printed = capsys.readouterr()
    assert printed.err == f"{SMALL}: broken\n"
    assert printed.out.splitlines()[2].startswith(f"{SMALL}_bias")
    assert [row["case"] for row in json.loads(output.read_text())] == [SMALL, f"{SMALL}_bias"]


def test_without_a_gpu_one_sentence_stands_for_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_device(ordinal: int) -> Any:
        raise AttentionError("no GPU")

    monkeypatch.setattr(driver, "device", no_device)
    with pytest.raises(AttentionError, match="no GPU"):
        harness.run((), "", tmp_path, None, 5)


# What torch is asked for


@dataclass
class Recorded:
    """A tensor of the fake torch: a name, and every method that was called on it, as text."""

    text: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def method(*arguments: Any, **options: Any) -> Recorded:
            listed = [str(item) for item in arguments] + [f"{key}={value}" for key, value in options.items()]
            return Recorded(f"{self.text}.{name}({', '.join(listed)})")

        return method

    def __str__(self) -> str:
        return self.text


@dataclass
class FakeTorch:
    """torch as the peers see it; `calls` has the name, the arguments and the options of each attention."""

    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    int32: str = "int32"

    def __post_init__(self) -> None:
        self.nn = SimpleNamespace(functional=self._recorder("scaled_dot_product_attention"))
        flash, efficient = "_flash_attention_forward", "_efficient_attention_forward"
        aten = SimpleNamespace(**vars(self._recorder(flash)), **vars(self._recorder(efficient)))
        self.ops = SimpleNamespace(aten=aten)

    def _recorder(self, name: str) -> SimpleNamespace:
        def called(*arguments: Any, **options: Any) -> tuple[str, ...]:
            shown = tuple(item.text if isinstance(item, Recorded) else item for item in arguments)
            named = {key: item.text if isinstance(item, Recorded) else item for key, item in options.items()}
            self.calls.append((name, shown, named))
            return ("output",)

        return SimpleNamespace(**{name: called})

    def from_dlpack(self, array: str) -> Recorded:
        return Recorded(array)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    """A fake torch with its module of backends, for which the backend is its own name."""
    attention: Any = ModuleType("torch.nn.attention")
    attention.SDPBackend = SimpleNamespace(**{name: name for name in bench_peers.BACKENDS.values()})
    attention.sdpa_kernel = lambda backend: backend
    monkeypatch.setitem(sys.modules, "torch.nn.attention", attention)
    return FakeTorch()


def asked(torch: FakeTorch, peer: str, name: str, direction: str) -> tuple[Any, Any, Any, Any]:
    """The call, and the name, the arguments and the options of what it asks torch for."""
    arrays = {key: key for key in ("query", "key", "value", "grad_output", "bias", "cu_seqlens_q")}
    call = bench_peers.prepare(torch, peer, parse(name), direction, arrays)
    call.forward()
    (found,) = torch.calls
    return call, *found


def test_plain_cases_are_scaled_dot_product_attention(torch: FakeTorch) -> None:
    call, name, arguments, options = asked(torch, "cudnn", "bf16_d64_s64_b2_h2_causal", "backward")
    assert name == "scaled_dot_product_attention"
    leaves = tuple(f"{item}.transpose(1, 2).detach().requires_grad_(True)" for item in ("query", "key", "value"))
    assert arguments == leaves
    expected = {"attn_mask": None, "dropout_p": 0.0, "is_causal": True, "enable_gqa": False}
    assert options == expected
    assert tuple(leaf.text for leaf in call.leaves) == leaves
    assert call.grad_output.text == "grad_output.transpose(1, 2)"
    assert call.backend == "CUDNN_ATTENTION"


@pytest.mark.parametrize(("word", "direction", "with_gradient"), [
    ("bias", "forward", False), ("bias", "backward", False),
    ("biasgrad", "forward", False), ("biasgrad", "backward", True),
    ("biassum", "forward", False), ("biassum", "backward", True),
])  # fmt: skip
def test_bias_is_the_mask_and_a_leaf_where_its_gradient_counts(
    torch: FakeTorch, word: str, direction: str, with_gradient: bool
) -> None:
    call, _, _, options = asked(torch, "mem_efficient", f"{SMALL}_{word}", direction)
    expanded = ".expand(2, 2, 64, 64)"
    if word == "biassum":
        leaf = f"bias.detach().requires_grad_({with_gradient})"
        mask = leaf + expanded
    else:
        leaf = mask = f"bias{expanded}.detach().requires_grad_({with_gradient})"
    assert options["attn_mask"] == mask
    assert not options["is_causal"]
    assert [given.text for given in call.leaves[3:]] == ([] if word == "bias" else [leaf])


def test_dropout_is_torch_s_own(torch: FakeTorch) -> None:
    _, _, _, options = asked(torch, "flash", f"{SMALL}_dropout0.1", "forward")
    assert options["dropout_p"] == 0.1


@pytest.mark.parametrize(("peer", "grouped"), [("flash", True), ("cudnn", True), ("mem_efficient", False)])
def test_groups_are_passed_on_or_their_heads_repeated(torch: FakeTorch, peer: str, grouped: bool) -> None:
    _, _, arguments, options = asked(torch, peer, "bf16_d64_s64_b2_h8k2_causal", "forward")
    repeated = "" if grouped else ".repeat_interleave(4, dim=2)"
    assert arguments[1] == f"key{repeated}.transpose(1, 2).detach().requires_grad_(False)"
    assert options["enable_gqa"] is grouped


def test_window_is_the_flash_operator(torch: FakeTorch) -> None:
    call, name, arguments, options = asked(torch, "flash", WINDOW, "forward")
    assert name == "_flash_attention_forward"
    assert arguments[0] == "query.detach().requires_grad_(False)"
    assert arguments[3:] == (None, None, 16384, 16384, 0.0, False, False)
    assert options == {"window_size_left": 1023, "window_size_right": 0}
    assert call.grad_output.text == "grad_output"


def test_lengths_are_the_flash_operator_on_tokens(torch: FakeTorch) -> None:
    call, name, arguments, _ = asked(torch, "flash", VARLEN, "backward")
    assert name == "_flash_attention_forward"
    assert arguments[0] == "query.squeeze(0).detach().requires_grad_(True)"
    bounds = "cu_seqlens_q.view(int32)"
    assert arguments[3:] == (bounds, bounds, 8192, 8192, 0.0, True, False)
    assert call.grad_output.text == "grad_output.squeeze(0)"


@pytest.mark.parametrize(("direction", "saved"), [("forward", False), ("backward", True)])
def test_lengths_are_the_memory_efficient_operator(torch: FakeTorch, direction: str, saved: bool) -> None:
    _, name, arguments, _ = asked(torch, "mem_efficient", VARLEN, direction)
    assert name == "_efficient_attention_forward"
    bounds = "cu_seqlens_q.view(int32)"
    assert arguments[3:] == (None, bounds, bounds, 8192, 8192, 0.0, 1, saved)


@pytest.mark.parametrize(("name", "peers"), [
    (SMALL, ("mem_efficient", "flash", "cudnn")),
    (f"{SMALL}_bias", ("mem_efficient", "flash", "cudnn")),
    (f"{SMALL}_dropout0.1", ("mem_efficient", "flash")),
    (WINDOW, ("flash",)),
    (VARLEN, ("mem_efficient", "flash")),
    (f"{WINDOW}_bias", ()),
    (f"{VARLEN}_bias", ()),
    (f"{SMALL}_softcap30", ()),
    (f"{SMALL}_alibi", ()),
    (f"{SMALL}_sinks", ()),
    (f"{SMALL}_deterministic", ()),
])  # fmt: skip
def test_peers_of_a_case(name: str, peers: tuple[str, ...]) -> None:
    assert bench_peers.names(parse(name)) == peers


VERSIONS = {
    "mem_efficient": "memory-efficient attention of torch 2.11.0",
    "flash": "FlashAttention-2 of torch 2.11.0",
    "cudnn": "cuDNN 9.19.1 of torch 2.11.0",
    "fa4": "FlashAttention-4",
    "cudnn_frontend": "cuDNN 9.19.1 through cudnn-frontend",
}


@pytest.fixture
def quiet_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that sees a GPU, without FlashAttention-4 and cuDNN's frontend."""
    quiet = SimpleNamespace(is_available=lambda: True, synchronize=lambda: None, empty_cache=lambda: None)
    cudnn = SimpleNamespace(version=lambda: 91901)
    fake = SimpleNamespace(cuda=quiet, backends=SimpleNamespace(cudnn=cudnn), __version__="2.11.0")
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setitem(sys.modules, "torch.nn.attention", ModuleType("torch.nn.attention"))
    for package in bench_peers.PACKAGES.values():
        monkeypatch.setattr(package, "version", lambda: "")


@pytest.mark.usefixtures("quiet_torch")
def test_a_peer_that_refuses_gives_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare(torch: Any, peer: str, *arguments: Any) -> str:
        if peer == "flash":
            raise RuntimeError("No available kernel.\nAborting")
        return peer

    monkeypatch.setattr(bench_peers, "prepare", prepare)
    monkeypatch.setattr(bench_peers, "_milliseconds", lambda *arguments: 2.0)
    reason = "RuntimeError: No available kernel."
    assert list(bench_peers.measure(parse(SMALL), "forward", {}, lambda replay, stream: 1.0)) == [
        bench_peers.Measurement("mem_efficient", VERSIONS["mem_efficient"], 2.0),
        bench_peers.Measurement("flash", VERSIONS["flash"], None, reason),
        bench_peers.Measurement("cudnn", VERSIONS["cudnn"], 2.0),
    ]
    assert capsys.readouterr().err == f"{SMALL} forward: no flash: {reason}\n"


@pytest.mark.usefixtures("quiet_torch")
@pytest.mark.parametrize(("chosen", "shown"), [(None, "FlashAttention-2"), ("FA3", "FlashAttention-3")])
def test_versions_name_the_flash_attention_of_torch(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, shown: str
) -> None:
    attention: Any = sys.modules["torch.nn.attention"]
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: chosen, raising=False)
    assert bench_peers.versions(sys.modules["torch"]) == {**VERSIONS, "flash": f"{shown} of torch 2.11.0"}


def test_a_refusal_is_an_empty_cell_of_the_row(graphs: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        bench_peers.Measurement("cudnn", "cuDNN 9.19.1", 2.5),
        bench_peers.Measurement("fa4", "FlashAttention-4 4.0", None, "AssertionError: no"),
    ]
    monkeypatch.setattr(bench_peers, "measure", lambda *arguments: iter(found))
    cudnn, fa4 = list(harness.measure(parse(SMALL), fakes.artifact, 5))[:2]
    assert (cudnn.peer_ms, cudnn.ratio, cudnn.refusal) == (2.5, 2.0, "")
    assert (fa4.peer, fa4.peer_tflops, fa4.ratio, fa4.peer_ms) == ("fa4", None, None, None)
    assert (fa4.refusal, fa4.ours_tflops) == ("AssertionError: no", cudnn.ours_tflops)
    lines = harness.table([cudnn, fa4]).splitlines()
    assert lines[2].split() == [SMALL, "forward", f"{fa4.ours_tflops:.1f}", "fa4"]
    assert lines[-2:] == ["cudnn: cuDNN 9.19.1", "fa4: FlashAttention-4 4.0"]


@pytest.mark.parametrize(("direction", "graphs_made"), [("forward", [3]), ("backward", [1, 3])])
def test_a_peer_is_captured_behind_two_calls_on_its_stream(direction: str, graphs_made: list[int]) -> None:
    """The time is that of a replay, divided by the calls in its graph."""
    log: list[str] = []

    @contextlib.contextmanager
    def scope(name: str) -> Iterator[None]:
        log.append(f"{name} begins")
        yield
        log.append(f"{name} ends")

    stream = SimpleNamespace(cuda_stream=7, synchronize=lambda: log.append("synchronised"))
    cuda = SimpleNamespace(
        Stream=lambda: stream,
        stream=lambda given: scope("stream"),
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: log.append("replay")),
        graph=lambda graph, stream: scope("capture"),
    )

    class Peer:
        backend = contextlib.nullcontext()

        def forward(self) -> str:
            log.append("forward")
            return "output"

        def backward(self, forwarded: str) -> None:
            assert forwarded == "output"
            log.append("backward")

    def timed(replay: Any, handle: int) -> float:
        assert handle == 7
        replay()
        return 6.0

    assert bench_peers._milliseconds(SimpleNamespace(cuda=cuda), Peer(), direction, timed, 3) == 2.0
    calls = ["forward"] if direction == "forward" else ["forward", "backward"]
    assert log[: 2 + 2 * len(calls)] == ["stream begins", *calls, *calls, "synchronised"]
    captures = " ".join(log).split("capture begins ")[1:]
    assert [each.split(" capture ends")[0].split() for each in captures] == [
        [name] * count for name, count in zip(calls, graphs_made, strict=True)
    ]


def test_mask_forms_of_the_operators_are_those_of_the_cases() -> None:
    assert {mask.form for mask in (Full(), Causal())} == set(bench_peers._MASKS)
