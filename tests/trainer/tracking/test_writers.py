"""Writers of CSV, TensorBoard and standard output, and groups of writers."""

from __future__ import annotations

import csv
import importlib.util
import io
import logging
import math
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainstack as ts
from tests.helpers.modules import Classifier, train
from tests.helpers.scripts import run_python
from trainstack.errors import ConfigurationError, MissingExtraError
from trainstack.trainer.tracking.history import Record
from trainstack.trainer.tracking.writers import (
    CsvWriter,
    RunInfo,
    StdoutWriter,
    TensorBoardWriter,
    Writer,
    WriterGroup,
    build_writers,
)

HEADER = "step,epoch,name,value\n"
needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)


def loss(step: int, value: float = 0.5) -> Record:
    return Record("loss", value, step, 1)


def write(
    writer: Writer,
    records: Sequence[Record],
    *,
    resume_step: int | None = None,
    before: Sequence[Record] = (),
    folder: Path = Path("elsewhere"),
) -> None:
    writer.open(RunInfo(resume_step=resume_step, records=lambda: before, log_dir=folder))
    writer.write(records)
    writer.close()


def read(path: Path) -> list[Record]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [Record(r["name"], float(r["value"]), int(r["step"]), int(r["epoch"])) for r in rows]


# --- CSV


@given(st.lists(st.tuples(st.text(st.characters(exclude_categories=("C", "Zl", "Zp")), min_size=1), st.floats())))
def test_csv_keeps_every_name_and_every_bit(rows: list[tuple[str, float]]) -> None:
    import tempfile

    records = [Record(name, value, step, 2) for step, (name, value) in enumerate(rows)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.csv"
        write(CsvWriter(path), records)
        assert repr(read(path)) == repr(records)
        back = [struct.pack("d", r.value) for r in read(path) if r.value == r.value]
        assert back == [struct.pack("d", r.value) for r in records if r.value == r.value]


def test_csv_rows_are_on_disk_after_each_write(tmp_path: Path) -> None:
    writer = CsvWriter(tmp_path / "deep" / "metrics.csv")
    writer.open(RunInfo(resume_step=None))
    writer.write([loss(1, 0.1), Record('a "b", c', float("inf"), 1, 1)])
    expected = HEADER + "1,1,loss,0.1\n" + '1,1,"a ""b"", c",inf\n'
    assert (tmp_path / "deep" / "metrics.csv").read_text() == expected
    writer.close()


@pytest.mark.processes
@pytest.mark.spec("F309")
def test_csv_of_a_killed_process_equals_an_unbroken_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    code = (
        "import os\n"
        "from trainstack.trainer.tracking.history import Record\n"
        "from trainstack.trainer.tracking.writers import CsvWriter, RunInfo\n"
        f"writer = CsvWriter({str(path)!r})\n"
        "writer.open(RunInfo(resume_step=None))\n"
        "for step in range(1, 8): writer.write([Record('loss', 1 / step, step, 0)])\n"
        "os._exit(1)\n"
    )
    assert run_python("-c", code).returncode == 1
    with path.open("a") as file:
        file.write("8,0,loss,0.1")  # the row that the crash tore
    resumed = CsvWriter(path)
    before = [Record("loss", 1 / step, step, 0) for step in range(1, 6)]
    write(resumed, [Record("loss", 1 / step, step, 0) for step in range(6, 11)], resume_step=5, before=before)
    unbroken = tmp_path / "unbroken.csv"
    write(CsvWriter(unbroken), [Record("loss", 1 / step, step, 0) for step in range(1, 11)])
    assert path.read_bytes() == unbroken.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["metrics.csv", "unbroken.csv"]


@pytest.mark.spec("F309")
def test_csv_resume_keeps_the_bytes_up_to_the_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    text = HEADER + "1,0,a,0.5\n2,0,a,1e-07\n2,0,b,nan\n"
    path.write_text(text + "3,0,a,1.0\n4,0,a,2.0\n")
    inode = path.stat().st_ino
    before = [Record("a", 0.5, 1, 0), Record("a", 1e-07, 2, 0), Record("b", math.nan, 2, 0)]
    write(CsvWriter(path), [], resume_step=2, before=before)
    assert path.read_text() == text
    assert path.stat().st_ino == inode  # in place


@pytest.mark.parametrize("torn", ["3", "3,0,a", "3,0,a,1.0", "1,0,a,0.25", "\x00\x00"])
def test_csv_resume_cuts_off_a_torn_last_row(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(HEADER + "1,0,a,0.5\n" + torn)
    write(CsvWriter(path), [Record("a", 2.0, 4, 0)], resume_step=3, before=[Record("a", 0.5, 1, 0)])
    assert path.read_text() == HEADER + "1,0,a,0.5\n4,0,a,2.0\n"


@pytest.mark.parametrize("inside", [True, False])
def test_csv_resume_replaces_files_of_the_run_only(tmp_path: Path, inside: bool) -> None:
    path = tmp_path / "metrics.csv"
    text = HEADER + "1,0,a,0.5\n900,0,x,1.0\nan edited line\n"
    path.write_text(text)
    before = [Record("a", 0.5, 1, 0), Record("a", 0.5, 2, 0)]
    write(CsvWriter(path), [], resume_step=2, before=before, folder=tmp_path if inside else tmp_path / "run")
    assert path.read_text() == HEADER + "1,0,a,0.5\n2,0,a,0.5\n"
    renamed = tmp_path / "metrics.1.csv"
    assert not renamed.exists() if inside else renamed.read_text() == text


@pytest.mark.parametrize("content", [None, "", "step,ep"])
def test_csv_resume_without_rows_starts_a_file(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "metrics.csv"
    if content is not None:
        path.write_text(content)
    write(CsvWriter(path), [loss(6)], resume_step=5)
    assert path.read_text() == HEADER + "6,1,loss,0.5\n"


@pytest.mark.spec("F309")
def test_csv_never_destroys_the_rows_of_an_earlier_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    for run in range(4):
        write(CsvWriter(path), [loss(run)])
    assert [read(tmp_path / name)[0].step for name in ("metrics.1.csv", "metrics.2.csv", "metrics.3.csv")] == [
        0,
        1,
        2,
    ]
    assert read(path) == [loss(3)]


@pytest.mark.parametrize("resume_step", [None, 0, 5])
def test_csv_renames_a_foreign_file(tmp_path: Path, resume_step: int | None) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("my,precious,results\n9,9,9")
    write(CsvWriter(path), [loss(6)], resume_step=resume_step)
    assert (tmp_path / "metrics.1.csv").read_text() == "my,precious,results\n9,9,9"
    assert read(path) == [loss(6)]


def test_errors_of_csv_name_the_wrong_use(tmp_path: Path) -> None:
    writer = CsvWriter(tmp_path / "metrics.csv")
    with pytest.raises(ConfigurationError, match=r"not open; call open\(\) first"):
        writer.write([loss(1)])
    writer.open(RunInfo(resume_step=None))
    with pytest.raises(ConfigurationError, match="open already"):
        writer.open(RunInfo(resume_step=None))
    writer.close()
    with pytest.raises(ConfigurationError, match="Remove or rename it, or write another output_dir"):
        CsvWriter(tmp_path).open(RunInfo(resume_step=None))


# --- TensorBoard


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@needs_tensorboard
@pytest.mark.spec("F117")
def test_tensorboard_deletes_no_foreign_file(tmp_path: Path) -> None:
    precious = tmp_path / "precious" / "results.csv"
    precious.parent.mkdir()
    precious.write_text("mine")
    before: dict[Path, bytes] = {}
    for resume_step in (None, 1, None, 3):
        write(TensorBoardWriter(tmp_path), [loss(2)], resume_step=resume_step, before=[loss(9)] if resume_step else [])
        now = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        assert {path: now.get(path) for path in before} == before
        before = now
    assert precious.read_text() == "mine"


@needs_tensorboard
@pytest.mark.spec("F117")
def test_tensorboard_resume_cuts_off_the_steps_that_are_run_again(tmp_path: Path) -> None:
    first = [loss(step, float(step)) for step in range(1, 8)]
    write(TensorBoardWriter(tmp_path), first)
    again = [loss(step, 10.0 * step) for step in range(6, 10)]
    write(TensorBoardWriter(tmp_path), again, resume_step=5, before=first[:5])
    expected = [(step, float(step)) for step in range(1, 6)] + [(step, 10.0 * step) for step in range(6, 10)]
    assert scalars(tmp_path) == {"loss": expected}


@needs_tensorboard
def test_tensorboard_keeps_two_fresh_runs_apart_and_resumes_the_newest(tmp_path: Path) -> None:
    write(TensorBoardWriter(tmp_path), [loss(1, 1.0)])
    write(TensorBoardWriter(tmp_path), [loss(1, 2.0)])
    write(TensorBoardWriter(tmp_path), [loss(2, 3.0)], resume_step=1, before=[loss(1, 2.0)])
    assert scalars(tmp_path) == {"loss": [(1, 1.0)]}
    assert scalars(tmp_path / "run-1") == {"loss": [(1, 2.0), (2, 3.0)]}


@needs_tensorboard
@pytest.mark.spec("F117")
def test_tensorboard_points_are_on_disk_after_each_write(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path)
    writer.open(RunInfo(resume_step=None))
    writer.write([loss(1)])
    assert scalars(tmp_path) == {"loss": [(1, 0.5)]}
    with pytest.raises(ConfigurationError, match="is open"):
        writer.open(RunInfo(resume_step=None))
    writer.close()
    with pytest.raises(ConfigurationError, match="not open"):
        writer.write([loss(2)])


def test_missing_tensorboard_is_an_error_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'trainstack\[tensorboard\]'"):
        TensorBoardWriter(tmp_path)


@pytest.mark.processes
def test_neither_tensorboard_nor_rich_is_imported_until_used() -> None:
    code = (
        "import sys, trainstack.trainer.tracking.writers, trainstack.trainer.tracking.progress\n"
        "sys.exit(bool({'tensorboard', 'rich', 'torch.utils.tensorboard'} & set(sys.modules)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


# --- standard output


@pytest.mark.spec("PA-39")
def test_stdout_prints_summaries_only(capsys: pytest.CaptureFixture[str]) -> None:
    writer = StdoutWriter()
    writer.open(RunInfo(resume_step=None))
    writer.write([loss(1)])
    writer.text("epoch 1: loss 0.5")
    writer.close()
    assert capsys.readouterr().out == "epoch 1: loss 0.5\n"


def test_stdout_ignores_a_closed_stream_and_escapes_characters() -> None:
    closed = io.StringIO()
    closed.close()
    StdoutWriter(closed).text("not printed")
    raw = io.BytesIO()
    ascii_only = io.TextIOWrapper(raw, encoding="ascii", newline="\n")
    StdoutWriter(ascii_only).text("ε = 3")
    assert raw.getvalue() == b"\\u03b5 = 3\n"


def test_the_log_has_the_metrics_of_each_step_as_fields(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "trainstack"):
        saving = ts.DefaultCheckpointerArguments(checkpoint=False)
        trainer = train(Classifier(validate=True), tmp_path, writers=["logging"], log_every=3, checkpointer_args=saving)
    found: list[Any] = [one for one in caplog.records if hasattr(one, "metrics")]

    for name, column in trainer.history.to_dict().items():
        values = [(one.step, one.epoch, one.metrics[name]) for one in found if name in one.metrics]
        assert values == list(zip(column["step"], column["epoch"], column["value"], strict=True))
    assert {one.name for one in found} == {"trainstack.metrics"}
    assert any(message.startswith("epoch=1/") for message in caplog.messages)
    assert list(tmp_path.iterdir()) == []


# --- building and grouping


@needs_tensorboard
@pytest.mark.spec("HZ-31")
def test_writers_are_built_from_names(tmp_path: Path) -> None:
    own = CsvWriter(tmp_path / "own.csv")
    stdout, table, board, mine = build_writers(["stdout", "csv", "tensorboard", own], tmp_path)
    assert isinstance(stdout, StdoutWriter)
    assert isinstance(table, CsvWriter)
    assert table.path == tmp_path / "metrics.csv"
    assert isinstance(board, TensorBoardWriter)
    assert board.directory == tmp_path / "tensorboard"
    assert mine is own
    assert list(tmp_path.iterdir()) == []  # building writes nothing


@pytest.mark.parametrize(
    ("given_writers", "message"),
    [
        (["tensorbord"], r"'tensorbord'. Did you mean 'tensorboard'\? Known: 'stdout', 'logging', 'csv', 'jsonl', "),
        (["CSV"], r"Did you mean 'csv'\?"),
        (["aml"], "'aml' .* not offered. Write 'mlflow'"),
        ("csv", r"one string, 'csv'; write \['csv'\]"),
        (["csv", "csv"], "'csv' is given twice"),
        ([CsvWriter], "not a writer. Give an instance"),
        ([3], "3 is a int, not a writer"),
    ],
)
def test_a_wrong_list_of_writers_is_refused_with_a_correction(tmp_path: Path, given_writers: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build_writers(given_writers, tmp_path)


class Spy(Writer):
    """Records its calls and fails in the method `fails_in`."""

    def __init__(self, fails_in: str = "") -> None:
        self.calls: list[str] = []
        self.fails_in = fails_in

    def _called(self, method: str) -> None:
        self.calls.append(method)
        if method == self.fails_in:
            raise OSError(f"disk full in {method}")

    def open(self, run: RunInfo) -> None:
        self._called("open")

    def write(self, records: Sequence[Record]) -> None:
        self._called("write")

    def text(self, line: str) -> None:
        self._called("text")

    def close(self) -> None:
        self._called("close")


class FailingSpy(Spy):
    pass


@pytest.mark.parametrize("method", ["write", "text", "close"])
def test_a_writer_that_fails_is_removed_and_the_others_continue(method: str) -> None:
    said: list[str] = []
    before, failing, after = Spy(), FailingSpy(fails_in=method), Spy()
    group = WriterGroup([before, failing, after], said.append)
    group.open(RunInfo())
    for _ in range(2):
        group.write([loss(1)])
        group.text("line")
    group.close()
    assert before.calls == after.calls == ["open", "write", "text", "write", "text", "close"]
    assert failing.calls.count(method) == (2 if method == "close" else 1)  # a writer that fails is closed once more
    assert failing.calls[-1] == "close"
    assert len(said) == 1
    assert said[0].startswith(
        f"FailingSpy.{method}() failed: OSError: disk full in {method}. This writer gets nothing more"
    )


def test_an_error_in_open_closes_the_other_writers() -> None:
    before, after = Spy(), Spy()
    group = WriterGroup([before, FailingSpy(fails_in="open"), after], pytest.fail)
    with pytest.raises(OSError, match="disk full in open") as caught:
        group.open(RunInfo())
    assert caught.value.__notes__ == ["FailingSpy.open() raised this"]  # type: ignore[attr-defined]
    assert before.calls == ["open", "close"]
    assert after.calls == []


def test_a_forked_process_writes_nothing(tmp_path: Path) -> None:
    spy = Spy()
    group = WriterGroup([spy], pytest.fail)
    group.open(RunInfo())
    group._process += 1  # as in a forked process
    group.write([loss(1)])
    group.close()
    assert spy.calls == ["open"]


def test_close_is_idempotent_and_needs_no_open(tmp_path: Path) -> None:
    writers: list[Writer] = [StdoutWriter(), CsvWriter(tmp_path / "a.csv")]
    if importlib.util.find_spec("tensorboard"):
        writers.append(TensorBoardWriter(tmp_path / "b"))
    group = WriterGroup(writers, pytest.fail)
    group.close()
    group.open(RunInfo(resume_step=None))
    group.write([])
    group.close()
    group.close()
