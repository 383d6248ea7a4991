"""HTML tags: a check that the tags of a page are balanced."""

from __future__ import annotations

from html.parser import HTMLParser


class UnbalancedTags(HTMLParser):
    """Tags of a text that are left open, and end tags that close no open tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.crossed: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "rect", "line", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """A self-closing tag needs no end tag."""

    def handle_endtag(self, tag: str) -> None:
        if tag == "rect":  # one with a tooltip
            return
        if not self.open or self.open.pop() != tag:
            self.crossed.append(tag)


def unbalanced(text: str) -> list[str]:
    """Returns the tags that are left open or close no open tag."""
    tags = UnbalancedTags(text)
    return [*tags.open, *tags.crossed]
