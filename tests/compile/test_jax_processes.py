"""Test of rows that are split over processes: the example, in two processes on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="jax is not installed")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/jax_processes.py"
STRATEGIES = ("all_gather", "ulysses", "ring")


def test_two_processes_have_the_results_of_one_device() -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(EXAMPLE), "--processes", "2"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    for rank in range(2):
        found = re.findall(rf"process {rank} of 2, 2 devices, (\w+): largest difference (\S+)", run.stdout)
        assert tuple(strategy for strategy, _ in found) == STRATEGIES
        assert all(float(difference) < 1e-5 for _, difference in found)
