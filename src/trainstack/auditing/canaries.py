"""Canary records whose gradients are orthogonal, so that each one is visible in every update.

The model consists of tables of different widths with a row for each canary. The gradient of a canary is its row in all
tables. Before clipping its length is between 1 and 1e12 times C, after clipping it is C. So row i of the update of a
step shows whether canary i was in it, how much it added to each parameter, and the noise.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainstack.backends.dp.arguments import DifferentialPrivacyArguments
from trainstack.backends.dp.telemetry import coordinates_of
from trainstack.backends.privacy_statement import PrivacyStatement
from trainstack.backends.spec import parse_spec
from trainstack.errors import ConfigurationError


def check_private(backend: str) -> None:
    """Refuse a backend string without a private layer."""
    if not any(record.layer.private for record in parse_spec(backend)):
        raise ConfigurationError(f"backend {backend!r} is not private: there is nothing to audit. Write 'sp-dp'.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedRun:
    """A private run that is audited.

    Attributes:
        args: the privacy settings.
        backend: the backend string.
        train_batch_size, dataset_size, epochs: of the run.
        gpu_batch_size_limit: records in one forward pass; None for all of a step.
        device: on which it runs.
    """

    args: DifferentialPrivacyArguments
    backend: str = "sp-dp"
    train_batch_size: int = 500
    dataset_size: int = 2000
    epochs: int = 2
    gpu_batch_size_limit: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_private(self.backend)
        if self.dataset_size < 100 or not 1 <= self.train_batch_size <= self.dataset_size or self.epochs < 1:
            raise ConfigurationError(
                f"an audit with dataset_size={self.dataset_size}, train_batch_size={self.train_batch_size}, "
                f"epochs={self.epochs}: write at least 100 records, a batch of 1 up to as many, and at least 1 epoch."
            )

    @property
    def rate(self) -> float:
        """q, the probability with which a record is in a step."""
        return self.train_batch_size / self.dataset_size

    @property
    def steps(self) -> int:
        """T, the global steps of the run."""
        return self.epochs * -(-self.dataset_size // self.train_batch_size)

    @property
    def text(self) -> str:
        """Backend, privacy settings and numbers, in one line."""
        args, sigma = self.args, self.args.noise_multiplier
        noise = f"noise multiplier {sigma:g}" if sigma is not None else f"target epsilon {args.target_epsilon:g}"
        return (
            f"{self.backend}: {noise}, {args.clipping} clipping, batches of {self.train_batch_size} out of "
            f"{self.dataset_size}, {self.steps} steps"
        )

    @property
    def all_included(self) -> Tensor:
        """All records as canaries: bool of shape `(dataset_size,)`."""
        return torch.ones(self.dataset_size, dtype=torch.bool)

    @property
    def norms(self) -> tuple[float, ...]:
        """The clipping norm, or that of each layer."""
        norms = self.args.per_sample_max_grad_norm
        return (float(norms),) if isinstance(norms, int | float) else tuple(float(norm) for norm in norms)

    @property
    def limits(self) -> tuple[float, ...]:
        """The length of a canary's clipped gradient in each table; the sum of their squares is C ** 2."""
        norms = self.norms
        return norms if len(norms) > 1 else (norms[0] / math.sqrt(len(_WIDTHS)),) * len(_WIDTHS)

    @property
    def own_args(self) -> DifferentialPrivacyArguments:
        """The settings without options that concern the user's data."""
        telemetry = {name: values for name, values in self.args.telemetry.items() if name in ("loss", "grad_norm")}
        own = self.args.without_ledger()
        return replace(own, dataset_size=None, sample_rate=None, max_epsilon=None, telemetry=telemetry)

    def without_noise(self) -> AuditedRun:
        """The same run without noise and budget."""
        return replace(self, args=replace(self.args, noise_multiplier=0.0, target_epsilon=None, max_epsilon=None))

    def gradient_noise(self, noise_multiplier: float) -> float:
        """The standard deviation of the gradient's noise divided by the clipping norm."""
        return gradient_noise(self.own_args, self.train_batch_size, noise_multiplier)


def gradient_noise(args: DifferentialPrivacyArguments, batch: int, noise_multiplier: float) -> float:
    """The standard deviation of the gradient's noise divided by the clipping norm; telemetry and counts increase it."""
    squares = len(coordinates_of(args)) * args.telemetry_weight**2
    if args.clipping == "adaptive":
        squares += 1 / ((2 * count_noise(args, batch, noise_multiplier) / noise_multiplier) ** 2 - 1)
    return noise_multiplier * math.sqrt(1 + squares)


def count_noise(args: DifferentialPrivacyArguments, batch: int, noise_multiplier: float) -> float:
    """The standard deviation of the noise on the count of unclipped records, in records."""
    return args.count_noise_multiplier or max(batch / 20, noise_multiplier)


_WIDTHS = (1, 3, 2)
"""The widths of the tables of a model with one clipping norm; different, so that their shares of C differ."""

_DECADES = 12
"""The lengths of canaries are from C to 10 ** 12 times C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The output of a private run.

    Attributes:
        tables: for each parameter float64 of shape `(steps, canaries, width)`: the noisy sums over each step's records,
            in units of the clipping norm of the step, without the row that belongs to no canary.
        direction: float64 of shape `(sum of widths,)`: the direction of a canary's gradient within its row; of length
            1.
        limits: the clipping norm of each step, as stated before the step.
        included: bool of shape `(canaries,)`: the canaries in the training data of all processes.
        statement: of the run.
        equal_on_ranks: whether all processes got the same sums.
    """

    tables: tuple[Tensor, ...]
    direction: Tensor
    limits: tuple[float, ...]
    included: Tensor
    statement: PrivacyStatement
    equal_on_ranks: bool

    @property
    def steps(self) -> int:
        """The number of updates that an optimizer got."""
        return len(self.tables[0])

    @property
    def updates(self) -> Tensor:
        """float64 of shape `(steps, canaries)`: a canary adds 1 to its column, noise has standard deviation sigma."""
        return torch.cat(self.tables, dim=2) @ self.direction

    @property
    def lengths(self) -> Tensor:
        """float64 of shape `(steps, canaries)`: the norm of each canary's row over all parameters."""
        lengths: Tensor = torch.linalg.vector_norm(torch.cat(self.tables, dim=2), dim=2)
        return lengths

    @property
    def noise_multiplier(self) -> float:
        """sigma, as the run states it."""
        return self.statement.history[0][0]


class CanaryModel(nn.Module):
    """Tables, trained on the records `rows` with gradients of `lengths`; the methods of a `ModuleInterface`."""

    tables: nn.ModuleList
    rows: Tensor
    lengths: Tensor
    recorder: Recorder
    direction: Tensor

    def __init__(self, subject: AuditedRun) -> None:
        super().__init__()
        limits = subject.limits
        widths = [_WIDTHS[k % len(_WIDTHS)] for k in range(len(limits))]
        self.tables = nn.ModuleList(nn.Embedding(subject.dataset_size + 1, width) for width in widths)
        self.rows, self.lengths = torch.empty(0), torch.empty(0)
        self.recorder = Recorder(self.parameters(), subject.train_batch_size)
        norm = math.hypot(*limits)
        self._shares = [limit / norm / math.sqrt(width) for limit, width in zip(limits, widths, strict=True)]
        self.direction = torch.cat(
            [torch.full((width,), share).double() for share, width in zip(self._shares, widths, strict=True)]
        )
        self._losses_of_records = subject.args.grad_mode == "ghost"

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> tuple[Any, Any]:
        return [self.recorder], []

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        records = TensorDataset(self.rows, self.lengths)
        return DataLoader(records, sampler=sampler(records), batch_size=batch_size)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Tensor:
        parts = [share * table(batch[0]).sum(-1) for share, table in zip(self._shares, self.tables, strict=True)]
        losses: Tensor = batch[1] * torch.stack(parts).sum(0)
        return losses if self._losses_of_records else losses.mean()


class Recorder(torch.optim.Optimizer):
    """An optimizer that stores its gradients: an adversary who gets the model after every step sees exactly these.

    Attributes:
        norm_now: returns the joint clipping norm that the run states.
        sums: for each step the sums of each table, in units of the norm that was stated before the step.
        norms: that norm, for each step and for the one after the last.
    """

    def __init__(self, parameters: Any, batch: int) -> None:
        super().__init__(parameters, {})
        self.norm_now: Callable[[], float] = lambda: 1.0
        self.norms: list[float] = []
        self.sums: list[list[Tensor]] = []
        self._batch = batch

    def begin(self, norm: float) -> None:
        """Start with this clipping norm, which remains unless `norm_now` is replaced."""
        self.norms, self.norm_now = [norm], lambda: norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        factor = self._batch / self.norms[-1]
        self.sums.append([factor * table.grad[:-1].cpu().double() for table in self.param_groups[0]["params"]])
        self.norms.append(self.norm_now())


def train_canaries(subject: AuditedRun, included: Tensor, *, shortest: float = 0.0) -> Observation:
    """Train privately on canaries, by the real `Trainer` and layer, in a new run and a new folder.

    Args:
        subject: the run.
        included: bool of shape `(dataset_size,)`. A canary that is not included is replaced by a record whose gradient
            is in a row that is not evaluated.
        shortest: the logarithm (to base 10) of the shortest gradient in units of C, from 0 to 12.
    """
    from trainstack.trainer import ModuleInterface, Trainer, TrainerArguments

    class Module(CanaryModel, ModuleInterface):
        pass

    module = Module(subject)
    names = ("epochs", "train_batch_size", "gpu_batch_size_limit", "backend", "device")
    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            **{name: getattr(subject, name) for name in names},
            "differential_privacy_args": subject.own_args,
            "output_dir": folder,
            "writers": (),
            "progress": "none",
            "log_level": "ERROR",
            "handle_signals": False,
            "checkpointer_args": {"checkpoint": False},
        }
        trainer = Trainer(module, TrainerArguments.from_dict(arguments))
        included = trainer.world.comm.broadcast_object(included, "choosing canaries")
        module.rows = torch.where(included, torch.arange(len(included)), len(included))
        places = torch.linspace(shortest, _DECADES, len(included), dtype=torch.float64)
        module.lengths = (math.hypot(*subject.norms) * 10**places).float()
        module.recorder.begin(math.hypot(*subject.norms))
        if subject.args.clipping == "adaptive":
            module.recorder.norm_now = lambda: trainer.privacy_statement().max_grad_norm[0]
        trainer.train()
        statement = trainer.privacy_statement()
        tables = tuple(torch.stack(table) for table in zip(*module.recorder.sums, strict=True))
        marks = trainer.world.comm.gather([float(table.sum()) for table in tables], "comparing audited updates")
        trainer.close()
    return Observation(
        tables=tables,
        direction=module.direction,
        limits=tuple(module.recorder.norms),
        included=included,
        statement=statement,
        equal_on_ranks=all(mark == marks[0] for mark in marks),
    )
