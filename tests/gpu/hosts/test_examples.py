"""The examples, run as a user runs them, but with the tests' kernels."""

from __future__ import annotations

import importlib
import runpy
import traceback
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from cutlass_py_attn.testing.check import Kernels

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
LIBRARIES = {"numpy": "numpy", "cupy": "cupy", "numba": "numba.cuda", "jax": "jax", "torch": "torch"}
FILES = {library: EXAMPLES / f"{library}_{'autograd' if library == 'torch' else 'arrays'}.py" for library in LIBRARIES}
assert all(path.is_file() for path in FILES.values())  # also where these tests are only collected
REMOVED_IN = (2, 5)  # the NumPy without functions that numba-cuda calls
# Of outputs and gradients of some tens: bfloat16 keeps eight bits of them, float32 what three TF32 products leave.
ALLOWED = {"numpy": 1e-4, "cupy": 0.02, "numba": 1e-4, "jax": 0.02, "torch": 1e-4}


def skip_without(library: str) -> None:
    try:
        found = importlib.import_module(LIBRARIES[library])
    except (ImportError, AttributeError) as error:  # AttributeError: numba-cuda beside a NumPy that it does not know
        pytest.skip(f"{library} does not come up: {error}")
    if library == "jax" and found.default_backend() != "gpu":
        pytest.skip("jax has no GPU backend here")


def skip_of_numba(error: Exception) -> str:
    """Returns why an error of Numba's own code is no failure: NumPy removed what Numba calls. Empty if it is one."""
    newer = tuple(map(int, np.__version__.split(".")[:2])) >= REMOVED_IN
    files = [Path(frame.filename).parts for frame in traceback.extract_tb(error.__traceback__)]
    callers = [parts for parts in files if "numpy" not in parts]  # of the function that NumPy does not have
    if not newer or not {"numba", "numba_cuda"} & set(callers[-1]):
        return ""
    text = str(error).strip().splitlines()
    reason = text[-1] if text else type(error).__name__
    return f"numba-cuda {metadata.version('numba-cuda')} does not know NumPy {np.__version__}: {reason}"


@pytest.mark.parametrize("library", LIBRARIES)
def test_arrays_of_every_library(library: str, kernels: Kernels) -> None:
    skip_without(library)
    try:
        worst = runpy.run_path(str(FILES[library]))["main"](kernels=kernels)
    except Exception as error:
        reason = skip_of_numba(error) if library == "numba" else ""
        if reason:
            pytest.skip(reason)
        raise
    assert worst < ALLOWED[library]


def test_a_block_learns(kernels: Kernels) -> None:
    skip_without("jax")
    losses, worst = runpy.run_path(str(EXAMPLES / "jax_training.py"))["main"](kernels=kernels)
    assert losses[0] > 2.5, "of 2.77 where nothing is known"
    assert losses[-1] < 0.5
    assert worst < 1e-5


def test_conversations_on_a_paged_cache(kernels: Kernels) -> None:
    """At full size: steps with prompts, and one captured graph of an append and a decode."""
    found = runpy.run_path(str(EXAMPLES / "serving_numpy.py"))["main"](kernels=kernels)
    assert found.steps > found.decode_steps > 0
    assert found.output_error < 0.04, "of outputs up to 7, in bfloat16"
    assert found.behind <= 2 * found.logit_error < 0.08


def test_conversations_on_a_paged_cache_in_jax(kernels: Kernels) -> None:
    skip_without("jax")
    found = runpy.run_path(str(EXAMPLES / "serving_jax.py"))["main"](kernels=kernels)
    assert found.steps > found.decode_steps > 0
    assert found.behind <= 2 * found.logit_error < 0.4, "of logits of some units, behind two layers in bfloat16"
