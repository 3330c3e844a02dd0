"""The Python in README.md and docs/ runs as pasted, and prints the output of the pages; links have targets.

How blocks are marked: see `tools/pages.py`. In an output block `...` stands for anything.
"""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

from tools.pages import PAGES, ROOT, Runner, blocks_of

pytestmark = pytest.mark.processes
OUTSIDE = [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md")]
ANYTHING = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
LINK = re.compile(r"\]\((?P<target>[^)\s#:]*)(?:#(?P<anchor>[^)\s]*))?\)")
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)


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
def test_the_code_of_a_page_runs_and_prints_its_output(page: Path, runner: Runner, tmp_path: Path) -> None:
    blocks = blocks_of(page)
    printed = runner.run(blocks, tmp_path)
    checker = doctest.OutputChecker()
    wrong = [
        f"{page.name}, block at line {block.line} printed:\n{got}\nbut the page says:\n{block.output}"
        for block, got in zip(blocks, printed, strict=False)
        if block.output is not None and not checker.check_output(block.output, got, ANYTHING)
    ]
    assert not wrong, "\n".join(wrong)


def links_of(page: Path) -> Iterator[tuple[Path, str]]:
    """The file and the anchor, which may be empty, of each link of a page; without links to other sites."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    for found in LINK.finditer(text):
        yield (page.parent / found["target"] if found["target"] else page), found["anchor"] or ""


def anchors_of(page: Path) -> set[str]:
    """The anchors of the headings of a page in the site; code and links in a heading count by their text."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.M)
    return {slugify(re.sub(r"\]\(.*?\)|[`\[*]", "", heading), "-") for heading in headings}


def test_links_of_pages_have_files_and_anchors_as_targets() -> None:
    """Also links of pages outside the site, which `make docs` does not check."""
    links = [(page, *link) for page in [*PAGES, *OUTSIDE] for link in links_of(page)]
    assert sum(bool(anchor) for *_, anchor in links) > 40
    dead = [
        f"{page.name}: {target.name}#{anchor}"
        for page, target, anchor in links
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors_of(target))
    ]
    assert dead == []


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_files_and_members_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    sources = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in tracked_python()}
    files = re.findall(r"`([\w/]+\.py)`", text)
    members = re.findall(r"`([A-Z]\w*[a-z]\w*)\.(\w+)`", text)
    assert files
    gone = [file for file in files if not any(f"/{path}".endswith(f"/{file}") for path in sources)]
    gone += [
        f"{owner}.{member}"
        for owner, member in members
        if not any(
            re.search(rf"^class {owner}\b", s, re.M) and re.search(rf"\b{member}\b", s) for s in sources.values()
        )
    ]
    assert gone == []


def tracked_python() -> list[Path]:
    return [path for folder in ("src", "tests", "tools") for path in (ROOT / folder).rglob("*.py")]
