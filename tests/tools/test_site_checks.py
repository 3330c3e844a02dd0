"""The checks of the built documentation find faults of a small site, and the hooks of its build describe pages."""

from __future__ import annotations

import inspect
import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from tools import public_names, site_checks, site_hooks

ROOT = Path(__file__).resolve().parents[2]
CODE = '<div class="{kind}"><pre><span></span><code>{line}\n</code></pre></div>'


def page(title: str = "One", description: str = "First.", code: str = "") -> str:
    return f'<title>{title}</title><meta name="description" content="{description}">{code}'


@pytest.mark.parametrize(
    ("other", "faults"),
    [
        (page("Two", "Second."), []),
        (page("One", "Second."), ["one/: title 'One'", "two/: title 'One'"]),
        (page("Two", ""), ["two/: description ''"]),
        (page("Two", "First."), ["one/: description 'First.'", "two/: description 'First.'"]),
    ],
)
def test_titles_and_descriptions_belong_to_one_page(other: str, faults: list[str]) -> None:
    pages = {"one/": page(), "two/": other}
    found = [
        *site_checks.repeated(pages, "title", site_checks.TITLE),
        *site_checks.repeated(pages, "description", site_checks.DESCRIPTION),
    ]
    assert [fault.partition(" is ")[0] for fault in found] == faults


@pytest.mark.parametrize(
    ("kind", "columns", "faults"),
    [("highlight", 80, 0), ("language-python highlight", 81, 1), ("language-text highlight", 81, 0)],
)
def test_a_long_line_of_code_is_a_fault(kind: str, columns: int, faults: int) -> None:
    code = CODE.format(kind=kind, line="<b>x</b> = &lt;" + "1" * (columns - 5))
    assert len(list(site_checks.long_lines({"one/": page(code=code)}))) == faults


@pytest.mark.processes
@pytest.mark.skipif(find_spec("material") is None, reason="needs the extra docs")
def test_the_search_of_the_site_ranks_pages(tmp_path: Path) -> None:
    """The script of the theme searches a small index: a word in a title counts more than in a text."""
    spec = find_spec("material")
    assert spec is not None
    assert spec.origin is not None
    scripts = "assets/javascripts/workers"
    shutil.copytree(Path(spec.origin).parent / "templates" / scripts, tmp_path / scripts)
    docs = [
        {"location": "a/", "title": "Animals", "text": "cats and dogs, with more cats"},
        {"location": "b/", "title": "Cats", "text": "animals that sleep"},
        {"location": "b/#food", "title": "Food", "text": "fish"},
    ]
    fields = {"title": {"boost": 1000.0}, "text": {"boost": 1.0}, "tags": {"boost": 1e6}}
    config = {"lang": ["en"], "separator": r"[\s\-]+", "pipeline": ["stopWordFilter"], "fields": fields}
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "search_index.json").write_text(json.dumps({"config": config, "docs": docs}))
    assert site_checks.results(tmp_path, ["cats", "fish", "horses"]) == [["b/", "a/"], ["b/"], []]
    assert list(site_checks.not_found(tmp_path, {"cats": "a/", "fish": "b/"})) == []
    (fault,) = site_checks.not_found(tmp_path, {"dogs": "b/"})
    assert fault == "search 'dogs': b/ is not among the first results: a/"


def test_a_description_is_the_first_paragraph_as_plain_text() -> None:
    markdown = "# Title\n\nUse [`fit`](a.md) to *train*.\nIt returns.\n\nMore.\n"
    assert site_hooks.description_of(markdown) == "Use fit to train. It returns."


def test_a_description_ends_with_a_sentence() -> None:
    short, long = "The first sentence is here.", "The second has " + "many words " * 20
    assert site_hooks.description_of(f"{short} {long}") == short
    assert site_hooks.description_of(long).endswith("many words ...")


def test_the_pages_of_the_api_have_each_public_class_and_function_once() -> None:
    pages = [path for path in sorted((ROOT / "docs" / "api").glob("*.md")) if path.name != "index.md"]
    listed = [name.rpartition(".")[2] for path in pages for name, _ in site_hooks.names_on(path)]
    public = {
        name
        for package in public_names.PACKAGES
        for name, value in public_names.names_of(package).items()
        if inspect.isclass(value) or inspect.isroutine(value)
    }
    assert public - set(listed) == set()
    assert len(listed) == len(set(listed))


def test_each_class_and_function_of_the_index_has_a_purpose() -> None:
    pages = (ROOT / "docs" / "api").glob("*.md")
    named = [row for path in pages for row in site_hooks.names_on(path) if not row[0].rpartition(".")[2].isupper()]
    assert len(named) > 190
    assert [name for name, purpose in named if not purpose] == []
