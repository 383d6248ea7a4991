"""Header: the manifest as a C header that launches its kernels; header.h.j2 is its text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cutlass_py_attn import decode
from cutlass_py_attn.bundle import rules
from cutlass_py_attn.errors import NotSupported

_TEMPLATE = Path(__file__).with_name("header.h.j2")


def render(manifest: dict[str, Any]) -> str:
    """The header of a manifest, from it alone; NotSupported where jinja2 is not installed."""
    try:
        import jinja2
    except ImportError as error:
        raise NotSupported("the C header needs jinja2: pip install 'cutlass-py-attn[cli]'") from error
    name, passes = manifest["name"], manifest["passes"]
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters["c"] = lambda rule, target: _in_c(rule, name, {item["name"] for item in target["definitions"]})
    targets = [target for item in passes.values() for target in item["targets"]]
    return environment.from_string(_TEMPLATE.read_text()).render(
        **manifest,
        most_entries=max(len(target["launches"]) for target in targets),
        target_numbers={
            direction: {target["arch"]: number for number, target in enumerate(item["targets"])}
            for direction, item in passes.items()
        },
        max_splits=decode.MAX_SPLITS,
        block_tiles=decode.BLOCK_TILES,
    )


def _in_c(rule: str, prefix: str, local: set[str]) -> str:
    """The rule with its names where the header has them."""

    def named(word: str) -> str:
        if word in rules.FUNCTIONS:
            return f"{prefix}_{word}"
        if word == "num_sms":
            return "b->num_sms"
        return word if word in local else f"c->{word}"

    return rules.NAME.sub(lambda found: named(found[0]), rule)
