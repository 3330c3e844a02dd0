"""Groups of optimizers that user code changes during training are restored on resume."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from trainstack.backends import Workload, World
from trainstack.errors import UnsupportedStateError
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.resume.optimizer_states import OptimizerStates
from trainstack.trainer.schedulers.stepping import Schedules

LOG = RunLogger("ERROR")
NAMES = ("a", "b", "c", "d")


class Vectors(nn.Module):
    """Parameters of one shape, so that shapes reveal no mistake."""

    def __init__(self) -> None:
        super().__init__()
        for number, name in enumerate(NAMES):
            self.register_parameter(name, nn.Parameter(torch.arange(3.0) + number))


class Run:
    """A module with one or two optimizers, created in the same way in each run."""

    def __init__(
        self, make: Callable[..., torch.optim.Optimizer], layout: Sequence[Sequence[str]], split: bool
    ) -> None:
        self.module = Vectors()
        groups = [
            {"params": [getattr(self.module, name) for name in names], "lr": 0.01 * (number + 1), "weight_decay": 0.1}
            for number, names in enumerate(layout)
        ]
        self.optimizers = [make(part) for part in ([[one] for one in groups] if split else [groups])]
        self.rates = [schedulers.StepLR(one, 2, 0.5) for one in self.optimizers]
        work = Workload.from_module(self.module, self.optimizers, World())
        self.states = OptimizerStates(work, Schedules(self.rates))

    def train(self, steps: range) -> None:
        for step in steps:
            for number, parameter in enumerate(self.module.parameters()):
                parameter.grad = torch.sin(torch.arange(3.0) * (step + 1) + number)
            for one in (*self.optimizers, *self.rates):
                one.step()

    def everything(self) -> str:
        names = {p: name for name, p in self.module.named_parameters()}
        groups = [
            [{**group, "params": [names[p] for p in group["params"]]} for group in one.param_groups]
            for one in self.optimizers
        ]
        moments = [sorted((names[p], repr(entry)) for p, entry in one.state.items()) for one in self.optimizers]
        return repr((groups, moments, self.module.state_dict()))


def removed(run: Run) -> None:
    for parameter in run.optimizers[0].param_groups.pop(0)["params"]:
        del run.optimizers[0].state[parameter]


def moved(run: Run) -> None:
    first, second = run.optimizers[0].param_groups
    first["params"].append(second["params"].pop(0))


def exchanged(run: Run) -> None:
    run.optimizers[0].param_groups.reverse()


def divided(run: Run) -> None:
    last = run.optimizers[0].param_groups[0]["params"].pop()
    state = run.optimizers[0].state.pop(last)
    run.optimizers[0].add_param_group({"params": [last], "lr": 0.3, "initial_lr": 0.3})
    run.optimizers[0].state[last] = state


def handed_over(run: Run) -> None:
    one, other = run.optimizers
    parameter = one.param_groups[0]["params"].pop()
    other.param_groups[0]["params"].insert(0, parameter)
    other.state[parameter] = one.state.pop(parameter)


def replaced(run: Run) -> None:
    new, optimizer = nn.Parameter(run.module.a.detach() * 0.5), run.optimizers[0]
    optimizer.param_groups[0]["params"][0] = new
    optimizer.state[new] = optimizer.state.pop(run.module.a)
    run.module.a = new


@pytest.mark.parametrize("change", [removed, moved, exchanged, divided, handed_over, replaced])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adagrad])
def test_groups_that_user_code_changed_are_restored(make: Any, change: Callable[[Run], None]) -> None:
    split = change is handed_over
    whole = Run(make, [["a", "b"], ["c", "d"]], split)
    whole.train(range(3))
    change(whole)
    whole.train(range(3, 5))
    saved = copy.deepcopy((whole.module.state_dict(), whole.states.get_state()))
    for _ in range(2):  # a resumed run is resumed again
        again = Run(make, [["a", "b"], ["c", "d"]], split)
        again.module.load_state_dict(saved[0])
        again.states.update_state(saved[1], LOG)
        saved = copy.deepcopy((again.module.state_dict(), again.states.get_state()))
    for run in (whole, again):
        run.train(range(5, 9))
    assert again.everything() == whole.everything()


def test_the_state_of_a_removed_parameter_is_refused() -> None:
    run = Run(torch.optim.AdamW, [["a", "b"], ["c", "d"]], False)
    run.train(range(1))
    new = nn.Parameter(torch.zeros(3))
    run.optimizers[0].param_groups[0]["params"][0] = new
    run.module.a = new
    with pytest.raises(
        UnsupportedStateError, match=r"optimizer 0 \(AdamW\) has the state of a parameter of shape \(3,\)"
    ):
        run.states.get_state()
    old = next(iter(run.optimizers[0].state))
    run.optimizers[0].state[new] = run.optimizers[0].state.pop(old)
    assert set(run.states.get_state()["optimizers"][0]["state"]) == set(NAMES)
