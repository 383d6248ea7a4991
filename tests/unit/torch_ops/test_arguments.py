"""Tests of torch_ops: signatures, which argument becomes which option, and refusals."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import compress
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn import torch_ops as to
from cutlass_py_attn.api.results import Gradients
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Window
from cutlass_py_attn.score_terms.dropout import Dropout
from cutlass_py_attn.torch_ops import cudnn, efficient, flash, sdpa
from tests.support.refusals import expect_raised

Array = np.ndarray[Any, Any]
B, MQ, MK, H, D = 2, 5, 9, 4, 8
COMMON = {"stream": None, "backend": "auto", "kernels": None}
PHILOX = {"philox_seed": 0, "philox_offset": 0}
OPERANDS = ("query", "key", "value")

SIGNATURES: dict[Callable[..., Any], tuple[str, dict[str, Any]]] = {
    to.efficient_attention_forward: (
        "query key value bias cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p custom_mask_type "
        "compute_log_sumexp",
        {"scale": None, "seqlen_k": None, "window_size": None} | PHILOX,
    ),
    to.efficient_attention_backward: (
        "grad_out query key value bias out cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k logsumexp dropout_p "
        "philox_seed philox_offset custom_mask_type bias_requires_grad",
        {"scale": None, "num_splits_key": None, "window_size": None, "shared_storage_dqdkdv": False}
        | {"seqlen_k": None, "deterministic": False},
    ),
    to.scaled_dot_product_efficient_attention: (
        "query key value attn_bias compute_log_sumexp dropout_p is_causal",
        {"scale": None} | PHILOX,
    ),
    to.scaled_dot_product_efficient_attention_backward: (
        "grad_out query key value attn_bias out logsumexp philox_seed philox_offset dropout_p grad_input_mask "
        "is_causal",
        {"scale": None, "deterministic": False},
    ),
    to.flash_attention_forward: (
        "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask",
        {"scale": None, "window_size_left": None, "window_size_right": None, "seqused_k": None, "alibi_slopes": None}
        | {"softcap": 0.0, "q_descale": None, "k_descale": None, "v_descale": None}
        | PHILOX,
    ),
    to.flash_attention_backward: (
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal philox_seed "
        "philox_offset",
        {"scale": None, "window_size_left": None, "window_size_right": None, "seqused_k": None, "alibi_slopes": None}
        | {"softcap": 0.0, "deterministic": False},
    ),
    to.cudnn_attention_forward: (
        "query key value attn_bias cum_seq_q cum_seq_k max_q max_k compute_log_sumexp dropout_p is_causal "
        "return_debug_mask",
        {"scale": None} | PHILOX,
    ),
    to.cudnn_attention_backward: (
        "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q max_k "
        "dropout_p is_causal",
        {"scale": None, "deterministic": False},
    ),
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_signature_is_the_schema(function: Callable[..., Any]) -> None:
    positional, keywords = SIGNATURES[function]
    found = inspect.signature(function).parameters.values()
    assert [item.name for item in found if item.kind is item.POSITIONAL_OR_KEYWORD] == positional.split()
    named = {item.name: item.default for item in found if item.kind is item.KEYWORD_ONLY}
    assert named == keywords | COMMON
    assert function.__doc__ is not None
    with pytest.raises(TypeError, match="missing"):
        function()
    with pytest.raises(TypeError, match="causal_mask"):
        function(causal_mask=True)


def zeros(*shape: int, dtype: Any = "f4") -> Array:
    """An array whose values no test reads."""
    return np.zeros(shape, dtype)


BMHK = {
    **{name: zeros(B, MQ, H, D) for name in ("query", "out", "grad_out")},
    **{name: zeros(B, MK, H, D) for name in ("key", "value")},
}
HEADS_FIRST = {name: np.swapaxes(array, 1, 2) for name, array in BMHK.items()}
TOKENS = {name: array[0] for name, array in BMHK.items()}
STARTS_Q, STARTS_K = np.array([0, 2, MQ], np.int32), np.array([0, 4, MK], np.int32)
PADDED = zeros(B, H, 32)


class Recorder:
    """Replaces attention_forward and attention_backward: records its arguments and returns zeros."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.operands: tuple[Array, ...] = ()
        self.options: dict[str, Any] = {}
        for module in (efficient, sdpa, flash, cudnn):
            patch.setattr(module, "attention_forward", self.forward)
            patch.setattr(module, "attention_backward", self.backward)

    def forward(self, *operands: Array, **options: Any) -> tuple[Array, Array]:
        self.operands, self.options = operands, options
        sequences = options.get("sequences")
        batch = operands[0].shape[0] if sequences is None else len(sequences.cu_seqlens_q) - 1
        return np.zeros_like(operands[0]), zeros(batch, H, 32)

    def backward(self, *operands: Array, **options: Any) -> Gradients:
        self.operands, self.options = operands, options
        made = {name: np.zeros_like(operands[i]) for i, name in enumerate(OPERANDS, 1)}
        made["bias"] = options.get("bias")
        return Gradients(**{name: made[name] for name in options.get("gradients", OPERANDS)})

    def changed_options(self) -> dict[str, Any]:
        """Returns the options that differ from their defaults, sequences as a tuple."""
        sequences = self.options.pop("sequences", None)
        plain = {
            "softcap": 0.0,
            "gradients": OPERANDS,
            "packed": False,
            "deterministic": False,
            "mask": Full(),
            **COMMON,
        }
        found = {k: v for k, v in self.options.items() if v is not None and not (k in plain and plain[k] == v)}
        if sequences is not None:
            names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_k")
            found["sequences"] = tuple(getattr(sequences, name) for name in names)
        return found


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """A Recorder that receives all calls."""
    return Recorder(monkeypatch)


def efficient_call(backward: bool, **changes: Any) -> Any:
    """Calls the efficient operator with dense zeros and these changes."""
    given: dict[str, Any] = {**BMHK, "bias": None, "cu_seqlens_q": None, "cu_seqlens_k": None, "max_seqlen_q": None}
    given |= {"max_seqlen_k": None, "dropout_p": 0.0, "custom_mask_type": 0}
    if backward:
        given |= {"logsumexp": PADDED, "philox_seed": 0, "philox_offset": 0, "bias_requires_grad": False}
        return to.efficient_attention_backward(**(given | changes))
    given = {name: value for name, value in given.items() if name not in ("out", "grad_out")}
    return to.efficient_attention_forward(**(given | changes))


SLOPES, BIAS = zeros(H), zeros(B, H, MQ, MK)
VARIABLE = {
    **{name: array[:1] for name, array in BMHK.items()},
    **{"cu_seqlens_q": STARTS_Q, "cu_seqlens_k": STARTS_K, "max_seqlen_q": 3, "max_seqlen_k": 5},
}
USED = np.array([1, 2], np.int32)
EFFICIENT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"scale": 0.5, "bias": BIAS}, {"scale": 0.5, "bias": BIAS}),
    ({"custom_mask_type": 1}, {"mask": Causal()}),
    ({"custom_mask_type": 2}, {"mask": CausalBottomRight()}),
    ({"custom_mask_type": 1, "window_size": 7}, {"mask": Causal(7)}),
    ({"custom_mask_type": 2, "window_size": 7}, {"mask": CausalBottomRight(7)}),
    ({"custom_mask_type": 2, "window_size": 0}, {"mask": CausalBottomRight()}),
    ({"dropout_p": 0.1, "philox_seed": 3, "philox_offset": 4}, {"dropout": Dropout(0.1, 3, 4)}),
    ({"dropout_p": 0.0, "philox_seed": 3, "philox_offset": 4}, {}),
    ({"max_seqlen_q": 3, "max_seqlen_k": 5}, {}),
    (VARIABLE, {"sequences": (STARTS_Q, STARTS_K, 3, 5, None)}),
    (VARIABLE | {"max_seqlen_k": None, "seqlen_k": USED}, {"sequences": (STARTS_Q, STARTS_K, 3, MK, USED)}),
    ({"stream": 7, "backend": "gpu"}, {"stream": 7, "backend": "gpu"}),
]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("case", EFFICIENT, ids=lambda case: " ".join(case[0]) or "plain")
def test_efficient_map(recorder: Recorder, backward: bool, case: tuple[dict[str, Any], ...]) -> None:
    changes, options = case
    if backward or "cu_seqlens_q" not in changes:
        efficient_call(backward, **changes)
    else:
        efficient_call(backward, **{k: v for k, v in changes.items() if k not in ("out", "grad_out")})
    assert recorder.changed_options() == options
    names = ("grad_out", *OPERANDS, "out") if backward else OPERANDS
    given = BMHK | changes
    assert all(found is given[name] for found, name in zip(recorder.operands, names, strict=False))


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"num_splits_key": None}, {}),
        ({"num_splits_key": 5}, {"num_splits_key": 5}),
        ({"num_splits_key": 1}, {"num_splits_key": 1}),
        ({"num_splits_key": 0}, {"num_splits_key": 1}),
        ({"num_splits_key": -32768}, {"num_splits_key": 1}),
        ({"shared_storage_dqdkdv": True}, {"packed": True}),
        ({"deterministic": True}, {"deterministic": True}),
        ({"bias_requires_grad": True}, {}),
        ({"bias": BIAS, "bias_requires_grad": True}, {"bias": BIAS, "gradients": (*OPERANDS, "bias")}),
    ],
)
def test_efficient_backward_map(recorder: Recorder, changes: dict[str, Any], options: dict[str, Any]) -> None:
    found = efficient_call(True, **changes)
    assert recorder.changed_options() == options
    assert found[3] is (BIAS if "gradients" in options else None)


def test_results_of_the_efficient_forward(recorder: Recorder) -> None:
    seed, offset = object(), object()
    drawn = {"philox_seed": seed, "philox_offset": offset}
    output, logsumexp, *rest = efficient_call(False, **drawn)
    assert (output.shape, logsumexp.shape, rest) == ((B, MQ, H, D), (B, H, 0), [seed, offset, MQ, MK])
    assert efficient_call(False, compute_log_sumexp=True)[1].shape == (B, H, 32)


def sdpa_call(backward: bool, **changes: Any) -> Any:
    """Calls scaled dot product attention with zeros and these changes."""
    given: dict[str, Any] = {**HEADS_FIRST, "attn_bias": None}
    if backward:
        given |= {"logsumexp": PADDED, "philox_seed": 0, "philox_offset": 0, "dropout_p": 0.0}
        given |= {"grad_input_mask": (True, True, True, True)}
        return to.scaled_dot_product_efficient_attention_backward(**(given | changes))
    given = {name: value for name, value in given.items() if name not in ("out", "grad_out")}
    return to.scaled_dot_product_efficient_attention(**(given | {"compute_log_sumexp": True} | changes))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_numbers_of_numpy(recorder: Recorder, backward: bool) -> None:
    """They become the options that Python's numbers become."""
    given = {"custom_mask_type": np.int64(2), "window_size": np.array(7), "dropout_p": np.float32(0.5)}
    efficient_call(backward, **given, **({"num_splits_key": np.int64(0)} if backward else {}))
    options = recorder.changed_options()
    assert (options["mask"], repr(options["mask"])) == (CausalBottomRight(7), "CausalBottomRight(window_size=7)")
    assert options["dropout"].dropout_p == 0.5
    assert options.get("num_splits_key") == (1 if backward else None)
    flash_call(backward, is_causal=np.True_, window_size_left=np.int8(4), dropout_p=np.float32(0))
    assert recorder.changed_options() == {"mask": Window(4, 0)}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_sdpa_map(recorder: Recorder, backward: bool) -> None:
    assert sdpa_call(backward)[0].shape == (B, H, MQ, D)
    assert recorder.changed_options() == {}
    names = ("grad_out", *OPERANDS, "out") if backward else OPERANDS
    for found, name in zip(recorder.operands, names, strict=False):
        assert found.strides == BMHK[name].strides, "a view"
        assert found.ctypes.data == BMHK[name].ctypes.data
    row = zeros(MK)
    drop = {"dropout_p": 0.2, "philox_seed": 1, "philox_offset": 2}
    sdpa_call(backward, is_causal=True, scale=2.0, attn_bias=row, stream=3, **drop)
    changed = recorder.changed_options()
    assert (changed["bias"].shape, changed["bias"].base) == ((1, 1, 1, MK), row)
    gradients = {"gradients": (*OPERANDS, "bias")} if backward else {}
    options = {"mask": Causal(), "scale": 2.0, "dropout": Dropout(0.2, 1, 2), "stream": 3}
    assert {k: v for k, v in changed.items() if k != "bias"} == options | gradients


@pytest.mark.parametrize("wanted", [(1, 0, 0, 0), (0, 1, 1, 0), (0, 0, 0, 1), (1, 1, 1, 1)])
def test_sdpa_computes_the_requested_gradients(recorder: Recorder, wanted: tuple[int, ...]) -> None:
    asked = [bool(item) for item in wanted]
    found = sdpa_call(True, grad_input_mask=asked, attn_bias=zeros(MQ, MK))
    assert [gradient is not None for gradient in found] == asked
    assert recorder.options["gradients"] == tuple(compress((*OPERANDS, "bias"), asked))


def test_no_requested_gradient_launches_nothing(recorder: Recorder) -> None:
    assert sdpa_call(True, grad_input_mask=[False] * 4) == (None,) * 4
    assert sdpa_call(True, grad_input_mask=[False, False, False, True]) == (None,) * 4
    assert sdpa_call(True, grad_out=None) == efficient_call(True, grad_out=None) == (None,) * 4
    assert flash_call(True, grad_out=None) == cudnn_call(True, grad_out=None) == (None,) * 3
    assert recorder.operands == ()


def flash_call(backward: bool, **changes: Any) -> Any:
    """Calls the flash operator with dense zeros and these changes."""
    given: dict[str, Any] = {**BMHK, "cum_seq_q": None, "cum_seq_k": None, "max_q": 0, "max_k": 0, "dropout_p": 0.0}
    given |= {"is_causal": False, "logsumexp": zeros(B, H, MQ), "philox_seed": 0, "philox_offset": 0} | changes
    if backward:
        return to.flash_attention_backward(**given)
    return to.flash_attention_forward(**{k: v for k, v in given.items() if k not in ("out", "grad_out", "logsumexp")})


PACKED = {**TOKENS, "cum_seq_q": STARTS_Q, "cum_seq_k": STARTS_K, "max_q": 3, "max_k": 5, "logsumexp": zeros(H, MQ)}
FLASH: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"mask": Window()}),
    ({"is_causal": True}, {"mask": Window(None, 0)}),
    ({"window_size_left": -1, "window_size_right": -1}, {"mask": Window()}),
    ({"window_size_left": 4, "window_size_right": -1}, {"mask": Window(4)}),
    ({"window_size_left": 4, "window_size_right": 2}, {"mask": Window(4, 2)}),
    ({"window_size_left": 4, "window_size_right": 2, "is_causal": True}, {"mask": Window(4, 0)}),
    ({"softcap": 3.0, "scale": 0.5}, {"mask": Window(), "softcap": 3.0, "scale": 0.5}),
    ({"alibi_slopes": SLOPES}, {"mask": Window(), "alibi_slopes": SLOPES}),
    ({"dropout_p": 0.5, "philox_seed": 1}, {"mask": Window(), "dropout": Dropout(0.5, 1, 0)}),
    (PACKED, {"mask": Window(), "sequences": (STARTS_Q, STARTS_K, 3, 5, None)}),
    (PACKED | {"max_q": 99, "max_k": 99, "seqused_k": USED, "is_causal": True},
     {"mask": Window(None, 0), "sequences": (STARTS_Q, STARTS_K, MQ, MK, USED)}),
]  # fmt: skip


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("case", FLASH, ids=lambda case: " ".join(case[0]) or "plain")
def test_flash_map(recorder: Recorder, backward: bool, case: tuple[dict[str, Any], ...]) -> None:
    changes, options = case
    found = flash_call(backward, **changes)
    assert recorder.changed_options() == options
    is_packed = "cum_seq_q" in changes
    assert all(operand.ndim == 4 for operand in recorder.operands[: 5 if backward else 3])
    assert found[0].shape == ((MQ, H, D) if is_packed else (B, MQ, H, D))
    if backward:
        assert recorder.operands[5].shape == (B, H, 32)
    else:
        assert found[1].shape == ((H, MQ) if is_packed else (B, H, MQ))


def test_flash_factors(recorder: Recorder) -> None:
    """FlashAttention's names of the factors of e4m3 operands."""
    descale = zeros(B, H)
    flash_call(False, q_descale=descale, v_descale=descale)
    assert recorder.changed_options() == {"mask": Window(), "query_scale": descale, "value_scale": descale}


def cudnn_call(backward: bool, **changes: Any) -> Any:
    """Calls the cudnn operator with dense zeros and these changes."""
    given: dict[str, Any] = {**HEADS_FIRST, "attn_bias": None, "cum_seq_q": None, "cum_seq_k": None, "max_q": 0}
    given |= {"max_k": 0, "dropout_p": 0.0, "is_causal": False, "philox_seed": 0, "philox_offset": 0}
    given |= {"logsumexp": zeros(B, H, MQ, 1), "compute_log_sumexp": True} | changes
    if backward:
        return to.cudnn_attention_backward(**{k: v for k, v in given.items() if k != "compute_log_sumexp"})
    return to.cudnn_attention_forward(**{k: v for k, v in given.items() if k not in ("out", "grad_out", "logsumexp")})


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_cudnn_map(recorder: Recorder, backward: bool) -> None:
    found = cudnn_call(backward, is_causal=True, scale=0.5, dropout_p=0.5, philox_seed=1, philox_offset=2)
    assert recorder.changed_options() == {"mask": Causal(), "scale": 0.5, "dropout": Dropout(0.5, 1, 2)}
    assert found[0].shape == (B, H, MQ, D)
    for shape in ((MQ, MK), (H, MQ, MK), (B, 1, MQ, MK)):
        cudnn_call(backward, attn_bias=zeros(*shape))
        assert recorder.changed_options()["bias"].shape == (1,) * (4 - len(shape)) + shape
    found = cudnn_call(backward, **(PACKED | {"logsumexp": zeros(MQ, H, 1)}))
    assert recorder.changed_options() == {"sequences": (STARTS_Q, STARTS_K, 3, 5, None)}
    assert found[0].shape == (MQ, H, D)
    if not backward:
        assert [item if isinstance(item, int) else None for item in found[4:6]] == [3, 5]
        assert found[1].shape == (MQ, H, 1)
        assert cudnn_call(False, compute_log_sumexp=False)[1] is None


REFUSED: list[tuple[Callable[..., Any], dict[str, Any], list[str]]] = [
    (efficient_call, {"custom_mask_type": 3, "window_size": -1, "seqlen_k": USED},
     ["custom_mask_type: 0 (none), 1 (top left)", "window_size: at least 1", "seqlen_k: must come with cu_seqlens_q"]),
    (efficient_call, {"window_size": 4}, ["window_size: custom_mask_type 1 or 2, not 0"]),
    (efficient_call, {"cu_seqlens_q": STARTS_Q},
     ["cu_seqlens_k: must come with cu_seqlens_q", "max_seqlen_q: an int of at least 0"]),
    (efficient_call, {"cu_seqlens_k": STARTS_K, "max_seqlen_q": 3}, ["cu_seqlens_q: and cu_seqlens_k"]),
    (efficient_call, {"query": None, "key": [1], "value": zeros(2, 3), "bias": zeros(2)},
     ["query: a NumPy, CuPy, torch or JAX array", "key: a NumPy, CuPy, torch or JAX array"]),
    (efficient_call, {"value": zeros(2, 3), "bias": zeros(2), "seqlen_k": zeros(1, 1)},
     ["value.shape: 4 axes", "bias.shape: 4 axes", "seqlen_k.shape: 1 axes"]),
    (efficient_call, {"scale": "x", "dropout_p": 2}, ["dropout_p: a probability", "scale: a number"]),
    (sdpa_call, {"attn_bias": zeros(3, MK), "key": zeros(B, H, MK, D + 1)},
     ["key.shape: (2, 9, 4, 8)", "attn_bias.shape: each axis must be 1 or that of"]),
    (sdpa_call, {"attn_bias": zeros(MQ, MK, dtype="f2")}, ["attn_bias.dtype: float32 as query"]),
    (flash_call, {"window_size_left": 1.5, "seqused_k": USED},
     ["window_size_left: an int, or None", "seqused_k: must come with cum_seq_q"]),
    (flash_call, {**TOKENS, "logsumexp": zeros(H, MQ), "cum_seq_q": STARTS_Q, "max_k": None},
     ["cum_seq_k: must come with cum_seq_q", "max_k: an int of at least 0"]),
    (flash_call, PACKED | {"cum_seq_q": STARTS_Q.astype("f4")}, ["cum_seq_q.dtype: int32"]),
    (flash_call, PACKED | {"max_q": 1}, ["max_q: at least the longest sequence, 3"]),
    (flash_call, {**PACKED, "query": zeros(B, MQ, H, D)}, ["query.shape: must have 3 axes"]),
    (cudnn_call, {"attn_bias": zeros(MK)}, ["attn_bias.shape: must have 2 or 3 or 4 axes"]),
    (cudnn_call, {**PACKED, "logsumexp": zeros(MQ, H), "max_q": -99}, ["max_q: an int of at least 0"]),
]  # fmt: skip


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case[0].__name__} {' '.join(case[1])}")
def test_refusals_name_the_operator_s_arguments(
    backward: bool, case: tuple[Callable[..., Any], dict[str, Any], list[str]]
) -> None:
    call, changes, expected = case
    if call is efficient_call and not backward:
        changes = {name: value for name, value in changes.items() if name not in ("out", "grad_out")}
    expect_raised(lambda: call(backward, **changes, backend="reference"), expected)


BACKWARD_REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (efficient_call, {"grad_out": zeros(B, MQ, H, 1)}, "grad_out.shape: (2, 5, 4, 8) to match query"),
    (efficient_call, {"out": zeros(B, MQ, H, 1)}, "out.shape: (2, 5, 4, 8) to match query"),
    (efficient_call, {"num_splits_key": "a"}, "num_splits_key: an int of at least 1"),
    (efficient_call, {"num_splits_key": 2, "deterministic": True}, "num_splits_key: 1 with deterministic"),
    (efficient_call, {"shared_storage_dqdkdv": True}, "shared_storage_dqdkdv: must have the same shape"),
    (efficient_call, {"logsumexp": zeros(B, H, MQ)}, "logsumexp: (2, 4, 32) float32"),
    (sdpa_call, {"grad_input_mask": (True, True)}, "grad_input_mask: four bools"),
    (sdpa_call, {"attn_bias": zeros(MK, dtype="?")}, "grad_input_mask: must not request attn_bias, which is bool"),
    (flash_call, {"logsumexp": PADDED}, "logsumexp.shape: (2, 4, 5)"),
    (flash_call, PACKED | {"logsumexp": zeros(H, 4)}, "logsumexp.shape: (4, 5)"),
    (cudnn_call, {"logsumexp": PADDED}, "logsumexp.shape: (2, 4, 5)"),
    (cudnn_call, {"logsumexp": zeros(B, H, MQ, 2)}, "logsumexp.shape: (2, 4, 5, 1)"),
]


@pytest.mark.parametrize("case", BACKWARD_REFUSED, ids=lambda case: case[2])
def test_refusals_of_the_backward(case: tuple[Callable[..., Any], dict[str, Any], str]) -> None:
    call, changes, expected = case
    expect_raised(lambda: call(True, **changes, backend="reference"), [expected])


def test_a_refusal_of_attention_forward_is_renamed() -> None:
    sequences = {name: VARIABLE[name] for name in VARIABLE if name not in ("out", "grad_out")}
    expect_raised(
        lambda: efficient_call(False, **sequences, seqlen_k=zeros(3, dtype="i4"), backend="reference"),
        ["seqlen_k: int32 array of shape"],
    )


def test_a_reason_states_the_order_of_axes_if_the_caller_s_differs() -> None:
    with pytest.raises(NotSupported, match=r"\(shapes are \(batch, seqlen, heads, head_dim\)\)$"):
        sdpa_call(False, key=zeros(B, H, MK, 3), backend="reference")
    with pytest.raises(NotSupported) as caught:
        efficient_call(False, key=zeros(B, MK, H, 3), backend="reference")
    assert "shapes are" not in str(caught.value)


@pytest.mark.parametrize("call", [flash_call, cudnn_call])
def test_no_debug_mask(call: Callable[..., Any]) -> None:
    with pytest.raises(NotSupported, match="return_debug_mask = True: must be False"):
        call(False, return_debug_mask=True)


def test_ranges_of_keys_are_no_bias() -> None:
    edge = np.zeros((1, 1, MQ), np.int32)
    for is_backward in (False, True):
        expect_raised(
            lambda: sdpa_call(is_backward, attn_bias=KeyRanges(edge, edge), backend="reference"),  # noqa: B023
            ["attn_bias: must be a NumPy, CuPy, torch or JAX array"],
        )
