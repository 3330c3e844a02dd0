"""Data sets of 10**12 samples: a run starts at once, in the memory of a small one."""

from __future__ import annotations

from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import trainstack as ts
from tests.helpers.patience import patience
from tests.helpers.processes import run_world
from tests.helpers.workers.huge import huge, in_parts
from trainstack.trainer.core.order import DataOrder
from trainstack.trainer.core.shuffling import LARGEST_IN_MEMORY, ORDER_VERSION
from trainstack.trainer.core.state import RunState

LENGTH = 10**12


def check_costs(*runs: dict[str, Any]) -> None:
    """Nothing was allocated for each sample: a bit for each would take 125 GB."""
    for run in runs:
        assert run["seconds"] < patience(5)
        assert run["MB"] < 300, "modules that are imported by the first run included"


def expected(steps: int, **changes: Any) -> list[list[int]]:
    order = DataOrder(**{"length": LENGTH, "global_batch": 10, "micro_batch": 10, "seed": 0, **changes})
    return [share.micro_batches[0].tolist() for share, _ in zip(order.local_batches(0), range(steps), strict=False)]


@pytest.mark.parametrize("shape", ["plain", "ordered", "dict", "subset"])
def test_a_run_starts_at_once_and_resumes_exactly(shape: str, tmp_path: Path) -> None:
    options = {"shape": shape, "backend": "sp"}
    whole = huge(str(tmp_path / "whole"), steps=5, **options)
    begun = huge(str(tmp_path / "parts"), steps=3, **options)
    rest = huge(str(tmp_path / "parts"), steps=5, resume=True, **options)

    check_costs(whole, begun, rest)
    assert [whole["steps"], begun["steps"], rest["steps"]] == [5, 3, 5]
    assert begun["seen"] == whole["seen"][:3]
    assert rest["seen"][3:] == whole["seen"][3:]
    assert rest["weights"] == whole["weights"]
    if shape == "subset":
        assert whole["seen"] == [[7 + index for index in step] for step in expected(5, length=LENGTH - 7)]
    else:
        assert whole["seen"] == expected(5, shuffle=shape != "ordered")


@pytest.mark.distributed
def test_ranks_start_at_once_and_resume_exactly(tmp_path: Path) -> None:
    whole, begun, rest = zip(*run_world(2, in_parts, directory=str(tmp_path)), strict=True)

    check_costs(*whole, *begun, *rest)
    assert [run["steps"] for run in (*whole, *begun, *rest)] == [5, 5, 3, 3, 5, 5]
    assert [run["weights"] for run in rest] == [run["weights"] for run in whole]
    for rank in range(2):
        assert begun[rank]["seen"] == whole[rank]["seen"][:3]
        assert rest[rank]["seen"][3:] == whole[rank]["seen"][3:]
    assert [a + b for a, b in zip(*(run["seen"] for run in whole), strict=True)] == expected(5)


def test_a_run_of_an_older_release_continues_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    length = LARGEST_IN_MEMORY + 1
    with monkeypatch.context() as older:
        older.setattr(RunState, "get_state", without_version)
        older.setattr(DataOrder, "indices", DataOrder.permutation)
        whole = huge(str(tmp_path / "whole"), length, steps=5, backend="sp")
        huge(str(tmp_path / "parts"), length, backend="sp")
    rest = huge(str(tmp_path / "parts"), length, steps=5, backend="sp", resume=True)
    again = huge(str(tmp_path / "parts"), length, steps=6, backend="sp", resume=True)

    assert whole["seen"] == expected(5, length=length, version=0) != expected(5, length=length)
    assert rest["seen"][3:] == whole["seen"][3:]
    assert rest["weights"] == whole["weights"]
    assert again["seen"][5:] == expected(6, length=length, version=0)[5:]


def without_version(state: RunState) -> dict[str, Any]:
    return {name: value for name, value in asdict(state).items() if name != "order_version"}


def test_a_checkpoint_of_a_newer_order_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(RunState, "get_state", lambda state: {**asdict(state), "order_version": ORDER_VERSION + 1})
        huge(str(tmp_path), backend="sp")
    with pytest.raises(ts.CheckpointMismatchError, match=r"with version 2 of the order.*Resume with the release"):
        huge(str(tmp_path), steps=5, backend="sp", resume=True)


def test_overfitting_uses_the_first_samples_of_the_order(tmp_path: Path) -> None:
    run = huge(str(tmp_path), steps=4, backend="sp", overfit_batches=2)

    check_costs(run)
    first, second = (sorted(chain(*part)) for part in (run["seen"][:2], run["seen"][2:]))
    assert first == second == sorted(chain(*expected(2)))


def test_a_private_run_draws_from_many_records(tmp_path: Path) -> None:
    private = ts.DifferentialPrivacyArguments(delta=1e-13, noise_multiplier=1.0)
    run = huge(str(tmp_path), shape="private", backend="sp-dp", differential_privacy_args=private)

    check_costs(run)
    assert run["steps"] == 3
