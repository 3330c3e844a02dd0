"""Runs whose module, callbacks and user_state hold other values on each rank."""

from __future__ import annotations

import random
import warnings
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, weights
from tests.helpers.workers import RANK

SAVING = ts.DefaultCheckpointerArguments(every_n_steps=1, keep_last=None)


class Remembers:
    """A generator, a counter, a deque, a tensor and numbers by name, other ones on each rank."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self.count, self.last = 0, deque[float](maxlen=3)
        self.tensor, self.by_name = torch.zeros(3), dict[str, Any]()

    def draw(self) -> float:
        value = float(self.generator.normal())
        self.count += 1 + RANK
        self.last.append(value)
        self.tensor[self.count % 3] += value
        self.by_name[f"rank {RANK}"] = {"count": self.count, "set": {"a", "b", str(RANK)}}
        return value

    def state_dict(self) -> dict[str, Any]:
        return {
            "generator": self.generator.bit_generator.state,
            "count": self.count,
            "last": self.last,
            "tensor": self.tensor,
            "by_name": self.by_name,
            "same": [1, 2, 3],
        }

    def load_state_dict(self, state: Any) -> None:
        self.generator.bit_generator.state = state["generator"]
        self.count, self.last = state["count"], deque(state["last"], maxlen=3)
        self.tensor, self.by_name = state["tensor"].clone(), dict(state["by_name"])

    @property
    def seen(self) -> list[Any]:
        return [self.count, list(self.last), self.tensor.tolist(), str(sorted(self.by_name)), self.generator.random()]


class ByRank(Classifier):
    """Adds noise to the loss; also from generators that `get_state` does not return."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__(dtype=torch.float64)
        self.own, self.stop_at = Remembers(RANK), stop_at
        self.hidden = {"torch": torch.Generator().manual_seed(RANK), "python": [random.Random(RANK)]}
        self.net.noise = np.random.RandomState(RANK)  # type: ignore[assignment]

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        noise = self.own.draw() + float(torch.rand((), generator=self.hidden["torch"]))  # type: ignore[arg-type]
        noise += self.hidden["python"][0].random() + self.net.noise.random()  # type: ignore[index,operator,union-attr]
        return super().train_step(global_step, batch, device) * (2 + noise)

    def on_end_train_step(self, global_step: int) -> None:
        if global_step == self.stop_at:
            raise KeyboardInterrupt

    def get_state(self) -> dict[str, Any]:
        return {"weights": super().get_state(), "own": self.own.state_dict()}

    def update_state(self, state: Any) -> None:
        if state:
            super().update_state(state["weights"])
            self.own.load_state_dict(state["own"])


class Divisible(ByRank):
    """Continues on any number of ranks."""

    asked: Any = None

    def redistribute_state(self, states: Any, rank: int, world_size: int) -> Any:
        self.asked = [[state["own"]["count"] for state in states], rank, world_size]
        return states[rank % len(states)]


class Draws(ts.Callback):
    def __init__(self) -> None:
        self.own = Remembers(10 + RANK)

    def on_train_step_end(self, trainer: Any) -> None:
        self.own.draw()

    def get_state(self) -> dict[str, Any]:
        return self.own.state_dict()

    def update_state(self, state: Any) -> None:
        self.own.load_state_dict(state)


def run(directory: str, stop_at: int | None, kind: type[ByRank] = ByRank, **changes: Any) -> dict[str, Any]:
    module, callback = kind(stop_at), Draws()
    trainer = ts.Trainer(
        module,
        arguments(directory, backend="ddp", train_batch_size=12, checkpointer_args=SAVING, resume="auto", **changes),
        callbacks=changes.pop("callbacks", [callback]),
    )
    user = Remembers(20 + RANK)
    trainer.user_state.object = user

    @trainer.on(ts.Event.TRAIN_STEP_END)
    def count(trainer: Any) -> None:
        user.draw()
        trainer.user_state["counts"] = [*trainer.user_state.get("counts", ()), RANK]

    try:
        trainer.train()
    except KeyboardInterrupt:
        return {}
    seen = {"module": module.own.seen, "callback": callback.own.seen, "user": user.seen}
    return {**seen, "weights": weights(module).tolist(), "counts": trainer.user_state["counts"]}


def resumed(directory: str) -> dict[str, Any]:
    """An unbroken run, and one that is interrupted twice."""
    whole = run(str(Path(directory) / "whole"), None)
    for stop_at in (2, 4, None):
        cut = run(str(Path(directory) / "cut"), stop_at)
    return {"unbroken": whole, "resumed": cut}


def refused(directory: str) -> str:
    try:
        run(str(Path(directory) / "cut"), None, epochs=2)
    except ts.CheckpointMismatchError as error:
        return str(error)
    return "nothing"


def divided(directory: str) -> list[Any]:
    """The module redistributes its state; nothing else differs between ranks."""
    found = list(Path(directory).glob("cut/checkpoints/checkpoint-0*"))
    module = Divisible()
    path = str(max(found))
    changes: dict[str, Any] = {"resume": path, "resume_mode": "weights", "train_batch_size": 12}
    trainer = ts.Trainer(module, arguments(Path(directory) / "divided", backend="ddp", **changes))
    _ = trainer.plan
    return [*module.asked, module.own.count]


class Statistics(Classifier):
    """A batch norm whose running statistics are those of each rank, and a non-persistent buffer."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__(numbers(40, dtype=torch.float64), dtype=torch.float64)
        self.net = nn.Sequential(nn.BatchNorm1d(6, dtype=torch.float64), self.net)
        self.register_buffer("level", torch.zeros((), dtype=torch.float64), persistent=False)
        self.stop_at = stop_at

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.level += batch[0].mean()
        return super().train_step(global_step, batch, device) * (1 + self.level.abs())

    def on_end_train_step(self, global_step: int) -> None:
        if global_step == self.stop_at:
            raise KeyboardInterrupt


def buffers(directory: str) -> dict[str, Any]:
    """Running statistics by rank, over an interruption."""
    ends = []
    for folder, stops in (("whole", (None,)), ("cut", (3, None))):
        for stop_at in stops:
            module = Statistics(stop_at)
            options = {"backend_options": {"ddp": {"forward_sync_buffers": False}}}
            made = arguments(
                Path(directory) / folder, backend="ddp", checkpointer_args=SAVING, resume="auto", **options
            )
            try:
                ts.Trainer(module, made).train()
            except KeyboardInterrupt:
                continue
            ends.append([buffer.tolist() for buffer in module.buffers()] + weights(module).tolist())
    return {"unbroken": ends[0], "resumed": ends[1]}


class Zero(Classifier):
    def __init__(self, order: int) -> None:
        super().__init__(dtype=torch.float64)
        self.order = order

    def get_optimizers_schedulers(self, *_: Any) -> Any:
        with warnings.catch_warnings():  # torch 2.13.0 warns about its code
            warnings.simplefilter("ignore")
            from torch.distributed.optim import ZeroRedundancyOptimizer
        parameters = list(self.parameters())
        groups = [{"params": parameters[:1], "lr": 0.02}, {"params": parameters[1:]}]
        if self.order:
            groups = [{"params": parameters[:0:-1]}, {"params": parameters[:1], "lr": 0.02}]
        first, *rest = groups
        made = ZeroRedundancyOptimizer(first["params"], torch.optim.Adam, lr=first.get("lr", 0.01), foreach=False)
        for group in rest:
            made.add_param_group({"lr": 0.01, **group})
        return made, None


def zero(directory: str) -> dict[str, Any]:
    """State that is divided among ranks; the second process hands the parameters over in another order."""
    made: dict[str, Any] = {"backend": "ddp", "checkpointer_args": SAVING, "clip_grads": False}
    whole, first, second = Zero(0), Zero(0), Zero(1)
    ts.Trainer(whole, arguments(Path(directory) / "whole", epochs=2, **made)).train()
    ts.Trainer(first, arguments(Path(directory) / "cut", epochs=1, **made)).train()
    ts.Trainer(second, arguments(Path(directory) / "cut", epochs=2, resume=True, **made)).train()
    return {"unbroken": weights(whole).tolist(), "resumed": weights(second).tolist()}
