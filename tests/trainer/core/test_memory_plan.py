"""The planned bytes of a process equal those that it holds, and planning changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.processes import run_world
from tests.helpers.workers import memory
from trainstack.trainer.core.memory_plan import format_bytes, plan_memory


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.BatchNorm1d(3))


MORE: dict[str, Callable[[Any], Any]] = {
    "AMSGrad": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "Adagrad": torch.optim.Adagrad,
    "NAdam": torch.optim.NAdam,
    "ASGD": torch.optim.ASGD,
}


@pytest.mark.parametrize("name", [*memory.OPTIMIZERS, *MORE])
def test_states_of_optimizers_are_known_before_a_step(name: str) -> None:
    module = make()
    optimizer = (memory.OPTIMIZERS | MORE)[name](list(module.parameters()))

    planned = plan_memory(module, [optimizer]).optimizer

    module(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    assert planned == memory.local_bytes(one for state in optimizer.state.values() for one in state.values())


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "size"), [("AdamW", 2), ("AdamW", 3), ("SGD with momentum", 3), ("SGD", 2)])
def test_each_rank_holds_the_planned_bytes(name: str, size: int) -> None:
    for held, planned in run_world(size, memory.held_and_planned, name=name, backend="fsdp", world=size):
        assert held == planned


@pytest.mark.distributed
def test_each_rank_of_ddp_holds_all() -> None:
    for held, planned in run_world(2, memory.held_and_planned, name="Adafactor", backend="ddp", world=2):
        assert held == planned


def test_planning_changes_neither_optimizer_nor_hooks() -> None:
    module = make()
    optimizer = torch.optim.AdamW(module.parameters())
    calls: list[object] = []
    optimizer.register_step_pre_hook(lambda *given: calls.append(given))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = [one.clone() for one in module.parameters()]

    assert plan_memory(module, [optimizer]).optimizer

    assert not calls
    assert not optimizer.state
    assert not getattr(optimizer, "_opt_called", False)  # which the schedule reads to find out whether a step was made
    assert all(map(torch.equal, before, module.parameters()))


@pytest.mark.parametrize(
    ("make_optimizer", "words"),
    [
        (torch.optim.LBFGS, "LBFGS keeps tensors in its attribute '_params'"),
        (torch.optim.SparseAdam, "SparseAdam cannot step without values"),
    ],
)
def test_unknown_parts_are_named(make_optimizer: Any, words: str) -> None:
    module = make()
    plan = plan_memory(module, [make_optimizer(list(module.parameters()))])

    assert plan.optimizer is None
    assert words in plan.unknown["optimizer"]
    assert plan.total == plan.parameters + plan.gradients + plan.buffers


def test_rows_of_a_parameter_are_divided_as_torch_does() -> None:
    parameter = nn.Module()
    parameter.weight = nn.Parameter(torch.empty(7, 3, device="meta"))
    sizes = [plan_memory(parameter, shards=4, rank=rank).parameters // 12 for rank in range(4)]

    assert sizes == [2, 2, 2, 1]
    assert [plan_memory(parameter, shards=9, rank=rank).parameters // 12 for rank in (0, 6, 7, 8)] == [1, 1, 0, 0]


def test_two_units_the_rest_and_gradients_are_gathered() -> None:
    module = nn.Sequential(nn.Linear(2, 10), nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 1))
    sizes = [4 * sum(one.numel() for one in part.parameters()) for part in module]
    units = list(module)[1:]

    assert plan_memory(module, shards=2, units=units).gathered == sizes[0] + 2 * sizes[1] + sizes[1]
    assert plan_memory(module, shards=2, units=units, accumulation=2).gathered == sizes[0] + 2 * sizes[1] + sum(sizes)
    assert plan_memory(module, units=units).gathered == 0


def test_activations_are_tensors_kept_by_a_pass_except_parameters() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        batch = torch.empty(4, 5)

    def step() -> Tensor:
        loss = module(batch).square().mean()
        assert loss.item() == 1  # it has no value; a step may read one for its log
        return loss

    plan = plan_memory(module, step=step)

    assert plan.activations == 4 * (4 * 5 + 4 * 7 + 4 * 3)  # inputs, outputs of tanh, and the input of the square
    assert "no batch" in plan_memory(module).unknown["activations"]
    assert (
        "a step on tensors without values failed"
        in plan_memory(module, step=lambda: batch.numpy()).unknown["activations"]
    )


def test_bytes_are_readable() -> None:
    assert [format_bytes(size) for size in (0, 1023, 1024, 3 * 2**20, 2**50)] == [
        "0 bytes",
        "1023 bytes",
        "1 KiB",
        "3 MiB",
        "1.02e+03 TiB",
    ]
