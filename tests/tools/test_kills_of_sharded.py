"""The battery that kills ranks which write sharded checkpoints, in a short form."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.kills import sharded

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.mark.long
def test_killed_ranks_leave_no_half_checkpoint_and_lose_none(tmp_path: Path) -> None:
    found = sharded.run(tmp_path, kills=1, seed=1)
    assert (found.problems, found.kills) == ([], 1)
    assert found.committed > 0


@pytest.mark.long
def test_sixty_kills(tmp_path: Path) -> None:
    found = sharded.run(tmp_path, kills=60, seed=2)
    assert (found.problems, found.kills) == ([], 60)
    assert found.while_writing > 0
