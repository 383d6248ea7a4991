"""Drawing: SVG pictures of the shared-memory map over the steps, and of the instructions of each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from xml.sax.saxutils import escape, quoteattr

FONT: Final = "font-family:system-ui,sans-serif"
INK, FAINT, PALE = "#1f2933", "#9aa5b1", "#e4e7eb"
# Ten colours that remain distinct in print and for colour-blind readers (after Paul Tol's schemes).
COLOURS: Final = (
    *("#bbbbbb", "#4477aa", "#ee6677", "#228833", "#bb9f2b"),
    *("#3aa6cc", "#aa3377", "#ee8866", "#44bb99", "#77aadd"),
)
# Colours of the instruction groups; the greys at the end are for integers, moves and control.
_GROUPS: Final = (
    *("#4477aa", "#ee6677", "#228833", "#8fc98f", "#66ccee", "#aa3377", "#ccbb44", "#ee8866", "#222222", "#44bb99"),
    *("#77aadd", "#c3c8ce", "#d6dade", "#e8eaed", "#f2f3f5"),
)

Numbers = float | int


class Svg:
    """An SVG picture to which shapes are added; lengths in pixels, the origin at the top left."""

    def __init__(self, width: Numbers, height: Numbers, title: str) -> None:
        self.size = width, height
        self.title = title
        self.parts: list[str] = []

    def rect(self, at: tuple[Numbers, Numbers], size: tuple[Numbers, Numbers], fill: str, hint: str = "") -> None:
        """Adds a rectangle. hint: its tooltip; "" for none."""
        (x, y), (width, height) = at, size
        inside = f"<title>{escape(hint)}</title>" if hint else ""
        self.parts.append(
            f'<rect x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}" '
            f"fill={quoteattr(fill)}>{inside}</rect>"
        )

    def text(self, at: tuple[Numbers, Numbers], text: str, *, size: int = 12, anchor: str = "start",
             fill: str = INK, weight: str = "normal") -> None:  # fmt: skip
        """Adds one line of text with its baseline at `at`."""
        self.parts.append(
            f'<text x="{_number(at[0])}" y="{_number(at[1])}" font-size="{size}" text-anchor="{anchor}" '
            f'fill={quoteattr(fill)} font-weight="{weight}">{escape(text)}</text>'
        )

    def line(self, start: tuple[Numbers, Numbers], end: tuple[Numbers, Numbers], stroke: str = PALE,
             width: Numbers = 1, *, arrow: bool = False) -> None:  # fmt: skip
        """Adds a straight line, with an arrowhead at `end` if `arrow`."""
        head = ' marker-end="url(#arrow)"' if arrow else ""
        self.parts.append(
            f'<line x1="{_number(start[0])}" y1="{_number(start[1])}" x2="{_number(end[0])}" y2="{_number(end[1])}" '
            f'stroke={quoteattr(stroke)} stroke-width="{_number(width)}"{head}/>'
        )

    def __str__(self) -> str:
        width, height = (_number(length) for length in self.size)
        marker = (
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>'
        )
        used = [marker] if any("url(#arrow)" in part for part in self.parts) else []
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" style="{FONT}"><title>{escape(self.title)}</title>'
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
        )
        return "\n".join([head, *used, *self.parts, "</svg>", ""])


def colour_of(name: str) -> str:
    """Returns the colour of a numbered step; grey for any other name."""
    return COLOURS[int(name) % len(COLOURS)] if name.isdigit() else COLOURS[0]


def shared_memory_svg(buffers: Sequence[Mapping[str, Any]], steps: Sequence[str], title: str) -> str:
    """Draws the shared-memory map: offsets downwards, steps to the right, a bar for the lifetime of each buffer.

    buffers: the rows shared_memory of `facts`. Heights are to scale, with a minimum that keeps the names readable.
    """
    last = max((buffer["last"] for buffer in buffers), default=0)
    names = [*steps, *map(str, range(len(steps), last + 1))][: max(last + 1, len(steps))]
    left, top, column, least, tall = 130, 46, 112, 18, 420
    total = max((buffer["offset"] + buffer["bytes"] for buffer in buffers), default=1)
    heights = [max(least, tall * buffer["bytes"] / total) for buffer in buffers]
    svg = Svg(left + column * len(names) + 20, top + sum(heights) + 36, title)
    svg.text((10, 20), title, size=13, weight="bold")
    for index, name in enumerate(names):
        svg.text((left + column * (index + 0.5), top - 8), f"{index}  {name}", anchor="middle", size=11)
        svg.line((left + column * index, top - 4), (left + column * index, top + sum(heights)))
    y: float = top
    for index, (buffer, height) in enumerate(zip(buffers, heights, strict=True)):
        svg.text((left - 8, y + 12), f"{buffer['offset']}", anchor="end", size=11, fill=FAINT)
        x, width = left + column * buffer["first"], column * (buffer["last"] - buffer["first"] + 1)
        hint = f"{buffer['name']}: {buffer['bytes']} bytes from {buffer['offset']}, alive {buffer['alive']}"
        svg.rect((x + 1, y + 1), (width - 2, height - 2), COLOURS[1 + index % (len(COLOURS) - 1)], hint)
        svg.text(
            (x + 8, y + 13), f"{buffer['name']}  {_bytes(buffer['bytes'])}", size=11, fill="#ffffff", weight="bold"
        )
        y += height
    svg.text((left - 8, y + 14), f"{total}", anchor="end", size=11, fill=FAINT)
    svg.text((left, y + 14), f"{_bytes(total)} in total, offsets in bytes", size=11, fill=FAINT)
    return str(svg)


def steps_svg(rows: Sequence[Mapping[str, Any]], groups: Sequence[str], title: str) -> str:
    """Draws a bar for each step: its instruction counts by group. groups: all groups in the order of the colours."""
    left, top, row, wide, in_line = 280, 80, 24, 560, 8
    colours = {group: _GROUPS[index % len(_GROUPS)] for index, group in enumerate(groups)}
    most = max((item["instructions"] for item in rows), default=1)
    svg = Svg(left + wide + 80, top + row * len(rows) + 12, title)
    svg.text((10, 20), title, size=13, weight="bold")
    present = [group for group in groups if any(group in item["groups"] for item in rows)]
    for index, group in enumerate(present):
        x, y = 10 + 112 * (index % in_line), 32 + 18 * (index // in_line)
        svg.rect((x, y), (10, 10), colours[group])
        svg.text((x + 14, y + 9), group, size=11)
    for number, item in enumerate(rows):
        y, end = top + row * number, float(left)
        label = f"{item['step']}  {item['title']}" if item["title"] else item["step"]
        svg.text((left - 8, y + 14), label if len(label) <= 44 else f"{label[:42]}...", anchor="end", size=11)
        for group in present:
            width = wide * item["groups"].get(group, 0) / most
            if width:
                svg.rect((end, y), (width, row - 6), colours[group], f"{group}: {item['groups'][group]}")
                end += width
        svg.text((end + 6, y + 14), str(item["instructions"]), size=11, fill=FAINT)
    return str(svg)


def _number(value: Numbers) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _bytes(count: int) -> str:
    return f"{count / 1024:.0f} KiB" if count >= 1024 else f"{count} B"
