"""SIGKILL after a save, around an epoch that ends early, and during averages that begin late."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.processes import run_world
from tests.helpers.workers.killed import killed


@pytest.mark.processes
def test_a_killed_run_ends_with_the_same_averages(tmp_path: Path) -> None:
    whole = killed(str(tmp_path / "whole"))
    assert whole["last"] == 5 + 8 + 8
    for at, first in (("saved", 5), ("step 5", 5), ("step 7", 7)):
        folder = str(tmp_path / at)
        (answer,) = run_world(1, killed, fresh=True, may_fail=True, directory=folder, at=at)
        assert answer["exit"] != 0
        rest = killed(folder)
        assert rest["first"] == first
        assert rest["weights"] == whole["weights"]
