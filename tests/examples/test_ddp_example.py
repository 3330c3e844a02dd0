"""The example of several processes trains under torchrun, and only rank 0 prints."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.patience import patience

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "ddp.py"


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.spec("PMT-23", "PMB-17", "PMB-19", "PMB-20", "FN-03")
def test_torchrun_trains_the_example_and_only_one_process_prints(tmp_path: Path) -> None:
    """The exit status is not checked: gloo sometimes aborts a process at its exit, after all work."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), "--device", "cpu", "--epochs", "2"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=patience(60),
    )
    said = re.findall(r"validation accuracy (\S+) over 2 processes", done.stdout)
    assert len(said) == 1, done.stdout + done.stderr
    assert done.stdout.count("backend     ddp on cpu") == 1

    with open(tmp_path / "runs" / "ddp" / "metrics.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["name"] == "val/accuracy"]
    assert [int(row["step"]) for row in rows] == [23, 46]
    accuracy = float(rows[-1]["value"])
    assert said[0] == f"{accuracy:.1%}"
    assert accuracy * 360 == pytest.approx(round(accuracy * 360), abs=1e-3), "a share of all 360 samples"
    assert accuracy > 0.5
