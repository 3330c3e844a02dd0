"""The memory that a process really holds, and the planned memory, for `run_world`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import trainstack as ts
from tests.helpers.modules import arguments
from tests.helpers.workers.meta import DATA, model
from trainstack._tensor_classes import is_sharded
from trainstack.trainer.core.memory_plan import plan_memory

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters),
    "Muon": lambda parameters: torch.optim.Muon([one for one in parameters if one.dim() == 2]),
}


def local_bytes(tensors: Any) -> int:
    """Bytes of this process's parts."""
    return sum((one.to_local() if is_sharded(one) else one).nbytes for one in tensors if isinstance(one, Tensor))


class Measured(ts.SupervisedModule):
    """Measures its gradients in the first step."""

    gradients = 0

    def on_end_backward(self, global_step: int, loss: Any) -> None:
        self.gradients = local_bytes(one.grad for one in self.parameters())


def held_and_planned(name: str, backend: str, world: int) -> list[tuple[int, ...]]:
    """Bytes of parameters, gradients and states after a step, and the same as planned before anything has memory."""
    with torch.device("meta"):
        network = model()
    network[0].bias.requires_grad_(False)
    optimizer = OPTIMIZERS[name](list(network.parameters()))
    shards = world if backend == "fsdp" else 1
    found = []
    module = Measured(network, nn.MSELoss(), OPTIMIZERS[name], DATA)
    trainer = ts.Trainer(module, arguments("unused", backend=backend, max_steps=1, train_batch_size=6))
    plan = plan_memory(network, [optimizer], shards=shards, rank=trainer.world.rank)
    trainer.train()
    states = [one for state in trainer.optimizers[0].state.values() for one in state.values()]
    found.append((local_bytes(module.parameters()), module.gradients, local_bytes(states)))
    trainer.close()
    assert plan.optimizer is not None
    return [*found, (plan.parameters, plan.gradients, plan.optimizer)]
