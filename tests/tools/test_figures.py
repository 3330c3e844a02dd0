"""Each measured figure in README and docs is in a section with the command that prints it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.pages import ROOT
from trainstack.cli.main import COMMANDS

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CHECKED = {
    "README.md": "tests/examples/test_readme.py compares its figures with those of the pages",
    "docs/examples": "each page is about one script, whose output has the figures",
}
"""Pages and folders of pages whose figures are checked otherwise."""

_UNIT = r"(?:%|s|ms|µs|us|ns|seconds|minutes|hours|kB|MB|GB|TB|KiB|MiB|GiB|times)"
_NUMBER = r"\d[\d,]*(?:\.\d+)?"
FIGURES = re.compile(
    rf"(?<![\w.-])(?:\d+\.\d+|{_NUMBER} (?:to|-) {_NUMBER}|\d[\d,]*(?= (?:%|ms|µs|us)))\s?{_UNIT}(?!\w)"
    rf"|\b{_NUMBER} of {_NUMBER} (?:trainings|runs|kills|tests|mutants|cases)\b"
    rf"|^\|.*\| *\d+\.\d+(?: (?:to|-) {_NUMBER})? *(?:{_UNIT} *)?\|",
    re.MULTILINE,
)
"""Decimals and ranges with units, shares of trials, and decimals in cells of tables. `30 seconds` is a setting."""
COMMAND = re.compile(
    r"\b(?:make (?P<target>[a-z][\w-]*)|python (?:-m (?P<module>tools(?:\.\w+)*)|(?P<file>\w+/\w+\.py))"
    r"|trainstack (?P<command>[a-z]+) )"
)
_CODE = re.compile(r"^ *(?P<fence>```+|~~~+)[^\n]*\n.*?^ *(?P=fence) *$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def sections(text: str) -> Iterator[tuple[int, str]]:
    """The parts of a page that begin with headings of level 2, and the part before them, with their first lines."""
    line = 1
    for part in re.split(r"^(?=## )", text, flags=re.MULTILINE):
        yield line, part
        line += part.count("\n")


def commands(text: str) -> list[str]:
    targets = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    found = []
    for one in COMMAND.finditer(text):
        path = Path(*(one["module"] or "").split("."))
        is_there = (
            one["target"] in targets
            or one["command"] in COMMANDS
            or (one["module"] and ((ROOT / path).is_dir() or (ROOT / path).with_suffix(".py").is_file()))
            or (one["file"] and (ROOT / one["file"]).is_file())
        )
        found += [one[0]] if is_there else []
    return found


def unproven(text: str) -> list[str]:
    """The figures of a page, with their lines, in sections without a command; one before the first section counts."""
    if commands(next(sections(text))[1]):
        return []
    return [
        f"line {first + part.count(chr(10), 0, figure.start())}: {figure[0]}"
        for first, part in sections(text)
        if not commands(part)
        for figure in FIGURES.finditer(_CODE.sub(lambda code: re.sub(r"[^\n]", "_", code[0]), part))
    ]


def test_every_measured_figure_has_a_command() -> None:
    """CONTRIBUTING.md, "Documentation", has the rule."""
    missing = {}
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        if not name.startswith(tuple(CHECKED)):
            missing |= {name: found} if (found := unproven(page.read_text(encoding="utf-8"))) else {}
    assert missing == {}, "name the command that prints these figures in their section, or remove them"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("A step takes 1.5 ms.", 1),
        ("A step takes 1.5 ms (`make bench`).", 0),
        ("A step takes 1.5 ms (`make nothing`).", 1),
        ("It prints 3 %.\n\n## Other\n\n`python -m tools.bench`", 1),
        ("`python -m tools.bench` prints:\n\n## Table\n\n| a | 0.66 |\n", 0),
        ("## One\n\n| a | 0.66 | 0.7 |\n", 1),
        ("200 of 200 trainings end alike, after 2 to 3 seconds.", 2),
        ("It waits for 30 seconds with torch 2.13.0, see `0.5 s`.\n\n```\n0.5 s\n```\n", 0),
    ],
)
def test_figures_in_sections_without_a_command_are_counted(text: str, count: int) -> None:
    assert len(unproven(text)) == count


def test_no_page_has_a_hash_of_weights() -> None:
    """The hash depends on the machine and on the number of threads."""
    assert [page for page in PAGES if re.search(r"^weights [0-9a-f]{8,}", page.read_text("utf-8"), re.MULTILINE)] == []
