"""Library: writes the manifest of many problems as a C library: <name>.c and <name>.h, and what builds them.

The C sources follow from the manifest and the cubins alone. library.c.j2 and library.h.j2 are their templates; what
computes and starts the launches of a kernel is shared with the header of a single problem (kernels.c.j2).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from cutlass_py_attn import __version__
from cutlass_py_attn.bundle import c_text, interface
from cutlass_py_attn.bundle.dispatch import ALWAYS, Facts, facts_of, order_key
from cutlass_py_attn.bundle.numbers import MASK_OPERANDS
from cutlass_py_attn.bundle.rules import ALL_DIRECTIONS, AnyProblem, from_json
from cutlass_py_attn.launch.build import ROW_KINDS, Build
from cutlass_py_attn.launch.expressions import Name
from cutlass_py_attn.launch.names import MASK_BLOCK_COLUMNS, MASK_BLOCK_HEADS, MASK_BLOCK_ROWS
from cutlass_py_attn.plan import preconditions
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.masks import UNLIMITED
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.quantization import (
    CACHE_AXES,
    CACHE_SCALES,
    OPERAND_AXES,
    OUTPUT_DTYPES,
    SCALE_COLUMNS,
    SCALES,
    has_codes,
)
from cutlass_py_attn.problem.tensors import (
    BLOCK_AXES,
    BMHK,
    ITEM_BYTES,
    KEY_ROPE,
    LSE_PADDING,
    OPERAND_BYTES,
    RANGE_AXES,
    RANGE_EDGES,
    VISIBLE_BLOCKS,
    WORD_BYTES,
)
from cutlass_py_attn.score_terms import registry
from cutlass_py_attn.score_terms.dropout import PHILOX

Json = dict[str, Any]

_HAS_RANGES: Final = Name("has_key_ranges")
_HAS_BLOCKS: Final = Name("has_visible_blocks")
# Numbers of a call with masks in memory: strides of the arrays, and sizes of blocks.
_OF_MASKS: Final = (
    *(f"{name}_{axis}" for name in RANGE_EDGES for axis in RANGE_AXES),
    *(f"{VISIBLE_BLOCKS}_{axis}" for axis in BLOCK_AXES),
    *map(str, (MASK_BLOCK_ROWS, MASK_BLOCK_COLUMNS, MASK_BLOCK_HEADS)),
)
_AXES_OF_LISTS: Final = ("ranges_batch", "ranges_heads")
_IMAGE_ALIGNMENT: Final = 64
_WORDS_IN_LINE: Final = 6
_FUNCTIONS: Final = (
    "cuGetErrorName", "cuGetErrorString", "cuCtxGetCurrent", "cuCtxGetDevice", "cuCtxPushCurrent", "cuCtxPopCurrent",
    "cuDeviceGetAttribute", "cuThreadExchangeStreamCaptureMode", "cuLibraryLoadData", "cuLibraryUnload",
    "cuLibraryGetKernel", "cuKernelGetParamInfo", "cuKernelSetAttribute", "cuKernelGetFunction",
    "cuTensorMapEncodeTiled", "cuMemsetD8Async", "cuLaunchKernelEx",
)  # fmt: skip
_FILES: Final = {
    "{name}.c": "library.c.j2",
    "{name}.h": "library.h.j2",
    "{name}.pc.in": "library.pc.in.j2",
    "CMakeLists.txt": "CMakeLists.txt.j2",
    "rust/Cargo.toml": "Cargo.toml.j2",
    "rust/build.rs": "build.rs.j2",
    "rust/src/lib.rs": "lib.rs.j2",
}


def render(manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Returns the files of the library of a manifest by name; NotSupported if jinja2 is not installed.

    files: the cubins that the manifest names
    """
    name = manifest["name"]
    environment = c_text.environment(name, "the C library", interface.field)
    kernels, builds = _kernels(manifest)
    images, code = _images(kernels, files)
    targets = [kernel["target"] for kernel in kernels]
    values = {
        **_constants(),
        **c_text.sizes(targets),
        "name": name,
        "made_by": manifest["made_by"],
        "owner": "error",
        "driver": f"{name}_driver.",
        "kernels": kernels,
        "order": list(_order(kernels, builds)),
        "entry_count": sum(len(target["launches"]) for target in targets),
        "images": images,
        "image_bytes": len(code),
        "image_sha256": hashlib.sha256(code).hexdigest(),
        "image_words": _words(code),
        "archs": sorted({target["arch"] for target in targets}),
        "listing": sorted({f"{target['symbol']} for {target['arch']}" for target in targets}),
    }
    found = {
        path.format(name=name): environment.get_template(template).render(**values).encode()
        for path, template in _FILES.items()
    }
    return {**found, f"{name}.images": code}


def _constants() -> Json:
    return {
        "abi": interface.ABI,
        "version": __version__,
        "first_bytes": interface.FIRST_BYTES,
        "most_call_bytes": interface.MOST_BYTES,
        "error_bytes": interface.ERROR_BYTES,
        "statuses": interface.STATUSES,
        "dtypes": interface.DTYPES,
        "item_bytes": OPERAND_BYTES,
        "output_bytes": ITEM_BYTES[OUTPUT_DTYPES[0]],
        "lse_padding": LSE_PADDING,
        "scale_columns": SCALE_COLUMNS,
        "masks": interface.MASKS,
        "directions": ALL_DIRECTIONS,
        "flags": interface.FLAGS,
        "direction_flags": interface.DIRECTION_FLAGS,
        "forward_flags": interface.FORWARD_FLAGS,
        "derived": interface.DERIVED,
        "gradients": interface.GRADIENTS,
        "feature_bits": sorted(interface.FEATURE_BITS.items()),
        "call": interface.CALL,
        "array": interface.ARRAY,
        "bias": interface.BIAS,
        "c_types": interface.C_TYPES,
        "rust_types": interface.RUST_TYPES,
        "unlimited": UNLIMITED,
        "functions": _FUNCTIONS,
    }


def _kernels(manifest: Mapping[str, Any]) -> tuple[list[Json], list[Build]]:
    """Returns the kernels of the manifest's targets as the template reads them, and the build of each."""
    kernels: list[Json] = []
    builds = []
    first_entry = 0
    for item in manifest["problems"]:
        problem = from_json(item["problem"], item["direction"])
        for target in item["targets"]:
            build = Plan.from_object(target["plan"]).build
            launches = target["launches"]
            sizes = [each["shared_memory_bytes"] + each["static_shared_memory_bytes"] for each in launches]
            builds.append(build)
            strides = _scale_strides(problem, build)
            addresses = _optional_addresses(target, has_scales=bool(strides))
            passed = _with_scales({**item, "pointers": _aligned(item["pointers"], build)}, strides)
            launched = _with_sources(target, addresses, strides)
            if build.form.has_ranges:
                passed, launched = _with_masks(passed), _of_masks(launched, build)
            kernels.append({
                "item": passed,
                "target": launched,
                "facts": _numbers(facts_of(problem, build)),
                "shared_memory": max(sizes),
                "first_entry": first_entry,
            })  # fmt: skip
            first_entry += len(launches)
    return kernels, builds


def _aligned(pointers: Json, build: Build) -> Json:
    """Returns the pointers with the alignments (bytes) of the kernel's loads in place of the exported problem's."""
    if build.kind in ROW_KINDS:
        return pointers
    loads = dict.fromkeys((*BMHK, KEY_ROPE), build.vector_bytes)
    loads |= {"page_table": WORD_BYTES, "bias": build.bias_vector_bytes, "grad_bias": build.grad_bias_vector_bytes}
    return {name: {**each, "alignment": loads.get(name, each["alignment"])} for name, each in pointers.items()}


def _scale_strides(problem: AnyProblem, build: Build) -> dict[str, str]:
    """Returns the rule of each stride of the scales of e4m3 codes: its name, or "0" where a call's scales have no axis.

    A call says by addresses and strides which scales it has, whichever were exported. A stride `batch` of its struct is
    that of sequences, unless rows have scales: then it is that of the first axis of key. Scales of tiles of columns
    have all axes, and no other kernel takes them: their rules are those of the exported problem.
    """
    if not isinstance(problem, Problem) or not has_codes(problem) or build.has(registry.KV8_TILE):
        return {}
    names, axes = (CACHE_SCALES, CACHE_AXES) if problem.has_e4m3_cache else (SCALES, OPERAND_AXES)
    stepped: tuple[str, ...] = OPERAND_AXES
    if build.has(registry.KV8_ROW):
        first = "batch" if problem.pages is None else "page"
        is_packed = first == "batch" and problem.has_ragged_rows  # all sequences in one
        stepped = ("row", "head") if is_packed else (first, "row", "head")
    strides = ((f"{name}_{axis}", axis in stepped) for name in names for axis in axes)
    return {stride: stride if has_axis else "0" for stride, has_axis in strides}


def _with_scales(item: Json, strides: Mapping[str, str]) -> Json:
    """Returns a problem with these strides of scales as inputs. Its scales may be absent: their pointers go."""
    if not strides:
        return item
    inputs = {name: {"type": "i64"} for name, rule in strides.items() if rule == name}
    pointers = {name: each for name, each in item["pointers"].items() if name not in SCALES}
    return {**item, "inputs": {**item["inputs"], **inputs}, "pointers": pointers}


def _with_masks(item: Json) -> Json:
    """Returns a problem whose calls may have ranges of keys, visible blocks or both, whichever were exported.

    A call says by flags which arrays it has, and by strides of 0 of which axes these have one.
    """
    arrays = {name: {"alignment": WORD_BYTES, "when": str(_HAS_RANGES)} for name in RANGE_EDGES}
    arrays |= {VISIBLE_BLOCKS: {"alignment": 1, "when": str(_HAS_BLOCKS)}}
    numbers = *_OF_MASKS, *_AXES_OF_LISTS, str(_HAS_RANGES), str(_HAS_BLOCKS)
    inputs = {name: {"type": "i64"} for name in numbers}
    return {**item, "inputs": {**item["inputs"], **inputs}, "pointers": {**item["pointers"], **arrays}}


def _of_masks(target: Json, build: Build) -> Json:
    """Returns the target with the rules of such calls in place of those of the exported arrays."""
    exported = {str(rule) for rule, _ in preconditions.block_sizes(build)}
    required = *preconditions.block_sizes(build, _HAS_BLOCKS), *preconditions.block_heads(build, _HAS_BLOCKS)
    others = [each for each in target["conditions"] if each["rule"] not in exported]
    return {
        **_with_sources(target, MASK_OPERANDS, {name: name for name in _OF_MASKS}),
        "conditions": [*others, *({"rule": str(rule), "says": says} for rule, says in required)],
        "definitions": [each for each in target["definitions"] if each["name"] not in _AXES_OF_LISTS],
    }


def _optional_addresses(target: Json, *, has_scales: bool) -> set[str]:
    """Returns the addresses that any call may set: of grad_logsumexp, seed and offset, and scales of e4m3 codes."""
    fields = target["struct"]["fields"]
    has_philox = any(each["rule"] in PHILOX for each in fields if "rule" in each)
    seeds = [f"{name}_address" for name in PHILOX] if has_philox else []
    return {"grad_logsumexp", *seeds, *(SCALES if has_scales else ())}


def _with_sources(target: Json, addresses: Collection[str], strides: Mapping[str, str]) -> Json:
    """Returns the target with these addresses, and the rules of these strides, as sources of its struct's fields."""
    found = []
    for each in target["struct"]["fields"]:
        name = each["name"]
        source = {"pointer": name} if name in addresses else {"rule": strides[name]} if name in strides else {}
        found.append({**each, **source})
    return {**target, "struct": {**target["struct"], "fields": found}}


def _numbers(facts: Facts) -> list[int]:
    """Returns the facts as the numbers of the C struct of a kernel, in its order."""
    gradients = {name: bit for _, bit, name in interface.GRADIENTS}
    dtypes = {name: number for number, _, name in interface.DTYPES}
    return [
        interface.direction_number(facts.direction),
        dtypes[facts.dtype],
        facts.head_dim,
        facts.head_dim_value,
        interface.MASKS.index(facts.mask),
        sum(map(interface.feature_bit, facts.features)),
        sum(gradients[name] for name in facts.gradients),
        int(facts.deterministic),
        facts.num_splits_key,
        sum(1 << axis for axis, is_full in enumerate(facts.grad_bias_axes) if is_full),
    ]


def _order(kernels: Sequence[Json], builds: Sequence[Build]) -> Iterator[tuple[int, bool]]:
    """Yields (kernel, whether only for calls for which its tile was chosen) in the order in which kernels are tried."""
    numbers = sorted(range(len(kernels)), key=lambda number: order_key(builds[number]))
    for family in dict.fromkeys(builds[number].family for number in numbers):
        of_family = [number for number in numbers if builds[number].family == family]
        some = [number for number in of_family if kernels[number]["target"]["preferred_when"] != str(ALWAYS)]
        yield from ((number, True) for number in some)
        yield from ((number, False) for number in of_family if number not in some)
        yield from ((number, False) for number in some)


def _images(kernels: Sequence[Json], files: Mapping[str, bytes]) -> tuple[list[Json], bytes]:
    """Returns the cubins with their offsets, and all of them one after another; each ends with a zero byte at least.

    Sets the number of its image in each kernel.
    """
    code = bytearray()
    images: dict[str, Json] = {}
    for kernel in kernels:
        cubin = kernel["target"]["cubin"]
        if cubin not in images:
            images[cubin] = {"cubin": cubin, "offset": len(code), "number": len(images)}
            code += files[cubin]
            code += bytes(_IMAGE_ALIGNMENT - len(code) % _IMAGE_ALIGNMENT)
        kernel["image"] = images[cubin]["number"]
    return list(images.values()), bytes(code)


def _words(code: bytes) -> str:
    """Returns the bytes as lines of 64-bit C numbers."""
    words = [f"0x{word:x}" for word in np.frombuffer(code, "<u8").tolist()]
    lines = (words[first : first + _WORDS_IN_LINE] for first in range(0, len(words), _WORDS_IN_LINE))
    return ",\n".join(",".join(line) for line in lines)
