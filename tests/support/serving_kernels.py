"""Serving kernels: the object file that makes launches on the fake driver compute, for a program of a bundle."""

from __future__ import annotations

from pathlib import Path

from cutlass_py_attn.bundle.files import Bundle
from cutlass_py_attn.launch import abi
from tests.support import fake_driver
from tests.support.c_compiler import WARNINGS, build, compiler

_TYPES = {"i64": "l", "i32": "i", "f32": "f"}


def compiled(bundle: Bundle, folder: Path, own: str = "advance") -> Path:
    """Compiles fake_driver/serving_kernels.c with the structs of the bundle's kernels; returns the object file.

    own: the program's own kernel, which is in the file fake_driver/<own>_kernel.c.
    """
    rows = {
        f'{{"{artifact.build.symbol}_", "{name}", {offset}, \'{_TYPES[kind]}\'}},'
        for artifact in bundle.artifacts
        for (name, kind), (_, offset, _) in zip(
            abi.fields_of(artifact.build), abi.layout(abi.fields_of(artifact.build)), strict=True
        )
    }
    struct = "struct { const char *kernel, *name; int offset; char type; }"
    lines = "\n".join(sorted(rows))
    (folder / "fields.h").write_text(f"static const {struct} fields[] = {{\n{lines}\n}};\n")
    here = Path(fake_driver.__file__).parent
    sources = str(here / "serving_kernels.c"), str(here / f"{own}_kernel.c")
    made = folder / "serving_kernels.o"
    build([compiler("c"), "-std=c11", "-O1", *WARNINGS, "-r", "-I", str(folder), *sources, "-o", str(made)])
    return made
