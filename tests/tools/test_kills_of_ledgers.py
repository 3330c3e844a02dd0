"""The battery that kills runs with one ledger, in a short form."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.kills import ledger

pytestmark = [pytest.mark.slow, pytest.mark.processes]


def test_the_sum_of_a_ledger_is_never_below_the_releases_of_killed_runs(tmp_path: Path) -> None:
    found = ledger.run(tmp_path, kills=3, seed=2)
    assert found.problems == []
    assert 0 < found.released <= found.recorded <= found.released + 16 * found.kills


@pytest.mark.long
def test_forty_kills(tmp_path: Path) -> None:
    found = ledger.run(tmp_path, kills=40, seed=4)
    assert (found.problems, found.kills) == ([], 40)
