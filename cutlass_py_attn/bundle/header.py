"""Header: writes the manifest of one problem as a C header that launches the kernels; header.h.j2 is the template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cutlass_py_attn.bundle import c_text
from cutlass_py_attn.bundle.numbers import MASK_OPERANDS


def render(manifest: Mapping[str, Any]) -> str:
    """Returns the header of a manifest with one problem for each direction; NotSupported if there is no jinja2."""
    passes = {item["direction"]: item for item in manifest["problems"]}
    targets = [target for item in passes.values() for target in item["targets"]]
    template = c_text.environment(manifest["name"], "the C header").get_template("header.h.j2")
    text: str = template.render(
        **manifest, passes=passes, **c_text.sizes(targets), owner="bundle", driver="", masks=MASK_OPERANDS
    )
    return text
