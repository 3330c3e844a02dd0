"""`python -m tools.launchers`: runs of each installed launcher, and the SLURM scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.launchers import __main__ as launchers
from tools.launchers import slurm


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("name", launchers.LAUNCHERS)
def test_each_run_ends_as_an_undisturbed_one(name: str, tmp_path: Path) -> None:
    reason = launchers.missing(name)
    if reason is not None:
        pytest.skip(f"python -m tools.launchers {name}: {reason}")
    rows = list(launchers.LAUNCHERS[name](tmp_path, ""))
    assert rows
    assert [row for row in rows if not row[2]] == []


@pytest.mark.parametrize("number", [0, 1])
def test_a_script_of_the_page_gets_other_sizes_and_commands(number: int) -> None:
    fitted = slurm.fitted(slurm.scripts()[number], "python -m one", "/a/run").splitlines()
    assert {'    scontrol requeue "$job"', "exit $code", "#SBATCH --requeue"} <= set(fitted)
    (command,) = (line for line in fitted if line.startswith("srun"))
    assert ("torchrun" if number else "--kill-on-bad-exit=1 python -m one") in command
    assert 'run="/a/run"' in fitted
    assert not [line for line in fitted if "train.py" in line or "--gpus" in line or "/shared" in line]
