"""Page: one self-contained HTML file about one kernel, with its pictures and listings."""

from __future__ import annotations

import importlib
import importlib.resources
from typing import Any

from cutlass_py_attn import extras
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.inspection import listing, sass
from cutlass_py_attn.inspection.drawing import colour_of, shared_memory_svg, steps_svg
from cutlass_py_attn.inspection.facts import InspectedKernel, facts
from cutlass_py_attn.launch.build import STEPS

TEMPLATE = "page.html.j2"


def page(subject: InspectedKernel) -> str:
    """Returns the HTML page of a kernel. Raises NotSupported if jinja2 is not installed."""
    try:
        jinja2 = importlib.import_module("jinja2")
    except ModuleNotFoundError as error:
        raise NotSupported(f"a page needs jinja2: {extras.remedy('inspect')}") from error
    text = importlib.resources.files(__package__).joinpath(TEMPLATE).read_text()
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(text)
    return str(template.render(**_content(subject, jinja2.filters.Markup)))


def _content(subject: InspectedKernel, safe: Any) -> dict[str, Any]:
    about = facts(subject)
    kind = about["identity"]["kind"]
    memory = shared_memory_svg(about["shared_memory"], STEPS[kind], f"Shared memory of {about['symbol']}")
    groups = (*sass.GROUPS, "other")
    pictures = [safe(steps_svg(rows, groups, f"Instructions of {name}")) for name, rows in about["steps"].items()]
    ptx = [(line.text, *_shown(line.step)) for line in listing.ptx_lines(subject.artifact, subject.line_info)]
    code = {name: [(str(item), *_shown(step)) for item, step in items] for name, items in subject.sass().items()}
    return {
        "about": about,
        "memory": safe(memory) if about["shared_memory"] else "",
        "pictures": pictures,
        "tables": ("resources", "launches", "parameters", "shared_memory", "fields"),
        "ptx": _sections(ptx),
        "sass": {name: _sections(lines) for name, lines in code.items()},
    }


def _shown(step: Any) -> tuple[str, str]:
    """Returns the mark and the colour of a step; ("", "") if there is no step."""
    return (listing.mark(step, "").lstrip(" -"), colour_of(step.name)) if step else ("", "")


def _sections(lines: list[tuple[str, str, str]]) -> list[dict[str, str]]:
    """Groups consecutive lines under one mark; a line without a step belongs to the group before it."""
    found: list[dict[str, Any]] = [{"mark": "", "colour": colour_of(""), "lines": []}]
    for text, mark, colour in lines:
        if mark and mark != found[-1]["mark"]:
            found.append({"mark": mark, "colour": colour, "lines": []})
        found[-1]["lines"].append(text)
    return [{**section, "text": "\n".join(section["lines"])} for section in found if section["lines"]]
