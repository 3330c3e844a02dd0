"""The state of an optimizer keeps its dtypes, its types and its plain attributes."""

from __future__ import annotations

import copy
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, weights
from tests.helpers.modules import train as train_module
from trainstack.backends import Workload, World
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.resume.optimizer_states import OptimizerStates
from trainstack.trainer.schedulers.stepping import Schedules

LOG = RunLogger("WARNING")


def states_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerStates:
    return OptimizerStates(Workload.from_module(module, [optimizer], World()), Schedules([]))


def layer(dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2).to(dtype)


class Master(torch.optim.SGD):
    """Keeps weights and a sum of gradients in float64, and values of other types."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"master": p.double(), "count": torch.zeros(2, dtype=torch.int64), "mode": "fast"}
                    state["nested"] = (1, [torch.ones(1, dtype=torch.float64)], {"a": torch.tensor([True])})
                    state |= {"seen": deque([1, 2], maxlen=2), "table": np.arange(2, dtype=np.uint16), "none": None}
                state["count"] += 1
                state["seen"].append(int(state["count"][0]))
                state["master"].sub_(p.grad.double(), alpha=group["lr"])
                p.copy_(state["master"])


class OwnForm(Master):
    """Has a state dict with an additional item."""

    def state_dict(self) -> Any:
        return super().state_dict() | {"mode": "slow"}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "mode"})


def train(module: nn.Linear, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for number in range(steps):
        for p in module.parameters():
            p.grad = torch.full_like(p, 0.1 * (number + 1))
        optimizer.step()


def entries(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [(p.dtype, optimizer.state[p]) for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [Master, OwnForm])
def test_a_state_keeps_its_dtypes_and_types(kind: type[Master], dtype: torch.dtype) -> None:
    module = layer(dtype)
    optimizer = kind(module.parameters(), lr=0.1)
    states = states_of(module, optimizer)
    train(module, optimizer)
    saved = copy.deepcopy(states.get_state())
    other = layer(dtype)
    again = kind(other.parameters(), lr=0.1)
    other.load_state_dict(module.state_dict())
    states_of(other, again).update_state(saved, LOG)
    assert repr(entries(again)) == repr(entries(optimizer))
    train(module, optimizer)
    train(other, again)
    assert repr(entries(again)) == repr(entries(optimizer))
    assert all(map(torch.equal, other.parameters(), module.parameters()))


@pytest.mark.parametrize("first", [torch.bfloat16, torch.float32], ids=str)
def test_states_in_the_dtype_of_parameters_follow_its_change(first: torch.dtype) -> None:
    second = torch.float32 if first is torch.bfloat16 else torch.bfloat16
    module, other = layer(first), layer(second)
    optimizer, again = (torch.optim.AdamW(one.parameters(), lr=0.1, foreach=True) for one in (module, other))
    train(module, optimizer)
    states_of(other, again).update_state(copy.deepcopy(states_of(module, optimizer).get_state()), LOG)
    train(other, again)
    state = again.state[other.weight]
    assert (state["exp_avg"].dtype, state["step"].dtype) == (second, torch.float32)


class Counting(torch.optim.SGD):
    """Its rate depends on plain attributes."""

    def __init__(self, parameters: Any, lr: float, power: float = 0.5) -> None:
        super().__init__(parameters, lr=lr)
        self.count, self.rates, self.power, self.best = 0, [lr], power, None
        self.held = [p for group in self.param_groups for p in group["params"]]
        self.groups = self.param_groups
        self.means, self.table = {"all": torch.zeros(1)}, np.zeros(1)
        self.generator, self.noise = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)

    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.means["all"] += 1 + torch.rand(1, generator=self.generator)
        self.table += 1
        self.best = min(self.rates)
        self.latest: Any = (self.count, torch.tensor(self.best))
        for group in self.param_groups:
            group["lr"] = self.rates[0] / (self.count + self.means["all"].item() + self.table[0]) ** self.power
            self.rates.append(group["lr"])
        super().step()


def attributes_of(optimizer: Counting) -> str:
    return repr([optimizer.count, optimizer.rates, optimizer.best, optimizer.means, optimizer.table, optimizer.latest])


def test_plain_attributes_that_have_changed_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    module, other = layer(torch.float32), layer(torch.float32)
    optimizer, again = Counting(module.parameters(), 0.1), Counting(other.parameters(), 0.1, power=0.3)
    states = states_of(module, optimizer)
    assert sorted(states.get_state()["optimizers"][0]["attributes"]["values"]) == ["means", "table"]
    train(module, optimizer)
    saved = copy.deepcopy(states.get_state())
    states_of(other, again).update_state(saved, LOG)
    assert attributes_of(again) == attributes_of(optimizer)
    assert again.power == 0.3  # an option of this run
    assert again.held[0] is other.weight
    for _ in range(2):
        states.warn_of_lost(LOG)
    (message,) = caplog.messages
    assert "optimizer 0 (Counting) has changed its attributes generator (torch._C.Generator), which" in message


class Logging(torch.optim.SGD):
    """Appends to lists of the caller."""

    def __init__(self, parameters: Any, short: list[int], long: list[int]) -> None:
        super().__init__(parameters, lr=0.1)
        self.short, self.long = short, long

    def step(self, closure: Any = None) -> None:
        self.short.append(1)
        self.long += [1] * 10_000
        super().step()


def test_containers_are_restored_in_place_and_large_ones_named_once(caplog: pytest.LogCaptureFixture) -> None:
    module, other, mine = layer(torch.float32), layer(torch.float32), list[int]()
    optimizer, again = Logging(module.parameters(), [], []), Logging(other.parameters(), mine, [])
    states = states_of(module, optimizer)
    for _ in range(2):
        train(module, optimizer)
        states.warn_of_lost(LOG)
    (message,) = caplog.messages
    assert "has changed its attributes long (list), which a checkpoint cannot store" in message
    states_of(other, again).update_state(copy.deepcopy(states.get_state()), LOG)
    assert (again.short is mine, mine, again.long) == (True, optimizer.short, [])


def test_attributes_in_parameter_order_are_refused_in_another_order() -> None:
    class Slow(torch.optim.SGD):
        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, lr=lr)
            self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    module, other = layer(torch.float32), layer(torch.float32)
    saved = states_of(module, Slow([module.weight, module.bias], 0.1)).get_state()
    with pytest.raises(ts.CheckpointMismatchError, match="in the order of its parameters"):
        states_of(other, Slow([other.bias, other.weight], 0.1)).update_state(saved, LOG)


def test_a_custom_optimizer_that_counts_resumes_with_the_same_bits(tmp_path: Path) -> None:
    def run(folder: str, epochs: int, **changes: Any) -> Any:
        module = Classifier(numbers(16), optimizer=Plain)
        train_module(module, tmp_path / folder, epochs=epochs, max_steps=changes.pop("max_steps", None), **changes)
        return weights(module)

    class Plain(Counting):
        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, lr)
            del self.generator, self.noise

        def step(self, closure: Any = None) -> None:
            self.generator = torch.Generator().manual_seed(self.count)
            super().step()
            del self.generator

    saving = {"checkpointer_args": ts.DefaultCheckpointerArguments()}
    whole = run("whole", 3)
    run("broken", 3, max_steps=5, **saving)
    assert torch.equal(run("broken", 3, resume=True, **saving), whole)


@pytest.mark.parametrize("trial", ["fit_micro_batch", "find_lr"])
def test_a_trial_restores_plain_attributes(trial: str, tmp_path: Path) -> None:
    ends = []
    for one in (None, trial):
        module = Classifier(numbers(16), optimizer=Counting)
        trainer = ts.Trainer(module, arguments(tmp_path / str(one), fit_micro_batch=one == "fit_micro_batch"))
        if one == "find_lr":
            group = trainer.optimizers[0].param_groups[0]
            ts.find_lr(trainer, start=1e-3, end=1e-2, steps=3)
            assert not hasattr(trainer.optimizers[0], "latest")
            assert trainer.optimizers[0].param_groups[0] is group
        trainer.train()
        ends.append((weights(module).tolist(), attributes_of(trainer.optimizers[0])))
    assert ends[0] == ends[1]
