"""The examples, run as a user runs them, but with the tests' kernels."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path

import pytest

from cutlass_py_attn.testing.check import Kernels

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
LIBRARIES = {"numpy": "numpy", "cupy": "cupy", "numba": "numba.cuda", "jax": "jax", "torch": "torch"}
FILES = {library: f"{library}_{'guest' if library == 'torch' else 'arrays'}.py" for library in LIBRARIES}
# Of outputs and gradients of some tens: bfloat16 keeps eight bits of them, float32 what three TF32 products leave.
ALLOWED = {"numpy": 1e-4, "cupy": 0.02, "numba": 1e-4, "jax": 0.02, "torch": 1e-4}


def skip_without(library: str) -> None:
    try:
        found = importlib.import_module(LIBRARIES[library])
    except (ImportError, AttributeError) as error:  # AttributeError: numba-cuda beside a NumPy that it does not know
        pytest.skip(f"{library} does not come up: {error}")
    if library == "jax" and found.default_backend() != "gpu":
        pytest.skip("jax has no GPU backend here")


@pytest.mark.parametrize("library", LIBRARIES)
def test_arrays_of_every_library(library: str, kernels: Kernels) -> None:
    skip_without(library)
    assert runpy.run_path(str(EXAMPLES / FILES[library]))["main"](kernels=kernels) < ALLOWED[library]


def test_a_block_learns(kernels: Kernels) -> None:
    skip_without("jax")
    losses, worst = runpy.run_path(str(EXAMPLES / "jax_training.py"))["main"](kernels=kernels)
    assert losses[0] > 2.5, "of 2.77 where nothing is known"
    assert losses[-1] < 0.5
    assert worst < 1e-5
