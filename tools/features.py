"""Compare docs/features.md with the ids that it must have and with the markers in the tests.

`python tools/features.py` prints every row with its state and its test, and the counts. `--check` fails if there is a
problem. `--list` prints rows without a test, or the tests of each id. Tests are parsed, not imported and not run.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/features.md"

LISTS = {"PMT": 25, "PMB": 23, "PA": 41, "HZ": 36, "FN": 54}
"""The number of rows of each of the five lists."""

_STARRED = {
    "PMT": (5, 11, 18, 19, 20, 21),
    "PMB": (5, 6, 7, 8, 13, 21),
    "PA": (7, 8, 11, 15, 18, 21, 26, 35, 37),
    "HZ": (5, 6, 12, 19, 20, 21, 28),
    "FN": (5, 7, 14, 15, 16, 17, 20, 21, 24, 25, 29, 30, 32, 36, 37, 45, 46),
}
STARRED = frozenset(f"{name}-{number:02d}" for name, numbers in _STARRED.items() for number in numbers)
"""The rows with a star: features with an error that is easy to make."""

_OTHERS = {"O": 21, "T": 7, "B": 6}
"""The last numbers of ids that only markers have: observations about Opacus (O), and PyMarlin's tests (T, B)."""

_STATES = re.compile(r"(?P<kind>works)$|(?P<later>later), \w.*|(?P<no>no), because \w.*")
_CELL_END = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True)
class Row:
    """One line of a table on the page.

    Attributes:
        id: such as "PMT-05".
        starred: whether the row has a star.
        state: "works", "later" or "no"; "" for any other text.
        written: the state as on the page.
        line: in the page, from 1.
    """

    id: str
    starred: bool
    state: str
    written: str
    line: int


class Place(NamedTuple):
    """The place of a marker."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass
class Markers:
    """The spec markers of all tests: the places of each id, and unreadable files."""

    places: dict[str, list[Place]] = field(default_factory=lambda: defaultdict(list))
    problems: list[str] = field(default_factory=list)


def expected_ids(lists: Mapping[str, int] = LISTS) -> list[str]:
    """The ids of all rows that the page must have, in order."""
    return [f"{name}-{number:02d}" for name, count in lists.items() for number in range(1, count + 1)]


def is_known_marker(id_: str) -> bool:
    """Whether a marker may have `id_`: a row of the page, or an id of tests/helpers/requirements.py."""
    if re.fullmatch(r"F\d{3}", id_):
        return True
    note = re.fullmatch(r"([OTB])([1-9]\d?)", id_)
    if note is not None:
        return int(note[2]) <= _OTHERS[note[1]]
    return id_ in _ALL_IDS


_ALL_IDS = frozenset(expected_ids())


# --- the page


def read_page(text: str) -> tuple[list[Row], list[str]]:
    """The rows of all tables whose first column is "id", and messages about rows that cannot be read."""
    rows, problems = [], []
    for line, cells in _table_rows(text):
        if len(cells) != 4 or not all(cells):
            fault = f"it has {len(cells)} cells" if len(cells) != 4 else "a cell is empty"
            problems.append(
                f"{PAGE}:{line}: {fault}; a row has four, none empty: id, feature, how, state. "
                "Write \\| for a bar inside a cell."
            )
        if cells:
            rows.append(_row(cells, line))
    return rows, problems


def _table_rows(text: str) -> Iterator[tuple[int, list[str]]]:
    inside = False
    for line, content in enumerate(text.splitlines(), start=1):
        content = content.strip()
        if not content.startswith("|"):
            inside = False
            continue
        cells = [cell.strip() for cell in _CELL_END.split(content)[1:]]
        if cells and not cells[-1]:
            cells.pop()
        if cells[:1] == ["id"]:
            inside = True
        elif inside and not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
            yield line, cells


def words_of_rows(text: str) -> dict[str, str]:
    """The feature of each row of the page, by id."""
    return {cells[0].partition(" ")[0]: cells[1] for _, cells in _table_rows(text) if len(cells) > 1}


def _row(cells: Sequence[str], line: int) -> Row:
    id_, _, star = cells[0].partition(" ")
    found = _STATES.fullmatch(cells[-1])
    state = next((part for part in found.groups() if part), "") if found else ""
    return Row(id=id_, starred="★" in star, state=state, written=cells[-1], line=line)


# --- the tests


def read_markers(tests: Path, root: Path = ROOT) -> Markers:
    """All spec markers in the Python files below `tests`; paths are given relative to `root`."""
    markers = Markers()
    for path in sorted(tests.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"), filename=name)
        except SyntaxError as error:
            markers.problems.append(f"{name}:{error.lineno}: this is not Python, so its markers cannot be read.")
            continue
        for call in _marker_calls(tree):
            _add_ids(markers, call, name)
    return markers


def _marker_calls(tree: ast.AST) -> Iterator[ast.Call]:
    """All calls of `pytest.mark.spec` or `mark.spec`."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "spec"):
            continue
        owner = node.func.value
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", None)
        if name == "mark":
            yield node


def _add_ids(markers: Markers, call: ast.Call, path: str) -> None:
    place = Place(path, call.lineno)
    if not call.args or call.keywords:
        markers.problems.append(f"{place}: the marker names no id. Write pytest.mark.spec('PMT-18').")
    for argument in call.args:
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            markers.places[argument.value].append(place)
        else:
            markers.problems.append(f"{place}: an id must be written out as a string, so that it can be read here.")


# --- problems


def find_problems(
    rows: Sequence[Row],
    markers: Markers,
    expected: Sequence[str],
    starred: Iterable[str] = STARRED,
) -> list[str]:
    """The messages of all problems. Tests are not run, so a failing test is not a problem here."""
    return [
        *_id_problems(rows, expected),
        *_star_problems(rows, frozenset(starred)),
        *_state_problems(rows),
        *_untested_problems(rows, markers),
        *_unknown_markers(markers),
        *markers.problems,
    ]


def _id_problems(rows: Sequence[Row], expected: Sequence[str]) -> Iterator[str]:
    counts = Counter(row.id for row in rows)
    for id_ in expected:
        if not counts[id_]:
            yield f"{PAGE}: {id_} is missing. Add a row with its state."
    for id_, count in counts.items():
        lines = ", ".join(str(row.line) for row in rows if row.id == id_)
        if id_ not in expected:
            yield f"{PAGE}:{lines}: {id_!r} is not in the five lists."
        elif count > 1:
            yield f"{PAGE}: {id_} occurs {count} times, on the lines {lines}. Keep one row."


def _star_problems(rows: Sequence[Row], starred: frozenset[str]) -> Iterator[str]:
    for row in rows:
        if row.starred != (row.id in starred):
            how = "has a ★ and should not" if row.starred else "lacks its ★"
            yield f"{PAGE}:{row.line}: {row.id} {how}."


def _state_problems(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if not row.state:
            yield (
                f"{PAGE}:{row.line}: {row.id} has the state {row.written!r}. "
                "Write 'works', 'later, with ...' or 'no, because ...'."
            )


def _untested_problems(rows: Sequence[Row], markers: Markers) -> Iterator[str]:
    for row in works_untested(rows, markers):
        yield (
            f"{PAGE}:{row.line}: {row.id} has the state 'works', and no test has its id. "
            f"Mark one with @pytest.mark.spec({row.id!r})."
        )


def _unknown_markers(markers: Markers) -> Iterator[str]:
    for id_, places in sorted(markers.places.items()):
        if not is_known_marker(id_):
            where = ", ".join(map(str, places))
            yield f"{where}: a marker names {id_!r}, which neither {PAGE} nor tests/helpers/requirements.py has."


# --- output


def works_untested(rows: Iterable[Row], markers: Markers) -> list[Row]:
    """The rows with the state "works" whose id no test has."""
    return [row for row in rows if row.state == "works" and row.id not in markers.places]


def table(rows: Sequence[Row], markers: Markers, words: Mapping[str, str]) -> str:
    """One line for each row: its id, its state, the feature, and the first of its tests."""
    lines = []
    for row in rows:
        state = "declined" if row.state == "no" else row.state or "?"
        places = markers.places.get(row.id, [])
        test = f"{places[0]}{f' and {len(places) - 1} more' if len(places) > 1 else ''}" if places else "no test"
        lines.append(f"{row.id:<7} {state:<9} {words.get(row.id, '')}; {test}")
        if state != "works":
            lines.append(f"{'':<17} {row.written}")
    return "\n".join(lines)


def summary(rows: Sequence[Row], markers: Markers) -> str:
    """A table of counts, with one line for each list and one for all."""
    lines = [f"{'list':<6}{'works':>7}{'tested':>8}{'later':>7}{'no':>5}{'total':>7}"]
    for name in LISTS:
        lines.append(_counts(name, [row for row in rows if row.id.partition("-")[0] == name], markers))
    lines.append(_counts("all", rows, markers))
    return "\n".join(lines)


def _counts(name: str, rows: Sequence[Row], markers: Markers) -> str:
    states = Counter(row.state for row in rows)
    tested = states["works"] - len(works_untested(rows, markers))
    return f"{name:<6}{states['works']:>7}{tested:>8}{states['later']:>7}{states['no']:>5}{len(rows):>7}"


def listing(kind: str, rows: Sequence[Row], markers: Markers) -> str:
    """One line for each row that works without a test, or for each id with the places of its tests."""
    if kind == "works-untested":
        return "\n".join(row.id + (" ★" if row.starred else "") for row in works_untested(rows, markers))
    ids = sorted(markers.places)
    return "\n".join(f"{id_}: {', '.join(map(str, markers.places[id_]))}" for id_ in ids)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="tools/features.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if there is a problem, and print it")
    parser.add_argument(
        "--list",
        choices=("works-untested", "tests"),
        help="print the rows that work without a test, or the tests of each id",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the tool on the repository at `root`; returns the exit status."""
    arguments = parse_arguments(argv)
    page = root / PAGE
    if not page.is_file():
        print(f"{PAGE} is missing. It has a row for each id of the five lists.")
        return 1
    rows, unreadable = read_page(page.read_text(encoding="utf-8"))
    markers = read_markers(root / "tests", root)
    if arguments.list:
        print(listing(arguments.list, rows, markers))
        return 0
    if not arguments.check:
        print(table(rows, markers, words_of_rows(page.read_text(encoding="utf-8"))) + "\n")
    print(summary(rows, markers))
    if not arguments.check:
        return 0
    problems = unreadable + find_problems(rows, markers, expected_ids())
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
