"""`trainstack report` writes pages from the files of runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.helpers.modules import Classifier, train
from trainstack.cli.main import main


def test_the_page_of_one_run_is_written_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(Classifier(), tmp_path, writers=["csv"], log_every=1)
    written = (tmp_path / "report.html").read_text()
    (tmp_path / "report.html").unlink()

    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    made = re.compile("Made by trainstack on [^.]*")
    assert made.sub("", (tmp_path / "report.html").read_text()) == made.sub("", written)


def test_one_page_compares_several_runs_and_their_arguments(tmp_path: Path) -> None:
    train(Classifier(validate=True), tmp_path / "a", writers=["csv"], log_every=1)
    train(Classifier(lr=0.3), tmp_path / "b", writers=["jsonl"], log_every=1, train_batch_size=4, seed=7)
    page = tmp_path / "both" / "page.html"

    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(page)]) == 0
    html = page.read_text()
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]
    assert ["<code>train_batch_size</code>", "8", "4"] in rows
    assert ["<code>seed</code>", "0", "7"] in rows
    assert not any(row[0] in ("<code>epochs</code>", "<code>output_dir</code>") for row in rows if row)
    figure = next(part for part in html.split("<figure>") if part.startswith("<figcaption>train/loss<"))
    assert len(re.findall(r'<g class="curve c[01]"', figure)) == 2
    assert "val/loss" in html


def test_metrics_suffice_for_a_page(tmp_path: Path) -> None:
    train(Classifier(), tmp_path, writers=["csv"], report=False, log_every=1)
    assert main(["report", str(tmp_path)]) == 0
    assert "train/loss" in (tmp_path / "report.html").read_text()


def test_a_page_that_cannot_be_written_is_named_as_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(Classifier(), tmp_path / "run", writers=["csv"], report=False, log_every=1)
    for output in (tmp_path, Path("/proc/x.html")):
        assert main(["report", str(tmp_path / "run"), "--output", str(output)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"trainstack: {output} cannot be written: ")
        assert said.count("\n") == 1
    assert main(["report", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"] == str(tmp_path / "run" / "report.html")


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_other_than_a_run_is_refused_in_one_line(
    there: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if there:
        (tmp_path / "x").mkdir()
    assert main(["report", str(tmp_path / "x")]) == 2
    said = capsys.readouterr().err
    assert "Name the output_dir of a run." in said
    assert said.count("\n") == 1


def test_a_run_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    assert main(["report", str(tmp_path), f"{tmp_path}/."]) == 2
