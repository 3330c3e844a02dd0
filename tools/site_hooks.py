"""Hooks for the build of the documentation: each page gets a description, and `docs/api/index.md` its list of names.

mkdocs.yml names this file, and mkdocs calls `on_page_markdown` for each page.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

INDEX = "<!-- api index -->"
LONGEST = 160
"""Characters of a description that search engines show."""

BEHIND = ("api/", "coming-from/", "architecture", "comparison", "conformance", "features", "releasing")
"""Pages that search lists behind the others: they name everything, and explain little."""

_ENTRY = re.compile(r"^::: ([\w.]+)((?:\n    .*)*)", re.M)
_FENCED = re.compile(r"^```.*?^```$", re.M | re.S)


def on_page_markdown(markdown: str, page: Any, config: Any, files: object) -> str:
    """Set the description of a page and its place in the search, and write the list of names if a page asks for it."""
    page.meta.setdefault("description", description_of(markdown))
    if page.file.src_uri.startswith(BEHIND):
        page.meta.setdefault("search", {"boost": 0.5})
    return markdown.replace(INDEX, api_index(config.nav, Path(config.docs_dir))) if INDEX in markdown else markdown


def description_of(markdown: str) -> str:
    """The first sentences of the first paragraph, as plain text."""
    blocks = _FENCED.sub("", markdown).split("\n\n")
    text = next(
        (block for block in map(str.strip, blocks) if block and not block.startswith(("#", "<", "|", ":::"))), ""
    )
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", " ".join(text.split())).replace("`", "").replace("*", "")
    while len(text) > LONGEST and ". " in text:
        text = text.rpartition(". ")[0] + "."
    return text if len(text) <= LONGEST else text[:LONGEST].rpartition(" ")[0] + " ..."


def api_index(nav: list[Any], docs: Path) -> str:
    """A heading for each page of the API in the navigation, with a table of its names and their purposes."""
    lines = []
    for group, pages in _groups(nav):
        lines += [f"## {group}", ""]
        for title, path in pages:
            rows = [f"| [`{name.rpartition('.')[2]}`][{name}] | {purpose} |" for name, purpose in names_on(docs / path)]
            lines += [f"### [{title}]({path.removeprefix('api/')})", "", "| name | purpose |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def names_on(page: Path) -> Iterator[tuple[str, str]]:
    """The full name and the purpose of each object on an API page. A module without heading gives its names."""
    for entry in _ENTRY.finditer(page.read_text(encoding="utf-8")):
        value = _imported(entry[1])
        if not inspect.ismodule(value) and "show_root_heading: false" not in entry[2]:
            yield entry[1], purpose_of(value)
            continue
        own = [name for name, one in vars(value).items() if name[0] != "_" and _is_from(one, value)]
        for name in getattr(value, "__all__", own):
            yield f"{entry[1]}.{name}", purpose_of(getattr(value, name))


def purpose_of(value: object) -> str:
    """The first sentence of a docstring, on one line; of a constant, that of its class in trainstack."""
    described = isinstance(value, property) or inspect.isclass(value) or inspect.isroutine(value)
    owner = value if described else type(value)
    doc = inspect.getdoc(owner) if described or type(value).__module__.startswith("trainstack") else None
    first = " ".join((doc or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.:]) (?=[A-Z])", first)[0].replace("|", "\\|")


def _groups(nav: list[Any]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    for entry in nav:
        for title, inside in entry.items() if isinstance(entry, dict) else ():
            if isinstance(inside, list):
                pages = [next(iter(one.items())) for one in inside if isinstance(one, dict)]
                if pages and all(str(path).startswith("api/") for _, path in pages):
                    yield title, pages
                else:
                    yield from _groups(inside)


def _imported(name: str) -> object:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, member = name.rpartition(".")
        return getattr(importlib.import_module(module), member)


def _is_from(value: object, owner: object) -> bool:
    if inspect.isclass(owner):
        return inspect.isroutine(value) or isinstance(value, property)
    return (getattr(value, "__module__", None) or type(value).__module__) == getattr(owner, "__name__", "")
