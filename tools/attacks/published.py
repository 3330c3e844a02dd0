"""Three attacks that have disproved a stated epsilon, with their exact settings.

- Dropout under a seeded script. 10,000 records, one step with all of them, sigma 20. The attacker computes the sums
  with and without record 0.
- Class weights with one rare record in 6,000. 80 steps of 300 records, sigma 4. In a step with the rare record the
  other gradients almost vanish.
- A plateau scheduler on the training loss. 24 steps of 100 of 400 records, sigma 8. One record with a huge loss
  prevents the decrease of the learning rate in one epoch, or lowers it in the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainstack as ts
from tools.attacks.guessing import Game, nearest_run
from tools.attacks.runs import Kind, MakeOptimizer, Outcome, Settings


class _Published(ts.ModuleInterface):
    """Keeps the weights after every step for the attacker."""

    def __init__(self, data: TensorDataset, make_optimizer: MakeOptimizer) -> None:
        super().__init__()
        self.data, self.make_optimizer = data, make_optimizer
        self.seen: list[Tensor] = []

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> tuple[Any, Any]:
        return [self.make_optimizer(self.parameters())], []

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.data, batch_size, sampler=sampler(self.data))


def _zeroed(net: nn.Linear) -> nn.Linear:
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    return net


class _SeededDropout(_Published):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.net, self.dropout = _zeroed(nn.Linear(400, 1)), nn.Dropout(0.5)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        outputs = self.net(self.dropout(batch[0]))
        return 1000 * nn.functional.binary_cross_entropy_with_logits(outputs, batch[1])


class _RareClass(_Published):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.net = _zeroed(nn.Linear(4, 2))
        self.register_buffer("weights", torch.tensor([1.0, 500.0]))

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1], weight=self.weights)

    def on_end_train_step(self, global_step: int, *outputs: Any) -> None:
        self.seen.append(self.net.bias.detach().clone())


class _Plateau(_Published):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.w = nn.Parameter(torch.zeros(300))

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> tuple[Any, Any]:
        optimizer = self.make_optimizer(self.parameters())
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
        return [optimizer], [ts.SchedulerConfig(plateau, monitor="train/loss_epoch")]

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return (batch[0] * (self.w[0] - 100).abs()).mean() + 0 * self.w.sum()

    def on_end_train_step(self, global_step: int, *outputs: Any) -> None:
        self.seen.append(self.w.detach().clone())


def _dropout_data(count: int, present: bool) -> TensorDataset:
    labels = torch.randint(0, 2, (count,), generator=torch.Generator().manual_seed(1)).float()[:, None]
    labels = labels if present else labels[1:]
    return TensorDataset(torch.ones(len(labels), 400), labels)


def _rare_data(count: int, present: bool) -> TensorDataset:
    inputs = 0.1 * torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    labels = torch.zeros(count, dtype=torch.long)
    labels[-1] = 1
    count -= not present
    return TensorDataset(inputs[:count], labels[:count])


def _plateau_data(count: int, present: bool) -> TensorDataset:
    scale = torch.ones(count)
    scale[0] = 1e9
    return TensorDataset(scale if present else scale[1:])


def _smallest_update(game: Game) -> Callable[[Outcome], bool]:
    factor = game.settings.batch / (game.settings.lr or 1.0)

    def guess(outcome: Outcome) -> bool:
        bias = torch.stack([torch.zeros(2), *outcome.module.seen])[:, 0]
        return float(bias.diff().abs().min()) * factor < 100

    return guess


def _last_rate(game: Game) -> Callable[[Outcome], bool]:
    def guess(outcome: Outcome) -> bool:
        updates = torch.stack([torch.zeros(300), *outcome.module.seen])[:, 1:].diff(dim=0)
        return bool(updates[-4:].std() < 0.5 * updates[:4].std())

    return guess


def games(*, short: bool = False) -> tuple[Game, ...]:
    """The three attacks; `short` has fewer records, proportionally less noise, and fewer steps."""
    dropout = Settings(dataset_size=10_000, batch=10_000, epochs=1, sigma=20.0, delta=1e-5, limit=1.0, lr=1.0)
    rare = Settings(dataset_size=6000, batch=300, epochs=4, sigma=4.0, delta=1e-5, limit=1.0, lr=1e-4)
    plateau = Settings(dataset_size=400, batch=100, epochs=6, sigma=8.0, delta=1e-5, limit=1.0, lr=0.3)
    if short:
        dropout = replace(dropout, dataset_size=2000, batch=2000, sigma=5.0)
        rare = replace(rare, dataset_size=1500, epochs=2)
    games = (
        _game("D-C1 dropout, seeded script", _SeededDropout, dropout, _dropout_data, nearest_run, 100),
        _game("D-C2 class weights, one rare record", _RareClass, rare, _rare_data, _smallest_update, 60),
        _game("D-C3 plateau on the training loss", _Plateau, plateau, _plateau_data, _last_rate, 40),
    )
    return tuple(replace(game, guesses=None, probe_each=False) for game in games) if short else games


def _game(
    name: str, module: Any, settings: Settings, data: Callable[[int, bool], Any], prepare: Any, guesses: int
) -> Game:
    return Game(
        kind=Kind(name=name, module=module),
        settings=settings,
        data=lambda present: data(settings.dataset_size, present),
        prepare=prepare,
        guesses=guesses,
    )
