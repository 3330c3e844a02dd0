"""`trainstack interrupted` and the batch scripts of the documentation."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from trainstack.cli.main import main
from trainstack.trainer.reporting.report.facts import RunFacts, Session, record_interruption

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in sorted(DOCS.rglob("*.md"))
    for number, block in enumerate(re.findall(r"^```[^\n]*\n(.*?)^```$", page.read_text(), re.M | re.S))
    if "#SBATCH" in block
]
STATUSES = (None, "interrupted", "finished", "stopped", "failed", "running")


def leave(directory: Path, status: str | None, began: float | None = None) -> None:
    session = Session(began=time.time() if began is None else began, status=status or "", reason="SIGUSR1")
    RunFacts(name="Module", sessions=() if status is None else (session,)).write(directory)


@pytest.mark.parametrize("status", STATUSES)
def test_only_an_interrupted_session_has_exit_code_0(
    status: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(tmp_path, status)
    assert main(["interrupted", str(tmp_path)]) == (0 if status == "interrupted" else 1)
    assert (status or "no session has begun").replace("running", "not ended") in capsys.readouterr().out


def test_an_older_session_does_not_count(tmp_path: Path) -> None:
    leave(tmp_path, "interrupted", began=1000.0)
    assert main(["interrupted", str(tmp_path), "--since", "999"]) == 0
    assert main(["interrupted", str(tmp_path), "--since", "1001"]) == 1
    assert main(["interrupted", str(tmp_path), "--since", "2025-01-31T12:00:00"]) == 1
    assert main(["interrupted", str(tmp_path), "--since", "1970-01-01T00:00:00+00:00"]) == 0


@pytest.mark.parametrize(("restarts", "code"), [(None, 0), ("2", 0), ("3", 1), ("9", 1)])
def test_a_killed_run_restarts_up_to_the_given_number(
    restarts: str | None, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if restarts is None:
        monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    else:
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    empty = tmp_path / "empty"
    assert main(["interrupted", str(empty), "--or-killed", "3"]) == code
    assert main(["interrupted", str(empty)]) == 1
    for status in STATUSES[1:]:
        leave(tmp_path, status)
        expected = {"interrupted": 0, "running": code}.get(str(status), 1)
        assert main(["interrupted", str(tmp_path), "--or-killed", "3"]) == expected


@pytest.mark.parametrize(("restarts", "limit", "code"), [(None, "1", 1), (None, "2", 0), ("0", "1", 0), ("1", "1", 1)])
def test_sessions_without_progress_are_not_repeated_forever(
    restarts: str | None, limit: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a rank fails on import, SLURM sends SIGTERM to the others. Without a limit, the job is requeued forever."""
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    if restarts is not None:  # in a job, sessions of earlier jobs do not count
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    steps = [(0, 8), (8, 8), (8, 8)]
    sessions = [Session(began=1.0, status="interrupted", first_step=first, last_step=last) for first, last in steps]
    RunFacts(name="Module", sessions=tuple(sessions)).write(tmp_path)
    assert main(["interrupted", str(tmp_path), "--without-progress", limit]) == code
    assert main(["interrupted", str(tmp_path)]) == 0
    assert main(["interrupted", str(tmp_path), "--without-progress", "-1"]) == 2
    RunFacts(name="Module", sessions=(*sessions[1:], sessions[0])).write(tmp_path)
    assert main(["interrupted", str(tmp_path), "--without-progress", "0"]) == 0


def test_a_folder_without_a_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text("[]")
    assert main(["interrupted", str(tmp_path)]) == 2
    assert main(["interrupted", str(tmp_path), "--since", "yesterday"]) == 2
    assert "--since 'yesterday': write seconds since 1970" in capsys.readouterr().err
    assert main(["interrupted", str(tmp_path), "--or-killed", "-1"]) == 2


def test_a_signal_before_the_first_session_is_recorded(tmp_path: Path) -> None:
    record_interruption(tmp_path / "logs", "Module", "SIGUSR1")
    record_interruption(tmp_path / "logs", "Module", "again")
    sessions = RunFacts.read(tmp_path / "logs").sessions
    assert [(session.status, session.reason) for session in sessions] == [
        ("interrupted", "SIGUSR1"),
        ("interrupted", "again"),
    ]
    assert main(["interrupted", str(tmp_path / "logs"), "--since", str(time.time() - 60)]) == 0


def run_script(block: str, folder: Path, code: int, answer: int, **variables: str) -> tuple[int, list[list[str]]]:
    """The exit code of a batch script, and its calls of `trainstack` and `scontrol`."""
    calls = folder / "calls"
    calls.write_text("")
    fakes = f"""
        note() {{ printf '%s\\0' "$@" >> {calls}; echo >> {calls}; }}
        srun() {{ return {code}; }}
        trainstack() {{ note trainstack "$@"; return {answer}; }}
        scontrol() {{ note scontrol "$@"; }}
        mpirun() {{ return {code}; }}
    """
    ended = subprocess.run(
        ["bash", "-c", fakes + block],
        env={**os.environ, "SLURM_JOB_ID": "77", "SLURM_NNODES": "2", **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.stderr == ""
    return ended.returncode, [line.split("\0")[:-1] for line in calls.read_text().splitlines()]


@pytest.mark.processes
@pytest.mark.parametrize("block", BLOCKS)
def test_batch_scripts_return_the_srun_code_and_requeue_interrupted_runs(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    asks = "trainstack interrupted" in block
    for code in (0, 1, 7, 75, 137, 138, 143):
        for status in STATUSES:
            ended, calls = run_script(block, tmp_path, code, answer=1)
            assert ended == code
            assert [call[0] for call in calls] == ["trainstack"] * asks
            if not asks:
                break
            _, command, directory, *options = calls[0]
            assert directory == "/shared/runs/experiment-1"
            leave(tmp_path, status)
            answer = main([command, str(tmp_path), *options])
            ended, calls = run_script(block, tmp_path, code, answer)
            requeued = status == "interrupted" or (code == 138 and status in (None, "running"))
            assert ended == code
            assert calls[1:] == [["scontrol", "requeue", "77"]] * requeued
            if status == "interrupted":  # of the previous session; this one failed on import
                leave(tmp_path, status, began=1.0)
                assert main([command, str(tmp_path), *options]) == (0 if code == 138 else 1)


@pytest.mark.processes
def test_a_task_of_an_array_requeues_only_itself(tmp_path: Path) -> None:
    """The last task has the job id of the array, with which `scontrol requeue` repeats all tasks."""
    (block,) = (str(block.values[0]) for block in BLOCKS if "trainstack interrupted" in str(block.values[0]))
    task = {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3"}
    _, calls = run_script(block, tmp_path, 75, 0, **task)
    assert calls[1:] == [["scontrol", "requeue", "77_3"]]


def test_one_batch_script_calls_trainstack_interrupted() -> None:
    assert sum("trainstack interrupted" in str(block.values[0]) for block in BLOCKS) == 1
