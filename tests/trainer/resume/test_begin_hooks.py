"""What begins a training or an epoch acts once on the state of a run, however often the run is interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.helpers.beginnings import EVERY_STEP, PLACES, begun, unlike
from tests.helpers.modules import Classifier, arguments, numbers
from tests.helpers.processes import run_world
from tests.helpers.workers import checkpoints as workers

STOPS = {5, 6, 8, 11}
"""At the first and a middle step and the last one of an epoch of four steps; two of them in one epoch, twice."""


@pytest.mark.parametrize("again", [False, True], ids=["resumed", "again"])
@pytest.mark.parametrize("act", ["advance", "reset"])
@pytest.mark.parametrize("place", PLACES)
def test_a_call_that_begins_something_acts_once(place: str, act: str, again: bool, tmp_path: Path) -> None:
    unbroken = begun(tmp_path / "unbroken", place, act, set())
    broken = begun(tmp_path / "broken", place, act, set(STOPS), again=again)

    assert unlike(tmp_path / "unbroken", tmp_path / "broken") == []
    assert broken.samples == unbroken.samples
    assert len({tuple(sorted(batch)) for _, batch in unbroken.samples}) == 12


@pytest.mark.parametrize("place", ["hook", "loader", "epoch_begin"])
def test_so_it_does_on_each_of_two_processes(place: str, tmp_path: Path) -> None:
    unbroken = run_world(2, workers.begun, directory=str(tmp_path / "unbroken"), place=place, stops=[])
    broken = run_world(2, workers.begun, directory=str(tmp_path / "broken"), place=place, stops=[5, 6, 8])

    assert broken == unbroken
    assert unbroken[0]["samples"] != unbroken[1]["samples"]
    assert unbroken[0]["kept"] == unbroken[1]["kept"]


class Adds(Classifier):
    """Adds a group in a hook, and stops at step 2."""

    def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
        if epoch == 0:
            self.trainer.optimizers[0].add_param_group({"params": [self.extra]})

    def on_end_train_step(self, global_step: int) -> None:
        if global_step == 2:
            raise InterruptedError


def test_a_hook_that_adds_a_group_again_gets_an_error_with_the_condition_to_write(tmp_path: Path) -> None:
    for expected in (InterruptedError, ValueError):
        module: Any = Adds(numbers(32), optimizer=lambda parameters, lr: torch.optim.SGD([*parameters][1:], lr=lr))
        module.extra = torch.nn.Parameter(torch.zeros(2))
        module.trainer = ts.Trainer(module, arguments(tmp_path, checkpointer_args=EVERY_STEP, resume="auto"))
        with pytest.raises(expected) as caught:
            module.trainer.train()
        module.trainer.close()

    assert "if len(self.opt.param_groups) < 2" in "".join(caught.value.__notes__)
