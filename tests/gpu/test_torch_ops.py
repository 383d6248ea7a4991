"""Conventions on the GPU: the same calls to the adapters, from every library, and to PyTorch's own operators."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final
from unittest import mock

import numpy as np
import pytest

from cutlass_py_attn import torch_ops
from cutlass_py_attn.api import attention
from cutlass_py_attn.api.attention import problem_of
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.testing.check import Array, Kernels
from tests.gpu import test_arrays

B, MQ, MK, H, HK, D = 2, 72, 136, 4, 2, 64
STARTS_Q, STARTS_K = (np.array(starts, np.int32) for starts in ([0, 5, 69, 102], [0, 9, 73, 143]))
LONGEST: Final = (64, 70)
SEED: Final = {"philox_seed": 42, "philox_offset": 5}
CLOSE: Final = 5e-3  # of two float16 results whose sums were made in another order, by the norm of their difference
LOGSUMEXP_CLOSE: Final = 2e-3

Give = Callable[[Array], Any]
Found = dict[str, Any]


class Ours:
    """The adapters, with the same options in every call; forwards draw from the seed given."""

    def __init__(self, where: dict[str, Any], seed: dict[str, Any] | None = None) -> None:
        self._where = where
        self._seed = seed or SEED

    def __call__(self, name: str, *arguments: Any, **options: Any) -> Any:
        is_backward = name.endswith("backward")
        seeded = {} if is_backward else self._seed
        return getattr(torch_ops, name)(*arguments, **options, **seeded, **self._where)


def numbers(*shape: int, seed: int = 0) -> Array:
    """float16, normal."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float16)


def operands(give: Give, *, heads_key: int = H, heads_first: bool = False) -> tuple[Any, Any, Any, Any]:
    """query, key, value and grad_out, [B, M, H, D] or, with heads first, [B, H, M, D]."""
    sizes = ((MQ, H, 1), (MK, heads_key, 2), (MK, heads_key, 3), (MQ, H, 4))
    shapes = [((B, heads, rows) if heads_first else (B, rows, heads), seed) for rows, heads, seed in sizes]
    query, key, value, grad_out = (give(numbers(*shape, D, seed=seed)) for shape, seed in shapes)
    return query, key, value, grad_out


def tokens(give: Give, *batch: int) -> tuple[Any, ...]:
    """The same of several concatenated sequences, then where these start."""
    rows = (int(STARTS_Q[-1]), int(STARTS_K[-1]), int(STARTS_K[-1]), int(STARTS_Q[-1]))
    tensors = (give(numbers(*batch, count, H, D, seed=seed)) for seed, count in enumerate(rows))
    return *tensors, give(STARTS_Q), give(STARTS_K)


def named(output: Any, logsumexp: Any, gradients: Any) -> Found:
    """The results by name, without those that are None."""
    names = ("grad_query", "grad_key", "grad_value", "grad_bias")
    found = {"output": output, "logsumexp": logsumexp, **dict(zip(names, gradients, strict=False))}
    return {name: array for name, array in found.items() if array is not None}


def efficient_bias_and_dropout(ops: Any, give: Give) -> Found:
    """The raw operator with everything that it differentiates."""
    query, key, value, grad_out = operands(give)
    bias = give(numbers(B, H, MQ, MK, seed=5))
    output, lse, seed, offset, mq, mk = ops(
        "efficient_attention_forward", query, key, value, bias, None, None, None, None, 0.3, 0, True, scale=0.2
    )
    gradients = ops(
        "efficient_attention_backward", grad_out, query, key, value, bias, output, None, None, mq, mk, lse, 0.3, seed,
        offset, 0, True, scale=0.2, num_splits_key=0,
    )  # fmt: skip
    return {**named(output, lse, gradients), "seed": (seed, offset)}


def _efficient_window(kind: int) -> Callable[[Any, Give], Found]:
    def run(ops: Any, give: Give) -> Found:
        query, key, value, grad_out = operands(give)
        output, lse, *rest = ops(
            "efficient_attention_forward", query, key, value, None, None, None, None, None, 0.0, kind, True,
            window_size=20,
        )  # fmt: skip
        gradients = ops(
            "efficient_attention_backward", grad_out, query, key, value, None, output, None, None, *rest[2:], lse, 0.0,
            *rest[:2], kind, False, window_size=20,
        )  # fmt: skip
        return named(output, lse, gradients[:3])

    return run


def _efficient_lengths(kind: int) -> Callable[[Any, Give], Found]:
    def run(ops: Any, give: Give) -> Found:
        query, key, value, grad_out, *starts = tokens(give, 1)
        output, lse, *rest = ops(
            "efficient_attention_forward", query, key, value, None, *starts, *LONGEST, 0.0, kind, True
        )
        gradients = ops(
            "efficient_attention_backward", grad_out, query, key, value, None, output, *starts, *LONGEST, lse, 0.0,
            *rest[:2], kind, False,
        )  # fmt: skip
        return named(output, lse, gradients[:3])

    return run


def efficient_shared_storage(ops: Any, give: Give) -> Found:
    """The gradients as slices of one array."""
    query, key, value, grad_out = operands(give)
    key, value = query + key[:, :MQ], query - value[:, :MQ]
    output, lse, *rest = ops(
        "efficient_attention_forward", query, key, value, None, None, None, None, None, 0.0, 1, True
    )
    gradients = ops(
        "efficient_attention_backward", grad_out, query, key, value, None, output, None, None, *rest[2:], lse, 0.0,
        *rest[:2], 1, False, shared_storage_dqdkdv=True,
    )  # fmt: skip
    return named(output, lse, gradients[:3])


def sdpa_causal_and_dropout(ops: Any, give: Give) -> Found:
    """Heads first, as views."""
    query, key, value, grad_out = operands(give, heads_first=True)
    name = "scaled_dot_product_efficient_attention"
    output, lse, seed, offset = ops(name, query, key, value, None, True, 0.3, True, scale=0.1)
    gradients = ops(
        f"{name}_backward", grad_out, query, key, value, None, output, lse, seed, offset, 0.3,
        [True, True, True, False], True, scale=0.1,
    )  # fmt: skip
    return {**named(output, lse, gradients[:3]), "seed": (seed, offset)}


def _sdpa_bias(bias: Array) -> Callable[[Any, Give], Found]:
    """A bias, with its gradient, or a bool mask that broadcasts."""

    def run(ops: Any, give: Give) -> Found:
        query, key, value, grad_out = operands(give, heads_first=True)
        given = give(bias)
        name = "scaled_dot_product_efficient_attention"
        output, lse, seed, offset = ops(name, query, key, value, given, True)
        asked = [True, True, True, bias.dtype != np.bool_]
        gradients = ops(f"{name}_backward", grad_out, query, key, value, given, output, lse, seed, offset, 0.0, asked)
        return named(output, lse, gradients)

    return run


def flash_window_and_groups(ops: Any, give: Give) -> Found:
    """Two query heads for each key head, and the bottom-right diagonal."""
    query, key, value, grad_out = operands(give, heads_key=HK)
    options = {"scale": 0.2, "window_size_left": 30, "window_size_right": -1}
    output, lse, *rest = ops(
        "flash_attention_forward", query, key, value, None, None, MQ, MK, 0.0, True, False, **options
    )
    gradients = ops(
        "flash_attention_backward", grad_out, query, key, value, output, lse, None, None, MQ, MK, 0.0, True, *rest[:2],
        **options,
    )  # fmt: skip
    return named(output, lse, gradients)


def flash_lengths(ops: Any, give: Give) -> Found:
    """Packed tensors and a packed logsumexp."""
    query, key, value, grad_out, *starts = tokens(give)
    output, lse, *rest = ops("flash_attention_forward", query, key, value, *starts, *LONGEST, 0.0, True, False)
    gradients = ops(
        "flash_attention_backward", grad_out, query, key, value, output, lse, *starts, *LONGEST, 0.0, True, *rest[:2]
    )
    return named(output, lse, gradients)


def flash_alibi_and_softcap(ops: Any, give: Give) -> Found:
    """What FlashAttention has beyond PyTorch's operator."""
    query, key, value, grad_out = operands(give)
    options = {"softcap": 2.0, "alibi_slopes": give(np.linspace(0.01, 0.3, H, dtype=np.float32))}
    output, lse, *rest = ops(
        "flash_attention_forward", query, key, value, None, None, MQ, MK, 0.0, False, False, **options
    )
    gradients = ops(
        "flash_attention_backward", grad_out, query, key, value, output, lse, None, None, MQ, MK, 0.0, False,
        *rest[:2], **options,
    )  # fmt: skip
    return named(output, lse, gradients)


def _cudnn(bias: Array | None, causal: bool) -> Callable[[Any, Give], Found]:
    def run(ops: Any, give: Give) -> Found:
        query, key, value, grad_out = operands(give, heads_first=True)
        given = None if bias is None else give(bias)
        output, lse, q, k, mq, mk, seed, offset, _ = ops(
            "cudnn_attention_forward", query, key, value, given, None, None, MQ, MK, True, 0.0, causal
        )
        gradients = ops(
            "cudnn_attention_backward", grad_out, query, key, value, output, lse, seed, offset, given, q, k, mq, mk,
            0.0, causal,
        )  # fmt: skip
        return named(output, lse, gradients)

    return run


def cudnn_lengths(ops: Any, give: Give) -> Found:
    """Packed tensors and a packed logsumexp, tokens first."""
    query, key, value, grad_out, *starts = tokens(give)
    output, lse, q, k, mq, mk, seed, offset, _ = ops(
        "cudnn_attention_forward", query, key, value, None, *starts, *LONGEST, True, 0.0, True
    )
    gradients = ops(
        "cudnn_attention_backward", grad_out, query, key, value, output, lse, seed, offset, None, q, k, mq, mk, 0.0,
        True,
    )  # fmt: skip
    return named(output, lse, gradients)


MASK_2D = numbers(MQ, MK, seed=6)
PADDING = np.arange(MK) < np.array([MK, 100])[:, None, None, None]

# Those that PyTorch's operators take too, and what only the adapters do.
SHARED: Final[dict[str, Callable[[Any, Give], Found]]] = {
    "efficient_bias_and_dropout": efficient_bias_and_dropout,
    "efficient_window_top_left": _efficient_window(1),
    "efficient_window_bottom_right": _efficient_window(2),
    "efficient_lengths_top_left": _efficient_lengths(1),
    "efficient_lengths_bottom_right": _efficient_lengths(2),
    "efficient_shared_storage": efficient_shared_storage,
    "sdpa_causal_and_dropout": sdpa_causal_and_dropout,
    "flash_window_and_groups": flash_window_and_groups,
    "flash_lengths": flash_lengths,
    "cudnn_causal": _cudnn(None, causal=True),
    "cudnn_bias": _cudnn(MASK_2D, causal=False),
    "cudnn_lengths": cudnn_lengths,
}
# The backward of PyTorch 2.11 forgets the offset of the diagonal where it tests the window.
FORWARD_ONLY: Final = ("efficient_window_bottom_right",)
SCENARIOS: Final = {
    **SHARED,
    "sdpa_bias_2d": _sdpa_bias(MASK_2D),
    "sdpa_padding_mask": _sdpa_bias(PADDING),
    "flash_alibi_and_softcap": flash_alibi_and_softcap,
}


def by_reference(name: str) -> Found:
    """The results in NumPy, from the CPU."""
    return SCENARIOS[name](Ours({"backend": "reference"}), lambda array: array)


def problems() -> list[Problem]:
    """Every problem that these tests run, recorded from the reference."""
    found: list[Problem] = []

    def record(direction: str, *rest: Any) -> Any:
        problem, results = problem_of(direction, *rest)
        found.append(problem)
        return problem, results

    with mock.patch.object(attention, "problem_of", record):
        for name in SCENARIOS:
            by_reference(name)
    return found


def expect_close(found: Found, expected: Found) -> None:
    """Same shapes; small differences by norm, and of logsumexp wherever a row sees a key."""
    for name, right in expected.items():
        if name == "seed":
            continue
        left, right = (np.asarray(array).astype(np.float64) for array in (found[name], right))
        assert left.shape == right.shape, name
        if name == "logsumexp":
            seen = np.isfinite(left)
            assert seen.any()
            np.testing.assert_allclose(left[seen], right[seen], rtol=0, atol=LOGSUMEXP_CLOSE)
        else:
            error = np.linalg.norm(left - right) / np.linalg.norm(right)
            assert error < CLOSE, f"{name}: {error:.2e}"


def on_host(library: test_arrays.Library, found: Found) -> Found:
    """The results as NumPy arrays; they are of the library."""
    arrays = {name: array for name, array in found.items() if name != "seed"}
    assert all(isinstance(array, library.array_type) for array in arrays.values())
    return {name: library.to_host(array) for name, array in arrays.items()}


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("module", ["numpy", "torch", "cupy", "jax"])
def test_every_library(name: str, module: str, kernels: Kernels) -> None:
    ours, expected = Ours({"kernels": kernels}), by_reference(name)
    if module == "numpy":
        expect_close(SCENARIOS[name](ours, lambda array: array), expected)
        return
    library = test_arrays._library(module)
    found = SCENARIOS[name](ours, library.to_device)
    driver.call("cuCtxSynchronize")
    found = on_host(library, found)
    expect_close(found, expected)
    if "logsumexp" in found:
        np.testing.assert_array_equal(np.isinf(found["logsumexp"]), np.isinf(expected["logsumexp"]))


class Theirs:
    """PyTorch's operators under our names."""

    def __init__(self, torch: ModuleType) -> None:
        self._operators = torch.ops.aten

    def __call__(self, name: str, *arguments: Any, **options: Any) -> Any:
        return getattr(self._operators, f"_{name}")(*arguments, **options)


@pytest.mark.parametrize("name", SHARED)
def test_as_pytorch_s_operators(name: str, kernels: Kernels) -> None:
    """Same calls, argument for argument; a dropped weight is dropped by both."""
    library = test_arrays._library("torch")
    try:
        theirs = SHARED[name](Theirs(library.module), library.to_device)
    except AttributeError:
        pytest.skip(f"torch {library.module.__version__} has no operator _{name}: nothing to compare with")
    seed = dict(zip(SEED, theirs["seed"], strict=True)) if "seed" in theirs else None
    ours = SHARED[name](Ours({"kernels": kernels}, seed), library.to_device)
    driver.call("cuCtxSynchronize")
    theirs = {key: array for key, array in theirs.items() if name not in FORWARD_ONLY or "grad" not in key}
    expect_close(on_host(library, ours), on_host(library, theirs))


def test_gradient_of_a_broadcast_bias_is_autograd_s(kernels: Kernels) -> None:
    library = test_arrays._library("torch")
    torch = library.module
    query, key, value, grad_out = operands(library.to_device, heads_first=True)
    bias = library.to_device(MASK_2D)
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value, bias)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        output = torch.nn.functional.scaled_dot_product_attention(*leaves[:3], attn_mask=leaves[3])
    output.backward(grad_out)
    ours = SCENARIOS["sdpa_bias_2d"](Ours({"kernels": kernels}), library.to_device)
    theirs = named(output.detach(), None, [leaf.grad for leaf in leaves])
    driver.call("cuCtxSynchronize")
    expect_close(on_host(library, ours), on_host(library, theirs))


def test_expanded_gradient(kernels: Kernels) -> None:
    """That of a plain sum has no contiguous axis; it is copied, as PyTorch does."""
    library = test_arrays._library("torch")
    query, key, value, _ = operands(library.to_device)
    where = {"kernels": kernels}
    output, lse, *rest = torch_ops.flash_attention_forward(
        query, key, value, None, None, 0, 0, 0.0, True, window_size_left=30, **where
    )
    ones = library.module.ones_like(output)
    expanded, dense = (
        torch_ops.flash_attention_backward(
            grad_out, query, key, value, output, lse, None, None, 0, 0, 0.0, True, *rest[:2], window_size_left=30,
            **where,
        )
        for grad_out in (ones[:1, :1, :1, :1].expand_as(ones), ones)
    )  # fmt: skip
    assert all(
        library.module.allclose(left, right, rtol=CLOSE, atol=CLOSE)
        for left, right in zip(expanded, dense, strict=True)
    )


@pytest.mark.parametrize("late", ["operands", "kernels"])
@pytest.mark.parametrize("name", ["sdpa_padding_mask", "flash_lengths"])
@pytest.mark.parametrize("module", ["torch", "cupy"])
def test_what_the_library_computes_is_in_the_stream_s_order(
    module: str, name: str, late: str, kernels: Kernels
) -> None:
    """Operands are written late on the library's stream, or the kernels' stream is busy: masks and logsumexp, which
    the library maps, are still those of this call."""
    library = test_arrays._library(module)
    streams = library.module.cuda
    producer, consumer = streams.Stream(), streams.Stream()
    busy = library.to_device(np.ones(test_arrays.DELAY_ELEMENTS, np.float32))

    def entered(stream: Any) -> Any:
        return streams.stream(stream) if module == "torch" else stream

    def delay() -> None:
        for _ in range(test_arrays.DELAY_PASSES):
            busy[...] *= 1.0001

    def written_late(array: Array) -> Any:
        source, target = library.to_device(array), library.to_device(np.zeros_like(array))
        if late == "operands":
            delay()
        target[...] = source
        return target

    for where in ({"kernels": kernels}, {"kernels": kernels, "stream": consumer}):
        # Once on the default stream, so that no library compiles anything later on.
        driver.call("cuCtxSynchronize")
        with entered(consumer if late == "kernels" else producer):
            delay()
        with entered(producer):
            found = SCENARIOS[name](Ours(where), written_late)
            driver.call("cuCtxSynchronize")
    expect_close(on_host(library, found), by_reference(name))
