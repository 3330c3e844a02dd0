"""`Kind` is one way to write user code; `play` trains it once with the public `Trainer`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainstack as ts
from trainstack.backends.dp import setup
from trainstack.backends.dp.randomness import DebugRandomness
from trainstack.backends.dp.sampling import PoissonSampling
from trainstack.backends.dp.telemetry import Telemetry
from trainstack.backends.workload import Draw

FEATURES, CLASSES, TOKENS = 6, 3, 20
LIMIT = 0.01
"""C by default. It is below most gradients here: clipped records show the smallest change of direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """A dataset of records, each with a label and tokens.

    Attributes:
        inputs: float32 of shape `(records, FEATURES)`.
        labels: int64 of shape `(records,)`.
        tokens: int64 labels of shape `(records, TOKENS)`; -100 for no label.
    """

    inputs: Tensor
    labels: Tensor
    tokens: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def without(self, index: int) -> Records:
        """A dataset that lacks one record; the indices of later records decrease by 1."""
        keep = [i for i in range(len(self)) if i != index]
        return Records(inputs=self.inputs[keep], labels=self.labels[keep], tokens=self.tokens[keep])

    def replaced(self, index: int, by: int) -> Records:
        """A dataset with a copy of the record `by` instead of the record `index`."""
        places = torch.arange(len(self))
        places[index] = by
        return Records(inputs=self.inputs[places], labels=self.labels[places], tokens=self.tokens[places])

    def dataset(self) -> TensorDataset:
        """Tuples `(inputs, label, tokens)`."""
        return TensorDataset(self.inputs, self.labels, self.tokens)


def make_records(count: int, rare: int) -> Records:
    """`count` records; `rare` is 300 times larger, of a separate class, with a label at each token."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, FEATURES, generator=generator)
    labels = torch.randint(0, CLASSES - 1, (count,), generator=generator)
    tokens = torch.randint(0, CLASSES - 1, (count, TOKENS), generator=generator)
    tokens[:, 1:] = -100
    inputs[rare] *= 300
    labels[rare] = CLASSES - 1
    tokens[rare] = torch.arange(TOKENS) % CLASSES
    return Records(inputs=inputs, labels=labels, tokens=tokens)


MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


class UserModule(ts.ModuleInterface):
    """A small classifier. Each kind of user code overrides a part of it.

    Args:
        records: the training data.
        make_optimizer: makes the optimizer of the parameters.
    """

    def __init__(self, records: Records, make_optimizer: MakeOptimizer) -> None:
        super().__init__()
        self.records, self.make_optimizer = records, make_optimizer
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.net = self.make_net()
        self.optimizer: torch.optim.Optimizer | None = None

    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def make_dataset(self) -> Any:
        return self.records.dataset()

    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        return []

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> tuple[Any, Any]:
        self.optimizer = self.make_optimizer([p for p in self.parameters() if p.requires_grad])
        return [self.optimizer], self.make_scheduler(self.optimizer)

    collate: Any = None

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        data = self.make_dataset()
        return DataLoader(data, batch_size, sampler=sampler(data), collate_fn=self.collate)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One way to write user code.

    Attributes:
        name: its name in the table.
        module: makes the user's module from the records and the optimizer.
        callbacks: makes the user's callbacks.
        privacy: options of `DifferentialPrivacyArguments` that the user adds.
        must_train: whether a refusal is a fault, because the guarantee holds for this code.
        rare_in: the number of records of a dataset for which a check before training seldom loads the rare record; None
            for code that needs no such dataset.
        short: whether the kind belongs to the short form.
    """

    name: str
    module: Callable[[Any, MakeOptimizer], Any]
    callbacks: Callable[[], Sequence[Any]] = tuple
    privacy: dict[str, Any] = field(default_factory=dict)
    must_train: bool = False
    rare_in: int | None = None
    short: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The numbers of a run; all of them are public.

    Attributes:
        dataset_size: N.
        batch: B, the expected batch size.
        epochs: epochs of `ceil(N / B)` steps.
        sigma: the noise multiplier.
        delta: of the guarantee.
        limit: C.
        debug_seed: makes masks and noise reproducible; None for a private run.
        lr: the learning rate of plain SGD; None records the released sums and does not change the weights.
    """

    dataset_size: int
    batch: int
    epochs: int
    sigma: float
    delta: float = 1e-4
    limit: float = LIMIT
    debug_seed: int | None = None
    lr: float | None = None


class SumRecorder(torch.optim.Optimizer):
    """Keeps the update of each step, in units of `lr * C / B`, and does not change the weights."""

    def __init__(self, parameters: Any, scale: float) -> None:
        super().__init__(parameters, {"lr": 1.0})
        self.scale = scale
        self.sums: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        rates = [(group["lr"], p) for group in self.param_groups for p in group["params"]]
        parts = [
            torch.zeros(p.numel(), dtype=torch.float64)
            if p.grad is None
            else rate * self.scale * p.grad.flatten().double()
            for rate, p in rates
        ]
        self.sums.append(torch.cat(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one run for its attacker.

    Attributes:
        sums: float64 of shape `(steps, weights)`: the released sums in units of C; empty without a recorder.
        moved: float64 of shape `(weights,)`: final minus initial weights.
        refused: the message of the library's refusal; None if the run trained to its end.
        steps: the number of steps before the refusal, or of all steps.
        statement: of the run; None if it was refused.
        module: the user's module.
    """

    sums: Tensor
    moved: Tensor
    refused: str | None
    steps: int
    statement: Any
    module: Any


def play(kind: Kind, records: Any, settings: Settings) -> Outcome:
    """Train once like a user: seed everything, make the module, train, read the weights and the statement."""
    ts.seed_everything(0)
    made: list[Any] = []

    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        if settings.lr is not None:
            return torch.optim.SGD(parameters, lr=settings.lr)
        made.append(SumRecorder(parameters, settings.batch / settings.limit))
        return made[-1]  # type: ignore[no-any-return]

    module = kind.module(records, make_optimizer)
    before = _weights(module)
    refused, statement, steps = None, None, 0
    with tempfile.TemporaryDirectory() as folder:
        trainer = None
        try:
            trainer = ts.Trainer(module, _arguments(kind, settings, folder), callbacks=list(kind.callbacks()))
            trainer.train()
            statement = trainer.privacy_statement()
        except (ts.PrivacyError, RuntimeError, ValueError) as error:  # the last two: torch refuses some code
            refused = str(error)
        finally:
            if trainer is not None:
                steps = trainer.global_steps_finished
                trainer.close()
    sums = made[-1].sums if made else []
    return Outcome(
        sums=torch.stack(sums) if sums else torch.zeros(0, len(before), dtype=torch.float64),
        moved=_weights(module) - before,
        refused=refused,
        steps=steps,
        statement=statement,
        module=module,
    )


def _weights(module: Any) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in module.parameters()])


def _arguments(kind: Kind, settings: Settings, folder: str) -> Any:
    private = {
        "delta": settings.delta,
        "noise_multiplier": settings.sigma,
        "dataset_size": settings.dataset_size,
        "per_sample_max_grad_norm": settings.limit,
        "debug_seed": settings.debug_seed,
        **kind.privacy,
    }
    return ts.TrainerArguments(
        backend="sp-dp",
        device="cpu",
        epochs=settings.epochs,
        train_batch_size=settings.batch,
        gpu_batch_size_limit=settings.batch,
        differential_privacy_args=ts.DifferentialPrivacyArguments(**private),
        writers=[],
        output_dir=folder,
        progress="none",
        log_level="ERROR",
        handle_signals=False,
        checkpointer_args=ts.DefaultCheckpointerArguments(checkpoint=False),
    )


@contextmanager
def unprobed() -> Iterator[None]:
    """Before training, compare modes on two records, and no neighbours: a short run takes a third of the time."""
    with (
        mock.patch.object(setup, "neighbour_problems", return_value=()),
        mock.patch.object(setup, "choose_probe_records", return_value=torch.arange(2)),
    ):
        yield


@contextmanager
def same_telemetry(values: list[dict[str, float]]) -> Iterator[None]:
    """Append the telemetry of a run to empty `values`, or replace the telemetry of another run by them.

    Telemetry is released, and later steps may depend on it. So sums without noise are compared for equal releases.
    """
    real, given = Telemetry.pop, iter(tuple(values)) if values else None

    def pop(self: Telemetry, window: Any) -> dict[str, float]:
        found = real(self, window)
        if given is not None:
            return next(given, found)
        values.append(found)
        return found

    with mock.patch.object(Telemetry, "pop", pop):
        yield


@contextmanager
def never_drawn(record: int) -> Iterator[list[int]]:
    """Remove one record from every sample; the others keep their indices, and so their random numbers.

    This is a neighbouring dataset for a library that draws the random numbers of a record by its index. In a dataset
    without the record, later records have other indices.

    Yields:
        The steps in which the record was drawn.
    """
    real, steps = PoissonSampling.draw, list[int]()

    def draw(self: PoissonSampling, step: int) -> Draw:
        drawn = real(self, step)
        kept = drawn.local[drawn.local != record]
        if len(kept) < len(drawn.local) and step not in steps:  # a step may ask for its sample again
            steps.append(step)
        return Draw(local=kept, total=drawn.total - (len(drawn.local) - len(kept)))

    with mock.patch.object(PoissonSampling, "draw", draw):
        yield steps


def seed_with(record: int, step: int, settings: Settings, *, other: int, later: int, steps: int) -> int:
    """A debug seed with `record` in `step` and not in another of `steps` steps, and the record `other` in `later`."""
    rate = settings.batch / settings.dataset_size
    for seed in range(100_000):
        masks = [DebugRandomness(seed).mask(s, settings.dataset_size, rate) for s in range(1, steps + 1)]
        if [s for s, mask in enumerate(masks, 1) if record in mask] == [step] and other in masks[later - 1]:
            return seed
    raise AssertionError(f"no debug seed draws record {record} only in step {step}, and {other} in {later}")
