"""tools/words.py: the words that it counts, the texts that it reads, and the limit of `--check`."""

import sys
from pathlib import Path

import pytest

from tools import words


def found(text: str) -> list[str]:
    return [word for _, word in words.find_words(text)]


@pytest.mark.parametrize(
    "text",
    [
        "It prints what it has.",
        "The run goes\non with step 3.",
        "The file lies there.",
        "Nobody waits.",
        "A process of its own.",
        "This is no file.",
        "The table beside it.",
        "It is written anew.",
        "It ends by itself.",
        "So far as it can.",
    ],
)
def test_a_word_to_avoid_is_found(text: str) -> None:
    assert len(found(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "What does it print? A table.",
        "There is no file.",
        "It is no longer there.",
        "The layer outlay is standard.",
        "N stands for the batch.",
        "Beyond the asides of a whatsoever.",
    ],
)
def test_ordinary_words_are_not_found(text: str) -> None:
    assert found(text) == []


def test_comments_messages_and_test_names_of_python_count() -> None:
    source = (
        '"""Module.\n\nSay what is there."""\n\n\n'
        "def test_what_it_does() -> None:  # goes on\n"
        '    what = "whatever"\n'
        '    raise ValueError(f"nobody is {what}")\n'
    )
    lines = sorted(
        (first + line, word) for first, text in words.texts("a.py", source) for line, word in words.find_words(text)
    )
    assert lines == [(3, "what"), (6, "goes on"), (6, "what"), (8, "nobody")]


def test_code_in_markdown_does_not_count() -> None:
    page = "Write `what` here, [so](what-page.md).\n\n```python\nwhat = 1\n```\n\nBut what is this.\n"
    lines = [first + line for first, text in words.texts("a.md", page) for line, _ in words.find_words(text)]
    assert lines == [7]


@pytest.mark.parametrize(("lines", "code"), [(997, 1), (998, 0)])
def test_check_fails_with_more_than_one_in_1000_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lines: int, code: int
) -> None:
    (tmp_path / "docs" / "more").mkdir(parents=True)
    (tmp_path / "docs" / "a.md").write_text("It says what it is.\n" + "\n" * lines)
    (tmp_path / "docs" / "more" / "b.md").write_text("Nothing.\n")
    monkeypatch.setattr(words, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["words.py", "--check", "--list"])

    assert words.main() == code

    printed = capsys.readouterr().out
    assert "docs/a.md:1: what" in printed
    assert ("More than 1 in 1,000 lines: docs." in printed) == (code == 1)


DENSE = '''"""A module.

Of two things.
"""

import os  # noqa: F401

LIMIT = 3  # kilobytes
"""The limit."""
TEXT = """not a
docstring"""


# A reason
# in two lines.
def read() -> str:
    """Read."""
    return TEXT
'''


def test_the_density_counts_comments_docstrings_and_code_apart() -> None:
    assert words.density(DENSE) == words.Density(code=6, comments=3, docstrings=6)


def test_the_density_is_printed_for_each_folder_with_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, code in (("src/trainstack/cli", DENSE), ("tools", "one = 1\ntwo = 2  # a reason\n")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text(code)
    monkeypatch.setattr(words, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["words.py", "--density"])

    assert words.main() == 0

    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(row[0], row[1], row[8], row[10]) for row in rows] == [
        ("src/trainstack/cli", "6", "50.0", "100.0"),
        ("tools", "2", "50.0", "0.0"),
        ("all", "8", "50.0", "75.0"),
    ]
