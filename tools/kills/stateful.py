"""Modules and callbacks with state in all places that users choose."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

import trainstack as ts
from trainstack import callbacks as cb

SAMPLES, BATCH, WIDTH, FEATURES, EPOCHS = 64, 8, 32, 6, 3


def rank() -> int:
    """The rank of this process."""
    return int(os.environ.get("RANK", "0"))


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The same samples in each process."""

    def __init__(self) -> None:
        self.inputs = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = self.inputs[index]
        return self.augmented(row), row.sum().reshape(1)

    def augmented(self, row: torch.Tensor) -> torch.Tensor:
        """The input of the model from a sample."""
        return row


class OwnGenerators(Numbers):
    """Augments with generators of the dataset."""

    def __init__(self) -> None:
        super().__init__()
        self.numpy, self.torch = np.random.default_rng(3), torch.Generator().manual_seed(4)
        self.python = random.Random(5)

    def augmented(self, row: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(FEATURES, generator=self.torch) + self.numpy.normal() + self.python.gauss(0, 1)
        return row + 0.1 * noise


class Plain(ts.ModuleInterface):
    """A regression with dropout, AdamW and a validation; the attributes in `kept` of a subclass are its state."""

    kept: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.data: Numbers = Numbers()
        self.workers = 0
        self.build()

    def build(self) -> None:
        """Make the layers."""
        self.net = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Dropout(0.2), nn.Linear(WIDTH, 1))

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> tuple[Any, Any]:
        return [torch.optim.AdamW(self.parameters(), lr=1e-2)], []

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        options: dict[str, Any] = {"sampler": sampler(self.data), "batch_size": batch_size}
        if self.workers:  # by fork: torch cannot share memory in processes of a fork server
            options |= {"num_workers": self.workers, "multiprocessing_context": "fork"}
        return DataLoader(self.data, **options)

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        data = Numbers()
        return DataLoader(data, sampler=sampler(data), batch_size=batch_size)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def get_state(self) -> dict[str, Any]:
        return {"weights": super().get_state(), **{name: state_of(getattr(self, name)) for name in self.kept}}

    def update_state(self, state: Mapping[str, Any] | None) -> None:
        if state:
            super().update_state(state["weights"])
            for name in self.kept:
                value = getattr(self, name)
                if isinstance(value, torch.Generator):
                    value.set_state(state[name])
                elif isinstance(value, np.random.Generator):
                    value.bit_generator.state = state[name]
                else:
                    setattr(self, name, state[name])


def state_of(value: Any) -> Any:
    """The part of `value` in a checkpoint."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.bit_generator.state if isinstance(value, np.random.Generator) else value


class Curriculum(Plain):
    """Counts in the hook and in the loader method at the beginning of an epoch; both choose the training data."""

    kept = ("level", "loaders", "draws")

    def __init__(self) -> None:
        super().__init__()
        self.level, self.loaders, self.draws = 0, 0, np.random.default_rng(6)

    def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
        self.level += 1
        self.draws.normal()

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        self.loaders += 1
        first = self.loaders + int(self.draws.integers(16))
        data = Subset(self.data, range(first, first + 40))
        return DataLoader(data, sampler=sampler(data), batch_size=batch_size)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return super().train_step(global_step, batch, device) / (1 + self.level)


class OfItsRank(Plain):
    """Each rank draws noise from a separate generator; the dataset has generators and workers, too."""

    kept = ("noise", "seen")

    def __init__(self) -> None:
        super().__init__()
        self.noise, self.seen = torch.Generator().manual_seed(100 + rank()), rank()
        self.data, self.workers = OwnGenerators(), 2

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.seen += len(batch[0])
        noise = torch.randn(batch[0].shape, generator=self.noise)
        return nn.functional.mse_loss(self.net(batch[0] + 0.1 * noise), batch[1]) / (1 + self.seen / 500)


class Shuffled(Plain):
    """Registers layers and gives parameters to the optimizers in another order in each process; buffers are assigned.

    The order depends on PYTHONHASHSEED, like that of a set of strings.
    """

    def build(self) -> None:
        order = random.Random(os.environ.get("PYTHONHASHSEED", ""))
        self.names = [f"part{number}" for number in range(5)]
        self.mixed = order.sample(self.names, len(self.names))
        for name in self.mixed:
            with torch.random.fork_rng():
                torch.manual_seed(int(name[-1]))
                self.add_module(name, nn.Linear(FEATURES, FEATURES))
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> tuple[Any, Any]:
        parts = [getattr(self, name) for name in self.mixed]
        adam = torch.optim.AdamW([part.weight for part in parts], lr=1e-2)
        sgd = torch.optim.SGD([part.bias for part in parts], lr=1e-2, momentum=0.9)
        return [adam, sgd], []

    def value(self, inputs: torch.Tensor) -> torch.Tensor:
        """The prediction, by the parts in the order of their names."""
        for name in self.names:
            inputs = torch.tanh(getattr(self, name)(inputs))
        return inputs.sum(1, keepdim=True)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * torch.ones(FEATURES) * (global_step + 1)  # a new tensor each time
        self.count = self.count + 1
        return nn.functional.mse_loss(self.value(batch[0] + 0.01 * self.mean), batch[1])

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return nn.functional.mse_loss(self.value(batch[0] + self.mean), batch[1])


class Fitted(Plain):
    """Counts its calls; the trial step of `fit_micro_batch` must not count."""

    kept = ("seen", "noise")

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.noise = 0, np.random.default_rng(8)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.seen += len(batch[0])
        return super().train_step(global_step, batch, device) * (1 + self.seen / 500 + 0.1 * self.noise.random())


class Plateau(Plain):
    """A plateau schedule over validations, and a cycle over steps, for two optimizers."""

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> tuple[Any, Any]:
        adam = torch.optim.AdamW(self.net[0].parameters(), lr=1e-1)
        sgd = torch.optim.SGD(self.net[3].parameters(), lr=1e-2, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(adam, factor=0.5, patience=0)
        steps = estimated_global_steps_per_epoch * epochs
        cycle = torch.optim.lr_scheduler.OneCycleLR(sgd, 0.05, total_steps=steps)
        return [adam, sgd], [ts.SchedulerConfig(plateau, monitor="val/loss"), cycle]


class Steady(Plateau):
    """State in many places, without hooks at the beginning of an epoch."""

    kept = ("seen", "noise")

    def build(self) -> None:
        super().build()
        self.norm = nn.BatchNorm1d(FEATURES, affine=False)
        self.seen, self.noise = 0, torch.Generator().manual_seed(2)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.seen += 1
        noise = torch.randn(batch[0].shape, generator=self.noise)
        outputs = self.net(self.norm(batch[0] + 0.1 * noise))
        return nn.functional.mse_loss(outputs, batch[1]) / (1 + self.seen / 100)


class Forgetful(Plain):
    """Has a counter that no checkpoint contains: a campaign has to find it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.seen += 1
        return super().train_step(global_step, batch, device) * (1 + self.seen / 10)


class Counts(ts.Callback):
    """Counts epochs and steps, by rank, and stores a count in `user_state`."""

    def __init__(self) -> None:
        self.begun, self.steps, self.noise = 0, rank(), torch.Generator().manual_seed(7 + rank())

    def on_epoch_begin(self, trainer: Any, epoch: int) -> None:
        self.begun += 1
        trainer.user_state["begun"] = trainer.user_state.get("begun", 0) + 1

    def on_train_step_end(self, trainer: Any) -> None:
        self.steps += 1
        drawn = float(torch.rand((), generator=self.noise))
        shown = drawn if rank() == 0 else 0.0
        trainer.history.update_metric("drawn", shown + self.begun + self.steps, step=trainer.state.global_step)

    def get_state(self) -> dict[str, Any]:
        return {"begun": self.begun, "steps": self.steps, "noise": self.noise.get_state()}

    def update_state(self, state: Mapping[str, Any]) -> None:
        self.begun, self.steps = state["begun"], state["steps"]
        self.noise.set_state(state["noise"])


class Notes(ts.Callback):
    """Counts steps, and stores their sum in `user_state`."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_step_end(self, trainer: Any) -> None:
        self.steps += 1
        trainer.user_state["noted"] = trainer.user_state.get("noted", 0) + self.steps

    def get_state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def update_state(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


class Case(NamedTuple):
    """A module, its callbacks and its unusual arguments."""

    module: type[ts.ModuleInterface]
    callbacks: tuple[type[ts.Callback], ...] = ()
    ema: bool = False
    arguments: Mapping[str, Any] = {}


CASES = {
    "curriculum": Case(Curriculum, (Counts,)),
    "rank-generators": Case(OfItsRank, (Counts,)),
    # Without clipping: the norm is a sum in the order of the parameters, so another order may change its last bit.
    "shuffled": Case(Shuffled, ema=True, arguments={"clip_grads": False}),
    "fitted": Case(Fitted, arguments={"fit_micro_batch": True, "sanity_val_steps": 1}),
    "plateau": Case(Plateau, (Counts,), ema=True),
    "steady": Case(Steady, (Notes,), ema=True),
    "forgetful": Case(Forgetful),
}
"""By name. The campaign has to find a difference in `forgetful`, and in no other case."""


class Make:
    """The factory of a case; it can be pickled.

    Args:
        name: of the case.
        break_with: called in the process before the training, to break the library there.
    """

    def __init__(self, name: str, break_with: Callable[[], None] | None = None) -> None:
        self.name, self.break_with = name, break_with

    def __call__(self) -> tuple[ts.ModuleInterface, Sequence[ts.Callback]]:
        """The module and its callbacks."""
        if self.break_with is not None:
            self.break_with()
        case = CASES[self.name]
        callbacks: list[ts.Callback] = [kind() for kind in case.callbacks]
        return case.module(), [*callbacks, *([cb.EMA(0.9)] if case.ema else [])]


def call_in(
    place: Path, name: str, backend: str, async_save: bool, break_with: Callable[[], None] | None = None
) -> bytes:
    """A training of the case in `place`, for `TrialSetup`: 3 epochs of about 8 steps, saved after every second step."""
    arguments: dict[str, Any] = {
        "epochs": EPOCHS,
        "train_batch_size": BATCH,
        "val_batch_size": 32,
        "backend": backend,
        "device": "cpu",
        "log_every": 1,
        "resume": "auto",
        "output_dir": str(place),
        "checkpointer_args": ts.DefaultCheckpointerArguments(every_n_steps=2, keep_last=2, async_save=async_save),
        "writers": ["csv"],
        "report": False,
        "progress": "none",
        **CASES[name].arguments,
    }
    return pickle.dumps((Make(name, break_with), (ts.TrainerArguments(**arguments),)))
