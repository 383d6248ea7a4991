"""append_to_cache and merge_states without a GPU: launches on the fake driver, refused calls, the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cutlass_py_attn.api import calls
from cutlass_py_attn.api.attention import attention_forward, mla_attention_forward
from cutlass_py_attn.api.paged import Paged
from cutlass_py_attn.api.serving import append_to_cache, merge_states
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.reference.quantization import dequantise_latent
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import InterfaceArray, aligned, artifact, decode
from tests.support.refusals import expect_raised

Array = npt.NDArray[Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
TOKENS, HEADS, D, DV, PAGES, PAGE = 5, 2, 64, 32, 3, 4


@pytest.fixture(autouse=True)
def _fresh() -> None:
    calls._prepared.clear()
    calls._repeated.clear()


class Kernels:
    """Artifacts for the fake driver, and the builds that were asked for."""

    def __init__(self) -> None:
        self.builds: list[Build] = []

    def __call__(self, build: Build) -> Any:
        self.builds.append(build)
        return artifact(build)


def rows(dtype: Any = BF16) -> dict[str, Array]:
    """Returns key, value and slots; the tokens 1 and 4 are skipped."""
    slots = aligned((TOKENS,), np.int64)
    slots[:] = 3, -1, 11, 0, 12
    return {
        "key": aligned((TOKENS, HEADS, D), dtype, 1),
        "value": aligned((TOKENS, HEADS, DV), dtype, 2),
        "slots": slots,
    }


def pools(dtype: Any = BF16) -> dict[str, Array]:
    """Returns the caches, full of ones."""
    found = {"key_cache": (PAGES, PAGE, HEADS, D), "value_cache": (PAGES, PAGE, HEADS, DV)}
    caches = {
        name: aligned(shape, np.uint8 if np.dtype(dtype).itemsize == 1 else dtype) for name, shape in found.items()
    }
    for cache in caches.values():
        cache[...] = 1
    return {name: cache.view(dtype) for name, cache in caches.items()}


def row_scales() -> dict[str, Array]:
    """Returns arrays for a scale of each row."""
    return {name: aligned((PAGES, PAGE, HEADS), np.float32) for name in ("key_scale", "value_scale")}


def on_device(arrays: dict[str, Array]) -> dict[str, Any]:
    """Returns CUDA arrays."""
    return {name: InterfaceArray(array) for name, array in arrays.items()}


def test_device_arrays_are_read_in_place(driver_log: FakeDriver) -> None:
    """One launch with the addresses and strides of the arrays; a call of the same layouts is bound once."""
    given, kernels = {**rows(), **pools()}, Kernels()
    given["key_cache"] = aligned((PAGES, HEADS, PAGE, D), BF16).transpose(0, 2, 1, 3)
    for _ in range(2):
        append_to_cache(**on_device(given), kernels=kernels, stream=0x77)
    launch = driver_log.of("cuLaunchKernelEx")[0]
    (build,) = kernels.builds
    struct = decode(build, launch.parameters)
    assert {name: struct[name] for name in given} == {name: array.ctypes.data for name, array in given.items()}
    assert [struct[f"key_cache_{axis}"] for axis in ("page", "row", "head")] == [HEADS * PAGE * D, D, PAGE * D]
    assert [struct[f"value_cache_{axis}"] for axis in ("page", "row", "head")] == [PAGE * HEADS * DV, HEADS * DV, DV]
    sizes = {"page_size": PAGE, "num_slots": PAGES * PAGE, "num_heads_key": HEADS, "num_rows": TOKENS * HEADS}
    assert {name: struct[name] for name in sizes} == sizes
    assert launch.stream == 0x77
    assert launch.grid == (-(-TOKENS * HEADS // build.tile_m), 1, 1)
    assert (build.symbol, build.arch) == ("append_sm80_bf16_d64v32_16x8", "sm_90")
    assert not [name for name in driver_log.names if name.startswith(("cuMemcpy", "cuMemAlloc"))]


@pytest.mark.parametrize(
    ("scale", "variant", "strides"),
    [((), "e4m3", (0, 0, 0)), ((1,), "e4m3", (0, 0, 0)), ((HEADS,), "e4m3", (0, 0, 1)),
     ((PAGES, PAGE, HEADS), "e4m3_row", (PAGE * HEADS, HEADS, 1))],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [np.uint8, E4M3])
def test_scales(driver_log: FakeDriver, dtype: Any, scale: tuple[int, ...], variant: str, strides: Any) -> None:
    """Each shape of the scales has its kernel and its strides."""
    scales = {name: aligned((*scale, 1), np.float32)[..., 0] for name in ("key_scale", "value_scale")}
    kernels = Kernels()
    append_to_cache(**on_device({**rows(), **pools(dtype), **scales}), kernels=kernels)
    (build,) = kernels.builds
    struct = decode(build, driver_log.of("cuLaunchKernelEx")[0].parameters)
    assert build.variant == variant
    assert tuple(struct[f"value_scale_{axis}"] for axis in ("page", "row", "head")) == strides
    assert struct["key_scale"] == scales["key_scale"].ctypes.data


def packed_pool(pages: int = PAGES) -> dict[str, Array]:
    """Returns the caches and the scales of a latent cache as views of rows of 656 bytes, which are 7."""
    pool = aligned((pages, PAGE, 1, 656), np.uint8)
    pool[...] = 7
    views = {"key_cache": pool[..., :512].view(E4M3), "key_scale": pool[..., 512:528].view(np.float32)}
    return {**views, "value_cache": pool[..., 528:].view(BF16)}


def latent_rows() -> dict[str, Array]:
    """Returns compressed rows, their columns of the rotary embedding, and slots; the tokens 1 and 4 are skipped."""
    given = {"key": aligned((TOKENS, 1, 512), BF16, 1), "value": aligned((TOKENS, 1, 64), BF16, 2)}
    return {**given, "slots": rows()["slots"]}


def test_a_latent_cache(driver_log: FakeDriver) -> None:
    """Codes, scales of tiles and 16-bit columns are views of one pool, and are written where they are."""
    given, kernels = {**latent_rows(), **packed_pool()}, Kernels()
    append_to_cache(**on_device(given), kernels=kernels)
    (build,) = kernels.builds
    (launch,) = driver_log.of("cuLaunchKernelEx")
    struct = decode(build, launch.parameters)
    assert build.symbol == "append_sm80_bf16_d512v64_e4m3_tile_4x32"
    assert {name: struct[name] for name in given} == {name: array.ctypes.data for name, array in given.items()}
    assert [struct[f"key_scale_{axis}"] for axis in ("page", "row", "head", "tile")] == [PAGE * 164, 164, 0, 1]
    assert "value_scale" not in struct


def test_numpy_pools_are_copied_back(driver_log: FakeDriver) -> None:
    """Caches go to the device and back, because most of their rows keep their values; rows only go there."""
    append_to_cache(**rows(), **pools(), kernels=artifact)
    names = driver_log.names
    assert (names.count("cuMemcpyHtoDAsync"), names.count("cuMemcpyDtoHAsync")) == (5, 2)
    assert names.count("cuMemAllocAsync") == names.count("cuMemFreeAsync") == 5


@pytest.mark.parametrize("empty", ["tokens", "pages"])
def test_nothing_to_store(driver_log: FakeDriver, empty: str) -> None:
    given = {**rows(), **pools()}
    names = ("key", "value", "slots") if empty == "tokens" else ("key_cache", "value_cache")
    append_to_cache(**on_device({**given, **{name: given[name][:0] for name in names}}), kernels=artifact)
    assert not driver_log.of("cuLaunchKernelEx")


APPEND_REFUSALS: dict[str, tuple[Callable[[dict[str, Array]], dict[str, Any]], str]] = {
    "missing": (lambda given: {"slots": None}, "slots: an array"),
    "rank": (lambda given: {"key": given["key"][0]}, "key.shape: (tokens, num_heads_key, head_dim)"),
    "tokens": (lambda given: {"slots": given["slots"][:4]}, "slots.shape: (5,) to match key (5, 2, 64)"),
    "heads": (lambda given: {"value": given["value"][:, :1]}, "value.shape: (5, 2, 32) to match key (5, 2, 64)"),
    "page size": (
        lambda given: {"value_cache": given["value_cache"][:, :3]},
        "value_cache.shape: (3, 4, 2, 32) to match key (5, 2, 64), value (5, 2, 32), key_cache (3, 4, 2, 64)",
    ),
    "dtype of slots": (lambda given: {"slots": given["slots"].astype(np.int32)}, "slots.dtype: int64"),
    "dtype of key": (
        lambda given: {name: each.astype("f8") for name, each in given.items() if name != "slots"},
        "key.dtype: one of float16, bfloat16, float32",
    ),
    "dtype of value": (lambda given: {"value": given["value"].astype(np.float16)}, "value.dtype: bfloat16 as key"),
    "dtype of the cache": (
        lambda given: {name: given[name].astype(np.float16) for name in ("key_cache", "value_cache")},
        "key_cache.dtype: bfloat16 as key, float8_e4m3fn, or uint8",
    ),
    "scale of 16 bits": (
        lambda given: {"key_scale": np.ones(2, np.float32)}, "key_scale: only an e4m3 cache has scales"
    ),
    "dtype of the other cache": (
        lambda given: {
            "key_cache": pools(E4M3)["key_cache"],
            "value_cache": given["value_cache"].astype(np.float16),
            **row_scales(),
        },
        "value_cache.dtype: float8_e4m3fn as key_cache, or bfloat16 as value",
    ),
    "no scale of a latent cache": (
        lambda given: {"key_cache": pools(E4M3)["key_cache"]}, "key_scale: float32 (3, 4, 2, 1), a computed scale"
    ),
    "shape of the scale of a latent cache": (
        lambda given: {"key_cache": pools(E4M3)["key_cache"], "key_scale": row_scales()["key_scale"]},
        "key_scale: float32 (3, 4, 2, 1), a computed scale of each 128 columns",
    ),
    "scale of 16-bit columns": (
        lambda given: {
            "key_cache": pools(E4M3)["key_cache"],
            "key_scale": row_scales()["key_scale"][..., None],
            "value_scale": row_scales()["value_scale"],
        },
        "value_scale: only e4m3 codes have scales",
    ),
    "scales of tiles of two caches": (
        lambda given: {
            **pools(E4M3),
            **{name: scale[..., None] for name, scale in row_scales().items() if name == "key_scale"},
            "value_scale": row_scales()["value_scale"],
        },
        "key_scale: float32 (), (1,), (2,) for given scales, or (3, 4, 2) for computed ones",
    ),
    "no scale": (
        lambda given: {**pools(E4M3), "value_scale": np.ones(2, np.float32)}, "key_scale: for an e4m3 cache"
    ),
    "shape of a scale": (
        lambda given: {**pools(E4M3), **row_scales(), "key_scale": np.ones((4, 2), np.float32)},
        "key_scale: float32 (), (1,), (2,) for given scales",
    ),
    "two kinds of scales": (
        lambda given: {**pools(E4M3), **row_scales(), "key_scale": np.ones(2, np.float32)},
        "value_scale: as key_scale of shape (2,)",
    ),
    "backend": (lambda given: {"backend": "cuda"}, "backend: one of auto, gpu, reference"),
    "kernels": (lambda given: {"kernels": "folder"}, "kernels: a function from a Build to its Artifact"),
    "one pool": (
        lambda given: {"value": given["value"].repeat(2, axis=2), "value_cache": given["key_cache"]},
        "key_cache: this shares it with value_cache",
    ),
    "pool of the rows": (
        lambda given: {"key": given["key_cache"].reshape(12, 2, 64)[:5]}, "key_cache: shares it with key"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", APPEND_REFUSALS)
@pytest.mark.parametrize("device", [True, False], ids=["device", "NumPy"])
def test_refused_appends(driver_log: FakeDriver, device: bool, name: str) -> None:
    """Nothing is allocated, copied or launched."""
    change, expected = APPEND_REFUSALS[name]
    given: dict[str, Any] = {**rows(), **pools()}
    given |= change(given)
    if device:
        given = {key: InterfaceArray(each) if isinstance(each, np.ndarray) else each for key, each in given.items()}
    options: dict[str, Any] = {} if "kernels" in given else {"kernels": artifact}
    expect_raised(lambda: append_to_cache(**given, **options), [expected])
    assert not [call for call in driver_log.names if call.startswith(("cuMem", "cuLaunch", "cuGraph"))]


def test_layouts_that_only_device_arrays_have(driver_log: FakeDriver) -> None:
    """All reasons at once: strides, alignment, rows that overlap."""
    given = {**rows(), **pools()}
    wide = aligned((TOKENS, HEADS, 2 * D), BF16)
    shared = np.lib.stride_tricks.as_strided(given["key_cache"], strides=(0, 256, 128, 2))
    slots = aligned((2 * TOKENS,), np.int64)[::2]
    odd = aligned((PAGES * PAGE * HEADS * DV * 2 + 1,), np.uint8)[1:].view(BF16).reshape(PAGES, PAGE, HEADS, DV)
    changed = {"key": wide[..., ::2], "key_cache": shared, "slots": slots, "value_cache": odd}
    expect_raised(
        lambda: append_to_cache(**on_device({**given, **changed}), kernels=artifact),
        ["key.strides: the last must be 1", "page stride of key_cache: must not overlap itself",
         "value_cache.alignment: the 2 bytes", "slots.strides: must be contiguous"],
    )  # fmt: skip


def test_a_pool_may_be_part_of_another_array(driver_log: FakeDriver) -> None:
    """Key and value heads take turns in one pool; read-only pools are refused."""
    whole = aligned((PAGES, PAGE, HEADS, 2, D), BF16)
    given = {**rows(), "key_cache": whole[..., 0, :], "value_cache": whole[..., 1, :]}
    given["value"] = aligned((TOKENS, HEADS, D), BF16)
    append_to_cache(**on_device(given), kernels=artifact)
    assert len(driver_log.of("cuLaunchKernelEx")) == 1
    given["key_cache"] = given["key_cache"].copy()
    given["key_cache"].flags.writeable = False
    with pytest.raises(NotSupported, match=r"key_cache = .*: must be writable.*; pass another array"):
        append_to_cache(**given, kernels=artifact)


def test_computed_scales_are_results(driver_log: FakeDriver) -> None:
    """Read-only ones are refused, while scales that are given may be read-only."""
    for scale, is_result in (((), False), ((HEADS,), False), ((PAGES, PAGE, HEADS), True)):
        scales = {name: aligned(scale, np.float32) for name in ("key_scale", "value_scale")}
        for array in scales.values():
            array.flags.writeable = False
        given = {**rows(), **pools(E4M3), **scales}
        if not is_result:
            append_to_cache(**given, kernels=artifact)
            continue
        expected = [f"{name}: must be writable" for name in scales]
        expect_raised(lambda given=given: append_to_cache(**given, kernels=artifact), expected)


def test_overlap_of_known_layouts(driver_log: FakeDriver) -> None:
    """A call of layouts that were sound is refused when its arrays overlap, each time."""
    key = aligned((2 * TOKENS, HEADS, D), BF16)
    given = {**rows(), **pools(), "key": key[:TOKENS]}
    append_to_cache(**on_device(given), kernels=artifact)
    append_to_cache(**on_device({**given, "key": key[TOKENS:]}), kernels=artifact)
    inside = given["key_cache"].reshape(-1, HEADS, D)[:TOKENS]
    for _ in range(2):
        with pytest.raises(NotSupported, match=r"key_cache = .* shares it with key"):
            append_to_cache(**on_device({**given, "key": inside}), kernels=artifact)
    assert len(driver_log.of("cuLaunchKernelEx")) == 2


@pytest.mark.parametrize("dtype", [np.float16, np.float32, BF16])
def test_reference_append(dtype: Any) -> None:
    """Rows 3, 11 and 0 of the cache; every other row keeps its ones."""
    given, caches = rows(dtype), pools(dtype)
    append_to_cache(**given, **caches, backend="reference")
    for name in ("key", "value"):
        flat = caches[f"{name}_cache"].reshape(PAGES * PAGE, HEADS, -1)
        for token, slot in ((0, 3), (2, 11), (3, 0)):
            assert (flat[slot] == given[name][token]).all()
        assert (np.delete(flat, (3, 11, 0), axis=0) == 1).all()


def test_reference_scales() -> None:
    """Computed scales restore the rows to 1/16 of a number; scales of skipped rows keep their values."""
    given, caches, scales = rows(), pools(E4M3), row_scales()
    before = {name: scale.copy() for name, scale in scales.items()}
    append_to_cache(**given, **caches, **scales, backend="reference")
    for name in ("key", "value"):
        for token, place in ((0, (0, 3)), (2, (2, 3)), (3, (0, 0))):
            row = given[name][token].astype("f4")
            scale = scales[f"{name}_scale"][place][:, None]
            np.testing.assert_allclose(scale[:, 0], np.abs(row).max(-1) / np.float32(448), rtol=1e-7)
            found = caches[f"{name}_cache"][place].astype("f4") * scale
            np.testing.assert_allclose(found, row, rtol=1 / 16, atol=float(scale.max()) * 2**-9)
        kept = np.ones((PAGES, PAGE), bool)
        kept[[0, 2, 0], [3, 3, 0]] = False
        assert (scales[f"{name}_scale"][kept] == before[f"{name}_scale"][kept]).all()


def test_reference_of_a_latent_cache() -> None:
    """What is appended is what mla_attention_forward reads; every byte of other rows keeps its value."""
    given, caches = latent_rows(), packed_pool()
    given["key"][0, 0, 128:256] *= 1000  # a scale of its own
    given["key"][2, 0, 300:302] = np.nan, np.inf
    append_to_cache(**given, **caches, backend="reference")
    flat = {name: cache.reshape(1, PAGES * PAGE, 1, -1) for name, cache in caches.items()}
    for token, slot in ((0, 3), (2, 11), (3, 0)):
        row = given["key"][token, 0].astype("f4")
        largest = np.nanmax(np.minimum(np.abs(row), np.finfo("f4").max).reshape(4, 128), axis=1)
        np.testing.assert_array_equal(flat["key_scale"][0, slot, 0], largest / np.float32(448))
        assert (flat["value_cache"][0, slot] == given["value"][token]).all()
    numbers = dequantise_latent(flat["key_cache"], flat["key_scale"], flat["value_cache"])
    for token, slot in ((0, 3), (3, 0)):
        row, scale = given["key"][token, 0].astype("f4"), np.repeat(flat["key_scale"][0, slot, 0], 128)
        assert (np.abs(numbers[0, slot, 0, :512] - row) <= np.abs(row) / 16 + scale * 2**-10).all()
    codes = caches["key_cache"].view(np.uint8).reshape(PAGES * PAGE, 512)
    assert codes[11, 300:302].tolist() == [0x7F, 0x7E]
    for name, cache in packed_pool().items():
        width = cache.shape[-1] * cache.itemsize
        before, after = (each.view(np.uint8).reshape(-1, width) for each in (cache, caches[name]))
        np.testing.assert_array_equal(*(np.delete(each, (3, 11, 0), axis=0) for each in (before, after)))
    query = aligned((1, 1, 4, 576), BF16, 3)
    paged = Paged(np.array([[0]], np.int32), np.array([1], np.int32))
    arrays = {"cache_scale": caches["key_scale"], "cache_rope": caches["value_cache"]}
    output, _ = mla_attention_forward(
        query, caches["key_cache"], **arrays, scale=0.05, sequences=paged, backend="reference"
    )
    np.testing.assert_allclose(output[0, 0, 0].astype("f4"), numbers[0, 0, 0, :512], rtol=2**-7)


def partial(dtype: Any = np.float16, queries: int = 40) -> list[Array]:
    """Returns two partial results of (2, queries, 3, 16) outputs."""
    padded = -(-queries // 32) * 32
    shapes = ((2, queries, 3, 16), (2, 3, padded))
    return [aligned(shape, kind, seed) for seed in (1, 2) for shape, kind in zip(shapes, (dtype, "f4"), strict=True)]


def test_merge_on_device_arrays(driver_log: FakeDriver) -> None:
    given, kernels = partial(), Kernels()
    output, logsumexp = merge_states(*map(InterfaceArray, given), kernels=kernels)
    (launch,) = driver_log.of("cuLaunchKernelEx")
    struct = decode(kernels.builds[0], launch.parameters)
    assert (output.shape, output.dtype, logsumexp.shape, logsumexp.dtype) == (
        (2, 40, 3, 16), "float16", (2, 3, 64), "float32",
    )  # fmt: skip
    assert (struct["output"], struct["logsumexp"]) == (output.pointer, logsumexp.pointer)
    assert (struct["output_a"], struct["logsumexp_b"]) == (given[0].ctypes.data, given[3].ctypes.data)
    assert [struct[f"output_b_{axis}"] for axis in ("batch", "row", "head")] == [40 * 48, 48, 16]
    assert (struct["num_heads"], struct["num_queries"], struct["num_rows"]) == (3, 40, 240)
    assert kernels.builds[0].symbol == "merge_sm80_f16_d16_64x2"


def test_packed_merge(driver_log: FakeDriver) -> None:
    """Rows outside of every sequence are cleared before the launch, which clamps lengths to the tokens."""
    output, logsumexp = aligned((1, 50, 3, 16), np.float16), aligned((4, 3, 32), "f4")
    bounds = aligned((5,), np.int32)
    kernels = Kernels()
    parts = [InterfaceArray(array) for array in (output, logsumexp, output.copy(), logsumexp.copy())]
    merge_states(*parts, cu_seqlens_q=InterfaceArray(bounds), max_seqlen_q=np.int64(20), kernels=kernels)
    struct = decode(kernels.builds[0], driver_log.of("cuLaunchKernelEx")[0].parameters)
    assert (struct["num_rows"], struct["num_queries"], struct["tokens_q"]) == (4 * 20 * 3, 20, 50)
    assert struct["cu_seqlens_q"] == bounds.ctypes.data
    names = driver_log.names
    assert [name for name in names if "Memset" in name or name == "cuLaunchKernelEx"][-1] == "cuLaunchKernelEx"
    assert any("Memset" in name for name in names)


MERGE_REFUSALS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "missing": (lambda given: {"logsumexp_b": None}, "logsumexp_b: an array"),
    "rank": (
        lambda given: {"output_b": given["output_b"][0]},
        "output_b.shape: (batch, num_queries, num_heads, head_dim_value)",
    ),
    "shape": (lambda given: {"output_b": given["output_b"][:, :39]}, "output_b.shape: (2, 40, 3, 16) as output_a"),
    "dtype": (lambda given: {"output_b": given["output_b"].astype("f4")}, "output_a.dtype: float32"),
    "unpadded": (
        lambda given: {"logsumexp_a": given["logsumexp_a"][..., :40].copy()},
        "logsumexp_a.shape: (2, 3, 64), (batch, num_heads, num_queries rounded up to a multiple of 32)",
    ),
    "dtype of logsumexp": (
        lambda given: {"logsumexp_a": given["logsumexp_a"].astype("f8")}, "logsumexp_a.dtype: float32"
    ),
    "no longest": (lambda given: {"cu_seqlens_q": np.zeros(3, np.int32)}, "max_seqlen_q: must come with cu_seqlens_q"),
    "longest": (
        lambda given: {"max_seqlen_q": 2.0, "cu_seqlens_q": np.zeros(3, np.int32)}, "max_seqlen_q: an int of at least 0"
    ),
    "out of another shape": (
        lambda given: {"out": np.zeros((2, 40, 3, 8), np.float16)}, "output.shape: (2, 40, 3, 16) as output_a"
    ),
    "out in an operand": (lambda given: {"out": given["output_a"]}, "output: shares it with output_a"),
}  # fmt: skip


@pytest.mark.parametrize("name", MERGE_REFUSALS)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_refused_merges(driver_log: FakeDriver, backend: str, name: str) -> None:
    change, expected = MERGE_REFUSALS[name]
    names = ("output_a", "logsumexp_a", "output_b", "logsumexp_b")
    given: dict[str, Any] = dict(zip(names, partial(), strict=True))
    given |= change(given)
    expect_raised(lambda: merge_states(**given, kernels=artifact, backend=backend), [expected])
    assert not [call for call in driver_log.names if call.startswith(("cuMem", "cuLaunch", "cuGraph"))]


def test_reference_merge_is_attention_over_all_keys() -> None:
    """Sinks in one part; a part without keys counts as nothing, though its output is NaN."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((2, n, 2, 16)).astype("f4") for n in (33, 50, 50))
    sinks = np.array([0.3, -1.0], np.float32)
    whole = attention_forward(query, key, value, sinks=sinks, backend="reference")
    first = attention_forward(query, key[:, :20], value[:, :20], sinks=sinks, backend="reference")
    second = attention_forward(query, key[:, 20:], value[:, 20:], backend="reference")
    out = np.empty_like(whole[0])
    found = merge_states(*first, *second, out=out, backend="reference")
    assert found[0] is out
    np.testing.assert_allclose(found[0], whole[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(found[1], whole[1], rtol=0, atol=1e-6)
    nothing = np.where(np.isposinf(whole[1]), whole[1], np.float32(-np.inf))
    kept = merge_states(np.full_like(out, np.nan), nothing, *whole, backend="reference")
    np.testing.assert_array_equal(kept[0], whole[0])
    np.testing.assert_array_equal(kept[1], whole[1])
    output, logsumexp = merge_states(out, nothing, out, nothing, backend="reference")
    assert not output.any()
    np.testing.assert_array_equal(logsumexp, nothing)
