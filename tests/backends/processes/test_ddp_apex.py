"""`ddp-amp-apex` over two processes, with apex's own code under a shim."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.apex_shim import ROOT, SHA256, get_wheel
from tests.helpers.processes import run_world
from tests.helpers.workers import apex

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def wheel() -> Path:
    place = ROOT / ".cache" / f"apex-{SHA256[:12]}"
    problem = get_wheel(place)
    if problem:
        pytest.skip(problem)
    return place


@pytest.mark.spec("PMB-01", "PMB-15")
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_two_processes_end_where_one_does_and_skip_together(level: str, wheel: Path) -> None:
    alone = run_world(1, apex.apex, fresh=True, wheel=str(wheel), level=level, backend="sp-amp-apex")[0]
    one, other = run_world(2, apex.apex, fresh=True, wheel=str(wheel), level=level, backend="ddp-amp-apex")

    assert one["weights"] == other["weights"]
    assert one["skipped"] == other["skipped"] == alone["skipped"] == (0 if level == "O0" else 1)
    difference = torch.tensor(one["weights"]) - torch.tensor(alone["weights"])
    assert difference.abs().max() <= (1e-6 if level == "O0" else 2e-3)
