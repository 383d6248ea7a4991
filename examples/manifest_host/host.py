"""Launches a bundle's kernels from manifest.json with Python's standard library and libcuda, without the package.

This file is a template for ports: each step of docs/bundles.md is one method, in the same order.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import hashlib
import json
import operator
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT = "cutlass_py_attn bundle 5"
INT64 = range(-(2**63), 2**63)
PACKED = {"i64": "<q", "i32": "<i", "f32": "<f"}

# CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion and others of cuda.h.
ELEMENT = {"uint8": 0, "float16": 6, "float32": 7, "bfloat16": 9}
SWIZZLE = {"NONE": 0, "32B": 1, "64B": 2, "128B": 3}
L2_PROMOTION = {"NONE": 0, "64B": 1, "128B": 2, "256B": 3}
MULTIPROCESSOR_COUNT, MAJOR, MINOR, SHARED_MEMORY_OPTIN = 16, 75, 76, 97
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
CLUSTER_DIMENSION = 4


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_memory", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute whose value is the cluster dimension."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("cluster", ctypes.c_uint * 3),
        ("rest", ctypes.c_char * 52),
    )


# 0  Rules


def fewest_splits(groups: int, key_tiles: int, num_sms: int) -> int:
    """Returns the smallest number of splits that minimises the work of the SM with the most blocks."""

    def work(splits: int) -> int:
        return -(-max(groups, 1) * splits // num_sms) * (-(-key_tiles // splits) + 1)

    return min(range(1, max(min(key_tiles, 256), 1) + 1), key=work)


def causal_key_tiles(num_queries: int, num_keys: int, shift: int, tile_m: int, tile_n: int) -> int:
    """Returns the key tiles that the query tiles of a head visit: query i sees the keys before i + 1 + shift."""
    ends = (min(first + tile_m, num_queries) for first in range(0, num_queries, tile_m))
    return sum(max(-(-min(num_keys, end + shift) // tile_n), 1) for end in ends)


def distinct(*sizes_and_strides: int) -> int:
    """Returns whether each stride exceeds what the axes of smaller strides span: no two indices have one element."""
    span = 0
    axes = zip(sizes_and_strides[::2], sizes_and_strides[1::2], strict=True)
    for stride, size in sorted((abs(stride), size) for size, stride in axes if size > 1):
        if stride <= span:
            return 0
        span = expect_int64(span + (size - 1) * stride)
    return 1


def expect_int64(value: float) -> float:
    """Returns the value; ValueError if it is an integer of more than 64 bits."""
    if isinstance(value, int) and value not in INT64:
        raise ValueError(f"{value} does not fit in 64 bits: sizes or strides are too large")
    return value


def divisor(value: int) -> int:
    """Returns the value; ValueError if it is less than 1."""
    if value < 1:
        raise ValueError(f"{value} as a divisor: sizes are too small")
    return value


FUNCTIONS: dict[str, Any] = {
    "ceil_div": lambda a, b: -(-a // divisor(b)),
    "round_up": lambda a, b: -(-a // divisor(b)) * b,
    "div": lambda a, b: a // divisor(b),
    "mod": lambda a, b: a % divisor(b),
    "min": min,
    "max": max,
    "step": lambda size, stride, other: other if size == 1 else stride,
    "fewest_splits": fewest_splits,
    "causal_key_tiles": causal_key_tiles,
    "distinct": distinct,
}
OPERATORS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Eq: operator.eq,
    ast.GtE: operator.ge, ast.LtE: operator.le, ast.Gt: operator.gt, ast.USub: operator.neg,
}  # fmt: skip


def evaluate(rule: str, names: Mapping[str, float]) -> Any:
    """Returns the value of a rule: + - *, comparisons and function calls over names and numbers.

    ValueError: an integer, or one on the way, does not fit in 64 bits.
    """

    def value(node: ast.expr) -> Any:
        return expect_int64(computed(node))

    def computed(node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return names[node.id]
            case ast.UnaryOp():
                return OPERATORS[type(node.op)](value(node.operand))
            case ast.BinOp():
                return OPERATORS[type(node.op)](value(node.left), value(node.right))
            case ast.Compare(ops=[relation], comparators=[right]):
                return OPERATORS[type(relation)](value(node.left), value(right))
            case ast.Call(func=ast.Name(id=name)):
                return FUNCTIONS[name](*map(value, node.args))
        raise ValueError(f"rule {rule!r}: {ast.dump(node)} is not part of the rule language")

    return value(parsed(rule))


@functools.cache
def parsed(rule: str) -> ast.expr:
    """Returns the syntax tree of a rule."""
    return ast.parse(rule, mode="eval").body


class Host:
    """The problem of one direction of a bundle on device 0, whose context must be current. cuda: libcuda."""

    def __init__(self, folder: Path, direction: str, cuda: ctypes.CDLL) -> None:
        self.folder, self.cuda = folder, cuda
        manifest = json.loads((folder / "manifest.json").read_text())
        if manifest["format"] != FORMAT:
            raise ValueError(f"{folder}: format {manifest['format']!r}, but this host reads {FORMAT!r}")
        self.passed = next(item for item in manifest["problems"] if item["direction"] == direction)
        self.num_sms = self._attribute(MULTIPROCESSOR_COUNT)
        self.target = self._choose()
        cubin = (folder / self.target["cubin"]).read_bytes()
        if hashlib.sha256(cubin).hexdigest() != manifest["files"][self.target["cubin"]]["sha256"]:
            raise ValueError(f"{self.target['cubin']}: its SHA-256 is not that of manifest.json; export it again")
        self.kernels = self._load(cubin)

    # 1  The target

    def _choose(self) -> dict[str, Any]:
        major, minor = self._attribute(MAJOR), self._attribute(MINOR)
        for target in self.passed["targets"]:
            asked_major, asked_minor = target["compute_capability"]
            later = target["later_minors"] and major == asked_major and minor >= asked_minor
            largest = max(each["shared_memory_bytes"] for each in target["launches"])
            runs = later or (major, minor) == (asked_major, asked_minor)
            if runs and largest <= self._attribute(SHARED_MEMORY_OPTIN):
                found: dict[str, Any] = target
                return found
        raise ValueError(f"no cubin for compute capability {major}.{minor}")

    # 2  The kernels

    def _load(self, cubin: bytes) -> list[ctypes.c_void_p]:
        library, kernels = ctypes.c_void_p(), []
        self._call("cuLibraryLoadData", ctypes.byref(library), cubin, None, None, 0, None, None, 0)
        for launch in self.target["launches"]:
            kernel = ctypes.c_void_p()
            self._call("cuLibraryGetKernel", ctypes.byref(kernel), library, launch["symbol"].encode())
            limit = launch["shared_memory_bytes"]
            self._call("cuKernelSetAttribute", MAX_DYNAMIC_SHARED_SIZE_BYTES, limit, kernel, 0)
            kernels.append(kernel)
        return kernels

    # 3  Numbers

    def numbers(self, changes: Mapping[str, float]) -> dict[str, float]:
        """Returns the exported inputs with `changes`, num_sms and definitions; ValueError says what is not allowed."""
        names = {name: item["value"] for name, item in self.passed["inputs"].items()}
        names |= {**changes, "num_sms": self.num_sms}
        self._expect("conditions", names)
        for item in self.target["definitions"]:
            names[item["name"]] = evaluate(item["rule"], names)
        self._expect("limits", names)
        return names

    def _expect(self, key: str, names: Mapping[str, float]) -> None:
        for item in self.target[key]:
            if not evaluate(item["rule"], names):
                raise ValueError(item["says"])

    # 4  The workspace

    def workspace(self, names: Mapping[str, float]) -> tuple[int, int, dict[str, int]]:
        """Returns (size in bytes, number of leading bytes to clear, offset of each buffer)."""
        end = zeroed = 0
        offsets = {}
        for buffer in self.target["workspace"]["buffers"]:
            if not evaluate(buffer["when"], names):
                continue
            offsets[buffer["name"]] = end
            end += evaluate(buffer["bytes_rule"], names)
            zeroed = end if buffer["zeroed"] else zeroed
            end = evaluate(f"round_up({end}, {self.target['workspace']['alignment']})", names)
        return end, zeroed, offsets

    # 5  The struct

    def struct(self, names: Mapping[str, float], addresses: Mapping[str, int], buffers: Mapping[str, int]) -> bytes:
        """Returns the kernels' struct parameter. buffers: addresses of the workspace buffers."""
        block = bytearray(self.target["struct"]["bytes"])
        for field in self.target["struct"]["fields"]:
            if "pointer" in field:
                value: float = addresses[field["pointer"]]
            elif "workspace" in field:
                value = buffers.get(field["workspace"], 0)
            else:
                value = evaluate(field["rule"], names)
            struct.pack_into(PACKED[field["type"]], block, field["offset"], value)
        return bytes(block)

    # 6  Tensor maps

    def tensor_map(self, recipe: Mapping[str, Any], names: Mapping[str, float], address: int) -> ctypes.Array[Any]:
        """Returns a CUtensorMap: 128 bytes at an address that is a multiple of 64."""
        storage = (ctypes.c_uint64 * 24)()
        tensor_map = (ctypes.c_uint64 * 16).from_buffer(storage, -ctypes.addressof(storage) % 64)
        rank = len(recipe["size_rules"])
        sizes = [evaluate(rule, names) for rule in recipe["size_rules"]]
        strides = [evaluate(rule, names) * recipe["item_bytes"] for rule in recipe["stride_rules"]]
        box = [evaluate(rule, names) for rule in recipe["box_rules"]]
        self._call(
            "cuTensorMapEncodeTiled", tensor_map, ELEMENT[recipe["dtype"]], rank, ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*sizes), (ctypes.c_uint64 * (rank - 1))(*strides),
            (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*recipe["element_strides"]),
            0, SWIZZLE[recipe["swizzle"]], L2_PROMOTION[recipe["l2_promotion"]], 0,
        )  # fmt: skip
        return tensor_map

    # 7  The launches

    def launch(self, changes: Mapping[str, float], addresses: Mapping[str, int], workspace: int, stream: int) -> None:
        """Launches the pass on the stream. workspace: address of as many bytes as `workspace()` returns."""
        names = self.numbers(changes)
        _, zeroed, offsets = self.workspace(names)
        buffers = {name: workspace + offset for name, offset in offsets.items()}
        block = ctypes.create_string_buffer(self.struct(names, addresses, buffers))
        if zeroed:
            self._call(
                "cuMemsetD8Async", ctypes.c_void_p(workspace), 0, ctypes.c_size_t(zeroed), ctypes.c_void_p(stream)
            )
        for launch, kernel in zip(self.target["launches"], self.kernels, strict=True):
            if not evaluate(launch["when"], names):
                continue
            maps = [self.tensor_map(recipe, names, addresses[recipe["pointer"]]) for recipe in launch["tensor_maps"]]
            parameters = (ctypes.c_void_p * (len(maps) + 1))(*map(ctypes.addressof, (*maps, block)))
            config = LaunchConfig(shared_memory=launch["shared_memory_bytes"], stream=stream)
            config.grid[:] = [evaluate(rule, names) for rule in launch["grid_rules"]]
            config.block[:] = launch["block"]
            cluster = LaunchAttribute(id=CLUSTER_DIMENSION)
            cluster.cluster[:] = launch["cluster"]
            config.attributes = ctypes.addressof(cluster)
            config.attribute_count = int(launch["cluster"] != [1, 1, 1])
            self._call("cuLaunchKernelEx", ctypes.byref(config), kernel, parameters, None)

    def _attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), number, 0)
        return value.value

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: CUresult {code}")
