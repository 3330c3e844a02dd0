"""Loader workers survive signals to their group but not their parent; errors of ended workers give the reason."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import trainstack as ts
from tests.helpers.patience import patience
from tests.helpers.processes import ROOT
from tests.helpers.scripts import run_python, start_python, wait_for_pid

pytestmark = [pytest.mark.processes, pytest.mark.timeout(patience(60))]

TRAINING = """
import os, signal, sys, time
from pathlib import Path
from torch.utils.data import get_worker_info
from tests.helpers.modules import Classifier, Noisy, arguments
import trainstack as ts

FOLDER = Path(sys.argv[1])

class Reads(Noisy):
    def __getitem__(self, index):
        if get_worker_info() is not None:
            (FOLDER / f"worker-{os.getpid()}").touch()
        time.sleep(0.01)
        return super().__getitem__(index)

class Slow(Classifier):
    def train_step(self, global_step, batch, device):
        if global_step == 3:
            (FOLDER / "now").touch()
        time.sleep(0.05)
        return super().train_step(global_step, batch, device)

if __name__ == "__main__":
    os.setsid()
    sys.path.append(os.getcwd())  # from which spawned workers import this
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    (FOLDER / "pid").write_text(str(os.getpid()))
    module = Slow(Reads(37), num_workers=int(sys.argv[2]), multiprocessing_context=sys.argv[3])
    saving = ts.DefaultCheckpointerArguments()
    ts.Trainer(module, arguments(FOLDER, train_batch_size=4, epochs=100, checkpointer_args=saving)).train()
"""

Program = Future[subprocess.CompletedProcess[str]]


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """A function that starts TRAINING in a new process group, which is killed at the end."""
    started: list[tuple[int, Program]] = []

    def run(method: str = "fork", count: int = 2) -> tuple[int, Program]:
        script = tmp_path / "script.py"
        script.write_text(TRAINING)
        program = start_python(str(script), str(tmp_path), str(count), method, cwd=ROOT)
        started.append((wait_for_pid(tmp_path / "pid", program), program))
        return started[-1]

    yield run
    for pid, program in started:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        program.result()


def wait_for(condition: Any, what: str) -> None:
    deadline = time.monotonic() + patience(30)
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def workers(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("worker-")) for path in folder.glob("worker-*"))


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_repeated_signals_to_the_group_stop_the_run_once(number: signal.Signals, start: Any, tmp_path: Path) -> None:
    """Without protection three SIGTERM within 40 ms kill the workers, and the run ends without a checkpoint."""
    pid, program = start()
    wait_for((tmp_path / "now").exists, "the training does not begin")
    for _ in range(5):
        os.killpg(pid, number)
        time.sleep(0.01)
    ended = program.result()

    assert ended.returncode == 75, ended.stderr
    assert f"stopped by {number.name} after global step" in ended.stderr
    assert len(ts.list_checkpoints(tmp_path / "checkpoints")) == 1


def test_starting_workers_survive_signals(start: Any, tmp_path: Path) -> None:
    parent, program = start("spawn", 1)

    def children() -> list[int]:
        path = Path(f"/proc/{parent}/task/{parent}/children")
        found = [int(pid) for pid in path.read_text().split()] if path.exists() else []
        return [pid for pid in found if b"spawn_main" in _command(pid)]

    wait_for(children, "no worker is started")
    (worker,) = children()
    for _ in range(3):
        os.kill(worker, signal.SIGTERM)
    wait_for(lambda: (tmp_path / "now").exists() or program.done(), "the training does not begin")

    assert not program.done(), program.result().stderr


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def test_a_killed_worker_is_named_with_the_likely_reason(start: Any, tmp_path: Path) -> None:
    _, program = start()
    wait_for((tmp_path / "now").exists, "the training does not begin")
    worker = workers(tmp_path)[-1]
    os.kill(worker, signal.SIGKILL)
    ended = program.result()

    assert ended.returncode == 1
    said = f"a loader worker (pid {worker}) was ended by SIGKILL, probably by the out-of-memory killer of the system"
    assert said in ended.stderr


@pytest.mark.parametrize(("method", "count"), [("fork", 2), ("spawn", 1)])
def test_workers_end_soon_after_their_parent(method: str, count: int, start: Any, tmp_path: Path) -> None:
    pid, _ = start(method, count)
    wait_for(lambda: len(workers(tmp_path)) == count, "no workers are started")
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(map(lives, workers(tmp_path))), "the workers do not end")


STARTING = """
import os, signal, sys, time
import multiprocessing

class LosesItsParent:
    def __getstate__(self):
        return {"parent": os.getpid()}
    def __setstate__(self, state):  # in the worker, while it starts
        with open(sys.argv[1], "w") as file:
            file.write(str(os.getpid()))
        os.kill(state["parent"], signal.SIGKILL)
        while os.getppid() == state["parent"]:
            time.sleep(0.001)
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return index

if __name__ == "__main__":
    import torch
    from torch.utils.data import DataLoader
    from trainstack.trainer.data.loading import Fetcher
    loader = DataLoader(LosesItsParent(), num_workers=1, multiprocessing_context="spawn")
    list(Fetcher(loader, 0).batches(0, torch.arange(4).split(2)))
"""


def test_a_spawned_worker_ends_if_its_parent_dies_early(tmp_path: Path) -> None:
    """torch reads the parent's id only after the worker has started, and then it is that of init."""
    script, word = tmp_path / "script.py", tmp_path / "pid"
    script.write_text(STARTING)
    run_python(str(script), str(word), cwd=ROOT)
    wait_for(lambda: word.exists() and word.read_text(), "no worker is started")
    pid = int(word.read_text())
    try:
        wait_for(lambda: not lives(pid), "the worker does not end")
    finally:
        if lives(pid):
            os.kill(pid, signal.SIGKILL)
