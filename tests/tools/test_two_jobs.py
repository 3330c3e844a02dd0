"""A short run of `make two-jobs`, and a broken lease that it finds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tools import two_jobs
from trainstack.checkpointing import Lease

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The final weights of an undisturbed training."""
    return two_jobs.undisturbed(tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize("number", range(len(two_jobs.EXPECTED)))
def test_one_of_two_jobs_owns_the_directory(number: int, reference: dict[str, torch.Tensor], tmp_path: Path) -> None:
    two_jobs.run_case(number, 0, reference, tmp_path)


def test_a_broken_lease_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lease, "verify", lambda self: None)
    monkeypatch.setattr(Lease, "check", lambda self: None)
    reference = {name: torch.zeros(()) for name in ("0.weight",)}
    stopped = [scenario.__name__ for scenario in two_jobs.EXPECTED].index("stopped")
    with pytest.raises(AssertionError, match="stopped"):
        two_jobs.run_case(stopped, 0, reference, tmp_path)
