"""The demo and the digits run from any directory, print their claims, and leave no process running."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import trainstack as ts
from tests.helpers.patience import patience
from tests.helpers.scripts import run_python

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(directory: Path, script: str, *arguments: str) -> str:
    done = run_python(str(EXAMPLES / script), *arguments, cwd=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.distributed
def test_the_demo_shows_equal_bits_over_an_earlier_demo(tmp_path: Path) -> None:
    kept = tmp_path / "runs" / "demo" / "notes.txt"
    for name in ("unbroken", "killed", "ddp"):
        left = ts.Checkpoint(module_interface_state={"w": torch.ones(2)}, global_step=46)
        ts.write_checkpoint(left, kept.parent / name / "checkpoints", "checkpoint-000000046")
        (kept.parent / name / "metrics.csv").write_text("of an earlier demo")
    kept.write_text("of the user")

    # Not in a fork: the processes of the demo import it under the name of the main script.
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--epochs", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patience(60))
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout
    assert printed.startswith("Shows a training, ")
    assert re.findall(r"^(\d)\. ", printed, re.M) == list("12345")
    weights = re.findall(r"^   weights    (\w{16})\b", printed, re.M)
    assert len(weights) == 2
    assert weights[0] == weights[1]
    assert f"{weights[1]}, the same bits\n" in printed
    assert "metrics.csv has the same bytes\n" in printed
    assert "NOT THE SAME" not in printed
    killed = re.search(r"process (\d+) by SIGKILL in step 26", printed)
    resumed = re.search(r"process (\d+) from the checkpoint of step (\d+)", printed)
    assert int(resumed[2]) in (23, 40)  # of the end of the first epoch, or of a few steps after the signal
    assert not is_running(int(killed[1]))
    assert not is_running(int(resumed[1]))
    assert "verdict    same bits: steps 21 to 46\n" in printed
    two, one = map(float, re.search(r"([\d.]+) with two processes, ([\d.]+) with one", printed).groups())
    assert two == pytest.approx(one, rel=1e-4)
    assert 2.5 < float(re.search(r"epsilon ([\d.]+) at delta", printed)[1]) <= 3
    assert "earlier" not in (kept.parent / "unbroken" / "metrics.csv").read_text()
    assert kept.read_text() == "of the user"
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.processes
def test_the_script_to_copy_trains_and_resumes_a_finished_run(tmp_path: Path) -> None:
    said = run(tmp_path, "digits.py", "--epochs", "1", "--backend", "sp-bf16")
    assert "sp-bf16 on " in said
    again = run(tmp_path, "digits.py", "--epochs", "1", "--backend", "sp-bf16", "--resume")
    assert "nothing is left to do" in again
    assert said.splitlines()[-1] == again.splitlines()[-1]
    assert said.splitlines()[-1].startswith("weights ")
