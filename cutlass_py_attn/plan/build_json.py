"""Build from JSON: every field is of its type, and every name is one that this version knows.

The names of a Build become names of files and of C functions, so that a file from elsewhere must not choose them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from cutlass_py_attn.kernels.catalogue import KERNELS
from cutlass_py_attn.launch.arch import ARCHITECTURES
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.variants import OPTIONS
from cutlass_py_attn.problem import masks, typed_json
from cutlass_py_attn.problem.mask_program import MaskProgram
from cutlass_py_attn.problem.tensors import OPERAND_BYTES, OPERANDS
from cutlass_py_attn.score_terms import registry

_SYMBOL: Final = re.compile(r"[a-z][a-z0-9_]*")


def read_build(data: object, what: str = "build") -> Build:
    """Returns the Build of a JSON object; ValueError says which field is missing, unknown or has a wrong value."""
    build = typed_json.read(Build, data, what)
    expect_known(build, what)
    return build


def expect_known(build: Build, what: str = "build") -> None:
    """Raises ValueError with every name of a build that this version does not know."""
    unknown = list(_unknown_names(build))
    if not unknown and not _SYMBOL.fullmatch(build.symbol):
        unknown = [f"symbol {build.symbol!r}"]
    if unknown:
        raise ValueError(f"{what}: {', '.join(unknown)}: not known to this version")


def _unknown_names(build: Build) -> Iterator[str]:
    body = build.kind, build.family, build.variant
    known = (
        ("arch", build.arch, build.arch in ARCHITECTURES),
        ("kind, family, variant", body, body in KERNELS),
        ("dtype", build.dtype, build.dtype in OPERAND_BYTES),
        ("mask", build.mask, _is_known_form(build.form)),
        ("options", build.options, {*OPTIONS}.issuperset(build.options)),
        ("gradients", build.gradients, {*OPERANDS, *registry.gradients()}.issuperset(build.gradients)),
    )
    return (f"{name} {value!r}" for name, value, is_known in known if not is_known)


def _is_known_form(form: masks.Form) -> bool:
    """Returns whether this is a form with, if any, a program that this version reads."""
    if form.name != masks.RANGES or not form.program:
        return form in (*masks.FORMS, masks.RANGES)
    try:
        return str(MaskProgram.parse(form.program)) == form.program
    except ValueError:
        return False
