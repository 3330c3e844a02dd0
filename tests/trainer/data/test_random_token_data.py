"""Random trainings on token data: `sp` equals a plain loop over documents, and ranks equal `sp`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.processes import run_world
from tests.helpers.workers.token_cases import KINDS, draw_tokens, plain_tokens, random_tokens, train_tokens

SEED = int(os.environ.get("TEST_SEED", "0"))


def resumed_alike(found: dict[str, Any]) -> bool:
    """Whether a run in two parts saw the same documents, and ended with the same bits."""
    seen = {**found["begun"]["seen"], **found["rest"]["seen"]}
    return bool(seen == found["whole"]["seen"] and found["rest"]["weights"] == found["whole"]["weights"])


def close(one: Any, other: Any) -> bool:
    return bool(np.allclose(one["weights"], other["weights"], rtol=0, atol=1e-10))


@pytest.mark.parametrize("number", range(2 * len(KINDS)))
def test_one_process_equals_a_plain_loop_over_documents(number: int, tmp_path: Path) -> None:
    case = draw_tokens(SEED, number)
    found = random_tokens(SEED, [number], str(tmp_path), "sp")[0]
    steps = [found["whole"]["seen"][step] for step in sorted(found["whole"]["seen"])]
    assert close(found["whole"], {"weights": plain_tokens(case, steps)}), case
    assert len(steps) > case.stop
    assert resumed_alike(found), case


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_ranks_equal_one_process_and_resume_with_the_same_bits(size: int, tmp_path: Path) -> None:
    numbers = list(range(len(KINDS)))
    ranks = run_world(size, random_tokens, seed=SEED, numbers=numbers, directory=str(tmp_path), timeout=60)
    for number in numbers:
        case, found = draw_tokens(SEED, number), [rank[number] for rank in ranks]
        alone = train_tokens(case, str(tmp_path / f"alone-{number}"), "sp")
        for step, documents in alone["seen"].items():
            shares = [rank["whole"]["seen"].get(str(step), []) for rank in found]
            assert sorted(one for share in shares for one in share) == documents, (case, step)
        assert all(close(rank["whole"], alone) for rank in found), case
        assert all(resumed_alike(rank) for rank in found), case
        fewer = train_tokens(case, f"{tmp_path}/{number}/cut", "sp", resume=True)
        assert fewer["weights"] == found[0]["whole"]["weights"]
