"""Tests of the pages: their code blocks run, their links lead to files, and the parser refuses unknown blocks."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tools.docs import pages

ROOT = pages.ROOT
PAGES = pages.pages()
MOST_LINES = 300
LINKED = pages.linked()
LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
EXTRAS = re.compile(r"\[([\w,-]+)\]")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_blocks_run(page: Path, tmp_path: Path) -> None:
    blocks = pages.code_blocks(page)
    runnable = [block for block in blocks if block.info in pages.EVALUATORS]
    if runnable:
        pytest.importorskip("cutlass")
        pytest.importorskip("jinja2")
    if any("import jax" in block.code for block in blocks):
        pytest.importorskip("jax")
        pytest.importorskip("flatbuffers")
    assert pages.run_on_cpu(page, tmp_path) == runnable


def test_some_page_has_blocks_of_each_kind() -> None:
    kinds = {block.info for page in PAGES for block in pages.code_blocks(page)}
    assert kinds >= {*pages.EVALUATORS, "python gpu", "sh setup"}


def test_extras_that_pages_install_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    setups = [block for page in PAGES for block in pages.code_blocks(page) if block.info == "sh setup"]
    named = {name for block in setups for listed in EXTRAS.findall(block.code) for name in listed.split(",")}
    assert named
    assert named <= set(extras)


def links() -> list[tuple[Path, str, str]]:
    """(page, path, anchor) of every link to a file of this repository."""
    found = [(page, *link) for page in LINKED for link in LINK.findall(prose(page))]
    return [(page, path, anchor) for page, path, anchor in found if "://" not in path]


def prose(page: Path) -> str:
    """The text of a page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_to_files() -> None:
    assert len(links()) > 200
    assert [(page.name, path) for page, path, _ in links() if not (page.parent / path).exists()] == []


def test_anchors_lead_to_headings() -> None:
    targets = [(page, page.parent / path if path else page, anchor) for page, path, anchor in links() if anchor]
    assert len(targets) > 100
    assert [(page.name, target.name, anchor) for page, target, anchor in targets if anchor not in anchors(target)] == []


def test_pages_are_short() -> None:
    """At most 300 lines, without the generated reference and the tables of whole runs."""
    lengths = {page.name: page.read_text().count("\n") for page in PAGES if page.name != "reference.md"}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


# The parser and the evaluators


def page_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "page.md"
    path.write_text(text)
    return path


def test_blocks_share_a_namespace_and_a_folder(tmp_path: Path) -> None:
    text = """
```python
x = 20
open("note.txt", "w").write("from python")
```

```sh
cat note.txt
```

```text
from python
```

  ```python
  print(x + 22,
        "words")
  ```

  ```text
  42 ...
  ```

```python host
assert open("note.txt").read() and x
```

```python gpu
raise SystemError
```

Not an expected output, because prose is between.

```text
never compared
```
"""
    page = page_of(tmp_path, text)
    run = pages.run_on_cpu(page, tmp_path)
    assert [(block.line, block.info) for block in run] == [
        (3, "python"),
        (8, "sh"),
        (16, "python"),
        (25, "python host"),
    ]
    assert [block.expected for block in run] == [None, "from python\n", "42 ...\n", None]
    assert [block.info for block in pages.code_blocks(page)][-2:] == ["python gpu", "text"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "page.md:2: printed\n1\n"),
        ("```sh\necho so; exit 3\n```\n", "page.md:2: exit code 3\nso"),
        ("```sh\nfalse | true\n```\n", "exit code 1"),
        ("```sh\necho 1\n```\n```text\n2\n```\n", "page.md:2: printed\n1\n"),
    ],
)
def test_a_block_with_another_result_fails(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        pages.run_on_cpu(page_of(tmp_path, text), tmp_path)


def test_a_traceback_has_the_line_of_the_page(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        pages.run_on_cpu(page_of(tmp_path, "# Title\n\n```python\nx = 1\nx / 0\n```\n"), tmp_path)
    assert raised.traceback[-1].lineno + 1 == 5


def test_unknown_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"page\.md:3: code block with info string 'pyton'"):
        pages.code_blocks(page_of(tmp_path, "# Title\n\n```pyton\n```\n"))
