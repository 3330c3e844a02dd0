"""tools/features.py: the rows of docs/features.md, the markers of tests, and the faults that `--check` reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.requirements import words_of
from tools import features
from tools.features import (
    LISTS,
    ROOT,
    STARRED,
    Markers,
    Place,
    Row,
    expected_ids,
    find_problems,
    is_known_marker,
    main,
    read_markers,
    read_page,
    summary,
    works_untested,
)

HEAD = "| id | what | how | state |\n| --- | --- | :-- | --: |\n"
IDS = ["PMT-01", "PMT-02"]


def page(*lines: str) -> str:
    return "# Features\n\nText with a | bar.\n\n" + HEAD + "".join(f"{line}\n" for line in lines)


def rows_of(*lines: str) -> list[Row]:
    rows, unreadable = read_page(page(*lines))
    assert unreadable == []
    return rows


def problems_of(*lines: str, ids: list[str] = IDS, starred: tuple[str, ...] = (), tested: tuple[str, ...] = ()) -> str:
    markers = Markers()
    for id_ in tested:
        markers.places[id_].append(Place("tests/test_it.py", 3))
    return "\n".join(find_problems(rows_of(*lines), markers, ids, starred))


def repository(tmp_path: Path, tests: str, text: str) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "features.md").write_text(text, encoding="utf-8")
    (tmp_path / "tests" / "deep").mkdir(parents=True)
    (tmp_path / "tests" / "deep" / "test_it.py").write_text(tests, encoding="utf-8")
    return tmp_path


def markers_in(tmp_path: Path, source: str) -> Markers:
    root = repository(tmp_path, source, "")
    return read_markers(root / "tests", root)


# --- reading the page


def test_rows_are_read_with_star_state_and_line() -> None:
    rows = rows_of("| PMT-01 | a | b \\| c | works |", "| PMT-02 ★ | a | b | later, with ddp |")
    assert rows == [
        Row(id="PMT-01", starred=False, state="works", written="works", line=7),
        Row(id="PMT-02", starred=True, state="later", written="later, with ddp", line=8),
    ]


def test_only_tables_of_ids_are_read() -> None:
    other = "| name | value | x | y |\n| --- | --- | --- | --- |\n| PMT-01 | a | b | works |\n"
    assert read_page(other) == ([], [])


@pytest.mark.parametrize(
    "row", ["| PMT-01 | a | works |", "| PMT-01 | a | b | c | works |", "| PMT-01 | | b | works |"]
)
def test_a_row_needs_four_cells(row: str) -> None:
    rows, unreadable = read_page(page(row))
    assert len(rows) == 1
    assert len(unreadable) == 1
    assert "docs/features.md:7" in unreadable[0]


@pytest.mark.parametrize("state", ["works", "later, with the ddp layer", "no, because it is wrong"])
def test_the_three_states_are_valid(state: str) -> None:
    assert problems_of(f"| PMT-01 | a | b | {state} |", "| PMT-02 | a | b | works |", tested=tuple(IDS)) == ""


@pytest.mark.parametrize("state", ["done", "later", "later, ", "no", "no, never", "works, mostly", "Works"])
def test_any_other_state_is_a_problem(state: str) -> None:
    found = problems_of(f"| PMT-01 | a | b | {state} |", "| PMT-02 | a | b | works |")
    assert f"PMT-01 has the state {state.strip()!r}" in found


# --- ids


def test_a_missing_id_is_named() -> None:
    assert problems_of("| PMT-01 | a | b | works |", tested=("PMT-01",)) == (
        "docs/features.md: PMT-02 is missing. Add a row with its state."
    )


def test_a_repeated_id_is_named_with_both_lines() -> None:
    row = "| PMT-01 | a | b | works |"
    assert "PMT-01 occurs 2 times, on the lines 7, 9" in problems_of(row, "| PMT-02 | a | b | works |", row)


@pytest.mark.parametrize("id_", ["PMT-03", "PMT-1", "XX-01", "F101", "pmt-01"])
def test_an_unknown_id_is_named(id_: str) -> None:
    rows = [f"| {other} | a | b | works |" for other in [*IDS, id_]]
    assert f"{id_!r} is not in the five lists" in problems_of(*rows)


def test_the_lists_have_179_different_ids() -> None:
    ids = expected_ids()
    assert len(ids) == len(set(ids)) == 179
    assert (ids[0], ids[25], ids[-1]) == ("PMT-01", "PMB-01", "FN-54")
    assert set(ids) >= STARRED


# --- stars and tests


def test_wrong_and_missing_stars_are_problems() -> None:
    found = problems_of(
        "| PMT-01 | a | b | works |", "| PMT-02 ★ | a | b | works |", starred=("PMT-01",), tested=("PMT-02",)
    )
    assert "PMT-01 lacks its ★" in found
    assert "PMT-02 has a ★ and should not" in found


def test_a_row_that_works_needs_a_test() -> None:
    rows = ("| PMT-01 ★ | a | b | works |", "| PMT-02 | a | b | works |")
    for tested, missing in (("PMT-01",), "PMT-02"), (("PMT-02",), "PMT-01"):
        found = problems_of(*rows, starred=("PMT-01",), tested=tested)
        assert f"{missing} has the state 'works', and no test has its id" in found
    assert problems_of(*rows, starred=("PMT-01",), tested=("PMT-01", "PMT-02")) == ""


@pytest.mark.parametrize("tested", [(), ("PMT-01",)])
def test_a_starred_row_for_later_needs_no_test(tested: tuple[str, ...]) -> None:
    rows = ("| PMT-01 ★ | a | b | later, with ddp |", "| PMT-02 | a | b | no, because of that |")
    assert problems_of(*rows, starred=("PMT-01",), tested=tested) == ""


@pytest.mark.parametrize("id_", ["PMT-25", "FN-54", "F101", "F417", "O1", "O21", "T7", "B6"])
def test_ids_of_rows_and_requirements_are_known(id_: str) -> None:
    assert is_known_marker(id_)


@pytest.mark.parametrize("id_", ["PMT-26", "PMT-5", "F1", "F1011", "O0", "O22", "T8", "B7", "O01", "X1", ""])
def test_other_ids_are_unknown_and_reported(id_: str) -> None:
    assert not is_known_marker(id_)
    assert f"names {id_!r}" in problems_of(*(f"| {i} | a | b | works |" for i in IDS), tested=(id_,))


# --- reading the tests

SOURCE = """
import pytest
from pytest import mark

raise RuntimeError("tests are never run by this tool")

pytestmark = [pytest.mark.slow, pytest.mark.spec("PMT-01")]

@pytest.mark.spec("PMT-18", "F106")
class TestIt:
    @mark.spec("PMT-19")
    @pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.spec("O7"))])
    async def test(self, x): importlib.util.find_spec("no marker"); self.spec("none either")

# @pytest.mark.spec("PMT-20")
"""


def test_markers_of_modules_classes_functions_and_parameters_are_found(tmp_path: Path) -> None:
    markers = markers_in(tmp_path, SOURCE)
    assert markers.problems == []
    assert set(markers.places) == {"PMT-01", "PMT-18", "F106", "PMT-19", "O7"}
    assert str(markers.places["F106"][0]) == "tests/deep/test_it.py:9"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("@pytest.mark.spec()\ndef test(): ...", "names no id"),
        ("@pytest.mark.spec(id='PMT-01')\ndef test(): ...", "names no id"),
        ("@pytest.mark.spec(SOME_ID)\ndef test(): ...", "written out as a string"),
        ("@pytest.mark.spec(18)\ndef test(): ...", "written out as a string"),
        ("def test(:", "this is not Python"),
    ],
)
def test_an_unreadable_file_is_a_problem(tmp_path: Path, source: str, sentence: str) -> None:
    (problem,) = markers_in(tmp_path, source).problems
    assert problem.startswith("tests/deep/test_it.py:1: ")
    assert sentence in problem


# --- output


def test_the_summary_counts_by_list() -> None:
    rows = rows_of("| PMT-01 | a | b | works |", "| PMT-02 | a | b | works |", "| HZ-01 | a | b | no, because so |")
    markers = Markers()
    markers.places["PMT-02"].append(Place("tests/test_it.py", 1))
    lines = {line.split()[0]: line.split()[1:] for line in summary(rows, markers).splitlines()}
    assert set(lines) == {"list", *LISTS, "all"}
    assert lines["PMT"] == ["2", "1", "0", "0", "2"]
    assert lines["HZ"] == ["0", "0", "0", "1", "1"]
    assert lines["all"] == ["2", "1", "0", "1", "3"]
    assert [row.id for row in works_untested(rows, markers)] == ["PMT-01"]


def full_page(state: str = "works") -> str:
    return page(*(f"| {id_}{' ★' * (id_ in STARRED)} | a | b | {state} |" for id_ in expected_ids()))


def test_a_complete_page_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tests = "import pytest\npytestmark = pytest.mark.spec(" + ", ".join(map(repr, expected_ids())) + ")"
    root = repository(tmp_path, tests, full_page())
    assert main(["--check"], root) == 0
    assert "all       179     179      0    0    179" in capsys.readouterr().out


def test_every_line_is_printed_with_its_state_and_its_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tests = "import pytest\npytestmark = pytest.mark.spec('PMT-01', 'PMT-02')"
    text = full_page().replace("| FN-54 | a | b | works |", "| FN-54 | a | b | no, because so |")
    assert main([], repository(tmp_path, tests, text)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "PMT-01  works     a; tests/deep/test_it.py:2"
    assert lines[178:180] == ["FN-54   declined  a; no test", f"{'':<17} no, because so"]


def test_all_problems_are_printed_and_only_check_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = repository(
        tmp_path, "import pytest\npytestmark = pytest.mark.spec('PMT-99')", full_page() + "| PA-99 | a |\n"
    )
    assert main([], root) == 0
    capsys.readouterr()
    assert main(["--check"], root) == 1
    printed = capsys.readouterr().out
    assert printed.count("has the state 'works', and no test has its id") == 179
    assert "'PA-99' is not in the five lists" in printed
    assert "it has 2 cells" in printed
    assert "a marker names 'PMT-99'" in printed


def test_untested_rows_and_tests_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = repository(tmp_path, "import pytest\npytestmark = pytest.mark.spec('PMT-05')", full_page())
    assert main(["--list", "works-untested"], root) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 178
    assert "PMT-11 ★" in printed
    assert main(["--list", "tests"], root) == 0
    assert capsys.readouterr().out == "PMT-05: tests/deep/test_it.py:2\n"


def test_a_missing_page_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"], tmp_path) == 1
    assert "docs/features.md is missing" in capsys.readouterr().out


# --- the real page


def test_the_real_page_is_well_formed() -> None:
    rows, unreadable = read_page((ROOT / features.PAGE).read_text(encoding="utf-8"))
    assert unreadable == []
    everything_tested = Markers()
    for id_ in expected_ids():
        everything_tested.places[id_].append(Place("tests/test_it.py", 1))
    assert find_problems(rows, everything_tested, expected_ids()) == []
    assert [row.id for row in rows] == expected_ids()


# --- the words of ids


def test_every_id_of_a_test_has_words() -> None:
    ids = read_markers(ROOT / "tests").places

    assert [id_ for id_ in ids if words_of(id_) == "an id without words"] == []
    assert words_of("PMT-02") == "Keep everything about a task in one class"
