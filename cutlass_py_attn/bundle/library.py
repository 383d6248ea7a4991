"""Library: writes the manifest of many problems as a C library: <name>.c and <name>.h, and what builds them.

The C sources follow from the manifest and the cubins alone. library.c.j2 and library.h.j2 are their templates; what
computes and starts the launches of a kernel is shared with the header of a single problem (kernels.c.j2).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from cutlass_py_attn import __version__
from cutlass_py_attn.bundle import c_text, interface
from cutlass_py_attn.bundle.dispatch import ALWAYS, Facts, facts_of, order_key
from cutlass_py_attn.bundle.rules import ALL_DIRECTIONS, from_json
from cutlass_py_attn.plan.build import ROW_KINDS, Build
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.masks import UNLIMITED
from cutlass_py_attn.problem.tensors import BMHK, ITEM_BYTES, LSE_PADDING, WORD_BYTES
from cutlass_py_attn.score_terms.dropout import PHILOX

Json = dict[str, Any]

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
        "item_bytes": ITEM_BYTES,
        "lse_padding": LSE_PADDING,
        "masks": interface.MASKS,
        "directions": ALL_DIRECTIONS,
        "flags": interface.FLAGS,
        "direction_flags": interface.DIRECTION_FLAGS,
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
            kernels.append({
                "item": {**item, "pointers": _aligned(item["pointers"], build)},
                "target": _with_optional_addresses(target),
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
    loads = dict.fromkeys(BMHK, build.vector_bytes)
    loads |= {"page_table": WORD_BYTES, "bias": build.bias_vector_bytes, "grad_bias": build.grad_bias_vector_bytes}
    return {name: {**each, "alignment": loads.get(name, each["alignment"])} for name, each in pointers.items()}


def _with_optional_addresses(target: Json) -> Json:
    """Returns the target with a source for the addresses of seed, offset and grad_logsumexp, which any call may set."""
    fields = target["struct"]["fields"]
    optional = {"grad_logsumexp"}
    if any(each["rule"] in PHILOX for each in fields if "rule" in each):
        optional |= {f"{name}_address" for name in PHILOX}
    found = [{**each, "pointer": each["name"]} if each["name"] in optional else each for each in fields]
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
        sum(interface.FEATURE_BITS[name] for name in facts.features),
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
        some = [number for number in of_family if kernels[number]["target"]["preferred_when"] != ALWAYS]
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
