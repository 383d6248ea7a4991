"""Tests of the peers of the benchmark: which take a case, what torch is asked for, and the program."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cutlass_py_attn.bench import harness
from cutlass_py_attn.errors import AttentionError
from cutlass_py_attn.problem.masks import Causal, Full
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.runtime import driver
from tests.support import fakes
from tools.bench import bench_peers, peers

VARLEN = "bf16_d128_s8192_t65536_h16_causal"
WINDOW = "bf16_d128_s16384_b2_h16_causal_window1024"
SMALL = "bf16_d64_s64_b2_h2_full"

# The program


@pytest.mark.usefixtures("graphs")
def test_a_run_compiles_peers_before_it_measures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log: list[str] = []
    monkeypatch.setattr(peers, "compile_ahead", lambda *arguments: log.append(f"compile {arguments[1:]}"))
    monkeypatch.setattr(harness, "Folder", lambda folder: fakes.artifact)
    monkeypatch.setattr(peers, "measure", lambda *arguments: log.append("measure") or iter(()))
    assert bench_peers.main(["--case", SMALL, "--kernels", str(tmp_path), "--samples", "5"]) == 0
    assert log == ["compile ((9, 0), 132)", "measure", "measure"]
    assert capsys.readouterr().out.splitlines()[1].startswith(SMALL)


def test_a_run_without_a_gpu_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_device(ordinal: int) -> Any:
        raise AttentionError("no GPU")

    monkeypatch.setattr(driver, "device", no_device)
    assert bench_peers.main(["--case", SMALL]) == 1
    assert capsys.readouterr() == ("", "no GPU\n")


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
    attention.SDPBackend = SimpleNamespace(**{name: name for name in peers.BACKENDS.values()})
    attention.sdpa_kernel = lambda backend: backend
    monkeypatch.setitem(sys.modules, "torch.nn.attention", attention)
    return FakeTorch()


def asked(torch: FakeTorch, peer: str, name: str, direction: str) -> tuple[Any, Any, Any, Any]:
    """The call, and the name, the arguments and the options of what it asks torch for."""
    arrays = {key: key for key in ("query", "key", "value", "grad_output", "bias", "cu_seqlens_q")}
    call = peers.prepare(torch, peer, parse(name), direction, arrays)
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


@pytest.mark.parametrize(("name", "takers"), [
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
    (f"{SMALL}_ranges11causal", ()),
    (f"{SMALL}_deterministic", ()),
    ("bf16_d128_q1_s8192_b64_h32k8_full_paged16", ()),
    ("bf16_d128_s256_b2_h4_full_paged16", ()),
])  # fmt: skip
def test_peers_of_a_case(name: str, takers: tuple[str, ...]) -> None:
    assert peers.names(parse(name)) == takers


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
    for package in peers.PACKAGES.values():
        monkeypatch.setattr(package, "version", lambda: "")


@pytest.mark.usefixtures("quiet_torch")
def test_a_peer_that_refuses_gives_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare(torch: Any, peer: str, *arguments: Any) -> str:
        if peer == "flash":
            raise RuntimeError("No available kernel.\nAborting")
        return peer

    monkeypatch.setattr(peers, "prepare", prepare)
    monkeypatch.setattr(peers, "_milliseconds", lambda *arguments: 2.0)
    reason = "RuntimeError: No available kernel."
    assert list(peers.measure(parse(SMALL), "forward", {}, lambda replay, stream: 1.0)) == [
        harness.Measurement("mem_efficient", VERSIONS["mem_efficient"], 2.0),
        harness.Measurement("flash", VERSIONS["flash"], None, reason),
        harness.Measurement("cudnn", VERSIONS["cudnn"], 2.0),
    ]
    assert capsys.readouterr().err == f"{SMALL} forward: no flash: {reason}\n"


@pytest.mark.usefixtures("quiet_torch")
@pytest.mark.parametrize(("chosen", "shown"), [(None, "FlashAttention-2"), ("FA3", "FlashAttention-3")])
def test_versions_name_the_flash_attention_of_torch(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, shown: str
) -> None:
    attention: Any = sys.modules["torch.nn.attention"]
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: chosen, raising=False)
    assert peers.versions(sys.modules["torch"]) == {**VERSIONS, "flash": f"{shown} of torch 2.11.0"}


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

    assert peers._milliseconds(SimpleNamespace(cuda=cuda), Peer(), direction, timed, 3) == 2.0
    calls = ["forward"] if direction == "forward" else ["forward", "backward"]
    assert log[: 2 + 2 * len(calls)] == ["stream begins", *calls, *calls, "synchronised"]
    captures = " ".join(log).split("capture begins ")[1:]
    assert [each.split(" capture ends")[0].split() for each in captures] == [
        [name] * count for name, count in zip(calls, graphs_made, strict=True)
    ]


def test_mask_forms_of_the_operators_are_those_of_the_cases() -> None:
    assert {mask.form for mask in (Full(), Causal())} == set(peers._MASKS)
