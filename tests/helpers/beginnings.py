"""Modules and callbacks whose state is advanced or reset at the begin of a training or an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers
from trainstack.checkpointing import list_checkpoints
from trainstack.checkpointing.difference import differences
from trainstack.checkpointing.reading import read_states

PLACES = ["hook", "loader", "train_begin", "epoch_begin", "train_epoch_begin"]
EVERY_STEP = ts.DefaultCheckpointerArguments(every_n_steps=1)


class Keeps(nn.Module):
    """State of five kinds, and values derived from it outside of all states."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.count, self.hidden = 0, None
        self.draws, self.noise = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        self.register_buffer("level", torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
        self.derived = 0.0

    def advance(self) -> None:
        """Read each kind, and change it."""
        self.count += 1
        drawn = float(self.draws.normal()) + float(torch.rand((), generator=self.noise))
        self.level += 1.0
        with torch.no_grad():
            self.scale.mul_(0.9).add_(0.01 * drawn)
        self.derived = self.count + drawn + float(self.level) + float(self.scale)

    def reset(self) -> None:
        """Set each kind to its first value."""
        self.count, self.hidden = 0, None
        self.draws, self.noise = np.random.default_rng(3), torch.Generator().manual_seed(3)
        self.level = torch.zeros(())
        with torch.no_grad():
            self.scale.fill_(1.0)
        self.derived = 1.0

    def used(self) -> Tensor:
        """A factor that depends on all of it; a step advances it as well."""
        before = torch.zeros(3) if self.hidden is None else self.hidden[0]
        self.hidden = (0.5 * before + self.count, self.count)
        self.count += 1
        self.level = self.level + 0.25
        drawn = float(self.draws.normal()) + float(torch.rand((), generator=self.noise))
        return 1 + 0.01 * (self.scale + self.level + before.mean() + self.count + drawn + self.derived)

    def state(self) -> dict[str, Any]:
        """Plain values; the hidden state is there only while there is one."""
        plain = {"count": self.count, "draws": self.draws.bit_generator.state, "noise": self.noise.get_state()}
        tensors = {"level": self.level.clone(), "scale": self.scale.detach().clone()}
        return {**plain, **tensors, **({} if self.hidden is None else {"hidden": self.hidden})}

    def take(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        self.count, self.hidden = state["count"], state.get("hidden")
        self.draws.bit_generator.state = state["draws"]
        self.noise.set_state(state["noise"])
        with torch.no_grad():
            self.level.copy_(state["level"])
            self.scale.copy_(state["scale"])


class Begins(Classifier):
    """Calls `act` of its state at one place; stops at some steps."""

    def __init__(self, place: str, act: str, stops: set[int], seed: int = 0) -> None:
        super().__init__(numbers(40), optimizer=torch.optim.AdamW, lr=0.01, validate=True)
        self.place, self.act, self.stops = place, act, stops
        self.keeps = Keeps(seed)
        self.samples: list[tuple[int, list[float]]] = []

    def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
        if self.place == "hook":
            getattr(self.keeps, self.act)()

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        if self.place == "loader":
            getattr(self.keeps, self.act)()
        first = self.keeps.count % 8
        part = Subset(self.dataset, range(first, first + 32))
        return DataLoader(part, batch_size=batch_size, sampler=sampler(part))

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.samples.append((global_step, batch[0][:, 0].tolist()))
        return super().train_step(global_step, batch, device) * self.keeps.used()

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.keeps.used()
        return super().val_step(global_step, batch, device)

    def on_end_train_step(self, global_step: int) -> None:
        if global_step in self.stops:
            self.stops.remove(global_step)
            raise InterruptedError

    def get_state(self) -> dict[str, Any]:
        return {"weights": super().get_state(), "kept": self.keeps.state()}

    def update_state(self, state: Mapping[str, Any] | None) -> None:
        if state:
            super().update_state(state["weights"])
            self.keeps.take(state["kept"])


class Acts(ts.Callback):
    """Has state, and acts on it and on the module's at one event."""

    def __init__(self, place: str, act: str, seed: int = 0) -> None:
        self.place, self.act, self.keeps = place, act, Keeps(seed + 1)

    def _at(self, place: str, trainer: Any) -> None:
        if self.place == place:
            getattr(self.keeps, self.act)()
            trainer.user_state["acted"] = trainer.user_state.get("acted", 0) + 1
            trainer.optimizers[0].param_groups[0]["weight_decay"] *= 0.5
            trainer.module.keeps.scale.data.mul_(1 + 0.01 * self.keeps.derived)
            trainer.module.log("acted", self.keeps.derived)

    def on_train_begin(self, trainer: Any) -> None:
        self._at("train_begin", trainer)

    def on_epoch_begin(self, trainer: Any) -> None:
        self._at("epoch_begin", trainer)

    def on_train_epoch_begin(self, trainer: Any) -> None:
        self._at("train_epoch_begin", trainer)

    def on_train_batch_begin(self, trainer: Any, batch: Any) -> None:
        batch[0].mul_(1 + 0.001 * self.keeps.count + 0.001 * self.keeps.derived)
        self.keeps.count += 1

    def get_state(self) -> dict[str, Any]:
        return self.keeps.state()

    def update_state(self, state: Mapping[str, Any]) -> None:
        self.keeps.take(state)


def begun(
    folder: Path | str,
    place: str,
    act: str,
    stops: set[int],
    *,
    again: bool = False,
    search: bool = False,
    **changes: Any,
) -> Begins:
    """Train 3 epochs of 4 steps over all interruptions, in new objects or `again` in the same; the last module.

    With `search`, each training begins with a search for a learning rate.
    """
    seed, samples = changes.pop("seed", 0), list[tuple[int, list[float]]]()
    trainer = None
    while True:
        if trainer is None or not again:
            module = Begins(place, act, stops, seed)
            args = arguments(folder, epochs=3, checkpointer_args=EVERY_STEP, resume="auto", log_every=1, **changes)
            trainer = ts.Trainer(module, args, callbacks=[Acts(place, act, seed)])
        try:
            if search:
                ts.find_lr(trainer, start=1e-3, end=1e-2, steps=3)
                module.samples.clear()
            trainer.train()
        except InterruptedError:
            # The step that was interrupted is finished, but not saved.
            if not again:
                samples += [one for one in module.samples if one[0] < trainer.state.global_step]
            continue
        trainer.close()
        module.samples = samples + module.samples
        return module


def unlike(one: Path | str, other: Path | str) -> list[str]:
    """The differences of the last checkpoints of two runs."""
    states = []
    for place in (one, other):
        kept = [info for info in list_checkpoints(Path(place) / "checkpoints") if info.kind == "checkpoint"]
        states.append(read_states(kept[-1].path)[1])
    return [str(row) for row in differences(*states)]
