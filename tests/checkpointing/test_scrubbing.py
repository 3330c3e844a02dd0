"""Stored checkpoints are read again: in the background of a run, and by the command."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.checkpointing.sharded_support import write_sharded
from tests.checkpointing.support import flip_bit, make_checkpoint
from tests.helpers.patience import patience
from trainstack.checkpointing import DefaultCheckpointer, DefaultCheckpointerArguments, write_checkpoint
from trainstack.checkpointing.directory import scan
from trainstack.checkpointing.integrity import scrubbing
from trainstack.checkpointing.integrity.scrubbing import (
    BackgroundScrub,
    Pace,
    ScrubResult,
    ScrubStopped,
    by_age,
    read_results,
    scrub_one,
)
from trainstack.cli.main import main
from trainstack.errors import ConfigurationError


def write(folder: Path, *steps: int) -> list[Path]:
    return [write_checkpoint(make_checkpoint(step, step=step), folder, f"checkpoint-{step:09d}") for step in steps]


def nothing(*_: Any) -> None:
    pass


def done(scrub: BackgroundScrub) -> None:
    """Wait for the thread."""
    assert scrub._thread is not None
    scrub._thread.join(patience(20))
    assert not scrub._thread.is_alive()


def test_results_are_kept_in_the_folder_of_the_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 1)
    sharded = write_sharded(make_checkpoint(2, step=2), tmp_path, "checkpoint-000000002", 2)
    assert main(["checkpoints", "scrub", str(tmp_path)]) == 0
    flip_bit(sharded / "model.rank-00002-of-00002.safetensors", -1)
    assert main(["checkpoints", "scrub", str(tmp_path), "--rate", "1GB"]) == 1

    found = read_results(tmp_path)
    assert found["checkpoint-000000001"].problem is None
    assert "model.rank-00002-of-00002.safetensors is damaged" in (found["checkpoint-000000002"].problem or "")
    assert "2 entries, 1 with a problem" in capsys.readouterr().out


def test_a_result_holds_for_the_checkpoint_that_was_read(tmp_path: Path) -> None:
    """A later one of the same name counts from its time; results of deleted ones are removed."""
    first, second = write(tmp_path, 1, 2)
    for path in (first, second):
        scrub_one(path, Pace(), nothing)
    late = datetime.now(timezone.utc).replace(microsecond=0) + timedelta(days=1)
    results = read_results(tmp_path)
    results["checkpoint-000000001"] = ScrubResult(
        verified=late.isoformat(timespec="seconds"), manifest=results["checkpoint-000000001"].manifest, problem=None
    )
    infos = scan(tmp_path).intact
    assert [info.global_step for info in by_age(infos, results)] == [2, 1]

    write_checkpoint(make_checkpoint(5, step=1), tmp_path, "checkpoint-000000001")
    assert scrubbing.read_at(next(i for i in scan(tmp_path).intact if i.global_step == 1), results) < late
    (tmp_path / "checkpoint-000000002").rename(tmp_path / "checkpoint-000000003")
    scrub_one(tmp_path / "checkpoint-000000003", Pace(), nothing)
    assert set(read_results(tmp_path)) == {"checkpoint-000000001", "checkpoint-000000003"}


@pytest.mark.parametrize("content", ["", "[]", '{"format": "trainstack-scrub", "checkpoints": {"a": 1}}', "\0"])
def test_a_damaged_file_of_results_is_an_empty_one(tmp_path: Path, content: str) -> None:
    (path,) = write(tmp_path, 1)
    (tmp_path / ".scrub.json").write_text(content)

    assert read_results(tmp_path) == {}
    scrub_one(path, Pace(), nothing)
    assert set(read_results(tmp_path)) == {"checkpoint-000000001"}


def test_a_checkpoint_deleted_during_a_scrub_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = write(tmp_path, 1)

    def delete(where: Path, pace: Pace) -> str:
        path.rename(tmp_path / ".tmp-away")
        return "it is missing"

    monkeypatch.setattr(scrubbing, "read_back", delete)
    assert scrub_one(path, Pace(), nothing) is None
    assert read_results(tmp_path) == {}


def test_a_read_only_folder_is_still_scrubbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = write(tmp_path, 1)
    said: list[str] = []

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("read-only file system")

    monkeypatch.setattr(scrubbing, "atomic_write", refuse)
    result = scrub_one(path, Pace(), lambda level, line: said.append(line))
    assert result is not None
    assert result.problem is None
    assert "could not be written: read-only file system" in said[0]


def test_the_rate_is_kept_over_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits that are asked for, not the time that passes."""
    waits: list[float] = []

    class Clocked(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return False

    monkeypatch.setattr(scrubbing.time, "monotonic", lambda: 100.0)
    pace = Pace(1000, Clocked())
    for count in (500, 500, 2000, 1):
        pace(count)
    assert waits == pytest.approx([0.0, 0.5, 1.0, 3.0])


def test_all_tensor_bytes_count_and_reading_can_be_stopped(tmp_path: Path) -> None:
    (path,) = write(tmp_path, 1)
    counted: list[int] = []
    scrub_one(path, counted.append, nothing)  # type: ignore[arg-type]
    assert sum(counted) == sum(file.stat().st_size for file in path.glob("*.safetensors"))

    ended = threading.Event()
    ended.set()
    with pytest.raises(ScrubStopped):
        scrub_one(path, Pace(None, ended), nothing)


class TestDuringTraining:
    def saver(self, folder: Path, **changes: Any) -> DefaultCheckpointer:
        changes = {"keep_last": None, "scrub_every_s": 1e-6, **changes}
        return DefaultCheckpointer(DefaultCheckpointerArguments(save_dir=str(folder), **changes))

    def test_a_save_lets_the_oldest_checkpoint_be_read(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(scrubbing, "read_at", _by_results)
        write(tmp_path, 1, 2)
        flip_bit(tmp_path / "checkpoint-000000001" / "state.json", -1)
        checkpointer = self.saver(tmp_path)
        for step in (3, 4, 5):
            checkpointer.save(make_checkpoint(step, step=step), step)
            assert checkpointer._scrub is not None
            done(checkpointer._scrub)
        checkpointer.finish()

        assert set(read_results(tmp_path)) == {f"checkpoint-{step:09d}" for step in (1, 2, 3)}
        assert caplog.text.count("a stored checkpoint is damaged: ") == 1
        assert "state.json is damaged" in caplog.text

    def test_a_checkpoint_that_is_not_due_is_not_read(self, tmp_path: Path) -> None:
        checkpointer = self.saver(tmp_path, scrub_every_s=3600)
        for step in (1, 2):
            checkpointer.save(make_checkpoint(step, step=step), step)
        checkpointer.finish()

        assert not (tmp_path / ".scrub.json").exists()

    def test_by_default_nothing_is_read(self, tmp_path: Path) -> None:
        checkpointer = self.saver(tmp_path, scrub_every_s=None)
        checkpointer.save(make_checkpoint(1, step=1), 1)
        checkpointer.finish()

        assert checkpointer._scrub is None
        assert not (tmp_path / ".scrub.json").exists()

    def test_the_end_of_the_training_does_not_wait_for_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """At one byte a second the reading would take hours."""
        monkeypatch.setattr(scrubbing, "RATE", 1)
        monkeypatch.setattr(scrubbing, "read_at", _by_results)
        checkpointer = self.saver(tmp_path)
        checkpointer.save(make_checkpoint(1, step=1), 1)
        assert checkpointer._scrub is not None
        thread = checkpointer._scrub._thread
        assert thread is not None
        checkpointer.finish()

        assert not thread.is_alive()
        assert read_results(tmp_path) == {}

    def test_a_damaged_one_does_not_count_as_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It was intact when retention read it; the scrubber finds later damage."""
        monkeypatch.setattr(scrubbing, "read_at", _by_results)
        checkpointer = self.saver(tmp_path, keep_last=2, keep_best=0, scrub_every_s=1e-6)
        scrub, checkpointer._scrub = checkpointer._scrub, None
        assert scrub is not None
        for step in (1, 2, 3):
            checkpointer.save(make_checkpoint(step, step=step), step)
        assert [info.global_step for info in scan(tmp_path).intact] == [3, 2]
        flip_bit(tmp_path / "checkpoint-000000003" / "model.safetensors", -1)
        scrub.start(tmp_path, [info for info in scan(tmp_path).intact if info.global_step == 3])
        done(scrub)
        checkpointer.save(make_checkpoint(4, step=4), 4)

        assert [info.global_step for info in scan(tmp_path).intact] == [4, 3, 2]

    @pytest.mark.parametrize("value", [0, -1, True, "6h", float("inf")])
    def test_wrong_times_are_refused(self, value: Any) -> None:
        with pytest.raises(ConfigurationError, match="scrub_every_s="):
            DefaultCheckpointerArguments(scrub_every_s=value)


def _by_results(info: Any, results: dict[str, ScrubResult]) -> datetime:
    """As `read_at`, by steps in place of the clock: a checkpoint that was read is due again much later."""
    days = info.global_step + (1000 if info.path.name in results else 0)
    return datetime(2020, 1, 1, tzinfo=timezone.utc) + timedelta(days=days)


class TestEvery:
    def test_the_loop_ends_on_a_signal_and_reports_all_damage(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Damaged, then mended: the exit code is that of the worst pass."""
        (path,) = write(tmp_path, 1)
        flip_bit(path / "state.json", -1)
        passes: list[float] = []

        class Waiting(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                if timeout != 6 * 3600:
                    return super().wait(0)
                passes.append(timeout)
                if len(passes) == 1:
                    flip_bit(path / "state.json", -1)
                else:
                    os.kill(os.getpid(), signal.SIGTERM)
                return True

        from trainstack.cli import checkpoint_proofs

        monkeypatch.setattr(checkpoint_proofs.threading, "Event", Waiting)
        before = signal.getsignal(signal.SIGTERM)
        assert main(["checkpoints", "scrub", str(tmp_path), "--every", "6h"]) == 1
        out = capsys.readouterr().out
        assert signal.getsignal(signal.SIGTERM) == before
        assert out.count("1 entries, 1 with a problem") == out.count("1 entries, 0 with a problem") == 1
        assert "state.json is damaged" in out

    @pytest.mark.parametrize("words", [["--every", "soon"], ["--every", "0h"], ["--rate", "fast"]])
    def test_wrong_words_are_refused(
        self, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        write(tmp_path, 1)
        assert main(["checkpoints", "scrub", str(tmp_path), *words]) == 2
        assert f"{words[0]}" in capsys.readouterr().err

    def test_json_has_an_object_for_a_pass(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        write(tmp_path, 1)
        assert main(["checkpoints", "scrub", str(tmp_path), "--json"]) == 0
        assert [one["problem"] for one in json.loads(capsys.readouterr().out)["entries"]] == [None]


def test_results_do_not_disturb_a_listing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (path,) = write(tmp_path, 1)
    scrub_one(path, Pace(), nothing)
    with caplog.at_level(logging.WARNING):
        contents = scan(tmp_path)

    assert [info.path for info in contents.intact] == [path]
    assert not contents.odd
