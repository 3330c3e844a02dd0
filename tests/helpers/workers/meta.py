"""Modules that were built on the meta device, for `run_world`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import trainstack as ts
from tests.helpers.modules import arguments, weights

DATA = TensorDataset(*(torch.randn(13, n, generator=torch.Generator().manual_seed(n)).double() for n in (5, 1)))


class Block(nn.Module):
    """A layer with a parameter and a table."""

    table: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=torch.float64)
        self.gain = nn.Parameter(torch.empty(width, dtype=torch.float64))
        self.register_buffer("table", torch.empty(width, dtype=torch.float64), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gain)
        self.table.copy_(torch.arange(len(self.table)))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.tanh(self.linear(inputs) * self.gain + self.table)


def model(width: int = 7) -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, width, dtype=torch.float64),
        Block(width),
        Block(width),
        nn.LayerNorm(width, dtype=torch.float64),
        nn.Linear(width, 1, dtype=torch.float64),
    )


def built(on: str, seed: int = 4) -> nn.Module:
    """`model`, built on the device `on` under a seed."""
    torch.manual_seed(seed)
    with torch.device(on):
        return model()


def trained(
    on: str, backend: str, directory: str = "unused", epochs: int = 2, seed: int = 4, **options: Any
) -> dict[str, Any]:
    """Train a module that was built on the device `on`; its weights before and after, and the next random number."""
    module = ts.SupervisedModule(built(on, seed), nn.MSELoss(), "adamw", DATA)
    args = arguments(directory, backend=backend, epochs=epochs, train_batch_size=6, gpu_batch_size_limit=2, **options)
    trainer = ts.Trainer(module, args)
    assert trainer.plan.total_steps
    begin = weights(module).tolist()
    trainer.train()
    found = {"begin": begin, "end": weights(module).tolist(), "next": torch.rand(2).tolist()}
    trainer.close()
    return found


def resumed(directory: str, on: str, backend: str, max_steps: int) -> list[float]:
    """Train a module that was built on the device `on`, up to a step, from where the last training has ended."""
    return list(
        trained(
            on,
            backend,
            directory,
            epochs=8,
            seed=9 if Path(directory).exists() else 4,
            max_steps=max_steps,
            resume="auto",
            checkpointer_args=ts.DefaultCheckpointerArguments(),
        )["end"]
    )


def started(source: str, on: str, backend: str, strict: bool) -> dict[str, Any]:
    """Train one step from the weights in `source`; the weights before it, the report, and the next draw."""
    module = ts.SupervisedModule(built(on, seed=9), nn.MSELoss(), "sgd", DATA)
    args = arguments(
        "unused",
        backend=backend,
        max_steps=1,
        train_batch_size=6,
        init_weights_from=source,
        init_weights_strict=strict,
    )
    trainer = ts.Trainer(module, args)
    assert trainer.plan.total_steps == 1
    begin, report = weights(module).tolist(), str(trainer.warm_start_report).replace(source, "there")
    trainer.train()
    found = {"begin": begin, "report": report, "end": weights(module).tolist(), "next": torch.rand(2).tolist()}
    trainer.close()
    return found


class _Early(ts.SupervisedModule):
    """Makes its optimizer in `__init__`."""

    def __init__(self, on: str) -> None:
        super().__init__(built(on), nn.MSELoss(), "sgd", DATA)
        self.early = torch.optim.SGD(self.parameters(), lr=0.1)

    def get_optimizers_schedulers(self, *sizes: Any) -> Any:
        return [self.early], []


def early(route: str, on: str, backend: str = "fsdp") -> str:
    """The error of a training whose optimizer was made before the module is sharded."""
    network = built(on)
    if route == "instance":
        module = ts.SupervisedModule(network, nn.MSELoss(), torch.optim.SGD(network.parameters(), lr=0.1), DATA)
    else:
        module = _Early(on)
    try:
        ts.Trainer(module, arguments("unused", backend=backend, train_batch_size=6)).train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"
