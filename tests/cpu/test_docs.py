"""Tests of the documentation: its blocks run, its links lead somewhere, and what is generated is as generated."""

from __future__ import annotations

import inspect
import json
import re
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import cutlass_py_attn  # noqa: E402
from cutlass_py_attn import conventions  # noqa: E402
from tools import docs, jax_table, pictures, reference, run_docs  # noqa: E402

PAGES = run_docs.pages(ROOT)
LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_blocks_run(page: Path, tmp_path: Path) -> None:
    """In order and in a folder of their own, printing what the page says they print."""
    found = run_docs.blocks(page)
    if any(block.is_python or block.words == ("sh",) for block in found):
        pytest.importorskip("cutlass")
        pytest.importorskip("jinja2")
    if any("import jax" in block.code for block in found):
        pytest.importorskip("jax")
        pytest.importorskip("flatbuffers")
    ran = run_docs.run_page(page, tmp_path, on_gpu=False)
    assert len(ran) == sum(not block.needs_gpu and "setup" not in block.words for block in found)


def test_gpu_blocks_have_passed_on_a_gpu_as_they_stand() -> None:
    assert run_docs.unrecorded(ROOT) == []


def test_extras_that_pages_install_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    setups = [block for page in PAGES for block in run_docs.blocks(page) if "setup" in block.words]
    named = {name for block in setups for listed in run_docs.EXTRAS.findall(block.code) for name in listed.split(",")}
    assert named
    assert named <= set(extras)


def test_links_lead_to_files() -> None:
    links = [(page, link) for page in (*PAGES, ROOT / "ptx/README.md") for link in LINK.findall(page.read_text())]
    assert len(links) > 60
    missing = [(page.name, link) for page, link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


def test_generated_files_are_as_generated() -> None:
    """After a change of docstrings, pages or the benchmark: python -m tools.docs."""
    stale = [name for name, text in docs.generated(ROOT).items() if (ROOT / name).read_text() != text]
    assert stale == []


def test_microbenchmarks_are_a_table_of_the_newest_run() -> None:
    assert docs.microbenchmarks([]) == docs.NOT_MEASURED
    run = {"gpu": "H200", "driver": "CUDA 13.0", "date": "2026-11-22T01:00:00+00:00", "commit": "0123456789abcdef"}
    numbers = {
        "blocks": 132,
        "median_ms": 1.5,
        "rate": 640.25,
        "rate_unit": "TFLOP/s",
        "per_clock": 8000.5,
        "mhz": 1755,
    }
    lines = [
        {**run, **numbers, "name": "wgmma SS, n 256", "beside_per_clock": 60.25, "date": "2026-11-21T09:00:00+00:00"},
        {**run, **numbers, "name": "wgmma SS, n 256", "beside_per_clock": 61.5},
        {**run, **numbers, "name": "ex2", "rate_unit": "Gop/s", "beside_per_clock": None},
    ]
    about, _, *table = docs.microbenchmarks(lines).splitlines()
    assert about == "On H200 (CUDA 13.0), 2026-11-22, commit 0123456789ab."
    assert table[2:] == [
        "| wgmma SS, n 256 | 132 | 1.5 | 640.2 TFLOP/s | 8000.5 | 1755 | 61.5 |",
        "| ex2 | 132 | 1.5 | 640.2 Gop/s | 8000.5 | 1755 |  |",
    ]


def test_a_run_of_jax_is_a_table() -> None:
    case = {"dtype": "float32", "batch": 4, "tokens": 2048, "heads": 16, "head_dim": 64, "is_causal": False}
    times = {"ours_ms": 0.6881, "cudnn_ms": None, "ours_both_ms": 2.4, "cudnn_both_ms": None}
    run = {
        "gpu": "H200",
        "driver": "CUDA 13.0",
        "jax": "0.11.2",
        "date": "2026-11-22T01:00:00+00:00",
        "commit": "0" * 40,
    }
    lines = jax_table.table({**run, "rows": [{**case, **times}]}).splitlines()
    assert lines[0] == "H200 (CUDA 13.0), JAX 0.11.2, 2026-11-22, commit 000000000000:"
    assert lines[-1] == "| float32, full, batch 4, 2048 tokens, 16 heads of 64 | 0.688 | refused | 2.400 | refused |"


def test_pictures_of_pages_are_all_generated() -> None:
    kept = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs/pictures").iterdir()}
    assert kept == {name for name in docs.generated(ROOT) if name.endswith(".svg")}


def test_pictures_are_wellformed() -> None:
    for path in (ROOT / "docs/pictures").iterdir():
        root = ElementTree.fromstring(path.read_text())
        assert root.tag.endswith("svg")
        assert len(" ".join(root.itertext())) > 100


def test_every_rate_of_the_benchmark_is_in_a_plot() -> None:
    rows = json.loads((ROOT / pictures.BENCHMARK).read_text())
    shown = {case for _, picture in pictures.plots(rows) for case in re.findall(r">(\w+_s\d+[\w.]*)</text>", picture)}
    assert shown == {row["case"] for row in rows}


def test_reference_has_every_public_name() -> None:
    headings = set(re.findall(r"^### (\w+)$", reference.reference(), re.MULTILINE))
    assert {*cutlass_py_attn.__all__, *conventions.__all__, *reference.OPTIONS, *reference.jax_names()} == headings


def test_names_of_jax_in_the_reference_are_those_of_the_module() -> None:
    module = pytest.importorskip("cutlass_py_attn.jax", exc_type=ImportError)
    assert sorted(reference.jax_names()) == sorted(module.__all__)
    assert all(inspect.getdoc(getattr(module, name)) in reference.reference() for name in module.__all__)


# The runner itself


def page_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "page.md"
    path.write_text(text)
    return path


def test_blocks_share_names_and_a_folder(tmp_path: Path) -> None:
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
read = 1
```

```python gpu
if "read" not in globals():
    raise SystemError
```

```python
open("never.txt", "w")
```
"""
    page = page_of(tmp_path, text)
    ran = run_docs.run_page(page, tmp_path, on_gpu=False)
    assert [block.line for block in ran] == [3, 8, 16, 25, 34]
    with pytest.raises(SystemError):
        run_docs.run_page(page, tmp_path, on_gpu=True)
    page.write_text(text.replace("raise SystemError", "found = True"))
    assert [block.line for block in run_docs.run_page(page, tmp_path, on_gpu=True)] == [3, 16, 29]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "page.md:2: printed\n1\n"),
        ("```sh\necho so; exit 3\n```\n", "page.md:2: exit code 3\nso"),
        ("```sh\nfalse | true\n```\n", "exit code 1"),
    ],
)
def test_a_block_that_does_otherwise_fails(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        run_docs.run_page(page_of(tmp_path, text), tmp_path, on_gpu=False)


def test_a_failing_line_is_the_page_s_line(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        run_docs.run_page(page_of(tmp_path, "# Title\n\n```python\nx = 1\nx / 0\n```\n"), tmp_path, on_gpu=False)
    assert raised.traceback[-1].lineno + 1 == 5


def test_unknown_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"page\.md:1: a block of 'pyton'"):
        run_docs.blocks(page_of(tmp_path, "```pyton\n```\n"))


def test_an_edited_gpu_block_must_run_again(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    (tmp_path / "README.md").write_text("")
    page = folder / "page.md"
    page.write_text("<!-- kernels: a_b c -->\n```python gpu\nlaunch()\n```\n")
    assert run_docs.unrecorded(tmp_path) == ["page.md:3"]
    (block,) = run_docs.blocks(page)
    (tmp_path / run_docs.RECORD).write_text(json.dumps({block.sha256: {"gpu": "toy"}}))
    assert run_docs.unrecorded(tmp_path) == []
    page.write_text(page.read_text().replace("launch()", "launch(2)"))
    assert run_docs.unrecorded(tmp_path) == ["page.md:3"]
    assert run_docs.kernels_of(page) == ["a_b", "c"]


def test_a_gpu_run_reports_and_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = page_of(tmp_path, "```python\nx = 1\n```\n\n```python gpu\nassert x\n```\n")
    bad = tmp_path / "bad.md"
    bad.write_text("```python gpu\nassert False, 'no'\n```\n")
    monkeypatch.setattr(run_docs, "pages", lambda: [good, bad])
    found = {block.page: failure for block, failure in run_docs.run_on_gpu(None)}
    assert found == {"page.md": "", "bad.md": "AssertionError: no"}
