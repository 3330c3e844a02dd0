"""A module with state of every kind, trained with and without steps that run twice."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, weights
from trainstack.verifying.comparison import compare

CALLS: list[int] = []
"""One item for each call of a `train_step`; nothing that a run restores."""


class Meter:
    """An object of a user's class."""

    def __init__(self) -> None:
        self.count, self.seen = 0, list[int]()


class Stateful(Classifier):
    """Draws from all generators, and writes buffers, plain attributes and an average of its weights."""

    def __init__(self, *, averages: bool = True, **changes: Any) -> None:
        super().__init__(**{"dropout": 0.3, "scheduler": True, "optimizer": torch.optim.AdamW, **changes})
        self.net.append(nn.BatchNorm1d(3) if len(self.dataset) % 8 != 1 else nn.Tanh())  # which needs two samples
        self.average = nn.Linear(6, 8).requires_grad_(False)
        self.register_buffer("running", torch.zeros(6))
        self.queue, self.hidden, self.meter = torch.zeros(4, 6), torch.zeros(6), Meter()
        self.generator, self.numbers = torch.Generator().manual_seed(1), np.random.default_rng(1)
        self.hooks_called: list[Any] = []
        self.averages, self.large = averages, torch.zeros(300_000)  # more than is copied in each step

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        CALLS.append(global_step)
        self.meter.count += 1
        self.meter.seen.append(self.micro_batch.number)
        noise = torch.randn(6, generator=self.generator) + float(self.numbers.normal()) + random.random()
        batch[0].add_(0.01 * noise.to(batch[0]) + 0.01 * np.random.rand() + 0.01 * self.hidden.to(batch[0]))
        self.running = 0.9 * self.running + 0.1 * batch[0].mean(0)
        self.queue[self.meter.count % 4].add_(batch[0].mean(0))
        self.hidden = self.hidden + self.queue.mean(0) + self.large[0]
        self.large += 0.01
        if self.averages:
            with torch.no_grad():
                self.average.weight.lerp_(self.net[0].weight, 0.1)
        self.log("count", self.meter.count)
        outputs = self.net(batch[0] + self.average(batch[0]).mean(1, keepdim=True))
        return nn.functional.cross_entropy(outputs, batch[1]), outputs

    def on_end_backward(self, global_step: int, loss: Tensor) -> None:
        torch.rand(1)
        self.hooks_called.append(("backward", global_step, loss.item()))

    def on_end_train_step(self, global_step: int, loss: Tensor, outputs: Tensor) -> None:
        self.hooks_called.append(("step", global_step, outputs.sum().item()))


def run(directory: str, **changes: Any) -> tuple[Stateful, ts.Trainer]:
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    sharded = changes.get("backend") == "fsdp"  # whose weights are DTensors outside of `forward`
    module = Stateful(dataset=numbers(changes.pop("samples", 42)), averages=not sharded)
    saves = ts.DefaultCheckpointerArguments(checkpoint=True)
    values = {"epochs": 2, "log_every": 2, "writers": ["jsonl"], "checkpointer_args": saves, **changes}
    trainer = ts.Trainer(module, arguments(directory, **values))
    trainer.train()
    return module, trainer


def compared(directory: str, share: float = 1.0, **changes: Any) -> dict[str, Any]:
    """The difference between a run without and one with verified steps, and the calls of `train_step` in each."""
    found: list[Any] = []
    calls = []
    for name, given in (("plain", 0.0), ("verified", share)):
        CALLS.clear()
        found.append(run(f"{directory}/{name}", verify_replay=given, **changes))
        calls.append(len(CALLS))
    (plain, one), (verified, other) = found
    logs = [(Path(t.output_dir) / "metrics.jsonl").read_text() for t in (one, other)] if one.is_main_process else []
    difference = compare(Path(f"{directory}/plain"), Path(f"{directory}/verified"))
    return {
        "checkpoints": None if difference is None else str(difference),
        "weights": torch.equal(weights(plain), weights(verified)),
        "hooks": plain.hooks_called == verified.hooks_called,
        "attributes": [plain.meter.count, plain.meter.seen] == [verified.meter.count, verified.meter.seen]
        and torch.equal(plain.hidden, verified.hidden)
        and torch.equal(plain.queue, verified.queue)
        and torch.equal(plain.large, verified.large),
        "logs": len({_without_times(log) for log in logs}) <= 1,
        "random": [torch.rand(1).item(), random.random()],
        "calls": calls,
    }


def _without_times(log: str) -> str:
    return "\n".join(line for line in log.splitlines() if "perf/" not in line and "time" not in line)
