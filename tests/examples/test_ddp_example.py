"""The example of many processes trains under torchrun, and goes on in another number of them."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "ddp.py"


def accuracies_said(directory: Path, processes: int, *arguments: str) -> list[str]:
    """What a run under torchrun prints as its accuracy.

    Its exit status tells nothing: gloo sometimes aborts a process at its exit, after all work is done.
    """
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), "--device", "cpu", *arguments],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    said = re.findall(rf"validation accuracy (\S+)% over {processes} processes", done.stdout)
    assert said, done.stdout + done.stderr
    return said


def recorded(directory: Path, name: str) -> list[tuple[int, float]]:
    """The steps and values of one metric."""
    with open(directory / "runs" / "ddp" / "metrics.csv", encoding="utf-8") as file:
        return [(int(row["step"]), float(row["value"])) for row in csv.DictReader(file) if row["name"] == name]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.spec("PMT-23", "PMB-17", "PMB-19", "FN-03")
def test_torchrun_trains_and_resumes_the_example_and_one_process_speaks(tmp_path: Path) -> None:
    said = accuracies_said(tmp_path, 2, "--epochs", "2")
    assert len(said) == 1
    assert float(said[0]) > 50

    resumed = accuracies_said(tmp_path, 4, "--epochs", "3", "--resume")
    assert len(resumed) == 1
    accuracy = recorded(tmp_path, "val/accuracy")
    assert [step for step, _ in accuracy] == [23, 46, 69]
    assert [f"{value:.1%}" for _, value in accuracy[1:]] == [f"{said[0]}%", f"{resumed[0]}%"]
    assert all(round(value * 360) == pytest.approx(value * 360) for _, value in accuracy), "of all 360 samples"
