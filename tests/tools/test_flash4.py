"""Tests of FlashAttention-4 as a peer, with a fake of its interface: its calls, and compilation ahead."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cutlass_py_attn.bench import cases
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.spec import parse
from tools.bench import flash4, peers

DENSE = "bf16_d64_s512_b2_h4_causal"
VARLEN = "bf16_d64_s64_t200_h4k2_causal"
WINDOW = "bf16_d64_s512_b2_h4_causal_window128"


class FakeInterface(ModuleType):
    """The module of the package; `calls` has (function, arguments, options) of every call."""

    def __init__(self) -> None:
        super().__init__(flash4.INTERFACE)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def _flash_attn_fwd(self, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        self.calls.append(("forward", arguments, options))
        return ("output", "logsumexp", None, None, None)

    def _flash_attn_bwd(self, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        self.calls.append(("backward", arguments, options))
        return ("grad_query", "grad_key", "grad_value")


class FakeTensor:
    """A tensor whose views are named after it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def squeeze(self, axis: int) -> str:
        return f"{self.name}.squeeze({axis})"

    def view(self, dtype: str) -> str:
        return f"{self.name}.view({dtype})"

    def __getitem__(self, key: tuple[Any, slice]) -> str:
        return f"{self.name}[..., :{key[1].stop}]"

    def __eq__(self, other: object) -> bool:
        return other == self.name

    def __hash__(self) -> int:
        return hash(self.name)


@pytest.fixture
def interface(monkeypatch: pytest.MonkeyPatch) -> FakeInterface:
    """The package, installed."""
    fake = FakeInterface()
    monkeypatch.setitem(sys.modules, flash4.INTERFACE, fake)
    monkeypatch.setattr(flash4, "version", lambda: "4.0.0")
    return fake


def prepared(name: str) -> Any:
    """The call of a case, with the torch tensors of every operand."""
    vectors = ("cu_seqlens_q", "cu_seqlens_k", "page_table", "seqused_k", "sinks")
    arrays = ("query", "key", "value", "grad_output", *vectors)
    torch = SimpleNamespace(from_dlpack=FakeTensor, int32="int32")
    return peers.prepare(torch, "fa4", parse(name), "backward", {key: key for key in arrays})


def test_both_directions_call_the_package_with_the_same_options(interface: FakeInterface) -> None:
    call = prepared(DENSE)
    assert call.backward(call.forward()) == ("grad_query", "grad_key", "grad_value")
    shared = {"softmax_scale": None, "softcap": 0.0, "causal": True, "learnable_sink": None}
    assert interface.calls == [
        ("forward", ("query", "key", "value"), {**shared, "return_lse": True}),
        (
            "backward",
            ("query", "key", "value", "output", "grad_output", "logsumexp"),
            {**shared, "deterministic": False},
        ),
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"{DENSE}_scale0.5", {"softmax_scale": 0.5}),
        (f"{DENSE}_softcap30", {"softcap": 30.0}),
        (f"{DENSE}_sinks", {"learnable_sink": "sinks"}),
        (f"{DENSE}_deterministic", {"deterministic": True}),
        (WINDOW, {"window_size_left": 127, "window_size_right": 0}),
        (
            VARLEN,
            {
                "cu_seqlens_q": "cu_seqlens_q.view(int32)",
                "cu_seqlens_k": "cu_seqlens_k.view(int32)",
                "max_seqlen_q": 64,
                "max_seqlen_k": 64,
            },
        ),
    ],
)
def test_features_are_its_arguments(interface: FakeInterface, name: str, expected: dict[str, Any]) -> None:
    call = prepared(name)
    call.backward(call.forward())
    for function, _, options in interface.calls:
        wanted = {key: value for key, value in expected.items() if function == "backward" or key != "deterministic"}
        assert {key: options[key] for key in wanted} == wanted
        assert ("causal" in options) == ("window" not in name)


def test_a_version_with_other_functions_is_refused(interface: FakeInterface, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(query: Any, key: Any, value: Any, softmax_scale: Any, **_: Any) -> None: ...

    def renamed(query: Any, key: Any, value: Any, scale: Any) -> None: ...

    monkeypatch.setattr(interface, "_flash_attn_fwd", forward)
    prepared(DENSE)
    monkeypatch.setattr(interface, "_flash_attn_fwd", renamed)
    monkeypatch.setattr(interface, "_flash_attn_bwd", None)
    with pytest.raises(
        NotSupported, match=r"flash-attn-4 4\.0\.0: .* has no argument softmax_scale of _flash_attn_fwd"
    ) as found:
        prepared(DENSE)
    assert str(found.value).endswith("no _flash_attn_bwd; install flash-attn-4==4.0.0b36")


def test_lengths_have_packed_tensors(interface: FakeInterface) -> None:
    call = prepared(VARLEN)
    call.forward()
    assert interface.calls[0][1] == ("query.squeeze(0)", "key.squeeze(0)", "value.squeeze(0)")
    assert call.grad_output == "grad_output.squeeze(0)"


@pytest.mark.parametrize(("name", "query", "lengths"), [
    ("bf16_d64_q1_s512_b2_h4k2_full_paged16", "query", ("page_table", "seqused_k")),
    ("bf16_d64_n1x512u100,1x512u512_h4k2_full_paged16", "query", ("page_table", "seqused_k")),
    ("bf16_d64_n8x512,16x512_h4_causal_br_paged16", "query.squeeze(0)", ("cu_seqlens_q", "page_table", "seqused_k")),
])  # fmt: skip
def test_pages_are_the_pools_with_their_table(
    interface: FakeInterface, name: str, query: str, lengths: tuple[str, ...]
) -> None:
    prepared(name).forward()
    _, arguments, options = interface.calls[0]
    assert arguments == (query, "key", "value")
    assert {key: value for key, value in options.items() if str(value).endswith("view(int32)")} == {
        key: f"{key}.view(int32)" for key in lengths
    }
    assert options["max_seqlen_k"] == 512


def test_values_in_the_keys_are_their_first_columns(interface: FakeInterface) -> None:
    prepared("bf16_d576v512_q1_s512_b2_h16k1_full_mla").forward()
    assert interface.calls[0][1] == ("query", "key", "value[..., :512]")


@pytest.mark.parametrize(("name", "taken"), [
    (DENSE, True),
    (f"{DENSE}_softcap30_sinks_deterministic", True),
    ("bf16_d64_q1_s512_b2_h4_full", True),
    ("bf16_d64_q8_s512_b2_h4_causal_br", True),
    ("bf16_d64_q8_s512_b2_h4_causal", False),  # its diagonal would be another one
    ("bf16_d64_n8x16,16_h4_causal", False),
    ("bf16_d64_n8x16u4,16_h4_full", False),
    ("bf16_d64_s512_b2_h4_full_paged16", True),
    ("bf16_d64_s512_b2_h4_causal_br_paged16", True),
    ("bf16_d64_n512x512u100,512x512u512_h4_causal_paged16", False),
    ("bf16_d64_n1x512u100,1x512u512_h4_full_paged16", True),
    ("bf16_d64_s512_b2_h4_full_kv8", False),
    ("e4m3_d64_s512_b2_h4_full", True),  # its kernel is for Blackwell, as a call shows
    ("e4m3_d64_s512_b2_h4_full_descalehead", False),
    ("bf16_d576v512_q1_s512_b2_h16k1_full_mla", True),
    (f"{DENSE}_bias", False),
    (f"{DENSE}_alibi", False),
    (f"{DENSE}_ranges11causal", False),
    (f"{DENSE}_dropout0.1", False),
])  # fmt: skip
def test_it_takes_what_it_has_an_argument_for(interface: FakeInterface, name: str, taken: bool) -> None:
    assert flash4.takes(parse(name)) is taken
    assert ("fa4" in peers.names(parse(name))) is taken


def test_it_is_no_peer_if_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash4, "DISTRIBUTION", "no-such-distribution")
    assert not flash4.is_installed()
    assert "fa4" not in peers.names(parse(DENSE))


# Compilation ahead


def test_cases_that_share_kernels_are_compiled_once() -> None:
    names = [
        "bf16_d64_q1_s8192_b4_h8k2_full",
        "bf16_d64_s8192_b4_h16_causal",
        "bf16_d64_s2048_b16_h8_causal",
        "bf16_d64_s64_b16_h8_causal",
        "bf16_d64_s8192_b2_h8k2_causal",
        "bf16_d64_s8192_t20000_h8k2_causal",
        "f32_d64_s2048_b1_h1_causal",
        "bf16_d64_s2048_b1_h1_causal_alibi",
        "bf16_d64_q1_s8192_b4_h8k2_full_paged16",
        "bf16_d64_n1x8192u100,1x8192u8192_h8k2_full_paged16",
    ]
    specs = [parse(name) for name in names]
    assert flash4.variants((spec, cases.directions(spec)) for spec in specs) == [
        ("bf16_d64_s256_b1_h1_causal", True),
        ("bf16_d64_s64_b1_h1_causal", True),
        ("bf16_d64_s256_b1_h4k1_causal", True),
        ("bf16_d64_s8192_t8192_h4k1_causal", True),
        ("bf16_d64_q1_s256_b1_h4k1_full", False),
        ("bf16_d64_q1_s256_b1_h4k1_full_paged16", False),
    ]


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch whose fake tensors are (shape, dtype, device)."""

    class Mode:
        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    class Tensor(tuple[Any, ...]):
        def squeeze(self, axis: int) -> Tensor:
            return self

        def view(self, dtype: str) -> Tensor:
            return self

    def empty(shape: tuple[int, ...], *, dtype: str, device: str) -> Tensor:
        return Tensor((shape, dtype, device))

    dtypes = {name: name for name in ("bfloat16", "float32", "int32", "int64")}
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(empty=empty, **dtypes))
    monkeypatch.setitem(sys.modules, "torch._subclasses.fake_tensor", SimpleNamespace(FakeTensorMode=Mode))


@pytest.mark.usefixtures("fake_torch")
@pytest.mark.parametrize("has_backward", [False, True])
def test_a_variant_is_compiled_by_calls_with_fake_tensors(interface: FakeInterface, has_backward: bool) -> None:
    assert flash4.compile_variant("bf16_d64_s256_b1_h1_causal", has_backward) == ""
    assert [name for name, _, _ in interface.calls] == ["forward", "backward"][: 1 + has_backward]
    assert interface.calls[0][1][0] == ((1, 256, 1, 64), "bfloat16", "cuda")


@pytest.mark.usefixtures("fake_torch")
def test_a_variant_that_does_not_compile_is_a_message(
    interface: FakeInterface, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("head_dim is not supported\nmore")

    monkeypatch.setattr(interface, "_flash_attn_fwd", refuse)
    assert flash4.compile_variant("bf16_d512_s256_b1_h1_full", True) == (
        "bf16_d512_s256_b1_h1_full: AssertionError: head_dim is not supported"
    )


class InlinePool:
    """ProcessPoolExecutor in this process."""

    def __init__(
        self, workers: int, context: Any, initializer: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        initializer(*arguments)

    def __enter__(self) -> InlinePool:
        return self

    def __exit__(self, *_: object) -> None: ...

    def map(self, function: Callable[..., Any], *lists: Any) -> Iterator[Any]:
        return map(function, *lists)


@contextmanager
def without_variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Removes what `compile_ahead` sets in this process."""
    for name in (*flash4.CACHE, "FLASH_ATTENTION_ARCH", "FLASH_ATTENTION_NUM_SMS", "CUTE_DSL_ARCH"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    yield


def test_compilation_ahead_names_the_gpu_and_keeps_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, bool, str, str]] = []

    def compile_variant(name: str, has_backward: bool) -> str:
        compiled.append((name, has_backward, os.environ["CUTE_DSL_ARCH"], os.environ["FLASH_ATTENTION_NUM_SMS"]))
        return "d64: no" if has_backward else ""

    monkeypatch.setattr(flash4, "ProcessPoolExecutor", InlinePool)
    monkeypatch.setattr(flash4, "compile_variant", compile_variant)
    with without_variables(monkeypatch):
        found = flash4.compile_ahead([(parse(DENSE), ("forward", "backward"))], (9, 0), 132)
        assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
    assert found == ["d64: no"]
    assert compiled == [("bf16_d64_s256_b1_h1_causal", True, "sm_90a", "132")]


def test_a_folder_that_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with without_variables(monkeypatch):
        monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "/somewhere")
        flash4.use_cache()
        assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == "/somewhere"


def test_processes_that_die_do_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying(InlinePool):
        def map(self, function: Callable[..., Any], *lists: Any) -> Iterator[Any]:
            raise BrokenProcessPool("a process was terminated")

    monkeypatch.setattr(flash4, "ProcessPoolExecutor", Dying)
    with without_variables(monkeypatch):
        found = flash4.compile_ahead([(parse(DENSE), ("forward",))], (9, 0), 132)
    assert found == ["ahead: a process was terminated"]
