"""Real processes: `launch`, torchrun, restarts, two agents, and values that depend on the rank."""

from __future__ import annotations

import functools
import json
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

import trainstack as ts
from tests.helpers import launched, torchrun_script
from tests.helpers.patience import patience
from tests.helpers.processes import free_port
from trainstack.launching import launch as launching
from trainstack.launching.options import check_options
from trainstack.launching.watchdog import WorkerWatchdog, launch_error

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]
START_S = patience(20)  # for two processes that start


@pytest.fixture(autouse=True)
def no_file_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread a process, and a folder for temporary files, which is empty at the end."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield
    left = [path.name for path in temporary.iterdir() if not path.name.startswith("pymp-")]  # removed at exit
    assert left == []


def surroundings() -> dict[str, Any]:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    return {
        "variables": dict(os.environ),
        "random": random.getstate(),
        "handlers": [signal.getsignal(number) for number in numbers],
        "processes": multiprocessing.active_children(),
        "threads": [thread.name for thread in threading.enumerate() if "trainstack" in thread.name],
    }


def launch(fn: Callable[..., Any], *args: Any, **changes: Any) -> list[Any]:
    """`ts.launch` of two processes, with a check that the surroundings are the same afterwards, also after an error."""
    before = surroundings()
    try:
        return ts.launch(fn, *args, **{"nproc": 2, "timeout_s": patience(20), **changes})
    finally:
        after = surroundings()
        assert [name for name in before if before[name] != after[name]] == []


def is_running(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


def torchrun(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str], timeout: float = 20) -> str:
    try:
        return process.communicate(timeout=patience(timeout))[0]
    finally:
        process.kill()
        process.wait()


def script(folder: Path, text: str) -> subprocess.Popen[str]:
    path = folder / "script.py"
    path.write_text(text)
    return subprocess.Popen(
        [sys.executable, str(path)], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


# --- launch


@pytest.mark.spec("FN-05")
def test_results_have_rank_order_for_any_exit_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    cores = len(os.sched_getaffinity(0))
    results = launch(launched.train_and_leave_carelessly, 5, env={"GIVEN": "by env"})
    assert "GIVEN" not in os.environ
    assert [result["rank"] for result in results] == [0, 1]
    for result in results:
        assert result["total"].item() == 11
        assert torch.equal(result["gradient"], torch.full((2, 4), 1.5))
        assert result["threads"] == str(max(1, cores // 2))
        assert result["given"] == "by env"
        assert not is_running(result["pid"])


def test_a_rank_that_raises_ends_all_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    start = time.monotonic()
    with pytest.raises(ts.LaunchError, match=r"rank 1 raised KeyError: 'the origin'") as caught:
        launch(launched.raise_in_rank_1, pids, grace_s=1)
    assert time.monotonic() - start < START_S
    assert caught.value.rank == 1
    assert 'raise KeyError("the origin")' in caught.value.child_traceback
    assert caught.value.child_traceback in str(caught.value)
    assert "launching/worker.py" not in caught.value.child_traceback
    assert len(list(pids.iterdir())) == 2
    assert not any(is_running(int(path.name)) for path in pids.iterdir())
    assert capfd.readouterr().err == ""  # only the error shows the traceback


def test_a_rank_that_is_killed_is_named() -> None:
    with pytest.raises(ts.LaunchError, match=r"rank 1 \(process \d+\) was ended by SIGKILL") as caught:
        launch(launched.kill_rank_1)
    assert (caught.value.rank, caught.value.exitcode) == (1, -9)


def test_a_rank_that_leaves_with_exit_code_0_is_named(tmp_path: Path) -> None:
    gone, stays = subprocess.Popen(["true"]), subprocess.Popen(["sleep", "60"])
    gone.wait()
    for rank, process in enumerate((stays, gone)):
        folder = tmp_path / "run" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "pid").write_text(f"{process.pid} {rank} 0")
    watch = WorkerWatchdog("fn", tmp_path, 0.0, None, set)
    watch._poll()
    watch._poll()  # the grace is over: the rest are killed

    assert stays.wait() == -signal.SIGKILL
    failed = RuntimeError()
    failed.failures = {0: SimpleNamespace(exitcode=-9, pid=stays.pid, local_rank=0)}  # type: ignore[attr-defined]
    for cause in (failed, None):
        error = launch_error("fn", tmp_path, cause, None, watch, "")
        assert (error.rank, error.exitcode) == (1, 0)
        assert str(error) == (
            f"launch(fn): rank 1 (process {gone.pid}) left with exit code 0 before its function had returned."
        )
    failed.failures = {1: SimpleNamespace(exitcode=-9, pid=gone.pid, local_rank=1)}  # type: ignore[attr-defined]
    assert "was ended by SIGKILL" in str(launch_error("fn", tmp_path, failed, None, watch, ""))


def test_an_abort_after_the_function_is_not_an_error(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    calls.mkdir()
    assert launch(launched.abort_at_exit, calls, max_restarts=1) == [0, 1]
    assert sorted(path.name for path in calls.iterdir()) == ["0-0", "1-0"]


def test_ranks_that_are_killed_twice_restart(caplog: pytest.LogCaptureFixture) -> None:
    """torch alone hangs at the second restart, because its store keeps the keys of ended processes."""
    assert launch(launched.fall_twice, max_restarts=2) == [(2, 2.0), (2, 2.0)]
    told = [record.getMessage() for record in caplog.records if record.name.startswith("trainstack")]
    assert [text[:30] for text in told] == ["launch(fall_twice): restart 1.", "launch(fall_twice): restart 2."]


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    with pytest.raises(ts.LaunchError, match="still running after timeout_s=6") as caught:
        launch(launched.sleep, pids, nproc=1, timeout_s=6, grace_s=1)
    assert f"\n  rank 0: sleep, at {launched.__file__}:" in str(caught.value) or not list(pids.iterdir())
    assert not any(is_running(int(path.name)) for path in pids.iterdir())


def test_a_rendezvous_store_that_hangs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request to the store of a lost host has no time limit."""
    called, lasts = threading.Event(), threading.Event()

    def num_nodes_waiting(self: Any) -> int:
        if list(pids.iterdir()):
            called.set()
            lasts.wait()
        return 0

    pids = tmp_path / "pids"
    pids.mkdir()
    monkeypatch.setattr(DynamicRendezvousHandler, "num_nodes_waiting", num_nodes_waiting)
    monkeypatch.setattr(launching, "_STORE_S", 0.5)
    try:
        with pytest.raises(ts.LaunchError, match=r"the rendezvous at 127\.0\.0\.1:0 does not answer"):
            ts.launch(launched.sleep, pids, nproc=1)
        assert called.is_set()
        assert not any(is_running(int(path.name)) for path in pids.iterdir())
    finally:
        release(lasts, monkeypatch)


def release(lasts: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an abandoned agent end, without torch's log lines about it."""
    for name in launching._LOGS_OF_FAILURE:
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)
    lasts.set()
    for thread in threading.enumerate():
        if thread.name == "trainstack-launch-agent":
            thread.join(patience(20))


@pytest.mark.long
def test_an_agent_that_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    lasts = threading.Event()
    monkeypatch.setattr(MultiprocessContext, "_poll", lambda self: lasts.wait())
    monkeypatch.setattr(launching, "_SPARE_S", 1.0)
    try:
        with pytest.raises(ts.LaunchError, match="all processes have ended, and the agent did not notice"):
            ts.launch(os._exit, 3, nproc=2)
    finally:
        release(lasts, monkeypatch)


@pytest.mark.long
def test_a_timeout_shows_the_line_of_each_rank(tmp_path: Path) -> None:
    with pytest.raises(ts.LaunchError, match="still running after timeout_s=") as caught:
        launch(launched.hang, nproc=3, timeout_s=patience(4), grace_s=1)
    said = str(caught.value)
    assert f"rank 0: hang, at {launched.__file__}:" in said
    assert ": time.sleep(600)" in said
    assert "ctypes.PyDLL(None).sleep(600)" in said, "it holds Python's lock"
    assert "rank 2: does not answer; it has ended or is stopped" in said


@pytest.mark.long
def test_a_process_that_hangs_on_import_is_ended(tmp_path: Path) -> None:
    text = """
import os, time, trainstack
from tests.helpers.launched import leave_by_exit
if __name__ == "__main__":
    trainstack.launch(leave_by_exit, None, nproc=2, grace_s=1, timeout_s=8)
elif os.fork() == 0:
    os._exit(0)
else:
    time.sleep(600)
"""
    began = time.monotonic()
    printed = finish(script(tmp_path, text), 40)
    assert "still running after timeout_s=8" in printed
    assert time.monotonic() - began < patience(20)


@pytest.mark.long
@pytest.mark.parametrize("how", ["before", "after", "all"])
def test_ranks_killed_at_other_moments_restart(how: str) -> None:
    assert launch(launched.fall_twice, how, max_restarts=2) == [(2, 2.0), (2, 2.0)]


@pytest.mark.spec("FN-25")
@pytest.mark.parametrize(
    ("mode", "out", "err"),
    [("only_error", {0}, {0, 1}), ("ignore", {0}, {0})],
)
def test_rank_output_selects_the_printed_ranks(
    mode: str, out: set[int], err: set[int], capfd: pytest.CaptureFixture[str]
) -> None:
    launch(launched.talk, rank_output=mode)
    seen = capfd.readouterr()
    for rank in (0, 1):
        assert (f"out of {rank}\n" in seen.out) == (rank in out)
        assert (f"descriptor of {rank}\n" in seen.out) == (rank in out)
        assert (f"err of {rank}\n" in seen.err) == (rank in err)


@pytest.mark.spec("FN-25")
def test_rank_output_may_be_a_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    launch(launched.talk, rank_output=tmp_path / "logs")
    assert capfd.readouterr() == ("", "")
    for rank in (0, 1):
        assert set((tmp_path / "logs" / f"{rank}_std.log").read_text().splitlines()) == {
            f"out of {rank}",
            f"descriptor of {rank}",
        }
        assert (tmp_path / "logs" / f"{rank}_err.log").read_text() == f"err of {rank}\n"


def test_a_missing_host_is_an_error_within_the_timeout() -> None:
    began = time.monotonic()
    with pytest.raises(ts.LaunchError, match="timeout_s=2"):
        launch(launched.talk, nnodes=2, node_rank=1, rdzv_endpoint=f"127.0.0.1:{free_port()}", timeout_s=2)
    assert time.monotonic() - began < 55  # torch alone waits for up to 120 s


def test_exit_codes_and_results_without_pickle_are_errors(tmp_path: Path) -> None:
    assert launch(launched.leave_by_exit, None, nproc=1) == [None]
    with pytest.raises(ts.LaunchError, match="rank 0 raised SystemExit: 3") as caught:
        launch(launched.leave_by_exit, 3, nproc=1)
    assert caught.value.exitcode == 3
    with pytest.raises(ts.LaunchError, match=r"returned a function, which cannot be pickled"):
        launch(launched.draw_and_return_a_lambda, nproc=1, rank_output=tmp_path)
    assert "cannot be pickled" in (tmp_path / "0_err.log").read_text()


def test_ctrl_c_ends_the_processes(tmp_path: Path) -> None:
    text = f"""
import pathlib, signal, trainstack
from tests.helpers.launched import sleep
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
    try:
        trainstack.launch(sleep, pathlib.Path({str(tmp_path / "pids")!r}), nproc=2, grace_s=2)
    except KeyboardInterrupt:
        print("interrupted")
"""
    (tmp_path / "pids").mkdir()
    process = script(tmp_path, text)
    deadline = time.monotonic() + START_S
    while len(list((tmp_path / "pids").iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    printed = finish(process)
    assert process.returncode == 0, printed
    assert "interrupted" in printed
    assert not any(is_running(int(path.name)) for path in (tmp_path / "pids").iterdir())


def test_the_error_suggests_a_guard_for_a_script(tmp_path: Path) -> None:
    process = script(tmp_path, "import time, trainstack\nprint(trainstack.launch(time.sleep, 0, nproc=1))\n")
    printed = finish(process)
    assert process.returncode == 1
    assert "launch() was called while a new process imported the script" in printed
    assert "LaunchError: launch(sleep): rank 0" in printed
    assert "left with exit code 1 before it reached the function" in printed


# --- launch, arguments


def test_a_function_that_cannot_be_pickled_is_refused() -> None:
    def inner() -> None: ...

    for fn in (inner, lambda: None, functools.partial(launched.talk, inner)):
        with pytest.raises(ts.ConfigurationError, match="by pickle, which refuses"):
            launch(fn)


def test_a_function_of_a_notebook_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = type(sys)("__main__")
    notebook.__spec__ = None

    def cell() -> None: ...

    cell.__module__ = "__main__"
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    with pytest.raises(ts.ConfigurationError, match="%%writefile"):
        launch(cell)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="here the number of accelerators is taken")
def test_launch_needs_a_number_of_processes() -> None:
    with pytest.raises(ts.ConfigurationError, match=r"Write launch\(fn, nproc=2\)"):
        launch(launched.talk, nproc=None)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"nproc": 0}, "nproc=0"),
        ({"nnodes": "2:1"}, "nnodes='2:1'"),
        ({"nnodes": "two"}, "nnodes='two'"),
        ({"nnodes": 2}, "several machines need one rendezvous address"),
        ({"nnodes": "1:2", "rdzv_endpoint": "host"}, "several machines need one rendezvous address"),
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"grace_s": -1}, "grace_s=-1"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"node_rank": 1}, "node_rank=1, nnodes='1': .* from 0 to 0, or remove it"),
        ({"nnodes": "1:2", "rdzv_endpoint": "localhost:29400", "node_rank": 7}, "from 0 to 1, or remove it"),
        ({"node_rank": -1}, "node_rank=-1"),
        ({"env": {"AAA": "1", "BBB": 2}}, r"env=\{'BBB': 2\}: .* Write env=\{'BBB': '2'\}"),
        ({"env": "AAA=1"}, "env='AAA=1': write variables with their values"),
        ({"rank_output": "onlyerror"}, "rank_output='onlyerror': write one of 'only_error'"),
        ({"rank_output": None}, "rank_output=None: .* Write one of 'only_error', 'all', 'ignore', or a folder"),
        ({"rank_output": 5}, "rank_output=5: "),
        ({"rank_output": ""}, "rank_output='' is empty"),
        ({"rank_output": __file__}, "rank_output='.*': .*File exists.* Write one of"),
    ],
)
def test_wrong_arguments_are_refused_with_a_correction(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ts.ConfigurationError, match=sentence):
        launch(launched.talk, **changes)


def test_any_other_word_names_a_folder_of_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "errors").mkdir()
    for given in ("logs", "./onlyerror", "errors", Path("all")):
        assert check_options(1, 1, None, None, 0, given, None, 1.0, None).output == str(tmp_path / given)
    assert {path.name for path in tmp_path.iterdir()} >= {"logs", "onlyerror", "errors", "all"}


def test_an_invalid_environment_variable_leaves_no_trace() -> None:
    with pytest.raises(ValueError, match="variable name"):
        launch(launched.talk, env={"TRAINSTACK_TEST": "1", "A=B": "2"})


def test_launch_in_a_launched_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(ts.ConfigurationError, match="each of them would start more"):
        launch(launched.talk)


# --- torchrun


def reports(folder: Path) -> dict[int, dict[str, Any]]:
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.mark.long
def test_ranks_of_torchrun_restart_twice(tmp_path: Path) -> None:
    process = torchrun(
        "--standalone", "--nproc-per-node=2", "--max-restarts=2", torchrun_script.__file__, str(tmp_path), "2"
    )
    printed = finish(process)
    assert process.returncode == 0, printed
    found = reports(tmp_path)
    assert sorted(found) == [0, 1]
    for rank, report in found.items():
        place = report["place"]
        assert (place["rank"], place["local_rank"], place["size"], place["local_size"]) == (rank, rank, 2, 2)
        assert (place["launcher"], place["restarts"]) == ("torchrun", 2)
        assert report["total"] == 3


def test_two_agents_of_torchrun_form_one_world(tmp_path: Path) -> None:
    """Two agents on one machine replace two machines: they share the disk, and use the loopback device."""
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    meeting = ("--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=7", endpoint)
    local = "--local-addr=127.0.0.1"
    agents = [torchrun(*meeting, local, torchrun_script.__file__, str(tmp_path), "0") for _ in range(2)]
    printed = [finish(agent) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], printed
    found = reports(tmp_path)
    assert sorted(found) == [0, 1, 2, 3]
    for rank, report in found.items():
        assert report["total"] == 10
        for place in (report["place"], report["group"]):
            assert (place["rank"], place["size"], place["local_rank"]) == (rank, 4, rank % 2)
            assert (place["node_rank"], place["local_size"]) == (rank // 2, 2)


def test_two_calls_of_launch_form_one_world(tmp_path: Path) -> None:
    text = """
import sys, trainstack
from tests.helpers.launched import train_and_leave_carelessly
if __name__ == "__main__":
    [result] = trainstack.launch(
        train_and_leave_carelessly, 0, nproc=1, nnodes=2, node_rank=int(sys.argv[1]), rdzv_endpoint=sys.argv[2],
        env={"GIVEN": "x"}, timeout_s=120,
    )
    print("total", result["total"].item())
"""
    (tmp_path / "node.py").write_text(text)
    endpoint = f"127.0.0.1:{free_port()}"
    nodes = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "node.py"), str(node), endpoint],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    printed = [finish(node) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], printed
    assert all("total 1\n" in text for text in printed), printed


# --- ranks


@pytest.mark.spec("F119", "PA-25", "PA-41")
def test_functions_for_ranks_work_on_two_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    main, other = launch(launched.ranks_and_order, tmp_path, rank_output="all")
    assert (main["before"], main["after"]) == ("before in 0", "after in 0")
    assert (other["before"], other["after"]) == (None, None)
    assert (main["saw the file"], other["saw the file"]) == (False, True)
    assert (main["first"], other["first"]) == (True, False)
    assert (main["first here"], other["first here"]) == (True, False)
    assert main["main raises"] == "OSError: no space left"
    assert "rank 0, which went first, raised OSError: no space left. Rank 1 stops, too." in other["main raises"]
    assert (main["rank 1 raises"], other["rank 1 raises"]) == (None, "OSError: no space left")
    assert main["exchange"] == other["exchange"] == ["text of 0", "text of 1"]
    assert main["exchange of a returned host"] == other["exchange of a returned host"] == ["text of 0", "text of 1"]
    assert (other["place"].launcher, other["place"].local_rank, other["place"].local_size) == ("group", 1, 2)
    printed = capfd.readouterr().out
    assert "out of 0" in printed
    assert "out of 1" in printed
    assert printed.count("once in the world") == printed.count("once a node") == 1


def test_functions_for_ranks_work_without_a_group(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ts.print_once("printed")
    with ts.main_process_first() as first:
        assert first
    monkeypatch.setenv("RANK", "1")
    assert ts.rank_zero_only(lambda: 7)() is None
    ts.print_once("not printed")
    monkeypatch.setenv("RANK", "0")
    assert ts.rank_zero_only(lambda: 7)() == 7
    assert capsys.readouterr().out == "printed\n"
