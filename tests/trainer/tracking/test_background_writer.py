"""A slow writer runs in a separate thread: training waits for it only at the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import trainstack as ts
from tests.helpers.modules import Classifier, train
from tests.helpers.patience import patience
from trainstack.trainer.tracking.history import Record
from trainstack.trainer.tracking.writers.base import RunInfo, Writer
from trainstack.trainer.tracking.writers.group import BackgroundWriter

ONE = [Record("loss", 0.5, 1, 0)]


class Slow(Writer):
    """Writes nothing before `gate` is open; fails at record `fails_at`."""

    slow = True

    def __init__(self, fails_at: int | None = None) -> None:
        self.gate = threading.Event()
        self.fails_at = fails_at
        self.steps: list[int] = []
        self.threads: set[threading.Thread] = set()
        self.closed = 0

    def write(self, records: Sequence[Record]) -> None:
        self.threads.add(threading.current_thread())
        assert self.gate.wait(20)
        for record in records:
            if record.step == self.fails_at:
                raise ConnectionError("no network")
            self.steps.append(record.step)

    def close(self) -> None:
        self.closed += 1


def test_calls_return_immediately_and_run_in_order_before_close() -> None:
    slow = Slow()
    writer = BackgroundWriter(slow)
    writer.open(RunInfo())
    for step in range(100):
        writer.write([Record("loss", 0.5, step, 0)])
    assert slow.steps == []
    slow.gate.set()
    writer.close()
    assert slow.steps == list(range(100))
    assert threading.current_thread() not in slow.threads
    assert len(slow.threads) == slow.closed == 1
    writer.close()
    assert slow.closed == 1


def test_the_next_call_raises_an_error_of_the_thread() -> None:
    slow = Slow(fails_at=1)
    slow.gate.set()
    writer = BackgroundWriter(slow)
    writer.open(RunInfo())
    writer.write(ONE)
    deadline = time.monotonic() + patience(20)
    while writer._done == 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    with pytest.raises(ConnectionError, match="no network"):
        writer.write(ONE)
    with pytest.raises(ConnectionError, match="no network"):
        writer.close()
    assert slow.closed == 1


def write_four_times(writer: Writer) -> None:
    for _ in range(4):
        writer.write(ONE)


def test_a_blocked_writer_raises_a_timeout() -> None:
    slow = Slow()
    full = BackgroundWriter(slow, most_waiting=2, patience_s=0.05)
    full.open(RunInfo())
    with pytest.raises(TimeoutError, match=r"has not moved for 0\.05 s; 2 calls are waiting"):
        write_four_times(full)
    slow.gate.set()

    stuck = Slow()
    closing = BackgroundWriter(stuck, patience_s=0.05)
    closing.open(RunInfo())
    closing.write(ONE)
    with pytest.raises(TimeoutError, match="has not moved"):
        closing.close()
    stuck.gate.set()


def test_training_continues_without_a_slow_writer_that_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow(fails_at=2)
    slow.gate.set()
    trainer = train(Classifier(), tmp_path, log_every=1, writers=[slow, "csv"])
    assert set(slow.steps) == {1}
    assert slow.closed == 1
    assert trainer.state.global_step == 6
    assert ts.read_history(tmp_path).to_dict() == trainer.history.to_dict()
    said = [r.message for r in caplog.records if "no network" in r.message]
    assert len(said) == 1
    assert "Slow" in said[0]
    assert "training continues" in said[0]
