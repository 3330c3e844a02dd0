"""Stopping: requests and signals end a run at a step boundary, and the continued run equals the unbroken one."""

from __future__ import annotations

import functools
import logging
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, Noisy, arguments, numbers, train
from tests.helpers.patience import patience
from tests.helpers.resume_run import exact
from tests.helpers.scripts import start_python, wait_for_pid
from trainstack.checkpointing import filesystem
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.resume.saving import SaveTimeBudget
from trainstack.trainer.run import stopping

ROOT = Path(__file__).resolve().parents[3]
SAVING = ts.DefaultCheckpointerArguments()
STEPS, LAST = 10, 10 * 3  # steps an epoch, and in all


@pytest.fixture(autouse=True)
def usual_handlers() -> Iterator[None]:
    """Each test begins with Python's own handlers, and must leave them as it found them."""
    usual = {signal.SIGTERM: signal.SIG_DFL, signal.SIGUSR1: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    after = {number: signal.getsignal(number) for number in usual}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == usual


class Signalled(Classifier):
    """Calls `action` at a moment of the run, such as `("train", 13)` or `("val", 2)`: the call of a step or a hook."""

    def __init__(self, moment: tuple[str, int] | None = None, action: Callable[[], None] | None = None) -> None:
        super().__init__(Noisy(37), dropout=0.3, optimizer=torch.optim.AdamW, lr=0.01, scheduler=True, validate=True)
        self.moment, self.action = moment, action
        self.calls: dict[str, int] = {}

    def reach(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        if self.moment == (name, self.calls[name]) and self.action is not None:
            self.action()

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        return {name: super(Signalled, self).get_val_dataloaders(sampler, batch_size) for name in ("one", "two")}

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.reach("train")
        return super().train_step(global_step, batch, device)

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.reach("val")
        outputs = super().val_step(global_step, batch, device)
        return outputs[0] + torch.rand(()), outputs[1]

    def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
        self.reach("begin")
        torch.rand(2)

    def on_end_train_epoch(self, global_step: int) -> None:
        self.reach("end")
        torch.rand(1)
        self.log("drawn", float(torch.rand(())))

    def on_end_val_epoch(self, global_step: int, *outputs: Any, key: str = "default") -> None:
        self.reach("validated")

    def on_end_train(self, global_step: int) -> None:
        self.reach("over")

    def on_save_checkpoint(self, trainer: ts.AbstractTrainer, checkpoint: ts.Checkpoint) -> None:
        self.reach("saving")


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def trainer_of(module: ts.ModuleInterface, directory: Path, **changes: Any) -> ts.Trainer:
    made = {"epochs": 3, "train_batch_size": 4, "val_batch_size": 8, "log_every": 7, "checkpointer_args": SAVING}
    return ts.Trainer(module, arguments(directory, **{**made, **changes}))


def fingerprint(trainer: ts.Trainer) -> str:
    """All bits of a run, and the next random numbers."""
    drawn = [random.random(), float(np.random.rand()), torch.rand(3).tolist()]
    return repr(exact([trainer.module.state_dict(), trainer.get_state(), trainer.history.get_state(), drawn]))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> str:
    seed(1)
    trainer = trainer_of(Signalled(), tmp_path_factory.mktemp("unbroken"))
    trainer.train()
    assert trainer.global_steps_finished == LAST
    return fingerprint(trainer)


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


MOMENTS = {
    "in the first step": (("train", 1), 1),
    "before the first step": (("begin", 1), 1),
    "within an epoch": (("train", 13), 13),
    "in the last step of an epoch": (("train", STEPS), STEPS),
    "in a hook between training and validation": (("end", 1), STEPS),
    "in a validation": (("val", 2), STEPS),
    "in the second validation loader": (("val", 7), STEPS),
    "in the last validation batch": (("val", 10), STEPS),
    "while a checkpoint is written": (("saving", 2), 2 * STEPS),
    "in the last step of all": (("train", LAST), LAST),
    "in the last validation of all": (("validated", 6), LAST),
}


@pytest.mark.spec("FN-33")
@pytest.mark.parametrize("when", MOMENTS)
def test_a_run_resumed_after_a_signal_has_the_same_bits(when: str, unbroken: str, tmp_path: Path) -> None:
    moment, stops_after = MOMENTS[when]
    seed(1)
    module = Signalled(moment, send(signal.SIGTERM))
    stopped = trainer_of(module, tmp_path)
    with pytest.raises(ts.Preempted, match=rf"stopped by SIGTERM after global step {stops_after}\. Saved .*resume="):
        stopped.train()
    assert stopped.global_steps_finished == stops_after
    assert stopped.stop_reason == "SIGTERM"
    assert "over" not in module.calls

    seed(2)
    again = Signalled()
    resumed = trainer_of(again, tmp_path, resume=True)
    resumed.train()

    assert fingerprint(resumed) == unbroken
    assert resumed.stop_reason is None
    assert again.calls["over"] == 1
    ended = {name: module.calls.get(name, 0) + again.calls.get(name, 0) for name in ("train", "end", "validated")}
    assert ended == {"train": LAST, "end": 3, "validated": 6}, "nothing is done twice or omitted"


@pytest.mark.parametrize("when", ["within an epoch", "in a validation"])
def test_train_called_again_in_the_same_process_continues(when: str, unbroken: str, tmp_path: Path) -> None:
    seed(1)
    trainer = trainer_of(Signalled(MOMENTS[when][0], send(signal.SIGUSR1)), tmp_path)
    with pytest.raises(ts.Preempted) as stop:
        trainer.train()
    assert (stop.value.code, stop.value.signal) == (75, signal.SIGUSR1)
    trainer.train()

    assert fingerprint(trainer) == unbroken


def test_ctrl_c_interrupts_a_validation_at_its_batch(tmp_path: Path) -> None:
    module = Signalled(("val", 2), send(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match=r"stopped by Ctrl-C after global step 10\. Saved"):
        trainer_of(module, tmp_path).train()

    assert module.calls["val"] == 2


def test_ctrl_c_again_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, monotonic = [0.0], time.monotonic
    clock = SimpleNamespace(**{**vars(time), "monotonic": lambda: monotonic() + ahead[0]})
    monkeypatch.setattr(stopping, "time", clock)

    def press() -> None:
        send(signal.SIGINT)()
        send(signal.SIGINT)()  # as a launcher that forwards it does
        ahead[0] = 1.1
        send(signal.SIGINT)()

    trainer = trainer_of(Signalled(("train", 3), press), tmp_path)
    with pytest.raises(KeyboardInterrupt) as stop:
        trainer.train()

    assert str(stop.value) == ""
    assert ahead == [1.1], "the second signal is a part of the first Ctrl-C"
    assert trainer.global_steps_finished == 2
    assert ts.list_checkpoints(tmp_path / "checkpoints") == []


def test_without_checkpoints_the_message_says_nothing_was_saved(tmp_path: Path) -> None:
    module = Signalled(("train", 3), send(signal.SIGTERM))
    with pytest.raises(ts.Preempted, match=r"after global step 3\. Nothing was saved"):
        train(module, tmp_path, train_batch_size=4)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_users_handler_is_kept_and_may_request_a_stop(number: int, tmp_path: Path) -> None:
    trainer = trainer_of(Signalled(("train", 3), send(number)), tmp_path)
    before = signal.signal(number, lambda *_: trainer.request_stop("my own handler"))
    try:
        trainer.train()
    finally:
        signal.signal(number, before)

    assert trainer.stop_reason == "my own handler"
    assert trainer.global_steps_finished == 3


def test_signals_are_not_handled_on_request_or_in_threads(tmp_path: Path) -> None:
    seen: list[Any] = []
    look = lambda: seen.append(signal.getsignal(signal.SIGTERM))  # noqa: E731
    trainer_of(Signalled(("train", 1), look), tmp_path / "one", handle_signals=False, epochs=1).train()
    other = trainer_of(Signalled(("train", 1), look), tmp_path / "two", epochs=1)
    thread = threading.Thread(target=other.train)
    thread.start()
    thread.join()

    assert seen == [signal.SIG_DFL, signal.SIG_DFL]


def test_a_signal_after_the_end_goes_to_the_next_handler(tmp_path: Path) -> None:
    module = Signalled(("over", 1), send(signal.SIGINT))
    trainer = trainer_of(module, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()

    assert trainer.stop_reason is None
    assert trainer.global_steps_finished == LAST


# --- request_stop


def test_a_request_ends_training_at_the_step_and_train_returns(unbroken: str, tmp_path: Path) -> None:
    seed(1)
    module = Signalled(("train", 13), lambda: trainer.request_stop("enough"))
    trainer = trainer_of(module, tmp_path)
    trainer.train()

    assert (trainer.stop_reason, trainer.global_steps_finished) == ("enough", 13)
    assert (module.calls["over"], module.calls["end"]) == (1, 1), "the current epoch is not ended"
    kinds = {info.kind: info.global_step for info in ts.list_checkpoints(tmp_path / "checkpoints")}
    assert kinds.keys() == {"checkpoint", "model"}
    trainer.train()
    assert trainer.stop_reason is None
    assert fingerprint(trainer) == unbroken


def test_a_request_in_a_validation_ends_training_with_the_epoch(tmp_path: Path) -> None:
    module = Signalled(("val", 2), lambda: trainer.request_stop("no better"))
    trainer = trainer_of(module, tmp_path)
    trainer.train()

    assert (trainer.last_epoch, trainer.global_steps_finished) == (0, STEPS)
    assert module.calls["validated"] == 2
    assert module.calls["begin"] == 1


def test_another_thread_may_request_a_stop(tmp_path: Path) -> None:
    trainer = trainer_of(Signalled(), tmp_path, epochs=100_000, checkpointer_args=SAVING)
    timer = threading.Timer(0.3, trainer.request_stop, ("time is up",))
    timer.start()
    trainer.train()

    assert trainer.stop_reason == "time is up"
    assert trainer.last_epoch < 100_000 - 1


def test_the_source_of_the_data_may_end_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spent privacy budget does this: no step is left, and the epoch is not over."""
    module = Signalled()
    trainer = trainer_of(module, tmp_path)
    run = trainer._ready()
    whole = run.data.iter_steps

    def spent(state: Any, sampling: Any) -> Iterator[Any]:
        for window in whole(state, sampling):
            if state.global_step == 14:
                run.stopper.request("the budget is spent")
                return
            yield window

    monkeypatch.setattr(run.data, "iter_steps", spent)
    for _ in range(2):
        trainer.train()
        assert (trainer.stop_reason, trainer.global_steps_finished) == ("the budget is spent", 14)
    assert module.calls["end"] == 1


def test_no_check_runs_between_the_steps_without_a_request(tmp_path: Path, monkeypatch: Any) -> None:
    module = Classifier(numbers(4 * 500))
    trainer = ts.Trainer(module, arguments(tmp_path, train_batch_size=4, log_every=100))
    run = trainer._ready()
    looks = []
    attend = run.due.attend
    monkeypatch.setattr(run.due, "attend", lambda: (looks.append(run.state.global_step), attend()))
    trainer.train()

    assert looks == [100, 200, 300, 400, 500]


# --- whole processes

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
import trainstack as ts
from tests.helpers.modules import Classifier, Noisy, arguments, weights

class Slow(Classifier):
    def train_step(self, global_step, batch, device):
        if global_step == 3:
            Path(sys.argv[1], "now").write_text(str(os.getpid()))
        time.sleep(0.05)
        return super().train_step(global_step, batch, device)

if __name__ == "__main__":
    os.setsid()
    torch.manual_seed(1)
    module = Slow(Noisy(37), dropout=0.3, num_workers=int(sys.argv[2]))
    made = {"checkpointer_args": ts.DefaultCheckpointerArguments(), "resume": "auto", "epochs": 2}
    trainer = ts.Trainer(module, arguments(sys.argv[1], train_batch_size=4, **made))
    trainer.train()
    print(weights(module).double().sum().item().hex())
"""


def script(directory: Path, workers: int) -> Future[subprocess.CompletedProcess[str]]:
    path = directory / "script.py"
    path.write_text(SCRIPT)
    return start_python("-W", "error", str(path), str(directory), str(workers), cwd=ROOT)


def stopped_by(number: int, directory: Path, workers: int) -> tuple[int, str]:
    """Send a signal to the script and all of its workers in the third step; its exit code and stderr."""
    program = script(directory, workers)
    group = wait_for_pid(directory / "now", program)
    try:
        os.killpg(group, number)
        ended = program.result()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    return ended.returncode, ended.stderr


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_to_the_group_stops_a_run_with_workers(number: signal.Signals, tmp_path: Path) -> None:
    code, error = stopped_by(number, tmp_path, workers=2)

    assert code == (-signal.SIGINT if number == signal.SIGINT else 75), error
    [info] = ts.list_checkpoints(tmp_path / "checkpoints")
    assert info.global_step in (3, 4, 5)
    said = "Ctrl-C" if number == signal.SIGINT else number.name
    assert f"stopped by {said} after global step {info.global_step}. Saved {info.path}; to resume" in error
    assert len(error.splitlines()) < 20, error
    if number == signal.SIGTERM:  # the tests above resume after every signal, in this process
        assert last_line(script(tmp_path, 0)) == last_line_of_the_unbroken_script()


@functools.cache
def last_line_of_the_unbroken_script() -> str:
    """The sum of the final weights of the script."""
    with tempfile.TemporaryDirectory() as folder:
        return last_line(script(Path(folder), 0))


def last_line(program: Future[subprocess.CompletedProcess[str]]) -> str:
    return program.result().stdout.splitlines()[-1]


# --- after an exception, and how long saving takes


def test_a_checkpoint_after_an_exception_is_never_resumed_automatically(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("by zero")

    with pytest.raises(ZeroDivisionError):
        trainer_of(Signalled(("train", 13), fail), tmp_path, save_on_exception=True).train()

    names = {info.name: info for info in ts.list_checkpoints(tmp_path / "checkpoints")}
    assert names.keys() == {"checkpoint-000000010", "exception-000000012"}
    assert "exception-000000012 after the exception" in caplog.text
    resumed = trainer_of(Signalled(), tmp_path, resume=True)
    assert resumed.plan
    assert resumed.global_steps_finished == 10
    with caplog.at_level(logging.WARNING):
        named = trainer_of(Signalled(), tmp_path / "other", resume=str(names["exception-000000012"].path))
        assert named.plan
        assert named.global_steps_finished == 12
    assert "written after an exception (ZeroDivisionError: by zero)" in caplog.text
    named.train()
    assert named.global_steps_finished == LAST


def test_a_save_after_an_exception_cannot_hang(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    class Stuck(Classifier):
        failed = False

        def get_state(self) -> Any:
            if self.failed:
                release.wait(patience(60))
            return super().get_state()

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            self.failed = True
            raise ZeroDivisionError

    began = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        trainer_of(Stuck(), tmp_path, save_on_exception=True, stop_grace_s=0.2).train()
    assert time.monotonic() - began < patience(10)
    release.set()
    assert "could not save after the exception within 0.2 s" in caplog.text


def test_a_save_that_takes_long_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    grace = SaveTimeBudget(None, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "10"})
    for seconds in (4.9, 5.1, 8.0):
        grace.record(seconds, RunLogger())

    assert [record.message[:30] for record in caplog.records] == ["saving a checkpoint took 5.1 s"]
    assert SaveTimeBudget(None, {}).seconds == 30.0
    assert SaveTimeBudget(90.0, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "10"}).seconds == 90.0


def test_the_trainer_measures_its_saves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(Classifier(), tmp_path, stop_grace_s=1e-6, checkpointer_args=SAVING, epochs=2)

    assert caplog.text.count("is killed after 1e-06 s") == 1


def test_a_background_save_is_measured_until_it_is_on_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync_directory, later = filesystem.sync_directory, threading.Event()

    def slow(path: Path) -> None:
        later.wait(0.3)
        sync_directory(path)

    monkeypatch.setattr(filesystem, "sync_directory", slow)
    train(Classifier(), tmp_path, stop_grace_s=0.4, checkpointer_args=replace(SAVING, async_save=True))

    said = [record.message for record in caplog.records if "is killed after 0.4 s" in record.message]
    assert len(said) == 1
    assert float(said[0].split()[4]) >= 0.3
