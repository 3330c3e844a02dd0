"""Signals before the first step and between two trainings end the process as an interrupted session."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers
from tests.helpers.processes import run_world
from tests.helpers.scripts import start_python, wait_for_pid
from tests.helpers.workers import stopping
from trainstack.trainer.reporting.report.facts import RunFacts

ROOT = Path(__file__).resolve().parents[3]
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def usual_handlers() -> Iterator[None]:
    """Begin each test with Python's handlers, and fail if the test does not restore them."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    gc.collect()
    after = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert set(after.values()) == {signal.SIG_DFL}


class Signalled(Classifier):
    """Calls `action` in the method `where`."""

    def __init__(self, where: str = "", action: Callable[[], None] = lambda: None) -> None:
        super().__init__(numbers(24))
        self.where, self.action = where, action

    def reach(self, name: str) -> None:
        if name == self.where:
            self.action()

    def get_optimizers_schedulers(self, *given: Any) -> Any:
        self.reach("optimizers")
        return super().get_optimizers_schedulers(*given)

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        self.reach("loader")
        return super().get_train_dataloader(sampler, batch_size)

    def update_state(self, state: Any) -> None:
        self.reach("restoring")
        super().update_state(state)


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def trainer_of(module: ts.ModuleInterface, folder: Path, **changes: Any) -> ts.Trainer:
    made = {"checkpointer_args": ts.DefaultCheckpointerArguments(), "report": True, "resume": "auto", **changes}
    return ts.Trainer(module, arguments(folder, **made))


def newest_session(folder: Path) -> str:
    return RunFacts.read(folder).sessions[-1].status


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("where", ["optimizers", "loader", "restoring"])
def test_a_signal_during_preparation_stops_the_run_without_saving(where: str, number: int, tmp_path: Path) -> None:
    trainer_of(Signalled(), tmp_path, epochs=1).train()
    saved = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    assert newest_session(tmp_path) == "finished"

    with pytest.raises(ts.Preempted, match=rf"stopped by {signal.Signals(number).name} after global step 3"):
        trainer_of(Signalled(where, send(number)), tmp_path, epochs=2).train()

    assert newest_session(tmp_path) == "interrupted"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == saved


def test_ctrl_c_during_preparation_stops_at_once(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt, match="stopped by Ctrl-C before the first step"):
            trainer_of(Signalled("optimizers", send(signal.SIGINT)), tmp_path).train()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert newest_session(tmp_path) == "interrupted"


def test_a_signal_outside_of_train_stops_a_slurm_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(Signalled(), tmp_path)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL, "without a job the handlers are unchanged"
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    trainer = trainer_of(Signalled(), tmp_path)
    for called in ("before", "after"):
        with pytest.raises(ts.Preempted, match=r"stopped by SIGUSR1 outside of train\(\)") as stop:
            send(signal.SIGUSR1)()
        assert (stop.value.code, stop.value.signal) == (75, signal.SIGUSR1)
        assert newest_session(tmp_path) == "interrupted", called
        if called == "before":
            trainer.train(max_steps=1)
            assert newest_session(tmp_path) == "finished"
    trainer.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_trainers_in_a_job_restore_handlers_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    first, second = trainer_of(Signalled(), tmp_path), trainer_of(Signalled(), tmp_path)
    first.close()
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    second.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    trainer_of(Signalled(), tmp_path)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN, "the program ignores it"
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    del second


@pytest.mark.parametrize("ended", ["first", "second"])
@pytest.mark.parametrize("how", ["closed", "collected", "collected in a thread"])
def test_a_trainer_keeps_its_handlers_after_the_end_of_another(
    ended: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    trainers = {name: trainer_of(Signalled(), tmp_path / name) for name in ("first", "second")}
    end = trainers.pop(ended)
    if how == "closed":
        end.close()
    del end
    if how == "collected in a thread":
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join()
    gc.collect()
    assert signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL, "the signal would kill the process"
    with pytest.raises(ts.Preempted, match=r"stopped by SIGUSR1 outside of train\(\)"):
        send(signal.SIGUSR1)()
    ((left, trainer),) = trainers.items()
    assert newest_session(tmp_path / left) == "interrupted"
    trainer.close()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [[1], [0, 1]])
def test_an_early_signal_to_some_ranks_stops_all(ranks: list[int], tmp_path: Path) -> None:
    for rank in run_world(2, stopping.told_early, directory=str(tmp_path), ranks=ranks):
        assert rank["code"] == 75
        assert "stopped by SIGUSR1 after global step 0" in rank["said"]
        assert rank["handler"] == "SIG_DFL"
    assert newest_session(tmp_path) == "interrupted"


@pytest.mark.processes
def test_a_preempted_process_ignores_sigterm_while_it_exits(tmp_path: Path) -> None:
    """A scheduler sends it to ranks that leave later than the first, and the exit code 75 would become 143."""
    script = f"""
import atexit, os, signal, time
from pathlib import Path
import trainstack as ts
from tests.helpers.modules import Classifier, arguments
folder = Path({str(tmp_path)!r})
def slow():
    (folder / "exits").write_text(str(os.getpid()))
    while not (folder / "told").exists():
        time.sleep(0.01)
atexit.register(slow)
class Told(Classifier):
    def train_step(self, global_step, batch, device):
        os.kill(os.getpid(), signal.SIGUSR1)
        return super().train_step(global_step, batch, device)
ts.Trainer(Told(), arguments(folder / "run")).train()
"""
    program = start_python("-c", script, cwd=ROOT)
    os.kill(wait_for_pid(tmp_path / "exits", program), signal.SIGTERM)
    (tmp_path / "told").touch()
    assert program.result().returncode == 75
