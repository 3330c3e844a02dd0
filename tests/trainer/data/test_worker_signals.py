"""Loader workers survive signals to their group but not their parent; errors of ended workers give the reason."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import trainstack as ts
from tests.helpers.patience import patience
from tests.helpers.processes import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.timeout(patience(60))]

TRAINING = """
import multiprocessing, os, sys, time
from pathlib import Path
from tests.helpers.modules import Classifier, Noisy, arguments
import trainstack as ts

FOLDER = Path(sys.argv[1])

class Reads(Noisy):
    def __getitem__(self, index):
        if multiprocessing.parent_process() is not None:
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
    module = Slow(Reads(37), num_workers=2, multiprocessing_context=sys.argv[2])
    saving = ts.DefaultCheckpointerArguments()
    ts.Trainer(module, arguments(FOLDER, train_batch_size=4, epochs=100, checkpointer_args=saving)).train()
"""


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """A function that starts TRAINING in a new process group, which is killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def run(method: str = "fork") -> subprocess.Popen[str]:
        script = tmp_path / "script.py"
        script.write_text(TRAINING)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        command = [sys.executable, str(script), str(tmp_path), method]
        process = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield run
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


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
def test_repeated_signals_to_the_group_stop_the_run_once(
    number: signal.Signals, start: Any, tmp_path: Path
) -> None:
    """Without protection three SIGTERM within 40 ms kill the workers, and the run ends without a checkpoint."""
    process = start()
    wait_for((tmp_path / "now").exists, "the training does not begin")
    for _ in range(5):
        os.killpg(process.pid, number)
        time.sleep(0.01)
    error = process.communicate(timeout=patience(30))[1]

    assert process.returncode == 75, error
    assert f"stopped by {number.name} after global step" in error
    assert len(ts.list_checkpoints(tmp_path / "checkpoints")) == 1


def test_starting_workers_survive_signals(start: Any, tmp_path: Path) -> None:
    process = start("spawn")

    def children() -> list[int]:
        path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        found = [int(pid) for pid in path.read_text().split()] if path.exists() else []
        return [pid for pid in found if b"spawn_main" in _command(pid)]

    wait_for(lambda: len(children()) == 2, "no workers are started")
    for pid in children():
        for _ in range(3):
            os.kill(pid, signal.SIGTERM)
    wait_for(lambda: (tmp_path / "now").exists() or process.poll() is not None, "the training does not begin")

    assert process.poll() is None, process.communicate()[1]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def test_a_killed_worker_is_named_with_the_likely_reason(start: Any, tmp_path: Path) -> None:
    process = start()
    wait_for((tmp_path / "now").exists, "the training does not begin")
    pid = workers(tmp_path)[-1]
    os.kill(pid, signal.SIGKILL)
    error = process.communicate(timeout=patience(30))[1]

    assert process.returncode == 1
    assert (
        f"a loader worker (pid {pid}) was ended by SIGKILL, probably by the out-of-memory killer of the system" in error
    )


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_end_soon_after_their_parent(method: str, start: Any, tmp_path: Path) -> None:
    process = start(method)
    wait_for(lambda: len(workers(tmp_path)) == 2, "no workers are started")
    process.kill()
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
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    subprocess.run([sys.executable, str(script), str(word)], env=environment, timeout=patience(30), check=False)
    wait_for(lambda: word.exists() and word.read_text(), "no worker is started")
    pid = int(word.read_text())
    try:
        wait_for(lambda: not lives(pid), "the worker does not end")
    finally:
        if lives(pid):
            os.kill(pid, signal.SIGKILL)
