"""The state of an optimizer keeps its dtypes, its types and its plain attributes."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

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
def test_state_of_the_dtype_of_the_parameters_follows_them_to_another(first: torch.dtype) -> None:
    second = torch.float32 if first is torch.bfloat16 else torch.bfloat16
    module, other = layer(first), layer(second)
    optimizer, again = (torch.optim.AdamW(one.parameters(), lr=0.1, foreach=True) for one in (module, other))
    train(module, optimizer)
    states_of(other, again).update_state(copy.deepcopy(states_of(module, optimizer).get_state()), LOG)
    train(other, again)
    state = again.state[other.weight]
    assert (state["exp_avg"].dtype, state["step"].dtype) == (second, torch.float32)
