"""All processes stop together when one gets a stop signal, and the resumed run has the bits of an unbroken one."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trainstack as ts
from tests.helpers.patience import patience
from tests.helpers.processes import ROOT, hears_ctrl_c, run_world
from tests.helpers.workers import stopping

pytestmark = pytest.mark.distributed

STEPS = 16  # an epoch


def torchrun(folder: Path, *extra: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *extra]
    command += ["-m", "tests.helpers.stop_run", str(folder), json.dumps(options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=hears_ctrl_c
    )


def run(
    folder: Path, *extra: str, then: Callable[[subprocess.Popen[str]], None] | None = None, **options: Any
) -> tuple[list[dict[str, Any]], str]:
    """The result of each process of torchrun, by rank, and the launcher's stderr."""
    folder.mkdir(exist_ok=True)
    for left in folder.glob("[0-9].json"):
        left.unlink()
    launcher = torchrun(folder, *extra, **options)
    try:
        if then is not None:
            then(launcher)
        error = launcher.communicate(timeout=patience(30))[1]
    finally:
        launcher.kill()
    left = sorted(folder.glob("[0-9].json"))
    assert len(left) == 2, error
    return [json.loads(path.read_text()) for path in left], error


def run_ranks(folder: Path, **options: Any) -> list[dict[str, Any]]:
    """The same in forked ranks, which import no module again. The pool replaces ranks that get a signal."""
    return run_world(2, stopping.left_behind, fresh="ranks" in options, directory=str(folder), **options)


@functools.cache
def unbroken() -> str:
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(Path(folder))
    assert [rank["step"] for rank in ranks] == [2 * STEPS] * 2
    return str([rank["hash"] for rank in ranks])


def stopped_together(folder: Path, ranks: list[dict[str, Any]]) -> int:
    """Both processes have stopped after the same step, and a checkpoint holds it."""
    assert [rank["ended"].partition(" after")[0] for rank in ranks] == ["Preempted: stopped by SIGTERM"] * 2
    steps = {rank["step"] for rank in ranks}
    assert len(steps) == 1
    newest = max(ts.list_checkpoints(folder / "checkpoints"), key=lambda info: info.sequence)
    assert newest.kind == "checkpoint"
    assert newest.global_step in steps
    return int(steps.pop())


def continues_exactly(folder: Path) -> None:
    ranks = run_ranks(folder)
    assert str([rank["hash"] for rank in ranks]) == unbroken()


CASES: dict[str, tuple[dict[str, Any], range]] = {
    "only the first": ({"at": 2, "ranks": [0], "pace": 0.1}, range(3, STEPS)),
    "only the second, which is slower": ({"at": 2, "ranks": [1], "pace": 0.1}, range(3, STEPS)),
    "both": ({"at": 5, "ranks": [0, 1], "pace": 0.1}, range(5, 8)),
    "one in the last step of an epoch": ({"at": STEPS, "ranks": [0]}, range(STEPS, STEPS + 1)),
    "one shortly before the end of an epoch": ({"at": STEPS - 2, "ranks": [0]}, range(STEPS - 1, STEPS + 1)),
    "one in the last step of all": ({"at": 2 * STEPS, "ranks": [0]}, range(2 * STEPS, 2 * STEPS + 1)),
    "one in a validation": ({"at": "val2", "ranks": [1], "pace": 0.1}, range(STEPS, STEPS + 1)),
}


LONG = ("only the first", "one shortly before the end of an epoch")


@pytest.mark.parametrize("who", [pytest.param(who, marks=pytest.mark.long if who in LONG else ()) for who in CASES])
def test_a_signal_to_any_process_stops_all_at_one_step(who: str, tmp_path: Path) -> None:
    options, expected = CASES[who]
    ranks = run_ranks(tmp_path, **options)

    assert stopped_together(tmp_path, ranks) in expected
    if options["at"] == "val2":
        assert ranks[1]["batches"] == 2
        assert ranks[0]["batches"] < 31, "the other process stops before the end of its validation"
    continues_exactly(tmp_path)


def when_started(folder: Path, number: int) -> Callable[[subprocess.Popen[str]], None]:
    def send(launcher: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + patience(30)
        while len(list(folder.glob("*.started"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        launcher.send_signal(number)

    return send


def test_torchrun_passes_sigterm_on_and_the_run_is_saved(tmp_path: Path) -> None:
    ranks, error = run(tmp_path, then=when_started(tmp_path, signal.SIGTERM), pace=0.1)

    assert stopped_together(tmp_path, ranks) < STEPS
    assert "SIGKILL" not in error
    continues_exactly(tmp_path)


def test_ctrl_c_under_torchrun_saves_and_prints_short_tracebacks(tmp_path: Path) -> None:
    ranks, error = run(tmp_path, then=when_started(tmp_path, signal.SIGINT), pace=0.1)

    assert len({rank["step"] for rank in ranks}) == 1
    assert all(rank["ended"].startswith("KeyboardInterrupt: stopped by Ctrl-C after global step") for rank in ranks)
    ours = error.partition("torch.distributed.elastic.multiprocessing.api.SignalException")[0]
    assert ours.count("Traceback") <= 3, error
    continues_exactly(tmp_path)


@pytest.mark.long
def test_with_max_restarts_a_stopped_group_restarts_and_continues(tmp_path: Path) -> None:
    options = {"at": 5, "ranks": [1], "pace": 0.05}
    ranks, _ = run(tmp_path, "--max-restarts=1", "--monitor-interval=0.2", **options)

    assert [rank["restarts"] for rank in ranks] == [1, 1]
    assert str([rank["hash"] for rank in ranks]) == unbroken()


def test_ctrl_c_in_a_script_that_calls_launch_saves_first(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "import sys\nfrom pathlib import Path\nimport trainstack as ts\nfrom tests.helpers.stop_run import main\n"
        "if __name__ == '__main__':\n"
        "    try:\n        ts.launch(main, Path(sys.argv[1]), None, (), 0.1, nproc=2)\n"
        "    except KeyboardInterrupt:\n        print('interrupted')\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, str(path), str(tmp_path)]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hears_ctrl_c
    )
    try:
        when_started(tmp_path, signal.SIGINT)(process)
        printed, error = process.communicate(timeout=patience(30))
    finally:
        process.kill()

    assert printed == "interrupted\n", error
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert len({rank["step"] for rank in ranks}) == 1
    assert all(rank["ended"].startswith("KeyboardInterrupt: stopped by Ctrl-C after global step") for rank in ranks)
    assert len(error.splitlines()) < 20, error
    continues_exactly(tmp_path)
