"""append_to_cache on the GPU: every byte equals the reference's, for random problems and for arrays of each library."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cutlass_py_attn.api.attention import mla_attention_forward
from cutlass_py_attn.api.paged import Paged
from cutlass_py_attn.api.serving import append_to_cache
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.testing.check import Kernels
from tests.cases import serving_cases
from tests.cases.serving_cases import AppendCase, Array, Placed
from tests.support.refusals import expect_among

GROUP = 24  # random problems of a test
BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("first", range(0, serving_cases.SEEDS, GROUP))
def test_random_appends(first: int, kernels: Kernels, arch: str) -> None:
    """Dims, dtypes, scales, layouts of the pools, page sizes and skipped slots."""
    for seed in range(first, first + GROUP):
        assert not serving_cases.append_case(seed).check(kernels, arch)[1], f"seed {seed}"


@pytest.mark.parametrize("first", range(0, serving_cases.SEEDS, GROUP))
def test_random_appends_to_latent_caches(first: int, kernels: Kernels, arch: str) -> None:
    """Codes with computed scales of tiles, beside columns as they are; packed rows and pages, and arrays apart."""
    for seed in range(first, first + GROUP):
        assert not serving_cases.latent_append_case(seed).check(kernels, arch)[1], f"seed {seed}"


@pytest.mark.parametrize("scale", [1.0, 0.37, 3.0])
def test_every_bfloat16_number(scale: float, kernels: Kernels, arch: str) -> None:
    """All 65536 bit patterns, NaN and infinities among them, as e4m3."""
    rows = np.arange(1 << 16, dtype=np.uint16).view(BF16).reshape(512, 1, 128)
    case = case_of(rows, rows[::-1], (32, 16, 1, 128), "uint8", np.float32(scale))
    assert not case.check(kernels, arch)[1]


def case_of(key: Array, value: Array, shape: tuple[int, ...], dtype: str, scale: Any) -> AppendCase:
    """Returns an append of dense arrays in the order of the slots; both scales are `scale`."""
    slots = np.arange(key.shape[0], dtype=np.int64)
    arrays = {"key": key, "value": value, "slots": slots, "key_scale": np.array(scale), "value_scale": np.array(scale)}
    placed = {
        name: Placed(np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy(), layout(array), 0)
        for name, array in arrays.items()
    }
    size = int(np.prod(shape))
    caches = {
        name: Placed(np.zeros(size, np.uint8), Tensor.contiguous(shape, dtype), 0) for name in serving_cases.CACHES
    }
    return AppendCase({**placed, **caches})


def layout(array: Array) -> Tensor:
    """Returns the layout of a dense copy."""
    return Tensor.contiguous(array.shape, array.dtype.name)


def inputs() -> dict[str, Array]:
    """Returns an append of 100 tokens into a pool of 16 pages, with skipped slots."""
    rng = np.random.default_rng(3)
    slots = rng.permutation(256)[:100].astype(np.int64)
    slots[[7, 50]] = -1, 300
    rows = [rng.standard_normal((100, 8, 128), np.float32).astype(BF16) for _ in range(2)]
    pools = [rng.integers(0, 60, (16, 16, 8, 128)).astype(BF16) for _ in range(2)]
    return dict(zip(("key", "value", "key_cache", "value_cache", "slots"), (*rows, *pools, slots), strict=True))


def expected_of(given: dict[str, Array]) -> dict[str, Array]:
    """Returns the arrays after the append, by the reference."""
    arrays = {name: array.copy() for name, array in given.items()}
    append_to_cache(**arrays, backend="reference")
    return arrays


def torch_array(torch: Any, array: Array) -> Any:
    """Returns the array on the GPU."""
    bits = torch.from_numpy(array.view(f"i{array.itemsize}").copy()).cuda()
    return bits.view(getattr(torch, array.dtype.name))


def torch_bits(tensor: Any) -> Array:
    """Returns the bits of a tensor of 1 or 2 bytes an element."""
    torch_type = {1: "uint8", 2: "int16"}[tensor.element_size()]
    import torch

    found: Array = tensor.contiguous().view(getattr(torch, torch_type)).cpu().numpy()
    return found


def test_torch(kernels: Kernels) -> None:
    """In place, on torch's current stream, with pools of float8_e4m3fn and computed scales too."""
    torch = pytest.importorskip("torch")
    given = inputs()
    expected = expected_of(given)
    arrays = {name: torch_array(torch, array) for name, array in given.items()}
    for _ in range(3):  # the call is checked, then repeated
        append_to_cache(**arrays, kernels=kernels)
    for name in ("key_cache", "value_cache"):
        assert (torch_bits(arrays[name]) == expected[name].view(np.int16)).all()
    pools = {f"{name}_cache": np.zeros((16, 16, 8, 128), np.uint8) for name in ("key", "value")}
    scales = {f"{name}_scale": np.zeros((16, 16, 8), np.float32) for name in ("key", "value")}
    expected = expected_of({**given, **pools, **scales})
    e4m3 = {name: torch.zeros(16, 16, 8, 128, dtype=torch.float8_e4m3fn, device="cuda") for name in pools}
    made = {name: torch.zeros(16, 16, 8, device="cuda") for name in scales}
    append_to_cache(**{**arrays, **e4m3}, **made, kernels=kernels)
    for name in pools:
        assert (torch_bits(e4m3[name]) == expected[name]).all()
    for name in scales:
        assert (made[name].cpu().numpy() == expected[name]).all()


def test_a_latent_cache_of_packed_rows(kernels: Kernels, gpu: driver.Device) -> None:
    """Codes, scales and other columns are views of one torch pool of 656 bytes a row, which a decode then reads."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(5)
    dims = {"key": 512, "value": 64}
    given = {name: rng.standard_normal((100, 1, dims[name]), np.float32).astype(BF16) for name in dims}
    given["slots"] = inputs()["slots"]
    host = np.zeros((16, 16, 1, 656), np.uint8)
    caches = host[..., :512], host[..., 512:528].view(np.float32), host[..., 528:].view(BF16)
    names = "key_cache", "key_scale", "value_cache"
    append_to_cache(**given, **dict(zip(names, caches, strict=True)), backend="reference")
    pool = torch.zeros(16, 16, 1, 656, dtype=torch.uint8, device="cuda")
    parts = pool[..., :512], pool[..., 512:528], pool[..., 528:]
    dtypes = torch.float8_e4m3fn, torch.float32, torch.bfloat16
    views = {name: part.view(dtype) for name, part, dtype in zip(names, parts, dtypes, strict=True)}
    arrays = {name: torch_array(torch, array) for name, array in given.items()}
    for _ in range(3):  # the call is checked, then repeated
        pool.zero_()
        append_to_cache(**arrays, **views, kernels=kernels)
        assert (pool.cpu().numpy() == host).all()
    if gpu.compute_capability != (9, 0):
        return  # no kernel of another GPU reads latent caches of codes
    query = rng.standard_normal((2, 1, 16, 576), np.float32).astype(BF16)
    table, lengths = np.arange(16, dtype=np.int32).reshape(2, 8)[:, ::-1].copy(), np.array([100, 37], np.int32)
    expected = decoded(query, table, lengths, caches, backend="reference")[0].astype(np.float32)
    on_gpu = (torch.from_numpy(array).cuda() for array in (table, lengths))
    output = decoded(torch_array(torch, query), *on_gpu, views.values(), kernels=kernels)[0].float().cpu().numpy()
    assert np.abs(output - expected).max() < 0.02


def decoded(query: Any, table: Any, lengths: Any, caches: Iterable[Any], **options: Any) -> Any:
    """Returns the output and the logsumexp of a decode of a latent cache: codes, scales and other columns."""
    codes, scale, rope = caches
    sequences = Paged(table, lengths)
    cached = {"cache_scale": scale, "cache_rope": rope}
    return mla_attention_forward(query, codes, **cached, scale=192**-0.5, sequences=sequences, **options)


def test_cupy_and_a_stream(kernels: Kernels) -> None:
    """On a stream that the caller names."""
    cupy = pytest.importorskip("cupy")
    given = inputs()
    expected = expected_of(given)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        arrays = {name: cupy.asarray(array) for name, array in given.items()}
        append_to_cache(**arrays, stream=stream, kernels=kernels)
    stream.synchronize()
    for name in ("key_cache", "value_cache"):
        assert (cupy.asnumpy(arrays[name]).view(np.int16) == expected[name].view(np.int16)).all()


def test_numpy(kernels: Kernels) -> None:
    """Host pools are written in place, strided ones too."""
    given = inputs()
    expected = expected_of(given)
    arrays = {name: array.copy() for name, array in given.items()}
    exchanged = arrays["key_cache"].transpose(0, 2, 1, 3).copy()
    arrays["key_cache"] = exchanged.transpose(0, 2, 1, 3)
    append_to_cache(**arrays, kernels=kernels)
    for name in ("key_cache", "value_cache"):
        assert (arrays[name].view(np.int16) == expected[name].view(np.int16)).all()


def test_a_graph_reads_the_slots_at_each_replay(kernels: Kernels) -> None:
    """A captured call stores in the slots that are in device memory when the graph is launched."""
    torch = pytest.importorskip("torch")
    given = inputs()
    arrays = {name: torch_array(torch, array) for name, array in given.items()}
    append_to_cache(**arrays, kernels=kernels)  # loads the kernel, which a capture must not do
    graph = torch.cuda.CUDAGraph()
    arrays["slots"].fill_(-1)
    with torch.cuda.graph(graph):
        append_to_cache(**arrays, kernels=kernels)
    for seed in range(3):
        given["slots"] = np.random.default_rng(seed).permutation(256)[:100].astype(np.int64)
        for name in ("key_cache", "value_cache", "slots"):
            arrays[name].copy_(torch_array(torch, given[name]))
        graph.replay()
        torch.cuda.synchronize()
        expected = expected_of(given)
        for name in ("key_cache", "value_cache"):
            assert (torch_bits(arrays[name]) == expected[name].view(np.int16)).all()


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (lambda arrays: {"key": arrays["key_cache"].view(256, 8, 128)[:100]}, "key_cache: shares it with key"),
        (lambda arrays: {"value_cache": arrays["key_cache"]}, "key_cache: shares it with value_cache"),
        (lambda arrays: {"slots": arrays["slots"].int()}, "slots.dtype: must be int64"),
        (lambda arrays: {"slots": arrays["slots"].cpu()}, "slots: must be in memory of DLPack device type 2"),
    ],
)
def test_refused(change: Callable[[dict[str, Any]], dict[str, Any]], refusal: str, kernels: Kernels) -> None:
    """Nothing is written."""
    torch = pytest.importorskip("torch")
    given = inputs()
    arrays = {name: torch_array(torch, array) for name, array in given.items()}
    append_to_cache(**{**arrays, "slots": arrays["slots"] * 0 - 1}, kernels=kernels)  # a sound call of these layouts
    with pytest.raises(NotSupported) as caught:
        append_to_cache(**{**arrays, **change(arrays)}, kernels=kernels)
    expect_among(caught.value.refusals, refusal)
    assert (torch_bits(arrays["key_cache"]) == given["key_cache"].view(np.int16)).all()
