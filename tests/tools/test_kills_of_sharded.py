"""Short runs of the battery that kills ranks during sharded saves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.kills import sharded

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.mark.long
def test_killed_ranks_leave_only_whole_checkpoints(tmp_path: Path) -> None:
    found = sharded.run(tmp_path, kills=1, seed=1)
    assert (found.problems, found.kills) == ([], 1)
    assert found.committed > 0


@pytest.mark.long
def test_sixty_kills_lose_no_checkpoint(tmp_path: Path) -> None:
    found = sharded.run(tmp_path, kills=60, seed=2)
    assert (found.problems, found.kills) == ([], 60)
    assert found.while_writing > 0
