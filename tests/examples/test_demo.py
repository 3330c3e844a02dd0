"""The examples run from any directory, show the announced results and leave nothing running."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

import trainstack as ts
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
def test_the_demo_kills_resumes_and_finds_the_same_weights_whatever_its_folder_holds(tmp_path: Path) -> None:
    kept = tmp_path / "runs" / "demo" / "notes.txt"
    for name in ("sp", "warm-up", "interrupted"):  # what an earlier tour has left
        left = ts.Checkpoint(module_interface_state={"w": torch.ones(2)}, global_step=46)
        ts.write_checkpoint(left, kept.parent / name / "checkpoints", "checkpoint-000000046")
        (kept.parent / name / "metrics.csv").write_text("of an earlier tour")
    kept.write_text("not the demo's")

    said = run(tmp_path, "demo.py", "--epochs", "2")
    weights = re.findall(r"weights (\w{16})$", said, re.M)
    assert len(weights) == 2
    assert weights[0] == weights[1]
    assert "The weights are the same bits." in said
    assert "The metrics files are the same bytes." in said
    assert "NOT THE SAME" not in said
    resumed_after = int(re.search(r"'resumed after global step (\d+)'", said)[1])
    assert 0 < resumed_after < 46
    assert not [pid for pid in map(int, re.findall(r"process (\d+) ", said)) if is_running(pid)]
    assert (tmp_path / "runs" / "demo" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "earlier" not in (tmp_path / "runs" / "demo" / "sp" / "metrics.csv").read_text()
    assert kept.read_text() == "not the demo's"
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.processes
def test_the_script_to_copy_trains_and_resumes_a_finished_run(tmp_path: Path) -> None:
    said = run(tmp_path, "digits.py", "--epochs", "1", "--backend", "sp-bf16")
    assert "sp-bf16 on " in said
    again = run(tmp_path, "digits.py", "--epochs", "1", "--backend", "sp-bf16", "--resume")
    assert "nothing is left to do" in again
    assert said.splitlines()[-1] == again.splitlines()[-1]
    assert said.splitlines()[-1].startswith("weights ")
