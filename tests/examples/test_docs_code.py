"""The Python in README.md and docs/ runs as it stands, and prints what the pages say; links lead somewhere.

How blocks are marked: see `tools/pages.py`. In an output block `...` stands for anything.
"""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.pages import PAGES, ROOT, Runner, blocks_of

pytestmark = pytest.mark.processes
ANYTHING = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
LINK = re.compile(r"\]\((?P<target>[^)\s#:]+)(?:#[^)]*)?\)")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix().removeprefix("docs/")


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as runner:
        yield runner


def test_the_pages_that_must_have_code_have_it() -> None:
    with_code = {name_of(page) for page in PAGES if blocks_of(page)}
    must = {page for page in map(name_of, PAGES) if page.startswith(("recipes/", "guides/"))} - {"recipes/cluster.md"}
    assert {"README.md", "quickstart.md", *must} <= with_code


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=name_of)
def test_the_code_of_a_page_runs_and_prints_what_it_says(page: Path, runner: Runner, tmp_path: Path) -> None:
    blocks = blocks_of(page)
    printed = runner.run(blocks, tmp_path)
    checker = doctest.OutputChecker()
    wrong = [
        f"{page.name}, block at line {block.line} printed:\n{got}\nbut the page says:\n{block.output}"
        for block, got in zip(blocks, printed, strict=False)
        if block.output is not None and not checker.check_output(block.output, got, ANYTHING)
    ]
    assert not wrong, "\n".join(wrong)


def test_links_from_a_page_to_a_file_lead_to_one() -> None:
    pages = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    links = [(page, found["target"]) for page in pages for found in LINK.finditer(page.read_text(encoding="utf-8"))]
    dead = [f"{page.name}: {target}" for page, target in links if not (page.parent / target).exists()]
    assert links
    assert dead == []
