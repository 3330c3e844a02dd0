"""The line of an epoch in logs and on terminals."""

from __future__ import annotations

import os
import pty
from pathlib import Path

from tests.helpers.modules import Classifier, numbers, train
from trainstack.trainer.tracking.epoch_lines import EpochLine, EpochTable
from trainstack.trainer.tracking.writers.console import StdoutWriter

METRICS = {
    "train/loss": 0.25,
    "val/loss": 0.39764,
    "cola/val/acc": 0.4,
    "lr/body": 1e-5,
    "memory": 1234567.0,
    "mnli/val/acc": 0.3976,
    "rte/val/acc": float("nan"),
    "stsb/val/pearson": -0.05,
}


def line(epoch: int, best: str | None = None, **changes: float) -> EpochLine:
    values = {**METRICS, **changes}
    return EpochLine(
        epoch=f"{epoch}/12", step=63 * epoch, values=values, seconds=1.25, best=best, elsewhere="metrics.csv"
    )


def test_a_log_line_has_keys_and_values() -> None:
    assert line(3) == (
        "epoch=3/12 step=189 train/loss=0.25 val/loss=0.3976 cola/val/acc=0.4 lr/body=1e-05 memory=1.235e+06 "
        "mnli/val/acc=0.3976 rte/val/acc=nan stsb/val/pearson=-0.05 seconds=1.2"
    )


def test_a_narrow_terminal_gets_fewer_columns_and_their_number() -> None:
    table = EpochTable()
    shown = [*table.rows(line(1), 80), *table.rows(line(12, best="val/loss"), 80)]
    assert shown == [
        "epoch    step train/loss    val/loss  cola/val/acc      time  +5 in metrics.csv",
        " 1/12      63     0.2500      0.3976        0.4000     1.2 s",
        "12/12     756     0.2500      0.3976*       0.4000     1.2 s",
    ]


def test_a_wide_terminal_gets_aligned_columns() -> None:
    header, row = EpochTable().rows(line(1, best="val/loss"), 120)
    names = "epoch    step train/loss    val/loss  cola/val/acc     lr/body      memory  mnli/val/acc      time"
    assert header == f"{names}  +2 in metrics.csv"
    assert row == " 1/12      63     0.2500      0.3976*       0.4000   1.000e-05   1.235e+06        0.3976     1.2 s"


def test_a_very_narrow_terminal_gets_the_losses_only() -> None:
    assert EpochTable().rows(line(1, best="val/loss"), 60) == [
        "epoch    step train/loss    val/loss      time +6",
        " 1/12      63     0.2500      0.3976*    1.2 s",
    ]
    assert EpochTable().rows(line(1, best="val/loss"), 40) == [
        "epoch train/loss    val/loss      time",
        " 1/12     0.2500      0.3976*    1.2 s",
    ]


def test_rows_fit_every_width_and_columns_are_aligned() -> None:
    for width in range(30, 200):
        table = EpochTable()
        rows = [*table.rows(line(1), width), *table.rows(line(2, "val/loss"), width)]
        assert max(map(len, rows)) <= width
        assert "train/loss" in rows[0]
        ends = [rows[0].find("time") + 4, *(row.find(" s") + 2 for row in rows[1:])]
        assert len(set(ends)) == 1


def test_the_header_is_repeated_for_a_new_metric() -> None:
    table = EpochTable()
    first = EpochLine(epoch="1/3", step=1, values={"train/loss": 1.0}, seconds=0, best=None, elsewhere="")
    second = EpochLine(
        epoch="2/3", step=2, values={"train/loss": 1.0, "val/loss": 2.0}, seconds=0, best=None, elsewhere=""
    )
    assert [len(table.rows(one, 80)) for one in (first, first, second, second)] == [2, 1, 2, 1]
    assert table.rows(first, 80) == ["  1/3       1     1.0000                 0.0 s"]
    assert len(table.rows(first, 100)) == 2


def test_the_header_is_repeated_every_40_rows() -> None:
    table = EpochTable()
    headers = [epoch for epoch in range(100) if len(table.rows(line(epoch), 80)) == 2]
    assert headers == [0, 40, 80]


def test_the_writer_aligns_rows_on_a_terminal_only(tmp_path: Path) -> None:
    ours, its = pty.openpty()
    with os.fdopen(its, "w") as terminal, (tmp_path / "log").open("w") as log:
        for stream in (terminal, log):
            StdoutWriter(stream).text(line(1))
            StdoutWriter(stream).text("a remark")
        text = ""
        while not text.endswith("a remark\r\n"):  # a terminal returns its output in parts
            text += os.read(ours, 10_000).decode()
    shown = text.splitlines()
    os.close(ours)
    assert shown[0].startswith("epoch    step train/loss")
    assert shown[2] == "a remark"
    assert (tmp_path / "log").read_text() == f"{line(1)}\na remark\n"


def test_the_best_monitored_value_is_marked_across_a_resume(tmp_path: Path) -> None:
    import trainstack as ts

    class Keeps(ts.Writer):
        def write(self, records: object) -> None: ...

        def text(self, line: str) -> None:
            if isinstance(line, EpochLine):
                best.append(line.best)

    class Scores(Classifier):
        def on_end_val_epoch(self, global_step: int, *outputs: object, key: str = "default") -> None:
            self.log("score", float([3, 5, 4, 5, 6][global_step // 2 - 1]))

    best: list[str | None] = []
    saving = ts.DefaultCheckpointerArguments()
    settings = {"monitor": "score", "monitor_mode": "max", "writers": [Keeps()], "checkpointer_args": saving}
    train(Scores(numbers(16), validate=True), tmp_path, epochs=3, **settings)
    train(Scores(numbers(16), validate=True), tmp_path, epochs=5, resume=True, **settings)
    assert best == ["score", "score", None, None, "score"]
