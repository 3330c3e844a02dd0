"""Runs whose `output_dir` is an address, on `memory://`."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, numbers, weights
from tests.helpers.remote import check_all_intact, fail_writes, listing, places
from trainstack.checkpointing import lease_file
from trainstack.checkpointing.remote import mirror as mirrors
from trainstack.checkpointing.remote.leases import RemoteLeases
from trainstack.checkpointing.remote.store import ObjectStore
from trainstack.trainer import run_directory
from trainstack.trainer.run_record import FILE_NAME as RECORD

RUN = "memory://bucket/run"
SAVES = ts.DefaultCheckpointerArguments(every_n_steps=2)


@pytest.fixture(autouse=True)
def empty_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(mirrors, "_PAUSES_S", (0.01, 0.05))
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    yield
    memory.store.clear()


def start(local: Path | None, *, callbacks: Any = (), module: Any = None, **changes: Any) -> ts.Trainer:
    """Train on the machine whose disk is `local`, as a process that has trained nothing before."""
    run_directory._finished.clear()
    ts.seed_everything(0)
    values: dict[str, Any] = {
        "output_dir": RUN,
        "local_dir": local,
        "train_batch_size": 8,
        "epochs": 2,
        "writers": ["csv"],
        "report": False,
        "progress": "none",
        "device": "cpu",
        "checkpointer_args": SAVES,
        "resume": "auto",
    }
    args = ts.TrainerArguments(**{**values, **changes})
    trainer = ts.Trainer(module or Classifier(numbers(32), dropout=0.2), args, callbacks=callbacks)
    trainer.train()
    trainer.close()
    return trainer


class Fails(ts.Callback):
    """Loses the machine after a step. Running uploads end, so that the uploaded files are known."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_end(self, trainer: ts.Trainer) -> None:
        if trainer.state.global_step == self.step:
            raise RuntimeError("lost")


def lose(local: Path, step: int, **changes: Any) -> None:
    with pytest.raises(RuntimeError, match="lost"):
        start(local, callbacks=[Fails(step)], **changes)


def test_another_machine_continues_with_the_same_bits(tmp_path: Path) -> None:
    whole = start(tmp_path / "whole", output_dir="memory://bucket/whole")
    lose(tmp_path / "one", 5)
    two = start(tmp_path / "two")
    assert torch.equal(weights(two.module), weights(whole.module))
    rows = [ObjectStore(address).read("metrics.csv") for address in (RUN, "memory://bucket/whole")]
    assert rows[0] == rows[1]
    assert (
        places(RUN)
        == places("memory://bucket/whole")
        == [
            "checkpoint-000000006",
            "checkpoint-000000008",
            "checkpoint-model-000000008",
        ]
    )
    assert check_all_intact(RUN, tmp_path / "check") == 4
    again = start(tmp_path / "three", epochs=3)  # continues from the end of the second machine
    assert again.global_steps_finished == 12


def test_the_local_copy_is_in_the_users_cache_by_default(tmp_path: Path) -> None:
    trainer = start(None, epochs=1)
    assert trainer.output_dir.is_relative_to(tmp_path / "cache" / "trainstack")
    assert start(None).global_steps_finished == 8


def test_a_run_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    start(tmp_path / "one", epochs=1)
    before = ObjectStore(RUN).list()
    with pytest.raises(ts.ConfigurationError, match=rf"output_dir='{RUN}' holds a run already"):
        start(tmp_path / "two", resume=False)
    assert {k: v for k, v in ObjectStore(RUN).list().items() if "lease" not in k} == {
        k: v for k, v in before.items() if "lease" not in k
    }
    ObjectStore(RUN).put("old.txt", b"x")
    start(tmp_path / "three", resume=False, overwrite=True, max_steps=2)
    assert places(RUN) == ["checkpoint-000000002", "checkpoint-model-000000002"]
    assert "old.txt" not in ObjectStore(RUN).list()


def test_a_second_run_at_the_address_is_refused(tmp_path: Path) -> None:
    refused = list[str]()

    class Second(ts.Callback):
        def on_train_begin(self) -> None:
            with pytest.raises(ts.LeaseError) as error:
                start(tmp_path / "two", lease_timeout_s=1.0)
            refused.append(str(error.value))

    start(tmp_path / "one", callbacks=[Second()], lease_timeout_s=1.0)
    assert refused
    assert f"{RUN} is in use by another run" in refused[0]


def test_a_run_that_lost_the_address_stops_its_uploads(tmp_path: Path) -> None:
    class Replaced(ts.Callback):
        def on_train_step_end(self, trainer: ts.Trainer) -> None:
            if trainer.state.global_step == 3:
                self.take_over()
            time.sleep(0.05)

        def take_over(self) -> None:
            leases = RemoteLeases(ObjectStore(RUN))
            seen = leases.look()
            assert seen is not None
            assert seen.record is not None
            other = replace(seen.record, counter=seen.counter + 1, token="other", machine="another", host="elsewhere")
            assert leases.claim(other)
            leases.clear(other)
            deadline = time.monotonic() + 20
            while not mirror_of[0].is_lost and time.monotonic() < deadline:
                time.sleep(0.02)
            self.before = ObjectStore(RUN).list()

    mirror_of, callback = [], Replaced()

    class Looks(ts.Callback):
        def on_train_begin(self, trainer: ts.Trainer) -> None:
            mirror_of.append(trainer._context.directory.mirror)

    with pytest.raises(ts.LeaseError, match=f"no longer owns {RUN}"):
        start(tmp_path / "one", callbacks=[Looks(), callback], lease_timeout_s=1.0)
    after = {key: size for key, size in ObjectStore(RUN).list().items() if not key.startswith(".lease")}
    assert after == {key: size for key, size in callback.before.items() if not key.startswith(".lease")}


def test_uploads_that_fail_for_a_while_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [3]

    def fails(name: str, args: tuple[Any, ...]) -> bool:
        if name != "upload" or failures[0] == 0:
            return False
        failures[0] -= 1
        return True

    fail_writes(monkeypatch, fails)
    start(tmp_path / "one")
    assert "failed and is tried again: the connection was reset" in caplog.text
    assert "works again" in caplog.text
    assert places(RUN)[-1] == "checkpoint-model-000000008"
    assert check_all_intact(RUN, tmp_path / "check") == 4


def test_a_failed_upload_raises_and_the_next_start_repeats_it(tmp_path: Path) -> None:
    patched = pytest.MonkeyPatch()
    fail_writes(patched, lambda name, args: name == "upload")
    with pytest.raises(ts.CheckpointError, match=rf"not everything was uploaded to {RUN}: the connection was reset"):
        start(tmp_path / "one", report=True)
    patched.undo()
    assert places(RUN) == []
    facts = json.loads((tmp_path / "one" / "run.json").read_text())["sessions"][-1]
    assert facts["status"] == "failed"
    assert "not everything was uploaded" in facts["reason"]
    assert json.loads(ObjectStore(RUN).read(RECORD))["saved"] is False  # else no run could begin here again
    assert (tmp_path / "one" / "checkpoints" / "checkpoint-000000008").is_dir()
    start(tmp_path / "one")
    assert places(RUN)[-1] == "checkpoint-model-000000008"
    assert json.loads(ObjectStore(RUN).read(RECORD))["finished"] is True


def test_a_copy_that_another_machine_has_overtaken_is_renamed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lose(tmp_path / "one", 3)
    patched = pytest.MonkeyPatch()
    fail_writes(patched, lambda name, args: name == "upload")
    monkey = pytest.MonkeyPatch()
    monkey.setattr(mirrors, "MOST_FAILURES", 1)
    lose(tmp_path / "one", 7)  # steps 4 and 6 are saved here only
    patched.undo()
    monkey.undo()
    two = start(tmp_path / "two", max_steps=5)
    assert two.global_steps_finished == 5
    one = start(tmp_path / "one")
    assert "has checkpoints that were not uploaded, and is not continued" in caplog.text
    renamed = next(path for path in tmp_path.iterdir() if path.name.startswith("one.aside-"))
    assert (renamed / "checkpoints" / "checkpoint-000000006").is_dir()
    assert torch.equal(weights(one.module), weights(start(tmp_path / "w", output_dir="memory://bucket/w").module))


def test_a_copy_of_another_address_is_refused(tmp_path: Path) -> None:
    start(tmp_path / "one", epochs=1)
    with pytest.raises(ts.CheckpointError, match="is not the local copy of memory://bucket/other"):
        start(tmp_path / "one", output_dir="memory://bucket/other")


def test_the_store_keeps_the_newest_and_best_checkpoints(tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments(every_n_epochs=1, keep_last=1, keep_best=1, monitor="val/loss")
    module = Classifier(numbers(32), validate=True, lr=5.0)
    start(tmp_path / "one", module=module, epochs=4, checkpointer_args=saving)
    infos = [entry.info for entry in listing(RUN).entries.values() if entry.content.kind == "checkpoint"]
    best = min(infos, key=lambda info: info.metrics["val/loss"])
    assert {info.global_step for info in infos} == {16, best.global_step}
    two = start(tmp_path / "two", module=Classifier(numbers(32), validate=True, lr=5.0), epochs=4, resume="best")
    assert (tmp_path / "two" / "checkpoints" / best.path.name).is_dir()
    assert two.global_steps_finished == 16


def test_a_mirror_forgets_entries_without_a_local_copy(tmp_path: Path) -> None:
    mirror = mirrors.Mirror(RUN, tmp_path / "one", SAVES, RECORD, lambda level, line: None)
    mirror.take(5.0, lambda: False)
    mirror._deleted = {"checkpoints/checkpoint-000000001.0123456789abcdef"}
    mirror._upload()
    assert not mirror._deleted
    mirror.release()


@pytest.mark.parametrize("address", [RUN, f"{RUN}/checkpoints/checkpoint-000000008", f"{RUN}/checkpoints/last"])
def test_a_run_elsewhere_begins_from_an_address(address: str, tmp_path: Path) -> None:
    one = start(tmp_path / "one")
    two = start(None, output_dir=str(tmp_path / "local"), resume=address, epochs=3)
    assert two.global_steps_finished == 12
    fresh = start(None, output_dir=str(tmp_path / "fresh"), resume=False, init_weights_from=address, max_steps=1)
    assert fresh.warm_start_report is not None
    assert fresh.warm_start_report.is_complete
    own = start(tmp_path / "three", resume=address, epochs=3)
    assert torch.equal(weights(own.module), weights(two.module))
    one.export("memory://bucket/model")
    read = ts.read_model(ts.checkpointing.fetch("memory://bucket/model"))
    assert torch.equal(read["net.0.weight"], one.module.net[0].weight)


@pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.long)])
def test_a_record_that_says_saved_never_precedes_the_checkpoint(stride: int, tmp_path: Path) -> None:
    """A machine may be lost between any two writes, and the next one has to continue."""
    for allowed in range(1, 60, stride):
        fsspec.filesystem("memory").store.clear()
        patched, left = pytest.MonkeyPatch(), [allowed]
        patched.setattr(mirrors, "MOST_FAILURES", 1)

        def fails(name: str, args: tuple[Any, ...], left: list[int] = left) -> bool:
            left[0] -= not str(args[-1] if name == "upload" else args[0]).startswith(".lease")
            return left[0] < 0

        fail_writes(patched, fails)
        ended = False
        try:
            start(tmp_path / f"one-{allowed}", max_steps=3)
            ended = True
        except ts.CheckpointError:
            pass
        patched.undo()
        for key in ObjectStore(RUN).list(".lease"):
            ObjectStore(RUN).delete([key])  # of a process that has ended
        assert start(tmp_path / f"two-{allowed}", max_steps=3).global_steps_finished == 3
        if ended:
            break
    assert ended


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "local_dir": ({"output_dir": "out", "local_dir": "there"}, "local_dir='there' is the local copy of a run"),
    "resume": ({"output_dir": None, "resume": RUN}, "without output_dir"),
    "save_dir": ({"checkpointer_args": ts.DefaultCheckpointerArguments(save_dir="x")}, "save_dir='x' with output_dir"),
    "logs": ({"writer_args": ts.WriterArguments(tb_log_dir="x")}, "tb_log_dir='x' with output_dir"),
    "deletes": (
        {"checkpointer_args": ts.DefaultCheckpointerArguments(delete_existing_checkpoints=True)},
        "write overwrite=True",
    ),
    "private": (
        {
            "backend": "sp-dp",
            "differential_privacy_args": ts.DifferentialPrivacyArguments(delta=1e-6, noise_multiplier=1.0),
        },
        "a ledger in the folder of the run would be lost",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_exclude_each_other_are_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changes, words = REFUSED[case]
    with pytest.raises(ts.ConfigurationError, match=words):
        start(None, **changes)
    assert not any(tmp_path.iterdir())


def test_a_signal_uploads_a_checkpoint_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float | None] = []
    finish = mirrors.Mirror.finish

    def waiting(self: mirrors.Mirror, within_s: float | None = None) -> str | None:
        waits.append(within_s)
        return finish(self, within_s)

    class Preempted(ts.Callback):
        def on_train_step_end(self, trainer: ts.Trainer) -> None:
            if trainer.state.global_step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(mirrors.Mirror, "finish", waiting)
    with pytest.raises(ts.Preempted):
        start(tmp_path / "one", callbacks=[Preempted()], stop_grace_s=20.0)
    assert waits[0] == 10.0, "the other half of the time is for the current step"
    assert "checkpoint-000000003" in places(RUN)
    assert start(tmp_path / "two").global_steps_finished == 8


def test_a_trainer_trains_again_unless_another_continued_the_run(tmp_path: Path) -> None:
    trainer = start(tmp_path / "one")
    trainer.train(epochs=3)
    assert "checkpoint-000000012" in places(RUN)
    start(tmp_path / "two", epochs=4)
    with pytest.raises(ts.CheckpointError, match="another process has written to"):
        trainer.train(epochs=4)
    trainer.close()


def test_a_dev_run_writes_nothing_to_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    start(None, fast_dev_run=True)
    assert ObjectStore(RUN).list() == {}
    assert lease_file.look(tmp_path) is None
