"""Tasks whose last step has fewer samples than there are ranks; each has to end as under `sp`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import trainstack as ts
from tests.helpers.modules import arguments, weights
from trainstack.backends.fsdp import whole

FEATURES = 4
UNUSED = {"find_unused_parameters": True}


class Task(ts.ModuleInterface):
    """Two layers in float64 under AdamW with decay. Each training step counts its calls and those of its hooks."""

    epochs = 2
    clips = True
    options: dict[str, Any] = {}  # noqa: RUF012 - it is never changed

    def __init__(self, samples: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        x = torch.randn(samples, FEATURES, generator=draw, dtype=torch.float64)
        self.data = TensorDataset(self.inputs(x), x.sum(1, keepdim=True))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(FEATURES, 6), nn.Linear(6, 1)
            self.build()
        self.double()
        self.calls = Counter[str]()

    def inputs(self, x: Tensor) -> Tensor:
        return x

    def build(self) -> None:
        """Make further layers."""

    def callbacks(self) -> list[Any]:
        return []

    def get_optimizers_schedulers(self, *given: Any) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.5), None

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.data, sampler=sampler(self.data), batch_size=batch_size)

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        return None

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        raise AssertionError("there is no validation")

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.calls["train_step"] += 1
        return functional.mse_loss(self.predict(batch[0], global_step), batch[1])

    def predict(self, x: Tensor, step: int) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x)))
        return out

    def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
        self.calls["on_begin_train_epoch"] += 1

    def on_end_backward(self, global_step: int, loss: Tensor) -> None:
        self.calls["on_end_backward"] += 1

    def on_end_train_step(self, global_step: int, *outputs: Any) -> None:
        self.calls["on_end_train_step"] += 1

    def on_end_train_epoch(self, global_step: int, *outputs: Any) -> None:
        self.calls["on_end_train_epoch"] += 1


class NeverUsed(Task):
    options = UNUSED

    def build(self) -> None:
        self.unused = nn.Linear(FEATURES, 1)


class EverySecondStep(NeverUsed):
    def predict(self, x: Tensor, step: int) -> Tensor:
        out = super().predict(x, step)
        return out + self.unused(x) if step % 2 else out


class Experts(Task):
    """Each sample goes through one of two layers."""

    options = UNUSED

    def build(self) -> None:
        self.experts = nn.ModuleList([nn.Linear(FEATURES, 1), nn.Linear(FEATURES, 1)])

    def predict(self, x: Tensor, step: int) -> Tensor:
        out = super().predict(x, step)
        first = x[:, 0] > 0
        for expert, rows in zip(self.experts, (first, ~first), strict=True):
            if rows.any():
                out = out.index_add(0, rows.nonzero()[:, 0], expert(x[rows]))
        return out


class CountsHalf(Experts):
    """Samples of the second expert have weight 0, so no step moves it."""

    def batch_weight(self, batch: Any) -> float:
        return float((batch[0][:, 0] > 0).sum())

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.calls["train_step"] += 1
        errors = (self.predict(batch[0], global_step) - batch[1]).square()[:, 0]
        counts = (batch[0][:, 0] > 0).double()
        return (errors * counts).sum() / counts.sum()


class Gan(Task):
    """The step's parity chooses which of two networks is trained, each by an optimizer."""

    options = UNUSED

    def build(self) -> None:
        self.critic = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1))

    def get_optimizers_schedulers(self, *given: Any) -> Any:
        generator = [*self.first.parameters(), *self.last.parameters()]
        return [torch.optim.Adam(generator, lr=0.02), torch.optim.Adam(self.critic.parameters(), lr=0.02)], None

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.calls["train_step"] += 1
        made = self.predict(batch[0], global_step)
        if global_step % 2:
            return (
                functional.softplus(self.critic(made.detach())).mean()
                + functional.softplus(-self.critic(batch[1])).mean()
            )
        self.critic.requires_grad_(False)
        loss = functional.softplus(-self.critic(made)).mean()
        self.critic.requires_grad_(True)
        return loss


class TwoOptimizers(Task):
    def get_optimizers_schedulers(self, *given: Any) -> Any:
        first = torch.optim.AdamW(self.first.parameters(), lr=0.05, weight_decay=0.5)
        return [first, torch.optim.SGD(self.last.parameters(), lr=0.1, momentum=0.9)], None


class WithFreezer(Task):
    epochs = 3

    def callbacks(self) -> list[Any]:
        return [ts.callbacks.Freezer("first", until_epoch=1), ts.callbacks.Freezer("last.bias")]


class Unfreezes(Task):
    """The usual recipe for fine-tuning."""

    def build(self) -> None:
        self.first.requires_grad_(False)

    def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
        self.first.requires_grad_(epoch > 0)


class UnfreezesIntoAGroup(Unfreezes):
    def get_optimizers_schedulers(self, *given: Any) -> Any:
        self.made = torch.optim.AdamW(self.last.parameters(), lr=0.05, weight_decay=0.5)
        return self.made, None

    def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
        super().on_begin_train_epoch(global_step, epoch)
        if epoch == 1:
            self.made.add_param_group({"params": list(self.first.parameters()), "lr": 0.01})


class Freezes(Task):
    def on_end_train_step(self, global_step: int, *outputs: Any) -> None:
        if global_step == 1:
            self.first.requires_grad_(False)


class Sparse(Task):
    clips = False

    def inputs(self, x: Tensor) -> Tensor:
        return (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()

    def build(self) -> None:
        self.table = nn.Embedding(5, FEATURES, sparse=True)

    def get_optimizers_schedulers(self, *given: Any) -> Any:
        rest = [*self.first.parameters(), *self.last.parameters()]
        return [torch.optim.SparseAdam(self.table.parameters(), lr=0.05), torch.optim.SGD(rest, lr=0.1)], None

    def predict(self, x: Tensor, step: int) -> Tensor:
        return super().predict(self.table(x), step)


class Contrastive(Task):
    """Each sample is distinguished from all others of the global batch."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        own = functional.normalize(torch.tanh(self.first(batch[0])))
        keys, offset = ts.all_gather_with_grad(functional.normalize(self.first(batch[0] + 0.1)))
        places = torch.arange(len(own)) + offset
        return (
            functional.cross_entropy(own @ keys.T / 0.1, places) + 0 * self.last.weight.sum() + 0 * self.last.bias.sum()
        )


class Synchronised(Task):
    """A norm of the user's over all ranks: one collective in each forward pass."""

    epochs = 1

    def predict(self, x: Tensor, step: int) -> Tensor:
        sums = torch.stack([x.sum(0), torch.full((FEATURES,), float(len(x)), dtype=x.dtype)])
        dist.all_reduce(sums)
        return super().predict(x - sums[0] / sums[1], step)


def _halves(self: Task) -> None:
    """Clips large values, which differs from scaling the loss."""
    for p in self.parameters():
        if p.grad is not None:
            p.grad.clamp_(-0.05, 0.05)


class EditsInHook(Task):
    def on_end_backward(self, global_step: int, loss: Tensor) -> None:
        _halves(self)


class EditsInEvent(Task):
    event = "after_backward"

    def callbacks(self) -> list[Any]:
        edits = {f"on_{self.event}": lambda own, trainer: _halves(self)}
        return [type("Edits", (ts.Callback,), edits)()]


class EditsBeforeTheUpdate(EditsInEvent):
    event = "before_optimizer_step"


class SetsGradient(Task):
    """A hook writes the gradient of a parameter that takes part in no loss."""

    options = UNUSED

    def build(self) -> None:
        self.extra = nn.Parameter(torch.ones(3))

    def on_end_backward(self, global_step: int, loss: Any) -> None:
        self.extra.grad = torch.ones_like(self.extra)


class HooksGradient(Task):
    """A tensor hook of the user adds to a gradient, on each rank."""

    def build(self) -> None:
        self.first.weight.register_hook(lambda gradient: gradient + 0.1 * self.first.weight.detach())


class TogglesInStep(Task):
    """`train_step` freezes and unfreezes before its forward pass."""

    options = UNUSED

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.first.requires_grad_(global_step % 2 == 0)
        self.last.requires_grad_(global_step % 2 == 1)
        return super().train_step(global_step, batch, device)


class GathersInACheckpoint(Task):
    """The recomputation in the backward pass gathers too."""

    reentrant = True

    def similarity(self, rows: Tensor) -> Tensor:
        everyone, first = ts.all_gather_with_grad(rows)
        return functional.cross_entropy(rows @ everyone.T, torch.arange(len(rows)) + first)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        rows = torch.tanh(self.first(batch[0]))
        loss = torch.utils.checkpoint.checkpoint(self.similarity, rows, use_reentrant=self.reentrant)
        return loss + self.last(rows).square().mean()


class GathersInACheckpointWithoutReentry(GathersInACheckpoint):
    reentrant = False


class Distances(Task):
    """Distances between the samples of all ranks. Those of borrowed rows are 0, with an infinite derivative."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        rows = torch.tanh(self.first(batch[0]))
        everyone, first = ts.all_gather_with_grad(rows)
        squares = (rows[:, None] - everyone[None]).square().sum(2)
        own = torch.arange(len(rows))[:, None] + first == torch.arange(len(everyone))
        distances = squares.masked_fill(own, 1.0).sqrt()
        return (-distances).exp().mean(1).mean() * len(everyone) + self.last(rows).square().mean()


class PenaltyThroughAGather(Task):
    """Second derivatives flow through the rows of all ranks, and nothing flows under `no_grad`."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        rows = torch.tanh(self.first(batch[0]))
        with torch.no_grad():
            fixed, _ = ts.all_gather_with_grad(rows)
        everyone, _ = ts.all_gather_with_grad(rows)
        value = (rows.detach() @ everyone.T).tanh().sum()
        (slope,) = torch.autograd.grad(value, rows, create_graph=True)
        penalty = slope.square().sum(1).mean() / len(everyone) ** 2
        return penalty + (rows @ fixed.T).tanh().mean() + self.last(rows).square().mean()


TASKS: dict[str, type[Task]] = {one.__name__: one for one in Task.__subclasses__()}
TASKS |= {
    one.__name__: one
    for one in (
        *(EverySecondStep, UnfreezesIntoAGroup, EditsBeforeTheUpdate),
        *(CountsHalf, GathersInACheckpointWithoutReentry),
    )
}


def counting(calls: Counter[str]) -> ts.Callback:
    """Counts every event."""

    def counter(name: str) -> Callable[..., None]:
        return lambda self, *given: calls.update([name])

    methods = {event.method: counter(event.value) for event in ts.Event}
    made: ts.Callback = type("Counts", (ts.Callback,), {**methods, "expects_all_events": False})()
    return made


def train(name: str, samples: int, backend: str = "ddp", limit: int | None = None) -> dict[str, Any]:
    """Train a task with 12 samples a step; weights, optimizer states, losses and counts of calls."""
    module = TASKS[name](samples)
    known = {"ddp": module.options, "fsdp": {key: on for key, on in module.options.items() if key in UNUSED}}
    options = known.get(backend, {})
    made: dict[str, Any] = {"backend_options": {backend: options}} if options else {}
    args = arguments(
        "unused",
        backend=backend,
        train_batch_size=12,
        gpu_batch_size_limit=limit,
        epochs=module.epochs,
        clip_grads=module.clips,
        log_every=1,
        seed=3,
        **made,
    )
    trainer = ts.Trainer(module, args, callbacks=[*module.callbacks(), counting(module.calls)])
    trainer.train()
    states = [
        whole(entry).double().tolist()
        for optimizer in trainer.optimizers
        for _, state in sorted(optimizer.state_dict()["state"].items())
        for entry in state.values()
        if isinstance(entry, Tensor)
    ]
    return {
        "weights": weights(module).tolist(),
        "states": states,
        "losses": trainer.history.get_metric_values("train/loss"),
        "norms": trainer.history.get_metric_values("train/grad_norm") if module.clips else [],
        "calls": dict(module.calls),
    }


def train_all(name: str, layouts: list[tuple[int, int | None]], backend: str = "ddp") -> list[dict[str, Any]]:
    """Several trainings of one task, one after the other."""
    return [train(name, samples, backend=backend, limit=limit) for samples, limit in layouts]
