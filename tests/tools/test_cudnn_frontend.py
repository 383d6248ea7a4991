"""Tests of cuDNN's frontend as a peer, with a fake of the package: its graphs, and what it reads and writes."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.tensors import Tensor
from tools.bench import cudnn_frontend, peers

E4M3 = "e4m3_d64_s512_b2_h4_causal"
DECODE = "bf16_d64_q1_s512_b2_h4k2_full_paged16"
CHUNK = "bf16_d64_q8_s500_b2_h4k2_causal_br_paged16"
LATENT = "bf16_d576v512_q1_s512_b2_h16k1_full_mla"
LENGTHS = "bf16_d64_n1x512u100,1x512u512_h4k2_full_paged16"


@dataclass(frozen=True)
class FakeTensor:
    """A tensor of torch: what it is made of, shape, strides and dtype."""

    text: str
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]

    @classmethod
    def new(cls, text: str, shape: tuple[int, ...] | int, dtype: str) -> FakeTensor:
        sizes = (shape,) if isinstance(shape, int) else shape
        strides = tuple(math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))
        return cls(text, sizes, dtype, strides)

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def transpose(self, first: int, second: int) -> FakeTensor:
        order = [*range(len(self.shape))]
        order[first], order[second] = second, first
        shape, strides = (tuple(each[axis] for axis in order) for each in (self.shape, self.strides))
        return FakeTensor(self.text, shape, self.dtype, strides)

    def view(self, *shape: Any) -> FakeTensor:
        if isinstance(shape[0], str):
            return FakeTensor(self.text, self.shape, shape[0], self.strides)
        assert math.prod(shape) == math.prod(self.shape)
        return self.new(self.text, shape, self.dtype)

    def __getitem__(self, key: tuple[Any, slice]) -> FakeTensor:
        return FakeTensor(self.text, (*self.shape[:-1], key[1].stop), self.dtype, self.strides)


@dataclass(eq=False)
class Node:
    """A tensor of a graph."""

    attributes: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        def setter(value: Any) -> Node:
            self.attributes[name.removeprefix("set_")] = value
            return self

        return setter


@dataclass(eq=False)
class FakeGraph:
    """A graph; `log` has what was asked of it, `attention` the arguments of the attention."""

    options: dict[str, Any]
    log: list[Any] = field(default_factory=list)
    attention: dict[str, Any] = field(default_factory=dict)

    def tensor(self, **attributes: Any) -> Node:
        return Node(attributes)

    def sdpa(self, **options: Any) -> tuple[Node, None]:
        self.attention = options
        return Node(), None

    def sdpa_fp8(self, **options: Any) -> tuple[Node, None, Node, Node]:
        self.attention = options
        return Node(), None, Node(), Node()

    def build(self, modes: list[str]) -> None:
        self.log.append(("build", modes))

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, tensors: Any, workspace: Any, *, handle: Any) -> None:
        self.log.append(("execute", tensors, workspace, handle))


class FakeCudnn(ModuleType):
    """The package; `graphs` has the graphs, `streams` the streams that its handle was set to."""

    def __init__(self) -> None:
        super().__init__(cudnn_frontend.MODULE)
        self.graphs: list[FakeGraph] = []
        self.streams: list[tuple[str, int]] = []
        self.data_type = SimpleNamespace(**{name: name for name in cudnn_frontend.DATA_TYPES.values()})
        self.heur_mode = SimpleNamespace(A="A", FALLBACK="FALLBACK")

    def backend_version(self) -> int:
        return 91900

    def create_handle(self) -> str:
        return "handle"

    def set_stream(self, *, handle: str, stream: int) -> None:
        self.streams.append((handle, stream))

    def pygraph(self, **options: Any) -> FakeGraph:
        self.graphs.append(FakeGraph(options))
        return self.graphs[-1]


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCudnn]:
    """The package, installed."""
    fake = FakeCudnn()
    monkeypatch.setitem(sys.modules, cudnn_frontend.MODULE, fake)
    monkeypatch.setattr(cudnn_frontend, "version", lambda: "1.23.0")
    cudnn_frontend._handle.cache_clear()
    yield fake
    cudnn_frontend._handle.cache_clear()


def fake_torch(version: int = 91900) -> Any:
    """torch, whose current stream is 7."""
    return SimpleNamespace(
        from_dlpack=lambda given: given,
        empty=lambda shape, dtype, device: FakeTensor.new("empty", shape, dtype),
        full=lambda shape, value, dtype, device: FakeTensor.new(f"full of {value}", shape, dtype),
        backends=SimpleNamespace(cudnn=SimpleNamespace(version=lambda: version)),
        cuda=SimpleNamespace(current_stream=lambda: SimpleNamespace(cuda_stream=7)),
        **{name: name for name in ("bfloat16", "float8_e4m3fn", "float32", "int32", "uint8")},
    )


def stored(name: str) -> dict[str, FakeTensor]:
    """The tensors of a case as the benchmark stores them: integers with the dtype float32."""
    problem = parse(name).problem("forward")
    tensors: dict[str, Tensor] = {**problem.tensors(), **problem.vectors()}
    dtypes = {key: "float32" if each.dtype == "int32" else each.dtype for key, each in tensors.items()}
    found = {key: FakeTensor.new(key, tuple(each.shape), dtypes[key]) for key, each in tensors.items()}
    return {**found, "value": found["key"]} if parse(name).value_in_key else found


def prepared(name: str) -> Any:
    """The call of a case."""
    return peers.prepare(fake_torch(), "cudnn_frontend", parse(name), "forward", stored(name))


def described(call: Any, node: Node) -> tuple[str, Any]:
    """(what the tensor behind a node is made of, what the graph knows of it)."""
    given = call.tensors[node]
    assert list(given.shape) == node.attributes["dim"]
    assert list(given.strides) == node.attributes["stride"]
    assert node.attributes["data_type"] == cudnn_frontend.DATA_TYPES[given.dtype]
    return given.text, tuple(node.attributes["dim"])


def test_e4m3_operands_have_a_graph_with_scales(cudnn: FakeCudnn) -> None:
    call = prepared(E4M3)
    (graph,) = cudnn.graphs
    assert graph.options["io_data_type"] == "FP8_E4M3"
    assert graph.log == [("build", ["A", "FALLBACK"])]
    asked = graph.attention
    for name, axis in (("q", "query"), ("k", "key"), ("v", "value")):
        assert described(call, asked[name]) == (axis, (2, 4, 512, 64))
        assert asked[name].attributes["stride"] == [512 * 256, 64, 256, 1]  # no copy: the heads are inside the rows
    for name, value in cudnn_frontend.SCALES.items():
        assert described(call, asked[name]) == (f"full of {value}", (1, 1, 1, 1))
    assert asked["scale_s"] is not asked["scale_o"]
    assert (asked["attn_scale"], asked["generate_stats"]) == (1 / 8, False)
    assert (asked["use_causal_mask"], asked["use_causal_mask_bottom_right"]) == (True, False)
    outputs = [node for node in call.tensors if node.attributes.get("output")]
    assert sorted(described(call, node) for node in outputs) == [
        ("empty", (2, 4, 512, 64)),
        ("full of 0", (1, 1, 1, 1)),
        ("full of 0", (1, 1, 1, 1)),
    ]
    assert call.output.dtype == "float8_e4m3fn"


@pytest.mark.parametrize(("name", "queries", "pages", "bottom_right"), [
    (DECODE, 1, 32, False), (CHUNK, 8, 32, True), (LENGTHS, 1, 32, False),
])  # fmt: skip
def test_pages_are_the_pool_and_the_table_themselves(
    cudnn: FakeCudnn, name: str, queries: int, pages: int, bottom_right: bool
) -> None:
    call = prepared(name)
    asked = cudnn.graphs[0].attention
    assert described(call, asked["q"]) == ("query", (2, 4, queries, 64))
    assert described(call, asked["k"]) == ("key", (2 * pages + 1, 2, 16, 64))
    assert asked["k"].attributes["stride"] == [16 * 128, 64, 128, 1]
    for key in ("paged_attention_k_table", "paged_attention_v_table"):
        assert described(call, asked[key]) == ("page_table", (2, 1, pages, 1))
        assert call.tensors[asked[key]].dtype == "int32"
    assert described(call, asked["seq_len_q"]) == (f"full of {queries}", (2, 1, 1, 1))
    assert described(call, asked["seq_len_kv"]) == ("seqused_k", (2, 1, 1, 1))
    assert asked["paged_attention_max_seq_len_kv"] == parse(name).num_keys
    assert asked["use_padding_mask"]
    assert (asked["use_causal_mask"], asked["use_causal_mask_bottom_right"]) == (False, bottom_right)
    assert (call.output.shape, call.output.dtype) == ((2, 4, queries, 64), "bfloat16")


def test_values_in_the_keys_are_their_first_columns(cudnn: FakeCudnn) -> None:
    call = prepared(f"{LATENT}_scale0.5")
    asked = cudnn.graphs[0].attention
    assert described(call, asked["k"]) == ("key", (2, 1, 512, 576))
    assert described(call, asked["v"]) == ("key", (2, 1, 512, 512))
    assert (asked["attn_scale"], asked.get("use_padding_mask")) == (0.5, None)
    assert call.output.shape == (2, 16, 1, 512)


def test_a_forward_runs_on_the_current_stream(cudnn: FakeCudnn) -> None:
    call = prepared(DECODE)
    assert call.forward() is call.output
    assert cudnn.streams == [("handle", 7)]
    assert cudnn.graphs[0].log[1:] == [("execute", call.tensors, FakeTensor.new("empty", 1, "uint8"), "handle")]
    with call.backend, pytest.raises(NotSupported, match=r"nvidia-cudnn-frontend: .* only its forward"):
        call.backward(call.output)


def test_another_library_than_torch_s_is_refused(cudnn: FakeCudnn) -> None:
    with pytest.raises(NotSupported, match=r"nvidia-cudnn-frontend 1\.23\.0 has loaded cuDNN 91900 and torch 92000"):
        cudnn_frontend.prepare(fake_torch(92000), parse(DECODE), stored(DECODE))
    assert not cudnn.graphs


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize(("name", "taken"), [
    (E4M3, True),
    (DECODE, True),
    (CHUNK, True),
    (LATENT, True),
    (LENGTHS, True),
    ("f16_d64_s512_b2_h4_causal_paged16", True),
    ("bf16_d576v512_q1_s512_b2_h16k1_full_paged64_mla", True),
    ("bf16_d64_s512_b2_h4_causal", False),  # torch passes it to cuDNN
    ("f32_d64_q1_s512_b2_h4_full_paged16", False),
    ("bf16_d64_q1_s512_b2_h4_full_paged16_kv8", False),
    ("bf16_d576v512_q1_s512_b2_h16k1_full_mla_kv8_descaletile", False),
    (f"{E4M3}_descalehead", False),
    (f"{E4M3}_f16out", False),
    (f"{E4M3}_ranges11", False),
    (f"{E4M3}_softcap30", False),
    ("e4m3_d64_n512,256_h4_causal", False),
    ("bf16_d64_n8x512,16x512_h4_full_paged16", False),
    ("bf16_d64_s512_b2_h4_causal_window128_paged16", False),
    (f"{DECODE[:-8]}_sinks_paged16", False),
])  # fmt: skip
def test_it_takes_what_it_has_an_argument_for(name: str, taken: bool) -> None:
    assert cudnn_frontend.takes(parse(name)) is taken
    assert ("cudnn_frontend" in peers.names(parse(name))) is taken


def test_it_is_no_peer_if_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_frontend, "DISTRIBUTION", "no-such-distribution")
    assert not cudnn_frontend.is_installed()
    assert "cudnn_frontend" not in peers.names(parse(E4M3))
