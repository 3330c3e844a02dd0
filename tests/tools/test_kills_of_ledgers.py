"""Short runs of the battery that kills runs with one ledger."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.kills import ledger

pytestmark = [pytest.mark.slow, pytest.mark.processes]


def test_a_ledger_records_all_releases_of_killed_runs(tmp_path: Path) -> None:
    found = ledger.run(tmp_path, kills=3, seed=2)
    assert found.problems == []
    assert 0 < found.released <= found.recorded <= found.released + 16 * found.kills


@pytest.mark.long
def test_forty_kills_lose_no_release(tmp_path: Path) -> None:
    found = ledger.run(tmp_path, kills=40, seed=4)
    assert (found.problems, found.kills) == ([], 40)
