"""Bad calls of the public functions beside attention: caches, e4m3 codes, dropout masks, exports and split rows."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

import cutlass_py_attn as attn
from cutlass_py_attn import distributed
from cutlass_py_attn.distributed import simulated
from tests.support.bad_calls import (
    BACKWARD,
    FORWARD,
    LSE,
    NOT_FLAGS,
    NOT_INTS,
    QUERY,
    SHAPE,
    UNPRINTABLE,
    BadCall,
    Unreadable,
    option,
)
from tests.support.fakes import artifact

APPEND = {
    "key": np.zeros((3, 2, 8), "f2"),
    "value": np.zeros((3, 2, 8), "f2"),
    "key_cache": np.zeros((4, 4, 2, 8), "f2"),
    "value_cache": np.zeros((4, 4, 2, 8), "f2"),
    "slots": np.zeros(3, "i8"),
}
LATENT = {
    "key": np.zeros((3, 1, 160), "f2"),
    "value": np.zeros((3, 1, 8), "f2"),
    "key_cache": np.zeros((4, 4, 1, 160), "u1"),
    "value_cache": np.zeros((4, 4, 1, 8), "f2"),
    "slots": np.zeros(3, "i8"),
    "key_scale": np.zeros((4, 4, 1, 2), "f4"),
}
MERGE = {"output_a": QUERY, "logsumexp_a": LSE, "output_b": QUERY, "logsumexp_b": LSE}
CODED = np.zeros((1, 4, 2, 16), "f4")
MASKED = np.ma.masked_array(CODED, CODED == 1)


def append(**changes: Any) -> Any:
    return attn.append_to_cache(**{"kernels": artifact, **APPEND, **changes})


def append_latent(**changes: Any) -> Any:
    return attn.append_to_cache(**{"kernels": artifact, **LATENT, **changes})


def merge(**changes: Any) -> Any:
    return attn.merge_states(**{"kernels": artifact, **MERGE, **changes})


def mla(**changes: Any) -> Any:
    arrays = {"query": np.zeros((1, 4, 1, 576), "f2"), "cache": np.zeros((1, 6, 1, 576), "f2")}
    return attn.mla_attention_forward(**{"kernels": artifact, **arrays, **changes})


def quantize(**changes: Any) -> Any:
    return attn.quantize_e4m3(**{"array": CODED, **changes})


def calls_of_caches() -> Iterator[BadCall]:
    backends = {"str": "cpu", "None": None, "list": ["gpu"], "array": np.ones(2), "empty array": np.ones(0)}
    yield from option("backend", backends, append, merge, mla)
    yield from option("kernels", {"int": 5, "str": "folder", "list": [artifact]}, append, merge, mla)
    yield from option("stream", {"str": "x", "float": 1.0, "huge": 2**64}, append, merge, mla)
    packed = functools.partial(merge, cu_seqlens_q=np.array([0, 4], "i4"))
    for kind, value in NOT_INTS.items():
        yield BadCall(f"merge max_seqlen_q {kind}", functools.partial(packed, max_seqlen_q=value), "max_seqlen_q")
    yield from option("head_dim_value", NOT_INTS, mla)
    for function, arrays in ((append, APPEND), (append_latent, LATENT), (merge, MERGE)):
        for name in arrays:
            values = {"None": None, "list": [0.0], "str": "x", "masked": np.ma.masked_array(arrays[name])}
            for kind, value in values.items():
                yield BadCall(f"{function.__name__} {name} {kind}", functools.partial(function, **{name: value}),
                              name)  # fmt: skip


def calls_of_codes() -> Iterator[BadCall]:
    shaped = "array"
    for function in (attn.quantize_e4m3, attn.rotate_rows):
        values = {"None": (None, "array"), "list": ([1.0], "array"), "masked": (MASKED, shaped)}
        for kind, (value, text) in values.items():
            yield BadCall(f"{function.__name__} {kind}", functools.partial(function, value), text)
    for shape in ((1, 0, 2, 16), (0, 4, 2, 16), (1, 4, 2, 0)):
        yield BadCall(f"quantize {shape}", functools.partial(quantize, array=np.zeros(shape, "f4"), rotate=True),
                      "array")  # fmt: skip
    yield from option("granularity", {"str": "rows", "None": None, "array": np.ones(2), "list": ["row"]}, quantize)
    yield from option("num_heads_key", NOT_INTS, quantize)
    yield from option("rotate", NOT_FLAGS, quantize)
    yield from option("cu_seqlens", {"str": "x", "float": 1.0, "rows": np.array([0, 9])}, quantize)
    bounds = np.array([0, 4])
    yield BadCall("quantize cu_seqlens masked",
                  functools.partial(quantize, cu_seqlens=np.ma.masked_array(bounds, bounds == 4)),
                  "cu_seqlens")  # fmt: skip
    yield BadCall("quantize cu_seqlens that raises",
                  lambda: quantize(cu_seqlens=Unreadable("__array_struct__")), "cu_seqlens")  # fmt: skip
    for name in ("batch", "num_heads", "num_queries", "num_keys"):
        sizes = {"batch": 1, "num_heads": 1, "num_queries": 2, "num_keys": 2}
        for kind, value in {"huge": 2**63, "unprintable": UNPRINTABLE}.items():
            call = functools.partial(attn.dropout_mask, attn.Dropout(0.5, 1), **{**sizes, name: value})
            yield BadCall(f"dropout_mask {name} {kind}", call, name)
    seed: Any = Unreadable("dtype")
    yield BadCall("Dropout seed that raises",
                  lambda: attn.attention_forward(**FORWARD, dropout=attn.Dropout(0.5, seed), kernels=artifact),
                  "philox_seed")  # fmt: skip


def calls_of_exports() -> Iterator[BadCall]:
    arguments: dict[str, Any] = {
        "folder": "no such folder",
        "problems": [attn.Problem.dense("forward", SHAPE, "float16")],
        "archs": ["sm_80"],
        "kernels": artifact,
    }
    for export in (attn.export_bundle, attn.export_library):
        made = "kernels(fwd_sm80_f16_d8_full_128x128)"
        for kind, name, value, field in (
            ("int", "folder", 5, "folder"),
            ("array", "problems", np.array(2), "problems"),
            ("array", "archs", np.array("sm_80"), "archs"),
            ("int", "name", 5, "name"),
            ("int", "kernels", 5, "kernels"),
            ("that give None", "kernels", lambda build: None, made),
            ("that give a Build", "kernels", lambda build: build, made),
        ):
            call = functools.partial(export, **{**arguments, name: value})
            yield BadCall(f"{export.__name__} {name} {kind}", call, field)


def calls_of_ranks() -> Iterator[BadCall]:
    def split_forward(**changes: Any) -> Any:
        (group,) = simulated.groups(1)
        arguments = {**FORWARD, "group": group, "backend": "reference", **changes}
        return distributed.attention_forward(**arguments)

    def split_backward(**changes: Any) -> Any:
        (group,) = simulated.groups(1)
        return distributed.attention_backward(**{**BACKWARD, "group": group, "backend": "reference", **changes})

    def group(**changes: Any) -> Any:
        return distributed.Group(simulated.groups(1)[0].communicator, **changes)

    yield from option("stream", {"str": "x", "float": 1.0, "list": [0], "huge": 2**64}, split_forward, split_backward)
    yield from option("context_strategy", {"str": "rings", "None": None, "int": 1}, split_forward, split_backward)
    yield from option("load_balance", {"str": "zag", "bool": True}, split_forward, split_backward)
    yield from option("group", {"None": None, "int": 1}, split_forward, split_backward)
    limits = {"str": "1", "zero": 0, "bool": True, "nan": np.nan, "huge": 10**400, "unprintable": UNPRINTABLE}
    yield from option("timeout", limits, group)
    sizes = {**NOT_INTS, "zero": 0, "huge": 10**6, "unprintable": UNPRINTABLE}
    yield from option("size", sizes, simulated.groups)
    for kind, value in {"str": "0", "float": 0.0, "below 0": -1, "array": np.ones(2, int)}.items():
        yield BadCall(f"groups device {kind}", functools.partial(simulated.groups, 1, value), "device")
    rows = functools.partial(distributed.rows_of_rank, rank=0, num_rows=8)
    for kind, value in {**sizes, "huge": 2**31}.items():
        yield BadCall(f"rows_of_rank size {kind}", functools.partial(rows, size=value), "size")


def all_calls() -> list[BadCall]:
    """Returns every bad call; names are unique, also among those of bad_calls.py."""
    groups = (calls_of_caches, calls_of_codes, calls_of_exports, calls_of_ranks)
    return [call for group in groups for call in group()]
