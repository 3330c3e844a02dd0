"""Rows as JSON lines, written and read."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

import trainstack as ts
from trainstack.trainer.tracking.history import Record
from trainstack.trainer.tracking.writers import CsvWriter, JsonLinesWriter, RunInfo, Writer

RECORDS = [
    Record("train/loss", 0.1, 1, 0),
    Record('a "b", é', math.inf, 1, 0),
    Record("train/loss", math.nan, 2, 1),
    Record("train/loss", -math.inf, 3, 1),
]


def put(writer: Writer, records: list[Record], resume_step: int | None = None, before: Sequence[Record] = ()) -> None:
    writer.open(RunInfo(resume_step=resume_step, records=lambda: before))
    writer.write(records)
    writer.close()


def test_a_json_line_has_name_value_step_and_epoch(tmp_path: Path) -> None:
    put(JsonLinesWriter(tmp_path / "metrics.jsonl"), RECORDS)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["name"], line["step"], line["epoch"]) for line in lines] == [(r[0], r[2], r[3]) for r in RECORDS]
    assert [line["value"] for line in lines] == [0.1, "inf", "nan", "-inf"]


def test_json_lines_are_truncated_to_the_checkpoint_on_resume(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    put(JsonLinesWriter(file), RECORDS)
    whole = file.read_bytes().splitlines(keepends=True)
    with file.open("ab") as end:
        end.write(whole[0][:20])
    put(JsonLinesWriter(file), [Record("train/loss", 4.0, 3, 1)], resume_step=2, before=RECORDS[:3])
    now = file.read_bytes().splitlines(keepends=True)
    assert now[:3] == whole[:3]
    assert [json.loads(line)["value"] for line in now[3:]] == [4.0]


@pytest.mark.spec("HZ-36")
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_written_rows_are_read_back(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"metrics.{suffix}"
    put(CsvWriter(file) if suffix == "csv" else JsonLinesWriter(file), RECORDS)
    with file.open("ab") as end:
        end.write(b"written in by hand\n" + b'{"name": "tor')
    for place in (file, tmp_path):
        history = ts.read_history(place)
        assert history.get_metric_names() == {"train/loss", 'a "b", é'}
        assert str(history.records("train/loss")) == str([r for r in RECORDS if r.name == "train/loss"])
        assert history.get_latest_metric('a "b", é') == math.inf
        assert history.flush() == []


def test_errors_in_reading_name_the_fault(tmp_path: Path) -> None:
    with pytest.raises(ts.ConfigurationError, match=r"has neither metrics\.csv nor metrics\.jsonl"):
        ts.read_history(tmp_path)
    with pytest.raises(ts.ConfigurationError, match="there is no file"):
        ts.read_history(tmp_path / "metrics.csv")
    for name in ("metrics.csv", "metrics.txt"):
        (tmp_path / name).write_text("time,loss\n")
        with pytest.raises(ts.ConfigurationError, match="was not written by the writer 'csv' or 'jsonl'"):
            ts.read_history(tmp_path / name)
