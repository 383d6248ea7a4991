"""Extras: the packages that this one needs, by extra, as its remedies name them.

The lists are those of pyproject.toml, which a test compares. A remedy names the packages themselves: pip finds an extra
of this package only where this package is installed, and not in a checkout that is merely on the path.
"""

from __future__ import annotations

import importlib.metadata
import shlex
from typing import Final

REQUIRED: Final = ("numpy>=2.1", "cuda-python>=13,<14", "ml_dtypes>=0.5")
PACKAGES: Final = {
    "compile": ("nvidia-cutlass-dsl==4.8.1",),
    "cli": ("click>=8.2", "rich>=14", "jinja2>=3.1"),
    "inspect": ("nvidia-cuda-nvdisasm>=13,<14", "jinja2>=3.1", "pygments>=2.19"),
    "jax": ("jax>=0.10", "flatbuffers>=24"),
    "nccl": ("nccl4py>=0.6,<0.7", "nvidia-nccl-cu13>=2.28"),
}


def version(distribution: str) -> str:
    """Returns the version of an installed package; "" if it is not installed. Does not import it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def remedy(extra: str) -> str:
    """Returns the command that installs the packages of an extra."""
    return install(*PACKAGES[extra])


def install(*requirements: str) -> str:
    """Returns the command that installs these packages."""
    return f"pip install {' '.join(map(shlex.quote, requirements))}"
