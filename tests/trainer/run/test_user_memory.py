"""The loop keeps no memory that user code, autograd or a loader may write to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainstack as ts
from tests.helpers.modules import arguments

STEPS = 4
SPLITS = [4, 2, 1]
"""Sizes of micro-batches, of which a step of 4 samples has 1, 2 or 4."""


class Shifted(ts.ModuleInterface):
    """A linear model, and a parameter with one element that the loss uses through a view only."""

    def __init__(self, view: Callable[[Tensor], Tensor] = Tensor.squeeze) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.view = nn.Linear(3, 1), view
        self.shift = nn.Parameter(torch.zeros(1))
        self.data = TensorDataset(torch.randn(4 * STEPS, 3), torch.randn(4 * STEPS, 1))
        self.gradients: list[list[Tensor]] = []

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.data, batch_size)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.net(inputs), targets) + self.view(self.shift)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return self.loss(*batch)

    def on_end_backward(self, global_step: int, loss: Any) -> None:
        self.gradients.append([p.grad.clone() for p in self.parameters() if p.grad is not None])


def by_hand(module: Shifted, micro: int, after_backward: Callable[[Any], None] = lambda module: None) -> None:
    """The plain loop."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for begin in range(0, 4 * STEPS, 4):
        for at in range(begin, begin + 4, micro):
            loss = module.loss(*module.data[at : at + micro])
            loss.backward(gradient=torch.tensor(micro / 4))
            module.on_end_backward(0, loss)
            after_backward(module)
        optimizer.step()
        optimizer.zero_grad()


def train(module: ts.ModuleInterface, folder: Path, **changes: Any) -> ts.Trainer:
    settings = {"train_batch_size": 4, "epochs": 1, "clip_grads": False, **changes}
    trainer = ts.Trainer(module, arguments(folder, **settings))
    trainer.train()
    return trainer


@pytest.mark.parametrize("micro", SPLITS)
@pytest.mark.parametrize("view", [Tensor.squeeze, lambda p: p.view(()), lambda p: p.reshape(()), lambda p: p[0]])
def test_one_element_parameters_have_the_gradients_of_a_plain_loop(view: Any, micro: int, tmp_path: Path) -> None:
    module, plain = Shifted(view), Shifted(view)
    train(module, tmp_path, gpu_batch_size_limit=micro)
    by_hand(plain, micro)

    assert all(map(same, module.gradients, plain.gradients))
    assert same(module.parameters(), plain.parameters())


@pytest.mark.parametrize("micro", SPLITS)
def test_writes_to_gradients_do_not_reach_the_next_backward_pass(micro: int, tmp_path: Path) -> None:
    def clamp(module: Shifted) -> None:
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad.data.clamp_(-0.1, 0.1)

    class Clamped(Shifted):
        def on_end_backward(self, global_step: int, loss: Any) -> None:
            super().on_end_backward(global_step, loss)
            clamp(self)

    module, plain = Clamped(), Shifted()
    train(module, tmp_path, gpu_batch_size_limit=micro)
    by_hand(plain, micro, clamp)

    assert all(map(same, module.gradients, plain.gradients))


@pytest.mark.parametrize("micro", SPLITS)
def test_writes_to_the_loss_gradient_last_for_one_pass(micro: int, tmp_path: Path) -> None:
    class Hooked(Shifted):
        def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
            loss = super().loss(inputs, targets)
            loss.register_hook(lambda gradient: gradient.data.mul_(0.5))
            return loss

    module, plain = Hooked(), Hooked()
    train(module, tmp_path, gpu_batch_size_limit=micro)
    by_hand(plain, micro)

    assert all(map(same, module.gradients, plain.gradients))


class Reading(ts.ModuleInterface):
    """Trains on batches of a loader, and records the first value of each."""

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.net, self.loader, self.seen = nn.Linear(1, 1), loader, list[float]()

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return self.loader

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.seen.append(batch[0, 0].item())
        return self.net(batch).mean()


class Weighed(Reading):
    def batch_weight(self, batch: Any) -> float:
        return 1.0 + float(batch[0, 0] == 2)


class Recycling:
    """Gives the same tensor for all batches, each of which is valid until the next is fetched."""

    def __init__(self, batches: int, sized: bool) -> None:
        self.batches = batches
        if sized:
            self.__class__ = type("Sized", (Recycling,), {"__len__": lambda self: self.batches})

    def __iter__(self) -> Iterator[Tensor]:
        buffer = torch.empty(2, 1)
        for number in range(self.batches):
            yield buffer.fill_(number)


@pytest.mark.parametrize("batches", [8, 7], ids=["whole steps", "a short last step"])
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
@pytest.mark.parametrize("kind", [Reading, Weighed])
def test_a_recycled_batch_is_used_before_the_next_fetch(kind: Any, sized: bool, batches: int, tmp_path: Path) -> None:
    module = kind(Recycling(batches, sized))
    train(module, tmp_path, train_batch_size=8, gpu_batch_size_limit=2)

    assert module.seen == [float(number) for number in range(batches)]


@pytest.mark.parametrize("kind", [Reading, Weighed])
def test_a_collate_function_may_fill_one_buffer(kind: Any, tmp_path: Path) -> None:
    buffer = torch.empty(2, 1)
    data = torch.arange(8.0)[:, None]
    module = kind(DataLoader(data, 2, collate_fn=lambda rows: torch.stack(rows, out=buffer)))  # type: ignore[arg-type]
    train(module, tmp_path, train_batch_size=8, gpu_batch_size_limit=2)

    assert module.seen == [0.0, 2.0, 4.0, 6.0]


def test_batch_weights_known_late_give_the_whole_batchs_gradient(tmp_path: Path) -> None:
    recycled, kept = Weighed(Recycling(4, True)), Weighed(Recycling(4, True))
    kept.load_state_dict(recycled.state_dict())
    train(recycled, tmp_path, train_batch_size=8, gpu_batch_size_limit=2)
    loss = sum((1 + (n == 2)) / 5 * kept.net(torch.full((2, 1), float(n))).mean() for n in range(4))
    loss.backward()
    torch.optim.SGD(kept.parameters(), lr=0.1).step()

    assert same(recycled.parameters(), kept.parameters(), atol=1e-7)


def test_a_step_holds_at_most_two_micro_batches(tmp_path: Path) -> None:
    alive: set[int] = set()
    most = 0

    class Counted(Reading):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            nonlocal most
            most = max(most, len(alive))
            return super().train_step(global_step, batch, device)

    def fetched(rows: Any) -> Tensor:
        batch = torch.stack(rows)
        alive.add(id(batch))
        weakref.finalize(batch, alive.discard, id(batch))
        return batch

    train(Counted(DataLoader(torch.zeros(64, 1), 1, collate_fn=fetched)), tmp_path, train_batch_size=64,
          gpu_batch_size_limit=1)  # fmt: skip

    assert most <= 2


class Running(Shifted):
    """Keeps its running mean in the memory of the first loss; the losses are 1, 2, 3, 4."""

    running: Tensor | None = None

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        loss = torch.tensor(float(global_step)) + 0 * self.shift.squeeze()
        if self.running is None:
            self.running = loss.detach()
        else:
            self.running.mul_(0.9).add_(loss.detach(), alpha=0.1)
        return loss


class Scaling(Running):
    """Scales the loss in a hook."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return torch.tensor(float(global_step)) + 0 * self.shift.squeeze()

    def on_end_backward(self, global_step: int, loss: Any) -> None:
        loss.data.mul_(100)


class AView(Running):
    """Returns a view of a parameter, which the optimizer changes."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        with torch.no_grad():
            self.shift.fill_(float(global_step))
        return self.shift.view(())


@pytest.mark.parametrize("kind", [Running, Scaling, AView])
def test_losses_are_logged_as_they_were_returned(kind: Any, tmp_path: Path) -> None:
    trainer = train(kind(), tmp_path, log_every=4)

    assert trainer.history.get_metric_values("train/loss") == [2.5]
    assert trainer.history.get_metric_values("train/loss_epoch") == [2.5]


def test_validation_losses_in_one_reused_tensor_are_averaged(tmp_path: Path) -> None:
    class Validated(Shifted):
        buffer = torch.zeros(())

        def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
            return DataLoader(torch.arange(4.0)[:, None], 1)

        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return self.buffer.copy_(batch[0, 0])

    trainer = train(Validated(), tmp_path)

    assert trainer.history.get_metric_values("val/loss") == [1.5]


def test_a_recorded_loss_does_not_keep_its_base_alive(tmp_path: Path) -> None:
    alive: set[int] = set()
    most = 0

    class Viewed(Shifted):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            nonlocal most
            most = max(most, len(alive))
            large = torch.zeros(1000) + self.shift
            alive.add(id(large))
            weakref.finalize(large, alive.discard, id(large))
            return large[0]

    train(Viewed(), tmp_path, train_batch_size=1, log_every=16)

    assert most <= 1


def same(ours: Any, theirs: Any, atol: float = 0.0) -> bool:
    return all(torch.allclose(a, b, rtol=0, atol=atol) for a, b in zip(ours, theirs, strict=True))
