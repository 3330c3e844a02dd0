"""Count the words to avoid (CONTRIBUTING.md, "Language") in the text of the project, for each 1,000 lines of a folder.

`python tools/words.py` prints the rates. `--list` also prints the places, and `--list docs tests/cli` those under some
paths. `--check` fails where a folder is above `LIMIT`. `--density` prints the lines of comments and docstrings for each
100 lines of code instead.

Text is: Markdown without code, and in Python files the comments, the strings with a space, and the names of tests.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 1.0
"""The largest rate of a folder, in occurrences for 1,000 lines."""
FOLDERS = (
    *("docs", "docs/coming-from", "docs/examples", "docs/guides", "docs/recipes", "examples"),
    *("src/trainstack", "src/trainstack/backends", "src/trainstack/backends/dp", "src/trainstack/checkpointing"),
    *("src/trainstack/cli", "src/trainstack/trainer", "src/trainstack/trainer/run", "src/trainstack/verifying"),
    *("tests", "tests/backends", "tests/checkpointing", "tests/helpers", "tests/trainer", "tools"),
)
"""A file counts for the longest entry above it."""
PAGES = "pages at the top"
"""The entry for README.md, CHANGELOG.md and the other Markdown files of the top folder."""

_AVOIDED = (
    r"(?P<what>what)\b",  # not in a question
    r"(?:go|goes|going|gone|went) on\b",
    r"(?:stands(?! for\b)|lies|lay)\b",
    r"(?:nobody|somebody|whoever|whatever)\b",
    r"of (?:its|their) own\b",
    r"(?<!there )(?:is|are|was|were) no (?!longer\b|more\b|better\b|less\b|\d)[a-z]+",
    r"(?:beside|besides|aside|heed|heeds|heeded|thereby|meanwhile)\b",
    r"(?:anew|afresh|under way|in vain|wholly)\b",
    r"by (?:itself|themselves)\b",
    r"so far as\b",
    r"(?:therein|thereof|whence|so too)\b",
)
_SPACE = re.compile(r" (?!\))")  # not the one in the lookbehind, whose length has to be fixed
_WORDS = re.compile(r"\b(?:" + _SPACE.sub(r"\\s+", "|".join(_AVOIDED)) + ")", re.IGNORECASE)
_CODE = re.compile(
    r"^ *(?P<fence>```+|~~~+)[^\n]*\n.*?^ *(?P=fence) *$|(?P<ticks>`+)[^`]+?(?P=ticks)|\]\([^)\s]*\)",
    re.MULTILINE | re.DOTALL,
)
_SENTENCE = re.compile(r"[.!?:](?=\s|$)|\n\s*\n")
_NOT_READ = ("tools/words.py", "tests/tools/test_words.py")
"""They contain the words."""


class Place(NamedTuple):
    """One occurrence.

    Attributes:
        file: the path from the root of the project.
        line: counted from 1.
        words: the words as written.
    """

    file: str
    line: int
    words: str


def find_words(text: str) -> Iterator[tuple[int, str]]:
    """The words to avoid in `text`, a piece of prose, each with its line counted from 0."""
    for match in _WORDS.finditer(text):
        if match["what"] and _in_question(text, match.end()):
            continue
        yield text.count("\n", 0, match.start()), " ".join(match[0].split())


def _in_question(text: str, start: int) -> bool:
    end = _SENTENCE.search(text, start)
    return end is not None and end[0] == "?"


def texts(name: str, source: str) -> Iterator[tuple[int, str]]:
    """The pieces of prose in the file `name`, each with its first line; code in them is replaced by blanks."""
    pieces = _texts_of_python(source) if name.endswith(".py") else [(1, source)]
    for line, text in pieces:
        yield line, _CODE.sub(lambda match: re.sub(r"[^\n]", "_", match[0]), text)


def _texts_of_python(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.lineno, node.name.replace("_", " ")


def places() -> tuple[list[Place], Counter[str]]:
    """All occurrences, and the number of lines of each folder."""
    found: list[Place] = []
    lines: Counter[str] = Counter()
    for path in _files():
        name = path.relative_to(ROOT).as_posix()
        source = path.read_text(encoding="utf-8")
        lines[folder_of(name)] += source.count("\n")
        found += [
            Place(name, first + line, words) for first, text in texts(name, source) for line, words in find_words(text)
        ]
    return found, lines


def _files() -> Iterator[Path]:
    yield from sorted(ROOT.glob("*.md"))
    for top, endings in (("docs", "md"), ("examples", "py"), ("src", "py"), ("tests", "py"), ("tools", "py")):
        for path in sorted((ROOT / top).rglob(f"*.{endings}")):
            if path.relative_to(ROOT).as_posix() not in _NOT_READ:
                yield path


def folder_of(name: str) -> str:
    """The entry of `FOLDERS` that the file `name` counts for."""
    under = [folder for folder in FOLDERS if name.startswith(folder + "/")]
    return max(under, key=len) if under else PAGES


class Density(NamedTuple):
    """Numbers of lines in Python files.

    Attributes:
        code: lines with code; not those of docstrings.
        comments: lines with a comment, also behind code. Marks for tools, such as `# noqa`, do not count.
        docstrings: lines of docstrings, also of attributes.
    """

    code: int = 0
    comments: int = 0
    docstrings: int = 0


_MARK = re.compile(r"#\s*(?:noqa|type:|fmt:|pragma:|pyright:|mypy:|ruff:|!)")
_LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def density(source: str) -> Density:
    """The numbers of lines in the text of a Python file."""
    docstrings, comments, code = set[int](), set[int](), set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.update([] if _MARK.match(token.string) else [token.start[0]])
        elif token.type not in _LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    return Density(len(code - docstrings), len(comments), len(docstrings))


def print_density() -> None:
    """Print the lines of comments and docstrings for each 100 lines of code, by folder."""
    found: dict[str, list[Density]] = {}
    for path in _files():
        if path.suffix == ".py":
            folder = folder_of(path.relative_to(ROOT).as_posix())
            found.setdefault(folder, []).append(density(path.read_text(encoding="utf-8")))
    everything = [one for files in found.values() for one in files]
    for name, files in ({folder: found[folder] for folder in FOLDERS if folder in found} | {"all": everything}).items():
        code, comments, docstrings = (sum(numbers) for numbers in zip(*files, strict=True))
        rates = [100 * number / max(1, code) for number in (comments, docstrings)]
        print(f"{name:36} {code:7} lines of code, for each 100: {rates[0]:5.1f} comments {rates[1]:5.1f} docstrings")


def main() -> int:
    """Print the rates; with `--check`, return 1 where one is above `LIMIT`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", nargs="*", metavar="PATH", help="print the places too, of all files or under these")
    parser.add_argument("--check", action="store_true", help="fail where a folder has more than 1 in 1,000 lines")
    parser.add_argument("--density", action="store_true", help="print the density of comments and docstrings instead")
    chosen = parser.parse_args()
    if chosen.density:
        print_density()
        return 0
    found, lines = places()
    if chosen.list is not None:
        for place in found:
            if not chosen.list or place.file.startswith(tuple(chosen.list)):
                print(f"{place.file}:{place.line}: {place.words}")
    counts = Counter(folder_of(place.file) for place in found)
    above = []
    for folder in (*FOLDERS, PAGES):
        rate = 1000 * counts[folder] / max(1, lines[folder])
        above += [folder] if rate > LIMIT else []
        print(f"{folder:36} {counts[folder]:5} words {lines[folder]:7} lines {rate:7.2f} in 1,000")
    print(f"{'all':36} {len(found):5} words {lines.total():7} lines {1000 * len(found) / lines.total():7.2f} in 1,000")
    if chosen.check and above:
        print(f"More than {LIMIT:g} in 1,000 lines: {', '.join(above)}.")
        print(f"`python tools/words.py --list {above[0]}` shows the places;")
        print("CONTRIBUTING.md has the words to write instead.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
