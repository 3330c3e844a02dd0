"""Begin hooks of a training or an epoch change the state of a run once, over any number of interruptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.helpers.beginnings import EVERY_STEP, PLACES, begun, unlike
from tests.helpers.modules import Classifier, arguments, numbers, weights
from tests.helpers.processes import run_world
from tests.helpers.workers import checkpoints as workers

STOPS = {5, 6, 8, 11}
"""The first, a middle and the last step of an epoch of four steps; the second epoch has three interruptions."""


@pytest.mark.parametrize("again", [False, True], ids=["resumed", "again"])
@pytest.mark.parametrize("act", ["advance", "reset"])
@pytest.mark.parametrize("place", PLACES)
def test_a_hook_that_begins_an_epoch_changes_state_once(place: str, act: str, again: bool, tmp_path: Path) -> None:
    unbroken = begun(tmp_path / "unbroken", place, act, set())
    broken = begun(tmp_path / "broken", place, act, set(STOPS), again=again)

    assert unlike(tmp_path / "unbroken", tmp_path / "broken") == []
    assert broken.samples == unbroken.samples
    assert len({tuple(sorted(batch)) for _, batch in unbroken.samples}) == 12


@pytest.mark.distributed
@pytest.mark.parametrize("place", ["hook", "loader", "epoch_begin"])
@pytest.mark.distributed
def test_begin_hooks_change_state_once_on_two_processes(place: str, tmp_path: Path) -> None:
    unbroken = run_world(2, workers.begun, directory=str(tmp_path / "unbroken"), place=place, stops=[])
    broken = run_world(2, workers.begun, directory=str(tmp_path / "broken"), place=place, stops=[5, 6, 8])

    assert broken == unbroken
    assert unbroken[0]["samples"] != unbroken[1]["samples"]
    assert unbroken[0]["kept"] == unbroken[1]["kept"]


@pytest.mark.parametrize("saves", [False, True])
def test_a_loader_that_failed_is_asked_again_with_the_effects_of_the_hook(saves: bool, tmp_path: Path) -> None:
    def trained(fails: int) -> torch.Tensor:
        epochs: list[int] = []

        class Moves(Classifier):
            def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
                epochs.append(epoch)
                with torch.no_grad():
                    self.net[0].bias += 1.0

            def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
                nonlocal fails
                if len(epochs) == 2 and fails:
                    fails -= 1
                    raise InterruptedError
                return super().get_train_dataloader(sampler, batch_size)

        module = Moves(numbers(16))
        saving = EVERY_STEP if saves else ts.DefaultCheckpointerArguments(checkpoint=False)
        trainer = ts.Trainer(module, arguments(tmp_path / str(fails), epochs=2, checkpointer_args=saving))
        for _ in range(fails):
            with pytest.raises(InterruptedError):
                trainer.train()
        trainer.train()
        assert epochs == [0, 1]
        return weights(module)

    assert torch.equal(trained(fails=2), trained(fails=0))


class OwnForm(torch.optim.SGD):
    """An optimizer with its own `state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()


class Adds(Classifier):
    """Adds a parameter group in the hook of each epoch without a check that it exists."""

    def __init__(self, make: Any, stops: set[int]) -> None:
        super().__init__(numbers(32), optimizer=make)
        self.extra = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(2)) for _ in range(3))
        self.stops = stops

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> tuple[Any, Any]:
        self.optimizer = self.make_optimizer(self.net.parameters(), lr=0.1)
        return self.optimizer, None

    def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
        if epoch == 2:
            self.optimizer.param_groups[0]["params"].append(self.extra[2])
        else:
            self.optimizer.add_param_group({"params": [self.extra[epoch]], "weight_decay": 0.1})
        self.added = self.optimizer.param_groups[-1]

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return super().train_step(global_step, batch, device) * sum(one.square().sum() for one in self.extra)

    def on_end_train_step(self, global_step: int) -> None:
        self.added["lr"] *= 0.9
        if global_step in self.stops:
            self.stops.remove(global_step)
            raise InterruptedError


def adding(folder: Path, stops: set[int], make: Any = torch.optim.AdamW) -> None:
    """Train 3 epochs of 4 steps over all interruptions."""
    stops = set(stops)
    while True:
        args = arguments(folder, epochs=3, checkpointer_args=EVERY_STEP, resume="auto")
        trainer = ts.Trainer(Adds(make, stops), args)
        try:
            trainer.train()
            return
        except InterruptedError:
            continue
        finally:
            trainer.close()


def test_a_hook_may_add_a_group_without_a_check(tmp_path: Path) -> None:
    adding(tmp_path / "unbroken", set())
    adding(tmp_path / "broken", {2, 5, 6, 10})

    assert unlike(tmp_path / "unbroken", tmp_path / "broken") == []


def test_with_a_custom_state_dict_the_error_names_the_check(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="more than one") as caught:
        adding(tmp_path, {2}, OwnForm)

    assert "if len(self.opt.param_groups) < 2" in "".join(caught.value.__notes__)
