"""Pyright in `make check`: the Python of the pages keeps its lines."""

from __future__ import annotations

from pathlib import Path

from tools import editor_types


def test_the_source_of_a_page_keeps_the_lines_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\nfirst = 1\n```\n\ntext\n\n```python\nsecond = first\n```\n", encoding="utf-8")
    lines = editor_types.source_of(page).splitlines()
    assert (lines[3], lines[9]) == ("first = 1", "second = first")
    assert [line for line in lines if line] == ["first = 1", "second = first"]


def test_the_python_of_each_page_compiles() -> None:
    for page in editor_types.PAGES:
        compile(editor_types.source_of(editor_types.ROOT / page), page, "exec")
