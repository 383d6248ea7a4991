"""Bad calls of every public function: each with the field of a refusal."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

import cutlass_py_attn as attn
from cutlass_py_attn import torch_ops
from cutlass_py_attn.plan.plan import Plan
from tests.support.fakes import InterfaceArray, artifact

B, MQ, MK, H, D = 1, 4, 6, 2, 8
QUERY, KEY = np.zeros((B, MQ, H, D), "f2"), np.zeros((B, MK, H, D), "f2")
LSE = np.zeros((B, H, 32), "f4")
FORWARD = {"query": QUERY, "key": KEY, "value": KEY}
BACKWARD = {"grad_output": QUERY, **FORWARD, "output": QUERY, "logsumexp": LSE}
SHAPE = attn.Shape(B, MQ, MK, H, D, D)
TILE = attn.TileConfig.parse("64x64x4:2,2")
UNPRINTABLE = 10**5000  # more digits than Python prints


class Unreadable:
    """An object that raises whatever is asked of it."""

    def __init__(self, attribute: str) -> None:
        self._attribute = attribute

    def __getattr__(self, name: str) -> Any:
        if name == self._attribute:
            raise OSError(f"no {name}")
        raise AttributeError(name)


class Interface:
    """An array whose __cuda_array_interface__ lacks or spoils some entries."""

    def __init__(self, **changes: Any) -> None:
        entries = {**InterfaceArray(QUERY).__cuda_array_interface__, **changes}
        self.__cuda_array_interface__ = {name: entry for name, entry in entries.items() if entry is not None}


class NoDlpackDevice:
    """An array that cannot say where it is."""

    def __dlpack_device__(self) -> Any:
        raise OSError("no device")


NOT_NUMBERS: dict[str, Any] = {
    "str": "2",
    "list": [2.0],
    "array": np.ones(2),
    "dict": {},
    "complex": 1j,
    "bool": True,
    "NumPy bool": np.True_,
    "0-d bool": np.array(True),
    "Decimal": Decimal("0.5"),
    "huge int": 10**400,
    "unprintable int": UNPRINTABLE,
    "device array": InterfaceArray(np.ones(())),
}
NOT_INTS: dict[str, Any] = {
    "str": "2",
    "list": [2],
    "array": np.ones(2, int),
    "bool": True,
    "float": 2.0,
    "NumPy float": np.float32(2),
    "0-d float": np.array(2.0),
    "Fraction": Fraction(2, 1),
}
NOT_FLAGS: dict[str, Any] = {"str": "no", "int": 1, "None": None, "array": np.array([True]), "0-d int": np.array(1)}


@dataclass(frozen=True, slots=True)
class BadCall:
    """call: raises the package's error. field: what it refuses; of an error without refusals, a part of its text.

    prepare: creates what the call needs.
    """

    name: str
    call: Callable[[], Any]
    field: str
    prepare: Callable[[], Any] = lambda: None


class UnreadablePath(os.PathLike[str]):
    """A path that raises when it is read."""

    def __fspath__(self) -> str:
        raise OSError("no path")

    def __repr__(self) -> str:
        return "UnreadablePath()"


def forward(**changes: Any) -> Any:
    return attn.attention_forward(**{"kernels": artifact, **FORWARD, **changes})


def backward(**changes: Any) -> Any:
    return attn.attention_backward(**{"kernels": artifact, **BACKWARD, **changes})


def reference(**changes: Any) -> Any:
    return attn.attention_forward(**FORWARD, backend="reference", **changes)


def option(name: str, values: dict[str, Any], *calls: Callable[..., Any], label: str = "") -> Iterator[BadCall]:
    """Yields calls with each value for one option. label: how the error names it; "" for the name."""
    for call in calls:
        for kind, value in values.items():
            made = functools.partial(call, **{name: value})
            yield BadCall(f"{call.__name__} {name} {kind}", made, label or name)


def calls_of_options() -> Iterator[BadCall]:
    yield from option("scale", {**NOT_NUMBERS, "nan": np.nan, "tiny": 1e-34}, forward)
    yield from option("scale", {"str": "2", "bool": False, "tiny": -1e-40}, backward, reference)
    yield from option("softcap", {**NOT_NUMBERS, "None": None}, forward)
    yield from option("softcap", {"str": "2", "array": np.ones(2)}, backward, reference)
    yield from option("num_splits_key", {**NOT_INTS, "zero": 0, "huge": -(10**400)}, backward)
    yield from option("deterministic", NOT_FLAGS, backward)
    yield from option("packed", NOT_FLAGS, backward)
    yield from option("backend", {"str": "cpu", "None": None, "list": ["gpu"], "array": np.ones(2)}, forward, backward)
    yield from option("kernels", {"int": 5, "str": "folder", "list": [artifact], "artifact": {}}, forward, backward)
    yield from option("mask", {"None": None, "str": "causal", "class": attn.Causal, "base": attn.Causal.__base__()},
                      forward, backward)  # fmt: skip
    yield from option("mask", {"array": np.ones((2, 2))}, forward)
    streams = {"str": "0", "float": 1.5, "bool": True, "negative": -1, "huge": 2**64, "array": np.ones(2, int)}
    yield from option("stream", {**streams, "list": [0]}, forward)
    yield from option("stream", {"str": "0", "huge": 10**400}, backward, reference)
    yield from option("dropout", {"float": 0.1, "tuple": (0.1, 5), "str": "0.1"}, forward, backward)
    yield from option("sequences", {"list": [0, 4], "int": 3}, forward, backward)
    yield from option("score_terms", {"list": [1], "None": None, "str": "x"}, forward)
    yield from option("out", {"int": 5, "array": QUERY, "tuple": (QUERY, KEY, KEY)}, backward)
    names: dict[str, Any] = {"str": "query", "None": None, "empty": (), "unknown": ("output",), "int": 3}
    names |= {"list of lists": [["query"]], "set": {"query"}, "ints": (0, 1)}
    yield from option("gradients", names, backward)
    repeated = {"gradients": ("query", "query")}
    yield BadCall("backward gradients twice", functools.partial(backward, **repeated), "gradients")
    yield BadCall("forward unknown option", functools.partial(forward, causal=True), "option")
    yield BadCall("backward unknown option", functools.partial(backward, is_causal=1), "option")


def calls_of_masks_and_dropout() -> Iterator[BadCall]:
    for mask in (attn.Causal, attn.CausalBottomRight):
        for kind, value in {**NOT_INTS, "zero": 0}.items():
            call = functools.partial(forward, mask=mask(value))
            yield BadCall(f"{mask.__name__} {kind}", call, "window_size")
    for kind, value in NOT_INTS.items():
        yield BadCall(f"Window left {kind}", functools.partial(backward, mask=attn.Window(value)),
                      "window_left")  # fmt: skip
        yield BadCall(f"Window right {kind}", functools.partial(forward, mask=attn.Window(0, value)),
                      "window_right")  # fmt: skip
    for kind, value in NOT_NUMBERS.items():
        yield BadCall(f"Dropout dropout_p {kind}", functools.partial(forward, dropout=attn.Dropout(value, 5)),
                      "dropout_p")  # fmt: skip
    for kind, value in {"str": "5", "float": 5.0, "None": None, "bool": True, "list": [5], "negative": -1,
                        "huge": 2**64, "unprintable": UNPRINTABLE}.items():  # fmt: skip
        for name in ("philox_seed", "philox_offset"):
            numbers = {"philox_seed": 1, "philox_offset": 2, name: value}
            call = functools.partial(backward, dropout=attn.Dropout(0.5, **numbers))
            yield BadCall(f"Dropout {name} {kind}", call, name)
            mask_call = functools.partial(attn.dropout_mask, attn.Dropout(0.5, **numbers), 1, 1, 2, 2)
            yield BadCall(f"dropout_mask {name} {kind}", mask_call, name)
    for kind, value in {"str": "x", "above": 1.5, "nan": np.nan, "bool": True}.items():
        yield BadCall(f"dropout_mask dropout_p {kind}",
                      functools.partial(attn.dropout_mask, attn.Dropout(value, 1), 1, 1, 2, 2),
                      "dropout_p")  # fmt: skip
    sizes = {"batch": 1, "num_heads": 1, "num_queries": 2, "num_keys": 2}
    for name, value in (("batch", "1"), ("num_heads", 1.0), ("num_queries", -1), ("num_keys", None)):
        call = functools.partial(attn.dropout_mask, attn.Dropout(0.5, 1), **{**sizes, name: value})
        yield BadCall(f"dropout_mask {name}", call, name)
    yield BadCall("dropout_mask dropout", functools.partial(attn.dropout_mask, 0.5, 1, 1, 2, 2),
                  "dropout")  # fmt: skip


def of_sequences(**changes: Any) -> Any:
    """Calls the forward with two sequences and these changes."""
    lengths = {"cu_seqlens_q": np.array([0, 1, 4]), "cu_seqlens_k": np.array([0, 2, 6]), "max_seqlen_q": 3,
               "max_seqlen_k": 4}  # fmt: skip
    return forward(sequences=attn.VariableLength(**{**lengths, **changes}))


def calls_of_sequences() -> Iterator[BadCall]:
    yield from option("max_seqlen_q", {**NOT_INTS, "None": None}, of_sequences)
    yield from option("max_seqlen_k", {"str": "4", "bool": True, "float": 4.0}, of_sequences)
    arrays: dict[str, Any] = {"list": [0, 4], "int": 4, "str": "04"}
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"):
        for kind, value in arrays.items():
            call = functools.partial(of_sequences, **{name: value})
            yield BadCall(f"VariableLength {name} {kind}", call, name)
        for kind, array in {"floats": np.zeros(3), "objects": np.array([0, "1", None]), "bools": np.zeros(3, bool),
                            "matrix": np.zeros((3, 1), int), "0-d": np.array(0)}.items():  # fmt: skip
            call = functools.partial(of_sequences, **{name: array})
            yield BadCall(f"VariableLength {name} {kind}", call, name)
    yield BadCall("VariableLength falls", functools.partial(of_sequences, cu_seqlens_q=np.array([0, 9, 4])),
                  "cu_seqlens_q")  # fmt: skip
    yield BadCall("VariableLength missing", functools.partial(of_sequences, cu_seqlens_k=None), "cu_seqlens_k")


def calls_of_arrays() -> Iterator[BadCall]:
    objects: dict[str, Any] = {"None": None, "int": 5, "float": 0.5, "str": "x", "list": [[0.0]], "object": object()}
    for call, names in ((forward, FORWARD), (backward, BACKWARD)):
        for name in names:
            for kind, value in objects.items():
                made = functools.partial(call, **{name: value})
                yield BadCall(f"{call.__name__} {name} {kind}", made, name)
    for name in ("bias", "alibi_slopes", "sinks", "out"):
        yield BadCall(
            f"forward {name} list", functools.partial(forward, **{name: [0.0]}), "output" if name == "out" else name
        )
    arrays = {"0-d": np.zeros((), "f2"), "1-d": np.zeros(8, "f2"), "5-d": np.zeros((1, 1, 4, 2, 8), "f2")}
    for name in FORWARD:
        for kind, array in arrays.items():
            made = functools.partial(forward, **{name: array})
            yield BadCall(f"forward {name} {kind}", made, f"{name}.shape")
        for dtype in ("f8", "i4", "bool", "O", "c8", "U1", ">f2"):
            made = functools.partial(forward, **{name: FORWARD[name].astype(dtype)})
            yield BadCall(f"forward {name} {dtype}", made, f"{name}.dtype")
    yield BadCall("backward logsumexp shape", functools.partial(backward, logsumexp=np.zeros(3, "f4")),
                  "logsumexp")  # fmt: skip
    yield BadCall("reference list", lambda: reference(bias=[1]), "bias")
    read_only = QUERY.copy()
    read_only.flags.writeable = False
    yield BadCall("reference read-only out", lambda: reference(out=read_only), "output")
    interfaces: dict[str, Any] = {
        "without data": Interface(data=None),
        "without typestr": Interface(typestr=None),
        "without shape": Interface(shape=None),
        "data that is an int": Interface(data=5),
        "a typestr that is an int": Interface(typestr=5),
        "a shape of words": Interface(shape=("a", "b", "c", "d")),
        "an interface that is a list": type("Listed", (), {"__cuda_array_interface__": []})(),
        "an interface that raises": Unreadable("__cuda_array_interface__"),
        "a DLPack device that raises": NoDlpackDevice(),
        "a DLPack device that is an int": type("Odd", (), {"__dlpack_device__": lambda self: 5})(),
    }
    for kind, value in interfaces.items():
        yield BadCall(f"forward query with {kind}", functools.partial(forward, query=value), "query")


def calls_of_problems() -> Iterator[BadCall]:
    def checked(**changes: Any) -> Any:
        return attn.Problem.dense("forward", SHAPE, "float16").replace(**changes).check()

    def planned(**changes: Any) -> Any:
        return attn.plan_backward(attn.Problem.dense("backward", SHAPE, "float16").replace(**changes), "sm_90")

    def shaped(**changes: Any) -> Any:
        return attn.Problem.dense("forward", replace(SHAPE, **changes), "float16").check()

    yield from option("scale", NOT_NUMBERS, checked)
    yield from option("softcap", NOT_NUMBERS, planned)
    yield from option("dropout_p", NOT_NUMBERS, planned)
    yield from option("num_splits_key", NOT_INTS, planned)
    yield from option("deterministic", NOT_FLAGS, planned)
    yield from option("philox_on_device", NOT_FLAGS, checked)
    yield from option("direction", {"str": "up", "None": None, "list": ["forward"], "array": np.ones(2)}, checked)
    yield from option("mask", {"str": "full", "class": attn.Full, "base": attn.Full.__base__()}, checked, planned)
    yield from option("sequences", {"int": 3, "VariableLength": attn.VariableLength(0, 0, 0, 0)}, checked)
    yield from option("query", {"None": None, "array": QUERY, "tuple": (1, 4, 2, 8)}, checked)
    yield from option("bias", {"array": QUERY, "int": 0}, checked)
    yield from option("score_terms", {"dict": {}, "name": ("slopes",), "None": None}, checked)
    tensor = attn.Tensor.contiguous((B, MK, H, D), "float16")
    fields: dict[str, Any] = {"shape": [1.5, 2, 3, 4], "strides": (1, 2, "3", 4), "dtype": np.float16,
                              "alignment": "16"}  # fmt: skip
    for name, value in fields.items():
        call = functools.partial(checked, key=replace(tensor, **{name: value}))
        yield BadCall(f"Tensor {name}", call, f"key.{name}")
    yield BadCall("Tensor negative", lambda: checked(key=replace(tensor, shape=(1, -6, 2, 8))), "key.shape")
    yield BadCall("Tensor dtype int8", lambda: checked(key=replace(tensor, dtype="int8")), "key.dtype")
    yield BadCall("Tensor of three strides", lambda: checked(key=replace(tensor, strides=(1, 2, 3))), "key.strides")
    for name in ("batch", "num_queries", "num_keys", "num_heads", "head_dim", "head_dim_value"):
        for kind, size in {"str": "4", "float": 4.0, "None": None, "bool": True}.items():
            yield BadCall(f"Shape {name} {kind}", functools.partial(shaped, **{name: size}),
                          f"shape.{name}")  # fmt: skip
        call = functools.partial(shaped, num_heads_key=0, **{name: -1})
        of_name = {"head_dim_value": "value", "num_keys": "key"}.get(name, "query")
        yield BadCall(f"Shape {name} negative", call, of_name)
        call = functools.partial(shaped, **{name: UNPRINTABLE})
        yield BadCall(f"Shape {name} unprintable", call, name)
    for kind, size in {"str": "4", "float": 0.0, "array": np.zeros(2), "bool": False}.items():
        yield BadCall(f"Shape num_heads_key {kind}", functools.partial(shaped, num_heads_key=size),
                      "shape.num_heads_key")  # fmt: skip
    for kind, array in {"int": 3, "array": np.ones(2)}.items():
        yield BadCall(f"Problem alibi_slopes {kind}", functools.partial(checked, alibi_slopes=array), "alibi_slopes")
    yield BadCall("Shape tokens", lambda: shaped(tokens=5), "shape.tokens")
    yield BadCall("Shape tokens of one", lambda: shaped(tokens=(5,)), "shape.tokens")
    for kind, shape in {"tuple": (1, 2), "None": None, "array": QUERY}.items():
        yield BadCall(f"Problem.dense shape {kind}",
                      functools.partial(attn.Problem.dense, "forward", shape, "float16"),
                      "shape")  # fmt: skip
    yield BadCall("Problem.dense dtype", lambda: attn.Problem.dense("forward", SHAPE, np.float16).check(),  # type: ignore[arg-type]
                  "query.dtype")  # fmt: skip
    yield BadCall("Problem.dense mask", lambda: attn.Problem.dense("forward", SHAPE, "float16", 0).check(),  # type: ignore[arg-type]
                  "mask")  # fmt: skip


def calls_of_plans() -> Iterator[BadCall]:
    dense = attn.Problem.dense("forward", SHAPE, "float16")
    gradients = attn.Problem.dense("backward", SHAPE, "float16")
    for function, problem in (
        (attn.plan_forward, dense),
        (attn.plan_backward, gradients),
        (functools.partial(attn.plan_with_tile, tile=TILE), gradients),
    ):
        name = getattr(function, "__name__", "plan_with_tile")
        for kind, value in {"None": None, "int": 5, "shape": SHAPE, "dict": {}}.items():
            yield BadCall(f"{name} problem {kind}", functools.partial(function, value, "sm_90"), "problem")
        for kind, arch in {"None": None, "int": 90, "list": ["sm_90"], "tuple": (9, 0), "bytes": b"sm_90"}.items():
            yield BadCall(f"{name} arch {kind}", functools.partial(function, problem, arch), "arch")
        yield BadCall(f"{name} arch unknown", functools.partial(function, problem, "sm_99"), "arch")
        for kind, count in {**NOT_INTS, "zero": 0, "negative": -1}.items():
            call = functools.partial(function, problem, "sm_90", num_sms=count)
            yield BadCall(f"{name} num_sms {kind}", call, "num_sms")
    yield BadCall("plan_forward of a backward", lambda: attn.plan_forward(gradients, "sm_90"), "direction")
    yield BadCall("plan_backward of a forward", lambda: attn.plan_backward(dense, "sm_90"), "direction")
    for kind, tile in {"str": "64x64x4", "tuple": (64, 64, 4), "None": None}.items():
        call = functools.partial(attn.plan_with_tile, gradients, "sm_90", tile)
        yield BadCall(f"plan_with_tile tile {kind}", call, "tile")
    for kind, family in {"int": 90, "str": "sm100", "list": ["sm80"]}.items():
        call = functools.partial(attn.plan_with_tile, gradients, "sm_90", TILE, family=family)
        yield BadCall(f"plan_with_tile family {kind}", call, "family")
    for name, value in (("tile_m", "64"), ("tile_n", 64.0), ("warps", None), ("query_stages", True),
                        ("register_usage_level", [5]), ("head_dim_split", "all"), ("key_stages", 1.5),
                        ("variant", 5), ("not_on", "sm_80")):  # fmt: skip
        call = functools.partial(attn.plan_with_tile, gradients, "sm_90", replace(TILE, **{name: value}))
        yield BadCall(f"TileConfig {name}", call, f"tile.{name}")
    for name, number in (("tile_m", 0), ("warps", -4), ("query_stages", 0), ("variant", "none"), ("tile_n", 10**30)):
        call = functools.partial(attn.plan_with_tile, gradients, "sm_90", replace(TILE, **{name: number}))
        yield BadCall(f"TileConfig {name} {number}", call, name)
    for text in (5, None, b"64x64x4", "", "64", "64x64", "64x64x4:", "axbxc", "9" * 5000 + "x1x1", ["64x64x4"]):
        call = functools.partial(attn.TileConfig.parse, text)
        yield BadCall(f"TileConfig.parse {str(text)[:12]!r} {type(text).__name__}", call, "tile")
    for kind, value in {"None": None, "plan": attn.plan_forward(dense, "sm_90")}.items():
        yield BadCall(f"TileConfig.of {kind}", functools.partial(attn.TileConfig.of, value),
                      "build")  # fmt: skip
    for text in (5, None, "", "{", "[]", "5", '{"build": 5}', "[" * 100000):
        call = functools.partial(Plan.from_json, text)
        yield BadCall(f"Plan.from_json {str(text)[:12]!r} {type(text).__name__}", call, "plan")


def calls_of_kernels() -> Iterator[BadCall]:
    dense = attn.Problem.dense("forward", SHAPE, "float16")
    plan = attn.plan_forward(dense, "sm_90")
    made = artifact(plan.build)
    for kind, value in {"None": None, "int": 5, "problem": dense, "str": plan.symbol}.items():
        yield BadCall(f"compile {kind}", functools.partial(attn.compile, value), "plan_or_build")
        yield BadCall(f"artifact_for {kind}", functools.partial(attn.artifact_for, value), "build")
    yield BadCall("artifact_for plan", lambda: attn.artifact_for(plan), "build")  # type: ignore[arg-type]
    for kind, path in {"int": 5, "list": ["a"], "bytes": b"a", "null": "a\0b", "raises": UnreadablePath()}.items():
        call = functools.partial(attn.artifact_for, plan.build, path)
        yield BadCall(f"artifact_for folder {kind}", call, "folder")
        yield BadCall(f"Folder {kind}", functools.partial(attn.Folder, path), "path")
        yield BadCall(f"load_bundle {kind}", functools.partial(attn.load_bundle, path), "folder")
    folder = attn.Folder("no such folder")
    yield BadCall("Folder of a plan", lambda: folder(plan), "build")  # type: ignore[arg-type]
    yield BadCall("Folder of None", lambda: folder(None), "build")  # type: ignore[arg-type]
    yield BadCall("Folder of an absent build", lambda: folder(plan.build), f"{plan.build.symbol} for sm_90: not in")
    yield BadCall("Folder.put", lambda: folder.put(plan), "artifact")  # type: ignore[arg-type]
    yield BadCall("load_bundle of an absent folder", lambda: attn.load_bundle("no such folder"), "no such folder")
    arguments: dict[str, Any] = {"artifact": made, "plan": plan, "problem": dense, "device": 0}
    for name, values in {
        "artifact": (None, 5, plan),
        "plan": (None, dense, plan.build),
        "problem": (5, plan, SHAPE),
        "device": ("0", 0.0, -1, None, [0], True, 99),
    }.items():
        for value in values:
            call = functools.partial(attn.bind, **{**arguments, name: value})
            yield BadCall(f"bind {name} {str(value)[:20]}", call, name)
    yield BadCall("kernels that return no artifact", lambda: forward(kernels=lambda build: build),
                  "kernels(fwd_sm90_f16_d8_full_64x64)")  # fmt: skip
    yield BadCall("kernels that are a class", lambda: forward(kernels=attn.Folder), "path")


def calls_of_launches() -> Iterator[BadCall]:
    dense = attn.Problem.dense("forward", SHAPE, "float32")
    plan = attn.plan_forward(dense, "sm_90")
    addresses = {name: 4096 for name in ("query", "key", "value", "output", "logsumexp")}

    @functools.cache
    def bound() -> Any:
        return attn.bind(artifact(plan.build), plan, dense)

    def bad(name: str, text: str, pointers: Any = addresses, **arguments: Any) -> BadCall:
        return BadCall(f"Bound {name}", lambda: bound()(pointers, **arguments), text, bound)

    for kind, value in {"None": None, "int": 5, "list": [4096], "str": "query"}.items():
        yield bad(f"pointers {kind}", "pointers", value)
    for kind, value in {"str": "4096", "float": 4096.0, "None": None, "list": [4096], "bool": True}.items():
        yield bad(f"address {kind}", "key", {**addresses, "key": value})
    for kind, value in {"str": "x", "float": 1.0, "odd": 3, "zero": 0, "huge": 2**64}.items():
        yield bad(f"workspace {kind}", "workspace", workspace=value)
    for kind, value in {"str": "x", "float": 1.0, "huge": 2**64}.items():
        yield bad(f"stream {kind}", "stream", stream=value)
    yield bad("names", "key", {"query": 4096})


def calls_of_bundles() -> Iterator[BadCall]:
    dense = attn.Problem.dense("forward", SHAPE, "float16")
    arguments: dict[str, Any] = {"folder": "no such folder", "problems": [dense], "archs": ["sm_80"],
                                 "kernels": artifact}  # fmt: skip
    for name, values in {
        "folder": (5, None, ["a"], b"a", "a\0b"),
        "problems": (5, None, dense, "fwd", {"forward": dense}),
        "archs": (5, None, "sm_80", {"sm_80": 1}, b"sm_80"),
        "name": (5, None, ["attention"], "Attention", "", "a b"),
        "kernels": (5, "folder", []),
    }.items():
        for value in values:
            call = functools.partial(attn.export_bundle, **{**arguments, name: value})
            text = "name" if name == "name" else name
            yield BadCall(f"export_bundle {name} {str(value)[:16]!r}", call, text)
    for label, changes, fragment in (
        ("no problems", {"problems": []}, "problems"),
        ("problems of others", {"problems": [5]}, "problem"),
        ("a wrong problem", {"problems": [dense.replace(scale="x")]}, "scale"),
        ("twice", {"problems": [dense, dense]}, "problems"),
        ("no archs", {"archs": ()}, "archs"),
        ("archs of ints", {"archs": [80]}, "arch"),
        ("unknown arch", {"archs": ["sm_10"]}, "arch"),
    ):
        yield BadCall(f"export_bundle {label}", functools.partial(attn.export_bundle, **{**arguments, **changes}),
                      fragment)  # fmt: skip


FIRST = {name: np.swapaxes(array, 1, 2) for name, array in (*FORWARD.items(), ("out", QUERY), ("grad_out", QUERY))}
ROWS = {**FORWARD, "out": QUERY, "grad_out": QUERY}
PACKED = {"cum_seq_q": np.array([0, 4], "i4"), "cum_seq_k": np.array([0, 6], "i4")}
OPERATORS: dict[str, dict[str, Any]] = {
    "efficient_attention_forward": {
        **FORWARD, "bias": None, "cu_seqlens_q": None, "cu_seqlens_k": None, "max_seqlen_q": None,
        "max_seqlen_k": None, "dropout_p": 0.0, "custom_mask_type": 0,
    },
    "efficient_attention_backward": {
        **ROWS, "bias": None, "cu_seqlens_q": None, "cu_seqlens_k": None, "max_seqlen_q": None, "max_seqlen_k": None,
        "logsumexp": LSE, "dropout_p": 0.0, "philox_seed": 0, "philox_offset": 0, "custom_mask_type": 0,
        "bias_requires_grad": False,
    },
    "scaled_dot_product_efficient_attention": {
        **{name: FIRST[name] for name in FORWARD}, "attn_bias": None, "compute_log_sumexp": True,
    },
    "scaled_dot_product_efficient_attention_backward": {
        **FIRST, "attn_bias": None, "logsumexp": LSE, "philox_seed": 0, "philox_offset": 0, "dropout_p": 0.0,
        "grad_input_mask": (True, True, True, False),
    },
    "flash_attention_forward": {
        **FORWARD, "cum_seq_q": None, "cum_seq_k": None, "max_q": 4, "max_k": 6, "dropout_p": 0.0, "is_causal": False,
    },
    "flash_attention_backward": {
        **ROWS, "logsumexp": LSE[..., :MQ], "cum_seq_q": None, "cum_seq_k": None, "max_q": 4, "max_k": 6,
        "dropout_p": 0.0, "is_causal": False, "philox_seed": 0, "philox_offset": 0,
    },
    "cudnn_attention_forward": {
        **{name: FIRST[name] for name in FORWARD}, "attn_bias": None, "cum_seq_q": None, "cum_seq_k": None, "max_q": 4,
        "max_k": 6, "compute_log_sumexp": True,
    },
    "cudnn_attention_backward": {
        **FIRST, "logsumexp": LSE[..., :MQ], "philox_seed": 0, "philox_offset": 0, "attn_bias": None,
        "cum_seq_q": None, "cum_seq_k": None, "max_q": 4, "max_k": 6, "dropout_p": 0.0, "is_causal": False,
    },
}  # fmt: skip
OPERATOR_NUMBERS = ("scale", "dropout_p", "softcap")
OPERATOR_FLAGS = ("is_causal", "compute_log_sumexp", "bias_requires_grad", "return_debug_mask",
                  "shared_storage_dqdkdv", "deterministic")  # fmt: skip
OPERATOR_INTS = ("custom_mask_type", "num_splits_key", "window_size", "window_size_left", "window_size_right")


def calls_of_operators() -> Iterator[BadCall]:
    import inspect

    for name, arguments in OPERATORS.items():
        function = getattr(torch_ops, name)
        allowed = inspect.signature(function).parameters

        def bad(argument: str, kind: str, value: Any, text: str, function: Any = function, name: str = name,
                arguments: dict[str, Any] = arguments) -> BadCall:  # fmt: skip
            call = functools.partial(function, **{"kernels": artifact, **arguments, argument: value})
            return BadCall(f"{name} {argument} {kind}", call, text)

        for argument in (each for each in OPERATOR_NUMBERS if each in allowed):
            for kind, value in {"str": "2", "array": np.ones(2), "bool": True}.items():
                yield bad(argument, kind, value, argument)
        for argument in (each for each in OPERATOR_FLAGS if each in allowed):
            for kind, value in {"str": "no", "int": 2, "array": np.ones(2, bool)}.items():
                yield bad(argument, kind, value, argument)
        for argument in (each for each in OPERATOR_INTS if each in allowed):
            for kind, value in {"str": "1", "float": 1.0, "bool": True, "array": np.ones(2, int)}.items():
                yield bad(argument, kind, value, argument)
        for argument in ("query", "key", "value"):
            yield bad(argument, "list", [0.0], argument)
            yield bad(argument, "rank", np.zeros(3, "f2"), f"{argument}.shape")
        for kind, value in {"str": "cpu", "None": None}.items():
            yield bad("backend", kind, value, "backend")
        yield bad("kernels", "int", 5, "kernels")
        yield bad("stream", "str", "x", "stream")
        if "philox_seed" in allowed:
            call = functools.partial(
                function, **{"kernels": artifact, **arguments, "dropout_p": 0.5, "philox_seed": "x"}
            )
            yield BadCall(f"{name} philox_seed", call, "philox_seed")
    for kind, value in {"str": "yes", "ints": (1, 1, 1, 0), "short": (True,), "None": None}.items():
        arguments = {**OPERATORS["scaled_dot_product_efficient_attention_backward"], "grad_input_mask": value}
        yield BadCall(f"grad_input_mask {kind}",
                      functools.partial(torch_ops.scaled_dot_product_efficient_attention_backward, **arguments),
                      "grad_input_mask")  # fmt: skip
    tokens = {name: FORWARD[name][0] for name in FORWARD}
    for name in ("max_q", "max_k"):
        for kind, value in NOT_INTS.items():
            arguments = {**OPERATORS["flash_attention_forward"], **tokens, **PACKED, name: value, "kernels": artifact}
            yield BadCall(f"flash packed {name} {kind}",
                          functools.partial(torch_ops.flash_attention_forward, **arguments),
                          name)  # fmt: skip


def all_calls() -> list[BadCall]:
    """Returns every bad call; names are unique."""
    groups = (
        *(calls_of_options, calls_of_masks_and_dropout, calls_of_sequences, calls_of_arrays, calls_of_problems),
        *(calls_of_plans, calls_of_kernels, calls_of_launches, calls_of_bundles, calls_of_operators),
    )
    return [call for group in groups for call in group()]
