"""Bundles for the fake driver: exported into a folder, with problems by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cutlass_py_attn import export_bundle
from cutlass_py_attn.bundle.files import Bundle
from cutlass_py_attn.problem import spec
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import DIRECTIONS
from tests.support import fakes

CASE = "bf16_d64_s200_b2_h3_causal"


def problem_of(direction: str, case: str = CASE) -> Problem:
    return spec.parse(case).problem(direction)


def export(
    folder: Path, *directions: str, archs: tuple[str, ...] = ("sm_90a",), case: str = CASE, **options: Any
) -> Bundle:
    problems = [problem_of(direction, case) for direction in directions or DIRECTIONS]
    return export_bundle(folder, problems, archs, **{"kernels": fakes.artifact, **options})


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
