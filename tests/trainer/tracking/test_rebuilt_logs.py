"""The log files of a resumed run equal those of an unbroken run, after any damage in between."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import trainstack as ts
from tests.helpers.modules import Classifier, numbers
from trainstack.trainer.tracking.history import Record, RunHistory
from trainstack.trainer.tracking.writers import CsvWriter, JsonLinesWriter, RunInfo, TensorBoardWriter, Writer
from trainstack.trainer.tracking.writers import tensorboard as event_writer
from trainstack.trainer.tracking.writers.group import WriterGroup

RECORDS = [
    Record("train/loss", 0.1 * step, step, step // 3) if turn else Record('val/a,"b"', float("nan"), step, step // 3)
    for step in range(1, 6)
    for turn in range(2)
]
KEPT = 6
"""Records that the checkpoint has."""


def run_info(folder: Path, kept: int | None) -> RunInfo:
    return RunInfo(
        resume_step=None if kept is None else 3, records=lambda: RECORDS[: kept or 0], log_dir=folder, config={}
    )


def write(writer: Writer, info: RunInfo, records: Sequence[Record]) -> None:
    writer.open(info)
    for record in records:
        writer.write([record])
    writer.sync()
    writer.close()


def damaged(data: bytes) -> Iterator[bytes | None]:
    yield from (data[:length] for length in range(len(data)))
    yield from (data + rest for rest in (b"x", b"\n", b"9,9,later,1.0\n", bytes(64)))
    yield None


@pytest.mark.parametrize("kind", [CsvWriter, JsonLinesWriter])
def test_rows_equal_those_of_an_unbroken_run_after_any_loss(kind: type[CsvWriter], tmp_path: Path) -> None:
    file, whole = tmp_path / "metrics", tmp_path / "whole"
    write(kind(whole), run_info(tmp_path, None), RECORDS)
    for left in damaged(whole.read_bytes()):
        file.unlink(missing_ok=True)
        if left is not None:
            file.write_bytes(left)
        write(kind(file), run_info(tmp_path, KEPT), RECORDS[KEPT:])
        assert file.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) in (["metrics", "whole"], ["metrics", "metrics.1", "whole"])


def test_only_lost_rows_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "metrics.csv"
    write(CsvWriter(file), run_info(tmp_path, None), RECORDS)
    write(CsvWriter(file), run_info(tmp_path, KEPT), RECORDS[KEPT:])
    assert not caplog.records
    file.write_bytes(file.read_bytes()[:40])
    write(CsvWriter(file), run_info(tmp_path, KEPT), RECORDS[KEPT:])
    file.unlink()
    write(CsvWriter(file), run_info(tmp_path, KEPT), RECORDS[KEPT:])

    assert ["lacked rows" in r.message for r in caplog.records] == [True, False]
    assert "was gone: it was rewritten from the history" in caplog.records[1].message


def points(folder: Path) -> list[tuple[str, int, float]]:
    """The content of TensorBoard, by its own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return sorted((tag, one.step, one.value) for tag in found.Tags()["scalars"] for one in found.Scalars(tag))


FINITE = [record for record in RECORDS if record.name == "train/loss"]


def finite_info(folder: Path) -> RunInfo:
    return RunInfo(resume_step=3, records=lambda: FINITE[:3], log_dir=folder)


def test_points_are_present_once_after_any_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(TensorBoardWriter(tmp_path / "whole"), run_info(tmp_path, None), FINITE)
    (source,) = (tmp_path / "whole").iterdir()
    data, expected = source.read_bytes(), points(tmp_path / "whole")
    for place, left in enumerate(damaged(data)):
        folder = tmp_path / str(place)
        folder.mkdir()
        if left is not None:
            (folder / source.name).write_bytes(left)
        write(TensorBoardWriter(folder), finite_info(tmp_path), FINITE[3:])
        if place % 8 == 0 or left is None or len(left) > len(data):
            assert points(folder) == expected, left
        shutil.rmtree(folder)
    assert "rewritten from the history" in caplog.text


def test_points_without_a_number_do_not_count_as_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(TensorBoardWriter(tmp_path / "tb"), run_info(tmp_path, None), RECORDS)
    write(TensorBoardWriter(tmp_path / "tb"), run_info(tmp_path, KEPT), RECORDS[KEPT:])

    assert not caplog.records


def test_a_clock_that_was_set_back_keeps_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tb"
    write(TensorBoardWriter(folder), run_info(tmp_path, None), FINITE)
    expected = points(folder)
    monkeypatch.setattr(event_writer.time, "time_ns", lambda: 10**18)
    write(TensorBoardWriter(folder), finite_info(tmp_path), FINITE[3:4])
    write(TensorBoardWriter(folder), finite_info(tmp_path), FINITE[3:])

    assert points(folder) == expected
    assert len(event_writer.event_files(folder)) == 2


def test_foreign_event_files_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "tb"
    folder.mkdir()
    theirs = folder / "events.out.tfevents.1700000000.host.12.0"
    theirs.write_bytes(b"theirs")
    write(TensorBoardWriter(folder), finite_info(tmp_path), FINITE[3:])

    assert theirs.read_bytes() == b"theirs"


def test_the_history_keeps_the_order_of_arrival() -> None:
    history = RunHistory()
    for record in RECORDS:
        history.update_metric(record.name, record.value, step=record.step, epoch=record.epoch)
    assert history.flushed_count == 0
    history.flush()
    again = RunHistory()
    again.update_state(history.get_state())

    assert [record[2:] + record[:1] for record in again.all_records()] == [r[2:] + r[:1] for r in RECORDS]
    assert again.flushed_count == history.flushed_count == len(RECORDS)


def train(folder: Path, **changes: Any) -> ts.Trainer:
    given = {"train_batch_size": 8, "log_every": 1, "epochs": 3, "progress": "none", "output_dir": folder}
    given["writers"] = ["csv", "jsonl", "tensorboard"]
    trainer = ts.Trainer(Classifier(numbers(16), validate=True), ts.TrainerArguments(**{**given, **changes}))
    trainer.train()
    return trainer


def test_a_resumed_run_has_the_files_of_an_unbroken_run(tmp_path: Path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "run"
    train(whole)
    train(folder, epochs=1)
    for name in ("metrics.csv", "metrics.jsonl"):
        (folder / name).write_bytes(b"")
    shutil.rmtree(folder / "tensorboard")
    train(folder, epochs=2, resume=True)
    shutil.copy(folder / "metrics.csv", folder / "metrics.jsonl")
    train(folder, resume=True)

    for name in ("metrics.csv", "metrics.jsonl"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    assert points(folder / "tensorboard") == points(whole / "tensorboard")


def test_records_of_an_earlier_run_are_not_written(tmp_path: Path) -> None:
    def fold(folder: Path, *, kills: bool) -> bytes:
        history = RunHistory("fold/")
        history.update_metric("before", 1.0)
        history.flush()
        for epochs in (1, 2) if kills else (2,):
            args = ts.TrainerArguments(
                train_batch_size=8, epochs=epochs, log_every=1, progress="none", output_dir=folder, resume="auto"
            )
            ts.Trainer(Classifier(numbers(16)), args, run_history=history).train()
        return (folder / "metrics.csv").read_bytes()

    assert fold(tmp_path / "a", kills=True) == fold(tmp_path / "b", kills=False)


def test_logs_are_synced_before_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for kind in (CsvWriter, JsonLinesWriter, TensorBoardWriter):
        monkeypatch.setattr(kind, "sync", lambda self: calls.append(type(self).__name__))
    save = ts.DefaultCheckpointer.save
    monkeypatch.setattr(ts.DefaultCheckpointer, "save", lambda *args: (calls.append("save"), save(*args))[1])
    train(tmp_path / "run", epochs=1)

    assert calls[:4] == ["CsvWriter", "JsonLinesWriter", "TensorBoardWriter", "save"]


def test_a_lost_lease_raises_its_error_in_writers(tmp_path: Path) -> None:
    class Lost(Exception):
        pass

    def check() -> None:
        raise Lost

    said: list[str] = []
    group = WriterGroup([CsvWriter(tmp_path / "metrics.csv")], said.append, check)
    group.open(run_info(tmp_path, None))
    for call in (lambda: group.write(RECORDS), lambda: group.text("a line")):
        with pytest.raises(Lost):
            call()
    group.close()

    assert (tmp_path / "metrics.csv").read_bytes() == CsvWriter.format.header
    assert not said


def test_a_run_that_lost_its_lease_writes_no_report(tmp_path: Path) -> None:
    args = ts.TrainerArguments(train_batch_size=8, log_every=1, progress="none", output_dir=tmp_path, epochs=3)
    trainer = ts.Trainer(Classifier(numbers(16)), args)
    seen: list[bytes] = []

    def refuse() -> None:
        raise ts.LeaseError("another process owns the run")

    @trainer.on(ts.Event.EPOCH_END)
    def lose(_: ts.Trainer, epoch: int) -> None:
        lease = trainer._context.lease
        assert lease is not None
        lease.check = refuse  # type: ignore[method-assign]
        seen.append((tmp_path / "run.json").read_bytes() + (tmp_path / "metrics.csv").read_bytes())

    with pytest.raises(ts.errors.CheckpointError, match="another process owns"):
        trainer.train()
    assert (tmp_path / "run.json").read_bytes() + (tmp_path / "metrics.csv").read_bytes() == seen[0]
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "+1", "-loss", "@SUM(1)"])
def test_a_name_that_a_spreadsheet_would_execute_is_refused(name: str) -> None:
    with pytest.raises(ts.ConfigurationError, match="a spreadsheet would execute it"):
        RunHistory().update_metric(name, 1.0)
    with pytest.raises(ts.ConfigurationError, match="a spreadsheet would execute it"):
        RunHistory(name).update_metric("loss", 1.0)
