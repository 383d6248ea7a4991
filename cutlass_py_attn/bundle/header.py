"""Header: writes the manifest as a C header that launches the kernels; header.h.j2 is the template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cutlass_py_attn import extras
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.plan import expressions, split_kv

_TEMPLATE = Path(__file__).with_name("header.h.j2")


def render(manifest: dict[str, Any]) -> str:
    """Returns the header of a manifest; NotSupported if jinja2 is not installed."""
    try:
        import jinja2
    except ImportError as error:
        raise NotSupported(f"the C header needs jinja2: {extras.remedy('cli')}") from error
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
        max_splits=split_kv.MAX_SPLITS,
        block_tiles=split_kv.SPLIT_OVERHEAD_TILES,
    )


def _in_c(rule: str, prefix: str, local: set[str]) -> str:
    """Returns the rule as a C expression, with its names replaced by those of the header."""

    def named(word: str) -> str:
        if word in expressions.FUNCTIONS:
            return f"{prefix}_{word}"
        if word == "num_sms":
            return "b->num_sms"
        return word if word in local else f"c->{word}"

    return expressions.NAME.sub(lambda found: named(found[0]), rule)
