"""The public suite: trainstack passes every case, and a handwritten loop with common mistakes fails every case."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.patience import patience
from tools.conformance.__main__ import main, run_row
from tools.conformance.adapter import Verdict
from tools.conformance.case import all_cases
from tools.conformance.process import ROOT
from tools.conformance.report import Row, page, table


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("trainer", "status"), [("trainstack", "pass"), pytest.param("naive", "wrong", marks=pytest.mark.long)]
)
def test_trainstack_passes_and_the_naive_loop_fails_every_case(trainer: str, status: str) -> None:
    row = run_row(trainer, Path(sys.executable), [], timeout=patience(60))

    assert list(row.cells) == [case.id for case in all_cases()]
    assert {case: cell for case, cell in row.cells.items() if cell.status != status} == {}
    assert all(not cell.seen.startswith("raises") for cell in row.cells.values()), "failed for another reason"


def test_the_page_has_a_line_for_every_case_with_its_result() -> None:
    cells = {case.id: Verdict("pass") for case in all_cases()}
    cells["torn"] = Verdict("wrong", "sees <nothing>")
    cells["bomb"] = Verdict("n.a.", "saves nothing")
    made = page({"some": Row({"trainer": "1.2", "torch": "3.4"}, cells)})

    assert "| torn checkpoint | **wrong** |" in made
    assert "- torn checkpoint: wrong, sees \\<nothing\\>" in made
    assert f"| passes | {len(cells) - 2} of {len(cells) - 1} |" in made
    assert all(f"(`{case.id}`): {case.demand}" in made for case in all_cases())


def test_a_table_of_some_cases_omits_the_others() -> None:
    assert table({"some": Row({}, {"torn": Verdict("pass")})}).count("\n") == 3


def test_an_unknown_case_gets_the_list_of_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--case", "tron"]) == 2
    assert "no case is called tron. There are short_window, " in capsys.readouterr().out


def test_the_page_in_the_documentation_has_the_current_cases() -> None:
    kept = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")

    assert [case.id for case in all_cases() if f"- **{case.title}** (`{case.id}`): {case.demand}" not in kept] == []
    assert "n.a." in kept.partition("## Requirements")[0]
    assert "| passes | 18 of 18 |" in kept
